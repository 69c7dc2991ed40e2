//! Strategies: who holds which part of a model, and when ranks talk.
//!
//! A trainer speaks to a [`Strategy`] and never learns how many ranks there are: [`SingleDevice`] does everything itself,
//! [`Ddp`] holds a whole copy of the model on every rank and sums gradients, and [`LogicalShards`] does so in an order that
//! doesn't depend on the number of ranks. The journey of a gradient is short: the backward pass writes it into its slot of the
//! gradient arena; its bucket, a range of that arena, is complete when its last slot is; the all-reduce of that range starts
//! while the backward pass goes on; the optimizer then reads the same memory.
//! Where a loss holds each sample against those of all ranks, [`gathered()`] brings their rows together.
//!
//! ```
//! use phalanx_comm::Group;
//! use phalanx_nn::{Ctx, Linear, Module, Parameters};
//! use phalanx_parallel::{Ddp, Strategy, Sync};
//! use phalanx_tensor::{DType, Device, Tensor};
//!
//! std::thread::scope(|scope| {
//!     for group in Group::threads(2) {
//!         scope.spawn(move || {
//!             let device = Device::cpu(1);
//!             let mut model = Linear::new(3, 1);
//!             let parameters = Parameters::build(&mut model, &device, 0);
//!             let mut strategy = Ddp::new(group);
//!             strategy.prepare(&parameters).unwrap();
//!             let x = Tensor::full(&device, [4, 3], strategy.place().rank as f64, DType::F32);
//!             // The run's seed, the step, and the samples' numbers, which dropout goes by.
//!             let samples = (0..4).map(|i| 4 * strategy.place().rank as u64 + i).collect();
//!             let loss = model.forward(&x, &mut Ctx::train(0, 0, samples)).mean_all();
//!             // This rank has 4 of the 8 samples of the step.
//!             strategy.backward(&parameters, Some(&loss), 0.5, Sync::Now).unwrap();
//!             strategy.finish(&parameters).unwrap();
//!             assert_eq!(parameters.grads().arena().tensor(0).to_vec::<f32>(), [0.5; 3]);
//!         });
//!     }
//! });
//! ```
#![forbid(unsafe_code)]

mod agreement;
mod between_gpus;
mod buckets;
mod ddp;
mod device_threads;
mod error;
mod evaluation;
mod fsdp;
mod gathered;
mod hook;
mod local;
mod mesh;
mod model_parallel;
pub mod pipeline;
mod place;
mod portion;
mod ranks;
mod recompute;
mod replay;
mod replicas;
mod shards;
mod single;
mod strategy;
mod tensor_parallel;

pub use agreement::first_that_differs;
pub use between_gpus::BetweenGpus;
pub use buckets::buckets;
pub use ddp::{Compress, Ddp, DdpConfig};
pub use error::Error;
pub use evaluation::{EvalPass, Judge, Outputs};
pub use fsdp::{Fsdp, FsdpConfig, Sharded};
pub use gathered::gathered;
pub use hook::{AllReduce, Bf16, Bucket, Fp16, Hook, Kept, Part, Pending, PowerSgd, PowerSgdConfig};
pub use local::{Local, LocalConfig, Pass, PassLoss, Whole};
pub use mesh::{Axis, Bound, By, Coordinates, Mesh, MeshError};
pub use model_parallel::{ModelParallel, ModelParallelConfig, StagesConfig};
pub use place::{Placeable, Placed};
pub use portion::{HandOver, Portion};
pub use recompute::Recomputed;
pub use replicas::{DataParallel, DataParallelConfig};
pub use shards::{LogicalShards, LogicalShardsConfig};
pub use single::SingleDevice;
pub use strategy::{Collected, HeldGradient, Here, Place, Shards, Strategy, Sync};
pub use tensor_parallel::{Between, Plan, PlanError, Style};
