//! Which signals the launcher takes, and what they mean.

use crate::news::News;
use crate::spec::LaunchError;
use signal_hook::consts::{SIGCONT, SIGHUP, SIGINT, SIGQUIT, SIGTERM, SIGUSR1, SIGUSR2};
use signal_hook::iterator::{Handle, Signals};
use std::fs;
use std::sync::mpsc::SyncSender;

/// These end the run.
const ENDING: [i32; 4] = [SIGINT, SIGTERM, SIGHUP, SIGQUIT];
/// These are for the workers: a batch system announces the end of an allocation with SIGUSR1.
const PASSED_ON: [i32; 3] = [SIGUSR1, SIGUSR2, SIGCONT];

/// Whether a signal is only passed on to the workers.
pub(crate) fn is_passed_on(signal: i32) -> bool {
    PASSED_ON.contains(&signal)
}

/// Takes all signals that whoever started this process didn't want ignored (`nohup`), from now on until the handle is closed.
pub(crate) fn take(news: &SyncSender<News>) -> Result<Handle, LaunchError> {
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    let ignored = ignored(&status);
    let taken = ENDING.iter().chain(&PASSED_ON).filter(|&&signal| ignored >> (signal - 1) & 1 == 0);
    let mut signals = Signals::new(taken).map_err(LaunchError::system("signals can't be taken"))?;
    let handle = signals.handle();
    let news = news.clone();
    let listen = move || signals.forever().take_while(|&s| news.send(News::Signal(s)).is_ok()).for_each(drop);
    let thread = std::thread::Builder::new().name("phalanx-signals".into()).spawn(listen);
    thread.map_err(LaunchError::system("a thread for signals"))?;
    Ok(handle)
}

/// The ignored signals of a process, from its status file: a bit each, from SIGHUP = 1 on.
fn ignored(status: &str) -> u64 {
    let mask = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    mask.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok()).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_mask_of_ignored_signals_is_read() {
        assert_eq!(
            ignored("SigBlk:\t0000000000000002\nSigIgn:\t0000000000001001\n"),
            1 << (SIGHUP - 1) | 1 << 12
        );
        assert_eq!(ignored(""), 0);
    }
}
