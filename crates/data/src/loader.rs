//! Batches in the order of the sampler, prepared ahead of the step that needs them.
//!
//! Thread t of T prepares steps t, t + T, t + 2T and so on, each into a queue of its own, and the training loop takes from the
//! queues in turn. So the order doesn't depend on the number of threads, and neither do the batches, as each is a function of
//! its step. Without threads a batch is filled when it is asked for: small images cost some ten microseconds, which is less
//! than a second thread takes from the ranks of a full machine.

use crate::batch::{Batch, Pool};
use crate::dataset::Dataset;
use crate::error::{Error, Result};
use crate::sampler::Sampler;
use crate::supply::Supply;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, sync_channel};
use std::thread::{self, JoinHandle};
use std::time::Duration;

/// How batches are prepared.
#[derive(Clone, Copy, Debug)]
pub struct LoaderOptions {
    /// How many threads prepare batches; 0, the default, fills them in the training loop.
    pub threads: usize,
    /// How many batches each thread may be ahead; at least 1, by default 2. No meaning without threads.
    pub ahead: usize,
    /// How long the training loop waits for a batch; by default five minutes.
    pub timeout: Duration,
}

impl Default for LoaderOptions {
    fn default() -> LoaderOptions {
        LoaderOptions { threads: 0, ahead: 2, timeout: Duration::from_secs(300) }
    }
}

/// Gives the batches of one rank, epoch by epoch.
///
/// ```
/// use phalanx_data::{ExactSampler, LinearRegression, Loader, LoaderOptions, Order};
/// let sampler = ExactSampler { len: 64, world_size: 1, rank: 0, batch_size: 24, order: Order::Shuffled { seed: 1 } };
/// let loader = Loader::new(LinearRegression::new(64), sampler, LoaderOptions { threads: 2, ..Default::default() });
/// let sizes: Vec<usize> = loader.epoch(0)?.map(|batch| Ok(batch?.len())).collect::<phalanx_data::Result<_>>()?;
/// assert_eq!(sizes, [24, 24, 16]);
/// # Ok::<(), phalanx_data::Error>(())
/// ```
pub struct Loader {
    work: Arc<Work>,
    options: LoaderOptions,
}

/// What the threads share.
struct Work {
    supply: Supply,
    sampler: Box<dyn Sampler>,
    pool: Arc<Pool>,
}

impl Loader {
    /// A loader of what `sampler` takes from `dataset` (an `Arc<dyn Dataset>` is a dataset, too).
    pub fn new(
        dataset: impl Dataset + 'static,
        sampler: impl Sampler + 'static,
        options: LoaderOptions,
    ) -> Loader {
        Loader::of(Supply::on_host(Arc::new(dataset)), sampler, options)
    }

    /// The same, whose batches are made where `supply` says.
    pub fn of(supply: Supply, sampler: impl Sampler + 'static, options: LoaderOptions) -> Loader {
        // A batch in each queue's slots, one in the hands of each thread, one in the loop's and one to spare.
        let pool = Arc::new(Pool::new(options.threads * (options.ahead.max(1) + 1) + 2));
        Loader { work: Arc::new(Work { supply, sampler: Box::new(sampler), pool }), options }
    }

    /// How many batches an epoch has.
    pub fn steps_per_epoch(&self) -> usize {
        self.work.sampler.steps_per_epoch()
    }

    /// The samples that the batches are taken from.
    pub fn dataset(&self) -> &dyn Dataset {
        &**self.work.supply.dataset()
    }

    /// The batches of epoch `epoch`.
    ///
    /// # Errors
    /// [`Error::Thread`] if the system gives no thread. The batches have errors of their own.
    pub fn epoch(&self, epoch: u64) -> Result<Batches> {
        self.epoch_from(epoch, 0)
    }

    /// The batches of epoch `epoch` from step `first` on: what a resumed run still has to do.
    ///
    /// # Errors
    /// As [`Loader::epoch`].
    pub fn epoch_from(&self, epoch: u64, first: usize) -> Result<Batches> {
        let steps = self.steps_per_epoch();
        let mut threads = Vec::with_capacity(self.options.threads);
        for t in 0..self.options.threads.min(steps.saturating_sub(first)) {
            let (queue, batches) = sync_channel(self.options.ahead.max(1));
            let work = self.work.clone();
            let every = self.options.threads;
            let handle = thread::Builder::new()
                .name(format!("loader-{t}"))
                .spawn(move || work.run(&queue, epoch, (first + t..steps).step_by(every)))
                .map_err(|error| Error::Thread { error })?;
            threads.push(Preparer { batches, handle: Some(handle) });
        }
        let timeout = self.options.timeout;
        Ok(Batches { work: self.work.clone(), threads, timeout, epoch, first, next: first, steps })
    }
}

impl Work {
    /// Fills batch after batch until all are done or nobody wants them.
    fn run(&self, queue: &SyncSender<Result<Batch>>, epoch: u64, steps: impl Iterator<Item = usize>) {
        for step in steps {
            let batch = self.prepare(epoch, step);
            if queue.send(batch).is_err() {
                return;
            }
        }
    }

    fn prepare(&self, epoch: u64, step: usize) -> Result<Batch> {
        Batch::prepare(&self.supply, &*self.sampler, &self.pool, epoch, step)
    }
}

/// The batches of one epoch, in order. After [`Error::LoaderStalled`] there are no more.
///
/// Dropping it closes the queues, and each thread ends once it has finished the batch at hand. Nobody waits for that: a thread
/// that hangs in a dead file system must not hang the training loop as well.
pub struct Batches {
    work: Arc<Work>,
    threads: Vec<Preparer>,
    timeout: Duration,
    epoch: u64,
    first: usize,
    next: usize,
    steps: usize,
}

/// A thread, and the queue that it fills.
struct Preparer {
    batches: Receiver<Result<Batch>>,
    /// Taken when the thread is found to have panicked.
    handle: Option<JoinHandle<()>>,
}

impl Iterator for Batches {
    type Item = Result<Batch>;

    fn next(&mut self) -> Option<Result<Batch>> {
        let step = self.next;
        if step >= self.steps {
            return None;
        }
        self.next += 1;
        let n_threads = self.threads.len();
        if n_threads == 0 {
            return Some(self.work.prepare(self.epoch, step));
        }
        let preparer = &mut self.threads[(step - self.first) % n_threads];
        Some(match preparer.batches.recv_timeout(self.timeout) {
            Ok(batch) => batch,
            Err(RecvTimeoutError::Timeout) => {
                // The late batch would be taken for the one of a later step.
                self.next = self.steps;
                Err(Error::LoaderStalled { epoch: self.epoch, step, waited: self.timeout })
            }
            Err(RecvTimeoutError::Disconnected) => {
                // A thread that leaves before its last step has panicked: a bug in a dataset or sampler, that is the
                // training loop's as well.
                let handle = preparer.handle.take().expect("a thread panics once");
                match handle.join() {
                    Err(panic) => std::panic::resume_unwind(panic),
                    Ok(()) => unreachable!("loader thread ended before step {step}"),
                }
            }
        })
    }

    fn size_hint(&self) -> (usize, Option<usize>) {
        let left = self.steps.saturating_sub(self.next);
        (left, Some(left))
    }
}
