//! What is typed behind a command that submits: a recipe with arguments of `phalanx train`, or a program with its own. What makes no
//! sense is found before there is a job.

use crate::args::{self, TrainArgs, WrongUsage};
use crate::train;
use anyhow::{Context, Result};
use clap::Args;
use phalanx::Recipe;
use phalanx::recipe::BUILT_IN;
use phalanx_job::{Work, names};
use std::path::Path;

/// What a command that submits takes behind its own flags.
#[derive(Args)]
pub(crate) struct WorkArgs {
    /// Print one JSON object a line on standard output.
    #[arg(long)]
    pub(crate) json: bool,
    /// A recipe (a built-in name, or a .toml file) with arguments of `phalanx train`, or a program with its own.
    #[arg(
        trailing_var_arg = true,
        allow_hyphen_values = true,
        required = true,
        value_name = "RECIPE|PROGRAM"
    )]
    pub(crate) work: Vec<String>,
}

/// A command that submits, as its hints have it.
pub(crate) struct Submits {
    pub(crate) command: &'static str,
    /// The flag that says how many workers there are.
    pub(crate) workers: &'static str,
    /// What has it hand on a variable of the environment, the name of which stands behind that; none where it hands on all.
    pub(crate) forwards: Option<&'static str>,
}

/// A recipe or a program, by its name.
pub(crate) fn work(typed: &[String], submits: &Submits) -> Result<Work> {
    let submit = submits.command;
    let typed = if typed.first().is_some_and(|word| word == "--") { &typed[1..] } else { typed };
    let Some(name) = typed.first() else {
        return Err(WrongUsage(format!("RECIPE or PROGRAM is missing, as in `{submit} mnist`")).into());
    };
    if BUILT_IN.iter().any(|(built_in, _)| built_in == name) || name.ends_with(".toml") {
        let (args, _) = training(typed)?;
        let before = [
            ("--nproc-per-node", submits.workers, args.nproc_per_node.clone()),
            ("--max-restarts", "--max-restarts", args.max_restarts.map(|n| n.to_string())),
        ];
        if let Some((flag, instead, value)) =
            before.into_iter().find_map(|(flag, instead, value)| Some((flag, instead, value?)))
        {
            let hint = format!("give it before the recipe, as in {submit} {instead} {value} {name}");
            return Err(WrongUsage(format!("{flag} {value}: agents start the workers\nhint: {hint}")).into());
        }
        if let Some(limits) = &args.hang_timeout {
            let variable = names::HANG_TIMEOUT;
            let forwards = submits.forwards.map_or_else(String::new, |flag| format!(" {flag} {variable}"));
            let hint = format!("{variable}={limits} {submit}{forwards} ...");
            let instead = format!("agents watch over the workers\nhint: {hint}");
            return Err(WrongUsage(format!("--hang-timeout {limits}: {instead}")).into());
        }
        let own = typed
            .iter()
            .find(|word| ["--out", "--resume"].contains(&word.split('=').next().unwrap_or_default()));
        if let Some(own) = own {
            let instead =
                "the job says where the run is kept, and goes on with it: give --out before the recipe";
            return Err(WrongUsage(format!("{own}: {instead}")).into());
        }
        return Ok(Work::Train(typed.to_vec()));
    }
    let in_path = || {
        let path = std::env::var_os("PATH").unwrap_or_default();
        std::env::split_paths(&path).any(|folder| folder.join(name).is_file())
    };
    if !Path::new(name).is_file() && !in_path() {
        let names: Vec<&str> = BUILT_IN.iter().map(|(name, _)| *name).collect();
        let words = format!(
            "{name}: is neither a recipe nor a program that is here\nhint: recipes are {}",
            names.join(", ")
        );
        return Err(WrongUsage(words).into());
    }
    Ok(Work::Program(typed.to_vec()))
}

/// Fails where a job can't keep its files in what was typed.
pub(crate) fn check_out(out: Option<&str>) -> Result<(), WrongUsage> {
    match out.filter(|out| out.is_empty() || out.starts_with('-')) {
        Some(out) => Err(WrongUsage(format!("--out {out:?}: must be a folder"))),
        None => Ok(()),
    }
}

/// This program, as the nodes find it: where they share no file system it has to be at the same place on each.
pub(crate) fn own_path() -> Result<String> {
    let path = std::env::current_exe().context("the path of this program")?;
    Ok(path.to_string_lossy().into_owned())
}

/// What the nodes are to train, as `phalanx train` takes it: what makes no sense is found before there is a job.
pub(crate) fn training(typed: &[String]) -> Result<(TrainArgs, Recipe)> {
    let args = args::parse_train(typed)?;
    let recipe = train::configured(&typed[0], None, &args).map_err(|error| WrongUsage(error.to_string()))?;
    Ok((args, recipe))
}
