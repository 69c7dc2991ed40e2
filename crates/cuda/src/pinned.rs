//! Memory of the host that stays where it is, so that a GPU copies it by itself while the program goes on.

use crate::codes;
use crate::context::{Context, Leftover};
use crate::error::Error;
use crate::event::{Event, Timing};
use crate::memory::DeviceMemory;
use crate::stream::Stream;
use std::ffi::c_void;
use std::fmt;
use std::ops::Range;
use std::ptr;
use std::slice;
use std::sync::Arc;

// CU_MEMHOSTALLOC_PORTABLE: pinned for all GPUs.
const PORTABLE: u32 = 1;

/// A pinned buffer. It knows of the copies that are under way, and waits for them before it lets anybody at its bytes: so a copy that
/// doesn't wait is safe. Copies that only read bytes keep nobody from reading them.
pub struct Pinned {
    context: Arc<Context>,
    at: *mut u8,
    bytes: usize,
    // Behind the last copy.
    copied: Arc<Event>,
    // Whether a copy may be under way that writes.
    is_written: bool,
}

// SAFETY: the bytes are owned by this, and the driver takes its handles from any thread.
unsafe impl Send for Pinned {}
// SAFETY: behind a shared reference bytes are only read.
unsafe impl Sync for Pinned {}

impl Pinned {
    pub(crate) fn zeroed(context: &Arc<Context>, bytes: usize) -> Result<Pinned, Error> {
        let copied = Arc::new(Event::new(context, Timing::No)?);
        let mut at: *mut c_void = ptr::null_mut();
        if bytes > 0 {
            // SAFETY: the call writes one pointer.
            let code = unsafe { (context.enter()?.host_alloc)(&mut at, bytes, PORTABLE) };
            if code == codes::OUT_OF_MEMORY {
                let about =
                    || format!("{bytes} bytes of the host's memory, pinned (`ulimit -l` may bound it)");
                context.succeeded("cuMemHostAlloc", code, about)?;
            }
            context.succeeded("cuMemHostAlloc", code, || format!("{bytes} bytes"))?;
            // SAFETY: the call gave as many bytes.
            unsafe { ptr::write_bytes(at.cast::<u8>(), 0, bytes) };
        }
        let at = if bytes > 0 { at.cast() } else { ptr::NonNull::dangling().as_ptr() };
        Ok(Pinned { context: context.clone(), at, bytes, copied, is_written: false })
    }

    /// How much there is.
    pub fn len(&self) -> usize {
        self.bytes
    }

    /// Whether there is nothing.
    pub fn is_empty(&self) -> bool {
        self.bytes == 0
    }

    /// Whether no copy is under way.
    pub fn is_idle(&self) -> Result<bool, Error> {
        self.copied.is_done()
    }

    /// The bytes, once no copy is under way that writes them.
    pub fn bytes(&self) -> Result<&[u8], Error> {
        let at = self.to_read()?;
        // SAFETY: as many bytes are owned and were initialised, no copy writes them, and a new one takes `&mut self`.
        Ok(unsafe { slice::from_raw_parts(at, self.bytes) })
    }

    /// The same, to be written, once no copy is under way.
    pub fn bytes_mut(&mut self) -> Result<&mut [u8], Error> {
        let at = self.to_write()?;
        // SAFETY: as above, and nobody else has them.
        Ok(unsafe { slice::from_raw_parts_mut(at, self.bytes) })
    }

    /// Where the bytes lie, for one who sees to it that no copy is begun that writes them while he reads there: no such is under way now.
    pub fn to_read(&self) -> Result<*const u8, Error> {
        if self.is_written {
            self.copied.settle()?;
        }
        Ok(self.at)
    }

    /// Where the bytes lie, for one who sees to it that no copy is begun while he writes there: none is under way now.
    pub fn to_write(&mut self) -> Result<*mut u8, Error> {
        self.copied.settle()?;
        self.is_written = false;
        Ok(self.at)
    }

    #[track_caller]
    fn part(&self, op: &str, range: &Range<usize>) -> *mut u8 {
        assert!(
            range.start <= range.end && range.end <= self.bytes,
            "{op}: bytes {range:?} of a pinned buffer of {} bytes",
            self.bytes
        );
        self.at.wrapping_add(range.start)
    }

    /// Copies follow each other, also in different streams, so that the last one's event stands for all.
    fn before_copy(&self, stream: &Stream) -> Result<(), Error> {
        stream.wait(&self.copied)
    }

    fn after_copy(&self, stream: &Stream) -> Result<(), Error> {
        stream.record(&self.copied).inspect_err(|_| {
            // No event stands for the copy, so it is waited for here. Where that fails, too, the GPU is lost.
            let _ = self.context.synchronize();
        })
    }
}

impl Stream {
    /// Copies these bytes of a pinned buffer to a place of a piece, in the stream's order, and doesn't wait.
    #[track_caller]
    pub fn upload(
        &self,
        from: &mut Pinned,
        range: Range<usize>,
        to: &DeviceMemory,
        at: usize,
    ) -> Result<(), Error> {
        self.of_one_gpu("upload", &from.context);
        self.of_one_gpu("upload", to.context());
        let bytes = range.len();
        let (source, target) = (from.part("upload", &range), to.part("upload", &(at..at + bytes)));
        self.not_in_graph("a copy from the host's memory")?;
        if bytes == 0 {
            return Ok(());
        }
        from.before_copy(self)?;
        self.launching()?;
        // SAFETY: both ranges lie in their buffers; the pinned one lets nobody at them, and isn't given back, before it is done.
        let code = unsafe { (self.context().enter()?.copy_up)(target.0, source.cast(), bytes, self.raw()) };
        let about = || format!("a copy of {bytes} pinned bytes to it");
        self.context().succeeded("cuMemcpyHtoDAsync", code, about)?;
        from.after_copy(self)?;
        self.launched(about)
    }

    /// Copies these bytes of a piece to a place of a pinned buffer, in the stream's order, and doesn't wait.
    #[track_caller]
    pub fn download(
        &self,
        from: &DeviceMemory,
        range: Range<usize>,
        to: &mut Pinned,
        at: usize,
    ) -> Result<(), Error> {
        self.of_one_gpu("download", from.context());
        self.of_one_gpu("download", &to.context);
        let bytes = range.len();
        let (source, target) = (from.part("download", &range), to.part("download", &(at..at + bytes)));
        self.not_in_graph("a copy to the host's memory")?;
        if bytes == 0 {
            return Ok(());
        }
        to.before_copy(self)?;
        self.launching()?;
        to.is_written = true;
        // SAFETY: as for an upload.
        let code = unsafe { (self.context().enter()?.copy_down)(target.cast(), source.0, bytes, self.raw()) };
        let about = || format!("a copy of {bytes} bytes from it to pinned ones");
        self.context().succeeded("cuMemcpyDtoHAsync", code, about)?;
        to.after_copy(self)?;
        self.launched(about)
    }
}

impl fmt::Debug for Pinned {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Pinned({} bytes)", self.bytes)
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        if self.bytes > 0 {
            self.context.give_back(Leftover::Host(self.at, self.copied.clone()));
        }
    }
}
