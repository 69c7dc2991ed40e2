//! Who has come, who is lost, and what follows from it: no I/O, no clock.
//!
//! Ranks that hold the run's state wait for nobody. Where one of them is lost, the others are told at once, and as soon as all
//! of them have left the membership at hand the next one begins, of them alone: they go on with their step, and nobody has to
//! be handed anything before. Those that have come anew wait until the members let them in, at the end of a step of theirs, and
//! where there are no members (at first, or when all were lost) for each other.
//!
//! Ranks of which each holds only a part of the state ([`GoesOn::WithAll`]) can't go on without the lost: they leave at once as well, but
//! the next membership begins when others have come in the place of those, or these are not expected any more.

use phalanx_job::{GoesOn, Roster};
use phalanx_wire::{Generation, Rank};
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

#[cfg(test)]
mod tests;

/// A worker, by the number of its connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Member(pub u64);

/// The workers of a run, as far as they are connected.
#[derive(Clone, Debug)]
pub struct Membership {
    /// That of the newest roster, or the one that comes first.
    generation: Generation,
    /// The ranks that workers are started with, as long as they are wanted.
    seats: BTreeSet<u32>,
    /// Whether there was a roster.
    begun: bool,
    /// Whether some of the membership at hand are lost, or were given up, who may not know it: the others are to leave it.
    lost: bool,
    /// Whether all members once said that they go on in place: then so do those that come anew, who run the same program.
    in_place: bool,
    /// Whether a member said that it goes on with as many as are expected only.
    needs_all: bool,
    /// Whether all are to end since some are lost.
    ends: bool,
    workers: BTreeMap<Member, Worker>,
}

/// What is known of a worker.
#[derive(Clone, Debug)]
struct Worker {
    /// The rank that it was started with.
    seat: Rank,
    address: String,
    /// Its rank in the membership at hand; none if it comes anew.
    rank: Option<Rank>,
    /// Whether it waits for the next roster.
    waits: bool,
    goes_on: bool,
    /// What it was told to do about the membership at hand.
    told: Leave,
}

/// When a member is to leave the membership at hand.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Leave {
    /// When it likes.
    Whenever,
    /// At the end of its step: somebody waits to come in.
    Soon,
    /// Now: another of its members is lost.
    Now,
}

/// What to do after something happened.
#[derive(Clone, Debug, PartialEq)]
pub enum Decision {
    /// Wait for these ranks.
    Wait {
        /// Who isn't there yet, or hasn't left yet.
        missing: Vec<u32>,
    },
    /// Tell everyone of them.
    Begin {
        /// Who has which rank.
        ranks: Vec<(Member, Rank)>,
        /// Who is in it.
        roster: Roster,
    },
    /// Tell these members to leave the membership at hand.
    Recall {
        /// Which.
        members: Vec<Member>,
        /// When.
        leave: Leave,
    },
    /// Don't take this one.
    Refuse {
        /// Why.
        reason: String,
    },
}

impl Membership {
    /// Nobody has come yet.
    pub fn new(generation: Generation, world_size: usize) -> Membership {
        Membership::of(generation, 0..world_size as u32)
    }

    /// The same for those that are started with these ranks.
    pub fn of(generation: Generation, seats: impl IntoIterator<Item = u32>) -> Membership {
        Membership {
            generation,
            seats: seats.into_iter().collect(),
            begun: false,
            lost: false,
            in_place: false,
            needs_all: false,
            ends: false,
            workers: BTreeMap::new(),
        }
    }

    /// What another coordinator has left: `workers` are in the membership of that generation, in the order of their ranks, named
    /// by the rank that they were started with; those that `live` come back, and those that are started with `seats` may come.
    pub fn resume(
        generation: Generation,
        workers: &[Rank],
        seats: impl IntoIterator<Item = u32>,
        live: &BTreeSet<u32>,
    ) -> Membership {
        let ranks = (0..).map(Rank).zip(workers).filter(|(_, seat)| live.contains(&seat.0));
        let absent = ranks.map(|(rank, seat)| {
            let (address, rank) = (String::new(), Some(rank));
            let told = Leave::Now;
            (absent(*seat), Worker { seat: *seat, address, rank, waits: false, goes_on: true, told })
        });
        let workers_left: BTreeMap<Member, Worker> = absent.collect();
        Membership {
            generation,
            seats: seats.into_iter().collect(),
            begun: true,
            lost: workers_left.len() < workers.len(),
            in_place: true,
            // Those that come back say so.
            needs_all: false,
            ends: false,
            workers: workers_left,
        }
    }

    /// A worker comes back that was in the membership of this generation as this rank, and goes on with these.
    pub fn come_back(
        &mut self,
        member: Member,
        seat: Rank,
        address: String,
        (generation, rank): (Generation, Rank),
        with: GoesOn,
    ) -> Decision {
        if !self.seats.contains(&seat.0) {
            return Decision::Refuse { reason: format!("rank {seat} was given up") };
        }
        self.workers.remove(&absent(seat));
        // The end of its other connection may not have been noticed yet.
        let is_it = |worker: &Worker| worker.rank == Some(rank) && generation == self.generation;
        self.workers.retain(|_, worker| worker.seat != seat || !is_it(worker));
        if self.workers.values().any(|worker| worker.seat == seat) {
            return Decision::Refuse { reason: format!("rank {seat} is there already") };
        }
        // It knows better than who told of the last membership.
        self.generation = self.generation.max(generation);
        self.needs_all |= with == GoesOn::WithAll;
        let rank = Some(rank);
        let worker = Worker { seat, address, rank, waits: true, goes_on: true, told: Leave::Now };
        self.workers.insert(member, worker);
        self.rejoin(member)
    }

    /// A worker that was started with this rank has ended, whatever its connection says; gives which that was.
    pub fn end(&mut self, seat: Rank) -> (Vec<Member>, Decision) {
        let of_seat = self.workers.iter().filter(|(_, worker)| worker.seat == seat && worker.rank.is_some());
        let ended: Vec<Member> = of_seat.map(|(member, _)| *member).collect();
        ended.iter().for_each(|member| self.lose(*member));
        (ended, self.settle())
    }

    /// Workers that were started with these ranks may come as well.
    pub fn expect(&mut self, seats: Range<u32>) {
        self.seats.extend(seats);
    }

    /// Nobody is waited for any more who was started with these ranks; gives those of them that are still there, who are lost.
    pub fn do_without(&mut self, seats: Range<u32>) -> (Vec<Member>, Decision) {
        self.seats.retain(|seat| !seats.contains(seat));
        let here = self.workers.iter().filter(|(_, worker)| seats.contains(&worker.seat.0));
        let here: Vec<Member> = here.map(|(member, _)| *member).collect();
        here.iter().for_each(|member| self.lose(*member));
        (here, self.settle())
    }

    /// The same where all are to end since these were lost. Who has something of the run goes on until it ends; those that have come in the
    /// place of others, and have nothing, begin nothing.
    pub fn part_from(&mut self, seats: Range<u32>) -> (Vec<Member>, Decision) {
        self.ends = true;
        self.do_without(seats)
    }

    /// That of the newest roster, or the one that comes first.
    pub fn generation(&self) -> Generation {
        self.generation
    }

    /// What comes after whatever has begun.
    pub fn next_generation(&self) -> Generation {
        Generation(self.generation.0 + u64::from(self.begun))
    }

    /// A worker is there that was started as rank `seat`.
    pub fn join(&mut self, member: Member, seat: Rank, address: String) -> Decision {
        if !self.seats.contains(&seat.0) {
            let reason = format!("rank {seat} in a world of {}", self.seats.len());
            return Decision::Refuse { reason };
        }
        // In a run that has begun it takes the place of one whose end wasn't noticed yet.
        if self.workers.values().any(|worker| worker.seat == seat && (!self.begun || worker.rank.is_none())) {
            return Decision::Refuse { reason: format!("rank {seat} has joined already") };
        }
        // Another process has its place.
        self.lose(absent(seat));
        let told = Leave::Whenever;
        let worker = Worker { seat, address, rank: None, waits: true, goes_on: false, told };
        self.workers.insert(member, worker);
        self.settle()
    }

    /// A worker says whether it goes on in place, and with whom.
    pub fn goes_on(&mut self, member: Member, with: GoesOn) -> Decision {
        if let Some(worker) = self.workers.get_mut(&member) {
            worker.goes_on = with != GoesOn::Not;
            self.needs_all |= with == GoesOn::WithAll;
        }
        self.in_place |= self.all_go_on();
        self.settle()
    }

    /// A member has left the membership at hand and waits for the next.
    pub fn rejoin(&mut self, member: Member) -> Decision {
        if !self.all_go_on() {
            let reason = "the ranks that are left can't go on in place, so that all begin again".into();
            return Decision::Refuse { reason };
        }
        if let Some(worker) = self.workers.get_mut(&member) {
            worker.waits = true;
        }
        self.settle()
    }

    /// The connection of a worker has ended. Where it goes on in place that says nothing of the worker: it comes back, or whoever
    /// started it tells that it has ended ([`Membership::end`]). The next membership waits for one of the two.
    pub fn cut(&mut self, member: Member) -> Decision {
        let goes_on = |worker: &Worker| worker.rank.is_some() && worker.goes_on;
        if let Some(worker) = self.workers.remove(&member)
            && goes_on(&worker)
        {
            self.workers.insert(absent(worker.seat), Worker { waits: false, told: Leave::Now, ..worker });
        }
        self.settle()
    }

    /// A worker is lost, or has ended.
    pub fn leave(&mut self, member: Member) -> Decision {
        self.lose(member);
        self.settle()
    }

    fn lose(&mut self, member: Member) {
        self.lost |= self.workers.remove(&member).is_some_and(|worker| worker.rank.is_some());
    }

    /// Whether whoever is lost can be replaced while the others go on: so it is when all are lost, too, since who comes then
    /// goes on from what they have saved.
    pub fn is_in_place(&self) -> bool {
        self.in_place && self.workers.values().all(|worker| worker.rank.is_none() || worker.goes_on)
    }

    /// Whether the members that are left need no other to go on.
    fn all_go_on(&self) -> bool {
        let mut members = self.workers.values().filter(|worker| worker.rank.is_some()).peekable();
        members.peek().is_some() && members.all(|worker| worker.goes_on)
    }

    /// The seat of a rank of the membership at hand that hasn't left it, if that goes on in place.
    pub fn seat_of(&self, rank: Rank) -> Option<Rank> {
        let worker = self.workers.values().find(|worker| worker.rank == Some(rank) && !worker.waits);
        worker.filter(|worker| worker.goes_on).map(|worker| worker.seat)
    }

    /// The seats of those of these ranks that have one.
    pub fn seats_of(&self, ranks: &[u32]) -> Vec<Rank> {
        ranks.iter().filter_map(|rank| self.seat_of(Rank(*rank))).collect()
    }

    /// Whether this worker waits for a roster.
    pub fn waits(&self, member: Member) -> bool {
        self.workers.get(&member).is_some_and(|worker| worker.waits)
    }

    /// Who is waited for.
    pub fn missing(&self) -> Vec<u32> {
        let busy = self.workers.values().filter(|worker| !worker.waits).filter_map(|worker| worker.rank);
        let mut busy: Vec<u32> = busy.map(|rank| rank.0).collect();
        busy.sort_unstable();
        if !busy.is_empty() {
            return busy;
        }
        let is_there = |rank: &u32| self.workers.values().any(|worker| worker.seat == Rank(*rank));
        self.seats.iter().copied().filter(|rank| !is_there(rank)).collect()
    }

    /// What follows from all that has happened. After [`Decision::Begin`] it is to be asked again: there may be some that wait still.
    pub fn settle(&mut self) -> Decision {
        if self.workers.values().any(|worker| !worker.waits) {
            let any_new = self.workers.values().any(|worker| worker.waits && worker.rank.is_none());
            let leave = match (self.lost, any_new) {
                // Those that can't go on in place are left alone; whoever started them ends them.
                _ if !self.all_go_on() => Leave::Whenever,
                (true, _) => Leave::Now,
                (false, true) => Leave::Soon,
                (false, false) => Leave::Whenever,
            };
            let busy = self.workers.iter_mut().filter(|(_, worker)| !worker.waits && worker.told < leave);
            let members: Vec<Member> = busy
                .map(|(member, worker)| {
                    worker.told = leave;
                    *member
                })
                .collect();
            return match members.is_empty() {
                true => Decision::Wait { missing: self.missing() },
                false => Decision::Recall { members, leave },
            };
        }
        let holds_state = self.workers.values().any(|worker| worker.rank.is_some());
        let waits_for_all = self.needs_all || !holds_state;
        let begins_nothing = self.workers.is_empty() || self.ends && !holds_state;
        if begins_nothing || waits_for_all && self.workers.len() < self.seats.len() {
            return Decision::Wait { missing: self.missing() };
        }
        self.begin()
    }

    /// The next membership: of all that wait, or of those that were left when others were lost and do without them.
    fn begin(&mut self) -> Decision {
        if self.begun {
            self.generation = Generation(self.generation.0 + 1);
        }
        let holds_state = |worker: &Worker| worker.rank.is_some();
        let only_holders = self.lost && !self.needs_all && self.workers.values().any(holds_state);
        (self.begun, self.lost) = (true, false);
        let (members, places): (Vec<Member>, Vec<Place>) = self
            .workers
            .iter()
            .filter(|(_, worker)| !only_holders || holds_state(worker))
            .map(|(member, worker)| (*member, Place { rank: worker.rank, seat: worker.seat }))
            .unzip();
        let ranks: Vec<(Member, Rank)> = members.into_iter().zip(deal(&places)).collect();
        for (member, rank) in &ranks {
            let worker = self.workers.get_mut(member).expect("one of them");
            (worker.rank, worker.waits, worker.told) = (Some(*rank), false, Leave::Whenever);
            worker.goes_on |= self.in_place;
        }
        let mut addresses = vec![String::new(); ranks.len()];
        for (member, rank) in &ranks {
            addresses[rank.index()].clone_from(&self.workers[member].address);
        }
        Decision::Begin { ranks, roster: Roster { generation: self.generation, addresses } }
    }
}

/// Stands for a worker whose connection has ended, or that another coordinator has left, and that hasn't come back yet.
fn absent(seat: Rank) -> Member {
    Member(u64::MAX - u64::from(seat.0))
}

/// What rank a worker had, and the one that it was started with.
#[derive(Clone, Copy, Debug)]
struct Place {
    rank: Option<Rank>,
    seat: Rank,
}

/// New ranks, from 0 without holes: members keep theirs where that is low enough, then those that come anew get the rank that
/// they were started with where it is free, and the rest fill the holes in order.
fn deal(places: &[Place]) -> Vec<Rank> {
    let mut dealt: Vec<Option<Rank>> = vec![None; places.len()];
    let mut free = vec![true; places.len()];
    let wishes: [fn(&Place) -> Option<Rank>; 2] = [|place| place.rank, |place| Some(place.seat)];
    for (is_for_new, wish) in [false, true].into_iter().zip(wishes) {
        for (place, dealt) in places.iter().zip(&mut dealt) {
            let Some(rank) = wish(place).filter(|_| place.rank.is_none() == is_for_new) else { continue };
            if free.get(rank.index()) == Some(&true) {
                (free[rank.index()], *dealt) = (false, Some(rank));
            }
        }
    }
    // Members first, by rank, so that who holds the state has the lowest that are left.
    let mut order: Vec<usize> = (0..places.len()).filter(|&i| dealt[i].is_none()).collect();
    order.sort_by_key(|&i| (places[i].rank.is_none(), places[i].rank, places[i].seat));
    let holes = (0..places.len() as u32).map(Rank).filter(|rank| free[rank.index()]);
    for (i, rank) in order.into_iter().zip(holes) {
        dealt[i] = Some(rank);
    }
    dealt.into_iter().map(|rank| rank.expect("as many ranks as places")).collect()
}
