//! Layer normalisation.

use crate::gpu::Engine;
use crate::gpu::launch::{Arg, check_float, check_single, rows};
use crate::gpu::reduce::{column_parts, columns, pieces};
use crate::tensor::Tensor;

/// The kernels of rows of this type that come out as another tensor does: forward, and the gradients of rows and of parameters.
fn named(rows: &Tensor, out: &Tensor) -> [&'static str; 3] {
    if rows.dtype == out.dtype {
        ["layer_norm", "layer_norm_gradient", "layer_norm_columns"]
    } else {
        check_single("layer_norm: rows to be rounded", rows.dtype);
        ["rounded_layer_norm", "rounded_layer_norm_gradient", "rounded_layer_norm_columns"]
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
    [out, mean, scale]: [&Tensor; 3],
) {
    check_float("layer_norm", x.dtype);
    let n = mean.count();
    let [name, ..] = named(x, out);
    let args = [
        Arg::In(x),
        Arg::InOrNull(weight),
        Arg::InOrNull(bias),
        Arg::Out(out),
        Arg::Out(mean),
        Arg::Out(scale),
        Arg::Int(n),
        Arg::Int(width),
        Arg::Float(eps),
    ];
    // SAFETY: there are n rows of `width` elements, of which weight and bias have one, mean and scale n.
    unsafe { engine.launch(name, rows(n, width), &args) }
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
    let [_, name, _] = named(x, grad);
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
    let [.., name] = named(x, grad);
    // SAFETY: there are n rows of `width` elements, a mean and a scale for each, and a part for each piece of a column.
    unsafe { engine.launch(name, columns(grad.dtype, n, width), &args) };
    check_single("layer_norm, gradients of weight and bias", out.dtype);
    let outputs = [weight, bias].map(|out| out.map_or(Arg::InOrNull(None), Arg::Out));
    let args =
        [Arg::In(&of_weight), Arg::In(&of_bias), outputs[0], outputs[1], Arg::Int(width), Arg::Int(n_pieces)];
    // SAFETY: both have a part for each piece of a column, and what is wanted an element for each column.
    unsafe { engine.launch("layer_norm_parameters", rows(2 * width, n_pieces), &args) };
}
