//! A worker that reads this process's standard input. Where that is the terminal, the worker's group is in the foreground for as long as
//! it runs, as the jobs of a shell are: a debugger reads there, and Ctrl-C reaches that worker alone.

use nix::sys::signal::{SigHandler, SigSet, Signal, signal};
use nix::unistd::{Pid, getpgrp, getpid, tcgetpgrp, tcsetpgrp};
use std::io::{IsTerminal, Stdin, stdin};
use std::process::Stdio;

/// The terminal, lent to a worker; it comes back when this is dropped.
pub(crate) struct Foreground {
    input: Stdin,
    /// The group that has it otherwise.
    own: Pid,
}

impl Foreground {
    /// If standard input is a terminal whose foreground this process is in.
    pub(crate) fn of_this_process() -> Option<Foreground> {
        let (input, own) = (stdin(), getpgrp());
        (tcgetpgrp(&input) == Ok(own)).then_some(Foreground { input, own })
    }

    /// What a worker that leads a group does between fork and exec; async-signal-safe.
    pub(crate) fn take(&self) -> nix::Result<()> {
        hand_to(&self.input, getpid())?;
        // SAFETY: no handler of ours is called. Stopped by Ctrl-Z, it would keep the terminal, and no shell would go on with it.
        unsafe { signal(Signal::SIGTSTP, SigHandler::SigIgn) }.map(drop)
    }
}

impl Drop for Foreground {
    fn drop(&mut self) {
        // A terminal that is gone has no foreground.
        let _ = hand_to(&self.input, self.own);
    }
}

/// Who isn't in the foreground is stopped by what it does to the terminal, unless it has that signal blocked.
fn hand_to(terminal: &Stdin, group: Pid) -> nix::Result<()> {
    let stop = SigSet::from_iter([Signal::SIGTTOU]);
    let before = stop.thread_swap_mask(nix::sys::signal::SigmaskHow::SIG_BLOCK)?;
    let handed = tcsetpgrp(terminal, group);
    before.thread_set_mask()?;
    handed
}

/// What a worker that is to read standard input has there: nothing where that is a terminal that somebody else reads.
pub(crate) fn input(foreground: Option<&Foreground>) -> Stdio {
    match foreground.is_none() && stdin().is_terminal() {
        true => Stdio::null(),
        false => Stdio::inherit(),
    }
}
