//! What a GPU device has beside its buffers.

use crate::gpu::conv;
use crate::gpu::landing::Landing;
use crate::lock::lock;
use phalanx_cuda::cublaslt::{Alignment, CublasLt, Product, Products};
use phalanx_cuda::{
    DeviceMemory, Driver, Error, Event, Gpu, GpuOptions, Nvrtc, Pinned, Priority, Proposals, Stream, Timing,
    Workspace,
};
use std::collections::HashSet;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, OnceLock};
use std::time::Duration;

/// What matrix products may use: as much as the largest GPUs are said to want.
const WORKSPACE_BYTES: usize = 32 << 20;

/// How long a proposal is measured for, and how often it is run at most.
const MEASURED_FOR: Duration = Duration::from_micros(500);
const MOST_RUNS: u32 = 32;

/// A GPU, opened, with what its kernels share.
pub(crate) struct Engine {
    /// Matrix products, and what they use as they like.
    pub(super) products: Mutex<Products>,
    pub(super) workspace: DeviceMemory,
    /// Products that cuBLASLt was found to have no way for, each with the alignment of what it was asked for.
    pub(super) unplanned: Mutex<HashSet<(Product, Alignment)>>,
    /// Convolutions, once there was one.
    pub(super) convolutions: Mutex<Option<conv::Opened>>,
    /// Whether factors of float32 are rounded before they are multiplied.
    rounds_factors: AtomicBool,
    /// Whether the libraries' proposals are measured for what is computed for the first time.
    searches: AtomicBool,
    /// Pinned buffers that values go up through.
    pub(super) staging: Mutex<Vec<Pinned>>,
    /// Where values land that go up beside what is computed.
    pub(super) landings: Mutex<Vec<Landing>>,
    /// The streams of what comes up from the host, and goes down to it, beside what is computed, once anything has.
    up: OnceLock<Stream>,
    down: OnceLock<Stream>,
    /// Events that stand for nothing any more.
    pub(super) spare_events: Mutex<Vec<Event>>,
    /// A number that kernels set to 1 where a label or a row number isn't one.
    pub(super) bad_index: DeviceMemory,
    /// Last, since all that is above ends on its streams.
    gpu: Gpu,
}

impl Drop for Engine {
    fn drop(&mut self) {
        // The libraries' handles end on the GPU that is current. A failure is one that others have reported.
        let _ = self.gpu.make_current();
    }
}

impl Engine {
    /// How many GPUs there are, where all is there that each of them needs.
    pub(crate) fn count(options: &GpuOptions) -> Result<u32, Error> {
        let driver = Driver::open(&options.libraries)?;
        Nvrtc::open(&options.libraries)?;
        CublasLt::open(&options.libraries)?;
        Ok(driver.gpus())
    }

    pub(crate) fn open(index: u32, options: &GpuOptions) -> Result<Engine, Error> {
        let gpu = Gpu::open(index, options)?;
        let bad_index = gpu.alloc(gpu.compute(), size_of::<i32>())?;
        gpu.make_current()?;
        let products = Mutex::new(gpu.cublaslt()?.products(WORKSPACE_BYTES)?);
        let workspace = gpu.alloc(gpu.compute(), WORKSPACE_BYTES)?;
        let (unplanned, convolutions) = (Mutex::default(), Mutex::new(None));
        Ok(Engine {
            gpu,
            products,
            workspace,
            unplanned,
            convolutions,
            rounds_factors: AtomicBool::new(false),
            searches: AtomicBool::new(false),
            staging: Mutex::default(),
            landings: Mutex::default(),
            up: OnceLock::new(),
            down: OnceLock::new(),
            spare_events: Mutex::default(),
            bad_index,
        })
    }

    pub(crate) fn gpu(&self) -> &Gpu {
        &self.gpu
    }

    pub(crate) fn set_rounds_factors(&self, rounds: bool) {
        self.rounds_factors.store(rounds, Ordering::Relaxed);
    }

    pub(super) fn rounds_factors(&self) -> bool {
        self.rounds_factors.load(Ordering::Relaxed)
    }

    pub(crate) fn set_searches(&self, searches: bool) {
        self.searches.store(searches, Ordering::Relaxed);
    }

    /// Whether proposals are to be measured for this: where it is computed for the first time, nothing was kept of a search before,
    /// which is taken else, and no pass is recorded, in which nothing can be measured.
    #[track_caller]
    pub(super) fn is_to_search<P: Proposals>(
        &self,
        among: &mut P,
        what: &P::Description,
        on: &P::Operands,
    ) -> bool {
        if !self.searches.load(Ordering::Relaxed) || among.is_chosen(what, on) {
            return false;
        }
        let is_kept = match self.gpu.choices().recall(among, what, on) {
            // Whoever computes it next tells.
            Err(Error::LibraryCall { .. }) => true,
            recalled => succeeded(recalled),
        };
        !is_kept && !succeeded(self.stream().is_capturing())
    }

    /// Measures proposals, and has the fastest taken from now on; none where all are refused, which whoever computes it next tells.
    ///
    /// # Safety
    /// As for [`Proposals::search`], on the compute stream.
    #[track_caller]
    pub(super) unsafe fn search<P: Proposals>(
        &self,
        among: &mut P,
        what: &P::Description,
        on: &P::Operands,
        workspace: &mut Workspace<'_>,
    ) {
        let [begin, end] = [(); 2].map(|()| succeeded(self.gpu.event(Timing::Yes)));
        let stream = self.stream();
        let mut clock = |run: &mut dyn FnMut() -> Result<(), Error>| {
            // The first brings what it needs.
            run()?;
            stream.synchronize()?;
            let mut measured = |runs: u32| {
                stream.record(&begin)?;
                (0..runs).try_for_each(|_| run())?;
                stream.record(&end)?;
                end.synchronize()?;
                Ok(end.since(&begin)? / runs)
            };
            let once: Duration = measured(1)?;
            let runs = MEASURED_FOR.as_nanos() / once.as_nanos().max(1);
            Ok(once.min(measured(runs.clamp(1, MOST_RUNS.into()) as u32)?))
        };
        let choices = self.gpu.choices();
        // SAFETY: the caller's promise.
        match unsafe { choices.search(among, what, on, workspace, stream.handle(), &mut clock) } {
            Ok(chosen) => tracing::debug!(
                "{what}: proposal {} of {} that were measured, {:?} where the first took {:?}",
                chosen.proposal,
                chosen.measured,
                chosen.best,
                chosen.first
            ),
            Err(Error::LibraryCall { .. }) => {}
            Err(error) => panic!("{error}"),
        }
    }

    /// The stream of all work on tensors.
    pub(super) fn stream(&self) -> &Stream {
        self.gpu.compute()
    }

    /// The stream of what comes up from the host beside what is computed.
    #[track_caller]
    pub(crate) fn up(&self) -> &Stream {
        self.up.get_or_init(|| self.new_stream())
    }

    /// That of what goes down.
    #[track_caller]
    pub(crate) fn down(&self) -> &Stream {
        self.down.get_or_init(|| self.new_stream())
    }

    #[track_caller]
    fn new_stream(&self) -> Stream {
        succeeded(self.gpu.stream(Priority::High))
    }

    /// Gives a stream copies, behind all that the compute stream has now. The event lies behind them. Panics while a pass is recorded,
    /// which they can't be part of.
    #[track_caller]
    pub(crate) fn beside(&self, stream: &Stream, copies: impl FnOnce(&Stream) -> Result<(), Error>) -> Event {
        let is_recorded = succeeded(self.stream().is_capturing());
        assert!(!is_recorded, "copies beside what a GPU computes can't be part of a pass that is recorded");
        let spare = lock(&self.spare_events).pop();
        let event = spare.unwrap_or_else(|| succeeded(self.gpu.event(Timing::No)));
        let given = self.stream().record(&event).and_then(|()| stream.wait(&event));
        let given = given.and_then(|()| copies(stream)).and_then(|()| stream.record(&event));
        succeeded(given.inspect_err(|_| {
            // Some may be under way that no event stands for. Where this fails, too, the GPU is lost.
            let _ = self.gpu.synchronize();
        }));
        event
    }

    /// Takes an event back that nobody will wait for any more.
    pub(crate) fn spare_event(&self, event: Event) {
        lock(&self.spare_events).push(event);
    }

    /// What it holds itself, beside what tensors lie in and what lands.
    pub(crate) fn own_bytes(&self) -> usize {
        self.workspace.bytes() + self.bad_index.bytes()
    }

    /// Panics where a kernel has met a label that is no class, or the number of a place or row that isn't there; waits for all work.
    #[track_caller]
    pub(crate) fn check_indices(&self) {
        let found = succeeded(self.stream().read(&self.bad_index, 0..size_of::<i32>()));
        if found != [0; 4] {
            succeeded(self.stream().fill(&self.bad_index, 0..size_of::<i32>(), 0));
            panic!(
                "a label was no class of its scores, an id no row of its table, or a place beyond its dimension: results are NaN, or 0 where they are whole numbers"
            );
        }
    }
}

/// What a call gives. A GPU that fails is no error that an operation could tell of by its type: the process is what ends.
#[track_caller]
pub(crate) fn succeeded<T>(result: Result<T, Error>) -> T {
    result.unwrap_or_else(|error| panic!("{error}"))
}
