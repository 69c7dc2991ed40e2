//! Where a row of blocks is cut, by what each block takes.
//!
//! A pipeline is as fast as its slowest stage, so the cut is the one whose slowest stage is the fastest, among those whose stages all
//! fit the memory. Blocks are measured one at a time, each with its own parameters alone, so that a model can be cut that no device
//! holds as a whole.

use phalanx_nn::{Ctx, Module, Parameters};
use phalanx_tensor::{DType, Device, Gradients, Tensor, backward};
use std::ops::Range;
use std::time::Instant;
use thiserror::Error;

/// What a block takes.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct BlockCost {
    /// Of a forward and a backward pass over a micro-batch.
    pub seconds: f64,
    /// Of its parameters, their gradients, and what a pass over a micro-batch keeps and needs meanwhile.
    pub bytes: usize,
}

/// Why a row can't be cut so.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum CutError {
    /// Fewer blocks than stages.
    #[error("{stages} stages of a model of {blocks} {}\nhint: a stage has at least one block, so take {blocks} or fewer", if *.blocks == 1 { "block" } else { "blocks" })]
    FewBlocks {
        /// How many stages were asked for.
        stages: usize,
        /// How many blocks there are.
        blocks: usize,
    },
    /// No cut fits the memory.
    #[error(
        "no cut into {stages} stages fits {most} bytes a stage: the largest block takes {largest}, all take {all}\nhint: take more stages, or smaller micro-batches"
    )]
    Memory {
        /// How many stages.
        stages: usize,
        /// What each may take.
        most: usize,
        /// What the largest block takes.
        largest: usize,
        /// What all take.
        all: usize,
    },
}

/// How often each block is measured; the fastest counts, since what disturbs a measurement only makes it longer.
const ROUNDS: usize = 3;

/// Measures every block of a row on CPU devices of so many threads, with the first block's input. The model's parameters have no
/// values afterwards that mean anything: they are to be built anew.
pub fn measure(model: &mut dyn Module, threads: usize, input: &Tensor, ctx: &Ctx) -> Vec<BlockCost> {
    let (mut x, mut ctx) = (input.detach(), ctx.clone());
    let mut costs = Vec::new();
    for block in 0..model.blocks() {
        let device = Device::cpu(threads);
        let parameters = Parameters::build_part(model, &device, |own| own == block, 0);
        let input = x.to(&device);
        let mut seconds = f64::INFINITY;
        let (mut output, mut after) = (input.clone(), ctx.clone());
        // One round more, in which memory is taken for the first time.
        for round in 0..=ROUNDS {
            let start = Instant::now();
            after = ctx.clone();
            let x = if block == 0 { input.clone() } else { input.clone().requires_grad() };
            let y = model.forward_block(block, &x, &mut after);
            if y.needs_grad() {
                let grad = Tensor::ones(&device, *y.shape(), y.dtype());
                parameters.grads().zero();
                backward(&[(&y, Some(&grad))], &mut Gradients::default());
            }
            if round > 0 {
                seconds = seconds.min(start.elapsed().as_secs_f64());
            }
            output = y.detach();
        }
        let learned = 2 * parameters.layout().len() * DType::F32.bytes();
        costs.push(BlockCost { seconds, bytes: learned + device.held_bytes() });
        (x, ctx) = (output, after);
    }
    costs
}

/// The blocks of each of `stages` stages, such that the slowest stage is as fast as can be; of equals the one whose first
/// stages are longest. With `most`, no stage takes more bytes than that.
///
/// # Errors
/// There are fewer blocks than stages, or no cut fits the memory.
pub fn cut(costs: &[BlockCost], stages: usize, most: Option<usize>) -> Result<Vec<Range<usize>>, CutError> {
    let blocks = costs.len();
    if stages == 0 || stages > blocks {
        return Err(CutError::FewBlocks { stages, blocks });
    }
    let seconds = |range: Range<usize>| costs[range].iter().map(|cost| cost.seconds).sum::<f64>();
    let bytes = |range: Range<usize>| costs[range].iter().map(|cost| cost.bytes).sum::<usize>();
    let fits = |range: Range<usize>| most.is_none_or(|most| bytes(range) <= most);
    // Of the first blocks in so many stages: how long the slowest takes, and where the last one begins.
    let mut best: Vec<Option<(f64, usize)>> =
        (0..=blocks).map(|end| (end > 0 && fits(0..end)).then(|| (seconds(0..end), 0))).collect();
    let mut begins = vec![best.clone()];
    for _ in 1..stages {
        let slowest = |end: usize| {
            let with_last_from = |start: usize| {
                let (before, _) = best[start].filter(|_| fits(start..end))?;
                Some((before.max(seconds(start..end)), start))
            };
            let all = (1..end).rev().filter_map(with_last_from);
            all.reduce(|best, other| if other.0 < best.0 { other } else { best })
        };
        best = (0..=blocks).map(slowest).collect();
        begins.push(best.clone());
    }
    let mut cuts = Vec::new();
    let mut end = blocks;
    for best in begins.iter().rev() {
        let Some((_, start)) = best[end] else {
            let largest = costs.iter().map(|cost| cost.bytes).max().unwrap_or(0);
            return Err(CutError::Memory { stages, most: most.unwrap_or(0), largest, all: bytes(0..blocks) });
        };
        cuts.push(start..end);
        end = start;
    }
    cuts.reverse();
    Ok(cuts)
}

#[cfg(test)]
mod tests {
    use super::*;
    use phalanx_nn::{Dropout, Linear, Relu, Sequential};
    use phalanx_tensor::Philox;

    fn costs(seconds: &[f64], bytes: &[usize]) -> Vec<BlockCost> {
        seconds.iter().zip(bytes).map(|(&seconds, &bytes)| BlockCost { seconds, bytes }).collect()
    }

    /// The slowest stage of every way to cut, the plain way.
    fn by_trying(costs: &[BlockCost], stages: usize, most: Option<usize>) -> Option<f64> {
        let sum = |costs: &[BlockCost]| costs.iter().map(|cost| cost.seconds).sum::<f64>();
        let fits = |costs: &[BlockCost]| {
            most.is_none_or(|most| costs.iter().map(|cost| cost.bytes).sum::<usize>() <= most)
        };
        if stages == 1 {
            return Some(sum(costs)).filter(|_| !costs.is_empty() && fits(costs));
        }
        let tried = (1..costs.len()).filter(|&at| fits(&costs[..at])).filter_map(|at| {
            by_trying(&costs[at..], stages - 1, most).map(|rest| rest.max(sum(&costs[..at])))
        });
        tried.reduce(f64::min)
    }

    #[test]
    fn the_slowest_stage_is_as_fast_as_can_be_and_all_fit() {
        for case in 0..400 {
            let random = Philox::new(2, case);
            let word = |i: u64| random.word(i) as usize;
            let blocks = word(0) % 9 + 1;
            let seconds: Vec<f64> = (0..blocks as u64).map(|i| (word(10 + i) % 20) as f64).collect();
            let bytes: Vec<usize> = (0..blocks as u64).map(|i| word(40 + i) % 10).collect();
            let costs = costs(&seconds, &bytes);
            let stages = word(1) % blocks + 1;
            let most = (word(2) % 2 == 0).then(|| word(3) % 40);
            let want = by_trying(&costs, stages, most);
            match cut(&costs, stages, most) {
                Err(error) => assert!(want.is_none() && matches!(error, CutError::Memory { .. }), "{error}"),
                Ok(cuts) => {
                    assert!(cuts.len() == stages && cuts[0].start == 0 && cuts[stages - 1].end == blocks);
                    assert!(cuts.windows(2).all(|pair| pair[0].end == pair[1].start), "{cuts:?}");
                    assert!(cuts.iter().all(|cut| !cut.is_empty()), "{cuts:?}");
                    let sum = |cut: &Range<usize>| seconds[cut.clone()].iter().sum::<f64>();
                    assert_eq!(cuts.iter().map(sum).reduce(f64::max), want, "{seconds:?} {cuts:?}");
                }
            }
        }
    }

    #[test]
    fn what_cannot_be_cut_is_refused() {
        let costs = costs(&[1.0, 1.0], &[5, 9]);
        assert_eq!(
            cut(&costs, 3, None).unwrap_err().to_string(),
            "3 stages of a model of 2 blocks\nhint: a stage has at least one block, so take 2 or fewer"
        );
        assert_eq!(
            cut(&costs, 2, Some(8)).unwrap_err().to_string(),
            "no cut into 2 stages fits 8 bytes a stage: the largest block takes 9, all take 14\nhint: take more stages, or smaller micro-batches"
        );
    }

    #[test]
    fn blocks_are_measured_with_what_they_learn_and_hold() {
        let mut row = Sequential::new()
            .then(Linear::new(8, 512))
            .then(Relu)
            .then(Dropout::new(0.5))
            .then(Linear::new(512, 4));
        let x = Tensor::ones(&Device::cpu(1), [16, 8], DType::F32);
        let costs = measure(&mut row, 1, &x, &Ctx::train(0, 0, (0..16).collect()));
        assert_eq!(costs.len(), 4);
        assert!(costs.iter().all(|cost| cost.seconds > 0.0 && cost.seconds < 10.0));
        // Values and gradients of 9 x 512 numbers, and at least what comes out.
        assert!(costs[0].bytes >= 2 * 4 * 9 * 512 + 4 * 16 * 512, "{costs:?}");
        assert!(
            costs[1].bytes >= 2 * 4 * 16 * 512 && costs[1].bytes < costs[0].bytes + (1 << 18),
            "{costs:?}"
        );
    }
}
