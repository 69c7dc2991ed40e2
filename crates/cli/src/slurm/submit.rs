//! `phalanx slurm submit`: what was typed becomes a script; what can be found out on this machine is found out before it is submitted.

use super::flags::SubmitArgs;
use super::follow;
use crate::args::WrongUsage;
use crate::bar::FetchBar;
use crate::say::{print, say};
use crate::work::{Submits, check_out, own_path, training, work};
use anyhow::Result;
use phalanx::data::{Places, listing};
use phalanx_job::Work;
use phalanx_launch::slurm::{Submission, queue, script};
use serde_json::json;

const SUBMITS: Submits =
    Submits { command: "phalanx slurm submit", workers: "--nproc-per-node", forwards: None };

pub(crate) fn submit(args: &SubmitArgs) -> Result<u8> {
    let job = submission(args)?;
    let text = script(&job);
    if args.dry_run {
        match args.typed.json {
            true => print(json!({"script": text})),
            false => print(text.trim_end()),
        }
        return Ok(0);
    }
    if let Work::Train(typed) = &job.work {
        // Nodes that compute often have no network.
        let (train, recipe) = training(typed)?;
        Places::from_env(train.data).find(listing(&recipe.data.name)?, &mut FetchBar::new())?;
    }
    // Of another run, in the same folder.
    let before = job.out.as_deref().map_or(0, follow::told_before);
    let number = queue::submit(&text).map_err(|error| WithHint::of(&error.to_string()))?;
    let out = job.run_dir(&if job.array.is_some() { format!("{number}_%a") } else { number.clone() });
    if args.typed.json {
        print(json!({"event": "submitted", "job": number, "out": out, "script": text}));
    }
    match job.array.is_some() {
        true => say(format_args!(
            "submitted jobs {number}; their runs are kept in {out}, where %a is the number of each"
        )),
        false => say(format_args!("submitted job {number}; its run is kept in {out}")),
    }
    say(format_args!("hint: phalanx slurm follow {number}, or scancel {number}"));
    if args.no_follow {
        return Ok(0);
    }
    follow::job(&number, before, args.cancel, args.typed.json)
}

/// An error of sbatch, with what to do about it.
struct WithHint;

impl WithHint {
    fn of(said: &str) -> anyhow::Error {
        let hint = [
            (
                "node configuration is not available",
                "no node has so much: see what there is with sinfo -o '%P %D %c %m %G'",
            ),
            ("Node count specification invalid", "sinfo -o '%P %D' says how many nodes a partition has"),
            ("More processors requested", "sinfo -o '%P %c' says how many cores nodes have"),
            ("invalid partition", "sinfo -s names the partitions"),
            ("time limit", "sinfo -o '%P %l' says how long a partition lets jobs run: give a smaller --time"),
            ("Invalid account", "give yours with --sbatch=--account=NAME: sacctmgr show assoc user=$USER"),
            ("Unable to contact", "see whether the controller is up: scontrol ping"),
            ("generic resource", "sinfo -o '%P %G' says which GPUs nodes have"),
        ];
        let hint = hint.iter().find(|(words, _)| said.to_lowercase().contains(&words.to_lowercase()));
        match hint.filter(|_| !said.contains("hint: ")) {
            Some((_, hint)) => anyhow::anyhow!("{said}\nhint: {hint}"),
            None => anyhow::anyhow!("{said}"),
        }
    }
}

/// What was typed, checked.
fn submission(args: &SubmitArgs) -> Result<Submission> {
    let mut work = work(&args.typed.work, &SUBMITS)?;
    if let Work::Train(typed) = &mut work
        && args.gpus_per_node > 0
        && training(typed)?.0.device.is_none()
    {
        // Who asks for GPUs wants to compute on them.
        typed.push("--device=cuda".to_owned());
        training(typed)
            .map_err(|error| WrongUsage(format!("--gpus-per-node {}: {error}", args.gpus_per_node)))?;
    }
    let nodes = match &args.elastic {
        None => (args.nodes, args.nodes),
        Some(text) => {
            let wrong =
                || WrongUsage(format!("--elastic {text}: must be the least and the most nodes, as in 1:4"));
            let (least, most) = text.split_once(':').ok_or_else(wrong)?;
            let pair = (least.parse().map_err(|_| wrong())?, most.parse().map_err(|_| wrong())?);
            if pair.0 > pair.1 {
                return Err(wrong().into());
            }
            pair
        }
    };
    if nodes.0 == 0 {
        let typed = args.elastic.as_ref().map_or("--nodes 0".into(), |text| format!("--elastic {text}"));
        return Err(WrongUsage(format!("{typed}: a job needs at least one node")).into());
    }
    if args.time.is_some_and(|time| time.is_zero()) {
        let want = "Slurm takes that for no limit; leave it out for the partition's";
        return Err(WrongUsage(format!("--time 0s: {want}")).into());
    }
    if args.cpus_per_node == Some(0) {
        return Err(WrongUsage("--cpus-per-node 0: a node needs at least one core".into()).into());
    }
    let workers = match (&args.nproc_per_node, args.gpus_per_node) {
        (Some(typed), _) => {
            let is_word = ["auto", "cpu", "gpu"].contains(&typed.as_str());
            if !is_word && !typed.parse::<u32>().is_ok_and(|n| n > 0) {
                let want = "must be a number from 1, `auto`, `cpu` or `gpu`";
                return Err(WrongUsage(format!("--nproc-per-node {typed}: {want}")).into());
            }
            typed.clone()
        }
        (None, 0) => "1".into(),
        (None, gpus) => gpus.to_string(),
    };
    let is_name = |c: char| c.is_ascii_alphanumeric() || "-_.".contains(c);
    let name = args.name.clone().unwrap_or_else(|| work.name());
    if name.is_empty() || !name.chars().all(is_name) {
        return Err(WrongUsage(format!("--name {name:?}: must be letters, digits, dots and dashes")).into());
    }
    if let Some(array) = &args.array
        && (array.is_empty() || !array.chars().all(|c| c.is_ascii_digit() || "-,:%".contains(c)))
    {
        let want = "must be numbers, as in 0-15 or 1-9%3";
        return Err(WrongUsage(format!("--array {array}: {want}")).into());
    }
    if let Some(partition) = &args.partition
        && (partition.is_empty() || partition.chars().any(|c| c.is_whitespace() || c.is_control()))
    {
        let want =
            "must be the name of a partition, or several with commas between them\nhint: sinfo -s names them";
        return Err(WrongUsage(format!("--partition {partition:?}: {want}")).into());
    }
    check_out(args.out.as_deref())?;
    for option in &args.sbatch {
        if option == "--test-only" {
            let instead = "submits nothing\nhint: phalanx slurm submit --dry-run ... | sbatch --test-only";
            return Err(WrongUsage(format!("--sbatch={option}: {instead}")).into());
        }
        if !option.starts_with('-') || option.contains('\n') {
            let want = "must be an option with its dashes, as in --sbatch=--account=lab";
            return Err(WrongUsage(format!("--sbatch {option:?}: {want}")).into());
        }
    }
    let out = args.out.clone();
    Ok(Submission {
        nodes,
        spares: args.spares,
        workers,
        gpus: args.gpus_per_node,
        cores: args.cpus_per_node,
        time: args.time,
        partition: args.partition.clone(),
        array: args.array.clone(),
        options: args.sbatch.clone(),
        out,
        max_restarts: args.max_restarts,
        phalanx: own_path()?,
        name,
        work,
    })
}
