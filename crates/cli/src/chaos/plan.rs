//! Which faults a campaign has, and when: a pure function of its seed.

use phalanx::tensor::Philox;

/// Something that happens to a run. Which worker or node is hurt is a number that those that are there then share out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Act {
    /// A worker is killed.
    Kill { worker: usize },
    /// Two are killed at once, this one and the next.
    KillTwo { worker: usize },
    /// All workers are killed at once.
    KillAll,
    /// The worker is stopped, and not continued.
    Stop { worker: usize },
    /// It is stopped for a moment, which is to cost nothing but that moment.
    Pause { worker: usize },
    /// It is asked to end: all end with a checkpoint, and the run is gone on with.
    Ask { worker: usize },
    /// A checkpoint is asked for.
    Checkpoint,
    /// The connection of a worker to another is cut.
    CutWorkers { worker: usize },
    /// The connection of a worker to the coordinator is cut.
    CutLink { worker: usize },
    /// There is no room on the disk when a checkpoint is due, and then there is again.
    FillDisk,
    /// The only agent is killed, and all workers with it; the run is gone on with.
    KillAgent,
    /// All agents are asked to end, as by a batch system; the run is gone on with.
    Drain,
    /// The agent of a node is killed, and its workers with it.
    KillNode { node: usize },
    /// The agent that hosts the coordinator is killed, and its workers with it.
    KillLeader,
    /// The connection of a node's agent to the coordinator is cut.
    CutNode { node: usize },
    /// A node is asked to leave, and another comes.
    Replace { node: usize },
    /// A node comes.
    AddNode,
    /// The only agent and its workers stand still, as on a machine that is moved, and then go on.
    Freeze,
}

/// How many nodes a run of several has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Nodes {
    pub(super) least: usize,
    pub(super) most: usize,
}

/// Where a kind of fault can happen.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Where {
    Anywhere,
    OnOneMachine,
    OnNodes,
}

/// Names of the kinds, for the report, with where they can happen and how often they are drawn beside the others.
const KINDS: [(&str, Where, u32); 18] = [
    ("a worker killed", Where::Anywhere, 40),
    ("two workers killed at once", Where::Anywhere, 8),
    ("all workers killed at once", Where::Anywhere, 4),
    ("a worker stopped", Where::Anywhere, 4),
    ("a worker paused", Where::Anywhere, 7),
    ("a worker asked to end", Where::Anywhere, 3),
    ("a checkpoint asked for", Where::Anywhere, 6),
    ("a connection of two workers cut", Where::Anywhere, 8),
    ("a worker's connection to the coordinator cut", Where::Anywhere, 5),
    ("a full disk", Where::Anywhere, 5),
    ("the agent killed", Where::OnOneMachine, 4),
    ("the agents asked to end", Where::Anywhere, 3),
    ("a node killed", Where::OnNodes, 10),
    ("a node cut off from the coordinator", Where::OnNodes, 6),
    ("a node leaving and another coming", Where::OnNodes, 8),
    ("a node coming", Where::OnNodes, 14),
    ("the node of the coordinator killed", Where::OnNodes, 8),
    ("the machine standing still", Where::OnOneMachine, 5),
];

impl Act {
    fn of(kind: usize, which: usize) -> Act {
        match kind {
            0 => Act::Kill { worker: which },
            1 => Act::KillTwo { worker: which },
            2 => Act::KillAll,
            3 => Act::Stop { worker: which },
            4 => Act::Pause { worker: which },
            5 => Act::Ask { worker: which },
            6 => Act::Checkpoint,
            7 => Act::CutWorkers { worker: which },
            8 => Act::CutLink { worker: which },
            9 => Act::FillDisk,
            10 => Act::KillAgent,
            11 => Act::Drain,
            12 => Act::KillNode { node: which },
            13 => Act::CutNode { node: which },
            14 => Act::Replace { node: which },
            15 => Act::AddNode,
            16 => Act::KillLeader,
            _ => Act::Freeze,
        }
    }

    /// What it is called.
    pub(super) fn name(self) -> &'static str {
        let kind = match self {
            Act::Kill { .. } => 0,
            Act::KillTwo { .. } => 1,
            Act::KillAll => 2,
            Act::Stop { .. } => 3,
            Act::Pause { .. } => 4,
            Act::Ask { .. } => 5,
            Act::Checkpoint => 6,
            Act::CutWorkers { .. } => 7,
            Act::CutLink { .. } => 8,
            Act::FillDisk => 9,
            Act::KillAgent => 10,
            Act::Drain => 11,
            Act::KillNode { .. } => 12,
            Act::CutNode { .. } => 13,
            Act::Replace { .. } => 14,
            Act::AddNode => 15,
            Act::KillLeader => 16,
            Act::Freeze => 17,
        };
        KINDS[kind].0
    }

    /// Whether the run ends with it, to be gone on with.
    pub(super) fn ends(self) -> bool {
        matches!(self, Act::KillAgent | Act::Drain | Act::Ask { .. })
    }
}

/// A fault, and the step after which it comes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Fault {
    pub(super) after: u64,
    pub(super) act: Act,
}

/// A run whose disk is full at its end can't keep its result, and who comes then comes to another run: neither is this near to it.
const LAST_STEPS: u64 = 200;

/// So many faults, spread over the steps of a run, with a few steps before the first and after the last.
pub(super) fn plan(seed: u64, faults: usize, nodes: Option<Nodes>, steps: u64) -> Vec<Fault> {
    let random = Philox::new(seed, 0);
    let gap = steps as f64 / (faults as f64 + 2.0);
    let mut here = nodes.map_or(1, |nodes| nodes.most);
    let fault = |i: usize| {
        let [kind, which, when, _] = random.block(i as u64);
        let jitter = f64::from(when) / 2f64.powi(32);
        let after = ((i as f64 + 0.5 + jitter) * gap) as u64;
        let mut act = Act::of(draw(kind, nodes.is_some()), which as usize);
        if let Some(nodes) = nodes {
            act = fit(act, here, nodes);
            here = nodes_after(act, here, nodes);
        }
        let is_late = after + LAST_STEPS > steps;
        let act = if is_late && matches!(act, Act::FillDisk) { Act::Checkpoint } else { act };
        Fault { after, act }
    };
    (0..faults).map(fault).collect()
}

/// A kind that can happen here.
fn draw(random: u32, on_nodes: bool) -> usize {
    let elsewhere = if on_nodes { Where::OnOneMachine } else { Where::OnNodes };
    let share = |&(_, place, share): &(&str, Where, u32)| if place == elsewhere { 0 } else { share };
    let mut left = random % KINDS.iter().map(share).sum::<u32>();
    let is_it = |kind: &(&str, Where, u32)| {
        let found = left < share(kind);
        left = left.saturating_sub(share(kind));
        found
    };
    KINDS.iter().position(is_it).expect("the shares add up to the total")
}

/// What can be done with so many nodes in the place of this: one stays, and there may be no more than the most.
fn fit(act: Act, here: usize, nodes: Nodes) -> Act {
    match act {
        Act::KillNode { .. } | Act::KillLeader | Act::CutNode { .. } | Act::Replace { .. } if here == 1 => {
            Act::AddNode
        }
        // One that leaves too few behind ends the run.
        Act::Replace { node } if nodes.least == nodes.most => Act::KillNode { node },
        Act::AddNode if here == nodes.most && nodes.least == nodes.most => Act::KillNode { node: 0 },
        Act::AddNode if here == nodes.most => Act::Replace { node: 0 },
        act => act,
    }
}

/// How many nodes there are then; below the least number another comes by itself.
fn nodes_after(act: Act, here: usize, nodes: Nodes) -> usize {
    match act {
        Act::KillNode { .. } | Act::KillLeader | Act::CutNode { .. } => (here - 1).max(nodes.least),
        Act::AddNode => here + 1,
        // All come when the run is gone on with.
        act if act.ends() => nodes.most,
        _ => here,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;

    #[test]
    fn a_seed_gives_one_plan_in_order_with_everything_in_it() {
        let of_nodes = Some(Nodes { least: 2, most: 4 });
        for (nodes, kinds, kills) in [(None, 13, 140..220), (of_nodes, 16, 90..170)] {
            let faults = plan(7, 400, nodes, 10_000);
            assert_eq!(faults, plan(7, 400, nodes, 10_000));
            assert_ne!(faults, plan(8, 400, nodes, 10_000));
            assert!(faults.is_sorted_by_key(|fault| fault.after));
            assert!(faults.iter().all(|fault| fault.after < 10_000));
            let names: HashSet<&str> = faults.iter().map(|fault| fault.act.name()).collect();
            assert_eq!(names.len(), kinds);
            let count = faults.iter().filter(|fault| matches!(fault.act, Act::Kill { .. })).count();
            assert!(kills.contains(&count), "{count}");
            let is_late = |fault: &&Fault| fault.after + LAST_STEPS > 10_000;
            assert!(faults.iter().filter(is_late).all(|fault| fault.act != Act::FillDisk));
        }
    }

    #[test]
    fn there_are_never_more_nodes_than_there_may_be_and_one_stays() {
        for (least, most) in [(1, 2), (2, 4), (3, 3)] {
            let nodes = Nodes { least, most };
            let mut here = most;
            for fault in plan(3, 400, Some(nodes), 10_000) {
                let others = here > 1;
                match fault.act {
                    Act::AddNode => assert!(here < most),
                    Act::KillNode { .. } | Act::KillLeader | Act::CutNode { .. } => assert!(others),
                    Act::Replace { .. } => assert!(others && least < most),
                    Act::KillAgent | Act::Freeze => panic!("there is more than one"),
                    _ => {}
                }
                here = nodes_after(fault.act, here, nodes);
                assert!((least..=most).contains(&here));
            }
        }
    }
}
