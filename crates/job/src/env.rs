//! The environment of a worker: torchrun's names and meanings, so that PyTorch programs run unchanged, and our own.

use crate::error::Error;
use crate::slurm;
use crate::whereabouts::Whereabouts;
use phalanx_wire::{Generation, Pass, Rank, Secret};
use std::net::SocketAddr;
use std::path::PathBuf;

/// The names of all variables.
#[allow(missing_docs)]
pub mod names {
    pub const RANK: &str = "RANK";
    pub const LOCAL_RANK: &str = "LOCAL_RANK";
    pub const WORLD_SIZE: &str = "WORLD_SIZE";
    pub const LOCAL_WORLD_SIZE: &str = "LOCAL_WORLD_SIZE";
    pub const GROUP_RANK: &str = "GROUP_RANK";
    pub const GROUP_WORLD_SIZE: &str = "GROUP_WORLD_SIZE";
    pub const ROLE_NAME: &str = "ROLE_NAME";
    pub const ROLE_RANK: &str = "ROLE_RANK";
    pub const ROLE_WORLD_SIZE: &str = "ROLE_WORLD_SIZE";
    pub const MASTER_ADDR: &str = "MASTER_ADDR";
    pub const MASTER_PORT: &str = "MASTER_PORT";
    pub const RESTART_COUNT: &str = "TORCHELASTIC_RESTART_COUNT";
    pub const MAX_RESTARTS: &str = "TORCHELASTIC_MAX_RESTARTS";
    pub const RUN_ID: &str = "TORCHELASTIC_RUN_ID";
    pub const ERROR_FILE: &str = "TORCHELASTIC_ERROR_FILE";
    /// The names of the signals that end the run, for programs that ask which those are.
    pub const SIGNALS_TO_HANDLE: &str = "TORCHELASTIC_SIGNALS_TO_HANDLE";
    /// `1` where a rank of a PyTorch program that waits for NCCL is to end once that has failed.
    pub const NCCL_ERRORS: &str = "TORCH_NCCL_ASYNC_ERROR_HANDLING";
    pub const OMP_NUM_THREADS: &str = "OMP_NUM_THREADS";
    /// Address of the coordinator.
    pub const COORDINATOR: &str = "PHALANX_COORDINATOR";
    /// Number of an inherited descriptor from which the address of the coordinator can be read when it has become another.
    pub const COORDINATOR_FD: &str = "PHALANX_COORDINATOR_FD";
    /// Number of an inherited descriptor from which the secret can be read.
    pub const SECRET_FD: &str = "PHALANX_SECRET_FD";
    pub const SECRET_FILE: &str = "PHALANX_SECRET_FILE";
    /// Number of an inherited descriptor of the memory in which a worker says how it gets on.
    pub const PULSE_FD: &str = "PHALANX_PULSE_FD";
    /// How long workers may make no progress, as in `step=60`, for who starts them.
    pub const HANG_TIMEOUT: &str = "PHALANX_HANG_TIMEOUT";
    pub const GENERATION: &str = "PHALANX_GENERATION";
    /// `1` in a run that goes on when workers are lost, and with others that come.
    pub const ELASTIC: &str = "PHALANX_ELASTIC";
    /// How many nodes the run may have, as in `1:4`.
    pub const NODES: &str = "PHALANX_NODES";
    pub const RUN_DIR: &str = "PHALANX_RUN_DIR";
    /// Compute threads of each worker, if somebody asks for a number: then they stay, whoever comes or goes.
    pub const THREADS: &str = "PHALANX_THREADS";
    /// Each worker's share of the cores, as whoever started it counts them.
    pub const SHARE: &str = "PHALANX_SHARE";
    /// `tcp` for ranks that shall not share memory; `auto` is as if it weren't set.
    pub const TRANSPORT: &str = "PHALANX_TRANSPORT";
    /// `1` for TLS on whatever goes over TCP, between ranks and to the coordinator; `0` is as if it weren't set.
    pub const TLS: &str = "PHALANX_TLS";
    /// How all-reduces are carried out, as in `ring`; `auto` is as if it weren't set.
    pub const ALLREDUCE: &str = "PHALANX_ALLREDUCE";
    /// When the time of the run is up, in seconds since 1970; 0 for never, whatever a batch system says.
    pub const END_TIME: &str = "PHALANX_END_TIME";
    /// When the launcher of a worker was started, in seconds since 1970: it may have started others before.
    pub const START_TIME: &str = "PHALANX_START_TIME";
    /// `1` to begin although clocks of nodes differ, or nodes don't share the run's folder; `0` is as if it weren't set.
    pub const UNCHECKED: &str = "PHALANX_UNCHECKED";
    /// The inherited descriptor of the text of its recipe's file, as it was when the run began.
    pub const RECIPE_FD: &str = "PHALANX_RECIPE_FD";
    /// Set for workers of `phalanx train`, whose command line is its own.
    pub const LED: &str = "PHALANX_TRAIN";
    /// Set by torchrun where its agent listens at `MASTER_PORT` itself.
    pub const AGENT_STORE: &str = "TORCHELASTIC_USE_AGENT_STORE";
}

/// A worker's place in its run.
#[derive(Clone, Debug)]
pub struct WorkerEnv {
    /// Among all workers.
    pub rank: Rank,
    /// Among the workers of this machine.
    pub local_rank: usize,
    /// How many workers there are.
    pub world_size: usize,
    /// How many of them are on this machine.
    pub local_world_size: usize,
    /// Host and port that belong to the program, on rank 0's machine.
    pub master: Option<(String, u16)>,
    /// Where the coordinator is, if an agent runs one.
    pub coordinator: Option<SocketAddr>,
    /// Where it is told if it has become another, if it can.
    pub whereabouts: Option<Whereabouts>,
    /// Which membership of the run.
    pub generation: Generation,
    /// Whether the run goes on when workers are lost, and with others that come.
    pub elastic: bool,
    /// Whether it may have more nodes than it began with, or fewer, for good.
    pub varies: bool,
    /// How often that was done before this one was started.
    pub restarts: usize,
    /// The run.
    pub run_id: String,
    /// Where the run keeps its files.
    pub run_dir: Option<PathBuf>,
    /// Compute threads of this worker, if somebody asked for a number.
    pub threads: Option<usize>,
    /// Its share of the cores when all are there, if whoever started it said so.
    pub share: Option<usize>,
    /// The devices that its job has on this node, if a batch system says so.
    pub devices_on_node: Option<usize>,
    /// What to change where cores that the run could have lie idle.
    pub advice: Option<String>,
    /// Where the secret is.
    pub secret: SecretSource,
    /// The inherited descriptor of its pulse, if who started it looks at that.
    pub pulse: Option<u32>,
    /// How it talks to the others.
    pub transport: Transport,
    /// Whether it encrypts what goes over TCP.
    pub tls: bool,
    /// The word for how all-reduces shall be carried out, if there is one. What it may be is not known here.
    pub all_reduce: Option<String>,
    /// Whether the run begins although its nodes differ in what they should have alike.
    pub unchecked: bool,
}

/// Whether these variables ask for TLS.
pub fn wants_tls(get: impl Fn(&str) -> Option<String>) -> Result<bool, Error> {
    is_on(names::TLS, get)
}

/// Whether these variables ask for a run that begins although its nodes differ in what they should have alike.
pub fn is_unchecked(get: impl Fn(&str) -> Option<String>) -> Result<bool, Error> {
    is_on(names::UNCHECKED, get)
}

/// The most compute threads that a worker may be told to have.
pub const MOST_THREADS: usize = 1024;

/// Whether workers that are started with these variables will take them: how they talk to each other, and with how many threads they
/// compute.
pub fn check_settings(get: impl Fn(&str) -> Option<String>) -> Result<(), Error> {
    transport(&get)?;
    threads(&get).map(drop)
}

fn transport(get: impl Fn(&str) -> Option<String>) -> Result<Transport, Error> {
    match get(names::TRANSPORT).as_deref() {
        None | Some("auto" | "") => Ok(Transport::Auto),
        Some("tcp") => Ok(Transport::Tcp),
        Some(value) => {
            let want = "must be auto or tcp".to_owned();
            Err(Error::Variable { name: names::TRANSPORT, value: value.to_owned(), want })
        }
    }
}

/// None, as 0, where it is left to the cores.
fn threads(get: impl Fn(&str) -> Option<String>) -> Result<Option<usize>, Error> {
    let Some(value) = get(names::THREADS).filter(|value| !value.is_empty()) else { return Ok(None) };
    match value.parse() {
        Ok(n) if n <= MOST_THREADS => Ok((n > 0).then_some(n)),
        _ => {
            let want = format!("must be a number up to {MOST_THREADS}, where 0 leaves it to the cores");
            Err(Error::Variable { name: names::THREADS, value, want })
        }
    }
}

/// Whether a variable that is `1` or `0` is on.
fn is_on(name: &'static str, get: impl Fn(&str) -> Option<String>) -> Result<bool, Error> {
    match get(name).as_deref() {
        None | Some("0" | "") => Ok(false),
        Some("1") => Ok(true),
        Some(value) => {
            let want = "must be 1 or 0".to_owned();
            Err(Error::Variable { name, value: value.to_owned(), want })
        }
    }
}

/// How a worker talks to the others.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Transport {
    /// Through shared memory with those of its host, over TCP with the rest.
    Auto,
    /// Over TCP with all.
    Tcp,
}

/// Where a worker reads the run's secret.
#[derive(Clone, Debug, PartialEq)]
pub enum SecretSource {
    /// An inherited descriptor.
    Descriptor(u32),
    /// A file that was named.
    File(PathBuf),
    /// The user's own file, made on first use.
    Own(PathBuf),
    /// Nowhere: no home folder is known.
    None,
}

impl SecretSource {
    /// Where a user keeps the secret that several processes of a run share: the file that the environment names, else an own one.
    pub fn kept(get: impl Fn(&str) -> Option<String>) -> SecretSource {
        let get = |name: &str| get(name).filter(|value| !value.is_empty());
        let own = || {
            let home = || get("HOME").map(|home| PathBuf::from(home).join(".config"));
            get("XDG_CONFIG_HOME").map(PathBuf::from).or_else(home)
        };
        match (get(names::SECRET_FILE), own()) {
            (Some(path), _) => SecretSource::File(path.into()),
            (None, Some(config)) => SecretSource::Own(config.join("phalanx/secret")),
            (None, None) => SecretSource::None,
        }
    }

    /// The secret of the run of this name.
    pub fn read(&self, run_id: &str) -> Result<Secret, Error> {
        let kept = match self {
            SecretSource::Descriptor(fd) => {
                // Opened anew through /proc, so that reading moves nobody else's position.
                let path = format!("/proc/self/fd/{fd}");
                // A number that means something else by now may be a pipe, which would be read for ever.
                let is_file =
                    std::fs::metadata(&path).is_ok_and(|found| found.is_file() && found.len() == 32);
                let bytes = is_file.then(|| std::fs::read(&path).ok()).flatten();
                let bytes = bytes.and_then(|bytes| <[u8; 32]>::try_from(bytes).ok());
                let bytes = bytes.ok_or_else(|| Error::Variable {
                    name: names::SECRET_FD,
                    value: fd.to_string(),
                    want: "must be the inherited descriptor of the launcher's secret, 32 bytes\nhint: a program that starts another closes it; start that one with `phalanx run`, or take the rank's variables out of its environment".into(),
                })?;
                // Made for this run alone.
                return Ok(Secret::from_bytes(bytes));
            }
            SecretSource::File(path) => Secret::read_file(path)?,
            SecretSource::Own(path) => Secret::load_or_create(path)?,
            SecretSource::None => return Err(Error::NoSecret),
        };
        Ok(kept.bind(run_id))
    }
}

impl WorkerEnv {
    /// The place that the environment of this process gives; none if it gives no rank.
    pub fn from_env() -> Result<Option<WorkerEnv>, Error> {
        WorkerEnv::from_variables(|name| std::env::var(name).ok())
    }

    /// The place that these variables give.
    pub fn from_variables(get: impl Fn(&str) -> Option<String>) -> Result<Option<WorkerEnv>, Error> {
        let get = |name: &str| get(name).filter(|value| !value.is_empty());
        let number = |name: &'static str| -> Result<Option<usize>, Error> {
            let Some(value) = get(name) else { return Ok(None) };
            let wrong =
                |_| Error::Variable { name, value: value.clone(), want: "must be a number from 0".into() };
            value.parse().map(Some).map_err(wrong)
        };
        let own_rank = number(names::RANK)?;
        let cores = || std::thread::available_parallelism().map_or(1, usize::from);
        let step = if own_rank.is_none() { slurm::Step::from_variables(get, cores())? } else { None };
        let Some(rank) = own_rank.or(step.as_ref().map(|step| step.rank)) else { return Ok(None) };
        let needed = |name: &'static str, found: Option<usize>| {
            found.ok_or_else(|| Error::Variable {
                name,
                value: String::new(),
                want: "must be set where RANK is".into(),
            })
        };
        let world_size = match &step {
            Some(step) => step.world_size,
            None => needed(names::WORLD_SIZE, number(names::WORLD_SIZE)?)?,
        };
        if rank >= world_size {
            let want = format!("must be below WORLD_SIZE, which is {world_size}");
            return Err(Error::Variable { name: names::RANK, value: rank.to_string(), want });
        }
        let (local_rank, local_world_size) = match &step {
            Some(step) => (step.local_rank, step.local_world_size),
            None => (
                number(names::LOCAL_RANK)?.unwrap_or(rank),
                number(names::LOCAL_WORLD_SIZE)?.unwrap_or(world_size),
            ),
        };
        let run_id = match &step {
            Some(step) => step.run_id(),
            None => get(names::RUN_ID).unwrap_or_else(|| "none".into()),
        };
        let host = get(names::MASTER_ADDR).or(step.as_ref().map(|step| step.first_node.clone()));
        let master = match (host, get(names::MASTER_PORT)) {
            (Some(host), Some(port)) => {
                let wrong = |_| Error::Variable {
                    name: names::MASTER_PORT,
                    value: port.clone(),
                    want: "must be a port number".into(),
                };
                let port = port.parse().map_err(wrong)?;
                let taken = get(names::AGENT_STORE).is_some_and(|value| value.eq_ignore_ascii_case("true"));
                Some((host, if taken { port_of(&format!("{run_id} {port}")) } else { port }))
            }
            (Some(host), None) if step.is_some() => Some((host, port_of(&run_id))),
            _ => None,
        };
        let coordinator = match get(names::COORDINATOR) {
            None => None,
            Some(value) => Some(value.parse().map_err(|_| Error::Variable {
                name: names::COORDINATOR,
                value: value.clone(),
                want: "must be an address and a port".into(),
            })?),
        };
        let transport = transport(get)?;
        let tls = wants_tls(get)?;
        let secret = match number(names::SECRET_FD)? {
            Some(fd) => SecretSource::Descriptor(fd as u32),
            None => SecretSource::kept(get),
        };
        Ok(Some(WorkerEnv {
            rank: Rank(rank as u32),
            local_rank,
            world_size,
            local_world_size,
            master,
            coordinator,
            whereabouts: number(names::COORDINATOR_FD)?.and_then(|fd| Whereabouts::inherited(fd as u32)),
            generation: Generation(number(names::GENERATION)?.unwrap_or(0) as u64),
            elastic: number(names::ELASTIC)?.is_some_and(|yes| yes > 0),
            varies: get(names::NODES)
                .is_some_and(|nodes| nodes.split_once(':').is_some_and(|(least, most)| least != most)),
            restarts: number(names::RESTART_COUNT)?.unwrap_or(0),
            run_id,
            run_dir: get(names::RUN_DIR).map(PathBuf::from),
            threads: threads(get)?,
            share: number(names::SHARE)?.filter(|&n| n > 0).or(step.as_ref().and_then(|step| step.share)),
            devices_on_node: step.as_ref().and_then(|step| step.devices_on_node),
            advice: step.and_then(|step| step.advice),
            secret,
            pulse: number(names::PULSE_FD)?.map(|fd| fd as u32),
            transport,
            tls,
            all_reduce: get(names::ALLREDUCE),
            unchecked: is_unchecked(get)?,
        }))
    }

    /// The number of this worker's device among the `visible` that it sees: that of its local rank, or 0 where Slurm lets each task
    /// see devices of its own. None if there is none left for it.
    pub fn device_index(&self, visible: usize) -> Option<usize> {
        let has_own =
            visible < self.local_world_size && self.devices_on_node.is_some_and(|devices| visible < devices);
        let index = if has_own { 0 } else { self.local_rank };
        (index < visible).then_some(index)
    }

    /// What the connections of this run are made with.
    pub fn pass(&self) -> Result<Pass, Error> {
        let secret = self.secret()?;
        if !self.tls {
            return Ok(secret.into());
        }
        Pass::encrypted(secret).map_err(|error| Error::Variable {
            name: names::TLS,
            value: "1".into(),
            want: error.to_string(),
        })
    }

    /// The secret of this run.
    pub fn secret(&self) -> Result<Secret, Error> {
        self.secret.read(&self.run_id)
    }
}

/// A port that all ranks of a run find without talking: below those that the system hands out by itself.
pub fn port_of(key: &str) -> u16 {
    // FNV-1a: any fixed hash would do, and the standard library promises none.
    let hash = key
        .bytes()
        .fold(0xcbf2_9ce4_8422_2325u64, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3));
    20_000 + (hash % 12_000) as u16
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::fd::AsRawFd;

    fn env(pairs: &[(&str, &str)]) -> Result<Option<WorkerEnv>, Error> {
        WorkerEnv::from_variables(|name| pairs.iter().find(|(n, _)| *n == name).map(|(_, v)| v.to_string()))
    }

    #[test]
    fn torchrun_and_nothing() {
        assert!(env(&[("HOME", "/h")]).unwrap().is_none());
        let torch = env(&[
            ("RANK", "3"),
            ("WORLD_SIZE", "4"),
            ("MASTER_ADDR", "h"),
            ("MASTER_PORT", "1"),
            ("HOME", "/h"),
        ]);
        let torch = torch.unwrap().unwrap();
        assert_eq!((torch.rank, torch.world_size, torch.master), (Rank(3), 4, Some(("h".into(), 1))));
        assert_eq!(torch.secret, SecretSource::Own("/h/.config/phalanx/secret".into()));
    }

    #[test]
    fn a_port_that_torchruns_agent_took_is_not_taken_again() {
        let mut variables =
            vec![("RANK", "0"), ("WORLD_SIZE", "2"), ("MASTER_ADDR", "h"), ("MASTER_PORT", "29500")];
        assert_eq!(env(&variables).unwrap().unwrap().master, Some(("h".into(), 29500)));
        variables.push(("TORCHELASTIC_USE_AGENT_STORE", "True"));
        let (_, port) = env(&variables).unwrap().unwrap().master.unwrap();
        assert!((20_000..32_000).contains(&port) && port != 29500);
        variables[0] = ("RANK", "1");
        assert_eq!(env(&variables).unwrap().unwrap().master.unwrap().1, port, "the same on every rank");
    }

    /// The variables of task 2 of 4 on two nodes, with more.
    fn of_slurm(more: &[(&str, &str)]) -> WorkerEnv {
        let usual = [
            ("SLURM_STEP_NUM_TASKS", "4"),
            ("SLURM_PROCID", "1"),
            ("SLURM_LOCALID", "1"),
            ("SLURM_NODEID", "0"),
            ("SLURM_STEP_TASKS_PER_NODE", "2(x2)"),
            ("SLURM_STEP_NODELIST", "rack[0-1]_blade[0-1]"),
            ("SLURM_JOB_ID", "55"),
            ("SLURM_STEP_ID", "2"),
        ];
        env(&[more, &usual].concat()).unwrap().unwrap()
    }

    #[test]
    fn slurm_alone_gives_a_place() {
        let task = of_slurm(&[]);
        assert_eq!((task.rank, task.world_size), (Rank(1), 4));
        assert_eq!((task.local_rank, task.local_world_size, task.run_id.as_str()), (1, 2, "slurm-55.2"));
        let (host, port) = task.master.unwrap();
        assert_eq!(host, "rack0_blade0");
        assert!((20_000..32_000).contains(&port));
        let other = of_slurm(&[("SLURM_STEP_ID", "3")]).master.unwrap();
        assert_ne!(other.1, port, "another step of the job");
        assert_eq!(of_slurm(&[("MASTER_PORT", "4567")]).master.unwrap(), ("rack0_blade0".into(), 4567));
        assert_eq!(of_slurm(&[("MASTER_ADDR", "h")]).master.unwrap(), ("h".into(), port));
        let started = of_slurm(&[("RANK", "0"), ("WORLD_SIZE", "1")]);
        assert_eq!((started.world_size, started.master), (1, None), "an agent's worker");
    }

    #[test]
    fn a_worker_has_the_device_of_its_local_rank_or_its_only_one() {
        for (on_node, visible, want) in [
            (None, 8, Some(1)),
            (None, 2, Some(1)),
            (None, 1, None),
            (None, 0, None),
            (Some("2"), 2, Some(1)),
            // --gpus-per-task=1
            (Some("2"), 1, Some(0)),
            (Some("2"), 0, None),
            // One for both.
            (Some("1"), 1, None),
        ] {
            let more: Vec<_> = on_node.map(|count| ("SLURM_GPUS_ON_NODE", count)).into_iter().collect();
            assert_eq!(of_slurm(&more).device_index(visible), want, "{on_node:?} {visible}");
        }
    }

    #[test]
    fn a_descriptor_that_is_something_else_is_refused_at_once() {
        let (reader, _writer) = std::io::pipe().unwrap();
        let fd = reader.as_raw_fd().to_string();
        let variables = [("RANK", "0"), ("WORLD_SIZE", "2"), ("PHALANX_SECRET_FD", fd.as_str())];
        let error = env(&variables).unwrap().unwrap().secret().err().unwrap().to_string();
        assert!(error.contains("PHALANX_SECRET_FD") && error.contains("hint: "), "{error}");
    }

    #[test]
    fn a_senseless_variable_is_named_with_its_value() {
        let message = |pairs| env(pairs).unwrap_err().to_string();
        assert!(message(&[("RANK", "x"), ("WORLD_SIZE", "2")]).contains("RANK is \"x\""));
        assert!(message(&[("RANK", "2"), ("WORLD_SIZE", "2")]).contains("below WORLD_SIZE, which is 2"));
        let wrong = message(&[("RANK", "0"), ("WORLD_SIZE", "1"), ("PHALANX_TRANSPORT", "udp")]);
        assert!(wrong.contains("PHALANX_TRANSPORT is \"udp\": must be auto or tcp"), "{wrong}");
        let wrong = message(&[("RANK", "0"), ("WORLD_SIZE", "1"), ("PHALANX_TLS", "yes")]);
        assert!(wrong.contains("PHALANX_TLS is \"yes\": must be 1 or 0"), "{wrong}");
        assert!(message(&[("RANK", "0")]).contains("WORLD_SIZE is \"\": must be set"));
        assert!(
            message(&[("RANK", "0"), ("WORLD_SIZE", "1"), ("PHALANX_COORDINATOR", "here")]).contains("here")
        );
        assert!(matches!(
            env(&[("RANK", "0"), ("WORLD_SIZE", "2")]).unwrap().unwrap().secret(),
            Err(Error::NoSecret)
        ));
    }
}
