//! `phalanx run --hosts`: over a real sshd on this machine, which the tests start, and skip aloud where they can't; and for faults
//! over a script in its place, which runs a host's command here.

mod sshd;
#[path = "../user/mod.rs"]
mod user;

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use phalanx_job::SecretSource;
use sshd::Sshd;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};
use user::{phalanx, text};

/// How long what should happen may take on a busy machine.
const LIMIT: Duration = Duration::from_secs(120);

/// What a stand-in for ssh does unless it is told otherwise: the last word is the command, and the one before it the host.
const PASS: &str = "for word; do host=$last; last=$word; done\n";

/// A program in the place of ssh.
fn stand_in(folder: &Path, script: &str) -> String {
    let path = folder.join("stand-in");
    fs::write(&path, format!("#!/bin/sh\n{PASS}{script}\n")).unwrap();
    fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
    format!("'{}'", path.display())
}

/// `phalanx run` on these hosts, in this folder.
fn run(folder: &Path, ssh: &str, hosts: &str) -> Command {
    let mut command = phalanx(folder);
    command.env_remove("PHALANX_SECRET_FILE").env("XDG_CONFIG_HOME", folder.join("config"));
    command.args(["run", "--ssh", ssh, "--hosts", hosts, "--out", "out"]);
    command
}

/// The two names of this machine.
const TWO: &str = "127.0.0.1:1,localhost:1";

fn start(command: &mut Command) -> Child {
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
}

/// Waits for its end, but not for ever.
fn end(child: Child) -> Output {
    let pid = Pid::from_raw(child.id() as i32);
    let (done, over) = std::sync::mpsc::channel::<()>();
    let watch = std::thread::spawn(move || {
        if over.recv_timeout(LIMIT) == Err(std::sync::mpsc::RecvTimeoutError::Timeout) {
            let _ = kill(pid, Signal::SIGKILL);
        }
    });
    let out = child.wait_with_output().unwrap();
    drop(done);
    watch.join().unwrap();
    out
}

fn until(what: &str, mut done: impl FnMut() -> bool) {
    let start = Instant::now();
    while !done() {
        assert!(start.elapsed() < LIMIT, "{what}");
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// A worker that writes down its process, and then only waits.
const WAITS: &str = "echo $$ > pid.$RANK.tmp; mv pid.$RANK.tmp pid.$RANK; exec sleep 600";

/// The processes of so many workers, once they are there.
fn pids(folder: &Path, workers: usize) -> Vec<i32> {
    let read = |rank| fs::read_to_string(folder.join(format!("pid.{rank}"))).ok()?.trim().parse().ok();
    until("the workers don't start", || (0..workers).all(|rank| read(rank).is_some()));
    (0..workers).filter_map(read).collect()
}

fn are_gone(pids: &[i32]) {
    let is_there = |pid: &i32| {
        let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
        stat.rsplit(')').next().is_some_and(|rest| !rest.is_empty() && !rest.trim_start().starts_with('Z'))
    };
    until("workers are left", || !pids.iter().any(is_there));
}

/// The processes that have this one as their parent and were called so.
fn children(parent: u32, program: &str) -> Vec<i32> {
    let entries =
        fs::read_dir("/proc").unwrap().filter_map(|entry| entry.unwrap().file_name().into_string().ok());
    let pids = entries.filter_map(|name| name.parse::<i32>().ok());
    let is_child = |pid: &i32| {
        let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
        let name = stat.split_once('(').and_then(|(_, rest)| rest.split_once(')')).map(|(name, _)| name);
        let of = stat.rsplit(')').next().and_then(|rest| rest.split_whitespace().nth(1));
        name == Some(program) && of == Some(parent.to_string().as_str())
    };
    let mut found: Vec<i32> = pids.filter(is_child).collect();
    found.sort_unstable();
    found
}

#[test]
fn ranks_of_several_hosts_are_one_run_and_nobody_sees_the_secret() {
    let Some(sshd) = Sshd::start() else { return };
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("secret");
    fs::write(&file, "5a".repeat(32)).unwrap();
    fs::set_permissions(&file, fs::Permissions::from_mode(0o600)).unwrap();
    // The first worker lists what everybody on the machine can list.
    let script = "echo \"rank $RANK of $WORLD_SIZE, $LOCAL_RANK of $LOCAL_WORLD_SIZE, it's '$PHALANX_THREADS'\"\n\
                  [ $RANK = 0 ] && cat /proc/[0-9]*/cmdline 2>/dev/null | tr '\\0' ' ' > listed; exit 0";
    let mut command = run(folder.path(), &sshd.ssh(), "127.0.0.1:2,localhost:1");
    command.args(["--rdzv-id", "mine", "--secret-file"]).arg(&file).env("PHALANX_THREADS", "3");
    let out = end(start(command.args(["--", "sh", "-c", script])));
    let (printed, said) = (text(&out.stdout), text(&out.stderr));
    assert_eq!(out.status.code(), Some(0), "{said}");
    for line in [
        "[127.0.0.1 rank0]: rank 0 of 3, 0 of 2, it's '3'\n",
        "[127.0.0.1 rank1]: rank 1 of 3, 1 of 2, it's '3'\n",
        "[localhost rank2]: rank 2 of 3, 0 of 1, it's '3'\n",
    ] {
        assert!(printed.contains(line), "{line} isn't in {printed}");
    }
    let mut plain = run(folder.path(), &sshd.ssh(), "127.0.0.1:1");
    let plain = end(start(plain.args(["--no-prefix", "--", "echo", "{}"])));
    assert_eq!(text(&plain.stdout), "{}\n", "as a program that reads it wants it");
    // What was looked at is told: a line each, and that they are one machine.
    assert!(said.contains("127.0.0.1: 2 workers, ") && said.contains("localhost: 1 worker, "), "{said}");
    assert!(said.contains("localhost is the same machine as 127.0.0.1"), "{said}");
    let listed = fs::read(folder.path().join("listed")).unwrap();
    let listed = String::from_utf8_lossy(&listed);
    assert!(listed.contains("phalanx host"), "{listed}");
    let secret = SecretSource::File(file).read("mine").unwrap();
    let hex: String = secret.expose().iter().map(|byte| format!("{byte:02x}")).collect();
    assert!(!listed.contains(&hex) && !listed.contains(&"5a".repeat(32)), "{listed}");
    // Whether the hosts share the folder was found out by a file, which is gone.
    let left = fs::read_dir(folder.path()).unwrap().map(|entry| entry.unwrap().file_name());
    assert!(left.into_iter().all(|name| !name.to_string_lossy().starts_with(".phalanx-")));
}

#[test]
fn training_over_ssh_comes_to_the_same_bits() {
    let Some(sshd) = Sshd::start() else { return };
    let folder = tempfile::tempdir().unwrap();
    let train = [
        "train",
        "mnist-mini",
        "--steps",
        "6",
        "--batch-size",
        "8",
        "--seed",
        "3",
        "--set",
        "train.threads=1",
    ];
    let mut command = run(folder.path(), &sshd.ssh(), TWO);
    let out = end(start(command.args(["--", "phalanx"]).args(train).args(["--out", "hosts"])));
    assert_eq!(out.status.code(), Some(0), "{}", text(&out.stderr));
    let mut command = phalanx(folder.path());
    let out = command.args(train).args(["--nproc-per-node", "2", "--out", "here"]).output().unwrap();
    assert_eq!(out.status.code(), Some(0), "{}", text(&out.stderr));
    let model = |run: &str| fs::read(folder.path().join(run).join("model.safetensors")).unwrap();
    assert!(model("hosts") == model("here"), "the weights differ");
}

#[test]
fn one_that_fails_stops_the_others_and_so_does_a_session_that_breaks() {
    let Some(sshd) = Sshd::start() else { return };
    let folder = tempfile::tempdir().unwrap();
    let script = format!(
        "[ $RANK = 1 ] && {{ until [ -e pid.0 ]; do sleep 0.05; done; echo out of luck; exit 3; }}\n{WAITS}"
    );
    let mut command = run(folder.path(), &sshd.ssh(), TWO);
    let out = end(start(command.args(["--", "sh", "-c", &script])));
    let said = text(&out.stderr);
    assert_eq!(out.status.code(), Some(1), "{said}");
    assert!(said.contains("[localhost]: error: rank 1 ") && said.contains("exited with code 3"), "{said}");
    are_gone(&pids(folder.path(), 1));

    let folder = tempfile::tempdir().unwrap();
    let mut command = run(folder.path(), &sshd.ssh(), TWO);
    let running = start(command.args(["--", "sh", "-c", WAITS]));
    let workers = pids(folder.path(), 2);
    let sessions = children(running.id(), "ssh");
    assert_eq!(sessions.len(), 2);
    kill(Pid::from_raw(sessions[1]), Signal::SIGKILL).unwrap();
    let out = end(running);
    let said = text(&out.stderr);
    assert_eq!(out.status.code(), Some(1), "{said}");
    assert!(said.contains("error: localhost: the ssh session has broken"), "{said}");
    are_gone(&workers);
}

#[test]
fn signals_reach_all_hosts_and_nothing_outlives_this_command() {
    let Some(sshd) = Sshd::start() else { return };
    for (signal, code) in [(Signal::SIGTERM, Some(143)), (Signal::SIGINT, Some(130)), (Signal::SIGKILL, None)]
    {
        let folder = tempfile::tempdir().unwrap();
        let mut command = run(folder.path(), &sshd.ssh(), TWO);
        let running = start(command.args(["--", "sh", "-c", WAITS]));
        let workers = pids(folder.path(), 2);
        kill(Pid::from_raw(running.id() as i32), signal).unwrap();
        let out = end(running);
        assert_eq!(out.status.code(), code, "{signal}: {}", text(&out.stderr));
        are_gone(&workers);
    }
}

#[test]
fn what_cannot_work_is_refused_before_anything_starts() {
    let Some(sshd) = Sshd::start() else { return };
    let folder = tempfile::tempdir().unwrap();
    let refused = |flags: &[&str], program: &[&str], want: &[&str]| {
        let mut command = run(folder.path(), &sshd.ssh(), TWO);
        let out = end(start(command.args(flags).arg("--").args(program)));
        let said = text(&out.stderr);
        assert_eq!(out.status.code(), Some(1), "{flags:?}: {said}");
        assert!(want.iter().all(|word| said.contains(word)), "{flags:?}: {said}");
        assert!(said.contains("hint: ") && !folder.path().join("out").exists(), "{flags:?}: {said}");
    };
    refused(
        &[],
        &["./no-such-program"],
        &["error: 127.0.0.1: ./no-such-program isn't there", "error: localhost: ./no-such-program"],
    );
    refused(
        &["--chdir", "/no/such/folder"],
        &["true"],
        &["localhost: the folder /no/such/folder can't be used"],
    );
    refused(
        &["--remote-phalanx", "/no/such/phalanx"],
        &["true"],
        &["there is no phalanx at /no/such/phalanx", "scp"],
    );
    refused(
        &[],
        &["phalanx", "train", "mnist-mini", "--data", "/no/such/data"],
        &["localhost: the data isn't there: /no/such/data"],
    );
    let mut command = run(folder.path(), "ssh -F none -p 1", TWO);
    let out = end(start(command.args(["--", "true"])));
    let said = text(&out.stderr);
    assert_eq!(out.status.code(), Some(1), "{said}");
    assert!(said.contains("ssh has failed") && said.contains("Connection refused"), "{said}");
}

#[test]
fn hosts_that_answer_otherwise_or_not_at_all_are_told_by_name() {
    let folder = tempfile::tempdir().unwrap();
    let check = |script: &str, flags: &[&str], code: i32, want: &[&str]| {
        let ssh = stand_in(folder.path(), script);
        let mut command = run(folder.path(), &ssh, "a:1,b:1");
        let out = end(start(command.args(flags).args(["--", "echo", "done"])));
        let said = text(&out.stdout) + &text(&out.stderr);
        assert_eq!(out.status.code(), Some(code), "{script}: {said}");
        assert!(want.iter().all(|word| said.contains(word)), "{script}: {said}");
    };
    let here = "exec sh -c \"$last\"";
    let meet = ["--rdzv-endpoint", "127.0.0.1:0"];
    // The shell's own files may print anything.
    let free = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let at = ["--rdzv-endpoint", &free.to_string()];
    check(&format!("echo welcome; printf title; {here}"), &at, 0, &["[a rank0]: done", "[b rank1]: done"]);
    let silent = format!("[ $host = b ] && exec sleep 600\n{here}");
    check(&silent, &["--hosts-patience", "5"], 1, &["error: b: no answer within 5 s", "ssh b true"]);
    check(&format!("[ $host = b ] && exit 255\n{here}"), &meet, 1, &["error: b: ssh has failed"]);
    check(&format!("[ $host = b ] && exit 9\n{here}"), &meet, 1, &["b: ", "ended with code 9"]);
    let other = "[ $host = b ] && { read line; echo 'phalanx-host {\"facts\":{\"version\":\"9.9.9\"}}'; read line; \
                 echo 'phalanx-host {\"clock\":0.0}'; exec sleep 600; }";
    check(&format!("{other}\n{here}"), &meet, 1, &["is of version 9.9.9, and this one of", "scp "]);
    // One whose clock is off: its answers pass through a filter.
    let ahead = "[ $host = b ] && { sh -c \"$last\" | sed -u 's/\\(.clock.:\\)[0-9.]*/\\19e12/'; exit; }";
    check(&format!("{ahead}\n{here}"), &meet, 1, &["error: b: its clock is +", "set-ntp"]);
    let free = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let unchecked = ["--unchecked", "--rdzv-endpoint", &free.to_string()];
    let want = ["started in spite of this: b: its clock is +", "[a rank0]: done", "[b rank1]: done"];
    check(&format!("{ahead}\n{here}"), &unchecked, 0, &want);
    // A program that differs, and a folder that isn't the first one's.
    let elsewhere = folder.path().join("elsewhere");
    fs::create_dir(&elsewhere).unwrap();
    for (place, words) in [(folder.path(), "echo one"), (&elsewhere, "echo other")] {
        fs::write(place.join("prog"), format!("#!/bin/sh\n{words}\n")).unwrap();
        fs::set_permissions(place.join("prog"), fs::Permissions::from_mode(0o755)).unwrap();
    }
    let cwd = folder.path().display();
    let there = elsewhere.display();
    let swapped = format!(
        "[ $host = b ] && {{ sed -u 's#\"folder\":\"{cwd}\"#\"folder\":\"{there}\"#' | sh -c \"$last\"; exit; }}"
    );
    let ssh = stand_in(folder.path(), &format!("{swapped}\n{here}"));
    let free = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let mut command = run(folder.path(), &ssh, "a:1,b:1");
    let out = end(start(command.args(["--rdzv-endpoint", &free.to_string(), "--", "./prog"])));
    let said = text(&out.stdout) + &text(&out.stderr);
    assert_eq!(out.status.code(), Some(0), "{said}");
    for words in [
        "b: ./prog has other bytes than on a (21 and 19 of them)",
        "of b isn't that of a",
        "[a rank0]: one",
        "[b rank1]: other",
    ] {
        assert!(said.contains(words), "{words}: {said}");
    }
}

#[test]
fn a_host_that_hears_nothing_any_more_ends_its_workers() {
    let folder = tempfile::tempdir().unwrap();
    let ssh = stand_in(folder.path(), "exec sh -c \"$last\"");
    let mut command = run(folder.path(), &ssh, "a:2");
    let running = start(command.args(["--hosts-patience", "20", "--", "sh", "-c", WAITS]));
    let workers = pids(folder.path(), 2);
    let pid = Pid::from_raw(running.id() as i32);
    // Its sessions are there, and say nothing.
    kill(pid, Signal::SIGSTOP).unwrap();
    are_gone(&workers);
    kill(pid, Signal::SIGCONT).unwrap();
    let out = end(running);
    let said = text(&out.stderr);
    assert!(said.contains("[a]: whoever started this run hasn't been heard of for 20 s"), "{said}");
    assert_eq!(out.status.code(), Some(1), "{said}");
}

/// A run of these hosts ends well though the second is lost, once two workers are there; gives its folder.
fn ends_well_without_the_second(hosts: &str, flags: &[&str], script: &str) -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    let ssh = stand_in(folder.path(), "exec sh -c \"$last\"");
    let free = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let mut command = run(folder.path(), &ssh, hosts);
    command.args(flags).args(["--rdzv-endpoint", &free.to_string()]);
    let running = start(command.args(["--", "sh", "-c", script]));
    let workers = pids(folder.path(), 2);
    let sessions = children(running.id(), "phalanx");
    assert_eq!(sessions.len(), hosts.split(',').count(), "the script is the agent by now");
    kill(Pid::from_raw(sessions[1]), Signal::SIGKILL).unwrap();
    let out = end(running);
    assert_eq!(out.status.code(), Some(0), "{}", text(&out.stderr));
    are_gone(&workers);
    folder
}

#[test]
fn a_run_that_may_lose_a_host_goes_on_without_it() {
    // Those that are started without the other are at their end.
    let script = format!("[ $WORLD_SIZE = 1 ] && exit 0\n{WAITS}");
    ends_well_without_the_second("a:1,b:1", &["--nnodes", "1:2"], &script);
}

#[test]
fn the_last_host_takes_the_place_of_one_that_is_lost() {
    // Those that are started after the first two are at their end.
    let script = format!("echo $RANK of $WORLD_SIZE >> ranks; [ $(wc -l < ranks) -gt 2 ] && exit 0\n{WAITS}");
    // Should the last one come after the loss, that costs a restart.
    let flags = ["--spares", "1", "--max-restarts", "1"];
    let folder = ends_well_without_the_second("a:1,b:1,c:1", &flags, &script);
    let ranks = fs::read_to_string(folder.path().join("ranks")).unwrap();
    let mut ranks: Vec<&str> = ranks.lines().collect();
    ranks.sort_unstable();
    assert_eq!(ranks, ["0 of 2", "0 of 2", "1 of 2", "1 of 2"]);
}

#[test]
fn hosts_that_make_no_sense_are_wrong_usage() {
    let folder = tempfile::tempdir().unwrap();
    let check = |flags: &[&str], want: &str| {
        let out = phalanx(folder.path()).arg("run").args(flags).args(["--", "true"]).output().unwrap();
        let said = text(&out.stderr);
        assert_eq!(out.status.code(), Some(2), "{flags:?}: {said}");
        assert!(said.contains(want), "{flags:?}: {said}");
    };
    check(&["--hosts", "a:8,a:8"], "a is named twice");
    check(&["--hosts", "-oProxyCommand=touch x"], "");
    check(&["--hosts=-oProxyCommand=touch"], "is no name of a host");
    check(&["--hosts", "a,b", "--nnodes", "3"], "--hosts names 2 machines");
    check(&["--hosts", "a,b", "--spares", "2"], "--spares 2: --hosts names 2 machines, not 3");
    check(&["--hosts", "a,b,c", "--spares", "1", "--nnodes", "3"], "names 3 machines, of which 1 stand by");
    check(&["--hosts", "a,b", "--node-rank", "0"], "cannot be used with");
    check(&["--ssh", "ssh"], "--hosts");
    check(&["--hosts", "a", "--ssh", "'open"], "must be a command");
    check(&["--hosts", "a", "--hosts-patience", "0"], "--hosts-patience 0");
    check(&["--hosts", "a", "--forward-env", "NO_SUCH_NAME"], "NO_SUCH_NAME: isn't set here");
}
