//! A device: where tensors live and kernels run: the threads of this machine, or a GPU of it.

use crate::account::{Account, Beside, Lack, OutOfMemory, Purpose};
use crate::cpu::arch::Arch;
use crate::cpu::conv::Plan;
use crate::gpu::{Engine, succeeded};
use crate::graph::Node;
use crate::lock::lock;
use crate::pool::Pool;
use crate::profile::{KernelTime, Profile, Timer};
use crate::replay::{KnownRoom, Private, Room};
use crate::shape::Order;
use crate::storage::{Buffer, Memory};
use phalanx_cuda::{DeviceMemory, Error, GpuOptions, Stream, Timed};
use std::cell::RefCell;
use std::ops::{Deref, DerefMut, Range};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock};

/// A handle to a device: what computes there, and the buffers that wait to be used again. Cloning gives another handle to the
/// same device; two devices made apart share nothing but what computes.
#[derive(Clone)]
pub struct Device(Arc<Shared>);

struct Shared {
    backend: Backend,
    /// Compute threads of the host; a GPU's host side has one, the caller's.
    pool: Pool,
    arch: Arch,
    /// What its memory is held for.
    account: Arc<Account>,
    /// What was told when it first had no memory left.
    lacked: OnceLock<OutOfMemory>,
    /// Free buffers by size class.
    buffers: Mutex<Vec<Vec<Arc<Buffer>>>>,
    /// Whether none waits to be used again.
    is_exact: AtomicBool,
    /// A pass that is being rehearsed or recorded, if one is, and whether it is.
    private: Mutex<Option<Private>>,
    has_private: AtomicBool,
    /// Those whose buffers recorded passes have to themselves.
    rooms: Mutex<Vec<KnownRoom>>,
    /// Empty graph nodes, so that recording a step allocates nothing.
    nodes: Mutex<Vec<Arc<Node>>>,
    /// The number of the last walk back through a graph; held for the length of a walk.
    walk: Mutex<u64>,
    profile: Profile,
}

/// Whose kernels a device runs.
pub(crate) enum Backend {
    /// Those of `cpu`.
    Cpu,
    /// Those of `gpu`.
    Gpu(Box<Engine>),
}

/// What becomes of factors of f32 before they are multiplied, in matrix products and convolutions.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum Factors {
    /// Nothing.
    #[default]
    Exact,
    /// They are rounded to 10 bits of fraction (TF32): several times faster on GPUs since Ampere.
    Tf32,
}

/// Whether the fastest of several ways to compute the same is found by measuring them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum Search {
    /// It is.
    Yes,
    /// The libraries choose without.
    #[default]
    No,
}

/// The smallest class holds this many bytes.
const SMALLEST_CLASS: usize = 256;

/// Above this many bytes, 2 to this power, classes are finer.
const LARGE_POWER: usize = 20;

/// Classes between a power of two and the next, above that.
const LARGE_CLASSES: usize = 32;

/// So many classes above its own a large buffer may come from on a CPU, up to a quarter more: passes over samples of many lengths would
/// leave buffers of each length behind otherwise. A GPU's memory is dearer, and what it holds was measured without.
const NEAR_CLASSES: usize = LARGE_CLASSES / 4;

/// Before a CPU takes another large buffer from the system it gives back all that wait, if these come to so many times the most that
/// was in use at a time.
const MOST_WAITING: usize = 2;
/// So many nodes of graphs are kept for others, which is about 100 MB.
const MOST_FREE_NODES: usize = 1 << 16;

/// The class of a buffer of `bytes` bytes and the size of that class. Of small ones there are four classes a power of two, so at most a
/// fifth of a buffer is slack; of those above a mebibyte 32, since it is of them that memory fills up.
pub(crate) fn size_class(bytes: usize) -> (usize, usize) {
    let bytes = bytes.max(SMALLEST_CLASS);
    let power = usize::BITS as usize - 1 - (bytes - 1).leading_zeros() as usize;
    let classes = if power < LARGE_POWER { 4 } else { LARGE_CLASSES };
    let step = (1usize << power) / classes;
    let steps = (bytes - (1 << power)).div_ceil(step);
    (power * LARGE_CLASSES + steps * (LARGE_CLASSES / classes), (1 << power) + steps * step)
}

impl Device {
    /// The CPU with `threads` compute threads, the caller's being one of them; 0 counts as 1.
    pub fn cpu(threads: usize) -> Device {
        Device::with_arch(threads, Arch::best())
    }

    /// The CPU as if it had just these instructions.
    pub(crate) fn with_arch(threads: usize, arch: Arch) -> Device {
        Device::of(Backend::Cpu, threads, arch)
    }

    /// The GPU of this number, counted among those that the process may see. It computes with f32, bf16 and f16; see [`Tensor::to`] for how
    /// values come there and back. Fails where driver, compiler, cuBLASLt or GPU aren't there or don't work, and says what to do.
    ///
    /// Operations only give the GPU its work. Whoever asks for values ([`Tensor::item`], [`Tensor::to_vec`]) waits for it.
    ///
    /// [`Tensor::to`]: crate::Tensor::to
    /// [`Tensor::item`]: crate::Tensor::item
    /// [`Tensor::to_vec`]: crate::Tensor::to_vec
    pub fn cuda(index: u32, options: &GpuOptions) -> Result<Device, Error> {
        let engine = Engine::open(index, options)?;
        Ok(Device::of(Backend::Gpu(Box::new(engine)), 1, Arch::best()))
    }

    /// How many GPUs the process may see. Fails where driver, compiler or cuBLASLt aren't there or are too old, and says what to do;
    /// touches no GPU.
    pub fn cuda_count(options: &GpuOptions) -> Result<u32, Error> {
        Engine::count(options)
    }

    /// Opens on a GPU what convolutions need, which the first of them would do otherwise. Fails where it isn't there, and says which
    /// package brings it. Does nothing on a CPU.
    pub fn prepare_convolutions(&self) -> Result<(), Error> {
        match self.backend() {
            Backend::Cpu => Ok(()),
            Backend::Gpu(engine) => engine.prepare_convolutions(),
        }
    }

    /// Lets products and convolutions of f32 take their factors so from now on, backward ones too. On a CPU they are always exact.
    pub fn set_factors(&self, factors: Factors) {
        if let Backend::Gpu(engine) = self.backend() {
            engine.set_rounds_factors(factors == Factors::Tf32);
        }
    }

    /// Lets products and convolutions take, from now on, what is measured to be the fastest of what NVIDIA's libraries propose, where they
    /// would take what the libraries think the fastest. What is computed for the first time is measured then and there, which may take a
    /// second for each, and what was chosen is kept beside the kernels ([`GpuOptions::kernels`]), so that later starts compute the same
    /// bits; elsewhere another may be chosen, and the last bits differ. Does nothing on a CPU.
    pub fn set_search(&self, search: Search) {
        if let Backend::Gpu(engine) = self.backend() {
            engine.set_searches(search == Search::Yes);
        }
    }

    fn of(backend: Backend, threads: usize, arch: Arch) -> Device {
        Device(Arc::new(Shared {
            backend,
            pool: Pool::new(threads.max(1)),
            arch,
            account: Arc::default(),
            lacked: OnceLock::new(),
            buffers: Mutex::new(Vec::new()),
            is_exact: AtomicBool::new(false),
            private: Mutex::new(None),
            has_private: AtomicBool::new(false),
            rooms: Mutex::default(),
            nodes: Mutex::new(Vec::new()),
            walk: Mutex::new(0),
            profile: Profile::default(),
        }))
    }

    pub(crate) fn backend(&self) -> &Backend {
        &self.0.backend
    }

    /// What its GPU offers beside tensors: streams, events, pinned memory; none on a CPU.
    pub fn gpu(&self) -> Option<&phalanx_cuda::Gpu> {
        match self.backend() {
            Backend::Cpu => None,
            Backend::Gpu(engine) => Some(engine.gpu()),
        }
    }

    /// Whether it computes. A GPU that isn't there ([`GpuOptions::absent`]) only keeps account: no number that is brought to it, or taken from
    /// it, means anything.
    pub fn computes(&self) -> bool {
        self.gpu().is_none_or(phalanx_cuda::Gpu::computes)
    }

    /// Whether a GPU has done all that its stream of kernels was given. A CPU is done whenever this can be asked.
    #[track_caller]
    pub fn is_idle(&self) -> bool {
        self.gpu().is_none_or(|gpu| gpu.compute().is_done().unwrap_or_else(|error| panic!("{error}")))
    }

    /// Has its GPU copy bytes from one memory to a place in another, in its compute stream's order. Panics on a CPU.
    #[track_caller]
    pub(crate) fn copy_on_gpu(&self, from: &DeviceMemory, bytes: Range<usize>, to: &DeviceMemory, at: usize) {
        let copied = self.gpu().expect("a GPU's memory has a GPU").compute().copy(from, bytes, to, at);
        copied.unwrap_or_else(|error| panic!("{error}"));
    }

    /// Has its GPU make bytes of a memory 0, likewise.
    #[track_caller]
    pub(crate) fn clear_on_gpu(&self, memory: &DeviceMemory, bytes: Range<usize>) {
        let filled = self.gpu().expect("a GPU's memory has a GPU").compute().fill(memory, bytes, 0);
        filled.unwrap_or_else(|error| panic!("{error}"));
    }

    /// So many new bytes of zeros. Panics where there are no more, and says who has them.
    pub(crate) fn allocate(&self, bytes: usize, purpose: Purpose) -> Memory {
        match self.backend() {
            Backend::Cpu => self.allocate_on_host(bytes).counted(&self.0.account, purpose),
            Backend::Gpu(engine) => self.allocate_for(engine, engine.gpu().compute(), bytes, purpose),
        }
    }

    fn allocate_on_host(&self, bytes: usize) -> Memory {
        let freed = || {
            self.release_cached();
            Memory::zeroed(bytes)
        };
        let lacks = || {
            let live = self.live_bytes();
            panic!(
                "out of memory: a tensor needs {bytes} bytes more, and others have {live} of this device already"
            )
        };
        Memory::zeroed(bytes).or_else(freed).unwrap_or_else(lacks)
    }

    /// The same of a GPU, for this stream of it. What waits in caches is the GPU's as well.
    pub(crate) fn allocate_for(
        &self,
        engine: &Engine,
        stream: &Stream,
        bytes: usize,
        purpose: Purpose,
    ) -> Memory {
        let alloc = || engine.gpu().alloc(stream, bytes);
        let memory = alloc().or_else(|_| {
            self.release_cached();
            engine.release_landings();
            alloc()
        });
        let memory = memory.unwrap_or_else(|error| self.refuse(engine, purpose, error));
        Memory::of_gpu(memory).counted(&self.0.account, purpose)
    }

    fn refuse(&self, engine: &Engine, purpose: Purpose, error: Error) -> ! {
        let Error::OutOfMemory { gpu, asked, free, total } = error else { panic!("{error}") };
        let (asked, beside) = (asked as usize, self.beside_account(engine.own_bytes()));
        let told = self.0.account.lacks(Lack { gpu, asked, purpose, free, total, beside });
        let _ = self.0.lacked.set(told.clone());
        panic!("{told}")
    }

    /// What of its bytes the account doesn't know, with those of its libraries.
    fn beside_account(&self, workspace: usize) -> Beside {
        let bytes =
            |classes: &[Vec<Arc<Buffer>>]| classes.iter().flatten().map(|buffer| buffer.capacity()).sum();
        let waiting: usize = bytes(&lock(&self.0.buffers));
        let in_private: usize = lock(&self.0.private).iter().map(|private| bytes(private.buffers())).sum();
        let in_rooms: usize = lock(&self.0.rooms).iter().map(KnownRoom::bytes).sum();
        Beside { workspace, of_recorded: in_private + in_rooms, waiting }
    }

    /// What its memory is held for at the moment, in words, and how many bytes that are: all that tensors, arenas and caches have of it,
    /// and on a GPU what its libraries were given.
    pub fn holdings(&self) -> Vec<(&'static str, u64)> {
        let workspace = match self.backend() {
            Backend::Cpu => 0,
            Backend::Gpu(engine) => engine.own_bytes(),
        };
        self.0.account.holdings(self.beside_account(workspace))
    }

    /// What was told when there was no memory left for something, if that has happened: the same would come of it again.
    pub fn lacked(&self) -> Option<&OutOfMemory> {
        self.0.lacked.get()
    }

    /// Tells that what comes is a pass over so many samples, by which an error about memory says how many would fit; 0 where nobody knows.
    pub fn begin_pass(&self, samples: usize) {
        self.0.account.begin_pass(samples);
    }

    /// Notes that recorded passes have this room's buffers to themselves.
    pub(crate) fn note_room(&self, room: &Room) {
        let mut rooms = lock(&self.0.rooms);
        rooms.retain(KnownRoom::is_there);
        if !rooms.iter().any(|known| known.is(room)) {
            rooms.push(room.known());
        }
    }

    pub(crate) fn account(&self) -> &Account {
        &self.0.account
    }

    /// The orders without gaps that its kernels know, the usual one first.
    pub(crate) fn orders(&self) -> &'static [Order] {
        match self.backend() {
            Backend::Cpu => &[Order::RowMajor, Order::Pixels, Order::Taps],
            Backend::Gpu(_) => &[Order::RowMajor, Order::ChannelsLast, Order::Pixels, Order::Taps],
        }
    }

    /// The order in which its kernels want images that come in none of their own.
    pub(crate) fn image_order(&self) -> Order {
        match self.backend() {
            Backend::Cpu => Order::RowMajor,
            Backend::Gpu(_) => Order::ChannelsLast,
        }
    }

    /// The orders in which it wants a convolution's images, kernels and outputs to lie.
    pub(crate) fn conv_orders(&self, plan: &Plan) -> [Order; 3] {
        match self.backend() {
            Backend::Cpu => plan.orders(),
            Backend::Gpu(_) => [Order::ChannelsLast; 3],
        }
    }

    /// How many threads of the host compute.
    pub fn threads(&self) -> usize {
        self.0.pool.threads()
    }

    /// Lets so many threads compute from now on, the caller's being one of them; 0 counts as 1. Results stay the same to the bit.
    /// Waits for a kernel that is running.
    pub fn set_threads(&self, threads: usize) {
        self.0.pool.resize(threads);
    }

    /// Takes the time of every kernel from now on, until [`Device::stop_profile`].
    pub fn start_profile(&self) {
        match self.backend() {
            Backend::Cpu => self.0.profile.start(),
            Backend::Gpu(engine) => engine.gpu().compute().start_timing(),
        }
    }

    /// The time that each kernel took since [`Device::start_profile`], the longest first. A GPU is waited for.
    pub fn stop_profile(&self) -> Vec<KernelTime> {
        let Backend::Gpu(engine) = self.backend() else { return self.0.profile.stop() };
        let times = succeeded(engine.gpu().compute().stop_timing());
        let time = |Timed { what, calls, total }| KernelTime { name: what.into(), calls, total };
        times.into_iter().map(time).collect()
    }

    /// Takes the time of a kernel until the timer is dropped, if somebody wants it.
    pub(crate) fn time(&self, kernel: &'static str) -> Timer<'_> {
        self.0.profile.time(kernel)
    }

    /// How many bytes of buffers were taken from the system, or of a GPU for arenas too, and not given back: in use, or waiting to be
    /// used again.
    pub fn held_bytes(&self) -> usize {
        self.0.account.held()
    }

    /// How many bytes of buffers tensors have at the moment, without arenas and without what waits to be used again.
    pub fn live_bytes(&self) -> usize {
        self.0.account.live()
    }

    /// The most that [`Device::live_bytes`] was at a time since this was asked for last.
    pub fn take_most_live_bytes(&self) -> usize {
        self.0.account.take_most_live()
    }

    /// Frees every cached buffer; how many bytes that were.
    pub fn release_cached(&self) -> usize {
        let classes = std::mem::take(&mut *lock(&self.0.buffers));
        classes.iter().flatten().map(|buffer| buffer.capacity()).sum()
    }

    /// Calls `task(0..n_tasks)`, each once, spread over the threads; returns when all are done.
    pub fn parallel_for(&self, n_tasks: usize, task: impl Fn(usize) + Sync) {
        self.0.pool.run(n_tasks, &task);
    }

    /// The instruction set that kernels are compiled for at run time.
    pub(crate) fn arch(&self) -> Arch {
        self.0.arch
    }

    /// Cuts `out` into pieces of `chunk` elements (the last may be shorter) and calls `task(i, piece)` for each, spread
    /// over the threads.
    pub(crate) fn for_chunks<T: Send>(
        &self,
        out: &mut [T],
        chunk: usize,
        task: impl Fn(usize, &mut [T]) + Sync,
    ) {
        self.for_chunks_by(out, chunk, &task);
    }

    /// The same, made once for all tasks.
    fn for_chunks_by<T: Send>(&self, out: &mut [T], chunk: usize, task: &(dyn Fn(usize, &mut [T]) + Sync)) {
        let n_tasks = out.len().div_ceil(chunk.max(1));
        if n_tasks <= 1 || self.threads() == 1 {
            out.chunks_mut(chunk.max(1)).enumerate().for_each(|(i, piece)| task(i, piece));
            return;
        }
        let out = Pieces::new(out);
        // SAFETY: the pool calls each index once, and pieces of different indices don't overlap.
        self.parallel_for(n_tasks, |i| task(i, unsafe { out.piece(i * chunk, chunk) }));
    }

    /// Cuts slices of one length in step into pieces of `chunk` elements and calls `task(start, pieces)` for each, spread over
    /// the threads. A slice may also be empty: then so are its pieces. Panics if the others differ in length.
    #[track_caller]
    pub fn for_pieces<T: Send, const N: usize>(
        &self,
        slices: [&mut [T]; N],
        chunk: usize,
        task: impl Fn(usize, [&mut [T]; N]) + Sync,
    ) {
        let len = slices.iter().map(|slice| slice.len()).max().unwrap_or(0);
        let lens = slices.each_ref().map(|slice| slice.len());
        assert!(lens.iter().all(|&l| l == len || l == 0), "for_pieces: slices of {lens:?} elements");
        let (slices, chunk) = (slices.map(Pieces::new), chunk.max(1));
        self.parallel_for(len.div_ceil(chunk), |i| {
            // SAFETY: the pool calls each index once, and pieces of different indices don't overlap.
            let pieces = unsafe { pieces_at(&slices, i * chunk, chunk) };
            task(i * chunk, pieces);
        });
    }

    /// As [`Device::for_chunks`] over two outputs in step: piece `i` of `a` with piece `i` of `b`. Both must have the same
    /// number of pieces.
    pub(crate) fn for_chunks2<T: Send, U: Send>(
        &self,
        a: (&mut [T], usize),
        b: (&mut [U], usize),
        task: impl Fn(usize, &mut [T], &mut [U]) + Sync,
    ) {
        let n_tasks = a.0.len().div_ceil(a.1.max(1));
        assert_eq!(n_tasks, b.0.len().div_ceil(b.1.max(1)), "outputs that don't go in step");
        let (chunk_a, chunk_b) = (a.1, b.1);
        let (a, b) = (Pieces::new(a.0), Pieces::new(b.0));
        self.parallel_for(n_tasks, |i| {
            // SAFETY: the pool calls each index once, and pieces of different indices don't overlap.
            let (piece_a, piece_b) =
                unsafe { (a.piece(i * chunk_a, chunk_a), b.piece(i * chunk_b, chunk_b)) };
            task(i, piece_a, piece_b);
        });
    }

    /// As [`Device::for_chunks2`], over three outputs.
    pub(crate) fn for_chunks3<T: Send>(
        &self,
        outputs: [(&mut [T], usize); 3],
        task: impl Fn(usize, [&mut [T]; 3]) + Sync,
    ) {
        let counts = outputs.each_ref().map(|(out, chunk)| out.len().div_ceil((*chunk).max(1)));
        assert!(counts.iter().all(|&count| count == counts[0]), "outputs that don't go in step: {counts:?}");
        let outputs = outputs.map(|(out, chunk)| (Pieces::new(out), chunk));
        self.parallel_for(counts[0], |i| {
            // SAFETY: the pool calls each index once, and pieces of different indices don't overlap.
            task(i, outputs.each_ref().map(|(out, chunk)| unsafe { out.piece(i * chunk, *chunk) }));
        });
    }

    /// Cuts a matrix with rows of `width` elements into blocks of so many rows and columns (the last may have fewer) and calls `task(block)`
    /// for each, spread over the threads. Panics if it isn't of whole rows, or they of nothing.
    #[track_caller]
    pub(crate) fn for_blocks<T: Send>(
        &self,
        matrix: &mut [T],
        width: usize,
        [rows, columns]: [usize; 2],
        task: impl Fn(Block<'_, T>) + Sync,
    ) {
        assert!(
            rows > 0 && columns > 0 && matrix.len().checked_rem(width).unwrap_or(matrix.len()) == 0,
            "blocks of {rows} x {columns} of {} elements in rows of {width}",
            matrix.len()
        );
        let (height, across) = (matrix.len() / width.max(1), width.div_ceil(columns));
        let matrix = Pieces::new(matrix);
        self.parallel_for(height.div_ceil(rows) * across, |i| {
            let [row, column] = [i / across * rows, i % across * columns];
            let (rows, columns) = (row..height.min(row + rows), column..width.min(column + columns));
            // The pool calls each index once, so blocks don't overlap.
            task(Block { matrix: &matrix, width, rows, columns });
        });
    }

    /// Has each tensor of a GPU that isn't part of an arena take memory of its own from now on, as long as its elements, which goes with it:
    /// so a tool that knows what was allocated finds who reads or writes beside it. Passes aren't recorded then, and a tensor that goes
    /// waits for all that the GPU has, nothing of which may wait for another rank.
    pub fn set_exact_memory(&self) {
        self.0.is_exact.store(true, Ordering::Relaxed);
    }

    pub(crate) fn is_exact(&self) -> bool {
        self.gpu().is_some() && self.0.is_exact.load(Ordering::Relaxed)
    }

    /// A free buffer that holds `bytes`, or else the capacity that a new one should have.
    pub(crate) fn take_buffer(&self, bytes: usize) -> Result<Arc<Buffer>, usize> {
        if self.is_exact() {
            return Err(bytes.max(1));
        }
        let (class, capacity) = size_class(bytes);
        let found = match self.private(|private| private.take(class)) {
            Some(own) => own,
            None => {
                let is_large = self.gpu().is_none() && class >= LARGE_POWER * LARGE_CLASSES;
                let more = if is_large { NEAR_CLASSES } else { 0 };
                let mut classes = lock(&self.0.buffers);
                let found =
                    (class..=class + more).find_map(|class| classes.get_mut(class).and_then(Vec::pop));
                if found.is_none() && is_large {
                    let waiting: usize = classes.iter().flatten().map(|buffer| buffer.capacity()).sum();
                    if waiting > MOST_WAITING * self.0.account.most_ever_live() {
                        classes.clear();
                    }
                }
                found
            }
        };
        found.ok_or(capacity)
    }

    /// What is done to the pass that this thread rehearses or records, if it does.
    pub(crate) fn private<T>(&self, with: impl FnOnce(&mut Private) -> T) -> Option<T> {
        if !self.0.has_private.load(Ordering::Relaxed) {
            return None;
        }
        lock(&self.0.private).as_mut().filter(|private| private.is_at_work()).map(with)
    }

    /// Has this memory stay as long as the replay of the pass that this thread records, if it does. Of memory in pieces that come and go
    /// that is for each of them to ask.
    pub(crate) fn hold(&self, memory: &Arc<Memory>) {
        if self.0.has_private.load(Ordering::Relaxed) && !memory.is_cut() {
            self.private(|private| private.hold(memory));
        }
    }

    /// Does something that is no part of the pass that this thread rehearses or records.
    pub(crate) fn aside<T>(&self, work: impl FnOnce() -> T) -> T {
        let set = |is_aside: bool| {
            let mut private = lock(&self.0.private);
            private
                .iter_mut()
                .filter(|pass| pass.is_of_this_thread())
                .for_each(|pass| pass.is_aside = is_aside);
        };
        set(true);
        let done = work();
        set(false);
        done
    }

    /// Notes such a pass, or that there is none any more; gives the one before. What this thread doesn't see of it, it has no part in.
    pub(crate) fn set_private(&self, pass: Option<Private>) -> Option<Private> {
        let mut private = lock(&self.0.private);
        self.0.has_private.store(pass.is_some(), Ordering::Relaxed);
        std::mem::replace(&mut *private, pass)
    }

    pub(crate) fn give_buffer(&self, buffer: Arc<Buffer>) {
        if self.is_exact() {
            return;
        }
        let (class, _) = size_class(buffer.capacity());
        let mut buffer = Some(buffer);
        self.private(|private| buffer.take().into_iter().for_each(|buffer| private.give(class, buffer)));
        let Some(buffer) = buffer else { return };
        let mut classes = lock(&self.0.buffers);
        if classes.len() <= class {
            classes.resize_with(class + 1, Vec::new);
        }
        classes[class].push(buffer);
    }

    /// What tells this device from all others that are there.
    pub(crate) fn address(&self) -> usize {
        Arc::as_ptr(&self.0).addr()
    }

    /// The number of a walk that begins, from 1: there is no other on this device until it is dropped. Panics in the midst of one on the
    /// same device and thread, which would wait for itself.
    #[track_caller]
    pub(crate) fn begin_walk(&self) -> CurrentWalk<'_> {
        let address = self.address();
        assert!(
            !WALKED.with_borrow(|walked| walked.contains(&address)),
            "backward: called in the midst of another backward pass on the same device, as by its GradSink: call it when that is over"
        );
        let mut number = lock(&self.0.walk);
        *number += 1;
        WALKED.with_borrow_mut(|walked| walked.push(address));
        CurrentWalk { number, address }
    }

    pub(crate) fn take_node(&self) -> Option<Arc<Node>> {
        lock(&self.0.nodes).pop()
    }

    pub(crate) fn give_node(&self, node: Arc<Node>) {
        let mut nodes = lock(&self.0.nodes);
        if nodes.len() < MOST_FREE_NODES {
            nodes.push(node);
        }
    }
}

thread_local! {
    /// The addresses of the devices that this thread walks on.
    static WALKED: RefCell<Vec<usize>> = const { RefCell::new(Vec::new()) };
}

/// A walk on a device, by this thread.
pub(crate) struct CurrentWalk<'a> {
    number: MutexGuard<'a, u64>,
    address: usize,
}

impl Deref for CurrentWalk<'_> {
    type Target = u64;
    fn deref(&self) -> &u64 {
        &self.number
    }
}

impl DerefMut for CurrentWalk<'_> {
    fn deref_mut(&mut self) -> &mut u64 {
        &mut self.number
    }
}

impl Drop for CurrentWalk<'_> {
    fn drop(&mut self) {
        WALKED.with_borrow_mut(|walked| walked.retain(|&address| address != self.address));
    }
}

impl PartialEq for Device {
    fn eq(&self, other: &Device) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}

impl std::fmt::Debug for Device {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self.backend() {
            Backend::Cpu => write!(f, "cpu ({} threads)", self.threads()),
            Backend::Gpu(engine) => write!(f, "cuda:{} ({})", engine.gpu().index(), engine.gpu().name()),
        }
    }
}

/// A slice that several threads write different pieces of.
struct Pieces<T> {
    ptr: *mut T,
    len: usize,
}

// SAFETY: whoever takes pieces promises that they don't overlap, so threads never touch the same element.
unsafe impl<T: Send> Sync for Pieces<T> {}

impl<T> Pieces<T> {
    fn new(slice: &mut [T]) -> Pieces<T> {
        Pieces { ptr: slice.as_mut_ptr(), len: slice.len() }
    }

    /// At most `n` elements from `start`.
    ///
    /// # Safety
    /// No two pieces that live at the same time overlap, and the slice outlives them.
    #[allow(clippy::mut_from_ref)]
    unsafe fn piece(&self, start: usize, n: usize) -> &mut [T] {
        assert!(start <= self.len, "piece at {start} of {}", self.len);
        // SAFETY: inside the slice by the check; exclusive by the caller's promise.
        unsafe { std::slice::from_raw_parts_mut(self.ptr.add(start), n.min(self.len - start)) }
    }
}

/// At most `n` elements from `start` of each; of one that is empty, none.
///
/// # Safety
/// As of [`Pieces::piece`], for each.
#[allow(clippy::mut_from_ref)]
unsafe fn pieces_at<T, const N: usize>(slices: &[Pieces<T>; N], start: usize, n: usize) -> [&mut [T]; N] {
    slices.each_ref().map(|slice| {
        let start = if slice.len == 0 { 0 } else { start };
        // SAFETY: by the caller's promise.
        unsafe { slice.piece(start, n) }
    })
}

/// Some columns of some rows of a matrix, to be written by one thread.
pub(crate) struct Block<'a, T> {
    matrix: &'a Pieces<T>,
    width: usize,
    rows: Range<usize>,
    columns: Range<usize>,
}

impl<T> Block<'_, T> {
    /// The rows of the matrix that it is of.
    pub(crate) fn rows(&self) -> Range<usize> {
        self.rows.clone()
    }

    /// The columns of the matrix that it is of.
    pub(crate) fn columns(&self) -> Range<usize> {
        self.columns.clone()
    }

    /// Its part of a row of the matrix.
    pub(crate) fn row_mut(&mut self, row: usize) -> &mut [T] {
        assert!(self.rows.contains(&row), "row {row} of a block of rows {:?}", self.rows);
        // SAFETY: blocks of a matrix don't overlap ([`Device::for_blocks`]), nor do rows of a block, which is borrowed as long as one is out.
        unsafe { self.matrix.piece(row * self.width + self.columns.start, self.columns.len()) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_of_several_slices_go_in_step() {
        for threads in [1, 3] {
            let (mut a, mut b) = ([0; 10], [1; 10]);
            Device::cpu(threads).for_pieces([&mut a, &mut [], &mut b], 4, |start, [a, none, b]| {
                assert!(none.is_empty());
                for (i, (a, b)) in a.iter_mut().zip(b).enumerate() {
                    (*a, *b) = (start + i, *b + start);
                }
            });
            assert_eq!((a, b), ([0, 1, 2, 3, 4, 5, 6, 7, 8, 9], [1, 1, 1, 1, 5, 5, 5, 5, 9, 9]));
        }
    }

    #[test]
    fn size_classes_hold_what_they_promise() {
        let sizes = (1..5000).chain([(1 << 20) - 1, 1 << 20, (1 << 20) + 1, 49 << 21, 123_456_789]);
        let mut before = (0, 0);
        for bytes in sizes {
            let (class, capacity) = size_class(bytes);
            let slack = if bytes > 1 << 20 { bytes / 32 } else { bytes.max(SMALLEST_CLASS) / 4 + 64 };
            assert!(
                capacity >= bytes && capacity <= bytes + slack.max(SMALLEST_CLASS),
                "{bytes}: {capacity}"
            );
            assert!((class, capacity) >= before && (class == before.0) == (capacity == before.1), "{bytes}");
            before = (class, capacity);
            assert_eq!(
                size_class(capacity),
                (class, capacity),
                "a full buffer returns to its own class: {bytes}"
            );
            assert!(capacity.is_multiple_of(64), "{capacity}");
        }
    }

    #[test]
    fn blocks_cover_a_matrix() {
        for (threads, [rows, columns]) in [(1, [2, 3]), (3, [2, 3]), (3, [5, 7]), (2, [8, 1]), (2, [1, 9])] {
            let mut matrix = vec![0; 5 * 7];
            Device::cpu(threads).for_blocks(&mut matrix, 7, [rows, columns], |mut block| {
                for row in block.rows() {
                    let first = block.columns().start;
                    assert!(block.rows().len() <= rows && block.columns().len() <= columns);
                    block
                        .row_mut(row)
                        .iter_mut()
                        .zip(first..)
                        .for_each(|(x, column)| *x += 10 * row + column);
                }
            });
            assert_eq!(matrix, (0..35).map(|i| i / 7 * 10 + i % 7).collect::<Vec<_>>());
        }
        Device::cpu(2).for_blocks(&mut [0; 0], 0, [1, 1], |_| unreachable!("no block of nothing"));
    }

    #[test]
    #[should_panic(expected = "row 2 of a block of rows 0..2")]
    fn a_block_has_no_rows_of_others() {
        Device::cpu(1).for_blocks(&mut [0; 12], 3, [2, 3], |mut block| block.row_mut(2).fill(1));
    }

    #[test]
    fn chunks_cover_the_output() {
        let device = Device::cpu(3);
        let mut out = vec![0; 103];
        device.for_chunks(&mut out, 10, |i, piece| piece.fill(i + 1));
        assert_eq!(out, (0..103).map(|i| i / 10 + 1).collect::<Vec<_>>());
    }
}
