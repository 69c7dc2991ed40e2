//! Whose state the ranks of a membership go on with: that of the one that is furthest. One that comes anew takes it from there
//! over the group, and so does one that lost the others just before the end of a step which they made: a step counts as soon
//! as any rank that is left has made it.

use super::State;
use crate::checkpoint::Position;
use crate::error::Error;
use crate::event::Event;
use phalanx_comm::{Group, Rank};
use phalanx_nn::{Average, Parameters};
use serde::{Deserialize, Serialize};

/// What a rank has of the run.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Standing {
    /// What it began with.
    Fresh,
    /// A state that the run came to, or began at.
    Holds {
        /// Samples of a step of the run.
        global_batch: usize,
    },
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
struct Header {
    position: Position,
    global_batch: usize,
    optimizer_steps: u64,
    /// How many arrays the optimizer has.
    states: usize,
    average: bool,
    told: Told,
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
    let own = key(standing, state, told);
    let mut all = vec![0u64; KEY * group.world_size()];
    group.all_gather(&own, &mut all)?;
    let keys = all.as_chunks::<KEY>().0;
    // Of equals the lowest rank.
    let source = (0..keys.len()).rev().max_by_key(|&rank| keys[rank]).expect("a group has a rank");
    if keys[source][0] == 0 {
        return Ok(None);
    }
    if keys.iter().all(|key| *key == keys[source]) {
        return Ok(Some(keys[source][1] as usize));
    }
    let root = Rank(source as u32);
    let header = share_header(group, root, standing, state, told)?;
    let is_source = group.rank() == root;
    let share = |own: Option<&[f32]>, len| share_array(group, root, own, len);
    let arenas = [parameters.values(), parameters.buffers()];
    let mut shared = Vec::new();
    for arena in arenas {
        let own = arena.flat::<f32>();
        shared.push(share(Some(&own[..]).filter(|_| is_source), own.len())?);
    }
    let [values, buffers] = arenas.map(|arena| arena.flat::<f32>().len());
    let mut states = Vec::new();
    for i in 0..header.states {
        let own = state.optimizer.state().nth(i).filter(|_| is_source);
        states.push(share(own.map(|(_, array)| &array[..]), values)?);
    }
    let average = state.average.as_ref().filter(|_| is_source);
    let average = match header.average {
        true => Some(Average::of_arrays(
            share(average.map(Average::values), values)?,
            share(average.map(Average::buffers), buffers)?,
        )),
        false => None,
    };
    // All of it is here.
    if !is_source {
        for (arena, array) in arenas.into_iter().zip(&shared) {
            arena.flat_mut::<f32>().copy_from_slice(array);
        }
        state.optimizer.take_over(header.optimizer_steps, states);
        (state.progress, state.average) = (header.position.into(), average);
        *told = header.told;
    }
    Ok(Some(header.global_batch))
}

const KEY: usize = 5;

/// How far a rank is, for comparison: whether it holds a state, the samples of a step, the position, and whether what came of
/// that was told.
fn key(standing: Standing, state: &State, told: &Told) -> [u64; KEY] {
    match standing {
        Standing::Fresh => [0; KEY],
        Standing::Holds { global_batch } => {
            let (step, epoch) = (state.progress.step, state.progress.epoch);
            [1, global_batch as u64, step, epoch, u64::from(told.evaluated == Some(step))]
        }
    }
}

/// Hands what the root has to all others, who get it; the root gets nothing.
fn share_array(group: &Group, root: Rank, own: Option<&[f32]>, len: usize) -> Result<Vec<f32>, Error> {
    let (mut array, mut lent) = match own {
        Some(_) => (Vec::new(), vec![0.0; len.min(PIECE)]),
        None => (vec![0.0; len], Vec::new()),
    };
    for start in (0..len).step_by(PIECE) {
        let end = len.min(start + PIECE);
        match own {
            Some(own) => {
                let lent = &mut lent[..end - start];
                lent.copy_from_slice(&own[start..end]);
                group.broadcast(lent, root)?;
            }
            None => group.broadcast(&mut array[start..end], root)?,
        }
    }
    Ok(array)
}

/// Numbers that are handed over at a time: few enough to stay in the cache, where the root copies them to.
const PIECE: usize = 1 << 17;

fn share_header(
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
            states: state.optimizer.state().count(),
            average: state.average.is_some(),
            told: told.clone(),
        };
        text = serde_json::to_vec(&header).expect("a header is always JSON");
    }
    let mut len = [text.len() as u64];
    group.broadcast(&mut len, root)?;
    text.resize(len[0] as usize, 0);
    group.broadcast(&mut text, root)?;
    serde_json::from_slice(&text)
        .map_err(|error| Error::Join(format!("rank {root} tells of its state what makes no sense: {error}")))
}
