//! How the agents of a run find each other: whoever can listen at the endpoint hosts the coordinator, the others dial it.

use super::succeed::stand_by;
use crate::crew::Crew;
use crate::news::News;
use crate::nodes::Nodes;
use crate::report::Report;
use crate::spec::LaunchError;
use phalanx_coord::{Coordinator, Fleet};
use phalanx_job::{AgentLink, Claim, Error, Terms, clock_ms};
use phalanx_wire::{Deadline, Pass};
use std::collections::HashMap;
use std::io::ErrorKind;
use std::net::{IpAddr, SocketAddr, ToSocketAddrs};
use std::time::{Duration, Instant};

/// How long to wait before a coordinator that isn't there yet is tried again.
const RETRY: Duration = Duration::from_millis(50);
/// Something that hangs up on newcomers for so long is no coordinator.
const HANGS_UP: Duration = Duration::from_secs(5);

/// What came of it.
pub(super) enum Met {
    At(Place),
    /// This signal asked for the end before.
    Asked(i32),
}

/// Where an agent meets the others.
pub(super) struct Place {
    pub(super) link: AgentLink,
    /// The coordinator, if this agent hosts it.
    pub(super) coordinator: Option<Coordinator>,
    /// What becomes one later, if it doesn't.
    pub(super) standby: Option<Coordinator>,
    /// Nobody else writes to the logs of who leads.
    pub(super) claim: Option<Claim>,
}

impl Place {
    fn of(
        crew: &Crew<'_>,
        pass: &Pass,
        link: AgentLink,
        coordinator: Option<Coordinator>,
    ) -> Result<Place, LaunchError> {
        // Where nodes share a file system, they share the folder as well.
        let claim = coordinator.as_ref().map(|_| crew.logs.claim_logs()).transpose()?;
        let standby = match coordinator {
            Some(_) => None,
            None => Some(stand_by(&link, pass).map_err(LaunchError::system("a port to lead the run from"))?),
        };
        Ok(Place { link, coordinator, standby, claim })
    }

    /// Where others find this agent, should it have to lead them.
    pub(super) fn standby(&self) -> SocketAddr {
        self.standby.as_ref().map_or(self.link.coordinator(), Coordinator::address)
    }
}

/// Meets the other agents, or waits for who hosts the coordinator.
pub(super) fn meet(
    crew: &mut Crew<'_>,
    nodes: &Nodes,
    terms: &Terms,
    pass: &Pass,
) -> Result<Met, LaunchError> {
    let deadline = Deadline::after(nodes.patience.join);
    let mut waits = false;
    // Since when, without anything else meanwhile.
    let mut hung_up: HashMap<SocketAddr, Instant> = HashMap::new();
    loop {
        let addresses = resolve(nodes)?;
        if let Some(coordinator) = host(nodes, terms, pass, &addresses)? {
            let place = coordinator.address();
            if place.ip().is_loopback() && is_name(&nodes.endpoint.0) {
                let (host, ip) = (&nodes.endpoint.0, place.ip());
                let words = format!(
                    "{host} is {ip} here, where other machines can't reach it: give them all its address"
                );
                crew.tell(Report::Told { words });
            }
            let link = AgentLink::dial(place, pass, deadline, nodes.patience.silence)?;
            return Ok(Met::At(Place::of(crew, pass, link, Some(coordinator))?));
        }
        let mut error = None;
        for address in &addresses {
            match AgentLink::dial(*address, pass, deadline, nodes.patience.silence) {
                Ok(link) => return Ok(Met::At(Place::of(crew, pass, link, None)?)),
                Err(broken @ Error::Broken { .. }) => {
                    if hung_up.entry(*address).or_insert_with(Instant::now).elapsed() > HANGS_UP {
                        return Err(Error::NotOurs { address: *address }.into());
                    }
                    error = Some(broken);
                }
                Err(unreachable @ (Error::Unreachable { .. } | Error::NobodyListens { .. })) => {
                    hung_up.remove(address);
                    error = Some(unreachable);
                }
                Err(error) => return Err(error.into()),
            }
        }
        if let Some(error) = error.filter(|_| deadline.expired()) {
            return Err(error.into());
        }
        if !std::mem::replace(&mut waits, true) {
            let (host, port) = &nodes.endpoint;
            let seconds = deadline.remaining().as_secs();
            let words = format!("waiting for the first node at {host}:{port}; giving up in {seconds} s");
            crew.tell(Report::Told { words });
        }
        if let Ok(News::Signal(signal)) = crew.news.recv_timeout(RETRY) {
            crew.watch.asked();
            return Ok(Met::Asked(signal));
        }
    }
}

/// Whether it is a name that may mean something else elsewhere.
fn is_name(host: &str) -> bool {
    host != "localhost" && host.parse::<IpAddr>().is_err()
}

/// The addresses of the endpoint, in an order that is the same for all: a name may stand for several.
fn resolve(nodes: &Nodes) -> Result<Vec<SocketAddr>, LaunchError> {
    let (host, port) = &nodes.endpoint;
    let unknown = |why: String| LaunchError::Endpoint { host: host.clone(), why };
    let found = (host.as_str(), *port).to_socket_addrs().map_err(|error| unknown(error.to_string()))?;
    let mut addresses: Vec<SocketAddr> = found.collect();
    addresses.sort();
    addresses.dedup();
    if addresses.is_empty() { Err(unknown("the name has no address".into())) } else { Ok(addresses) }
}

/// A coordinator at one of these addresses, if it is for this agent to host it and nobody else listens there.
fn host(
    nodes: &Nodes,
    terms: &Terms,
    pass: &Pass,
    addresses: &[SocketAddr],
) -> Result<Option<Coordinator>, LaunchError> {
    if nodes.hosts == Some(false) {
        return Ok(None);
    }
    let mut is_here = false;
    for address in addresses {
        // Others may dial it before it leads, and are to wait for that.
        match Coordinator::stand_by(*address, pass) {
            Ok(coordinator) => {
                let fleet = Fleet::new(terms.clone(), nodes.patience, Instant::now(), clock_ms());
                coordinator.lead(fleet).map_err(LaunchError::system("a thread for the nodes"))?;
                return Ok(Some(coordinator));
            }
            Err(error) if error.kind() == ErrorKind::AddrInUse => is_here = true,
            Err(error) if error.kind() == ErrorKind::AddrNotAvailable => {}
            Err(error) => {
                return Err(LaunchError::system(format!("the coordinator can't listen at {address}"))(error));
            }
        }
    }
    if nodes.hosts == Some(true) && !is_here {
        let (host, port) = nodes.endpoint.clone();
        return Err(LaunchError::NotHere { host, port });
    }
    Ok(None)
}
