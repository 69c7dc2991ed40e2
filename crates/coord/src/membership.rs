//! Who has come, and what follows from it: no I/O, no clock.

use phalanx_job::Roster;
use phalanx_wire::{Generation, Rank};

/// The ranks that have joined.
#[derive(Clone, Debug)]
pub struct Membership {
    generation: Generation,
    addresses: Vec<Option<String>>,
}

/// What to do after a rank has joined.
#[derive(Clone, Debug, PartialEq)]
pub enum Decision {
    /// Wait for these.
    Wait {
        /// Who isn't there yet.
        missing: Vec<u32>,
    },
    /// Tell everyone.
    Begin(Roster),
    /// Don't take the newcomer.
    Refuse {
        /// Why.
        reason: String,
    },
}

impl Membership {
    /// Nobody has come yet.
    pub fn new(generation: Generation, world_size: usize) -> Membership {
        Membership { generation, addresses: vec![None; world_size] }
    }

    /// Rank `rank` is there.
    pub fn join(&mut self, rank: Rank, address: String) -> Decision {
        let world_size = self.addresses.len();
        let Some(place) = self.addresses.get_mut(rank.index()) else {
            return Decision::Refuse { reason: format!("rank {rank} in a world of {world_size}") };
        };
        if place.is_some() {
            return Decision::Refuse { reason: format!("rank {rank} has joined already") };
        }
        *place = Some(address);
        let missing = self.missing();
        if !missing.is_empty() {
            return Decision::Wait { missing };
        }
        let addresses = self.addresses.iter().flatten().cloned().collect();
        Decision::Begin(Roster { generation: self.generation, addresses })
    }

    /// Rank `rank` went away before all were there; it may come again.
    pub fn leave(&mut self, rank: Rank) {
        self.addresses[rank.index()] = None;
    }

    /// Who isn't there yet.
    pub fn missing(&self) -> Vec<u32> {
        (0..).zip(&self.addresses).filter(|(_, address)| address.is_none()).map(|(rank, _)| rank).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn begins_when_all_are_there_and_refuses_the_rest() {
        let mut members = Membership::new(Generation(4), 3);
        assert_eq!(members.join(Rank(2), "c".into()), Decision::Wait { missing: vec![0, 1] });
        assert!(
            matches!(members.join(Rank(2), "x".into()), Decision::Refuse { reason } if reason.contains("already"))
        );
        assert!(
            matches!(members.join(Rank(3), "x".into()), Decision::Refuse { reason } if reason.contains("world of 3"))
        );
        assert_eq!(members.join(Rank(0), "gone".into()), Decision::Wait { missing: vec![1] });
        members.leave(Rank(0));
        assert_eq!(members.missing(), [0, 1]);
        assert_eq!(members.join(Rank(0), "a".into()), Decision::Wait { missing: vec![1] });
        let roster =
            Roster { generation: Generation(4), addresses: vec!["a".into(), "b".into(), "c".into()] };
        assert_eq!(members.join(Rank(1), "b".into()), Decision::Begin(roster));
    }
}
