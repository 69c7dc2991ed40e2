//! Comparisons, and elements that are chosen by a mask or by their places. A place that isn't there gives NaN, or 0 of whole numbers, and
//! whoever reads that is told why ([`Engine::check_indices`]).

use crate::dtype::DType;
use crate::gpu::Engine;
use crate::gpu::launch::{Arg, check_float, elements, walk};
use crate::op::Relation;
use crate::ops::choice::around;
use crate::shape::Shape;
use crate::tensor::Tensor;

/// The kernel for elements of this type: one of floats, or one of whole numbers.
#[track_caller]
fn of_type(op: &str, dtype: DType, [floats, integers]: [&'static str; 2]) -> &'static str {
    if dtype == DType::I64 {
        return integers;
    }
    check_float(op, dtype);
    floats
}

/// `mask`, row-major f32 = 1 where the relation holds between elements of `a` and `b`, which spread to its shape, else 0.
#[track_caller]
pub(crate) fn compare(engine: &Engine, relation: Relation, a: &Tensor, b: &Tensor, mask: &Tensor) {
    let name = of_type("a comparison", a.dtype, ["compare", "compare_integers"]);
    let views = [a, b].map(|x| x.geometry.broadcast_to(*mask.shape()));
    let (walk, n) = (walk(views.each_ref()), mask.count());
    let sizes = [n, relation as usize].map(Arg::Int);
    let args = [Arg::In(a), Arg::In(b), Arg::Out(mask), Arg::Struct(walk.as_bytes()), sizes[0], sizes[1]];
    // SAFETY: the walk goes through the elements of both views; the mask has n without gaps.
    unsafe { engine.launch(name, elements(n), &args) }
}

/// `out`, row-major = `yes` where `mask` isn't 0, else `no`; all three spread to its shape.
#[track_caller]
pub(crate) fn choose(engine: &Engine, mask: &Tensor, yes: &Tensor, no: &Tensor, out: &Tensor) {
    let name = of_type("where_cond", out.dtype, ["choose", "choose_integers"]);
    let views = [mask, yes, no].map(|x| x.geometry.broadcast_to(*out.shape()));
    let (walk, n) = (walk(views.each_ref()), out.count());
    let inputs = [mask, yes, no].map(Arg::In);
    let args = [inputs[0], inputs[1], inputs[2], Arg::Out(out), Arg::Struct(walk.as_bytes()), Arg::Int(n)];
    // SAFETY: the walk goes through the elements of the three views; the output has n without gaps.
    unsafe { engine.launch(name, elements(n), &args) }
}

/// `out` = the elements of `x` along `dim` that `index` says; all contiguous.
#[track_caller]
pub(crate) fn gather(engine: &Engine, x: &Tensor, index: &Tensor, dim: usize, out: &Tensor) {
    let name = of_type("gather", out.dtype, ["gather", "gather_integers"]);
    let ([outer, size, inner], [_, taken, _]) = (around(x.shape(), dim), around(out.shape(), dim));
    let bad = Arg::Bare(engine.bad_index.address());
    let sizes = [outer, size, taken, inner].map(Arg::Int);
    let args = [Arg::In(x), Arg::In(index), Arg::Out(out), bad, sizes[0], sizes[1], sizes[2], sizes[3]];
    // SAFETY: `x` has the product of the sizes without those taken, the others that without its own; and there is one number for what
    // is bad.
    unsafe { engine.launch(name, elements(out.count()), &args) }
}

/// Whoever reads a number is told if one of these, contiguous, is no place along dimension `dim` of this shape.
#[track_caller]
pub(crate) fn check_places(engine: &Engine, _: &str, index: &Tensor, dim: usize, of: &Shape) {
    let (bad, n) = (Arg::Bare(engine.bad_index.address()), index.count());
    // SAFETY: there are n places, and one number for what is bad.
    unsafe {
        engine.launch(
            "check_places",
            elements(n),
            &[Arg::In(index), bad, Arg::Int(n), Arg::Int(of.dims()[dim])],
        )
    }
}

/// `out` = the sum of those elements of the contiguous `grad` that [`gather`] took from each element. Each is looked for among all that
/// were taken of its line, so that the order of the sums is always the same.
#[track_caller]
pub(crate) fn gather_gradient(engine: &Engine, grad: &Tensor, index: &Tensor, dim: usize, out: &Tensor) {
    check_float("gather", out.dtype);
    let ([outer, size, inner], [_, taken, _]) = (around(out.shape(), dim), around(grad.shape(), dim));
    let sizes = [outer, size, taken, inner].map(Arg::Int);
    let bad = Arg::BareIn(engine.bad_index.address());
    let args = [Arg::In(grad), Arg::In(index), Arg::Out(out), bad, sizes[0], sizes[1], sizes[2], sizes[3]];
    // SAFETY: as above.
    unsafe { engine.launch("gather_gradient", elements(out.count()), &args) }
}
