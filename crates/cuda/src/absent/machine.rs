//! What there is of GPUs that aren't there: how much of their memory is taken, and which streams are captured.
//!
//! A driver is one of a process, whoever calls it, so this is, too.

use super::{AbsentGpu, CONTEXT_BYTES};
use crate::lock::lock;
use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::cell::Cell;
use std::collections::HashMap;
use std::ffi::{c_int, c_void};
use std::sync::{Mutex, MutexGuard};

/// How many GPUs a driver has. Each that is opened has one of its own, so that what one run leaves behind for a moment is nothing to the
/// next: its GPUs' numbers are that of the driver, times this, and their own.
const OF_A_DRIVER: c_int = 1 << 12;
/// How memory lies, as CUDA's manual promises of allocations.
const ALIGNMENT: u64 = 512;
/// Of pieces from half of this on the driver takes whole ones of it. So MNIST's and ResNet-18's steps and GPT-2's are short of the same on
/// an H200 (`benches/runs/2026-11-29-epyc-2-cores/plan.md`).
const GRANULE: u64 = 2 << 20;
/// How pinned memory lies: at the beginning of a page.
const PAGE: usize = 4096;

static MACHINE: Mutex<Option<Machine>> = Mutex::new(None);

thread_local! {
    /// The GPU whose context is current.
    static CURRENT: Cell<c_int> = const { Cell::new(0) };
}

#[derive(Default)]
struct Machine {
    /// What each driver's GPUs are.
    kinds: Vec<AbsentGpu>,
    /// Bytes of each GPU that are taken, and how many it has sent to others.
    taken: HashMap<c_int, u64>,
    sent: HashMap<c_int, u64>,
    /// Which GPU each piece is of, and how many bytes it has, by its address.
    pieces: HashMap<u64, (c_int, u64)>,
    /// How long each piece of pinned memory is.
    pinned: HashMap<usize, Layout>,
    /// The first address that was never given, and the number of the last handle.
    next_address: u64,
    last_handle: usize,
    /// Streams, and events of these, whose work becomes part of a graph, each with the stream that the capture began on.
    captured: HashMap<usize, usize>,
}

/// The number of the first GPU of a new driver, whose GPUs are all of a kind.
pub(crate) fn register(kind: AbsentGpu) -> c_int {
    with(|machine| {
        machine.kinds.push(kind);
        (machine.kinds.len() as c_int - 1) * OF_A_DRIVER
    })
}

/// The kind of a GPU, and its number among these.
pub(super) fn kind(device: c_int) -> (AbsentGpu, c_int) {
    (with(|machine| machine.kind(device)), device % OF_A_DRIVER)
}

pub(super) fn make_current(device: c_int) {
    CURRENT.set(device);
}

/// Free and all bytes of the GPU that is current.
pub(super) fn memory() -> (u64, u64) {
    let device = CURRENT.get();
    with(|machine| {
        let total = machine.kind(device).memory;
        (total.saturating_sub(*machine.taken(device)), total)
    })
}

/// The address of so many bytes of the GPU that is current; none where it has no more.
pub(super) fn take(bytes: usize) -> Option<u64> {
    let device = CURRENT.get();
    let bytes = bytes as u64;
    let bytes = bytes.next_multiple_of(if bytes < GRANULE / 2 { ALIGNMENT } else { GRANULE });
    with(|machine| {
        let AbsentGpu { memory, is_endless, .. } = machine.kind(device);
        let taken = machine.taken(device);
        if !is_endless && bytes > memory.saturating_sub(*taken) {
            return None;
        }
        *taken += bytes;
        // An address of no piece lies between any two.
        let address = machine.next_address + ALIGNMENT;
        machine.next_address = address + bytes;
        machine.pieces.insert(address, (device, bytes));
        Some(address)
    })
}

pub(super) fn give_back(address: u64) {
    with(|machine| {
        let Some((device, bytes)) = machine.pieces.remove(&address) else { return };
        *machine.taken(device) -= bytes;
    });
}

/// The GPU that is current sends so many bytes.
pub(super) fn send(bytes: u64) {
    let device = CURRENT.get();
    with(|machine| *machine.sent.entry(device).or_default() += bytes);
}

/// How many bytes a GPU has sent so far.
pub(crate) fn sent(device: c_int) -> u64 {
    with(|machine| machine.sent.get(&device).copied().unwrap_or(0))
}

/// So many bytes of the host's memory, which are 0; null where there are no more.
pub(super) fn pin(bytes: usize) -> *mut c_void {
    let Ok(layout) = Layout::from_size_align(bytes.max(1), PAGE) else { return std::ptr::null_mut() };
    // SAFETY: the layout isn't empty.
    let at = unsafe { alloc_zeroed(layout) };
    if !at.is_null() {
        with(|machine| machine.pinned.insert(at.addr(), layout));
    }
    at.cast()
}

pub(super) fn unpin(at: *mut c_void) {
    let Some(layout) = with(|machine| machine.pinned.remove(&at.addr())) else { return };
    // SAFETY: `pin` gave it, of this layout, and it wasn't given back since.
    unsafe { dealloc(at.cast(), layout) };
}

/// A handle that no other is like.
pub(super) fn new_handle() -> *mut c_void {
    with(|machine| {
        machine.last_handle += 1;
        std::ptr::without_provenance_mut(machine.last_handle)
    })
}

pub(super) fn begin_capture(stream: *mut c_void) {
    with(|machine| machine.captured.insert(stream.addr(), stream.addr()));
}

/// Of all streams that have joined in.
pub(super) fn end_capture(stream: *mut c_void) {
    with(|machine| machine.captured.retain(|_, begun_on| *begun_on != stream.addr()));
}

pub(super) fn is_captured(stream: *mut c_void) -> bool {
    with(|machine| machine.captured.contains_key(&stream.addr()))
}

/// What `to` stands for from now on is what `from` does: an event that is recorded in a stream.
pub(super) fn record(from: *mut c_void, to: *mut c_void) {
    with(|machine| match machine.captured.get(&from.addr()).copied() {
        Some(begun_on) => machine.captured.insert(to.addr(), begun_on),
        None => machine.captured.remove(&to.addr()),
    });
}

/// A stream that waits for an event of a capture joins in.
pub(super) fn join(event: *mut c_void, stream: *mut c_void) {
    with(|machine| {
        if let Some(begun_on) = machine.captured.get(&event.addr()).copied() {
            machine.captured.insert(stream.addr(), begun_on);
        }
    });
}

impl Machine {
    fn kind(&self, device: c_int) -> AbsentGpu {
        self.kinds[(device / OF_A_DRIVER) as usize]
    }

    fn taken(&mut self, device: c_int) -> &mut u64 {
        self.taken.entry(device).or_insert(CONTEXT_BYTES)
    }
}

fn with<T>(use_it: impl FnOnce(&mut Machine) -> T) -> T {
    let mut machine: MutexGuard<'_, Option<Machine>> = lock(&MACHINE);
    use_it(machine.get_or_insert_default())
}
