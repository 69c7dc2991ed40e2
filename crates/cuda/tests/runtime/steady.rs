//! Step after step after step: nothing is allocated, nobody is waited for but by the loader for its own buffer, and nothing stays
//! behind.

use crate::counting::allocations;
use crate::rig::{affine, bytes, fake, floats, gpu};
use phalanx_cuda::{DeviceMemory, Event, Gpu, Graph, Pinned, Timing};
use phalanx_fake_cuda::{Count, FakeCuda};

const N: usize = 64;
const STEPS: usize = 10_000;

/// What a step needs, made once: a pair of buffers for the loader, so that one is filled while the other travels.
struct Job {
    host: [Pinned; 2],
    batch: DeviceMemory,
    sum: DeviceMemory,
    arrived: Event,
    used: Event,
    graph: Graph,
}

impl Job {
    fn new(gpu: &Gpu) -> Job {
        let compute = gpu.compute();
        let host = [gpu.pinned(4 * N).unwrap(), gpu.pinned(4 * N).unwrap()];
        let [batch, sum] = [0, 0].map(|_| gpu.alloc(compute, 4 * N).unwrap());
        let event = || gpu.event(Timing::No).unwrap();
        let (graph, ()) = compute.capture(|| affine(gpu, compute, &batch, &sum, 1.0, 1.0)).unwrap();
        gpu.synchronize().unwrap();
        Job { host, batch, sum, arrived: event(), used: event(), graph }
    }

    /// The odd steps play a graph, the others launch.
    fn step(&mut self, gpu: &Gpu, step: usize) {
        let (compute, copy) = (gpu.compute(), gpu.copy());
        let host = &mut self.host[step % 2];
        host.bytes_mut().unwrap().copy_from_slice(bytes(&[step as f32; N]));
        copy.wait(&self.used).unwrap();
        copy.upload(host, 0..4 * N, &self.batch, 0).unwrap();
        copy.record(&self.arrived).unwrap();
        compute.wait(&self.arrived).unwrap();
        if step % 2 == 1 {
            // SAFETY: the memory that was captured lies beside the graph.
            unsafe { self.graph.launch(compute) }.unwrap();
        } else {
            affine(gpu, compute, &self.batch, &self.sum, 1.0, 1.0).unwrap();
        }
        compute.record(&self.used).unwrap();
    }
}

/// What there is, and how often what takes time was called.
fn standing(fake: &FakeCuda) -> Vec<u64> {
    let there = [
        Count::Pieces,
        Count::Bytes,
        Count::Pinned,
        Count::Streams,
        Count::Events,
        Count::Graphs,
        Count::Modules,
    ];
    let called = [
        "cuMemAlloc_v2",
        "cuMemFree_v2",
        "cuMemHostAlloc",
        "cuMemFreeHost",
        "cuModuleLoadData",
        "cuModuleGetFunction",
        "cuEventCreate",
        "cuStreamCreateWithPriority",
        "cuStreamSynchronize",
        "cuCtxSynchronize",
        "cuCtxSetCurrent",
    ];
    let there = there.into_iter().map(|what| fake.count(what));
    there.chain(called.into_iter().map(|function| fake.calls(function))).collect()
}

#[test]
fn ten_thousand_steps_leave_nothing_behind() {
    let Some(fake) = fake() else { return };
    let gpu = gpu(&fake);
    let mut job = Job::new(&gpu);
    (0..4).for_each(|step| job.step(&gpu, step));
    let (before, taken) = (standing(&fake), allocations());
    for step in 4..STEPS {
        job.step(&gpu, step);
    }
    assert_eq!(allocations(), taken, "the host's memory");
    assert_eq!(standing(&fake), before);
    assert_eq!(fake.count(Count::BytesUp), (STEPS * 4 * N) as u64);
    assert_eq!(fake.calls("cuLaunchKernel"), 1 + (STEPS / 2) as u64);
    assert_eq!(fake.calls("cuGraphLaunch"), (STEPS / 2) as u64);
    let sum = gpu.compute().read(&job.sum, 0..4 * N).unwrap();
    assert_eq!(floats(&sum), [STEPS as f32; N]);
    assert_eq!(fake.count(Count::Waiting), 0);
    drop(job);
    drop(gpu);
    let [pieces, pinned, events] = [Count::Pieces, Count::Pinned, Count::Events].map(|what| fake.count(what));
    assert_eq!((pieces, pinned, events), (0, 0, 0));
    assert!(fake.damage().is_empty(), "{:?}", fake.damage());
}
