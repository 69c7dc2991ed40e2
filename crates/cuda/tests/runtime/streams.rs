//! Streams that wait for each other's events come to the right numbers in whatever order they are carried out, and a driver that
//! mixes them as a seed says finds an event that is missing.

use crate::rig::{affine, bytes, fake, floats, gpu, numbers};
use phalanx_cuda::{Error, Gpu, Stream, Timing};
use phalanx_fake_cuda::FakeCuda;

const N: usize = 300;
const BATCHES: u64 = 4;
const SEEDS: u64 = 200;

/// Events of the loop below that a test may leave out.
#[derive(Clone, Copy, PartialEq)]
enum Missing {
    Nothing,
    /// The kernel doesn't wait for its batch.
    Arrival,
    /// The next copy doesn't wait for the kernel that reads the buffer.
    Release,
    /// The copy back doesn't wait for the kernel.
    Result,
}

/// Batches go up on one stream while the batch before is worked on in another, through a single buffer; results come back on a
/// third. Gives whether they are right.
fn batches_are_right(fake: &FakeCuda, gpu: &Gpu, seed: u64, missing: Missing) -> bool {
    fake.seed(seed);
    let (compute, copy, comm) = (gpu.compute(), gpu.copy(), gpu.comm());
    let event = || gpu.event(Timing::No).unwrap();
    let (fresh, arrived, read, done, fetched) = (event(), event(), event(), event(), event());
    let from = gpu.alloc(compute, 4 * N).unwrap();
    let to = gpu.alloc(compute, 4 * N).unwrap();
    compute.record(&fresh).unwrap();
    copy.wait(&fresh).unwrap();
    comm.wait(&fresh).unwrap();
    let mut host: Vec<_> = (0..BATCHES).map(|_| gpu.pinned(4 * N).unwrap()).collect();
    let mut results: Vec<_> = (0..BATCHES).map(|_| gpu.pinned(4 * N).unwrap()).collect();
    for (i, (host, result)) in host.iter_mut().zip(&mut results).enumerate() {
        host.bytes_mut().unwrap().copy_from_slice(bytes(&numbers(N, i as u64)));
        if missing != Missing::Release {
            copy.wait(&read).unwrap();
        }
        copy.upload(host, 0..4 * N, &from, 0).unwrap();
        copy.record(&arrived).unwrap();
        if missing != Missing::Arrival {
            compute.wait(&arrived).unwrap();
        }
        compute.wait(&fetched).unwrap();
        affine(gpu, compute, &from, &to, 2.0, 1.0).unwrap();
        compute.record(&read).unwrap();
        compute.record(&done).unwrap();
        if missing != Missing::Result {
            comm.wait(&done).unwrap();
        }
        comm.download(&to, 0..4 * N, result, 0).unwrap();
        comm.record(&fetched).unwrap();
    }
    let right = results.iter().enumerate().all(|(i, result)| {
        let want: Vec<f32> = numbers(N, i as u64).iter().map(|x| 2.0 * x + 1.0).collect();
        floats(result.bytes().unwrap()) == want
    });
    gpu.synchronize().unwrap();
    right
}

#[test]
fn copies_beside_kernels_are_right_in_every_order() {
    let Some(fake) = fake() else { return };
    let gpu = gpu(&fake);
    for seed in 0..SEEDS {
        assert!(batches_are_right(&fake, &gpu, seed, Missing::Nothing), "seed {seed}");
    }
    assert!(fake.damage().is_empty(), "{:?}", fake.damage());
}

#[test]
fn a_missing_event_is_found_by_some_seed() {
    let Some(fake) = fake() else { return };
    let gpu = gpu(&fake);
    for missing in [Missing::Arrival, Missing::Release, Missing::Result] {
        let wrong = (0..SEEDS).filter(|&seed| !batches_are_right(&fake, &gpu, seed, missing)).count();
        assert!(wrong > 0, "{} was found by no seed", missing as u8);
    }
}

#[test]
fn work_is_put_off_until_somebody_waits() {
    let Some(fake) = fake() else { return };
    let gpu = gpu(&fake);
    let stream = gpu.compute();
    let memory = gpu.alloc(stream, 4 * N).unwrap();
    let (early, late) = (gpu.event(Timing::Yes).unwrap(), gpu.event(Timing::Yes).unwrap());
    assert!(early.is_done().unwrap(), "an event that was never recorded stands for nothing");
    stream.synchronize().unwrap();
    stream.record(&early).unwrap();
    affine(&gpu, stream, &memory, &memory, 1.0, 1.0).unwrap();
    stream.record(&late).unwrap();
    assert!(!late.is_done().unwrap() && !stream.is_done().unwrap());
    late.synchronize().unwrap();
    assert!(late.is_done().unwrap() && stream.is_done().unwrap());
    assert!(!late.since(&early).unwrap().is_zero());
    assert_eq!(floats(&stream.read(&memory, 0..4 * N).unwrap()), [1.0; N]);
}

#[test]
fn what_a_stream_is_given_while_its_time_is_taken_is_told_with_its_time() {
    let Some(fake) = fake() else { return };
    let gpu = gpu(&fake);
    let stream = gpu.compute();
    let memory = gpu.alloc(stream, 4 * N).unwrap();
    let work = |stream: &Stream, n: usize| {
        (0..n).try_for_each(|_| affine(&gpu, stream, &memory, &memory, 1.0, 1.0)).unwrap();
        stream.fill(&memory, 0..8, 0).unwrap();
    };
    assert_eq!(stream.stop_timing().unwrap(), [], "nobody has asked");
    work(stream, 2);
    // More than are read at a time.
    stream.start_timing();
    work(stream, 5_000);
    work(gpu.copy(), 3);
    let recorded = stream.capture(|| {
        work(stream, 7);
        Ok::<(), Error>(())
    });
    let (mut graph, ()) = recorded.unwrap();
    // SAFETY: the memory is there, and the GPU is open.
    unsafe { graph.launch(stream) }.unwrap();
    let times = stream.stop_timing().unwrap();
    work(stream, 2);
    let calls = |part: &str| -> Vec<u64> {
        times.iter().filter(|timed| timed.what.contains(part)).map(|timed| timed.calls).collect()
    };
    assert_eq!(
        (calls("kernel"), calls("a fill of 8 bytes"), calls("graph")),
        (vec![5_000], vec![1], vec![1])
    );
    assert!(times.iter().all(|timed| !timed.total.is_zero()), "{times:?}");
    assert!(times.is_sorted_by(|a, b| a.total >= b.total), "{times:?}");
    assert_eq!(stream.stop_timing().unwrap(), [], "it was told");
}
