//! The kernels as data: which there are, where, what they take, and how their work is shared out.

use crate::framing::Framing;
use crate::geometry::{Geometry, Share, Work};
use crate::heads::Heads;
use crate::source::Source;
use crate::spread::Spread;
use crate::taps::Taps;
use crate::walk::Walk;
use crate::window::Window;

/// One of our kernels.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Kernel {
    /// Its name in the module.
    pub name: &'static str,
    /// The file that it stands in.
    pub source: Source,
    /// What it takes, in order.
    pub parameters: &'static [Parameter],
    /// How its work is shared out.
    pub share: Share,
}

/// What a kernel takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Parameter {
    /// Memory that it reads.
    Read,
    /// Memory that it reads, or null.
    ReadOrNull,
    /// Memory that it writes.
    Write,
    /// Memory that it writes, or null.
    WriteOrNull,
    /// A whole number of 64 bits.
    Int,
    /// A float32.
    Float,
    /// A float64.
    Double,
    /// A struct of so many bytes.
    Struct(usize),
}

impl Kernel {
    /// The grid of a launch, of at most `most_blocks` blocks; none where there is nothing to do.
    #[track_caller]
    pub fn geometry(&self, work: Work, most_blocks: u32) -> Option<Geometry> {
        assert!(
            work.share() == self.share,
            "{}: work in {:?}, but the kernel shares out {:?}",
            self.name,
            work.share(),
            self.share
        );
        work.geometry(most_blocks)
    }
}

/// The most parameters that one of the kernels has.
pub const MOST_PARAMETERS: usize = {
    let (mut most, mut i) = (0, 0);
    while i < KERNELS.len() {
        let parameters = KERNELS[i].parameters.len();
        most = if parameters > most { parameters } else { most };
        i += 1;
    }
    most
};

/// The kernel of this name. Panics if there is none.
#[track_caller]
pub fn kernel(name: &str) -> &'static Kernel {
    KERNELS
        .iter()
        .find(|kernel| kernel.name == name)
        .unwrap_or_else(|| panic!("kernel: no {name} among them"))
}

const R: Parameter = Parameter::Read;
const R0: Parameter = Parameter::ReadOrNull;
const W: Parameter = Parameter::Write;
const W0: Parameter = Parameter::WriteOrNull;
const N: Parameter = Parameter::Int;
const F: Parameter = Parameter::Float;
const D: Parameter = Parameter::Double;
const WINDOW: Parameter = Parameter::Struct(Window::BYTES);
const HEADS: Parameter = Parameter::Struct(Heads::BYTES);
const FRAMING: Parameter = Parameter::Struct(Framing::BYTES);
const TAPS: Parameter = Parameter::Struct(Taps::BYTES);
const SPREAD: Parameter = Parameter::Struct(Spread::BYTES);
const WALK1: Parameter = Parameter::Struct(size_of::<Walk<1>>());
const WALK2: Parameter = Parameter::Struct(size_of::<Walk<2>>());
const WALK3: Parameter = Parameter::Struct(size_of::<Walk<3>>());

const FUNCTION: &[Parameter] = &[R, W, N, F, F];
const GRADIENT: &[Parameter] = &[R0, R, W, N, F, F];
const ARITHMETIC: &[Parameter] = &[R, R, W, N];
const NORMALISED: &[Parameter] = &[R, R0, R0, W, W, W, N, N, F];
const NORMALISED_GRADIENT: &[Parameter] = &[R, R0, R, R, R, W, N, N];
const NORMALISED_COLUMNS: &[Parameter] = &[R, R, R, R, W, W, N, N, N];
const NORMALISED_WHOLE: &[Parameter] = &[R, R0, W0, R0, R0, W, W, W, N, N, F];
const NORMALISED_WHOLE_GRADIENT: &[Parameter] = &[R, R0, R, R0, R, R, W0, W0, W0, W0, N, N, N];
const OF_VIEWS: &[Parameter] = &[R, R, W, WALK2, N];
const ATTENTION: &[Parameter] = &[R, R, R, W, W, R0, R0, R0, HEADS];
const TO_QUERIES: &[Parameter] = &[R, R, R, R, R, R, W, W, R0, R0, R0, HEADS];
const TO_KEYS: &[Parameter] = &[R, R, R, R, R, R, W, W, R0, R0, R0, HEADS];

const fn convolution(name: &'static str, parameters: &'static [Parameter]) -> Kernel {
    Kernel { name, source: Source::Convolution, parameters, share: Share::Elements }
}

const fn elementwise(name: &'static str, parameters: &'static [Parameter]) -> Kernel {
    Kernel { name, source: Source::Elementwise, parameters, share: Share::Elements }
}

const fn reduce(name: &'static str, parameters: &'static [Parameter], share: Share) -> Kernel {
    Kernel { name, source: Source::Reduce, parameters, share }
}

const fn copy(name: &'static str, parameters: &'static [Parameter], share: Share) -> Kernel {
    Kernel { name, source: Source::Copy, parameters, share }
}

const fn softmax(name: &'static str, parameters: &'static [Parameter]) -> Kernel {
    Kernel { name, source: Source::Softmax, parameters, share: Share::Rows }
}

const fn attention(name: &'static str, parameters: &'static [Parameter]) -> Kernel {
    Kernel { name, source: Source::Attention, parameters, share: Share::Pieces }
}

const fn halves(name: &'static str, parameters: &'static [Parameter]) -> Kernel {
    Kernel { name, source: Source::AttentionHalves, parameters, share: Share::Pieces }
}

const fn choice(name: &'static str, parameters: &'static [Parameter]) -> Kernel {
    Kernel { name, source: Source::Choice, parameters, share: Share::Elements }
}

const fn loss(name: &'static str, parameters: &'static [Parameter], share: Share) -> Kernel {
    Kernel { name, source: Source::Loss, parameters, share }
}

const fn embedding(name: &'static str, parameters: &'static [Parameter], share: Share) -> Kernel {
    Kernel { name, source: Source::Embedding, parameters, share }
}

const fn layer_norm(name: &'static str, parameters: &'static [Parameter], share: Share) -> Kernel {
    Kernel { name, source: Source::LayerNorm, parameters, share }
}

const fn batch_norm(name: &'static str, parameters: &'static [Parameter], share: Share) -> Kernel {
    Kernel { name, source: Source::BatchNorm, parameters, share }
}

const fn pooling(name: &'static str, parameters: &'static [Parameter]) -> Kernel {
    Kernel { name, source: Source::Pooling, parameters, share: Share::Elements }
}

const fn random(name: &'static str, parameters: &'static [Parameter]) -> Kernel {
    Kernel { name, source: Source::Random, parameters, share: Share::Elements }
}

const fn convert(name: &'static str) -> Kernel {
    Kernel { name, source: Source::Convert, parameters: &[R, W, N], share: Share::Elements }
}

/// Of runs that lie apart.
const fn spread(name: &'static str) -> Kernel {
    Kernel { name, source: Source::Convert, parameters: &[R, W, SPREAD, N, N], share: Share::Rows }
}

const fn recurrent(name: &'static str, parameters: &'static [Parameter]) -> Kernel {
    Kernel { name, source: Source::Recurrent, parameters, share: Share::Elements }
}

const fn gradients(name: &'static str, parameters: &'static [Parameter], share: Share) -> Kernel {
    Kernel { name, source: Source::Gradients, parameters, share }
}

const fn rule(name: &'static str, parameters: &'static [Parameter]) -> Kernel {
    Kernel { name, source: Source::Optimizer, parameters, share: Share::Elements }
}

const fn samples(name: &'static str, parameters: &'static [Parameter], share: Share) -> Kernel {
    Kernel { name, source: Source::Samples, parameters, share }
}

/// All kernels.
pub const KERNELS: &[Kernel] = &[
    elementwise("negative", FUNCTION),
    elementwise("negative_gradient", GRADIENT),
    elementwise("exponential", FUNCTION),
    elementwise("exponential_gradient", GRADIENT),
    elementwise("logarithm", FUNCTION),
    elementwise("logarithm_gradient", GRADIENT),
    elementwise("root", FUNCTION),
    elementwise("root_gradient", GRADIENT),
    elementwise("hyperbolic_tangent", FUNCTION),
    elementwise("hyperbolic_tangent_gradient", GRADIENT),
    elementwise("sigmoid", FUNCTION),
    elementwise("sigmoid_gradient", GRADIENT),
    elementwise("relu", FUNCTION),
    elementwise("relu_gradient", GRADIENT),
    elementwise("gelu", FUNCTION),
    elementwise("gelu_gradient", GRADIENT),
    elementwise("gelu_tanh", FUNCTION),
    elementwise("gelu_tanh_gradient", GRADIENT),
    elementwise("silu", FUNCTION),
    elementwise("silu_gradient", GRADIENT),
    elementwise("softplus", FUNCTION),
    elementwise("softplus_gradient", GRADIENT),
    elementwise("leaky_relu", FUNCTION),
    elementwise("leaky_relu_gradient", GRADIENT),
    elementwise("elu", FUNCTION),
    elementwise("elu_gradient", GRADIENT),
    elementwise("sine", FUNCTION),
    elementwise("sine_gradient", GRADIENT),
    elementwise("cosine", FUNCTION),
    elementwise("cosine_gradient", GRADIENT),
    elementwise("absolute", FUNCTION),
    elementwise("absolute_gradient", GRADIENT),
    elementwise("square", FUNCTION),
    elementwise("square_gradient", GRADIENT),
    elementwise("power", FUNCTION),
    elementwise("power_gradient", GRADIENT),
    elementwise("over", FUNCTION),
    elementwise("over_gradient", GRADIENT),
    elementwise("clamp", FUNCTION),
    elementwise("clamp_gradient", GRADIENT),
    elementwise("affine", FUNCTION),
    elementwise("affine_gradient", GRADIENT),
    elementwise("sum", ARITHMETIC),
    elementwise("sum_views", OF_VIEWS),
    elementwise("difference", ARITHMETIC),
    elementwise("difference_views", OF_VIEWS),
    elementwise("product", ARITHMETIC),
    elementwise("product_views", OF_VIEWS),
    elementwise("quotient", ARITHMETIC),
    elementwise("quotient_views", OF_VIEWS),
    elementwise("maximum", ARITHMETIC),
    elementwise("maximum_views", OF_VIEWS),
    elementwise("minimum", ARITHMETIC),
    elementwise("minimum_views", OF_VIEWS),
    elementwise("arithmetic_of_integers", &[R, R, W, WALK2, N, N]),
    elementwise("function_of_integers", &[R, W, N, N, N, N]),
    elementwise("winner_gradient", &[R, R, R, W, WALK3, N, F]),
    elementwise("add_assign", &[W, R, N]),
    elementwise("sum_in_float", ARITHMETIC),
    reduce("sum_by_thread", &[R, W, WALK1, WALK1, N, N], Share::Elements),
    reduce("sum_by_block", &[R, W, WALK1, WALK1, N, N], Share::Rows),
    reduce("sum_pieces", &[R, W, WALK1, WALK1, N, N, N], Share::Rows),
    reduce("sum_parts", &[R, W, N, N, F], Share::Rows),
    reduce("sum_columns", &[R, W, N, N, N], Share::Columns),
    reduce("sum_integers", &[R, W, WALK1, WALK1, N, N, N], Share::Rows),
    reduce("running_sums", &[R, W, N, N, N, N], Share::Elements),
    reduce("running_sums_of_rows", &[R, W, N, N, N], Share::Rows),
    reduce("max_by_thread", &[R, W, W, N, N, N], Share::Elements),
    reduce("max_by_block", &[R, W, W, N, N], Share::Rows),
    reduce("top_by_block", &[R, W, N, N, N], Share::Rows),
    reduce("max_gradient", &[R, R, W, N, N, N], Share::Elements),
    copy("copy_1", &[R, W, WALK2, N], Share::Elements),
    copy("transpose_1", &[R, W, N, N, N], Share::Tiles),
    copy("flip_1", &[R, W, N, N, N], Share::Elements),
    copy("fill_1", &[W, N, N], Share::Elements),
    copy("copy_2", &[R, W, WALK2, N], Share::Elements),
    copy("transpose_2", &[R, W, N, N, N], Share::Tiles),
    copy("flip_2", &[R, W, N, N, N], Share::Elements),
    copy("fill_2", &[W, N, N], Share::Elements),
    copy("copy_4", &[R, W, WALK2, N], Share::Elements),
    copy("transpose_4", &[R, W, N, N, N], Share::Tiles),
    copy("flip_4", &[R, W, N, N, N], Share::Elements),
    copy("fill_4", &[W, N, N], Share::Elements),
    copy("copy_8", &[R, W, WALK2, N], Share::Elements),
    copy("transpose_8", &[R, W, N, N, N], Share::Tiles),
    copy("flip_8", &[R, W, N, N, N], Share::Elements),
    copy("fill_8", &[W, N, N], Share::Elements),
    softmax("softmax", &[R, W, N, N]),
    softmax("log_softmax", &[R, W, N, N]),
    softmax("softmax_gradient", &[R, R, W, N, N]),
    softmax("log_softmax_gradient", &[R, R, W, N, N]),
    attention("attention_64", ATTENTION),
    attention("attention_queries_64", TO_QUERIES),
    attention("attention_keys_64", TO_KEYS),
    attention("attention_128", ATTENTION),
    attention("attention_queries_128", TO_QUERIES),
    attention("attention_keys_128", TO_KEYS),
    attention("attention_256", ATTENTION),
    attention("attention_queries_256", TO_QUERIES),
    attention("attention_keys_256", TO_KEYS),
    halves("halves_attention_64", ATTENTION),
    halves("halves_attention_queries_64", TO_QUERIES),
    halves("halves_attention_keys_64", TO_KEYS),
    halves("halves_attention_plain_64", ATTENTION),
    halves("halves_attention_queries_plain_64", TO_QUERIES),
    halves("halves_attention_keys_plain_64", TO_KEYS),
    halves("halves_attention_128", ATTENTION),
    halves("halves_attention_queries_128", TO_QUERIES),
    halves("halves_attention_keys_128", TO_KEYS),
    halves("halves_attention_plain_128", ATTENTION),
    halves("halves_attention_queries_plain_128", TO_QUERIES),
    halves("halves_attention_keys_plain_128", TO_KEYS),
    choice("compare", &[R, R, W, WALK2, N, N]),
    choice("compare_integers", &[R, R, W, WALK2, N, N]),
    choice("choose", &[R, R, R, W, WALK3, N]),
    choice("choose_integers", &[R, R, R, W, WALK3, N]),
    choice("gather", &[R, R, W, W, N, N, N, N]),
    choice("gather_integers", &[R, R, W, W, N, N, N, N]),
    choice("gather_gradient", &[R, R, W, R, N, N, N, N]),
    choice("check_places", &[R, W, N, N]),
    loss("one_hot", &[R, W, W, N, N, N, N], Share::Elements),
    loss("nll", &[R, R, W, W, N, N], Share::Elements),
    loss("nll_gradient", &[R, R, W, N, N, F], Share::Elements),
    loss("label_places", &[R, R, W, N, N], Share::Rows),
    loss("cross_entropy", &[R, R, W, W, W, N, N, F], Share::Rows),
    loss("cross_entropy_gradient", &[R, R, R, R, W, N, N, F, F], Share::Elements),
    loss("squared_error", &[R, R, W, N, N], Share::Rows),
    loss("squared_error_gradient", &[R, R, R, W, N, F], Share::Elements),
    loss("binary_cross_entropy", &[R, R, W, N, N], Share::Rows),
    loss("binary_cross_entropy_gradient", &[R, R, R, W, N, F], Share::Elements),
    embedding("embedding", &[R, R, W, W, N, N, N, N, N], Share::Elements),
    embedding("embedding_spans", &[R, W, W, N, N, N], Share::Elements),
    embedding("embedding_gradient", &[R, R, R, R, W, N, N, N], Share::Rows),
    layer_norm("layer_norm", NORMALISED, Share::Rows),
    layer_norm("layer_norm_gradient", NORMALISED_GRADIENT, Share::Rows),
    layer_norm("layer_norm_parameters", &[R, R, W0, W0, N, N], Share::Rows),
    layer_norm("layer_norm_columns", NORMALISED_COLUMNS, Share::Columns),
    layer_norm("rounded_layer_norm", NORMALISED, Share::Rows),
    layer_norm("rounded_layer_norm_gradient", NORMALISED_GRADIENT, Share::Rows),
    layer_norm("rounded_layer_norm_columns", NORMALISED_COLUMNS, Share::Columns),
    layer_norm("layer_norm_whole", NORMALISED_WHOLE, Share::Bands),
    layer_norm("layer_norm_whole_gradient", NORMALISED_WHOLE_GRADIENT, Share::Bands),
    layer_norm("rounded_layer_norm_whole", NORMALISED_WHOLE, Share::Bands),
    layer_norm("rounded_layer_norm_whole_gradient", NORMALISED_WHOLE_GRADIENT, Share::Bands),
    layer_norm("layer_norm_bands", &[R0, R0, W0, W0, N, N], Share::Rows),
    batch_norm("batch_moments", &[R, W, W, N, N, N], Share::Columns),
    batch_norm("batch_totals", &[R, R, W, N, N, N], Share::Rows),
    batch_norm("batch_found", &[R, R, W, W, W, W0, W0, N, N, N, D, D], Share::Rows),
    batch_norm("batch_shared", &[R, W, W, W, W0, W0, N, D, D], Share::Elements),
    batch_norm("batch_scales", &[R, W, N, D], Share::Elements),
    batch_norm("batch_normalise", &[R, R, R, R0, R0, R0, W, W0, N, N, N], Share::Elements),
    batch_norm("batch_whole", &[R, R0, R0, R0, W, W, W, W, W0, W0, N, N, N, D, D], Share::WholeColumns),
    batch_norm("batch_sums", &[R, R, R0, R0, R0, R, W, W, N, N, N], Share::Columns),
    batch_norm("merge_sums", &[R, R, W, N, N], Share::Rows),
    batch_norm("batch_channel_gradients", &[R, R, W0, W0, N], Share::Elements),
    batch_norm("batch_factors", &[R, R, R, R0, W, N], Share::Elements),
    batch_norm("batch_gradients_found", &[R, R, R, R0, W0, W0, W, N, N, D], Share::Rows),
    batch_norm("batch_input_gradient", &[R, R, R0, R0, R0, R, R, W, W0, N, N], Share::Elements),
    batch_norm(
        "batch_whole_gradient",
        &[R, R, R0, R0, R, R, R0, W, W0, W0, W0, W, N, N, D],
        Share::WholeColumns,
    ),
    recurrent("lstm_step", &[R, R, W, W, W, N, N, N, N, N]),
    recurrent("lstm_step_gradient", &[R, R, R, R, W, W, N, N, N, N, N]),
    recurrent("gru_step", &[R, R, W, W, N, N, N, N, N]),
    recurrent("gru_step_gradient", &[R, R, R, W, W, W, N, N, N, N, N]),
    pooling("max_pool", &[R, W, W, WINDOW, N]),
    pooling("max_pool_gradient", &[R, R, W, WINDOW, N]),
    pooling("average_pool", &[R, W, WINDOW, N, N]),
    pooling("average_pool_gradient", &[R, W, WINDOW, N, N]),
    pooling("resample", &[R, R, W, N, N, N, N, N]),
    random("uniform", &[W, N, N, D, D, F, N]),
    random("fill_normal", &[W, N, N, D, N]),
    random("normal", &[W, N, N, D, D, N]),
    random("dropout_mask", &[W, R, R, N, N, N, F]),
    random("dropout", &[R, W, R, R, N, N, N, F]),
    convert("from_f32"),
    convert("from_bf16"),
    convert("from_f16"),
    convert("from_f64"),
    convert("to_f64"),
    convert("from_integers"),
    convert("to_integers"),
    spread("spread_from_bf16"),
    spread("spread_from_f16"),
    gradients("find_not_finite", &[R, W, N], Share::Elements),
    gradients("sum_squares", &[R, W, N, N], Share::Rows),
    gradients("norm_of_parts", &[R, W, N], Share::Rows),
    gradients("clip_value", &[W, F, N], Share::Elements),
    rule("sgd", &[W, R, W0, R, R0, D, R0, W0, N]),
    rule("sgd_momentum", &[W, R, W0, W, R, R0, D, R0, W0, N]),
    rule("sgd_nesterov", &[W, R, W0, W, R, R0, D, R0, W0, N]),
    rule("adam", &[W, R, W0, W, W, R, R0, D, R0, W0, N]),
    rule("adamw", &[W, R, W0, W, W, R, R0, D, R0, W0, N]),
    rule("adadelta", &[W, R, W0, W, W, R, R0, D, R0, W0, N]),
    rule("rmsprop", &[W, R, W0, W, W0, W0, R, R0, D, R0, W0, N]),
    rule("follow", &[W, R, F, N]),
    Kernel {
        name: "plain_product",
        source: Source::Product,
        parameters: &[R, R, W, N, N, N, N, N, N, N, N, N, N],
        share: Share::Elements,
    },
    convolution("plain_convolution", &[R, R, W, N, TAPS]),
    convolution("plain_convolution_images", &[R, R, W, N, TAPS]),
    convolution("plain_convolution_kernels", &[R, R, W, N, N, TAPS]),
    samples("sample_images", &[R, R, R, W, FRAMING, N, N], Share::Rows),
    samples("sample_windows", &[R, R, W, W, N, N, N, N, N], Share::Elements),
];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_stand_once() {
        for (i, kernel) in KERNELS.iter().enumerate() {
            assert!(
                KERNELS[..i].iter().all(|other| other.name != kernel.name),
                "{} stands twice",
                kernel.name
            );
        }
    }

    #[test]
    fn work_of_another_kind_is_a_bug() {
        let wrong = std::panic::catch_unwind(|| kernel("relu").geometry(Work::Rows { rows: 1, width: 1 }, 1));
        assert!(wrong.is_err());
    }
}
