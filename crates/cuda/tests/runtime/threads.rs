//! Any thread may use a GPU, and any GPU.

use crate::rig::{affine, bytes, fake, floats, gpu, numbers, options};
use phalanx_cuda::{Gpu, Priority};
use std::thread;

const N: usize = 100;

/// A stream of the thread's own, and a sum that only comes out if nobody else's work gets in between.
fn count_to(gpu: &Gpu, steps: u64, stream: u64) {
    let own = gpu.stream(Priority::Low).unwrap();
    let memory = gpu.alloc(&own, 4 * N).unwrap();
    let mut host = gpu.pinned(4 * N).unwrap();
    let start = numbers(N, stream);
    host.bytes_mut().unwrap().copy_from_slice(bytes(&start));
    own.upload(&mut host, 0..4 * N, &memory, 0).unwrap();
    for _ in 0..steps {
        affine(gpu, &own, &memory, &memory, 1.0, 1.0).unwrap();
    }
    own.download(&memory, 0..4 * N, &mut host, 0).unwrap();
    let want: Vec<f32> = start.iter().map(|&x| (0..steps).fold(x, |x, _| x + 1.0)).collect();
    assert_eq!(floats(host.bytes().unwrap()), want);
}

#[test]
fn threads_share_gpus_and_load_a_kernel_once() {
    let Some(fake) = fake() else { return };
    let gpus = [gpu(&fake), Gpu::open(1, &options(&fake)).unwrap()];
    thread::scope(|scope| {
        for i in 0..6 {
            let gpus = &gpus;
            scope.spawn(move || {
                for round in 0..4 {
                    count_to(&gpus[(i + round) % 2].clone(), 5, (10 * i + round) as u64);
                }
            });
        }
    });
    assert_eq!(fake.calls("cuModuleLoadData"), 2);
    assert!(fake.damage().is_empty(), "{:?}", fake.damage());
}

#[test]
fn a_thread_sets_its_context_once() {
    let Some(fake) = fake() else { return };
    let gpu = gpu(&fake);
    count_to(&gpu, 100, 1);
    assert_eq!(fake.calls("cuCtxSetCurrent"), 1);
    thread::scope(|scope| scope.spawn(|| count_to(&gpu, 100, 2)).join().unwrap());
    assert_eq!(fake.calls("cuCtxSetCurrent"), 2);
    // Other libraries may have set another one, so for them it is set in any case.
    gpu.make_current().unwrap();
    assert_eq!(fake.calls("cuCtxSetCurrent"), 3);
}

#[test]
fn the_last_one_closes_it_on_whatever_thread() {
    let Some(fake) = fake() else { return };
    let gpu = gpu(&fake);
    let memory = gpu.alloc(gpu.compute(), 4).unwrap();
    drop(gpu);
    assert_eq!(fake.calls("cuDevicePrimaryCtxRelease_v2"), 0);
    thread::spawn(move || drop(memory)).join().unwrap();
    assert_eq!(fake.calls("cuDevicePrimaryCtxRelease_v2"), 1);
}
