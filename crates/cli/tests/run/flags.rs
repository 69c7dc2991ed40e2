//! torchrun's flags, as a program under them finds itself, and as its user sees it.

use super::stop::Two;
use super::user::{phalanx, text};
use super::{run, without_times};
use std::fs;
use std::io::Read;
use std::process::{Command, Stdio};

/// The lines of standard output, sorted: those of different workers come in any order.
fn lines(stdout: &[u8]) -> Vec<String> {
    let mut lines: Vec<String> = text(stdout).lines().map(str::to_owned).collect();
    lines.sort();
    lines
}

#[test]
fn what_is_redirected_is_in_the_logs_alone() {
    let script = "echo out $RANK; echo err $RANK >&2";
    let check = |flags: &[&str], out: &[&str], err: &[&str]| {
        let folder = tempfile::tempdir().unwrap();
        let ran = run(folder.path(), "2", flags, script);
        assert_eq!(ran.status.code(), Some(0), "{flags:?}");
        assert_eq!((lines(&ran.stdout), lines(&ran.stderr)), (owned(out), owned(err)), "{flags:?}");
        for rank in 0..2 {
            for stream in ["out", "err"] {
                let log = folder.path().join(format!("out/logs/0/{rank}.{stream}"));
                assert_eq!(without_times(&log), format!("{stream} {rank}\n"), "{flags:?}");
            }
        }
    };
    let (out, err) = (["[rank0]: out 0", "[rank1]: out 1"], ["[rank0]: err 0", "[rank1]: err 1"]);
    check(&["--redirects", "3"], &[], &[]);
    check(&["-r", "1"], &[], &err);
    check(&["-r", "0:3"], &out[1..], &err[1..]);
    check(&["-r", "3", "-t", "1:1"], &out[1..], &[]);
    check(&["--tee", "3"], &out, &err);
    check(&["--local_ranks_filter", "1"], &out[1..], &err[1..]);
}

fn owned(lines: &[&str]) -> Vec<String> {
    lines.iter().map(|&line| line.to_owned()).collect()
}

#[test]
fn the_prefix_is_a_template_from_a_flag_or_from_torchruns_variable() {
    let folder = tempfile::tempdir().unwrap();
    let check = |flags: &[&str], want: &[&str]| {
        let mut command = phalanx(folder.path());
        command.env("TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE", "<$local_rank>").args(["run", "--out", "out"]);
        let out =
            command.args(flags).args(["--nproc-per-node=2", "--role", "trainer", "echo", "hi"]).output();
        assert_eq!(lines(&out.unwrap().stdout), owned(want), "{flags:?}");
    };
    check(&[], &["<0>hi", "<1>hi"]);
    check(
        &["--log_line_prefix_template", "[${role_name}${local_rank}]:"],
        &["[trainer0]:hi", "[trainer1]:hi"],
    );
    check(&["--no-prefix"], &["hi", "hi"]);
}

#[test]
fn a_flag_that_is_not_typed_is_looked_for_in_the_environment() {
    let folder = tempfile::tempdir().unwrap();
    let check = |variables: &[(&str, &str)], flags: &[&str], want: &[&str]| {
        let mut command = phalanx(folder.path());
        command.envs(variables.iter().copied()).args(["run", "--out", "out"]).args(flags);
        let script = "echo $RANK of $WORLD_SIZE, $ROLE_NAME, $TORCHELASTIC_MAX_RESTARTS";
        let out = command.args(["--", "sh", "-c", script]).output().unwrap();
        assert_eq!(out.status.code(), Some(0), "{variables:?}: {}", text(&out.stderr));
        assert_eq!(lines(&out.stdout), owned(want), "{variables:?}");
    };
    let all = [
        ("PET_NPROC_PER_NODE", "2"),
        ("PET_NNODES", "1:1"),
        ("PET_ROLE", "trainer"),
        ("PET_MAX_RESTARTS", "4"),
        ("PET_STANDALONE", "1"),
        ("PET_MODULE", "0"),
        ("PET_MASTER_ADDR", ""),
        ("PET_RDZV_BACKEND", "c10d"),
        ("PET_REDIRECTS", "0:1"),
        ("PET_MONITOR_INTERVAL", "5"),
    ];
    check(&all, &[], &["[rank1]: 1 of 2, trainer, 4"]);
    check(&all, &["--nproc_per_node", "1", "--redirects=0"], &["[rank0]: 0 of 1, trainer, 4"]);
    let refused = phalanx(folder.path()).args(["run", "true"]).env("PET_NNODES", "3").output().unwrap();
    assert_eq!(refused.status.code(), Some(2));
    assert!(text(&refused.stderr).contains("--nnodes 3"), "{}", text(&refused.stderr));
}

#[test]
fn how_one_machine_would_meet_others_changes_nothing_but_the_meeting_point_of_static() {
    let folder = tempfile::tempdir().unwrap();
    let check = |flags: &[&str], want: &str| {
        let out =
            run(folder.path(), "1", &[flags, &["--no-prefix"]].concat(), "echo $MASTER_ADDR $MASTER_PORT");
        assert_eq!(out.status.code(), Some(0), "{flags:?}: {}", text(&out.stderr));
        assert!(text(&out.stdout).starts_with(want), "{flags:?}: {}", text(&out.stdout));
    };
    let free = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let at = format!("localhost:{free}");
    check(&["--rdzv-backend=c10d", "--rdzv-endpoint=nowhere.invalid:29400", "--rdzv-id=7"], "127.0.0.1 ");
    check(
        &["--rdzv_backend", "etcd-v2", "--rdzv_endpoint", "localhost:2379", "--rdzv_conf", "timeout=9"],
        "127.0.0.1 ",
    );
    check(&["--standalone", "--rdzv-endpoint", &at], "127.0.0.1 ");
    check(&["--rdzv-endpoint", &at], &format!("localhost {free}\n"));
    check(
        &["--nnodes", "1:1", "--start-method=spawn", "--local-addr", "here", "--event-log-handler=null"],
        "127.0.0.1 ",
    );
}

#[test]
fn programs_of_torch_distributed_launch_get_their_local_rank_as_an_argument() {
    let folder = tempfile::tempdir().unwrap();
    let check = |flags: &[&str], want: &[&str]| {
        let mut command = phalanx(folder.path());
        command.args(["run", "--out", "out", "--no-prefix", "--nproc-per-node=2"]).args(flags);
        // Stands for a Python that shows its arguments.
        let out = command.env("PYTHON_EXEC", "echo").output().unwrap();
        assert_eq!(lines(&out.stdout), owned(want), "{flags:?}: {}", text(&out.stderr));
    };
    let both = ["-u t.py --local-rank=0 --lr 1", "-u t.py --local-rank=1 --lr 1"];
    check(&["--pass-local-rank", "t.py", "--lr", "1"], &both);
    check(&["--use-env", "t.py", "--lr", "1"], &["-u t.py --lr 1"; 2]);
    check(&["--use_env", "-m", "t", "x"], &["-u -m t x"; 2]);
    check(&["--run-path", "script", "x"], &["-u script x"; 2]);
    check(&["--pass-local-rank", "--no-python", "echo", "x"], &["--local-rank=0 x", "--local-rank=1 x"]);
}

#[test]
fn under_virtual_local_ranks_each_worker_sees_one_device_as_number_0() {
    let folder = tempfile::tempdir().unwrap();
    let with_devices = |devices: &str| {
        let mut command = phalanx(folder.path());
        command.env("CUDA_VISIBLE_DEVICES", devices).env_remove("HIP_VISIBLE_DEVICES");
        command.args(["run", "--out", "out", "--nproc-per-node=2", "--virtual-local-rank", "--", "sh", "-c"]);
        command.arg("echo $LOCAL_RANK $CUDA_VISIBLE_DEVICES").output().unwrap()
    };
    assert_eq!(lines(&with_devices("5,3").stdout), ["[rank0]: 0 5", "[rank1]: 0 3"]);
    let few = with_devices("5");
    assert_eq!(few.status.code(), Some(2));
    assert!(
        text(&few.stderr).contains("CUDA_VISIBLE_DEVICES=5 has 1 devices for 2 workers"),
        "{}",
        text(&few.stderr)
    );
}

#[test]
fn times_stand_in_the_logs_unless_told_otherwise() {
    let folder = tempfile::tempdir().unwrap();
    let script = "printf 'one\\n10%%\\r20%%\\n\\000\\377 no end'";
    let written = b"one\n10%\r20%\n\0\xff no end";
    let log = || fs::read(folder.path().join("out/logs/0/0.out")).unwrap();
    let check = |flags: &[&str], times_in_log: usize, times_shown: usize| {
        // What an earlier run has written there would stay.
        let _ = fs::remove_dir_all(folder.path().join("out"));
        let out = run(folder.path(), "1", flags, script);
        assert_eq!(out.status.code(), Some(0), "{}", text(&out.stderr));
        assert_eq!(log().len(), written.len() + 25 * times_in_log, "{flags:?}");
        let shown = written.len() + 1 + 4 * "[rank0]: ".len() + 25 * times_shown;
        assert_eq!(out.stdout.len(), shown, "{flags:?}: {}", text(&out.stdout));
        (text(&log()), text(&out.stdout))
    };
    check(&["--log-timestamps", "none"], 0, 0);
    assert_eq!(log(), written);
    let (log, _) = check(&[], 4, 0);
    let year = &log[..2];
    assert!(year == "20" && log[25..].starts_with("one\n20"), "{log}");
    let (_, shown) = check(&["--log_timestamps=all"], 4, 4);
    assert!(shown.starts_with("[rank0]: 20") && shown[34..].starts_with("one\n[rank0]: 20"), "{shown}");
}

#[test]
fn a_line_that_is_not_ended_is_in_the_log_at_once() {
    let folder = tempfile::tempdir().unwrap();
    // It ends when what it has written is there.
    let script = "printf '10%%\\r'; until grep -q 10% out/logs/0/0.out; do sleep 0.01; done";
    assert_eq!(run(folder.path(), "1", &[], script).status.code(), Some(0));
}

/// As a prompt, or a progress bar, which writes over its line.
#[test]
fn a_line_that_is_not_ended_is_shown_at_once_and_a_long_one_is_whole() {
    let folder = tempfile::tempdir().unwrap();
    let mut command = phalanx(folder.path());
    let script = "printf 'ready? '; read -r go < go; printf '\\r10%%\\r20%%\\n'; head -c 300000 /dev/zero | tr '\\0' x; echo";
    assert!(Command::new("mkfifo").arg(folder.path().join("go")).status().unwrap().success());
    command.args(["run", "--out", "out", "--", "sh", "-c", script]).stdout(Stdio::piped());
    let mut run = command.spawn().unwrap();
    let mut shown = run.stdout.take().unwrap();
    let mut prompt = [0; 15];
    shown.read_exact(&mut prompt).unwrap();
    assert_eq!(&prompt, b"[rank0]: ready?");
    fs::write(folder.path().join("go"), "\n").unwrap();
    let mut rest = String::new();
    shown.read_to_string(&mut rest).unwrap();
    let long = "x".repeat(300_000);
    assert_eq!(rest, format!(" \r[rank0]: 10%\r[rank0]: 20%\n[rank0]: {long}\n"));
    assert_eq!(run.wait().unwrap().code(), Some(0));
}

#[test]
fn logs_may_lie_elsewhere_than_the_rest() {
    let folder = tempfile::tempdir().unwrap();
    let script = "echo $PHALANX_RUN_DIR; echo > $TORCHELASTIC_ERROR_FILE; exit 3";
    let out = run(folder.path(), "1", &["--log_dir", "logs-of-all"], script);
    assert!(text(&out.stderr).contains("  logs: logs-of-all/logs\n"), "{}", text(&out.stderr));
    let log = fs::read_to_string(folder.path().join("logs-of-all/logs/0/0.out")).unwrap();
    assert!(log.ends_with("/out\n"), "{log}");
    assert!(folder.path().join("logs-of-all/logs/0/0.error.json").exists());
    assert!(!folder.path().join("out/logs").exists());
    let alone = phalanx(folder.path()).args(["run", "--log-dir", "alone", "true"]).output().unwrap();
    assert_eq!(alone.status.code(), Some(0), "{}", text(&alone.stderr));
    assert!(folder.path().join("alone/logs/0/0.out").exists() && !folder.path().join("runs").exists());
}

#[test]
fn only_the_signals_that_were_named_end_the_run() {
    let script = "trap 'echo told; exit 0' USR1; sleep 60 & echo $$ $!; wait";
    let folder = tempfile::tempdir().unwrap();
    let mut two = Two::start(folder.path(), &["--signals-to-handle", "SIGUSR1"], script);
    two.signal("-USR1");
    let (code, message) = two.end();
    // It is SIGUSR1 that ended the run, however well the workers took it.
    assert_eq!(code, 138, "{message}");
    let mut two = Two::start(folder.path(), &["--signals_to_handle=SIGUSR1"], script);
    two.signal("-INT");
    // It isn't taken, so it does what it does to any process.
    assert_eq!(two.end().0, -1);
}

#[test]
fn a_numa_binding_on_a_machine_of_one_node_says_that_it_does_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let out = run(folder.path(), "1", &["--numa-binding", "node"], "nproc");
    assert_eq!(out.status.code(), Some(0), "{}", text(&out.stderr));
    let nodes = fs::read_to_string("/sys/devices/system/node/online").unwrap_or_default();
    if nodes.trim().contains(['-', ',']) {
        println!("skipped: this machine has the NUMA nodes {nodes}");
        return;
    }
    assert!(
        text(&out.stderr).contains("--numa-binding: this machine has one NUMA node"),
        "{}",
        text(&out.stderr)
    );
}
