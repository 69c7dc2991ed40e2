//! The door of a process: where other ranks come in, for every group that it is a member of, as long as there is one.
//!
//! A thread waits at the door. Whoever knocks proves itself first, on a thread of its own, so that a silent one holds up
//! nobody; then it says which group it comes for, and is led to that group's [`Lobby`], where the group finds the connection.
//! Strangers are refused and logged.
//!
//! Two ranks that need each other may both dial. A rank that dials already turns away the lower one that knocks, so that the
//! connection which the higher rank dialed is the one that stays. A rank may knock before this one has heard of the group at
//! all: it waits in the lobby. What belongs to an older generation than the newest is turned away, and whoever comes for a group
//! that has ended hears why.
//!
//! A process may have another rank in each generation, so whoever knocks also says which rank it takes this one for, and is
//! turned away where that is wrong.

use crate::endpoint::{Endpoint, PeerAddress, Stream};
use crate::error::Error;
use crate::guests::Guests;
use crate::lobby::Lobby;
use crate::transport::{Lost, Pulse};
use crate::word::{MAX_WORD, Word};
use nix::sys::eventfd::{EfdFlags, EventFd};
use phalanx_wire::tls::Tls;
use phalanx_wire::{
    Deadline, Generation, HandshakeError, Hello, Rank, Secret, Side, Strangers, read_frame, write_frame,
};
use std::collections::{HashMap, VecDeque};
use std::io::{ErrorKind, Read, Write};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// Which group of a run: its generation, and what tells it from others of that.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(crate) struct Key {
    pub(crate) generation: Generation,
    pub(crate) group: u64,
}

/// What one who knocks comes for.
#[derive(Clone, Copy, PartialEq, Debug)]
pub(crate) struct Call {
    pub(crate) key: Key,
    /// The rank that it wants to meet, as the run numbers it.
    pub(crate) whom: Rank,
}

/// How long one stranger may take to prove itself.
const HANDSHAKE_LIMIT: Duration = Duration::from_secs(5);
/// How long those who come for a group that has ended are told so, if the process lives as long.
const LATE: Duration = Duration::from_secs(1);
/// How many unproven connections may be open at once.
const STRANGERS: usize = 128;
/// How many groups others may knock for that this rank hasn't heard of.
const UNHEARD_OF: usize = 64;
/// How many ended groups are remembered.
const ENDED: usize = 1024;
/// How long the door rests where those who wait can't be taken in: to look again at once would take a core.
const BARRED: Duration = Duration::from_millis(50);
const PURPOSE: &str = "comm";

impl Call {
    fn of(hello: &Hello) -> Option<Call> {
        let mut words = hello.purpose.split('/');
        let (purpose, whom) = (words.next()?, words.next()?.parse().ok()?);
        let group = words.next().map_or(Ok(0), |number| u64::from_str_radix(number, 16)).ok()?;
        let key = Key { generation: hello.generation, group };
        (purpose == PURPOSE && words.next().is_none()).then_some(Call { key, whom: Rank(whom) })
    }

    /// What `rank`, as the run numbers it, says of itself at such a call, whether it makes it or answers it.
    pub(crate) fn hello(self, rank: Rank) -> Hello {
        let Call { key: Key { generation, group }, whom } = self;
        let world = format!("{PURPOSE}/{whom}");
        let purpose = if group == 0 { world } else { format!("{world}/{group:016x}") };
        Hello { purpose, rank, generation }
    }
}

/// A group that somebody may come for.
struct Expected {
    lobby: Arc<Lobby>,
    /// This process's rank there, as the run numbers it.
    own: Rank,
    /// Whether this process has heard of the group; else it has its rank from the one who knocked first.
    is_known: bool,
}

/// The groups that there are, as far as the door is concerned.
#[derive(Default)]
struct Groups {
    newest: Generation,
    lobbies: HashMap<Key, Expected>,
    ended: VecDeque<(Key, Word)>,
    /// Whether no group will come any more.
    is_closed: bool,
}

impl Groups {
    /// What a group that is over said last.
    fn end_of(&self, key: Key) -> Option<&Word> {
        self.ended.iter().find(|(other, _)| *other == key).map(|(_, word)| word)
    }

    /// What is older than this is turned away from now on.
    fn raise(&mut self, generation: Generation) {
        let newest = self.newest.max(generation);
        self.newest = newest;
        self.lobbies.retain(|key, expected| expected.is_known || key.generation >= newest);
    }
}

/// What one who has proven itself is told.
enum Answer {
    Welcome(Arc<Lobby>),
    /// This rank is on its way to the other one.
    Crossed,
    Ended(Word),
}

struct Inside {
    endpoint: Endpoint,
    address: PeerAddress,
    secret: Secret,
    groups: Mutex<Groups>,
    strangers: Strangers<Stream>,
    guests: Guests,
    stop: EventFd,
}

/// The door, which closes when it is dropped.
pub(crate) struct Door(Arc<Inside>);

impl Door {
    /// Opens the door of a rank.
    pub(crate) fn open(endpoint: Endpoint, secret: Secret, own: Rank) -> Result<Door, Error> {
        let failed = |error: std::io::Error| Error::connect(own, format!("it can't open its door: {error}"));
        let stop = EventFd::from_flags(EfdFlags::EFD_CLOEXEC | EfdFlags::EFD_NONBLOCK);
        let stop = stop.map_err(|error| failed(error.into()))?;
        let (groups, strangers) = (Mutex::default(), Strangers::new(STRANGERS));
        let address = endpoint.address();
        let guests = Guests::default();
        let inside = Arc::new(Inside { endpoint, address, secret, groups, strangers, guests, stop });
        let keeper = Arc::clone(&inside);
        let thread = std::thread::Builder::new().name("phalanx-door".into());
        thread.spawn(move || keeper.keep()).map_err(failed)?;
        Ok(Door(inside))
    }

    pub(crate) fn pulse(&self) -> &Arc<Pulse> {
        self.0.endpoint.pulse()
    }

    pub(crate) fn tls(&self) -> Option<&Tls> {
        self.0.endpoint.tls()
    }

    pub(crate) fn secret(&self) -> &Secret {
        &self.0.secret
    }

    /// Where it is.
    pub(crate) fn address(&self) -> &PeerAddress {
        &self.0.address
    }

    /// Who was let in to this process's memory.
    pub(crate) fn guests(&self) -> &Guests {
        &self.0.guests
    }

    /// What is older than this is turned away from now on.
    pub(crate) fn raise(&self, generation: Generation) {
        self.0.groups().raise(generation);
    }

    /// The lobby of a group that this process is now rank `own` of.
    pub(crate) fn expect(&self, key: Key, own: Rank) -> Result<Arc<Lobby>, Error> {
        let mut groups = self.0.groups();
        groups.raise(key.generation);
        let (is_over, waiting) = (groups.end_of(key).is_some(), groups.lobbies.remove(&key));
        if is_over || waiting.as_ref().is_some_and(|expected| expected.is_known) {
            groups.lobbies.extend(waiting.map(|expected| (key, expected)));
            let text = format!("there is, or was, a group of generation {} already", key.generation);
            return Err(Error::connect(own, text));
        }
        // Who took this one for another rank finds the connection closed.
        let waiting = waiting.filter(|expected| expected.own == own);
        let lobby = waiting.map_or_else(Arc::default, |expected| expected.lobby);
        groups.lobbies.insert(key, Expected { lobby: Arc::clone(&lobby), own, is_known: true });
        Ok(lobby)
    }

    /// The group is over.
    pub(crate) fn forget(&self, key: Key, word: &Word) {
        let mut groups = self.0.groups();
        let lobby = groups.lobbies.remove(&key);
        if groups.ended.len() == ENDED {
            groups.ended.pop_front();
        }
        groups.ended.push_back((key, word.clone()));
        if let Some(Expected { lobby, .. }) = lobby {
            lobby.close(word);
        }
    }
}

impl Drop for Door {
    fn drop(&mut self) {
        // A counter that is full has told it already.
        let _ = self.0.stop.write(1);
    }
}

impl Inside {
    fn groups(&self) -> MutexGuard<'_, Groups> {
        self.groups.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits at the door until it closes, and then for those who come late for a group that has ended, to be told why.
    fn keep(self: Arc<Inside>) {
        let (mut closes, mut is_barred): (Option<Deadline>, bool) = (None, false);
        loop {
            let rest = closes.map(|deadline| deadline.remaining());
            if rest == Some(Duration::ZERO) {
                return;
            }
            if self.endpoint.park(&self.stop, rest) {
                let _ = self.stop.read();
                self.groups().is_closed = true;
                closes = Some(Deadline::after(LATE));
            }
            self.let_in(&mut is_barred);
        }
    }

    /// Takes in all who wait outside; rests where this process has no descriptor for them, which is said once.
    fn let_in(self: &Arc<Inside>, is_barred: &mut bool) {
        loop {
            match self.endpoint.accept() {
                Ok(Some(stream)) => self.receive(stream),
                Ok(None) => return *is_barred = false,
                Err(error) => {
                    if !std::mem::replace(is_barred, true) {
                        tracing::warn!("connections have to wait: {error}");
                    }
                    return std::thread::sleep(BARRED);
                }
            }
        }
    }

    /// Lets one prove itself on a thread of its own.
    fn receive(self: &Arc<Inside>, stream: Stream) {
        let address = stream.describe();
        let Ok(handle) = stream.handle() else { return };
        let (number, evicted) = self.strangers.enter(handle);
        evicted.iter().for_each(Stream::close);
        let inside = Arc::clone(self);
        let thread = std::thread::Builder::new().name("phalanx-accept".into());
        let spawned = thread.spawn(move || {
            match inside.lead(stream, number) {
                // As a rank does that needs nobody any more.
                Err(HandshakeError::Io(error)) if error.kind() == ErrorKind::UnexpectedEof => {
                    tracing::debug!(address, "who called has hung up: {error}");
                }
                Err(error) => tracing::warn!(address, "refused a connection: {error}"),
                Ok(()) => {}
            }
            inside.strangers.leave(number);
        });
        if let Err(error) = spawned {
            tracing::warn!("refused a connection: no thread for it: {error}");
            self.strangers.leave(number);
        }
    }

    /// Leads one who proves itself to the group that it comes for.
    fn lead(&self, stream: Stream, number: u64) -> Result<(), HandshakeError> {
        let deadline = Deadline::after(HANDSHAKE_LIMIT);
        let tls = self.endpoint.tls();
        let (mut stream, theirs) =
            stream.welcome(tls, &self.secret, &deadline, |hello| self.answer_to(hello))?;
        // It makes room for nobody any more.
        self.strangers.leave(number);
        let call = Call::of(&theirs).ok_or(HandshakeError::NotOurs)?;
        match self.place_for(call, theirs.rank)? {
            Answer::Welcome(lobby) => {
                let is_memory = stream.is_memory();
                let made = stream
                    .write_all(&[WELCOME])
                    .and_then(|()| stream.into_wire(Side::Accepted, self.endpoint.pulse()));
                match made {
                    Ok(wire) => lobby.settle(theirs.rank, Ok(wire)),
                    Err(error) => {
                        lobby.turn_back(theirs.rank);
                        if !is_memory {
                            return Err(error.into());
                        }
                        let peer = theirs.rank;
                        tracing::warn!("memory can't be shared with rank {peer}, TCP is used: {error}");
                    }
                }
            }
            Answer::Crossed => stream.write_all(&[CROSSED])?,
            Answer::Ended(word) => {
                stream.write_all(&[HAS_ENDED])?;
                write_frame(&mut stream, &word.encode())?;
            }
        }
        Ok(())
    }

    /// What this process says of itself to one who says that: the same group, if there is or may be one, and its rank there.
    fn answer_to(&self, hello: &Hello) -> Hello {
        let groups = self.groups();
        let own = |key: &Key| groups.lobbies.get(key).map(|expected| expected.own);
        let may_be = |key: &Key| groups.end_of(*key).is_some() || key.generation >= groups.newest;
        let call = Call::of(hello).and_then(|call| match own(&call.key) {
            Some(whom) => Some(Call { whom, ..call }),
            None => may_be(&call.key).then_some(call),
        });
        let of_now = Key { generation: groups.newest, group: 0 };
        let call = call.unwrap_or(Call { key: of_now, whom: own(&of_now).unwrap_or(Rank(0)) });
        call.hello(call.whom)
    }

    fn place_for(&self, Call { key, whom: own }: Call, peer: Rank) -> Result<Answer, HandshakeError> {
        let mut groups = self.groups();
        if let Some(word) = groups.end_of(key) {
            return Ok(Answer::Ended(word.clone()));
        }
        if groups.is_closed {
            return Err(std::io::Error::other("this rank has left").into());
        }
        let unheard_of = groups.lobbies.values().filter(|expected| !expected.is_known).count();
        if unheard_of >= UNHEARD_OF && !groups.lobbies.contains_key(&key) {
            return Err(std::io::Error::other("too many knock for groups that aren't there yet").into());
        }
        let unknown = || Expected { lobby: Arc::default(), own, is_known: false };
        let Expected { lobby, own: now, .. } = groups.lobbies.entry(key).or_insert_with(unknown);
        if *now != own {
            // It was heard of in between.
            return Err(std::io::Error::other(format!("rank {own} is wanted here, and rank {now} is")).into());
        }
        Ok(if lobby.admit(own, peer) { Answer::Welcome(Arc::clone(lobby)) } else { Answer::Crossed })
    }
}

/// What one who has proven itself is told, in a byte; after the last comes a frame with the group's parting word.
const WELCOME: u8 = 1;
const CROSSED: u8 = 2;
const HAS_ENDED: u8 = 3;

/// What the other side answers to one who has proven itself: whether it goes on.
pub(crate) fn hear_answer(stream: &mut impl Read) -> Result<bool, Lost> {
    let broken = |error: std::io::Error| Lost::Seen(format!("it doesn't answer: {error}"));
    let mut answer = [0];
    stream.read_exact(&mut answer).map_err(broken)?;
    match answer[0] {
        WELCOME => Ok(true),
        CROSSED => Ok(false),
        HAS_ENDED => {
            let word = Word::decode(&read_frame(stream, MAX_WORD).map_err(broken)?);
            Err(word.map_or_else(|| Lost::Seen("it gives a mad answer".into()), Lost::Told))
        }
        _ => Err(Lost::Seen("it gives a mad answer".into())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn calls_survive_the_way_through_a_hello() {
        for (group, whom) in [(0, 0), (1, 4), (u64::MAX, u32::MAX)] {
            let call = Call { key: Key { generation: Generation(7), group }, whom: Rank(whom) };
            assert_eq!(Call::of(&call.hello(Rank(3))), Some(call));
        }
        for purpose in
            ["coord/1", "comm", "comm/", "comm/xyz", "comm/1/", "comm/1/2/3", "commune/1", "comm0/1"]
        {
            let hello = Hello { purpose: purpose.into(), rank: Rank(0), generation: Generation(0) };
            assert_eq!(Call::of(&hello), None, "{purpose}");
        }
    }
}
