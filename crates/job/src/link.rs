//! A worker's connection to the coordinator. As long as it is open, the worker counts as alive.

use crate::error::Error;
use crate::message::{Cause, FromWorker, GoesOn, Roster, ToWorker};
use crate::store::LinkStore;
use crate::whereabouts::Whereabouts;
use phalanx_wire::{
    Channel, Deadline, Doubts, Generation, HandshakeError, Hello, Pass, Rank, read_frame, write_frame,
};
use std::io::ErrorKind;
use std::net::{SocketAddr, TcpStream, ToSocketAddrs};
use std::time::{Duration, Instant};

/// The longest message, in bytes: a roster of some ten thousand workers.
pub const MAX_FRAME: usize = 1 << 20;
/// What both ends say the connection is for.
pub(crate) const PURPOSE: &str = "coord";
/// How long to wait before a coordinator that isn't there yet is tried again.
const RETRY: Duration = Duration::from_millis(20);
/// How often to look whether another coordinator has taken the place of one that is lost.
const LOOK: Duration = Duration::from_millis(5);
/// How long a coordinator that was lost may take to take a worker back.
const AGAIN: Duration = Duration::from_millis(300);
/// How long a worker that can do without the coordinator waits before it tries again to reach it.
const MEND: Duration = Duration::from_millis(500);
/// How long whoever listens there may take to prove that it is the coordinator, however many ranks come at once.
const PROOF_LIMIT: Duration = Duration::from_secs(30);
/// How long each of several addresses is tried before the next.
const TURN: Duration = Duration::from_secs(5);
/// How long an answer of the coordinator may take.
const ANSWER_LIMIT: Duration = Duration::from_secs(2);

/// Whether the members are to leave the membership at hand.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Due {
    Nothing,
    /// At the end of their step, since somebody waits to come in.
    Change,
    /// Now, since one of them is lost.
    Loss,
}

/// The worker's end.
pub struct Link {
    stream: Channel,
    address: SocketAddr,
    pass: Pass,
    hello: Hello,
    /// Where it is told that the coordinator has become another.
    whereabouts: Option<Whereabouts>,
    /// Where the others reach this worker.
    own_address: String,
    /// The membership that it is in, and its rank there.
    member: Option<(Generation, Rank)>,
    /// With whom it goes on when others are lost.
    goes_on: GoesOn,
    /// Whether this coordinator has been told of it: one that has taken another's place hasn't at first.
    is_known: bool,
    /// What was said since the last roster, that members are to leave.
    due: Due,
    /// Where the connection has ended, when another is to be made.
    cut: Option<Instant>,
    /// Whether it ended and was made anew to where it was: a coordinator of others may listen there by now.
    came_back: bool,
}

impl Link {
    /// What the handshake of such a connection says it is for.
    pub fn purpose() -> &'static str {
        PURPOSE
    }

    /// Connects with the run's secret, or with TLS as well ([`Pass`]), trying again until the deadline while nobody listens there yet or it hangs up on strangers.
    pub fn connect(
        place: impl ToSocketAddrs + std::fmt::Display,
        pass: impl Into<Pass>,
        rank: Rank,
        generation: Generation,
        deadline: Deadline,
    ) -> Result<Link, Error> {
        let unreachable = |reason: String| Error::Unreachable { address: place.to_string(), reason };
        let places: Vec<SocketAddr> =
            place.to_socket_addrs().map_err(|e| unreachable(e.to_string()))?.collect();
        if places.is_empty() {
            return Err(unreachable("the name has no address".into()));
        }
        Link::connect_following(&places, pass, rank, generation, None, deadline)
    }

    /// The same at whichever of these addresses, at least one, of the same machine, going with the coordinator where another takes its
    /// place, which is told there.
    pub fn connect_following(
        places: &[SocketAddr],
        pass: impl Into<Pass>,
        rank: Rank,
        generation: Generation,
        whereabouts: Option<Whereabouts>,
        deadline: Deadline,
    ) -> Result<Link, Error> {
        let (pass, hello) = (pass.into(), Hello { purpose: PURPOSE.into(), rank, generation });
        let mut turns = places.iter().copied().cycle();
        loop {
            let now = whereabouts.as_ref().and_then(|whereabouts| whereabouts.read().ok());
            let address = now.or_else(|| turns.next()).expect("a place to connect to");
            // One that may move, or be reached elsewhere, isn't waited for where it doesn't answer.
            let (limit, has_others) = match (&whereabouts, places.len()) {
                (Some(_), _) => (ANSWER_LIMIT, true),
                (None, 1) => (Duration::MAX, false),
                (None, _) => (TURN, true),
            };
            let soon = Deadline::after(deadline.remaining().min(limit));
            let error = match dial(address, &pass, &hello, &soon) {
                Ok(stream) => return Ok(Link { whereabouts, ..Link::new(stream, address, pass, hello) }),
                Err(Attempt::Vain(error @ Error::Unreachable { .. })) if has_others => error,
                Err(Attempt::Vain(error)) => return Err(error),
                Err(Attempt::Early(error)) => error,
            };
            if deadline.expired() {
                return Err(error);
            }
            std::thread::sleep(RETRY.min(deadline.remaining()));
        }
    }

    fn new(stream: Channel, address: SocketAddr, pass: Pass, hello: Hello) -> Link {
        let (whereabouts, own_address, member) = (None, String::new(), None);
        let (goes_on, is_known, due, cut, came_back) = (GoesOn::Not, false, Due::Nothing, None, false);
        Link {
            stream,
            address,
            pass,
            hello,
            whereabouts,
            own_address,
            member,
            goes_on,
            is_known,
            due,
            cut,
            came_back,
        }
    }

    /// The address of this end, which is one that the run's other machines can reach.
    pub fn local_address(&self) -> Result<SocketAddr, Error> {
        self.stream.local_addr().map_err(|e| self.broken(e.to_string()))
    }

    /// Says that this worker is there, and waits until all are: gives its rank among them.
    pub fn join(&mut self, address: String, deadline: Deadline) -> Result<(Rank, Roster), Error> {
        self.own_address.clone_from(&address);
        self.enter(None, &[], deadline)
    }

    /// Says whether, and with whom, this worker goes on in place when others are lost or wait to come in.
    pub fn goes_on(&mut self, with: GoesOn) -> Result<(), Error> {
        self.goes_on = with;
        self.say(&FromWorker::GoesOn { with })
    }

    /// Whether somebody waits to come in, or is lost, or the coordinator is another, or this worker had to connect to it again, so
    /// that this worker is to rejoin together with the others. Waits only where the connection has ended and no other can be made.
    pub fn is_change_due(&mut self) -> bool {
        self.listen();
        if self.moved().is_some() {
            self.due = self.due.max(Due::Change);
        }
        let is_due = |next: Instant| Instant::now() >= next;
        if self.due == Due::Nothing && self.whereabouts.is_some() && self.cut.is_some_and(is_due) {
            // Who leads the run on where the coordinator is gone is told soon.
            if self.dial_again(self.address, Deadline::after(AGAIN)).is_ok() {
                self.due = Due::Change;
            }
            self.cut = self.cut.map(|_| Instant::now() + MEND);
        }
        self.due > Due::Nothing
    }

    /// Whether it was said that one of the membership at hand is lost, so that nothing comes of what its ranks are at. Costs less
    /// than [`Link::is_change_due`], and never waits.
    pub fn is_loss_told(&mut self) -> bool {
        self.listen();
        self.due == Due::Loss
    }

    /// Hears what was said without being asked for.
    fn listen(&mut self) {
        while self.due < Due::Loss && self.cut.is_none() && self.stream.is_readable() {
            match self.hear_any(ANSWER_LIMIT) {
                Ok(heard) => self.heed(heard.as_ref()),
                Err(_) => self.cut = Some(Instant::now()),
            }
        }
    }

    fn heed(&mut self, heard: Option<&ToWorker>) {
        self.due = match heard {
            Some(ToWorker::Loss) => Due::Loss,
            Some(ToWorker::Change) => self.due.max(Due::Change),
            _ => self.due,
        };
    }

    /// Says that this worker has left the membership at hand, of which these ranks gave no sign of life, and waits for the next.
    pub fn rejoin(&mut self, silent: &[Rank], deadline: Deadline) -> Result<(Rank, Roster), Error> {
        let silent: Vec<u32> = silent.iter().map(|rank| rank.0).collect();
        self.enter(Some(FromWorker::Rejoin { silent: silent.clone() }), &silent, deadline)
    }

    /// Says that it waits to come in, and waits for that: at another coordinator if this one is lost.
    fn enter(
        &mut self,
        mut again: Option<FromWorker>,
        silent: &[u32],
        deadline: Deadline,
    ) -> Result<(Rank, Roster), Error> {
        loop {
            let message = again.take().filter(|_| self.is_known).unwrap_or_else(|| self.arrival(silent));
            let lost = match self.ask_for_roster(&message, deadline) {
                Err(error @ Error::Broken { .. }) if self.whereabouts.is_some() => error,
                // Where the one that was lost listened, a coordinator of others may do so by now.
                Err(error @ Error::Refused { .. }) if self.came_back && self.moves_within(deadline) => error,
                entered => {
                    if let Ok((rank, roster)) = &entered {
                        self.member = Some((roster.generation, *rank));
                    }
                    return entered;
                }
            };
            self.move_on(deadline).map_err(|_| lost)?;
        }
    }

    /// Whether it is told soon that the coordinator is elsewhere.
    fn moves_within(&self, deadline: Deadline) -> bool {
        let soon = Deadline::after(deadline.remaining().min(ANSWER_LIMIT));
        while self.moved().is_none() && !soon.expired() {
            std::thread::sleep(LOOK);
        }
        self.moved().is_some()
    }

    /// What a coordinator is told first.
    fn arrival(&self, silent: &[u32]) -> FromWorker {
        let address = self.own_address.clone();
        match self.member {
            None => FromWorker::Join { address },
            Some((generation, rank)) => {
                FromWorker::Return { address, generation, rank, with: self.goes_on, silent: silent.to_vec() }
            }
        }
    }

    fn ask_for_roster(&mut self, message: &FromWorker, deadline: Deadline) -> Result<(Rank, Roster), Error> {
        if self.moved().is_some() {
            return Err(self.broken("another has taken its place".into()));
        }
        self.say(message)?;
        self.is_known = true;
        self.roster(deadline)
    }

    /// Where the coordinator is by now, if that is elsewhere.
    fn moved(&self) -> Option<SocketAddr> {
        let now = self.whereabouts.as_ref()?.read().ok()?;
        (now != self.address).then_some(now)
    }

    /// Waits until another coordinator has taken the place of the one that was lost, and connects there; or again to that one, if
    /// only the connection was lost.
    fn move_on(&mut self, deadline: Deadline) -> Result<(), Error> {
        loop {
            let moved = self.moved();
            let (address, limit) = (moved.unwrap_or(self.address), moved.map_or(AGAIN, |_| ANSWER_LIMIT));
            let soon = Deadline::after(deadline.remaining().min(limit));
            match self.dial_again(address, soon) {
                Ok(()) => return Ok(()),
                Err(Attempt::Vain(error @ Error::Handshake { .. })) if moved.is_some() => return Err(error),
                // It may be lost as well, and yet another take its place.
                Err(_) => {}
            }
            if deadline.expired() {
                return Err(self.broken("no other has taken its place".into()));
            }
            std::thread::sleep(LOOK.min(deadline.remaining()));
        }
    }

    /// Connects to a coordinator that doesn't know this connection.
    fn dial_again(&mut self, address: SocketAddr, deadline: Deadline) -> Result<(), Attempt> {
        self.stream = dial(address, &self.pass, &self.hello, &deadline)?;
        self.came_back = address == self.address;
        (self.address, self.is_known, self.due, self.cut) = (address, false, Due::Nothing, None);
        Ok(())
    }

    fn roster(&mut self, deadline: Deadline) -> Result<(Rank, Roster), Error> {
        let waited_in_vain = match self.hear(deadline.remaining())? {
            Some(ToWorker::Roster { rank, roster }) => return Ok((rank, roster)),
            Some(ToWorker::Refused { reason }) => {
                return Err(Error::Refused { address: self.address, reason });
            }
            Some(other) => {
                return Err(self.broken(format!("it said {other:?} to a rank that waits for the roster")));
            }
            None => deadline.waited(),
        };
        self.say(&FromWorker::WhoIsMissing)?;
        match self.hear(ANSWER_LIMIT)? {
            // It came in the last moment.
            Some(ToWorker::Roster { rank, roster }) => Ok((rank, roster)),
            Some(ToWorker::Missing { missing }) => {
                Err(Error::Missing { seconds: waited_in_vain.as_secs_f64(), missing })
            }
            _ => Err(self.broken(format!("no roster after {waited_in_vain:.0?}: not all ranks came"))),
        }
    }

    /// Says why this worker can't go on, and waits a moment until that was heard, so that it isn't overtaken by the news that
    /// the worker has ended.
    pub fn fail(&mut self, message: String, cause: Cause) -> Result<(), Error> {
        if self.moved().is_some() {
            self.move_on(Deadline::after(ANSWER_LIMIT))?;
        }
        self.say(&FromWorker::Fail { message, cause })?;
        self.hear(ANSWER_LIMIT).map(|_| ())
    }

    /// Speaks of the rendezvous store from now on. A worker that has joined keeps its link and connects once more for this.
    pub fn open_store(mut self) -> Result<LinkStore, Error> {
        self.say(&FromWorker::OpenStore)?;
        match self.hear(ANSWER_LIMIT)? {
            Some(ToWorker::StoreOpen) => {}
            Some(ToWorker::Refused { reason }) => {
                return Err(Error::Refused { address: self.address, reason });
            }
            Some(other) => return Err(self.broken(format!("it said {other:?} when asked for the store"))),
            None => return Err(self.broken(format!("no store within {ANSWER_LIMIT:.0?}"))),
        }
        let address = self.address;
        LinkStore::new(self.stream, address).map_err(|e| Error::Broken { address, reason: e.to_string() })
    }

    /// The next message that is an answer, if one comes within `limit`.
    fn hear(&mut self, limit: Duration) -> Result<Option<ToWorker>, Error> {
        let deadline = Deadline::after(limit);
        loop {
            // One that is silent may be another by now, without the end of this connection being seen.
            while !self.stream.is_readable_within(LOOK.min(deadline.remaining())) && !deadline.expired() {
                if self.moved().is_some() {
                    return Err(self.broken("another has taken its place".into()));
                }
            }
            match self.hear_any(deadline.remaining())? {
                heard @ Some(ToWorker::Change | ToWorker::Loss) => self.heed(heard.as_ref()),
                // That goes for the membership before it.
                Some(roster @ ToWorker::Roster { .. }) => {
                    self.due = Due::Nothing;
                    return Ok(Some(roster));
                }
                answer => return Ok(answer),
            }
        }
    }

    /// The next message, if one comes within `limit`.
    fn hear_any(&mut self, limit: Duration) -> Result<Option<ToWorker>, Error> {
        let limit = limit.max(Duration::from_millis(1));
        self.stream.set_read_timeout(Some(limit)).map_err(|e| self.broken(e.to_string()))?;
        match read_frame(&mut &self.stream, MAX_FRAME) {
            Ok(frame) => serde_json::from_slice(&frame)
                .map(Some)
                .map_err(|error| self.broken(format!("an unreadable message: {error}"))),
            Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => Ok(None),
            Err(error) if error.kind() == ErrorKind::UnexpectedEof => {
                Err(self.broken("it closed the connection: the run has ended".into()))
            }
            Err(error) => Err(self.broken(error.to_string())),
        }
    }

    fn say(&mut self, message: &FromWorker) -> Result<(), Error> {
        let frame = serde_json::to_vec(message).expect("a message is always JSON");
        write_frame(&mut &self.stream, &frame).map_err(|e| self.broken(e.to_string()))
    }

    fn broken(&self, reason: String) -> Error {
        Error::Broken { address: self.address, reason }
    }
}

/// Why there is no connection.
enum Attempt {
    /// Nobody is there yet.
    Early(Error),
    /// There will be none.
    Vain(Error),
}

fn dial(address: SocketAddr, pass: &Pass, hello: &Hello, deadline: &Deadline) -> Result<Channel, Attempt> {
    let unreachable = |error: std::io::Error| Error::Unreachable {
        address: address.to_string(),
        reason: error.to_string(),
    };
    let mut doubts = Doubts::default();
    loop {
        let left = deadline.remaining().max(Duration::from_millis(1));
        let stream = TcpStream::connect_timeout(&address, left).map_err(|error| match error.kind() {
            ErrorKind::ConnectionRefused => Attempt::Early(unreachable(error)),
            _ => Attempt::Vain(unreachable(error)),
        })?;
        match prove(stream, address, (pass, hello), (deadline, PROOF_LIMIT)) {
            Err(Attempt::Vain(Error::Handshake { source, .. })) if doubts.remain(&source, deadline) => {}
            proven => return proven,
        }
    }
}

/// Proves this rank and has the other end proven, until the deadline and for so long at most.
fn prove(
    stream: TcpStream,
    address: SocketAddr,
    (pass, hello): (&Pass, &Hello),
    (deadline, limit): (&Deadline, Duration),
) -> Result<Channel, Attempt> {
    let soon = Deadline::after(deadline.remaining().min(limit));
    match Channel::dial(stream, pass, hello, &soon) {
        Ok((stream, _)) => Ok(stream),
        // Where something else listens rank 0 can't, and never will.
        Err(HandshakeError::NotOurs) => Err(Attempt::Vain(Error::NotOurs { address })),
        Err(HandshakeError::Io(error)) if error.kind() == ErrorKind::TimedOut && !deadline.expired() => {
            Err(Attempt::Vain(Error::NotOurs { address }))
        }
        // A coordinator that is beset by strangers may close a connection before it was proven, and one that is stopped says nothing.
        Err(HandshakeError::Io(error)) if is_hang_up(error.kind()) || error.kind() == ErrorKind::TimedOut => {
            Err(Attempt::Early(Error::Broken { address, reason: error.to_string() }))
        }
        Err(source) => Err(Attempt::Vain(Error::Handshake { address, source })),
    }
}

fn is_hang_up(kind: ErrorKind) -> bool {
    matches!(kind, ErrorKind::UnexpectedEof | ErrorKind::ConnectionReset | ErrorKind::BrokenPipe)
}

#[cfg(test)]
mod tests {
    use super::*;
    use phalanx_wire::Secret;
    use std::net::TcpListener;

    #[test]
    fn one_that_hangs_up_on_a_proof_is_asked_again() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let secret = Secret::random().unwrap();
        // As it does for want of room, or where another coordinator has ended there.
        let proven = [Secret::random().unwrap(), Secret::random().unwrap(), secret.clone()];
        let deadline = Deadline::after(Duration::from_secs(60));
        let coordinator = std::thread::spawn(move || {
            proven.map(|secret| {
                let (stream, _) = listener.accept().unwrap();
                let answer =
                    |_: &Hello| Hello { purpose: PURPOSE.into(), rank: Rank(0), generation: Generation(0) };
                Channel::accept(stream, &secret.into(), &deadline, answer).is_ok()
            })
        });
        Link::connect(address, secret, Rank(1), Generation(0), deadline).unwrap();
        assert_eq!(coordinator.join().unwrap(), [false, false, true]);
    }

    #[test]
    fn what_says_nothing_is_not_the_coordinator() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let stream = TcpStream::connect(address).unwrap();
        let pass = Pass::from(Secret::from_bytes([7; 32]));
        let hello = Hello { purpose: PURPOSE.into(), rank: Rank(1), generation: Generation(0) };
        let (deadline, limit) = (Deadline::after(Duration::from_secs(300)), Duration::from_millis(20));
        match prove(stream, address, (&pass, &hello), (&deadline, limit)) {
            Err(Attempt::Vain(error @ Error::NotOurs { .. })) => {
                let hint = format!("ss -ltnp 'sport = :{}'", address.port());
                assert!(error.to_string().contains(&hint), "{error}");
            }
            Err(Attempt::Vain(error) | Attempt::Early(error)) => panic!("{error}"),
            Ok(_) => panic!("nobody has proven anything"),
        }
    }
}
