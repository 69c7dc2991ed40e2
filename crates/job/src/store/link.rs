//! The coordinator's store, asked over a worker's link.
//!
//! Threads share one connection: each question has a number, a thread of the connection's own reads the answers and hands
//! each to who waits for it. The coordinator keeps all in memory, so nothing here connects anew: whoever's connection broke
//! has lost its leases, and has to look at the store with fresh eyes.

use super::{
    Answer, Ask, Entry, Expect, Folder, FromClient, Key, Lease, LeaseId, Listing, MAX_STORE_FRAME, News,
    Refusal, Revision, Store, StoreError, Swap, ToClient, Value,
};
use phalanx_wire::{Channel, Deadline, read_frame, write_frame};
use std::collections::HashMap;
use std::io::ErrorKind;
use std::net::{Shutdown, SocketAddr};
use std::sync::mpsc::{RecvTimeoutError, SyncSender, sync_channel};
use std::sync::{Arc, Mutex, MutexGuard};
use std::thread::JoinHandle;
use std::time::Duration;

/// How long an answer may take that has nothing to wait for: a value of a MiB comes in less at 1 Mbit/s.
const ANSWER_LIMIT: Duration = Duration::from_secs(10);

/// A connection to the coordinator's store; see [`crate::Link::open_store`]. Dropping it ends its leases.
pub struct LinkStore {
    address: SocketAddr,
    stream: Channel,
    asked: Arc<Mutex<Asked>>,
    reader: Option<JoinHandle<()>>,
}

/// The questions that have no answer yet.
#[derive(Default)]
struct Asked {
    last: u64,
    open: HashMap<u64, SyncSender<Answer>>,
    /// Why there will be no more answers.
    over: Option<String>,
}

impl LinkStore {
    /// Takes over a connection on which the coordinator speaks of the store from now on.
    pub(crate) fn new(stream: Channel, address: SocketAddr) -> std::io::Result<LinkStore> {
        stream.set_read_timeout(None)?;
        stream.set_write_timeout(Some(ANSWER_LIMIT))?;
        let asked = Arc::new(Mutex::new(Asked::default()));
        let (input, waiting) = (stream.clone(), Arc::clone(&asked));
        let reader = std::thread::Builder::new()
            .name("phalanx-store-link".into())
            .spawn(move || read_answers(input, &waiting))?;
        Ok(LinkStore { address, stream, asked, reader: Some(reader) })
    }

    /// Asks, and waits for the answer until `patience` is over.
    fn ask(&self, operation: &str, ask: Ask, patience: Duration) -> Result<Answer, StoreError> {
        let (sender, answer) = sync_channel(1);
        let id = {
            let mut asked = lock(&self.asked);
            if let Some(reason) = &asked.over {
                return Err(self.broken(operation, reason.clone()));
            }
            asked.last += 1;
            let id = asked.last;
            asked.open.insert(id, sender);
            id
        };
        let frame = serde_json::to_vec(&FromClient { id, ask }).expect("a message is always JSON");
        if let Err(error) = write_frame(&mut &self.stream, &frame) {
            // Part of the frame may be on its way, so nothing else can be said here any more.
            end(&self.asked, in_words(&error));
            let _ = self.stream.shutdown(Shutdown::Both);
        }
        match answer.recv_timeout(patience) {
            Ok(Answer::Refused(refusal)) => Err(StoreError::refused(operation, refusal)),
            Ok(answer) => Ok(answer),
            Err(RecvTimeoutError::Timeout) => {
                lock(&self.asked).open.remove(&id);
                let (address, operation) = (self.address.to_string(), operation.to_owned());
                Err(StoreError::Late { address, operation, waited: patience })
            }
            Err(RecvTimeoutError::Disconnected) => {
                let reason = lock(&self.asked).over.clone().unwrap_or_default();
                Err(self.broken(operation, reason))
            }
        }
    }

    fn ask_soon(&self, operation: &str, ask: Ask) -> Result<Answer, StoreError> {
        self.ask(operation, ask, ANSWER_LIMIT)
    }

    fn broken(&self, operation: &str, reason: String) -> StoreError {
        StoreError::Broken { address: self.address.to_string(), operation: operation.into(), reason }
    }

    fn nonsense<T>(&self, operation: &str, answer: &Answer) -> Result<T, StoreError> {
        Err(self.broken(operation, format!("it answered {answer:?}")))
    }
}

impl Drop for LinkStore {
    fn drop(&mut self) {
        // A connection that is gone already needs no closing, and the reader ends either way.
        let _ = self.stream.shutdown(Shutdown::Both);
        if let Some(reader) = self.reader.take() {
            let _ = reader.join();
        }
    }
}

/// What is locked is whole between any two statements that could panic.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
}

/// There will be no more answers; whoever waits for one is woken.
fn end(asked: &Mutex<Asked>, reason: String) {
    let mut asked = lock(asked);
    asked.over.get_or_insert(reason);
    asked.open.clear();
}

/// The end of a connection is the same whether it is met reading or writing.
fn in_words(error: &std::io::Error) -> String {
    match error.kind() {
        ErrorKind::UnexpectedEof | ErrorKind::BrokenPipe | ErrorKind::ConnectionReset => {
            "it closed the connection; its leases have ended".to_owned()
        }
        _ => error.to_string(),
    }
}

fn read_answers(input: Channel, asked: &Mutex<Asked>) {
    let reason = loop {
        let frame = match read_frame(&mut &input, MAX_STORE_FRAME) {
            Ok(frame) => frame,
            Err(error) => break in_words(&error),
        };
        match serde_json::from_slice(&frame) {
            Ok(ToClient { id, answer }) => {
                // Whoever asked may have given up, between two locks or long ago.
                if let Some(sender) = lock(asked).open.remove(&id) {
                    let _ = sender.try_send(answer);
                }
            }
            Err(error) => break format!("an unreadable message: {error}"),
        }
    };
    end(asked, reason);
    let _ = input.shutdown(Shutdown::Both);
}

/// The limit in whole milliseconds, so that a wait is never shorter than asked for.
fn milliseconds(limit: Duration) -> u64 {
    u64::try_from(limit.as_micros().div_ceil(1000)).unwrap_or(u64::MAX)
}

impl Store for LinkStore {
    fn get(&self, key: &Key) -> Result<Option<Entry>, StoreError> {
        let operation = format!("get {key}");
        match self.ask_soon(&operation, Ask::Get { key: key.clone() })? {
            Answer::Entry(entry) => Ok(entry),
            other => self.nonsense(&operation, &other),
        }
    }

    fn set(&self, key: &Key, value: &[u8], lease: Option<LeaseId>) -> Result<Revision, StoreError> {
        let operation = format!("set {key}");
        Refusal::unless_value_fits(value).map_err(|r| StoreError::refused(&operation, r))?;
        match self.ask_soon(&operation, Ask::Set { key: key.clone(), value: Value::from(value), lease })? {
            Answer::Done(revision) => Ok(revision),
            other => self.nonsense(&operation, &other),
        }
    }

    fn add(&self, key: &Key, by: i64) -> Result<i64, StoreError> {
        let operation = format!("add to {key}");
        match self.ask_soon(&operation, Ask::Add { key: key.clone(), by })? {
            Answer::Sum(sum) => Ok(sum),
            other => self.nonsense(&operation, &other),
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
        let ask = Ask::CompareAndSet { key: key.clone(), expect, value: Value::from(value), lease };
        match self.ask_soon(&operation, ask)? {
            Answer::Done(revision) => Ok(Swap::Done(revision)),
            Answer::Entry(entry) => Ok(Swap::Conflict(entry)),
            other => self.nonsense(&operation, &other),
        }
    }

    fn delete(&self, key: &Key) -> Result<bool, StoreError> {
        let operation = format!("delete {key}");
        match self.ask_soon(&operation, Ask::Delete { key: key.clone() })? {
            Answer::Deleted(was_there) => Ok(was_there),
            other => self.nonsense(&operation, &other),
        }
    }

    fn list(&self, folder: &Folder) -> Result<Listing, StoreError> {
        let operation = format!("list {folder}");
        match self.ask_soon(&operation, Ask::List { folder: folder.clone() })? {
            Answer::Listing { revision, keys } => Ok(Listing { revision, keys }),
            other => self.nonsense(&operation, &other),
        }
    }

    fn wait(&self, keys: &[Key], deadline: Deadline) -> Result<(), StoreError> {
        let operation = format!("wait for {} keys", keys.len());
        Refusal::unless_wait_fits(keys).map_err(|r| StoreError::refused(&operation, r))?;
        let left = deadline.remaining();
        let ask = Ask::Wait { keys: keys.to_vec(), limit_ms: milliseconds(left) };
        match self.ask(&operation, ask, left.saturating_add(ANSWER_LIMIT))? {
            Answer::Done(_) => Ok(()),
            Answer::Missing(keys) => Err(StoreError::Missing { keys, waited: deadline.waited() }),
            other => self.nonsense(&operation, &other),
        }
    }

    fn poll(&self, folder: &Folder, from: Revision, deadline: Deadline) -> Result<News, StoreError> {
        let operation = format!("watch {folder}");
        let left = deadline.remaining();
        let ask = Ask::Poll { folder: folder.clone(), from, limit_ms: milliseconds(left) };
        match self.ask(&operation, ask, left.saturating_add(ANSWER_LIMIT))? {
            Answer::News { events, next } => Ok(News { events, next }),
            other => self.nonsense(&operation, &other),
        }
    }

    fn grant(&self, time_to_live: Duration) -> Result<Lease, StoreError> {
        let operation = "grant a lease";
        match self.ask_soon(operation, Ask::Grant { time_to_live_ms: milliseconds(time_to_live) })? {
            Answer::Granted(id) => Ok(Lease { id, time_to_live }),
            other => self.nonsense(operation, &other),
        }
    }

    fn keep_alive(&self, lease: LeaseId) -> Result<(), StoreError> {
        let operation = format!("keep lease {lease} alive");
        match self.ask_soon(&operation, Ask::KeepAlive { lease })? {
            Answer::Done(_) => Ok(()),
            other => self.nonsense(&operation, &other),
        }
    }

    fn revoke(&self, lease: LeaseId) -> Result<(), StoreError> {
        let operation = format!("revoke lease {lease}");
        match self.ask_soon(&operation, Ask::Revoke { lease })? {
            Answer::Done(_) => Ok(()),
            other => self.nonsense(&operation, &other),
        }
    }
}
