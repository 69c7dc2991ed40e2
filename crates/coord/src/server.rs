//! The coordinator's sockets. Every connection has a thread of its own and proves the secret before anything else is read;
//! a stranger is logged, refused, and holds up nobody.

use crate::membership::{Decision, Membership};
use phalanx_job::{FromWorker, Link, MAX_FRAME, ToWorker};
use phalanx_wire::{Generation, Hello, Rank, Secret, Side, handshake, read_frame, write_frame};
use std::collections::HashMap;
use std::io::Result;
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

/// What the host of a coordinator may want to know.
#[derive(Clone, Debug, PartialEq)]
pub enum Notice {
    /// All ranks are there.
    Complete,
    /// A rank said that it can't go on.
    Failed {
        /// Which.
        rank: Rank,
        /// Why.
        message: String,
        /// Whether it only fails because another rank did.
        consequence: bool,
    },
}

/// How long a newcomer may take to prove itself and to say what it wants.
const NEWCOMER_LIMIT: Duration = Duration::from_secs(10);
/// Connections at once, above one a rank; more are closed unread.
const SURPLUS: usize = 64;

/// A running coordinator; dropping it closes its sockets.
pub struct Coordinator {
    address: SocketAddr,
    shared: Arc<Shared>,
}

struct Shared {
    secret: Secret,
    generation: Generation,
    limit: usize,
    stop: AtomicBool,
    open: AtomicUsize,
    state: Mutex<State>,
    notify: Box<dyn Fn(Notice) + Send + Sync>,
}

struct State {
    members: Membership,
    /// Connections of those who wait for the roster.
    waiting: HashMap<Rank, TcpStream>,
}

impl Coordinator {
    /// Listens at `address` (port 0 for a free one) for `world_size` ranks; `notify` is called from its threads.
    pub fn serve(
        address: SocketAddr,
        secret: Secret,
        generation: Generation,
        world_size: usize,
        notify: impl Fn(Notice) + Send + Sync + 'static,
    ) -> Result<Coordinator> {
        let listener = TcpListener::bind(address)?;
        let address = listener.local_addr()?;
        let state = State { members: Membership::new(generation, world_size), waiting: HashMap::new() };
        let shared = Arc::new(Shared {
            secret,
            generation,
            limit: world_size + SURPLUS,
            stop: AtomicBool::new(false),
            open: AtomicUsize::new(0),
            state: Mutex::new(state),
            notify: Box::new(notify),
        });
        let serving = Arc::clone(&shared);
        std::thread::Builder::new()
            .name("phalanx-coord".into())
            .spawn(move || accept(&listener, &serving))?;
        Ok(Coordinator { address, shared })
    }

    /// Where it listens.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Who hasn't come yet.
    pub fn missing(&self) -> Vec<u32> {
        self.shared.state().members.missing()
    }

    /// Tells those who wait that the others didn't come.
    pub fn give_up(&self, waited: Duration) {
        let mut state = self.shared.state();
        let message = ToWorker::Missing { seconds: waited.as_secs_f64(), missing: state.members.missing() };
        for (_, mut stream) in state.waiting.drain() {
            say(&mut stream, &message);
        }
    }
}

impl Drop for Coordinator {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::Relaxed);
        // A connection to itself wakes the thread that accepts; if none can be made, nothing is listening any more.
        let _ = TcpStream::connect_timeout(&self.address, Duration::from_secs(1));
    }
}

impl Shared {
    /// The state is whole between any two statements that could panic.
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }
}

fn accept(listener: &TcpListener, shared: &Arc<Shared>) {
    for stream in listener.incoming() {
        if shared.stop.load(Ordering::Relaxed) {
            return;
        }
        let Ok(stream) = stream else { continue };
        let from = stream.peer_addr().map_or_else(|_| "an unknown address".into(), |a| a.to_string());
        if shared.open.fetch_add(1, Ordering::Relaxed) >= shared.limit {
            shared.open.fetch_sub(1, Ordering::Relaxed);
            tracing::warn!(from, "refused a connection: {} are open", shared.limit);
            continue;
        }
        let serving = Arc::clone(shared);
        let thread = std::thread::Builder::new().name("phalanx-member".into()).spawn(move || {
            if let Err(reason) = serve_one(stream, &serving) {
                tracing::warn!(from, "refused a connection: {reason}");
            }
            serving.open.fetch_sub(1, Ordering::Relaxed);
        });
        if let Err(error) = thread {
            shared.open.fetch_sub(1, Ordering::Relaxed);
            tracing::warn!("refused a connection: no thread for it: {error}");
        }
    }
}

/// Serves one connection to its end; an error is why a newcomer was refused.
fn serve_one(mut stream: TcpStream, shared: &Shared) -> std::result::Result<(), String> {
    let text = |error: std::io::Error| error.to_string();
    stream.set_read_timeout(Some(NEWCOMER_LIMIT)).map_err(text)?;
    stream.set_write_timeout(Some(NEWCOMER_LIMIT)).map_err(text)?;
    stream.set_nodelay(true).map_err(text)?;
    // The coordinator is no rank; it speaks as rank 0 of the same generation.
    let hello = Hello { purpose: Link::purpose().into(), rank: Rank(0), generation: shared.generation };
    let peer =
        handshake(&mut stream, &shared.secret, Side::Accepted, &hello).map_err(|error| error.to_string())?;
    loop {
        // The end of the connection is the end of the worker, which whoever started it sees better.
        let Ok(frame) = read_frame(&mut stream, MAX_FRAME) else { return Ok(()) };
        stream.set_read_timeout(None).map_err(text)?;
        match serde_json::from_slice(&frame).map_err(|error| format!("rank {}: {error}", peer.rank))? {
            FromWorker::Join { address } => {
                let mut state = shared.state();
                match state.members.join(peer.rank, address) {
                    Decision::Refuse { reason } => {
                        let _ = stream.shutdown(Shutdown::Both);
                        return Err(reason);
                    }
                    Decision::Wait { .. } => {
                        state.waiting.insert(peer.rank, stream.try_clone().map_err(text)?);
                    }
                    Decision::Begin(roster) => {
                        // Told first, so that nothing a rank does afterwards can be told before it.
                        (shared.notify)(Notice::Complete);
                        let message = ToWorker::Roster(roster);
                        say(&mut stream, &message);
                        for (_, mut other) in state.waiting.drain() {
                            say(&mut other, &message);
                        }
                    }
                }
            }
            FromWorker::Fail { message, consequence } => {
                (shared.notify)(Notice::Failed { rank: peer.rank, message, consequence });
            }
        }
    }
}

/// A worker that can't be told has gone; whoever started it sees that.
fn say(stream: &mut TcpStream, message: &ToWorker) {
    let frame = serde_json::to_vec(message).expect("a message is always JSON");
    let _ = write_frame(stream, &frame);
}
