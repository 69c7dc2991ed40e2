//! Letters between stages from GPU to GPU, where each rank of a pipeline has one.
//!
//! NCCL brings nothing to where it isn't waited for: a send is under way until the other rank receives it. So each ordered pair of
//! neighbours has a communicator and a stream of its own, a *lane*, on which one only sends and the other only receives, and what is
//! on one lane keeps none on another, and no computing, waiting. On a lane both have the letters in the order in which the sender's
//! list of actions makes them (LANE-ORDER), whatever the receiver wants first: what it is given before it wants it waits aside.
//! So the letters of a schedule that plays to its end all arrive.
//!
//! It is the compute stream that waits for a letter, and the host goes on, two letters of a lane ahead at most ([`Trail`]).

use super::schedule::{Action, Schedule, Work};
use super::stage::MicroBatch;
use crate::error::Error;
use phalanx_comm::{Deadline, GpuGroup, GpuWork, Group, Rank, Trail, Unfit};
use phalanx_tensor::{DType, Device, GpuTensor, Shape, Tensor};
use std::collections::{BTreeSet, HashMap, VecDeque};
use std::sync::Arc;
use std::time::Duration;

/// The lanes of one rank, by the rank at their other end.
pub(super) struct Lanes {
    to: HashMap<usize, To>,
    from: HashMap<usize, From>,
    timeout: Duration,
}

struct To {
    gpus: Arc<GpuGroup>,
    peer: Rank,
    sending: VecDeque<GpuWork<GpuTensor>>,
}

struct From {
    gpus: Arc<GpuGroup>,
    peer: Rank,
    /// The letters of a pass, in the order in which they come, and how many of them were asked for.
    order: Vec<Action>,
    asked: usize,
    coming: HashMap<Action, GpuWork<GpuTensor>>,
}

/// Letters of a lane that the host may have taken while its GPU waits for them.
const MOST_AHEAD: usize = 2;

/// What one rank sends another in a pass, as its list of actions makes it: of micro-batches with samples.
fn letters(schedule: &Schedule, micro_batches: &[MicroBatch], [from, to]: [usize; 2]) -> Vec<Action> {
    let has_samples = |action: &&Action| micro_batches[action.micro_batch].samples > 0;
    let goes_there = |action: &&Action| goes_to(schedule, action) == Some(to);
    schedule.actions(from).iter().filter(goes_there).filter(has_samples).copied().collect()
}

/// The rank that is sent what an action makes, if that is another.
fn goes_to(schedule: &Schedule, action: &Action) -> Option<usize> {
    let stage = match action.work {
        Work::Forward => Some(action.stage + 1).filter(|&stage| stage < schedule.stages()),
        Work::Backward | Work::BackwardInput => action.stage.checked_sub(1),
        Work::BackwardWeight => None,
    };
    stage.map(|stage| schedule.rank_of(stage)).filter(|&rank| rank != schedule.rank_of(action.stage))
}

/// Who sends letters to whom, in an order that all ranks come to.
fn pairs(schedule: &Schedule) -> BTreeSet<[usize; 2]> {
    let of = |from: usize| {
        let to = schedule.actions(from).iter().filter_map(|action| goes_to(schedule, action));
        to.map(move |to| [from, to])
    };
    (0..schedule.shape().ranks).flat_map(of).collect()
}

impl Lanes {
    /// Those of this rank of `group`, whose ranks have a GPU as `device` each, and come with the same schedule; or why NCCL can't be used.
    pub(super) fn among(
        group: &Group,
        schedule: &Schedule,
        device: &Device,
    ) -> Result<Result<Lanes, Unfit>, Error> {
        let gpu = device.gpu().expect("lanes lie between GPUs");
        let own = group.rank().index();
        let pairs: Vec<[Rank; 2]> =
            pairs(schedule).into_iter().map(|pair| pair.map(|rank| Rank(rank as u32))).collect();
        let lanes = match GpuGroup::pairs(group, gpu, &pairs)? {
            Ok(lanes) => lanes,
            Err(unfit) => return Ok(Err(unfit)),
        };
        let timeout = group.timeout();
        let (mut to, mut from) = (HashMap::new(), HashMap::new());
        for (pair, gpus) in lanes {
            // The sender is the first of the two. They meet once before there is anything else to do, since a library that is
            // still looking for the other rank takes no more from this one.
            let gpus = Arc::new(gpus);
            let [sends, receives] = pair.map(|rank| rank.index());
            let word = Tensor::zeros(device, [1], DType::F32).to_lend().expect("the device is a GPU");
            let deadline = Deadline::after(timeout);
            if sends == own {
                let peer = Rank(1);
                gpus.start_send(word, peer)?.wait(deadline)?;
                to.insert(receives, To { gpus, peer, sending: VecDeque::new() });
            } else {
                let peer = Rank(0);
                gpus.start_receive(word, peer)?.wait(deadline)?;
                let (order, coming) = (Vec::new(), HashMap::new());
                from.insert(sends, From { gpus, peer, order, asked: 0, coming });
            }
        }
        Ok(Ok(Lanes { to, from, timeout }))
    }

    /// Begins a pass of this rank.
    pub(super) fn begin(&mut self, schedule: &Schedule, own: usize, micro_batches: &[MicroBatch]) {
        for (&rank, from) in &mut self.from {
            from.order = letters(schedule, micro_batches, [rank, own]);
            from.asked = 0;
        }
    }

    /// Sends a copy of the values; doesn't wait for it.
    pub(super) fn send(&mut self, to: usize, values: &Tensor) -> Result<(), Error> {
        let lane = self.to.get_mut(&to).expect("there is a lane to everyone who is sent anything");
        while lane.sending.front_mut().is_some_and(GpuWork::poll) {
            let sent = lane.sending.pop_front().expect("it was looked at");
            sent.wait(Deadline::after(self.timeout))?;
        }
        let values = values.to_lend().expect("a stage on a GPU makes values there");
        lane.sending.push_back(lane.gpus.start_send(values, lane.peer)?);
        Ok(())
    }

    /// The next letter of rank `from` that has to be asked for before `wanted` is, or `wanted` itself; none if it was asked for.
    pub(super) fn lacking(&self, from: usize, wanted: Action) -> Option<Action> {
        let lane = &self.from[&from];
        let place = lane.order.iter().position(|&action| action == wanted);
        let place = place.expect("the other rank's list makes what this one's wants");
        (lane.asked <= place).then(|| lane.order[lane.asked])
    }

    /// The letter of rank `from` that comes behind all that were asked for.
    pub(super) fn next(&self, from: usize) -> Option<Action> {
        let lane = &self.from[&from];
        lane.order.get(lane.asked).copied()
    }

    /// Asks for that one, which is of such a form.
    pub(super) fn ask(
        &mut self,
        from: usize,
        device: &Device,
        shape: Shape,
        dtype: DType,
    ) -> Result<(), Error> {
        let lane = self.from.get_mut(&from).expect("there is a lane from everyone who sends anything");
        let action = lane.order[lane.asked];
        let room = GpuTensor::stale(device, shape, dtype).expect("the device is a GPU");
        lane.coming.insert(action, lane.gpus.start_receive(room, lane.peer)?);
        lane.asked += 1;
        Ok(())
    }

    /// A letter that was asked for: the compute stream waits for it, which `trail` is told of.
    pub(super) fn take(&mut self, from: usize, wanted: Action, trail: &Trail) -> Result<Tensor, Error> {
        let lane = self.from.get_mut(&from).expect("there is a lane from everyone who sends anything");
        let work = lane.coming.remove(&wanted).expect("it was asked for");
        Ok(trail.join(&lane.gpus, work, MOST_AHEAD)?.into_tensor())
    }

    /// Has the compute stream wait until all that was sent has come, which `trail` is told of.
    pub(super) fn deliver(&mut self, trail: &Trail) -> Result<(), Error> {
        for lane in self.to.values_mut() {
            while let Some(sent) = lane.sending.pop_front() {
                trail.join(&lane.gpus, sent, MOST_AHEAD)?;
            }
        }
        Ok(())
    }

    /// The ranks of each.
    pub(super) fn groups(&self) -> impl Iterator<Item = &Group> {
        let to = self.to.values().map(|lane| lane.gpus.group());
        to.chain(self.from.values().map(|lane| lane.gpus.group()))
    }

    /// Ends all of them, with what is under way.
    pub(super) fn abort(&self, reason: &str) {
        self.to.values().for_each(|lane| lane.gpus.abort(reason));
        self.from.values().for_each(|lane| lane.gpus.abort(reason));
    }
}

#[cfg(test)]
mod tests {
    use super::super::schedule::{ScheduleKind, Shape as Of};
    use super::*;
    use phalanx_nn::Ctx;

    fn of(samples: usize) -> MicroBatch {
        MicroBatch { input: None, target: None, ctx: Ctx::eval(), samples, weight: 1.0 }
    }

    /// Plays a pass as GPUs do at their slowest: a send is done once the other rank has asked for it, and a rank that wants a
    /// letter asks for those before it.
    #[test]
    fn all_letters_arrive_whichever_a_rank_wants_first() {
        let shapes = [(2, 1, 4), (3, 1, 2), (2, 2, 4), (4, 3, 8)];
        for kind in ScheduleKind::ALL {
            for (ranks, chunks, n) in shapes {
                let Ok(schedule) = Schedule::new(kind, Of { ranks, chunks, micro_batches: n }) else {
                    continue;
                };
                let micro_batches: Vec<MicroBatch> = (0..n).map(|i| of(usize::from(i + 1 < n))).collect();
                let orders: HashMap<[usize; 2], Vec<Action>> = pairs(&schedule)
                    .into_iter()
                    .map(|pair| (pair, letters(&schedule, &micro_batches, pair)))
                    .collect();
                let (mut sent, mut asked) = (HashMap::new(), HashMap::new());
                let mut next = vec![0; ranks];
                while (0..ranks).any(|rank| next[rank] < schedule.actions(rank).len()) {
                    let before = next.clone();
                    for rank in 0..ranks {
                        let Some(&action) = schedule.actions(rank).get(next[rank]) else { continue };
                        if action.micro_batch + 1 == n {
                            next[rank] += 1;
                            continue;
                        }
                        let of_others = |needed: &Action| schedule.rank_of(needed.stage) != rank;
                        if let Some(needed) = schedule.needs(action).into_iter().flatten().find(of_others) {
                            let pair = [schedule.rank_of(needed.stage), rank];
                            let place = orders[&pair].iter().position(|&letter| letter == needed).unwrap();
                            let asked: &mut usize = asked.entry(pair).or_default();
                            *asked = (*asked).max(place + 1);
                            if sent.get(&pair).copied().unwrap_or(0) <= place {
                                continue;
                            }
                        }
                        next[rank] += 1;
                        if let Some(to) = goes_to(&schedule, &action) {
                            let count: &mut usize = sent.entry([rank, to]).or_default();
                            assert_eq!(
                                orders[&[rank, to]][*count],
                                action,
                                "letters are sent in their order"
                            );
                            *count += 1;
                        }
                    }
                    assert_ne!(next, before, "{kind} of {ranks} ranks stands still");
                }
                assert!(orders.iter().all(|(pair, order)| asked[pair] == order.len()));
            }
        }
    }
}
