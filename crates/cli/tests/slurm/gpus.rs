//! Jobs with GPUs: Slurm deals them out in earnest, and the driver that finds those that a task was given is the fake one.

use super::cluster::Cluster;
use super::fake::fake;
use super::user::text;
use super::{PHALANX, losses, srun};
use std::fs;
use std::path::Path;
use std::process::Command;

/// A run of three steps, small enough for a driver that plays a GPU.
const TRAIN: [&str; 10] =
    ["train", "mnist-mini", "--json", "--steps", "3", "--batch-size", "4", "--seed", "3", "--device"];

/// A step whose tasks find the fake driver.
fn step(cluster: &Cluster, folder: &Path, libraries: &Path, flags: &[&str]) -> Command {
    let mut step = srun(cluster, folder, flags);
    step.env("LD_LIBRARY_PATH", libraries).env_remove("CUDA_VISIBLE_DEVICES");
    step
}

#[test]
fn tasks_have_the_gpus_that_slurm_gives_them() {
    let Some(cluster) = Cluster::with_gpus(2, 2) else { return };
    let Some(fake) = fake() else { return };
    let folder = tempfile::tempdir().unwrap();
    let run = |flags: &[&str], command: &[&str]| {
        let mut step = step(&cluster, folder.path(), fake.folder(), flags);
        let out = cluster.attempt(step.args(command));
        assert_eq!(out.status.code(), Some(0), "{flags:?}: {}\n{}", text(&out.stderr), cluster.logs());
        text(&out.stdout)
    };
    // What Slurm tells, on which all else relies: GPUs of the node for all of its tasks, or one for each.
    let tell = ["sh", "-c", "echo $SLURM_LOCALID $SLURM_GPUS_ON_NODE $CUDA_VISIBLE_DEVICES"];
    let told = |flags: &[&str]| {
        let mut lines: Vec<String> = run(flags, &tell).lines().map(str::to_owned).collect();
        lines.sort();
        lines
    };
    let (tasks, of_node) = (["-N2", "--ntasks-per-node=2"], "--gpus-per-node=2");
    assert_eq!(told(&[tasks[0], tasks[1], of_node]), ["0 2 0,1", "0 2 0,1", "1 2 0,1", "1 2 0,1"]);
    let each = told(&[tasks[0], tasks[1], "--gpus-per-task=1"]);
    assert_eq!(each, ["0 2 0", "0 2 0", "1 2 1", "1 2 1"]);

    let train = |out: &str, flags: &[&str], before: &[&str], device: &str| {
        run(flags, &[before, &[PHALANX], &TRAIN, &[device, "--out", out]].concat());
        losses(&folder.path().join(out))
    };
    let want = train("cpus", &tasks, &[], "cpu");
    let number = |loss: &String| loss.parse::<f64>().unwrap();
    let check = |out: &str, flags: &[&str], before: &[&str]| {
        let got = train(out, flags, before, "cuda");
        assert_eq!(got.len(), 3, "{out}");
        let near = got.iter().zip(&want).all(|(a, b)| (number(a) - number(b)).abs() < 2e-4);
        assert!(near, "{out}: {got:?}, not {want:?}");
    };
    check("by-node", &[tasks[0], tasks[1], of_node], &[]);
    check("by-task", &[tasks[0], tasks[1], "--gpus-per-task=1"], &[]);
    let agents = [PHALANX, "run", "--nproc-per-node", "2", "--out", "logs", "--"];
    check("by-agent", &["-N2", "--ntasks-per-node=1", of_node], &agents);
}

#[test]
fn gpus_that_are_missing_are_told_with_the_line_to_change() {
    let Some(cluster) = Cluster::with_gpus(1, 2) else { return };
    let Some(fake) = fake() else { return };
    let folder = tempfile::tempdir().unwrap();
    let refused = |flags: &[&str], want: &[&str]| {
        let mut step = step(&cluster, folder.path(), fake.folder(), flags);
        let out =
            cluster.attempt(step.arg("--wait=5").arg(PHALANX).args(TRAIN).args(["cuda", "--out", "run"]));
        let said = text(&out.stderr);
        assert_ne!(out.status.code(), Some(0), "{said}");
        assert!(want.iter().all(|word| said.contains(word)), "{flags:?}: {said}");
    };
    refused(
        &["--ntasks=2", "--gpus-per-node=1"],
        &["there is no GPU 1, there are 1", "--gpus-per-node says"],
    );
    // What no node has isn't submitted.
    let mut submit = cluster.command(PHALANX);
    submit.current_dir(folder.path()).args(["slurm", "submit", "--gpus-per-node", "9", "sleep", "1"]);
    let out = cluster.attempt(&mut submit);
    let said = text(&out.stderr);
    assert_eq!(out.status.code(), Some(1), "{said}");
    assert!(said.contains("hint: no node has so much: see what there is with sinfo"), "{said}");
}

#[test]
fn a_job_with_gpus_is_submitted_and_trains_on_them() {
    let Some(cluster) = Cluster::with_gpus(2, 2) else { return };
    let Some(fake) = fake() else { return };
    let folder = tempfile::tempdir().unwrap();
    let mut submit = cluster.command(PHALANX);
    submit.current_dir(folder.path()).env("XDG_CONFIG_HOME", folder.path().join("config"));
    submit.env("LD_LIBRARY_PATH", fake.folder()).env("PHALANX_CACHE", folder.path().join("cache"));
    submit.args(["slurm", "submit", "--nodes", "2", "--gpus-per-node", "2", "--cpus-per-node", "2"]);
    submit.args(["--out", "run", "--json", "mnist-mini", "--steps", "3", "--batch-size", "4"]);
    let out = cluster.attempt(&mut submit);
    let output = || -> String {
        let files = fs::read_dir(folder.path()).unwrap().map(|entry| entry.unwrap().path());
        let outputs = files.filter(|path| path.extension().is_some_and(|end| end == "out"));
        outputs.map(|path| fs::read_to_string(path).unwrap_or_default()).collect()
    };
    assert_eq!(out.status.code(), Some(0), "{}\n{}", text(&out.stderr), output());
    let events = fs::read_to_string(folder.path().join("run/events.jsonl")).unwrap();
    assert!(events.contains("\"world_size\":4"), "a worker for each of four GPUs: {events}");
    assert!(events.contains("\"event\":\"done\",\"steps\":3"), "{events}");
}
