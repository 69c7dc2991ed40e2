//! How a worker finds the others, whoever started it.

use crate::server::Coordinator;
use phalanx_job::{Error, Link, Roster, WorkerEnv, names, slurm};
use phalanx_wire::{Deadline, Rank, Secret};
use std::net::{IpAddr, SocketAddr, ToSocketAddrs};
use std::time::Instant;

/// What a worker leaves the rendezvous with.
pub struct Meeting {
    /// This worker's rank.
    pub rank: Rank,
    /// Who is in the run.
    pub roster: Roster,
    /// The run's secret.
    pub secret: Secret,
    /// The connection to the coordinator; closing it means leaving.
    pub link: Link,
    /// The coordinator itself, where rank 0 hosts it.
    pub host: Option<Coordinator>,
}

/// Meets the other ranks: at the agent's coordinator if there is one, else at `MASTER_ADDR:MASTER_PORT`, where rank 0 then
/// hosts one. `endpoint` is asked for this rank's address once it is known which of this machine's addresses reaches the
/// coordinator.
pub fn rendezvous(
    env: &WorkerEnv,
    deadline: Deadline,
    endpoint: impl FnOnce(IpAddr) -> Result<String, Error>,
) -> Result<Meeting, Error> {
    let pass = env.pass()?;
    let mut host = None;
    let place: SocketAddr = match (env.coordinator, &env.master) {
        (Some(address), _) => address,
        (None, Some((name, port))) => {
            let text = format!("{name}:{port}");
            let unreachable = |reason: String| Error::Unreachable { address: text.clone(), reason };
            let mut addresses = (name.as_str(), *port).to_socket_addrs().or_else(|error| {
                let by_slurm = slurm::node_address(name).ok_or(error)?;
                (by_slurm.as_str(), *port).to_socket_addrs()
            });
            let addresses = addresses.as_mut().map_err(|e| unreachable(e.to_string()))?;
            let address = addresses.next().ok_or_else(|| unreachable("the name has no address".into()))?;
            if env.rank.0 == 0 {
                let hosted = Coordinator::serve(address, &pass, env.generation, env.world_size, |_, _| {});
                host = Some(hosted.map_err(|e| {
                    unreachable(format!(
                        "rank 0 can't listen there: {e}\nhint: choose another MASTER_PORT, the same for all ranks, or start them with `phalanx run`, which finds a free one"
                    ))
                })?);
            }
            address
        }
        (None, None) => {
            let want = "must be set with MASTER_PORT where there is no PHALANX_COORDINATOR".into();
            return Err(Error::Variable { name: names::MASTER_ADDR, value: String::new(), want });
        }
    };
    let moves = env.whereabouts.clone();
    let begun = Instant::now();
    let connected = Link::connect_following(place, &pass, env.rank, env.generation, moves, deadline);
    let mut link = connected.map_err(|error| match error {
        // An agent starts its workers once it listens itself.
        Error::Unreachable { address, reason } if env.coordinator.is_none() => {
            let waited = begun.elapsed().as_secs();
            let hint = "rank 0 listens at MASTER_ADDR:MASTER_PORT: is it started, and are these the same for all ranks?";
            Error::Unreachable { address, reason: format!("{reason}, after {waited} s\nhint: {hint}") }
        }
        other => other,
    })?;
    let address = endpoint(link.local_address()?.ip())?;
    let (rank, roster) = link.join(address, deadline)?;
    Ok(Meeting { rank, roster, secret: pass.secret().clone(), link, host })
}
