//! A rank before it meets the others.

use super::threads::Threads;
use super::{Worker, panics};
use crate::device::DeviceSpec;
use crate::error::Error;
use phalanx_comm::Group;
use phalanx_job::{Cause, Entered, Link, Pulse, Section, WorkerEnv};
use phalanx_tensor::{DebugSync, Device};
use phalanx_wire::Deadline;
use std::time::Duration;

/// What a process is in its run, before it has met the other ranks. See [`Worker::arrive`].
pub struct Arrival {
    place: Place,
    threads: Threads,
    pulse: Pulse,
    /// That the start goes on until it has joined.
    _start: Entered,
}

/// Which rank it is to be, and its device; tells of a panic.
struct Place {
    /// None where the environment gives no rank.
    env: Option<WorkerEnv>,
    device: Device,
}

impl Drop for Place {
    fn drop(&mut self) {
        if std::thread::panicking() {
            let (why, cause) = panics::why(&self.device);
            tell(self.env.as_ref(), why, cause);
        }
    }
}

/// How long whoever started the workers may take to hear of an error.
const PATIENCE: Duration = Duration::from_secs(2);

impl Arrival {
    pub(super) fn on(
        device: DeviceSpec,
        threads: Option<usize>,
        debug_sync: DebugSync,
    ) -> Result<Arrival, Error> {
        panics::listen();
        let env = WorkerEnv::from_env().map_err(|error| Error::Join(error.to_string()))?;
        if let Some(env) = env.as_ref().filter(|env| env.rank.0 == 0)
            && let Some(advice) = &env.advice
        {
            tracing::warn!("{advice}");
        }
        let threads = Threads::of(threads, env.as_ref());
        let pulse = env.as_ref().and_then(|env| env.pulse).map_or_else(Pulse::none, Pulse::inherited);
        let start = pulse.enter(Section::Start);
        // A batch system may let each task see GPUs of its own, which are counted anew in each. Where none is left for it, that of
        // its local rank is the one that is missing.
        let own = |visible| env.as_ref().map_or(0, |env| env.device_index(visible).unwrap_or(env.local_rank));
        let device = device.open(threads.first(), own, debug_sync);
        let device = device.inspect_err(|error| report(env.as_ref(), error))?;
        Ok(Arrival { place: Place { env, device }, threads, pulse, _start: start })
    }

    /// What to compute on, then as well.
    pub fn device(&self) -> &Device {
        &self.place.device
    }

    /// Meets the others.
    pub fn join(self) -> Result<Worker, Error> {
        let device = self.place.device.clone();
        match &self.place.env {
            Some(env) => Worker::meet(env, device, self.threads, self.pulse),
            None => Ok(Worker::on(Group::solo(), device, self.pulse)),
        }
    }

    /// Tells whoever started the workers why this one can't join.
    pub fn report(&self, error: &Error) {
        report(self.place.env.as_ref(), error);
    }
}

fn report(env: Option<&WorkerEnv>, error: &Error) {
    tell(env, error.to_string(), error.cause());
}

fn tell(env: Option<&WorkerEnv>, why: String, cause: Cause) {
    let Some((env, coordinator)) = env.and_then(|env| Some((env, env.coordinator?))) else { return };
    let Ok(pass) = env.pass() else { return };
    let (moves, soon) = (env.whereabouts.clone(), Deadline::after(PATIENCE));
    let link = Link::connect_following(&[coordinator], pass, env.rank, env.generation, moves, soon);
    // Where nobody listens, the exit code has to say it.
    let _ = link.and_then(|mut link| link.fail(why, cause));
}
