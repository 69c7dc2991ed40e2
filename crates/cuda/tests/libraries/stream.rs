//! Streams that the stand-ins work on: each a thread.

use crate::build;
use phalanx_cuda::StreamHandle;
use std::ffi::{c_int, c_void};
use std::path::Path;
use std::sync::OnceLock;

/// The stand-in for the driver, open for the whole process; none where there is no compiler.
pub(crate) fn driver() -> Option<&'static libloading::Library> {
    static DRIVER: OnceLock<Option<libloading::Library>> = OnceLock::new();
    DRIVER
        .get_or_init(|| {
            let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/libraries/stream.cpp");
            let folder = build::folder(&source, "libcuda.so.1")?;
            // SAFETY: the library is ours, and starting it does nothing.
            Some(unsafe { libloading::Library::new(folder.join("libcuda.so.1")) }.unwrap())
        })
        .as_ref()
}

fn function<F: Copy>(name: &str) -> F {
    // SAFETY: the callers below name the types of stream.cpp, and the library stays open.
    unsafe { *driver().expect("a test has one").get::<F>(name.as_bytes()).unwrap() }
}

/// A stream, which ends with this.
pub(crate) struct TestStream(*mut c_void);

// SAFETY: its functions may be called from any thread.
unsafe impl Send for TestStream {}
// SAFETY: as above.
unsafe impl Sync for TestStream {}

impl TestStream {
    pub(crate) fn new() -> TestStream {
        // SAFETY: the type is that of stream.cpp.
        TestStream(unsafe { function::<unsafe extern "C" fn() -> *mut c_void>("test_stream_create")() })
    }

    pub(crate) fn handle(&self) -> StreamHandle {
        StreamHandle(self.0)
    }

    /// Whether it has done all its work.
    pub(crate) fn idle(&self) -> bool {
        // SAFETY: the type is that of stream.cpp, and the stream lives.
        unsafe { function::<unsafe extern "C" fn(*mut c_void) -> c_int>("test_stream_idle")(self.0) != 0 }
    }

    /// Waits for all its work.
    pub(crate) fn synchronize(&self) {
        // SAFETY: as above.
        unsafe { function::<unsafe extern "C" fn(*mut c_void)>("test_stream_synchronize")(self.0) }
    }
}

impl Drop for TestStream {
    fn drop(&mut self) {
        // SAFETY: as above, and nobody has it from here on.
        unsafe { function::<unsafe extern "C" fn(*mut c_void)>("test_stream_destroy")(self.0) }
    }
}

/// Says which GPU is current on this thread.
pub(crate) fn set_device(device: i32) {
    // SAFETY: the type is that of stream.cpp.
    unsafe { function::<unsafe extern "C" fn(c_int)>("test_set_device")(device) }
}
