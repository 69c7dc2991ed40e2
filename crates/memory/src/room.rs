//! Memory that is there before it is needed.

use super::PAGE;
use nix::sys::mman::{MmapAdvise, madvise};
use std::ptr::NonNull;

/// The pages that processors' tables know beside the smallest ones.
const HUGE_PAGE: usize = 2 << 20;

/// Has the system bring in the memory of `array` now, which it may only have promised, instead of page by page when each is first
/// touched, and in huge pages where it has some: that takes a fraction of the time. Values stay what they are. A system that can't
/// (Linux before 5.14) brings it in as ever.
pub fn bring_in<T>(array: &mut [T]) {
    let bytes = array.as_mut_ptr_range();
    let (start, end) = (bytes.start.addr(), bytes.end.addr());
    let huge = start.next_multiple_of(HUGE_PAGE)..end / HUGE_PAGE * HUGE_PAGE;
    let whole = start / PAGE * PAGE..end.next_multiple_of(PAGE);
    for (range, advice) in [(huge, MmapAdvise::MADV_HUGEPAGE), (whole, MmapAdvise::MADV_POPULATE_WRITE)] {
        let Some(at) = NonNull::new(bytes.start.with_addr(range.start)).filter(|_| !range.is_empty()) else {
            continue;
        };
        // SAFETY: both leave every byte as it is, and the pages are those of `array`, which is this caller's alone; one that it shares
        // with a neighbour is brought in and nothing more.
        let advised = unsafe { madvise(at.cast(), range.len(), advice) };
        // What isn't brought in now comes when it is touched.
        advised.unwrap_or_default();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// How many bytes of this process are in memory.
    fn resident() -> usize {
        let pages = std::fs::read_to_string("/proc/self/statm").unwrap();
        pages.split(' ').nth(1).unwrap().parse::<usize>().unwrap() * PAGE
    }

    #[test]
    fn memory_that_is_brought_in_is_there_and_keeps_its_values() {
        const LEN: usize = 16 << 20;
        let mut array = vec![0u32; LEN];
        array[LEN - 1] = 7;
        let before = resident();
        // All but its ends, which lie somewhere in a page.
        bring_in(&mut array[1..LEN - 1]);
        let came = resident() - before;
        assert!(came > 4 * LEN - HUGE_PAGE, "{came} of {} bytes came", 4 * LEN);
        assert!(array[..LEN - 1].iter().all(|number| *number == 0) && array[LEN - 1] == 7);
        bring_in::<u32>(&mut []);
    }
}
