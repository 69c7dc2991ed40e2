//! Whether a process of this host runs, is stopped, or has ended: what `/proc` says of it.

use super::signs::State;
use std::io::{Error, ErrorKind, Result};

/// A process, told from later ones of the same number by when it began.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Process {
    pid: i32,
    begun: u64,
}

impl Process {
    /// None if it can't be seen: it has ended, or it counts its processes otherwise.
    pub(crate) fn of(pid: i32) -> Option<Process> {
        let (_, begun) = parse(&stat(pid).ok()?)?;
        Some(Process { pid, begun })
    }

    pub(crate) fn state(&self) -> State {
        let text = match stat(self.pid) {
            Ok(text) => text,
            Err(error) if is_gone(&error) => return State::Ended,
            // As where this process may open no more files: that says nothing of the other one.
            Err(_) => return State::Runs,
        };
        match parse(&text) {
            Some((_, begun)) if begun != self.begun => State::Ended,
            Some(('T' | 't', _)) => State::Stopped,
            Some(('Z' | 'X', _)) | None => State::Ended,
            Some(_) => State::Runs,
        }
    }
}

/// Whether a process can't be looked at since there is none.
fn is_gone(error: &Error) -> bool {
    const ESRCH: i32 = 3;
    error.kind() == ErrorKind::NotFound || error.raw_os_error() == Some(ESRCH)
}

/// The line of `/proc`, in which a name may be cut within a character.
fn stat(pid: i32) -> Result<String> {
    let bytes = std::fs::read(format!("/proc/{pid}/stat"))?;
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}

/// The state and the start of `pid (name) state ...`, where a name may be anything.
fn parse(stat: &str) -> Option<(char, u64)> {
    let mut fields = stat[stat.rfind(')')? + 1..].split_whitespace();
    let state = fields.next()?.chars().next()?;
    // The 22nd field of all; the state is the third.
    Some((state, fields.nth(18)?.parse().ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;
    use nix::sys::signal::{Signal, kill};
    use nix::sys::wait::{WaitPidFlag, waitpid};
    use nix::unistd::Pid;
    use std::process::Command;

    #[test]
    fn that_nothing_can_be_seen_is_no_end() {
        let raw = Error::from_raw_os_error;
        // ENOENT and ESRCH; EACCES, ENFILE and EMFILE.
        assert!([2, 3].into_iter().all(|code| is_gone(&raw(code))));
        assert!(![13, 23, 24].into_iter().any(|code| is_gone(&raw(code))));
    }

    #[test]
    fn a_line_of_proc_is_read_whatever_the_name() {
        let rest = "S 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 4242 20";
        for name in ["cat", "a) T (b", "", ")"] {
            assert_eq!(parse(&format!("7 ({name}) {rest}")), Some(('S', 4242)));
        }
        for broken in [
            "",
            "7",
            "7 (cat",
            "7 (cat)",
            "7 (cat) S 1",
            "7 (cat) S 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 x",
        ] {
            assert_eq!(parse(broken), None, "{broken}");
        }
    }

    #[test]
    fn a_process_is_seen_running_stopped_and_ended() {
        let mut child = Command::new("sleep").arg("60").spawn().unwrap();
        let process = Process::of(child.id() as i32).unwrap();
        assert_eq!(process.state(), State::Runs);
        let pid = Pid::from_raw(child.id() as i32);
        kill(pid, Signal::SIGSTOP).unwrap();
        waitpid(pid, Some(WaitPidFlag::WUNTRACED)).unwrap();
        assert_eq!(process.state(), State::Stopped);
        kill(pid, Signal::SIGKILL).unwrap();
        child.wait().unwrap();
        assert_eq!(process.state(), State::Ended);
        let other = Process { pid: std::process::id() as i32, begun: process.begun };
        assert_eq!(other.state(), State::Ended, "a number that was given again is another process");
    }
}
