//! One rank of a run: its place, its group, its device.

mod arrival;
mod loss;
mod nodes;
pub(crate) mod panics;
mod regroup;
mod threads;

pub use arrival::Arrival;
pub(crate) use nodes::share;

use crate::device::DeviceSpec;
use crate::error::Error;
use crate::flight;
use phalanx_comm::{Algorithm, Endpoint, Group, GroupConfig, PeerAddress, WaitObserver};
use phalanx_coord::{Coordinator, Meeting, rendezvous};
use phalanx_job::{Cause, Link, Pulse, Roster, Transport, WorkerEnv, names};
use phalanx_tensor::{DebugSync, Device};
use phalanx_wire::Deadline;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicUsize, Ordering};
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use threads::Threads;

/// What a training program is given: who it is among the ranks, how to reach the others, and what to compute on.
pub struct Worker {
    /// That of the membership at hand.
    group: Mutex<Group>,
    /// Which one it is in that.
    rank: Arc<AtomicU32>,
    device: Device,
    /// Where it says how it gets on.
    pulse: Pulse,
    threads: Threads,
    run_dir: Option<PathBuf>,
    /// Kept open: as long as it is, this worker counts as alive.
    link: Option<Arc<Mutex<Link>>>,
    /// Whether the run goes on when workers are lost, and with others that come.
    is_elastic: bool,
    /// How many ranks there were to be when this one was started.
    launched: usize,
    /// Whether that number is whatever there happens to be.
    varies: bool,
    /// How many callers go on in place at the moment.
    in_place: AtomicUsize,
    /// Whether another rank's failure was told already, which a panic then only follows.
    followed: Arc<AtomicBool>,
    /// The coordinator, if this rank hosts it.
    #[expect(dead_code, reason = "kept running, not asked")]
    host: Option<Coordinator>,
}

/// Tells whoever started the run that this rank can't go on, and waits until that was heard.
fn tell(link: &Mutex<Link>, why: String, cause: Cause) {
    // Where nobody listens any more, the exit code has to say it.
    let _ = locked(link).fail(why, cause);
}

/// What is locked here is whole between any two statements that could panic.
fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// How long the ranks of a run may take to find each other, and how long a collective may wait.
const PATIENCE: Duration = Duration::from_secs(300);
/// How long it waits for the others without a word.
const SILENCE: Duration = Duration::from_secs(5);

/// Says that the others are waited for, if they take their time, until this is dropped.
struct Patient {
    _until: Sender<()>,
}

impl Patient {
    fn begin(env: &WorkerEnv) -> Patient {
        let (until, over) = channel();
        // Where agents started them, these tell who is missing.
        if env.coordinator.is_none() {
            let (rank, world, seconds) = (env.rank, env.world_size, PATIENCE.as_secs());
            let place =
                env.master.as_ref().map(|(host, port)| format!(" at {host}:{port}")).unwrap_or_default();
            let wait = move || {
                if over.recv_timeout(SILENCE) == Err(RecvTimeoutError::Timeout) {
                    tracing::warn!(
                        "rank {rank} waits for the others of {world}{place}; giving up after {seconds} s"
                    );
                }
            };
            // Without a thread it waits without a word.
            let _ = std::thread::Builder::new().name("phalanx-patient".into()).spawn(wait);
        }
        Patient { _until: until }
    }
}

impl Worker {
    /// A world of one with this many compute threads.
    pub fn alone(threads: usize) -> Worker {
        Worker::new(Group::solo(), threads)
    }

    /// A rank of `group` with this many compute threads.
    pub fn new(group: Group, threads: usize) -> Worker {
        Worker::on(group, Device::cpu(threads), Pulse::none())
    }

    /// A rank of `group` on this device, as one that a program has opened for itself.
    pub fn with_device(group: Group, device: Device) -> Worker {
        Worker::on(group, device, Pulse::none())
    }

    fn on(group: Group, device: Device, pulse: Pulse) -> Worker {
        Worker {
            rank: Arc::new(AtomicU32::new(group.rank().0)),
            threads: Threads::Asked(device.threads()),
            group: Mutex::new(group),
            device,
            pulse,
            run_dir: None,
            link: None,
            is_elastic: false,
            launched: 1,
            varies: false,
            in_place: AtomicUsize::new(0),
            followed: Arc::default(),
            host: None,
        }
    }

    /// The place that the environment gives: under `phalanx run`, torchrun or Slurm a rank, connected to all others; else a
    /// world of one with all cores.
    pub fn from_env() -> Result<Worker, Error> {
        Worker::from_environment(None)
    }

    /// As [`Worker::from_env`], with this many compute threads whatever the environment says.
    pub fn from_environment(threads: Option<usize>) -> Result<Worker, Error> {
        Worker::arrive(threads)?.join()
    }

    /// The rank that the environment makes of this process, which hasn't met the others yet. What takes time is best done
    /// before it does: they wait for whoever comes in the place of a rank that was lost, from the moment that it has joined.
    pub fn arrive(threads: Option<usize>) -> Result<Arrival, Error> {
        Arrival::on(DeviceSpec::Cpu, threads, DebugSync::No)
    }

    /// As [`Worker::arrive`], on a device of its choice; `debug_sync` says whether all that a GPU is given is waited for, so that what
    /// fails is named.
    pub fn arrive_on(
        device: DeviceSpec,
        threads: Option<usize>,
        debug_sync: DebugSync,
    ) -> Result<Arrival, Error> {
        Arrival::on(device, threads, debug_sync)
    }

    /// Meets the others.
    fn meet(env: &WorkerEnv, device: Device, threads: Threads, pulse: Pulse) -> Result<Worker, Error> {
        let join = |error: phalanx_job::Error| Error::Join(error.to_string());
        let algorithm = asked_algorithm(env.all_reduce.as_deref()).map_err(join)?;
        let run_dir = env.run_dir.clone();
        let is_elastic = env.coordinator.is_some() && env.elastic;
        if env.world_size == 1 && !is_elastic {
            let mut alone = Worker::on(Group::solo(), device, pulse);
            alone.run_dir = run_dir;
            return Ok(alone);
        }
        // Who doesn't come is to blame, and not those that wait for it.
        let waiting = pulse.wait();
        let patient = Patient::begin(env);
        let mut ear = None;
        let meeting = rendezvous(env, Deadline::after(PATIENCE), |ip| {
            let unreachable = |error: phalanx_comm::Error| phalanx_job::Error::Unreachable {
                address: ip.to_string(),
                reason: error.to_string(),
            };
            let bind = match env.transport {
                Transport::Auto => Endpoint::bind,
                Transport::Tcp => Endpoint::tcp,
            };
            let endpoint =
                bind(ip).and_then(|endpoint| if env.tls { endpoint.with_tls() } else { Ok(endpoint) });
            let endpoint = ear.insert(endpoint.map_err(unreachable)?);
            Ok(serde_json::to_string(&endpoint.address()).expect("an address is always JSON"))
        })
        .map_err(join)?;
        let peers = addresses(&meeting.roster)?;
        let group = Group::connect(GroupConfig {
            rank: meeting.rank,
            generation: meeting.roster.generation,
            secret: meeting.secret.clone(),
            endpoint: ear.expect("the rendezvous asked for an address"),
            peers,
            timeout: PATIENCE,
        })?;
        drop((waiting, patient));
        let group = group.with_algorithm(algorithm);
        if env.coordinator.is_none() && !env.unchecked {
            nodes::compare_clocks(&group)?;
        }
        group.on_wait(Arc::new(Waits(pulse.clone())));
        if let Some(run_dir) = &run_dir {
            record_flights(&group, run_dir.clone());
        }
        let Meeting { rank: meeting_rank, link, host, .. } = meeting;
        let link = Arc::new(Mutex::new(link));
        let teller = Arc::clone(&link);
        // A rank that lost another, or was left by it, only says so; the other is to be blamed, even if this one's process ends
        // before.
        let rank = Arc::new(AtomicU32::new(meeting_rank.0));
        let own = Arc::clone(&rank);
        let followed = Arc::new(AtomicBool::new(false));
        let follows = Arc::clone(&followed);
        group.on_failure(move |error| {
            use phalanx_comm::Error::{Aborted, PeerLost, Silent};
            let is_left = match error {
                PeerLost { .. } | Silent { .. } => true,
                Aborted { by, .. } => by.0 != own.load(Ordering::Relaxed),
                _ => false,
            };
            if is_left {
                follows.store(true, Ordering::Relaxed);
                tell(&teller, error.to_string(), Cause::Other);
            }
        });
        Ok(Worker {
            rank,
            threads,
            group: Mutex::new(group),
            device,
            pulse,
            run_dir,
            link: Some(link),
            is_elastic,
            launched: env.world_size,
            varies: env.varies,
            in_place: AtomicUsize::new(0),
            followed,
            host,
        })
    }

    /// Where the run keeps its files, if whoever started it said so.
    pub fn run_dir(&self) -> Option<&Path> {
        self.run_dir.as_deref()
    }

    /// Tells whoever started the run why this rank can't go on. Losing another rank, and a panic, are told without this.
    pub fn report(&mut self, error: &Error) {
        self.tell_why(error.to_string(), error.cause());
    }

    /// Tells it, or what this rank's GPU has met: all else follows from that.
    fn tell_why(&self, why: String, cause: Cause) {
        let (why, cause) = self.fault_of_device().map_or((why, cause), |fault| (fault, Cause::Device));
        if let Some(link) = &self.link {
            tell(link, why, cause);
        }
    }

    fn fault_of_device(&self) -> Option<String> {
        self.device.gpu().and_then(|gpu| gpu.fault()).map(|fault| fault.to_string())
    }

    /// The connections to the other ranks. Where ranks come and go, later ones are to others.
    pub fn group(&self) -> Group {
        locked(&self.group).clone()
    }

    /// What to compute on.
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// Where this worker's thread says what it is doing: under `phalanx run` and `phalanx train`, one that makes no progress in a
    /// section for too long is replaced, as one that has failed. The trainer says so by itself; a loop of a program's own enters
    /// its sections here.
    ///
    /// ```
    /// use phalanx::{Section, Worker};
    /// let worker = Worker::from_env()?;
    /// for number in 0..10 {
    ///     let _step = worker.pulse().enter(Section::Step(number));
    ///     // ... a step that ends here
    /// }
    /// # Ok::<(), phalanx::Error>(())
    /// ```
    pub fn pulse(&self) -> &Pulse {
        &self.pulse
    }

    /// Whether this is rank 0, which alone prints and writes shared files.
    pub fn is_first(&self) -> bool {
        self.rank.load(Ordering::Relaxed) == 0
    }

    /// How many ranks there were to be when this one was started: some may be lost since.
    pub(crate) fn launched(&self) -> usize {
        self.launched
    }

    /// Whether the number of ranks is whatever there happens to be, so that it says nothing of what is wanted.
    pub(crate) fn varies(&self) -> bool {
        self.varies
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        // Told while the connections to the others are open, so that none of them can fail of it first.
        if std::thread::panicking() {
            let (why, cause) = panics::why(&self.device);
            let followed = self.followed.load(Ordering::Relaxed);
            self.tell_why(why, if followed { Cause::Other } else { cause });
        }
    }
}

/// Tells of the waits of a group by the pulse.
struct Waits(Pulse);

impl WaitObserver for Waits {
    fn begins(&self) {
        self.0.wait_begins();
    }

    fn ends(&self) {
        self.0.wait_ends();
    }
}

/// Where the ranks of a roster are.
fn addresses(roster: &Roster) -> Result<Vec<PeerAddress>, Error> {
    let address = |text: &String| {
        serde_json::from_str(text).map_err(|e| Error::Join(format!("a peer's address is {text:?}: {e}")))
    };
    roster.addresses.iter().map(address).collect()
}

/// Has the group's failure written down in the run directory. Where that can't be done, the error itself must do.
fn record_flights(group: &Group, run_dir: PathBuf) {
    let (world_size, unwritten) = (group.world_size(), |error| tracing::warn!("no flight record: {error}"));
    flight::clear(&run_dir, group.generation().0, group.rank().0).unwrap_or_else(unwritten);
    group.on_flight(move |record| {
        flight::keep(&run_dir, world_size, record).map(drop).unwrap_or_else(unwritten);
    });
}

/// How all-reduces shall be carried out, if not by what is best.
fn asked_algorithm(word: Option<&str>) -> Result<Option<Algorithm>, phalanx_job::Error> {
    let asked = |word: &str| {
        Algorithm::asked(word).map_err(|want| phalanx_job::Error::Variable {
            name: names::ALLREDUCE,
            value: word.to_owned(),
            want,
        })
    };
    word.map_or(Ok(None), asked)
}

/// Whether workers that are started with the environment of this process will take what it says to them, so that whoever starts them can
/// say otherwise before that.
pub fn check_environment() -> Result<(), Error> {
    let get = |name: &str| std::env::var(name).ok().filter(|value| !value.is_empty());
    let checked = phalanx_job::check_settings(get);
    let all = checked.and_then(|()| asked_algorithm(get(names::ALLREDUCE).as_deref()).map(drop));
    all.map_err(|error| Error::Join(error.to_string()))
}

/// How many cores this process may use.
pub fn cores() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from)
}

/// Runs `f` as `n` ranks, each a thread of this process with its share of the cores: for programs that want no launcher.
/// The first error, by rank, is returned when all have ended; a rank that panics counts as one.
///
/// ```
/// use phalanx::comm::ReduceOp;
/// phalanx::spawn(2, |worker| {
///     let mut sum = [worker.group().rank().0 + 1];
///     worker.group().all_reduce(&mut sum, ReduceOp::Sum)?;
///     assert_eq!(sum, [3]);
///     Ok(())
/// })?;
/// # Ok::<(), phalanx::Error>(())
/// ```
pub fn spawn(n: usize, f: impl Fn(Worker) -> Result<(), Error> + Sync) -> Result<(), Error> {
    let threads = (cores() / n.max(1)).max(1);
    on_threads(n, |group| f(Worker::new(group, threads)))
}

/// Runs `f` for each of `n` ranks, on a thread each; gives the first error as [`spawn`] does.
pub(crate) fn on_threads(n: usize, f: impl Fn(Group) -> Result<(), Error> + Sync) -> Result<(), Error> {
    let f = &f;
    let results: Vec<Result<(), Error>> = std::thread::scope(|scope| {
        let ranks: Vec<_> = Group::threads(n)
            .into_iter()
            .map(|group| {
                let name = format!("rank-{}", group.rank());
                std::thread::Builder::new().name(name).spawn_scoped(scope, move || {
                    // A rank that fails leaves its group, so that the others don't wait for it.
                    let held = group.clone();
                    let result = f(group);
                    if let Err(error) = &result {
                        held.abort(&error.to_string());
                    }
                    result
                })
            })
            .collect();
        let joined = ranks.into_iter().enumerate().map(|(rank, thread)| match thread {
            Ok(thread) => thread.join().unwrap_or_else(|panic| Err(panics::error(rank, &*panic))),
            Err(source) => Err(Error::Thread { rank, source }),
        });
        joined.collect()
    });
    // A rank that lost its peer is a consequence, and one that panicked may have by that; the cause is an error of another kind, if there
    // is one.
    let mut errors: Vec<Error> = results.into_iter().filter_map(Result::err).collect();
    errors.sort_by_key(|error| (error.is_consequence(), !matches!(error, Error::Panicked { .. })));
    errors.into_iter().next().map_or(Ok(()), Err)
}
