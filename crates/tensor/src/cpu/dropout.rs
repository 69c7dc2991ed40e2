//! Dropout masks.

use crate::dtype::with_float;
use crate::ops::dropout::{DropoutKey, Within};
use crate::tensor::Tensor;

/// Fills `mask`, a row for each sample: 0 with probability `p` and 1 / (1 - p) otherwise.
pub(crate) fn mask(p: f64, key: &DropoutKey, mask: &Tensor) {
    // An element is dropped where its 32 random bits lie below p: exact to 2^-32.
    let threshold = threshold(p);
    with_float!(mask.dtype, "dropout", T => {
        let keep = (1.0 / (1.0 - p)) as T;
        let width = mask.count() / key.samples.len().max(1);
        let runs = Runs::of(mask.dims(), key.within);
        let mut mask = mask.write_whole::<T>();
        for (row, &sample) in mask.chunks_exact_mut(width.max(1)).zip(key.samples.iter()) {
            let stream = key.stream(sample);
            for (i, run) in row.chunks_mut(runs.len.max(1)).enumerate() {
                let at = (runs.first + i * runs.step) as u64;
                // A run may begin within a block of four numbers.
                let (begun, whole) = run.split_at_mut(((4 - at % 4) % 4).min(run.len() as u64) as usize);
                let of = |word: u32| if word < threshold { 0.0 } else { keep };
                begun.iter_mut().zip(at..).for_each(|(m, at)| *m = of(stream.word(at)));
                for (block, four) in (at.div_ceil(4)..).zip(whole.chunks_mut(4)) {
                    four.iter_mut().zip(stream.block(block)).for_each(|(m, word)| *m = of(word));
                }
            }
        }
    });
}

/// How the elements of a sample lie among those of the whole: runs of so many, the first at `first`, and `step` from one to the next.
struct Runs {
    len: usize,
    first: usize,
    step: usize,
}

impl Runs {
    fn of(dims: &[usize], within: Option<Within>) -> Runs {
        let Some(Within { dim, start, of }) = within else {
            return Runs { len: dims.iter().skip(1).product(), first: 0, step: 0 };
        };
        let behind: usize = dims[dim + 1..].iter().product();
        Runs { len: dims[dim] * behind, first: start * behind, step: of * behind }
    }
}

/// The number below which the random bits of an element lie that is dropped.
pub(crate) fn threshold(p: f64) -> u32 {
    (p * f64::from(u32::MAX)) as u32
}
