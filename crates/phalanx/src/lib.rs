//! Distributed training. A whole program:
//!
//! ```
//! use phalanx::data::{Places, Silent, View, open};
//! use phalanx::nn::{Conv2d, Linear, Module, module, optim::Sgd};
//! use phalanx::tensor::PoolOptions;
//! use phalanx::{Error, Trainer, Worker};
//!
//! module! {
//!     struct Net() {
//!         conv: Conv2d = Conv2d::new(1, 8, 5),
//!         fc: Linear = Linear::new(288, 10),
//!     }
//!
//!     fn forward(&self, x: &Tensor, ctx: &mut Ctx) -> Tensor {
//!         let x = self.conv.forward(x, ctx).max_pool2d(PoolOptions::square(4)).relu();
//!         self.fc.forward(&x.flatten_from(1), ctx).log_softmax(1)
//!     }
//! }
//!
//! fn main() -> Result<(), Error> {
//!     let worker = Worker::from_env()?; // a world of one here, a rank under `phalanx run`
//!     let mut net = Net::new();
//!     let digits = open("mnist-mini", View::default(), &Places::from_env(None), &mut Silent)?;
//!     let trainer = Trainer { epochs: 2, batch_size: 32, ..Trainer::default() };
//!     let sgd = Sgd { momentum: 0.9, ..Sgd::new(0.05) };
//!     let trained = trainer.fit(&worker, &mut net, sgd, digits.train, Some(digits.test), &mut phalanx::Quiet)?;
//!     assert!(trained.evaluation.and_then(|e| e.accuracy) > Some(0.8));
//!     trained.parameters.to_weights().save(&std::env::temp_dir().join("model.safetensors"))?;
//!     Ok(())
//! }
//! ```
//!
//! A loss that isn't among those of [`nn::Loss`] is [`nn::Loss::own`], and numbers that test samples are judged by beside it are
//! [`Trainer::metrics`]. What was learned before is judged by [`Trainer::evaluate`]. A loop of one's own, as for two networks that learn
//! by each other, has a [`parallel::Strategy`] make gradients whole, and moves the parameters itself:
//!
//! ```
//! use phalanx::nn::optim::{Adam, Optimizer};
//! use phalanx::nn::{Ctx, Linear, Module, Parameters};
//! use phalanx::parallel::{Ddp, Strategy, Sync};
//! use phalanx::tensor::{DType, Keep, Philox, Tensor};
//!
//! // Two ranks, as threads; `Worker::from_env` makes one of a process.
//! phalanx::spawn(2, |worker| {
//!     let (device, group) = (worker.device(), worker.group());
//!     let mut model = Linear::new(3, 1);
//!     let parameters = Parameters::build(&mut model, device, 0);
//!     let mut optimizer = Optimizer::new(Adam { lr: 0.05, ..Adam::default() })?;
//!     let mut strategy = Ddp::new(group.clone());
//!     strategy.prepare(&parameters)?; // rank 0's values
//!     let mut last = f64::INFINITY;
//!     for step in 0..100 {
//!         let own = Philox::new(step, group.rank().0.into());
//!         let x = Tensor::uniform(device, [8, 3], -1.0, 1.0, DType::F32, own);
//!         // The run's seed, the step, and the samples' numbers, which dropout goes by.
//!         let samples = (0..8).map(|i| 8 * u64::from(group.rank().0) + i).collect();
//!         let y = model.forward(&x, &mut Ctx::train(0, step, samples));
//!         let loss = (y - x.sum(&[1], Keep::Yes)).square().mean_all();
//!         // These are half of the step's samples.
//!         strategy.backward(&parameters, Some(&loss), 0.5, Sync::Now)?;
//!         strategy.finish(&parameters)?;
//!         strategy.step(&mut optimizer, &parameters, device, 1.0)?;
//!         last = loss.item();
//!     }
//!     assert!(last < 0.1, "{last}");
//!     Ok(())
//! })?;
//! # Ok::<(), phalanx::Error>(())
//! ```
//!
//! The layers below are re-exported whole: [`tensor`] computes, [`nn`] has modules and optimizers, [`data`] samples,
//! [`comm`] collectives, [`parallel`] strategies.
#![forbid(unsafe_code)]

pub mod checkpoint;
mod device;
mod error;
mod event;
pub mod flight;
pub mod recipe;
mod rehearsal;
pub mod selftest;
mod trainer;
mod worker;

pub use device::DeviceSpec;
pub use error::Error;
pub use event::{Concluded, Event, Observer, Quiet, Scores};
pub use phalanx_comm as comm;
pub use phalanx_data as data;
pub use phalanx_job::{Entered, Pulse, Section, Waiting};
pub use phalanx_nn as nn;
pub use phalanx_parallel as parallel;
pub use phalanx_tensor as tensor;
pub use recipe::{Recipe, RecipeError};
pub use rehearsal::{Held, Rehearsed, Stage, rehearse};
pub use trainer::{
    BadNumber, Best, Evaluation, Interruption, LossScale, OnNan, Precision, Progress, Requests, State,
    TimeLimit, Trained, Trainer, Used, Watch,
};
pub use worker::{Arrival, Worker, check_environment, cores, spawn};

/// The programs of the tutorials, which are compiled and run as those of this page are.
#[cfg(doctest)]
#[doc = include_str!("../../../docs/tutorials/spawn.md")]
#[doc = include_str!("../../../docs/tutorials/tabular.md")]
#[doc = include_str!("../../../docs/tutorials/pixels.md")]
#[doc = include_str!("../../../docs/tutorials/own-loop.md")]
#[doc = include_str!("../../../docs/tutorials/two-models.md")]
struct Tutorials;
