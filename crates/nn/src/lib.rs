//! Neural networks: modules, losses, optimizers, schedules, models, and files of weights.
//!
//! A [`Module`] computes in `forward` and names its parts in `visit`; [`module!`] writes it from a table of parts. Layers are made
//! without a device or a seed; [`Parameters::build`] then lays every parameter of a model into one arena, gives each its
//! first values, and from there on optimizers see flat slices. No layer knows of ranks or devices.
//!
//! ```
//! use phalanx_nn::{Ctx, Linear, Module, Parameters, module};
//! use phalanx_tensor::{Device, Tensor};
//!
//! module! {
//!     struct Net(width: usize) {
//!         hidden: Linear = Linear::new(4, width),
//!         out: Linear = Linear::new(width, 2),
//!     }
//!
//!     fn forward(&self, x: &Tensor, ctx: &mut Ctx) -> Tensor {
//!         self.out.forward(&self.hidden.forward(x, ctx).relu(), ctx)
//!     }
//! }
//!
//! let mut net = Net::new(8);
//! let device = Device::cpu(1);
//! let parameters = Parameters::build(&mut net, &device, 0);
//! assert_eq!(parameters.names(), ["hidden.weight", "hidden.bias", "out.weight", "out.bias"]);
//! let x = Tensor::ones(&device, [3, 4], phalanx_tensor::DType::F32);
//! assert_eq!(net.forward(&x, &mut Ctx::eval()).dims(), [3, 2]);
//! ```
#![forbid(unsafe_code)]

mod describe;
mod metric;
mod module;
mod param;
mod parameters;
mod row;
mod seam;

mod layers;
mod loss;
pub mod models;

mod average;
mod finite;
pub mod optim;
mod plateau;
mod schedule;
mod shadow;

mod freeze;

mod foreign;
mod pth;
mod weights;

mod head;

pub use average::Average;
pub use finite::NotFinite;
pub use freeze::{BadFreeze, freeze, freeze_all};
pub use layers::activation::{Elu, Gelu, LeakyRelu, LogSoftmax, PRelu, Relu, Sigmoid, Silu, Softplus, Tanh};
pub use layers::conv::{Conv1d, Conv2d, ConvTranspose1d, ConvTranspose2d};
pub use layers::dropout::{Dropout, Dropout2d};
pub use layers::embedding::Embedding;
pub use layers::linear::{Linear, LinearInOut};
pub use layers::norm::{BatchNorm1d, BatchNorm2d, GroupNorm, LayerNorm, RmsNorm};
pub use layers::pair::Pair;
pub use layers::pooling::{AdaptiveAvgPool2d, AvgPool1d, AvgPool2d, MaxPool1d, MaxPool2d, Upsample};
pub use layers::recurrent::{Gru, Lstm, RecurrentConfig};
pub use layers::sequential::{Flatten, Sequential};
pub use layers::transformer::{
    MultiheadAttention, TransformerDecoderLayer, TransformerEncoderLayer, TransformerLayerConfig,
};
pub use loss::{Loss, MeanOver, OwnLoss, WeightedCrossEntropy};
pub use metric::Metric;
pub use module::{CrossEntropyInParts, Ctx, Module, Role, Visitor};
pub use param::{Init, Param};
pub use parameters::{Mismatch, Parameters};
pub use plateau::{Plateau, Plateaued};
pub use row::{Block, Row};
pub use schedule::{Anneal, Curve, Moment, OneCycle, Schedule, Unit, Warmup};
pub use seam::{Cut, Seam, Stretch};
pub use shadow::Shadow;
pub use weights::{WeightError, Weights};

/// What modules compute with.
pub use phalanx_tensor::Tensor;
