//! The first steps of a run, made to see what its workers would hold and tell each other: on GPUs that aren't there ([`AbsentGpu`]), where
//! nothing is computed and everything is accounted for, or on this machine's cores, where it is computed.
//!
//! It is the run itself, with its trainer, strategies and collectives, and a thread in the place of each worker's process. So what doesn't
//! fit ends it in the words that the run would end in.

use crate::error::Error;
use crate::event::{Event, Observer};
use crate::recipe::{LaidOut, Recipe};
use crate::trainer::{State, Trainer, Watch};
use crate::worker::{Worker, cores, on_threads};
use phalanx_data::Split;
use phalanx_tensor::{AbsentGpu, Device, GpuOptions};
use std::sync::Mutex;
use std::time::Duration;

/// On what a run is rehearsed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stage {
    /// The cores of this machine, shared out among the workers.
    Cpu,
    /// A GPU of this kind for each worker.
    Gpus(AbsentGpu),
}

/// What one worker had of its device after the last step.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Held {
    /// What for, in words, and how many bytes. On a CPU these are those of tensors; the data set and the program come to them.
    pub parts: Vec<(&'static str, u64)>,
}

impl Held {
    /// All its bytes.
    pub fn bytes(&self) -> u64 {
        self.parts.iter().map(|(_, bytes)| bytes).sum()
    }
}

/// What came of a rehearsal.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Rehearsed {
    /// What each worker held, by its rank.
    pub workers: Vec<Held>,
    /// How many numbers the model learns.
    pub parameters: usize,
    /// Samples of an epoch.
    pub samples: usize,
    /// Steps of an epoch.
    pub steps_per_epoch: u64,
    /// Bytes that the first worker's GPU sends to others in a step, as rings have it; none where workers tell each other by way of their
    /// hosts, which nobody counts.
    pub sent: Option<u64>,
    /// Samples of a step, of all workers.
    pub step_samples: u64,
    /// How long a step took; without a meaning where nothing was computed.
    pub step: Duration,
}

/// The first takes memory, the second is recorded where passes are, and those after it are replays.
const STEPS: u64 = 4;

/// Makes the first steps of a recipe with so many workers.
///
/// # Errors
/// What the run would end with: a model that doesn't go with the workers, or memory that there isn't.
pub fn rehearse(recipe: &Recipe, data: &Split, workers: usize, stage: Stage) -> Result<Rehearsed, Error> {
    recipe.check_classes(data.train.target())?;
    recipe.check_workers(workers)?;
    let open = |rank: usize| match stage {
        Stage::Cpu => {
            let share = (cores() / workers).max(1);
            Ok(Device::cpu(if recipe.train.threads > 0 { recipe.train.threads } else { share }))
        }
        Stage::Gpus(kind) => {
            let options = GpuOptions { absent: Some(kind), ..GpuOptions::default() };
            Device::cuda(rank as u32, &options)
        }
    };
    let devices: Vec<Device> = (0..workers).map(open).collect::<Result<_, _>>()?;
    let rehearsed = Mutex::new(Rehearsed::default());
    let went = on_threads(workers, |group| {
        let device = &devices[group.rank().index()];
        let worker = Worker::with_device(group, device.clone());
        let LaidOut { model, parameters, local, mesh, .. } =
            recipe.lay_out(device, data.train.input_dims())?;
        let trainer = recipe.trainer()?;
        // However short the run is; and nothing is judged.
        let epochs = trainer.epochs.max(STEPS);
        let (metrics, watch) = (Vec::new(), Watch::Loss);
        let trainer = trainer.without_judgement();
        let trainer = Trainer { steps: Some(STEPS), epochs, local, mesh, metrics, watch, ..trainer };
        let state = State::start(recipe.rule()?)?;
        let mut watching = Watching { devices: &devices, sent: None, seen: Rehearsed::default() };
        trainer.resume(
            &worker,
            model.as_ref(),
            parameters,
            state,
            data.train.clone(),
            None,
            &mut watching,
        )?;
        if worker.is_first() {
            *rehearsed.lock().unwrap_or_else(|poisoned| poisoned.into_inner()) = watching.seen;
        }
        Ok(())
    });
    if let Some(lacked) = devices.iter().find_map(Device::lacked) {
        return Err(Error::OutOfMemory(Box::new(lacked.clone())));
    }
    went?;
    let mut seen = rehearsed.into_inner().unwrap_or_else(|poisoned| poisoned.into_inner());
    seen.sent = seen.sent.filter(|&bytes| workers == 1 || bytes > 0);
    Ok(seen)
}

/// Looks at what all workers' devices hold, whenever the first has made a step: itself between two of them, the others wherever they are
/// in one. After the first two of them none takes more, but for batches on their way.
struct Watching<'a> {
    devices: &'a [Device],
    /// What the first had sent after its last step.
    sent: Option<u64>,
    seen: Rehearsed,
}

impl Observer for Watching<'_> {
    fn event(&mut self, event: &Event) {
        match *event {
            Event::Start { parameters, steps_per_epoch, samples, .. } => {
                self.seen = Rehearsed { parameters, samples, steps_per_epoch, ..Rehearsed::default() };
            }
            Event::Step { step, samples, ms, .. } => {
                if step == 0 {
                    self.seen.step_samples = samples;
                }
                let held = self.devices.iter().map(|device| Held { parts: device.holdings() });
                self.seen.workers = held.collect();
                self.seen.step = Duration::from_secs_f64(ms / 1e3);
                let before = self.sent;
                self.sent = self.devices[0].gpu().and_then(|gpu| gpu.sent_bytes());
                // Of what is sent in replays nobody is told.
                let in_step = self.sent.zip(before).map(|(now, before)| now - before);
                self.seen.sent = self.seen.sent.max(in_step);
            }
            _ => {}
        }
    }
}
