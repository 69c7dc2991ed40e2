//! Who has come, who is lost, and what follows from it: no I/O, no clock.
//!
//! Ranks that hold the run's state wait for nobody. Where one of them is lost, the others are told at once, and as soon as all
//! of them have left the membership at hand the next one begins, of them alone: they go on with their step, and nobody has to
//! be handed anything before. Those that have come anew wait until the members let them in, at the end of a step of theirs, and
//! where there are no members (at first, or when all were lost) for each other.

use phalanx_job::Roster;
use phalanx_wire::{Generation, Rank};
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

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
            workers: workers_left,
        }
    }

    /// A worker comes back that was in the membership of this generation as this rank.
    pub fn come_back(
        &mut self,
        member: Member,
        seat: Rank,
        address: String,
        (generation, rank): (Generation, Rank),
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

    /// A worker says whether it goes on in place.
    pub fn goes_on(&mut self, member: Member, yes: bool) -> Decision {
        if let Some(worker) = self.workers.get_mut(&member) {
            worker.goes_on = yes;
        }
        self.in_place |= self.all_go_on();
        self.settle()
    }

    /// A member has left the membership at hand and waits for the next.
    pub fn rejoin(&mut self, member: Member) -> Decision {
        if !self.all_go_on() {
            let reason = "not all ranks can go on in place".into();
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
        if self.workers.is_empty() || !holds_state && self.workers.len() < self.seats.len() {
            return Decision::Wait { missing: self.missing() };
        }
        self.begin()
    }

    /// The next membership: of all that wait, or of those that were left when others were lost.
    fn begin(&mut self) -> Decision {
        if self.begun {
            self.generation = Generation(self.generation.0 + 1);
        }
        let holds_state = |worker: &Worker| worker.rank.is_some();
        let only_holders = self.lost && self.workers.values().any(holds_state);
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

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// A run of so many ranks that has begun and goes on in place; the members' numbers are their ranks.
    fn begun(world_size: u32) -> Membership {
        let mut members = Membership::new(Generation(0), world_size as usize);
        for rank in 0..world_size {
            members.join(Member(rank.into()), Rank(rank), rank.to_string());
        }
        (0..world_size).for_each(|rank| drop(members.goes_on(Member(rank.into()), true)));
        members
    }

    fn ranks(decision: &Decision) -> Vec<(u64, u32)> {
        match decision {
            Decision::Begin { ranks, .. } => ranks.iter().map(|(member, rank)| (member.0, rank.0)).collect(),
            other => panic!("{other:?}"),
        }
    }

    fn wait(missing: &[u32]) -> Decision {
        Decision::Wait { missing: missing.to_vec() }
    }

    #[test]
    fn begins_when_all_are_there_and_refuses_the_rest() {
        let mut members = Membership::new(Generation(4), 3);
        assert_eq!(members.join(Member(7), Rank(2), "c".into()), wait(&[0, 1]));
        let refused = |decision| matches!(decision, Decision::Refuse { reason } if reason.contains("already") || reason.contains("world of 3"));
        assert!(refused(members.join(Member(8), Rank(2), "x".into())));
        assert!(refused(members.join(Member(9), Rank(3), "x".into())));
        assert_eq!(members.join(Member(1), Rank(0), "gone".into()), wait(&[1]));
        assert_eq!(members.leave(Member(1)), wait(&[0, 1]));
        assert_eq!(members.join(Member(2), Rank(0), "a".into()), wait(&[1]));
        let begin = members.join(Member(3), Rank(1), "b".into());
        let roster =
            Roster { generation: Generation(4), addresses: vec!["a".into(), "b".into(), "c".into()] };
        assert_eq!(ranks(&begin), [(2, 0), (3, 1), (7, 2)]);
        assert!(matches!(begin, Decision::Begin { roster: found, .. } if found == roster));
    }

    #[test]
    fn survivors_wait_for_nobody_and_keep_their_ranks_where_they_can() {
        let mut members = begun(4);
        assert_eq!(members.rejoin(Member(2)), wait(&[0, 1, 3]));
        // The one that has left it already needn't be told.
        assert_eq!(members.leave(Member(1)), recall(&[0, 3], Leave::Now));
        assert_eq!(members.rejoin(Member(3)), wait(&[0]));
        let begin = members.rejoin(Member(0));
        assert_eq!(ranks(&begin), [(0, 0), (2, 2), (3, 1)]);
        assert_eq!(members.generation(), Generation(1));
        // The one in its place comes when the others run, and is let in when all of them have left.
        assert_eq!(members.join(Member(9), Rank(1), "new".into()), recall(&[0, 2, 3], Leave::Soon));
        assert_eq!(members.rejoin(Member(0)), wait(&[1, 2]));
        assert_eq!(members.rejoin(Member(2)), wait(&[1]));
        assert_eq!(ranks(&members.rejoin(Member(3))), [(0, 0), (2, 2), (3, 1), (9, 3)]);
    }

    #[test]
    fn those_that_come_anew_wait_for_each_other_where_nobody_holds_the_state() {
        let mut members = begun(2);
        members.leave(Member(0));
        assert_eq!(members.leave(Member(1)), wait(&[0, 1]));
        assert_eq!(members.join(Member(5), Rank(1), "b".into()), wait(&[0]));
        assert_eq!(ranks(&members.join(Member(6), Rank(0), "a".into())), [(5, 1), (6, 0)]);
        assert_eq!(members.generation(), Generation(1));
    }

    #[test]
    fn who_comes_before_the_end_of_another_was_noticed_takes_its_place() {
        let mut members = begun(2);
        assert_eq!(members.join(Member(5), Rank(1), "b".into()), recall(&[0, 1], Leave::Soon));
        members.rejoin(Member(0));
        assert_eq!(ranks(&members.leave(Member(1))), [(0, 0)]);
        assert_eq!(members.settle(), recall(&[0], Leave::Soon));
        assert_eq!(ranks(&members.rejoin(Member(0))), [(0, 0), (5, 1)]);
        assert_eq!(members.settle(), wait(&[0, 1]));
    }

    #[test]
    fn those_that_are_left_go_on_before_others_come_in() {
        let mut members = begun(3);
        assert_eq!(members.join(Member(7), Rank(1), "early".into()), recall(&[0, 1, 2], Leave::Soon));
        assert_eq!(members.leave(Member(1)), recall(&[0, 2], Leave::Now), "that is more than they knew");
        members.rejoin(Member(2));
        assert_eq!(ranks(&members.rejoin(Member(0))), [(0, 0), (2, 1)]);
        assert_eq!(members.settle(), recall(&[0, 2], Leave::Soon));
        // Another is lost before that comes to anything.
        assert_eq!(members.leave(Member(0)), recall(&[2], Leave::Now));
        assert_eq!(ranks(&members.rejoin(Member(2))), [(2, 0)]);
        assert_eq!(members.settle(), recall(&[2], Leave::Soon));
        assert_eq!(ranks(&members.rejoin(Member(2))), [(2, 0), (7, 1)]);
        // Where nobody is lost, they come in with the same membership in which the others leave the last.
        members.expect(3..4);
        assert_eq!(members.join(Member(8), Rank(3), "d".into()), recall(&[2, 7], Leave::Soon));
        members.rejoin(Member(2));
        assert_eq!(ranks(&members.rejoin(Member(7))), [(2, 0), (7, 1), (8, 2)]);
    }

    #[test]
    fn a_run_grows_by_those_who_are_expected_and_shrinks_by_those_who_are_not() {
        let mut members = begun(2);
        let refused = |decision| matches!(decision, Decision::Refuse { .. });
        assert!(refused(members.join(Member(7), Rank(2), "c".into())));
        members.expect(2..4);
        assert_eq!(members.join(Member(8), Rank(3), "d".into()), recall(&[0, 1], Leave::Soon));
        members.rejoin(Member(0));
        // The other one's host is gone, and its connection says nothing of that.
        let (lost, decision) = members.do_without(0..1);
        assert_eq!((lost, decision), (vec![Member(0)], recall(&[1], Leave::Now)));
        assert_eq!(ranks(&members.rejoin(Member(1))), [(1, 0)]);
        assert_eq!(ranks(&members.rejoin(Member(1))), [(1, 0), (8, 1)]);
        // Where nobody holds the state, those are waited for who are still wanted.
        assert_eq!(members.leave(Member(1)), recall(&[8], Leave::Now));
        assert_eq!(members.leave(Member(8)), wait(&[1, 2, 3]));
        assert!(refused(members.join(Member(9), Rank(0), "a".into())));
        assert_eq!(members.join(Member(10), Rank(1), "b".into()), wait(&[2, 3]));
        let (lost, decision) = members.do_without(2..4);
        assert_eq!((lost, ranks(&decision)), (vec![], vec![(10, 0)]));
    }

    #[test]
    fn whoever_is_given_up_is_left_even_if_it_seems_to_be_alive() {
        let mut members = begun(3);
        let (lost, decision) = members.do_without(2..3);
        assert_eq!((lost, decision), (vec![Member(2)], recall(&[0, 1], Leave::Now)));
        members.rejoin(Member(0));
        assert_eq!(ranks(&members.rejoin(Member(1))), [(0, 0), (1, 1)]);
        assert_eq!(members.rejoin(Member(0)), wait(&[1]), "nobody is asked to leave this one");
    }

    #[test]
    fn ranks_that_can_not_go_on_in_place_are_left_alone() {
        let mut members = begun(2);
        members.goes_on(Member(1), false);
        assert!(matches!(members.rejoin(Member(0)), Decision::Refuse { .. }));
        assert_eq!(members.join(Member(5), Rank(1), "b".into()), wait(&[0, 1]));
        assert_eq!(members.seat_of(Rank(1)), None);
        assert_eq!(members.seat_of(Rank(0)), Some(Rank(0)));
    }

    #[test]
    fn one_whose_connection_was_cut_is_waited_for_until_it_comes_back_or_has_ended() {
        for comes_back in [true, false] {
            let mut members = begun(3);
            assert_eq!(members.cut(Member(0)), wait(&[0, 1, 2]));
            assert_eq!(
                members.join(Member(9), Rank(3), "late".into()),
                Decision::Refuse { reason: "rank 3 in a world of 3".into() }
            );
            members.expect(3..4);
            let soon = recall(&[1, 2], Leave::Soon);
            assert_eq!(members.join(Member(9), Rank(3), "new".into()), soon);
            members.rejoin(Member(1));
            assert_eq!(members.rejoin(Member(2)), wait(&[0]));
            if comes_back {
                let begin = members.come_back(Member(10), Rank(0), "0".into(), (Generation(0), Rank(0)));
                assert_eq!(ranks(&begin), [(1, 1), (2, 2), (9, 3), (10, 0)]);
            } else {
                let (ended, begin) = members.end(Rank(0));
                assert_eq!((ended.len(), ranks(&begin)), (1, vec![(1, 1), (2, 0)]));
            }
        }
        // It may be back before its end is seen; an older process in its place may not.
        let mut members = begun(2);
        members.rejoin(Member(0));
        let begin = members.come_back(Member(5), Rank(1), "1".into(), (Generation(0), Rank(1)));
        assert_eq!(ranks(&begin), [(0, 0), (5, 1)]);
        assert_eq!(members.cut(Member(1)), wait(&[0, 1]), "it is another connection's by now");
        let older = members.come_back(Member(6), Rank(1), "1".into(), (Generation(0), Rank(1)));
        assert!(matches!(older, Decision::Refuse { .. }));
    }

    fn recall(members: &[u64], leave: Leave) -> Decision {
        Decision::Recall { members: members.iter().copied().map(Member).collect(), leave }
    }

    #[derive(Clone, Debug)]
    enum Act {
        /// The worker with this seat is lost.
        Lose(u32),
        /// Its connection is cut.
        Cut(u32),
        /// One is started in this seat, if that is empty.
        Start(u32),
        /// Those that know of a loss or of somebody who waits leave.
        Rejoin(u32),
        /// The coordinator is another.
        Succeed,
    }

    fn acts() -> impl Strategy<Value = Vec<Act>> {
        let act = prop_oneof![
            (0..5u32).prop_map(Act::Lose),
            (0..5u32).prop_map(Act::Cut),
            (0..5u32).prop_map(Act::Start),
            (0..5u32).prop_map(Act::Rejoin),
            (0..5u32).prop_map(Act::Rejoin),
            Just(Act::Succeed),
        ];
        proptest::collection::vec(act, 0..80)
    }

    proptest! {
        /// Whatever happens: ranks have no holes, generations only grow, survivors keep ranks that are low enough, nobody is let in
        /// with a loss, and once everybody who can has left twice, everybody has a rank.
        #[test]
        fn nobody_is_forgotten(acts in acts()) {
            let mut members = begun(5);
            let mut living: BTreeMap<Member, u32> = (0..5).map(|rank| (Member(rank), rank as u32)).collect();
            let mut held: BTreeMap<Member, Rank> = living.keys().map(|member| (*member, Rank(member.0 as u32))).collect();
            let (mut next, mut last) = (100, Generation(0));
            // Those that another coordinator has left.
            let mut left: BTreeSet<Member> = BTreeSet::new();
            let end = (0..10).map(|number| Act::Rejoin(number % 5));
            for act in acts.into_iter().chain(end) {
                let of = |seat: u32| living.iter().find(|(_, s)| **s == seat).map(|(member, _)| *member);
                let decision = match act {
                    Act::Lose(seat) => of(seat).map(|member| {
                        living.remove(&member);
                        if left.remove(&member) { members.end(Rank(seat)).1 } else { members.leave(member) }
                    }),
                    // One that hadn't come in yet joins again by a connection of its own.
                    Act::Cut(seat) => of(seat).filter(|member| held.contains_key(member)).map(|member| match left.insert(member) {
                        true => members.cut(member),
                        false => members.settle(),
                    }),
                    Act::Start(seat) if of(seat).is_none() => {
                        next += 1;
                        living.insert(Member(next), seat);
                        Some(members.join(Member(next), Rank(seat), next.to_string()))
                    }
                    Act::Start(_) => None,
                    Act::Succeed => {
                        let seat_of = |member: &Member| living.get(member).copied();
                        let mut workers = vec![Rank(u32::MAX); held.len()];
                        for (member, rank) in &held {
                            workers[rank.index()] = Rank(seat_of(member).unwrap_or(u32::MAX));
                        }
                        let live = living.values().copied().collect();
                        members = Membership::resume(last, &workers, 0..5, &live);
                        left = living.keys().copied().filter(|member| held.contains_key(member)).collect();
                        let anew = living.iter().filter(|(member, _)| !left.contains(member));
                        anew.map(|(member, seat)| members.join(*member, Rank(*seat), member.0.to_string())).last()
                    }
                    Act::Rejoin(seat) if of(seat).is_some_and(|member| left.contains(&member)) => of(seat).map(|member| {
                        left.remove(&member);
                        members.come_back(member, Rank(seat), member.0.to_string(), (last, held[&member]))
                    }),
                    Act::Rejoin(seat) => of(seat).filter(|member| held.contains_key(member) && !members.waits(*member)).map(|member| members.rejoin(member)),
                };
                if let Some(Decision::Begin { ranks, roster }) = decision {
                    prop_assert!(roster.generation > last);
                    last = roster.generation;
                    let is_left = |member: &Member| living.contains_key(member);
                    let any_lost = held.keys().any(|member| !is_left(member));
                    let holders = held.keys().filter(|member| is_left(member)).count();
                    prop_assert_eq!(ranks.len(), if any_lost && holders > 0 { holders } else { living.len() });
                    let mut numbers: Vec<usize> = ranks.iter().map(|(_, rank)| rank.index()).collect();
                    numbers.sort_unstable();
                    prop_assert!(numbers.into_iter().eq(0..ranks.len()));
                    for (member, rank) in &ranks {
                        if let Some(before) = held.get(member).filter(|before| before.index() < ranks.len()) {
                            prop_assert_eq!(before, rank);
                        }
                        prop_assert_eq!(&roster.addresses[rank.index()], &members.workers[member].address);
                    }
                    held = ranks.into_iter().collect();
                    members.settle();
                }
            }
            let holders = living.keys().filter(|member| held.contains_key(member)).count();
            let newcomers = living.len() - holders;
            prop_assert!(holders == 0 && newcomers < 5 || living.keys().all(|member| held.contains_key(member)), "{living:?} {held:?}");
        }
    }
}
