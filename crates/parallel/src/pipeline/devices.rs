//! A pipeline over the devices of one process: a thread a device, and queues between them.
//!
//! The first device's thread is the caller's, to which the others tell their gradients, too: it hands them on between its own
//! actions, and while it waits. So what the strategy does with a gradient, such as to begin a bucket's sum, takes its time.

use super::check::check;
use super::parts::micro_batches;
use super::schedule::{Action, Schedule, ScheduleKind, Shape, Work};
use super::stage::{Carried, Link, Ran, Rank};
use super::timeline::Timeline;
use crate::device_threads::DeviceThreads;
use crate::error::Error;
use crate::local::{Local, Pass};
use phalanx_tensor::{Device, GradSink, LeafId, Tensor, autocast, autocast_dtype};
use std::cell::RefCell;
use std::collections::HashMap;
use std::ops::Range;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, SyncSender, TryRecvError, channel, sync_channel};
use std::thread::{available_parallelism, yield_now};
use std::time::{Duration, Instant};

/// How long a stage may wait for another: a stage's work on one micro-batch takes no longer.
const PATIENCE: Duration = Duration::from_secs(300);

/// How long a stage looks for its next micro-batch and nothing else: what being woken costs, to both.
const SPIN: Duration = Duration::from_micros(50);

/// How long it looks in all before it sleeps, with whoever else wants its core before it: what a stage of a small network takes.
const LOOK: Duration = Duration::from_millis(1);

/// How long the caller's thread sleeps at most before it looks for gradients of others.
const NAP: Duration = Duration::from_millis(1);

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
    threads: DeviceThreads,
    /// Whether every stage has a core, if the worker has the machine for itself.
    spins: bool,
    last: Option<Timeline>,
    alive: Vec<usize>,
}

impl Pipelined {
    /// Fails if there is no such schedule, or no thread for each device.
    pub fn new(config: PipelineConfig) -> Result<Pipelined, Error> {
        let schedule = config.schedule()?;
        let threads = DeviceThreads::new(config.devices.len().saturating_sub(1), "stage")?;
        // To ask takes the system longer than a stage of a small network takes for a micro-batch.
        let spins = available_parallelism().is_ok_and(|cores| cores.get() >= config.devices.len());
        Ok(Pipelined { config, schedule, threads, spins, last: None, alive: Vec::new() })
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

/// What another device's thread tells the caller's.
struct Told(Sender<(LeafId, Tensor)>);

impl GradSink for Told {
    fn finished(&mut self, leaf: LeafId, grad: Tensor) {
        // Nobody listens any more where the pass has failed.
        let _ = self.0.send((leaf, grad));
    }
}

/// What the caller's thread is told, and whom it tells in turn.
struct Hears<'a> {
    told: Receiver<(LeafId, Tensor)>,
    sink: RefCell<&'a mut dyn GradSink>,
}

impl Hears<'_> {
    fn tell(&self, leaf: LeafId, grad: Tensor) {
        self.sink.borrow_mut().finished(leaf, grad);
    }

    /// Hands on what it was told so far.
    fn hand_on(&self) {
        while let Ok((leaf, grad)) = self.told.try_recv() {
            self.tell(leaf, grad);
        }
    }
}

impl GradSink for &Hears<'_> {
    fn finished(&mut self, leaf: LeafId, grad: Tensor) {
        self.hand_on();
        self.tell(leaf, grad);
    }
}

impl Local for Pipelined {
    fn pass(&mut self, pass: &Pass<'_>, sink: &mut dyn GradSink) -> Result<f64, Error> {
        let Pipelined { config, schedule, threads, spins, last, alive } = self;
        if pass.samples() == 0 {
            return Ok(0.0);
        }
        let n = config.micro_batches;
        let parts = micro_batches(Some(&pass.input), Some(&pass.target), &pass.ctx, pass.weight, n);
        let since = Instant::now();
        let of = |rank: usize| Rank {
            schedule,
            rank,
            model: pass.model,
            blocks: &config.blocks,
            device: &config.devices[rank],
            micro_batches: &parts,
        };
        let (tell, told) = channel();
        let mut links = links(schedule, *spins).into_iter();
        let own_link = links.next().expect("a pipeline has a rank");
        let others = links.enumerate().map(|(i, link)| (i + 1, link, Told(tell.clone()))).collect();
        drop(tell);
        let hears = Hears { told, sink: RefCell::new(sink) };
        // What holds for this thread holds for the others.
        let products = autocast_dtype();
        let other = |(rank, mut link, mut tell): (usize, Queues, Told)| {
            autocast(products, || of(rank).run(&mut link, &pass.loss, &mut tell, since))
        };
        let (own, others) = threads.run(others, other, || {
            let mut link = Listening { queues: own_link, hears: &hears };
            let ran = of(0).run(&mut link, &pass.loss, &mut &hears, since);
            // A neighbour that waits for what doesn't come is told so.
            drop(link);
            // Ends when every other has.
            while let Ok((leaf, grad)) = hears.told.recv() {
                hears.tell(leaf, grad);
            }
            ran
        });
        let mut results: Vec<Result<Ran, Error>> = std::iter::once(own).chain(others).collect();
        // A stage that lost its neighbour is a consequence: what the neighbour says counts first.
        let cause = |error: &Error| !matches!(error, Error::StageLost { .. });
        if let Some(first) = results.iter().position(|result| result.as_ref().is_err_and(cause)) {
            return Err(results.swap_remove(first).expect_err("it is the first error"));
        }
        let ran = results.into_iter().collect::<Result<Vec<Ran>, Error>>()?;
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
    spins: bool,
    to: HashMap<Border, SyncSender<Carried>>,
    from: HashMap<Border, Receiver<Carried>>,
}

/// A link a rank. Each queue holds a whole pass, so nobody waits to send.
fn links(schedule: &Schedule, spins: bool) -> Vec<Queues> {
    let Shape { ranks, micro_batches, .. } = schedule.shape();
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

impl Queues {
    /// Waits for what `action` made; calls `meanwhile` as long as it looks, and before each `nap`.
    fn wait(&self, action: Action, nap: Duration, meanwhile: impl Fn()) -> Result<Carried, Error> {
        let queue = &self.from[&border(action)];
        let since = Instant::now();
        let mut looked = Duration::ZERO;
        while self.spins && looked < LOOK {
            match queue.try_recv() {
                Ok(carried) => return Ok(carried),
                Err(TryRecvError::Disconnected) => break,
                Err(TryRecvError::Empty) => {}
            }
            if looked < SPIN {
                std::hint::spin_loop();
            } else {
                meanwhile();
                yield_now();
            }
            looked = since.elapsed();
        }
        let lost = |waited| Error::StageLost { rank: self.schedule_rank, action: action.to_string(), waited };
        loop {
            meanwhile();
            match queue.recv_timeout(nap) {
                Ok(carried) => return Ok(carried),
                Err(RecvTimeoutError::Disconnected) => return Err(lost(None)),
                Err(RecvTimeoutError::Timeout) if since.elapsed() >= PATIENCE => {
                    return Err(lost(Some(PATIENCE)));
                }
                Err(RecvTimeoutError::Timeout) => {}
            }
        }
    }
}

impl Link for Queues {
    fn send(&mut self, action: Action, made: Carried) -> Result<(), Error> {
        let lost = Error::StageLost { rank: self.schedule_rank, action: action.to_string(), waited: None };
        self.to[&border(action)].send(made).map_err(|_| lost)
    }

    fn receive(&mut self, action: Action, _: &Device) -> Result<Carried, Error> {
        self.wait(action, PATIENCE, || ())
    }
}

/// The link of the caller's thread.
struct Listening<'a, 's> {
    queues: Queues,
    hears: &'a Hears<'s>,
}

impl Link for Listening<'_, '_> {
    fn send(&mut self, action: Action, made: Carried) -> Result<(), Error> {
        self.queues.send(action, made)
    }

    fn receive(&mut self, action: Action, _: &Device) -> Result<Carried, Error> {
        self.queues.wait(action, NAP, || self.hears.hand_on())
    }

    fn progress(&mut self) {
        self.hears.hand_on();
    }
}
