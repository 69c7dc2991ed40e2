//! Where a worker hangs, written down before it is killed: what the system knows of its threads, and the stack of the one that
//! trains and of others, if it is a program of ours and they still answer.

use nix::libc;
use nix::unistd::{Pid, getpgid};
use phalanx_job::{Monitor, STACK_SIGNAL};
use std::fs::{self, OpenOptions};
use std::io::{Result, Write};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// How long the worker has to write down its stacks.
const PATIENCE: Duration = Duration::from_secs(1);
/// How much of that a thread has which doesn't train.
const BESIDE: Duration = Duration::from_millis(300);
/// How many threads are told of.
const THREADS: usize = 256;

/// Adds to the file. `group` is the worker's, which it leads.
pub(crate) fn write(path: &Path, title: &str, monitor: &Monitor, group: Pid) -> Result<()> {
    // The thread may be one of a process that the worker has started.
    let thread = monitor.thread().filter(|(pid, _)| getpgid(Some(Pid::from_raw(*pid))) == Ok(group));
    let (pid, own) = thread.unwrap_or((group.as_raw(), group.as_raw()));
    let task = PathBuf::from(format!("/proc/{pid}/task"));
    let tids = threads(&task);
    // First, since one that answers does something else then.
    let known: String = tids.iter().map(|tid| known(&task, *tid)).collect();
    let stacks = thread.map_or(String::new(), |_| stacks(monitor, pid, own, &tids));
    if let Some(folder) = path.parent() {
        fs::create_dir_all(folder)?;
    }
    // The one before in its place may have hung as well.
    let mut file = OpenOptions::new().append(true).create(true).open(path)?;
    write!(
        file,
        "{title}\n\n\
         the stacks of threads that wrote them down, from the signal on that asked for it; {own} trains:\n{stacks}\n\
         the threads of process {pid}, as /proc has them:\n{known}\n"
    )
}

/// The stacks of those threads that answer, that of the one which trains first.
fn stacks(monitor: &Monitor, pid: i32, own: i32, tids: &[i32]) -> String {
    let until = Instant::now() + PATIENCE;
    let mut stacks = String::new();
    for tid in [own].iter().chain(tids.iter().filter(|tid| **tid != own)) {
        let left = until.saturating_duration_since(Instant::now());
        let patience = if *tid == own { left } else { left.min(BESIDE) };
        if !patience.is_zero() {
            stacks += &monitor.stack(|| ask(pid, *tid), patience).unwrap_or_default();
        }
    }
    stacks
}

/// Has a thread write down its stack.
fn ask(pid: i32, tid: i32) {
    // SAFETY: a system call that takes three numbers and touches no memory of this process. Where there is no such thread any more,
    // it does nothing.
    unsafe { libc::syscall(libc::SYS_tgkill, pid, tid, STACK_SIGNAL) };
}

/// The threads of a process.
fn threads(task: &Path) -> Vec<i32> {
    let names = fs::read_dir(task).into_iter().flatten().flatten().map(|entry| entry.file_name());
    let mut tids: Vec<i32> = names.filter_map(|name| name.to_str()?.parse().ok()).collect();
    tids.sort_unstable();
    tids.truncate(THREADS);
    tids
}

/// What the system knows of a thread, as far as it tells this user: its name, whether it runs, in which system call it is, and where
/// in the kernel.
fn known(task: &Path, tid: i32) -> String {
    let read = |file: &str| {
        fs::read_to_string(task.join(tid.to_string()).join(file)).unwrap_or_default().trim().to_owned()
    };
    let status = read("status");
    let of = |key: &str| status.lines().find_map(|line| line.strip_prefix(key)).unwrap_or_default().trim();
    let (name, state, switches) = (of("Name:"), of("State:"), of("voluntary_ctxt_switches:"));
    let (wchan, syscall, kernel) = (read("wchan"), read("syscall"), read("stack"));
    format!(
        "\nthread {tid} {name:?}: {state}, has slept {switches} times\n  in the kernel: {wchan}\n  system call: {syscall}\n{kernel}"
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_known_of_threads_is_told_also_where_none_answers() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("hang/0/rank-1.txt");
        let monitor = Monitor::make().unwrap();
        let name = "stays-awhile";
        let (started, has_started) = std::sync::mpsc::channel();
        let (stay, told) = std::sync::mpsc::channel::<()>();
        let wait = move || {
            // It has its name by now.
            started.send(()).unwrap();
            told.recv()
        };
        let thread = std::thread::Builder::new().name(name.into()).spawn(wait).unwrap();
        has_started.recv().unwrap();
        write(&path, "rank 1 hung", &monitor, nix::unistd::getpid()).unwrap();
        drop(stay);
        assert!(thread.join().unwrap().is_err());
        let text = fs::read_to_string(path).unwrap();
        let own = std::process::id();
        for part in ["rank 1 hung\n", &format!("; {own} trains:\n\n"), &format!("\"{name}\": ")] {
            assert!(text.contains(part), "{part} in: {text}");
        }
    }
}
