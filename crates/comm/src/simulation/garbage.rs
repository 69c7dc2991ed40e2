//! A peer that has proven itself and sends nonsense: headers with flipped bits, random bytes, mad lengths, in the middle of any
//! operation. It ends with an error that names that peer, never with a panic, and never takes more memory than may wait.

use super::chance::Chance;
use super::network::{Network, Shared, Wires, lock};
use super::player::{Clock, LIMIT, Looked, Player, State};
use super::script::{Step, What};
use crate::element::{Element, ReduceOp};
use crate::error::Error;
use crate::group::{Group, Place};
use crate::signature::{HEADER, Kind, Signature};
use crate::transport::Transport;
use phalanx_wire::{Generation, Rank};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

const SEEDS: u64 = 20_000;

#[test]
fn a_peer_that_sends_nonsense_is_named() {
    for seed in 0..SEEDS {
        let error = beset(seed);
        let named = match &error {
            // What it sent happened to be right, or was more than what was waited for.
            None => true,
            Some(Error::Mismatch { rank, peer, .. } | Error::Overrun { rank, peer, .. }) => {
                (*rank, *peer) == (Rank(0), Rank(1))
            }
            // It never came to an end.
            Some(Error::Timeout { missing, .. }) => *missing == [Rank(1)],
            Some(Error::PeerLost { peer, .. }) => *peer == Rank(1),
            Some(_) => false,
        };
        assert!(named, "seed {seed}: {error:?}");
    }
}

/// What becomes of an operation of rank 0 with such a peer.
fn beset(seed: u64) -> Option<Error> {
    let mut chance = Chance::new(seed);
    let network: Shared = Arc::new(Mutex::new(Network::new(2, 1 << 20)));
    let [own, mut theirs] = [0, 1].map(|rank| Wires { rank, network: Arc::clone(&network) });
    let place = Place::in_world(Rank(0), 2, Generation(0), LIMIT);
    let group = Group::over(place, Some(Box::new(own)));
    let op = ReduceOp::Sum;
    let what = chance.pick(&[
        What::AllReduce(op),
        What::Broadcast(1),
        What::AllGather,
        What::Barrier,
        What::Reduce(0, op),
        What::Gather(0),
        What::AllToAll,
        What::Letter(1, 0),
        What::FanIn(0),
    ]);
    let step = Step { number: 0, group: 0, what, len: chance.pick(&[0, 1, 9]) };
    let clock = Clock { began: Instant::now(), percent: 100 };
    let mut player = Player::new(vec![Some(group)], vec![step], clock, 1);
    let mut now = Duration::ZERO;
    while player.is_playing() {
        if chance.once_in(2) {
            let bytes = nonsense(&mut chance, &step);
            // A wire that is full, or closed by now, takes no more.
            let _ = theirs.try_send(1 - theirs.rank, &bytes);
        }
        while lock(&network).deliver(&mut chance, 1 << 20) {}
        if let Looked::Wrong(_) = player.look(now) {
            // Right headers over other values: nothing tells these from a sum.
            return None;
        }
        now += LIMIT / 40;
    }
    match player.state {
        State::Failed(_, error) => Some(error),
        _ => None,
    }
}

/// Something like a message of this operation.
fn nonsense(chance: &mut Chance, step: &Step) -> Vec<u8> {
    const KINDS: [Kind; 4] = [Kind::AllReduce, Kind::Broadcast, Kind::Message, Kind::Barrier];
    let kind = match (step.what, chance.below(3)) {
        (_, 0) => chance.pick(&KINDS),
        (What::AllReduce(_), _) => Kind::AllReduce,
        (What::Broadcast(_), _) => Kind::Broadcast,
        (What::Letter(..) | What::FanIn(_), _) => Kind::Message,
        _ => Kind::Barrier,
    };
    let signature = Signature {
        kind,
        op: (kind == Kind::AllReduce).then(|| ReduceOp::Sum.into()),
        algorithm: None,
        detail: chance.below(3) as u32,
        at: 0,
        sequence: 1 + chance.below(3) as u64,
        element: u64::KIND,
        count: chance.pick(&[0, 1, 9, usize::MAX / 8, usize::MAX]),
    };
    let mut bytes = signature.header(signature.count).0.to_vec();
    for _ in 0..chance.below(3) {
        bytes[chance.below(HEADER)] ^= 1 << chance.below(8);
    }
    match chance.below(4) {
        0 => bytes = (0..chance.below(100)).map(|_| chance.next() as u8).collect(),
        1 => bytes.truncate(chance.below(HEADER)),
        _ => bytes.extend((0..chance.below(100)).map(|_| chance.next() as u8)),
    }
    bytes
}
