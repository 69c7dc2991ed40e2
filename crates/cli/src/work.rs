//! What is typed behind a command that submits: a recipe with arguments of `phalanx train`, or a program with its own. What makes no
//! sense is found before there is a job.

use crate::args::{self, TrainArgs, WrongUsage};
use crate::train;
use anyhow::{Context, Result};
use phalanx::Recipe;
use phalanx::recipe::BUILT_IN;
use std::path::Path;

/// What a job is to do.
pub(crate) enum Work {
    /// Train, by a recipe and arguments.
    Train(Vec<String>),
    /// Run a program with arguments.
    Program(Vec<String>),
}

impl Work {
    /// What a job is called that nobody has named.
    pub(crate) fn name(&self) -> String {
        let (Work::Train(typed) | Work::Program(typed)) = self;
        let stem = Path::new(&typed[0]).file_stem().unwrap_or_default().to_string_lossy().into_owned();
        let is_plain = |c: char| c.is_ascii_alphanumeric() || "-_.".contains(c);
        stem.replace(|c| !is_plain(c), "-")
    }
}

/// A recipe or a program, by its name.
pub(crate) fn work(typed: &[String], submit: &str) -> Result<Work> {
    let typed = if typed.first().is_some_and(|word| word == "--") { &typed[1..] } else { typed };
    let Some(name) = typed.first() else {
        return Err(WrongUsage(format!("RECIPE or PROGRAM is missing, as in `{submit} mnist`")).into());
    };
    if BUILT_IN.iter().any(|(built_in, _)| built_in == name) || name.ends_with(".toml") {
        let (args, _) = training(typed)?;
        let before = [
            ("--nproc-per-node", args.nproc_per_node.clone()),
            ("--max-restarts", args.max_restarts.map(|n| n.to_string())),
        ];
        if let Some((flag, value)) = before.into_iter().find_map(|(flag, value)| Some((flag, value?))) {
            let instead = format!(
                "agents start the workers\nhint: give it before the recipe, as in {submit} {flag} {value} {name}"
            );
            return Err(WrongUsage(format!("{flag} {value}: {instead}")).into());
        }
        if let Some(limits) = &args.hang_timeout {
            let instead =
                format!("agents watch over the workers\nhint: PHALANX_HANG_TIMEOUT={limits} {submit} ...");
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
