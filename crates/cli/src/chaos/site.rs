//! Where a run happens: one machine with an agent, or several nodes, which are agents on this host that meet over 127.0.0.1.

use super::plan::Nodes;
use crate::trial::{Agent, Heard, LIMIT, QUEUE, program, training};
use anyhow::{Context, Result, bail};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use phalanx::Event;
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::fs::{self, File};
use std::io::Write;
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::path::PathBuf;
use std::process::{Command, ExitStatus};
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, sync_channel};
use std::time::{Duration, Instant};

/// How often what nobody tells is looked at.
const LOOK: Duration = Duration::from_millis(10);
/// More restarts than any campaign has faults.
pub(super) const RESTARTS: u64 = 1_000_000;
/// Nothing that small models do takes longer.
const HANGS: &str = "start=30,step=10,evaluation=10,checkpoint=30";
/// What a shell gives for SIGTERM.
const TERMINATED: i32 = 128 + 15;

/// What is started.
pub(super) struct Setup {
    pub(super) recipe: String,
    /// What training is told.
    pub(super) args: Vec<String>,
    /// Holds all that the campaign writes.
    pub(super) folder: PathBuf,
    /// Of each machine.
    pub(super) workers: usize,
    pub(super) nodes: Option<Nodes>,
}

impl Setup {
    /// Where the run keeps its files.
    pub(super) fn out(&self) -> PathBuf {
        self.folder.join("disturbed")
    }

    /// What the run tells.
    pub(super) fn events(&self) -> PathBuf {
        self.out().join("events.jsonl")
    }
}

/// The agents of a run.
pub(super) struct Site<'a> {
    setup: &'a Setup,
    resumes: bool,
    endpoint: SocketAddr,
    agents: BTreeMap<usize, Agent>,
    /// The number of the next one.
    next: usize,
    /// Those that came later and aren't known to take part yet.
    coming: BTreeSet<usize>,
    /// Those that something was done to which ends them.
    hurt: BTreeMap<usize, Hurt>,
    /// How the others ended, and what they said.
    ends: Vec<(usize, ExitStatus, String)>,
    sender: SyncSender<(usize, Heard)>,
    news: Receiver<(usize, Heard)>,
    /// What was heard and not looked at yet.
    events: VecDeque<Event>,
    /// Whether nobody is to come any more.
    closing: bool,
    /// Whether the end of the run was heard.
    over: bool,
}

/// What was done to a node.
#[derive(Clone, Copy, PartialEq)]
enum Hurt {
    Lost,
    /// It was asked to leave, and says with its exit code that it did.
    Asked,
}

impl Site<'_> {
    /// Starts all agents that there may be.
    pub(super) fn start(setup: &Setup, resumes: bool) -> Result<Site<'_>> {
        let (sender, news) = sync_channel(QUEUE);
        let endpoint = TcpListener::bind("127.0.0.1:0").and_then(|listener| listener.local_addr());
        let mut site = Site {
            setup,
            resumes,
            endpoint: endpoint.context("no port of 127.0.0.1 is free")?,
            agents: BTreeMap::new(),
            next: 0,
            coming: BTreeSet::new(),
            hurt: BTreeMap::new(),
            ends: Vec::new(),
            sender,
            news,
            events: VecDeque::new(),
            closing: false,
            over: false,
        };
        site.add()?;
        if let Some(nodes) = setup.nodes {
            site.wait(|site| site.is_hosted(), "the first agent hosts no coordinator")?;
            (1..nodes.most).try_for_each(|_| site.add())?;
        }
        site.coming.clear();
        Ok(site)
    }

    /// Whether somebody listens at the endpoint.
    fn is_hosted(&self) -> bool {
        TcpStream::connect_timeout(&self.endpoint, LOOK).is_ok()
    }

    /// Starts another agent, unless the run is over.
    pub(super) fn add(&mut self) -> Result<()> {
        if self.over {
            return Ok(());
        }
        let (node, sender) = (self.next, self.sender.clone());
        let (command, folder) = self.command(node)?;
        let hear = move |heard| sender.send((node, heard)).is_ok();
        self.agents.insert(node, Agent::start(command, folder, hear)?);
        self.coming.insert(node);
        self.next += 1;
        Ok(())
    }

    /// The command of an agent, and its run directory.
    fn command(&self, node: usize) -> Result<(Command, PathBuf)> {
        let Setup { recipe, args, folder, workers, nodes } = self.setup;
        let out = self.setup.out();
        let number = |number: u64| number.to_string();
        let mut args = args.clone();
        args.extend(self.resumes.then(|| "--resume".to_owned()));
        let numbers = [
            "--nproc-per-node".into(),
            number(*workers as u64),
            "--max-restarts".into(),
            number(RESTARTS),
            "--hang-timeout".into(),
            HANGS.into(),
        ];
        let Some(Nodes { least, most }) = nodes else {
            args.extend(numbers);
            return Ok((training(recipe, &out, &args)?, out));
        };
        let training = training(recipe, &out, &args)?;
        let own = folder.join(format!("node-{node}"));
        let mut command = Command::new(program()?);
        command.args(["run", "--no-prefix", "--rdzv-id", "chaos"]).args(numbers);
        command.args(["--rdzv-conf", "last_call_timeout=1,join_timeout=60"]);
        command.args(["--nnodes", &format!("{least}:{most}"), "--rdzv-endpoint", &self.endpoint.to_string()]);
        command.arg("--out").arg(&own).arg("--").arg(training.get_program()).args(training.get_args());
        // Their secret is their own, and they are to be as far apart as nodes are.
        command.env_remove("PHALANX_SECRET_FILE").env("XDG_CONFIG_HOME", folder.join("config"));
        command.env("PHALANX_TRANSPORT", "tcp");
        Ok((command, own))
    }

    /// The next event; none when all agents have ended.
    pub(super) fn next(&mut self) -> Result<Option<Event>> {
        let since = Instant::now();
        loop {
            if let Some(event) = self.events.pop_front() {
                return Ok(Some(event));
            }
            if self.agents.is_empty() {
                return Ok(None);
            }
            if since.elapsed() > LIMIT {
                bail!("the run has told nothing for {LIMIT:.0?}:\n{}", self.said());
            }
            self.hear(LIMIT)?;
        }
    }

    /// Hears what comes within this time, if anything does.
    fn hear(&mut self, limit: Duration) -> Result<()> {
        match self.news.recv_timeout(limit) {
            Ok((_, Heard::Event(_, event))) => {
                match event {
                    Event::Start { .. } | Event::Members { .. } => self.note_who_came(),
                    // At once, though it may be long until it is looked at: who came then would begin another run.
                    Event::Done { .. } => {
                        self.over = true;
                        self.close();
                    }
                    _ => {}
                }
                self.events.push_back(event);
                Ok(())
            }
            Ok((node, Heard::End)) => self.ended(node),
            Err(RecvTimeoutError::Timeout | RecvTimeoutError::Disconnected) => Ok(()),
        }
    }

    fn note_who_came(&mut self) {
        let Site { coming, agents, .. } = self;
        coming.retain(|node| agents.get(node).is_some_and(|agent| agent.workers().is_empty()));
    }

    fn ended(&mut self, node: usize) -> Result<()> {
        let Some(agent) = self.agents.remove(&node) else { return Ok(()) };
        self.coming.remove(&node);
        let (status, said) = agent.end()?;
        self.keep(&format!("node {node}, {status}:\n{said}\n"))?;
        match self.hurt.get(&node) {
            // The run may be over before what is told of it was heard, and so before it was asked.
            Some(Hurt::Asked) if status.success() && self.is_over()? => {}
            Some(Hurt::Asked) if !self.closing && status.code() != Some(TERMINATED) => {
                bail!("node {node} was asked to leave and ended with {status}:\n{said}");
            }
            Some(_) => {}
            None => self.ends.push((node, status, said)),
        }
        self.keep_enough()
    }

    /// Writes down what an agent has said by its end, for who wants to know why the run ended as it did.
    fn keep(&self, said: &str) -> Result<()> {
        let path = self.setup.folder.join("said.txt");
        let file = File::options().append(true).create(true).open(&path);
        file.and_then(|mut file| file.write_all(said.as_bytes()))
            .with_context(|| format!("{}", path.display()))
    }

    /// Whether the run has told of its end.
    fn is_over(&self) -> Result<bool> {
        let events = self.setup.events();
        let text = fs::read_to_string(&events).with_context(|| format!("{}", events.display()))?;
        let last = text.lines().next_back().and_then(|line| serde_json::from_str(line).ok());
        Ok(matches!(last, Some(Event::Done { .. })))
    }

    /// Has others come where there are too few.
    pub(super) fn keep_enough(&mut self) -> Result<()> {
        let least = self.setup.nodes.map_or(0, |nodes| nodes.least);
        while !self.closing && !self.agents.is_empty() && self.here().len() < least && self.has_room() {
            self.add()?;
        }
        Ok(())
    }

    /// Whether another node finds a place, whoever comes back that was cut off.
    pub(super) fn has_room(&self) -> bool {
        self.setup.nodes.is_none_or(|nodes| self.agents.len() < nodes.most)
    }

    /// The nodes that nothing was done to, the first one first.
    pub(super) fn here(&self) -> Vec<usize> {
        self.agents.keys().copied().filter(|node| !self.hurt.contains_key(node)).collect()
    }

    /// Those of them that are known to take part.
    pub(super) fn taking_part(&self) -> Vec<usize> {
        self.here().into_iter().filter(|node| !self.coming.contains(node)).collect()
    }

    /// The workers that run, in order.
    pub(super) fn workers(&self) -> Vec<Pid> {
        let here = self.agents.iter().filter(|(node, _)| !self.hurt.contains_key(node));
        here.flat_map(|(_, agent)| agent.workers().into_values()).collect()
    }

    /// The process of an agent.
    pub(super) fn agent(&self, node: usize) -> Option<Pid> {
        self.agents.get(&node).map(Agent::pid)
    }

    /// Sends a signal to the first agent.
    pub(super) fn signal_first(&self, signal: Signal) -> Result<()> {
        let first = self.agents.values().next().context("no agent is left")?;
        first.signal(signal)
    }

    /// Asks all agents to end.
    pub(super) fn ask_all(&self) {
        // One that has ended needs no asking.
        self.agents.values().for_each(|agent| _ = agent.signal(Signal::SIGTERM));
    }

    /// Something was done to a node that ends it.
    pub(super) fn lose(&mut self, node: usize) {
        self.hurt.insert(node, Hurt::Lost);
    }

    /// Kills a node.
    pub(super) fn kill(&mut self, node: usize) {
        self.lose(node);
        // One that has ended is beyond it.
        let _ = self.agent(node).map(|agent| kill(agent, Signal::SIGKILL));
    }

    /// Has all agents and workers stand still for this long.
    pub(super) fn freeze(&mut self, how_long: Duration) -> Result<()> {
        let agents = self.agents.values().map(Agent::pid);
        let stopped: Vec<Pid> = agents.chain(self.workers()).collect();
        // One that has ended is beyond it.
        let send = |signal| stopped.iter().for_each(|pid| _ = kill(*pid, signal));
        send(Signal::SIGSTOP);
        let until = Instant::now() + how_long;
        while let Some(left) = until.checked_duration_since(Instant::now()) {
            self.hear(left)?;
        }
        send(Signal::SIGCONT);
        Ok(())
    }

    /// Asks a node to leave and has another come: first that where too few would be left.
    pub(super) fn replace(&mut self, node: usize) -> Result<()> {
        let others = self.taking_part().into_iter().filter(|other| *other != node).count();
        let is_enough = self.setup.nodes.is_some_and(|nodes| others >= nodes.least);
        if !is_enough {
            if self.coming.iter().all(|other| *other == node) && self.has_room() {
                self.add()?;
            }
            let newest = self.next - 1;
            let is_in = |site: &mut Site<'_>| {
                site.agents.get(&newest).is_none_or(|agent| !agent.workers().is_empty())
            };
            self.wait(is_in, "a node that came isn't given a rank")?;
        }
        // One that has only just been started may not listen yet, and ends by the signal.
        let hurt = if self.coming.contains(&node) { Hurt::Lost } else { Hurt::Asked };
        self.hurt.insert(node, hurt);
        self.agents.get(&node).map(|agent| agent.signal(Signal::SIGTERM)).transpose()?;
        self.wait(|site| !site.agents.contains_key(&node), "a node that was asked to leave stays")?;
        if is_enough { self.add() } else { Ok(()) }
    }

    /// Hears on until this is so.
    pub(super) fn wait(&mut self, mut is_so: impl FnMut(&mut Self) -> bool, otherwise: &str) -> Result<()> {
        let until = Instant::now() + LIMIT;
        while !is_so(self) && !self.agents.is_empty() {
            if Instant::now() > until {
                bail!("{otherwise} within {LIMIT:.0?}:\n{}", self.said());
            }
            self.hear(LOOK)?;
        }
        Ok(())
    }

    /// Whether the run is over, which may have been heard and not looked at yet.
    pub(super) fn has_ended(&self) -> bool {
        self.over
    }

    /// What was heard and not looked at yet.
    pub(super) fn heard(&self) -> impl Iterator<Item = &Event> {
        self.events.iter()
    }

    /// The run is about to end, and whoever isn't in yet would begin another.
    pub(super) fn close(&mut self) {
        self.closing = true;
        // Those that were given a rank are told of the end.
        self.note_who_came();
        std::mem::take(&mut self.coming).into_iter().for_each(|node| self.kill(node));
    }

    /// It isn't.
    pub(super) fn reopen(&mut self) -> Result<()> {
        self.closing = self.over;
        self.keep_enough()
    }

    /// How the agents ended that nothing was done to, and what they said.
    pub(super) fn ends(self) -> Vec<(usize, ExitStatus, String)> {
        self.ends
    }

    /// What all agents that are left have said, which ends them.
    fn said(&mut self) -> String {
        let mut said: Vec<String> = self
            .ends
            .drain(..)
            .map(|(node, status, said)| format!("node {node}, {status}:\n{said}"))
            .collect();
        for (node, agent) in std::mem::take(&mut self.agents) {
            // One that has ended is beyond it.
            let _ = agent.signal(Signal::SIGKILL);
            said.extend(agent.end().map(|(_, said)| format!("node {node}:\n{said}")));
        }
        said.join("\n")
    }
}
