//! Memory that the ranks of a group see in common: how it comes about.

use super::Group;
use super::family::Kin;
use crate::common::{Common, Shared};
use crate::element::{Element, ReduceOp};
use crate::error::Error;
use crate::transport::{Lost, Transport};
use crate::watch::Watch;
use phalanx_memory::Region;
use phalanx_wire::{Deadline, Rank};
use std::fs::File;
use std::sync::Arc;
use std::time::Instant;

impl Group {
    /// A slice of zeros for this rank in memory that all ranks see: what is summed in it is summed in place, without a copy,
    /// where the ranks share a host; elsewhere it is a slice like any other. All ranks must call it with one length; where one
    /// has no memory for it, that is the end of the group.
    ///
    /// When the group has failed, what the slice holds means nothing, and a rank that was only stopped may still write to it:
    /// another group allocates its own.
    pub fn allocate<T: Element>(&self, len: usize) -> Result<Shared<T>, Error> {
        let shared = Shared::zeroed(len).map_err(|error| {
            let reason = format!("it has no memory for {len} x {}: {error}", T::KIND.name);
            self.abort(&reason);
            Error::Aborted { by: self.known_as(), reason }
        })?;
        self.attach(Some(shared.region()))?;
        Ok(shared)
    }

    /// Lets all ranks see a region, which was shared before ([`Region::share`], or [`Group::may_attach`]) and is for this group
    /// alone; true if they now
    /// do. From then on all-reduces of slices in it, which must lie at the same place on every rank, are done in place, until it
    /// is shared anew: then it is to be attached again. All ranks must call it, with regions of one size. Where one has none, or
    /// none that is shared, or is reached over TCP, nothing changes.
    pub fn attach(&self, region: Option<&Arc<Region>>) -> Result<bool, Error> {
        if self.world_size == 1 {
            return Ok(false);
        }
        let deadline = Deadline::after(self.timeout);
        let ours = region
            .filter(|_| self.shares_memory(&deadline))
            .and_then(|region| Some((region, region.file()?)));
        let own = ours.as_ref().map_or(0, |(region, _)| region.bytes() as u64);
        let mut all = vec![0; self.world_size];
        self.all_gather(&[own], &mut all)?;
        let Some((region, file)) = ours.filter(|_| !all.contains(&0)) else { return Ok(false) };
        if let Some(other) = all.iter().position(|&theirs| theirs != own) {
            let sizes = format!("{} bytes where rank {} brings {own}", all[other], self.known_as());
            let reason = format!("rank {} brings shared memory of {sizes}", self.members[other]);
            self.abort(&reason);
            return Err(Error::Aborted { by: self.known_as(), reason });
        }
        self.let_in(&file);
        let passed = self.pass_round(&file, &deadline)?;
        self.recognise_guests(&deadline)?;
        let open = |file: std::io::Result<File>| file.and_then(|file| Region::open(file, region.bytes()));
        let opened = passed.into_iter().map(|file| file.map(open).transpose());
        let opened: Result<Vec<Option<Region>>, _> = opened.collect();
        // All or none.
        let mut missing = [u8::from(opened.is_err())];
        self.all_reduce(&mut missing, ReduceOp::Sum)?;
        match opened {
            Err(error) => tracing::warn!("memory of another rank can't be mapped, it is copied: {error}"),
            Ok(others) if missing[0] == 0 => {
                let common = Common { own: Arc::clone(region), file, others };
                self.engine(&deadline)?.regions.attach(common);
                return Ok(true);
            }
            Ok(_) => {}
        }
        Ok(false)
    }

    /// Whether a region that was shared before can be attached to this group as it is, since nobody but its ranks can still
    /// touch it: whoever was let in before is one of them, or has ended. What is in the region stays then.
    pub fn may_attach(&self, region: &Region) -> bool {
        let Kin::Processes(home) = &self.kin else { return false };
        region.file().is_some_and(|file| home.door.guests().are_all_among(&file, &home.peers))
    }

    /// From now on the others may touch what is in this file.
    fn let_in(&self, file: &Arc<File>) {
        let Kin::Processes(home) = &self.kin else { return };
        let others = home.peers.iter().filter(|peer| *peer != home.door.address());
        others.for_each(|peer| home.door.guests().let_in(file, peer));
    }

    /// Takes note of which processes the others are, while there is a connection to each.
    fn recognise_guests(&self, deadline: &Deadline) -> Result<(), Error> {
        let Kin::Processes(home) = &self.kin else { return Ok(()) };
        let engine = self.engine(deadline)?;
        let Some(wires) = &engine.wires else { return Ok(()) };
        for (rank, peer) in home.peers.iter().enumerate() {
            if let Some(process) = wires.process(rank) {
                home.door.guests().recognise(peer, process);
            }
        }
        Ok(())
    }

    fn shares_memory(&self, deadline: &Deadline) -> bool {
        self.engine(deadline)
            .is_ok_and(|engine| engine.wires.as_ref().is_some_and(|wires| wires.shares_memory()))
    }

    /// Hands a file to every other rank, and takes the one that each hands out; by rank.
    fn pass_round(
        &self,
        file: &File,
        deadline: &Deadline,
    ) -> Result<Vec<Option<std::io::Result<File>>>, Error> {
        let others = || (0..self.world_size).filter(|&other| other != self.rank.index());
        let (mut unsent, mut missing): (Vec<usize>, Vec<usize>) = (others().collect(), others().collect());
        let mut files: Vec<Option<std::io::Result<File>>> = (0..self.world_size).map(|_| None).collect();
        let operation = || "sharing memory".to_owned();
        let mut watch = Watch::new(self.silence(), Instant::now());
        loop {
            let mut engine = self.engine(deadline)?;
            engine.check()?;
            let wires = engine.wires.as_mut().expect("a group of several ranks has connections");
            match swap(wires.as_mut(), file, &mut unsent, &mut missing, &mut files) {
                Ok(()) if unsent.is_empty() && missing.is_empty() => return Ok(files),
                Ok(()) => {}
                Err((peer, lost)) => engine.fail(lost.into_error(operation(), Rank(peer as u32))),
            }
            engine.check()?;
            let awaited = || {
                let ranks = others().filter(|other| unsent.contains(other) || missing.contains(other));
                ranks.map(|rank| Rank(rank as u32)).collect::<Vec<Rank>>()
            };
            let now = Instant::now();
            if watch.is_due(now) {
                engine.watch(&mut watch, operation(), &awaited(), now)?;
            }
            if deadline.remaining_at(now).is_zero() {
                let (missing, waited) = (awaited(), deadline.waited_at(now));
                let heard = engine.mail.heard(&missing);
                engine.fail(Error::Timeout { operation: operation(), waited, missing, heard });
            }
            engine.check()?;
            drop(engine);
            std::thread::sleep(super::BUSY_NAP);
        }
    }
}

/// Passes a file to whom it wasn't yet, and takes those that came, as far as that goes now; or says whose connection ended.
fn swap(
    wires: &mut dyn Transport,
    file: &File,
    unsent: &mut Vec<usize>,
    missing: &mut Vec<usize>,
    files: &mut [Option<std::io::Result<File>>],
) -> Result<(), (usize, Lost)> {
    let mut left = Vec::new();
    for to in unsent.drain(..) {
        if !wires.pass(to, file).map_err(|lost| (to, lost))? {
            left.push(to);
        }
    }
    *unsent = left;
    for &from in &*missing {
        files[from] = wires.take_passed(from).map_err(|lost| (from, lost))?;
    }
    missing.retain(|&from| files[from].is_none());
    Ok(())
}
