//! Who leads the nodes of a run when their coordinator is gone: no I/O, no clock.
//!
//! Nodes are tried in the order of their numbers, those that stand by last; the first that is there calls the roll of all that
//! were led, and leads those that come back. That none of the others can be led by somebody else meanwhile is known of nodes whose
//! agent has ended: their machine says so by refusing connections. A node that is only silent may be alive, cut off from these, so of all but those
//! that have ended more than half must be here, or half and the first of them. Who counts as first is the coordinator that is
//! gone, unless its agent has ended: it stops itself when it is left with less than half, and not before.
//!
//! Invariant S-ONE: of nodes that know the same standing, no two sets without a common node can both be led.

use crate::fleet::{Event, Fleet, Legacy, NodeId, Order, Patience};
use phalanx_job::{FIRST_SPARE, FromAgent, NodeStanding, Return, Standing, Terms};
use std::collections::BTreeSet;
use std::time::{Duration, Instant};

/// How often to look whether the node that calls has come back to itself.
const OWN: Duration = Duration::from_millis(50);

/// Whether the nodes that are `here` may go on without the others of `nodes`, of which those in `ended` are known to have ended;
/// if not, why. `leader` is who has led them.
pub fn quorum(
    nodes: &BTreeSet<u32>,
    leader: Option<u32>,
    ended: &BTreeSet<u32>,
    here: &BTreeSet<u32>,
) -> Result<(), String> {
    let left: BTreeSet<u32> = nodes.difference(ended).copied().collect();
    let here: BTreeSet<u32> = here.intersection(&left).copied().collect();
    let first = leader.filter(|leader| left.contains(leader)).or(left.first().copied());
    let has_first = first.is_some_and(|first| here.contains(&first));
    if here.len() * 2 > left.len() || here.len() * 2 == left.len() && has_first {
        return Ok(());
    }
    let name = |number: &u32| match *number >= FIRST_SPARE {
        true => "one that stands by".into(),
        false => number.to_string(),
    };
    let silent: Vec<String> = left.difference(&here).map(name).collect();
    let (count, of, silent) = (here.len(), left.len(), silent.join(", "));
    Err(format!(
        "only {count} of {of} nodes are here: {silent} may be alive and go on without them\nhint: start the run again with --resume, or run three nodes or more, of which one may be lost"
    ))
}

/// Whether a node was led, and is no other one that had its number.
fn is_led(standing: &Standing, back: &Return) -> bool {
    let is_it = |node: &NodeStanding| node.number == Some(back.number) && node.node.standby == back.standby;
    standing.nodes.iter().any(is_it)
}

/// What follows from who has come back.
#[derive(Clone, Debug, PartialEq)]
pub enum Verdict {
    /// Wait for others, until then.
    Wait(Instant),
    /// Lead those that are here.
    Lead,
    /// There are too few, and this is why.
    GiveUp(String),
}

/// The nodes of a run whose coordinator is gone, as they come back to the one that is to lead them.
#[derive(Debug)]
pub struct RollCall {
    standing: Standing,
    /// The number of the node that calls.
    own: u32,
    ended: BTreeSet<u32>,
    back: Vec<(NodeId, Return)>,
    /// What nodes have said besides.
    held: Vec<(NodeId, FromAgent)>,
    until: Instant,
}

impl RollCall {
    /// `own` is the number of the node that calls; the agents of those in `ended` are known to have ended.
    pub fn new(standing: Standing, own: u32, ended: BTreeSet<u32>, until: Instant) -> RollCall {
        RollCall { standing, own, ended, back: Vec::new(), held: Vec::new(), until }
    }

    /// The numbers of those that haven't come back and aren't known to have ended.
    pub fn missing(&self) -> BTreeSet<u32> {
        let is_here = |number: &u32| self.back.iter().any(|(_, back)| back.number == *number);
        let nodes: BTreeSet<u32> = self.standing.numbered().into_keys().collect();
        nodes.difference(&self.ended).copied().filter(|number| !is_here(number)).collect()
    }

    /// The agents of these nodes have ended as well.
    pub fn count_out(&mut self, ended: &BTreeSet<u32>) {
        self.ended.extend(ended);
    }

    /// Takes notice of what happens.
    pub fn heed(&mut self, event: Event) {
        match event {
            Event::Said(id, FromAgent::Return(back)) => {
                if back.standing.is_newer(&self.standing) {
                    self.standing = back.standing.clone();
                }
                self.back.retain(|(_, other)| other.standby != back.standby);
                self.back.push((id, *back));
            }
            Event::Said(_, FromAgent::Beat) => {}
            Event::Said(id, said) => self.held.push((id, said)),
            Event::Gone(id, _) => {
                self.back.retain(|(of, _)| *of != id);
                self.held.retain(|(of, _)| *of != id);
            }
            Event::InPlace(..) | Event::Begun(..) | Event::Tick => {}
        }
    }

    /// What follows.
    pub fn verdict(&self, now: Instant) -> Verdict {
        let nodes: BTreeSet<u32> = self.standing.numbered().into_keys().collect();
        if !nodes.contains(&self.own) {
            return Verdict::GiveUp("this node was given up before".into());
        }
        let here: BTreeSet<u32> = self
            .back
            .iter()
            .filter(|(_, back)| is_led(&self.standing, back))
            .map(|(_, back)| back.number)
            .collect();
        let leader = self.standing.leader().and_then(|node| node.number);
        // Who has led them doesn't come to be led.
        let is_missing =
            |number: &u32| !here.contains(number) && !self.ended.contains(number) && Some(*number) != leader;
        if !here.contains(&self.own) {
            return Verdict::Wait(now + OWN);
        }
        if nodes.iter().any(is_missing) && now < self.until {
            return Verdict::Wait(self.until);
        }
        quorum(&nodes, leader, &self.ended, &here).map_or_else(Verdict::GiveUp, |()| Verdict::Lead)
    }

    /// The fleet of those that have come back, and what is to be done at first.
    pub(crate) fn lead(
        self,
        terms: Terms,
        patience: Patience,
        now: Instant,
        clock_ms: u64,
    ) -> (Fleet, Vec<Order>) {
        let RollCall { standing, own, ended, back, held, .. } = self;
        let strangers: Vec<(NodeId, Return)> =
            back.iter().filter(|(_, back)| !is_led(&standing, back)).cloned().collect();
        let left = Legacy { standing: &standing, leader: own, ended: &ended, back: &back };
        let (mut fleet, mut orders) = Fleet::resume(terms, patience, &left, now, clock_ms);
        for (id, back) in strangers {
            match back.newcomer() {
                // It hasn't heard that it was taken in.
                Some(node) => orders.extend(fleet.heed(now, Event::Said(id, FromAgent::Join(node.clone())))),
                None => orders.push(Order::GoneOn(id)),
            }
        }
        for (id, said) in held {
            orders.extend(fleet.heed(now, Event::Said(id, said)));
        }
        (fleet, orders)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn set(numbers: &[u32]) -> BTreeSet<u32> {
        numbers.iter().copied().collect()
    }

    #[test]
    fn more_than_half_go_on_and_half_with_the_first() {
        // Of these nodes, led by node 0, these have ended, and these are here.
        let check = |nodes: &[u32], ended: &[u32], here: &[u32], why: Option<&str>| {
            let found = quorum(&set(nodes), Some(0), &set(ended), &set(here));
            match (&found, why) {
                (Ok(()), None) => {}
                (Err(found), Some(why)) => {
                    assert!(found.starts_with(why) && found.contains("hint: "), "{found}")
                }
                _ => panic!("{nodes:?} {ended:?} {here:?}: {found:?}"),
            }
        };
        check(&[0, 1], &[0], &[1], None);
        check(&[0, 1], &[], &[1], Some("only 1 of 2 nodes are here: 0 may be alive"));
        check(&[0, 1, 2], &[], &[1, 2], None);
        check(&[0, 1, 2], &[], &[2], Some("only 1 of 3 nodes are here: 0, 1 may be alive"));
        // The coordinator is as good as gone, and of the two that are left each could lead.
        check(&[0, 1, 2], &[0], &[1], None);
        check(&[0, 1, 2], &[0], &[2], Some("only 1 of 2 nodes are here: 1 may be alive"));
        check(&[0, 1, 2], &[0, 1], &[2], None);
        check(&[0, 1, 2, 3], &[], &[2, 3], Some("only 2 of 4"));
        check(&[0, 1, 2, 3], &[], &[0, 3], None);
        check(&[4, 7], &[], &[4], None);
    }

    proptest! {
        /// S-ONE, however the nodes are parted and whatever is known on each side of those that have ended.
        #[test]
        fn no_two_parts_of_a_run_go_on(
            nodes in prop::collection::btree_set(0..9u32, 1..8),
            fate in prop::collection::vec(0..3u8, 9),
            known in prop::collection::vec(any::<[bool; 2]>(), 9),
            leader in 0..9u32,
        ) {
            let of = |wanted: u8| -> BTreeSet<u32> {
                nodes.iter().copied().filter(|number| fate[*number as usize] == wanted).collect()
            };
            let [a, b, gone] = [0, 1, 2].map(of);
            let leader = nodes.get(&leader).copied();
            let goes_on = |here: &BTreeSet<u32>, side: usize| {
                let ended = gone.iter().copied().filter(|number| known[*number as usize][side]).collect();
                quorum(&nodes, leader, &ended, here).is_ok()
            };
            prop_assert!(!(goes_on(&a, 0) && goes_on(&b, 1)));
            // All that live can go on once the ends of the others are known.
            let living: BTreeSet<u32> = a.union(&b).copied().collect();
            prop_assert!(living.is_empty() || quorum(&nodes, leader, &gone, &living).is_ok());
        }
    }
}
