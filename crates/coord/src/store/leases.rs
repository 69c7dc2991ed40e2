//! Who promised to be alive until when, and which keys hang on it.

use super::ledger::Client;
use phalanx_job::store::{Key, LeaseId, Refusal};
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

/// A lease that hasn't ended.
struct Granted {
    owner: Client,
    time_to_live: Duration,
    ends: Duration,
    keys: BTreeSet<Key>,
}

/// All leases. Their numbers are never given twice.
#[derive(Default)]
pub(super) struct Leases {
    last: u64,
    granted: BTreeMap<LeaseId, Granted>,
    by_end: BTreeSet<(Duration, LeaseId)>,
}

impl Leases {
    pub(super) fn count(&self, owner: Client) -> usize {
        self.granted.values().filter(|lease| lease.owner == owner).count()
    }

    pub(super) fn grant(&mut self, now: Duration, owner: Client, time_to_live: Duration) -> LeaseId {
        self.last += 1;
        let (id, ends) = (LeaseId(self.last), now.saturating_add(time_to_live));
        self.granted.insert(id, Granted { owner, time_to_live, ends, keys: BTreeSet::new() });
        self.by_end.insert((ends, id));
        id
    }

    /// Says no if the lease isn't this client's, or no longer.
    pub(super) fn check(&self, lease: LeaseId, owner: Client) -> Result<(), Refusal> {
        match self.granted.get(&lease) {
            Some(granted) if granted.owner == owner => Ok(()),
            _ => Err(Refusal::NoLease { lease }),
        }
    }

    pub(super) fn keep_alive(&mut self, now: Duration, lease: LeaseId) {
        if let Some(granted) = self.granted.get_mut(&lease) {
            self.by_end.remove(&(granted.ends, lease));
            granted.ends = now.saturating_add(granted.time_to_live);
            self.by_end.insert((granted.ends, lease));
        }
    }

    /// How many keys hang on a lease.
    pub(super) fn keys(&self, lease: LeaseId) -> usize {
        self.granted.get(&lease).map_or(0, |granted| granted.keys.len())
    }

    /// Moves a key from the lease that it hung on to another.
    pub(super) fn attach(&mut self, key: &Key, old: Option<LeaseId>, new: Option<LeaseId>) {
        if let Some(granted) = old.and_then(|id| self.granted.get_mut(&id)) {
            granted.keys.remove(key);
        }
        if let Some(granted) = new.and_then(|id| self.granted.get_mut(&id)) {
            granted.keys.insert(key.clone());
        }
    }

    /// Ends a lease; its keys are to go.
    pub(super) fn end(&mut self, lease: LeaseId) -> BTreeSet<Key> {
        let Some(granted) = self.granted.remove(&lease) else { return BTreeSet::new() };
        self.by_end.remove(&(granted.ends, lease));
        granted.keys
    }

    /// The leases of one client.
    pub(super) fn of(&self, owner: Client) -> Vec<LeaseId> {
        self.granted.iter().filter(|(_, lease)| lease.owner == owner).map(|(id, _)| *id).collect()
    }

    /// The lease that ends first, and when.
    pub(super) fn first_end(&self) -> Option<(Duration, LeaseId)> {
        self.by_end.first().copied()
    }
}
