//! When the time of a training run is up, as far as it was typed or a batch system says so, and how one that has ended before its
//! steps were made is told.

use crate::args::{TrainArgs, WrongUsage};
use phalanx::Interruption;
use phalanx_job::{DRAINED, WorkerEnv, end_time, names, start_time};
use signal_hook::consts::SIGTERM;
use std::time::{Duration, SystemTime};

/// Who asks a batch system that doesn't say by itself when the time is up.
pub(crate) enum Asks<'a> {
    /// This process, for all workers that it starts.
    Always,
    /// This worker, if it is the first: the others hear it from that one.
    AsFirst(&'a WorkerEnv),
}

/// When the time is up, by whatever comes first of what is known.
pub(crate) fn end(args: &TrainArgs, asks: Asks<'_>) -> Result<Option<SystemTime>, WrongUsage> {
    let get = |name: &str| std::env::var(name).ok();
    let (asks, begun) = match asks {
        Asks::Always => (true, None),
        // Others may have had its place before.
        Asks::AsFirst(env) => (env.rank.0 == 0, start_time(get)),
    };
    let set = end_time(get, asks).map_err(|error| WrongUsage(error.to_string()))?;
    let begun = begun.unwrap_or_else(SystemTime::now);
    let typed = args.time_limit.and_then(|limit| begun.checked_add(limit));
    Ok(set.into_iter().chain(typed).min())
}

/// What tells the workers.
pub(crate) fn variable(end: SystemTime) -> (String, String) {
    // 0 would be no end.
    (names::END_TIME.into(), seconds(end).max(1).to_string())
}

/// What tells the workers of a launcher that isn't theirs alone when it was started: now.
pub(crate) fn start_variable() -> (String, String) {
    (names::START_TIME.into(), seconds(SystemTime::now()).to_string())
}

fn seconds(time: SystemTime) -> u64 {
    time.duration_since(SystemTime::UNIX_EPOCH).map_or(0, |time| time.as_secs())
}

/// What is said of a run that has ended early.
pub(crate) fn told(why: Interruption, steps: u64, is_kept: bool) -> String {
    let why = match why {
        Interruption::Stop => "SIGTERM",
        Interruption::Drain => "SIGUSR1",
        Interruption::TimeLimit => "the time is nearly up",
    };
    match is_kept {
        true => format!("{why}: stopped after {steps} steps; --resume goes on from there"),
        false => format!("{why}: stopped after {steps} steps, without a checkpoint of the last"),
    }
}

/// The exit code of such a run. SIGTERM's is what a shell makes of a process that it has ended.
pub(crate) fn exit_code(why: Interruption) -> u8 {
    match why {
        Interruption::Stop => 128 + SIGTERM as u8,
        Interruption::Drain | Interruption::TimeLimit => DRAINED,
    }
}

/// A time as it is typed: numbers with units, such as `1h30m`.
pub(crate) fn duration(text: &str) -> Result<Duration, String> {
    let wrong = || "must be a time with units, such as 90s, 1h30m or 2d".to_owned();
    let (mut rest, mut seconds) = (text, 0u64);
    while !rest.is_empty() {
        let digits = rest.find(|c: char| !c.is_ascii_digit()).ok_or_else(wrong)?;
        let (number, unit) = rest.split_at(digits);
        let unit_seconds = match unit.chars().next() {
            Some('s') => 1,
            Some('m') => 60,
            Some('h') => 60 * 60,
            Some('d') => 24 * 60 * 60,
            _ => return Err(wrong()),
        };
        let part = number.parse::<u64>().ok().and_then(|number| number.checked_mul(unit_seconds));
        seconds = part.and_then(|part| seconds.checked_add(part)).ok_or_else(wrong)?;
        rest = &unit[1..];
    }
    if text.is_empty() { Err(wrong()) } else { Ok(Duration::from_secs(seconds)) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_have_units() {
        let check = |text: &str, want: Option<u64>| {
            assert_eq!(duration(text).ok(), want.map(Duration::from_secs), "{text:?}");
        };
        check("90s", Some(90));
        check("1h30m", Some(5400));
        check("2d", Some(172_800));
        check("0s", Some(0));
        for text in ["", "90", "h", "1h30", "1.5h", "-1s", "99999999999999999999d", "1y", "1\u{e9}"] {
            check(text, None);
        }
    }
}
