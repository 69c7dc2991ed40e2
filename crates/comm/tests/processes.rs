//! Real processes that are killed, stopped, cut off from each other and told to abort, two hundred times.
//!
//! Four processes, over shared memory and TCP mixed, all-reduce without end. A fault strikes while they do; every process that
//! is left must say so within seconds and blame the one that was hurt, with no wrong sum before. Then the survivors go on as a
//! group of the next generation, and who was killed comes back in the one after.

#[path = "processes/child.rs"]
mod child;
#[path = "processes/talk.rs"]
mod talk;

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use phalanx_comm::{Generation, PeerAddress, Rank};
use std::io::{BufRead, BufReader, Write};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::{Duration, Instant};
use talk::{CHILD, MARK, Order, Said, Transport};

const FAULTS: usize = 200;
/// How long a process may take to say what it is asked for, or that it lost another.
const LIMIT: Duration = Duration::from_secs(20);
/// Each process's; ranks of shared memory and of TCP only reach each other over TCP.
const TRANSPORTS: [Transport; 4] = [Transport::Memory, Transport::Memory, Transport::Tcp, Transport::Tcp];

/// The processes start this test with [`CHILD`] in their environment, and then it is what they do.
#[test]
fn one_of_the_processes() {
    if let Ok(transport) = std::env::var(CHILD) {
        child::live(serde_json::from_str(&transport).unwrap());
    }
}

#[derive(Clone, Copy, PartialEq, Debug)]
enum Fault {
    Kill(usize),
    Abort(usize),
    /// The connection between two.
    Cut(usize, usize),
    /// For so many milliseconds.
    Nap(usize, u64),
    /// Until the others went on without it.
    Stop(usize),
}

/// Fault `i` of a world of four: a function of the number, so that a failure can be had again.
fn fault(i: usize) -> Fault {
    let mut x = (i as u64 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    let mut below = |n: u64| {
        x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9).wrapping_add(0x94d0_49bb_1331_11eb);
        (x >> 33) % n
    };
    let who = below(4) as usize;
    // Each stop takes as long as it goes unnoticed.
    match below(12) {
        0..3 => Fault::Kill(who),
        3..6 => Fault::Abort(who),
        // Of these two, one has no shared memory.
        6..9 => Fault::Cut(below(2) as usize, 2 + below(2) as usize),
        9..11 => Fault::Nap(who, 1 + below(30)),
        _ => Fault::Stop(who),
    }
}

/// A process and how to speak to it.
struct Process {
    child: Child,
}

impl Drop for Process {
    fn drop(&mut self) {
        // One that is gone already needs no killing.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

struct World {
    processes: Vec<Process>,
    heard: Receiver<(u32, Said)>,
    speaker: Sender<(u32, Said)>,
    generation: u64,
}

impl World {
    fn new() -> World {
        let (speaker, heard) = channel();
        let mut world = World { processes: Vec::new(), heard, speaker, generation: 0 };
        world.processes = TRANSPORTS.iter().map(|&transport| world.process(transport)).collect();
        world
    }

    fn process(&self, transport: Transport) -> Process {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["one_of_the_processes", "--exact", "--nocapture"])
            .env(CHILD, serde_json::to_string(&transport).unwrap())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let (said, speaker, pid) = (child.stdout.take().unwrap(), self.speaker.clone(), child.id());
        let listen = move || {
            for line in BufReader::new(said).lines().map_while(Result::ok) {
                // The test harness speaks there, too.
                let Some(said) = line.split_once(MARK).map(|(_, said)| serde_json::from_str(said)) else {
                    continue;
                };
                if speaker.send((pid, said.unwrap())).is_err() {
                    return;
                }
            }
        };
        std::thread::Builder::new().name(format!("ear-{pid}")).spawn(listen).unwrap();
        Process { child }
    }

    fn order(&mut self, who: usize, order: &Order) {
        let line = serde_json::to_string(order).unwrap() + "\n";
        let stdin = self.processes[who].child.stdin.as_mut().unwrap();
        stdin.write_all(line.as_bytes()).and_then(|()| stdin.flush()).unwrap();
    }

    /// What each of these says next that `wanted` makes something of; in their order.
    fn await_all<T>(&mut self, who: &[usize], wanted: impl Fn(Said) -> Option<T>) -> Vec<T> {
        let until = Instant::now() + LIMIT;
        let mut said: Vec<Option<T>> = who.iter().map(|_| None).collect();
        while said.iter().any(Option::is_none) {
            let missing = || who.iter().zip(&said).filter(|(_, said)| said.is_none()).map(|(who, _)| *who);
            let next = self.heard.recv_timeout(until.saturating_duration_since(Instant::now()));
            let Ok((pid, word)) = next else {
                panic!("nothing is heard of ranks {:?}", missing().collect::<Vec<_>>());
            };
            assert!(!matches!(word, Said::Wrong(_)), "process {pid}: {word:?}");
            let speaker = who.iter().position(|&who| self.processes[who].child.id() == pid);
            if let Some(speaker) = speaker {
                said[speaker] = wanted(word).or(said[speaker].take());
            }
        }
        said.into_iter().flatten().collect()
    }

    /// All become one group, who is new among them, too.
    fn meet(&mut self) {
        self.generation += 1;
        let all: Vec<usize> = (0..TRANSPORTS.len()).collect();
        all.iter().for_each(|&who| self.order(who, &Order::Listen));
        let address = |said| if let Said::Here(address) = said { Some(address) } else { None };
        let peers: Vec<PeerAddress> = self.await_all(&all, address);
        for &who in &all {
            let (rank, peers) = (Rank(who as u32), peers.clone());
            self.order(who, &Order::Join { rank, generation: Generation(self.generation), peers });
        }
        self.await_playing(&all);
    }

    /// Those who play come to an end, and all become one group.
    fn reunite(&mut self, first: usize, playing: &[usize]) {
        self.order(first, &Order::Rest);
        self.await_all(playing, |said| matches!(said, Said::Resting).then_some(()));
        self.meet();
    }

    /// These go on as they are.
    fn rebuild(&mut self, survivors: &[usize]) {
        self.generation += 1;
        let ranks: Vec<Rank> = survivors.iter().map(|&who| Rank(who as u32)).collect();
        for &who in survivors {
            let (survivors, generation) = (ranks.clone(), Generation(self.generation));
            self.order(who, &Order::Rebuild { survivors, generation });
        }
        self.await_playing(survivors);
    }

    fn await_playing(&mut self, who: &[usize]) {
        self.await_all(who, |said| matches!(said, Said::Playing).then_some(()));
    }

    fn signal(&self, who: usize, signal: Signal) {
        kill(Pid::from_raw(self.processes[who].child.id() as i32), signal).unwrap();
    }

    /// A fault, and all that it leads to, until everyone plays again.
    fn strike(&mut self, fault: Fault) {
        let blamed = |said| if let Said::Failed(blame) = said { Some(blame) } else { None };
        let all: Vec<usize> = (0..TRANSPORTS.len()).collect();
        match fault {
            Fault::Kill(who) => {
                self.signal(who, Signal::SIGKILL);
                let left: Vec<usize> = all.iter().copied().filter(|&other| other != who).collect();
                for blame in self.await_all(&left, blamed) {
                    assert_eq!(blame.lost, Some(who), "{fault:?}: {blame:?}");
                }
                self.rebuild(&left);
                self.processes[who] = self.process(TRANSPORTS[who]);
                self.reunite(left[0], &left);
            }
            Fault::Stop(who) => {
                self.signal(who, Signal::SIGSTOP);
                let left: Vec<usize> = all.iter().copied().filter(|&other| other != who).collect();
                let blames = self.await_all(&left, blamed);
                // Whoever finds out tells the others.
                assert!(blames.iter().any(|blame| blame.silent == Some(who)), "{fault:?}: {blames:?}");
                for blame in blames {
                    assert!([blame.silent, blame.lost].contains(&Some(who)), "{fault:?}: {blame:?}");
                }
                self.rebuild(&left);
                // It finds that it was left, and by whom is told from who is alive.
                self.signal(who, Signal::SIGCONT);
                self.await_all(&[who], blamed);
                self.reunite(left[0], &left);
            }
            Fault::Abort(who) => {
                self.order(who, &Order::Abort);
                for blame in self.await_all(&all, blamed) {
                    assert_eq!(blame.ended_by, Some(who), "{fault:?}: {blame:?}");
                }
                self.rebuild(&all);
            }
            Fault::Cut(a, b) => {
                self.order(a, &Order::Cut(b));
                self.order(b, &Order::Cut(a));
                for blame in self.await_all(&all, blamed) {
                    assert!([Some(a), Some(b)].contains(&blame.lost), "{fault:?}: {blame:?}");
                }
                self.rebuild(&all);
            }
            Fault::Nap(who, ms) => {
                self.signal(who, Signal::SIGSTOP);
                let said = self.heard.recv_timeout(Duration::from_millis(ms));
                assert!(said.is_err(), "{fault:?}: {said:?}");
                self.signal(who, Signal::SIGCONT);
            }
        }
    }
}

#[test]
fn survivors_of_two_hundred_faults_blame_whom_it_hit_and_go_on() {
    let mut world = World::new();
    world.meet();
    for i in 0..FAULTS {
        world.strike(fault(i));
    }
    world.order(0, &Order::Rest);
    let all: Vec<usize> = (0..TRANSPORTS.len()).collect();
    let steps = world.await_all(&all, |said| matches!(said, Said::Resting).then_some(()));
    assert_eq!(steps.len(), all.len());
}

#[test]
fn faults_are_of_all_kinds() {
    let all: Vec<Fault> = (0..FAULTS).map(fault).collect();
    let count = |kind: fn(&Fault) -> bool| all.iter().filter(|fault| kind(fault)).count();
    let kinds: [fn(&Fault) -> bool; 5] = [
        |fault| matches!(fault, Fault::Kill(_)),
        |fault| matches!(fault, Fault::Abort(_)),
        |fault| matches!(fault, Fault::Cut(..)),
        |fault| matches!(fault, Fault::Nap(..)),
        |fault| matches!(fault, Fault::Stop(_)),
    ];
    for kind in kinds {
        assert!(count(kind) > FAULTS / 20, "{} of {FAULTS}", count(kind));
    }
}
