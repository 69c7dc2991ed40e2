//! Streams of the fake driver, and the stand-ins beside it.

use phalanx_cuda::{Gpu, GpuOptions, Priority, Stream, StreamHandle};
use phalanx_fake_cuda::FakeCuda;
use std::path::{Path, PathBuf};

/// The fake driver of one test, with as many GPUs as it can have; none where there is no compiler.
pub(crate) fn fake() -> Option<FakeCuda> {
    let fake = FakeCuda::new(Path::new(env!("CARGO_TARGET_TMPDIR")), &kernels(), &[])?;
    fake.gpus(8);
    Some(fake)
}

/// Nothing is launched from here.
fn kernels() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("kernels")
}

/// A stream on a GPU that is open as long as this.
pub(crate) struct TestStream {
    stream: Stream,
    gpu: Gpu,
}

impl TestStream {
    /// Of this GPU, which is current on this thread from now on.
    pub(crate) fn on(fake: &FakeCuda, gpu: usize) -> TestStream {
        let options = GpuOptions { libraries: vec![fake.folder().to_owned()], ..GpuOptions::default() };
        let gpu = Gpu::open(gpu as u32, &options).unwrap();
        gpu.make_current().unwrap();
        TestStream { stream: gpu.stream(Priority::Low).unwrap(), gpu }
    }

    pub(crate) fn stream(&self) -> &Stream {
        &self.stream
    }

    pub(crate) fn handle(&self) -> StreamHandle {
        self.stream.handle()
    }

    pub(crate) fn make_current(&self) {
        self.gpu.make_current().unwrap();
    }

    /// Whether it has done all its work.
    pub(crate) fn idle(&self) -> bool {
        self.stream.is_done().unwrap()
    }

    /// Waits for all its work.
    pub(crate) fn synchronize(&self) {
        self.stream.synchronize().unwrap();
    }
}

impl Drop for TestStream {
    fn drop(&mut self) {
        // Tests keep memory for the work no longer than this. A failure is one that the test has seen.
        let _ = self.stream.synchronize();
    }
}
