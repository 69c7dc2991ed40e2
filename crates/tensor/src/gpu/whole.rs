//! What is done to all values of an arena at once.

use crate::arena::Arena;
use crate::dtype::DType;
use crate::gpu::Engine;
use crate::gpu::engine::succeeded;
use crate::gpu::launch::{Arg, check_single, element, elements, rows};
use crate::gpu::transfer::place;
use crate::storage::Memory;
use crate::tensor::Tensor;
use phalanx_cuda::Address;
use std::ops::Range;
use std::slice::from_ref;

/// Numbers whose squares a block adds up.
const PIECE: usize = 1 << 14;

fn bytes(arena: &Arena) -> usize {
    arena.layout().len() * arena.dtype().bytes()
}

#[track_caller]
fn at(arena: &Arena) -> Address {
    arena.memory().gpu(0..bytes(arena)).address()
}

/// Where ranges of elements begin that have any, and how many they have. The caller holds a borrow of the arena.
fn places<'a>(arena: &'a Arena, ranges: &'a [Range<usize>]) -> impl Iterator<Item = (Address, usize)> + 'a {
    let size = arena.dtype().bytes();
    ranges
        .iter()
        .filter(|range| !range.is_empty())
        .map(move |range| (arena.memory().gpu(range.start * size..range.end * size).address(), range.len()))
}

impl Engine {
    /// Gives the compute stream a copy of so many bytes from the start of one memory, which is borrowed for reading, to that of
    /// another, which is borrowed for writing.
    #[track_caller]
    pub(crate) fn copy_bytes(
        &self,
        (from, start): (&Memory, usize),
        (to, into): (&Memory, usize),
        bytes: usize,
    ) {
        let (from, to) = (from.gpu(start..start + bytes), to.gpu(into..into + bytes));
        succeeded(self.stream().copy(from.memory(), from.at..from.at + bytes, to.memory(), to.at));
    }

    /// `to = from`; both are of one layout on this GPU.
    #[track_caller]
    pub(crate) fn copy_arena(&self, from: &Arena, to: &Arena) {
        let (_written, _read) = (to.write(), from.read());
        self.copy_bytes((from.memory(), 0), (to.memory(), 0), bytes(to));
    }

    /// Rounds all values of `from`, which are f32, to those of `to`; both are of one layout on this GPU.
    #[track_caller]
    pub(crate) fn cast_arena(&self, from: &Arena, to: &Arena) {
        check_single("cast", from.dtype());
        let (_written, _read) = (to.write(), from.read());
        let n = to.layout().len();
        let args = [Arg::BareIn(at(from)), Arg::Bare(at(to)), Arg::Int(n)];
        // SAFETY: both arenas have n elements, and stay until the stream has come to it.
        unsafe { self.launch_for(element(to.dtype()), "from_f32", elements(n), &args) }
    }

    /// Rounds as many f32 as are told to numbers of another type; the two are borrowed, for reading and for writing.
    #[track_caller]
    pub(crate) fn cast_bytes(
        &self,
        (from, source): (&Memory, Range<usize>),
        (to, target): (&Memory, Range<usize>),
        dtype: DType,
        n: usize,
    ) {
        let (from, to) = (from.gpu(source).address(), to.gpu(target).address());
        let args = [Arg::BareIn(from), Arg::Bare(to), Arg::Int(n)];
        // SAFETY: there are n numbers from both addresses on, and they stay until the stream has come to them.
        unsafe { self.launch_for(element(dtype), "from_f32", elements(n), &args) }
    }

    /// Exchanges the values of two arenas of one layout on this GPU.
    #[track_caller]
    pub(crate) fn swap_arenas(&self, a: &Arena, b: &Arena) {
        let (_a, _b) = (a.write(), b.write());
        let n = bytes(a);
        let aside = Tensor::stale(a.device(), [n].into(), DType::U8);
        let _aside = aside.storage.write_on_gpu();
        self.copy_bytes((a.memory(), 0), place(&aside), n);
        self.copy_bytes((b.memory(), 0), (a.memory(), 0), n);
        self.copy_bytes(place(&aside), (b.memory(), 0), n);
    }

    /// Moves `values` by a share of the way to those of `to`.
    #[track_caller]
    pub(crate) fn follow(&self, values: &Arena, to: &Arena, share: f32) {
        check_single("follow", values.dtype());
        let (_written, _read) = (values.write(), to.read());
        let n = values.layout().len();
        let args = [Arg::Bare(at(values)), Arg::BareIn(at(to)), Arg::Float(f64::from(share)), Arg::Int(n)];
        // SAFETY: both arenas have n elements, and stay until the stream has come to it.
        unsafe { self.launch("follow", elements(n), &args) }
    }

    /// Multiplies values of ranges that the arena has.
    #[track_caller]
    pub(crate) fn scale(&self, values: &Arena, ranges: &[Range<usize>], by: f32) {
        check_single("scale", values.dtype());
        let _written = values.write();
        for (at, n) in places(values, ranges) {
            let args =
                [Arg::BareIn(at), Arg::Bare(at), Arg::Int(n), Arg::Float(f64::from(by)), Arg::Float(0.0)];
            // SAFETY: the arena has n elements from there on, of which each is read and then written by one thread, and stays until the
            // stream has come to it.
            unsafe { self.launch("affine", elements(n), &args) }
        }
    }

    /// Whether values of ranges that the arena has are finite; waits for them.
    #[track_caller]
    pub(crate) fn is_finite(&self, values: &Arena, ranges: &[Range<usize>]) -> bool {
        check_single("is_finite", values.dtype());
        let found = Tensor::zeros(values.device(), [size_of::<i32>()], DType::U8);
        let read = values.read();
        for (at, n) in places(values, ranges) {
            let args = [Arg::BareIn(at), Arg::Out(&found), Arg::Int(n)];
            // SAFETY: the arena has n elements from there on, and there is one number for what is found.
            unsafe { self.launch("find_not_finite", elements(n), &args) }
        }
        drop(read);
        self.get::<u8>(&found) == [0; 4]
    }

    /// The norm of all values, in float64.
    #[track_caller]
    pub(crate) fn norm(&self, values: &Arena) -> Tensor {
        let parts = self.squares_of_pieces("norm", values, from_ref(&(0..values.layout().len())));
        let norm = Tensor::zeros(values.device(), [1], DType::F64);
        let pieces = parts.count();
        let args = [Arg::In(&parts), Arg::Out(&norm), Arg::Int(pieces)];
        // SAFETY: there are so many parts, and one number for the norm.
        unsafe { self.launch("norm_of_parts", rows(pieces.min(1), pieces), &args) };
        norm
    }

    /// The sum of the squares of elements that the arena has.
    #[track_caller]
    pub(crate) fn sum_of_squares(&self, values: &Arena, ranges: &[Range<usize>]) -> f64 {
        self.get::<f64>(&self.squares_of_pieces("sum_of_squares", values, ranges)).iter().sum()
    }

    /// The same piece by piece, one range after the other.
    #[track_caller]
    fn squares_of_pieces(&self, op: &str, values: &Arena, ranges: &[Range<usize>]) -> Tensor {
        check_single(op, values.dtype());
        let pieces = |range: &Range<usize>| range.len().div_ceil(PIECE);
        let parts = Tensor::stale(values.device(), [ranges.iter().map(pieces).sum()].into(), DType::F64);
        let _held = values.hold::<f32>();
        let mut first = 0;
        for (start, n) in places(values, ranges) {
            let pieces = n.div_ceil(PIECE);
            let own = parts.narrow(0, first, pieces);
            let args = [Arg::BareIn(start), Arg::Out(&own), Arg::Int(n), Arg::Int(PIECE)];
            // SAFETY: the arena has n elements from there on, and there is a part for each piece of them.
            unsafe { self.launch("sum_squares", rows(pieces, PIECE), &args) }
            first += pieces;
        }
        parts
    }

    /// Makes each value of ranges that the arena has at most `limit` large.
    #[track_caller]
    pub(crate) fn clip_value(&self, values: &Arena, ranges: &[Range<usize>], limit: f32) {
        check_single("clip_value", values.dtype());
        let _written = values.write();
        for (at, n) in places(values, ranges) {
            let args = [Arg::Bare(at), Arg::Float(f64::from(limit)), Arg::Int(n)];
            // SAFETY: the arena has n elements from there on, and stays until the stream has come to it.
            unsafe { self.launch("clip_value", elements(n), &args) }
        }
    }
}
