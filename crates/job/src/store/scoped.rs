//! A folder of a store as a store of its own.

use super::{
    Change, Entry, Event, Expect, Folder, Key, Lease, LeaseId, Listing, News, Revision, Store, StoreError,
    Swap,
};
use phalanx_wire::Deadline;
use std::time::Duration;

/// A store all of whose keys lie below one folder of another: what a run sees of an etcd that others use as well, with
/// [`Folder::of_run`], so that neither runs nor the generations of one meet. Errors name the whole key.
pub struct Scoped<S> {
    store: S,
    folder: Folder,
}

impl<S: Store> Scoped<S> {
    /// What lies below `folder`.
    pub fn new(store: S, folder: Folder) -> Scoped<S> {
        Scoped { store, folder }
    }

    fn strip(&self, key: &Key) -> Key {
        self.folder.strip(key).expect("a store tells only of keys below the folder that it was asked for")
    }
}

impl<S: Store> Store for Scoped<S> {
    fn get(&self, key: &Key) -> Result<Option<Entry>, StoreError> {
        self.store.get(&self.folder.key(key)?)
    }

    fn set(&self, key: &Key, value: &[u8], lease: Option<LeaseId>) -> Result<Revision, StoreError> {
        self.store.set(&self.folder.key(key)?, value, lease)
    }

    fn add(&self, key: &Key, by: i64) -> Result<i64, StoreError> {
        self.store.add(&self.folder.key(key)?, by)
    }

    fn compare_and_set(
        &self,
        key: &Key,
        expect: Expect,
        value: &[u8],
        lease: Option<LeaseId>,
    ) -> Result<Swap, StoreError> {
        self.store.compare_and_set(&self.folder.key(key)?, expect, value, lease)
    }

    fn delete(&self, key: &Key) -> Result<bool, StoreError> {
        self.store.delete(&self.folder.key(key)?)
    }

    fn list(&self, folder: &Folder) -> Result<Listing, StoreError> {
        let listing = self.store.list(&self.folder.folder(folder)?)?;
        let keys = listing.keys.iter().map(|(key, revision)| (self.strip(key), *revision)).collect();
        Ok(Listing { keys, ..listing })
    }

    fn wait(&self, keys: &[Key], deadline: Deadline) -> Result<(), StoreError> {
        let keys: Result<Vec<Key>, _> = keys.iter().map(|key| self.folder.key(key)).collect();
        self.store.wait(&keys?, deadline)
    }

    fn poll(&self, folder: &Folder, from: Revision, deadline: Deadline) -> Result<News, StoreError> {
        let news = self.store.poll(&self.folder.folder(folder)?, from, deadline)?;
        let events = news.events.into_iter().map(|event| {
            let change = match event.change {
                Change::Set { key, value } => Change::Set { key: self.strip(&key), value },
                Change::Gone { keys } => {
                    Change::Gone { keys: keys.iter().map(|key| self.strip(key)).collect() }
                }
            };
            Event { change, ..event }
        });
        Ok(News { events: events.collect(), next: news.next })
    }

    fn grant(&self, time_to_live: Duration) -> Result<Lease, StoreError> {
        self.store.grant(time_to_live)
    }

    fn keep_alive(&self, lease: LeaseId) -> Result<(), StoreError> {
        self.store.keep_alive(lease)
    }

    fn revoke(&self, lease: LeaseId) -> Result<(), StoreError> {
        self.store.revoke(lease)
    }
}
