//! Where values of the host land beside what a GPU computes.
//!
//! A tensor's buffer may still be used by work that the compute stream was given before, so a copy into one comes behind all of that
//! (S-STREAM), and the samples of a step behind the step before. So they land in memory of the engine's own, in the order of the
//! stream of copies. Once they are wanted the compute stream waits for them and copies them to where they belong, at the rate of the
//! GPU's own memory, and from then on others may land there.

use crate::account::Purpose;
use crate::device::Device;
use crate::gpu::Engine;
use crate::gpu::engine::succeeded;
use crate::gpu::transfer::{PIECE_BYTES, place};
use crate::lock::lock;
use crate::storage::Memory;
use crate::tensor::Tensor;
use phalanx_cuda::{Event, Timing};

/// Landings that are kept: one that values come to, and one that they are taken from.
const MOST_LANDINGS: usize = 2;
/// Each part begins at a multiple of this, as buffers do.
const ALIGNMENT: usize = 256;
/// Memory is taken in multiples of this, so that batches of nearly one size fit in one landing.
const GRAIN: usize = 1 << 16;

/// A piece of memory that no tensor lies in.
pub(crate) struct Landing {
    memory: Memory,
    /// In the stream of copies, behind the values.
    landed: Event,
    /// In the compute stream, behind what has taken the values before.
    taken: Event,
}

impl Engine {
    /// Gives the stream of copies the bytes of some values, behind whatever takes those that landed there before.
    #[track_caller]
    pub(crate) fn land(&self, parts: &[&[u8]], device: &Device) -> Landing {
        let bytes = parts.iter().map(|part| part.len().next_multiple_of(ALIGNMENT)).sum();
        let landing = self.landing(bytes, device);
        let stream = self.gpu().copy();
        succeeded(stream.wait(&landing.taken));
        let mut start = 0;
        for part in parts {
            for (i, bytes) in part.chunks(PIECE_BYTES).enumerate() {
                let mut pinned = self.staging(bytes.len());
                succeeded(pinned.bytes_mut())[..bytes.len()].copy_from_slice(bytes);
                let at = start + i * PIECE_BYTES;
                succeeded(stream.upload(&mut pinned, 0..bytes.len(), landing.memory.device_memory(), at));
                lock(&self.staging).push(pinned);
            }
            start += part.len().next_multiple_of(ALIGNMENT);
        }
        succeeded(stream.record(&landing.landed));
        landing
    }

    /// Fills contiguous tensors with the parts that have landed, in the compute stream's order, which waits for them.
    #[track_caller]
    pub(crate) fn take(&self, landing: Landing, tensors: &[Tensor]) {
        let stream = self.stream();
        succeeded(stream.wait(&landing.landed));
        let mut start = 0;
        for tensor in tensors {
            tensor
                .device()
                .private(|pass| pass.refuse("values of the host that go to the GPU within the pass, which"));
            let _borrowed = tensor.storage.write_on_gpu();
            let (memory, at) = place(tensor);
            let bytes = tensor.count() * tensor.dtype.bytes();
            let to = memory.gpu(at..at + bytes);
            succeeded(stream.copy(landing.memory.device_memory(), start..start + bytes, to.memory(), to.at));
            start += bytes.next_multiple_of(ALIGNMENT);
        }
        succeeded(stream.record(&landing.taken));
        self.leave(landing);
    }

    /// Takes a landing back, whose values were taken or are nobody's any more.
    pub(crate) fn leave(&self, landing: Landing) {
        let mut kept = lock(&self.landings);
        kept.push(landing);
        if kept.len() > MOST_LANDINGS {
            // The smallest serves least. Dropping it waits for the GPU, which comes to pass when sizes change.
            let smallest = (0..kept.len()).min_by_key(|&i| kept[i].memory.bytes());
            smallest.into_iter().for_each(|i| drop(kept.remove(i)));
        }
    }

    /// Gives those back that nobody's values are on their way to.
    pub(crate) fn release_landings(&self) {
        let kept = std::mem::take(&mut *lock(&self.landings));
        drop(kept);
    }

    /// One of at least so many bytes, whose values were all taken, though perhaps not yet on the GPU.
    #[track_caller]
    fn landing(&self, bytes: usize, device: &Device) -> Landing {
        let mut kept = lock(&self.landings);
        // The one that was left longest ago comes first.
        if let Some(found) = kept.iter().position(|landing| landing.memory.bytes() >= bytes) {
            return kept.remove(found);
        }
        drop(kept);
        let event = || succeeded(self.gpu().event(Timing::No));
        let bytes = bytes.next_multiple_of(GRAIN);
        let memory = device.allocate_for(self, self.gpu().copy(), bytes, Purpose::Landings);
        Landing { memory, landed: event(), taken: event() }
    }
}
