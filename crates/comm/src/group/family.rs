//! Groups that come of a group: some of its ranks, as a group of their own, or those that are left of it.
//!
//! Each group has connections of its own, so one that fails or is slow doesn't touch another. The members of a new group meet
//! at the doors where those of the old one met, under a name that all of them come to by themselves; survivors of a failed group
//! meet under a new generation, and refuse whoever comes with the old one. New processes may come to that, too: then somebody
//! else says who is in it and where, as when the first group was made.

use super::{Group, Place};
use crate::door::Door;
use crate::endpoint::PeerAddress;
use crate::error::Error;
use crate::topology::Topology;
use crate::transport::{SharedThreads, end_of};
use phalanx_wire::{Deadline, Generation, Rank};
use std::collections::HashSet;
use std::sync::Arc;

/// How a group's ranks can meet again.
#[derive(Clone)]
pub(crate) enum Kin {
    /// There are no others.
    Alone,
    Threads(Arc<SharedThreads>),
    Processes(Arc<Home>),
}

/// Where processes met.
pub(crate) struct Home {
    pub(crate) door: Arc<Door>,
    /// Of all ranks, by rank.
    pub(crate) peers: Vec<PeerAddress>,
}

impl Home {
    /// That of some of its ranks.
    fn of(&self, ranks: &[usize]) -> Home {
        let peers = ranks.iter().map(|&rank| self.peers[rank].clone()).collect();
        Home { door: Arc::clone(&self.door), peers }
    }
}

/// A number for a group of these ranks, which is the same wherever it is made: 0 is that of the world.
fn name_of(number: u64, members: &[Rank]) -> u64 {
    let mix = |name: u64, word: u64| (name ^ word).wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(29);
    let name = members.iter().fold(mix(1, number), |name, rank| mix(name, u64::from(rank.0) + 1));
    name.max(1)
}

fn taken_by(generation: Generation) -> String {
    format!("generation {generation} takes its place")
}

impl Group {
    /// Parts the group: ranks that say the same color become a group of their own, ordered by key and then by rank; those that
    /// say none get none. All ranks of the group must call it.
    pub fn split(&self, color: Option<u32>, key: u32) -> Result<Option<Group>, Error> {
        let mut all = vec![0i64; 2 * self.world_size];
        self.all_gather(&[color.map_or(-1, i64::from), i64::from(key)], &mut all)?;
        let words = all.as_chunks::<2>().0;
        let mine = words[self.rank.index()][0];
        let mut members: Vec<usize> = (0..self.world_size).filter(|&rank| words[rank][0] == mine).collect();
        members.sort_by_key(|&rank| (words[rank][1], rank));
        self.part(color.map(|_| members))
    }

    /// A group of these ranks, in this order, or none on a rank that isn't among them. All ranks of the group must call it with
    /// the same list.
    #[track_caller]
    pub fn subgroup(&self, ranks: &[Rank]) -> Result<Option<Group>, Error> {
        ranks.iter().for_each(|&rank| self.check_peer("subgroup", rank));
        let distinct: HashSet<Rank> = ranks.iter().copied().collect();
        assert!(distinct.len() == ranks.len() && !ranks.is_empty(), "subgroup: of ranks {ranks:?}");
        let place = |rank: usize| ranks.iter().position(|r| r.index() == rank);
        let mine: Vec<i32> =
            (0..self.world_size).map(|rank| place(rank).map_or(-1, |place| place as i32)).collect();
        let mut all = vec![0; self.world_size * self.world_size];
        self.all_gather(&mine, &mut all)?;
        if let Some(other) = all.chunks_exact(self.world_size).position(|theirs| *theirs != mine) {
            let other = self.members[other];
            let reason = format!("rank {other} asks for a subgroup of other ranks than {ranks:?}");
            return Err(Error::connect(self.known_as(), reason));
        }
        let members = ranks.iter().map(|rank| rank.index()).collect();
        self.part(place(self.rank.index()).map(|_| members))
    }

    /// The group of the ranks of this one that are left, in this order, of which this must be one. Ends this group, where it
    /// hasn't failed already; what belongs to it, or to any older generation, is refused by the new one. All survivors must
    /// call it, with the same list and generation; who they are is not decided here.
    #[track_caller]
    pub fn rebuild(&self, survivors: &[Rank], generation: Generation) -> Result<Group, Error> {
        survivors.iter().for_each(|&rank| self.check_peer("rebuild", rank));
        assert!(
            generation > self.generation,
            "rebuild: generation {generation} after generation {}",
            self.generation
        );
        let members: Vec<usize> = survivors.iter().map(|rank| rank.index()).collect();
        self.abort(&taken_by(generation));
        self.member(&members, generation, |place, index| match &self.kin {
            Kin::Alone => Ok(Group::over(place, None)),
            Kin::Threads(shared) => {
                self.among_threads(shared, (true, generation.0, members[0]), members.len(), place, index)
            }
            Kin::Processes(home) => Group::meet(Place { name: self.name, ..place }, home.of(&members)),
        })
        .inspect(|group| self.entrust(group))
    }

    /// The group that follows this one: its ranks are those at `peers`, by their new numbers, and this process is `rank` of them,
    /// at the address that it has had so far. Some were in this group, maybe under other numbers; others are new processes that
    /// call [`Group::connect`] with the same generation and peers. What belongs to an older generation is refused, and what this
    /// group was told of timeouts, algorithms and failures goes for the new one.
    ///
    /// A group that hasn't failed ends when the new one stands, without a failure: ranks that are still in its last operation
    /// while this one is done with it aren't disturbed. Where the new group can't be made, this one can be succeeded all the
    /// same, under a higher generation. Groups of threads, and those that were never connected, have no address and no followers.
    pub fn succeed(
        &self,
        rank: Rank,
        generation: Generation,
        peers: Vec<PeerAddress>,
    ) -> Result<Group, Error> {
        let refused = |reason: String| Err(Error::connect(rank, reason));
        let Kin::Processes(home) = &self.kin else {
            let hint = "make it with Group::connect, with itself as its only peer if there is no other yet";
            return refused(format!("nobody can come to {}\nhint: {hint}", self.description));
        };
        if generation <= self.generation {
            return refused(format!("generation {generation} can't follow generation {}", self.generation));
        }
        let address = home.door.address();
        if peers.get(rank.index()) != Some(address) {
            let other = peers.get(rank.index()).map_or("nowhere".into(), |peer| format!("at {}", peer.tcp));
            return refused(format!(
                "it is at {}, and rank {rank} of {} is {other}",
                address.tcp,
                peers.len()
            ));
        }
        let members = (0..peers.len()).map(|rank| Rank(rank as u32)).collect();
        let place = self.place(rank, Topology::one_host(peers.len()), generation, members);
        let group = Group::meet(place, Home { door: Arc::clone(&home.door), peers })?;
        self.entrust(&group);
        let reason = taken_by(generation);
        match self.free_engine() {
            Some(mut engine) => engine.retire(Error::Aborted { by: self.rank, reason }),
            // A thread that is in it still waits for somebody who has gone on. Who meets this rank in the new group relies on it
            // not touching memory that they have in common any more.
            None => {
                self.abort(&reason);
                drop(self.engine(&Deadline::after(self.timeout))?);
            }
        }
        Ok(group)
    }

    /// A group that takes the place of this one tells whom this one tells.
    fn entrust(&self, group: &Group) {
        if let Some(listener) = self.aside.listener.get() {
            let _ = group.aside.listener.set(Arc::clone(listener));
        }
        self.hand_on(group);
    }

    /// A group of `members`, if this rank is one. All ranks take part.
    fn part(&self, members: Option<Vec<usize>>) -> Result<Option<Group>, Error> {
        let number = self.engine(&Deadline::after(self.timeout))?.collectives;
        let Some(members) = members else { return Ok(None) };
        let group = self.member(&members, self.generation, |place, index| match &self.kin {
            Kin::Alone => Ok(Group::over(place, None)),
            Kin::Threads(shared) => {
                self.among_threads(shared, (false, number, members[0]), members.len(), place, index)
            }
            Kin::Processes(home) => {
                let name = name_of(self.name.wrapping_add(number), &place.members);
                Group::meet(Place { name, ..place }, home.of(&members))
            }
        })?;
        self.hand_on(&group);
        Ok(Some(group))
    }

    /// This rank's place among `members` as a group of `generation`, handed to what makes the group.
    #[track_caller]
    fn member(
        &self,
        members: &[usize],
        generation: Generation,
        make: impl FnOnce(Place, usize) -> Result<Group, Error>,
    ) -> Result<Group, Error> {
        let index = members.iter().position(|&rank| rank == self.rank.index());
        let index = index.unwrap_or_else(|| panic!("rank {} is none of the ranks {members:?}", self.rank));
        let known = members.iter().map(|&rank| self.members[rank]).collect();
        let place = self.place(Rank(index as u32), self.topology.part(members), generation, known);
        make(place, index)
    }

    /// A place in a group that comes of this one and waits as this one does; `members` are as the run numbers them.
    fn place(&self, rank: Rank, topology: Topology, generation: Generation, members: Vec<Rank>) -> Place {
        Place {
            rank,
            topology,
            generation,
            timeout: self.timeout,
            silence: self.patience.silence,
            algorithm: self.algorithm,
            members,
            name: 0,
            siblings: Arc::clone(&self.siblings),
            kin: Kin::Alone,
        }
    }

    /// A group that comes of this one leaves its flight record where this one does, and tells whom this one tells of waits.
    fn hand_on(&self, group: &Group) {
        if let Some(observer) = self.aside.observer.get() {
            group.on_wait(Arc::clone(observer));
        }
        if let Some(keeper) = self.aside.keeper.get() {
            let _ = group.aside.keeper.set(Arc::clone(keeper));
        }
    }

    fn among_threads(
        &self,
        shared: &SharedThreads,
        name: (bool, u64, usize),
        n: usize,
        place: Place,
        index: usize,
    ) -> Result<Group, Error> {
        let end = end_of(shared, name, n, index).ok_or_else(|| {
            Error::connect(self.known_as(), "this group was made already, or with other ranks")
        })?;
        let place = Place { kin: Kin::Threads(end.shared()), ..place };
        let group = Group::over(place, (n > 1).then(|| Box::new(end) as _));
        group.assemble()?;
        Ok(group)
    }
}
