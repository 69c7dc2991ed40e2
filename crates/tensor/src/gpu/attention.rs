//! Causal self-attention of several heads. Nothing that is stored grows with the square of the positions.

use crate::cpu::dropout::threshold;
use crate::dtype::DType;
use crate::gpu::Engine;
use crate::gpu::copy::fill;
use crate::gpu::launch::{Arg, check_float};
use crate::ops::attention::{Asked, Dropped};
use crate::tensor::Tensor;
use phalanx_cuda::{Heads, Work};

/// The most numbers of a head.
pub(crate) const MOST_DEPTH: usize = 256;

/// The kernels of an attention: forward, back to queries, back to keys and values.
struct Kernels {
    names: [&'static str; 3],
    /// Positions that a block has as its own.
    own: usize,
}

impl Kernels {
    /// Those that do heads of these numbers best, of which `all` are the tensors.
    fn of(engine: &Engine, depth: usize, all: &[&Tensor]) -> Kernels {
        // The kernels for both floats of 16 bits are made of what came with bfloat16.
        let halves = all.iter().all(|tensor| tensor.dtype.is_half())
            && engine.gpu().architecture().has_bfloat16()
            && depth.is_multiple_of(8)
            && all.iter().all(|tensor| begins_evenly(tensor));
        let (names, own) = match (depth, halves) {
            (..=64, true) => {
                (["halves_attention_64", "halves_attention_queries_64", "halves_attention_keys_64"], 64)
            }
            (65..=128, true) => {
                (["halves_attention_128", "halves_attention_queries_128", "halves_attention_keys_128"], 64)
            }
            (..=64, false) => (["attention_64", "attention_queries_64", "attention_keys_64"], 32),
            (65..=128, false) => (["attention_128", "attention_queries_128", "attention_keys_128"], 32),
            _ => (["attention_256", "attention_queries_256", "attention_keys_256"], 32),
        };
        Kernels { names, own }
    }

    /// A block for each stretch of so many positions of each head.
    fn work(&self, sizes: &Heads, positions: usize) -> Work {
        let is_nothing = sizes.depth == 0;
        let stretches = if is_nothing { 0 } else { positions.div_ceil(self.own) };
        Work::Pieces((sizes.batch * sizes.heads * stretches) as u64)
    }
}

/// Whether it begins at a multiple of 16 bytes, as buffers do.
fn begins_evenly(tensor: &Tensor) -> bool {
    (tensor.geometry.offset * tensor.dtype.bytes()).is_multiple_of(16)
}

/// The heads of `qkv (B, T, 3 H D)`, which aren't larger than the kernels do.
fn sizes(qkv: &Tensor, asked: Asked, dropped: Option<Dropped<'_>>) -> Heads {
    let [batch, time, all] = *qkv.dims() else { unreachable!("(B, T, 3 H D), checked by the operation") };
    let Asked { heads, from, asking } = asked;
    let depth = all / (3 * heads);
    let p = dropped.map_or(0.0, |dropped| dropped.p);
    Heads {
        batch,
        time,
        heads,
        depth,
        from,
        asking,
        first: dropped.map_or(0, |dropped| dropped.first),
        threshold: threshold(p),
        keep: (1.0 / (1.0 - p)) as f32,
        scale: (1.0 / (depth.max(1) as f64).sqrt()) as f32,
    }
}

/// Where the parts of a key lie; nowhere without dropout.
fn key<'a>(dropped: Option<Dropped<'a>>) -> [Arg<'a>; 2] {
    dropped.map_or([Arg::InOrNull(None); 2], |dropped| dropped.key.map(Arg::In))
}

/// `out (B, Q, H D)` = for each head of `qkv (B, T, 3 H D)` the values weighed by the softmax of the Q queries that are asked times
/// earlier keys; `lse (B, H, Q)` = the logarithm of the sum of the exponentials of a query's scores.
#[track_caller]
pub(crate) fn attention(
    engine: &Engine,
    qkv: &Tensor,
    asked: Asked,
    dropped: Option<Dropped<'_>>,
    out: &Tensor,
    lse: &Tensor,
) {
    check_float("attention", qkv.dtype);
    let sizes = sizes(qkv, asked, dropped);
    let kernels = Kernels::of(engine, sizes.depth, &[qkv, out]);
    let (bytes, [words, samples]) = (sizes.to_bytes(), key(dropped));
    let args = [Arg::In(qkv), Arg::Out(out), Arg::Out(lse), words, samples, Arg::Struct(&bytes)];
    // SAFETY: all are as large as the sizes say, which are those of `qkv` and of what is asked of it, and so is the number of samples.
    unsafe { engine.launch(kernels.names[0], kernels.work(&sizes, asked.asking), &args) }
}

/// `out (B, T, 3 H D)` = the gradient of queries, keys and values, which came to the output `y`, from that of `y`, `grad (B, Q, H D)`.
#[track_caller]
pub(crate) fn attention_gradient(
    engine: &Engine,
    forward: [&Tensor; 3],
    asked: Asked,
    dropped: Option<Dropped<'_>>,
    grad: &Tensor,
    out: &Tensor,
) {
    let [qkv, y, lse] = forward;
    check_float("attention", qkv.dtype);
    let sizes = sizes(qkv, asked, dropped);
    let kernels = Kernels::of(engine, sizes.depth, &[qkv, y, grad, out]);
    if asked.asking < sizes.time {
        // Nobody asked the other queries.
        fill(engine, out, 0.0);
    }
    let (bytes, [words, samples]) = (sizes.to_bytes(), key(dropped));
    let levels = Tensor::stale(qkv.device(), *lse.shape(), DType::F32);
    let [given, of_y, sums, from] = [qkv, y, lse, grad].map(Arg::In);
    let last = [words, samples, Arg::Struct(&bytes)];
    let first = [given, of_y, sums, from, Arg::Out(&levels), Arg::Out(out), last[0], last[1], last[2]];
    let second = [given, sums, from, Arg::In(&levels), Arg::Out(out), last[0], last[1], last[2]];
    // SAFETY: as above; each kernel writes parts of `out` that the other doesn't, and all of it together.
    unsafe {
        engine.launch(kernels.names[1], kernels.work(&sizes, asked.asking), &first);
        engine.launch(kernels.names[2], kernels.work(&sizes, sizes.time), &second);
    }
}
