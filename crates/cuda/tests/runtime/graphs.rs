//! Graphs: captured once, launched again and again; and captures that fail.

use crate::rig::{affine, bytes, fake, floats, gpu, launch, numbers, step_of};
use phalanx_cuda::{Argument, DeviceMemory, Element, Error, Event, Gpu, Graph, Stream, Timing, Work};
use phalanx_fake_cuda::Count;
use phalanx_nn::optim::{Adam, Optimizer};
use std::panic::{AssertUnwindSafe, catch_unwind};

const N: usize = 300;

/// A launch of a graph whose memory outlives it.
fn again(graph: &mut Graph, stream: &Stream) {
    // SAFETY: the tests hold all memory until the stream is done, and the fake driver runs nothing on memory that isn't there.
    unsafe { graph.launch(stream) }.unwrap();
}

fn held(stream: &Stream, memory: &DeviceMemory) -> Vec<f32> {
    floats(&stream.read(memory, 0..memory.bytes()).unwrap())
}

/// Memory for `N` float32 numbers.
fn piece(gpu: &Gpu) -> DeviceMemory {
    gpu.alloc(gpu.compute(), 4 * N).unwrap()
}

#[test]
fn a_graph_does_its_work_anew_on_what_lies_in_its_buffers() {
    let Some(fake) = fake() else { return };
    let gpu = gpu(&fake);
    let (compute, comm) = (gpu.compute(), gpu.comm());
    let [from, left, right, to] = &[(); 4].map(|()| piece(&gpu));
    let (forked, joined) = (gpu.event(Timing::No).unwrap(), gpu.event(Timing::No).unwrap());
    // Two branches, one of them in another stream, and a sum.
    let work = || -> Result<u32, Error> {
        compute.record(&forked)?;
        comm.wait(&forked)?;
        affine(&gpu, comm, from, left, 2.0, 0.0)?;
        affine(&gpu, compute, from, right, 0.0, 1.0)?;
        comm.record(&joined)?;
        assert!(compute.is_capturing()? && comm.is_capturing()?);
        compute.wait(&joined)?;
        let sum = [
            Argument::Read(left.address()),
            Argument::Read(right.address()),
            Argument::Write(to.address()),
            Argument::Int(N as i64),
        ];
        launch(&gpu, compute, "sum", Element::F32, Work::Elements(N as u64), &sum)?;
        Ok(7)
    };
    let (mut graph, given) = compute.capture(work).unwrap();
    assert_eq!((given, compute.is_capturing().unwrap(), comm.is_capturing().unwrap()), (7, false, false));
    assert_eq!(held(compute, to), [0.0; N], "what is captured isn't done");
    for seed in 0..50 {
        fake.seed(seed);
        let x = numbers(N, seed);
        compute.write(bytes(&x), from, 0).unwrap();
        again(&mut graph, compute);
        assert_eq!(held(compute, to), x.iter().map(|x| 2.0 * x + 1.0).collect::<Vec<f32>>(), "seed {seed}");
    }
    assert!(fake.damage().is_empty(), "{:?}", fake.damage());
    drop(graph);
    assert_eq!(fake.count(Count::Graphs), 0);
}

#[test]
fn a_captured_optimizer_counts_its_steps_in_device_memory() {
    let Some(fake) = fake() else { return };
    let gpu = gpu(&fake);
    let stream = gpu.compute();
    let [values, grads, mean, squares] = &[(); 4].map(|()| piece(&gpu));
    let settings = gpu.alloc(stream, 48).unwrap();
    let mut engine = numbers(N, 1);
    stream.write(bytes(&engine), values, 0).unwrap();
    let arguments = [
        Argument::Write(values.address()),
        Argument::Read(grads.address()),
        Argument::Null,
        Argument::Write(mean.address()),
        Argument::Write(squares.address()),
        Argument::Read(settings.address()),
        Argument::Null,
        Argument::Double(0.0),
        Argument::Null,
        Argument::Null,
        Argument::Int(N as i64),
    ];
    let step = || launch(&gpu, stream, "adam", Element::F32, Work::Elements(N as u64), &arguments);
    let (mut graph, ()) = stream.capture(step).unwrap();
    let rule = Adam::default();
    let mut optimizer = Optimizer::new(rule).unwrap();
    let (mut next_grads, mut next_settings) = (gpu.pinned(4 * N).unwrap(), gpu.pinned(48).unwrap());
    for step in 1..=5 {
        let g = numbers(N, 10 + step as u64);
        let (first, second) = rule.betas;
        let lr = rule.lr as f32 / (1.0 - first.powi(step)) as f32;
        let root = (1.0 - second.powi(step)).sqrt() as f32;
        let pair = |keep: f64| [keep as f32, (1.0 - keep) as f32];
        let ([a, b], [c, d]) = (pair(first), pair(second));
        next_grads.bytes_mut().unwrap().copy_from_slice(bytes(&g));
        let numbers = [1.0, lr, rule.weight_decay as f32, a, b, c, d, root, rule.eps as f32];
        next_settings.bytes_mut().unwrap().copy_from_slice(&step_of(N, numbers));
        stream.upload(&mut next_grads, 0..4 * N, grads, 0).unwrap();
        stream.upload(&mut next_settings, 0..48, &settings, 0).unwrap();
        again(&mut graph, stream);
        optimizer.step(&mut engine, &g, 1.0);
    }
    assert!(held(stream, values) == engine);
}

type Call<'a> = &'a mut dyn FnMut() -> Result<(), Error>;

#[test]
fn what_a_capture_refuses_is_told_and_the_stream_goes_on() {
    let Some(fake) = fake() else { return };
    let gpu = gpu(&fake);
    let (compute, comm) = (gpu.compute(), gpu.comm());
    let memory = gpu.alloc(compute, 4 * N).unwrap();
    let (outside, inside) = (gpu.event(Timing::No).unwrap(), gpu.event(Timing::No).unwrap());
    comm.record(&outside).unwrap();
    let waits = |event: &Event| {
        compute.record(event)?;
        event.synchronize()
    };
    let unjoined = || {
        compute.record(&inside)?;
        comm.wait(&inside)?;
        affine(&gpu, comm, &memory, &memory, 1.0, 1.0)
    };
    let mut host = gpu.pinned(4).unwrap();
    let mut upload = || compute.upload(&mut host, 0..4, &memory, 0);
    let refused: [(Call<'_>, &str); 9] = [
        (&mut || compute.synchronize(), "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED"),
        (&mut || compute.is_done().map(drop), "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED"),
        (&mut || gpu.synchronize(), "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED"),
        (&mut || gpu.alloc(compute, 4).map(drop), "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED"),
        (&mut || compute.wait(&outside), "CUDA_ERROR_STREAM_CAPTURE_ISOLATION"),
        (&mut || waits(&inside), "CUDA_ERROR_CAPTURED_EVENT"),
        (&mut || compute.read(&memory, 0..4).map(drop), "can't become part of a graph"),
        (&mut || compute.write(&[0; 4], &memory, 0), "can't become part of a graph"),
        (&mut upload, "can't become part of a graph"),
    ];
    let mut count = 0.0;
    let mut goes_on = || {
        affine(&gpu, compute, &memory, &memory, 1.0, 1.0).unwrap();
        count += 1.0;
        assert_eq!(held(compute, &memory), [count; N]);
        assert_eq!(fake.count(Count::Graphs), 0);
    };
    for (call, want) in refused {
        let words = compute.capture(&mut *call).unwrap_err().to_string();
        assert!(words.contains(want) && words.contains("hint:"), "{words}");
        goes_on();
        if want.starts_with("CUDA") {
            // Who doesn't mind the error is told at the end.
            let ended = compute.capture(|| {
                let _ = call();
                Ok::<(), Error>(())
            });
            let words = ended.unwrap_err().to_string();
            assert!(words.contains("CUDA_ERROR_STREAM_CAPTURE_INVALIDATED"), "{words}");
            goes_on();
        }
    }
    let words = compute.capture(unjoined).unwrap_err().to_string();
    assert!(words.contains("CUDA_ERROR_STREAM_CAPTURE_UNJOINED"), "{words}");
    goes_on();
    let panicked =
        catch_unwind(AssertUnwindSafe(|| compute.capture(|| -> Result<(), Error> { panic!("on purpose") })));
    assert!(panicked.is_err());
    goes_on();
    // Both streams are free for a capture that is right.
    compute.capture(|| affine(&gpu, compute, &memory, &memory, 1.0, 1.0)).unwrap();
    comm.capture(|| affine(&gpu, comm, &memory, &memory, 1.0, 1.0)).unwrap();
}

#[test]
fn a_capture_may_load_kernels_and_drop_memory_and_others_may_allocate_meanwhile() {
    let Some(fake) = fake() else { return };
    let gpu = gpu(&fake);
    let stream = gpu.compute();
    let memory = gpu.alloc(stream, 4 * N).unwrap();
    let dropped = (gpu.alloc(stream, 4).unwrap(), gpu.pinned(4).unwrap());
    let work = || -> Result<DeviceMemory, Error> {
        affine(&gpu, stream, &memory, &memory, 1.0, 1.0)?;
        drop(dropped);
        let others = || {
            let mut host = gpu.pinned(4 * N)?;
            host.bytes_mut()?.copy_from_slice(bytes(&[1.0; N]));
            let own = gpu.alloc(gpu.copy(), 4 * N)?;
            gpu.copy().upload(&mut host, 0..4 * N, &own, 0)?;
            gpu.copy().synchronize()?;
            Ok(own)
        };
        std::thread::scope(|scope| scope.spawn(others).join().unwrap())
    };
    let (mut graph, own) = stream.capture(work).unwrap();
    assert_eq!((fake.count(Count::Pieces), fake.count(Count::Pinned)), (2, 0), "given back in the end");
    assert_eq!(held(gpu.copy(), &own), [1.0; N]);
    again(&mut graph, stream);
    again(&mut graph, stream);
    assert_eq!(held(stream, &memory), [2.0; N]);
}

#[test]
fn what_another_opening_of_the_gpu_drops_spoils_no_capture() {
    let Some(fake) = fake() else { return };
    let (own, other) = (gpu(&fake), gpu(&fake));
    let memory = piece(&own);
    let [here, there] = [(); 2].map(|()| (piece(&other), other.pinned(4).unwrap()));
    let pieces = fake.count(Count::Pieces);
    let work = || -> Result<(), Error> {
        affine(&own, own.compute(), &memory, &memory, 1.0, 1.0)?;
        drop(here);
        std::thread::scope(|scope| scope.spawn(|| drop(there)).join().unwrap());
        assert_eq!(fake.count(Count::Pieces), pieces);
        Ok(())
    };
    let (mut graph, ()) = own.compute().capture(work).unwrap();
    assert_eq!(
        (fake.count(Count::Pieces), fake.count(Count::Pinned)),
        (pieces - 2, 0),
        "given back in the end"
    );
    again(&mut graph, own.compute());
    assert_eq!(held(own.compute(), &memory), [1.0; N]);
    assert_eq!(fake.damage(), [""; 0]);
}

#[test]
fn an_opening_that_is_closed_while_another_records_unloads_its_kernels_afterwards() {
    let Some(fake) = fake() else { return };
    let (own, other) = (gpu(&fake), gpu(&fake));
    let (memory, theirs) = (piece(&own), piece(&other));
    affine(&own, own.compute(), &memory, &memory, 1.0, 1.0).unwrap();
    affine(&other, other.compute(), &theirs, &theirs, 1.0, 1.0).unwrap();
    assert_eq!(fake.count(Count::Modules), 2);
    let work = || -> Result<(), Error> {
        affine(&own, own.compute(), &memory, &memory, 1.0, 1.0)?;
        std::thread::scope(|scope| scope.spawn(|| drop((theirs, other))).join().unwrap());
        assert_eq!(fake.count(Count::Modules), 2, "kept as long as somebody records");
        Ok(())
    };
    let (mut graph, ()) = own.compute().capture(work).unwrap();
    assert_eq!((fake.count(Count::Modules), fake.count(Count::Pieces)), (1, 1), "given back in the end");
    again(&mut graph, own.compute());
    assert_eq!(held(own.compute(), &memory), [2.0; N]);
    drop((graph, memory, own));
    assert_eq!((fake.count(Count::Modules), fake.count(Count::Pieces)), (0, 0));
    assert_eq!(fake.damage(), [""; 0]);
}
