//! Layer normalisation. Rows that the threads of a block can hold are read once, forward and back, with what goes along with them: a sum
//! before, a sum of gradients and a cast of it, and the gradients of weight and bias. Wider ones, and those of other numbers, are read
//! again for each of these.

use crate::dtype::DType;
use crate::gpu::Engine;
use crate::gpu::launch::{Arg, check_float, check_single, out_or_null, rows};
use crate::gpu::reduce::{column_parts, columns, pieces};
use crate::tensor::Tensor;
use phalanx_cuda::Work;

/// Rows of a band at least, of which a block finds the gradients of weight and bias, and the most bands: enough to keep a GPU busy, few
/// enough for what they come to.
const BAND: usize = 8;
const MOST_BANDS: usize = 1024;

/// Whether the threads of a block can hold rows of this width.
pub(crate) fn is_held(width: usize) -> bool {
    width > 0 && width.is_multiple_of(Work::IN_BAND as usize) && width <= Work::MOST_IN_BAND as usize
}

/// The kernels of rows of a type that come out in a type.
struct Names {
    forward: &'static str,
    gradient: &'static str,
    columns: &'static str,
    /// Of rows that are held.
    whole: &'static str,
    whole_gradient: &'static str,
}

/// Those of rows of this type that come out as another tensor does.
fn named(rows: &Tensor, out: &Tensor) -> Names {
    if rows.dtype == out.dtype {
        return Names {
            forward: "layer_norm",
            gradient: "layer_norm_gradient",
            columns: "layer_norm_columns",
            whole: "layer_norm_whole",
            whole_gradient: "layer_norm_whole_gradient",
        };
    }
    check_single("layer_norm: rows to be rounded", rows.dtype);
    Names {
        forward: "rounded_layer_norm",
        gradient: "rounded_layer_norm_gradient",
        columns: "rounded_layer_norm_columns",
        whole: "rounded_layer_norm_whole",
        whole_gradient: "rounded_layer_norm_whole_gradient",
    }
}

/// Normalises each row of `width` to mean 0 and variance 1, then scales by `weight` and shifts by `bias` where given; keeps
/// each row's mean and 1/std.
#[track_caller]
pub(crate) fn layer_norm(
    engine: &Engine,
    x: &Tensor,
    weight: Option<&Tensor>,
    bias: Option<&Tensor>,
    eps: f64,
    width: usize,
    outputs: [&Tensor; 3],
) {
    sum_layer_norm(engine, x, None, [weight, bias], eps, width, outputs);
}

/// The same. Rows that are held ([`is_held`]) may have those of a branch added first: then the sums are written, too.
#[track_caller]
pub(crate) fn sum_layer_norm(
    engine: &Engine,
    x: &Tensor,
    branch: Option<(&Tensor, &Tensor)>,
    affine: [Option<&Tensor>; 2],
    eps: f64,
    width: usize,
    [out, mean, scale]: [&Tensor; 3],
) {
    check_float("layer_norm", x.dtype);
    let (n, names) = (mean.count(), named(x, out));
    let [weight, bias] = affine.map(Arg::InOrNull);
    let [out, mean, scale] = [out, mean, scale].map(Arg::Out);
    let rest = [weight, bias, out, mean, scale, Arg::Int(n), Arg::Int(width), Arg::Float(eps)];
    if !is_held(width) {
        assert!(branch.is_none(), "layer_norm: a branch beside rows that no block holds");
        let args = [&[Arg::In(x)], &rest[..]].concat();
        // SAFETY: there are n rows of `width` elements, of which weight and bias have one, mean and scale n.
        return unsafe { engine.launch(names.forward, rows(n, width), &args) };
    }
    let (branch, sums) = (branch.map(|(branch, _)| branch), branch.map(|(_, sums)| sums));
    let args = [&[Arg::In(x), Arg::InOrNull(branch), out_or_null(sums)], &rest[..]].concat();
    // SAFETY: the same, and the branch and the sums have n rows.
    unsafe { engine.launch(names.whole, bands(n, width), &args) }
}

/// Work on so many bands, or rows, that are held.
fn bands(bands: usize, width: usize) -> Work {
    Work::Bands { bands: bands as u64, width: width as u64 }
}

/// What the gradients of a layer norm go to, each where it is wanted.
pub(crate) struct Gradients<'a> {
    /// The gradient of the rows.
    pub(crate) rows: Option<&'a Tensor>,
    /// What is added to it.
    pub(crate) plus: Option<&'a Tensor>,
    /// The sum of both, rounded to the type of the output.
    pub(crate) halves: Option<&'a Tensor>,
    /// The gradients of weight and bias.
    pub(crate) parameters: [Option<&'a Tensor>; 2],
}

/// All gradients of rows that are held, in one go.
#[track_caller]
pub(crate) fn layer_norm_gradients(
    engine: &Engine,
    [x, mean, scale]: [&Tensor; 3],
    weight: Option<&Tensor>,
    grad: &Tensor,
    width: usize,
    to: &Gradients<'_>,
) {
    check_float("layer_norm", x.dtype);
    let (n, names) = (mean.count(), named(x, grad));
    let band = BAND.max(n.div_ceil(MOST_BANDS));
    let n_bands = n.div_ceil(band);
    let parts = to.parameters.map(|out| {
        let out = out?;
        check_single("layer_norm, gradients of weight and bias", out.dtype);
        Some(Tensor::stale(x.device(), [width * n_bands].into(), DType::F32))
    });
    let [of_weight, of_bias] = [0, 1].map(|i| parts[i].as_ref());
    let args = [
        Arg::In(x),
        Arg::InOrNull(weight),
        Arg::In(grad),
        Arg::InOrNull(to.plus),
        Arg::In(mean),
        Arg::In(scale),
        out_or_null(to.rows),
        out_or_null(to.halves),
        out_or_null(of_weight),
        out_or_null(of_bias),
        Arg::Int(n),
        Arg::Int(width),
        Arg::Int(band),
    ];
    // SAFETY: there are n rows of `width` elements, wherever they go to, a mean and a scale for each, and a part for each band of a
    // column.
    unsafe { engine.launch(names.whole_gradient, bands(n_bands, width), &args) };
    if of_weight.or(of_bias).is_some() {
        let [weight, bias] = to.parameters.map(out_or_null);
        let parts = [Arg::InOrNull(of_weight), Arg::InOrNull(of_bias)];
        let args = [parts[0], parts[1], weight, bias, Arg::Int(width), Arg::Int(n_bands)];
        let eight = Work::IN_BAND as usize;
        // SAFETY: where one is wanted there is a part for each band of its columns, and an element for each column.
        unsafe { engine.launch("layer_norm_bands", rows(2 * width / eight, eight * n_bands), &args) }
    }
}

/// `out =` the gradient with respect to the input.
#[track_caller]
pub(crate) fn layer_norm_gradient(
    engine: &Engine,
    [x, mean, scale]: [&Tensor; 3],
    weight: Option<&Tensor>,
    grad: &Tensor,
    width: usize,
    out: &Tensor,
) {
    check_float("layer_norm", x.dtype);
    let n = mean.count();
    let name = named(x, grad).gradient;
    let args = [
        Arg::In(x),
        Arg::InOrNull(weight),
        Arg::In(grad),
        Arg::In(mean),
        Arg::In(scale),
        Arg::Out(out),
        Arg::Int(n),
        Arg::Int(width),
    ];
    // SAFETY: as above.
    unsafe { engine.launch(name, rows(n, width), &args) }
}

/// The gradients of weight and bias, where they are wanted.
#[track_caller]
pub(crate) fn layer_norm_parameter_gradients(
    engine: &Engine,
    [x, mean, scale]: [&Tensor; 3],
    grad: &Tensor,
    weight: Option<&Tensor>,
    bias: Option<&Tensor>,
) {
    let Some(out) = weight.or(bias) else { return };
    check_float("layer_norm", x.dtype);
    let (n, width) = (mean.count(), out.count());
    let [piece, n_pieces] = pieces(n);
    let [of_weight, of_bias] = [0, 1].map(|_| column_parts(x, n, width));
    let inputs = [x, grad, mean, scale].map(Arg::In);
    let sizes = [n, width, piece].map(Arg::Int);
    let outputs = [&of_weight, &of_bias].map(Arg::Out);
    let args =
        [inputs[0], inputs[1], inputs[2], inputs[3], outputs[0], outputs[1], sizes[0], sizes[1], sizes[2]];
    let name = named(x, grad).columns;
    // SAFETY: there are n rows of `width` elements, a mean and a scale for each, and a part for each piece of a column.
    unsafe { engine.launch(name, columns(grad.dtype, n, width), &args) };
    check_single("layer_norm, gradients of weight and bias", out.dtype);
    let outputs = [weight, bias].map(out_or_null);
    let args =
        [Arg::In(&of_weight), Arg::In(&of_bias), outputs[0], outputs[1], Arg::Int(width), Arg::Int(n_pieces)];
    // SAFETY: both have a part for each piece of a column, and what is wanted an element for each column.
    unsafe { engine.launch("layer_norm_parameters", rows(2 * width, n_pieces), &args) };
}
