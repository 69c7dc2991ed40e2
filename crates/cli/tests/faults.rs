//! What a user sees when ranks of a run break, disagree, or can't meet.

mod user;

use phalanx::comm::ReduceOp;
use phalanx::{Error, Worker};
use std::io::Write;
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::time::{Duration, Instant};
use user::{LOOK, phalanx, text};

const PHALANX: &str = env!("CARGO_BIN_EXE_phalanx");
/// No failure may take as long as this to be told.
const LIMIT: Duration = Duration::from_secs(20);

/// Runs this very test program as two workers, each in the test named `body` with `PHALANX_TEST` set.
fn two_workers(folder: &Path, body: &str) -> Output {
    let program = std::env::current_exe().unwrap();
    let mut command = phalanx(folder);
    command.args(["run", "--nproc-per-node", "2", "--out", "out", "--no-python", "--"]);
    command
        .arg(program)
        .args(["--exact", body, "--nocapture"])
        .env("PHALANX_TEST", body)
        .env("RUST_BACKTRACE", "0")
        .output()
        .unwrap()
}

/// What the flight records of the run in `out` say.
fn flight(folder: &Path) -> String {
    let told = phalanx(folder).args(["flight", "out"]).output().unwrap();
    assert!(told.status.success(), "{}", text(&told.stderr));
    text(&told.stdout)
}

#[test]
fn the_flight_records_of_ranks_that_disagree_say_who_understood_what() {
    if is_worker() {
        let worker = Worker::from_env().unwrap();
        let root = worker.group().rank();
        worker.group().barrier().unwrap();
        let error = worker.group().broadcast(&mut [1.0f32; 4], root).and_then(|()| worker.group().barrier());
        let error = error.unwrap_err();
        // The first to leave has the other stopped, which may not have come to writing its own record.
        let flight = Path::new("out/flight");
        let start = Instant::now();
        while start.elapsed() < LIMIT && records(flight) < 2 {
            std::thread::sleep(LOOK);
        }
        panic!("{error}");
    }
    let folder = tempfile::tempdir().unwrap();
    let out = two_workers(folder.path(), "the_flight_records_of_ranks_that_disagree_say_who_understood_what");
    let message = text(&out.stderr);
    assert!(message.contains("flight records:") && message.contains("hint: phalanx flight"), "{message}");
    let told = flight(folder.path());
    assert!(told.contains("ranks 0, 1: all left a record"), "{told}");
    for rank in 0..2 {
        let understood = format!("rank {rank} understood broadcast #2 (4 x f32, from rank {rank})");
        assert!(told.contains(&understood), "{told}");
    }
}

/// How many records lie in a folder of generations.
fn records(flight: &Path) -> usize {
    let entries = |folder: &Path| std::fs::read_dir(folder).into_iter().flatten().flatten().map(|e| e.path());
    let is_record = |path: &PathBuf| path.extension().is_some_and(|end| end == "json");
    entries(flight).map(|generation| entries(&generation).filter(is_record).count()).sum()
}

fn is_worker() -> bool {
    std::env::var_os("PHALANX_TEST").is_some()
}

#[test]
fn a_worker_that_panics_is_named_with_its_last_words() {
    if is_worker() {
        let worker = Worker::from_env().unwrap();
        for step in 0.. {
            let mut sum = [1.0f32; 1000];
            if let Err(error) = worker.group().all_reduce(&mut sum, ReduceOp::Sum) {
                eprintln!("rank {} saw: {error}", worker.group().rank());
                std::process::exit(1);
            }
            assert!(worker.group().rank().0 != 1 || step < 3, "the third step was too much");
        }
    }
    let folder = tempfile::tempdir().unwrap();
    let start = Instant::now();
    let out = two_workers(folder.path(), "a_worker_that_panics_is_named_with_its_last_words");
    let message = text(&out.stderr);
    assert_eq!(out.status.code(), Some(1), "{message}");
    assert!(start.elapsed() < LIMIT);
    let report =
        message.find("error: rank 1").map(|at| &message[at..]).unwrap_or_else(|| panic!("{message}"));
    assert!(
        report.contains("exited with code 101") && report.contains("the third step was too much"),
        "{report}"
    );
}

#[test]
fn two_models_in_one_group_are_told_apart() {
    let folder = tempfile::tempdir().unwrap();
    let script = "if [ $RANK = 0 ]; then recipe=mnist-mini; else recipe=linear-regression; fi; exec \"$0\" train $recipe --out $RANK";
    let mut command = phalanx(folder.path());
    let out = command
        .args(["run", "--nproc-per-node", "2", "--out", "out", "--", "bash", "-c", script, PHALANX])
        .output()
        .unwrap();
    let message = text(&out.stderr);
    assert_eq!(out.status.code(), Some(1), "{message}");
    let words = "rank 1 would train otherwise than rank 0: ";
    let model = "model.name is \"linear-regression\" there, and \"mnist\" on rank 0";
    assert!(message.contains(words) && message.contains(model), "{message}");
    for rank in ["0", "1"] {
        assert!(!folder.path().join(rank).join("model.safetensors").exists());
    }
}

#[test]
fn a_port_in_use_is_named() {
    let folder = tempfile::tempdir().unwrap();
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = taken.local_addr().unwrap().port().to_string();
    let mut command = phalanx(folder.path());
    command.args(["train", "mnist-mini", "--steps", "1", "--out", "out"]);
    command.env("XDG_CONFIG_HOME", folder.path());
    for (name, value) in
        [("RANK", "0"), ("WORLD_SIZE", "2"), ("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", &port)]
    {
        command.env(name, value);
    }
    let out = command.output().unwrap();
    let message = text(&out.stderr);
    assert_eq!(out.status.code(), Some(1), "{message}");
    assert!(
        message.contains(&format!("127.0.0.1:{port}"))
            && message.contains("Address already in use")
            && message.contains("hint:"),
        "{message}"
    );
}

#[test]
fn a_full_disk_ends_the_run_with_one_error_and_no_model() {
    let folder = tempfile::tempdir().unwrap();
    // The shell limits the size of files, the model's is larger: a full disk as far as the program can tell.
    let script = "ulimit -f 8; exec \"$0\" train mnist-mini --steps 1 --out out";
    let told =
        Command::new("bash").args(["-c", script, PHALANX]).current_dir(folder.path()).output().unwrap();
    let message = text(&told.stderr);
    assert_eq!(told.status.code(), Some(1), "{message}");
    assert!(message.contains("model.safetensors: can't be written"), "{message}");
    let left: Vec<_> =
        std::fs::read_dir(folder.path().join("out")).unwrap().map(|e| e.unwrap().file_name()).collect();
    assert!(!left.iter().any(|name| name.to_string_lossy().contains("safetensors")), "{left:?}");
}

#[test]
fn a_rank_whose_peer_is_killed_says_so_and_the_killed_one_is_blamed() {
    if is_worker() {
        let worker = Worker::from_env().unwrap();
        if worker.group().rank().0 == 1 {
            Command::new("kill").args(["-9", &std::process::id().to_string()]).status().unwrap();
        }
        let error = worker.group().barrier().map_err(Error::from).unwrap_err();
        // In one write, since the launcher may stop this rank at any moment.
        let line = format!("rank 0 saw: {error}\n");
        std::io::stderr().write_all(line.as_bytes()).unwrap();
        std::process::exit(7);
    }
    let folder = tempfile::tempdir().unwrap();
    let out = two_workers(folder.path(), "a_rank_whose_peer_is_killed_says_so_and_the_killed_one_is_blamed");
    let message = text(&out.stderr);
    assert_eq!(out.status.code(), Some(1), "{message}");
    assert!(message.contains("rank 1") && message.contains("SIGKILL"), "{message}");
    let log = std::fs::read_to_string(folder.path().join("out/logs/0/0.err")).unwrap();
    assert!(log.is_empty() || log.contains("rank 1 is gone"), "{log}");
}

#[test]
fn a_worker_that_is_stopped_ends_the_run_and_is_named() {
    if is_worker() {
        let worker = Worker::from_env().unwrap();
        worker.group().barrier().unwrap();
        if worker.group().rank().0 == 1 {
            Command::new("kill").args(["-STOP", &std::process::id().to_string()]).status().unwrap();
            // One of its threads may go on for a moment.
            loop {
                std::thread::park();
            }
        }
        let error = worker.group().barrier().map_err(Error::from).unwrap_err();
        std::io::stderr().write_all(format!("{error}\n").as_bytes()).unwrap();
        std::process::exit(7);
    }
    let folder = tempfile::tempdir().unwrap();
    let start = Instant::now();
    let out = two_workers(folder.path(), "a_worker_that_is_stopped_ends_the_run_and_is_named");
    let message = text(&out.stderr);
    assert_eq!(out.status.code(), Some(1), "{message}");
    assert!(message.contains("rank 1 is silent: it is stopped (SIGSTOP or a debugger)"), "{message}");
    // The grace period, which a stopped process used to last out, is longer.
    assert!(start.elapsed() < LIMIT, "{:?}", start.elapsed());
}
