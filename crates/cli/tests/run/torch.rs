//! PyTorch programs under `phalanx run`, unchanged. They need a Python with torch, which `PHALANX_TEST_PYTHON` names;
//! `PHALANX_TEST_TORCH=1 .ci/run` installs one.

use super::nodes::{Agent, Site};
use super::user::{phalanx, text};
use std::io::Write;
use std::path::Path;
use std::process::{Command, Output};
use std::{env, fs};

/// A Python with torch; none if there is none, which it says.
fn python() -> Option<String> {
    let python = env::var("PHALANX_TEST_PYTHON").unwrap_or("python3".into());
    let has = Command::new(&python).args(["-c", "import torch"]).output();
    if has.is_ok_and(|out| out.status.success()) {
        return Some(python);
    }
    let name = std::thread::current().name().unwrap_or("a test").to_owned();
    // Past the harness, which keeps what tests print.
    let text =
        format!("{name}: SKIPPED, since {python} has no torch: name one that has in PHALANX_TEST_PYTHON\n");
    std::io::stderr().write_all(text.as_bytes()).unwrap();
    None
}

/// Runs a program as two nodes of two workers; gives what each node's agent has: its exit code, its workers' lines, its own.
fn two_by_two(flags: &[&str], program: &str) -> Option<[(i32, String, String); 2]> {
    let python = python()?;
    let site =
        Site::new(&[&["--nnodes", "2", "--nproc-per-node", "2", "--rdzv-backend", "c10d"], flags].concat());
    let start = |name: &str| {
        fs::write(site.folder(name).join("program.py"), program).unwrap();
        let mut command = site.command(name, &[]);
        command.env("PYTHON_EXEC", &python).arg("program.py");
        Agent::of(command)
    };
    let first = start("a");
    first.waits_for_others();
    let second = start("b");
    Some([first.end(), second.end()])
}

/// Runs a program as two workers; none if there is no torch.
fn two(folder: &Path, flags: &[&str], program: &str) -> Option<Output> {
    let python = python()?;
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

#[test]
fn ddp_runs_over_two_nodes() {
    let program = r#"
import os, torch, torch.nn as nn, torch.distributed as d
from torch.nn.parallel import DistributedDataParallel
d.init_process_group("gloo")
torch.manual_seed(0)
model = DistributedDataParallel(nn.Linear(8, 8))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
torch.manual_seed(d.get_rank())
for step in range(4):
    optimizer.zero_grad()
    model(torch.rand(4, 8)).sum().backward()
    optimizer.step()
weights = [torch.zeros(8, 8) for _ in range(4)]
d.all_gather(weights, model.module.weight.detach())
assert all(torch.equal(weights[0], other) for other in weights)
print(d.get_rank(), "of", d.get_world_size(), "on node", os.environ["GROUP_RANK"])
d.destroy_process_group()
"#;
    let Some(ends) = two_by_two(&[], program) else { return };
    for (node, (code, out, said)) in ends.into_iter().enumerate() {
        assert_eq!(code, 0, "{said}");
        let mut lines: Vec<&str> = out.lines().collect();
        lines.sort();
        let want = [0, 1].map(|local| format!("{} of 4 on node {node}", 2 * node + local));
        assert_eq!(lines, want, "{said}");
    }
}

#[test]
fn a_rank_that_raises_on_one_node_is_blamed_on_both() {
    let program = r#"
import torch, torch.distributed as d
d.init_process_group("gloo")
d.barrier()
if d.get_rank() == 3:
    raise ValueError("the data is gone")
d.all_reduce(torch.ones(1))
"#;
    let Some(ends) = two_by_two(&[], program) else { return };
    for (code, _, said) in ends {
        assert_eq!(code, 1, "{said}");
        let report =
            said.find("error: rank 3 (pid").map(|at| &said[at..]).unwrap_or_else(|| panic!("{said}"));
        assert!(
            report.contains(" on node 1 (") && report.contains("ValueError: the data is gone"),
            "{report}"
        );
    }
}

#[test]
fn ranks_of_two_nodes_meet_again_after_one_was_killed() {
    let program = r#"
import os, signal, torch, torch.distributed as d
d.init_process_group("gloo")
again = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
for step in range(6):
    x = torch.ones(1)
    d.all_reduce(x)
    if step == 3 and d.get_rank() == 1 and again == 0:
        os.kill(os.getpid(), signal.SIGKILL)
d.barrier()
print("through after", again)
d.destroy_process_group()
"#;
    let Some(ends) = two_by_two(&["--max-restarts", "2"], program) else { return };
    for (code, out, said) in ends {
        assert_eq!(code, 0, "{said}");
        assert_eq!(out, "through after 1\nthrough after 1\n", "{said}");
        assert!(said.contains("  0: rank 1 (pid") && said.contains("was killed by SIGKILL"), "{said}");
    }
}
