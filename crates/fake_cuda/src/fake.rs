//! A fake driver of a test's own, and what the test asks of it.

use crate::build::{self, LIBRARIES, Module};
use crate::stand_in::StandIn;
use libloading::Library;
use std::ffi::{CString, c_char, c_int};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicU64, Ordering};
use std::{fs, process};

/// What the fake counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Count {
    /// Pieces of device memory that are there.
    Pieces,
    /// Their bytes.
    Bytes,
    /// Pieces of pinned memory that are there.
    Pinned,
    /// Streams that are there.
    Streams,
    /// Events that are there.
    Events,
    /// Graphs that are there, instantiated or not.
    Graphs,
    /// Modules that are loaded.
    Modules,
    /// Pieces of work that wait in streams.
    Waiting,
    /// Bytes that copies were asked to take to a GPU so far.
    BytesUp,
    /// Bytes that copies were asked to take from a GPU so far.
    BytesDown,
    /// Bytes of these two kinds on streams that were given no kernels, so beside what those compute.
    BytesBeside,
    /// Bytes that copies were asked to move inside of a GPU so far.
    BytesAcross,
}

impl Count {
    fn name(self) -> &'static str {
        match self {
            Count::Pieces => "pieces",
            Count::Bytes => "bytes",
            Count::Pinned => "pinned",
            Count::Streams => "streams",
            Count::Events => "events",
            Count::Graphs => "graphs",
            Count::Modules => "modules",
            Count::Waiting => "waiting",
            Count::BytesUp => "bytes_up",
            Count::BytesDown => "bytes_down",
            Count::BytesBeside => "bytes_beside",
            Count::BytesAcross => "bytes_across",
        }
    }
}

/// A driver, a compiler and libraries that nobody else uses: two GPUs of 1 GiB each, of compute capability 9.0, with 132 multiprocessors.
pub struct FakeCuda {
    folder: PathBuf,
    // Each of them is a copy with a state of its own.
    driver: Library,
    nvrtc: Library,
    cublaslt: StandIn,
    cudnn: StandIn,
    nccl: StandIn,
    nvml: StandIn,
}

impl FakeCuda {
    /// Makes one that can run the kernels of `modules`, whose sources lie in `kernels`; what is built is kept in `cache`. Where
    /// there is no C++ compiler it says so aloud and gives none, so that a test can pass. Panics where something doesn't compile.
    pub fn new(cache: &Path, kernels: &Path, modules: &[Module]) -> Option<FakeCuda> {
        if let Err(error) = Command::new("c++").arg("--version").output() {
            eprintln!("skipped: no C++ compiler (package g++): {error}");
            return None;
        }
        let built = build::build(cache, kernels, modules).unwrap_or_else(|cause| panic!("{cause}"));
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let own = format!("own-{}-{}", process::id(), NEXT.fetch_add(1, Ordering::Relaxed));
        let folder = cache.join("fake-cuda").join(own);
        fs::create_dir_all(&folder).unwrap_or_else(|error| panic!("{}: {error}", folder.display()));
        fs::write(folder.join("modules"), built.modules.to_str().expect("a path in UTF-8")).unwrap();
        let libraries = std::array::from_fn(|i| {
            let to = folder.join(LIBRARIES[i].2);
            fs::copy(&built.libraries[i], &to).unwrap_or_else(|error| panic!("{}: {error}", to.display()));
            // SAFETY: the library is built from this crate, and its start makes nothing but its own state.
            unsafe { Library::new(&to) }.unwrap_or_else(|error| panic!("{}: {error}", to.display()))
        });
        let [driver, nvrtc, cublaslt, cudnn, nccl, nvml] = libraries;
        let [cublaslt, cudnn, nccl, nvml] = [cublaslt, cudnn, nccl, nvml].map(StandIn::new);
        Some(FakeCuda { folder, driver, nvrtc, cublaslt, cudnn, nccl, nvml })
    }

    /// What stands in for cuBLASLt.
    pub fn cublaslt(&self) -> &StandIn {
        &self.cublaslt
    }

    /// What stands in for cuDNN.
    pub fn cudnn(&self) -> &StandIn {
        &self.cudnn
    }

    /// What stands in for NCCL.
    pub fn nccl(&self) -> &StandIn {
        &self.nccl
    }

    /// What stands in for NVML.
    pub fn nvml(&self) -> &StandIn {
        &self.nvml
    }

    /// What NVML sees from now on, in this process and in others: a line a GPU, and behind it lines of what is on it, as nvml.cpp
    /// explains. At first there are two GPUs with nothing on them.
    pub fn nvml_sees(&self, lines: &str) {
        let path = self.folder.join("nvml.txt");
        fs::write(&path, lines).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    }

    /// The folder that the libraries lie in, and that is removed with this.
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// Decides in which order streams are carried out, and with what fresh memory is filled.
    pub fn seed(&self, seed: u64) {
        // SAFETY: the type is that of `fake_seed` in questions.h.
        unsafe { self.driver.get::<extern "C" fn(u64)>(b"fake_seed").unwrap()(seed) }
    }

    /// How many GPUs there are, 8 at most; said before the driver is opened.
    pub fn gpus(&self, n: u32) {
        // SAFETY: the type is that of `fake_gpus` in questions.h.
        unsafe { self.driver.get::<extern "C" fn(c_int)>(b"fake_gpus").unwrap()(n as c_int) }
    }

    /// How many bytes a GPU has; in a process with `PHALANX_FAKE_MEMORY=BYTES`, each has as many at first.
    pub fn limit_memory(&self, gpu: u32, bytes: u64) {
        // SAFETY: the type is that of `fake_limit_memory` in questions.h.
        unsafe {
            let limit = self.driver.get::<extern "C" fn(c_int, u64)>(b"fake_limit_memory").unwrap();
            limit(gpu as c_int, bytes);
        }
    }

    /// Makes the `nth` call of a function from now on, counted from 1, do nothing and give `code`.
    pub fn fail(&self, function: &str, nth: u64, code: i32) {
        let name = CString::new(function).unwrap();
        // SAFETY: the type is that of `fake_fail` in questions.h; the name ends in 0 and outlives the call.
        unsafe {
            let fail = self.driver.get::<extern "C" fn(*const c_char, u64, c_int)>(b"fake_fail").unwrap();
            fail(name.as_ptr(), nth, code);
        }
    }

    /// Has what the `nth` call of a function from now on gives a stream come upon memory that isn't there, once it is done. A process
    /// with `PHALANX_FAKE_ILLEGAL="FUNCTION NTH"` has the same, of functions of the libraries, too.
    pub fn illegal(&self, function: &str, nth: u64) {
        let name = CString::new(function).unwrap();
        // SAFETY: the type is that of `fake_illegal` in questions.h; the name ends in 0 and outlives the call.
        unsafe {
            let illegal = self.driver.get::<extern "C" fn(*const c_char, u64)>(b"fake_illegal").unwrap();
            illegal(name.as_ptr(), nth);
        }
    }

    /// How often a function of the driver was called.
    pub fn calls(&self, function: &str) -> u64 {
        let name = CString::new(function).unwrap();
        // SAFETY: the type is that of `fake_calls` in questions.h; the name ends in 0 and outlives the call.
        unsafe {
            self.driver.get::<extern "C" fn(*const c_char) -> u64>(b"fake_calls").unwrap()(name.as_ptr())
        }
    }

    /// How many there are.
    pub fn count(&self, what: Count) -> u64 {
        let name = CString::new(what.name()).unwrap();
        // SAFETY: the type is that of `fake_count` in questions.h; the name ends in 0 and outlives the call.
        unsafe {
            self.driver.get::<extern "C" fn(*const c_char) -> u64>(b"fake_count").unwrap()(name.as_ptr())
        }
    }

    /// The last thousands of calls, in order: a function's name a line, and `launch NAME` behind a launch.
    pub fn log(&self) -> Vec<String> {
        self.text("log")
    }

    /// What the program did that it mustn't: writes beside memory, work on memory that was freed.
    pub fn damage(&self) -> Vec<String> {
        self.text("damage")
    }

    /// How many programs the compiler was given.
    pub fn compilations(&self) -> u64 {
        // SAFETY: the type is that of `fake_compilations` in libnvrtc.cpp.
        unsafe { self.nvrtc.get::<extern "C" fn() -> u64>(b"fake_compilations").unwrap()() }
    }

    /// Makes the next compilation fail and say this.
    pub fn fail_compilation(&self, log: &str) {
        let log = CString::new(log).unwrap();
        // SAFETY: the type is that of `fake_fail_compilation` in libnvrtc.cpp; the text ends in 0 and outlives the call.
        unsafe {
            let fail = self.nvrtc.get::<extern "C" fn(*const c_char)>(b"fake_fail_compilation").unwrap();
            fail(log.as_ptr());
        }
    }

    /// Lets the compiler know one architecture, as 80, from when it is opened next.
    pub fn know(&self, architecture: i32) {
        // SAFETY: the type is that of `fake_know` in libnvrtc.cpp.
        unsafe { self.nvrtc.get::<extern "C" fn(i32)>(b"fake_know").unwrap()(architecture) }
    }

    fn text(&self, what: &str) -> Vec<String> {
        let what = CString::new(what).unwrap();
        let mut text = Vec::new();
        // SAFETY: the type is that of `fake_text` in questions.h, which writes no more bytes than there is room for.
        unsafe {
            let get = self
                .driver
                .get::<extern "C" fn(*const c_char, *mut u8, usize) -> usize>(b"fake_text")
                .unwrap();
            // Others may write in the meantime.
            loop {
                let bytes = get(what.as_ptr(), text.as_mut_ptr(), text.len());
                if bytes <= text.len() {
                    text.truncate(bytes);
                    break;
                }
                text.resize(bytes, 0);
            }
        }
        String::from_utf8_lossy(&text).lines().map(str::to_owned).collect()
    }
}

impl Drop for FakeCuda {
    fn drop(&mut self) {
        // What is left of it is taken away by `cargo clean`.
        let _ = fs::remove_dir_all(&self.folder);
    }
}
