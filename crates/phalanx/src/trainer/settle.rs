//! Whose state the ranks of a membership go on with: that of the one that is furthest. One that comes anew takes it from there
//! over the group, and so does one that lost the others just before the end of a step which they made: a step counts as soon
//! as any rank that is left has made it.

use super::State;
use crate::checkpoint::Position;
use crate::error::Error;
use crate::event::Event;
use crate::worker::share;
use phalanx_comm::{Group, Rank};
use phalanx_nn::optim::{Optimizer, Rested};
use phalanx_nn::{Average, Parameters};
use serde::{Deserialize, Serialize};

/// What a rank has of the run.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Standing {
    /// What it began with.
    Fresh,
    /// A state of which parts are lost: the run goes on from its newest checkpoint.
    Lost {
        /// Samples of a step of the run.
        global_batch: usize,
    },
    /// A state that the run came to, or began at.
    Holds {
        /// Samples of a step of the run.
        global_batch: usize,
    },
}

impl Standing {
    pub(super) const FRESH: u64 = 0;
    pub(super) const LOST: u64 = 1;
    const HOLDS: u64 = 2;
}

/// What of the run was told.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct Told {
    /// What is to be told last.
    pub(super) last: Option<Event>,
    /// After which step the last evaluation was told.
    pub(super) evaluated: Option<u64>,
}

/// What goes before the arrays.
#[derive(Serialize, Deserialize)]
pub(super) struct Header {
    pub(super) position: Position,
    pub(super) global_batch: usize,
    pub(super) optimizer_steps: u64,
    /// Who made fewer.
    pub(super) rested: Rested,
    /// How many arrays the optimizer has.
    pub(super) states: usize,
    pub(super) average: bool,
    pub(super) told: Told,
}

/// Brings all ranks to the newest state that any of them holds, and gives the samples of a step of the run; none if no rank
/// holds any. A rank that fails in this still has what it had.
pub(super) fn settle(
    group: &Group,
    standing: Standing,
    parameters: &Parameters,
    state: &mut State,
    told: &mut Told,
) -> Result<Option<usize>, Error> {
    let Furthest { rank: root, key: [stage, global_batch, ..], are_all } =
        Furthest::of(group, standing, state, told)?;
    if stage == Standing::FRESH {
        return Ok(None);
    }
    if are_all {
        return Ok(Some(global_batch as usize));
    }
    let header = share_header(group, root, standing, state, told)?;
    if group.rank() == root {
        lend_all(group, parameters, state)?;
    } else {
        let is_empty = !parameters.has_values();
        let landed = parameters.take_values(|values, buffers| {
            if is_empty {
                return land_all(group, root, [values, buffers], &header, &mut state.optimizer);
            }
            // What this rank has is given up when all of it is here.
            let mut arrays = [vec![0.0; values.len()], vec![0.0; buffers.len()]];
            let into = arrays.each_mut().map(Vec::as_mut_slice);
            let landed = land_all(group, root, into, &header, &mut state.optimizer)?;
            values.copy_from_slice(&arrays[0]);
            buffers.copy_from_slice(&arrays[1]);
            Ok(landed)
        })?;
        state.optimizer.take_over(header.optimizer_steps, header.rested, landed.states);
        (state.progress, state.average) = (header.position.into(), landed.average);
        *told = header.told;
    }
    Ok(Some(header.global_batch))
}

/// The arrays of a state beside values and buffers, as they came.
struct Landed {
    states: Vec<Vec<f32>>,
    average: Option<Average>,
}

/// Hands all arrays of this rank's state to the others.
fn lend_all(group: &Group, parameters: &Parameters, state: &State) -> Result<(), Error> {
    let own = |own: &[f32]| lend(group, own);
    parameters.values().with_flat(own)?;
    parameters.buffers().with_flat(own)?;
    for (_, shadow) in state.optimizer.state() {
        shadow.with(own)?;
    }
    if let Some(average) = &state.average {
        average.values().with(own)?;
        average.buffers().with(own)?;
    }
    Ok(())
}

/// Takes all arrays of the root's state, in the order of [`lend_all`]: values and buffers to where they are to go.
fn land_all(
    group: &Group,
    root: Rank,
    [values, buffers]: [&mut [f32]; 2],
    header: &Header,
    optimizer: &mut Optimizer,
) -> Result<Landed, Error> {
    let [len, buffers_len] = [values.len(), buffers.len()];
    land(group, root, values)?;
    land(group, root, buffers)?;
    let land_in = |mut array: Vec<f32>| land(group, root, &mut array).map(|()| array);
    let states: Result<_, Error> = (0..header.states).map(|_| land_in(optimizer.take_room(len))).collect();
    let states = states?;
    let average = match header.average {
        true => Some(Average::of_arrays(land_in(vec![0.0; len])?, land_in(vec![0.0; buffers_len])?)),
        false => None,
    };
    Ok(Landed { states, average })
}

/// Tells all ranks what this one was to tell of the run; gives what others were to.
pub(super) fn pass_on(group: &Group, untold: &[Event]) -> Result<Vec<Vec<Event>>, Error> {
    let own = match untold {
        [] => Vec::new(),
        events => serde_json::to_vec(events).expect("events are always JSON"),
    };
    let mut lens = vec![0u64; group.world_size()];
    group.all_gather(&[own.len() as u64], &mut lens)?;
    let mut passed = Vec::new();
    for (rank, len) in (0..).map(Rank).zip(lens).filter(|(_, len)| *len > 0) {
        let mut text = if rank == group.rank() { own.clone() } else { vec![0; len as usize] };
        group.broadcast(&mut text, rank)?;
        if rank != group.rank() {
            let events = serde_json::from_slice(&text).map_err(|error| {
                Error::Join(format!("rank {rank} tells of what happened what makes no sense: {error}"))
            })?;
            passed.push(events);
        }
    }
    Ok(passed)
}

const KEY: usize = 5;

/// The rank that has come furthest.
pub(super) struct Furthest {
    /// Of equals the lowest.
    pub(super) rank: Rank,
    /// How far it is.
    pub(super) key: [u64; KEY],
    /// Whether all others are as far.
    are_all: bool,
}

impl Furthest {
    /// All ranks of `group` have to ask, each with what it has of the run.
    pub(super) fn of(
        group: &Group,
        standing: Standing,
        state: &State,
        told: &Told,
    ) -> Result<Furthest, Error> {
        let own = key(standing, state, told);
        let mut all = vec![0u64; KEY * group.world_size()];
        group.all_gather(&own, &mut all)?;
        let keys = all.as_chunks::<KEY>().0;
        let rank = (0..keys.len()).rev().max_by_key(|&rank| keys[rank]).expect("a group has a rank");
        let are_all = keys.iter().all(|key| *key == keys[rank]);
        Ok(Furthest { rank: Rank(rank as u32), key: keys[rank], are_all })
    }
}

/// How far a rank is, for comparison: whether it holds a state, the samples of a step, the position, and whether what came of
/// that was told.
fn key(standing: Standing, state: &State, told: &Told) -> [u64; KEY] {
    match standing {
        Standing::Fresh => [Standing::FRESH; KEY],
        Standing::Lost { global_batch } => [Standing::LOST, global_batch as u64, 0, 0, 0],
        Standing::Holds { global_batch } => {
            let (step, epoch) = (state.progress.step, state.progress.epoch);
            let evaluated = u64::from(told.evaluated == Some(step));
            [Standing::HOLDS, global_batch as u64, step, epoch, evaluated]
        }
    }
}

/// Hands an array of this rank to all others, by way of a piece that stays in the cache.
fn lend(group: &Group, own: &[f32]) -> Result<(), Error> {
    let mut lent = vec![0.0; own.len().min(PIECE)];
    for piece in own.chunks(PIECE) {
        let lent = &mut lent[..piece.len()];
        lent.copy_from_slice(piece);
        group.broadcast(lent, group.rank())?;
    }
    Ok(())
}

/// Takes an array of the root.
fn land(group: &Group, root: Rank, into: &mut [f32]) -> Result<(), Error> {
    into.chunks_mut(PIECE).try_for_each(|piece| Ok(group.broadcast(piece, root)?))
}

/// Numbers that are handed over at a time: few enough to stay in the cache.
const PIECE: usize = 1 << 17;

pub(super) fn share_header(
    group: &Group,
    root: Rank,
    standing: Standing,
    state: &State,
    told: &Told,
) -> Result<Header, Error> {
    let mut text = Vec::new();
    if let Standing::Holds { global_batch } = standing {
        let header = Header {
            position: (&state.progress).into(),
            global_batch,
            optimizer_steps: state.optimizer.steps(),
            rested: state.optimizer.rested(),
            states: state.optimizer.state().count(),
            average: state.average.is_some(),
            told: told.clone(),
        };
        text = serde_json::to_vec(&header).expect("a header is always JSON");
    }
    let text = share(group, root, text)?;
    serde_json::from_slice(&text)
        .map_err(|error| Error::Join(format!("rank {root} tells of its state what makes no sense: {error}")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_some_ranks_were_to_tell_reaches_all_others_by_rank() {
        let note = |text: &str| Event::Note { message: text.to_owned() };
        let untold = [vec![], vec![note("first"), note("second")], vec![note("third")]];
        std::thread::scope(|scope| {
            for group in Group::threads(3) {
                let untold = &untold;
                scope.spawn(move || {
                    let rank = group.rank().index();
                    let others: Vec<Vec<Event>> =
                        (1..3).filter(|other| *other != rank).map(|other| untold[other].clone()).collect();
                    assert_eq!(pass_on(&group, &untold[rank]).unwrap(), others, "rank {rank}");
                });
            }
        });
    }
}
