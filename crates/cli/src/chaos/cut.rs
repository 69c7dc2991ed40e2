//! Cuts connections of other processes: takes a descriptor of theirs for its own and shuts the connection down, so that both
//! ends find it ended. That needs no rights but those over one's own processes, where the system doesn't forbid it altogether.

use nix::sys::socket::getsockopt;
use nix::sys::socket::sockopt::PeerCredentials;
use nix::unistd::Pid;
use rustix::net::Shutdown;
use rustix::process::{PidfdFlags, PidfdGetfdFlags, pidfd_getfd, pidfd_open};
use std::fs;
use std::io;
use std::net::{SocketAddr, TcpStream};
use std::os::fd::OwnedFd;

/// A connection of another process, held by a descriptor of ours.
struct Connection {
    socket: OwnedFd,
    ends: Ends,
}

/// What is known of its ends.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Ends {
    /// A connection of this host, to this process.
    Local(Pid),
    Tcp {
        own: SocketAddr,
        other: SocketAddr,
    },
}

/// Cuts a connection of a process to any of the others; gives whether there was one.
pub(super) fn between(process: Pid, others: &[Pid]) -> io::Result<bool> {
    let mut far = Vec::new();
    for other in others {
        far.extend(connections(*other)?.into_iter().map(|connection| connection.ends));
    }
    cut_first(process, |ends| match ends {
        Ends::Local(other) => others.contains(&other),
        Ends::Tcp { own, other } => far.contains(&Ends::Tcp { own: other, other: own }),
    })
}

/// Cuts a connection of a process to this place; gives whether there was one.
pub(super) fn to(process: Pid, place: SocketAddr) -> io::Result<bool> {
    cut_first(process, |ends| matches!(ends, Ends::Tcp { other, .. } if other == place))
}

fn cut_first(process: Pid, is_it: impl Fn(Ends) -> bool) -> io::Result<bool> {
    let found = connections(process)?.into_iter().find(|connection| is_it(connection.ends));
    if let Some(Connection { socket, .. }) = &found {
        rustix::net::shutdown(socket, Shutdown::Both)?;
    }
    Ok(found.is_some())
}

/// The connections of a process; none if it has ended.
fn connections(process: Pid) -> io::Result<Vec<Connection>> {
    let Ok(descriptors) = fs::read_dir(format!("/proc/{process}/fd")) else { return Ok(Vec::new()) };
    let Some(pid) = rustix::process::Pid::from_raw(process.as_raw()) else { return Ok(Vec::new()) };
    let process = match pidfd_open(pid, PidfdFlags::empty()) {
        Err(rustix::io::Errno::SRCH) => return Ok(Vec::new()),
        opened => opened?,
    };
    let is_socket = |entry: &fs::DirEntry| {
        fs::read_link(entry.path()).is_ok_and(|link| link.to_string_lossy().starts_with("socket:"))
    };
    let numbers = descriptors.filter_map(Result::ok).filter(is_socket);
    let numbers = numbers.filter_map(|entry| entry.file_name().to_str()?.parse().ok());
    let mut found = Vec::new();
    for number in numbers {
        match pidfd_getfd(&process, number, PidfdGetfdFlags::empty()) {
            Ok(socket) => found.extend(connection(socket)),
            // It was closed meanwhile, or its process has ended.
            Err(rustix::io::Errno::BADF | rustix::io::Errno::SRCH) => {}
            Err(error) => return Err(error.into()),
        }
    }
    Ok(found)
}

/// None for a socket that isn't connected.
fn connection(socket: OwnedFd) -> Option<Connection> {
    let stream = TcpStream::from(socket);
    let tcp = stream.local_addr().and_then(|own| Ok(Ends::Tcp { own, other: stream.peer_addr()? }));
    let ends = match tcp {
        Ok(ends) => ends,
        // Whoever listens is its own peer, which nobody asks for.
        Err(_) => Ends::Local(Pid::from_raw(getsockopt(&stream, PeerCredentials).ok()?.pid())),
    };
    Some(Connection { socket: stream.into(), ends })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::say::say;
    use std::io::Read;
    use std::net::TcpListener;
    use std::os::unix::net::UnixStream;
    use std::process::{Child, Command, Stdio};

    /// A process that reads from this to its end.
    fn reader(from: impl Into<OwnedFd>) -> (Child, Pid) {
        let reader = Command::new("cat").stdin(from.into()).stdout(Stdio::null()).spawn().unwrap();
        let pid = Pid::from_raw(reader.id() as i32);
        (reader, pid)
    }

    #[test]
    fn a_connection_that_is_cut_ends_for_both() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let place = listener.local_addr().unwrap();
        let (mut reader_over_tcp, pid) = reader(TcpStream::connect(place).unwrap());
        let (mut far, _) = listener.accept().unwrap();
        assert!(!between(pid, &[]).unwrap());
        match to(pid, place) {
            Err(error) => {
                reader_over_tcp.kill().unwrap();
                return say(format_args!("skipped: connections can't be cut here: {error}"));
            }
            Ok(is_cut) => assert!(is_cut),
        }
        let mut byte = [0];
        assert_eq!(far.read(&mut byte).unwrap(), 0);
        assert!(reader_over_tcp.wait().unwrap().success());
        let (mut near, far) = UnixStream::pair().unwrap();
        let (mut local_reader, pid) = reader(far);
        assert!(!to(pid, place).unwrap());
        assert!(between(pid, &[Pid::this()]).unwrap());
        assert_eq!(near.read(&mut byte).unwrap(), 0);
        assert!(local_reader.wait().unwrap().success());
        assert!(!between(pid, &[Pid::this()]).unwrap());
    }
}
