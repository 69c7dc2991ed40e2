//! Ranks that share a device, each a thread: two at half the batch have the losses of one.

use super::{Extent, Finding, Open, sheltered};
use crate::error::Error;
use crate::event::{Event, Observer};
use crate::trainer::Trainer;
use crate::worker::Worker;
use phalanx_comm::Group;
use phalanx_data::{Places, Silent, View, open};
use phalanx_nn::models::MnistNet;
use phalanx_nn::optim::Sgd;
use std::sync::Mutex;
use std::thread;

/// What losses may be off by: roundings of float32 in another order, growing from step to step.
const TOLERANCE: f64 = 1e-4;
/// Samples of a step of all ranks together.
const BATCH: usize = 16;

/// Runs `f` as `n` ranks, each with a device of its own. The first error, by rank, is returned when all have ended.
pub(super) fn on_ranks(
    n: usize,
    open: Open<'_>,
    f: impl Fn(Worker) -> Result<(), Error> + Sync,
) -> Result<(), Error> {
    let f = &f;
    let run = |group: Group| {
        let held = group.clone();
        let result = open(n).and_then(|device| f(Worker::with_device(group, device)));
        // A rank that fails leaves its group, so that the others don't wait for it.
        if let Err(error) = &result {
            held.abort(&error.to_string());
        }
        result
    };
    let results: Vec<Result<(), Error>> = thread::scope(|scope| {
        let ranks: Vec<_> =
            Group::threads(n).into_iter().map(|group| scope.spawn(move || run(group))).collect();
        let joined = ranks.into_iter().enumerate();
        joined.map(|(rank, thread)| thread.join().unwrap_or(Err(Error::Panicked { rank }))).collect()
    });
    let mut errors: Vec<Error> = results.into_iter().filter_map(Result::err).collect();
    errors.sort_by_key(Error::is_consequence);
    errors.into_iter().next().map_or(Ok(()), Err)
}

/// Notes the losses of a run.
pub(super) struct Losses<'a>(pub(super) &'a Mutex<Vec<f64>>);

impl Observer for Losses<'_> {
    fn event(&mut self, event: &Event) {
        if let Event::Step { loss, .. } = event {
            self.0.lock().expect("nobody panics while it holds this").push(*loss);
        }
    }
}

pub(super) fn equality(open: Open<'_>, extent: Extent) -> Finding {
    let steps = match extent {
        Extent::Whole => 20,
        Extent::Quick => 2,
    };
    let runs = [1, 2].map(|ranks| sheltered(|| losses(ranks, steps, open)));
    let (apart, failure) = match runs {
        [Ok(Ok(one)), Ok(Ok(two))] => {
            let apart = one.iter().zip(&two).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max);
            let same = one.len() == two.len() && apart <= TOLERANCE;
            (apart, (!same).then(|| format!("one rank has the losses {one:?}, two have {two:?}")))
        }
        runs => {
            let why = |run: Result<Result<_, Error>, String>| match run {
                Ok(Ok(_)) => None,
                Ok(Err(error)) => Some(error.to_string()),
                Err(words) => Some(words),
            };
            (0.0, runs.into_iter().find_map(why))
        }
    };
    let name = "two ranks on the device, against one".to_owned();
    Finding::Run { name, steps, apart, tolerance: TOLERANCE, failure }
}

/// Those of a run with dropout over the first digits.
fn losses(ranks: usize, steps: usize, device: Open<'_>) -> Result<Vec<f64>, Error> {
    let losses = Mutex::default();
    on_ranks(ranks, device, |worker| {
        let data = open("mnist-mini", View::default(), &Places::from_env(None), &mut Silent)?;
        let trainer = Trainer { steps: Some(steps as u64), batch_size: BATCH / ranks, ..Trainer::default() };
        let sgd = Sgd { momentum: 0.5, ..Sgd::new(0.05) };
        let mut net = MnistNet::new(0.5);
        trainer.fit(&worker, &mut net, sgd, data.train, None, &mut Losses(&losses)).map(drop)
    })?;
    Ok(losses.into_inner().expect("nobody panics while it holds this"))
}
