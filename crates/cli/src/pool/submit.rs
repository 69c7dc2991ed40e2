//! `phalanx pool submit`: what was typed becomes a job; what can be found out on this machine is found out before it is one.

use super::flags::SubmitArgs;
use super::{ask, dial, show, unasked};
use crate::args::{WrongUsage, forwarded};
use crate::bar::FetchBar;
use crate::say::{print, say};
use crate::work::{self, Submits, check_out, training};
use anyhow::{Context, Result};
use phalanx::data::{Places, listing};
use phalanx_job::Work;
use phalanx_pool::{Answer, Ask, Ending, JobSpec, check_name};
use serde_json::json;
use std::path::Path;

const SUBMITS: Submits =
    Submits { command: "phalanx pool submit", workers: "--workers", forwards: Some("--forward-env") };

pub(crate) fn submit(args: &SubmitArgs) -> Result<u8> {
    let spec = spec(args)?;
    if let Work::Train(typed) = &spec.work {
        // Nodes that compute often have no network.
        let (train, recipe) = training(typed)?;
        Places::from_env(train.data).find(listing(&recipe.data.name)?, &mut FetchBar::new())?;
    }
    let client = dial(&args.to)?;
    let job = match ask(&client, &Ask::Submit(Box::new(spec.clone())))? {
        Answer::Submitted { job } => job,
        other => return Err(unasked(&other)),
    };
    let out = spec.run_dir(job);
    if args.typed.json {
        print(json!({"event": "submitted", "job": job, "out": out}));
    }
    say(format_args!("submitted job {job}; its run is kept in {}", out.display()));
    if args.wait {
        return show::wait(&args.to, job, args.typed.json);
    }
    say(format_args!("hint: phalanx pool wait {job}, phalanx pool show, or phalanx pool cancel {job}"));
    Ok(0)
}

/// What was typed, checked.
fn spec(args: &SubmitArgs) -> Result<JobSpec> {
    let mut work = work::work(&args.typed.work, &SUBMITS)?;
    let (least, most) = workers(&args.workers)?;
    let together = args.together;
    if together == 0 || least % together != 0 || most % together != 0 {
        let why = format!("--workers {} can't be shared out in such groups", args.workers);
        return Err(WrongUsage(format!("--together {together}: {why}")).into());
    }
    let name = args.name.clone().unwrap_or_else(|| work.name());
    check_name(&name).map_err(|why| WrongUsage(format!("--name {why}")))?;
    check_out(args.out.as_deref())?;
    let folder = std::env::current_dir().context("the folder that this is typed in")?;
    let ending = if args.drain || matches!(work, Work::Train(_)) { Ending::Drain } else { Ending::Terminate };
    if let Work::Program(typed) = &mut work
        && Path::new(&typed[0]).is_file()
    {
        // Nodes would look for it where their own programs are.
        typed[0] = folder.join(&typed[0]).to_string_lossy().into_owned();
    }
    Ok(JobSpec {
        queue: args.queue.clone(),
        out: args.out.clone().unwrap_or_else(|| format!("runs/{name}-%j")),
        name,
        priority: args.priority,
        least: least / together,
        most: most / together,
        workers: together,
        folder,
        work,
        ending,
        max_restarts: args.max_restarts,
        variables: forwarded(&args.forward_env)?,
    })
}

/// The fewest and the most workers.
fn workers(text: &str) -> Result<(u32, u32), WrongUsage> {
    let wrong = || {
        WrongUsage(format!("--workers {text}: must be a number from 1 on, or two as in 1:4, the least first"))
    };
    let number = |text: &str| text.parse::<u32>().ok().filter(|n| *n > 0).ok_or_else(wrong);
    let (least, most) = text.split_once(':').unwrap_or((text, text));
    let (least, most) = (number(least)?, number(most)?);
    if least <= most { Ok((least, most)) } else { Err(wrong()) }
}
