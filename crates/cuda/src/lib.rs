//! What a GPU of NVIDIA's needs: our kernels, as sources and as data ([`KERNELS`]), the libraries that compile and run them, which
//! are opened at run time, so that the same program runs where there are none, and the GPU itself ([`Gpu`]) with its streams, its
//! memory and its graphs.
//!
//! Kernels are CUDA C++ in `kernels/`, one file a family. A module is such a file compiled for one type of elements and one
//! architecture. All sums have an order that sizes alone decide, and no kernel adds floats atomically, so results are the same
//! bits run after run. What this crate does not know: tensors, and which memory is free for whom.
//!
//! What NVIDIA's libraries do better than kernels of ours is called there: matrix products ([`cublaslt`]), convolutions
//! ([`cudnn`]), collectives between GPUs ([`nccl`]). They are handed addresses and streams, so their calls are unsafe. How busy GPUs are, and
//! with whose processes, is asked of [`nvml`].
//!
//! ```no_run
//! use phalanx_cuda::{Argument, Element, Gpu, GpuOptions, Work, kernel};
//!
//! # fn main() -> Result<(), phalanx_cuda::Error> {
//! let gpu = Gpu::open(0, &GpuOptions::default())?;
//! let stream = gpu.compute();
//! let (x, y) = (gpu.alloc(stream, 4000)?, gpu.alloc(stream, 4000)?);
//! stream.write(&(-1.0f32).to_ne_bytes(), &x, 0)?;
//! let arguments = [
//!     Argument::Read(x.address()),
//!     Argument::Write(y.address()),
//!     Argument::Int(1000),
//!     Argument::Float(0.0),
//!     Argument::Float(0.0),
//! ];
//! // SAFETY: both pieces hold the 1000 elements, until the stream has been waited for.
//! unsafe { gpu.launch(stream, kernel("relu"), Element::F32, Work::Elements(1000), &arguments)? };
//! assert_eq!(stream.read(&y, 0..4)?, 0.0f32.to_ne_bytes());
//! # Ok(())
//! # }
//! ```

mod address;
mod element;
mod framing;
mod geometry;
mod heads;
mod kernels;
mod source;
mod spread;
mod taps;
mod walk;
mod window;

mod absent;
mod choices;
mod clock;
mod error;
mod foreign;
mod library;
mod lock;
mod nvrtc;

mod calls;
mod codes;
mod driver;

mod context;
mod cubins;
mod event;
mod gpu;
mod graph;
mod launch;
mod memory;
mod modules;
mod pinned;
mod stream;
mod timing;

pub mod cublaslt;
pub mod cudnn;
pub mod nccl;
pub mod nvml;

pub use absent::AbsentGpu;
pub use address::{Address, StreamHandle};
pub use choices::{Choices, Chosen, Proposals, Workspace};
pub use clock::Clock;
pub use cubins::KernelCache;
pub use driver::Driver;
pub use element::Element;
pub use error::{Amount, Error};
pub use event::{Event, Timing};
pub use framing::Framing;
pub use geometry::{Geometry, LINE, SECTOR, Share, TILE, Work};
pub use gpu::{DebugSync, Gpu, GpuMemory, GpuOptions};
pub use graph::Graph;
pub use heads::{Apart, Heads};
pub use kernels::{KERNELS, Kernel, MOST_PARAMETERS, Parameter, kernel};
pub use launch::Argument;
pub use library::{Library, Version};
pub use memory::DeviceMemory;
pub use nvrtc::{Architecture, Form, Nvrtc};
pub use pinned::Pinned;
pub use source::Source;
pub use spread::{Run, Spread};
pub use stream::{Priority, Stream};
pub use taps::Taps;
pub use timing::Timed;
pub use walk::{MAX_DIMS, Walk};
pub use window::Window;
