//! As `settle.rs`, where each rank has only a part of the state: what was lost is handed over by whoever has it as well, to those in
//! the place of the lost. Only where nobody has it does the newest checkpoint count.
//!
//! A step counts as soon as any rank has made it, and then all that are left make it: who has made one has come to its tally, which all
//! ranks come to with whole gradients. So whoever was cut off in that tally still has these, and makes the step alone. Between two steps
//! ranks differ in nothing but the step and what they keep of the model, so all that are left have parts of one state.

use super::settle::{Furthest, Header, Standing, Told, share_header};
use super::{Progress, State};
use crate::error::Error;
use phalanx_comm::{Group, Rank};
use phalanx_nn::{Average, Parameters, Shadow};
use phalanx_parallel::{HandOver, Strategy};
use std::ops::Range;

/// With what the ranks of a membership begin.
pub(super) enum Beginning {
    /// None of them has anything of the run.
    Anew,
    /// With the newest checkpoint of a run with so many samples a step: parts of what they had are lost.
    Checkpoint {
        /// Samples of a step.
        global_batch: usize,
    },
    /// With what each of them has.
    Whole {
        /// Samples of a step.
        global_batch: usize,
    },
    /// With what some of them have parts of.
    Newest(Box<Newest>),
}

/// The newest state that there are parts of.
pub(super) struct Newest {
    /// The lowest rank that has come furthest.
    pub(super) source: Rank,
    /// What this rank has of it.
    pub(super) own: Own,
    header: Header,
}

/// What a rank has of a state.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Own {
    /// Nothing.
    Nothing,
    /// The state a step before, and the gradients of that step, whole.
    StepBefore,
    /// A part.
    Part,
}

/// Finds out with what all ranks begin. `is_prepared` says whether this one has whole gradients of a step that it hasn't made.
pub(super) fn agree(
    group: &Group,
    standing: Standing,
    is_prepared: bool,
    state: &State,
    told: &Told,
) -> Result<Beginning, Error> {
    let Furthest { rank: source, key: [stage, global_batch, step, ..], .. } =
        Furthest::of(group, standing, state, told)?;
    match stage {
        Standing::FRESH => return Ok(Beginning::Anew),
        Standing::LOST => return Ok(Beginning::Checkpoint { global_batch: global_batch as usize }),
        _ => {}
    }
    let header = share_header(group, source, standing, state, told)?;
    let has_any = matches!(standing, Standing::Holds { .. });
    let own = match state.progress.step {
        own if has_any && own == step => Own::Part,
        own if has_any && is_prepared && own + 1 == step => Own::StepBefore,
        _ => Own::Nothing,
    };
    Ok(Beginning::Newest(Box::new(Newest { source, own, header })))
}

impl Newest {
    /// Samples of a step of the run.
    pub(super) fn global_batch(&self) -> usize {
        self.header.global_batch
    }

    /// Where the run is, and what was told of it.
    pub(super) fn take_up(&self, progress: &mut Progress, told: &mut Told) {
        (*progress, *told) = (self.header.position.clone().into(), self.header.told.clone());
    }

    /// Brings this rank what `strategy` keeps: values and buffers to their places, and what lies beside them to `state`. `before` is
    /// what kept this rank's part in the membership before. False on all ranks where something of it is nowhere; a rank that fails
    /// still has what it had.
    pub(super) fn hand_over(
        &self,
        group: &Group,
        before: Option<&dyn Strategy>,
        strategy: &dyn Strategy,
        parameters: &Parameters,
        state: &mut State,
    ) -> Result<bool, Error> {
        let before = before.filter(|_| self.own != Own::Nothing);
        let (held, wanted) = (before.map(|before| before.portion(parameters)), strategy.portion(parameters));
        let Some(over) = HandOver::among(group, held.as_ref(), &wanted)? else { return Ok(false) };
        let (old, new) =
            (before.map(|before| before.own_parameters(parameters)), strategy.own_parameters(parameters));
        let lent = || old.expect("only who has something is asked for it");
        over.carry_out(
            group,
            |range, into| {
                before.expect("only who has something is asked for it").read_held(parameters, range, into);
            },
            |range, values| strategy.write_held(parameters, range, values),
        )?;
        over.carry_buffers(
            group,
            new.buffers().layout().len(),
            |into| lent().buffers().with_flat(|all: &[f32]| into.copy_from_slice(all)),
            |buffers| new.buffers().write_flat(buffers),
        )?;
        // Who keeps what it had keeps the arrays beside it as they are: the optimizer's, and the running mean behind them.
        let stays = held.as_ref() == Some(&wanted);
        let mut own: Vec<Shadow> = state.optimizer.state().map(|(_, state)| state.clone()).collect();
        own.extend(state.average.as_ref().map(|average| average.values().clone()));
        let mut arrays = Vec::with_capacity(own.len());
        for i in 0..self.header.states + usize::from(self.header.average) {
            let mut array = vec![0.0; if stays { 0 } else { wanted.count() }];
            let lent = |range: Range<usize>, into: &mut [f32]| {
                let has = held.as_ref().zip(own.get(i));
                let (held, own) = has.expect("only who has something is asked for it");
                own.read_range(held.place_of(&range), into);
            };
            over.carry_out(group, lent, |range, values| {
                if !stays {
                    array[wanted.place_of(&range)].copy_from_slice(values);
                }
            })?;
            arrays.push(array);
        }
        drop(own);
        let mean = match self.header.average {
            true => Some(self.hand_over_buffers_of_mean(&over, group, new, state)?),
            false => None,
        };
        if !stays {
            let values = |arrays: &mut Vec<_>| arrays.pop().expect("the mean is the last");
            state.average = mean.map(|buffers| Average::of_arrays(values(&mut arrays), buffers));
            let Header { optimizer_steps, rested, .. } = &self.header;
            state.optimizer.take_over(*optimizer_steps, rested.clone(), arrays);
        }
        new.count_as_given();
        Ok(true)
    }

    /// The running mean of the buffers of this rank's part.
    fn hand_over_buffers_of_mean(
        &self,
        over: &HandOver,
        group: &Group,
        new: &Parameters,
        state: &State,
    ) -> Result<Vec<f32>, Error> {
        let mut buffers = vec![0.0; new.buffers().layout().len()];
        let lent = || state.average.as_ref().expect("only who has something is asked for it").buffers();
        over.carry_buffers(
            group,
            buffers.len(),
            |into| lent().with(|all| into.copy_from_slice(all)),
            |all| buffers.copy_from_slice(all),
        )?;
        Ok(buffers)
    }
}
