//! The binary `phalanx`: from arguments to action. What was typed is in `args`, each command has a file, only this crate
//! prints.

mod args;
mod bar;
mod bench;
mod chaos;
mod checkpoint;
mod cluster;
mod data;
mod doctor;
mod drain;
mod events;
mod failure;
mod first;
mod flight;
mod meminfo;
mod plan;
mod pool;
mod run;
mod runs;
mod say;
mod selftest;
mod slurm;
mod top;
mod train;
mod trial;
mod watch;
mod work;

use args::Command;
use nix::sys::prctl::set_name;
use signal_hook::consts::SIGXFSZ;
use std::ffi::CString;
use std::io::IsTerminal;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::process::ExitCode;
use std::sync::Arc;

fn main() -> ExitCode {
    be_listed_by_name();
    let filter = tracing_subscriber::EnvFilter::try_from_env("PHALANX_LOG").unwrap_or_else(|_| "warn".into());
    // An event that can't be written is lost: to complain would be to write to the same place, and to panic.
    let log = tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr).without_time();
    log.with_ansi(std::io::stderr().is_terminal()).log_internal_errors(false).init();
    // A file that grows beyond what is allowed is an error of whoever writes it, as where the disk is full. Where
    // the signal can't be taken it ends this process, as it would without this.
    let _ = signal_hook::flag::register(SIGXFSZ, Arc::default());
    let result = match args::parse() {
        Command::Train(args) => train::train(&args),
        Command::Run(args) => run::run(&args),
        Command::Host => run::serve_as_host(),
        Command::Bench(args) => bench::bench(&args),
        Command::Data(args) => data::data(&args),
        Command::Checkpoint(args) => checkpoint::checkpoint(&args),
        Command::Chaos(args) => chaos::chaos(&args),
        Command::Cluster(args) => cluster::cluster(&args),
        Command::Doctor(args) => doctor::doctor(&args),
        Command::Top(args) => top::top(&args),
        Command::Watch(args) => watch::watch(&args),
        Command::Selftest(args) => selftest::run(&args),
        Command::Slurm(args) => slurm::slurm(&args),
        Command::Plan(args) => plan::plan(&args),
        Command::Pool(args) => pool::pool(&args),
        Command::Flight(args) => flight::flight(&args),
        Command::Completions { shell } => args::completions(shell),
    };
    let lost = say::lost().map(anyhow::Error::msg);
    match result.and_then(|code| lost.filter(|_| code == 0).map_or(Ok(code), Err)) {
        Ok(code) => ExitCode::from(code),
        Err(error) => {
            let usage = error.downcast_ref::<args::WrongUsage>().is_some();
            say::say(format_args!("error: {}", say::harmless(&told(&error))));
            ExitCode::from(if usage { 2 } else { 1 })
        }
    }
}

/// A worker is started as `/proc/self/exe`, and would be listed as `exe`.
fn be_listed_by_name() {
    let given = std::env::args_os().next().unwrap_or_default();
    let name = Path::new(&given).file_name().and_then(|name| CString::new(name.as_bytes()).ok());
    // A process without its name runs as well.
    let _ = name.map(|name| set_name(&name));
}

/// An error with its causes, each said once: many of our messages quote their cause already.
fn told(error: &anyhow::Error) -> String {
    error.chain().fold(String::new(), |text, cause| match cause.to_string() {
        cause if text.is_empty() => cause,
        cause if text.contains(&cause) => text,
        cause => format!("{text}: {cause}"),
    })
}
