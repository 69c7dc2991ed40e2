//! What can be wrong with a machine's libraries and driver, in words for whoever has to put it right.

use crate::library::{Library, Version};
use crate::nccl::Failure;
use crate::nvrtc::Architecture;
use std::fmt;
use thiserror::Error;

/// Why the GPU can't be used.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum Error {
    /// No library of the driver.
    #[error(
        "no NVIDIA driver on this machine: {tried}\nhint: on a machine with an NVIDIA GPU, install its driver, version {wanted} or later (Ubuntu: nvidia-driver-580 or later; elsewhere NVIDIA's repository); without one use --device cpu"
    )]
    NoDriver {
        /// What was tried to open, and what came of it.
        tried: String,
        /// The oldest driver that would do.
        wanted: &'static str,
    },
    /// The driver is there, but older than the toolkit that this program speaks to.
    #[error(
        "the NVIDIA driver of this machine supports CUDA up to {found}, CUDA {wanted} is needed\nhint: update the driver to version {driver} or later; `nvidia-smi` shows the present one. On a data centre's GPU, such as an A100 or H100, the package cuda-compat-13-0 of NVIDIA's repository does without that"
    )]
    DriverTooOld {
        /// What the driver supports.
        found: Version,
        /// What is needed.
        wanted: Version,
        /// The driver that has it.
        driver: &'static str,
    },
    /// The driver is there, but fails.
    #[error(
        "the NVIDIA driver fails: {call}: {words} (CUDA error {code})\nhint: `nvidia-smi` should list the GPUs; {hint}"
    )]
    Driver {
        /// What was asked of it.
        call: &'static str,
        /// CUDA's number.
        code: i32,
        /// What that number means.
        words: &'static str,
        /// What to do.
        hint: &'static str,
    },
    /// A library of the toolkit isn't there.
    #[error("{library} isn't on this machine: {tried}\nhint: {packages}", packages = library.packages())]
    MissingLibrary {
        /// Which one.
        library: Library,
        /// What was tried to open, and what came of it.
        tried: String,
    },
    /// A library that is there lacks a function.
    #[error("{library} has no function {function}\nhint: {packages}", packages = library.packages())]
    MissingFunction {
        /// Which library.
        library: Library,
        /// Which function.
        function: &'static str,
    },
    /// A kernel doesn't compile, or not without warnings.
    #[error("{file} doesn't compile for {element} on {architecture}: {cause}\n{log}")]
    Compile {
        /// The source.
        file: String,
        /// The type of elements.
        element: &'static str,
        /// The architecture.
        architecture: String,
        /// What the compiler calls it.
        cause: String,
        /// What it has to say.
        log: String,
    },
    /// A GPU is older than all that the compiler of kernels knows.
    #[error(
        "NVRTC {compiler} doesn't compile for sm_{architecture}, which this GPU is: it begins with {oldest}\nhint: choose a newer GPU with CUDA_VISIBLE_DEVICES, or take --device cpu"
    )]
    Architecture {
        /// What the GPU is.
        architecture: Architecture,
        /// The compiler's version.
        compiler: Version,
        /// The oldest one it knows, as `sm_75`.
        oldest: String,
    },
    /// A call fails on a GPU, or tells that work which was given to the GPU before has failed.
    #[error("{call} fails on GPU {gpu}: {about}: {words} ({name}, CUDA error {code})\nhint: {hint}")]
    Call {
        /// The driver's function.
        call: &'static str,
        /// Which GPU.
        gpu: u32,
        /// What it was to do.
        about: String,
        /// CUDA's number.
        code: i32,
        /// CUDA's name of it.
        name: String,
        /// What it means.
        words: String,
        /// What to do.
        hint: &'static str,
    },
    /// A call of a library of the toolkit fails.
    #[error("{library} fails: {call} for {what}: {status}: {words}\nhint: {hint}")]
    LibraryCall {
        /// Which library.
        library: Library,
        /// Which function of it.
        call: &'static str,
        /// What it was to do, with its sizes.
        what: String,
        /// The library's name for what happened.
        status: String,
        /// What it says of it.
        words: String,
        /// What to do.
        hint: &'static str,
    },
    /// A GPU hasn't as much memory left.
    #[error(
        "out of memory on GPU {gpu}: {} were asked for, {} of {} are free\nhint: a smaller batch takes less; `nvidia-smi` shows which programs hold the rest",
        Amount(*asked), Amount(*free), Amount(*total)
    )]
    OutOfMemory {
        /// Which GPU.
        gpu: u32,
        /// Bytes that were asked for.
        asked: u64,
        /// Bytes that were free then.
        free: u64,
        /// Bytes that it has.
        total: u64,
    },
    /// Work that a graph can't hold.
    #[error(
        "{what} can't become part of a graph: the host's memory may be gone when the graph runs\nhint: copy before the capture or after the launch"
    )]
    HostInGraph {
        /// What was asked for.
        what: &'static str,
    },
    /// A pass that would not be right when it is replayed.
    #[error("the pass can't be recorded as a graph: {what} would be those of the recording for good")]
    NotRecorded {
        /// What was found in it.
        what: String,
    },
    /// An operation among ranks fails.
    #[error(transparent)]
    Nccl(Box<Failure>),
}

/// Bytes, as people say them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Amount(pub u64);

impl fmt::Display for Amount {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let units = ["KiB", "MiB", "GiB", "TiB"];
        let Some(power) = (0..units.len()).rev().find(|&i| self.0 >> (10 * (i + 1)) > 0) else {
            return write!(f, "{} bytes", self.0);
        };
        write!(
            f,
            "{:.1} {} ({} bytes)",
            self.0 as f64 / (1u64 << (10 * (power + 1))) as f64,
            units[power],
            self.0
        )
    }
}
