//! Attention of several heads. Nothing that is stored grows with the square of the positions.

use crate::cpu::dropout::threshold;
use crate::dtype::DType;
use crate::gpu::Engine;
use crate::gpu::launch::{Arg, also_written, check_float};
use crate::ops::attention::{Shares, Sight};
use crate::shape::Geometry;
use crate::tensor::Tensor;
use phalanx_cuda::{Apart, Heads, Work};

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
    fn of(engine: &Engine, sizes: &Heads, shares: Shares<'_>, all: &[&Tensor]) -> Kernels {
        let depth = sizes.depth;
        // The kernels for both floats of 16 bits are made of what came with bfloat16.
        let halves = all.iter().all(|tensor| tensor.dtype.is_half())
            && engine.gpu().architecture().has_bfloat16()
            && depth.is_multiple_of(8)
            && depth <= 128
            && all.iter().all(|tensor| lies_evenly(tensor));
        // What sees no key at all is looked at by the others.
        let is_plain = shares.dropped.is_none() && shares.mask.is_none() && sizes.keys > 0;
        let names = match (depth, halves) {
            (64, true) if is_plain => [
                "halves_attention_plain_64",
                "halves_attention_queries_plain_64",
                "halves_attention_keys_plain_64",
            ],
            (..=64, true) => {
                ["halves_attention_64", "halves_attention_queries_64", "halves_attention_keys_64"]
            }
            (128, true) if is_plain => [
                "halves_attention_plain_128",
                "halves_attention_queries_plain_128",
                "halves_attention_keys_plain_128",
            ],
            (_, true) => {
                ["halves_attention_128", "halves_attention_queries_128", "halves_attention_keys_128"]
            }
            (..=64, false) => ["attention_64", "attention_queries_64", "attention_keys_64"],
            (65..=128, false) => ["attention_128", "attention_queries_128", "attention_keys_128"],
            _ => ["attention_256", "attention_queries_256", "attention_keys_256"],
        };
        Kernels { names, own: if halves { 64 } else { 32 } }
    }

    /// A block for each stretch of so many positions of each head.
    fn work(&self, sizes: &Heads, positions: usize) -> Work {
        let is_nothing = sizes.depth == 0;
        let stretches = if is_nothing { 0 } else { positions.div_ceil(self.own) };
        Work::Pieces((sizes.batch * sizes.heads * stretches) as u64)
    }
}

/// Whether its rows begin at multiples of 16 bytes, as whole buffers do.
fn lies_evenly(tensor: &Tensor) -> bool {
    let (shape, Geometry { strides, offset, .. }) = (tensor.dims(), &tensor.geometry);
    let rows = shape
        .iter()
        .zip(strides)
        .take(shape.len() - 1)
        .filter(|(size, _)| **size > 1)
        .map(|(_, stride)| *stride);
    rows.chain([*offset]).all(|numbers| (numbers * tensor.dtype.bytes()).is_multiple_of(16))
}

/// How far apart the rows of a view (B, H, T, D) lie.
fn apart(view: &Tensor) -> Apart {
    let &[sample, head, position, ..] = &view.geometry.strides;
    Apart { sample, head, position }
}

/// The sizes of an attention of these queries, keys and values (B, H, T, D), which aren't larger than the kernels do; without the places of
/// gradients.
fn sizes(given: [&Tensor; 3], shares: Shares<'_>) -> Heads {
    let &[batch, heads, asking, depth] = given[0].dims() else {
        unreachable!("(B, H, T, D), checked by the operation")
    };
    let Shares { sight, mask, dropped } = shares;
    let (keys, p) = (given[1].dims()[2], dropped.map_or(0.0, |dropped| dropped.p));
    let given = given.map(apart);
    Heads {
        batch,
        heads,
        depth,
        keys,
        from: sight.from(),
        asking,
        causal: sight != Sight::All,
        dropping: sight.queries(asking, keys),
        first: dropped.map_or(0, |dropped| dropped.first),
        threshold: threshold(p),
        given,
        gradients: given,
        hiding: mask.map_or((given[0], 0), |mask| (apart(mask), mask.geometry.strides[3])),
        keep: (1.0 / (1.0 - p)) as f32,
        scale: (1.0 / (depth.max(1) as f64).sqrt()) as f32,
    }
}

/// Where the parts of a key lie, nowhere without dropout, and the mask, if there is one.
fn masks<'a>(shares: Shares<'a>) -> [Arg<'a>; 3] {
    let [words, samples] = shares.dropped.map_or([None; 2], |dropped| dropped.key.map(Some));
    [words, samples, shares.mask].map(Arg::InOrNull)
}

/// `out (B, T, H, D)` = for each head of queries (B, H, T, D), keys and values (B, H, S, D) the values weighed by the shares; `lse (B, H, T)`
/// = the logarithm of the sum of the exponentials of a query's scores, infinite where it sees no key.
#[track_caller]
pub(crate) fn attention(
    engine: &Engine,
    given: [&Tensor; 3],
    shares: Shares<'_>,
    out: &Tensor,
    lse: &Tensor,
) {
    check_float("attention", out.dtype);
    let sizes = sizes(given, shares);
    let [q, k, v] = given;
    let kernels = Kernels::of(engine, &sizes, shares, &[q, k, v, out]);
    let (bytes, [words, samples, hiding]) = (sizes.to_bytes(), masks(shares));
    let [q, k, v] = given.map(Arg::In);
    let args = [q, k, v, Arg::Out(out), Arg::Out(lse), words, samples, hiding, Arg::Struct(&bytes)];
    // SAFETY: all are as large as the sizes say and lie as they do, and so many are the samples' numbers.
    unsafe { engine.launch(kernels.names[0], kernels.work(&sizes, sizes.asking), &args) }
}

/// `outs` = the gradients of queries, keys and values `given`, from that of the output, `grad (B, T, H, D)`, where forward `came` the output and
/// the logarithms.
#[track_caller]
pub(crate) fn attention_gradient(
    engine: &Engine,
    given: [&Tensor; 3],
    came: [&Tensor; 2],
    shares: Shares<'_>,
    grad: &Tensor,
    outs: [&Tensor; 3],
) {
    check_float("attention", grad.dtype);
    let sizes = Heads { gradients: outs.map(apart), ..sizes(given, shares) };
    let ([q, k, v], [y, lse], [of_q, of_k, of_v]) = (given, came, outs);
    let kernels = Kernels::of(engine, &sizes, shares, &[q, k, v, y, grad, of_q, of_k, of_v]);
    let (bytes, [words, samples, hiding]) = (sizes.to_bytes(), masks(shares));
    let levels = Tensor::stale(grad.device(), *lse.shape(), DType::F32);
    let [q, k, v, y, lse, grad] = [q, k, v, y, lse, grad].map(Arg::In);
    let last = [words, samples, hiding, Arg::Struct(&bytes)];
    let [of_q, of_values] = [Arg::Out(of_q), also_written(of_v, of_k)];
    let first = [q, k, v, y, lse, grad, Arg::Out(&levels), of_q, last[0], last[1], last[2], last[3]];
    let second =
        [q, k, v, lse, grad, Arg::In(&levels), Arg::Out(of_k), of_values, last[0], last[1], last[2], last[3]];
    // SAFETY: as above; the kernels write all of the gradients, of which no two rows overlap.
    unsafe {
        engine.launch(kernels.names[1], kernels.work(&sizes, sizes.asking), &first);
        engine.launch(kernels.names[2], kernels.work(&sizes, sizes.keys), &second);
    }
}
