//! Which signals the launcher takes, and what they mean.

use crate::news::News;
use crate::spec::LaunchError;
use signal_hook::consts::{SIGALRM, SIGCONT, SIGHUP, SIGINT, SIGQUIT, SIGTERM, SIGUSR1, SIGUSR2, SIGXCPU};
use signal_hook::iterator::{Handle, Signals};
use std::fmt;
use std::fs;
use std::str::FromStr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::SyncSender;

/// These are for the workers, unless they were asked to end the run: a batch system announces the end of an allocation with
/// SIGUSR1, and workers that heed it end by themselves.
const PASSED_ON: [i32; 3] = [SIGUSR1, SIGUSR2, SIGCONT];
/// Those that may be asked to end the run.
const KNOWN: [(&str, i32); 8] = [
    ("SIGTERM", SIGTERM),
    ("SIGINT", SIGINT),
    ("SIGHUP", SIGHUP),
    ("SIGQUIT", SIGQUIT),
    ("SIGUSR1", SIGUSR1),
    ("SIGUSR2", SIGUSR2),
    ("SIGALRM", SIGALRM),
    ("SIGXCPU", SIGXCPU),
];

/// The signals that end a run: they are handed to the workers, which have the grace period from then on. SIGUSR1, SIGUSR2 and
/// SIGCONT are handed to the workers too, and end nothing unless they are among these; all others do what they always do.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EndingSignals(Vec<i32>);

impl Default for EndingSignals {
    /// SIGTERM, SIGINT, SIGHUP and SIGQUIT.
    fn default() -> EndingSignals {
        EndingSignals(vec![SIGTERM, SIGINT, SIGHUP, SIGQUIT])
    }
}

/// Names with commas between them, with SIG before them or not.
impl FromStr for EndingSignals {
    type Err = String;

    fn from_str(text: &str) -> Result<EndingSignals, String> {
        let number = |name: &str| {
            let (name, plain) = (name.trim(), |known: &str| known.trim_start_matches("SIG").to_owned());
            let known = KNOWN.iter().find(|(known, _)| *known == name || plain(known) == name);
            let all = || KNOWN.map(|(name, _)| name).join(", ");
            known.map(|(_, number)| *number).ok_or_else(|| format!("{name:?} is none of {}", all()))
        };
        text.split(',').map(number).collect::<Result<_, _>>().map(EndingSignals)
    }
}

impl fmt::Display for EndingSignals {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = |number: &i32| KNOWN.iter().find(|(_, known)| known == number).map(|(name, _)| *name);
        let names: Vec<&str> = self.0.iter().filter_map(name).collect();
        f.write_str(&names.join(","))
    }
}

/// Takes all signals that whoever started this process didn't want ignored (`nohup`), from now on until the handle is closed. Sets
/// `is_asked` with one that ends the run, for whoever doesn't look at the news yet.
pub(crate) fn take(
    ending: &EndingSignals,
    news: &SyncSender<News>,
    is_asked: &Arc<AtomicBool>,
) -> Result<Handle, LaunchError> {
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    let ignored = ignored(&status);
    let taken = ending.0.iter().chain(&PASSED_ON).filter(|&&signal| ignored >> (signal - 1) & 1 == 0);
    let mut signals = Signals::new(taken).map_err(LaunchError::system("signals can't be taken"))?;
    let handle = signals.handle();
    let (ending, news, is_asked) = (ending.clone(), news.clone(), Arc::clone(is_asked));
    let told = move |signal| {
        if !ending.0.contains(&signal) {
            return News::PassOn(signal);
        }
        is_asked.store(true, Ordering::Relaxed);
        News::Signal(signal)
    };
    let listen = move || signals.forever().take_while(|&s| news.send(told(s)).is_ok()).for_each(drop);
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
    fn signals_are_named_as_torchrun_names_them() {
        let check = |text: &str, want: Result<&[i32], &str>| match (text.parse::<EndingSignals>(), want) {
            (Ok(signals), Ok(want)) => assert_eq!(signals.0, want, "{text}"),
            (Err(error), Err(want)) => assert!(error.contains(want) && error.contains("SIGTERM"), "{error}"),
            (got, want) => panic!("{text}: {got:?} and not {want:?}"),
        };
        check("SIGTERM,SIGINT,SIGHUP,SIGQUIT", Ok(&EndingSignals::default().0));
        check("USR1, SIGTERM", Ok(&[SIGUSR1, SIGTERM]));
        check("SIGKILL", Err("\"SIGKILL\""));
        check("SIGCHLD", Err("\"SIGCHLD\""));
        check("15", Err("\"15\""));
        check("SIGTERM,", Err("\"\""));
        check("", Err("\"\""));
    }

    #[test]
    fn the_mask_of_ignored_signals_is_read() {
        assert_eq!(
            ignored("SigBlk:\t0000000000000002\nSigIgn:\t0000000000001001\n"),
            1 << (SIGHUP - 1) | 1 << 12
        );
        assert_eq!(ignored(""), 0);
    }
}
