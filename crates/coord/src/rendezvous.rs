//! How a worker finds the others, whoever started it.

use crate::server::Coordinator;
use phalanx_job::{Error, Link, Roster, WorkerEnv, names, slurm};
use phalanx_wire::{Deadline, Rank, Secret};
use std::io::ErrorKind;
use std::net::{IpAddr, SocketAddr, ToSocketAddrs, UdpSocket};
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
    let places = match (env.coordinator, &env.master) {
        (Some(address), _) => vec![address],
        (None, Some((name, port))) => {
            let found = addresses(name, *port, env.world_size > env.local_world_size)?;
            if env.rank.0 == 0 {
                let serve =
                    |address| Coordinator::serve(address, &pass, env.generation, env.world_size, |_, _| {});
                // Where a port is taken, the others would find whoever has it.
                let hosted = found.iter().skip(1).fold(serve(found[0]), |hosted, next| match hosted {
                    Err(error) if error.kind() != ErrorKind::AddrInUse => serve(*next),
                    hosted => hosted,
                });
                let hosted = hosted.map_err(|e| {
                    unreachable(name, *port, format!(
                        "rank 0 can't listen there: {e}\nhint: choose another MASTER_PORT, the same for all ranks, or start them with `phalanx run`, which finds a free one"
                    ))
                })?;
                vec![host.insert(hosted).address()]
            } else {
                found
            }
        }
        (None, None) => {
            let want = "must be set with MASTER_PORT where there is no PHALANX_COORDINATOR".into();
            return Err(Error::Variable { name: names::MASTER_ADDR, value: String::new(), want });
        }
    };
    let moves = env.whereabouts.clone();
    let begun = Instant::now();
    let connected = Link::connect_following(&places, &pass, env.rank, env.generation, moves, deadline);
    let mut link = connected.map_err(|error| match error {
        // An agent starts its workers once it listens itself.
        Error::Unreachable { address, reason } if env.coordinator.is_none() => {
            let waited = begun.elapsed().as_secs();
            let hint = "rank 0 listens at MASTER_ADDR:MASTER_PORT: is it started, and are these the same for all ranks? Where MASTER_ADDR is a name, its own machine may know it as 127.0.1.1 (/etc/hosts): then give the address that others reach it at";
            Error::Unreachable { address, reason: format!("{reason}, after {waited} s\nhint: {hint}") }
        }
        other => other,
    })?;
    let address = endpoint(link.local_address()?.ip())?;
    let (rank, roster) = link.join(address, deadline)?;
    Ok(Meeting { rank, roster, secret: pass.secret().clone(), link, host })
}

fn unreachable(name: &str, port: u16, reason: String) -> Error {
    Error::Unreachable { address: format!("{name}:{port}"), reason }
}

/// Where rank 0 of a run, on several machines or not, may listen: one address at least.
fn addresses(name: &str, port: u16, spans_nodes: bool) -> Result<Vec<SocketAddr>, Error> {
    let found = match (name, port).to_socket_addrs() {
        Ok(found) => {
            let own = || if spans_nodes { address_to_others() } else { None };
            seen_by_others(name, found, own)
        }
        // A cluster's own names may be known to nobody else.
        Err(error) => slurm::node_address(name)
            .ok_or(error)
            .and_then(|known| (known.as_str(), port).to_socket_addrs())
            .map_err(|error| unreachable(name, port, error.to_string()))?
            .collect(),
    };
    if found.is_empty() {
        return Err(unreachable(name, port, "the name has no address".into()));
    }
    Ok(found)
}

/// Those of a name's addresses that are good for other machines, which this one's own name often isn't here: Debian's `/etc/hosts`
/// has it as 127.0.1.1. Where none is, `own` is asked for the address that this machine has for others, which all of its ranks find
/// alike.
fn seen_by_others(
    name: &str,
    found: impl Iterator<Item = SocketAddr>,
    own: impl FnOnce() -> Option<IpAddr>,
) -> Vec<SocketAddr> {
    let found: Vec<SocketAddr> = found.collect();
    let Some(port) = found.first().map(SocketAddr::port) else { return found };
    let is_meant = name == "localhost" || name.parse::<IpAddr>().is_ok();
    let good: Vec<SocketAddr> =
        found.iter().filter(|address| is_meant || !address.ip().is_loopback()).copied().collect();
    match good.is_empty() {
        false => good,
        true => own().map_or(found, |ip| vec![SocketAddr::new(ip, port)]),
    }
}

/// The address that this machine sends from to others; none where it is connected to nobody. Nothing is sent to find out.
fn address_to_others() -> Option<IpAddr> {
    // Of a network that is for examples in texts.
    const ANYBODY: &str = "192.0.2.1:9";
    let socket = UdpSocket::bind("0.0.0.0:0").ok()?;
    socket.connect(ANYBODY).ok()?;
    Some(socket.local_addr().ok()?.ip()).filter(|ip| !ip.is_loopback() && !ip.is_unspecified())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_that_is_only_good_here_gets_the_address_that_others_see() {
        let check = |name: &str, found: &[&str], own: Option<&str>, want: &[&str]| {
            let found = found.iter().map(|ip| SocketAddr::new(ip.parse().unwrap(), 29500));
            let got = seen_by_others(name, found, || own.map(|ip| ip.parse().unwrap()));
            let got: Vec<String> = got.iter().map(|got| got.ip().to_string()).collect();
            assert_eq!(got, want, "{name}");
        };
        check("n1", &["10.0.0.7"], None, &["10.0.0.7"]);
        check("n1", &["127.0.1.1"], Some("10.0.0.7"), &["10.0.0.7"]);
        check("n1", &["127.0.1.1", "10.0.0.8"], Some("10.0.0.7"), &["10.0.0.8"]);
        check("n1", &["fe80::7", "10.0.0.8"], Some("10.0.0.7"), &["fe80::7", "10.0.0.8"]);
        check("n1", &["127.0.1.1"], None, &["127.0.1.1"]);
        check("localhost", &["::1", "127.0.0.1"], Some("10.0.0.7"), &["::1", "127.0.0.1"]);
        check("127.0.0.1", &["127.0.0.1"], Some("10.0.0.7"), &["127.0.0.1"]);
        check("n1", &[], Some("10.0.0.7"), &[]);
    }
}
