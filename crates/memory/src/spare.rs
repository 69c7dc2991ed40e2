//! Pages that are used at many places in turn.

use super::{PAGE, READ_WRITE, Region};
use nix::sys::mman::{MapFlags, mmap_anonymous};
use std::io::{Error, Result};
use std::num::NonZeroUsize;
use std::ops::Range;

/// Pages that aren't needed where they were, and may be soon at another place.
///
/// A page that is given back to the system and asked for at another place costs a fault, a search for a free one and 4096 zeros,
/// which takes longer than to copy values there. Here it stays the process's: only the tables say of it that it lies elsewhere.
/// Pages move in lots, always whole, so that what was moved once lies in one piece whenever it is moved again, which is what the
/// system asks for; what doesn't fill a lot is given back as ever. Where the system can't move pages (Linux before 5.7), or the
/// memory is one that others see, all are.
pub struct Spare {
    /// Where pages lie that nobody needs.
    shelf: Region,
    lot: usize,
    /// The places of the shelf that hold a lot, and those that don't.
    full: Vec<usize>,
    empty: Vec<usize>,
}

/// The most lots that a part comes in.
const LOTS: usize = 32;
/// To move a lot takes the system as long as to bring in so many pages.
const PAGES_A_MOVE: usize = 2;

impl Spare {
    /// Keeps at most so many bytes, in lots of the length in which these parts of regions, which come and go equally often, do so the
    /// fastest: where most are of one length, that is it.
    pub fn fitting(parts: &[Range<usize>], bytes: usize) -> Result<Spare> {
        let pages = |part: &Range<usize>| (part.end / PAGE).saturating_sub(part.start.div_ceil(PAGE));
        let parts: Vec<usize> = parts.iter().map(pages).filter(|pages| *pages > 0).collect();
        let cost =
            |lot: usize| parts.iter().map(|pages| pages / lot * PAGES_A_MOVE + pages % lot).sum::<usize>();
        let lots = parts.iter().flat_map(|pages| (1..=LOTS).map(move |lots| (pages / lots).max(1)));
        let lot = lots.min_by_key(|lot| cost(*lot)).unwrap_or(1) * PAGE;
        Spare::new(bytes / lot, lot)
    }

    /// Keeps at most so many lots of so many bytes, which are rounded up to whole pages. Only what is kept takes memory.
    fn new(lots: usize, lot: usize) -> Result<Spare> {
        let lot = lot.max(1).next_multiple_of(PAGE);
        let shelf = Region::zeroed(lots.saturating_mul(lot))?;
        let empty = (0..lots).rev().map(|place| place * lot).collect();
        Ok(Spare { shelf, lot, full: Vec::new(), empty })
    }

    /// As [`Region::give_back`], but pages of these bytes are kept as far as there is room.
    ///
    /// # Safety
    ///
    /// As there.
    pub unsafe fn take(&mut self, region: &Region, bytes: Range<usize>) -> Result<()> {
        let lots = self.lots(region, &bytes);
        let mut rest = bytes;
        for at in lots {
            let Some(place) = self.empty.pop() else { break };
            // SAFETY: both are a lot, in their mappings; nobody has a reference to the one, as the caller says, and the other is empty.
            if unsafe { move_pages(region, at, &self.shelf, place, self.lot) }.is_err() {
                // A system that can't isn't asked again.
                self.empty.clear();
                break;
            }
            self.full.push(place);
            rest.start = at + self.lot;
        }
        // SAFETY: as the caller says.
        unsafe { region.give_back(rest) }
    }

    /// Puts pages that are kept in the place of those of these bytes, as far as there are some. Bytes are any then: what was
    /// there is lost.
    ///
    /// # Safety
    ///
    /// No thread of this process may use these bytes meanwhile, nor hold a reference to them.
    pub unsafe fn put(&mut self, region: &Region, bytes: Range<usize>) {
        for at in self.lots(region, &bytes) {
            let Some(place) = self.full.pop() else { return };
            // SAFETY: as in `take`, the other way.
            if unsafe { move_pages(&self.shelf, place, region, at, self.lot) }.is_err() {
                self.full.push(place);
                return;
            }
            self.empty.push(place);
        }
    }

    /// Where lots begin in these bytes of a region: always at the same places for the same bytes. None in memory that others see.
    fn lots(&self, region: &Region, bytes: &Range<usize>) -> impl Iterator<Item = usize> + use<> {
        assert!(bytes.end <= region.bytes(), "spare: bytes {bytes:?} of a region of {}", region.bytes());
        let (first, lot) = (bytes.start.next_multiple_of(PAGE), self.lot);
        let own = if region.file().is_none() { bytes.end.saturating_sub(first) / lot } else { 0 };
        (0..own).map(move |i| first + i * lot)
    }
}

/// Moves the pages of some bytes of one region into the place of those of another, or of none where there are none. What they
/// leave has no pages, and zeros when it is touched next.
///
/// # Safety
///
/// Nobody uses the bytes of either, which are whole pages of private mappings, nor has a reference to them.
unsafe fn move_pages(from: &Region, at: usize, to: &Region, place: usize, bytes: usize) -> Result<()> {
    debug_assert!(at + bytes <= from.bytes() && place + bytes <= to.bytes(), "pages outside their region");
    // SAFETY: both addresses are inside of their mappings.
    let (old, new) = unsafe { (from.start().add(at), to.start().add(place)) };
    let flags = libc::MREMAP_MAYMOVE | libc::MREMAP_FIXED | libc::MREMAP_DONTUNMAP;
    // SAFETY: nobody uses the bytes, as the caller says; both mappings stay, at both ends.
    let moved = unsafe { libc::mremap(old.as_ptr().cast(), bytes, bytes, flags, new.as_ptr()) };
    if moved != libc::MAP_FAILED {
        return Ok(());
    }
    let error = Error::last_os_error();
    let (new, bytes) = (NonZeroUsize::new(new.addr().get()), NonZeroUsize::new(bytes));
    // The system may have done away with the place before it found that it can't.
    let flags = MapFlags::MAP_PRIVATE | MapFlags::MAP_FIXED;
    // SAFETY: what is mapped anew is in `to`, and nobody uses it, as the caller says.
    let mended = unsafe { mmap_anonymous(new, bytes.expect("a lot has a page"), READ_WRITE, flags) };
    if mended.is_err() {
        // There would be a hole in memory that others take for theirs.
        std::process::abort();
    }
    Err(error)
}

#[cfg(test)]
mod tests {
    use super::*;

    const LOT: usize = 4 * PAGE;

    #[test]
    fn lots_are_as_long_as_most_parts_and_short_where_parts_differ() {
        let lot = |pages: &[usize]| {
            let parts: Vec<_> = pages.iter().map(|pages| 10..10 + (pages + 1) * PAGE).collect();
            Spare::fitting(&parts, 1000 * PAGE).unwrap().lot / PAGE
        };
        assert_eq!(lot(&[]), 1);
        assert_eq!(lot(&[0, 100]), 100);
        // A page that is left over costs less than a second move.
        assert_eq!(lot(&[100, 101, 100]), 100);
        assert_eq!(lot(&[5, 100, 100, 100]), 100);
        // In fifties both come without a rest: 9 moves.
        assert_eq!(lot(&[200, 250]), 50);
        assert!(lot(&[100, 10_000]) >= 100);
        assert_eq!(Spare::fitting(std::slice::from_ref(&(0..8 * PAGE)), 20 * PAGE).unwrap().empty.len(), 2);
    }

    /// A region and one that others see.
    fn regions() -> [Region; 2] {
        let [own, seen] = [(); 2].map(|()| Region::zeroed(20 * PAGE).unwrap());
        // SAFETY: the test has one thread.
        unsafe { seen.share() }.unwrap();
        [own, seen]
    }

    fn bytes(region: &mut Region) -> &mut [u8] {
        // SAFETY: the mapping is so long, and the slice borrows the region.
        unsafe { std::slice::from_raw_parts_mut(region.start().as_ptr(), region.bytes()) }
    }

    #[test]
    fn pages_that_were_left_at_one_place_come_to_another_and_no_more_are_kept_than_there_is_room_for() {
        for mut region in regions() {
            let is_seen = region.file().is_some();
            let mut spare = Spare::new(2, LOT - 1).unwrap();
            bytes(&mut region).fill(7);
            // Three lots and two pages, from the second page on.
            // SAFETY: nobody has a reference.
            unsafe { spare.take(&region, 10..PAGE + 3 * LOT + 2 * PAGE) }.unwrap();
            let kept = spare.shelf.resident().unwrap();
            assert_eq!(kept, if is_seen { 0 } else { 2 * LOT });
            assert_eq!(region.resident().unwrap(), 6 * PAGE, "one before and five behind");
            let left = |at: usize| (PAGE..PAGE + 3 * LOT + 2 * PAGE).contains(&at);
            assert!((0..20 * PAGE).all(|at| bytes(&mut region)[at] == if left(at) { 0 } else { 7 }));

            let mut other = Region::zeroed(4 * LOT).unwrap();
            bytes(&mut other)[3 * LOT..].fill(5);
            // SAFETY: as above.
            unsafe { spare.put(&other, 1..3 * LOT) };
            assert_eq!(spare.shelf.resident().unwrap(), 0);
            assert_eq!(other.resident().unwrap(), LOT + kept);
            // What came lies behind the first page, which isn't whole.
            let came = PAGE..PAGE + kept;
            let value = |at: usize| if came.contains(&at) { 7 } else { 5 * u8::from(at >= 3 * LOT) };
            assert!((0..4 * LOT).all(|at| bytes(&mut other)[at] == value(at)));
        }
    }

    #[test]
    fn pages_go_round_among_places_of_different_lengths() {
        let [mut region, _] = regions();
        let mut spare = Spare::new(3, PAGE).unwrap();
        let places = [0..3 * PAGE, 3 * PAGE + 1..6 * PAGE + 5, 8 * PAGE..9 * PAGE, 10 * PAGE - 1..14 * PAGE];
        let mut numbers = 0u8..;
        for round in 0..40 {
            let place = places[round * 7 % places.len()].clone();
            // SAFETY: nobody has a reference.
            unsafe { spare.put(&region, place.clone()) };
            let value = numbers.next().unwrap();
            bytes(&mut region)[place.clone()].fill(value);
            assert!(bytes(&mut region)[place.clone()].iter().all(|byte| *byte == value));
            // SAFETY: as above.
            unsafe { spare.take(&region, place) }.unwrap();
            assert_eq!(spare.full.len() + spare.empty.len(), 3);
            assert_eq!(spare.shelf.resident().unwrap(), spare.full.len() * PAGE);
        }
    }
}
