//! What a process has of a GPU: its primary context, which all of its streams, memory and kernels belong to.
//!
//! The driver keeps for each thread which context is current, and most of its calls mean that one. So every call of ours begins
//! with [`Context::enter`], which sets it where the thread had another one.

use crate::address::Address;
use crate::calls::{Calls, Code, Handle};
use crate::codes;
use crate::driver::Driver;
use crate::error::Error;
use crate::event::Event;
use crate::gpu::DebugSync;
use crate::lock::lock;
use crate::modules::Module;
use crate::nvrtc::Architecture;
use std::cell::Cell;
use std::ffi::{CStr, c_char, c_int};
use std::ptr;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, Weak};

// CUdevice_attribute.
pub(crate) const MULTIPROCESSORS: c_int = 16;
pub(crate) const MAJOR: c_int = 75;
pub(crate) const MINOR: c_int = 76;
// CUstreamCaptureMode.
const RELAXED: c_int = 2;

thread_local! {
    /// The context that this thread has set last, by its number: the driver has the same of its own, but asking costs a call.
    static CURRENT: Cell<u64> = const { Cell::new(0) };
}

pub(crate) struct Context {
    driver: Driver,
    gpu: u32,
    device: c_int,
    handle: Handle,
    debug_sync: DebugSync,
    // Unlike a handle, no other context of the process ever has it.
    number: u64,
    captures: Arc<Mutex<Captures>>,
}

/// Whether streams are captured, and what was dropped since.
#[derive(Default)]
struct Captures {
    under_way: usize,
    leftovers: Vec<(Arc<Context>, Leftover)>,
}

/// The captures of the primary context with this handle: all that have opened its GPU share it, and a call on behalf of one would
/// spoil the capture of another. This is what the driver has one of in a process, so there is one list of it here.
fn captures_of(handle: Handle) -> Arc<Mutex<Captures>> {
    type Known = (usize, Weak<Mutex<Captures>>);
    static KNOWN: Mutex<Vec<Known>> = Mutex::new(Vec::new());
    let mut known = lock(&KNOWN);
    known.retain(|(_, captures)| captures.strong_count() > 0);
    let found =
        known.iter().find(|(of, _)| *of == handle.addr()).and_then(|(_, captures)| captures.upgrade());
    found.unwrap_or_else(|| {
        let captures = Arc::<Mutex<Captures>>::default();
        known.push((handle.addr(), Arc::downgrade(&captures)));
        captures
    })
}

// SAFETY: the driver's functions may be called from any thread; which context they mean is set on each before.
unsafe impl Send for Context {}
// SAFETY: as above.
unsafe impl Sync for Context {}

// SAFETY: the pointer is to memory that nobody owns any more, and that any thread may give back; the rest may go to any thread by itself.
unsafe impl Send for Leftover {}

/// What nobody owns any more. It is given back once no stream is captured: a capture would be spoilt by it.
pub(crate) enum Leftover {
    /// Of the GPU.
    Device(Address),
    /// Of the host, with the event behind the last copy.
    Host(*mut u8, Arc<Event>),
    /// Kernels, which graphs and streams may still run.
    Kernels(Vec<Module>),
}

impl Context {
    pub(crate) fn open(driver: Driver, gpu: u32, debug_sync: DebugSync) -> Result<Context, Error> {
        static NUMBERS: AtomicU64 = AtomicU64::new(1);
        let number = NUMBERS.fetch_add(1, Ordering::Relaxed);
        let mut context = Context {
            driver,
            gpu,
            device: 0,
            handle: ptr::null_mut(),
            debug_sync,
            number,
            captures: Arc::default(),
        };
        let about = || format!("the process sees {} GPUs", context.driver.gpus());
        let (mut device, mut handle) = (0, ptr::null_mut());
        // SAFETY: the call writes one number.
        let code = unsafe { (context.calls().device)(&mut device, context.driver.number(gpu)) };
        context.succeeded("cuDeviceGet", code, about)?;
        // SAFETY: the device is one that the driver just gave; the call writes one handle, which is released with `context`.
        let code = unsafe { (context.calls().context_retain)(&mut handle, device) };
        context.succeeded("cuDevicePrimaryCtxRetain", code, about)?;
        (context.device, context.handle, context.captures) = (device, handle, captures_of(handle));
        Ok(context)
    }

    fn calls(&self) -> &Calls {
        self.driver.calls()
    }

    pub(crate) fn gpu(&self) -> u32 {
        self.gpu
    }

    /// By which number the driver knows its GPU.
    pub(crate) fn number(&self) -> c_int {
        self.device
    }

    pub(crate) fn debug_sync(&self) -> DebugSync {
        self.debug_sync
    }

    /// Makes the context current on this thread, and gives the calls that then mean it.
    pub(crate) fn enter(&self) -> Result<&Calls, Error> {
        if CURRENT.get() != self.number {
            self.make_current()?;
        }
        Ok(self.calls())
    }

    /// The same, also where another library may have set another one behind our back.
    pub(crate) fn make_current(&self) -> Result<(), Error> {
        // SAFETY: the context is retained as long as `self` is there.
        let code = unsafe { (self.calls().context_set)(self.handle) };
        self.succeeded("cuCtxSetCurrent", code, || "making it current on a thread".to_owned())?;
        CURRENT.set(self.number);
        Ok(())
    }

    /// What a call that gave `code` comes to.
    pub(crate) fn succeeded(
        &self,
        call: &'static str,
        code: Code,
        about: impl FnOnce() -> String,
    ) -> Result<(), Error> {
        if code == 0 {
            return Ok(());
        }
        let (name, said) = self.calls().words_of(code);
        let (words, hint) = match codes::meaning(code) {
            Some((words, hint)) => (words.to_owned(), hint),
            None => (said, codes::UNKNOWN_HINT),
        };
        Err(Error::Call { call, gpu: self.gpu, about: about(), code, name, words, hint })
    }

    pub(crate) fn name(&self) -> Result<String, Error> {
        self.text("cuDeviceGetName", self.calls().device_name)
    }

    pub(crate) fn bus_id(&self) -> Result<String, Error> {
        self.text("cuDeviceGetPCIBusId", self.calls().device_bus)
    }

    fn text(
        &self,
        call: &'static str,
        ask: unsafe extern "C" fn(*mut c_char, c_int, c_int) -> Code,
    ) -> Result<String, Error> {
        let mut text = [0; 256];
        // SAFETY: both functions that come here write at most as many bytes as they are told, with a 0 at the end.
        let code = unsafe { ask(text.as_mut_ptr(), text.len() as c_int, self.device) };
        self.succeeded(call, code, String::new)?;
        // SAFETY: it ended in 0 before the call, and does after.
        Ok(unsafe { CStr::from_ptr(text.as_ptr()) }.to_string_lossy().into_owned())
    }

    pub(crate) fn multiprocessors(&self) -> Result<u32, Error> {
        self.attribute(MULTIPROCESSORS)
    }

    pub(crate) fn architecture(&self) -> Result<Architecture, Error> {
        Ok(Architecture { major: self.attribute(MAJOR)?, minor: self.attribute(MINOR)? })
    }

    fn attribute(&self, which: c_int) -> Result<u32, Error> {
        let mut value = 0;
        // SAFETY: the call writes one number.
        let code = unsafe { (self.calls().device_attribute)(&mut value, which, self.device) };
        self.succeeded("cuDeviceGetAttribute", code, || format!("attribute {which}"))?;
        Ok(value as u32)
    }

    /// Free and all bytes.
    pub(crate) fn memory(&self) -> Result<(u64, u64), Error> {
        let (mut free, mut total) = (0, 0);
        // SAFETY: the call writes two numbers.
        let code = unsafe { (self.enter()?.memory_info)(&mut free, &mut total) };
        self.succeeded("cuMemGetInfo", code, || "its memory".to_owned())?;
        Ok((free as u64, total as u64))
    }

    /// Waits for everything.
    pub(crate) fn synchronize(&self) -> Result<(), Error> {
        // SAFETY: the call takes nothing.
        let code = unsafe { (self.enter()?.context_synchronize)() };
        self.succeeded("cuCtxSynchronize", code, || "waiting for all streams".to_owned())
    }

    /// Does `work`, which a capture on this thread would forbid though it doesn't concern it.
    pub(crate) fn beside_captures<T>(&self, work: impl FnOnce() -> Result<T, Error>) -> Result<T, Error> {
        let mut mode = RELAXED;
        // SAFETY: the call swaps the number for the thread's own.
        let code = unsafe { (self.enter()?.capture_mode)(&mut mode) };
        self.succeeded("cuThreadExchangeStreamCaptureMode", code, || "to relaxed".to_owned())?;
        let done = work();
        // SAFETY: as above; the number is what the thread had before.
        let code = unsafe { (self.calls().capture_mode)(&mut mode) };
        self.succeeded("cuThreadExchangeStreamCaptureMode", code, || "back".to_owned())?;
        done
    }

    /// A capture begins.
    pub(crate) fn capture_begins(&self) {
        self.captures().under_way += 1;
    }

    /// A capture has ended; gives back what was dropped in the meantime.
    pub(crate) fn capture_ended(&self) {
        let contexts: Vec<Arc<Context>> = {
            let mut captures = self.captures();
            captures.under_way -= 1;
            let is_over = captures.under_way == 0;
            let leftovers = if is_over { std::mem::take(&mut captures.leftovers) } else { Vec::new() };
            // Still locked, so that no capture begins meanwhile.
            let released = leftovers.into_iter().map(|(of, leftover)| {
                of.release(leftover);
                of
            });
            released.collect()
        };
        // The last of a context may go with them.
        drop(contexts);
    }

    /// Gives something back, now or when no stream is captured any more.
    pub(crate) fn give_back(self: &Arc<Self>, leftover: Leftover) {
        // Held to the end: no capture begins meanwhile.
        let mut captures = self.captures();
        if captures.under_way > 0 {
            captures.leftovers.push((self.clone(), leftover));
        } else {
            self.release(leftover);
        }
    }

    fn captures(&self) -> MutexGuard<'_, Captures> {
        lock(&self.captures)
    }

    /// Gives something back once all work that uses it is done, since the driver doesn't promise to wait for that. A failure is one
    /// that the GPU has met before, which others report; then memory stays away.
    fn release(&self, leftover: Leftover) {
        let Ok(calls) = self.enter() else { return };
        match leftover {
            Leftover::Device(address) => {
                if self.synchronize().is_ok() {
                    // SAFETY: memory of this context that nobody owns any more, and no work uses.
                    unsafe { (calls.memory_free)(address.0) };
                }
            }
            Leftover::Host(at, copied) => {
                if copied.settle().is_ok() {
                    // SAFETY: as above.
                    unsafe { (calls.host_free)(at.cast()) };
                }
            }
            Leftover::Kernels(modules) => {
                let _ = self.synchronize();
                drop(modules);
            }
        }
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        if !self.handle.is_null() {
            // SAFETY: retained once, in `open`; all that belongs to it holds `self`.
            unsafe { (self.calls().context_release)(self.device) };
        }
    }
}
