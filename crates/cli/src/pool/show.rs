//! How a pool is, for people and for programs.

use super::flags::To;
use super::{dial, look};
use crate::say::{harmless, is_read, print, say};
use anyhow::Result;
use phalanx_pool::{Client, End, JobId, Shown, ShownJob, ShownNode, ShownQueue, ShownState};
use serde_json::json;
use std::thread;
use std::time::{Duration, Instant};

/// How often a job that is waited for is looked at.
const ASK: Duration = Duration::from_millis(500);
/// How long a pool that is away is looked for.
const PATIENCE: Duration = Duration::from_secs(60);

/// So many jobs that have ended are in the table.
const SHOWN: usize = 20;

pub(crate) fn show(to: &To, job: Option<JobId>, json: bool) -> Result<u8> {
    let shown = look(&dial(to)?, job)?;
    if let Some(job) = job.filter(|_| shown.jobs.is_empty()) {
        return Err(no_job(job));
    }
    match json {
        true => print(serde_json::to_string(&shown)?),
        false => {
            print(harmless(table(&shown).trim_end()));
            if let (Some(_), [only]) = (job, &shown.jobs[..]) {
                print(harmless(&format!(
                    "its run is kept in {}, and what it says in agents/ there",
                    only.out
                )));
            }
        }
    }
    Ok(0)
}

/// Waits for the end of a job, and tells how it is whenever that changes. A pool that ends is waited for.
pub(crate) fn wait(to: &To, job: JobId, json: bool) -> Result<u8> {
    let mut client: Option<Client> = Some(dial(to)?);
    let (mut answered, mut told) = (Instant::now(), None);
    loop {
        let shown = match &client {
            Some(client) => look(client, Some(job)),
            None => dial(to).and_then(|anew| {
                let shown = look(&anew, Some(job));
                client = Some(anew);
                shown
            }),
        };
        match shown {
            Ok(shown) => {
                answered = Instant::now();
                let Some(found) = shown.jobs.into_iter().next() else { return Err(no_job(job)) };
                if told.as_ref() != Some(&found.state) {
                    match json {
                        true => print(
                            json!({"event": "job", "job": job, "attempts": found.attempts, "now": found.state}),
                        ),
                        false => say(harmless(&format!("job {job} ({}) {}", found.name, found.state))),
                    }
                }
                if let ShownState::Ended { how } = &found.state {
                    if matches!(how, End::Failed { .. }) && !json {
                        say(harmless(&format!("hint: what it said is in {}/agents", found.out)));
                    }
                    return Ok(u8::from(*how != End::Done));
                }
                told = Some(found.state);
            }
            Err(error) if answered.elapsed() > PATIENCE => return Err(error),
            Err(_) => {
                if client.take().is_some() {
                    say("the pool is away, and its jobs go on; looking for it for a minute");
                }
            }
        }
        if !is_read() {
            return Ok(0);
        }
        thread::sleep(ASK);
    }
}

fn no_job(job: JobId) -> anyhow::Error {
    anyhow::anyhow!("there is no job {job}, or it has ended long ago\nhint: phalanx pool show lists them")
}

fn table(shown: &Shown) -> String {
    let mut text = String::new();
    // Neither is there where one job was asked for.
    if !shown.queues.is_empty() {
        text += &format!(
            "{:<20} {:>6} {:>6} {:>6} {:>6} {:>6}\n",
            "queue", "holds", "fair", "quota", "limit", "weight"
        );
        for ShownQueue { name, queue, share, used } in &shown.queues {
            let limit = queue.limit.map_or("-".into(), |limit| limit.to_string());
            let (quota, weight) = (queue.quota, queue.weight);
            text += &format!("{name:<20} {used:>6} {share:>6} {quota:>6} {limit:>6} {weight:>6}\n");
        }
        text += &format!("\n{:<20} {:>6} {:>6}  at\n", "node", "used", "slots");
        for ShownNode { name, address, slots, used, is_there } in &shown.nodes {
            let away = if *is_there { "" } else { ", is given nothing now" };
            text += &format!("{name:<20} {used:>6} {slots:>6}  {address}{away}\n");
        }
        if shown.nodes.is_empty() {
            text += "none; on each machine: phalanx pool node --pool ADDRESS\n";
        }
        text.push('\n');
    }
    text += &format!(
        "{:>6} {:<20} {:<20} {:>8} {:>8} {:>6}  now\n",
        "job", "name", "queue", "priority", "workers", "starts"
    );
    let (over, living): (Vec<&ShownJob>, Vec<&ShownJob>) =
        shown.jobs.iter().partition(|job| matches!(job.state, ShownState::Ended { .. }));
    let earlier = over.len().saturating_sub(SHOWN);
    for job in living.into_iter().chain(over.into_iter().skip(earlier)) {
        let ShownJob {
            job: number,
            name,
            queue,
            priority,
            agents: (least, most),
            workers,
            attempts,
            state,
            ..
        } = job;
        let wants = match (least * workers, most * workers) {
            (least, most) if least == most => least.to_string(),
            (least, most) => format!("{least}:{most}"),
        };
        text +=
            &format!("{number:>6} {name:<20} {queue:<20} {priority:>8} {wants:>8} {attempts:>6}  {state}\n");
    }
    if earlier > 0 {
        text += &format!("and {earlier} that ended before these, which --json shows\n");
    }
    text
}
