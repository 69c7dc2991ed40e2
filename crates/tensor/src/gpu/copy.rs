//! Copies between views, and fills.

use crate::dtype::{DType, Element as _};
use crate::gpu::Engine;
use crate::gpu::launch::{Arg, element, elements, rows, walk};
use crate::gpu::transfer::place;
use crate::ops::choice::around;
use crate::shape::Order;
use crate::tensor::Tensor;
use half::{bf16, f16};
use phalanx_cuda::{Address, Run, Spread, Work};

/// The kernels for elements of so many bytes: a copy, a transposition, a dimension from its end, a fill.
fn named(dtype: DType) -> [&'static str; 4] {
    match dtype.bytes() {
        1 => ["copy_1", "transpose_1", "flip_1", "fill_1"],
        2 => ["copy_2", "transpose_2", "flip_2", "fill_2"],
        4 => ["copy_4", "transpose_4", "flip_4", "fill_4"],
        _ => ["copy_8", "transpose_8", "flip_8", "fill_8"],
    }
}

/// The fewest rows and columns of a matrix that is transposed tile by tile.
const LEAST_SIDE: usize = 8;

/// Sets every element of the dense `out`.
#[track_caller]
pub(crate) fn fill(engine: &Engine, out: &Tensor, value: f64) {
    let bits = match out.dtype {
        DType::F32 => i64::from((value as f32).to_bits()),
        DType::F64 => value.to_bits() as i64,
        DType::BF16 => i64::from(bf16::from_f32(value as f32).to_bits()),
        DType::F16 => i64::from(f16::from_f32(value as f32).to_bits()),
        DType::I64 => i64::from_f64(value),
        DType::U8 => i64::from(u8::from_f64(value)),
    };
    let [.., name] = named(out.dtype);
    let args = [Arg::Out(out), Arg::Bits(bits), Arg::Int(out.count())];
    // SAFETY: as many elements as the dense tensor has are written.
    unsafe { engine.launch(name, elements(out.count()), &args) }
}

/// Fills `out` with the elements of `from`, which has the same shape and dtype. Either may be any view.
#[track_caller]
pub(crate) fn copy(engine: &Engine, from: &Tensor, out: &Tensor) {
    let n = out.count();
    if n == 0 {
        return;
    }
    let (from_order, order) = (from.order(), out.order());
    if from_order.is_some() && order.is_some_and(|order| from.geometry.lies_in(order)) {
        return copy_bytes(engine, from, out);
    }
    let [copy, transpose, ..] = named(out.dtype);
    if let (Some(from_order), Some(order), &[images, channels, h, w]) = (from_order, order, out.dims()) {
        let sizes = match (from_order, order) {
            (Order::RowMajor, Order::ChannelsLast) => Some([channels, h * w]),
            (Order::ChannelsLast, Order::RowMajor) => Some([h * w, channels]),
            _ => None,
        };
        // Of few channels, as images from files have, a tile would be next to empty.
        if let Some([rows, columns]) = sizes.filter(|sizes| sizes.iter().all(|&side| side >= LEAST_SIDE)) {
            let work = Work::Tiles { matrices: images as u64, rows: rows as u64, columns: columns as u64 };
            let sizes = [images, rows, columns].map(Arg::Int);
            let args = [Arg::In(from), Arg::Out(out), sizes[0], sizes[1], sizes[2]];
            // SAFETY: both are dense and have images * rows * columns elements.
            return unsafe { engine.launch(transpose, work, &args) };
        }
    }
    let walk = walk([&from.geometry, &out.geometry]);
    let args = [Arg::In(from), Arg::Out(out), Arg::Struct(walk.as_bytes()), Arg::Int(n)];
    // SAFETY: the walk goes through the elements of both views.
    unsafe { engine.launch(copy, elements(n), &args) }
}

/// `out` = `from` with dimension `dim` from its end to its beginning; both contiguous.
#[track_caller]
pub(crate) fn flip(engine: &Engine, from: &Tensor, dim: usize, out: &Tensor) {
    let ([.., flip, _], [outer, size, inner]) = (named(out.dtype), around(from.shape(), dim));
    let sizes = [outer, size, inner].map(Arg::Int);
    let args = [Arg::In(from), Arg::Out(out), sizes[0], sizes[1], sizes[2]];
    // SAFETY: both have outer * size * inner elements.
    unsafe { engine.launch(flip, elements(out.count()), &args) }
}

/// Fills `out` with the elements of `from` in its own type, each rounded once; both lie in one order without gaps.
#[track_caller]
pub(crate) fn convert(engine: &Engine, from: &Tensor, out: &Tensor) {
    let (name, module) = conversion(from.dtype, out.dtype);
    let n = out.count();
    // SAFETY: both have n elements without gaps, of the kernel's types.
    unsafe {
        engine.launch_for(element(module), name, elements(n), &[Arg::In(from), Arg::Out(out), Arg::Int(n)])
    }
}

/// The kernel that converts floats, and the type of its module.
#[track_caller]
fn conversion(from: DType, to: DType) -> (&'static str, DType) {
    match (from, to) {
        (DType::I64, _) => ("from_integers", to),
        (_, DType::I64) => ("to_integers", from),
        (_, DType::F64) => ("to_f64", from),
        (DType::F32, _) => ("from_f32", to),
        (DType::BF16, _) => ("from_bf16", to),
        (DType::F16, _) => ("from_f16", to),
        (DType::F64, _) => ("from_f64", to),
        (DType::U8, _) => panic!("cast: from {from} to {to}: floats and i64 are cast to each other"),
    }
}

/// As [`convert`] each of these pairs, from a float of 16 bits to f32, as many with a launch as one takes.
#[track_caller]
pub(crate) fn convert_all(engine: &Engine, pairs: &[(Tensor, Tensor)]) {
    let of_one_type = pairs.chunk_by(|a, b| a.0.dtype == b.0.dtype);
    for pairs in of_one_type.flat_map(|pairs| pairs.chunks(Spread::MOST)) {
        let name = if pairs[0].0.dtype == DType::BF16 { "spread_from_bf16" } else { "spread_from_f16" };
        let behind = |tensor: &Tensor| tensor.geometry.offset * tensor.dtype.bytes();
        // Whoever has one of them asks for it in vain until the launch is given.
        let lent: Vec<_> =
            pairs.iter().map(|(from, to)| (from.storage.read_on_gpu(), to.storage.write_on_gpu())).collect();
        let places = pairs.iter().zip(&lent).map(|((from, to), (lent_from, lent_to))| {
            [lent_from.at.plus(behind(from)), lent_to.at.plus(behind(to))]
        });
        let places: Vec<[Address; 2]> = places.collect();
        let [first_from, first_to] = places[0];
        let elements_to =
            |at: Address, from: Address, dtype: DType| (at.0 as i64 - from.0 as i64) / dtype.bytes() as i64;
        let runs = pairs.iter().zip(&places).map(|((from, to), [at, at_to])| Run {
            from: elements_to(*at, first_from, from.dtype),
            to: elements_to(*at_to, first_to, to.dtype),
            len: to.count(),
        });
        let spread = Spread::new(runs.collect());
        let (bytes, chunks) = (spread.to_bytes(), spread.chunks());
        let runs = [Arg::Struct(&bytes), Arg::Int(spread.runs()), Arg::Int(chunks)];
        let args = [Arg::BareIn(first_from), Arg::Bare(first_to), runs[0], runs[1], runs[2]];
        // SAFETY: each run is the elements of a pair, which lie without gaps in one order, and whose buffers are borrowed until the
        // launch is given.
        unsafe { engine.launch_for(element(DType::F32), name, rows(chunks, Spread::CHUNK), &args) }
    }
}

/// Both lie in one order without gaps.
#[track_caller]
fn copy_bytes(engine: &Engine, from: &Tensor, out: &Tensor) {
    let _borrowed = (from.storage.read_on_gpu(), out.storage.write_on_gpu());
    let ((source, at), (target, to)) = (place(from), place(out));
    let bytes = out.count() * out.dtype.bytes();
    engine.copy_bytes((source, at), (target, to), bytes);
}
