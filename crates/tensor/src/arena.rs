//! Arenas: all parameters of a model in one contiguous buffer, all gradients in another with the same offsets, each state of
//! an optimizer likewise.
//!
//! An optimizer step is one pass over slices, a bucket of gradients is a range, a shard is a shorter range, and nothing is
//! copied between them. Each parameter stays a tensor of its own with its own run-time borrow (S-BORROW in
//! [`crate::storage`]), so one range can be reduced over the network while the backward pass still writes another.

use crate::account::Purpose;
use crate::casts::Casts;
use crate::cpu::copy::{from_channels_last, from_pixels, from_taps, to_channels_last, to_pixels, to_taps};
use crate::device::{Backend, Device};
use crate::dtype::{DType, Element};
use crate::graph::{self, NodeRef};
use crate::lock::lock;
use crate::shape::{Geometry, Order, Shape};
use crate::storage::{ALIGN, Memory, Storage};
use crate::tensor::Tensor;
use phalanx_cuda::Error;
use phalanx_memory::{Region, Spare};
use std::borrow::Cow;
use std::marker::PhantomData;
use std::ops::{Deref, DerefMut, Range};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, Weak};

/// Which parameter lies where in an arena. Every parameter starts on a cache line. The padding between them starts as zero;
/// what becomes of it is the affair of whoever writes to whole spans (Adam with an eps of 0 makes it NaN), and nobody reads
/// a value from it.
#[derive(Clone, Debug, PartialEq)]
pub struct Layout {
    shapes: Vec<Shape>,
    /// In which order the elements of each lie.
    orders: Vec<Order>,
    /// In elements; one more than there are parameters, the last being the length of the arena.
    offsets: Vec<usize>,
}

impl Layout {
    /// The layout of parameters with these shapes, in this order, each row-major.
    pub fn new(shapes: &[Shape]) -> Layout {
        Layout::ordered(shapes.iter().map(|&shape| (shape, Order::RowMajor)))
    }

    /// The layout of parameters with these shapes, in this order, whose elements lie in the orders beside them.
    pub fn ordered(parameters: impl IntoIterator<Item = (Shape, Order)>) -> Layout {
        let (shapes, orders): (Vec<Shape>, _) = parameters.into_iter().unzip();
        let mut offsets = vec![0];
        for shape in &shapes {
            offsets.push(offsets[offsets.len() - 1] + shape.count().next_multiple_of(ALIGN));
        }
        Layout { shapes, orders, offsets }
    }

    /// How many parameters there are.
    pub fn count(&self) -> usize {
        self.shapes.len()
    }

    /// The length of an arena in elements, padding included.
    #[allow(clippy::len_without_is_empty)]
    pub fn len(&self) -> usize {
        self.offsets[self.count()]
    }

    /// The shape of parameter `i`.
    pub fn shape(&self, i: usize) -> &Shape {
        &self.shapes[i]
    }

    /// In which order the elements of parameter `i` lie.
    pub fn order(&self, i: usize) -> Order {
        self.orders[i]
    }

    /// The elements of parameter `i` in row-major order, as files have them, from a flat array of this layout: where they lie
    /// if they lie so.
    #[track_caller]
    pub fn row_major<'a, T: Element>(&self, i: usize, flat: &'a [T]) -> Cow<'a, [T]> {
        let values = &flat[self.range(i)];
        let shuffle = match self.orders[i] {
            Order::RowMajor => return Cow::Borrowed(values),
            Order::Pixels => from_pixels,
            Order::Taps => from_taps,
            Order::ChannelsLast => from_channels_last,
        };
        let mut out = vec![T::default(); values.len()];
        shuffle(values, self.planes(i), &mut out);
        Cow::Owned(out)
    }

    /// The way back from [`Layout::row_major`] for parameter `i` alone: its elements, which are in row-major order, as they lie in
    /// memory.
    #[track_caller]
    pub fn laid<'a, T: Element>(&self, i: usize, values: &'a [T]) -> Cow<'a, [T]> {
        if self.orders[i] == Order::RowMajor {
            return Cow::Borrowed(values);
        }
        let mut out = vec![T::default(); self.part(i..i + 1).len()];
        self.part(i..i + 1).put(0, values, &mut out);
        out.truncate(values.len());
        Cow::Owned(out)
    }

    /// The layout of some of the parameters, whose elements lie as in [`Layout::span`] of them.
    pub fn part(&self, params: Range<usize>) -> Layout {
        let orders = self.orders[params.clone()].iter().copied();
        Layout::ordered(self.shapes[params].iter().copied().zip(orders))
    }

    /// The way back from [`Layout::row_major`]: puts elements that are in row-major order where they belong in `flat`.
    #[track_caller]
    pub fn put<T: Element>(&self, i: usize, values: &[T], flat: &mut [T]) {
        let into = &mut flat[self.range(i)];
        assert!(into.len() == values.len(), "put: {} values for shape {}", values.len(), self.shapes[i]);
        match self.orders[i] {
            Order::RowMajor => into.copy_from_slice(values),
            Order::Pixels => to_pixels(values, self.planes(i), into),
            Order::Taps => to_taps(values, self.planes(i), into),
            Order::ChannelsLast => to_channels_last(values, self.planes(i), into),
        }
    }

    /// The first two sizes of parameter `i`, which has four, and the product of the others.
    fn planes(&self, i: usize) -> [usize; 3] {
        let dims = self.shapes[i].dims();
        [dims[0], dims[1], dims[2] * dims[3]]
    }

    /// The elements of parameter `i`, without padding.
    pub fn range(&self, i: usize) -> Range<usize> {
        self.offsets[i]..self.offsets[i] + self.shapes[i].count()
    }

    /// The elements of parameters `params`, with the padding between and after them.
    pub fn span(&self, params: Range<usize>) -> Range<usize> {
        self.offsets[params.start]..self.offsets[params.end]
    }
}

/// One contiguous buffer that holds one value for every element of a [`Layout`].
#[derive(Clone)]
pub struct Arena(Arc<Inner>);

struct Inner {
    layout: Layout,
    device: Device,
    dtype: DType,
    memory: Arc<Memory>,
    /// One a parameter, in order.
    parts: Vec<Storage>,
}

/// What tells an [`Arena`] from all others.
#[derive(Clone)]
pub struct ArenaMark(Weak<Memory>);

impl ArenaMark {
    /// Whether it is that of this arena.
    pub fn is_of(&self, arena: &Arena) -> bool {
        std::ptr::eq(self.0.as_ptr(), Arc::as_ptr(&arena.0.memory))
    }
}

impl Arena {
    /// An arena of zeros.
    pub fn new(device: &Device, dtype: DType, layout: &Layout) -> Arena {
        Arena::spread(device, dtype, layout, |_| device)
    }

    /// An arena of zeros in the memory of `device` of which each parameter is a tensor of the device that `of` names: a model may
    /// lie on several CPU devices, and still be one run of memory to whoever sees it flat. Panics if one of several is a GPU, whose
    /// memory is its own.
    #[track_caller]
    pub fn spread<'a>(
        device: &'a Device,
        dtype: DType,
        layout: &Layout,
        of: impl Fn(usize) -> &'a Device,
    ) -> Arena {
        let memory = Arc::new(Memory::of_arena(device, layout.len() * dtype.bytes()));
        Arena::over(memory, device, dtype, layout, of)
    }

    #[track_caller]
    fn over<'a>(
        memory: Arc<Memory>,
        device: &'a Device,
        dtype: DType,
        layout: &Layout,
        of: impl Fn(usize) -> &'a Device,
    ) -> Arena {
        let bytes = |i: usize| layout.offsets[i] * dtype.bytes()..layout.offsets[i + 1] * dtype.bytes();
        // S-PART: the spans of different parameters don't overlap.
        let part = |i: usize| {
            let own = of(i);
            let shares = own == device || [own, device].iter().all(|device| device.gpu().is_none());
            assert!(
                shares,
                "an arena on {device:?} with a parameter on {own:?}: only CPU devices share memory"
            );
            Storage::part(own, &memory, bytes(i))
        };
        let parts = (0..layout.count()).map(part).collect();
        Arena(Arc::new(Inner { layout: layout.clone(), device: device.clone(), dtype, memory, parts }))
    }

    /// An arena of zeros in the memory of `host`, a CPU, which the GPU `gpu` copies from and to by itself ([`Span::come_up`],
    /// [`Span::go_down`]). Fails where the system has no such memory left. Panics if one is not what it is called here.
    pub fn pinned(host: &Device, gpu: &Device, dtype: DType, layout: &Layout) -> Result<Arena, Error> {
        let (Backend::Cpu, Backend::Gpu(engine)) = (host.backend(), gpu.backend()) else {
            panic!("an arena of {host:?} that {gpu:?} copies");
        };
        let bytes = (layout.len() * dtype.bytes()).max(ALIGN);
        let memory = Arc::new(Memory::pinned(engine.gpu().pinned(bytes)?));
        Ok(Arena::over(memory, host, dtype, layout, |_| host))
    }

    /// Has what it takes of a GPU from now on be counted as held for this, as an error about memory tells.
    pub fn held_for(self, purpose: Purpose) -> Arena {
        self.0.memory.hold_for(purpose);
        self
    }

    /// Which parameter lies where.
    pub fn layout(&self) -> &Layout {
        &self.0.layout
    }

    /// The type of its elements.
    pub fn dtype(&self) -> DType {
        self.0.dtype
    }

    /// Parameter `i` as a tensor that shares the arena's memory.
    pub fn tensor(&self, i: usize) -> Tensor {
        let Layout { shapes, orders, .. } = &self.0.layout;
        let tensor = Tensor::over(self.0.parts[i].clone(), shapes[i], self.0.dtype);
        tensor.seen_as(Geometry::dense(shapes[i], orders[i]))
    }

    /// Where it lies.
    pub fn device(&self) -> &Device {
        &self.0.device
    }

    /// A copy of the whole arena, wherever it lies. Panics while any parameter of it is being written, or if `T` isn't its dtype.
    #[track_caller]
    pub fn read_flat<T: Element>(&self) -> Vec<T> {
        let mut values = Vec::new();
        self.read_into(&mut values);
        values
    }

    /// Overwrites the whole arena, wherever it lies, as far as `values` go. Panics while anyone uses any parameter of it, if `T`
    /// isn't its dtype, or if there are too many values.
    #[track_caller]
    pub fn write_flat<T: Element>(&self, values: &[T]) {
        let len = self.0.layout.len();
        assert!(values.len() <= len, "write_flat: {} values for an arena of {len}", values.len());
        let mut span = self.flat_mut::<T>();
        match self.0.device.backend() {
            Backend::Cpu => span[..values.len()].copy_from_slice(values),
            Backend::Gpu(engine) => engine.upload(values, &self.0.memory, 0),
        }
    }

    /// Calls `f` with the whole arena; where it lies on a GPU, with a copy. Panics as [`Arena::flat`] does.
    #[track_caller]
    pub fn with_flat<T: Element, R>(&self, f: impl FnOnce(&[T]) -> R) -> R {
        match self.0.device.backend() {
            Backend::Cpu => f(&self.flat::<T>()),
            Backend::Gpu(_) => f(&self.read_flat::<T>()),
        }
    }

    /// Whether there is no other handle to it; tensors of its parameters don't count.
    pub fn is_unique(&self) -> bool {
        Arc::strong_count(&self.0) == 1
    }

    /// What tells it from all others, without keeping it.
    pub fn mark(&self) -> ArenaMark {
        ArenaMark(Arc::downgrade(&self.0.memory))
    }

    /// What tells its memory from all other.
    pub(crate) fn memory_of_all(&self) -> &Arc<Memory> {
        &self.0.memory
    }

    /// How often any parameter was borrowed for writing: as long as it stays, so do all values.
    pub fn overwrites(&self) -> u64 {
        self.0.parts.iter().map(Storage::writes).sum()
    }

    /// How often parameter `i` was borrowed for writing.
    pub(crate) fn writes(&self, i: usize) -> u64 {
        self.0.parts[i].writes()
    }

    /// How often for reading.
    pub(crate) fn reads(&self, i: usize) -> u64 {
        self.0.parts[i].reads()
    }

    pub(crate) fn memory(&self) -> &Memory {
        self.device().hold(&self.0.memory);
        &self.0.memory
    }

    /// The read borrow of every part, of values of this type.
    #[track_caller]
    pub(crate) fn hold<T: Element>(&self) -> Held<'_> {
        self.check::<T>();
        self.read()
    }

    /// The read borrow of every part.
    #[track_caller]
    pub(crate) fn read(&self) -> Held<'_> {
        let mut held = Held { arena: self, parts: 0 };
        for part in &self.0.parts {
            part.lock_for_reading();
            held.parts += 1;
        }
        held
    }

    /// The whole arena for reading. Panics while any parameter of it is being written, if `T` isn't its dtype, or if it lies on a
    /// GPU ([`Arena::read_flat`]).
    #[track_caller]
    pub fn flat<T: Element>(&self) -> Flat<'_, T> {
        let held = self.hold::<T>();
        // SAFETY: the read borrow of every part was taken just above; `Held` gives them back when it is dropped.
        let slice = unsafe { self.0.memory.slice(0..self.0.layout.len() * T::DTYPE.bytes()) };
        Flat { slice, _held: held }
    }

    /// The whole arena for writing. Panics while anyone uses any parameter of it, or if `T` isn't its dtype.
    #[track_caller]
    pub fn flat_mut<T: Element>(&self) -> Span<T> {
        self.range_mut(0..self.0.layout.count())
    }

    /// The span of parameters `params` for writing: owned, so that it can travel to whoever reduces it. Panics while anyone
    /// uses one of them, or if `T` isn't the arena's dtype.
    #[track_caller]
    pub fn range_mut<T: Element>(&self, params: Range<usize>) -> Span<T> {
        self.check::<T>();
        Span { locked: self.lock(params, Storage::lock_for_writing), element: PhantomData }
    }

    /// The same for one who takes values away that nobody is to see meanwhile, and brings the same ones back before the span is
    /// dropped: for a backward pass that comes later they are what they were. One who moves them on in between does so when no
    /// pass is left that needs the old ones.
    #[track_caller]
    pub fn set_aside<T: Element>(&self, params: Range<usize>) -> Span<T> {
        self.check::<T>();
        Span { locked: self.lock(params, Storage::lock_for_keeping), element: PhantomData }
    }

    /// The write borrow of every part.
    #[track_caller]
    pub(crate) fn write(&self) -> Locked {
        self.lock(0..self.0.layout.count(), Storage::lock_for_writing)
    }

    #[track_caller]
    fn lock(&self, params: Range<usize>, lock: fn(&Storage)) -> Locked {
        let parts = &self.0.parts[params.clone()];
        // It grows with each part, so that one that is refused leaves none before it locked.
        let mut locked = Locked { arena: self.clone(), params: params.start..params.start };
        for part in parts {
            lock(part);
            locked.params.end += 1;
        }
        locked
    }

    /// Has each of these runs of parameters, which are all of them in order, lie in memory of its own on a GPU, so that it can be given
    /// back by itself ([`Span::give_back`]) for other tensors to use; values stay. What is done to all values at once can't be done
    /// then, but for copies from and to the host. Does nothing on a CPU, which takes back any pages. Panics while anyone uses any
    /// parameter, or if something was recorded that uses one.
    #[track_caller]
    pub fn cut(&self, runs: &[Range<usize>]) {
        let inner = &self.0;
        if inner.device.gpu().is_none() {
            return;
        }
        let in_order = runs.windows(2).all(|pair| pair[0].end == pair[1].start)
            && runs.first().is_none_or(|run| run.start == 0)
            && runs.last().is_none_or(|run| run.end == inner.layout.count());
        assert!(in_order, "cut: {runs:?} of {} parameters are not all in their order", inner.layout.count());
        let _held = self.lock(0..inner.layout.count(), Storage::lock_for_keeping);
        assert!(
            Arc::strong_count(&inner.memory) == inner.parts.len() + 1,
            "cut: a recorded pass uses the arena"
        );
        let mut ends: Vec<usize> = runs.iter().map(|run| inner.layout.span(run.clone()).end).collect();
        ends.iter_mut().for_each(|end| *end *= inner.dtype.bytes());
        ends.dedup();
        ends.retain(|&end| end > 0);
        if let Some(last) = ends.last_mut() {
            *last = inner.memory.bytes();
            inner.memory.cut(&ends);
        }
    }

    /// Has an arena that was cut lie in one run of memory again, as whatever is done to all values at once needs it; values stay. Panics
    /// while anyone uses any parameter of one that was cut.
    #[track_caller]
    pub fn join(&self) {
        if self.is_cut() {
            let inner = &self.0;
            let _held = self.lock(0..inner.layout.count(), Storage::lock_for_keeping);
            inner.memory.cut(&[]);
        }
    }

    /// Whether that was done to it.
    pub fn is_cut(&self) -> bool {
        self.0.memory.is_cut()
    }

    /// The memory that the arena lies in, where that is some that other processes can be let in to.
    pub fn region(&self) -> Option<&Arc<Region>> {
        self.0.memory.region()
    }

    /// Gives the arena memory that other processes can be let in to, under the same address; whoever was let in before no longer
    /// sees it. All values are zero then. None where the system doesn't give such memory. Panics while anyone uses any parameter
    /// of it.
    ///
    /// What others then do with it is for whoever lets them in: they may only touch what somebody here has borrowed for
    /// writing for them.
    #[track_caller]
    pub fn share<T: Element>(&self) -> std::io::Result<Option<Arc<Region>>> {
        let held = self.flat_mut::<T>();
        let Some(region) = self.0.memory.region() else { return Ok(None) };
        // SAFETY: the write borrow of every part is held, so nobody uses the memory, and the slice itself isn't looked at again.
        unsafe { region.share()? };
        drop(held);
        Ok(Some(Arc::clone(region)))
    }

    #[track_caller]
    fn check<T: Element>(&self) {
        assert!(self.0.dtype == T::DTYPE, "arena: holds {}, was asked for {}", self.0.dtype, T::DTYPE);
    }
}

/// A whole arena borrowed for reading.
pub struct Flat<'a, T> {
    slice: &'a [T],
    _held: Held<'a>,
}

/// Parts of an arena borrowed for reading.
pub(crate) struct Held<'a> {
    arena: &'a Arena,
    /// How many, from the first on: all of them, unless one is refused while it is made.
    parts: usize,
}

impl Drop for Held<'_> {
    fn drop(&mut self) {
        self.arena.0.parts[..self.parts].iter().for_each(Storage::unlock_for_reading);
    }
}

impl<T> Deref for Flat<'_, T> {
    type Target = [T];
    fn deref(&self) -> &[T] {
        self.slice
    }
}

/// Neighbouring parameters of an arena borrowed for writing.
pub(crate) struct Locked {
    arena: Arena,
    params: Range<usize>,
}

impl Locked {
    /// Whoever kept what its parameters were, kept something else.
    fn count_overwrites(&self) {
        self.arena.0.parts[self.params.clone()].iter().for_each(Storage::count_overwrite);
    }
}

impl Drop for Locked {
    fn drop(&mut self) {
        self.arena.0.parts[self.params.clone()].iter().for_each(Storage::unlock_for_writing);
    }
}

/// Neighbouring parameters of an arena borrowed for writing, as one slice where it lies on a CPU.
pub struct Span<T> {
    locked: Locked,
    element: PhantomData<fn() -> T>,
}

impl<T: Element> Span<T> {
    pub(crate) fn arena(&self) -> &Arena {
        &self.locked.arena
    }

    pub(crate) fn bytes(&self) -> Range<usize> {
        let span = self.arena().layout().span(self.params());
        span.start * T::DTYPE.bytes()..span.end * T::DTYPE.bytes()
    }

    /// Which parameters.
    pub fn params(&self) -> Range<usize> {
        self.locked.params.clone()
    }

    /// How many elements there are, wherever they lie.
    pub fn count(&self) -> usize {
        self.bytes().len() / T::DTYPE.bytes()
    }

    /// Overwrites all elements, wherever they lie. Panics if there are fewer or more values.
    #[track_caller]
    pub fn write(&mut self, values: &[T]) {
        assert!(values.len() == self.count(), "write: {} values for {} elements", values.len(), self.count());
        self.locked.count_overwrites();
        match self.arena().device().backend() {
            Backend::Cpu => self.copy_from_slice(values),
            Backend::Gpu(engine) => engine.upload(values, self.arena().memory(), self.bytes().start),
        }
    }

    /// Overwrites elements from `at` on with these of another span, wherever the two lie; elements are counted from the start of each
    /// span. From a GPU to a CPU it waits for them. Panics if either has fewer, or they lie on two GPUs.
    #[track_caller]
    pub fn copy_from(&mut self, at: usize, from: &Span<T>, elements: Range<usize>) {
        let count = elements.len();
        let (source, target) = (from.bytes_of(&elements), self.bytes_of(&(at..at + count)));
        let here = self.arena().device().clone();
        match (here.backend(), from.arena().device().backend()) {
            (Backend::Cpu, Backend::Cpu) => self[at..at + count].copy_from_slice(&from[elements]),
            (Backend::Cpu, Backend::Gpu(engine)) => {
                engine.download_into(from.arena().memory(), source.start, &mut self[at..at + count]);
            }
            (Backend::Gpu(engine), Backend::Cpu) => {
                engine.upload(&from[elements], self.arena().memory(), target.start);
            }
            (Backend::Gpu(engine), Backend::Gpu(_)) => {
                assert!(here == *from.arena().device(), "copy_from: spans on two GPUs");
                let (from, to) = (from.arena().memory(), self.arena().memory());
                engine.copy_bytes((from, source.start), (to, target.start), source.len());
            }
        }
    }

    /// Gives the memory of these elements of the span, counted from its start, back to the system, as far as they fill whole pages
    /// and the system takes them: they are 0 then. Whatever isn't taken stays as it is. A GPU takes whole arenas, or pieces that they were
    /// cut into ([`Arena::cut`]), of which nothing was recorded; they come anew with whoever uses them next.
    #[track_caller]
    pub fn give_back(&mut self, elements: Range<usize>) {
        let bytes = self.bytes_of(&elements);
        let inner = &self.arena().0;
        // Each part has a handle to the memory, and so does the arena; a recorded pass has one more, beside the bare address.
        if Arc::strong_count(&inner.memory) == inner.parts.len() + 1 {
            // Behind the last of its elements the memory may have some that make it a whole number of lines.
            let is_last = bytes.end == inner.layout.len() * T::DTYPE.bytes();
            inner.memory.give_back(bytes.start..if is_last { usize::MAX } else { bytes.end });
        }
        let Some(region) = self.arena().region() else { return };
        // SAFETY: the write borrow of every part in the span is held, and `&mut self` says that no slice of it is alive.
        expect_given(unsafe { region.give_back(bytes) });
    }

    /// The same, but what `spare` has room for it keeps.
    #[track_caller]
    pub fn leave(&mut self, elements: Range<usize>, spare: &mut Spare) {
        let bytes = self.bytes_of(&elements);
        let Some(region) = self.arena().region() else { return };
        // SAFETY: as in `give_back`.
        expect_given(unsafe { spare.take(region, bytes) });
    }

    /// Has these elements of the span, counted from its start, lie in memory that `spare` keeps, as far as it has some: they are any
    /// numbers then. For one who overwrites them all.
    #[track_caller]
    pub fn refill(&mut self, elements: Range<usize>, spare: &mut Spare) {
        let bytes = self.bytes_of(&elements);
        let Some(region) = self.arena().region() else { return };
        // SAFETY: as in `give_back`; whatever bits pages have, they are numbers.
        unsafe { spare.put(region, bytes) };
    }

    /// Has the span, if it is one of the runs that an arena on a GPU was cut into and was given back, be there with any numbers, where
    /// whoever used it next would find zeros: for one who overwrites them all. Does nothing elsewhere.
    pub fn renew(&mut self) {
        let inner = &self.arena().0;
        let Range { start, end } = self.bytes();
        let is_last = end == inner.layout.len() * T::DTYPE.bytes();
        inner.memory.renew(start..if is_last { usize::MAX } else { end });
    }

    /// Where these elements of the span lie in the arena.
    #[track_caller]
    pub(crate) fn bytes_of(&self, elements: &Range<usize>) -> Range<usize> {
        let (len, start, size) = (self.count(), self.bytes().start, T::DTYPE.bytes());
        assert!(elements.end <= len, "elements {elements:?} of a span of {len}");
        start + elements.start * size..start + elements.end * size
    }
}

/// It only takes more memory where pages can't be given back.
fn expect_given(given: std::io::Result<()>) {
    if let Err(error) = given {
        debug_assert!(false, "pages can't be given back: {error}");
    }
}

impl<T: Element> Deref for Span<T> {
    type Target = [T];
    fn deref(&self) -> &[T] {
        // SAFETY: `range_mut` took the write borrow of every part in the span, and `drop` gives it back.
        unsafe { self.arena().0.memory.slice(self.bytes()) }
    }
}

impl<T: Element> DerefMut for Span<T> {
    fn deref_mut(&mut self) -> &mut [T] {
        // SAFETY: as in `deref`; `&mut self` makes it the only slice of this span.
        unsafe { self.arena().0.memory.slice_mut(self.bytes()) }
    }
}

/// The gradient arena: one slot a parameter.
///
/// [`Grads::zero`] writes nothing: it marks the slots stale, the first gradient afterwards overwrites, later ones are added.
#[derive(Clone)]
pub struct Grads {
    arena: Arena,
    stale: Arc<[AtomicBool]>,
    casts: Arc<Casts>,
    /// The leaf of each slot, once somebody has asked for it.
    leaves: Arc<[Mutex<Option<NodeRef>>]>,
}

impl Grads {
    /// A gradient arena without gradients.
    pub fn new(device: &Device, dtype: DType, layout: &Layout) -> Grads {
        Grads::over(Arena::new(device, dtype, layout))
    }

    /// The same in this arena.
    pub fn over(arena: Arena) -> Grads {
        let stale = (0..arena.layout().count()).map(|_| AtomicBool::new(true)).collect();
        let casts = Arc::new(Casts::new(arena.layout()));
        let leaves = (0..arena.layout().count()).map(|_| Mutex::default()).collect();
        Grads { arena: arena.held_for(Purpose::Gradients), stale, casts, leaves }
    }

    /// The memory of the gradients. Slots without a gradient hold old values until [`Grads::settle`].
    pub fn arena(&self) -> &Arena {
        &self.arena
    }

    /// Forgets all gradients.
    pub fn zero(&self) {
        self.stale.iter().for_each(|s| s.store(true, Ordering::Relaxed));
    }

    /// Which slots got a gradient since [`Grads::zero`].
    pub fn made(&self) -> Vec<usize> {
        (0..self.stale.len()).filter(|&i| !self.stale[i].load(Ordering::Relaxed)).collect()
    }

    /// Takes note that these slots got gradients by a pass that was replayed.
    pub fn were_made(&self, params: &[usize]) {
        params.iter().for_each(|&i| self.stale[i].store(false, Ordering::Relaxed));
    }

    /// Fills the slots of parameters that got no gradient since [`Grads::zero`] with zeros; says which they are.
    pub fn settle(&self) -> Vec<usize> {
        self.settle_in(0..self.stale.len())
    }

    /// The same for these parameters alone.
    pub fn settle_in(&self, params: Range<usize>) -> Vec<usize> {
        let unused: Vec<usize> = params.filter(|&i| self.stale[i].swap(false, Ordering::Relaxed)).collect();
        for &i in &unused {
            self.arena.tensor(i).fill(0.0);
        }
        unused
    }

    /// Where the parameters lie that were cast to a float of 16 bits, once one was.
    pub fn casts(&self) -> Option<Arena> {
        self.casts.arena()
    }

    /// Where the parameters lie, or are to, that are cast to this float of 16 bits: for one who brings casts there himself, as where
    /// values come and go. Nothing is taken for cast then.
    pub fn casts_in(&self, dtype: DType) -> Arena {
        let casts = self.casts.of_type(self.arena.device(), dtype);
        self.forget_casts(0..self.arena.layout().count());
        casts
    }

    /// Whether parameter `i` of `values` is cast as it is now.
    pub fn is_cast(&self, i: usize, values: &Arena) -> bool {
        self.casts.has(i, values)
    }

    /// Takes note that somebody cast these parameters of `values` as they are now.
    pub fn were_cast(&self, params: impl IntoIterator<Item = usize>, values: &Arena) {
        self.casts.note(params, values);
    }

    /// Where they lie, on a GPU, if all of `values` are cast as they are now, and somebody has wanted that since they moved last: for who
    /// moves them and writes their casts along the way ([`crate::Terms::casts`], [`Grads::casts_were_moved`]).
    pub fn casts_of_now(&self, values: &Arena) -> Option<Arena> {
        self.casts.of_now(values)
    }

    /// Takes note that these casts were written as `values` were moved.
    pub fn casts_were_moved(&self, values: &Arena, casts: &Arena) {
        self.casts.were_moved(values, casts);
    }

    /// Has these casts, on a GPU, be what `values` are now: for who replays a pass that reads them.
    #[track_caller]
    pub fn renew_casts(&self, values: &Arena, casts: &Arena) {
        self.casts.renew(values, casts);
    }

    /// Takes note that what these parameters were cast to isn't there any more.
    pub fn forget_casts(&self, params: Range<usize>) {
        self.casts.forget(params);
    }

    /// The same for all of them, whose memory is given back until one is wanted again. Panics while anyone uses one of them.
    #[track_caller]
    pub fn give_casts_back(&self) {
        self.casts.give_back();
    }

    /// How often parameter `i` of `values` was read, but for being cast.
    pub fn reads_beside_casts(&self, i: usize, values: &Arena) -> u64 {
        values.reads(i) - self.casts.made(i)
    }

    /// Parameter `i` of `values` as a leaf whose gradient is written to slot `i` of this arena; one leaf, however often it is asked for.
    #[track_caller]
    pub fn leaf(&self, i: usize, values: &Arena) -> Tensor {
        assert!(
            values.layout() == self.arena.layout(),
            "leaf: the values have another layout than the gradients"
        );
        let mut tensor = values.tensor(i);
        let mut known = lock(&self.leaves[i]);
        let node = known.take().filter(|node| node.is_leaf_of(values)).unwrap_or_else(|| {
            let (stale, casts) = (Arc::clone(&self.stale), Arc::clone(&self.casts));
            let slot = Slot { tensor: self.arena.tensor(i), stale, casts, values: values.clone(), index: i };
            graph::leaf(tensor.device(), Some(slot))
        });
        tensor.node = Some(known.insert(node).clone());
        tensor
    }
}

/// Where the gradient of one leaf goes.
pub(crate) struct Slot {
    tensor: Tensor,
    stale: Arc<[AtomicBool]>,
    casts: Arc<Casts>,
    values: Arena,
    index: usize,
}

impl Slot {
    pub(crate) fn index(&self) -> usize {
        self.index
    }

    /// Whether it is for the gradient of one of these.
    pub(crate) fn is_of(&self, values: &Arena) -> bool {
        Arc::ptr_eq(self.values.memory_of_all(), values.memory_of_all())
    }

    pub(crate) fn is_stale(&self) -> bool {
        self.stale[self.index].load(Ordering::Relaxed)
    }

    pub(crate) fn tensor(&self) -> Tensor {
        self.tensor.clone()
    }

    /// The leaf's values in this type, cast once for as long as they stay what they are; none where they can't be kept so.
    pub(crate) fn cast(&self, dtype: DType) -> Option<Tensor> {
        self.casts.of(self.index, &self.values, dtype)
    }

    /// Makes the slot hold its old gradient (unless stale) plus `grad`, which may lie in the slot already.
    pub(crate) fn settle_with(&self, grad: &Tensor) -> Tensor {
        let stale = self.stale[self.index].swap(false, Ordering::Relaxed);
        if !graph::same_storage(&self.tensor.storage, &grad.storage) {
            if stale { self.tensor.copy_from(grad) } else { self.tensor.add_from(grad) }
        }
        self.tensor.clone()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::panic::{AssertUnwindSafe, catch_unwind};

    fn layout() -> Layout {
        Layout::new(&[[2, 3].into(), [100].into(), [1].into()])
    }

    #[test]
    fn parameters_start_on_cache_lines() {
        let layout = layout();
        assert_eq!((layout.range(0), layout.range(1), layout.range(2)), (0..6, 64..164, 192..193));
        assert_eq!((layout.len(), layout.span(1..3)), (256, 64..256));
    }

    #[test]
    fn elements_are_taken_and_put_by_their_place_in_the_shape() {
        let device = Device::cpu(1);
        let shape = Shape::new(&[17, 3, 2, 3]);
        // The second element in memory is the second channel of the first sample, (H, W, N, C), or that channel of the second
        // kernel, (H, W, I, O).
        for (order, first) in [(Order::Pixels, [0, 6, 12, 18]), (Order::Taps, [0, 18, 36, 54])] {
            let layout = Layout::ordered([([5].into(), Order::RowMajor), (shape, order)]);
            let arena = Arena::new(&device, DType::I64, &layout);
            let values: Vec<i64> = (0..shape.count() as i64).collect();
            layout.put(1, &values, &mut arena.flat_mut::<i64>());
            assert_eq!(arena.tensor(1).to_vec::<i64>(), values);
            assert_eq!(arena.flat::<i64>()[layout.range(1)][..4], first);
            assert_eq!(*layout.row_major(1, &arena.flat::<i64>()), values);
            assert_eq!(arena.tensor(1).contiguous().to_vec::<i64>(), values);
            arena.tensor(1).copy_from(&Tensor::from_slice(&device, &values, shape));
            assert_eq!(arena.tensor(1).to_vec::<i64>(), values);
            assert_eq!(arena.flat::<i64>()[layout.range(1)][..4], first);
        }
    }

    #[test]
    fn a_span_and_the_rest_are_borrowed_apart() {
        let arena = Arena::new(&Device::cpu(1), DType::F32, &layout());
        let mut span = arena.range_mut::<f32>(1..3);
        span[0] = 5.0;
        arena.tensor(0).fill(1.0);
        assert!(catch_unwind(AssertUnwindSafe(|| arena.tensor(1).to_vec::<f32>())).is_err(), "being written");
        drop(span);
        assert_eq!(arena.tensor(1).to_vec::<f32>()[0], 5.0);
        assert_eq!(arena.flat::<f32>()[5..7], [1.0, 0.0]);
    }

    #[test]
    fn a_refused_borrow_of_the_whole_leaves_no_part_borrowed() {
        let arena = Arena::new(&Device::cpu(1), DType::F32, &layout());
        let span = arena.range_mut::<f32>(2..3);
        assert!(catch_unwind(AssertUnwindSafe(|| arena.flat::<f32>().len())).is_err(), "being written");
        assert!(catch_unwind(AssertUnwindSafe(|| arena.flat_mut::<f32>().len())).is_err(), "being written");
        drop(span);
        assert_eq!(arena.flat_mut::<f32>().len(), 256);
        assert_eq!(arena.flat::<f32>().len(), 256);
    }

    #[test]
    fn gradients_overwrite_when_stale_and_add_up_after() {
        let device = Device::cpu(1);
        let (values, grads) =
            (Arena::new(&device, DType::F32, &layout()), Grads::new(&device, DType::F32, &layout()));
        let leaf = grads.leaf(0, &values);
        leaf.fill(3.0);
        for want in [6.0, 12.0] {
            leaf.square().sum_all().backward();
            assert_eq!(grads.arena().tensor(0).to_vec::<f32>(), [want; 6]);
        }
        grads.zero();
        (&leaf + &leaf.square()).sum_all().backward();
        assert_eq!(grads.arena().tensor(0).to_vec::<f32>(), [7.0; 6]);
        assert_eq!(grads.settle(), [1, 2]);
    }
}
