//! What a GPU of NVIDIA's needs: our kernels, as sources and as data ([`KERNELS`]), and the libraries that compile and run them,
//! which are opened at run time, so that the same program runs where there are none.
//!
//! Kernels are CUDA C++ in `kernels/`, one file a family. A module is such a file compiled for one type of elements and one
//! architecture. All sums have an order that sizes alone decide, and no kernel adds floats atomically, so results are the same
//! bits run after run. What this crate does not know: tensors, streams, and when memory is free.
//!
//! What NVIDIA's libraries do better than kernels of ours is called there: matrix products ([`cublaslt`]), convolutions
//! ([`cudnn`]), collectives between GPUs ([`nccl`]). They are handed addresses and streams, so their calls are unsafe.
//!
//! ```
//! use phalanx_cuda::{Work, kernel};
//!
//! let relu = kernel("relu");
//! let geometry = relu.geometry(Work::Elements(1000), 1024).expect("there is something to do");
//! assert_eq!((geometry.blocks, geometry.threads), (4, 256));
//! assert!(relu.geometry(Work::Elements(0), 1024).is_none(), "nothing to launch");
//! ```

mod address;
mod element;
mod geometry;
mod kernels;
mod source;
mod walk;
mod window;

mod clock;
mod driver;
mod error;
mod foreign;
mod library;
mod nvrtc;

pub mod cublaslt;
pub mod cudnn;
pub mod nccl;

pub use address::{Address, StreamHandle};
pub use clock::Clock;
pub use driver::Driver;
pub use element::Element;
pub use error::Error;
pub use geometry::{COLUMNS, Geometry, Share, TILE, Work};
pub use kernels::{KERNELS, Kernel, Parameter, kernel};
pub use library::{Library, Version};
pub use nvrtc::{Architecture, Form, Nvrtc};
pub use source::Source;
pub use walk::{MAX_DIMS, Walk};
pub use window::Window;
