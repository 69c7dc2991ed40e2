//! The op table: every operation that can stand in a graph, with what its gradient needs to know beside saved values.
//! Its counterpart, row for row, is [`crate::gradient`].

use crate::cpu::conv;
use crate::dtype::DType;
use crate::ops::attention::Sight;
use crate::ops::choice::whole;
use crate::ops::reduce::Toward;
use crate::shape::{MAX_DIMS, Order, Shape};

/// One recorded operation. Where a variant says "saves", that is the content of the node's saved values, in order.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Op {
    /// Elementwise function of one tensor; saves its input or its output, see [`Unary::keeps_output`].
    Unary(Unary),
    /// `a + b`, with the shapes before broadcasting.
    Add(Shape, Shape),
    /// `a + b`, of one shape, where a is f32 and b of this type of 16 bits.
    AddHalf(DType),
    /// `a - b`, with the shapes before broadcasting.
    Sub(Shape, Shape),
    /// `a * b`; saves a where b wants a gradient, b where a does.
    Mul(Shape, Shape),
    /// `a / b`; saves b, and the quotient where b wants a gradient.
    Div(Shape, Shape),
    /// The larger of each pair; saves a, b. A tie gives each half, as in PyTorch.
    Maximum(Shape, Shape),
    /// The smaller of each pair; saves a, b.
    Minimum(Shape, Shape),
    /// Sum over some dimensions; the shape before, and the shape after with those dimensions kept as 1.
    Sum { from: Shape, kept: Shape },
    /// Largest along `dim`; saves the indices of the largest, with the dimension kept.
    Max { from: Shape, dim: usize },
    /// One of two by a mask, with their shapes before broadcasting; saves the mask.
    Choose(Shape, Shape),
    /// Elements along `dim`; saves where they stand.
    Gather { from: Shape, dim: usize },
    /// Sums of elements by their places along `dim`; saves the places.
    Scatter { dim: usize },
    /// Running sums along `dim`.
    RunningSum { dim: usize },
    /// Another shape over the same row-major elements.
    Reshape(Shape),
    /// Dimensions in another order; holds the order that leads back.
    Permute([u8; MAX_DIMS]),
    /// A stretch of one dimension.
    Narrow { from: Shape, dim: usize, start: usize },
    /// One dimension from its end to its beginning.
    Flip { dim: usize },
    /// The middle of one dimension, `len` from `start` on, with something else around it.
    Pad { dim: usize, start: usize, len: usize },
    /// Repetition along dimensions of size 1 or missing ones.
    Broadcast(Shape),
    /// The same values in another order in memory.
    Arrange,
    /// The same values on another device.
    To,
    /// The same values in another type than this one.
    Cast(DType),
    /// A linear map that somebody else knows both directions of.
    Across,
    /// A part of the computation that is made once more; saves where it begins.
    Again,
    /// Two tensors one after the other along `dim`; the second starts at `middle`.
    Cat { dim: usize, middle: usize },
    /// Matrix product of the last two dimensions, with the shapes of both sides; saves a where b wants a gradient, b where
    /// a does.
    Matmul(Shape, Shape),
    /// `x w^T + b`, with the shapes of x and w; saves x where w wants a gradient, w where x does, and then
    /// what x is made of beside what stands in its place, if it isn't kept.
    Linear(Shape, Shape),
    /// `x w + b`, with the shapes of x and w; saves as [`Op::Linear`].
    LinearInOut(Shape, Shape),
    /// `gelu_tanh(x) w + b`, with the shapes of x and w, on a GPU, where GELU is part of products; saves gelu_tanh(x) where w wants a
    /// gradient, w and x where x does.
    GeluLinearInOut(Shape, Shape),
    /// Cross-correlation of images with kernels, plus bias; saves x, w.
    Conv2d(Conv2dOptions),
    /// The transposed map of that from outputs to images, without a bias; saves x, w.
    ConvTranspose2d(Conv2dOptions),
    /// A long short-term memory along the first dimension, from what inputs add to its gates, the weight, the hidden state and the cell;
    /// saves the states, the weight, the gates and the cells.
    Lstm { toward: Toward },
    /// A gated recurrent unit, of the same but for a bias in the place of the hidden state, and the state; saves the states, the weight and the
    /// gates.
    Gru { toward: Toward },
    /// Largest of each window; saves the position of the largest in its window, which lies in `order` as the image does.
    MaxPool2d { from: Shape, order: Order, options: PoolOptions },
    /// Mean of each window.
    AvgPool2d { from: Shape, options: PoolOptions, padding: CountPadding },
    /// Sums of elements along `dim` by a table; saves the table turned round.
    Resample { from: Shape, dim: usize },
    /// Softmax along `dim`; saves the output.
    Softmax { dim: usize },
    /// Logarithm of softmax along `dim`; saves the output.
    LogSoftmax { dim: usize },
    /// Mean negative log likelihood; saves the labels.
    NllLoss { from: Shape },
    /// Mean cross entropy of logits; saves their log-softmax and the labels, or on a GPU the logits, the labels, and what is taken from
    /// each row of logits to make it its log-softmax.
    CrossEntropy { label_smoothing: f64 },
    /// Mean squared error; saves both sides.
    MseLoss,
    /// Mean binary cross entropy of logits; saves logits and targets.
    BceWithLogits,
    /// Rows of a table; saves the row numbers.
    Embedding { table: Shape, start: usize },
    /// Attention of several heads, whose shares are dropped with this probability; saves queries, keys and values where they are one tensor, else
    /// the queries, then the output, each query's logarithm of the sum of the exponentials of its scores, where shares are dropped the
    /// key's words and the samples' numbers, where keys are hidden the mask, and keys and values where they are tensors of their own. The
    /// first head is number `first` of those that have masks.
    Attention { sight: Sight, first: usize, dropout: f64 },
    /// Each element dropped with this probability, by a mask that is made where it is needed; saves the key's words and the samples'
    /// numbers.
    Dropout { p: f64 },
    /// Normalisation over the last dimensions, rounded to a type; saves x, weight, each row's mean and 1/std, and bias.
    LayerNorm { row: usize, n_dims: usize, eps: f64, dtype: DType },
    /// Normalisation of groups of a sample's channels, of so many channels of so many pixels each, on a CPU; saves x, weight, each group's mean
    /// and 1/std.
    GroupNorm { sizes: [usize; 2] },
    /// Normalisation of each channel over the batch and its pixels, then possibly a sum with another tensor and a ReLU; saves
    /// x, weight, each channel's mean and 1/std, and where there is a ReLU the output, or bits of what it passes on.
    BatchNorm {
        /// How many values a channel has, if mean and deviation are the batch's own, and so have gradients; none if they
        /// were given, or are those of a shared batch.
        count: Option<f64>,
        /// Whether a ReLU follows.
        relu: bool,
    },
}

/// Elementwise functions of one tensor.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Unary {
    /// -x
    Neg,
    /// e^x
    Exp,
    /// Natural logarithm.
    Ln,
    /// Square root.
    Sqrt,
    /// Hyperbolic tangent.
    Tanh,
    /// 1 / (1 + e^-x)
    Sigmoid,
    /// max(x, 0)
    Relu,
    /// x times the normal distribution function of x, exactly (by erf), as PyTorch's default.
    Gelu,
    /// x times an approximation of that by tanh, as GPT-2 has it.
    GeluTanh,
    /// x / (1 + e^-x)
    Silu,
    /// ln(1 + e^x)
    Softplus,
    /// x, or below 0 this multiple of it.
    LeakyRelu(f64),
    /// x, or below 0 this multiple of e^x - 1.
    Elu(f64),
    /// Sine of an angle in radians.
    Sin,
    /// Cosine of an angle in radians.
    Cos,
    /// |x|
    Abs,
    /// x^2
    Square,
    /// x^p
    Powf(f64),
    /// x / d: not x * (1 / d), which rounds twice.
    Over(f64),
    /// mul * x + add
    Affine { mul: f64, add: f64 },
    /// x, or the bound beyond which it lies.
    Clamp { least: f64, most: f64 },
}

impl Unary {
    /// Whether the gradient is a function of neither the input nor the output.
    pub(crate) fn keeps_nothing(self) -> bool {
        matches!(self, Unary::Neg | Unary::Over(_) | Unary::Affine { .. })
    }

    /// Whether regions compute it in f32 ([`crate::autocast`]): powers, exponentials and logarithms.
    pub(crate) fn is_steep(self) -> bool {
        matches!(self, Unary::Exp | Unary::Ln | Unary::Square | Unary::Powf(_) | Unary::Softplus)
    }

    /// Whether the gradient is a function of the output rather than of the input.
    pub(crate) fn keeps_output(self) -> bool {
        matches!(self, Unary::Exp | Unary::Sqrt | Unary::Tanh | Unary::Sigmoid | Unary::Relu)
    }
}

/// Those of whole numbers.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum WholeUnary {
    /// mul * x + add
    Affine { mul: i64, add: i64 },
    /// x, or the bound beyond which it lies.
    Clamp { least: i64, most: i64 },
    /// |x|
    Abs,
    /// x^2
    Square,
}

impl Unary {
    /// The same of whole numbers. Panics unless that gives whole numbers.
    #[track_caller]
    pub(crate) fn of_whole_numbers(self) -> WholeUnary {
        let number = |x: f64| whole(DType::I64, x);
        match self {
            Unary::Neg => WholeUnary::Affine { mul: -1, add: 0 },
            Unary::Affine { mul, add } => WholeUnary::Affine { mul: number(mul), add: number(add) },
            // A bound may be none.
            Unary::Clamp { least, most } => {
                let [least, most] =
                    [least, most].map(|bound| if bound.is_infinite() { bound as i64 } else { number(bound) });
                WholeUnary::Clamp { least, most }
            }
            Unary::Abs => WholeUnary::Abs,
            Unary::Square => WholeUnary::Square,
            other => {
                let what = match other {
                    Unary::Over(by) => format!("a quotient by {by}, as a mean is one,"),
                    other => format!("{other:?}"),
                };
                panic!(
                    "{what} of a tensor of i64 would give fractions: cast it to floats first (`floor_div` divides whole numbers)"
                )
            }
        }
    }
}

/// Elementwise functions of two tensors. Kernels of whole numbers know them by their places here.
#[derive(Clone, Copy)]
pub(crate) enum Binary {
    Add,
    Sub,
    Mul,
    Div,
    Maximum,
    Minimum,
    /// The whole part of a quotient of whole numbers, rounded down.
    FloorDiv,
    /// What is left of it: a number between 0 and the divisor, whose sign it has.
    Remainder,
}

/// What may hold between two numbers; nothing holds of a NaN.
#[derive(Clone, Copy)]
pub(crate) enum Relation {
    Less,
    AtMost,
    Equal,
}

/// Which of the two a kernel computes: softmax, or its logarithm.
#[derive(Clone, Copy, PartialEq)]
pub(crate) enum Form {
    Softmax,
    LogSoftmax,
}

/// How a convolution moves over its image; (height, width) each.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Conv2dOptions {
    /// Pixels from one output to the next.
    pub stride: [usize; 2],
    /// Zeros added on each side.
    pub padding: [usize; 2],
    /// Pixels between the taps of a kernel.
    pub dilation: [usize; 2],
    /// Input and output channels fall into this many groups that don't see each other.
    pub groups: usize,
}

impl Default for Conv2dOptions {
    /// Stride 1, no padding, no dilation, one group.
    fn default() -> Self {
        Conv2dOptions { stride: [1, 1], padding: [0, 0], dilation: [1, 1], groups: 1 }
    }
}

impl Conv2dOptions {
    /// The order in which kernels between so many (input, output) channels in so many groups should lie, so that they needn't
    /// be brought into another for each convolution of a batch.
    pub fn kernel_order([inputs, outputs]: [usize; 2], groups: usize) -> Order {
        conv::kernel_order([inputs, outputs], groups)
    }
}

/// How a pooling window moves over its image; (height, width) each.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PoolOptions {
    /// Size of the window.
    pub kernel: [usize; 2],
    /// Pixels from one window to the next.
    pub stride: [usize; 2],
    /// Pixels added on each side: never the largest in max-pooling, zero in average pooling.
    pub padding: [usize; 2],
}

impl PoolOptions {
    /// Windows of k x k that touch but don't overlap.
    pub fn square(k: usize) -> PoolOptions {
        PoolOptions { kernel: [k, k], stride: [k, k], padding: [0, 0] }
    }
}

/// Whether average pooling divides by the whole window or by the pixels inside the image.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CountPadding {
    /// Divide by the size of the window, as PyTorch does unless told otherwise.
    Yes,
    /// Divide by the number of pixels of the image in the window.
    No,
}
