//! PyTorch programs under `phalanx run`, unchanged. They need a Python with torch, which `PHALANX_TEST_PYTHON` names.

use super::user::{phalanx, text};
use std::path::Path;
use std::process::{Command, Output};
use std::{env, fs};

/// Runs a program as two workers; none if there is no torch, which it says.
fn two(folder: &Path, flags: &[&str], program: &str) -> Option<Output> {
    let python = env::var("PHALANX_TEST_PYTHON").unwrap_or("python3".into());
    let has = Command::new(&python).args(["-c", "import torch"]).output();
    if !has.is_ok_and(|out| out.status.success()) {
        println!("skipped: {python} has no torch; set PHALANX_TEST_PYTHON to a python that has");
        return None;
    }
    fs::write(folder.join("program.py"), program).unwrap();
    let mut command = phalanx(folder);
    command.env("PYTHON_EXEC", python).args(["run", "--out", "out", "--nproc-per-node", "2"]);
    Some(command.args(flags).arg("program.py").output().unwrap())
}

#[test]
fn ranks_meet_over_gloo() {
    let folder = tempfile::tempdir().unwrap();
    let program = "import torch, torch.distributed as d\nd.init_process_group('gloo')\nx = torch.full((1,), d.get_rank() + 1.0)\nd.all_reduce(x)\nprint(x.item())\nd.destroy_process_group()\n";
    let Some(out) = two(folder.path(), &["--standalone"], program) else { return };
    assert_eq!(out.status.code(), Some(0), "{}", text(&out.stderr));
    assert_eq!(text(&out.stdout).lines().filter(|line| line.ends_with(": 3.0")).count(), 2);
}

#[test]
fn a_rank_that_raises_is_blamed_though_the_other_only_sees_its_connection_end() {
    let folder = tempfile::tempdir().unwrap();
    let program = r#"
import torch, torch.distributed as d
from torch.distributed.elastic.multiprocessing.errors import record
@record
def main():
    d.init_process_group("gloo")
    d.barrier()
    if d.get_rank() == 1:
        raise ValueError("the data is gone")
    d.all_reduce(torch.ones(1))
main()
"#;
    let Some(out) = two(folder.path(), &[], program) else { return };
    let message = text(&out.stderr);
    assert_eq!(out.status.code(), Some(1), "{message}");
    let report =
        message.find("error: rank 1 (pid").map(|at| &message[at..]).unwrap_or_else(|| panic!("{message}"));
    assert!(report.contains("ValueError: the data is gone"), "{report}");
    let recorded = fs::read_to_string(folder.path().join("out/logs/0/1.error.json")).unwrap();
    assert!(recorded.contains("the data is gone"), "{recorded}");
}

#[test]
fn ddp_goes_on_after_a_rank_was_killed_in_the_middle() {
    let folder = tempfile::tempdir().unwrap();
    let program = r#"
import os, signal, torch, torch.nn as nn, torch.distributed as d
from torch.nn.parallel import DistributedDataParallel
d.init_process_group("gloo")
torch.manual_seed(0)
model = DistributedDataParallel(nn.Linear(8, 8))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
again = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
for step in range(6):
    optimizer.zero_grad()
    model(torch.rand(4, 8)).sum().backward()
    optimizer.step()
    if step == 3 and d.get_rank() == 1 and again == 0:
        os.kill(os.getpid(), signal.SIGKILL)
d.barrier()
print("through after", again, "of", os.environ["TORCHELASTIC_MAX_RESTARTS"])
d.destroy_process_group()
"#;
    let Some(out) = two(folder.path(), &["--standalone", "--max-restarts", "3"], program) else { return };
    let message = text(&out.stderr);
    assert_eq!(out.status.code(), Some(0), "{message}");
    assert_eq!(text(&out.stdout).lines().filter(|line| line.ends_with(": through after 1 of 3")).count(), 2);
    assert!(message.contains("  0: rank 1 (pid") && message.contains("was killed by SIGKILL"), "{message}");
}
