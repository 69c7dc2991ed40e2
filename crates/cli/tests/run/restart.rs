//! How a run whose workers fail is started again, by `--max-restarts`.

use super::stop::Two;
use super::user::text;
use super::{run, without_times};
use phalanx::Worker;
use phalanx::comm::ReduceOp;
use std::fs;
use std::process::Command;

#[test]
fn a_failure_starts_all_workers_again_until_they_end_well() {
    let folder = tempfile::tempdir().unwrap();
    let script = "echo $TORCHELASTIC_RESTART_COUNT of $TORCHELASTIC_MAX_RESTARTS, generation $PHALANX_GENERATION; \
                  echo $MASTER_PORT >> ports.$PHALANX_GENERATION; test $TORCHELASTIC_RESTART_COUNT = 2 && exit 0; \
                  test $RANK = 0 && exec sleep 60; \
                  until test $(wc -l < ports.$PHALANX_GENERATION) = 2; do sleep 0.01; done; \
                  exit $((7 + TORCHELASTIC_RESTART_COUNT))";
    let out = run(folder.path(), "2", &["--max-restarts", "3"], script);
    let message = text(&out.stderr);
    assert_eq!(out.status.code(), Some(0), "{message}");
    for generation in 0..3 {
        for rank in 0..2 {
            let log = without_times(&folder.path().join(format!("out/logs/{generation}/{rank}.out")));
            assert_eq!(log, format!("{generation} of 3, generation {generation}\n"));
        }
    }
    // Each is said when it happens, and all of them at the end.
    for (restart, code) in [(1, 7), (2, 8)] {
        let said = format!("starting all workers again (restart {restart} of 3)");
        assert!(
            message.lines().any(|line| line.contains(&said) && line.starts_with("rank 1 (pid")),
            "{message}"
        );
        let cause = |line: &str| line.starts_with(&format!("  {}: rank 1 (pid", restart - 1));
        let how = format!("exited with code {code} after");
        assert!(message.lines().any(|line| cause(line) && line.contains(&how)), "{message}");
    }
    assert!(message.contains("restarts: 2;") && !message.contains("error:"), "{message}");
    let ports = [0, 1, 2].map(|generation| {
        let ports = fs::read_to_string(folder.path().join(format!("ports.{generation}"))).unwrap();
        let [one, other] = ports.lines().collect::<Vec<_>>()[..] else { panic!("{ports}") };
        assert_eq!(one, other);
        one.to_owned()
    });
    // Free ports are handed out at random.
    assert!(ports.iter().any(|port| *port != ports[0]), "{ports:?}");
}

#[test]
fn the_last_failure_of_a_run_without_restarts_left_is_told_last() {
    let folder = tempfile::tempdir().unwrap();
    let script = "test $RANK = $TORCHELASTIC_RESTART_COUNT || exec sleep 60; echo reason $RANK >&2; exit 3";
    let out = run(folder.path(), "2", &["--max_restarts=1", "--master-port", "0"], script);
    let message = text(&out.stderr);
    assert_eq!(out.status.code(), Some(1), "{message}");
    let at = |words: &str| message.rfind(words).unwrap_or_else(|| panic!("{words} in {message}"));
    let order = [
        "restarts: 1; what went wrong each time:",
        "  0: rank 0 (pid",
        "  1: rank 1 (pid",
        "error: rank 1 (pid",
        "    reason 1",
        "not started again: a worker failed, and all restarts of --max-restarts 1 are used",
    ];
    assert!(order.windows(2).all(|pair| at(pair[0]) < at(pair[1])), "{message}");
}

#[test]
fn a_port_that_was_asked_for_is_the_same_after_a_restart() {
    let folder = tempfile::tempdir().unwrap();
    let port = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port().to_string();
    let script = "echo $MASTER_PORT; exit $((1 - TORCHELASTIC_RESTART_COUNT))";
    let out =
        run(folder.path(), "1", &["--max-restarts", "1", "--no-prefix", "--master-port", &port], script);
    assert_eq!(out.status.code(), Some(0), "{}", text(&out.stderr));
    assert_eq!(text(&out.stdout), format!("{port}\n{port}\n"));
}

#[test]
fn who_asked_for_the_end_gets_no_restart() {
    for first in ["", "test $TORCHELASTIC_RESTART_COUNT = 0 && { test $RANK = 0 && exit 1; exec sleep 60; };"]
    {
        let folder = tempfile::tempdir().unwrap();
        // Both fail when they are told to end.
        let script = format!("{first} trap 'exit 9' TERM; sleep 60 & echo $$ $!; wait");
        let mut two = Two::start(folder.path(), &["--max-restarts", "5"], &script);
        two.signal("-TERM");
        let (code, message) = two.end();
        assert_eq!(code, 143, "{message}");
        assert_eq!(message.contains("restarts: 1;"), !first.is_empty(), "{message}");
        assert!(!message.contains("restart 2"), "{message}");
    }
}

#[test]
fn workers_that_want_to_be_started_later_are_not_started_again_now() {
    let check = |script: &str, code: i32, words: &str| {
        let folder = tempfile::tempdir().unwrap();
        let out = run(folder.path(), "2", &["--max-restarts", "3"], script);
        let message = text(&out.stderr);
        assert_eq!(out.status.code(), Some(code), "{script}: {message}");
        assert!(message.contains(words) && !message.contains("starting all workers again"), "{message}");
        assert_eq!(message.is_empty(), words.is_empty(), "{message}");
        assert_eq!(fs::read_to_string(folder.path().join("0")).unwrap(), "kept\n");
    };
    // Rank 0 isn't hurried when the other is gone and it still keeps its work.
    let keeps = "test $RANK = 1 && { echo $$ > pid; mv pid 1; exit 75; }; until test -e 1; do sleep 0.01; done; \
                 while kill -0 $(cat 1) 2> kill; do sleep 0.01; done; echo kept > 0;";
    check(&format!("{keeps} exit 75"), 75, "");
    check(&format!("{keeps} exit 0"), 75, "");
    // Whoever fails meanwhile is told of, and is no reason to begin again now, nor never.
    check(&format!("{keeps} exit 4"), 75, "error: rank 0 (pid ");
}

#[test]
fn workers_of_ours_meet_again_after_one_was_killed() {
    let body = "restart::workers_of_ours_meet_again_after_one_was_killed";
    if std::env::var_os("PHALANX_TEST").is_some() {
        let worker = Worker::from_env().unwrap();
        let mut sum = [1.0f32];
        worker.group().all_reduce(&mut sum, ReduceOp::Sum).unwrap();
        assert_eq!(sum, [3.0]);
        let generation = worker.group().generation().0;
        if generation < 2 && worker.group().rank().0 == 2 {
            Command::new("kill").args(["-9", &std::process::id().to_string()]).status().unwrap();
        }
        worker.group().barrier().unwrap();
        println!("rank {} is through in generation {generation}", worker.group().rank());
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let mut command = super::user::phalanx(folder.path());
    command.args([
        "run",
        "--nproc-per-node",
        "3",
        "--max-restarts",
        "2",
        "--out",
        "out",
        "--no-python",
        "--",
    ]);
    command.arg(std::env::current_exe().unwrap()).args(["--exact", body, "--nocapture"]);
    let out = command.env("PHALANX_TEST", body).env("RUST_BACKTRACE", "0").output().unwrap();
    let (message, said) = (text(&out.stderr), text(&out.stdout));
    assert_eq!(out.status.code(), Some(0), "{message}");
    assert_eq!(said.matches("is through in generation 2").count(), 3, "{said}{message}");
    for generation in 0..2 {
        let cause = |line: &&str| line.starts_with(&format!("  {generation}: rank 2 (pid"));
        let line = message.lines().find(cause).unwrap_or_else(|| panic!("{message}"));
        assert!(line.contains("was killed by SIGKILL"), "{line}");
    }
}

/// As PyTorch's programs do under `@record`.
#[test]
fn why_a_worker_failed_is_read_where_it_says_so() {
    let folder = tempfile::tempdir().unwrap();
    let script = r#"test $RANK = 1 || exec sleep 60
        test $TORCHELASTIC_RESTART_COUNT = 1 && { echo {} > $TORCHELASTIC_ERROR_FILE; exit 4; }
        printf %s '{"message": {"message": "ValueError: bad", "extraInfo": {"py_callstack": "Traceback:\n  here\n"}}}' > $TORCHELASTIC_ERROR_FILE
        seq 40 >&2; exit 3"#;
    let out = run(folder.path(), "2", &["--max-restarts", "1"], script);
    let said = text(&out.stderr);
    assert_eq!(out.status.code(), Some(1), "{said}");
    assert!(
        said.contains("exited with code 3 after") && said.contains("(ValueError: bad): starting all"),
        "{said}"
    );
    // The one in its place says nothing of its own.
    let (_, last) = said.split_once("error: rank 1").unwrap_or_else(|| panic!("{said}"));
    assert!(last.contains("exited with code 4") && !last.contains("ValueError"), "{said}");
    let out = run(folder.path(), "2", &[], script);
    let said = text(&out.stderr);
    assert!(
        said.contains("it said: ValueError: bad\n  Traceback:\n    here\n  its last lines:\n    29\n"),
        "{said}"
    );
}
