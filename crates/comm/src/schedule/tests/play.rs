//! Plays the schedules of all ranks against each other, on elements that remember what became of them.

use crate::schedule::{Round, Schedule, Take};
use std::collections::{HashMap, VecDeque};
use std::ops::Range;

/// The most ranks that are played.
pub(super) const MOST: usize = 17;

/// An element: which ranks' contributions it holds, how often each, and in which order they were combined.
#[derive(Clone, Copy, PartialEq, Debug)]
pub(super) struct Symbol {
    index: usize,
    counts: [u8; MOST],
    /// The tree of combinations, as a number that differs for different trees but for the order of two branches, which sums
    /// don't depend on.
    tree: u64,
}

impl Symbol {
    /// What a rank contributes at an index.
    pub(super) fn of(rank: usize, index: usize) -> Symbol {
        let mut counts = [0; MOST];
        counts[rank] = 1;
        Symbol { index, counts, tree: mixed((rank * 1000 + index) as u64) }
    }

    /// What nobody contributed.
    pub(super) fn junk() -> Symbol {
        Symbol { index: usize::MAX, counts: [99; MOST], tree: 0 }
    }

    fn combine(&mut self, other: &Symbol) {
        assert_eq!(self.index, other.index, "elements of different places are combined");
        self.counts.iter_mut().zip(other.counts).for_each(|(count, more)| *count += more);
        self.tree = mixed(mixed(self.tree.min(other.tree)) ^ self.tree.max(other.tree));
    }

    /// Whether it is the sum of one contribution of each of `n` ranks at this index.
    pub(super) fn is_sum(&self, n: usize, index: usize) -> bool {
        self.index == index && self.counts.iter().enumerate().all(|(r, &count)| count == u8::from(r < n))
    }
}

/// SplitMix64's last steps.
fn mixed(x: u64) -> u64 {
    let x = x.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}

/// When a send is over.
#[derive(Clone, Copy, PartialEq, Debug)]
pub(super) enum Wires {
    /// At once: they hold everything.
    HoldAll,
    /// When its receiver took it: they hold nothing.
    HoldNothing,
}

/// Something that can happen next.
#[derive(Clone, Copy)]
enum Step {
    /// Send `i` of a rank's round leaves.
    Leave { rank: usize, send: usize },
    /// Receive `i` of a rank's round is taken off its wire.
    Arrive { rank: usize, receive: usize },
    /// Both at once.
    Meet { rank: usize, send: usize, peer: usize, receive: usize },
}

/// A rank in the middle of its schedule.
struct Player<'a> {
    rounds: &'a [Round],
    buffer: Vec<Symbol>,
    round: usize,
    left: Vec<bool>,
    came: Vec<Option<Vec<Symbol>>>,
}

impl Player<'_> {
    fn enter(&mut self) {
        let Some(round) = self.rounds.get(self.round) else { return };
        self.left = vec![false; round.sends.len()];
        self.came = vec![None; round.receives.len()];
    }

    fn now(&self) -> Option<&Round> {
        self.rounds.get(self.round)
    }

    /// The sends that could leave now.
    fn sends(&self) -> impl Iterator<Item = (usize, usize)> {
        let sends = self.now().into_iter().flat_map(|round| round.sends.iter().enumerate());
        sends.filter(|(i, _)| !self.left[*i]).map(|(i, (to, _))| (i, *to))
    }

    /// The receives that are still to come.
    fn receives(&self) -> impl Iterator<Item = (usize, usize)> {
        let receives = self.now().into_iter().flat_map(|round| round.receives.iter().enumerate());
        receives.filter(|(i, _)| self.came[*i].is_none()).map(|(i, (from, ..))| (i, *from))
    }

    fn take_out(&mut self, send: usize) -> Vec<Symbol> {
        self.left[send] = true;
        self.buffer[self.rounds[self.round].sends[send].1.clone()].to_vec()
    }

    fn take_in(&mut self, rank: usize, receive: usize, message: Vec<Symbol>) {
        let (from, range, take) = &self.rounds[self.round].receives[receive];
        assert_eq!(message.len(), range.len(), "rank {rank} in round {} from {from}", self.round);
        let into = &mut self.buffer[range.clone()];
        match take {
            Take::Replace => into.copy_from_slice(&message),
            Take::Combine => into.iter_mut().zip(&message).for_each(|(into, from)| into.combine(from)),
            Take::InRankOrder => {}
        }
        self.came[receive] = Some(message);
    }

    /// Goes on to the next round if all of this one is done.
    fn go_on(&mut self, rank: usize) -> bool {
        let Some(round) = self.rounds.get(self.round) else { return false };
        if self.left.contains(&false) || self.came.contains(&None) {
            return false;
        }
        let in_order = round.receives.iter().zip(&self.came);
        let mut all: Vec<(usize, &[Symbol])> = in_order
            .filter(|((.., take), _)| *take == Take::InRankOrder)
            .map(|((from, ..), came)| (*from, came.as_deref().expect("looked at above")))
            .collect();
        if !all.is_empty() {
            let own = self.buffer.clone();
            all.push((rank, &own));
            assert!(all.windows(2).rev().skip(1).all(|two| two[0].0 < two[1].0), "not in the order of ranks");
            all.sort_by_key(|(from, _)| *from);
            self.buffer.copy_from_slice(all[0].1);
            for (_, more) in &all[1..] {
                self.buffer.iter_mut().zip(*more).for_each(|(into, from)| into.combine(from));
            }
        }
        self.round += 1;
        self.enter();
        true
    }
}

/// Plays to the end, or until nothing can happen; what can happen next is taken in an order that follows from `seed`. Ranks
/// from which `is_held` never begin. Returns the buffers, and which ranks are done.
pub(super) fn play_all_but(
    schedules: &[Schedule],
    buffers: &[Vec<Symbol>],
    wires: Wires,
    mut seed: u64,
    is_held: impl Fn(usize) -> bool,
) -> (Vec<Vec<Symbol>>, Vec<bool>) {
    let mut players: Vec<Player<'_>> = Vec::new();
    for (schedule, buffer) in schedules.iter().zip(buffers) {
        schedule.rounds.iter().for_each(check_round);
        let (buffer, rounds) = (buffer.clone(), &schedule.rounds[..]);
        players.push(Player { rounds, buffer, round: 0, left: Vec::new(), came: Vec::new() });
    }
    let mut held: HashMap<(usize, usize), VecDeque<Vec<Symbol>>> = HashMap::new();
    for (rank, player) in players.iter_mut().enumerate() {
        player.enter();
        while !is_held(rank) && player.go_on(rank) {}
    }
    loop {
        let mut steps = Vec::new();
        for (rank, player) in players.iter().enumerate().filter(|(rank, _)| !is_held(*rank)) {
            for (send, peer) in player.sends() {
                let meets = players[peer].receives().find(|(_, from)| *from == rank && !is_held(peer));
                match (wires, meets) {
                    (Wires::HoldAll, _) => steps.push(Step::Leave { rank, send }),
                    (_, Some((receive, _))) => steps.push(Step::Meet { rank, send, peer, receive }),
                    _ => {}
                }
            }
            let there = |from| held.get(&(from, rank)).is_some_and(|wire| !wire.is_empty());
            let arrivals = player.receives().filter(|(_, from)| there(*from));
            steps.extend(arrivals.map(|(receive, _)| Step::Arrive { rank, receive }));
        }
        if steps.is_empty() {
            break;
        }
        seed = mixed(seed);
        let moved = match steps[seed as usize % steps.len()] {
            Step::Leave { rank, send } => {
                let to = players[rank].rounds[players[rank].round].sends[send].0;
                let message = players[rank].take_out(send);
                held.entry((rank, to)).or_default().push_back(message);
                [rank, rank]
            }
            Step::Arrive { rank, receive } => {
                let from = players[rank].rounds[players[rank].round].receives[receive].0;
                let message = held.get_mut(&(from, rank)).and_then(VecDeque::pop_front);
                players[rank].take_in(rank, receive, message.expect("the wire holds something"));
                [rank, rank]
            }
            Step::Meet { rank, send, peer, receive } => {
                let message = players[rank].take_out(send);
                players[peer].take_in(peer, receive, message);
                [rank, peer]
            }
        };
        for rank in moved {
            while players[rank].go_on(rank) {}
        }
    }
    let done: Vec<bool> = players.iter().map(|player| player.round == player.rounds.len()).collect();
    let nothing_is_left = held.values().all(VecDeque::is_empty);
    assert!(nothing_is_left || done.contains(&false), "something was sent that nobody took");
    (players.into_iter().map(|player| player.buffer).collect(), done)
}

/// Plays to the end.
pub(super) fn play(
    schedules: &[Schedule],
    buffers: &[Vec<Symbol>],
    wires: Wires,
    seed: u64,
) -> Vec<Vec<Symbol>> {
    let (buffers, done) = play_all_but(schedules, buffers, wires, seed, |_| false);
    assert!(!done.contains(&false), "stuck: {done:?} with wires that {wires:?}");
    buffers
}

/// That nothing of what may run at once touches what another part of it does, and that no two messages of a round could be taken
/// for each other.
fn check_round(round: &Round) {
    let overlap = |a: &Range<usize>, b: &Range<usize>| a.start.max(b.start) < a.end.min(b.end);
    for (i, (from, range, take)) in round.receives.iter().enumerate() {
        let others = round.receives[..i].iter();
        assert!(others.clone().all(|(other, ..)| from != other), "two messages from rank {from}: {round:?}");
        if *take != Take::InRankOrder {
            assert!(others.clone().all(|(_, other, _)| !overlap(range, other)), "{round:?}");
            assert!(round.sends.iter().all(|(_, other)| !overlap(range, other)), "{round:?}");
        }
    }
    for (i, (to, _)) in round.sends.iter().enumerate() {
        assert!(
            round.sends[..i].iter().all(|(other, _)| to != other),
            "two messages to rank {to}: {round:?}"
        );
    }
}
