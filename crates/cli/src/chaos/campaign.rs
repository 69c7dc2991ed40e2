//! Puts faults to a run until it is over, and goes on with it where it was ended.

use super::plan::{Act, Fault};
use super::record::Record;
use super::site::{Setup, Site};
use super::{cut, full, leader};
use crate::say::say;
use anyhow::{Context, Result, ensure};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use phalanx::Event;
use std::time::{Duration, Instant};

/// How long a paused worker stands still: less than what makes a silent one lost.
const PAUSE: Duration = Duration::from_millis(300);

/// How long a machine does: longer than any silence that workers or an agent put up with.
const STANDSTILL: Duration = Duration::from_secs(4);

/// So many steps at most are made once a worker was asked to end that heard of it.
const HEEDED: u64 = 200;

/// How long nodes that are all asked to end may take, one of which may have to find a coordinator first.
const ENDS_WITHIN: Duration = Duration::from_secs(30);

/// The faults of a run.
pub(super) struct Campaign {
    pub(super) faults: Vec<Fault>,
    /// How many of them have been.
    pub(super) done: usize,
    /// Names of those that were put to the run.
    pub(super) put: Vec<&'static str>,
    /// Names of those that couldn't be.
    pub(super) skipped: Vec<&'static str>,
    pub(super) quiet: bool,
}

impl Campaign {
    /// Starts the run, or goes on with it, until it ends; gives whether it is over.
    pub(super) fn run(&mut self, setup: &Setup, resumes: bool) -> Result<bool> {
        let mut site = Site::start(setup, resumes)?;
        let mut ended: Option<Ended> = None;
        while let Some(event) = site.next()? {
            let Event::Step { step, .. } = event else { continue };
            if site.has_ended() {
                continue;
            }
            if let Some(end) = ended.take_if(|end| !end.is_heeded(step)) {
                let name = end.act.name();
                ensure!(end.is_by_one(), "{name}, and {ENDS_WITHIN:.0?} later steps are made");
                // Who was asked didn't train yet, and ended alone.
                site.reopen()?;
            }
            while let Some(act) = self.due(step).filter(|_| ended.is_none() && !site.has_ended()) {
                self.done += 1;
                self.put(&mut site, setup, step, act)?;
                ended = act.ends().then(|| Ended { act, step, at: Instant::now() });
            }
        }
        let is_over = site.has_ended();
        for (node, status, said) in site.ends() {
            let is_well = ended.is_some() || status.success();
            ensure!(is_well, "node {node} ended with {status} though nobody ended it:\n{said}");
        }
        ensure!(is_over || ended.is_some(), "the run has ended though nobody ended it");
        if is_over {
            // An end that was asked for late came after the last step.
            self.skipped.extend(self.faults[self.done..].iter().map(|fault| fault.act.name()));
        }
        Ok(is_over)
    }

    fn due(&self, step: u64) -> Option<Act> {
        self.faults.get(self.done).filter(|fault| fault.after <= step).map(|fault| fault.act)
    }

    /// Puts it to the run, unless that can't be here, which is said.
    fn put(&mut self, site: &mut Site<'_>, setup: &Setup, step: u64, act: Act) -> Result<()> {
        let (name, number) = (act.name(), format!("{} of {}", self.done, self.faults.len()));
        if !self.quiet {
            say(format_args!("step {step}: {name} ({number})"));
        }
        match put(site, setup, act)? {
            None => self.put.push(name),
            Some(why) => {
                say(format_args!("skipped: {name} ({number}): {why}"));
                self.skipped.push(name);
            }
        }
        Ok(())
    }
}

/// What ended the run, and when.
struct Ended {
    act: Act,
    step: u64,
    at: Instant,
}

impl Ended {
    /// Whether a single worker was to end all.
    fn is_by_one(&self) -> bool {
        matches!(self.act, Act::Ask { .. })
    }

    /// Whether the run may still make this step.
    fn is_heeded(&self, step: u64) -> bool {
        if self.is_by_one() { step <= self.step + HEEDED } else { self.at.elapsed() < ENDS_WITHIN }
    }
}

/// Does it; gives why it can't be done, if so. A worker that isn't there at the moment has gone by itself, or isn't there yet.
fn put(site: &mut Site<'_>, setup: &Setup, act: Act) -> Result<Option<String>> {
    let workers = site.workers();
    let nth = |worker: usize| workers.get(worker % workers.len().max(1)).copied();
    // One that ends at this moment isn't hurt by it.
    let send = |worker: Option<Pid>, signal| _ = worker.map(|pid| kill(pid, signal));
    match act {
        Act::Kill { worker } => send(nth(worker), Signal::SIGKILL),
        Act::KillTwo { worker } => {
            [worker, worker.wrapping_add(1)]
                .into_iter()
                .for_each(|worker| send(nth(worker), Signal::SIGKILL));
        }
        Act::KillAll => workers.iter().for_each(|worker| send(Some(*worker), Signal::SIGKILL)),
        Act::Stop { worker } => send(nth(worker), Signal::SIGSTOP),
        Act::Pause { worker } => {
            for signal in [Signal::SIGSTOP, Signal::SIGCONT] {
                send(nth(worker), signal);
                std::thread::sleep(PAUSE);
            }
        }
        Act::Checkpoint => workers.iter().for_each(|worker| send(Some(*worker), Signal::SIGUSR2)),
        Act::CutWorkers { worker } => {
            let Some(worker) = nth(worker) else { return Ok(nobody()) };
            let others: Vec<Pid> = workers.iter().copied().filter(|other| *other != worker).collect();
            return Ok(told(cut::between(worker, &others)));
        }
        Act::CutLink { worker } => {
            let Some(worker) = nth(worker) else { return Ok(nobody()) };
            let Some(coordinator) = leader::address(worker) else { return Ok(nobody()) };
            return Ok(told(cut::to(worker, coordinator)));
        }
        Act::FillDisk => fill_disk(site, setup)?,
        Act::Ask { worker } => {
            site.close();
            send(nth(worker), Signal::SIGTERM);
        }
        Act::KillAgent => {
            site.close();
            site.signal_first(Signal::SIGKILL)?;
        }
        Act::Drain => {
            site.close();
            site.ask_all();
        }
        Act::KillNode { node } => {
            let Some(node) = one_of_several(site, node) else { return Ok(nobody()) };
            site.kill(node);
            site.keep_enough()?;
        }
        Act::KillLeader => {
            let address = workers.iter().find_map(|worker| leader::address(*worker));
            let agents = site.here().into_iter().filter_map(|node| Some((node, site.agent(node)?)));
            let leads = address.and_then(|address| leader::listens(agents, address));
            let Some(node) = leads.filter(|_| site.here().len() > 1) else { return Ok(nobody()) };
            site.kill(node);
            site.keep_enough()?;
        }
        Act::CutNode { node } => {
            let Some(node) = one_of_several(site, node) else { return Ok(nobody()) };
            let agent = site.agent(node).context("a node has an agent")?;
            let Some(coordinator) = workers.iter().find_map(|worker| leader::address(*worker)) else {
                return Ok(nobody());
            };
            let why = told(cut::to(agent, coordinator));
            if why.is_none() {
                site.lose(node);
                site.keep_enough()?;
            }
            return Ok(why);
        }
        Act::Replace { node } => match one_of_several(site, node) {
            Some(node) => site.replace(node)?,
            None => return Ok(nobody()),
        },
        Act::AddNode => {
            if !site.has_room() {
                let most = setup.nodes.map_or(1, |nodes| nodes.most);
                return Ok(Some(format!("there are {most} nodes, as many as may be")));
            }
            site.add()?;
        }
        Act::Freeze => site.freeze(STANDSTILL)?,
    }
    Ok(None)
}

fn nobody() -> Option<String> {
    Some("nobody is there at the moment that it could be put to".into())
}

/// Why a connection wasn't cut.
fn told(cut: std::io::Result<bool>) -> Option<String> {
    match cut {
        Ok(true) => None,
        Ok(false) => Some("there is no such connection at the moment".into()),
        Err(error) => Some(format!("the connections of other processes are out of reach: {error}")),
    }
}

/// One of the nodes, if there are others.
fn one_of_several(site: &Site<'_>, node: usize) -> Option<usize> {
    let here = site.here();
    here.get(node % here.len().max(1)).copied().filter(|_| here.len() > 1)
}

/// Leaves no room for a checkpoint that is asked for, until it is told that there is none, and waits until all that was told
/// meanwhile is in the file where it belongs.
fn fill_disk(site: &mut Site<'_>, setup: &Setup) -> Result<()> {
    let seen = site.heard().count();
    let is_told = |site: &mut Site<'_>| {
        // Those that came meanwhile find the disk full, too.
        for worker in site.workers() {
            // One that can't be limited has ended.
            let _ = full::fill(worker);
            let _ = kill(worker, Signal::SIGUSR2);
        }
        let told = |event: &Event| match event {
            Event::Note { message } => message.starts_with("no checkpoint after step "),
            Event::Done { .. } => true,
            _ => false,
        };
        site.heard().skip(seen).any(told)
    };
    site.wait(is_told, "nobody told that there is no room for a checkpoint")?;
    for worker in site.workers() {
        full::free(worker).with_context(|| format!("the limit of process {worker} can't be taken back"))?;
    }
    let step_of = |event: &Event| if let Event::Step { step, .. } = event { Some(*step) } else { None };
    let last = site.heard().filter_map(step_of).last();
    let events = setup.events();
    let is_there = |_: &mut Site<'_>| Record::read(&events).is_ok_and(|record| record.has(last));
    site.wait(is_there, "what happened while the disk was full isn't written down")
}
