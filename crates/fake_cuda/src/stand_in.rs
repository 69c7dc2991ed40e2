//! A stand-in for one of NVIDIA's libraries, and what it says of the calls that it got.

use libloading::Library;
use std::collections::BTreeMap;
use std::ffi::{CString, c_char, c_int, c_long};

/// A stand-in.
pub struct StandIn(Library);

impl StandIn {
    pub(crate) fn new(library: Library) -> StandIn {
        StandIn(library)
    }

    /// How often a function was called.
    pub fn calls(&self, function: &str) -> i64 {
        let function = CString::new(function).unwrap();
        // SAFETY: the type is that of fake.h, and the string ends in 0.
        unsafe {
            let calls = self.0.get::<extern "C" fn(*const c_char) -> c_long>(b"phalanx_fake_calls").unwrap();
            calls(function.as_ptr())
        }
    }

    /// Lets the `nth` call from now on fail, 1 being the next.
    pub fn fail(&self, function: &str, nth: i64, code: i32) {
        let function = CString::new(function).unwrap();
        // SAFETY: as above.
        unsafe {
            let fail =
                self.0.get::<extern "C" fn(*const c_char, c_long, c_int)>(b"phalanx_fake_fail").unwrap();
            fail(function.as_ptr(), nth, code);
        }
    }

    /// How many things live that must be ended.
    pub fn live(&self) -> i64 {
        // SAFETY: the type is that of fake.h.
        unsafe { self.0.get::<extern "C" fn() -> c_long>(b"phalanx_fake_live").unwrap()() }
    }

    /// The calls, a line each, as far as they were kept: the first thousands.
    pub fn log(&self) -> Vec<String> {
        let mut bytes = vec![0; 4 << 20];
        // SAFETY: the type is that of fake.h, and it writes as much as there is room for.
        let n = unsafe {
            let log = self.0.get::<extern "C" fn(*mut u8, usize) -> usize>(b"phalanx_fake_log").unwrap();
            log(bytes.as_mut_ptr(), bytes.len())
        };
        bytes.truncate(n);
        String::from_utf8_lossy(&bytes).lines().map(str::to_owned).collect()
    }

    /// How often each function was called.
    pub fn counts(&self) -> BTreeMap<String, usize> {
        let mut counts = BTreeMap::new();
        for line in self.log() {
            *counts.entry(line.split(' ').next().unwrap().to_owned()).or_default() += 1;
        }
        counts
    }
}
