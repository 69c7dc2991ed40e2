//! The running mean of the weights where ranks share out a state. Each has all of the mean, as it has all values (under ZeRO's third
//! stage there is none). But a rank that was cut off while it was brought the values of a step has the newest ones of its own
//! portion alone, and so that much of the mean.

use super::Trainer;
use crate::error::Error;
use phalanx_comm::Group;
use phalanx_nn::{Average, Parameters};
use phalanx_parallel::{HandOver, Portion, Strategy};
use std::ops::Range;

/// How much of the newest mean this rank has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Mean {
    /// All of it.
    Whole,
    /// That of the step before: it hasn't followed the step that was cut off.
    Behind,
    /// What belongs to the values that this rank keeps.
    Portion,
}

impl Trainer {
    /// Moves the running mean, if there is to be one, towards the values of now.
    pub(super) fn follow(&self, parameters: &Parameters, average: &mut Option<Average>) {
        match (average, self.ema) {
            (Some(average), Some(decay)) => average.update(parameters, decay),
            (average, Some(_)) => *average = Some(Average::of(parameters)),
            (_, None) => {}
        }
    }
}

impl Mean {
    /// Follows the step that it is behind, once `parameters` hold this rank's portion of it.
    pub(super) fn catch_up(
        &mut self,
        trainer: &Trainer,
        parameters: &Parameters,
        average: &mut Option<Average>,
    ) {
        if *self == Mean::Behind {
            trainer.follow(parameters, average);
            *self = Mean::Portion;
        }
    }

    /// Brings each rank of `group` all of the newest mean. `before` is what kept this rank's portion, if it has any of the newest
    /// state. False on all ranks where something of it is nowhere; a rank that fails still has what it had.
    pub(super) fn hand_over(
        &mut self,
        group: &Group,
        before: Option<&dyn Strategy>,
        parameters: &Parameters,
        average: &mut Option<Average>,
    ) -> Result<bool, Error> {
        debug_assert!(*self != Mean::Behind, "a rank catches up when it parts from the others");
        let wanted = Portion::whole(parameters.layout().len());
        let own = before.and(average.as_ref());
        let held = own.zip(before).map(|(_, before)| match self {
            Mean::Whole => wanted.clone(),
            Mean::Behind | Mean::Portion => before.portion(parameters),
        });
        let Some(over) = HandOver::among(group, held.as_ref(), &wanted)? else { return Ok(false) };
        let lent = || own.expect("only who has something is asked for it");
        let mut values = vec![0.0; wanted.count()];
        over.carry_out(
            group,
            |range, into| lent().values().read_range(range, into),
            |range: Range<usize>, piece| values[range].copy_from_slice(piece),
        )?;
        let mut buffers = vec![0.0; parameters.buffers().layout().len()];
        over.carry_buffers(
            group,
            buffers.len(),
            |into| lent().buffers().with(|buffers| into.copy_from_slice(buffers)),
            |whole| buffers.copy_from_slice(whole),
        )?;
        if held.as_ref() != Some(&wanted) {
            *average = Some(Average::of_arrays(values, buffers));
        }
        *self = Mean::Whole;
        Ok(true)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use phalanx_nn::{BatchNorm2d, Linear, Sequential};
    use phalanx_parallel::{Fsdp, FsdpConfig, Sharded};
    use phalanx_tensor::Device;

    /// What each rank has: `None` nothing, else how much; the mean is to be whole on all of them.
    #[track_caller]
    fn check(own: &[Option<Mean>], is_there: bool) {
        let trainer = Trainer { ema: Some(0.75), ..Trainer::default() };
        let rank = |group: Group| {
            let rank = group.rank().index();
            // Values that no number of these ranks divides.
            let mut model = Sequential::new().then(Linear::new(5, 7)).then(BatchNorm2d::new(3));
            let parameters = Parameters::build(&mut model, &Device::cpu(1), 0);
            let config = FsdpConfig { sharded: Sharded::States, unit_bytes: 1, ..FsdpConfig::default() };
            let fsdp = Fsdp::new(group.clone(), &model, &parameters, config).unwrap();
            let mut average = Some(Average::of(&parameters));
            let now: Vec<f32> = (0..parameters.layout().len()).map(|i| i as f32).collect();
            parameters.values().write_flat(&now);
            parameters.buffers().write_flat(&vec![8.0f32; parameters.buffers().layout().len()]);
            let mut whole = average.clone();
            trainer.follow(&parameters, &mut whole);
            let mut mean = own[rank].unwrap_or(Mean::Whole);
            match own[rank] {
                None => average = None,
                Some(Mean::Whole) => average = whole.clone(),
                Some(_) => {
                    let portion = fsdp.portion(&parameters);
                    // The others' values of this step never came.
                    let is_own = |i: usize| portion.elements.iter().any(|held| held.contains(&i));
                    let here: Vec<f32> =
                        now.iter().enumerate().map(|(i, now)| if is_own(i) { *now } else { -1e3 }).collect();
                    parameters.values().write_flat(&here);
                    mean = Mean::Behind;
                    mean.catch_up(&trainer, &parameters, &mut average);
                    assert_eq!(mean, Mean::Portion);
                }
            }
            let before: Option<&dyn Strategy> = own[rank].map(|_| &fsdp as &dyn Strategy);
            let found = mean.hand_over(&group, before, &parameters, &mut average).unwrap();
            assert_eq!(found, is_there, "rank {rank} of {own:?}");
            if found {
                let numbers = |average: &Option<Average>| {
                    let average = average.as_ref().unwrap();
                    [average.values(), average.buffers()].map(|shadow| shadow.with(<[f32]>::to_vec))
                };
                assert_eq!(mean, Mean::Whole);
                assert_eq!(numbers(&average), numbers(&whole), "rank {rank} of {own:?}");
            }
        };
        std::thread::scope(|scope| {
            Group::threads(own.len()).into_iter().for_each(|group| {
                scope.spawn(move || rank(group));
            });
        });
    }

    #[test]
    fn all_ranks_come_to_the_newest_mean_if_they_have_it_together() {
        let [whole, portion] = [Mean::Whole, Mean::Portion].map(Some);
        check(&[whole, whole, whole], true);
        check(&[None, portion, whole], true);
        check(&[portion, whole, None, None], true);
        check(&[portion, portion, portion], true);
        check(&[portion, None, portion], false);
        check(&[None, None], false);
    }
}
