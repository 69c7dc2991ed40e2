//! Memory of a GPU, and what streams do with it.

use crate::address::Address;
use crate::codes;
use crate::context::{Context, Leftover};
use crate::error::Error;
use crate::stream::Stream;
use std::fmt;
use std::ops::Range;
use std::sync::Arc;

/// A piece of a GPU's memory. Dropping it waits for all work that the GPU has been given, and gives it back; while a stream is
/// captured, that is put off to the capture's end. So who needs memory step after step keeps it.
pub struct DeviceMemory {
    context: Arc<Context>,
    address: Address,
    bytes: usize,
}

impl DeviceMemory {
    pub(crate) fn zeroed(stream: &Stream, bytes: usize) -> Result<DeviceMemory, Error> {
        let context = stream.context();
        let mut address = 0;
        // The driver has no empty pieces.
        if bytes > 0 {
            // SAFETY: the call writes one address.
            let code = unsafe { (context.enter()?.memory_alloc)(&mut address, bytes) };
            if code == codes::OUT_OF_MEMORY {
                let (free, total) = context.memory()?;
                return Err(Error::OutOfMemory { gpu: context.gpu(), asked: bytes as u64, free, total });
            }
            context.succeeded("cuMemAlloc", code, || format!("{bytes} bytes"))?;
        }
        let memory = DeviceMemory { context: context.clone(), address: Address(address), bytes };
        stream.fill(&memory, 0..bytes, 0)?;
        Ok(memory)
    }

    /// Where it lies; null where it has no bytes.
    pub fn address(&self) -> Address {
        self.address
    }

    /// How much there is.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    pub(crate) fn context(&self) -> &Arc<Context> {
        &self.context
    }

    /// Where so many bytes from a place on lie. Panics where they don't all lie in it.
    #[track_caller]
    pub(crate) fn part(&self, op: &str, range: &Range<usize>) -> Address {
        assert!(
            range.start <= range.end && range.end <= self.bytes,
            "{op}: bytes {range:?} of a piece of {} bytes",
            self.bytes
        );
        self.address.plus(range.start)
    }
}

impl fmt::Debug for DeviceMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "DeviceMemory({} bytes at {:#x} of GPU {})", self.bytes, self.address.0, self.context.gpu())
    }
}

impl Drop for DeviceMemory {
    fn drop(&mut self) {
        if self.bytes > 0 {
            self.context.give_back(Leftover::Device(self.address));
        }
    }
}

impl Stream {
    /// Sets these bytes, in the stream's order.
    #[track_caller]
    pub fn fill(&self, memory: &DeviceMemory, range: Range<usize>, byte: u8) -> Result<(), Error> {
        self.of_one_gpu("fill", memory.context());
        let (at, bytes) = (memory.part("fill", &range), range.len());
        if bytes == 0 {
            return Ok(());
        }
        self.launching()?;
        // SAFETY: the bytes lie in the piece, which is given back after all work.
        let code = unsafe { (self.context().enter()?.fill)(at.0, byte, bytes, self.raw()) };
        let about = || format!("a fill of {bytes} bytes");
        self.context().succeeded("cuMemsetD8Async", code, about)?;
        self.launched(about)
    }

    /// Copies these bytes of one piece to a place in another, in the stream's order. The two don't overlap.
    #[track_caller]
    pub fn copy(
        &self,
        from: &DeviceMemory,
        range: Range<usize>,
        to: &DeviceMemory,
        at: usize,
    ) -> Result<(), Error> {
        self.of_one_gpu("copy", from.context());
        self.of_one_gpu("copy", to.context());
        let bytes = range.len();
        let (from, to) = (from.part("copy", &range), to.part("copy", &(at..at + bytes)));
        assert!(
            bytes == 0 || from.plus(bytes) <= to || to.plus(bytes) <= from,
            "copy: {bytes} bytes at {:#x} and at {:#x} overlap",
            from.0,
            to.0
        );
        if bytes == 0 {
            return Ok(());
        }
        self.launching()?;
        // SAFETY: the bytes lie in their pieces, which are given back after all work.
        let code = unsafe { (self.context().enter()?.copy_across)(to.0, from.0, bytes, self.raw()) };
        let about = || format!("a copy of {bytes} bytes within it");
        self.context().succeeded("cuMemcpyDtoDAsync", code, about)?;
        self.launched(about)
    }

    /// Puts these bytes to a place of a piece, and waits until they, and all that the stream was given before, are there. For a
    /// copy that doesn't wait there is [`Pinned`](crate::Pinned).
    #[track_caller]
    pub fn write(&self, bytes: &[u8], to: &DeviceMemory, at: usize) -> Result<(), Error> {
        self.of_one_gpu("write", to.context());
        let to = to.part("write", &(at..at + bytes.len()));
        self.not_in_graph("a copy from the host's memory")?;
        let about = || format!("a copy of {} bytes to it", bytes.len());
        if !bytes.is_empty() {
            // SAFETY: the bytes lie in the piece; those of the host are borrowed until the stream has done it,
            // or the GPU is lost.
            let code = unsafe {
                (self.context().enter()?.copy_up)(to.0, bytes.as_ptr().cast(), bytes.len(), self.raw())
            };
            self.context().succeeded("cuMemcpyHtoDAsync", code, about)?;
        }
        self.synchronize_about(about)
    }

    /// What these bytes are once the stream has done what it was given; waits for that.
    #[track_caller]
    pub fn read(&self, from: &DeviceMemory, range: Range<usize>) -> Result<Vec<u8>, Error> {
        self.of_one_gpu("read", from.context());
        let (from, n) = (from.part("read", &range), range.len());
        self.not_in_graph("a copy to the host's memory")?;
        let about = || format!("a copy of {n} bytes from it");
        let mut bytes = vec![0u8; n];
        if n > 0 {
            // SAFETY: the bytes lie in the piece; those of the host are there until the stream has done it.
            let code = unsafe {
                (self.context().enter()?.copy_down)(bytes.as_mut_ptr().cast(), from.0, n, self.raw())
            };
            self.context().succeeded("cuMemcpyDtoHAsync", code, about)?;
        }
        if let Err(error) = self.synchronize_about(about) {
            // The GPU is lost, and nobody knows whether it still writes.
            std::mem::forget(bytes);
            return Err(error);
        }
        Ok(bytes)
    }

    pub(crate) fn not_in_graph(&self, what: &'static str) -> Result<(), Error> {
        if self.is_capturing()? { Err(Error::HostInGraph { what }) } else { Ok(()) }
    }
}
