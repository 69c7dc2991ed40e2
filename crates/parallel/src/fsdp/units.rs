//! How a model is cut for sharding: into units, which are gathered, used and given back as a whole.

use crate::error::Error;
use phalanx_comm::Group;
use phalanx_nn::{Module, Parameters};
use std::ops::Range;

/// Neighbouring blocks of the model, with their parameters.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Unit {
    pub(super) blocks: Range<usize>,
    /// Which parameters.
    pub(super) params: Range<usize>,
    /// Their elements in the arena, padding included.
    pub(super) span: Range<usize>,
    /// Those of them that have an equal part for each rank, counted from the start of the span.
    pub(super) shared_out: Range<usize>,
    /// This rank's part, counted likewise.
    pub(super) own: Range<usize>,
    /// Whether a part of the model behind it may use its parameters too: then it stays from its forward to its backward, which
    /// comes after theirs.
    pub(super) stays: bool,
}

impl Unit {
    /// The few that are left over: all ranks hold them. Counted from the start of the span.
    pub(super) fn rest(&self) -> Range<usize> {
        self.shared_out.end..self.span.len()
    }

    /// The parts of the others, before this rank's and behind it, counted likewise.
    pub(super) fn of_others(&self) -> [Range<usize>; 2] {
        [0..self.own.start, self.own.end..self.shared_out.end]
    }

    /// The same in bytes of the arena's float32.
    pub(super) fn bytes_of_others(&self) -> [Range<usize>; 2] {
        let at = |element: usize| (self.span.start + element) * size_of::<f32>();
        self.of_others().map(|part| at(part.start)..at(part.end))
    }
}

/// The parameters of each unit.
pub(super) fn runs(units: &[Unit]) -> Vec<Range<usize>> {
    units.iter().map(|unit| unit.params.clone()).collect()
}

/// Cuts a model between blocks into units of at least `bytes` bytes of float32 parameters. The last may be smaller, and so may those
/// between which a shared parameter begins or ends: a block stays for nothing but what is shared of its own.
pub(super) fn units(
    model: &dyn Module,
    parameters: &Parameters,
    group: &Group,
    bytes: usize,
) -> Result<Vec<Unit>, Error> {
    let layout = parameters.layout();
    let of: Vec<usize> = parameters.names().iter().map(|name| model.block_of(name)).collect();
    if let Some(i) = (1..of.len()).find(|&i| of[i] < of[i - 1]) {
        let (name, before) = (parameters.names()[i].clone(), parameters.names()[i - 1].clone());
        return Err(Error::Scattered { name, block: of[i], before, block_before: of[i - 1] });
    }
    let stays = |mut params: Range<usize>| params.any(|i| parameters.is_shared(i));
    let mut units = Vec::new();
    let (mut first_block, mut first_param) = (0, 0);
    for block in 0..model.blocks() {
        let end = of.partition_point(|&of| of <= block);
        let span = layout.span(first_param..end);
        let is_last = block + 1 == model.blocks();
        let (params, next) = (first_param..end, end..of.partition_point(|&of| of <= block + 1));
        let parts = !params.is_empty() && !next.is_empty() && stays(params.clone()) != stays(next);
        if span.len() * size_of::<f32>() < bytes.max(1) && !is_last && !parts {
            continue;
        }
        let shared_out = 0..span.len() / group.world_size() * group.world_size();
        let own = group.own_part(shared_out.end);
        let (blocks, stays) = (first_block..block + 1, stays(params.clone()));
        units.push(Unit { blocks, params, span, shared_out, own, stays });
        (first_block, first_param) = (block + 1, end);
    }
    Ok(units)
}

#[cfg(test)]
mod tests {
    use super::*;
    use phalanx_nn::models::{Gpt, GptConfig};
    use phalanx_nn::{Linear, Relu, Sequential};
    use phalanx_tensor::Device;

    #[test]
    fn a_unit_that_stays_has_nothing_but_what_is_shared() {
        let config =
            GptConfig { vocabulary: 8, context: 4, layers: 2, width: 8, heads: 2, ..GptConfig::default() };
        let mut net = Gpt::new(config);
        let parameters = Parameters::build(&mut net, &Device::cpu(1), 0);
        for group in Group::threads(2) {
            let units = units(&net, &parameters, &group, 1 << 20).unwrap();
            let found: Vec<_> = units.iter().map(|unit| (unit.blocks.clone(), unit.stays)).collect();
            // The table of words, which the last block has, too; all else is less than a unit.
            assert_eq!(found, [(0..1, true), (1..4, false)]);
        }
    }

    #[test]
    fn units_are_neighbouring_blocks_that_cover_the_model() {
        // 64 + 64, 0, 192 + 64, 64 + 64 elements with padding.
        let mut net = Sequential::new()
            .then(Linear::new(4, 4))
            .then(Relu)
            .then(Linear::new(4, 40))
            .then(Linear::new(40, 1));
        let parameters = Parameters::build(&mut net, &Device::cpu(1), 0);
        for (bytes, want) in [
            (0, vec![(0..1, 0..2), (1..3, 2..4), (3..4, 4..6)]),
            (600, vec![(0..3, 0..4), (3..4, 4..6)]),
            (1 << 20, vec![(0..4, 0..6)]),
        ] {
            for n in 1..4 {
                for group in Group::threads(n) {
                    let units = units(&net, &parameters, &group, bytes).unwrap();
                    let found: Vec<_> = units.iter().map(|u| (u.blocks.clone(), u.params.clone())).collect();
                    assert_eq!(found, want, "{bytes} bytes");
                    for unit in units {
                        assert_eq!(unit.span, parameters.layout().span(unit.params.clone()));
                        assert!(unit.rest().len() < n && unit.own.len() * n == unit.shared_out.len());
                        assert_eq!(unit.own.start, group.rank().index() * unit.own.len());
                    }
                }
            }
        }
    }
}
