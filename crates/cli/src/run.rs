//! `phalanx run`: any program as several workers.

use crate::args::{RunArgs, WrongUsage};
use crate::failure;
use anyhow::Result;
use phalanx_launch::{Console, LaunchSpec, MAX_GRACE};
use std::ffi::{OsStr, OsString};
use std::path::{Path, PathBuf};
use std::time::Duration;

pub(crate) fn run(args: &RunArgs) -> Result<u8> {
    let refuse = |text: String| Err(anyhow::Error::new(WrongUsage(text)));
    if args.nnodes != "1" && args.nnodes != "1:1" {
        return refuse(format!(
            "--nnodes {}: runs over several machines are not supported yet; leave it out",
            args.nnodes
        ));
    }
    if args.node_rank != 0 {
        return refuse(format!("--node-rank {}: there is one machine, whose rank is 0", args.node_rank));
    }
    let workers = worker_count(&args.nproc_per_node)?;
    let run_id = match &args.rdzv_id {
        Some(id) => id.clone(),
        None => fresh_run_id()?,
    };
    let grace = Duration::try_from_secs_f64(args.shutdown_timeout).ok().filter(|grace| *grace <= MAX_GRACE);
    let Some(grace) = grace else {
        return refuse(format!(
            "--shutdown-timeout {}: must be from 0 to {} seconds",
            args.shutdown_timeout,
            MAX_GRACE.as_secs()
        ));
    };
    let typed = match args.program.as_slice() {
        [first, rest @ ..] if first == "--" => rest,
        all => all,
    };
    let Some(name) = typed.first() else {
        return refuse("PROGRAM is missing: give it after the flags, as in `phalanx run -- ./train`".into());
    };
    let (program, arguments) = command_line(args, name, &typed[1..]);
    let name = Path::new(name).file_stem().map_or("program".into(), |s| s.to_string_lossy().into_owned());
    let run_dir = args.out.clone().unwrap_or_else(|| PathBuf::from(format!("runs/{name}-{run_id}")));
    let spec = LaunchSpec {
        program,
        args: arguments,
        workers,
        run_id,
        run_dir: run_dir.clone(),
        role: args.role.clone(),
        master: (args.master_addr.clone(), args.master_port),
        variables: Vec::new(),
        console: if args.no_prefix { Console::Plain } else { Console::Prefixed },
        max_restarts: args.max_restarts,
        grace,
    };
    let most = args.max_restarts;
    let outcome = phalanx_launch::run(&spec, move |report| failure::tell(&report, most))?;
    Ok(failure::conclude(&outcome, &run_dir))
}

/// A name for a run that nobody named.
pub(crate) fn fresh_run_id() -> Result<String> {
    let mut random = [0; 5];
    getrandom::fill(&mut random)
        .map_err(|error| anyhow::anyhow!("the system gives no random numbers: {error}"))?;
    Ok(phalanx_job::run_id(random))
}

fn worker_count(text: &str) -> Result<usize, WrongUsage> {
    match text {
        "auto" | "cpu" => Ok(phalanx::cores()),
        "gpu" => Err(WrongUsage(
            "--nproc-per-node gpu: this version computes on the CPU only; use a number or `auto`".into(),
        )),
        number => match number.parse() {
            Ok(0) => Err(WrongUsage("--nproc-per-node 0: a run needs at least one worker".into())),
            Ok(n) => Ok(n),
            Err(_) => Err(WrongUsage(format!(
                "--nproc-per-node {number}: must be a number, `auto`, `cpu` or `gpu`"
            ))),
        },
    }
}

/// What is really started: a .py file and a module with the active Python, anything else as it is.
fn command_line(args: &RunArgs, program: &OsStr, arguments: &[OsString]) -> (OsString, Vec<OsString>) {
    let is_script = Path::new(program).extension().is_some_and(|e| e == "py");
    if args.no_python || !(args.module || is_script) {
        // A file in this folder is meant where a name could be looked for in PATH in vain, too.
        let here = Path::new(".").join(program);
        let found_here = !program.to_string_lossy().contains('/') && here.is_file() && !in_path(program);
        return (if found_here { here.into() } else { program.to_owned() }, arguments.to_vec());
    }
    let mut python: Vec<OsString> = vec!["-u".into()];
    if args.module {
        python.push("-m".into());
    }
    python.push(program.to_owned());
    python.extend_from_slice(arguments);
    (active_python(), python)
}

fn in_path(program: &OsStr) -> bool {
    let path = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&path).any(|folder| folder.join(program).is_file())
}

/// `$PYTHON_EXEC`, the virtual environment's, or `python3`.
fn active_python() -> OsString {
    let set = |name: &str| std::env::var_os(name).filter(|value| !value.is_empty());
    set("PYTHON_EXEC")
        .or_else(|| set("VIRTUAL_ENV").map(|venv| Path::new(&venv).join("bin/python").into()))
        .unwrap_or_else(|| "python3".into())
}
