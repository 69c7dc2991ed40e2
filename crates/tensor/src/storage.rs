//! Buffers: where a tensor's elements live.
//!
//! Five invariants make the safe API above sound:
//! - **S-INIT**: every byte of a buffer is initialised from its birth on (fresh memory is zeroed, recycled memory keeps its
//!   old values), and every element type takes any bit pattern. So a slice over "uninitialised" output is only stale.
//! - **S-BORROW**: at any time a buffer has any number of readers or one writer. It is checked at run time, because tensors
//!   share buffers as they share values; a breach is a bug of the program and panics.
//! - **S-STREAM**: all that reads or writes the memory of a GPU's buffers is given to the device's one compute stream, while
//!   the buffer is borrowed (S-BORROW) for the time of giving. The stream does it in that order. So the borrow may end, and the
//!   buffer may be dropped, taken again and written anew, before the GPU has come to what was given first. An address is looked up
//!   under the borrow, since memory that was given back comes anew with that, elsewhere. Whoever uses another
//!   stream lets that wait for an event of the compute stream, and the compute stream for one of its own.
//! - **S-PINNED**: a GPU copies from and to pinned memory of the host while the program goes on. Such a copy is given to its stream while
//!   the memory is borrowed (S-BORROW), for writing if it writes there, and whoever gives out a slice afterwards waits for the copies
//!   that don't go with it: to read for those that write, to write for all.
//! - **S-PART**: the buffers cut from one arena never overlap, and each keeps the whole allocation alive.

use crate::account::{Account, Purpose};
use crate::device::{Backend, Device, size_class};
use crate::dtype::Element;
use crate::lock::lock;
use phalanx_cuda::{Address, DeviceMemory, Pinned};
use phalanx_memory::Region;
use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::ops::{Deref, DerefMut, Range};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicI32, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};

/// Buffers start on cache lines, which are also the widest vectors.
pub(crate) const ALIGN: usize = 64;

/// One allocation from the system, or from a GPU.
pub(crate) struct Memory {
    place: Place,
    bytes: usize,
    /// Where its bytes are counted for as long as they are there.
    counted: Option<(Arc<Account>, Purpose)>,
}

enum Place {
    /// Owned bytes of the host.
    Host(NonNull<u8>),
    /// Bytes of the host that other processes may be let in to.
    Region(Arc<Region>),
    /// Bytes of the host that a GPU copies by itself.
    Pinned(Mutex<Pinned>),
    /// Bytes of a GPU.
    Gpu(DeviceMemory),
    /// Bytes of a GPU in pieces, in their order, that may be given back, and come anew with whoever uses them next.
    Pieces { device: Device, pieces: Mutex<Pieces> },
}

/// The bytes of an arena on a GPU.
struct Pieces {
    /// In their order; none is empty.
    all: Vec<Piece>,
    /// Whether they come and go by themselves, so that their memory is to be used by others meanwhile.
    come_and_go: bool,
    /// What they are held for.
    purpose: Purpose,
}

/// Some of the bytes of an arena on a GPU.
struct Piece {
    /// Which, counted from the start of the arena.
    range: Range<usize>,
    /// None until somebody uses them, and after they were given back.
    held: Option<Arc<Held>>,
}

/// What somebody is about to do with the host's bytes.
#[derive(Clone, Copy)]
enum Access {
    Read,
    Write,
}

/// Where a piece lies.
enum Held {
    /// In an allocation of its own.
    Own(Memory),
    /// In a buffer that other tensors use before and after.
    Lent(Storage),
}

// SAFETY: `Memory` is plain owned bytes; who may read or write them when is the business of `Buffer` (S-BORROW).
unsafe impl Send for Memory {}
// SAFETY: as above; a shared `Memory` gives out nothing but its address.
unsafe impl Sync for Memory {}

impl Memory {
    /// None where the system has no more.
    pub(crate) fn zeroed(bytes: usize) -> Option<Memory> {
        let layout = Layout::from_size_align(bytes.max(ALIGN), ALIGN).ok()?;
        // SAFETY: the layout has a size above zero.
        let ptr = NonNull::new(unsafe { alloc_zeroed(layout) })?;
        Some(Memory { place: Place::Host(ptr), bytes: layout.size(), counted: None })
    }

    /// Zeros for an arena of `device`: on a CPU such that other processes can be let in to later, where the system has them.
    pub(crate) fn of_arena(device: &Device, bytes: usize) -> Memory {
        let region = match device.backend() {
            Backend::Cpu => Region::zeroed(bytes).ok(),
            Backend::Gpu(_) => None,
        };
        match region {
            Some(region) => {
                Memory { bytes: region.bytes(), place: Place::Region(Arc::new(region)), counted: None }
            }
            None if device.gpu().is_none() => device.allocate(bytes.max(ALIGN), Purpose::Other),
            None => {
                let bytes = bytes.max(ALIGN);
                let all = vec![Piece { range: 0..bytes, held: None }];
                let pieces = Mutex::new(Pieces { all, come_and_go: false, purpose: Purpose::Other });
                Memory { place: Place::Pieces { device: device.clone(), pieces }, bytes, counted: None }
            }
        }
    }

    /// Has the bytes of an arena on a GPU lie in pieces that end here, in rising order, each of which is given back by itself, for others
    /// to use; the last is the end of all. Without any end they are one run of memory of their own again. Their values stay. Does
    /// nothing to other memory. The caller holds the write borrow of everything in it, and knows that nobody keeps its address.
    pub(crate) fn cut(&self, ends: &[usize]) {
        let Place::Pieces { device, pieces } = &self.place else { return };
        let mut pieces = lock(pieces);
        let before = std::mem::take(&mut pieces.all);
        pieces.come_and_go = !ends.is_empty();
        let (come_and_go, purpose, whole) = (pieces.come_and_go, pieces.purpose, [self.bytes]);
        let (mut start, ends) = (0, if ends.is_empty() { &whole } else { ends });
        for &end in ends {
            let range = start..end;
            start = end;
            let mut held = None;
            for from in &before {
                let common = from.range.start.max(range.start)..from.range.end.min(range.end);
                if let (Some(source), false) = (&from.held, common.is_empty()) {
                    let held =
                        held.get_or_insert_with(|| Held::anew(device, range.len(), come_and_go, purpose));
                    let (at, to) = (common.start - from.range.start, common.start - range.start);
                    device.copy_on_gpu(source.memory(), at..at + common.len(), held.memory(), to);
                }
            }
            pieces.all.push(Piece { range, held });
        }
        assert!(
            start == self.bytes,
            "an arena of {} bytes was cut into pieces up to byte {start}",
            self.bytes
        );
    }

    /// Whether its bytes lie in pieces that come and go.
    pub(crate) fn is_cut(&self) -> bool {
        matches!(&self.place, Place::Pieces { pieces, .. } if lock(pieces).come_and_go)
    }

    /// Gives those pieces back of an arena on a GPU that lie within these bytes; whoever uses them next finds zeros. Does nothing to
    /// other memory. The caller holds the write borrow of everything in them, and knows that nobody keeps their addresses.
    pub(crate) fn give_back(&self, bytes: Range<usize>) {
        if let Place::Pieces { pieces, .. } = &self.place {
            let within = |range: &Range<usize>| bytes.start <= range.start && range.end <= bytes.end;
            let mut pieces = lock(pieces);
            let given: Vec<_> = pieces.all.iter_mut().filter(|piece| within(&piece.range)).collect();
            given.into_iter().for_each(|piece| drop(piece.held.take()));
        }
    }

    /// Has the piece of an arena on a GPU that is these bytes be there, with whatever a buffer holds if it was given back and comes and
    /// goes. Does nothing to other memory. The caller holds the write borrow of everything in it, and overwrites it.
    pub(crate) fn renew(&self, bytes: Range<usize>) {
        if let Place::Pieces { device, pieces } = &self.place {
            let mut pieces = lock(pieces);
            let is_it = |piece: &&mut Piece| piece.range.start == bytes.start && piece.range.end <= bytes.end;
            let (come_and_go, purpose) = (pieces.come_and_go, pieces.purpose);
            if let Some(piece) = pieces.all.iter_mut().find(is_it).filter(|_| come_and_go) {
                let stale =
                    || Arc::new(Held::Lent(Storage::stale(device, piece.range.len()).held_for(purpose)));
                piece.held.get_or_insert_with(stale);
            }
        }
    }

    /// How many bytes from this one on lie beside each other.
    pub(crate) fn run(&self, at: usize) -> usize {
        match &self.place {
            Place::Pieces { pieces, .. } => {
                let pieces = lock(pieces);
                let piece = pieces.all.partition_point(|piece| piece.range.end <= at);
                pieces.all.get(piece).map_or(0, |piece| piece.range.end - at)
            }
            _ => self.bytes - at,
        }
    }

    /// Memory of a GPU, which is 0 for what its compute stream does from now on.
    pub(crate) fn of_gpu(memory: DeviceMemory) -> Memory {
        Memory { bytes: memory.bytes(), place: Place::Gpu(memory), counted: None }
    }

    /// The same, with its bytes counted there.
    pub(crate) fn counted(mut self, account: &Arc<Account>, purpose: Purpose) -> Memory {
        account.take(purpose, self.bytes);
        self.counted = Some((account.clone(), purpose));
        self
    }

    /// Has what an arena on a GPU takes from now on be counted as held for this; other memory stays as it is.
    pub(crate) fn hold_for(&self, purpose: Purpose) {
        if let Place::Pieces { pieces, .. } = &self.place {
            lock(pieces).purpose = purpose;
        }
    }

    /// Zeros of the host's that a GPU copies by itself.
    pub(crate) fn pinned(pinned: Pinned) -> Memory {
        Memory { bytes: pinned.len(), place: Place::Pinned(Mutex::new(pinned)), counted: None }
    }

    /// The same memory, for one who has a GPU copy from it or to it, and holds the borrow for that (S-PINNED). Panics if it is other.
    #[track_caller]
    pub(crate) fn copied_by_gpu(&self) -> MutexGuard<'_, Pinned> {
        match &self.place {
            Place::Pinned(pinned) => lock(pinned),
            _ => panic!("a GPU was to copy beside its work from memory that isn't pinned: see Arena::pinned"),
        }
    }

    /// How many bytes there are.
    pub(crate) fn bytes(&self) -> usize {
        self.bytes
    }

    pub(crate) fn region(&self) -> Option<&Arc<Region>> {
        match &self.place {
            Place::Region(region) => Some(region),
            _ => None,
        }
    }

    /// Where the host's bytes begin, for this access. Panics if they are a GPU's.
    #[track_caller]
    fn host(&self, access: Access) -> *mut u8 {
        let settled = |at: Result<*mut u8, phalanx_cuda::Error>| at.unwrap_or_else(|error| panic!("{error}"));
        match &self.place {
            Place::Host(at) => at.as_ptr(),
            Place::Region(region) => region.start().as_ptr(),
            Place::Pinned(pinned) => settled(match access {
                Access::Read => lock(pinned).to_read().map(<*const u8>::cast_mut),
                Access::Write => lock(pinned).to_write(),
            }),
            Place::Gpu(_) | Place::Pieces { .. } => panic!(
                "values of a GPU were asked for as the host's: to_vec, Arena::read_flat and Arena::write_flat copy them"
            ),
        }
    }

    /// These bytes of a GPU, which come anew if they were given back. Panics if they are the host's, or lie in several pieces.
    #[track_caller]
    pub(crate) fn gpu(&self, bytes: Range<usize>) -> OnGpu<'_> {
        match &self.place {
            Place::Gpu(memory) => OnGpu { held: HeldOnGpu::Own(memory), at: bytes.start },
            Place::Pieces { device, pieces } => {
                let mut pieces = lock(pieces);
                let (come_and_go, purpose) = (pieces.come_and_go, pieces.purpose);
                // None of no bytes begins behind the last.
                let before = |piece: &Piece| piece.range.end <= bytes.start && piece.range.end < self.bytes;
                let first = pieces.all.partition_point(before);
                let piece = &mut pieces.all[first];
                assert!(
                    bytes.end <= piece.range.end,
                    "bytes {bytes:?} of an arena on a GPU lie in several pieces"
                );
                let len = piece.range.len();
                let held =
                    piece.held.get_or_insert_with(|| Held::anew(device, len, come_and_go, purpose)).clone();
                if let Held::Lent(storage) = &*held {
                    device.hold(&storage.buffer().memory);
                }
                OnGpu { held: HeldOnGpu::Shared(held), at: bytes.start - piece.range.start }
            }
            Place::Host(_) | Place::Region(_) | Place::Pinned(_) => {
                panic!("memory of the host was handed to a GPU")
            }
        }
    }

    /// A GPU's own bytes.
    pub(crate) fn device_memory(&self) -> &DeviceMemory {
        match &self.place {
            Place::Gpu(memory) => memory,
            _ => unreachable!("a GPU allocates its own bytes"),
        }
    }
}

impl Held {
    /// So many zeros, in a buffer that others use before and after if they come and go.
    fn anew(device: &Device, bytes: usize, come_and_go: bool, purpose: Purpose) -> Arc<Held> {
        if !come_and_go {
            return Arc::new(Held::Own(device.allocate(bytes, purpose)));
        }
        let held = Held::Lent(Storage::stale(device, bytes).held_for(purpose));
        device.clear_on_gpu(held.memory(), 0..bytes);
        Arc::new(held)
    }

    fn memory(&self) -> &DeviceMemory {
        match self {
            Held::Own(memory) => memory.device_memory(),
            // A buffer that is used again is the whole of its memory.
            Held::Lent(storage) => storage.buffer().memory.device_memory(),
        }
    }
}

/// Bytes of a GPU, as they are looked up for the time of giving work on them.
pub(crate) struct OnGpu<'a> {
    held: HeldOnGpu<'a>,
    /// Where in its memory they begin.
    pub(crate) at: usize,
}

enum HeldOnGpu<'a> {
    Own(&'a DeviceMemory),
    Shared(Arc<Held>),
}

impl OnGpu<'_> {
    /// What they lie in.
    pub(crate) fn memory(&self) -> &DeviceMemory {
        match &self.held {
            HeldOnGpu::Own(memory) => memory,
            HeldOnGpu::Shared(held) => held.memory(),
        }
    }

    /// Where the first of them lies.
    pub(crate) fn address(&self) -> Address {
        self.memory().address().plus(self.at)
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        if let Some((account, purpose)) = &self.counted {
            account.give_back(*purpose, self.bytes);
        }
        let Place::Host(at) = &self.place else { return };
        let layout = Layout::from_size_align(self.bytes, ALIGN).expect("checked when it was allocated");
        // SAFETY: allocated in `zeroed` with this very layout, and nobody else frees it.
        unsafe { dealloc(at.as_ptr(), layout) }
    }
}

/// A run of bytes with a run-time borrow check.
pub(crate) struct Buffer {
    memory: Arc<Memory>,
    /// The bytes of `memory` that belong to this buffer.
    range: Range<usize>,
    /// Readers, or -1 for a writer.
    borrow: AtomicI32,
    /// How often it was borrowed for writing: tells whether a value is still the one that somebody kept.
    writes: AtomicU64,
    /// How often for reading: tells whether anybody wanted a value at all.
    reads: AtomicU64,
    /// Where the buffer belongs: `None` only while it waits in the device's cache.
    pub(crate) device: Option<Device>,
    /// Whether it may be recycled: parts of an arena may not.
    cached: bool,
    /// What it is in use for, as a number of [`Purpose`].
    purpose: AtomicUsize,
}

impl Buffer {
    pub(crate) fn capacity(&self) -> usize {
        self.range.len()
    }

    /// What it was in use for, of one that isn't any more.
    fn end_use(&self, device: &Device) {
        let purpose = self.purpose.swap(Purpose::Pass as usize, Ordering::Relaxed);
        device.account().end_use(Purpose::numbered(purpose), self.capacity());
    }
}

impl Drop for Buffer {
    /// One that goes while it is in use, as where two threads drop the last two handles at once.
    fn drop(&mut self) {
        if let Some(device) = self.device.as_ref().filter(|_| self.cached) {
            self.end_use(device);
        }
    }
}

/// A shared handle to a buffer, which returns to its device's cache when the last handle goes.
pub(crate) struct Storage(Option<Arc<Buffer>>);

impl Storage {
    /// A buffer of at least `bytes` bytes: a recycled one with stale contents, or a new one of zeros.
    pub(crate) fn stale(device: &Device, bytes: usize) -> Storage {
        let mut shell = device.take_buffer(bytes).unwrap_or_else(|capacity| {
            Arc::new(Buffer {
                memory: Arc::new(device.allocate(capacity, Purpose::Pass)),
                range: 0..capacity,
                borrow: AtomicI32::new(0),
                writes: AtomicU64::new(0),
                reads: AtomicU64::new(0),
                device: None,
                cached: true,
                purpose: AtomicUsize::new(Purpose::Pass as usize),
            })
        });
        device.account().begin_use(Purpose::Pass, shell.capacity());
        let buffer = Arc::get_mut(&mut shell).expect("a cached buffer has one owner");
        buffer.device = Some(device.clone());
        Storage(Some(shell))
    }

    /// Has it be counted as in use for this.
    pub(crate) fn held_for(self, purpose: Purpose) -> Storage {
        let buffer = self.buffer();
        if buffer.cached {
            buffer.end_use(self.device());
            buffer.purpose.store(purpose as usize, Ordering::Relaxed);
            self.device().account().begin_use(purpose, buffer.capacity());
        }
        self
    }

    /// The bytes `range` of `memory`. The caller keeps S-PART: ranges given out for one memory don't overlap.
    pub(crate) fn part(device: &Device, memory: &Arc<Memory>, range: Range<usize>) -> Storage {
        assert!(
            range.end <= memory.bytes && range.start.is_multiple_of(ALIGN),
            "a part outside its arena: {range:?}"
        );
        Storage(Some(Arc::new(Buffer {
            memory: Arc::clone(memory),
            range,
            borrow: AtomicI32::new(0),
            writes: AtomicU64::new(0),
            reads: AtomicU64::new(0),
            device: Some(device.clone()),
            cached: false,
            purpose: AtomicUsize::new(Purpose::Other as usize),
        })))
    }

    fn buffer(&self) -> &Arc<Buffer> {
        self.0.as_ref().expect("a storage holds its buffer until it is dropped")
    }

    pub(crate) fn device(&self) -> &Device {
        self.buffer().device.as_ref().expect("a buffer in use has a device")
    }

    pub(crate) fn is(&self, other: &Storage) -> bool {
        Arc::ptr_eq(self.buffer(), other.buffer())
    }

    /// Whether no other handle to this buffer exists.
    pub(crate) fn is_unique(&self) -> bool {
        Arc::strong_count(self.buffer()) == 1
    }

    /// How often the buffer was borrowed for writing, over all its lives.
    pub(crate) fn writes(&self) -> u64 {
        self.buffer().writes.load(Ordering::Relaxed)
    }

    /// How often it was borrowed for reading, likewise.
    pub(crate) fn reads(&self) -> u64 {
        self.buffer().reads.load(Ordering::Relaxed)
    }

    #[track_caller]
    fn elements<T: Element>(&self, access: Access) -> (*mut T, usize) {
        let buffer = self.buffer();
        // SAFETY: the range lies inside the allocation (checked in `part`, whole in `stale`).
        let start = unsafe { buffer.memory.host(access).add(buffer.range.start) };
        (start.cast(), buffer.range.len() / size_of::<T>())
    }

    /// The whole buffer for reading. Panics if it is being written.
    #[track_caller]
    pub(crate) fn read<T: Element>(&self) -> Read<'_, T> {
        assert!(self.count_reader(), "a tensor is read while its buffer is being written");
        let borrow = Borrow { reads: true, of: &self.buffer().borrow };
        let (ptr, len) = self.elements::<T>(Access::Read);
        // SAFETY: S-INIT; aligned to 64 bytes; S-BORROW: counted as a reader above until `Read` is dropped; S-PINNED.
        Read { slice: unsafe { std::slice::from_raw_parts(ptr, len) }, _borrow: borrow }
    }

    /// Where the whole buffer lies on a GPU, for work that reads it (S-STREAM). Panics if it is being written.
    #[track_caller]
    pub(crate) fn read_on_gpu(&self) -> Lent<'_> {
        assert!(self.count_reader(), "a tensor is read while its buffer is being written");
        let borrow = Borrow { reads: true, of: &self.buffer().borrow };
        Lent { at: self.on_gpu(), _borrow: borrow }
    }

    /// Where the whole buffer lies on a GPU, for work that writes it (S-STREAM). Panics if anyone reads or writes it.
    #[track_caller]
    pub(crate) fn write_on_gpu(&self) -> Lent<'_> {
        let borrow = Borrow { reads: false, of: self.mark_writer() };
        Lent { at: self.on_gpu(), _borrow: borrow }
    }

    #[track_caller]
    fn on_gpu(&self) -> Address {
        let buffer = self.buffer();
        self.device().hold(&buffer.memory);
        buffer.memory.gpu(buffer.range.clone()).address()
    }

    /// The class of its buffer, and the buffer if this was the last handle to it.
    pub(crate) fn into_buffer(mut self) -> (usize, Option<Arc<Buffer>>) {
        let mut shell = self.0.take().expect("a storage holds its buffer until it is dropped");
        let (class, _) = size_class(shell.capacity());
        let own = Arc::get_mut(&mut shell).filter(|buffer| buffer.cached).map(|buffer| buffer.device.take());
        if let Some(Some(device)) = &own {
            shell.end_use(device);
        }
        (class, own.map(|_| shell))
    }

    /// The memory that the buffer is a part of, and which bytes of it.
    pub(crate) fn memory(&self) -> (&Memory, Range<usize>) {
        (&self.buffer().memory, self.buffer().range.clone())
    }

    /// Counts one reader more, unless the buffer is being written. A refused reader leaves no trace: a count that it raised
    /// even for a moment would let the next one in beside the writer.
    fn count_reader(&self) -> bool {
        let more = |readers: i32| if readers < 0 { None } else { readers.checked_add(1) };
        self.buffer().reads.fetch_add(1, Ordering::Relaxed);
        self.buffer().borrow.fetch_update(Ordering::Acquire, Ordering::Relaxed, more).is_ok()
    }

    /// The whole buffer for writing. Panics if anyone reads or writes it.
    #[track_caller]
    pub(crate) fn write<T: Element>(&self) -> Write<'_, T> {
        let borrow = Borrow { reads: false, of: self.mark_writer() };
        let (ptr, len) = self.elements::<T>(Access::Write);
        // SAFETY: S-INIT; aligned to 64 bytes; S-BORROW: marked as the only writer above until `Write` is dropped; S-PINNED.
        Write { slice: unsafe { std::slice::from_raw_parts_mut(ptr, len) }, _borrow: borrow }
    }

    /// Marks the buffer as being written. Panics if anyone reads or writes it.
    #[track_caller]
    fn mark_writer(&self) -> &AtomicI32 {
        let borrow = self.mark_holder();
        self.buffer().writes.fetch_add(1, Ordering::Relaxed);
        borrow
    }

    /// The same without counting it as an overwrite, for one who leaves the values as they are.
    #[track_caller]
    fn mark_holder(&self) -> &AtomicI32 {
        let borrow = &self.buffer().borrow;
        if let Err(other) = borrow.compare_exchange(0, -1, Ordering::Acquire, Ordering::Relaxed) {
            let who = if other < 0 { "written" } else { "read" };
            panic!("a tensor is to be written while its buffer is being {who}");
        }
        borrow
    }

    /// Counts an overwrite by one who has the write borrow.
    pub(crate) fn count_overwrite(&self) {
        self.buffer().writes.fetch_add(1, Ordering::Relaxed);
    }

    /// Takes the write borrow without a guard and without counting an overwrite; see [`crate::arena::Arena::set_aside`].
    #[track_caller]
    pub(crate) fn lock_for_keeping(&self) {
        self.mark_holder();
    }

    /// Takes the write borrow without a guard; see [`crate::arena::Span`], which gives it back.
    #[track_caller]
    pub(crate) fn lock_for_writing(&self) {
        self.mark_writer();
    }

    /// Gives back what [`Storage::lock_for_writing`] took.
    pub(crate) fn unlock_for_writing(&self) {
        self.buffer().borrow.store(0, Ordering::Release);
    }

    /// Counts a reader without a guard; see [`crate::arena::Flat`], which gives it back.
    #[track_caller]
    pub(crate) fn lock_for_reading(&self) {
        assert!(self.count_reader(), "a tensor is read while its buffer is being written");
    }

    /// Gives back what [`Storage::lock_for_reading`] took.
    pub(crate) fn unlock_for_reading(&self) {
        self.buffer().borrow.fetch_sub(1, Ordering::Release);
    }
}

impl Memory {
    /// The elements of bytes `range`.
    ///
    /// # Safety
    /// The caller holds the read or write borrow of every part that overlaps the range for as long as the slice lives.
    #[track_caller]
    pub(crate) unsafe fn slice<'a, T: Element>(&self, range: Range<usize>) -> &'a [T] {
        debug_assert!(range.end <= self.bytes && range.start.is_multiple_of(ALIGN));
        // SAFETY: inside the allocation; S-INIT; the borrow is the caller's promise; S-PINNED.
        unsafe {
            std::slice::from_raw_parts(
                self.host(Access::Read).add(range.start).cast(),
                range.len() / size_of::<T>(),
            )
        }
    }

    /// The elements of bytes `range`, to write.
    ///
    /// # Safety
    /// The caller holds the write borrow of every part that overlaps the range for as long as the slice lives.
    #[track_caller]
    pub(crate) unsafe fn slice_mut<'a, T: Element>(&self, range: Range<usize>) -> &'a mut [T] {
        debug_assert!(range.end <= self.bytes && range.start.is_multiple_of(ALIGN));
        // SAFETY: inside the allocation; S-INIT; the exclusive borrow is the caller's promise; S-PINNED.
        unsafe {
            std::slice::from_raw_parts_mut(
                self.host(Access::Write).add(range.start).cast(),
                range.len() / size_of::<T>(),
            )
        }
    }
}

impl Clone for Storage {
    fn clone(&self) -> Storage {
        Storage(Some(Arc::clone(self.buffer())))
    }
}

impl Drop for Storage {
    fn drop(&mut self) {
        let Some(mut shell) = self.0.take() else { return };
        // When two threads drop the last two handles at once, both may see the other: then the buffer is freed instead.
        if let Some(buffer) = Arc::get_mut(&mut shell)
            && buffer.cached
            && let Some(device) = buffer.device.take()
        {
            buffer.end_use(&device);
            device.give_buffer(shell);
        }
    }
}

/// Where a buffer lies on a GPU, borrowed while work that uses it is given to the compute stream.
pub(crate) struct Lent<'a> {
    pub(crate) at: Address,
    _borrow: Borrow<'a>,
}

struct Borrow<'a> {
    reads: bool,
    of: &'a AtomicI32,
}

impl Drop for Borrow<'_> {
    fn drop(&mut self) {
        if self.reads {
            self.of.fetch_sub(1, Ordering::Release);
        } else {
            self.of.store(0, Ordering::Release);
        }
    }
}

/// A buffer borrowed for reading.
pub(crate) struct Read<'a, T> {
    slice: &'a [T],
    _borrow: Borrow<'a>,
}

impl<T> Deref for Read<'_, T> {
    type Target = [T];
    fn deref(&self) -> &[T] {
        self.slice
    }
}

/// A buffer borrowed for writing.
pub(crate) struct Write<'a, T> {
    slice: &'a mut [T],
    _borrow: Borrow<'a>,
}

impl<T> Deref for Write<'_, T> {
    type Target = [T];
    fn deref(&self) -> &[T] {
        self.slice
    }
}

impl<T> DerefMut for Write<'_, T> {
    fn deref_mut(&mut self) -> &mut [T] {
        self.slice
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::panic::{AssertUnwindSafe, catch_unwind};
    use std::time::{Duration, Instant};

    #[test]
    fn one_writer_or_many_readers() {
        let storage = Storage::stale(&Device::cpu(1), 256);
        let (a, b) = (storage.read::<f32>(), storage.read::<f32>());
        assert!(catch_unwind(AssertUnwindSafe(|| drop(storage.write::<f32>()))).is_err());
        drop((a, b));
        let writer = storage.write::<f32>();
        assert!(catch_unwind(AssertUnwindSafe(|| drop(storage.read::<f32>()))).is_err());
        drop(writer);
        assert_eq!(storage.read::<f32>().len(), 64);
    }

    #[test]
    fn refused_readers_let_nobody_in_beside_the_writer() {
        let storage = Storage::stale(&Device::cpu(1), 256);
        let writer = storage.write::<f32>();
        // Long enough for the system to give each thread a core of its own.
        let end = Instant::now() + Duration::from_millis(100);
        std::thread::scope(|scope| {
            for _ in 0..2 {
                scope.spawn(|| {
                    while Instant::now() < end {
                        assert!((0..1000).all(|_| !storage.count_reader()), "read while written");
                    }
                });
            }
        });
        drop(writer);
        drop(storage.write::<f32>());
    }

    #[test]
    fn a_dropped_buffer_is_used_again() {
        let device = Device::cpu(1);
        let first = Storage::stale(&device, 1000);
        first.write::<f32>()[0] = 7.0;
        let address = first.read::<f32>().as_ptr();
        drop(first);
        let second = Storage::stale(&device, 990);
        assert_eq!(second.read::<f32>().as_ptr(), address);
        assert_eq!(second.read::<f32>()[0], 7.0, "stale, not zeroed");
    }
}
