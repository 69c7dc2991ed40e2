//! Functions of one and of two tensors, and their gradients.

use crate::dtype::DType;
use crate::gpu::Engine;
use crate::gpu::launch::{Arg, check_float, check_single, elements, walk};
use crate::op::{Binary, Unary, WholeUnary};
use crate::shape::{Geometry, Order};
use crate::tensor::Tensor;

/// The kernel of a function and that of its gradient, and the function's constants.
fn named(f: Unary) -> ([&'static str; 2], [f64; 2]) {
    let none = [0.0; 2];
    match f {
        Unary::Neg => (["negative", "negative_gradient"], none),
        Unary::Exp => (["exponential", "exponential_gradient"], none),
        Unary::Ln => (["logarithm", "logarithm_gradient"], none),
        Unary::Sqrt => (["root", "root_gradient"], none),
        Unary::Tanh => (["hyperbolic_tangent", "hyperbolic_tangent_gradient"], none),
        Unary::Sigmoid => (["sigmoid", "sigmoid_gradient"], none),
        Unary::Relu => (["relu", "relu_gradient"], none),
        Unary::Gelu => (["gelu", "gelu_gradient"], none),
        Unary::GeluTanh => (["gelu_tanh", "gelu_tanh_gradient"], none),
        Unary::Silu => (["silu", "silu_gradient"], none),
        Unary::Softplus => (["softplus", "softplus_gradient"], none),
        Unary::LeakyRelu(slope) => (["leaky_relu", "leaky_relu_gradient"], [slope, 0.0]),
        Unary::Elu(alpha) => (["elu", "elu_gradient"], [alpha, 0.0]),
        Unary::Sin => (["sine", "sine_gradient"], none),
        Unary::Cos => (["cosine", "cosine_gradient"], none),
        Unary::Abs => (["absolute", "absolute_gradient"], none),
        Unary::Square => (["square", "square_gradient"], none),
        Unary::Powf(p) => (["power", "power_gradient"], [p, p - 1.0]),
        Unary::Over(d) => (["over", "over_gradient"], [d, 0.0]),
        Unary::Clamp { least, most } => (["clamp", "clamp_gradient"], [least, most]),
        Unary::Affine { mul, add } => (["affine", "affine_gradient"], [mul, add]),
    }
}

/// `out = f(x)`; both lie in one order without gaps.
#[track_caller]
pub(crate) fn unary(engine: &Engine, f: Unary, x: &Tensor, out: &Tensor) {
    let n = out.count();
    if out.dtype == DType::I64 {
        let (f, [a, b]) = match f.of_whole_numbers() {
            WholeUnary::Affine { mul, add } => (0, [mul, add]),
            WholeUnary::Clamp { least, most } => (1, [least, most]),
            WholeUnary::Abs => (2, [0; 2]),
            WholeUnary::Square => (3, [0; 2]),
        };
        let args = [Arg::In(x), Arg::Out(out), Arg::Int(n), Arg::Int(f), Arg::Bits(a), Arg::Bits(b)];
        // SAFETY: as below.
        return unsafe { engine.launch("function_of_integers", elements(n), &args) };
    }
    let ([name, _], [a, b]) = named(f);
    check_float(name, out.dtype);
    let args = [Arg::In(x), Arg::Out(out), Arg::Int(n), Arg::Float(a), Arg::Float(b)];
    // SAFETY: both have n elements without gaps.
    unsafe { engine.launch(name, elements(n), &args) }
}

/// `out = grad * f'`, with f' told from the kept value: the output for those that keep it, else the input. All lie in one order
/// without gaps.
#[track_caller]
pub(crate) fn unary_gradient(engine: &Engine, f: Unary, kept: &Tensor, grad: &Tensor, out: &Tensor) {
    let ([_, name], [a, b]) = named(f);
    check_float(name, out.dtype);
    let n = out.count();
    let kept = (!f.keeps_nothing()).then_some(kept);
    let constants = [Arg::Float(a), Arg::Float(b)];
    let args = [Arg::InOrNull(kept), Arg::In(grad), Arg::Out(out), Arg::Int(n), constants[0], constants[1]];
    // SAFETY: all have n elements without gaps.
    unsafe { engine.launch(name, elements(n), &args) }
}

/// `out = f(a, b)`; `a` and `b` broadcast to the shape of `out`, which has no gaps.
#[track_caller]
pub(crate) fn binary(engine: &Engine, f: Binary, a: &Tensor, b: &Tensor, out: &Tensor) {
    let (shape, n, order) = (*out.shape(), out.count(), out.dense_order());
    let (ga, gb) = (a.geometry.broadcast_to(shape), b.geometry.broadcast_to(shape));
    if out.dtype == DType::I64 {
        return of_integers(engine, f, [(a, &ga), (b, &gb)], out);
    }
    let [name, of_views] = match f {
        Binary::Add => ["sum", "sum_views"],
        Binary::Sub => ["difference", "difference_views"],
        Binary::Mul => ["product", "product_views"],
        Binary::Div => ["quotient", "quotient_views"],
        Binary::Maximum => ["maximum", "maximum_views"],
        Binary::Minimum => ["minimum", "minimum_views"],
        Binary::FloorDiv | Binary::Remainder => unreachable!("of whole numbers alone"),
    };
    check_float(name, out.dtype);
    if a.dtype != b.dtype {
        return sum_in_float(engine, f, [a, b], out);
    }
    if ga.lies_in(order) && gb.lies_in(order) {
        let args = [Arg::In(a), Arg::In(b), Arg::Out(out), Arg::Int(n)];
        // SAFETY: all have n elements without gaps.
        return unsafe { engine.launch(name, elements(n), &args) };
    }
    if order != Order::RowMajor {
        // Seldom: operands that lie in different orders.
        let rows = Tensor::stale(out.device(), shape, out.dtype);
        binary(engine, f, a, b, &rows);
        return out.copy_from(&rows);
    }
    let walk = walk([&ga, &gb]);
    let args = [Arg::In(a), Arg::In(b), Arg::Out(out), Arg::Struct(walk.as_bytes()), Arg::Int(n)];
    // SAFETY: the walk goes through the elements of both views; the output has n without gaps.
    unsafe { engine.launch(of_views, elements(n), &args) }
}

/// The same of whole numbers: tensors with how they spread to the shape of `out`.
#[track_caller]
fn of_integers(engine: &Engine, f: Binary, [a, b]: [(&Tensor, &Geometry); 2], out: &Tensor) {
    assert!(
        !matches!(f, Binary::Div),
        "div: a quotient of whole numbers may be none: cast to floats, or `floor_div`"
    );
    if out.dense_order() != Order::RowMajor {
        let rows = Tensor::stale(out.device(), *out.shape(), out.dtype);
        of_integers(engine, f, [a, b], &rows);
        return out.copy_from(&rows);
    }
    let (walk, n) = (walk([a.1, b.1]), out.count());
    let walk = Arg::Struct(walk.as_bytes());
    let args = [Arg::In(a.0), Arg::In(b.0), Arg::Out(out), walk, Arg::Int(n), Arg::Int(f as usize)];
    // SAFETY: the walk goes through the elements of both views; the output has n without gaps.
    unsafe { engine.launch("arithmetic_of_integers", elements(n), &args) }
}

/// `out = a + b`, of f32 and of 16 bits, in f32; all have one shape.
#[track_caller]
fn sum_in_float(engine: &Engine, f: Binary, [a, b]: [&Tensor; 2], out: &Tensor) {
    assert!(matches!(f, Binary::Add), "tensors of {} and {} are only added as they are", a.dtype, b.dtype);
    check_single("sum of two types", a.dtype);
    check_single("sum of two types", out.dtype);
    let (order, n) = (out.dense_order(), out.count());
    let [a, b] = [a, b].map(|x| x.detach().arranged(order));
    let args = [Arg::In(&a), Arg::In(&b), Arg::Out(out), Arg::Int(n)];
    // SAFETY: all have n elements without gaps.
    unsafe { engine.launch("sum_in_float", elements(n), &args) }
}

/// `out = grad` where `mine` beats `other` or either is NaN, half of it at a tie, else 0. `sign` is 1 for a maximum, -1 for a
/// minimum; `out` is row-major.
#[track_caller]
pub(crate) fn winner_gradient(
    engine: &Engine,
    mine: &Tensor,
    other: &Tensor,
    grad: &Tensor,
    sign: f64,
    out: &Tensor,
) {
    check_float("winner_gradient", out.dtype);
    let (shape, n) = (*out.shape(), out.count());
    let views = [mine, other, grad].map(|view| view.geometry.broadcast_to(shape));
    let walk = walk(views.each_ref());
    let inputs = [mine, other, grad].map(Arg::In);
    let args = [
        inputs[0],
        inputs[1],
        inputs[2],
        Arg::Out(out),
        Arg::Struct(walk.as_bytes()),
        Arg::Int(n),
        Arg::Float(sign),
    ];
    // SAFETY: the walk goes through the elements of the views; the output has n without gaps.
    unsafe { engine.launch("winner_gradient", elements(n), &args) }
}

/// `sum += x`; both lie in one order without gaps.
#[track_caller]
pub(crate) fn add_assign(engine: &Engine, sum: &Tensor, x: &Tensor) {
    check_float("add_assign", sum.dtype);
    let n = sum.count();
    // SAFETY: both have n elements without gaps.
    unsafe { engine.launch("add_assign", elements(n), &[Arg::Out(sum), Arg::In(x), Arg::Int(n)]) }
}
