//! Several collectives that are issued as one, as under torch.distributed's coalescing manager.
//!
//! Small ones of a kind travel together, in one message where each would be a message of its own: reductions of the same sort
//! and element type, all-gathers, and broadcasts from the same rank. Large ones follow one after the other, since copying them
//! together would cost more than a message does. What belongs together is decided by what all ranks know alike.

mod joined;
mod owned;

pub use owned::{Batched, Member, OwnedBatch};

use super::Group;
use crate::element::{Element, ReduceOp};
use crate::error::Error;
use bytemuck::{cast_slice, cast_slice_mut};
use phalanx_wire::Rank;
use std::any::TypeId;

/// Up to this many bytes of a rank a collective is packed with others.
const PACKED_BYTES: usize = 16 << 10;

/// Collectives that wait to be issued together; see [`Group::batch`].
#[must_use = "a batch does nothing until it is run"]
pub struct Batch<'a> {
    group: &'a Group,
    packs: Vec<Pack<'a>>,
}

/// Collectives that travel as one.
struct Pack<'a> {
    key: Key,
    slices: Vec<Slices<'a>>,
    /// Carries them out, for the type that the slices have.
    run: fn(&Group, &Key, &mut [Slices<'a>]) -> Result<(), Error>,
}

/// What collectives of a pack have in common.
#[derive(Clone, Copy, PartialEq)]
struct Key {
    what: What,
    element: TypeId,
    /// Nothing is packed with a large one.
    is_large: bool,
}

impl Key {
    /// That of a slice of so many bytes, or of one that is for all ranks.
    fn new<T: Element>(what: What, bytes: usize) -> Key {
        Key { what, element: TypeId::of::<T>(), is_large: bytes > PACKED_BYTES }
    }

    /// Whether what has one key travels with what has the other. Others may have other factors, which don't go together there.
    fn packs_with(&self, other: &Key) -> bool {
        self == other && !self.is_large && !self.what.has_factor()
    }
}

#[derive(Clone, Copy, PartialEq)]
enum What {
    AllReduce(ReduceOp),
    ReduceScatter(ReduceOp),
    AllGather,
    Broadcast(Rank),
}

impl What {
    /// Whether each rank has a factor of its own.
    fn has_factor(self) -> bool {
        matches!(self, What::AllReduce(ReduceOp::PremulSum(_)) | What::ReduceScatter(ReduceOp::PremulSum(_)))
    }
}

/// The slices of a collective with their type forgotten; the input is empty where the output is both.
struct Slices<'a> {
    input: &'a [u8],
    output: &'a mut [u8],
}

impl Group {
    /// An empty batch. All ranks must add the same collectives in the same order, which may touch nothing of each other; they
    /// are carried out by [`Batch::run`].
    ///
    /// ```
    /// # use phalanx_comm::{Group, Rank, ReduceOp};
    /// # std::thread::scope(|scope| for group in Group::threads(2) { scope.spawn(move || {
    /// let (mut losses, mut counts, mut word) = ([0.5f32; 3], [2u64], [group.rank().0]);
    /// let mut batch = group.batch();
    /// batch.all_reduce(&mut losses, ReduceOp::Average);
    /// batch.all_reduce(&mut counts, ReduceOp::Sum);
    /// batch.broadcast(&mut word, Rank(1));
    /// batch.run().unwrap();
    /// assert_eq!((losses, counts, word), ([0.5; 3], [4], [1]));
    /// # }); });
    /// ```
    pub fn batch(&self) -> Batch<'_> {
        Batch { group: self, packs: Vec::new() }
    }
}

impl<'a> Batch<'a> {
    /// Adds a [`Group::all_reduce`].
    #[track_caller]
    pub fn all_reduce<T: Element>(&mut self, values: &'a mut [T], op: ReduceOp) {
        super::collectives::check_op::<T>("all_reduce", op);
        let slices = Slices { input: &[], output: cast_slice_mut(values) };
        self.add::<T>(What::AllReduce(op), slices, |group, key, slices| {
            let What::AllReduce(op) = key.what else { unreachable!("packs are told apart by what they are") };
            if let [alone] = slices {
                return group.all_reduce::<T>(cast_slice_mut(alone.output), op);
            }
            let mut all: Vec<T> = joined(slices, |slices| &*slices.output);
            group.all_reduce(&mut all, op)?;
            let mut rest = &all[..];
            slices.iter_mut().for_each(|slices| take_from(&mut rest, slices.output));
            Ok(())
        });
    }

    /// Adds a [`Group::reduce_scatter`].
    #[track_caller]
    pub fn reduce_scatter<T: Element>(&mut self, input: &'a [T], output: &'a mut [T], op: ReduceOp) {
        super::collectives::check_op::<T>("reduce_scatter", op);
        self.group.check_all("reduce_scatter", ["in", "out"], [input.len(), output.len()]);
        let slices = Slices { input: cast_slice(input), output: cast_slice_mut(output) };
        self.add::<T>(What::ReduceScatter(op), slices, |group, key, slices| {
            let What::ReduceScatter(op) = key.what else {
                unreachable!("packs are told apart by what they are")
            };
            if let [alone] = slices {
                let input = cast_slice(alone.input);
                return group.reduce_scatter::<T>(input, cast_slice_mut(alone.output), op);
            }
            // All that is one rank's, then all that is the next one's.
            let part = |rank: usize, slices: &Slices<'_>| {
                let bytes = slices.output.len();
                rank * bytes..(rank + 1) * bytes
            };
            let ranks = 0..group.world_size;
            let input: Vec<T> = ranks.flat_map(|rank| joined(slices, |s| &s.input[part(rank, s)])).collect();
            let mut output = input[..input.len() / group.world_size].to_vec();
            group.reduce_scatter(&input, &mut output, op)?;
            let mut rest = &output[..];
            slices.iter_mut().for_each(|slices| take_from(&mut rest, slices.output));
            Ok(())
        });
    }

    /// Adds a [`Group::all_gather`].
    #[track_caller]
    pub fn all_gather<T: Element>(&mut self, input: &'a [T], output: &'a mut [T]) {
        self.group.check_all("all_gather", ["out", "in"], [output.len(), input.len()]);
        let slices = Slices { input: cast_slice(input), output: cast_slice_mut(output) };
        self.add::<T>(What::AllGather, slices, |group, _, slices| {
            if let [alone] = slices {
                return group.all_gather::<T>(cast_slice(alone.input), cast_slice_mut(alone.output));
            }
            let input: Vec<T> = joined(slices, |slices| slices.input);
            let mut output = input.repeat(group.world_size);
            group.all_gather(&input, &mut output)?;
            let mut rest = &output[..];
            for rank in 0..group.world_size {
                for slices in slices.iter_mut() {
                    let bytes = slices.input.len();
                    take_from(&mut rest, &mut slices.output[rank * bytes..(rank + 1) * bytes]);
                }
            }
            Ok(())
        });
    }

    /// Adds a [`Group::broadcast`].
    #[track_caller]
    pub fn broadcast<T: Element>(&mut self, values: &'a mut [T], root: Rank) {
        self.group.check_peer("broadcast", root);
        let slices = Slices { input: &[], output: cast_slice_mut(values) };
        self.add::<T>(What::Broadcast(root), slices, |group, key, slices| {
            let What::Broadcast(root) = key.what else {
                unreachable!("packs are told apart by what they are")
            };
            if let [alone] = slices {
                return group.broadcast::<T>(cast_slice_mut(alone.output), root);
            }
            let mut all: Vec<T> = joined(slices, |slices| &*slices.output);
            group.broadcast(&mut all, root)?;
            let mut rest = &all[..];
            slices.iter_mut().for_each(|slices| take_from(&mut rest, slices.output));
            Ok(())
        });
    }

    /// Carries all of them out. The first error is the end of the group, and of the batch.
    pub fn run(self) -> Result<(), Error> {
        let group = self.group;
        self.packs.into_iter().try_for_each(|mut pack| (pack.run)(group, &pack.key, &mut pack.slices))
    }

    fn add<T: Element>(
        &mut self,
        what: What,
        slices: Slices<'a>,
        run: fn(&Group, &Key, &mut [Slices<'a>]) -> Result<(), Error>,
    ) {
        let key = Key::new::<T>(what, slices.output.len().max(slices.input.len()));
        match self.packs.iter_mut().find(|pack| pack.key.packs_with(&key)) {
            Some(pack) => pack.slices.push(slices),
            None => self.packs.push(Pack { key, slices: vec![slices], run }),
        }
    }
}

/// What `of` shows of all slices, one after the other.
fn joined<T: Element>(slices: &[Slices<'_>], of: impl for<'s> Fn(&'s Slices<'_>) -> &'s [u8]) -> Vec<T> {
    slices.iter().flat_map(|slices| cast_slice::<u8, T>(of(slices)).iter().copied()).collect()
}

/// Fills a slice with the first elements of `rest`, which then lacks them.
fn take_from<T: Element>(rest: &mut &[T], slice: &mut [u8]) {
    let (these, after) = rest.split_at(slice.len() / size_of::<T>());
    cast_slice_mut::<u8, T>(slice).copy_from_slice(these);
    *rest = after;
}
