//! Sums and largest values along dimensions. Which way a sum is taken depends on sizes alone, and so do its bits.

use crate::dtype::DType;
use crate::gpu::Engine;
use crate::gpu::launch::{Arg, check_float, elements, rows, walk};
use crate::ops::choice::around;
use crate::ops::reduce::Toward;
use crate::shape::{Geometry, Shape};
use crate::tensor::Tensor;
use phalanx_cuda::{Walk, Work};

/// Up to so many terms are added up by one thread.
const FEW: usize = 64;
/// Terms that a block adds up where an output has many.
const PIECE: usize = 1 << 13;
/// Outputs that keep a GPU busy with a block each.
const MANY: usize = 512;
/// Rows of a piece where columns are added up, and the most pieces.
const ROWS: usize = 256;
const MOST_PIECES: usize = 1024;

/// How rows are cut into pieces: how many rows each has, and how many pieces there are.
pub(super) fn pieces(rows: usize) -> [usize; 2] {
    let piece = ROWS.max(rows.div_ceil(MOST_PIECES));
    [piece, rows.div_ceil(piece)]
}

/// `out = sum of x` over the dimensions in which `out` (dimensions kept, row-major) has size 1.
#[track_caller]
pub(crate) fn sum(engine: &Engine, x: &Tensor, out: &Tensor) {
    let n_outputs = out.count();
    let n_terms = x.count() / n_outputs.max(1);
    let is_whole = x.dtype == DType::I64;
    if !is_whole {
        check_float("sum", x.dtype);
    }
    if n_terms > FEW && !is_whole && x.geometry.is_contiguous() && goes_first(x.shape(), out.shape()) {
        return sum_columns(engine, x, [n_terms, n_outputs], out);
    }
    let goes = |d: usize| out.dims()[d] == 1;
    let (outputs, terms) = (part(&x.geometry, |d| !goes(d)), part(&x.geometry, goes));
    let walks = [Arg::Struct(outputs.as_bytes()), Arg::Struct(terms.as_bytes())];
    let sizes = [Arg::Int(n_outputs), Arg::Int(n_terms)];
    let pieces = n_terms.div_ceil(PIECE);
    if is_whole {
        let several = pieces > 1 && n_outputs < MANY;
        let parts = several.then(|| Tensor::stale(x.device(), [n_outputs, pieces].into(), x.dtype));
        let (sums, piece) = (parts.as_ref().unwrap_or(out), if several { PIECE } else { n_terms.max(1) });
        let args = [Arg::In(x), Arg::Out(sums), walks[0], walks[1], sizes[0], sizes[1], Arg::Int(piece)];
        let work = rows(sums.count(), piece);
        // SAFETY: the walks go through the elements of `x`; there is a sum for each piece of an output.
        unsafe { engine.launch("sum_integers", work, &args) };
        return parts.into_iter().for_each(|parts| {
            let column = Geometry::row_major([n_outputs, 1].into());
            sum(engine, &parts, &out.seen_as(Geometry { offset: out.geometry.offset, ..column }));
        });
    }
    if pieces > 1 && n_outputs < MANY {
        let parts = Tensor::stale(x.device(), [n_outputs, pieces].into(), DType::F32);
        let args = [Arg::In(x), Arg::Out(&parts), walks[0], walks[1], sizes[0], sizes[1], Arg::Int(PIECE)];
        // SAFETY: the walks go through the elements of `x`; there is a part for each piece of an output.
        unsafe { engine.launch("sum_pieces", rows(n_outputs * pieces, PIECE), &args) };
        return sum_parts(engine, &parts, [n_outputs, pieces], 1.0, out);
    }
    let (name, work) = match n_terms <= FEW {
        true => ("sum_by_thread", elements(n_outputs)),
        false => ("sum_by_block", rows(n_outputs, n_terms)),
    };
    let args = [Arg::In(x), Arg::Out(out), walks[0], walks[1], sizes[0], sizes[1]];
    // SAFETY: the walks go through the elements of `x`; the row-major output has as many elements as there are outputs.
    unsafe { engine.launch(name, work, &args) }
}

/// Whether the dimensions that go come before those that stay.
fn goes_first(from: &Shape, to: &Shape) -> bool {
    let sizes = || from.dims().iter().zip(to.dims()).filter(|(from, _)| **from != 1);
    sizes().map(|(from, to)| from == to).is_sorted() && sizes().any(|(from, to)| from == to)
}

/// A walk through the dimensions for which `takes` holds.
fn part(geometry: &Geometry, takes: impl Fn(usize) -> bool) -> Walk<1> {
    let dims = (0..geometry.shape.n_dims()).filter(|&d| takes(d));
    let (mut shape, mut strides, mut n) = (Shape::new(&[]), geometry.strides, 0);
    for d in dims {
        shape = shape.insert(n, geometry.shape.dims()[d]);
        strides[n] = geometry.strides[d];
        n += 1;
    }
    walk([&Geometry { shape, strides, offset: 0 }])
}

/// `out[c] =` the sum of column `c` of the contiguous `x`.
#[track_caller]
fn sum_columns(engine: &Engine, x: &Tensor, [n, width]: [usize; 2], out: &Tensor) {
    let [piece, n_pieces] = pieces(n);
    let parts = column_parts(x, n, width);
    let args = [Arg::In(x), Arg::Out(&parts), Arg::Int(n), Arg::Int(width), Arg::Int(piece)];
    // SAFETY: `x` has n rows of `width` elements; there is a part for each piece of a column.
    unsafe { engine.launch("sum_columns", columns(x.dtype, n, width), &args) };
    sum_parts(engine, &parts, [width, n_pieces], 1.0, out);
}

/// The work of finding something of the columns of n rows piece by piece, by a kernel of elements of this type.
pub(super) fn columns(dtype: DType, n: usize, width: usize) -> Work {
    Work::Columns { pieces: pieces(n)[1] as u64, width: width as u64, bytes: dtype.bytes() as u64 }
}

/// Room for a number of each column and piece of n rows, on the device of `like`.
pub(super) fn column_parts(like: &Tensor, n: usize, width: usize) -> Tensor {
    Tensor::stale(like.device(), [width, pieces(n)[1]].into(), DType::F32)
}

/// `out[o] = factor` times the sum of row `o` of `parts` (outputs, pieces) in float32.
#[track_caller]
pub(super) fn sum_parts(engine: &Engine, parts: &Tensor, [n, width]: [usize; 2], factor: f64, out: &Tensor) {
    let args = [Arg::In(parts), Arg::Out(out), Arg::Int(n), Arg::Int(width), Arg::Float(factor)];
    // SAFETY: the parts have n rows of `width` elements, the output n elements.
    unsafe { engine.launch("sum_parts", rows(n, width), &args) }
}

/// `out =` the running sums of `x` along dimension `dim`; both contiguous.
#[track_caller]
pub(crate) fn running_sums(engine: &Engine, x: &Tensor, dim: usize, toward: Toward, out: &Tensor) {
    check_float("cumsum", x.dtype);
    let [outer, size, inner] = around(x.shape(), dim);
    let tensors = [Arg::In(x), Arg::Out(out)];
    let [lines, size_arg, step, backwards] =
        [outer, size, inner, usize::from(toward == Toward::Beginning)].map(Arg::Int);
    // SAFETY: both have the product of the sizes.
    unsafe {
        match inner {
            1 => engine.launch(
                "running_sums_of_rows",
                rows(outer, size),
                &[tensors[0], tensors[1], lines, size_arg, backwards],
            ),
            _ => engine.launch(
                "running_sums",
                elements(outer * inner),
                &[tensors[0], tensors[1], lines, size_arg, step, backwards],
            ),
        }
    }
}

/// For each row of `width` elements of the contiguous `x`: the largest, and where the first of them stands.
#[track_caller]
pub(crate) fn max_rows(engine: &Engine, x: &Tensor, width: usize, largest: &Tensor, index: &Tensor) {
    check_float("max", x.dtype);
    let n = largest.count();
    let [values, best, places] = [Arg::In(x), Arg::Out(largest), Arg::Out(index)];
    let [n_rows, size] = [n, width].map(Arg::Int);
    // SAFETY: `x` has n rows of `width` elements, the outputs n elements.
    unsafe {
        if width <= FEW {
            let args = [values, best, places, n_rows, size, Arg::Int(1)];
            engine.launch("max_by_thread", elements(n), &args);
        } else {
            engine.launch("max_by_block", rows(n, width), &[values, best, places, n_rows, size]);
        }
    }
}

/// Where the largest of each row of the contiguous `x` (rows, width) stand, the largest first: `index` is (rows, as many as are wanted).
#[track_caller]
pub(crate) fn top_rows(engine: &Engine, x: &Tensor, index: &Tensor) {
    check_float("topk", x.dtype);
    let ([n, width], wanted) = ([x.dims()[0], x.dims()[1]], index.dims()[1]);
    let args = [Arg::In(x), Arg::Out(index), Arg::Int(n), Arg::Int(width), Arg::Int(wanted)];
    // SAFETY: `x` has n rows of `width` elements, the index n rows of those that are wanted, which are no more than `width`.
    unsafe { engine.launch("top_by_block", rows(n, width), &args) }
}

/// `out =` each element of `grad` where `index` says along `dim`, and 0 elsewhere; both have size 1 there.
#[track_caller]
pub(crate) fn max_gradient(engine: &Engine, grad: &Tensor, index: &Tensor, dim: usize, out: &Tensor) {
    check_float("max, gradient", out.dtype);
    let grad = grad.contiguous();
    let (outer, inner) = (out.dims()[..dim].iter().product(), out.dims()[dim + 1..].iter().product());
    let sizes = [outer, out.dims()[dim], inner].map(Arg::Int);
    let args = [Arg::In(&grad), Arg::In(index), Arg::Out(out), sizes[0], sizes[1], sizes[2]];
    // SAFETY: the output has the product of the sizes, the others that without the middle one.
    unsafe { engine.launch("max_gradient", elements(out.count()), &args) }
}
