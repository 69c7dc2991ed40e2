//! `phalanx run` as a user has it: the real binary, real processes, real signals.

mod flags;
mod full;
mod hang;
mod in_place;
mod network;
mod nodes;
mod restart;
mod schedules;
mod stdin;
mod stop;
mod torch;
mod training;
#[path = "../user/mod.rs"]
mod user;

use std::fs;
use std::path::Path;
use std::process::Output;
use user::{phalanx, text};

/// Runs a shell script as `workers` workers.
fn run(folder: &Path, workers: &str, flags: &[&str], script: &str) -> Output {
    let mut command = phalanx(folder);
    command
        .args(["run", "--nproc-per-node", workers, "--out", "out"])
        .args(flags)
        .args(["--", "sh", "-c", script]);
    command.output().unwrap()
}

/// What a log holds behind the time that each of its lines begins with.
fn without_times(log: &Path) -> String {
    let text = fs::read_to_string(log).unwrap();
    let bare = text.split_inclusive('\n').map(|line| {
        let (time, line) = line.split_once(' ').expect("a time");
        assert!(time.len() == 24 && time.starts_with("20") && time.ends_with('Z'), "{time}");
        line
    });
    bare.collect()
}

#[test]
fn workers_get_torchruns_environment_and_their_lines_a_prefix() {
    let folder = tempfile::tempdir().unwrap();
    let script = "echo $RANK/$WORLD_SIZE $LOCAL_RANK/$LOCAL_WORLD_SIZE $GROUP_RANK $ROLE_NAME $MASTER_ADDR; echo $MASTER_PORT >&2; \
                  test -n \"$TORCHELASTIC_RUN_ID\" && test -n \"$OMP_NUM_THREADS\" && test \"$(wc -c < /proc/self/fd/$PHALANX_SECRET_FD)\" = 32";
    let out = run(folder.path(), "3", &[], script);
    assert_eq!(out.status.code(), Some(0), "{}", text(&out.stderr));
    let mut lines: Vec<String> = text(&out.stdout).lines().map(str::to_owned).collect();
    lines.sort();
    let want: Vec<String> = (0..3).map(|r| format!("[rank{r}]: {r}/3 {r}/3 0 default 127.0.0.1")).collect();
    assert_eq!(lines, want);
    for rank in 0..3 {
        let log = |end: &str| without_times(&folder.path().join(format!("out/logs/0/{rank}.{end}")));
        assert_eq!(log("out"), format!("{rank}/3 {rank}/3 0 default 127.0.0.1\n"));
        assert!(log("err").trim().parse::<u16>().is_ok());
    }
    let plain = run(folder.path(), "1", &["--no-prefix"], "echo as it is");
    assert_eq!(text(&plain.stdout), "as it is\n");
}

#[test]
fn the_secret_is_in_no_environment_and_no_argument() {
    let folder = tempfile::tempdir().unwrap();
    let script =
        "secret=$(od -An -vtx1 /proc/self/fd/$PHALANX_SECRET_FD | tr -d ' \\n'); env | grep -c $secret";
    assert_eq!(text(&run(folder.path(), "1", &["--no-prefix"], script).stdout), "0\n");
}

#[test]
fn what_cannot_be_is_refused_with_words() {
    let folder = tempfile::tempdir().unwrap();
    let check = |args: &[&str], code: i32, words: &[&str]| {
        let out = phalanx(folder.path()).arg("run").args(args).output().unwrap();
        let message = text(&out.stderr);
        assert_eq!(out.status.code(), Some(code), "{args:?}: {message}");
        assert!(words.iter().all(|word| message.contains(word)), "{args:?}: {message}");
    };
    check(&["--nproc-per-node", "0", "true"], 2, &["at least one worker"]);
    check(&["--nproc_per_node", "many", "true"], 2, &["many", "auto"]);
    check(&["--nnodes", "2", "true"], 2, &["--nnodes 2", "--rdzv-endpoint HOST:PORT"]);
    check(&["--nnodes", "1:4", "--standalone", "true"], 2, &["--standalone", "1:4"]);
    check(&["--nnodes", "4:1", "true"], 2, &["--nnodes 4:1", "must not be above"]);
    check(&["--node-rank", "1", "true"], 2, &["--node-rank 1", "--nnodes 1"]);
    let meet = ["--rdzv-endpoint", "h", "true"];
    let several = |flags: &[&str], words: &[&str]| check(&[flags, &meet].concat(), 2, words);
    several(&["--nnodes", "1:2", "--node-rank", "1"], &["--node-rank 1", "counted as they come"]);
    several(&["--nnodes", "2", "--rdzv-conf", "rank=2"], &["rank=2: must be below", "--nnodes 2"]);
    several(&["--nnodes", "2", "--rdzv-backend", "etcd"], &["--rdzv-backend etcd", "--nnodes 2"]);
    several(&["--nnodes", "2", "--rdzv-conf", "join_timeout=long"], &["join_timeout=long", "seconds"]);
    check(&["--rdzv-backend", "zookeeper", "true"], 2, &["zookeeper", "static, c10d, etcd"]);
    check(&["--rdzv_endpoint", "h:port", "true"], 2, &["--rdzv-endpoint h:port", "localhost:29400"]);
    check(&["--rdzv-conf", "timeout", "true"], 2, &["--rdzv-conf timeout", "timeout=900"]);
    check(&["--redirects", "7", "true"], 2, &["--redirects 7", "0:1,1:3"]);
    check(&["-t", "1:3", "true"], 2, &["--tee 1:3", "no worker 1"]);
    check(&["--local_ranks_filter", "1", "true"], 2, &["--local-ranks-filter 1"]);
    check(&["--signals-to-handle", "SIGKILL", "true"], 2, &["SIGKILL", "SIGTERM, SIGINT"]);
    check(&["--log-line-prefix-template", "${rnak}", "true"], 2, &["${rnak}", "${rank}"]);
    check(&["--numa-binding", "socks", "true"], 2, &["socks", "core-complex"]);
    check(&["--use-env", "--pass-local-rank", "true"], 2, &["cannot be used with"]);
    check(&["--logs-specs", "mine", "true"], 2, &["--logs-specs mine", "--log-dir"]);
    check(&["--duplicate-stdout-filters", "loss", "true"], 2, &["--duplicate-stdout-filters loss", "grep"]);
    check(&["--max-restarts=-1", "true"], 2, &["--max-restarts"]);
    check(&["--unheard-of", "true"], 2, &["--unheard-of"]);
    check(&[], 2, &["PROGRAM"]);
    check(&["--", "--"], 2, &["PROGRAM"]);
    check(&["--shutdown-timeout", "1e19", "true"], 2, &["--shutdown-timeout", "86400"]);
    check(&["--shutdown-timeout", "nan", "true"], 2, &["--shutdown-timeout NaN"]);
    check(&["--hang-timeout", "steps=9", "true"], 2, &["--hang-timeout steps=9", "start, step, evaluation"]);
    check(&["./nothing-here"], 1, &["./nothing-here", "can't be started", "hint:"]);
    let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let port = taken.local_addr().unwrap().port().to_string();
    check(&["--master-port", &port, "true"], 1, &[&format!("port {port} of 127.0.0.1 is in use"), "hint:"]);
}

#[test]
fn a_run_directory_is_told_by_its_whole_path() {
    let folder = tempfile::tempdir().unwrap();
    let script = "cd /; test -d \"$PHALANX_RUN_DIR\" && echo > \"$TORCHELASTIC_ERROR_FILE\"";
    let out = run(folder.path(), "1", &[], script);
    assert_eq!(out.status.code(), Some(0), "{}", text(&out.stderr));
    assert!(folder.path().join("out/logs/0/0.error.json").exists());
}
