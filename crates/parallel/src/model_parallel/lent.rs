//! Gradients that several ranks of a replica have, or have parts of, made the same from GPU to GPU and where they lie.

use crate::error::Error;
use crate::strategy::Strategy;
use phalanx_comm::{GpuGroup, Rank, ReduceOp, Trail};
use phalanx_nn::Parameters;
use std::ops::Range;
use std::sync::Arc;

/// What ranks make of gradients of theirs.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Becomes {
    /// The sum of all ranks'.
    Sum,
    /// The first rank's.
    First,
}

/// Makes that of the gradients that `inner` holds of these runs of parameters, once they are whole, with the ranks of `gpus`, which
/// come with the same; the compute stream waits for that, of which `trail` is told. Says no, and leaves all as it is, where they lie in
/// the host's memory.
pub(super) fn made_among(
    gpus: &Arc<GpuGroup>,
    becomes: Becomes,
    trail: &Trail,
    (inner, own): (&mut dyn Strategy, &Parameters),
    runs: impl IntoIterator<Item = Range<usize>>,
) -> Result<bool, Error> {
    for run in runs {
        let lent = inner.lend_gradients(own, run, &mut |span| {
            match becomes {
                Becomes::Sum => gpus.start_all_reduce(span, ReduceOp::Sum)?.join()?,
                Becomes::First => gpus.start_broadcast(span, Rank(0))?.join()?,
            };
            Ok(())
        })?;
        if !lent {
            return Ok(false);
        }
    }
    trail.note(gpus, "gradients that ranks of a replica tell each other")?;
    Ok(true)
}

/// Rising numbers as runs of neighbours.
pub(super) fn runs(numbers: impl IntoIterator<Item = usize>) -> Vec<Range<usize>> {
    let mut runs: Vec<Range<usize>> = Vec::new();
    for number in numbers {
        match runs.last_mut().filter(|run| run.end == number) {
            Some(run) => run.end += 1,
            None => runs.push(number..number + 1),
        }
    }
    runs
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn neighbours_are_one_run() {
        assert_eq!(runs([0, 1, 2, 5, 7, 8]), [0..3, 5..6, 7..9]);
        assert!(runs([]).is_empty());
    }
}
