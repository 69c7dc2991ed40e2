//! Dropout: masks, and elements times masks that are never stored.

use crate::cpu::dropout::threshold;
use crate::gpu::Engine;
use crate::gpu::launch::{Arg, check_float, check_single, elements};
use crate::ops::dropout::{DropoutKey, Within};
use crate::tensor::Tensor;

/// Fills `mask`, a row for each sample: 0 with probability `p` and 1 / (1 - p) otherwise. The key goes to the GPU's memory, from
/// which kernels read it.
#[track_caller]
pub(crate) fn mask(engine: &Engine, p: f64, key: &DropoutKey, mask: &Tensor) {
    check_single("dropout", mask.dtype);
    if let Some(Within { dim, start, of }) = key.within {
        // The part of the whole tensor's, which is made for it: numbers are keyed by their place in a sample.
        let whole = Tensor::stale(mask.device(), mask.shape().with(dim, of), mask.dtype);
        self::mask(engine, p, &DropoutKey { within: None, ..key.clone() }, &whole);
        return mask.copy_from(&whole.narrow(dim, start, mask.dims()[dim]));
    }
    let [words, samples] = mask.device().feed_key(key);
    let n = samples.count();
    let width = mask.count() / n.max(1);
    let args = [
        Arg::Out(mask),
        Arg::In(&words),
        Arg::In(&samples),
        Arg::Int(n),
        Arg::Int(width),
        Arg::Int(threshold(p) as usize),
        Arg::Float(1.0 / (1.0 - p)),
    ];
    // SAFETY: the mask has `width` elements for each of n samples; a key is three words.
    unsafe { engine.launch("dropout_mask", elements(n * width.div_ceil(4)), &args) }
}

/// `out` = the elements of `x` times that mask, both contiguous. Seed, step and layer of the key lie in memory, and the number of each
/// sample.
#[track_caller]
pub(crate) fn dropout(engine: &Engine, p: f64, [words, samples]: [&Tensor; 2], x: &Tensor, out: &Tensor) {
    check_float("dropout", x.dtype);
    let n = samples.count();
    let width = x.count() / n.max(1);
    let args = [
        Arg::In(x),
        Arg::Out(out),
        Arg::In(words),
        Arg::In(samples),
        Arg::Int(n),
        Arg::Int(width),
        Arg::Int(threshold(p) as usize),
        Arg::Float(1.0 / (1.0 - p)),
    ];
    // SAFETY: both have `width` elements for each of n samples; a key is three words.
    unsafe { engine.launch("dropout", elements(n * width.div_ceil(4)), &args) }
}
