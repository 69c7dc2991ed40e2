//! The binary `phalanx`: from arguments to action. What was typed is in `args`, each command has a file, only this crate
//! prints.

mod args;
mod bar;
mod bench;
mod data;
mod failure;
mod run;
mod train;

use args::Command;
use std::process::ExitCode;

fn main() -> ExitCode {
    let filter = tracing_subscriber::EnvFilter::try_from_env("PHALANX_LOG").unwrap_or_else(|_| "warn".into());
    tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr).without_time().init();
    let result = match args::parse() {
        Command::Train(args) => train::train(&args),
        Command::Run(args) => run::run(&args),
        Command::Bench(args) => bench::bench(&args),
        Command::Data(args) => data::data(&args),
    };
    match result {
        Ok(code) => ExitCode::from(code),
        Err(error) => {
            let usage = error.downcast_ref::<args::WrongUsage>().is_some();
            eprintln!("error: {}", told(&error));
            ExitCode::from(if usage { 2 } else { 1 })
        }
    }
}

/// An error with its causes, each said once: many of our messages quote their cause already.
fn told(error: &anyhow::Error) -> String {
    error.chain().fold(String::new(), |text, cause| match cause.to_string() {
        cause if text.is_empty() => cause,
        cause if text.contains(&cause) => text,
        cause => format!("{text}: {cause}"),
    })
}
