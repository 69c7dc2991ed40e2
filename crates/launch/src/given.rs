//! What every worker of a run is given: its environment, the secret, the program's port.

use crate::spec::{LaunchError, LaunchSpec, LocalRank};
use nix::sys::memfd::{MFdFlags, memfd_create};
use phalanx_job::{RunDir, Seat, Whereabouts, names};
use phalanx_wire::{Generation, Pass, Rank, Secret};
use std::ffi::CStr;
use std::fs::File;
use std::io::Write;
use std::net::{Ipv4Addr, SocketAddr, TcpListener, ToSocketAddrs};
use std::os::fd::AsRawFd;
use std::path::PathBuf;

/// What every worker of a run is told.
pub(crate) struct Given<'a> {
    pub(crate) spec: &'a LaunchSpec,
    pub(crate) coordinator: SocketAddr,
    /// The number of the inherited descriptor that tells where it is by now, where it may move.
    pub(crate) whereabouts: Option<i32>,
    /// This node's place among the nodes.
    pub(crate) seat: Seat,
    /// The number of the inherited descriptor that holds the secret.
    pub(crate) secret: i32,
    pub(crate) run_dir: &'a RunDir,
    /// Where their logs lie: the run directory, or another folder that is like one.
    pub(crate) logs: &'a RunDir,
    pub(crate) generation: Generation,
    /// Which folder of the logs is theirs.
    pub(crate) folder: Generation,
    /// How often workers were started again before.
    pub(crate) restarts: usize,
    /// Whether it is for one that takes the place of another, while the rest go on.
    pub(crate) replaces: bool,
    /// Compute threads of each worker, unless somebody asks for others.
    pub(crate) threads: usize,
}

impl Given<'_> {
    /// Where a worker that fails may say why, as PyTorch's programs do.
    pub(crate) fn error_file(&self, local: usize) -> PathBuf {
        let name = format!("{}.error.json", self.rank(local));
        self.logs.path().join("logs").join(self.folder.to_string()).join(name)
    }

    /// The rank of the worker of this number on this machine.
    pub(crate) fn rank(&self, local: usize) -> Rank {
        Rank(self.seat.first_rank + local as u32)
    }
}

/// The environment contract, for the worker of this number on this machine.
pub(crate) fn variables(given: &Given<'_>, local: usize) -> Vec<(&'static str, String)> {
    let (spec, seat, rank) = (given.spec, &given.seat, given.rank(local));
    let (local_rank, device) = match &spec.local_rank {
        LocalRank::Counted => (local.to_string(), None),
        LocalRank::Virtual { variable, devices } => ("0".into(), Some((*variable, devices[local].clone()))),
    };
    let mut variables: Vec<(&str, String)> = vec![
        (names::RANK, rank.to_string()),
        (names::LOCAL_RANK, local_rank),
        (names::WORLD_SIZE, seat.world_size.to_string()),
        (names::LOCAL_WORLD_SIZE, spec.workers.to_string()),
        (names::GROUP_RANK, seat.node.to_string()),
        (names::GROUP_WORLD_SIZE, seat.nodes.to_string()),
        (names::ROLE_NAME, spec.role.clone()),
        (names::ROLE_RANK, (seat.first_role_rank + local as u32).to_string()),
        (names::ROLE_WORLD_SIZE, seat.role_world_size.to_string()),
        (names::MASTER_ADDR, seat.master.0.clone()),
        (names::MASTER_PORT, seat.master.1.to_string()),
        (names::RESTART_COUNT, given.restarts.to_string()),
        (names::MAX_RESTARTS, spec.max_restarts.to_string()),
        (names::RUN_ID, spec.run_id.clone()),
        (names::ERROR_FILE, given.error_file(local).display().to_string()),
        (names::SIGNALS_TO_HANDLE, spec.ending_signals.to_string()),
        // Another launcher's would have rank 0 wait for a store of its agent.
        (names::AGENT_STORE, "False".into()),
        (names::COORDINATOR, given.coordinator.to_string()),
        // Said in any case, as below: another launcher's would be in this one's own environment.
        (names::COORDINATOR_FD, given.whereabouts.map_or(String::new(), |fd| fd.to_string())),
        (names::SECRET_FD, given.secret.to_string()),
        (names::GENERATION, given.generation.to_string()),
        (names::ELASTIC, u8::from(spec.is_elastic()).to_string()),
        (
            names::NODES,
            spec.nodes.as_ref().map_or("1".into(), |nodes| format!("{}:{}", nodes.least, nodes.most)),
        ),
        (names::RUN_DIR, given.run_dir.path().display().to_string()),
        (names::SHARE, given.threads.to_string()),
    ];
    variables.extend(device);
    // Said in any case: what this launcher's own environment asks for is no more than what it does.
    variables.push((names::TLS, u8::from(spec.tls).to_string()));
    let mut unless_set = |name, value| {
        if std::env::var_os(name).is_none() {
            variables.push((name, value));
        }
    };
    unless_set(names::OMP_NUM_THREADS, given.threads.to_string());
    unless_set(names::NCCL_ERRORS, "1".into());
    // A debugger that reads nothing ends its worker, and the run, before the one that has the terminal is asked anything.
    if spec.stdin.is_some_and(|reads| reads != local) {
        unless_set("PYTHONBREAKPOINT", "0".into());
    }
    variables
}

/// What the run's connections are made with.
pub(crate) fn pass(spec: &LaunchSpec, secret: &Secret) -> Result<Pass, LaunchError> {
    if !spec.tls {
        return Ok(secret.into());
    }
    Pass::encrypted(secret.clone()).map_err(LaunchError::system("TLS for the run's connections"))
}

/// Memory that tells the workers where the coordinator is, who inherit its descriptor.
pub(crate) fn whereabouts(coordinator: SocketAddr) -> Result<(Whereabouts, i32), LaunchError> {
    let failed = || LaunchError::system("a descriptor for the coordinator's address");
    let file = inherited_file(c"phalanx-coordinator", &[]).map_err(failed())?;
    let (descriptor, whereabouts) = (file.as_raw_fd(), Whereabouts::new(file));
    whereabouts.write(coordinator).map_err(failed())?;
    Ok((whereabouts, descriptor))
}

/// A file in memory that holds the secret and is inherited by the workers: out of sight of `ps` and of the file system.
pub(crate) fn descriptor(secret: &Secret) -> Result<File, LaunchError> {
    inherited_file(c"phalanx-secret", secret.expose())
        .map_err(LaunchError::system("a descriptor for the secret"))
}

/// A file in memory that holds these bytes, whose descriptor all programs inherit that this process starts, under the same number.
///
/// # Errors
/// The system has no descriptor or no memory left.
pub fn inherited_file(name: &CStr, bytes: &[u8]) -> std::io::Result<File> {
    let mut file = File::from(memfd_create(name, MFdFlags::empty())?);
    file.write_all(bytes)?;
    Ok(file)
}

/// The program's port: the one asked for if it is free, else any free one.
pub(crate) fn master_port(spec: &LaunchSpec) -> Result<u16, LaunchError> {
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
