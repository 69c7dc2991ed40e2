//! Where clients of the store come to: the threads and queues around the [`Ledger`].
//!
//! Each connection has a thread that reads questions and one that writes answers, so a client that doesn't read its answers
//! stalls nobody else. It isn't asked for more questions either while too many answers lie ready for it, and its connection
//! is closed when it takes none for [`STALL`]. One more thread ends what has a time to end.

use super::ledger::{Client, Ledger, Limits, Sent};
use phalanx_job::store::{Answer, Change, FromClient, MAX_STORE_FRAME, Revision, ToClient};
use phalanx_wire::{Channel, Rank, read_frame, write_frame};
use std::collections::{HashMap, VecDeque};
use std::net::Shutdown;
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

/// The most clients at once; each has two threads.
const MAX_CLIENTS: usize = 4096;
/// While so many bytes of answers lie ready for a client, it is asked for no further question.
const MAX_UNREAD: usize = 4 << 20;
/// How long a client may take no byte of an answer.
const STALL: Duration = Duration::from_secs(10);

/// The store and its clients.
pub(crate) struct Desk {
    start: Instant,
    inside: Mutex<Inside>,
    /// Rung when something may end earlier than before, and at the end.
    clock: Condvar,
}

struct Inside {
    ledger: Ledger,
    clients: HashMap<Client, Mailbox>,
    last: u64,
    over: bool,
}

/// The answers that lie ready for a client.
struct Mailbox {
    stream: Channel,
    answers: VecDeque<ToClient>,
    bytes: usize,
    open: bool,
    /// Rung when an answer comes, when one is taken, and at the end.
    bell: Arc<Condvar>,
}

impl Desk {
    /// An empty store, and the thread that ends its leases and waits.
    pub(crate) fn open() -> std::io::Result<Arc<Desk>> {
        let since_1970 = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let revision = Revision(u64::try_from(since_1970.as_micros()).unwrap_or_default());
        let inside = Inside {
            ledger: Ledger::new(revision, Limits::default()),
            clients: HashMap::new(),
            last: 0,
            over: false,
        };
        let desk =
            Arc::new(Desk { start: Instant::now(), inside: Mutex::new(inside), clock: Condvar::new() });
        let ticking = Arc::clone(&desk);
        std::thread::Builder::new().name("phalanx-store".into()).spawn(move || ticking.tick())?;
        Ok(desk)
    }

    /// Ends the store; all its clients are hung up on.
    pub(crate) fn close(&self) {
        let mut inside = self.inside();
        inside.over = true;
        inside.clients.values_mut().for_each(Mailbox::close);
        self.clock.notify_all();
    }

    /// Serves one client to the end of its connection; an error is why it was refused.
    pub(crate) fn serve(self: &Arc<Desk>, stream: &Channel, rank: Rank) -> Result<(), String> {
        let text = |error: std::io::Error| error.to_string();
        stream.set_write_timeout(Some(STALL)).map_err(text)?;
        let (client, bell) = self.enter(stream.clone())?;
        let out = stream.clone();
        let (desk, ringing) = (Arc::clone(self), Arc::clone(&bell));
        let writer = std::thread::Builder::new()
            .name("phalanx-store-out".into())
            .spawn(move || desk.write_answers(client, &ringing, out));
        let served = match writer {
            Ok(_) => self.read_questions(client, &bell, stream, rank),
            Err(error) => Err(format!("no thread for it: {error}")),
        };
        self.leave(client);
        served
    }

    fn enter(&self, stream: Channel) -> Result<(Client, Arc<Condvar>), String> {
        let mut inside = self.inside();
        if inside.over {
            return Err("the store is closed".into());
        }
        if inside.clients.len() >= MAX_CLIENTS {
            return Err(format!("the store has {MAX_CLIENTS} clients already"));
        }
        inside.last += 1;
        let client = Client(inside.last);
        let bell = Arc::new(Condvar::new());
        let mailbox =
            Mailbox { stream, answers: VecDeque::new(), bytes: 0, open: true, bell: Arc::clone(&bell) };
        inside.clients.insert(client, mailbox);
        Ok((client, bell))
    }

    /// The client is gone: its leases end, and its threads.
    fn leave(&self, client: Client) {
        let mut inside = self.inside();
        if let Some(mut mailbox) = inside.clients.remove(&client) {
            mailbox.close();
        }
        let sent = inside.ledger.close(client);
        inside.post(sent);
    }

    fn read_questions(
        &self,
        client: Client,
        bell: &Condvar,
        mut stream: &Channel,
        rank: Rank,
    ) -> Result<(), String> {
        loop {
            // The end of the connection is the end of the client.
            let frame = match read_frame(&mut stream, MAX_STORE_FRAME) {
                Ok(frame) => frame,
                Err(error) if error.kind() == std::io::ErrorKind::InvalidData => {
                    return Err(format!("rank {rank} asked the store: {error}"));
                }
                Err(_) => return Ok(()),
            };
            let FromClient { id, ask } = serde_json::from_slice(&frame)
                .map_err(|error| format!("rank {rank} asked the store: {error}"))?;
            let mut inside = self.inside();
            let before = inside.ledger.next_end();
            let sent = inside.ledger.handle(self.start.elapsed(), client, id, ask);
            inside.post(sent);
            let after = inside.ledger.next_end();
            if after.is_some_and(|after| before.is_none_or(|before| after < before)) {
                self.clock.notify_all();
            }
            // Whoever writes the answers is done with this within its own time limit.
            while inside
                .clients
                .get(&client)
                .is_some_and(|mailbox| mailbox.open && mailbox.bytes > MAX_UNREAD)
            {
                inside = bell.wait(inside).unwrap_or_else(|poisoned| poisoned.into_inner());
            }
        }
    }

    fn write_answers(&self, client: Client, bell: &Condvar, out: Channel) {
        let mut inside = self.inside();
        loop {
            let Some(mailbox) = inside.clients.get_mut(&client).filter(|mailbox| mailbox.open) else {
                return;
            };
            let Some(answer) = mailbox.answers.pop_front() else {
                inside = bell.wait(inside).unwrap_or_else(|poisoned| poisoned.into_inner());
                continue;
            };
            mailbox.bytes -= weight(&answer);
            drop(inside);
            bell.notify_all();
            let frame = serde_json::to_vec(&answer).expect("a message is always JSON");
            let written = write_frame(&mut &out, &frame);
            inside = self.inside();
            if written.is_err() {
                // The reader sees the end of the connection and lets the client go.
                inside.clients.get_mut(&client).into_iter().for_each(Mailbox::close);
                return;
            }
        }
    }

    fn tick(&self) {
        let mut inside = self.inside();
        while !inside.over {
            let now = self.start.elapsed();
            let sent = inside.ledger.tick(now);
            inside.post(sent);
            inside = match inside.ledger.next_end() {
                None => self.clock.wait(inside).unwrap_or_else(|poisoned| poisoned.into_inner()),
                Some(ends) => {
                    let left = ends.saturating_sub(now);
                    self.clock.wait_timeout(inside, left).unwrap_or_else(|poisoned| poisoned.into_inner()).0
                }
            };
        }
    }

    /// The ledger is whole between any two statements that could panic.
    fn inside(&self) -> MutexGuard<'_, Inside> {
        self.inside.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }
}

impl Inside {
    fn post(&mut self, sent: Vec<Sent>) {
        for Sent { client, id, answer } in sent {
            // Whoever left needs no answer.
            if let Some(mailbox) = self.clients.get_mut(&client) {
                let answer = ToClient { id, answer };
                mailbox.bytes += weight(&answer);
                mailbox.answers.push_back(answer);
                mailbox.bell.notify_all();
            }
        }
    }
}

impl Mailbox {
    fn close(&mut self) {
        self.open = false;
        let _ = self.stream.shutdown(Shutdown::Both);
        self.bell.notify_all();
    }
}

/// What an answer takes in memory, roughly.
fn weight(message: &ToClient) -> usize {
    const FIXED: usize = 128;
    FIXED
        + match &message.answer {
            Answer::Entry(entry) => entry.as_ref().map_or(0, |entry| entry.value.len()),
            Answer::Listing { keys, .. } => keys.iter().map(|(key, _)| FIXED + key.as_str().len()).sum(),
            Answer::Missing(keys) => keys.iter().map(|key| FIXED + key.as_str().len()).sum(),
            Answer::News { events, .. } => events
                .iter()
                .map(|event| match &event.change {
                    Change::Set { key, value } => FIXED + key.as_str().len() + value.len(),
                    Change::Gone { keys } => keys.iter().map(|key| FIXED + key.as_str().len()).sum(),
                })
                .sum(),
            Answer::Done(_)
            | Answer::Sum(_)
            | Answer::Deleted(_)
            | Answer::Granted(_)
            | Answer::Refused(_) => 0,
        }
}
