//! Going on in place: a worker that loses others keeps its process and its state, and comes back with those that are left, or
//! with others in the place of the lost. What is done with the state is the trainer's business.

use super::{PATIENCE, Worker, addresses, locked};
use crate::error::Error;
use phalanx_comm::Rank;
use phalanx_job::{GoesOn, Link, Section};
use phalanx_wire::Deadline;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex};

/// As long as there is one, the worker goes on in place.
pub(crate) struct InPlace<'a>(&'a Worker);

impl Drop for InPlace<'_> {
    fn drop(&mut self) {
        // One that panics, or whose device is at fault, is lost as soon as its process ends. If it took this back before, the others would
        // be told in between that nobody goes on.
        let is_lost = std::thread::panicking() || self.0.fault_of_device().is_some();
        if self.0.in_place.fetch_sub(1, Ordering::Relaxed) == 1 && !is_lost {
            self.0.say_in_place(GoesOn::Not);
        }
    }
}

impl Worker {
    /// Says with whom this worker goes on from now on when others are lost, until what this returns is dropped. None where the run
    /// doesn't go on when some are lost.
    pub(crate) fn go_on_in_place(&self, with: GoesOn) -> Option<InPlace<'_>> {
        if !self.is_elastic {
            return None;
        }
        if self.in_place.fetch_add(1, Ordering::Relaxed) == 0 {
            self.say_in_place(with);
        }
        Some(InPlace(self))
    }

    fn say_in_place(&self, with: GoesOn) {
        if let Some(link) = &self.link {
            // Who can't hear it hears nothing of the run any more.
            let _ = locked(link).goes_on(with);
        }
    }

    /// What connects it to whoever leads the run, while it goes on in place.
    pub(super) fn in_place_link(&self) -> Option<&Arc<Mutex<Link>>> {
        self.link.as_ref().filter(|_| self.in_place.load(Ordering::Relaxed) > 0)
    }

    /// Whether somebody waits to come in, so that all ranks are to regroup.
    pub(crate) fn is_change_due(&self) -> bool {
        let Some(link) = self.link.as_ref().filter(|_| self.is_elastic) else { return false };
        locked(link).is_change_due()
    }

    /// Leaves the membership at hand because of this error, or because somebody waits to come in, and comes back in the next:
    /// [`Worker::group`] is another then, and the rank may be. An error that isn't another rank's fault is given back.
    pub(crate) fn regroup(&self, because: Option<Error>) -> Result<(), Error> {
        // Until they have met, ranks don't see of each other whether they are stopped; who has started them does.
        let _start = self.pulse.enter(Section::Start);
        let _waiting = self.pulse.wait();
        let is_loss = because.as_ref().is_none_or(Error::is_consequence);
        let link = self.in_place_link().filter(|_| is_loss);
        let nobody = || Error::Join("there is nobody to regroup with".into());
        let Some(link) = link else { return Err(because.unwrap_or_else(nobody)) };
        let mut silent: Vec<Rank> = because.iter().filter_map(Error::silent).collect();
        let (old, deadline) = (self.group(), Deadline::after(PATIENCE));
        loop {
            let (rank, roster) = match locked(link).rejoin(&silent, deadline) {
                Ok(place) => place,
                // Where not all go on in place, this rank ends as it would have without.
                Err(error) => return Err(because.unwrap_or(Error::Join(error.to_string()))),
            };
            match old.succeed(rank, roster.generation, addresses(&roster)?).map_err(Error::from) {
                Ok(group) => {
                    self.rank.store(rank.0, Ordering::Relaxed);
                    self.followed.store(false, Ordering::Relaxed);
                    // A GPU's kernels share nothing with other ranks' but the GPU.
                    if self.device.gpu().is_none() {
                        self.device.set_threads(self.threads.among(group.local_world_size()));
                    }
                    *locked(&self.group) = group;
                    return Ok(());
                }
                // One of them was lost before it came.
                Err(error @ (Error::Comm(_) | Error::Parallel(_))) if !deadline.expired() => {
                    silent = error.silent().into_iter().collect();
                }
                Err(error) => return Err(error),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::worker::threads::Threads;
    use phalanx_coord::{Coordinator, Notice};
    use phalanx_job::{Pulse, WorkerEnv, names};
    use phalanx_tensor::Device;
    use phalanx_wire::{Generation, Secret};
    use std::net::{Ipv4Addr, SocketAddr};
    use std::panic::{AssertUnwindSafe, catch_unwind};
    use std::sync::mpsc;

    /// The others would be refused, and end, though they could go on without it.
    #[test]
    fn a_rank_that_panics_does_not_say_first_that_it_does_not_go_on() {
        let folder = tempfile::tempdir().unwrap();
        let secret = folder.path().join("secret");
        let (id, any_port) = ("panics", SocketAddr::from((Ipv4Addr::LOCALHOST, 0)));
        let bound = Secret::load_or_create(&secret).unwrap().bind(id);
        let (sender, notices) = mpsc::channel();
        let coordinator = Coordinator::serve(any_port, bound, Generation(0), 1, move |_, notice| {
            let _ = sender.send(notice);
        });
        let address = coordinator.as_ref().unwrap().address().to_string();
        let variables = [
            (names::RANK, "0"),
            (names::WORLD_SIZE, "1"),
            (names::ELASTIC, "1"),
            (names::RUN_ID, id),
            (names::COORDINATOR, &address),
            (names::SECRET_FILE, secret.to_str().unwrap()),
        ];
        let get = |name: &str| variables.iter().find(|row| row.0 == name).map(|row| row.1.to_owned());
        let env = WorkerEnv::from_variables(get).unwrap().unwrap();
        let device = Device::cpu(1);
        let worker = Worker::meet(&env, device, Threads::Asked(1), Pulse::none()).unwrap();
        let panicked = catch_unwind(AssertUnwindSafe(|| {
            let _in_place = worker.go_on_in_place(GoesOn::WithThoseLeft);
            panic!("on purpose");
        }));
        assert!(panicked.is_err());
        // What is heard now was said after all that was said before.
        drop(worker.go_on_in_place(GoesOn::WithThoseLeft));
        locked(worker.link.as_ref().unwrap()).fail("the end".into(), phalanx_job::Cause::Own).unwrap();
        let told = notices.iter().take_while(|notice| !matches!(notice, Notice::Failed { .. }));
        let told: Vec<bool> = told
            .filter_map(|notice| match notice {
                Notice::InPlace(yes) => Some(yes),
                _ => None,
            })
            .collect();
        assert_eq!(told, [true, false], "taken back once, where it really was");
    }
}
