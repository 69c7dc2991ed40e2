//! What arrives in the queue that the supervising thread empties.

use crate::agent::Found;
use nix::sys::signal::Signal;
use nix::sys::wait::WaitStatus;
use phalanx_coord::{Coordinator, Notice};
use phalanx_job::{DRAINED, ToAgent};
use phalanx_wire::Generation;
use std::fmt;
use std::net::SocketAddr;
use std::path::PathBuf;

/// Everything that arrives.
pub(crate) enum News {
    /// A worker's process is over.
    Exited(Berth, How),
    /// Nothing is left of it.
    Ended(Berth),
    /// This process was sent a signal that ends the run.
    Signal(i32),
    /// It was sent one that is only for the workers.
    PassOn(i32),
    /// From the coordinator of a run of several nodes.
    Fleet(ToAgent),
    /// The coordinator there is gone, and this is how that was seen.
    Alone(SocketAddr, phalanx_job::Error),
    /// Who leads the run on, or why this node has no part in it any more, and then what would have led it here.
    Found(Result<Box<Found>, phalanx_job::Error>, Option<Coordinator>),
    /// Where a worker hangs is written down in this file, if it could be.
    Stack(Berth, Option<PathBuf>),
    /// From the coordinator, about a worker of this generation.
    Notice(Generation, Notice),
    /// One of the threads that write to the console has written everything.
    Shown,
}

/// The place of a worker's process among those of the run, from its start until nothing is left of it. One that takes a rank
/// over has a berth of its own, since what the one before has left behind may need a while to end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Berth(pub(crate) u32);

/// How a process ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum How {
    Code(i32),
    Signal(i32),
    /// The system can't say.
    Lost(String),
}

impl How {
    pub(crate) fn of(status: nix::Result<WaitStatus>) -> How {
        match status {
            Ok(WaitStatus::Exited(_, code)) => How::Code(code),
            Ok(WaitStatus::Signaled(_, signal, _)) => How::Signal(signal as i32),
            Ok(other) => How::Lost(format!("{other:?}")),
            Err(error) => How::Lost(error.to_string()),
        }
    }

    pub(crate) fn is_good(&self) -> bool {
        *self == How::Code(0)
    }

    /// Whether nothing went wrong: its work was done, or it was kept, to be gone on with later.
    pub(crate) fn is_well(&self) -> bool {
        self.is_good() || self.is_drained()
    }

    /// Whether it wants to be started again later.
    pub(crate) fn is_drained(&self) -> bool {
        *self == How::Code(DRAINED.into())
    }

    /// Whether a signal of this number ended it: as a signal, or as the code that a shell makes of it.
    pub(crate) fn is_by(&self, signal: Signal) -> bool {
        [How::Signal(signal as i32), How::Code(128 + signal as i32)].contains(self)
    }
}

impl fmt::Display for How {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            How::Code(code) => write!(f, "exited with code {code}"),
            How::Signal(number) => match Signal::try_from(*number) {
                Ok(signal) => write!(f, "was killed by {signal}"),
                Err(_) => write!(f, "was killed by signal {number}"),
            },
            How::Lost(why) => write!(f, "was lost: {why}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_end_is_told_and_laid_at_a_signals_door() {
        let check = |how: How, text: &str, by_sigterm: bool| {
            assert_eq!((how.to_string().as_str(), how.is_by(Signal::SIGTERM)), (text, by_sigterm));
        };
        check(How::Code(0), "exited with code 0", false);
        assert!(How::Code(75).is_well() && How::Code(75).is_drained() && !How::Code(75).is_good());
        check(How::Code(15), "exited with code 15", false);
        check(How::Code(143), "exited with code 143", true);
        check(How::Signal(15), "was killed by SIGTERM", true);
        check(How::Signal(9), "was killed by SIGKILL", false);
        check(How::Signal(64), "was killed by signal 64", false);
    }
}
