//! Causal self-attention of several heads. Nothing that is stored grows with the square of the positions.

use crate::cpu::dropout::threshold;
use crate::dtype::DType;
use crate::gpu::Engine;
use crate::gpu::launch::{Arg, check_float};
use crate::ops::attention::Dropped;
use crate::tensor::Tensor;
use phalanx_cuda::{Heads, Work};

/// The most numbers of a head.
pub(crate) const MOST_DEPTH: usize = 256;
/// Positions that a block has as its own.
const OWN: usize = 32;

/// The kernels for heads of a size: forward, back to queries, back to keys and values.
fn kernels(depth: usize) -> [&'static str; 3] {
    match depth {
        ..=64 => ["attention_64", "attention_queries_64", "attention_keys_64"],
        65..=128 => ["attention_128", "attention_queries_128", "attention_keys_128"],
        _ => ["attention_256", "attention_queries_256", "attention_keys_256"],
    }
}

/// The heads of `qkv (B, T, 3 H D)`, which aren't larger than the kernels do.
fn sizes(qkv: &Tensor, heads: usize, dropped: Option<Dropped<'_>>) -> Heads {
    let [batch, time, all] = *qkv.dims() else { unreachable!("(B, T, 3 H D), checked by the operation") };
    let depth = all / (3 * heads);
    let p = dropped.map_or(0.0, |dropped| dropped.p);
    Heads {
        batch,
        time,
        heads,
        depth,
        first: dropped.map_or(0, |dropped| dropped.first),
        threshold: threshold(p),
        keep: (1.0 / (1.0 - p)) as f32,
        scale: (1.0 / (depth.max(1) as f64).sqrt()) as f32,
    }
}

/// A block for each stretch of positions of each head.
fn work(sizes: &Heads) -> Work {
    let is_nothing = sizes.depth == 0;
    Work::Pieces(if is_nothing { 0 } else { sizes.batch * sizes.heads * sizes.time.div_ceil(OWN) } as u64)
}

/// Where the parts of a key lie; nowhere without dropout.
fn key<'a>(dropped: Option<Dropped<'a>>) -> [Arg<'a>; 2] {
    dropped.map_or([Arg::InOrNull(None); 2], |dropped| dropped.key.map(Arg::In))
}

/// `out (B, T, H D)` = for each head of `qkv (B, T, 3 H D)` the values weighed by the softmax of queries times earlier keys;
/// `lse (B, H, T)` = the logarithm of the sum of the exponentials of a query's scores.
#[track_caller]
pub(crate) fn attention(
    engine: &Engine,
    qkv: &Tensor,
    heads: usize,
    dropped: Option<Dropped<'_>>,
    out: &Tensor,
    lse: &Tensor,
) {
    check_float("attention", qkv.dtype);
    let sizes = sizes(qkv, heads, dropped);
    let ([name, _, _], bytes, [words, samples]) = (kernels(sizes.depth), sizes.to_bytes(), key(dropped));
    let args = [Arg::In(qkv), Arg::Out(out), Arg::Out(lse), words, samples, Arg::Struct(&bytes)];
    // SAFETY: all are as large as the sizes say, which are those of `qkv`, and so is the number of samples.
    unsafe { engine.launch(name, work(&sizes), &args) }
}

/// `out (B, T, 3 H D)` = the gradient of queries, keys and values, which came to the output `y`, from that of `y`, `grad (B, T, H D)`.
#[track_caller]
pub(crate) fn attention_gradient(
    engine: &Engine,
    forward: [&Tensor; 3],
    heads: usize,
    dropped: Option<Dropped<'_>>,
    grad: &Tensor,
    out: &Tensor,
) {
    let [qkv, y, lse] = forward;
    check_float("attention", qkv.dtype);
    let sizes = sizes(qkv, heads, dropped);
    let ([_, to_queries, to_keys], bytes) = (kernels(sizes.depth), sizes.to_bytes());
    let [words, samples] = key(dropped);
    let levels = Tensor::stale(qkv.device(), *lse.shape(), DType::F32);
    let [given, of_y, sums, from] = [qkv, y, lse, grad].map(Arg::In);
    let last = [words, samples, Arg::Struct(&bytes)];
    let first = [given, of_y, sums, from, Arg::Out(&levels), Arg::Out(out), last[0], last[1], last[2]];
    let second = [given, sums, from, Arg::In(&levels), Arg::Out(out), last[0], last[1], last[2]];
    // SAFETY: as above; each kernel writes parts of `out` that the other doesn't, and all of it together.
    unsafe {
        engine.launch(to_queries, work(&sizes), &first);
        engine.launch(to_keys, work(&sizes), &second);
    }
}
