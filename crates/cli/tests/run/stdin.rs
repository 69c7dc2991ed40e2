//! What a worker reads: nothing, or with `--stdin` what `phalanx run` is given, by a pipe or on a terminal.

use super::run;
use super::user::{phalanx, text};
use std::fs;
use std::io::Write;
use std::path::Path;
use std::process::{Command, Output, Stdio};

/// Gives a command these lines.
fn given(lines: &str, command: &mut Command) -> Output {
    let command = command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().unwrap();
    child.stdin.take().unwrap().write_all(lines.as_bytes()).unwrap();
    child.wait_with_output().unwrap()
}

/// Gives a shell script on a terminal of its own these lines; the script calls `phalanx` by the variable P.
fn on_a_terminal(lines: &str, folder: &Path, script: &str) -> Output {
    fs::write(folder.join("typed.sh"), script).unwrap();
    let mut command = Command::new("timeout");
    command.args(["60", "script", "-qec", "sh typed.sh", "/dev/null"]).current_dir(folder);
    given(lines, command.env("P", phalanx(folder).get_program()))
}

#[test]
fn one_worker_reads_what_comes_by_a_pipe() {
    let folder = tempfile::tempdir().unwrap();
    let mut command = phalanx(folder.path());
    command.args(["run", "--nproc-per-node", "3", "--stdin", "1", "--", "sh", "-c", "echo $(cat)!"]);
    let out = given("a\nb\n", &mut command);
    assert_eq!(out.status.code(), Some(0), "{}", text(&out.stderr));
    let mut lines: Vec<_> = text(&out.stdout).lines().map(str::to_owned).collect();
    lines.sort();
    assert_eq!(lines, ["[rank0]: !", "[rank1]: a b!", "[rank2]: !"]);
    // A debugger of Python's is for the one that reads.
    let asked = run(folder.path(), "2", &["--stdin", "1"], "echo $PYTHONBREAKPOINT.");
    let mut lines: Vec<_> = text(&asked.stdout).lines().map(str::to_owned).collect();
    lines.sort();
    assert_eq!(lines, ["[rank0]: 0.", "[rank1]: ."]);
    let none = run(folder.path(), "2", &["--stdin", "2"], "true");
    assert_eq!(none.status.code(), Some(2));
    assert!(text(&none.stderr).contains("--stdin 2: there are 2 workers"), "{}", text(&none.stderr));
}

#[test]
fn one_worker_has_the_terminal_and_gives_it_back() {
    let folder = tempfile::tempdir().unwrap();
    // Fails once, so that another takes its place, which has the terminal too; a prompt is seen before its line ends.
    let worker = "test $RANK = 1 || exit 0; printf \"name? \"; read -r name; echo \"hello $name\"; \
                  test $TORCHELASTIC_RESTART_COUNT = 1";
    let script = format!(
        "\"$P\" run --nproc-per-node 2 --max-restarts 1 --stdin 1 --no-python -- sh -c '{worker}'\n\
         echo code $?; printf 'again? '; read -r again; echo \"got $again\""
    );
    let out = on_a_terminal("Ann\nBea\nCid\n", folder.path(), &script);
    let shown = text(&out.stdout);
    assert_eq!(out.status.code(), Some(0), "{shown}");
    let at = |words: &str| shown.find(words).unwrap_or_else(|| panic!("{words} in {shown}"));
    let order = ["name? ", "hello Ann", "hello Bea", "code 0", "again? ", "got Cid"].map(at);
    assert!(order.is_sorted(), "{shown}");
    assert!(!shown.contains("[rank1]"), "{shown}");
}

#[test]
fn ctrl_c_is_the_workers_that_has_the_terminal() {
    let folder = tempfile::tempdir().unwrap();
    // Ctrl-Z, which it is not stopped by, and Ctrl-C, once the terminal is its own.
    let worker = "trap \"echo heard; exit 0\" INT; : > ready; read -r line; echo \"read $line\"";
    let script =
        format!("\"$P\" run --nproc-per-node 1 --stdin 0 --no-python -- sh -c '{worker}'; echo code $?");
    let keys = "until test -e ready; do sleep 0.01; done; printf '\\032'; sleep 0.2; printf '\\003'";
    fs::write(folder.path().join("keys.sh"), keys).unwrap();
    fs::write(folder.path().join("typed.sh"), script).unwrap();
    let mut command = Command::new("sh");
    command.args(["-c", "sh keys.sh | timeout 60 script -qec 'sh typed.sh' /dev/null"]);
    command.current_dir(folder.path()).env("P", phalanx(folder.path()).get_program());
    let out = command.output().unwrap();
    let shown = text(&out.stdout);
    assert!(shown.contains("heard") && shown.contains("code 0"), "{shown}");
}
