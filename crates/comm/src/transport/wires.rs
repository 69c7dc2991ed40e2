//! Ranks in processes: one wire a pair, each of the kind that suits where the peer is.

use super::{Lost, Process, Signs, Transport, Waker, is_cut_off};
use crate::dial::Errand;
use crate::door::{Door, Key};
use crate::endpoint::PeerAddress;
use crate::error::Error;
use crate::group::Home;
use crate::lobby::Lobby;
use crate::word::{Why, Word};
use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, ppoll};
use nix::sys::eventfd::{EfdFlags, EventFd};
use nix::sys::time::TimeSpec;
use phalanx_wire::{Deadline, Rank};
use std::fs::File;
use std::ops::DerefMut;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// A rank's end of the connection to one other.
pub(crate) trait Wire: Send {
    /// Takes as many bytes as fit now; says how many.
    fn try_send(&mut self, bytes: &[u8]) -> Result<usize, Lost>;

    /// Brings as many bytes as are there now; says how many.
    fn try_receive(&mut self, into: &mut [u8]) -> Result<usize, Lost>;

    /// Puts a whole letter where the peer takes it from without this rank's help, if it fits there; says where.
    fn shelve(&mut self, _: &[u8]) -> Result<Option<u32>, Lost> {
        Ok(None)
    }

    /// Takes a letter from where the peer says that it lies.
    fn unshelve(&mut self, _: u32, _: &mut [u8]) -> Result<(), Lost> {
        Err(Lost::Seen("memory can't be shared with it".into()))
    }

    /// The next bytes that are there, where they lie, if this wire can show them: as many as lie in one piece.
    fn look(&mut self) -> Result<Option<&[u8]>, Lost> {
        Ok(None)
    }

    /// So many bytes that were looked at are done with.
    fn consume(&mut self, _: usize) {}

    /// The process at the other end, if that can be seen.
    fn process(&self) -> Option<Process> {
        None
    }

    /// Hands the peer a file, whose memory both then see; whether that could be done now. Where no files can be passed there is
    /// nothing to do, and the peer knows as much.
    fn pass(&mut self, _: &File) -> Result<bool, Lost> {
        Ok(true)
    }

    /// The next file that the peer passed, if there is one, or why this process couldn't take it.
    fn take_passed(&mut self) -> Result<Option<std::io::Result<File>>, Lost> {
        Ok(Some(Err(std::io::Error::other("it is reached over TCP"))))
    }

    /// Gets ready for a sleep until something may be received (or, for `PollFlags::POLLOUT`, sent): the events to sleep
    /// for. None if that is so already.
    fn fall_asleep(&mut self, wanted: PollFlags) -> Option<PollFlags>;

    /// The sleep is over.
    fn wake(&mut self) {}

    /// What the events happen to.
    fn fd(&self) -> BorrowedFd<'_>;

    /// What can be seen of the peer without waiting.
    fn signs(&mut self) -> Signs {
        Signs::Unseen
    }

    /// Whether the peer's host has all that was sent, after this rank has left: what still comes is let go.
    fn is_delivered(&mut self) -> bool {
        true
    }

    /// Tells the peer why this rank leaves, if that goes without waiting, and leaves, so that the peer notices.
    fn part(&mut self, word: &Word);
}

/// How long a rank that leaves waits for the others' hosts to have what it sent: where there may be results in it, and where
/// there is only its word.
const LEAVING: Duration = Duration::from_secs(30);
pub(crate) const LEAVING_FAILED: Duration = Duration::from_millis(500);
/// How long it waits for one whose host acknowledges nothing, though it was sent to again: TCP does that after 0.2, 0.6 and 1.4
/// seconds, so a link that was down for a second is no reason.
const LEAVING_CUT_OFF: Duration = Duration::from_secs(2);
/// How long it sleeps before it looks again.
const LEAVING_NAP: Duration = Duration::from_micros(200);

/// Waits until the peers' hosts have what was sent to them before this rank left, or can't be reached any more; the error is how
/// long it waited for one that hasn't.
pub(crate) fn deliver<W: DerefMut<Target = dyn Wire>>(
    wires: &mut [W],
    limit: Duration,
) -> Result<(), Duration> {
    let deadline = Deadline::after(limit);
    loop {
        let mut left = wires.iter_mut().filter_map(|wire| (!wire.is_delivered()).then(|| wire.signs()));
        let Some(first) = left.next() else { return Ok(()) };
        let waited = deadline.waited();
        let is_hopeless = |signs: Signs| is_cut_off(&signs, waited, LEAVING_CUT_OFF);
        if deadline.expired() || is_hopeless(first) && left.all(is_hopeless) {
            return Err(waited);
        }
        drop(left);
        std::thread::sleep(LEAVING_NAP);
    }
}

/// A process's end of a group: connections to those ranks that it needed so far.
pub(crate) struct Wires {
    own: usize,
    key: Key,
    door: Arc<Door>,
    lobby: Arc<Lobby>,
    peers: Vec<Peer>,
    /// Whether all ranks have been here once, so that somebody waits at each of their doors.
    have_met: bool,
    /// Written to by wakers.
    alarm: Arc<EventFd>,
    /// How long what was sent may take to arrive, once this rank has left.
    leaving: Duration,
}

/// Another rank, or this one.
struct Peer {
    /// As the run numbers it.
    rank: Rank,
    address: PeerAddress,
    is_here: bool,
    link: Link,
}

/// How this rank and another one are connected.
enum Link {
    /// Not yet; since when it has been asked for.
    Absent(Option<Instant>),
    Open(Box<dyn Wire>),
    Lost(Lost),
}

/// How long a rank waits for a higher one to dial before it dials itself: mostly both need each other at once, and one connection
/// is enough.
const COURTESY: Duration = Duration::from_millis(20);
/// A sleep is at least so long, so that a wait that is nearly over doesn't become a spin.
const SHORTEST_SLEEP: Duration = Duration::from_micros(10);

impl Wires {
    /// To the ranks of a group, `members` as the run numbers them, who can be reached from `home`.
    pub(crate) fn new(own: usize, members: &[Rank], home: &Home, key: Key) -> Result<Wires, Error> {
        let lobby = home.door.expect(key, members[own])?;
        Wires::at(own, members, home, key, &lobby).inspect_err(|error| {
            // The others come all the same, and hear it instead of waiting for nobody.
            let word = Word::of(Rank(own as u32), error, members);
            home.door.forget(key, &word);
            lobby.turn_away(&word);
        })
    }

    /// As [`Wires::new`], for a group that the door knows.
    fn at(own: usize, members: &[Rank], home: &Home, key: Key, lobby: &Arc<Lobby>) -> Result<Wires, Error> {
        let failed =
            |error: Errno| Error::connect(members[own], format!("it has no event to wake by: {error}"));
        let alarm = EventFd::from_flags(EfdFlags::EFD_CLOEXEC | EfdFlags::EFD_NONBLOCK).map_err(failed)?;
        let (door, alarm) = (Arc::clone(&home.door), Arc::new(alarm));
        let ours = &home.peers[own];
        let is_over_tcp = |(rank, address): &(&Rank, &PeerAddress)| {
            **rank != members[own] && !ours.can_share_memory_with(address)
        };
        let has_tls = door.tls().is_some();
        check_tls(members[own], has_tls, members.iter().zip(&home.peers).filter(is_over_tcp))?;
        let peer = |(&rank, address): (&Rank, &PeerAddress)| Peer {
            rank,
            address: address.clone(),
            is_here: ours.can_share_memory_with(address),
            link: Link::Absent(None),
        };
        let peers = members.iter().zip(&home.peers).map(peer).collect();
        lobby.ring(ringing(&alarm));
        Ok(Wires {
            own,
            key,
            door,
            lobby: Arc::clone(lobby),
            peers,
            have_met: false,
            alarm,
            leaving: Duration::ZERO,
        })
    }

    /// The connection to a peer, once there is one; goes for it if there is none.
    fn wire(&mut self, peer: usize) -> Result<Option<&mut Box<dyn Wire>>, Lost> {
        if !matches!(self.peers[peer].link, Link::Open(_)) {
            self.reach(peer);
        }
        match &mut self.peers[peer].link {
            Link::Open(wire) => Ok(Some(wire)),
            Link::Lost(lost) => Err(lost.clone()),
            Link::Absent(_) => Ok(None),
        }
    }

    fn others(&self) -> impl Iterator<Item = &Peer> {
        self.peers.iter().enumerate().filter(|(peer, _)| *peer != self.own).map(|(_, peer)| peer)
    }

    /// Takes in who arrived.
    fn look_into_lobby(&mut self) {
        for (rank, arrived) in self.lobby.take() {
            if let Some(peer) = self.peers.iter_mut().find(|peer| peer.rank == rank) {
                peer.link = arrived.map_or_else(Link::Lost, Link::Open);
            }
        }
    }

    /// Goes to a peer that isn't connected: a lower one at once, a higher one when it doesn't come.
    fn reach(&mut self, peer: usize) {
        self.look_into_lobby();
        let own = self.peers[self.own].rank;
        let Peer { rank, address, is_here, link: Link::Absent(since) } = &mut self.peers[peer] else {
            return;
        };
        let now = Instant::now();
        let waited = now.saturating_duration_since(*since.get_or_insert(now));
        if (*rank < own || waited >= COURTESY) && self.lobby.begin(*rank, now) {
            let (address, is_here) = (address.clone(), *is_here);
            let here = Rank(self.own as u32);
            let errand = Errand { key: self.key, own, here, peer: *rank, address, is_here };
            errand.send_off(&self.door, &self.lobby);
        }
    }
}

/// Whether all who are reached over TCP speak TLS there, or none does. What this rank does itself is not taken from the
/// addresses, which went through other hands.
fn check_tls<'a>(
    own: Rank,
    has_tls: bool,
    mut others: impl Iterator<Item = (&'a Rank, &'a PeerAddress)>,
) -> Result<(), Error> {
    let Some((peer, _)) = others.find(|(_, address)| address.tls != has_tls) else { return Ok(()) };
    let what =
        if has_tls { "has no TLS, which this rank wants" } else { "wants TLS, which this rank has not" };
    let hint = "give all ranks of a run TLS, or none: PHALANX_TLS=1, or Endpoint::with_tls";
    Err(Error::connect(own, format!("rank {peer} {what}\nhint: {hint}")))
}

fn ringing(alarm: &Arc<EventFd>) -> Waker {
    let alarm = Arc::clone(alarm);
    // A counter that is full has rung already.
    Box::new(move || {
        let _ = alarm.write(1);
    })
}

impl Transport for Wires {
    fn try_send(&mut self, to: usize, bytes: &[u8]) -> Result<usize, Lost> {
        self.wire(to)?.map_or(Ok(0), |wire| wire.try_send(bytes))
    }

    fn try_receive(&mut self, from: usize, into: &mut [u8]) -> Result<usize, Lost> {
        if into.is_empty() {
            return Ok(0);
        }
        self.wire(from)?.map_or(Ok(0), |wire| wire.try_receive(into))
    }

    fn shelve(&mut self, to: usize, letter: &[u8]) -> Result<Option<u32>, Lost> {
        self.wire(to)?.map_or(Ok(None), |wire| wire.shelve(letter))
    }

    fn unshelve(&mut self, from: usize, at: u32, into: &mut [u8]) -> Result<(), Lost> {
        let gone = || Err(Lost::Seen("it closed the connection".into()));
        self.wire(from)?.map_or_else(gone, |wire| wire.unshelve(at, into))
    }

    fn look(&mut self, from: usize) -> Result<Option<&[u8]>, Lost> {
        self.wire(from)?.map_or(Ok(None), |wire| wire.look())
    }

    fn consume(&mut self, from: usize, n: usize) {
        if let Link::Open(wire) = &mut self.peers[from].link {
            wire.consume(n);
        }
    }

    fn pass(&mut self, to: usize, file: &File) -> Result<bool, Lost> {
        self.wire(to)?.map_or(Ok(false), |wire| wire.pass(file))
    }

    fn take_passed(&mut self, from: usize) -> Result<Option<std::io::Result<File>>, Lost> {
        self.wire(from)?.map_or(Ok(None), |wire| wire.take_passed())
    }

    fn process(&self, peer: usize) -> Option<Process> {
        match &self.peers[peer].link {
            Link::Open(wire) => wire.process(),
            Link::Absent(_) | Link::Lost(_) => None,
        }
    }

    fn shares_memory(&self) -> bool {
        self.others().all(|peer| peer.is_here)
    }

    fn reaches(&mut self, peer: usize) -> bool {
        self.look_into_lobby();
        matches!(self.peers[peer].link, Link::Open(_))
    }

    fn have_met(&mut self) {
        self.have_met = true;
    }

    fn park(&mut self, receives: &[usize], sends: &[usize], at_most: Duration) {
        // One entry a peer: a wire falls asleep once.
        let flags = |peer: usize| {
            let mut flags = PollFlags::empty();
            flags.set(PollFlags::POLLIN, receives.contains(&peer));
            flags.set(PollFlags::POLLOUT, sends.contains(&peer));
            flags
        };
        let (mut asleep, mut is_quiet, mut at_most) = (Vec::new(), true, at_most);
        for (peer, Peer { link, .. }) in self.peers.iter_mut().enumerate() {
            match (link, flags(peer)) {
                (_, flags) if flags.is_empty() => {}
                (Link::Open(wire), flags) => {
                    let events = wire.fall_asleep(flags);
                    is_quiet &= events.is_some();
                    asleep.push((wire, events.unwrap_or(PollFlags::empty())));
                }
                (Link::Absent(_), _) => at_most = at_most.min(COURTESY),
                (Link::Lost(_), _) => is_quiet = false,
            }
        }
        if is_quiet {
            let fds = asleep.iter().map(|(wire, events)| PollFd::new(wire.fd(), *events));
            // Whoever arrives rings it, too.
            let alarm = PollFd::new(self.alarm.as_fd(), PollFlags::POLLIN);
            let mut fds: Vec<PollFd<'_>> = fds.chain([alarm]).collect();
            // An error only ends the sleep early.
            let _ = ppoll(&mut fds, Some(TimeSpec::from_duration(at_most.max(SHORTEST_SLEEP))), None);
        }
        asleep.iter_mut().for_each(|(wire, _)| wire.wake());
        // An alarm that didn't ring has nothing to read.
        let _ = self.alarm.read();
    }

    fn waker(&self) -> Waker {
        ringing(&self.alarm)
    }

    fn signs(&mut self, peer: usize) -> Signs {
        match self.wire(peer) {
            Ok(Some(wire)) => return wire.signs(),
            Ok(None) => {}
            Err(_) => return Signs::Unseen,
        }
        match self.lobby.signs(self.peers[peer].rank, Instant::now()) {
            // It may not have come to its own door yet.
            Signs::Network(_) if !self.have_met => Signs::Unseen,
            signs => signs,
        }
    }

    fn part(&mut self, word: &Word) {
        // Whoever arrives from now on hears it at the door, and whoever did so before is among the peers below.
        self.door.forget(self.key, word);
        self.look_into_lobby();
        let is_done = word.why == Why::Left && !std::thread::panicking();
        self.leaving = if is_done { LEAVING } else { LEAVING_FAILED };
        for peer in &mut self.peers {
            if let Link::Open(wire) = &mut peer.link {
                wire.part(word);
            }
        }
    }

    fn name(&self) -> String {
        let tcp = if self.door.tls().is_some() { "TCP with TLS" } else { "TCP" };
        let mut names: Vec<&str> =
            self.others().map(|peer| if peer.is_here { "shared memory" } else { tcp }).collect();
        names.sort_unstable();
        names.dedup();
        names.join(" and ")
    }
}

impl Drop for Wires {
    /// A kernel takes back what a closed connection still has to send as soon as anything comes for it, a beat say.
    fn drop(&mut self) {
        let mut open: Vec<&mut dyn Wire> = self
            .peers
            .iter_mut()
            .filter_map(|peer| match &mut peer.link {
                Link::Open(wire) => Some(&mut **wire),
                _ => None,
            })
            .collect();
        if let Err(waited) = deliver(&mut open, self.leaving) {
            tracing::warn!("a peer hasn't taken what was sent to it within {waited:.1?}, and may miss it");
        }
    }
}
