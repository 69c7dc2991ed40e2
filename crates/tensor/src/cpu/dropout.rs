//! Dropout masks.

use crate::dtype::with_float;
use crate::ops::dropout::DropoutKey;
use crate::tensor::Tensor;

/// Fills `mask`, a row for each sample: 0 with probability `p` and 1 / (1 - p) otherwise.
pub(crate) fn mask(p: f64, key: &DropoutKey, mask: &Tensor) {
    // An element is dropped where its 32 random bits lie below p: exact to 2^-32.
    let threshold = threshold(p);
    with_float!(mask.dtype, "dropout", T => {
        let keep = (1.0 / (1.0 - p)) as T;
        let width = mask.count() / key.samples.len().max(1);
        let mut mask = mask.write_whole::<T>();
        for (row, &sample) in mask.chunks_exact_mut(width.max(1)).zip(key.samples.iter()) {
            let stream = key.stream(sample);
            for (block, four) in row.chunks_mut(4).enumerate() {
                let words = stream.block(block as u64);
                four.iter_mut().zip(words).for_each(|(m, word)| *m = if word < threshold { 0.0 } else { keep });
            }
        }
    });
}

/// The number below which the random bits of an element lie that is dropped.
pub(crate) fn threshold(p: f64) -> u32 {
    (p * f64::from(u32::MAX)) as u32
}
