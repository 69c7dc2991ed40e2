//! A simulated world: its ranks, its time, its bytes, and what befalls them.

use super::blame::{Hurt, wrong_with};
use super::chance::Chance;
use super::network::{Leave, Network, Shared, Wires, lock};
use super::player::{Clock, LIMIT, Looked, Player, State};
use super::script::{Step, What};
use crate::error::Error;
use crate::group::{Group, Kin, Place};
use crate::schedule::Algorithm;
use crate::topology::Topology;
use phalanx_wire::{Generation, Rank};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

/// What may befall a rank.
#[derive(Clone, Copy, PartialEq, Debug)]
enum Fault {
    Kill,
    /// A connection, which both ends learn.
    Cut,
    /// One group, by one rank.
    Abort,
    /// For a shorter time than an operation may take.
    Nap,
    Stop,
    /// From all others, and nobody is told.
    Isolate,
    /// An operation of its script.
    Misunderstand,
}

const FAULTS: [Fault; 7] =
    [Fault::Kill, Fault::Cut, Fault::Abort, Fault::Nap, Fault::Stop, Fault::Isolate, Fault::Misunderstand];

/// A group.
struct Circle {
    network: Shared,
    topology: Topology,
    /// What all-reduces are to be done by.
    algorithm: Option<Algorithm>,
    /// The ranks of the world that it has, by its own.
    members: Vec<usize>,
}

pub(super) struct World {
    chance: Chance,
    began: Instant,
    now: Duration,
    circles: Vec<Circle>,
    players: Vec<Player>,
    /// What is still to befall this generation.
    faults: Vec<Fault>,
    hurt: Hurt,
    /// Whether those who were stopped or cut off came back.
    released: bool,
    generation: u64,
    /// Bytes that arrive at once, at most.
    piece: usize,
    told: bool,
}

/// After so long a silence every wait has begun to listen to all and to ask, however slow its rank's clock is.
const LISTENING: Duration = Duration::from_millis(130);
/// What a world may do before it is taken for endless.
const ACTIONS: usize = 3_000_000;

impl World {
    pub(super) fn new(seed: u64, told: bool) -> World {
        let chance = Chance::new(seed.wrapping_mul(0x2545_f491_4f6c_dd1d));
        World {
            chance,
            began: Instant::now(),
            now: Duration::ZERO,
            circles: Vec::new(),
            players: Vec::new(),
            faults: Vec::new(),
            hurt: Hurt::default(),
            released: false,
            generation: 0,
            piece: 1,
            told,
        }
    }

    /// Plays all generations of a world; what went wrong, if anything did.
    pub(super) fn play(mut self) -> Result<(), String> {
        let mut ranks = 2 + self.chance.below(8);
        for _ in 0..1 + self.chance.below(3) {
            self.begin(ranks);
            self.run()?;
            self.judge()?;
            // The survivors meet again, and some who died were started anew.
            let lost = self.players.iter().filter(|p| matches!(p.state, State::Dead)).count();
            ranks = ranks - lost + self.chance.below(lost + 1);
            if ranks < 2 {
                break;
            }
        }
        Ok(())
    }

    fn tell(&self, what: impl FnOnce() -> String) {
        if self.told {
            eprintln!("[{} {:>9.3?}] {}", self.generation, self.now, what());
        }
    }

    /// A generation of so many ranks.
    fn begin(&mut self, ranks: usize) {
        self.generation += 1;
        (self.hurt, self.released) = (Hurt::default(), false);
        self.piece = self.chance.pick(&[1, 3, 40, 1000, 100_000]);
        let room = self.chance.pick(&[7, 100, 5000, 1 << 20]);
        self.faults = match self.chance.below(4) {
            0 => Vec::new(),
            1 | 2 => vec![self.chance.pick(&FAULTS)],
            _ => (0..2 + self.chance.below(3)).map(|_| self.chance.pick(&FAULTS)).collect(),
        };
        let mut groups = vec![(0..ranks).collect::<Vec<_>>()];
        // Whoever waits in another group isn't there to be asked what it understood.
        let others = if self.faults.contains(&Fault::Misunderstand) { 0 } else { self.chance.below(3) };
        for _ in 0..others {
            // Some of them, in any order.
            let mut members: Vec<usize> = (0..ranks).collect();
            (0..ranks).for_each(|i| members.swap(i, self.chance.below(ranks)));
            members.truncate(2 + self.chance.below(ranks - 1));
            groups.push(members);
        }
        let hosts: Vec<usize> = (0..ranks).map(|_| self.chance.below(3)).collect();
        let hosts = if self.chance.once_in(3) { hosts } else { vec![0; ranks] };
        let circle = |members: &Vec<usize>| Circle {
            network: Arc::new(Mutex::new(Network::new(members.len(), room))),
            topology: Topology::of(members, |&a, &b| hosts[a] == hosts[b]),
            algorithm: self.chance.once_in(2).then(|| self.chance.pick(&Algorithm::OF_ALL_REDUCE)),
            members: members.clone(),
        };
        self.circles = groups.iter().map(circle).collect();
        let script = self.script(if self.piece.min(room) < 100 { 7 } else { usize::MAX });
        if script.iter().any(Step::is_large) {
            // Byte by byte they would take too long.
            self.piece = 100_000;
            self.circles.iter().for_each(|circle| lock(&circle.network).room = 1 << 20);
        }
        self.players = (0..ranks).map(|rank| self.player(rank, script.clone())).collect();
        self.tell(|| format!("{ranks} ranks in {groups:?}, to befall them: {:?}", self.faults));
        // Misunderstandings are there from the beginning.
        if self.faults.contains(&Fault::Misunderstand) {
            self.faults.retain(|fault| *fault != Fault::Misunderstand);
            self.misunderstand();
        }
    }

    /// Some operations, of so many elements at most.
    fn script(&mut self, longest: usize) -> Vec<Step> {
        let mut script: Vec<Step> = (0..2 + self.chance.below(9))
            .map(|number| {
                let group = self.chance.below(self.circles.len());
                let step = Step::random(&mut self.chance, number, group, self.circles[group].members.len());
                Step { len: step.len.min(longest), ..step }
            })
            .collect();
        // Nobody leaves a group before all have found out what there is to find.
        for group in 0..self.circles.len() {
            script.push(Step { number: script.len(), group, what: What::Barrier, len: 0 });
        }
        script
    }

    fn player(&mut self, rank: usize, script: Vec<Step>) -> Player {
        let end = |circle: &Circle| {
            let own = circle.members.iter().position(|&member| member == rank)?;
            let members: Vec<Rank> = circle.members.iter().map(|&rank| Rank(rank as u32)).collect();
            let place = Place {
                rank: Rank(own as u32),
                topology: circle.topology.clone(),
                generation: Generation(self.generation),
                timeout: LIMIT,
                silence: None,
                algorithm: circle.algorithm,
                members,
                name: 0,
                siblings: Arc::default(),
                kin: Kin::Alone,
            };
            let wires = Wires { rank: own, network: Arc::clone(&circle.network) };
            Some(Group::over(place, Some(Box::new(wires))))
        };
        let groups = self.circles.iter().map(end).collect();
        let offset = Duration::from_millis(self.chance.next() % 100_000);
        let clock = Clock { began: self.began + offset, percent: 80 + self.chance.below(41) as u32 };
        let ahead = 1 + self.chance.below(4);
        Player::new(groups, script, clock, ahead)
    }

    /// One rank takes one of its collectives for another.
    fn misunderstand(&mut self) {
        let script = &self.players[0].script;
        let before_the_end = 0..script.len() - self.circles.len();
        let collectives: Vec<usize> = before_the_end.filter(|&at| script[at].is_collective()).collect();
        if collectives.is_empty() {
            return;
        }
        let at = self.chance.pick(&collectives);
        let step = script[at];
        let members = &self.circles[step.group].members;
        let deviant = self.chance.pick(members);
        let mistaken = step.misunderstood(&mut self.chance, members.len());
        self.tell(|| format!("rank {deviant} takes {step:?} for {mistaken:?}"));
        self.players[deviant].script[at] = mistaken;
        self.players.iter_mut().for_each(|player| player.doubtful = Some(step));
        self.hurt.deviant = Some(deviant);
        self.hurt.times += 1;
    }

    /// Until every rank came to its end.
    fn run(&mut self) -> Result<(), String> {
        // Rounds in which all looked and nothing moved.
        let mut still = 0;
        for _ in 0..ACTIONS {
            if !self.players.iter().any(Player::is_playing) {
                return Ok(());
            }
            if !self.faults.is_empty() && self.chance.once_in(60) {
                self.strike();
            }
            if self.chance.once_in(20) {
                self.now += Duration::from_micros(self.chance.next() % 300);
                self.resume();
            }
            let ready: Vec<usize> = (0..self.players.len())
                .filter(|&rank| self.players[rank].is_ready() && self.players[rank].awake)
                .collect();
            let looks = !ready.is_empty() && self.chance.once_in(2);
            let moved = if looks {
                let rank = self.chance.pick(&ready);
                self.look(rank)?
            } else {
                self.deliver()
            };
            if moved {
                still = 0;
            } else if ready.is_empty() {
                still = self.wait(still)?;
            }
        }
        Err(format!("it goes on and on{}", self.whereabouts()))
    }

    fn whereabouts(&self) -> String {
        let each = self.players.iter().enumerate();
        each.map(|(rank, player)| format!("\n  rank {rank}: {}", player.whereabouts())).collect()
    }

    fn look(&mut self, rank: usize) -> Result<bool, String> {
        if self.chance.once_in(8) {
            self.players[rank].progress();
        }
        let looked = self.players[rank].look(self.now);
        self.rouse();
        match looked {
            Looked::Wrong(wrong) => Err(format!("at rank {rank}: {wrong}")),
            Looked::Nothing => Ok(false),
            Looked::Moved => {
                if let State::Failed(group, error) = &self.players[rank].state {
                    self.tell(|| format!("rank {rank} failed in group {group}: {error}"));
                    if let Some(wrong) = self.wrong_with(rank, *group, error) {
                        return Err(format!("rank {rank} in group {group} says \"{error}\", but {wrong}"));
                    }
                }
                Ok(true)
            }
        }
    }

    /// What an error says that isn't so.
    fn wrong_with(&self, rank: usize, group: usize, error: &Error) -> Option<&'static str> {
        let Circle { network, members, .. } = &self.circles[group];
        let own = members.iter().position(|&member| member == rank).expect("a member's error");
        let failed = |by: usize| self.players[members[by]].failure(group);
        wrong_with(error, own, members, &lock(network), &self.hurt, failed)
    }

    /// Lets something arrive; false if nothing is under way.
    fn deliver(&mut self) -> bool {
        let (n, first) = (self.circles.len(), self.chance.below(self.circles.len()));
        let arrived = (0..n).any(|i| {
            let circle = &self.circles[(first + i) % n];
            lock(&circle.network).deliver(&mut self.chance, self.piece)
        });
        self.rouse();
        arrived
    }

    /// Wakes whoever something happened to.
    fn rouse(&mut self) {
        for circle in &self.circles {
            for rank in lock(&circle.network).touched.drain(..) {
                self.players[circle.members[rank]].awake = true;
            }
        }
    }

    /// Nothing moved, and so often before: time passes, until somebody goes on, or a deadline is over. How often it was after
    /// that.
    fn wait(&mut self, still: usize) -> Result<usize, String> {
        self.hurt.silent |= self.players.iter().any(|player| self.hopes(player));
        let goes_on = self.players.iter().filter(|p| p.is_playing()).filter_map(|p| p.stopped).min();
        let mut still = still + 1;
        match (still, goes_on) {
            (1, _) => self.now += LISTENING,
            // Now they listen.
            (2, _) => {}
            (_, Some(time)) if time < Duration::MAX => self.now = self.now.max(time),
            (3..5, _) if self.hurt.silent => self.now += LIMIT * 2,
            (5, _) if self.hurt.silent && !self.released => {
                // Whoever was stopped or cut off comes back, and finds what became of its group.
                self.players.iter_mut().for_each(|p| p.stopped = None);
                for circle in &self.circles {
                    let mut network = lock(&circle.network);
                    (0..circle.members.len()).for_each(|rank| network.silence(rank, false));
                }
                (self.released, still) = (true, 0);
            }
            _ => return Err(format!("nothing moves any more{}", self.whereabouts())),
        }
        self.resume();
        self.players.iter_mut().for_each(|player| player.awake = true);
        Ok(still)
    }

    /// Whether a rank waits for a letter of any rank of a group that another left at its end: that is no error before the
    /// deadline.
    fn hopes(&self, player: &Player) -> bool {
        let waits = player.waits_for().filter(|step| matches!(step.what, What::FanIn(_)));
        waits.is_some_and(|step| {
            let Circle { network, members, .. } = &self.circles[step.group];
            (0..members.len()).any(|rank| lock(network).left(rank) == Some(Leave::Done))
        })
    }

    fn resume(&mut self) {
        let now = self.now;
        let over = self.players.iter_mut().filter(|p| p.stopped.is_some_and(|until| until <= now));
        over.for_each(|player| (player.stopped, player.awake) = (None, true));
    }

    /// Something befalls somebody.
    fn strike(&mut self) {
        let playing: Vec<usize> =
            (0..self.players.len()).filter(|&rank| self.players[rank].is_playing()).collect();
        let (Some(fault), false) = (self.faults.pop(), playing.is_empty()) else { return };
        let rank = self.chance.pick(&playing);
        self.tell(|| format!("{fault:?} befalls rank {rank}"));
        self.hurt.times += usize::from(fault != Fault::Nap);
        match fault {
            Fault::Kill => {
                for circle in &self.circles {
                    if let Some(own) = circle.members.iter().position(|&member| member == rank) {
                        lock(&circle.network).kill(own, &mut self.chance);
                    }
                }
                self.players[rank].leave(State::Dead);
            }
            Fault::Cut => {
                let circle = &self.circles[self.chance.below(self.circles.len())];
                let n = circle.members.len();
                let a = self.chance.below(n);
                let b = (a + 1 + self.chance.below(n - 1)) % n;
                self.tell(|| format!("namely {a} and {b} of group {:?}", circle.members));
                lock(&circle.network).cut(a, b, &mut self.chance);
            }
            Fault::Abort => {
                let groups: Vec<&Group> = self.players[rank].groups.iter().flatten().collect();
                self.chance.pick(&groups).abort("told to");
                self.hurt.aborted.push(rank);
                self.players[rank].awake = true;
            }
            Fault::Nap => {
                let time = Duration::from_micros(self.chance.next() % 100_000);
                self.players[rank].stopped = Some(self.now + time);
            }
            Fault::Stop => {
                self.players[rank].stopped = Some(Duration::MAX);
                (self.hurt.silent, self.released) = (true, false);
            }
            Fault::Isolate => {
                for circle in &self.circles {
                    if let Some(own) = circle.members.iter().position(|&member| member == rank) {
                        lock(&circle.network).silence(own, true);
                    }
                }
                (self.hurt.silent, self.released) = (true, false);
            }
            Fault::Misunderstand => unreachable!("these are there from the beginning"),
        }
        self.rouse();
    }

    /// What can be said only when all is over.
    fn judge(&self) -> Result<(), String> {
        let failed = |player: &Player| matches!(player.state, State::Failed(..));
        let named = |player: &Player| matches!(player.state, State::Failed(_, Error::Mismatch { .. }));
        if self.hurt.times == 0 && self.players.iter().any(failed) {
            return Err("ranks failed, and nobody was hurt".into());
        }
        let only_misunderstood = self.hurt.deviant.is_some() && self.hurt.times == 1;
        if only_misunderstood && !self.players.iter().any(named) {
            return Err(format!("nobody found out who misunderstood{}", self.whereabouts()));
        }
        Ok(())
    }
}
