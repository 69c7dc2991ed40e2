//! How a run stops: by a failure, by a signal, by the end of the launcher, and what it leaves behind.

use super::user::{LOOK, text};
use super::{run, without_times};
use std::fs;
use std::io::{BufRead, BufReader, Read};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, ChildStdout, Command, Stdio};
use std::time::{Duration, Instant};

const LIMIT: Duration = Duration::from_secs(30);

fn wait(child: &mut Child) -> i32 {
    let start = Instant::now();
    loop {
        if let Some(status) = child.try_wait().unwrap() {
            return status.code().unwrap_or(-1);
        }
        assert!(start.elapsed() < LIMIT, "the run doesn't end");
        std::thread::sleep(LOOK);
    }
}

fn mkfifo(folder: &Path, name: &str) {
    assert!(Command::new("mkfifo").arg(folder.join(name)).status().unwrap().success());
}

fn alive(pid: &str) -> bool {
    // A zombie is dead, only not yet buried.
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    stat.rsplit(')').next().is_some_and(|rest| !rest.trim().is_empty() && !rest.trim_start().starts_with('Z'))
}

#[test]
fn the_first_failure_stops_the_others_and_is_reported() {
    let folder = tempfile::tempdir().unwrap();
    let check = |script: &str, words: &[&str]| {
        let start = Instant::now();
        let out = run(folder.path(), "2", &[], script);
        let message = text(&out.stderr);
        assert_eq!(out.status.code(), Some(1), "{message}");
        assert!(words.iter().all(|word| message.contains(word)), "{message}");
        assert!(start.elapsed() < LIMIT, "the other worker was not stopped");
    };
    check(
        "test $RANK = 0 && exec sleep 60; echo the reason >&2; exit 7",
        &["rank 1 (pid", "exited with code 7", "    the reason", "logs: out/logs"],
    );
    check("test $RANK = 1 && exec sleep 60; kill -9 $$", &["rank 0 (pid", "was killed by SIGKILL"]);
    check("test $RANK = 1 && exec sleep 60; kill -SEGV $$", &["rank 0 (pid", "was killed by SIGSEGV"]);
}

#[test]
fn a_worker_that_ignores_sigterm_is_killed_after_the_grace_period() {
    let folder = tempfile::tempdir().unwrap();
    let script =
        "test $RANK = 1 && { read line < go; exit 1; }; trap '' TERM; echo > go; while :; do sleep 1; done";
    mkfifo(folder.path(), "go");
    let out = run(folder.path(), "2", &["--shutdown-timeout", "0.3"], script);
    let message = text(&out.stderr);
    assert_eq!(out.status.code(), Some(1), "{message}");
    assert!(message.contains("killing: rank 0") && message.contains("rank 1 (pid"), "{message}");
}

/// A launcher of two workers.
pub(crate) struct Two {
    launcher: Child,
    out: BufReader<ChildStdout>,
    /// Of the workers and what they have started.
    pids: Vec<String>,
}

impl Two {
    /// Runs this script as two workers. Each says the ids of its processes in its first line.
    pub(crate) fn start(folder: &Path, flags: &[&str], script: &str) -> Two {
        Two::under(folder, "--default-signal", flags, script)
    }

    /// The same with these dispositions of signals, in `env`'s words: what started the tests may ignore some, too.
    fn under(folder: &Path, signals: &str, flags: &[&str], script: &str) -> Two {
        let mut command = Command::new("env");
        command.args(signals.split(' ')).arg(env!("CARGO_BIN_EXE_phalanx")).current_dir(folder);
        command.args(["run", "--nproc-per-node", "2", "--no-prefix", "--out", "out"]).args(flags);
        command.args(["--", "sh", "-c", script]).env_remove("RANK").process_group(0);
        let mut launcher = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        let mut two =
            Two { out: BufReader::new(launcher.stdout.take().unwrap()), launcher, pids: Vec::new() };
        for _ in 0..2 {
            let pids = two.line();
            two.pids.extend(pids.split_whitespace().map(str::to_owned));
        }
        two
    }

    fn line(&mut self) -> String {
        let mut line = String::new();
        self.out.read_line(&mut line).unwrap();
        line
    }

    pub(crate) fn signal(&self, signal: &str) {
        kill(signal, &self.launcher.id().to_string());
    }

    /// Waits for the launcher's end; gives its exit code and what it said.
    pub(crate) fn end(&mut self) -> (i32, String) {
        let code = wait(&mut self.launcher);
        let mut said = String::new();
        self.launcher.stderr.take().map(|mut err| err.read_to_string(&mut said).unwrap());
        (code, said)
    }
}

/// Workers with a process in the background, which only a signal ends.
const WAITING: &str = "sleep 60 & echo $$ $!; wait";

fn kill(signal: &str, pid: &str) {
    assert!(Command::new("kill").args([signal, "--", pid]).status().unwrap().success());
}

fn all_gone(pids: &[String]) {
    let start = Instant::now();
    while pids.iter().any(|pid| alive(pid)) {
        assert!(start.elapsed() < LIMIT, "orphans: {pids:?}");
        std::thread::sleep(LOOK);
    }
}

#[test]
fn who_failed_first_is_blamed_whatever_the_others_do_then() {
    let folder = tempfile::tempdir().unwrap();
    mkfifo(folder.path(), "go");
    // Rank 0 ignores SIGTERM, so that it is the launcher that kills it.
    let script = "test $RANK = 1 && { read line < go; kill -TERM $$; }; trap '' TERM; echo > go; while :; do sleep 1; done";
    let out = run(folder.path(), "2", &["--shutdown-timeout", "0.2"], script);
    let message = text(&out.stderr);
    assert_eq!(out.status.code(), Some(1), "{message}");
    assert!(message.contains("rank 1 (pid") && message.contains("was killed by SIGTERM"), "{message}");
}

#[test]
fn a_failure_before_ctrl_c_is_still_told() {
    let folder = tempfile::tempdir().unwrap();
    mkfifo(folder.path(), "go");
    let script = "echo $$; test $RANK = 1 && { read line < go; exit 7; }; \
                  trap 'echo told to stop' TERM; trap '' INT; echo > go; while :; do sleep 0.05; done";
    let mut two = Two::start(folder.path(), &[], script);
    // The lines of different workers come in any order.
    let said = format!("{} {}", two.pids.join(" "), two.line());
    assert!(said.contains("told to stop"), "{said}");
    // The second one kills, but two of the same kind may reach a process as one.
    two.signal("-INT");
    two.signal("-QUIT");
    let (code, message) = two.end();
    assert_eq!(code, 1, "{message}");
    assert!(message.contains("rank 1 (pid") && message.contains("exited with code 7"), "{message}");
}

#[test]
fn signals_reach_the_workers_and_decide_the_exit_code() {
    for (signal, code) in [("-INT", 130), ("-TERM", 143)] {
        let folder = tempfile::tempdir().unwrap();
        let mut two = Two::start(folder.path(), &[], WAITING);
        assert_eq!(two.pids.iter().filter(|pid| alive(pid)).count(), 4);
        // A shell without a terminal ignores SIGINT in what it runs in the background, so a second one is owed to some.
        two.signal(signal);
        two.signal(signal);
        assert_eq!(two.end().0, code, "{signal}");
        assert!(!two.pids.iter().any(|pid| alive(pid)), "{signal} left a worker");
    }
}

#[test]
fn a_run_whose_folder_is_named_again_goes_on_and_keeps_its_logs() {
    let folder = tempfile::tempdir().unwrap();
    let mut two = Two::start(folder.path(), &[], WAITING);
    let logs = || {
        ["0", "1"]
            .map(|rank| fs::read_to_string(folder.path().join("out/logs/0").join(rank.to_owned() + ".out")))
    };
    let before = logs().map(Result::unwrap);
    assert!(before.iter().all(|log| log.lines().count() == 1), "{before:?}");
    let second = run(folder.path(), "3", &[], "echo the second");
    let message = text(&second.stderr);
    assert_eq!((second.status.code(), text(&second.stdout).as_str()), (Some(1), ""), "{message}");
    for words in
        ["/out: another run is writing to it", "hint: end that run, or name another folder with --out"]
    {
        assert!(message.contains(words), "{message}");
    }
    assert_eq!(logs().map(Result::unwrap), before);
    assert!(!folder.path().join("out/logs/0/2.out").exists());
    two.signal("-TERM");
    assert_eq!(two.end().0, 143);
    // The folder is free as soon as its run is over.
    assert_eq!(run(folder.path(), "1", &[], "true").status.code(), Some(0));
}

#[test]
fn a_signal_that_nohup_ignores_stays_ignored() {
    let folder = tempfile::tempdir().unwrap();
    let mut two = Two::under(folder.path(), "--default-signal --ignore-signal=HUP", &[], WAITING);
    two.signal("-HUP");
    two.signal("-TERM");
    assert_eq!(two.end().0, 143);
}

#[test]
fn the_announcement_of_a_batch_system_is_passed_on_and_ends_nothing() {
    for signal in ["USR1", "USR2", "CONT"] {
        let folder = tempfile::tempdir().unwrap();
        let script = format!("trap 'echo told; exit 0' {signal}; {WAITING}");
        let mut two = Two::start(folder.path(), &[], &script);
        two.signal(&format!("-{signal}"));
        assert_eq!([two.line(), two.line()], ["told\n", "told\n"]);
        let (code, message) = two.end();
        assert_eq!((code, message.as_str()), (0, ""), "{signal}");
    }
}

#[test]
fn a_launcher_that_nobody_listens_to_still_stops_its_workers() {
    let folder = tempfile::tempdir().unwrap();
    let Two { mut launcher, out, pids } = Two::start(folder.path(), &[], WAITING);
    drop((out, launcher.stderr.take()));
    kill("-TERM", &launcher.id().to_string());
    assert_eq!(wait(&mut launcher), 143);
    assert!(!pids.iter().any(|pid| alive(pid)), "SIGTERM left a worker");
}

#[test]
fn a_console_that_stalls_holds_up_no_signal_and_no_failure() {
    let folder = tempfile::tempdir().unwrap();
    // Nobody reads what they go on to write.
    let mut two = Two::start(folder.path(), &[], "echo $$; exec yes");
    two.signal("-TERM");
    assert_eq!(two.end().0, 143);
    mkfifo(folder.path(), "go");
    let script =
        "echo $$; test $RANK = 1 && { read line < go; exit 7; }; yes | head -c 20000; (echo > go) & exec yes";
    let mut two = Two::start(folder.path(), &[], script);
    all_gone(&two.pids);
    // What was written is still shown before the launcher ends.
    assert!(std::io::copy(&mut two.out, &mut std::io::sink()).unwrap() >= 20000);
    assert_eq!(two.end().0, 1);
}

#[test]
fn no_orphan_is_left_when_the_launcher_is_killed() {
    for whole_group in ["", "-"] {
        let folder = tempfile::tempdir().unwrap();
        let mut two = Two::start(folder.path(), &[], WAITING);
        kill("-KILL", &format!("{whole_group}{}", two.launcher.id()));
        two.launcher.wait().unwrap();
        all_gone(&two.pids);
    }
}

#[test]
fn who_left_the_group_and_holds_the_pipe_is_not_waited_for() {
    let folder = tempfile::tempdir().unwrap();
    let start = Instant::now();
    let out = run(folder.path(), "1", &[], "setsid sleep 60 & echo $! > pid; echo the end >&2; exit 3");
    let pid = fs::read_to_string(folder.path().join("pid")).unwrap();
    kill("-KILL", pid.trim());
    let message = text(&out.stderr);
    assert_eq!(out.status.code(), Some(1), "{message}");
    assert!(message.contains("exited with code 3") && message.contains("    the end"), "{message}");
    assert!(start.elapsed() < LIMIT, "the launcher waited for a process that isn't its");
}

#[test]
fn a_filter_may_finish_after_its_worker() {
    let folder = tempfile::tempdir().unwrap();
    let script = "mkfifo pipe; tee copy < pipe & exec > pipe; seq 100000";
    let out = run(folder.path(), "1", &["--no-prefix"], script);
    assert_eq!(out.status.code(), Some(0), "{}", text(&out.stderr));
    for lines in [text(&out.stdout), without_times(&folder.path().join("out/logs/0/0.out"))] {
        assert_eq!(lines.lines().last(), Some("100000"));
    }
}

#[test]
fn what_a_worker_leaves_behind_is_asked_to_end_and_then_killed() {
    let folder = tempfile::tempdir().unwrap();
    mkfifo(folder.path(), "go");
    let script = "(trap 'echo > asked' TERM; echo > go; while :; do sleep 0.05; done) > /dev/null 2>&1 & \
                  echo $! > pid; read line < go";
    let out = run(folder.path(), "1", &[], script);
    assert_eq!(out.status.code(), Some(0), "{}", text(&out.stderr));
    assert!(folder.path().join("asked").exists());
    all_gone(&[fs::read_to_string(folder.path().join("pid")).unwrap().trim().to_owned()]);
}

#[test]
fn nothing_runs_on_when_a_log_cannot_be_made() {
    let folder = tempfile::tempdir().unwrap();
    // Rank 0 is there already when rank 1 finds a folder where its log should be.
    fs::create_dir_all(folder.path().join("out/logs/0/1.out")).unwrap();
    let out = run(folder.path(), "2", &[], "echo $$ > pid.$RANK; exec sleep 60");
    let message = text(&out.stderr);
    assert_eq!(out.status.code(), Some(1), "{message}");
    assert!(message.contains("out/logs/0/1.out") && message.contains("hint:"), "{message}");
    assert!(message.contains("--out"), "{message}");
    assert!(!folder.path().join("pid.1").exists(), "a worker without a log was started");
    let first = fs::read_to_string(folder.path().join("pid.0")).unwrap_or_default();
    assert!(first.is_empty() || !alive(first.trim()), "rank 0 runs on");
}
