//! `phalanx top`: the GPUs of this machine and the workers of all runs on it, again and again.

pub(crate) mod gpus;
mod ranks;

use crate::args::TopArgs;
use crate::say::{is_read, print};
use anyhow::Result;
use console::Term;
use gpus::{Shown, Visible};
use phalanx_cuda::nvml::Nvml;
use phalanx_cuda::{Driver, Error, Library};
use ranks::{Looks, Worker};
use serde::Serialize;
use std::fmt::Write;
use std::io::IsTerminal;
use std::time::{Duration, Instant};

/// A line of `--json`.
#[derive(Serialize)]
#[serde(tag = "top", rename_all = "lowercase")]
enum Line<'a> {
    Gpu(&'a Shown),
    Worker(&'a Worker),
    /// The last one of a look.
    Look {
        look: u64,
        gpus: usize,
        workers: usize,
        why_no_gpus: Option<&'a str>,
    },
}

pub(crate) fn top(args: &TopArgs) -> Result<u8> {
    let is_screen = std::io::stdout().is_terminal() && !args.json;
    let last = args.looks.unwrap_or(if is_screen { u64::MAX } else { 1 });
    let nvml = Nvml::open(&[]);
    let visible = Visible::of(&Driver::open(&[]));
    let mut looks = Looks::default();
    for look in 0..last {
        if look > 0 {
            std::thread::sleep(args.interval);
        }
        if !is_read() {
            break;
        }
        let gpus = nvml.as_ref().map_err(Error::clone).and_then(|nvml| gpus::look(nvml, &visible));
        let workers = looks.look(Instant::now());
        let (gpus, why_no_gpus) = match gpus {
            Ok(gpus) => (gpus, None),
            Err(error) => (Vec::new(), Some(why(&error))),
        };
        if args.json {
            let (n_gpus, n_workers) = (gpus.len(), workers.len());
            let end =
                Line::Look { look, gpus: n_gpus, workers: n_workers, why_no_gpus: why_no_gpus.as_deref() };
            for line in gpus.iter().map(Line::Gpu).chain(workers.iter().map(Line::Worker)).chain([end]) {
                print(serde_json::to_string(&line)?);
            }
            continue;
        }
        let told = told(&gpus, why_no_gpus.as_deref(), &workers);
        if !is_screen {
            print(told.trim_end());
            continue;
        }
        let (rows, columns) = Term::stdout().size();
        // To the first line, and the rest of the screen empty.
        print(format_args!("\x1b[H\x1b[J{}", fitted(told.trim_end(), rows.into(), columns.into())));
    }
    Ok(0)
}

/// Most machines without that library have no GPU: what to install is said by `doctor`.
fn why(error: &Error) -> String {
    match error {
        Error::MissingLibrary { library: Library::Nvml, .. } => {
            "no GPUs: NVML, which comes with NVIDIA's driver, isn't on this machine (`phalanx doctor` tells more)".into()
        }
        error => error.to_string(),
    }
}

/// Of these lines what a screen of so many rows has room for, above the one that the cursor stands in; longer ones are cut.
fn fitted(told: &str, rows: usize, columns: usize) -> String {
    let lines: Vec<&str> = told.lines().collect();
    let room = rows.saturating_sub(1).max(1);
    let shown = if lines.len() > room { room - 1 } else { lines.len() };
    let cut = |line: &&str| line.chars().take(columns).collect::<String>();
    let mut text: Vec<String> = lines[..shown].iter().map(cut).collect();
    if shown < lines.len() {
        text.push(format!("... and {} lines more: a higher window shows them", lines.len() - shown));
    }
    text.join("\n")
}

fn told(gpus: &[Shown], why_no_gpus: Option<&str>, workers: &[Worker]) -> String {
    let mut text = String::new();
    // A string takes all that is written to it.
    let _ = why_no_gpus.map(|why| writeln!(text, "{why}"));
    for gpu in gpus {
        let _ = writeln!(text, "{gpu}");
    }
    if workers.is_empty() {
        text.push_str("no workers of this user's runs\n");
        return text;
    }
    let _ = writeln!(text, "{:<24} {:>5} {:>8} {:>7} {:>10}", "RUN", "RANK", "PID", "CPU", "MEMORY");
    for worker in workers {
        let cpu = worker.cpu_percent.map_or("?".into(), |percent| format!("{percent:.0}%"));
        let memory = worker.memory_bytes.map_or("?".into(), gpus::gib);
        let (run, rank, pid) = (&worker.rank.run, worker.rank.rank, worker.pid);
        let _ = writeln!(text, "{run:<24} {rank:>5} {pid:>8} {cpu:>7} {memory:>10}");
    }
    text
}

/// How long between two looks, in seconds.
pub(crate) fn interval(text: &str) -> Result<Duration, String> {
    let seconds: f64 = text.parse().map_err(|_| "must be a number of seconds".to_owned())?;
    match Duration::try_from_secs_f64(seconds) {
        Ok(interval) if interval >= Duration::from_millis(10) => Ok(interval),
        _ => Err("must be a number of seconds, 0.01 or more".into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_screen_shows_the_first_lines_and_how_many_there_are() {
        assert_eq!(fitted("a\nb\nc", 4, 9), "a\nb\nc");
        assert_eq!(fitted("abcde\nb", 3, 3), "abc\nb");
        assert_eq!(fitted("a\nb\nc\nd", 4, 9), "a\nb\n... and 2 lines more: a higher window shows them");
        assert_eq!(fitted("a\nb", 1, 9), "... and 2 lines more: a higher window shows them");
    }
}
