//! A disk without room, as far as processes can tell: none of their files may grow. That is a limit of each process, which
//! needs no rights and harms nobody else on the machine, unlike a disk that is filled.

use nix::unistd::Pid;
use rustix::process::{Resource, Rlimit, getrlimit, prlimit};
use std::io;

/// What a file may have all the same: as much as is written before it is known what kind of run this is.
const ROOM: u64 = 4096;

/// From now on the process can't write more.
pub(super) fn fill(process: Pid) -> io::Result<()> {
    let own = getrlimit(Resource::Fsize);
    limit(process, Rlimit { current: Some(ROOM), ..own })
}

/// It can again, as this one can.
pub(super) fn free(process: Pid) -> io::Result<()> {
    limit(process, getrlimit(Resource::Fsize))
}

fn limit(process: Pid, limit: Rlimit) -> io::Result<()> {
    let Some(pid) = rustix::process::Pid::from_raw(process.as_raw()) else { return Ok(()) };
    match prlimit(Some(pid), Resource::Fsize, limit) {
        // It has ended, or is about to.
        Err(rustix::io::Errno::SRCH) => Ok(()),
        done => Ok(done.map(drop)?),
    }
}
