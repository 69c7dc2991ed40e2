//! What the store decides: no I/O, no clock.
//!
//! Named invariants, which the tests check by these names:
//! - K-ORDER: every change has a revision of its own, greater than all before, and every watch sees the changes of its
//!   folder in that order, each once, or is told that it can't.
//! - K-WAKE: no question stays parked whose wish has come true, or whose time is over.
//! - K-LEASE: a key that was set under a lease is gone when the lease is, in one change.
//! - K-BOUND: what all clients together can make the store keep is bounded.

use super::history::{History, below};
use super::leases::Leases;
use super::parked::{Parked, Wish};
use phalanx_job::store::{
    Answer, Ask, Change, Entry, Event, Expect, Folder, Key, LeaseId, MAX_LISTING, MAX_TIME_TO_LIVE, Refusal,
    Revision, Value,
};
use std::collections::BTreeMap;
use std::time::Duration;

/// The most that is kept.
#[derive(Clone, Debug)]
pub struct Limits {
    /// Keys.
    pub keys: usize,
    /// Bytes of all keys and values.
    pub bytes: usize,
    /// Changes that are remembered for those who watch.
    pub history_events: usize,
    /// Bytes of these changes.
    pub history_bytes: usize,
    /// Keys and folders that the questions of one client wait for.
    pub parked: usize,
    /// Leases of one client.
    pub leases: usize,
    /// Keys under one lease.
    pub lease_keys: usize,
    /// The shortest lease.
    pub min_time_to_live: Duration,
    /// The longest lease.
    pub max_time_to_live: Duration,
}

impl Default for Limits {
    /// Room for some thousand workers with some keys each.
    fn default() -> Limits {
        Limits {
            keys: 1 << 17,
            bytes: 256 << 20,
            history_events: 1 << 16,
            history_bytes: 64 << 20,
            parked: 4096,
            leases: 64,
            lease_keys: 1024,
            min_time_to_live: Duration::from_millis(10),
            max_time_to_live: MAX_TIME_TO_LIVE,
        }
    }
}

/// One connection to the store. A number is never given twice, so nothing of a client that left is taken for another's.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct Client(pub u64);

/// An answer on its way.
#[derive(Clone, PartialEq, Debug)]
pub struct Sent {
    /// To whom.
    pub client: Client,
    /// To which of its questions.
    pub id: u64,
    /// What.
    pub answer: Answer,
}

struct Record {
    value: Value,
    revision: Revision,
    lease: Option<LeaseId>,
}

/// The store itself. Times are since whenever its owner likes, and never go back.
pub struct Ledger {
    limits: Limits,
    /// The last change.
    revision: Revision,
    records: BTreeMap<Key, Record>,
    bytes: usize,
    history: History,
    leases: Leases,
    parked: Parked,
}

type Outcome = Result<Answer, Refusal>;

impl Ledger {
    /// An empty store whose first change will come right after `revision`.
    pub fn new(revision: Revision, limits: Limits) -> Ledger {
        let history = History::new(revision.next(), limits.history_events, limits.history_bytes);
        Ledger {
            limits,
            revision,
            records: BTreeMap::new(),
            bytes: 0,
            history,
            leases: Leases::default(),
            parked: Parked::default(),
        }
    }

    /// A client asks something; gives what is to be sent, to it and to others.
    pub fn handle(&mut self, now: Duration, client: Client, id: u64, ask: Ask) -> Vec<Sent> {
        // What has ended by now has ended before this question.
        let mut sent = self.tick(now);
        let outcome = match ask {
            Ask::Get { key } => Ok(Answer::Entry(self.entry(&key))),
            Ask::Set { key, value, lease } => self.set(client, key, value, lease, &mut sent),
            Ask::Add { key, by } => self.add(key, by, &mut sent),
            Ask::CompareAndSet { key, expect, value, lease } => {
                let present = self.entry(&key);
                let as_expected = match (expect, &present) {
                    (Expect::Absent, None) => true,
                    (Expect::Revision(wanted), Some(entry)) => entry.revision == wanted,
                    _ => false,
                };
                if as_expected {
                    self.set(client, key, value, lease, &mut sent)
                } else {
                    Ok(Answer::Entry(present))
                }
            }
            Ask::Delete { key } => {
                let was_there = self.records.contains_key(&key);
                self.remove(vec![key], &mut sent);
                Ok(Answer::Deleted(was_there))
            }
            Ask::List { folder } => self.list(&folder),
            Ask::Grant { time_to_live_ms } => self.grant(now, client, time_to_live_ms),
            Ask::KeepAlive { lease } => self.leases.check(lease, client).map(|()| {
                self.leases.keep_alive(now, lease);
                Answer::Done(self.revision)
            }),
            Ask::Revoke { lease } => self.leases.check(lease, client).map(|()| {
                self.end_lease(lease, &mut sent);
                Answer::Done(self.revision)
            }),
            Ask::Wait { keys, limit_ms } => match Refusal::unless_wait_fits(&keys) {
                Ok(()) => match self.first_missing(&keys) {
                    None => Ok(Answer::Done(self.revision)),
                    Some(missing) => {
                        let wish = Wish::Keys(keys, missing);
                        return self.park(now, client, id, limit_ms, wish, sent);
                    }
                },
                Err(refusal) => Err(refusal),
            },
            Ask::Poll { folder, from, limit_ms } => match self.history.since(&folder, from) {
                Ok((events, _)) if events.is_empty() => {
                    return self.park(now, client, id, limit_ms, Wish::News(folder), sent);
                }
                Ok((events, next)) => Ok(Answer::News { events, next }),
                Err(refusal) => Err(refusal),
            },
        };
        sent.push(Sent { client, id, answer: outcome.unwrap_or_else(Answer::Refused) });
        sent
    }

    /// Ends what has ended by `now`; gives what is to be sent.
    pub fn tick(&mut self, now: Duration) -> Vec<Sent> {
        let mut sent = Vec::new();
        while let Some((_, lease)) = self.leases.first_end().filter(|(ends, _)| *ends <= now) {
            self.end_lease(lease, &mut sent);
        }
        while let Some((_, question)) = self.parked.first_end().filter(|(ends, _)| *ends <= now) {
            let Some((_, wish)) = self.parked.take(question) else { break };
            let answer = match wish {
                Wish::Keys(keys, _) => {
                    Answer::Missing(keys.into_iter().filter(|key| !self.records.contains_key(key)).collect())
                }
                // Nothing below its folder has changed up to now, or it would have been told.
                Wish::News(_) => Answer::News { events: Vec::new(), next: self.revision.next() },
            };
            sent.push(Sent { client: question.0, id: question.1, answer });
        }
        sent
    }

    /// A client has left: its questions are void and its leases end.
    pub fn close(&mut self, client: Client) -> Vec<Sent> {
        let mut sent = Vec::new();
        for question in self.parked.of(client).collect::<Vec<_>>() {
            self.parked.take(question);
        }
        for lease in self.leases.of(client) {
            self.end_lease(lease, &mut sent);
        }
        sent
    }

    /// When [`Ledger::tick`] has something to do next.
    pub fn next_end(&self) -> Option<Duration> {
        let lease = self.leases.first_end().map(|(ends, _)| ends);
        let question = self.parked.first_end().map(|(ends, _)| ends);
        lease.into_iter().chain(question).min()
    }

    fn entry(&self, key: &Key) -> Option<Entry> {
        self.records.get(key).map(|record| Entry { value: record.value.clone(), revision: record.revision })
    }

    fn set(
        &mut self,
        client: Client,
        key: Key,
        value: Value,
        lease: Option<LeaseId>,
        sent: &mut Vec<Sent>,
    ) -> Outcome {
        Refusal::unless_value_fits(&value)?;
        lease.map_or(Ok(()), |lease| self.leases.check(lease, client))?;
        self.put(key, value, lease, sent).map(Answer::Done)
    }

    /// Writes a value if there is room, and wakes those who wait for it.
    fn put(
        &mut self,
        key: Key,
        value: Value,
        lease: Option<LeaseId>,
        sent: &mut Vec<Sent>,
    ) -> Result<Revision, Refusal> {
        let full = |what: &str, limit| Err(Refusal::Full { what: what.into(), limit });
        let old = self.records.get(&key);
        let (old_lease, before) =
            (old.and_then(|record| record.lease), old.map_or(0, |record| weight(&key, &record.value)));
        if let Some(id) = lease.filter(|_| lease != old_lease)
            && self.leases.keys(id) >= self.limits.lease_keys
        {
            return full("keys under one lease", self.limits.lease_keys);
        }
        if before == 0 && self.records.len() >= self.limits.keys {
            return full("keys", self.limits.keys);
        }
        let bytes = self.bytes - before + weight(&key, &value);
        if bytes > self.limits.bytes {
            return full("bytes", self.limits.bytes);
        }
        self.bytes = bytes;
        self.leases.attach(&key, old_lease, lease);
        let revision = self.revision.next();
        self.records.insert(key.clone(), Record { value: value.clone(), revision, lease });
        self.changed(Change::Set { key: key.clone(), value }, sent);
        for question in self.parked.waiting_for(&key) {
            self.look_again(question, sent);
        }
        Ok(revision)
    }

    fn add(&mut self, key: Key, by: i64, sent: &mut Vec<Sent>) -> Outcome {
        let record = self.records.get(&key);
        let value = match record.map(|record| std::str::from_utf8(&record.value).map(str::parse::<i64>)) {
            None => 0,
            Some(Ok(Ok(value))) => value,
            Some(_) => return Err(Refusal::NotANumber),
        };
        let sum = value.checked_add(by).ok_or(Refusal::Overflow { value, by })?;
        let text = Value::from(sum.to_string().into_bytes());
        // The key stays with its lease, whoever's that is.
        let lease = record.and_then(|record| record.lease);
        self.put(key, text, lease, sent)?;
        Ok(Answer::Sum(sum))
    }

    fn list(&self, folder: &Folder) -> Outcome {
        let start: std::ops::Bound<&str> = std::ops::Bound::Included(folder.as_str());
        let keys: Vec<(Key, Revision)> = self
            .records
            .range::<str, _>((start, std::ops::Bound::Unbounded))
            .take_while(|(key, _)| folder.holds(key))
            .take(MAX_LISTING + 1)
            .map(|(key, record)| (key.clone(), record.revision))
            .collect();
        if keys.len() > MAX_LISTING {
            return Err(Refusal::Full { what: "keys in one listing".into(), limit: MAX_LISTING });
        }
        Ok(Answer::Listing { revision: self.revision, keys })
    }

    fn grant(&mut self, now: Duration, client: Client, asked_ms: u64) -> Outcome {
        let (min, max) = (self.limits.min_time_to_live, self.limits.max_time_to_live);
        let time_to_live = Duration::from_millis(asked_ms);
        if time_to_live < min || time_to_live > max {
            let (min_ms, max_ms) = (min.as_millis() as u64, max.as_millis() as u64);
            return Err(Refusal::TimeToLive { asked_ms, min_ms, max_ms });
        }
        if self.leases.count(client) >= self.limits.leases {
            return Err(Refusal::Full { what: "leases of one client".into(), limit: self.limits.leases });
        }
        Ok(Answer::Granted(self.leases.grant(now, client, time_to_live)))
    }

    fn end_lease(&mut self, lease: LeaseId, sent: &mut Vec<Sent>) {
        let keys = self.leases.end(lease);
        self.remove(keys.into_iter().collect(), sent);
    }

    /// Removes those of the keys that are there, in one change.
    fn remove(&mut self, mut keys: Vec<Key>, sent: &mut Vec<Sent>) {
        keys.retain(|key| {
            let Some(record) = self.records.remove(key) else { return false };
            self.bytes -= weight(key, &record.value);
            self.leases.attach(key, record.lease, None);
            true
        });
        if !keys.is_empty() {
            self.changed(Change::Gone { keys }, sent);
        }
    }

    /// A change has been made: it is remembered, and told to those who watch.
    fn changed(&mut self, change: Change, sent: &mut Vec<Sent>) {
        self.revision = self.revision.next();
        let event = Event { revision: self.revision, change };
        let told: Vec<_> = self
            .parked
            .readers()
            .filter_map(|(question, folder)| Some((question, below(folder, &event)?)))
            .collect();
        for ((client, id), event) in told {
            self.parked.take((client, id));
            let answer = Answer::News { events: vec![event], next: self.revision.next() };
            sent.push(Sent { client, id, answer });
        }
        self.history.push(event);
    }

    /// The first of these keys that isn't there.
    fn first_missing(&self, keys: &[Key]) -> Option<usize> {
        keys.iter().position(|key| !self.records.contains_key(key))
    }

    /// A key has come that a question waits for: answers it, or has it wait for another key.
    fn look_again(&mut self, question: (Client, u64), sent: &mut Vec<Sent>) {
        let Some((ends, wish)) = self.parked.take(question) else { return };
        let Wish::Keys(keys, _) = wish else { unreachable!("only waits are woken by keys") };
        match self.first_missing(&keys) {
            Some(missing) => self.parked.park(question, ends, Wish::Keys(keys, missing)),
            None => {
                let (client, id) = question;
                sent.push(Sent { client, id, answer: Answer::Done(self.revision) });
            }
        }
    }

    /// Has a question wait, if its client hasn't too many that do.
    fn park(
        &mut self,
        now: Duration,
        client: Client,
        id: u64,
        limit_ms: u64,
        wish: Wish,
        mut sent: Vec<Sent>,
    ) -> Vec<Sent> {
        let limit = self.limits.parked;
        if self.parked.weight(client) + wish.weight() > limit {
            let what = "keys and folders that one client waits for".into();
            let answer = Answer::Refused(Refusal::Full { what, limit });
            sent.push(Sent { client, id, answer });
            return sent;
        }
        let ends = now.saturating_add(Duration::from_millis(limit_ms));
        self.parked.park((client, id), ends, wish);
        // A limit of nothing is over at once.
        sent.extend(self.tick(now));
        sent
    }
}

/// What a key and its value count as; never 0.
fn weight(key: &Key, value: &Value) -> usize {
    key.as_str().len() + value.len()
}

#[cfg(test)]
mod tests;
