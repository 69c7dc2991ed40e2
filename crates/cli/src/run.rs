//! `phalanx run`: any program as several workers. What was typed is checked here, before anything is started; files beside
//! this one know what the words mean.

mod devices;
mod flags;
mod hosts;
mod nodes;
mod program;
mod shown;
mod slurm;

pub(crate) use devices::{Gpus, number_of_workers, worker_count};
pub(crate) use flags::RunArgs;
pub(crate) use hosts::there::serve as serve_as_host;
pub(crate) use slurm::refuse_trouble;

use crate::args::WrongUsage;
use crate::drain;
use crate::failure;
use crate::say::say;
use anyhow::Result;
use devices::Bound;
use flags::{Idle, Times};
use phalanx_job::{DRAINED, names, wants_tls};
use phalanx_launch::{Console, HangLimits, LaunchSpec, LocalRank, LogTimes, MAX_GRACE, Numa, Prefix};
use program::Program;
use signal_hook::consts::SIGUSR1;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

pub(crate) fn run(args: &RunArgs) -> Result<u8> {
    if let Some(text) = &args.hosts.hosts {
        let code = hosts::run(args, text)?;
        return Ok(keep(code, args.exit_code_to.as_deref()));
    }
    // Whoever says where nodes meet, or that there is one, knows.
    if !args.standalone && args.rdzv_endpoint.is_none() && args.master_addr.is_none() {
        slurm::refuse_trouble()?;
    }
    let spec = spec(args)?;
    let (logs, most) = (spec.log_dir.clone().unwrap_or(spec.run_dir.clone()), spec.max_restarts);
    let outcome = phalanx_launch::run(&spec, move |report| failure::tell(&report, most))?;
    let code = failure::conclude(&outcome, &spec.run_dir, &logs);
    // Who was parted from the others may know that all end, and leaves it to them to say how, where they do. With those that stand by they
    // may go on.
    let all_end = code == DRAINED && args.spares == 0;
    let is_told = |file: &&Path| outcome.reason.is_of_the_run() || all_end && !file.exists();
    Ok(keep(code, args.exit_code_to.as_deref().filter(is_told)))
}

/// Gives the exit code on, and to whoever reads it in this file.
fn keep(code: u8, file: Option<&Path>) -> u8 {
    if let Some(file) = file
        && let Err(error) = fs::write(file, format!("{code}\n"))
    {
        say(format_args!("error: --exit-code-to {}: {error}", file.display()));
    }
    code
}

/// What is to be started.
fn spec(args: &RunArgs) -> Result<LaunchSpec> {
    let (as_typed, get) = (args, |name: &str| std::env::var(name).ok());
    let args = &slurm::placed(as_typed, get)?;
    refuse_what_is_not_here(&args.idle)?;
    let typed = match args.program.as_slice() {
        [first, rest @ ..] if first == "--" => rest,
        all => all,
    };
    let (master, mut nodes) = nodes::meeting(args, typed)?;
    if let Some(nodes) = &mut nodes {
        nodes.patience.anew = slurm::anew(as_typed, nodes, get);
    }
    let gpus = Gpus::of_this_machine();
    let workers = worker_count("--nproc-per-node", &args.nproc_per_node, phalanx::cores(), &gpus)?;
    let shown = shown::shown(
        args.redirects.as_deref(),
        args.tee.as_deref(),
        args.local_ranks_filter.as_deref(),
        workers,
    )?;
    if let Some(asked) = args.stdin.filter(|&local| local >= workers) {
        let why = format!("--stdin {asked}: there are {workers} workers on this machine, from 0 on");
        return Err(WrongUsage(why).into());
    }
    let local_rank = if args.virtual_local_rank { gpus.virtual_ranks(workers)? } else { LocalRank::Counted };
    let ending_signals = args
        .signals_to_handle
        .parse()
        .map_err(|why| WrongUsage(format!("--signals-to-handle {}: {why}", args.signals_to_handle)))?;
    let grace = Duration::try_from_secs_f64(args.shutdown_timeout).ok().filter(|grace| *grace <= MAX_GRACE);
    let grace = grace.ok_or_else(|| {
        let (asked, most) = (args.shutdown_timeout, MAX_GRACE.as_secs());
        WrongUsage(format!("--shutdown-timeout {asked}: must be from 0 to {most} seconds"))
    })?;
    let [name, arguments @ ..] = typed else {
        let text = "PROGRAM is missing: give it after the flags, as in `phalanx run -- ./train`";
        return Err(WrongUsage(text.into()).into());
    };
    // Workers hold against each other what agents don't.
    let unchecked = nodes.as_ref().is_some_and(|nodes| nodes.unchecked);
    let mut variables = vec![drain::start_variable()];
    variables.extend(unchecked.then(|| (names::UNCHECKED.into(), "1".into())));
    let program = program::program(args, name, arguments);
    let held_signals = if is_training(&program) { vec![SIGUSR1] } else { Vec::new() };
    let run_id = match (&args.rdzv_id, &nodes) {
        (Some(id), _) => id.clone(),
        (None, Some(_)) => nodes::UNNAMED.into(),
        (None, None) => fresh_run_id()?,
    };
    let name = Path::new(name).file_stem().map_or("program".into(), |s| s.to_string_lossy().into_owned());
    let unnamed = || PathBuf::from(format!("runs/{name}-{run_id}"));
    let run_dir = args.out.clone().or_else(|| args.log_dir.clone()).unwrap_or_else(unnamed);
    Ok(LaunchSpec {
        program: program.program,
        args: program.args,
        workers,
        run_id,
        run_dir,
        log_dir: args.log_dir.clone(),
        role: args.role.clone(),
        master,
        local_rank,
        local_rank_argument: args.pass_local_rank.then_some(program.before),
        processors: processors(args, workers)?,
        stdin: args.stdin,
        ending_signals,
        held_signals,
        console: Console::Lines { prefix: prefix(args)?, shown },
        log_times: match args.log_timestamps {
            Times::Logs => LogTimes::Logs,
            Times::All => LogTimes::Everywhere,
            Times::None => LogTimes::Nowhere,
        },
        max_restarts: args.max_restarts,
        nodes,
        tls: args.tls || tls_is_asked_for()?,
        hang_limits: hang_limits(args.hang_timeout.as_deref())?,
        grace,
        variables,
    })
}

/// Whether the program is `phalanx train`, which heeds the signals of a batch system once it is ready for them.
fn is_training(program: &Program) -> bool {
    let is_own = Path::new(&program.program).file_name().is_some_and(|name| name == "phalanx");
    is_own && program.args.first().is_some_and(|word| word == "train")
}

/// Whether the environment asks for TLS.
pub(crate) fn tls_is_asked_for() -> Result<bool, WrongUsage> {
    wants_tls(|name| std::env::var(name).ok()).map_err(|error| WrongUsage(error.to_string()))
}

/// How long workers may make no progress, by the flag or else by the environment.
pub(crate) fn hang_limits(typed: Option<&str>) -> Result<HangLimits, WrongUsage> {
    let set = std::env::var(names::HANG_TIMEOUT).ok().filter(|text| !text.is_empty());
    let (name, text) = match (typed, set) {
        (Some(text), _) => ("--hang-timeout", text.to_owned()),
        (None, Some(text)) => (names::HANG_TIMEOUT, text),
        (None, None) => return Ok(HangLimits::default()),
    };
    text.parse().map_err(|why| WrongUsage(format!("{name} {text}: {why}")))
}

/// Flags of torchrun that would do something which isn't there; each with what does it here.
fn refuse_what_is_not_here(idle: &Idle) -> Result<(), WrongUsage> {
    let logs = "all that workers write is in the logs: search there, as in grep -r WORD RUN/logs";
    let refused = [
        ("--duplicate-stdout-filters", &idle.duplicate_stdout_filters, logs),
        ("--duplicate-stderr-filters", &idle.duplicate_stderr_filters, logs),
        ("--logs-specs", &idle.logs_specs, "logs lie in logs/GENERATION/RANK.out and .err below --log-dir"),
        (
            "--event-log-handler",
            &idle.event_log_handler.clone().filter(|handler| handler != "null"),
            "what happens to workers is said on standard error",
        ),
    ];
    let found = refused.iter().find_map(|(flag, value, instead)| Some((flag, value.as_ref()?, instead)));
    found.map_or(Ok(()), |(flag, value, instead)| {
        Err(WrongUsage(format!("{flag} {value}: not supported; {instead}")))
    })
}

/// What stands before the workers' lines.
fn prefix(args: &RunArgs) -> Result<Option<Prefix>, WrongUsage> {
    const VARIABLE: &str = "TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE";
    let set = || std::env::var(VARIABLE).ok().map(|template| (VARIABLE, template));
    let typed =
        args.log_line_prefix_template.clone().map(|template| ("--log-line-prefix-template", template));
    match typed.or_else(set).filter(|(_, template)| !template.is_empty()) {
        _ if args.no_prefix => Ok(None),
        None => Ok(Some(Prefix::default())),
        Some((name, template)) => {
            template.parse().map(Some).map_err(|why| WrongUsage(format!("{name} {template}: {why}")))
        }
    }
}

/// The processors that the workers keep to.
fn processors(args: &RunArgs, workers: usize) -> Result<Vec<Vec<usize>>, WrongUsage> {
    let Some(binding) = args.numa_binding else { return Ok(Vec::new()) };
    match devices::bound(binding, workers, &Numa::of_this_machine())? {
        Bound::To(processors) => Ok(processors),
        Bound::OneNode => {
            say(
                "--numa-binding: this machine has one NUMA node, so workers may run on all of its processors",
            );
            Ok(Vec::new())
        }
    }
}

/// A name for a run that nobody named.
pub(crate) fn fresh_run_id() -> Result<String> {
    let mut random = [0; 5];
    getrandom::fill(&mut random)
        .map_err(|error| anyhow::anyhow!("the system gives no random numbers: {error}"))?;
    Ok(phalanx_job::run_id(random))
}
