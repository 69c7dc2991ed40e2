//! A driver without a GPU, for tests: libraries that stand in for `libcuda` and NVRTC (`native/`) and for cuBLASLt, cuDNN, NCCL and
//! NVML (`libraries/`), built by the system's C++ compiler when a test first asks for them.
//!
//! The fake driver does what CUDA's manual says, as late as that allows. Device memory is the host's, between guards and full of
//! garbage; kernels are the real sources, compiled for the host, whose threads are fibers; streams are carried out only when
//! somebody waits for them, in an order that a seed picks among those that events allow, so that a forgotten event shows as a
//! wrong number. It counts and writes down calls, and fails those that a test names ([`FakeCuda`]).
//!
//! What it does not know: time, copies that overlap in earnest, memory of one GPU seen by another, and whatever of CUDA this
//! project doesn't call.
//!
//! ```no_run
//! use phalanx_fake_cuda::{FakeCuda, Module};
//!
//! let modules = [Module { file: "elementwise.cu", element: "float", kernels: vec!["relu"] }];
//! let Some(fake) = FakeCuda::new("target/tmp".as_ref(), "crates/cuda/kernels".as_ref(), &modules) else { return };
//! fake.seed(7);
//! // Whoever looks for libraries in this folder finds two GPUs.
//! println!("{}", fake.folder().display());
//! assert!(fake.damage().is_empty());
//! ```

mod build;
mod fake;
mod stand_in;

pub use build::Module;
pub use fake::{Count, FakeCuda};
pub use stand_in::StandIn;
