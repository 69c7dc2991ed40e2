//! The workers of all runs on this machine, as the system knows them: by the environment that they were started with.

use crate::meminfo::kib;
use phalanx_job::{Environ, names, processes};
use serde::Serialize;
use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::time::Instant;

/// Which worker a process is, or was started by.
#[derive(Clone, Serialize, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Rank {
    /// What the run is called.
    pub(crate) run: String,
    pub(crate) rank: u32,
}

/// A worker at one moment.
#[derive(Serialize)]
pub(super) struct Worker {
    #[serde(flatten)]
    pub(super) rank: Rank,
    pub(super) pid: i32,
    /// Processors that it kept busy since the last look, or since it was started at the first: 100 for one.
    pub(super) cpu_percent: Option<f64>,
    pub(super) memory_bytes: Option<u64>,
}

/// The system counts the time of processes in hundredths of a second, whatever its clock does (USER_HZ).
const TICKS_PER_S: f64 = 100.0;

/// Which worker a process is, if it is one of this user's.
pub(super) fn of_process(pid: u32) -> Option<Rank> {
    rank(&Environ::of(i32::try_from(pid).ok()?)?)
}

fn rank(environ: &Environ) -> Option<Rank> {
    let folder = environ.get(names::RUN_DIR).and_then(|folder| Path::new(folder).file_name()?.to_str());
    // Slurm's tasks have no run's name.
    let run = environ.get(names::RUN_ID).or(folder).unwrap_or("a run without a name");
    Some(Rank { rank: environ.get(names::RANK)?.parse().ok()?, run: run.to_owned() })
}

/// What the system says of a process's time.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Times {
    parent: i32,
    /// Ticks that it has computed for.
    used: f64,
    /// Ticks from the machine's start to its own.
    begun: f64,
}

/// Sees workers again and again.
#[derive(Default)]
pub(super) struct Looks {
    /// What each had used at the last look.
    before: BTreeMap<i32, (Instant, f64)>,
}

impl Looks {
    /// All workers of this user, by run and rank. Processes that a worker has started are its own affair.
    pub(super) fn look(&mut self, now: Instant) -> Vec<Worker> {
        let uptime = fs::read_to_string("/proc/uptime").unwrap_or_default();
        let uptime = uptime.split(' ').next().and_then(|seconds| seconds.parse::<f64>().ok());
        let of = |pid: i32| Some((pid, (rank(&Environ::of(pid)?)?, times(pid)?)));
        let found: BTreeMap<i32, (Rank, Times)> = processes().filter_map(of).collect();
        let is_started_by_it =
            |(rank, times): &(Rank, Times)| found.get(&times.parent).is_some_and(|of| of.0 == *rank);
        let own = found.iter().filter(|(_, one)| !is_started_by_it(one));
        let mut workers: Vec<Worker> = own
            .map(|(&pid, (rank, times))| {
                let since = match self.before.get(&pid) {
                    Some((then, used)) => {
                        Some((now.saturating_duration_since(*then).as_secs_f64(), times.used - used))
                    }
                    None => uptime.map(|uptime| (uptime - times.begun / TICKS_PER_S, times.used)),
                };
                let percent = since.filter(|(seconds, _)| *seconds > 0.0);
                let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
                Worker {
                    rank: rank.clone(),
                    pid,
                    cpu_percent: percent.map(|(seconds, ticks)| ticks / TICKS_PER_S / seconds * 100.0),
                    memory_bytes: kib(&status, "VmRSS:").map(|kib| kib << 10),
                }
            })
            .collect();
        self.before = found.iter().map(|(&pid, (_, times))| (pid, (now, times.used))).collect();
        workers.sort_by(|a, b| (&a.rank, a.pid).cmp(&(&b.rank, b.pid)));
        workers
    }
}

fn times(pid: i32) -> Option<Times> {
    parse(&fs::read_to_string(format!("/proc/{pid}/stat")).ok()?)
}

/// The name of the program stands in brackets, and may have brackets and spaces of its own.
fn parse(stat: &str) -> Option<Times> {
    let fields: Vec<&str> = stat.rsplit_once(')')?.1.split_whitespace().collect();
    // proc(5) counts from 1, and the name is the second.
    let field = |number: usize| fields.get(number - 3).copied();
    let ticks = |number| field(number)?.parse::<f64>().ok();
    Some(Times { parent: field(4)?.parse().ok()?, used: ticks(14)? + ticks(15)?, begun: ticks(22)? })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    #[test]
    fn times_are_found_behind_any_name() {
        let rest = "S 7 1 1 0 -1 0 0 0 0 0 250 50 9 9 20 0 1 0 4711 0";
        for name in ["(sh)", "(a) b (c)"] {
            let want = Times { parent: 7, used: 300.0, begun: 4711.0 };
            assert_eq!(parse(&format!("12 {name} {rest}")), Some(want), "{name}");
        }
        assert_eq!(parse("12 (sh) S 7"), None);
    }

    #[test]
    fn who_keeps_a_processor_busy_has_used_about_all_of_it() {
        // Whoever else runs on this machine takes some of it away.
        let (mut looks, own) = (Looks::default(), std::process::id() as i32);
        let start = Instant::now();
        looks.before.insert(own, (start, times(own).unwrap().used));
        let mut x = 1u64;
        while start.elapsed() < Duration::from_millis(300) {
            x = std::hint::black_box(x.wrapping_mul(3));
        }
        let used = times(own).unwrap().used - looks.before[&own].1;
        assert!((5.0..400.0).contains(&used), "{used} ticks in 0.3 s");
    }
}
