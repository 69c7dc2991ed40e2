//! A node of a pool: starts agents and stops them, as it is told, and says how they ended.
//!
//! It goes on while the pool is away, and looks for it. It says all that it knows when it is back; that an agent has ended it
//! says until that is noted. Its agents end with its process.

use crate::client::Line;
use crate::error::Error;
use crate::job::{AgentId, Ending};
use crate::message::{BEAT, Ended, FromNode, Here, NODE_PURPOSE, Running, SILENCE, Start, ToNode};
use nix::errno::Errno;
use nix::sys::signal::{Signal, kill};
use nix::sys::wait::{Id, WaitPidFlag, waitid};
use nix::unistd::Pid;
use phalanx_wire::Secret;
use std::collections::BTreeMap;
use std::io;
use std::net::{Shutdown, SocketAddr, TcpListener};
use std::os::unix::process::ExitStatusExt;
use std::process::{Child, Command, ExitStatus};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, SendError, SyncSender, sync_channel};
use std::thread;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

/// How long an agent may take to end with a checkpoint before it gets SIGTERM.
const DRAIN_LIMIT: Duration = Duration::from_secs(60);
/// How long it may take after SIGTERM: it gives its workers some of that before it kills them.
const TERM_LIMIT: Duration = Duration::from_secs(60);
/// How long to wait before the pool is looked for again.
const REDIAL: Duration = Duration::from_secs(1);
/// What was heard and not heeded yet; whoever says more waits.
const NEWS: usize = 1024;
/// How long a node that leaves waits for a pool that is away to hear of it.
const FAREWELL: Duration = Duration::from_secs(5);

/// Makes the command of an agent whose run meets at this endpoint. An error of the kind `InvalidInput` is one of the job, any other
/// one of the node. It is called on a thread of the agent's own, which starts it and lasts as long: a folder that doesn't answer keeps
/// nobody else.
pub type AgentCommand = Arc<dyn Fn(&Start, &str) -> io::Result<Command> + Send + Sync>;

/// What a node is.
pub struct NodeConfig {
    /// Where the pool is.
    pub pool: SocketAddr,
    /// What lets it in.
    pub secret: Secret,
    /// What it is called, as no other node of the pool.
    pub name: String,
    /// How many workers it has room for.
    pub slots: u32,
    /// The address at which others reach it; none for that from which it reaches the pool.
    pub address: Option<String>,
    /// Makes the commands of agents.
    pub command: AgentCommand,
    /// What happens, in lines for people.
    pub say: Box<dyn Fn(&str)>,
}

/// Has a node leave, from another thread: asked once its agents end as their jobs want it, asked again at once.
#[derive(Clone)]
pub struct Leaver(SyncSender<News>);

impl Leaver {
    /// Has it leave.
    pub fn leave(&self) {
        // One that has left needs no telling.
        let _ = self.0.send(News::Leave);
    }
}

/// Something that a node hears.
enum News {
    Connected(Line),
    Heard(ToNode),
    Lost(Error),
    Begun(AgentId, io::Result<Pid>),
    /// One that has ended, and still has its process number.
    Ended(AgentId, Child),
    Leave,
}

/// An agent that runs, or is being started.
struct Agent {
    /// The job's.
    name: String,
    /// None until it has begun.
    pid: Option<Pid>,
    slots: Vec<u32>,
    endpoint: String,
    ending: Ending,
    /// How it is to end, once it has begun.
    asked: Option<Ending>,
    /// Since it was told to stop: what it is sent next, and when.
    stops: Option<(Signal, Instant)>,
}

impl Agent {
    fn is_to_stop(&self) -> bool {
        self.asked.is_some() || self.stops.is_some()
    }
}

struct Node {
    config: NodeConfig,
    process: String,
    line: Option<Line>,
    agents: BTreeMap<AgentId, Agent>,
    /// Those whose ends aren't noted yet.
    ended: BTreeMap<AgentId, Ended>,
    news: SyncSender<News>,
    leaves: Option<Instant>,
    /// Why the pool won't have it.
    refused: Option<String>,
    /// Whether it was said that the pool is away.
    is_told: bool,
}

/// Runs a node until it is asked to leave; `leaver` is given what asks it.
pub fn run_node(config: NodeConfig, leaver: impl FnOnce(Leaver)) -> Result<(), Error> {
    let (sender, news) = sync_channel(NEWS);
    leaver(Leaver(sender.clone()));
    let since = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_nanos());
    let process = format!("{}-{since}", std::process::id());
    let (agents, ended) = (BTreeMap::new(), BTreeMap::new());
    let dialing = Dialing { pool: config.pool, secret: config.secret.clone(), news: sender.clone() };
    let (line, leaves, refused, is_told) = (None, None, None, false);
    let node = Node { config, process, line, agents, ended, news: sender, leaves, refused, is_told };
    thread::Builder::new()
        .name("phalanx-pool-line".into())
        .spawn(move || dialing.keep())
        .map_err(|source| Error::System { what: "a thread for the connection to the pool", source })?;
    node.run(&news)
}

impl Node {
    fn run(mut self, news: &Receiver<News>) -> Result<(), Error> {
        let mut beat_at = Instant::now() + BEAT;
        loop {
            match news.recv_timeout(beat_at.saturating_duration_since(Instant::now())) {
                Ok(News::Connected(line)) => self.meet(line)?,
                Ok(News::Heard(message)) => self.heed(message),
                Ok(News::Lost(error)) => self.miss(error)?,
                Ok(News::Begun(id, begun)) => self.begun(id, begun),
                Ok(News::Ended(id, mut child)) => self.bury(id, child.wait()),
                Ok(News::Leave) => self.leave(),
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => unreachable!("this holds the other end itself"),
            }
            if Instant::now() >= beat_at {
                self.say(&FromNode::Beat);
                self.insist();
                beat_at = Instant::now() + BEAT;
            }
            // What hasn't begun by then won't once this has ended.
            let is_left = |since: Instant| {
                self.agents.values().all(|agent| agent.pid.is_none() && since.elapsed() > FAREWELL)
            };
            if let Some(since) = self.leaves.filter(|since| is_left(*since)) {
                let is_known = self.line.is_some() && self.ended.is_empty() || since.elapsed() > FAREWELL;
                if let Some(reason) = self.refused {
                    return Err(Error::Refused { reason });
                }
                if is_known {
                    return Ok(());
                }
            }
        }
    }

    /// What can't be said is said when the pool is back.
    fn say(&self, message: &FromNode) {
        if let Some(line) = &self.line
            && line.say(message).is_err()
        {
            // Whoever hears at it finds that out.
            let _ = line.channel.shutdown(Shutdown::Both);
        }
    }

    /// The pool is there.
    fn meet(&mut self, line: Line) -> Result<(), Error> {
        if self.config.address.is_none() {
            let local = line.channel.local_addr();
            let local = local.map_err(|source| Error::System { what: "the address of this node", source })?;
            self.config.address = Some(local.ip().to_string());
        }
        let running = self.agents.iter().map(|(id, agent)| Running {
            id: *id,
            slots: agent.slots.clone(),
            endpoint: agent.endpoint.clone(),
            stops: agent.is_to_stop(),
        });
        let here = Here {
            name: self.config.name.clone(),
            process: self.process.clone(),
            address: self.address(),
            slots: self.config.slots,
            leaves: self.leaves.is_some(),
            running: running.collect(),
            ended: self.ended.values().cloned().collect(),
        };
        self.line = Some(line);
        self.is_told = false;
        self.say(&FromNode::Here(here));
        (self.config.say)(&format!("the pool at {} has this node", self.config.pool));
        Ok(())
    }

    fn address(&self) -> String {
        self.config.address.clone().unwrap_or_default()
    }

    /// The pool is away.
    fn miss(&mut self, error: Error) -> Result<(), Error> {
        self.line = None;
        match error {
            // It won't be another before somebody changes something.
            error @ Error::Handshake { .. } if self.agents.is_empty() => Err(error),
            error => {
                if !std::mem::replace(&mut self.is_told, true) && self.refused.is_none() {
                    (self.config.say)(&format!("{error}\nlooking for it again and again"));
                }
                Ok(())
            }
        }
    }

    fn heed(&mut self, message: ToNode) {
        match message {
            ToNode::Beat => {}
            ToNode::Refused { reason } => {
                self.refused = Some(reason);
                self.leave();
            }
            ToNode::Start(start) => self.start(*start),
            ToNode::Stop { id, ending } => self.stop(id, ending),
            ToNode::Noted { id } => drop(self.ended.remove(&id)),
        }
    }

    fn start(&mut self, start: Start) {
        let id = start.id;
        if self.agents.contains_key(&id) || self.ended.contains_key(&id) {
            return;
        }
        if self.leaves.is_some() {
            // It crossed what this has just said.
            return self.tell_end(Ended { id, code: None, words: None, stops: true });
        }
        if let Err(error) = self.begin(start) {
            self.begun(id, Err(error));
        }
    }

    /// Has an agent started, which [`Node::begun`] hears of.
    fn begin(&mut self, start: Start) -> io::Result<()> {
        let (id, ending) = (start.id, start.spec.ending);
        let endpoint = start.endpoint.clone().map_or_else(|| self.free_endpoint(), Ok);
        let (name, slots) = (start.spec.name.clone(), start.slots.clone());
        let known = endpoint.as_ref().cloned().unwrap_or_default();
        let agent = Agent { name, pid: None, slots, endpoint: known, ending, asked: None, stops: None };
        self.agents.insert(id, agent);
        let (endpoint, command, news) = (endpoint?, Arc::clone(&self.config.command), self.news.clone());
        let thread = thread::Builder::new().name("phalanx-pool-agent".into());
        let started = thread.spawn(move || {
            // The node may have ended before it hears any of this.
            match command(&start, &endpoint).and_then(|mut command| command.spawn()) {
                Ok(child) => {
                    let pid = Pid::from_raw(child.id() as i32);
                    let _ = news.send(News::Begun(id, Ok(pid)));
                    wait_out(pid);
                    let _ = news.send(News::Ended(id, child));
                }
                Err(error) => drop(news.send(News::Begun(id, Err(error)))),
            }
        });
        started.map(drop)
    }

    /// An agent has begun, or can't.
    fn begun(&mut self, id: AgentId, begun: io::Result<Pid>) {
        let Some(agent) = self.agents.get_mut(&id) else { return };
        match begun {
            Ok(pid) => {
                agent.pid = Some(pid);
                let (endpoint, asked) = (agent.endpoint.clone(), agent.asked.take());
                (self.config.say)(&format!("{id} ({}) has begun", agent.name));
                self.say(&FromNode::Began { id, endpoint });
                asked.into_iter().for_each(|ending| self.stop(id, ending));
            }
            Err(error) => {
                let (name, stops) = (agent.name.clone(), agent.is_to_stop());
                self.agents.remove(&id);
                (self.config.say)(&format!("{id} ({name}) can't be started: {error}"));
                let words = Some(format!("node {}: {error}", self.config.name));
                // A folder that isn't there is the job's affair.
                let code = (error.kind() == io::ErrorKind::InvalidInput).then_some(1);
                self.tell_end(Ended { id, code, words, stops });
            }
        }
    }

    /// A port of this node that is free now; who takes it in the meantime has the agent say so.
    fn free_endpoint(&self) -> io::Result<String> {
        let address = self.address();
        let port = TcpListener::bind((address.as_str(), 0))?.local_addr()?.port();
        Ok(if address.contains(':') { format!("[{address}]:{port}") } else { format!("{address}:{port}") })
    }

    fn stop(&mut self, id: AgentId, ending: Ending) {
        let Some(agent) = self.agents.get_mut(&id) else { return };
        let Some(pid) = agent.pid else {
            agent.asked = Some(ending);
            return;
        };
        let now = Instant::now();
        let (first, next) = match ending {
            Ending::Drain if agent.stops.is_some() => return,
            Ending::Drain => (Signal::SIGUSR1, (Signal::SIGTERM, now + DRAIN_LIMIT)),
            Ending::Terminate => (Signal::SIGTERM, (Signal::SIGKILL, now + TERM_LIMIT)),
        };
        // Even one that has ended has its number until that is heard.
        let _ = kill(pid, first);
        agent.stops = Some(next);
    }

    /// Sends those that don't stop what they are sent next.
    fn insist(&mut self) {
        let now = Instant::now();
        for (id, agent) in &mut self.agents {
            if let (Some(pid), Some((signal, at))) = (agent.pid, agent.stops)
                && now >= at
            {
                (self.config.say)(&format!("{id} hasn't stopped yet, and gets {signal}"));
                let _ = kill(pid, signal);
                agent.stops = Some((Signal::SIGKILL, now + TERM_LIMIT));
            }
        }
    }

    fn bury(&mut self, id: AgentId, status: io::Result<ExitStatus>) {
        let Some(agent) = self.agents.remove(&id) else { return };
        let (code, words) = match status {
            Ok(status) => (status.code().or_else(|| status.signal().map(|signal| 128 + signal)), None),
            Err(error) => (None, Some(format!("node {} lost sight of it: {error}", self.config.name))),
        };
        let how = code.map_or("has ended".to_owned(), |code| format!("has ended with {code}"));
        (self.config.say)(&format!("{id} {how}"));
        self.tell_end(Ended { id, code, words, stops: agent.stops.is_some() });
    }

    fn tell_end(&mut self, ended: Ended) {
        self.say(&FromNode::Ended(ended.clone()));
        self.ended.insert(ended.id, ended);
    }

    fn leave(&mut self) {
        let is_again = self.leaves.is_some();
        self.leaves.get_or_insert_with(Instant::now);
        if !is_again {
            self.say(&FromNode::Leaves);
        }
        let all: Vec<(AgentId, Ending)> = self.agents.iter().map(|(id, agent)| (*id, agent.ending)).collect();
        for (id, ending) in all {
            self.stop(id, if is_again { Ending::Terminate } else { ending });
        }
    }
}

/// Waits until a process has ended, which keeps its number.
fn wait_out(pid: Pid) {
    let keeping = WaitPidFlag::WEXITED | WaitPidFlag::WNOWAIT;
    while waitid(Id::Pid(pid), keeping) == Err(Errno::EINTR) {}
}

/// Looks for the pool, and hears what it says.
struct Dialing {
    pool: SocketAddr,
    secret: Secret,
    news: SyncSender<News>,
}

impl Dialing {
    /// Until the node has ended.
    fn keep(self) {
        while self.hear_out().is_ok() {
            thread::sleep(REDIAL);
        }
    }

    /// One connection, to its end.
    fn hear_out(&self) -> Result<(), SendError<News>> {
        let line = match Line::dial(self.pool, &self.secret, NODE_PURPOSE, SILENCE) {
            Ok(line) => line,
            Err(error) => return self.news.send(News::Lost(error)),
        };
        self.news.send(News::Connected(line.clone()))?;
        loop {
            match line.hear() {
                Ok(message) => self.news.send(News::Heard(message))?,
                Err(error) => {
                    let _ = line.channel.shutdown(Shutdown::Both);
                    return self.news.send(News::Lost(error));
                }
            }
        }
    }
}
