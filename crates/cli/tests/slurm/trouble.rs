//! What users of Slurm meet that can't work: each is told at once, with the line to change.

use super::cluster::Cluster;
use super::user::{phalanx, text};
use super::{PHALANX, TRAIN, losses, srun, until};
use std::fs;
use std::io::{BufRead, BufReader};
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::Stdio;

#[test]
fn a_script_of_several_nodes_without_srun_is_refused() {
    let Some(cluster) = Cluster::start(2) else { return };
    let folder = tempfile::tempdir().unwrap();
    for command in ["train mnist-mini --steps 1", "run --nproc-per-node 2 true"] {
        let wrapped = format!("--wrap={PHALANX} {command}; echo code $?");
        let output = folder.path().join("job.out");
        let mut sbatch = cluster.command("sbatch");
        sbatch.current_dir(folder.path()).args(["--wait", "--nodes=2", "--ntasks=2", &wrapped]);
        let out = cluster.attempt(sbatch.arg(format!("--output={}", output.display())));
        assert!(out.status.success(), "{}", text(&out.stderr));
        let said = fs::read_to_string(output).unwrap();
        assert!(said.contains("has 2 nodes, and this command runs on n1 alone"), "{said}");
        assert!(said.contains("hint: put `srun` before it") && said.contains("code 2"), "{said}");
    }
}

#[test]
fn a_folder_that_is_not_on_the_node_is_told() {
    let Some(cluster) = Cluster::start(1) else { return };
    for srun in ["", "srun "] {
        let kept = tempfile::tempdir().unwrap();
        let (gone, output) = (tempfile::tempdir().unwrap(), kept.path().join("job.out"));
        let mut sbatch = cluster.command("sbatch");
        let command = format!("--wrap={srun}{PHALANX} train mnist-mini --steps 1; echo code $?");
        sbatch.current_dir(gone.path()).args(["--parsable", "--hold", "--ntasks=2", &command]);
        let out = cluster.attempt(sbatch.arg(format!("--output={}", output.display())));
        let job = text(&out.stdout).trim().to_owned();
        let folder = gone.path().to_owned();
        // What the node doesn't see isn't there.
        gone.close().unwrap();
        cluster.run("scontrol", &["release", &job]);
        let said = || fs::read_to_string(&output).unwrap_or_default();
        until(|| "the job doesn't end", &cluster, || said().contains("code "));
        let want = format!("was submitted in {}, which isn't on n1", folder.display());
        let (said, told) = (said(), [want.as_str(), "#SBATCH --chdir=", "code 2"]);
        assert!(told.iter().all(|word| said.contains(word)), "{srun}: {said}");
    }
}

#[test]
fn data_that_a_compute_node_cannot_get_is_told_with_what_to_run_where() {
    let Some(cluster) = Cluster::start(2) else { return };
    let folder = tempfile::tempdir().unwrap();
    let mut step = srun(&cluster, folder.path(), &["-N2", "--ntasks-per-node=1", "--wait=5", PHALANX]);
    let out = cluster.attempt(step.args(["train", "mnist", "--steps", "1"]));
    let said = text(&out.stderr);
    assert_ne!(out.status.code(), Some(0), "{said}");
    assert!(said.contains("dataset mnist was not found"), "{said}");
    assert!(said.contains("hint: where there is a network, run `phalanx data fetch mnist`"), "{said}");
}

#[test]
fn two_jobs_with_one_port_hurt_only_the_second() {
    let Some(cluster) = Cluster::start(2) else { return };
    let folder = tempfile::tempdir().unwrap();
    let free = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port().to_string();
    let mut first = srun(&cluster, folder.path(), &["-N1", "--ntasks=2", PHALANX]);
    first.args(["train", "mnist-mini", "--batch-size", "8", "--epochs", "1000000", "--out", "first"]);
    let mut first =
        first.env("MASTER_PORT", &free).stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
    let made = || losses(&folder.path().join("first")).len();
    until(|| "the first job doesn't train", &cluster, || made() > 10);
    let mut second = srun(&cluster, folder.path(), &["-N1", "--ntasks=2", "--wait=5", PHALANX]);
    let out = cluster.attempt(second.env("MASTER_PORT", &free).args(TRAIN).args(["--out", "second"]));
    let said = text(&out.stderr);
    assert_ne!(out.status.code(), Some(0), "{said}");
    assert!(said.contains(&free) && said.contains("MASTER_PORT"), "{said}");
    let before = made();
    until(|| "the first job is hurt", &cluster, || made() > before + 10);
    cluster.run("scancel", &["--full", "--partition=debug"]);
    first.wait().unwrap();
}

#[test]
fn a_job_that_vanishes_while_it_is_followed_is_told() {
    let folder = tempfile::tempdir().unwrap();
    // A controller that has forgotten it, as one that was set up anew.
    let script = "#!/bin/sh\necho asked >> asked\n[ $(wc -l < asked) -gt 1 ] && { echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1; }\n\
                  echo 'JobId=7 JobName=x JobState=RUNNING Reason=None NodeList=n1 ExitCode=0:0 StdOut=/x WorkDir=/'\n";
    fs::write(folder.path().join("scontrol"), script).unwrap();
    fs::set_permissions(folder.path().join("scontrol"), fs::Permissions::from_mode(0o755)).unwrap();
    let path = format!("{}:/usr/bin:/bin", folder.path().display());
    let out = phalanx(folder.path()).env("PATH", path).args(["slurm", "follow", "7"]).output().unwrap();
    let said = text(&out.stderr);
    assert_eq!(out.status.code(), Some(1), "{said}");
    assert!(said.contains("job 7: runs on n1"), "{said}");
    assert!(
        said.contains("error: job 7 is gone: the controller doesn't know it any more\nhint: sacct -j 7"),
        "{said}"
    );
}

#[test]
fn tasks_and_nodes_that_do_not_fit_are_told() {
    let Some(cluster) = Cluster::start(2) else { return };
    let folder = tempfile::tempdir().unwrap();
    // More tasks than the step's nodes have workers for.
    let mut step = srun(&cluster, folder.path(), &["-N2", "--ntasks=3", PHALANX]);
    let out = cluster.attempt(step.args(["run", "--nproc-per-node", "1", "--", "true"]));
    let said = text(&out.stderr);
    assert!(said.contains("SLURM_STEP_NUM_TASKS is \"3\": must be 2, one task a node"), "{said}");
    // Uneven tasks are ranks all the same.
    let mut step = srun(&cluster, folder.path(), &["-N2", "--ntasks=3", PHALANX]);
    let out = cluster.attempt(step.args(TRAIN).args(["--out", "uneven"]));
    assert_eq!(out.status.code(), Some(0), "{}", text(&out.stderr));
    assert_eq!(losses(&folder.path().join("uneven")).len(), 6);
    // A job of more nodes than there are waits for good, and says so.
    let mut submit = cluster.command(PHALANX);
    submit.current_dir(folder.path()).args(["slurm", "submit", "--nodes", "3", "--cancel", "sleep", "1"]);
    let mut submit = submit.stderr(Stdio::piped()).spawn().unwrap();
    let mut said = BufReader::new(submit.stderr.take().unwrap());
    let mut all = String::new();
    while !all.contains("waits: PartitionNodeLimit (it asks for more nodes than the partition gives") {
        let more = said.read_line(&mut all).unwrap();
        assert!(more > 0, "{all}");
    }
    let pid = nix::unistd::Pid::from_raw(submit.id() as i32);
    nix::sys::signal::kill(pid, nix::sys::signal::Signal::SIGINT).unwrap();
    assert_eq!(submit.wait().unwrap().code(), Some(130));
}

/// A `scontrol` that says these, one after the other, and the last for good; what it is asked with `write` is its script.
fn controller(folder: &Path, said: &[&str], script: &str) -> String {
    fs::write(folder.join("script"), script).unwrap();
    for (number, said) in said.iter().enumerate() {
        fs::write(folder.join(format!("said-{number}")), said).unwrap();
    }
    let last = said.len() - 1;
    let dir = folder.display();
    let text = format!(
        "#!/bin/sh\ncd {dir}\n[ $1 = write ] && exec cat script\nn=$(cat asked 2>/dev/null || echo 0)\n\
         echo $((n < {last} ? n + 1 : n)) > asked\nexec cat said-$n\n"
    );
    fs::write(folder.join("scontrol"), text).unwrap();
    fs::set_permissions(folder.join("scontrol"), fs::Permissions::from_mode(0o755)).unwrap();
    format!("{dir}:/usr/bin:/bin")
}

#[test]
fn what_a_job_of_an_array_came_to_counts_when_the_controller_has_forgotten_it() {
    let folder = tempfile::tempdir().unwrap();
    let job = |task: u32, state: &str, code: u32| {
        format!(
            "JobId={task} ArrayJobId=7 ArrayTaskId={task} JobName=x JobState={state} Reason=None ExitCode={code}:0 NodeList=n1\n"
        )
    };
    let first = job(0, "FAILED", 9) + &job(1, "RUNNING", 0);
    let path =
        controller(folder.path(), &[&first, &job(1, "RUNNING", 0), &job(1, "COMPLETED", 0)], "#!/bin/sh\n");
    let out = phalanx(folder.path()).env("PATH", path).args(["slurm", "follow", "7"]).output().unwrap();
    let said = text(&out.stderr);
    assert_eq!(out.status.code(), Some(9), "{said}");
    assert!(said.contains("job 7_0: failed with exit code 9") && said.contains("job 7_1: is done"), "{said}");
}

#[test]
fn the_run_of_a_job_is_followed_by_its_script() {
    let folder = tempfile::tempdir().unwrap();
    let mut dry = phalanx(folder.path());
    let dry =
        dry.args(["slurm", "submit", "--dry-run", "--out", "it's here", "mnist-mini"]).output().unwrap();
    let mut train = phalanx(folder.path());
    train.args(["train", "mnist-mini", "--steps", "3", "--batch-size", "8", "--out", "it's here"]);
    assert_eq!(train.output().unwrap().status.code(), Some(0));
    let said = format!(
        "JobId=7 JobName=x JobState=FAILED Reason=None ExitCode=0:9 NodeList=n1 WorkDir={} Power=\n",
        folder.path().display()
    );
    let path = controller(folder.path(), &[&said], &text(&dry.stdout));
    let out = phalanx(folder.path()).env("PATH", path).args(["slurm", "follow", "7"]).output().unwrap();
    let said = text(&out.stderr);
    assert_eq!(out.status.code(), Some(137), "{said}");
    assert!(said.contains("job 7: was ended by signal 9 (SIGKILL)") && said.contains("done in "), "{said}");
}
