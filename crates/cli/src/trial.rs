//! A training run that faults are put to: a real agent with real workers, watched by the events that it tells.

use crate::args::WrongUsage;
use anyhow::{Context, Result, bail, ensure};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use phalanx::data::{CifarSet, write_synthetic_cifar};
use phalanx::{Event, Recipe};
use std::fs;
use std::io::{BufRead, BufReader, Read};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdout, Command, ExitStatus, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, sync_channel};
use std::time::{Duration, Instant};

/// How long a run may tell nothing.
const LIMIT: Duration = Duration::from_secs(120);
/// Events that wait to be looked at; they are looked at at once.
const QUEUE: usize = 4096;
/// Images in each file that is made up: an epoch of some hundred steps.
const PER_FILE: usize = 2_000;

/// A run on its way.
pub(crate) struct Trial {
    agent: Child,
    out: PathBuf,
    events: Receiver<(Instant, Event)>,
    /// What it says to people, once it has ended.
    said: std::thread::JoinHandle<String>,
}

impl Trial {
    /// Starts `phalanx train` with these arguments, and keeps its files in `out`.
    pub(crate) fn start(recipe: &str, out: &Path, args: &[String]) -> Result<Trial> {
        let mut command = Command::new(std::env::current_exe().context("the path of this program")?);
        command.args(["train", recipe, "--json", "--out"]).arg(out).args(args);
        for name in ["RANK", "WORLD_SIZE"] {
            command.env_remove(name);
        }
        let agent = command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn();
        let mut agent = agent.context("phalanx train can't be started")?;
        let lines = BufReader::new(agent.stdout.take().expect("it is piped"));
        let mut errors = agent.stderr.take().expect("it is piped");
        let (sender, events) = sync_channel(QUEUE);
        let tell = move || read(lines, |event| sender.send(event).is_ok());
        std::thread::Builder::new().name("trial-events".into()).spawn(tell)?;
        let said = std::thread::Builder::new().name("trial-errors".into()).spawn(move || {
            let mut bytes = Vec::new();
            // What can't be read is what a run that ended badly didn't say.
            let _ = errors.read_to_end(&mut bytes);
            String::from_utf8_lossy(&bytes).into_owned()
        })?;
        Ok(Trial { agent, out: out.to_owned(), events, said })
    }

    /// The next event, with the time at which it came; none at the end of the run.
    pub(crate) fn next(&self) -> Result<Option<(Instant, Event)>> {
        match self.events.recv_timeout(LIMIT) {
            Ok(event) => Ok(Some(event)),
            Err(RecvTimeoutError::Disconnected) => Ok(None),
            Err(RecvTimeoutError::Timeout) => {
                bail!("the run has told nothing for {LIMIT:.0?}; its files are in {}", self.out.display())
            }
        }
    }

    /// Reads on to the first step after `from` that so many workers have made.
    pub(crate) fn step_of(&mut self, workers: usize, from: u64) -> Result<u64> {
        while let Some((_, event)) = self.next()? {
            if let Event::Step { step, world_size, .. } = event
                && world_size == workers
                && step >= from
            {
                return Ok(step);
            }
        }
        bail!("the run has ended: {}", self.say_why())
    }

    /// The newest process that was started as this rank.
    pub(crate) fn worker(&self, rank: usize) -> Option<Pid> {
        let (rank, out) = (format!("RANK={rank}"), format!("PHALANX_RUN_DIR={}", self.out.display()));
        let is_it = |pid: &i32| {
            let variables = fs::read(format!("/proc/{pid}/environ")).unwrap_or_default();
            let has = |wanted: &str| variables.split(|&byte| byte == 0).any(|v| v == wanted.as_bytes());
            has(&rank) && has(&out)
        };
        let entries = fs::read_dir("/proc").ok()?.filter_map(Result::ok);
        let pids = entries.filter_map(|entry| entry.file_name().to_str()?.parse::<i32>().ok());
        pids.filter(is_it).max().map(Pid::from_raw)
    }

    /// Sends a signal to the agent.
    pub(crate) fn signal(&self, signal: Signal) -> Result<()> {
        let agent = Pid::from_raw(self.agent.id() as i32);
        kill(agent, signal).with_context(|| format!("the agent {agent} can't be sent {signal}"))
    }

    /// Waits for the end; gives how it ended and what it said to people. Events that were not read are lost.
    pub(crate) fn end(mut self) -> Result<(ExitStatus, String)> {
        while self.next()?.is_some() {}
        let status = self.agent.wait()?;
        let said = self.said.join().unwrap_or_default();
        Ok((status, said))
    }

    fn say_why(&mut self) -> String {
        let _ = self.agent.kill();
        self.agent.wait().map_or_else(|error| error.to_string(), |status| status.to_string())
    }
}

/// Hands over every event of a run until nobody wants more.
fn read(lines: BufReader<ChildStdout>, mut take: impl FnMut((Instant, Event)) -> bool) {
    for line in lines.lines().map_while(Result::ok) {
        let now = Instant::now();
        let Ok(event) = serde_json::from_str(&line) else { return };
        if !take((now, event)) {
            return;
        }
    }
}

/// What `phalanx train` is told beside the recipe: where its data lies, which is made up in `folder` where it can be.
pub(crate) fn data_for(recipe: &str, folder: &Path) -> Result<Vec<String>> {
    let loaded = Recipe::load(recipe, &[]).map_err(|error| WrongUsage(error.to_string()))?;
    let set = match loaded.data.name.as_str() {
        "cifar10" => CifarSet::Ten,
        "cifar100" => CifarSet::Hundred,
        _ => return Ok(Vec::new()),
    };
    let data = folder.join("data");
    fs::create_dir_all(&data)?;
    write_synthetic_cifar(&data, set, PER_FILE)?;
    let data = data.to_str().context("the folder for temporary files has no name in UTF-8")?;
    ensure!(!data.is_empty(), "no folder for images");
    Ok(vec!["--data".into(), data.to_owned()])
}
