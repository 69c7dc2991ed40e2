//! Every call that fails says which it was, on which GPU, what it was about and what to do.

use crate::rig::{affine, fake, floats, gpu, launch, options};
use phalanx_cuda::{Argument, DebugSync, Driver, Element, Error, Gpu, GpuOptions, Timing, Work};
use phalanx_fake_cuda::FakeCuda;
use std::path::PathBuf;

/// ECC: a fault that any call may be told of.
const FAULT: i32 = 214;

/// Opens a GPU and does a little of everything.
fn everything(fake: &FakeCuda) -> Result<(), Error> {
    let gpu = Gpu::open(0, &options(fake))?;
    let (compute, copy) = (gpu.compute(), gpu.copy());
    gpu.memory()?;
    let (from, to) = (gpu.alloc(compute, 400)?, gpu.alloc(compute, 400)?);
    compute.write(&[0; 400], &from, 0)?;
    let mut host = gpu.pinned(400)?;
    host.bytes_mut()?.fill(0);
    let (early, late) = (gpu.event(Timing::Yes)?, gpu.event(Timing::Yes)?);
    copy.upload(&mut host, 0..400, &from, 0)?;
    copy.record(&early)?;
    compute.wait(&early)?;
    let (mut graph, ()) = compute.capture(|| affine(&gpu, compute, &from, &to, 1.0, 1.0))?;
    // SAFETY: the memory is held until the end.
    unsafe { graph.launch(compute)? };
    compute.copy(&to, 0..40, &from, 0)?;
    compute.record(&late)?;
    late.is_done()?;
    late.synchronize()?;
    late.since(&early)?;
    compute.is_done()?;
    compute.read(&to, 0..400)?;
    gpu.synchronize()
}

#[test]
fn every_call_that_fails_is_told() {
    let Some(trial) = fake() else { return };
    everything(&trial).unwrap();
    for function in [
        "cuDriverGetVersion",
        "cuInit",
        "cuDeviceGetCount",
        "cuDeviceGet",
        "cuDeviceGetName",
        "cuDeviceGetAttribute",
        "cuDevicePrimaryCtxRetain",
        "cuCtxSetCurrent",
        "cuCtxGetStreamPriorityRange",
        "cuStreamCreateWithPriority",
        "cuMemGetInfo_v2",
        "cuMemAlloc_v2",
        "cuMemsetD8Async",
        "cuMemHostAlloc",
        "cuMemcpyHtoDAsync_v2",
        "cuMemcpyDtoHAsync_v2",
        "cuMemcpyDtoDAsync_v2",
        "cuEventCreate",
        "cuEventRecord",
        "cuEventQuery",
        "cuEventSynchronize",
        "cuEventElapsedTime_v2",
        "cuStreamWaitEvent",
        "cuStreamIsCapturing",
        "cuStreamQuery",
        "cuStreamSynchronize",
        "cuThreadExchangeStreamCaptureMode",
        "cuModuleLoadData",
        "cuModuleGetFunction",
        "cuLaunchKernel",
        "cuStreamBeginCapture_v2",
        "cuStreamEndCapture",
        "cuGraphInstantiateWithFlags",
        "cuGraphLaunch",
        "cuCtxSynchronize",
    ] {
        assert!(trial.calls(function) > 0, "{function} isn't called at all");
        let fake = fake().unwrap();
        fake.fail(function, 1, FAULT);
        let error = everything(&fake).expect_err(function);
        let (Error::Call { call, code, .. } | Error::Driver { call, code, .. }) = &error else {
            panic!("{function}: {error:?}");
        };
        assert!(function.starts_with(call) && *code == FAULT, "{function}: {error}");
        let words = error.to_string();
        assert!(["214", "hint:", "ECC"].iter().all(|part| words.contains(part)), "{words}");
        assert!(matches!(error, Error::Driver { .. }) || words.contains("GPU 0"), "{words}");
        // The driver is whole, and so is what comes next; only a capture that didn't end is still there.
        if function != "cuStreamEndCapture" {
            everything(&fake).unwrap();
        }
    }
}

#[test]
fn a_call_fails_when_it_is_told_to() {
    let Some(fake) = fake() else { return };
    let gpu = gpu(&fake);
    fake.fail("cuMemAlloc_v2", 3, 2);
    let held: Vec<_> = (0..4).map(|_| gpu.alloc(gpu.compute(), 4)).collect();
    assert_eq!(held.iter().map(Result::is_ok).collect::<Vec<_>>(), [true, true, false, true]);
    assert!(matches!(held[2], Err(Error::OutOfMemory { asked: 4, .. })));
}

#[test]
fn codes_without_words_of_ours_have_the_drivers() {
    let Some(fake) = fake() else { return };
    let gpu = gpu(&fake);
    fake.fail("cuMemGetInfo_v2", 1, 401);
    let words = gpu.memory().unwrap_err().to_string();
    assert!(words.contains("CUDA_ERROR_ILLEGAL_STATE") && words.contains("present state"), "{words}");
    fake.fail("cuMemGetInfo_v2", 1, 7777);
    let words = gpu.memory().unwrap_err().to_string();
    assert!(words.contains("7777") && words.contains("hint:"), "{words}");
}

#[test]
fn a_gpu_that_is_not_there_is_told() {
    let Some(trial) = fake() else { return };
    assert_eq!(Driver::open(&options(&trial).libraries).unwrap().gpus(), 2);
    let words = Gpu::open(2, &options(&trial)).unwrap_err().to_string();
    for part in ["GPU 2", "sees 2 GPUs", "CUDA_VISIBLE_DEVICES", "hint:"] {
        assert!(words.contains(part), "{words}");
    }
    let Some(none) = fake() else { return };
    none.gpus(0);
    let words = Gpu::open(0, &options(&none)).unwrap_err().to_string();
    assert!(words.contains("no GPU that it may use"), "{words}");
}

#[test]
fn a_missing_compiler_names_its_package() {
    let Some(fake) = fake() else { return };
    std::fs::remove_file(fake.folder().join("libnvrtc.so.13")).unwrap();
    // Where the system has the real one, that is found.
    if let Err(error) = Gpu::open(0, &options(&fake)) {
        assert!(error.to_string().contains("nvidia-cuda-nvrtc"), "{error}");
    }
    let nowhere = GpuOptions { libraries: vec![PathBuf::from("/nowhere")], ..GpuOptions::default() };
    if let Err(error) = Gpu::open(0, &nowhere) {
        assert!(error.to_string().contains("hint:"), "{error}");
    }
}

#[test]
fn a_kernel_that_does_not_compile_comes_with_what_the_compiler_says() {
    let Some(fake) = fake() else { return };
    let gpu = gpu(&fake);
    let memory = gpu.alloc(gpu.compute(), 4).unwrap();
    fake.fail_compilation("elementwise.cu(3): error: on purpose");
    let error = affine(&gpu, gpu.compute(), &memory, &memory, 1.0, 1.0).unwrap_err();
    let Error::Compile { file, log, .. } = &error else { panic!("{error}") };
    assert!(file == "elementwise.cu" && log.contains("on purpose"), "{error}");
    affine(&gpu, gpu.compute(), &memory, &memory, 1.0, 1.0).unwrap();
}

#[test]
fn a_gpu_that_is_older_than_all_that_the_compiler_knows_is_refused() {
    let Some(fake) = fake() else { return };
    fake.know(100);
    let gpu = gpu(&fake);
    let memory = gpu.alloc(gpu.compute(), 4).unwrap();
    let error = affine(&gpu, gpu.compute(), &memory, &memory, 1.0, 1.0).unwrap_err().to_string();
    assert!(error.contains("sm_90") && error.contains("sm_100") && error.contains("hint:"), "{error}");
}

#[test]
fn a_gpu_that_is_newer_than_all_that_the_compiler_knows_is_given_text() {
    let Some(fake) = fake() else { return };
    fake.know(80);
    let kernels = tempfile::tempdir().unwrap();
    let options = GpuOptions { kernels: Some(kernels.path().to_owned()), ..options(&fake) };
    let gpu = Gpu::open(0, &options).unwrap();
    let memory = gpu.alloc(gpu.compute(), 40).unwrap();
    affine(&gpu, gpu.compute(), &memory, &memory, 1.0, 1.0).unwrap();
    assert_eq!(floats(&gpu.compute().read(&memory, 0..40).unwrap()), [1.0; 10]);
    let file = std::fs::read_dir(kernels.path()).unwrap().next().unwrap().unwrap().file_name();
    assert!(file.to_string_lossy().starts_with("elementwise-float-compute_80-"), "{file:?}");
}

/// A launch of relu on memory that is gone, and what is told of it at the launch and after.
fn illegal(debug_sync: DebugSync) -> Option<(Result<(), Error>, Error)> {
    let fake = fake()?;
    let gpu = Gpu::open(0, &GpuOptions { debug_sync, ..options(&fake) }).unwrap();
    let to = gpu.alloc(gpu.compute(), 400).unwrap();
    let gone = gpu.alloc(gpu.compute(), 400).unwrap().address();
    let arguments = [
        Argument::Read(gone),
        Argument::Write(to.address()),
        Argument::Int(100),
        Argument::Float(0.0),
        Argument::Float(0.0),
    ];
    let launched = launch(&gpu, gpu.compute(), "relu", Element::F32, Work::Elements(100), &arguments);
    Some((launched, gpu.compute().synchronize().unwrap_err()))
}

#[test]
fn an_illegal_access_is_told_later_or_with_its_kernel_at_once() {
    let Some((launched, later)) = illegal(DebugSync::No) else { return };
    assert_eq!(launched, Ok(()));
    let words = later.to_string();
    assert!(
        words.contains("CUDA_ERROR_ILLEGAL_ADDRESS")
            && words.contains("--debug-sync")
            && words.contains("DebugSync::Yes"),
        "{words}"
    );
    let (launched, later) = illegal(DebugSync::Yes).unwrap();
    let words = launched.unwrap_err().to_string();
    assert!(words.contains("kernel relu of float over Elements(100) in 1 blocks of 256"), "{words}");
    assert!(later.to_string().contains("CUDA_ERROR_ILLEGAL_ADDRESS"), "the GPU is lost to the process");
}

/// Each by its own words, and at the call, also behind work of another stream.
#[test]
fn copies_and_fills_that_fail_are_named_at_once() {
    let rows = [
        ("cuMemsetD8Async", "a fill of 40 bytes"),
        ("cuMemcpyDtoDAsync_v2", "a copy of 40 bytes within it"),
        ("cuMemcpyHtoDAsync_v2", "a copy of 40 pinned bytes to it"),
        ("cuMemcpyDtoHAsync_v2", "a copy of 40 bytes from it to pinned ones"),
    ];
    for (function, words) in rows {
        for debug_sync in [DebugSync::Yes, DebugSync::No] {
            let Some(fake) = fake() else { return };
            let gpu = Gpu::open(0, &GpuOptions { debug_sync, ..options(&fake) }).unwrap();
            let (compute, copy) = (gpu.compute(), gpu.copy());
            let (from, to) = (gpu.alloc(compute, 400).unwrap(), gpu.alloc(compute, 400).unwrap());
            let mut host = gpu.pinned(400).unwrap();
            fake.illegal(function, 1);
            let done = match function {
                "cuMemsetD8Async" => compute.fill(&to, 0..40, 1),
                "cuMemcpyDtoDAsync_v2" => compute.copy(&from, 0..40, &to, 0),
                "cuMemcpyHtoDAsync_v2" => copy.upload(&mut host, 0..40, &to, 0),
                _ => copy.download(&from, 0..40, &mut host, 0),
            };
            let told = done.map_err(|error| error.to_string());
            match debug_sync {
                DebugSync::No => assert_eq!(told, Ok(()), "{function}"),
                DebugSync::Yes => assert!(told.unwrap_err().contains(words), "{function}"),
            }
            assert_eq!(fake.calls("cuStreamSynchronize") > 0, debug_sync == DebugSync::Yes, "{function}");
        }
    }
}

#[test]
fn a_graph_that_fails_is_told_at_its_launch() {
    let Some(fake) = fake() else { return };
    let gpu = Gpu::open(0, &GpuOptions { debug_sync: DebugSync::Yes, ..options(&fake) }).unwrap();
    let memory = gpu.alloc(gpu.compute(), 400).unwrap();
    let work = || affine(&gpu, gpu.compute(), &memory, &memory, 1.0, 1.0);
    let (mut graph, ()) = gpu.compute().capture(work).unwrap();
    drop(memory);
    // SAFETY: the memory is gone on purpose; the fake driver finds out and runs nothing.
    let words = unsafe { graph.launch(gpu.compute()) }.unwrap_err().to_string();
    assert!(words.contains("running a graph") && words.contains("CUDA_ERROR_ILLEGAL_ADDRESS"), "{words}");
    assert_eq!(fake.damage(), ["affine: argument 0 is no memory of this GPU"]);
}

#[test]
fn launches_that_are_captured_are_not_waited_for() {
    let Some(fake) = fake() else { return };
    let gpu = Gpu::open(0, &GpuOptions { debug_sync: DebugSync::Yes, ..options(&fake) }).unwrap();
    let memory = gpu.alloc(gpu.compute(), 400).unwrap();
    let (from, to) = (gpu.alloc(gpu.compute(), 400).unwrap(), gpu.alloc(gpu.compute(), 400).unwrap());
    let work = || {
        affine(&gpu, gpu.compute(), &memory, &memory, 1.0, 1.0)?;
        gpu.compute().fill(&from, 0..400, 1)?;
        gpu.compute().copy(&from, 0..400, &to, 0)
    };
    gpu.compute().capture(work).unwrap();
}
