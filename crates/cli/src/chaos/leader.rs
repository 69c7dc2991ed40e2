//! Which agent leads a run of several nodes at the moment.

use nix::unistd::Pid;
use phalanx_job::{Environ, names};
use std::fs;
use std::net::{Ipv4Addr, SocketAddr};
use std::path::Path;

/// Where a worker reads that its coordinator is: where it was told at its start, or in memory if that has become another.
pub(super) fn address(worker: Pid) -> Option<SocketAddr> {
    let variables = Environ::of(worker.as_raw())?;
    let given = |name: &str| variables.get(name).filter(|value| !value.is_empty());
    let now = given(names::COORDINATOR_FD).and_then(|fd| {
        let text = fs::read_to_string(format!("/proc/{worker}/fd/{fd}")).ok()?;
        text.trim_end().parse().ok()
    });
    now.or_else(|| given(names::COORDINATOR)?.parse().ok())
}

/// Which of these agents listens there.
pub(super) fn listens(agents: impl IntoIterator<Item = (usize, Pid)>, at: SocketAddr) -> Option<usize> {
    let SocketAddr::V4(at) = at else { return None };
    let local = format!("{:08X}:{:04X}", u32::from_le_bytes(at.ip().octets()), at.port());
    let any = format!("{:08X}:{:04X}", u32::from(Ipv4Addr::UNSPECIFIED), at.port());
    let table = fs::read_to_string("/proc/net/tcp").ok()?;
    let inode = table.lines().find_map(|line| {
        let fields: Vec<&str> = line.split_whitespace().collect();
        let is_it = [&local, &any].iter().any(|address| fields.get(1) == Some(&address.as_str()));
        // 0A is the state of a socket that listens.
        fields.get(9).filter(|_| is_it && fields.get(3) == Some(&"0A")).copied()
    })?;
    let socket = format!("socket:[{inode}]");
    let holds = |agent: &Pid| {
        let entries = fs::read_dir(format!("/proc/{agent}/fd")).into_iter().flatten().flatten();
        entries
            .map(|entry| fs::read_link(entry.path()))
            .any(|link| link.is_ok_and(|to| to == Path::new(&socket)))
    };
    agents.into_iter().find(|(_, agent)| holds(agent)).map(|(node, _)| node)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::TcpListener;

    #[test]
    fn who_listens_is_found() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let (at, own) = (listener.local_addr().unwrap(), Pid::this());
        assert_eq!(listens([(1, Pid::from_raw(1)), (7, own)], at), Some(7));
        drop(listener);
        assert_eq!(listens([(7, own)], at), None);
    }
}
