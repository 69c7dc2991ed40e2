//! Values on their way between the host and a GPU. Up they go through pinned buffers and nobody waits; who asks for values waits
//! until they are there.

use crate::dtype::{Element, bytes_of, elements_of};
use crate::gpu::Engine;
use crate::gpu::engine::{lock, succeeded};
use crate::storage::Memory;
use crate::tensor::Tensor;
use phalanx_cuda::Pinned;

/// Pinned buffers that are kept; with all of them on their way, a copy waits for one.
const MOST_STAGING: usize = 16;

/// The memory that a tensor lies in, and the byte that its first element begins with.
pub(super) fn place(tensor: &Tensor) -> (&Memory, usize) {
    let (memory, range) = tensor.storage.memory();
    (memory, range.start + tensor.geometry.offset * tensor.dtype.bytes())
}

impl Engine {
    /// Fills a contiguous tensor with as many values.
    #[track_caller]
    pub(crate) fn put<T: Element>(&self, values: &[T], to: &Tensor) {
        let _borrowed = to.storage.write_on_gpu();
        let (memory, at) = place(to);
        self.upload(values, memory, at);
    }

    /// The values of a contiguous tensor, once the stream has come to them.
    #[track_caller]
    pub(crate) fn get<T: Element>(&self, from: &Tensor) -> Vec<T> {
        assert!(from.dtype == T::DTYPE, "tensor: holds {}, was asked for {}", from.dtype, T::DTYPE);
        assert!(
            from.geometry.is_contiguous(),
            "values of a GPU: needs a contiguous tensor, got a view of shape {}",
            from.shape()
        );
        let _borrowed = from.storage.read_on_gpu();
        let (memory, at) = place(from);
        self.download(memory, at, from.count())
    }

    /// Puts values to a place in memory, in the compute stream's order. The caller holds the write borrow of what lies there.
    #[track_caller]
    pub(crate) fn upload<T: Element>(&self, values: &[T], to: &Memory, at: usize) {
        let bytes = bytes_of(values);
        if bytes.is_empty() {
            return;
        }
        let mut pinned = self.staging(bytes.len());
        succeeded(pinned.bytes_mut())[..bytes.len()].copy_from_slice(bytes);
        succeeded(self.stream().upload(&mut pinned, 0..bytes.len(), to.gpu(), at));
        lock(&self.staging).push(pinned);
    }

    /// So many values from a place in memory. The caller holds a read borrow of what lies there.
    #[track_caller]
    pub(crate) fn download<T: Element>(&self, from: &Memory, at: usize, count: usize) -> Vec<T> {
        let range = at..at + count * T::DTYPE.bytes();
        elements_of(&succeeded(self.stream().read(from.gpu(), range)))
    }

    /// A pinned buffer of at least so many bytes, of which no copy is under way unless there are many that have one.
    #[track_caller]
    fn staging(&self, bytes: usize) -> Pinned {
        let mut kept = lock(&self.staging);
        // The one that was used longest ago comes first.
        let fits = |pinned: &Pinned| pinned.len() >= bytes && pinned.len() / 4 <= bytes.max(1 << 16);
        let idle = kept.iter().position(|pinned| fits(pinned) && succeeded(pinned.is_idle()));
        let full = kept.len() >= MOST_STAGING;
        let found = idle.or_else(|| if full { kept.iter().position(fits) } else { None });
        match found {
            Some(found) => kept.remove(found),
            None => {
                if full {
                    kept.remove(0);
                }
                succeeded(self.gpu().pinned(bytes.next_power_of_two().max(1 << 12)))
            }
        }
    }
}
