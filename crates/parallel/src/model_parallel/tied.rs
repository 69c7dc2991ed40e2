//! Parameters that blocks of several stages have, as a language model's table of words, which its last layer multiplies with.

use super::holding::{Holder, Holding};
use super::lent::{Becomes, made_among};
use crate::between_gpus::BetweenGpus;
use crate::error::Error;
use crate::strategy::{HeldGradient, Strategy};
use phalanx_comm::{GpuGroup, Group, Rank, ReduceOp, Trail, Via};
use phalanx_nn::Parameters;
use std::ops::Range;
use std::sync::Arc;

/// What stages share (MP-TIED).
pub(super) struct Tied {
    /// The ranks of the pipeline that have any of them, and those that these share their stages out with; none on one that hasn't.
    group: Option<Group>,
    /// Which of those that share its stage out this rank is, if any do.
    of_shards: Option<Rank>,
    /// Their GPUs, where these sum gradients among themselves: of ranks that have all of them each.
    gpus: Option<Arc<GpuGroup>>,
    /// This rank's own numbers of them, in the order of the whole model, where it has them.
    own: Vec<Option<usize>>,
    /// How many elements of each a rank has.
    lengths: Vec<usize>,
}

impl Tied {
    /// None if no two stages share any. All ranks of `over` come here, those of the pipeline and those that `shard` says share their
    /// stages out with them; `holders` are those of the replica.
    pub(super) fn among(
        over: &Group,
        shard: Option<&Group>,
        whole: &Parameters,
        holding: &Holding,
        holders: &[Holder],
        between_gpus: BetweenGpus,
    ) -> Result<Option<Tied>, Error> {
        let is_copied = |i: usize| {
            let copies =
                |holder: &Holder| holder.holding.own_number(i).is_some_and(|own| holder.holding.is_copy(own));
            holders.iter().any(copies)
        };
        let shared: Vec<usize> = (0..whole.names().len()).filter(|&i| is_copied(i)).collect();
        if shared.is_empty() {
            return Ok(None);
        }
        let own: Vec<_> = shared.iter().map(|&i| holding.own_number(i)).collect();
        let has_any = own.iter().any(Option::is_some);
        let group = over.split(has_any.then_some(0), 0)?;
        let is_whole = |Holder { holding, .. }: &Holder| {
            let has = |&i: &usize| holding.own_number(i).is_some();
            shared.iter().all(has) || !shared.iter().any(has)
        };
        let gpus = match &group {
            Some(group) if shard.is_none() && holders.iter().all(is_whole) => {
                let device = whole.values().device();
                between_gpus.meet("gradients that stages share", group, device, Via::CommStream)?
            }
            _ => None,
        };
        // Ranks of a pipeline have the same part of what is cut.
        let len = |&i: &usize| {
            let of = |Holder { holding, .. }: &Holder| Some(holding.own_len(holding.own_number(i)?));
            holders.iter().find_map(of).unwrap_or(0)
        };
        let lengths = shared.iter().map(len).collect();
        let of_shards = shard.map(Group::rank);
        Ok(Some(Tied { group, of_shards, gpus: gpus.map(Arc::new), own, lengths }))
    }

    /// Ends the group, on a rank that is of it, and what GPUs have under way.
    pub(super) fn abort(&self, because: &str) {
        self.group.iter().for_each(|group| group.abort(because));
        self.gpus.iter().for_each(|gpus| gpus.abort(because));
    }

    /// Sums the gradients that each stage has of them; one that hasn't one of them adds nothing. The compute stream may have to wait for
    /// that, of which `trail` is told.
    pub(super) fn sum(&self, inner: &mut dyn Strategy, own: &Parameters, trail: &Trail) -> Result<(), Error> {
        let Some(group) = &self.group else { return Ok(()) };
        // In the order of the whole model, which all ranks have.
        let numbers = self.own.iter().flatten().map(|&own| own..own + 1);
        if let Some(gpus) = &self.gpus
            && made_among(gpus, Becomes::Sum, trail, (inner, own), numbers)?
        {
            return Ok(());
        }
        trail.settle()?;
        let mut all = vec![0.0; self.lengths.iter().sum()];
        if let Some(of_shards) = self.of_shards {
            return self.sum_shards((group, of_shards), inner, own, &mut all);
        }
        // Where those that this rank has lie among all, in the order in which it has them.
        let mut places: Vec<(usize, Range<usize>)> = self
            .own
            .iter()
            .enumerate()
            .filter_map(|(number, own)| Some(((*own)?, self.place(number))))
            .collect();
        places.sort_by_key(|&(parameter, _)| parameter);
        let is_own = |parameter: usize| self.own.contains(&Some(parameter));
        inner.change_gradients(own, &is_own, &mut |held| {
            let mut left = &held[..];
            for (_, place) in &places {
                let (now, later) = left.split_at(place.len());
                all[place.clone()].copy_from_slice(now);
                left = later;
            }
            group.all_reduce(&mut all, ReduceOp::Sum)?;
            let mut left = held;
            for (_, place) in &places {
                let (now, later) = left.split_at_mut(place.len());
                now.copy_from_slice(&all[place.clone()]);
                left = later;
            }
            Ok(())
        })
    }

    /// The same where each rank has some elements of a stage's gradients: all of these together are the stages' sum.
    fn sum_shards(
        &self,
        (group, of_shards): (&Group, Rank),
        inner: &mut dyn Strategy,
        own: &Parameters,
        all: &mut [f32],
    ) -> Result<(), Error> {
        let number = |parameter: usize| self.own.iter().position(|own| *own == Some(parameter));
        let is_own = |parameter: usize| number(parameter).is_some();
        let place = |held: &HeldGradient<'_>| {
            let number = number(held.parameter).expect("only these come");
            let start = self.place(number).start + held.start;
            start..start + held.values.len()
        };
        inner.each_gradient(own, &is_own, &mut |held| {
            // What all of them hold is told by one.
            if !held.is_everywhere || of_shards == Rank(0) {
                all[place(&held)].copy_from_slice(held.values);
            }
        });
        group.all_reduce(all, ReduceOp::Sum)?;
        inner.each_gradient(own, &is_own, &mut |held| held.values.copy_from_slice(&all[place(&held)]));
        Ok(())
    }

    /// Where the elements of one of those that are shared lie among all.
    fn place(&self, number: usize) -> Range<usize> {
        let start: usize = self.lengths[..number].iter().sum();
        start..start + self.lengths[number]
    }
}
