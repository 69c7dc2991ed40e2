//! A training run that faults are put to: a real agent with real workers, watched by the events that it tells.

mod agent;

pub(crate) use agent::{Agent, Heard};

use crate::args::WrongUsage;
use anyhow::{Context, Result, bail, ensure};
use nix::sys::signal::Signal;
use nix::unistd::Pid;
use phalanx::data::{CifarSet, write_synthetic_cifar};
use phalanx::{Event, Recipe};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus};
use std::sync::mpsc::{Receiver, RecvTimeoutError, sync_channel};
use std::time::{Duration, Instant};

/// How long a run may tell nothing.
pub(crate) const LIMIT: Duration = Duration::from_secs(120);
/// Events that wait to be looked at; they are looked at at once.
pub(crate) const QUEUE: usize = 4096;
/// Images in each file that is made up: an epoch of some hundred steps.
const PER_FILE: usize = 2_000;

/// A run on its way.
pub(crate) struct Trial {
    agent: Agent,
    out: PathBuf,
    events: Receiver<(Instant, Event)>,
}

impl Trial {
    /// Starts `phalanx train` with these arguments, and keeps its files in `out`.
    pub(crate) fn start(recipe: &str, out: &Path, args: &[String]) -> Result<Trial> {
        let (sender, events) = sync_channel(QUEUE);
        let hear = move |heard| match heard {
            Heard::Event(at, event) => sender.send((at, event)).is_ok(),
            Heard::End => false,
        };
        let agent = Agent::start(training(recipe, out, args)?, out.to_owned(), hear)?;
        Ok(Trial { agent, out: out.to_owned(), events })
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
        bail!("the run has ended before {workers} workers made step {from}")
    }

    /// The newest process that was started as this rank.
    pub(crate) fn worker(&self, rank: usize) -> Option<Pid> {
        self.agent.workers().get(&rank).copied()
    }

    /// Sends a signal to the agent.
    pub(crate) fn signal(&self, signal: Signal) -> Result<()> {
        self.agent.signal(signal)
    }

    /// Waits for the end; gives how it ended and what it said to people. Events that were not read are lost.
    pub(crate) fn end(self) -> Result<(ExitStatus, String)> {
        while self.next()?.is_some() {}
        self.agent.end()
    }
}

/// `phalanx train` with these arguments, which tells what happens as JSON and keeps its files in `out`.
pub(crate) fn training(recipe: &str, out: &Path, args: &[String]) -> Result<Command> {
    let mut command = Command::new(program()?);
    command.args(["train", recipe, "--json", "--out"]).arg(out).args(args);
    Ok(command)
}

/// This program.
pub(crate) fn program() -> Result<PathBuf> {
    std::env::current_exe().context("the path of this program")
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
