//! A pipeline over the devices of one process: a thread a device, and queues between them.

use super::check::check;
use super::parts::micro_batches;
use super::schedule::{Action, Schedule, ScheduleKind, Shape, Work};
use super::stage::{Carried, Link, Ran, Rank};
use super::timeline::Timeline;
use crate::error::Error;
use crate::local::{Local, Pass};
use phalanx_tensor::{Device, GradSink, LeafId, Tensor, autocast, autocast_dtype};
use std::collections::HashMap;
use std::ops::Range;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, SyncSender, channel, sync_channel};
use std::time::{Duration, Instant};

/// How long a stage may wait for another: a stage's work on one micro-batch takes no longer.
const PATIENCE: Duration = Duration::from_secs(300);

/// How long a stage looks for its next micro-batch before it sleeps: some times what being woken costs.
const SPIN: Duration = Duration::from_micros(100);

/// A pipeline over devices.
#[derive(Clone, Debug)]
pub struct PipelineConfig {
    /// The blocks of each stage of the row, and the device that holds each rank's: stage `s` lies on device `s % devices.len()`.
    pub blocks: Vec<Range<usize>>,
    /// A device a rank.
    pub devices: Vec<Device>,
    /// Which schedule.
    pub kind: ScheduleKind,
    /// Into how many parts each batch is cut.
    pub micro_batches: usize,
}

impl PipelineConfig {
    /// The schedule of this pipeline. Fails if there is none, with the reason.
    pub fn schedule(&self) -> Result<Schedule, Error> {
        let ranks = self.devices.len();
        let shape =
            Shape { ranks, chunks: self.blocks.len() / ranks.max(1), micro_batches: self.micro_batches };
        let schedule = Schedule::new(self.kind, shape)?;
        assert!(
            self.blocks.len() == schedule.stages(),
            "a pipeline of {} stages on {ranks} devices",
            self.blocks.len()
        );
        check(&schedule).expect("every schedule that is made plays to its end; its tests say so");
        Ok(schedule)
    }
}

/// Makes passes by a pipeline over the devices of this process. The model's blocks lie on those devices already
/// ([`phalanx_nn::Parameters::build_on`]).
pub struct Pipelined {
    config: PipelineConfig,
    schedule: Schedule,
    last: Option<Timeline>,
    alive: Vec<usize>,
}

impl Pipelined {
    /// Fails if there is no such schedule.
    pub fn new(config: PipelineConfig) -> Result<Pipelined, Error> {
        let schedule = config.schedule()?;
        Ok(Pipelined { config, schedule, last: None, alive: Vec::new() })
    }

    /// What each device did when in the last pass, in seconds.
    pub fn timeline(&self) -> Option<&Timeline> {
        self.last.as_ref()
    }

    /// The most micro-batches of which each device held the activations at a time in the last pass, counted a stage.
    pub fn alive(&self) -> &[usize] {
        &self.alive
    }

    /// The schedule.
    pub fn schedule(&self) -> &Schedule {
        &self.schedule
    }
}

/// What a stage's thread tells the one that waits for all.
struct Told(Sender<(LeafId, Tensor)>);

impl GradSink for Told {
    fn finished(&mut self, leaf: LeafId, grad: Tensor) {
        // Nobody listens any more where the pass has failed.
        let _ = self.0.send((leaf, grad));
    }
}

impl Local for Pipelined {
    fn pass(&mut self, pass: &Pass<'_>, sink: &mut dyn GradSink) -> Result<f64, Error> {
        let Pipelined { config, schedule, last, alive } = self;
        let (ranks, n) = (config.devices.len(), config.micro_batches);
        if pass.samples() == 0 {
            return Ok(0.0);
        }
        let parts = micro_batches(Some(&pass.input), Some(&pass.target), &pass.ctx, pass.weight, n);
        let since = Instant::now();
        let mut links = links(schedule);
        let (tell, told) = channel();
        // What holds for this thread holds for the stages'.
        let products = autocast_dtype();
        let ran: Result<Vec<Ran>, Error> = std::thread::scope(|scope| {
            let threads: Vec<_> = (0..ranks)
                .map(|rank| {
                    let (mut link, mut tell) = (links.remove(0), Told(tell.clone()));
                    let own = Rank {
                        schedule,
                        rank,
                        model: pass.model,
                        blocks: &config.blocks,
                        device: &config.devices[rank],
                        micro_batches: &parts,
                    };
                    let thread = std::thread::Builder::new().name(format!("stage-{rank}"));
                    thread
                        .spawn_scoped(scope, move || {
                            autocast(products, || own.run(&mut link, pass.loss, &mut tell, since))
                        })
                        .expect("the system has a thread for each stage of a pipeline")
                })
                .collect();
            drop(tell);
            // Ends when every stage's thread has.
            while let Ok((leaf, grad)) = told.recv() {
                sink.finished(leaf, grad);
            }
            let joined = threads.into_iter().map(|thread| match thread.join() {
                Ok(ran) => ran,
                Err(panic) => std::panic::resume_unwind(panic),
            });
            // A stage that lost its neighbour is a consequence: what the neighbour says counts first.
            let results: Vec<Result<Ran, Error>> = joined.collect();
            let cause = |error: &Error| !matches!(error, Error::StageLost { .. });
            let first = results.iter().position(|result| result.as_ref().is_err_and(cause));
            let mut results = results;
            match first {
                Some(first) => Err(results.swap_remove(first).expect_err("it is the first error")),
                None => results.into_iter().collect(),
            }
        });
        let ran = ran?;
        let loss = ran.iter().map(|ran| ran.loss).sum::<f64>() / pass.weight;
        *alive = ran.iter().map(|ran| ran.alive).collect();
        *last = Some(Timeline { ranks: ran.into_iter().map(|ran| ran.done).collect() });
        Ok(loss)
    }
}

/// The way from a stage to its neighbours, by the stage that sends and whether it sends forth.
pub(super) type Border = (usize, bool);

struct Queues {
    schedule_rank: usize,
    /// Whether every stage has a core, so that nobody is kept from one by who waits.
    spins: bool,
    to: HashMap<Border, SyncSender<Carried>>,
    from: HashMap<Border, Receiver<Carried>>,
}

/// A link a rank. Each queue holds a whole pass, so nobody waits to send.
fn links(schedule: &Schedule) -> Vec<Queues> {
    let Shape { ranks, micro_batches, .. } = schedule.shape();
    let spins = std::thread::available_parallelism().is_ok_and(|cores| cores.get() >= ranks);
    let mut links: Vec<Queues> = (0..ranks)
        .map(|rank| Queues { schedule_rank: rank, spins, to: HashMap::new(), from: HashMap::new() })
        .collect();
    let mut connect = |border: Border, receiver: usize| {
        let (from, to) = (schedule.rank_of(border.0), schedule.rank_of(receiver));
        if from != to {
            let (sender, taker) = sync_channel(micro_batches);
            links[from].to.insert(border, sender);
            links[to].from.insert(border, taker);
        }
    };
    for stage in 1..schedule.stages() {
        connect((stage - 1, true), stage);
        connect((stage, false), stage - 1);
    }
    links
}

pub(super) fn border(action: Action) -> Border {
    (action.stage, action.work == Work::Forward)
}

impl Link for Queues {
    fn send(&mut self, action: Action, made: Carried) -> Result<(), Error> {
        let lost = Error::StageLost { rank: self.schedule_rank, action: action.to_string(), waited: None };
        self.to[&border(action)].send(made).map_err(|_| lost)
    }

    fn receive(&mut self, action: Action, _: &Device) -> Result<Carried, Error> {
        let queue = &self.from[&border(action)];
        let since = Instant::now();
        while self.spins && since.elapsed() < SPIN {
            if let Ok(carried) = queue.try_recv() {
                return Ok(carried);
            }
            std::hint::spin_loop();
        }
        queue.recv_timeout(PATIENCE).map_err(|why| Error::StageLost {
            rank: self.schedule_rank,
            action: action.to_string(),
            waited: (why == RecvTimeoutError::Timeout).then_some(PATIENCE),
        })
    }
}
