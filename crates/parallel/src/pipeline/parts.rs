//! How the samples of a pass fall into micro-batches.

use super::stage::MicroBatch;
use crate::evaluation::EvalPass;
use phalanx_nn::Ctx;
use phalanx_tensor::Tensor;
use std::ops::Range;

/// Consecutive samples, the first parts longer by one where they must be; parts without samples come last.
pub fn parts(samples: usize, n: usize) -> impl Iterator<Item = Range<usize>> {
    let (size, longer) = (samples / n, samples % n);
    (0..n).map(move |i| {
        let start = i * size + i.min(longer);
        start..start + size + usize::from(i < longer)
    })
}

/// A batch as `n` micro-batches. `weight` is the whole batch's, and `ctx` its pass, whose rows are the samples. Panics if inputs
/// or targets have another number of rows than `ctx` has samples. Where inputs are to have a gradient, each part's are a leaf of their own.
#[track_caller]
pub fn micro_batches(
    input: Option<&Tensor>,
    target: Option<&Tensor>,
    ctx: &Ctx,
    weight: f64,
    n: usize,
) -> Vec<MicroBatch> {
    let samples = ctx.samples().len();
    for rows in [input, target].into_iter().flatten() {
        assert!(
            rows.dim(0) == samples,
            "micro_batches: a tensor of shape {} for {samples} samples",
            rows.shape()
        );
    }
    let part = |rows: Range<usize>| {
        let of = |whole: &Tensor| {
            let part = rows_of(whole, &rows);
            if whole.needs_grad() { part.requires_grad() } else { part }
        };
        MicroBatch {
            input: input.map(of),
            target: target.map(of),
            ctx: ctx.of_samples(rows.clone()),
            samples: rows.len(),
            weight: weight * rows.len() as f64 / samples.max(1) as f64,
        }
    };
    parts(samples, n).map(part).collect()
}

/// The samples of an evaluation likewise.
pub(super) fn evaluated(pass: &EvalPass<'_>, n: usize) -> Vec<MicroBatch> {
    let samples = pass.samples();
    let part = |rows: Range<usize>| MicroBatch {
        input: Some(rows_of(&pass.input, &rows)),
        target: Some(rows_of(&pass.target, &rows)),
        ctx: pass.ctx.of_samples(rows.clone()),
        samples: rows.len(),
        weight: rows.len() as f64 / samples.max(1) as f64,
    };
    parts(samples, n).map(part).collect()
}

fn rows_of(whole: &Tensor, rows: &Range<usize>) -> Tensor {
    whole.detach().narrow(0, rows.start, rows.len()).contiguous()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_follow_each_other_and_differ_by_one_sample() {
        for samples in 0..40 {
            for n in 1..9 {
                let parts: Vec<Range<usize>> = parts(samples, n).collect();
                assert_eq!(parts.len(), n);
                let ends = parts.iter().scan(0, |end, part| {
                    let follows = part.start == *end;
                    *end = part.end;
                    Some(follows)
                });
                assert!(ends.into_iter().all(|follows| follows) && parts[n - 1].end == samples);
                let lengths: Vec<usize> = parts.iter().map(Range::len).collect();
                assert!(lengths.is_sorted_by(|a, b| a >= b) && lengths[0] - lengths[n - 1] <= 1);
            }
        }
    }
}
