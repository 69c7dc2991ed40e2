//! Memory that the ranks of a group have in common, and operations in it that move nothing through messages.
//!
//! Each rank brings a region of its own, and sees those of all others. An all-reduce of slices that lie at the same place in
//! the same region on every rank then copies nothing: each rank takes one part of the slices, adds to its own what the others
//! have there, in the order of ranks, and writes the sum to all of them. Every byte is read once and written once, which is
//! the least that it takes. In a reduce-scatter in place each rank adds up its own part where it lies, and in an all-gather in
//! place it takes the others' parts from where those lie.
//!
//! **R-TURNS**: between the first and the second message that a rank exchanges with all others in such an operation, its
//! slice is everybody's. While a sum is taken for all, of each part only the rank that has that part reads or writes it, on
//! whichever rank it lies; so it is in a reduce-scatter, where only its own is written; and in an all-gather all read the part
//! that is at home on a rank, nobody writes it, and each rank alone touches the others' parts in its own slice. Before
//! and after, it is its owner's alone. A rank that is stopped in the middle and goes on when the others have given it up may
//! still write into their slices: what a failed operation was about means nothing, and a region is shared anew
//! ([`Region::share`]) before another group gets it, unless all who were let in are of that group or have ended
//! ([`crate::Group::may_attach`]).
#![allow(unsafe_code, reason = "memory that other processes write to; every block has its note")]

use crate::buffer::Buffer;
use crate::element::{Element, Erased, ReduceOp, Room};
use crate::schedule::SMALL_PARTS;
use crate::signature::{Kind, Signature};
use phalanx_memory::Region;
use std::fs::File;
use std::marker::PhantomData;
use std::ops::{Deref, DerefMut, Range};
use std::sync::Arc;

/// From so many bytes on it pays to go without copies.
const LEAST: usize = 32 << 10;
/// Bytes that are added up at once, so that they are still in the cache when the sums are written.
const CHUNK: usize = 32 << 10;
/// Bytes of a part that are done before the rank looks at something else.
const AT_ONCE: usize = 1 << 20;
/// Parts end on whole cache lines.
const LINE: usize = 64;

/// The regions of a group, by number. Those that nobody uses any more, or that were shared anew, leave their number behind.
#[derive(Default)]
pub(crate) struct Regions(Vec<Option<Common>>);

/// One region of each rank.
pub(crate) struct Common {
    pub(crate) own: Arc<Region>,
    /// What the others see of it: a region that was shared anew since is in another.
    pub(crate) file: Arc<File>,
    /// The others', by rank; none for this rank itself.
    pub(crate) others: Vec<Option<Region>>,
}

/// Where a slice lies.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Place {
    region: usize,
    offset: usize,
}

impl Place {
    /// As two words for a header: 0 is no region at all.
    pub(crate) fn words(self) -> [u32; 2] {
        // Offsets are whole quarters of a word's range, see `find`.
        [self.region as u32 + 1, (self.offset / 4) as u32]
    }
}

impl Common {
    /// Whether the others still see what this rank does in its region.
    fn is_seen(&self) -> bool {
        self.own.file().is_some_and(|file| Arc::ptr_eq(&file, &self.file))
    }
}

impl Regions {
    /// Adds a region that all ranks brought.
    pub(crate) fn attach(&mut self, common: Common) {
        for slot in &mut self.0 {
            slot.take_if(|common| Arc::strong_count(&common.own) == 1 || !common.is_seen());
        }
        self.0.push(Some(common));
    }

    /// Where a slice lies, if that is in a region and it has so many bytes.
    pub(crate) fn find(&self, slice: &[u8], least: usize) -> Option<Place> {
        if slice.len() < least {
            return None;
        }
        let start = slice.as_ptr().addr();
        self.0.iter().enumerate().find_map(|(region, common)| {
            let common = common.as_ref()?;
            let own = &common.own;
            let offset = start.checked_sub(own.start().as_ptr().addr())?;
            let fits = offset.checked_add(slice.len())? <= own.bytes();
            let told = offset.is_multiple_of(4) && u32::try_from(offset / 4).is_ok();
            (fits && told && common.is_seen()).then_some(Place { region, offset })
        })
    }

    /// The bytes of a slice at `place` on rank `rank`.
    ///
    /// # Safety
    ///
    /// Until the reference is dropped, nobody else writes to the bytes, which are only read where others read them, too, and
    /// nobody else in this process has a reference to them (R-TURNS).
    #[allow(clippy::mut_from_ref, reason = "the memory isn't behind the reference")]
    unsafe fn bytes(&self, place: Place, rank: usize, range: &Range<usize>) -> &mut [u8] {
        let common = self.0[place.region].as_ref().expect("a region that is used stays");
        let region = common.others[rank].as_ref().unwrap_or(&common.own);
        let (start, len) = (place.offset + range.start, range.len());
        assert!(start + len <= region.bytes(), "a part outside its region");
        // SAFETY: inside the mapping, which lives as long as `self`; the rest is the caller's.
        unsafe { std::slice::from_raw_parts_mut(region.start().as_ptr().add(start), len) }
    }
}

/// The part of rank `rank` in a sum for all of so many bytes.
fn part(bytes: usize, n: usize, rank: usize) -> Range<usize> {
    let size = bytes.div_ceil(n).next_multiple_of(LINE);
    (rank * size).min(bytes)..((rank + 1) * size).min(bytes)
}

/// What can be done in place.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Way {
    AllReduce,
    ReduceScatter,
    AllGather,
}

impl Way {
    /// That of an operation that isn't asked to go another one.
    pub(crate) fn of(signature: &Signature) -> Option<Way> {
        match signature.kind {
            Kind::AllReduce if signature.algorithm.is_none() => Some(Way::AllReduce),
            Kind::ReduceScatter => Some(Way::ReduceScatter),
            Kind::AllGather => Some(Way::AllGather),
            _ => None,
        }
    }

    /// From how many bytes on it is gone. Sums of parts keep to the order of the ring, so it must be the ring's sizes.
    pub(crate) fn least(self) -> usize {
        match self {
            Way::AllReduce => LEAST,
            Way::ReduceScatter | Way::AllGather => SMALL_PARTS + 1,
        }
    }
}

/// What a rank does in its turn.
pub(crate) struct Turn {
    way: Way,
    place: Place,
    /// What of the slice it works on, and what of that is to be done.
    part: Range<usize>,
    rest: Range<usize>,
    /// The bytes of the slice.
    bytes: usize,
    ranks: usize,
    /// This rank.
    own: usize,
    /// A sum on its way, and what joins it.
    rooms: [Room; 2],
}

impl Turn {
    pub(crate) fn new(way: Way, place: Place, bytes: usize, ranks: usize, own: usize) -> Turn {
        let part = match way {
            Way::AllReduce => part(bytes, ranks, own),
            Way::ReduceScatter => own * (bytes / ranks)..(own + 1) * (bytes / ranks),
            Way::AllGather => 0..bytes,
        };
        Turn {
            way,
            place,
            rest: part.clone(),
            part,
            bytes,
            ranks,
            own,
            rooms: [Room::default(), Room::default()],
        }
    }

    /// The same from the start.
    pub(crate) fn restart(&mut self) {
        self.rest = self.part.clone();
    }

    pub(crate) fn is_done(&self) -> bool {
        self.rest.is_empty()
    }

    /// Whether it has begun and isn't done: then it needs nobody else to go on.
    pub(crate) fn is_under_way(&self) -> bool {
        self.rest.start > self.part.start && !self.is_done()
    }

    /// Does some of what is to be done; says how many bytes.
    pub(crate) fn advance(&mut self, regions: &Regions, element: Erased, op: ReduceOp) -> usize {
        let (first, end) = (self.rest.start, self.rest.end.min(self.rest.start + AT_ONCE));
        while self.rest.start < end {
            let mut range = self.rest.start..end.min(self.rest.start + CHUNK);
            match self.way {
                Way::AllReduce => self.sum_for_all(regions, &range, element, op),
                Way::ReduceScatter => self.sum_here(regions, &range, element, op),
                Way::AllGather => {
                    let size = self.bytes / self.ranks;
                    let home = range.start / size;
                    range.end = range.end.min((home + 1) * size);
                    self.take(regions, &range, home);
                }
            }
            self.rest.start = range.end;
        }
        self.rest.start - first
    }

    /// The other ranks, the one after this first.
    fn others(&self) -> impl Iterator<Item = usize> + use<> {
        let (own, ranks) = (self.own, self.ranks);
        (1..ranks).map(move |k| (own + k) % ranks)
    }

    fn sum_for_all(&self, regions: &Regions, range: &Range<usize>, element: Erased, op: ReduceOp) {
        let others = (0..self.ranks).filter(|&rank| rank != self.own);
        // SAFETY: the range is in this rank's part, and the operation between its two messages (R-TURNS), which has the
        // slice of this process to itself; each of the references below is to another rank's memory.
        let sum = unsafe { regions.bytes(self.place, self.own, range) };
        for rank in others.clone() {
            // SAFETY: as above.
            (element.combine)(op, sum, unsafe { regions.bytes(self.place, rank, range) });
        }
        for rank in others {
            // SAFETY: as above.
            unsafe { regions.bytes(self.place, rank, range) }.copy_from_slice(sum);
        }
    }

    /// As the ring does: the first is the rank after this one, each joins what those before it made, and this one is the last.
    fn sum_here(&mut self, regions: &Regions, range: &Range<usize>, element: Erased, op: ReduceOp) {
        let mut others = self.others();
        let Some(first) = others.next() else { return };
        // SAFETY: as in `sum_for_all`; nobody else touches this rank's part, wherever it lies.
        let (own, first) =
            unsafe { (regions.bytes(self.place, self.own, range), regions.bytes(self.place, first, range)) };
        if self.ranks == 2 {
            return (element.combine)(op, own, first);
        }
        self.rooms.iter_mut().for_each(|room| room.grow(CHUNK));
        let [mut sum, mut next] = self.rooms.each_mut().map(|room| &mut room.bytes_mut()[..range.len()]);
        sum.copy_from_slice(first);
        for rank in others {
            // SAFETY: as above.
            next.copy_from_slice(unsafe { regions.bytes(self.place, rank, range) });
            (element.combine)(op, next, sum);
            std::mem::swap(&mut sum, &mut next);
        }
        (element.combine)(op, own, sum);
    }

    /// Takes what is at home on another rank.
    fn take(&self, regions: &Regions, range: &Range<usize>, home: usize) {
        if home == self.own {
            return;
        }
        // SAFETY: the operation is between its two messages, so nobody writes what is at home on its rank, and this rank alone
        // touches its copy (R-TURNS); the two are in different mappings.
        let (own, theirs) =
            unsafe { (regions.bytes(self.place, self.own, range), regions.bytes(self.place, home, range)) };
        own.copy_from_slice(theirs);
    }
}

/// A slice in memory that all ranks of a group see, of [`crate::Group::allocate`]: operations on it, and on parts of it, copy
/// nothing.
pub struct Shared<T> {
    region: Arc<Region>,
    len: usize,
    element: PhantomData<T>,
}

impl<T: Element> Shared<T> {
    /// Zeros in a region of their own, which others can be let in to where the system has such memory.
    pub(crate) fn zeroed(len: usize) -> std::io::Result<Shared<T>> {
        let bytes = len.checked_mul(size_of::<T>()).ok_or(std::io::ErrorKind::OutOfMemory)?;
        let region = Arc::new(Region::zeroed(bytes)?);
        // SAFETY: nobody else knows the region yet.
        if let Err(error) = unsafe { region.share() } {
            tracing::warn!("memory can't be shared with the ranks of this host, it is copied: {error}");
        }
        Ok(Shared { region, len, element: PhantomData })
    }

    /// What it lies in, which gives out its address to whoever lets others in.
    pub(crate) fn region(&self) -> &Arc<Region> {
        &self.region
    }
}

impl<T: Element> Deref for Shared<T> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        // SAFETY: inside the region, which lives as long as `self`, starts on a page, and held zeros or elements ever since;
        // other ranks touch it only while an operation has it (R-TURNS).
        unsafe { std::slice::from_raw_parts(self.region.start().as_ptr().cast(), self.len) }
    }
}

impl<T: Element> DerefMut for Shared<T> {
    fn deref_mut(&mut self) -> &mut [T] {
        // SAFETY: as in `deref`; this is the one handle to the region that gives out slices.
        unsafe { std::slice::from_raw_parts_mut(self.region.start().as_ptr().cast(), self.len) }
    }
}

impl<T: Element> Buffer for Shared<T> {
    type Item = T;

    fn as_mut_slice(&mut self) -> &mut [T] {
        self
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_shared_anew_is_no_longer_where_the_others_looked_for_it() {
        let own = Arc::new(Region::zeroed(LEAST).unwrap());
        let mut regions = Regions::default();
        // SAFETY: the mapping is so long, and nobody writes.
        let slice = || unsafe { std::slice::from_raw_parts(own.start().as_ptr(), LEAST) };
        for number in 0..3 {
            // SAFETY: the test has one thread.
            let file = unsafe { own.share() }.unwrap();
            assert_eq!(regions.find(slice(), LEAST), None, "others see what it was in before");
            regions.attach(Common { own: Arc::clone(&own), file, others: vec![None] });
            assert_eq!(regions.find(slice(), LEAST), Some(Place { region: number, offset: 0 }));
            let held = regions.0.iter().flatten().count();
            assert_eq!(held, 1, "what nobody can find is let go");
        }
    }

    #[test]
    fn a_sum_that_began_goes_on_without_anybody() {
        let bytes = 2 * (2 * AT_ONCE + LINE);
        let region = || Region::zeroed(bytes).unwrap();
        let own = Arc::new(region());
        // SAFETY: the test has one thread.
        let file = unsafe { own.share() }.unwrap();
        let mut regions = Regions::default();
        regions.attach(Common { own, file, others: vec![None, Some(region())] });
        let mut turn = Turn::new(Way::AllReduce, Place { region: 0, offset: 0 }, bytes, 2, 0);
        for want in [false, true, true, false] {
            assert_eq!(turn.is_under_way(), want, "{:?} of {:?}", turn.rest, turn.part);
            turn.advance(&regions, Erased::of::<f32>(), ReduceOp::Sum);
        }
        assert!(turn.is_done());
    }

    #[test]
    fn parts_cover_a_slice_once() {
        for n in 1..10 {
            for bytes in [0, 1, 63, 64, 65, 1000, 4096, 65_537] {
                let mut end = 0;
                for rank in 0..n {
                    let part = part(bytes, n, rank);
                    assert_eq!(part.start, end, "{bytes} bytes, rank {rank} of {n}");
                    end = part.end;
                }
                assert_eq!(end, bytes);
            }
        }
    }
}
