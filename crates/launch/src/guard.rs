//! The last resort against orphans. When the launcher is killed, the kernel kills the workers themselves, but not what they
//! have started. A small process without anything else to do notices its end and kills their groups.
//!
//! It is forked, not executed: a library has no program of its own to run. It lives in a session of its own, so that who kills the
//! launcher's group spares it, and takes no signal but SIGKILL.

use crate::news::Berth;
use crate::spec::LaunchError;
use nix::fcntl::{FcntlArg, OFlag, fcntl};
use nix::libc;
use nix::sys::prctl::set_name;
use nix::sys::signal::{SigSet, Signal, kill, killpg};
use nix::sys::wait::{WaitPidFlag, WaitStatus, waitpid};
use nix::unistd::{ForkResult, Pid, fork, setsid};
use std::io::{PipeReader, PipeWriter, Read, Write, pipe};
use std::os::fd::AsRawFd;
use std::time::{Duration, Instant};

/// How long it has to end once it is let go, and once it is killed. One that takes longer is stopped.
const MOMENT: Duration = Duration::from_secs(1);

/// The guard of a run; it ends when this is dropped, and kills the groups that it still watches.
pub(crate) struct Guard {
    /// None once it is dismissed.
    orders: Option<PipeWriter>,
    /// Where it reads them. Kept open on this side too, so that orders for a guard that somebody has killed are no broken pipe,
    /// whose SIGPIPE would kill a worker before it is one.
    _read_by_guard: PipeReader,
    pid: Pid,
}

/// A berth and the group to watch for it from now on, 0 for none. Orders are written whole: they are shorter than any pipe.
type Order = [u8; 8];

impl Guard {
    /// Forks it. Early is best: it keeps the memory of this moment.
    pub(crate) fn start(berths: usize) -> Result<Guard, LaunchError> {
        let (orders, sender) = pipe().map_err(LaunchError::system("a pipe for the guard process"))?;
        // Nobody waits for a guard that is stopped, and so takes no orders.
        fcntl(&sender, FcntlArg::F_SETFL(OFlag::O_NONBLOCK))
            .map_err(std::io::Error::from)
            .map_err(LaunchError::system("a pipe for the guard process"))?;
        let mut groups = vec![0; berths];
        // SAFETY: other threads may exist, so until its end the child may only do what is async-signal-safe. `stand` makes
        // system calls on memory that is there already, and doesn't return.
        match unsafe { fork() } {
            Ok(ForkResult::Child) => {
                drop(sender);
                stand(orders, &mut groups)
            }
            Ok(ForkResult::Parent { child }) => {
                Ok(Guard { orders: Some(sender), _read_by_guard: orders, pid: child })
            }
            Err(error) => Err(LaunchError::system("the guard process can't be started")(error.into())),
        }
    }

    /// What a worker does between fork and exec: from then on its group is watched, before it can have started anything. It
    /// is async-signal-safe. Where the guard takes no orders the worker starts without.
    pub(crate) fn enlist(&self, berth: Berth) -> Result<impl Fn() + Send + Sync + 'static, LaunchError> {
        let orders = self.orders.as_ref().map(PipeWriter::try_clone).transpose();
        let orders = orders.map_err(LaunchError::system("a pipe for the guard process"))?;
        Ok(move || {
            let _ = orders.as_ref().map(|mut to| to.write_all(&order(berth, std::process::id() as i32)));
        })
    }

    /// What was there has ended or never began, and the number of its group may soon be another's.
    pub(crate) fn forget(&mut self, berth: Berth) {
        let told = self.orders.as_mut().map(|orders| orders.write_all(&order(berth, 0)));
        // A guard that somebody has stopped for so long would kill another's group once it goes on. The run goes on without.
        if told.is_some_and(|told| told.is_err()) {
            self.kill();
        }
    }

    /// Lets it go, which takes it a moment.
    pub(crate) fn dismiss(&mut self) {
        self.orders = None;
    }

    /// Whether its process is there. If it isn't, its id may be another's.
    fn is_there(&self) -> bool {
        waitpid(self.pid, Some(WaitPidFlag::WNOHANG)) == Ok(WaitStatus::StillAlive)
    }

    fn kill(&self) {
        if self.is_there() {
            let _ = kill(self.pid, Signal::SIGKILL);
        }
    }

    fn ends_within(&self, patience: Duration) -> bool {
        let until = Instant::now() + patience;
        while self.is_there() {
            if Instant::now() >= until {
                return false;
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        true
    }
}

fn order(berth: Berth, group: i32) -> Order {
    let mut order = Order::default();
    order[..4].copy_from_slice(&berth.0.to_ne_bytes());
    order[4..].copy_from_slice(&group.to_ne_bytes());
    order
}

impl Drop for Guard {
    fn drop(&mut self) {
        self.dismiss();
        // It ends at once, unless somebody has stopped it.
        if !self.ends_within(MOMENT) {
            self.kill();
            self.ends_within(MOMENT);
        }
    }
}

/// The life of the guard.
fn stand(mut orders: PipeReader, groups: &mut [i32]) -> ! {
    let _ = SigSet::all().thread_set_mask();
    let _ = setsid();
    let _ = set_name(c"phalanx-guard");
    close_all_but(orders.as_raw_fd() as u32);
    let mut order = Order::default();
    // Fails when nobody can give orders any more.
    while orders.read_exact(&mut order).is_ok() {
        let [a, b, c, d, e, f, g, h] = order;
        if let Some(group) = groups.get_mut(u32::from_ne_bytes([a, b, c, d]) as usize) {
            *group = i32::from_ne_bytes([e, f, g, h]);
        }
    }
    for group in groups.iter().filter(|group| **group > 0) {
        let _ = killpg(Pid::from_raw(*group), Signal::SIGKILL);
    }
    // SAFETY: ends this process without running anything that the parent had registered for its own end.
    unsafe { libc::_exit(0) }
}

/// Closes what was inherited, so that a pipe of the launcher ends with the launcher. Before Linux 5.9 there is no such call,
/// and the descriptors stay open for the moment that the guard outlives it.
fn close_all_but(kept: u32) {
    for (first, last) in [(0, kept - 1), (kept + 1, u32::MAX)] {
        // SAFETY: nothing in this process uses any of these descriptors again: it does nothing but `stand`.
        unsafe { libc::syscall(libc::SYS_close_range, first, last, 0) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use nix::sys::wait::{Id, waitid};
    use std::os::unix::process::CommandExt;
    use std::process::{Command, ExitStatus};
    use std::sync::mpsc::sync_channel;

    /// What becomes of a worker.
    fn worker(guard: &Guard) -> ExitStatus {
        let enlist = guard.enlist(Berth(0)).unwrap();
        let mut command = Command::new("true");
        // SAFETY: between fork and exec only what is async-signal-safe is done, as `enlist` promises.
        unsafe {
            command.pre_exec(move || {
                enlist();
                Ok(())
            })
        };
        command.status().unwrap()
    }

    #[test]
    fn a_worker_starts_where_the_guard_was_killed() {
        let mut guard = Guard::start(1).unwrap();
        assert_eq!(worker(&guard).code(), Some(0));
        kill(guard.pid, Signal::SIGKILL).unwrap();
        waitid(Id::Pid(guard.pid), WaitPidFlag::WEXITED | WaitPidFlag::WNOWAIT).unwrap();
        let ended = worker(&guard);
        assert_eq!(ended.code(), Some(0), "{ended}");
        guard.forget(Berth(0));
    }

    /// Does it on a thread, so that a wait without end is a failure.
    fn in_time(what: &str, act: impl FnOnce() + Send + 'static) {
        let (done, wait) = sync_channel(1);
        std::thread::spawn(move || {
            act();
            done.send(())
        });
        assert_eq!(wait.recv_timeout(Duration::from_secs(60)), Ok(()), "{what}");
    }

    #[test]
    fn nobody_waits_for_a_guard_that_was_stopped() {
        let guard = Guard::start(1).unwrap();
        kill(guard.pid, Signal::SIGSTOP).unwrap();
        in_time("its end", || drop(guard));

        let mut guard = Guard::start(1).unwrap();
        kill(guard.pid, Signal::SIGSTOP).unwrap();
        in_time("more orders than a pipe holds, and a worker", move || {
            (0..1 << 14).for_each(|_| guard.forget(Berth(0)));
            assert!(guard.ends_within(MOMENT), "it would kill what has the number of a group later");
            assert_eq!(worker(&guard).code(), Some(0));
        });
    }
}
