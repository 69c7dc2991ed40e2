//! etcd as a store, for those who run one.
//!
//! It keeps what it is given when coordinators come and go. Two things differ from the coordinator's own store: a lease lasts
//! whole seconds, as many as etcd likes, and when its owner is killed it ends by its time alone (one that leaves properly
//! revokes its own); and an etcd that compacts its history may tell a watch that has nothing to read that it lags.
//! Others may use the same etcd: see [`Folder::of_run`] and [`phalanx_job::store::Scoped`].

mod gateway;

use gateway::{
    ANSWER_LIMIT, Deleted, Done, Gateway, Granted, KeptAlive, KeyValue, Put, Range, RawEvent, Transaction,
    Trouble,
};
use phalanx_job::store::{
    Change, Entry, Event, Expect, Folder, Key, Lease, LeaseId, Listing, MAX_LISTING, MAX_TIME_TO_LIVE, News,
    Refusal, Revision, Store, StoreError, Swap, Value,
};
use phalanx_wire::Deadline;
use serde_json::json;
use std::collections::BTreeSet;
use std::sync::{Mutex, MutexGuard};
use std::time::Duration;

/// etcd does at most so many things in one transaction, unless it is told otherwise.
const MAX_TRANSACTION: usize = 128;

/// Where etcd is, and how to be let in.
#[derive(Clone)]
pub struct EtcdConfig {
    /// The servers of the cluster, such as `http://10.0.0.1:2379`; when one can't be reached the next is asked.
    pub endpoints: Vec<String>,
    /// A user's name and password, where etcd wants them. To an endpoint of `http://` they go in the clear.
    pub login: Option<(String, String)>,
}

/// A client of etcd. Dropping it ends its leases.
pub struct EtcdStore {
    gateway: Gateway,
    leases: Mutex<BTreeSet<LeaseId>>,
}

impl EtcdStore {
    /// Asks etcd where it is, so that a wrong address or password is known at once.
    pub fn connect(config: EtcdConfig) -> Result<EtcdStore, StoreError> {
        let EtcdConfig { endpoints, login } = config;
        if endpoints.is_empty() {
            let (address, operation) = ("nowhere".into(), "connect".into());
            let reason = "no endpoint is given\nhint: name one such as http://127.0.0.1:2379".into();
            return Err(StoreError::Broken { address, operation, reason });
        }
        let endpoints = endpoints.iter().map(|place| place.trim_end_matches('/').to_owned()).collect();
        let store = EtcdStore { gateway: Gateway::new(endpoints, login), leases: Mutex::default() };
        let question = json!({ "key": bytes("phalanx"), "count_only": true });
        store.ask::<Range>("connect", "kv/range", &question)?;
        Ok(store)
    }

    fn ask<T: serde::de::DeserializeOwned>(
        &self,
        operation: &str,
        path: &str,
        question: &serde_json::Value,
    ) -> Result<T, StoreError> {
        self.gateway
            .ask(operation, path, question)
            .map_err(|trouble| self.gateway.unexpected(operation, trouble))
    }

    /// Says no if the lease isn't this client's.
    fn check_lease(&self, operation: &str, lease: LeaseId) -> Result<(), StoreError> {
        let is_ours = self.leases().contains(&lease);
        if is_ours { Ok(()) } else { Err(StoreError::refused(operation, Refusal::NoLease { lease })) }
    }

    fn leases(&self) -> MutexGuard<'_, BTreeSet<LeaseId>> {
        self.leases.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    /// Those of the keys that aren't there, and at which moment.
    fn missing(&self, operation: &str, keys: &[Key]) -> Result<(Vec<Key>, u64), StoreError> {
        let (mut missing, mut at) = (Vec::new(), 0);
        for keys in keys.chunks(MAX_TRANSACTION) {
            // The first part is asked for now, and the others for that same moment; 0 means now.
            let ranges: Vec<_> = keys
                .iter()
                .map(|key| json!({ "request_range": { "key": bytes(key.as_str()), "count_only": true, "revision": at.to_string() } }))
                .collect();
            let found: Transaction = self.ask(operation, "kv/txn", &json!({ "success": ranges }))?;
            if at == 0 {
                at = found.header.revision;
            }
            let absent =
                keys.iter().zip(&found.responses).filter(|(_, found)| found.response_range.count == 0);
            missing.extend(absent.map(|(key, _)| key.clone()));
        }
        Ok((missing, at))
    }

    fn key(&self, operation: &str, name: &[u8]) -> Result<Key, StoreError> {
        let key = std::str::from_utf8(name).ok().and_then(|name| name.parse().ok());
        key.ok_or_else(|| {
            let reason =
                format!("it holds a key that isn't one of ours: {:?}", name.escape_ascii().to_string());
            self.gateway.broken(operation, reason)
        })
    }

    /// etcd's changes as ours: keys that are gone at one revision are one change.
    fn events(&self, operation: &str, raw: Vec<RawEvent>) -> Result<Vec<Event>, StoreError> {
        let mut events: Vec<Event> = Vec::new();
        for RawEvent { kind, kv } in raw {
            let (key, revision) = (self.key(operation, &kv.key)?, Revision(kv.mod_revision));
            let change = match (kind.as_str(), events.last_mut()) {
                ("DELETE", Some(Event { revision: last, change: Change::Gone { keys } }))
                    if *last == revision =>
                {
                    keys.push(key);
                    continue;
                }
                ("DELETE", _) => Change::Gone { keys: vec![key] },
                _ => Change::Set { key, value: kv.value },
            };
            events.push(Event { revision, change });
        }
        Ok(events)
    }
}

impl Drop for EtcdStore {
    fn drop(&mut self) {
        let leases = std::mem::take(&mut *self.leases());
        for lease in leases {
            // One that can't be revoked ends by its time.
            let question = json!({ "ID": lease.to_string() });
            if let Err(Trouble::Error(_)) =
                self.gateway.ask::<Done>("revoke a lease", "lease/revoke", &question)
            {
                return;
            }
        }
    }
}

/// Bytes as etcd's JSON has them.
fn bytes(text: &str) -> Value {
    Value::from(text.as_bytes())
}

/// The keys of a folder as a range: up to the first name that doesn't begin like it.
fn range(folder: &Folder) -> (Value, Value) {
    match folder.as_str().strip_suffix('/') {
        // '0' comes right after '/'.
        Some(path) => (bytes(folder.as_str()), bytes(&format!("{path}0"))),
        // Two zero bytes mean everything.
        None => (bytes("\0"), bytes("\0")),
    }
}

fn entry(kvs: Vec<KeyValue>) -> Option<Entry> {
    kvs.into_iter().next().map(|kv| Entry { value: kv.value, revision: Revision(kv.mod_revision) })
}

fn condition(key: &Key, expect: Expect) -> serde_json::Value {
    let key = bytes(key.as_str());
    match expect {
        Expect::Absent => {
            json!({ "key": key, "target": "CREATE", "result": "EQUAL", "create_revision": "0" })
        }
        Expect::Revision(revision) => {
            json!({ "key": key, "target": "MOD", "result": "EQUAL", "mod_revision": revision.to_string() })
        }
    }
}

fn put(key: &Key, value: &[u8], lease: Option<LeaseId>) -> serde_json::Value {
    let lease = lease.map_or(0, |lease| lease.0).to_string();
    json!({ "key": bytes(key.as_str()), "value": Value::from(value), "lease": lease })
}

impl Store for EtcdStore {
    fn get(&self, key: &Key) -> Result<Option<Entry>, StoreError> {
        let found: Range =
            self.ask(&format!("get {key}"), "kv/range", &json!({ "key": bytes(key.as_str()) }))?;
        Ok(entry(found.kvs))
    }

    fn set(&self, key: &Key, value: &[u8], lease: Option<LeaseId>) -> Result<Revision, StoreError> {
        let operation = format!("set {key}");
        Refusal::unless_value_fits(value).map_err(|r| StoreError::refused(&operation, r))?;
        let ended = Refusal::NoLease { lease: lease.unwrap_or(LeaseId(0)) };
        lease.map_or(Ok(()), |lease| self.check_lease(&operation, lease))?;
        let done: Put = self
            .gateway
            .ask(&operation, "kv/put", &put(key, value, lease))
            .map_err(|trouble| trouble.or_refused(&operation, ended))?;
        Ok(Revision(done.header.revision))
    }

    fn add(&self, key: &Key, by: i64) -> Result<i64, StoreError> {
        let operation = format!("add to {key}");
        let deadline = Deadline::after(ANSWER_LIMIT);
        loop {
            let present = self.get(key)?;
            let text = present.as_ref().map_or(Ok("0"), |entry| std::str::from_utf8(&entry.value));
            let value: i64 = text
                .ok()
                .and_then(|text| text.parse().ok())
                .ok_or_else(|| StoreError::refused(&operation, Refusal::NotANumber))?;
            let sum = value
                .checked_add(by)
                .ok_or_else(|| StoreError::refused(&operation, Refusal::Overflow { value, by }))?;
            let mut change = put(key, sum.to_string().as_bytes(), None);
            let mut expect = Expect::Absent;
            if let Some(entry) = present {
                expect = Expect::Revision(entry.revision);
                change["ignore_lease"] = json!(true);
            }
            let question =
                json!({ "compare": [condition(key, expect)], "success": [{ "request_put": change }] });
            if self.ask::<Transaction>(&operation, "kv/txn", &question)?.succeeded {
                return Ok(sum);
            }
            // Another one was quicker, so somebody always gets on; but it needn't be this one.
            if deadline.expired() {
                let reason = format!("others changed it all the time for {:.1?}", deadline.waited());
                return Err(self.gateway.broken(&operation, reason));
            }
        }
    }

    fn compare_and_set(
        &self,
        key: &Key,
        expect: Expect,
        value: &[u8],
        lease: Option<LeaseId>,
    ) -> Result<Swap, StoreError> {
        let operation = format!("compare and set {key}");
        Refusal::unless_value_fits(value).map_err(|r| StoreError::refused(&operation, r))?;
        let ended = Refusal::NoLease { lease: lease.unwrap_or(LeaseId(0)) };
        lease.map_or(Ok(()), |lease| self.check_lease(&operation, lease))?;
        let question = json!({
            "compare": [condition(key, expect)],
            "success": [{ "request_put": put(key, value, lease) }],
            "failure": [{ "request_range": { "key": bytes(key.as_str()) } }],
        });
        let done: Transaction = self
            .gateway
            .ask(&operation, "kv/txn", &question)
            .map_err(|trouble| trouble.or_refused(&operation, ended))?;
        if done.succeeded {
            return Ok(Swap::Done(Revision(done.header.revision)));
        }
        Ok(Swap::Conflict(
            done.responses.into_iter().next().and_then(|found| entry(found.response_range.kvs)),
        ))
    }

    fn delete(&self, key: &Key) -> Result<bool, StoreError> {
        let question = json!({ "key": bytes(key.as_str()) });
        let done: Deleted = self.ask(&format!("delete {key}"), "kv/deleterange", &question)?;
        Ok(done.deleted > 0)
    }

    fn list(&self, folder: &Folder) -> Result<Listing, StoreError> {
        let operation = format!("list {folder}");
        let (start, end) = range(folder);
        let limit = MAX_LISTING.to_string();
        let question = json!({ "key": start, "range_end": end, "keys_only": true, "limit": limit });
        let found: Range = self.ask(&operation, "kv/range", &question)?;
        if found.more {
            let refusal = Refusal::Full { what: "keys in one listing".into(), limit: MAX_LISTING };
            return Err(StoreError::refused(operation, refusal));
        }
        let key = |kv: &KeyValue| Ok((self.key(&operation, &kv.key)?, Revision(kv.mod_revision)));
        let keys: Result<_, StoreError> = found.kvs.iter().map(key).collect();
        Ok(Listing { revision: Revision(found.header.revision), keys: keys? })
    }

    fn wait(&self, keys: &[Key], deadline: Deadline) -> Result<(), StoreError> {
        let operation = format!("wait for {} keys", keys.len());
        Refusal::unless_wait_fits(keys).map_err(|r| StoreError::refused(&operation, r))?;
        loop {
            let (missing, at) = self.missing(&operation, keys)?;
            let Some(first) = missing.first() else { return Ok(()) };
            if deadline.expired() {
                return Err(StoreError::Missing { keys: missing, waited: deadline.waited() });
            }
            let from = (at + 1).to_string();
            let question =
                json!({ "create_request": { "key": bytes(first.as_str()), "start_revision": from } });
            self.gateway.watch(&operation, &question, deadline)?;
        }
    }

    fn poll(&self, folder: &Folder, from: Revision, deadline: Deadline) -> Result<News, StoreError> {
        let operation = format!("watch {folder}");
        let (start, end) = range(folder);
        // To etcd 0 means now, which would pass over the past in silence; its first revision is 1.
        let first = from.max(Revision(1)).to_string();
        let request = json!({ "key": start, "range_end": end, "start_revision": first });
        let watched = self.gateway.watch(&operation, &json!({ "create_request": request }), deadline)?;
        if watched.compacted > 0 {
            let refusal = Refusal::Lagged { from, first: Revision(watched.compacted) };
            return Err(StoreError::refused(operation, refusal));
        }
        if Revision(watched.now).next() < from {
            let refusal = Refusal::NotYet { from, now: Revision(watched.now) };
            return Err(StoreError::refused(operation, refusal));
        }
        let events = self.events(&operation, watched.events)?;
        let next = events.last().map_or(from, |event| event.revision.next());
        Ok(News { events, next })
    }

    fn grant(&self, time_to_live: Duration) -> Result<Lease, StoreError> {
        let operation = "grant a lease";
        let asked_ms = u64::try_from(time_to_live.as_millis()).unwrap_or(u64::MAX);
        if time_to_live.is_zero() || time_to_live > MAX_TIME_TO_LIVE {
            let max_ms = MAX_TIME_TO_LIVE.as_millis() as u64;
            let refusal = Refusal::TimeToLive { asked_ms, min_ms: 1, max_ms };
            return Err(StoreError::refused(operation, refusal));
        }
        let seconds = asked_ms.div_ceil(1000).max(1).to_string();
        let granted: Granted = self.ask(operation, "lease/grant", &json!({ "TTL": seconds }))?;
        let id = LeaseId(granted.id);
        self.leases().insert(id);
        Ok(Lease { id, time_to_live: Duration::from_secs(granted.seconds) })
    }

    fn keep_alive(&self, lease: LeaseId) -> Result<(), StoreError> {
        let operation = format!("keep lease {lease} alive");
        self.check_lease(&operation, lease)?;
        let kept: KeptAlive = self.ask(&operation, "lease/keepalive", &json!({ "ID": lease.to_string() }))?;
        if kept.result.seconds == 0 {
            self.leases().remove(&lease);
        }
        self.check_lease(&operation, lease)
    }

    fn revoke(&self, lease: LeaseId) -> Result<(), StoreError> {
        let operation = format!("revoke lease {lease}");
        self.check_lease(&operation, lease)?;
        let revoked =
            self.gateway.ask::<Done>(&operation, "lease/revoke", &json!({ "ID": lease.to_string() }));
        revoked.map_err(|trouble| trouble.or_refused(&operation, Refusal::NoLease { lease }))?;
        self.leases().remove(&lease);
        Ok(())
    }
}
