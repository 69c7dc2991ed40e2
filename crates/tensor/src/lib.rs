//! Tensors with eager autograd: the engine that Phalanx trains with.
//!
//! A [`Tensor`] is a cheap handle to values on a [`Device`]. Operations on tensors that need a gradient are recorded as they
//! run, and [`backward`] hands each leaf's gradient to a [`GradSink`] at the moment it is complete. The parameters of a model
//! live in one [`Arena`], their gradients in another ([`Grads`]) with the same offsets, so that optimizers, gradient buckets
//! and shards are slices. What this crate does not know: names of parameters, ranks, files.
//!
//! ```
//! use phalanx_tensor::{Device, Philox, Tensor, DType};
//! let device = Device::cpu(2);
//! let x = Tensor::uniform(&device, [8, 3], -1.0, 1.0, DType::F32, Philox::new(0, 0));
//! let w = Tensor::zeros(&device, [3, 1], DType::F32).requires_grad();
//! let loss = (x.matmul(&w) - 1.0).square().mean_all();
//! assert_eq!(loss.item(), 1.0);
//! let grads = loss.backward();
//! assert_eq!(grads.get(&w).unwrap().dims(), [3, 1]);
//! ```

mod dtype;
mod lock;
mod normal;
mod philox;
mod shape;

mod account;
mod arena;
mod autocast;
mod between;
mod casts;
mod device;
mod gpu_span;
mod gpu_tensor;
mod host_span;
mod pool;
mod profile;
mod replay;
mod storage;
mod transit;
mod upload;

pub mod cases;
mod cpu;
mod gpu;
mod gradient;
mod graph;
mod kernel;
mod later;
mod op;
mod ops;
mod tensor;
mod update;
mod walk;
mod whole;

pub use account::{OutOfMemory, Purpose};
pub use arena::{Arena, ArenaMark, Flat, Grads, Layout, Span};
pub use autocast::{autocast, autocast_dtype};
pub use between::looking;
pub use device::{Device, Factors, Search};
pub use dtype::{DType, Element, Float};
pub use gpu_span::GpuSpan;
pub use gpu_tensor::GpuTensor;
pub use graph::{GradSink, Gradients, LeafId, no_grad, without_cheap};
pub use host_span::HostSpan;
pub use later::{Later, LaterVec};
pub use op::{Conv2dOptions, CountPadding, PoolOptions};
pub use ops::across::Crossing;
pub use ops::choice::Comparand;
pub use ops::dropout::{DropoutKey, Within};
pub use ops::norm::{BatchNormed, ChannelStats, Running, SumOverBatch, Then};
pub use ops::reduce::{Keep, Toward};
pub use ops::resample::Interpolation;
pub use ops::samples::{Border, SampleImages, SampleOrder};
pub use phalanx_cuda::{AbsentGpu, DebugSync, Error, GpuOptions};
pub use phalanx_memory::{Spare, bring_in};
pub use philox::Philox;
pub use pool::Team;
pub use profile::KernelTime;
pub use replay::{Rehearsal, Replay, Room};
pub use shape::{MAX_DIMS, Order, Shape};
pub use tensor::Tensor;
pub use transit::Transit;
pub use update::{Guard, NormLimit, Terms, Update, UpdateRun, UpdateStep};
pub use upload::{Upload, Values};
pub use walk::{WeightGradients, backward, backward_inputs};
