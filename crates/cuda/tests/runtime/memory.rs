//! Memory: what it holds at first, what copies do, when it is given back.

use crate::rig::{affine, bytes, fake, floats, gpu, launch, numbers, options};
use phalanx_cuda::{Argument, Element, Error, Gpu, Work};
use phalanx_fake_cuda::Count;
use std::panic::{AssertUnwindSafe, catch_unwind};

#[test]
fn fresh_memory_is_zero_though_the_drivers_is_not() {
    let Some(fake) = fake() else { return };
    let gpu = gpu(&fake);
    for n in [0, 1, 1000] {
        let memory = gpu.alloc(gpu.compute(), n).unwrap();
        assert_eq!(gpu.compute().read(&memory, 0..n).unwrap(), vec![0; n]);
        assert_eq!(gpu.pinned(n).unwrap().bytes().unwrap(), vec![0; n]);
    }
}

#[test]
fn copies_and_fills_touch_what_they_are_told_to() {
    let Some(fake) = fake() else { return };
    let gpu = gpu(&fake);
    let stream = gpu.compute();
    let (a, b) = (gpu.alloc(stream, 8).unwrap(), gpu.alloc(stream, 8).unwrap());
    stream.write(&[1, 2, 3], &a, 2).unwrap();
    stream.copy(&a, 3..6, &b, 1).unwrap();
    stream.copy(&b, 1..3, &b, 6).unwrap();
    stream.fill(&b, 0..1, 9).unwrap();
    assert_eq!(stream.read(&a, 0..8).unwrap(), [0, 0, 1, 2, 3, 0, 0, 0]);
    assert_eq!(stream.read(&b, 0..8).unwrap(), [9, 2, 3, 0, 0, 0, 2, 3]);
    assert_eq!(stream.read(&b, 1..3).unwrap(), [2, 3]);
    assert_eq!(fake.count(Count::BytesUp), 3);
    assert_eq!(fake.count(Count::BytesAcross), 5);
    for beside in [
        &(|| stream.fill(&a, 0..9, 0)) as &dyn Fn() -> Result<(), Error>,
        &|| stream.copy(&a, 0..4, &b, 5),
        &|| stream.copy(&a, 0..4, &a, 3),
        &|| stream.write(&[0; 2], &a, 7),
        &|| stream.read(&a, 4..9).map(drop),
        &|| stream.upload(&mut gpu.pinned(4).unwrap(), 0..5, &a, 0),
        &|| stream.download(&a, 0..5, &mut gpu.pinned(4).unwrap(), 0),
    ] {
        assert!(catch_unwind(AssertUnwindSafe(beside)).is_err(), "outside of memory");
    }
}

#[test]
fn what_is_dropped_is_given_back_and_what_was_to_be_done_with_it_is_done() {
    let Some(fake) = fake() else { return };
    {
        let gpu = gpu(&fake);
        let other = gpu.stream(phalanx_cuda::Priority::Low).unwrap();
        let to = gpu.alloc(gpu.compute(), 400).unwrap();
        gpu.compute().synchronize().unwrap();
        let mut host = gpu.pinned(400).unwrap();
        host.bytes_mut().unwrap().copy_from_slice(bytes(&numbers(100, 1)));
        {
            let from = gpu.alloc(&other, 400).unwrap();
            other.upload(&mut host, 0..400, &from, 0).unwrap();
            affine(&gpu, &other, &from, &to, 1.0, 0.0).unwrap();
        }
        drop(host);
        drop(other);
        assert_eq!(floats(&gpu.compute().read(&to, 0..400).unwrap()), numbers(100, 1));
        assert_eq!(fake.count(Count::Pieces), 1);
    }
    for what in [Count::Pieces, Count::Bytes, Count::Pinned, Count::Streams, Count::Events, Count::Modules] {
        assert_eq!(fake.count(what), 0, "{what:?}");
    }
    assert_eq!(fake.calls("cuDevicePrimaryCtxRetain"), fake.calls("cuDevicePrimaryCtxRelease_v2"));
    assert!(fake.damage().is_empty(), "{:?}", fake.damage());
}

/// The driver lets freed memory go at once, and goes on with a stream that was destroyed whenever it likes.
#[test]
fn streams_and_buffers_may_be_dropped_in_any_order() {
    let Some(fake) = fake() else { return };
    let gpu = gpu(&fake);
    for seed in 0..100 {
        fake.seed(seed);
        let to = gpu.alloc(gpu.compute(), 400).unwrap();
        gpu.compute().synchronize().unwrap();
        let mut host = gpu.pinned(400).unwrap();
        host.bytes_mut().unwrap().copy_from_slice(bytes(&numbers(100, seed)));
        for _ in 0..2 {
            let short_lived = gpu.stream(phalanx_cuda::Priority::High).unwrap();
            short_lived.upload(&mut host, 0..400, &to, 0).unwrap();
        }
        // Neither of both before all have read it.
        if seed % 2 == 0 {
            host.bytes_mut().unwrap().fill(0);
        }
        drop(host);
        assert_eq!(floats(&gpu.compute().read(&to, 0..400).unwrap()), numbers(100, seed), "seed {seed}");
    }
    assert!(fake.damage().is_empty(), "{:?}", fake.damage());
}

#[test]
fn a_gpu_is_not_closed_before_its_kernels_are_done() {
    let Some(fake) = fake() else { return };
    let gpu = gpu(&fake);
    let memory = gpu.alloc(gpu.compute(), 400).unwrap();
    affine(&gpu, gpu.compute(), &memory, &memory, 1.0, 1.0).unwrap();
    drop(gpu);
    drop(memory);
    assert_eq!((fake.count(Count::Waiting), fake.count(Count::Modules)), (0, 0));
    assert!(fake.damage().is_empty(), "{:?}", fake.damage());
}

#[test]
fn pinned_bytes_are_out_of_reach_while_a_copy_is_under_way() {
    let Some(fake) = fake() else { return };
    let gpu = gpu(&fake);
    let memory = gpu.alloc(gpu.compute(), 4).unwrap();
    gpu.compute().synchronize().unwrap();
    let mut host = gpu.pinned(4).unwrap();
    for seed in 0..50 {
        fake.seed(seed);
        host.bytes_mut().unwrap().fill(1);
        // By two streams, one after the other.
        gpu.copy().upload(&mut host, 0..4, &memory, 0).unwrap();
        gpu.compute().upload(&mut host, 0..4, &memory, 0).unwrap();
        host.bytes_mut().unwrap().fill(2);
        assert_eq!(gpu.compute().read(&memory, 0..4).unwrap(), [1; 4], "seed {seed}");
        gpu.copy().download(&memory, 0..4, &mut host, 0).unwrap();
        assert_eq!(host.bytes().unwrap(), [1; 4], "seed {seed}");
    }
}

#[test]
fn no_memory_left_tells_what_was_asked_for_and_what_there_is() {
    let Some(fake) = fake() else { return };
    fake.limit_memory(0, 3 << 20);
    let gpu = gpu(&fake);
    let held = gpu.alloc(gpu.compute(), 2 << 20).unwrap();
    let error = gpu.alloc(gpu.compute(), (1 << 20) + 512).unwrap_err();
    assert_eq!(error, Error::OutOfMemory { gpu: 0, asked: (1 << 20) + 512, free: 1 << 20, total: 3 << 20 });
    let words = error.to_string();
    for part in ["GPU 0", "1.0 MiB (1049088 bytes)", "3.0 MiB", "hint:"] {
        assert!(words.contains(part), "{part} isn't in {words}");
    }
    drop(held);
    gpu.alloc(gpu.compute(), (1 << 20) + 512).unwrap();
}

/// What the other tests rely on must be noticed.
#[test]
fn writes_beside_memory_and_work_on_freed_memory_are_noticed() {
    let Some(fake) = fake() else { return };
    let relu = |gpu: &Gpu, from, to, n: usize| {
        let arguments = [
            Argument::Read(from),
            Argument::Write(to),
            Argument::Int(n as i64),
            Argument::Float(0.0),
            Argument::Float(0.0),
        ];
        launch(gpu, gpu.compute(), "relu", Element::F32, Work::Elements(n as u64), &arguments).unwrap();
    };
    let gpu_0 = gpu(&fake);
    let (from, to) = (gpu_0.alloc(gpu_0.compute(), 400).unwrap(), gpu_0.alloc(gpu_0.compute(), 396).unwrap());
    relu(&gpu_0, from.address(), to.address(), 100);
    assert!(gpu_0.synchronize().unwrap_err().to_string().contains("CUDA_ERROR_ILLEGAL_ADDRESS"));
    assert_eq!(fake.damage(), ["relu writes beside its argument 1"]);

    let gpu_1 = Gpu::open(1, &options(&fake)).unwrap();
    let (from, to) = (gpu_1.alloc(gpu_1.compute(), 400).unwrap(), gpu_1.alloc(gpu_1.compute(), 400).unwrap());
    let gone = from.address();
    drop(from);
    relu(&gpu_1, gone, to.address(), 100);
    assert!(gpu_1.synchronize().is_err());
    assert_eq!(fake.damage().last().unwrap(), "relu: argument 0 is no memory of this GPU");
}

#[test]
fn things_of_two_gpus_do_not_mix() {
    let Some(fake) = fake() else { return };
    let (gpu_0, gpu_1) = (gpu(&fake), Gpu::open(1, &options(&fake)).unwrap());
    let memory = gpu_1.alloc(gpu_1.compute(), 4).unwrap();
    assert!(catch_unwind(AssertUnwindSafe(|| gpu_0.compute().fill(&memory, 0..4, 1))).is_err());
    assert!(catch_unwind(AssertUnwindSafe(|| gpu_0.alloc(gpu_1.compute(), 4))).is_err());
    gpu_1.compute().write(&[1; 4], &memory, 0).unwrap();
    let other = gpu_0.alloc(gpu_0.compute(), 4).unwrap();
    assert_eq!(gpu_1.compute().read(&memory, 0..4).unwrap(), [1; 4]);
    assert_eq!(gpu_0.compute().read(&other, 0..4).unwrap(), [0; 4]);
}
