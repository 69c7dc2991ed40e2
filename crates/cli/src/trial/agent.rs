//! An agent with its workers: a process, the events that they tell, and what it says to people.

use anyhow::{Context, Result, bail};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use phalanx::Event;
use phalanx_job::{Environ, names, processes};
use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Read};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdout, Command, ExitStatus, Stdio};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// How long one that has told its last may take to end.
const END: Duration = Duration::from_secs(60);
const LOOK: Duration = Duration::from_millis(2);

/// An agent that was started. It is killed when this is dropped.
pub(crate) struct Agent {
    process: Child,
    folder: PathBuf,
    /// What it says to people, once it has ended.
    said: Option<JoinHandle<String>>,
}

/// What is heard of it.
pub(crate) enum Heard {
    /// One of its workers has told this.
    Event(Instant, Event),
    /// Nothing more will come.
    End,
}

impl Agent {
    /// Starts a command that is outside of any run and whose run directory is `folder`; what it tells goes to `hear`, until
    /// that wants no more.
    pub(crate) fn start(
        mut command: Command,
        folder: PathBuf,
        hear: impl FnMut(Heard) -> bool + Send + 'static,
    ) -> Result<Agent> {
        // In a job of several nodes it is for this one all the same.
        for name in ["RANK", "WORLD_SIZE", "SLURM_JOB_NUM_NODES"] {
            command.env_remove(name);
        }
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        // Whatever ends this process, none of it is left.
        phalanx_launch::end_with_caller(&mut command);
        let program = command.get_program().to_string_lossy().into_owned();
        let mut process = command.spawn().with_context(|| format!("{program} can't be started"))?;
        let lines = BufReader::new(process.stdout.take().expect("it is piped"));
        let mut errors = process.stderr.take().expect("it is piped");
        let mut agent = Agent { process, folder, said: None };
        std::thread::Builder::new().name("trial-events".into()).spawn(move || read(lines, hear))?;
        let said = std::thread::Builder::new().name("trial-errors".into()).spawn(move || {
            let mut bytes = Vec::new();
            // What can't be read is what a run that ended badly didn't say.
            let _ = errors.read_to_end(&mut bytes);
            String::from_utf8_lossy(&bytes).into_owned()
        })?;
        agent.said = Some(said);
        Ok(agent)
    }

    /// Its process.
    pub(crate) fn pid(&self) -> Pid {
        Pid::from_raw(self.process.id() as i32)
    }

    /// Sends it a signal.
    pub(crate) fn signal(&self, signal: Signal) -> Result<()> {
        let agent = self.pid();
        kill(agent, signal).with_context(|| format!("the agent {agent} can't be sent {signal}"))
    }

    /// The newest process of each rank that its workers were started as.
    pub(crate) fn workers(&self) -> BTreeMap<usize, Pid> {
        workers(&self.folder)
    }

    /// Waits for its end; gives how it ended and what it said to people.
    pub(crate) fn end(mut self) -> Result<(ExitStatus, String)> {
        let until = Instant::now() + END;
        let status = loop {
            if let Some(status) = self.process.try_wait()? {
                break status;
            }
            if Instant::now() > until {
                bail!("the agent {} has told its last and hasn't ended within {END:.0?}", self.pid());
            }
            std::thread::sleep(LOOK);
        };
        let said = self.said.take().map(|said| said.join().unwrap_or_default());
        Ok((status, said.unwrap_or_default()))
    }
}

impl Drop for Agent {
    fn drop(&mut self) {
        // One that has ended is beyond it.
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// Hands over every event of a run until nobody wants more. A line that a killed worker left half written is none.
fn read(lines: BufReader<ChildStdout>, mut hear: impl FnMut(Heard) -> bool) {
    for line in lines.lines().map_while(Result::ok) {
        let now = Instant::now();
        let Ok(event) = serde_json::from_str(&line) else { continue };
        if !hear(Heard::Event(now, event)) {
            return;
        }
    }
    hear(Heard::End);
}

/// The newest process of each rank that was started for this run directory.
fn workers(folder: &Path) -> BTreeMap<usize, Pid> {
    let rank_of = |pid: i32| {
        let variables = Environ::of(pid)?;
        let is_its = variables.get(names::RUN_DIR).is_some_and(|given| Path::new(given) == folder);
        variables.get(names::RANK).filter(|_| is_its)?.parse::<usize>().ok()
    };
    let mut pids: Vec<i32> = processes().collect();
    pids.sort_unstable();
    pids.into_iter().filter_map(|pid| Some((rank_of(pid)?, Pid::from_raw(pid)))).collect()
}
