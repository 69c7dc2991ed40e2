//! Jobs that end before their work is done, each in another way, and go on; and jobs that go on without a node.

use super::cluster::Cluster;
use super::user::text;
use super::{PHALANX, told_steps, until};
use nix::sys::signal::Signal;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// A run that never comes to its end by itself, submitted from a folder and followed.
struct Submitted<'a> {
    cluster: &'a Cluster,
    folder: tempfile::TempDir,
    following: Child,
}

impl<'a> Submitted<'a> {
    fn new(cluster: &'a Cluster, flags: &[&str], more: &[&str]) -> Submitted<'a> {
        let folder = tempfile::tempdir().unwrap();
        let mut command = submit(cluster, folder.path(), flags);
        command
            .args(["mnist-mini", "--batch-size", "8", "--epochs", "1000000", "--seed", "3", "--json"])
            .args(more);
        let following = command.stdout(Stdio::piped()).stderr(Stdio::null()).spawn().unwrap();
        Submitted { cluster, folder, following }
    }

    fn events(&self) -> String {
        fs::read_to_string(self.folder.path().join("run/events.jsonl")).unwrap_or_default()
    }

    fn last(&self) -> u64 {
        told_steps(&self.events()).last().copied().unwrap_or(0)
    }

    /// What the script and its agents have written.
    fn output(&self) -> String {
        let files = fs::read_dir(self.folder.path()).unwrap().map(|entry| entry.unwrap().path());
        let is_output = |path: &PathBuf| path.extension().is_some_and(|end| end == "out");
        files.filter(is_output).map(|path| fs::read_to_string(path).unwrap_or_default()).collect()
    }

    fn until(&self, what: &str, done: impl Fn(&Submitted<'_>) -> bool) {
        until(|| what_of(&format!("{}\n{what}", self.output())), self.cluster, || done(self));
    }

    fn begins(&self) -> u64 {
        self.until("the job doesn't begin", |job| {
            assert!(!job.output().contains("error: "), "{}", job.output());
            job.last() > 20
        });
        self.last()
    }

    /// Sends a signal to the agent of a node and to its workers, all at once.
    fn signal_node(&self, node: &str, signal: Signal) {
        let wanted = [
            format!("SLURMD_NODENAME={node}"),
            format!("XDG_CONFIG_HOME={}", self.folder.path().join("config").display()),
        ];
        let is_of_node = |pid: &i32| {
            let set = fs::read(format!("/proc/{pid}/environ")).unwrap_or_default();
            // The script and srun are on the first node as well.
            fs::read_link(format!("/proc/{pid}/exe")).is_ok_and(|exe| exe == Path::new(PHALANX))
                && wanted.iter().all(|want| set.split(|&byte| byte == 0).any(|set| set == want.as_bytes()))
        };
        let names = fs::read_dir("/proc").unwrap().map(|entry| entry.unwrap().file_name());
        let pids = names.filter_map(|name| name.to_str()?.parse().ok());
        let there: Vec<i32> = pids.filter(is_of_node).collect();
        assert!(there.len() >= 2, "an agent and a worker: {there:?}");
        for pid in there {
            let _ = nix::sys::signal::kill(nix::unistd::Pid::from_raw(pid), signal);
        }
    }

    /// Waits until the run goes on from a checkpoint, without having lost or repeated a step, and ends it.
    fn goes_on(mut self, at_least: u64) {
        self.until("the run doesn't go on", |job| {
            job.events().contains("\"event\":\"resume\"") && job.last() > at_least + 20
        });
        let steps = told_steps(&self.events());
        assert!(steps.iter().zip(0..).all(|(step, want)| *step == want), "{steps:?}");
        self.cluster.run("scancel", &["--full", "--partition=debug"]);
        self.following.kill().unwrap();
        self.following.wait().unwrap();
    }
}

/// The last lines of a long text, for a message.
fn what_of(text: &str) -> String {
    let lines: Vec<&str> = text.lines().collect();
    lines[lines.len().saturating_sub(30)..].join("\n")
}

fn submit(cluster: &Cluster, folder: &Path, flags: &[&str]) -> Command {
    let mut command = cluster.command(PHALANX);
    command.current_dir(folder).env("XDG_CONFIG_HOME", folder.join("config"));
    // As one that is typed within another job, of a task, which says nothing of this one.
    command.env("SLURM_JOB_ID", "1").env("SLURM_NTASKS", "1");
    command.args([
        "slurm",
        "submit",
        "--nproc-per-node",
        "1",
        "--cpus-per-node",
        "2",
        "--out",
        "run",
        "--json",
    ]);
    command.args(flags);
    command
}

#[test]
fn a_job_whose_time_is_up_drains_and_goes_on_in_the_next() {
    let Some(cluster) = Cluster::start(2) else { return };
    // A minute is the least that Slurm gives.
    let job = Submitted::new(&cluster, &["--nodes", "2", "--time", "1m"], &["--time-margin", "45s"]);
    let begun = job.begins();
    job.until("the job doesn't drain", |job| job.output().contains("the time is nearly up: stopped after "));
    job.goes_on(begun);
}

#[test]
fn a_job_that_is_preempted_drains_and_goes_on_when_there_is_room() {
    let Some(cluster) = Cluster::start(2) else { return };
    let job = Submitted::new(&cluster, &["--nodes", "2", "--sbatch=--exclusive"], &[]);
    let begun = job.begins();
    let folder = tempfile::tempdir().unwrap();
    let output = format!("--output={}", folder.path().join("urgent.out").display());
    let args = ["--parsable", "--partition=urgent", "--nodes=2", "--exclusive", &output, "--wrap=hostname"];
    let urgent = cluster.run("sbatch", &args).trim().to_owned();
    job.until("the urgent job doesn't run", |_| {
        cluster.run("scontrol", &["show", "job", &urgent]).contains("JobState=COMPLETED")
    });
    job.until("the run doesn't drain", |job| job.output().contains("SIGTERM: stopped after "));
    job.goes_on(begun);
}

#[test]
fn an_elastic_job_goes_on_without_a_node_that_is_lost() {
    let Some(cluster) = Cluster::start(2) else { return };
    let job = Submitted::new(&cluster, &["--elastic", "1:2"], &[]);
    job.begins();
    job.signal_node("n2", Signal::SIGKILL);
    let lost = job.last();
    job.until("the run doesn't go on with one node", |job| {
        job.events().lines().any(|line| line.contains("\"members\"") && line.contains("\"world_size\":1"))
            && job.last() > lost + 20
    });
    // The agent that was lost isn't how the run ends: this asks for a checkpoint and another start.
    cluster.run("scancel", &["--signal=USR1", cluster.run("squeue", &["-h", "-o", "%A"]).trim()]);
    let asked = job.last();
    job.goes_on(asked);
}

#[test]
fn a_job_of_a_fixed_size_goes_on_with_a_node_that_stood_by() {
    let Some(cluster) = Cluster::start(3) else { return };
    let job = Submitted::new(&cluster, &["--nodes", "2", "--spares", "1"], &[]);
    job.begins();
    job.until("no node stands by", |job| job.output().contains(" stands by, in case that a node is lost"));
    job.signal_node("n2", Signal::SIGKILL);
    let lost = job.last();
    job.until("the run doesn't go on with as many nodes as before", |job| {
        let events = job.events();
        let last = events.lines().rfind(|line| line.contains("\"members\""));
        last.is_some_and(|line| line.contains("\"world_size\":2,")) && job.last() > lost + 20
    });
    // In place, without a new start.
    assert!(!job.events().contains("\"resume\""), "{}", job.output());
    cluster.run("scancel", &["--signal=USR1", cluster.run("squeue", &["-h", "-o", "%A"]).trim()]);
    let asked = job.last();
    job.goes_on(asked);
}

/// Not that of the first node: the other of two couldn't know that the run isn't led on from there.
#[test]
fn an_elastic_job_ends_without_an_agent_that_hangs_for_good() {
    let Some(cluster) = Cluster::start(2) else { return };
    let job = Submitted::new(&cluster, &["--elastic", "1:2"], &[]);
    job.begins();
    let has = |job: &Submitted<'_>, nodes: usize| {
        let events = job.events();
        let last = events.lines().rfind(|line| line.contains("\"event\":\"step\""));
        last.is_some_and(|line| line.contains(&format!("\"world_size\":{nodes},")))
    };
    job.until("the run hasn't all nodes", |job| has(job, 2));
    // The first leads, whoever comes first.
    job.signal_node("n2", Signal::SIGSTOP);
    job.until("the run doesn't go on with one node", |job| has(job, 1));
    cluster.run("scancel", &["--signal=USR1", cluster.run("squeue", &["-h", "-o", "%A"]).trim()]);
    let asked = job.last();
    job.goes_on(asked);
}

/// In a step nobody starts another agent in its place, so nobody waits for one.
#[test]
fn a_job_of_a_fixed_size_that_loses_a_node_is_requeued_and_goes_on() {
    let Some(cluster) = Cluster::start(2) else { return };
    for node in ["n2", "n1"] {
        let job = Submitted::new(&cluster, &["--nodes", "2"], &[]);
        job.begins();
        job.signal_node(node, Signal::SIGKILL);
        let (lost, since) = (job.last(), Instant::now());
        job.until("the run doesn't end", |job| job.output().contains("not started again: "));
        assert!(since.elapsed() < Duration::from_secs(20), "after {:.0?}: {}", since.elapsed(), job.output());
        let said = job.output();
        assert!(
            said.contains(&format!("error: node {} ({node}) was lost: ", u8::from(node == "n2"))),
            "{said}"
        );
        job.goes_on(lost);
    }
}

#[test]
fn jobs_of_an_array_are_runs_that_differ_in_their_seed() {
    let Some(cluster) = Cluster::start(2) else { return };
    let folder = tempfile::tempdir().unwrap();
    let mut command = submit(&cluster, folder.path(), &["--array", "0-2"]);
    let out = cluster.attempt(command.args(["mnist-mini", "--batch-size", "8", "--steps", "3", "--json"]));
    assert_eq!(out.status.code(), Some(0), "{}\n{}", text(&out.stderr), text(&out.stdout));
    let losses: Vec<Vec<String>> =
        (0..3).map(|n| super::losses(&folder.path().join(format!("run/{n}")))).collect();
    assert!(losses.iter().all(|losses| losses.len() == 3), "{losses:?}");
    assert!(losses[0] != losses[1] && losses[1] != losses[2], "{losses:?}");
    // Each is told of by its number.
    let told = text(&out.stdout);
    assert!((0..3).all(|n| told.contains(&format!("_{n}\",\"message\":\"is done\""))), "{told}");
}
