//! Values on their way between the host and a GPU. Up they go through pinned buffers and nobody waits; who asks for values waits
//! until they are there. What goes up beside what is computed lands elsewhere first (`landing.rs`).

use crate::dtype::{Element, bytes_of, bytes_of_mut};
use crate::gpu::Engine;
use crate::gpu::engine::succeeded;
use crate::lock::lock;
use crate::storage::Memory;
use crate::tensor::Tensor;
use phalanx_cuda::Pinned;
use std::ops::Range;

/// Pinned buffers that are kept; with all of them on their way, a copy waits for one.
const MOST_STAGING: usize = 16;
/// Bytes of a small one, and how many of these are kept.
const SMALL: usize = 1 << 16;
const MOST_SMALL: usize = 512;
/// Bytes of a pinned buffer that values go through: enough to keep the bus busy, few enough to be kept.
pub(super) const PIECE_BYTES: usize = 8 << 20;

/// The memory that a tensor lies in, and the byte that its first element begins with.
pub(super) fn place(tensor: &Tensor) -> (&Memory, usize) {
    let (memory, range) = tensor.storage.memory();
    (memory, range.start + tensor.geometry.offset * tensor.dtype.bytes())
}

/// Keeps a pass from being recorded that reads values: they would be those of one pass for good.
fn refuse_replays(from: &Tensor) {
    from.device().private(|pass| pass.refuse("values of the GPU that are read within the pass, which"));
}

impl Engine {
    /// Fills a contiguous tensor with as many values.
    #[track_caller]
    pub(crate) fn put<T: Element>(&self, values: &[T], to: &Tensor) {
        to.device()
            .private(|pass| pass.refuse("values of the host that go to the GPU within the pass, which"));
        let _borrowed = to.storage.write_on_gpu();
        let (memory, at) = place(to);
        self.upload(values, memory, at);
    }

    /// The values of a contiguous tensor, once the stream has come to them. Panics where an index was none and that can't
    /// be seen of them, as of whole numbers.
    #[track_caller]
    pub(crate) fn get<T: Element>(&self, from: &Tensor) -> Vec<T> {
        assert!(from.dtype == T::DTYPE, "tensor: holds {}, was asked for {}", from.dtype, T::DTYPE);
        assert!(
            from.geometry.is_contiguous(),
            "values of a GPU: needs a contiguous tensor, got a view of shape {}",
            from.shape()
        );
        refuse_replays(from);
        let _borrowed = from.storage.read_on_gpu();
        let (memory, at) = place(from);
        let mut values = vec![T::default(); from.count()];
        self.download_into(memory, at, &mut values);
        if !T::DTYPE.is_float() {
            // They look like any others.
            self.check_indices();
        }
        values
    }

    /// A pinned buffer that the elements of a contiguous tensor come to, as [`Engine::came`] reads them: few enough for one buffer.
    #[track_caller]
    pub(crate) fn get_later(&self, from: &Tensor) -> Pinned {
        refuse_replays(from);
        let _borrowed = from.storage.read_on_gpu();
        let (memory, at) = place(from);
        self.bring(memory, at..at + from.count() * from.dtype.bytes())
    }

    /// Fills `into` with the first elements in a pinned buffer, once they are here.
    #[track_caller]
    pub(crate) fn came<T: Element>(&self, pinned: Pinned, into: &mut [T]) {
        let bytes = bytes_of_mut(into);
        bytes.copy_from_slice(&Engine::here(&pinned)[..bytes.len()]);
        self.leave_pinned(pinned);
    }

    /// Puts values to a place in memory, in the compute stream's order. The caller holds the write borrow of what lies there.
    #[track_caller]
    pub(crate) fn upload<T: Element>(&self, values: &[T], to: &Memory, at: usize) {
        let (mut at, mut left) = (at, bytes_of(values));
        while !left.is_empty() {
            let (bytes, behind) = left.split_at(PIECE_BYTES.min(left.len()).min(to.run(at)));
            let mut pinned = self.staging(bytes.len());
            succeeded(pinned.bytes_mut())[..bytes.len()].copy_from_slice(bytes);
            self.put_back(pinned, to, at..at + bytes.len());
            (at, left) = (at + bytes.len(), behind);
        }
    }

    /// Fills `into` with the values from a place in memory on. The caller holds a read borrow of what lies there.
    #[track_caller]
    pub(crate) fn download_into<T: Element>(&self, from: &Memory, at: usize, into: &mut [T]) {
        let mut at = at;
        // While one piece is looked at, the next one comes.
        let mut coming: Option<(Pinned, &mut [u8])> = None;
        let look = |(pinned, into): (Pinned, &mut [u8])| {
            into.copy_from_slice(&Engine::here(&pinned)[..into.len()]);
            lock(&self.staging).push(pinned);
        };
        let mut left = bytes_of_mut(into);
        while !left.is_empty() {
            let piece = left
                .split_off_mut(..PIECE_BYTES.min(left.len()).min(from.run(at)))
                .expect("no longer than that");
            let pinned = self.bring(from, at..at + piece.len());
            at += piece.len();
            coming.replace((pinned, piece)).into_iter().for_each(look);
        }
        coming.into_iter().for_each(look);
    }

    /// A pinned buffer that these bytes come to, in the compute stream's order. The caller holds a borrow of what lies there until
    /// they are here, or until they are put back.
    #[track_caller]
    pub(crate) fn bring(&self, from: &Memory, bytes: Range<usize>) -> Pinned {
        let mut pinned = self.staging(bytes.len());
        let from = from.gpu(bytes.clone());
        succeeded(self.stream().download(from.memory(), from.at..from.at + bytes.len(), &mut pinned, 0));
        pinned
    }

    /// Puts the first bytes of a pinned buffer where they belong, in the compute stream's order. The caller holds the write borrow of
    /// what lies there.
    #[track_caller]
    pub(crate) fn put_back(&self, mut pinned: Pinned, to: &Memory, bytes: Range<usize>) {
        let to = to.gpu(bytes.clone());
        succeeded(self.stream().upload(&mut pinned, 0..bytes.len(), to.memory(), to.at));
        lock(&self.staging).push(pinned);
    }

    /// Takes a buffer back, whose bytes may still be on their way.
    pub(crate) fn leave_pinned(&self, pinned: Pinned) {
        lock(&self.staging).push(pinned);
    }

    /// Whether nobody has to wait for a buffer's bytes.
    #[track_caller]
    pub(crate) fn is_here(pinned: &Pinned) -> bool {
        succeeded(pinned.is_idle())
    }

    /// A buffer's bytes, once they are here.
    #[track_caller]
    pub(crate) fn here(pinned: &Pinned) -> &[u8] {
        succeeded(pinned.bytes())
    }

    /// The same, to be written.
    #[track_caller]
    pub(crate) fn here_mut(pinned: &mut Pinned) -> &mut [u8] {
        succeeded(pinned.bytes_mut())
    }

    /// A pinned buffer of at least so many bytes, of which no copy is under way unless there are many that have one.
    #[track_caller]
    pub(super) fn staging(&self, bytes: usize) -> Pinned {
        let mut kept = lock(&self.staging);
        // The one that was used longest ago comes first.
        let fits = |pinned: &Pinned| pinned.len() >= bytes && pinned.len() / 4 <= bytes.max(1 << 16);
        let idle = kept.iter().position(|pinned| fits(pinned) && succeeded(pinned.is_idle()));
        // A few large ones do for anything; of small ones nobody is to wait for one while a GPU stands still.
        let is_alike = |pinned: &Pinned| (pinned.len() <= SMALL) == (bytes <= SMALL);
        let most = if bytes <= SMALL { MOST_SMALL } else { MOST_STAGING };
        let full = kept.iter().filter(|pinned| is_alike(pinned)).count() >= most;
        let found = idle.or_else(|| if full { kept.iter().position(fits) } else { None });
        match found {
            Some(found) => kept.remove(found),
            None => {
                if let Some(first) = kept.iter().position(is_alike).filter(|_| full) {
                    kept.remove(first);
                }
                succeeded(self.gpu().pinned(bytes.next_power_of_two().max(1 << 12)))
            }
        }
    }
}
