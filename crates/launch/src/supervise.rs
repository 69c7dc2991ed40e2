//! Starting the workers of a run, and standing by until all have ended.

use crate::output::{Stream, Tail, show};
use crate::spec::{LaunchError, LaunchSpec};
use crate::worker::{Given, Worker};
use nix::sys::memfd::{MFdFlags, memfd_create};
use nix::sys::signal::Signal;
use phalanx_coord::{Coordinator, Notice};
use phalanx_job::RunDir;
use phalanx_wire::{Generation, Rank, Secret};
use signal_hook::consts::{SIGHUP, SIGINT, SIGQUIT, SIGTERM};
use signal_hook::iterator::Signals;
use std::collections::BTreeMap;
use std::fs::File;
use std::io::Write;
use std::net::{Ipv4Addr, SocketAddr, TcpListener, ToSocketAddrs};
use std::os::fd::AsRawFd;
use std::os::unix::process::ExitStatusExt;
use std::process::ExitStatus;
use std::sync::mpsc::{RecvTimeoutError, SyncSender, sync_channel};
use std::time::{Duration, Instant};

/// What the caller may want to show.
#[derive(Clone, Debug)]
pub enum Report {
    /// All workers were started.
    Started {
        /// Their process ids, by rank.
        pids: Vec<i32>,
    },
    /// A worker has failed and the others are being stopped.
    Stopping {
        /// Which has failed.
        rank: Rank,
    },
    /// A signal is passed on to the workers.
    Signalled {
        /// Its name.
        signal: &'static str,
    },
    /// The grace period is over and workers are still there.
    Killing {
        /// Which.
        ranks: Vec<Rank>,
    },
}

/// How a run ended.
#[derive(Clone, Debug)]
pub struct Outcome {
    /// For the shell: 0, 1, or 128 and the number of the signal that ended the run.
    pub exit_code: i32,
    /// What went wrong first, if anything did.
    pub failure: Option<Failure>,
    /// How long the run took.
    pub lasted: Duration,
}

/// The worker that ended a run.
#[derive(Clone, Debug)]
pub struct Failure {
    /// Which.
    pub rank: Rank,
    /// Its process id.
    pub pid: i32,
    /// "exited with code 3" or "was killed by SIGKILL".
    pub how: String,
    /// How long after the start of the run.
    pub after: Duration,
    /// What it told the coordinator, if it came to that.
    pub reported: Option<String>,
    /// The last lines it wrote to standard error, or to standard output if there were none.
    pub last_lines: Vec<String>,
}

/// Everything that arrives.
pub(crate) enum Happening {
    Line(Rank, Stream, Vec<u8>),
    Ended(Rank, std::io::Result<ExitStatus>),
    Signal(i32),
    Notice(Notice),
}

/// Lines that wait to be shown; a worker that writes faster waits.
const QUEUE: usize = 1024;
/// Without anything to wait for, the queue is still looked at this often.
const IDLE: Duration = Duration::from_secs(3600);

/// What is known of one worker.
#[derive(Default)]
struct Known {
    out: Tail,
    err: Tail,
    reported: Option<String>,
    consequence: bool,
    ended: Option<(String, Duration, bool)>,
}

/// Starts the workers and returns when all have ended. Call it on the thread that lives longest: a worker is killed when the
/// thread that started it ends.
pub fn run(spec: &LaunchSpec, report: &mut dyn FnMut(Report)) -> Result<Outcome, LaunchError> {
    let start = Instant::now();
    let run_dir = RunDir::create(&spec.run_dir)?;
    let generation = Generation(0);
    let secret = Secret::random()?;
    let secret_file = descriptor(&secret)?;
    let (sender, happenings) = sync_channel(QUEUE);
    let coordinator = {
        let sender = sender.clone();
        let any_port = SocketAddr::from((Ipv4Addr::LOCALHOST, 0));
        Coordinator::serve(any_port, secret, generation, spec.workers, move |notice| {
            // The run is over when nobody listens any more.
            let _ = sender.send(Happening::Notice(notice));
        })
        .map_err(LaunchError::system("the coordinator can't listen on this machine"))?
    };
    // Signals are taken before the first worker is there, so that none goes astray.
    let mut signals =
        Signals::new([SIGINT, SIGTERM, SIGHUP, SIGQUIT]).map_err(LaunchError::system("signals"))?;
    let signal_handle = signals.handle();
    let to_queue = sender.clone();
    let listening =
        move || signals.forever().take_while(|&s| to_queue.send(Happening::Signal(s)).is_ok()).for_each(drop);
    let listener = std::thread::Builder::new().name("phalanx-signals".into()).spawn(listening);
    listener.map_err(LaunchError::system("a thread for signals"))?;

    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let given = Given {
        spec,
        coordinator: coordinator.address(),
        master_port: master_port(spec)?,
        secret: secret_file.as_raw_fd(),
        run_dir: &run_dir,
        generation,
        threads: (cores / spec.workers).max(1),
    };
    let workers = start_all(&given, &sender, report)?;
    drop(sender);

    let mut known: BTreeMap<Rank, Known> = workers.iter().map(|w| (w.rank, Known::default())).collect();
    let mut stop: Option<Instant> = None;
    let mut signal: Option<i32> = None;
    let mut order_of_ends = Vec::new();
    while known.values().any(|worker| worker.ended.is_none()) {
        let patience = stop.map_or(IDLE, |kill_at| kill_at.saturating_duration_since(Instant::now()));
        let running = |known: &BTreeMap<Rank, Known>| -> Vec<Rank> {
            known.iter().filter(|(_, w)| w.ended.is_none()).map(|(rank, _)| *rank).collect()
        };
        let send = |known: &BTreeMap<Rank, Known>, signal: Signal| {
            let running = running(known);
            workers.iter().filter(|w| running.contains(&w.rank)).for_each(|w| w.signal(signal));
        };
        match happenings.recv_timeout(patience) {
            Ok(Happening::Line(rank, stream, line)) => {
                show(spec.console, rank, stream, &line);
                let worker = known.entry(rank).or_default();
                if stream == Stream::Out { worker.out.push(&line) } else { worker.err.push(&line) }
            }
            Ok(Happening::Notice(Notice::Complete)) => {}
            Ok(Happening::Notice(Notice::Failed { rank, message, consequence })) => {
                let worker = known.entry(rank).or_default();
                (worker.reported, worker.consequence) = (Some(message), consequence);
            }
            Ok(Happening::Ended(rank, status)) => {
                let (how, good) = describe(status);
                known.entry(rank).or_default().ended = Some((how, start.elapsed(), good));
                order_of_ends.push((rank, stop.is_some()));
                if !good && stop.is_none() {
                    stop = Some(Instant::now() + spec.grace);
                    if !running(&known).is_empty() {
                        send(&known, Signal::SIGTERM);
                        report(Report::Stopping { rank });
                    }
                }
            }
            Ok(Happening::Signal(number)) => {
                let name = Signal::try_from(number).unwrap_or(Signal::SIGTERM);
                // The second one means it.
                send(&known, if signal.is_some() { Signal::SIGKILL } else { name });
                report(Report::Signalled { signal: name.as_str() });
                signal.get_or_insert(number);
                stop.get_or_insert(Instant::now() + spec.grace);
            }
            Err(RecvTimeoutError::Timeout) if stop.is_some() => {
                send(&known, Signal::SIGKILL);
                report(Report::Killing { ranks: running(&known) });
                stop = Some(Instant::now() + IDLE);
            }
            Err(RecvTimeoutError::Timeout) => {}
            Err(RecvTimeoutError::Disconnected) => break,
        }
    }
    signal_handle.close();
    let failure = first_failure(&known, &order_of_ends, &workers);
    let exit_code = match (signal, &failure) {
        (Some(number), _) => 128 + number,
        (None, Some(_)) => 1,
        (None, None) => 0,
    };
    Ok(Outcome { exit_code, failure: if signal.is_some() { None } else { failure }, lasted: start.elapsed() })
}

fn start_all(
    given: &Given<'_>,
    sender: &SyncSender<Happening>,
    report: &mut dyn FnMut(Report),
) -> Result<Vec<Worker>, LaunchError> {
    let mut workers: Vec<Worker> = Vec::with_capacity(given.spec.workers);
    for rank in (0..given.spec.workers as u32).map(Rank) {
        match Worker::start(given, rank, sender) {
            Ok(worker) => workers.push(worker),
            Err(error) => {
                workers.iter().for_each(|worker| worker.signal(Signal::SIGKILL));
                return Err(error);
            }
        }
    }
    report(Report::Started { pids: workers.iter().map(|w| w.pid.as_raw()).collect() });
    Ok(workers)
}

/// A file in memory that holds the secret and is inherited by the workers: out of sight of `ps` and of the file system.
fn descriptor(secret: &Secret) -> Result<File, LaunchError> {
    let made = memfd_create(c"phalanx-secret", MFdFlags::empty()).map_err(std::io::Error::from);
    let mut file = File::from(made.map_err(LaunchError::system("a descriptor for the secret"))?);
    file.write_all(secret.expose()).map_err(LaunchError::system("a descriptor for the secret"))?;
    Ok(file)
}

/// The program's port: the one asked for if it is free, else any free one.
fn master_port(spec: &LaunchSpec) -> Result<u16, LaunchError> {
    let (host, wanted) = &spec.master;
    let mut addresses = (host.as_str(), wanted.unwrap_or(0))
        .to_socket_addrs()
        .map_err(LaunchError::system(format!("the host {host}")))?;
    let address = addresses.next().unwrap_or(SocketAddr::from((Ipv4Addr::LOCALHOST, wanted.unwrap_or(0))));
    let bound = TcpListener::bind(address).map_err(|source| match (source.kind(), wanted) {
        (std::io::ErrorKind::AddrInUse, Some(port)) => {
            LaunchError::PortInUse { host: host.clone(), port: *port }
        }
        _ => LaunchError::System { what: format!("a port of {host}"), source },
    })?;
    bound.local_addr().map(|a| a.port()).map_err(LaunchError::system(format!("a port of {host}")))
}

/// How a process ended, in words, and whether that was well.
fn describe(status: std::io::Result<ExitStatus>) -> (String, bool) {
    let status = match status {
        Ok(status) => status,
        Err(error) => return (format!("was lost: {error}"), false),
    };
    match (status.code(), status.signal()) {
        (Some(0), _) => ("exited with code 0".into(), true),
        (Some(code), _) => (format!("exited with code {code}"), false),
        (None, Some(number)) => {
            let name = Signal::try_from(number)
                .map_or_else(|_| format!("signal {number}"), |s| s.as_str().to_owned());
            (format!("was killed by {name}"), false)
        }
        (None, None) => (format!("ended: {status}"), false),
    }
}

/// The cause: the first worker that ended badly before the others were stopped and that didn't only follow another; else the
/// first that ended badly at all.
fn first_failure(
    known: &BTreeMap<Rank, Known>,
    ends: &[(Rank, bool)],
    workers: &[Worker],
) -> Option<Failure> {
    let bad = |rank: &Rank| known[rank].ended.as_ref().is_some_and(|(.., good)| !good);
    let ended_itself =
        |rank: &Rank| known[rank].ended.as_ref().is_some_and(|(how, ..)| !how.ends_with("SIGTERM"));
    let candidates: Vec<&Rank> = ends.iter().map(|(rank, _)| rank).filter(|rank| bad(rank)).collect();
    let own = candidates.iter().find(|rank| !known[rank].consequence && ended_itself(rank));
    let rank = **own.or(candidates.first())?;
    let worker = &known[&rank];
    let (how, after, _) = worker.ended.clone()?;
    let last_lines = if worker.err.lines().is_empty() { worker.out.lines() } else { worker.err.lines() };
    let pid = workers.iter().find(|w| w.rank == rank)?.pid.as_raw();
    Some(Failure { rank, pid, how, after, reported: worker.reported.clone(), last_lines })
}
