//! Following a job: what changes is told once, in words, and how far its run is as under `phalanx train`.
//!
//! The controller is asked every two seconds, or five where it has to be asked for longer than a minute; the run itself is read from
//! `events.jsonl` of its directory, where this machine sees that.

use crate::args::WrongUsage;
use crate::bar::TrainBar;
use crate::events::{EVENTS, Tail};
use crate::say::{print, say};
use anyhow::{Result, bail};
use nix::sys::signal::Signal;
use phalanx::{Event, Observer};
use phalanx_job::DRAINED;
use phalanx_launch::slurm::queue::{self, JobView, meaning};
use phalanx_launch::slurm::run_dir;
use serde_json::json;
use signal_hook::consts::SIGINT;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// How often the controller is asked.
const ASK: Duration = Duration::from_secs(2);
const ASK_LATER: Duration = Duration::from_secs(5);
/// How often it is seen whether somebody has typed Ctrl-C, and what the run has told.
const LOOK: Duration = Duration::from_millis(200);
/// How long a controller that doesn't answer is asked again.
const PATIENCE: Duration = Duration::from_secs(600);

/// How many bytes `events.jsonl` of a run directory has.
pub(crate) fn told_before(run_dir: &str) -> u64 {
    std::fs::metadata(Path::new(run_dir).join(EVENTS)).map_or(0, |file| file.len())
}

/// Follows a job to its end; the exit code is the job's, or the largest of an array's. What `events.jsonl` had told by `before` bytes is
/// of another run.
pub(crate) fn job(number: &str, before: u64, cancels: bool, as_json: bool) -> Result<u8> {
    if number.is_empty() || !number.bytes().all(|byte| byte.is_ascii_digit() || b"_".contains(&byte)) {
        let wrong = format!("{number}: is no number of a job, as 7 or 7_3\nhint: squeue --me names yours");
        return Err(WrongUsage(wrong).into());
    }
    let interrupted = Arc::new(AtomicBool::new(false));
    signal_hook::flag::register(SIGINT, Arc::clone(&interrupted))?;
    let mut view = View {
        number,
        as_json,
        before,
        told: BTreeMap::new(),
        codes: BTreeMap::new(),
        progress: None,
        seen: false,
    };
    let (start, mut answered) = (Instant::now(), Instant::now());
    loop {
        match queue::look(number) {
            Ok(jobs) => {
                answered = Instant::now();
                if let Some(code) = view.heed(jobs)? {
                    return Ok(code);
                }
            }
            // It may be restarted just now.
            Err(error) if view.seen && answered.elapsed() < PATIENCE => {
                view.tell("", &format!("the controller doesn't answer, asking again: {error}"), None);
            }
            Err(error) => return Err(error.into()),
        }
        let until = Instant::now() + if start.elapsed() < Duration::from_secs(60) { ASK } else { ASK_LATER };
        while Instant::now() < until {
            if interrupted.load(Ordering::Relaxed) {
                return leave(number, cancels);
            }
            if let Some(Some(progress)) = &mut view.progress {
                progress.show(as_json);
            }
            std::thread::sleep(LOOK);
        }
    }
}

/// Waits for the end of a job that nobody looks at; it is cancelled where that takes longer than this. Fails if the job did.
pub(crate) fn wait_for(number: &str, limit: Duration) -> Result<()> {
    let (start, mut answered) = (Instant::now(), Instant::now());
    let mut told = String::new();
    loop {
        let jobs = match queue::look(number) {
            Ok(jobs) => jobs,
            // It may be restarted just now.
            Err(_) if answered.elapsed() < PATIENCE.min(limit) => {
                std::thread::sleep(ASK);
                continue;
            }
            Err(error) => {
                bail!("{error}\nhint: job {number} may still be there: scancel {number} once it answers")
            }
        };
        answered = Instant::now();
        let Some(job) = jobs.first() else {
            bail!("job {number} is gone: the controller doesn't know it any more")
        };
        let now = words(job);
        if now != told {
            say(format_args!("job {number}: {now}"));
            told = now;
        }
        if job.is_over() {
            match exit_code(job) {
                0 => return Ok(()),
                _ => bail!("job {number} {told}"),
            }
        }
        if start.elapsed() > limit {
            queue::cancel(number)?;
            bail!(
                "job {number} hasn't ended within {} s and is cancelled: it {told}\nhint: wait longer with --patience",
                limit.as_secs()
            );
        }
        std::thread::sleep(if start.elapsed() < Duration::from_secs(60) { ASK } else { ASK_LATER });
    }
}

/// What Ctrl-C does.
fn leave(number: &str, cancels: bool) -> Result<u8> {
    if cancels {
        queue::cancel(number)?;
        say(format_args!("job {number} is cancelled"));
    } else {
        say(format_args!("job {number} goes on\nhint: phalanx slurm follow {number}, or scancel {number}"));
    }
    Ok(130)
}

/// What was told of a job.
struct View<'a> {
    number: &'a str,
    as_json: bool,
    /// Where its run's news begin.
    before: u64,
    /// The last words about each job of an array, or about the one.
    told: BTreeMap<String, String>,
    /// The exit code of each job that was started; none as long as it isn't over.
    codes: BTreeMap<String, Option<u8>>,
    /// What the run tells, once it was looked for: none where it is nobody's of ours.
    progress: Option<Option<RunFile>>,
    /// Whether the controller has known it.
    seen: bool,
}

impl View<'_> {
    /// Tells what has changed; gives the exit code once all is over.
    fn heed(&mut self, jobs: Vec<JobView>) -> Result<Option<u8>> {
        let number = self.number;
        let hint = format!("hint: sacct -j {number} --format=JobID,State,ExitCode, where accounting is on");
        if jobs.is_empty() && !self.seen {
            bail!("job {number} isn't known to the controller\n{hint}");
        }
        self.seen = true;
        let is_one = jobs.len() == 1;
        for job in &jobs {
            let words = words(job);
            self.tell(&job.job, &words, Some(job));
            if job.is_pending() {
                // Those of an array that wait are one.
                self.codes.remove(&job.job);
            } else {
                self.codes.insert(job.job.clone(), job.is_over().then(|| exit_code(job)));
            }
            if is_one && job.is_pending() && self.told.get("nodes").is_none_or(|told| !told.contains(&words))
            {
                self.tell_unfit(&words, job);
            }
        }
        // The controller forgets those of an array that ended some minutes ago; what they came to counts all the same.
        let is_here = |number: &String| jobs.iter().any(|job| job.job == *number);
        let gone = self
            .codes
            .iter()
            .find(|(job, code)| code.is_none() && !is_here(job))
            .map(|(job, _)| job.as_str());
        if let Some(gone) = gone.or((jobs.is_empty() && self.codes.is_empty()).then_some(number)) {
            bail!("job {gone} is gone: the controller doesn't know it any more\n{hint}");
        }
        if let [job] = jobs.as_slice()
            && !job.is_pending()
        {
            if self.progress.is_none() {
                self.progress = RunFile::of(job, self.before);
            }
            if let Some(Some(progress)) = &mut self.progress {
                progress.show(self.as_json);
            }
        }
        if jobs.iter().any(|job| !job.is_over()) {
            return Ok(None);
        }
        Ok(self.codes.values().copied().flatten().max())
    }

    fn tell(&mut self, key: &str, words: &str, job: Option<&JobView>) {
        if self.told.get(key).is_some_and(|told| told == words) {
            return;
        }
        self.told.insert(key.to_owned(), words.to_owned());
        if self.as_json {
            let (state, reason) = job.map_or((None, None), |job| (Some(&job.state), job.reason.as_ref()));
            print(json!({"event": "job", "job": key, "state": state, "reason": reason, "message": words}));
        } else if job.is_none() {
            say(words);
        } else {
            say(format_args!("job {key}: {words}"));
        }
    }

    /// Nodes that are missing may be why it waits.
    fn tell_unfit(&mut self, words: &str, job: &JobView) {
        self.told.insert("nodes".into(), words.to_owned());
        let waits = job.reason.as_deref().is_some_and(|reason| {
            ["Resources", "ReqNodeNotAvail", "Nodes", "PartitionConfig"]
                .iter()
                .any(|word| reason.starts_with(word))
        });
        // That they can't be told is no reason to end the view.
        let unfit = if waits { queue::unfit_nodes().unwrap_or_default() } else { Vec::new() };
        for node in unfit.iter().take(8) {
            self.tell(
                &node.node,
                &format!("{node}: scontrol update node={} state=resume, once it is well", node.node),
                None,
            );
        }
    }
}

/// How a job stands.
fn words(job: &JobView) -> String {
    let reason = job.reason.as_deref().unwrap_or_default();
    let again = match job.restarts {
        0 => String::new(),
        1 => ", for the second time".into(),
        n => format!(", after {n} restarts"),
    };
    let output = job.output.as_ref().map(|path| format!("; its output: {path}")).unwrap_or_default();
    match job.state.as_str() {
        _ if job.is_pending() => match meaning(reason) {
            Some(meaning) => format!("waits{again}: {reason} ({meaning})"),
            None if reason.is_empty() => format!("waits{again}"),
            None => format!("waits{again}: {reason}"),
        },
        "RUNNING" => format!("runs on {}{again}{output}", job.nodes.as_deref().unwrap_or("its nodes")),
        "COMPLETED" => "is done".into(),
        "COMPLETING" => "is ending".into(),
        "TIMEOUT" => format!(
            "ran out of time{output}\nhint: a longer --time, or a run that can go on: exit code {DRAINED} requeues it"
        ),
        "OUT_OF_MEMORY" => {
            format!("ran out of memory{output}\nhint: more with --sbatch=--mem=..., or smaller batches")
        }
        "NODE_FAIL" => format!("lost a node{output}\nhint: --elastic MIN:MAX goes on without it"),
        "CANCELLED" => "was cancelled".into(),
        "FAILED" if job.signal > 0 && job.exit_code == 0 => {
            let name = Signal::try_from(job.signal).map_or("".into(), |signal| format!(" ({signal})"));
            format!("was ended by signal {}{name}{output}", job.signal)
        }
        "FAILED" => format!("failed with exit code {}{output}", job.exit_code),
        other => format!("{}{output}", other.to_lowercase().replace('_', " ")),
    }
}

/// The exit code of a job that is over.
fn exit_code(job: &JobView) -> u8 {
    match job.state.as_str() {
        "COMPLETED" => 0,
        // As a shell tells of signals.
        "FAILED" if job.exit_code == 0 && job.signal > 0 => u8::try_from(128 + job.signal).unwrap_or(1),
        _ => u8::try_from(job.exit_code).ok().filter(|&code| code > 0).unwrap_or(1),
    }
}

/// `events.jsonl` of a run, as far as it was read.
struct RunFile {
    tail: Tail,
    shown: TrainBar,
}

impl RunFile {
    /// That of a job, from this byte on, if its script is one of ours; none as long as the controller doesn't say.
    fn of(job: &JobView, before: u64) -> Option<Option<RunFile>> {
        let script = queue::script(&job.job).ok()?;
        let folder = job.folder.clone().map_or_else(PathBuf::new, PathBuf::from);
        Some(run_dir(&script, &job.job).map(|run_dir| {
            let path = folder.join(run_dir).join(EVENTS);
            RunFile { tail: Tail::new(path, before), shown: TrainBar::new(None, None) }
        }))
    }

    /// Shows what is new.
    fn show(&mut self, as_json: bool) {
        loop {
            let look = self.tail.look();
            for line in look.lines {
                if let Ok(event) = serde_json::from_slice::<Event>(&line) {
                    match as_json {
                        true => print(String::from_utf8_lossy(&line).trim_end()),
                        false => self.shown.event(&event),
                    }
                }
            }
            if !look.has_more {
                break;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_job_is_told_in_words() {
        let check = |state: &str, reason: &str, restarts: u32, want: &str| {
            let reason = Some(reason.to_owned()).filter(|reason| !reason.is_empty());
            let job = JobView {
                job: "7".into(),
                state: state.into(),
                reason,
                restarts,
                nodes: Some("n[1-2]".into()),
                exit_code: 3,
                ..JobView::default()
            };
            let words = words(&job);
            assert!(words.contains(want), "{words}");
        };
        check("PENDING", "Resources", 0, "waits: Resources (it is next, as soon as enough nodes are free)");
        check("PENDING", "BeginTime", 1, "waits, for the second time: BeginTime (");
        check("PENDING", "Odd", 0, "waits: Odd");
        check("RUNNING", "", 2, "runs on n[1-2], after 2 restarts");
        check("FAILED", "NonZeroExitCode", 0, "failed with exit code 3");
        check("STOPPED", "", 0, "stopped");
    }

    #[test]
    fn the_exit_code_is_the_jobs() {
        let of = |state: &str, exit_code: i32| exit_code_of(state, exit_code);
        fn exit_code_of(state: &str, exit_code: i32) -> u8 {
            super::exit_code(&JobView { state: state.into(), exit_code, ..JobView::default() })
        }
        let killed = JobView { state: "FAILED".into(), signal: 9, ..JobView::default() };
        assert_eq!(
            (super::exit_code(&killed), words(&killed)),
            (137, "was ended by signal 9 (SIGKILL)".into())
        );
        assert_eq!((of("COMPLETED", 0), of("FAILED", 3), of("CANCELLED", 0), of("TIMEOUT", 0)), (0, 3, 1, 1));
    }
}
