//! A stand-in, and what it says of the calls that it got.

use crate::{build, stream};
use std::collections::BTreeMap;
use std::ffi::{CString, c_char, c_int, c_long};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// A stand-in for one test at a time, with nothing on its record.
pub(crate) struct Fake {
    /// Where it lies, for those who open it.
    pub(crate) folders: [PathBuf; 1],
    library: libloading::Library,
    _alone: MutexGuard<'static, ()>,
}

/// The stand-in of `source`, as the library `file`; none where there is no compiler, said aloud.
pub(crate) fn fake(source: &str, file: &str) -> Option<Fake> {
    static ALONE: Mutex<()> = Mutex::new(());
    let alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    stream::driver()?;
    let sources = Path::new(env!("CARGO_MANIFEST_DIR")).join("../fake_cuda/libraries");
    let folder = build::folder(&sources.join(source), file)?;
    // SAFETY: the library is ours, and starting it does nothing.
    let library = unsafe { libloading::Library::new(folder.join(file)) }.unwrap();
    let fake = Fake { folders: [folder], library, _alone: alone };
    // SAFETY: the type is that of fake.h.
    unsafe { fake.library.get::<unsafe extern "C" fn()>(b"phalanx_fake_reset").unwrap()() };
    Some(fake)
}

impl Fake {
    /// How often a function was called.
    pub(crate) fn calls(&self, function: &str) -> i64 {
        let function = CString::new(function).unwrap();
        // SAFETY: the type is that of fake.h, and the string ends in 0.
        unsafe {
            let calls =
                self.library.get::<unsafe extern "C" fn(*const c_char) -> c_long>(b"phalanx_fake_calls");
            calls.unwrap()(function.as_ptr())
        }
    }

    /// Lets the `nth` call from now on fail.
    pub(crate) fn fail(&self, function: &str, nth: i64, code: i32) {
        let function = CString::new(function).unwrap();
        // SAFETY: as above.
        unsafe {
            let fail = self
                .library
                .get::<unsafe extern "C" fn(*const c_char, c_long, c_int)>(b"phalanx_fake_fail")
                .unwrap();
            fail(function.as_ptr(), nth, code);
        }
    }

    /// How many things live that must be ended.
    pub(crate) fn live(&self) -> i64 {
        // SAFETY: the type is that of fake.h.
        unsafe { self.library.get::<unsafe extern "C" fn() -> c_long>(b"phalanx_fake_live").unwrap()() }
    }

    /// The calls, a line each.
    pub(crate) fn log(&self) -> Vec<String> {
        let mut bytes = vec![0; 4 << 20];
        // SAFETY: the type is that of fake.h, and it writes as much as there is room for.
        let n = unsafe {
            let log = self
                .library
                .get::<unsafe extern "C" fn(*mut u8, usize) -> usize>(b"phalanx_fake_log")
                .unwrap();
            log(bytes.as_mut_ptr(), bytes.len())
        };
        bytes.truncate(n);
        String::from_utf8(bytes).unwrap().lines().map(str::to_owned).collect()
    }

    /// How often each function was called.
    pub(crate) fn counts(&self) -> BTreeMap<String, usize> {
        let mut counts = BTreeMap::new();
        for line in self.log() {
            *counts.entry(line.split(' ').next().unwrap().to_owned()).or_default() += 1;
        }
        counts
    }
}
