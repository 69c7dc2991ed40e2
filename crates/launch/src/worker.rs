//! One worker process: how it is started, so that it never outlives this process. Whatever can fail is made before it.

use crate::console::Lines;
use crate::ending::Ending;
use crate::foreground::{self, Foreground};
use crate::full::is_full;
use crate::given::{Given, variables};
use crate::guard::Guard;
use crate::news::{Berth, News};
use crate::output::{Console, Stream, Tail, WorkerStream, copy_lines};
use crate::said;
use crate::spec::{LaunchError, LaunchSpec, THIS_PROGRAM};
use nix::fcntl::{FcntlArg, FdFlag, fcntl};
use nix::sched::{CpuSet, sched_setaffinity};
use nix::sys::prctl::set_pdeathsig;
use nix::sys::signal::{SigSet, Signal, killpg};
use nix::unistd::Pid;
use phalanx_job::{Monitor, names};
use phalanx_wire::Rank;
use std::convert::Infallible;
use std::ffi::OsString;
use std::fs;
use std::io::{IsTerminal, PipeReader, PipeWriter, pipe};
use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::mpsc::{Sender, SyncSender, channel, sync_channel};
use std::sync::{Arc, Mutex, PoisonError};

/// What the workers of a run have in common on this side.
#[derive(Clone)]
pub(crate) struct Ties {
    /// Where their ends are told.
    pub(crate) news: SyncSender<News>,
    /// Where their lines are shown.
    pub(crate) lines: Lines,
    /// Closed at its other end when the run is over.
    pub(crate) over: Arc<PipeReader>,
    /// Whether somebody waits for the run to end.
    pub(crate) hurry: Arc<AtomicBool>,
    /// The rank that the first of the workers was started with.
    pub(crate) first: Arc<AtomicU32>,
}

/// A worker that runs, or ran.
pub(crate) struct Worker {
    pub(crate) rank: Rank,
    pub(crate) pid: Pid,
    child: Child,
    out: Arc<Mutex<Tail>>,
    err: Arc<Mutex<Tail>>,
    error_file: PathBuf,
}

/// Has the kernel kill what this command starts when the thread that starts it ends, however that ends.
pub fn end_with_caller(command: &mut Command) {
    let parent = std::process::id();
    // SAFETY: between fork and exec only async-signal-safe calls are made: those of `end_with`.
    unsafe {
        command.pre_exec(move || end_with(parent));
    }
}

/// The same of this process, which is one that `parent` has just started: prctl, getppid, and an error that is built from a number.
fn end_with(parent: u32) -> std::io::Result<()> {
    set_pdeathsig(Signal::SIGKILL)?;
    // If the parent has ended before that, it is another one by now.
    match std::os::unix::process::parent_id() == parent {
        true => Ok(()),
        false => Err(std::io::Error::from_raw_os_error(nix::errno::Errno::ESRCH as i32)),
    }
}

impl Worker {
    /// Starts rank `rank`; its end arrives as news.
    pub(crate) fn start(
        given: &Given<'_>,
        ties: &Ties,
        guard: &Guard,
        berth: Berth,
        local: usize,
        monitor: Option<Arc<Monitor>>,
    ) -> Result<Worker, LaunchError> {
        let (spec, rank) = (given.spec, given.rank(local));
        let mut command = Command::new(&spec.program);
        command
            .args(arguments(spec, local))
            .envs(variables(given, local))
            .envs(spec.variables.iter().cloned())
            .stdin(Stdio::null());
        let reads = spec.stdin == Some(local);
        let foreground = reads.then(Foreground::of_this_process).flatten().map(Arc::new);
        if reads {
            command.stdin(foreground::input(foreground.as_deref()));
        }
        // Who lists processes finds it by the name that this one was started by.
        if let Some(name) = std::env::args_os().next().filter(|_| spec.program == THIS_PROGRAM) {
            command.arg0(name);
        }
        match &monitor {
            Some(monitor) => command.env(names::PULSE_FD, monitor.as_fd().as_raw_fd().to_string()),
            None => command.env_remove(names::PULSE_FD),
        };
        let error_file = given.error_file(local);
        // One that is there is another worker's; where it can't be removed there is none, or it is no reason to start nothing.
        let _ = fs::remove_file(&error_file);
        let (reading, streams) = channel();
        let [out, err] = [Arc::default(), Arc::default()];
        let is_first = spec.console == Console::FirstRank && rank == Rank(0) && !given.replaces;
        // A prompt is no line.
        let writes_itself = |is_terminal: bool| is_first || foreground.is_some() && is_terminal;
        if !writes_itself(std::io::stdout().is_terminal()) {
            command.stdout(copied(given, ties, local, Stream::Out, &out, reading.clone())?);
        }
        if !writes_itself(std::io::stderr().is_terminal()) {
            command.stderr(copied(given, ties, local, Stream::Err, &err, reading.clone())?);
        }
        drop(reading);
        // A group of its own, so that signals reach whatever the worker starts, and the terminal's Ctrl-C only this process.
        command.process_group(0);
        let (life, held_by_worker) = pipe().map_err(LaunchError::system("a pipe for a worker"))?;
        let parent = std::process::id();
        let enlist = guard.enlist(berth)?;
        let processors = processors(spec, local)?;
        let held = spec.held_signals.iter().filter_map(|&number| Signal::try_from(number).ok());
        let held: SigSet = held.collect();
        let terminal = foreground.clone();
        // SAFETY: between fork and exec only async-signal-safe calls are made: prctl, getppid, fcntl, sched_setaffinity, tcsetpgrp,
        // sigaction, sigmask, getpid, write, and building an error from a number.
        unsafe {
            command.pre_exec(move || {
                end_with(parent)?;
                fcntl(&held_by_worker, FcntlArg::F_SETFD(FdFlag::empty()))?;
                if let Some(monitor) = &monitor {
                    fcntl(monitor.as_fd(), FcntlArg::F_SETFD(FdFlag::empty()))?;
                }
                if let Some(processors) = &processors {
                    sched_setaffinity(Pid::from_raw(0), processors)?;
                }
                terminal.as_ref().map_or(Ok(()), |terminal| terminal.take())?;
                held.thread_block()?;
                enlist();
                Ok(())
            });
        }
        let (started, pid) = sync_channel(1);
        let (news, lines, hurry) = (ties.news.clone(), ties.lines.clone(), Arc::clone(&ties.hurry));
        let ending = Ending { berth, life, streams, foreground, lines, hurry, news };
        let attend = move || {
            if let Ok(pid) = pid.recv() {
                ending.attend(pid);
            }
        };
        let thread = std::thread::Builder::new().name(format!("phalanx-wait-{rank}")).spawn(attend);
        thread.map_err(LaunchError::system("a thread to wait for a worker"))?;
        let child = command.spawn().map_err(|source| match is_full(&source) {
            true => LaunchError::full(format!("rank {rank}")),
            false => LaunchError::Program { program: spec.program.clone().into(), source },
        })?;
        let pid = Pid::from_raw(child.id() as i32);
        // There is room for one, and the thread waits for it.
        let _ = started.send(pid);
        Ok(Worker { rank, pid, child, out, err, error_file })
    }

    /// Sends a signal to the worker and everything in its group; not to be called once it is reaped.
    pub(crate) fn signal(&self, signal: Signal) {
        let _ = killpg(self.pid, signal);
    }

    /// Buries a worker whose end was told.
    pub(crate) fn reap(&mut self) {
        // How it ended was told; what is left is its entry in the process table.
        let _ = self.child.wait();
    }

    /// What it has left where a PyTorch program says why it failed.
    pub(crate) fn said(&self) -> Option<String> {
        said::of(&self.error_file)
    }

    /// The last lines it wrote to standard error, or to standard output if there were none.
    pub(crate) fn last_lines(&self) -> Vec<String> {
        let lines = |tail: &Mutex<Tail>| tail.lock().unwrap_or_else(PoisonError::into_inner).lines();
        let err = lines(&self.err);
        if err.is_empty() { lines(&self.out) } else { err }
    }
}

/// What the program is started with.
fn arguments(spec: &LaunchSpec, local: usize) -> Vec<OsString> {
    let mut arguments = spec.args.clone();
    if let Some(place) = spec.local_rank_argument {
        arguments.insert(place, format!("--local-rank={local}").into());
    }
    arguments
}

/// The processors that a worker keeps to, if it is told which.
fn processors(spec: &LaunchSpec, local: usize) -> Result<Option<CpuSet>, LaunchError> {
    let Some(processors) = spec.processors.get(local) else { return Ok(None) };
    let mut set = CpuSet::new();
    for &processor in processors {
        let set = set.set(processor).map_err(std::io::Error::from);
        set.map_err(LaunchError::system(format!("processor {processor} for local rank {local}")))?;
    }
    Ok(Some(set))
}

/// A stream for a worker to write to: a thread copies it into its log, its tail and to the console. `reading` is dropped at
/// its end.
fn copied(
    given: &Given<'_>,
    ties: &Ties,
    local: usize,
    stream: Stream,
    tail: &Arc<Mutex<Tail>>,
    reading: Sender<Infallible>,
) -> Result<PipeWriter, LaunchError> {
    let ending = if stream == Stream::Out { "out" } else { "err" };
    let rank = given.rank(local);
    let log = given.logs.create_log(given.folder, rank, ending)?;
    let times = given.spec.log_times;
    let lines = given.spec.console.shows(local, stream).then(|| ties.lines.clone());
    let prefix = ties.lines.prefix(local, rank);
    let is_for_first = (given.spec.console == Console::FirstRank).then(|| Arc::clone(&ties.first));
    let (from, to) = pipe().map_err(LaunchError::system("a pipe for a worker"))?;
    let from = WorkerStream::new(from, Arc::clone(&ties.over));
    let tail = Arc::clone(tail);
    let copy = move || {
        // A stream that can't be read any more has ended.
        let _ = copy_lines(from, log, times, |line| {
            tail.lock().unwrap_or_else(PoisonError::into_inner).push(&line);
            let is_shown =
                || is_for_first.as_ref().is_none_or(|first| first.load(Ordering::Relaxed) == rank.0);
            if let Some(lines) = lines.as_ref().filter(|_| is_shown()) {
                lines.show(&prefix, stream, line);
            }
        });
        drop(reading);
    };
    let thread = std::thread::Builder::new().name(format!("phalanx-log-{rank}")).spawn(copy);
    thread.map_err(LaunchError::system("a thread for a log"))?;
    Ok(to)
}
