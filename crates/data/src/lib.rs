//! Where samples come from: datasets, the order they are seen in, who sees which, and batches that are ready in time.
//!
//! A mini-batch begins here. A [`Sampler`] says which samples a rank takes at a step, the [`Dataset`] writes them into the
//! buffers of a [`Batch`], and the [`Loader`] does both ahead of the training loop. [`open`] gets a known dataset by name: it
//! looks into the user's folder, the cache and the folders of system packages, and fetches and verifies it otherwise.
//! What this crate does not know: models, and how ranks find each other.
//!
//! ```
//! use phalanx_data::{ExactSampler, Loader, LoaderOptions, Order, Places, Silent, View, open};
//! use phalanx_tensor::Device;
//!
//! let digits = open("mnist-mini", View::default(), &Places::from_env(None), &mut Silent)?;
//! // Rank 1 of 4, with batches of 16 of its own.
//! let order = Order::Shuffled { seed: 1 };
//! let sampler = ExactSampler { len: digits.train.len(), world_size: 4, rank: 1, batch_size: 16, order };
//! let loader = Loader::new(digits.train, sampler, LoaderOptions::default());
//! let device = Device::cpu(1);
//! for batch in loader.epoch(0)?.take(2) {
//!     let batch = batch?;
//!     assert_eq!(batch.input_tensor(&device).dims(), [16, 1, 28, 28]);
//!     assert_eq!(batch.target_tensor(&device).dims(), [16]);
//!     assert_eq!(batch.global_samples(), 64);
//! }
//! # Ok::<(), phalanx_data::Error>(())
//! ```
//!
//! A dataset of your own is an implementation of [`Dataset`], four short functions.

// Only `mapped.rs` may: a file can't be mapped without.
#![deny(unsafe_code)]

mod bytes;
mod dataset;
mod order;
mod sampler;
mod sharded;

mod batch;
mod loader;
mod supply;

mod idx;
mod linear;
mod mnist;
mod pixels;

mod images;
mod pictures;
mod transform;
mod treatment;

mod cifar;
mod folder;
mod mapped;
mod text;

mod catalog;
mod fetch;
mod open;
mod places;
mod progress;
mod verify;

mod error;

pub use batch::Batch;
pub use bytes::{ByteSamples, Kept, Making};
pub use catalog::{FileSpec, Home, Listing, Source, Twin, catalog, listing};
pub use cifar::{Cifar, CifarSet, write_synthetic_cifar};
pub use dataset::{BatchBuffers, BatchParts, Dataset, Input, Reconstruct, Target};
pub use error::{Attempt, CifarProblem, Error, FolderProblem, IdxProblem, Result};
pub use fetch::fetch;
pub use folder::ImageFolder;
pub use idx::read_idx;
pub use images::{COLOURS, Image, Images};
pub use linear::LinearRegression;
pub use loader::{Batches, Loader, LoaderOptions};
pub use mnist::{Mnist, Part, Scaling};
pub use open::{Pixels, Split, Targets, View, open};
pub use order::{Order, Permutation};
pub use phalanx_tensor::Border;
pub use pictures::{BadImages, Pictures};
pub use places::{Location, Network, Places};
pub use progress::{FetchEvent, Progress, Silent};
pub use sampler::{DistributedSampler, ExactSampler, PassSampler, Sampler, StepPlan};
pub use sharded::ShardSampler;
pub use supply::{Resident, Supply};
pub use text::{BYTES, Text};
pub use transform::{Jitter, Normalise, Pipeline, Transform};
pub use treatment::{Augment, Pipelines, Treatment};
pub use verify::{Verified, verify};
