//! How parameters fall into buckets.

use phalanx_tensor::Layout;
use std::ops::Range;

/// Cuts a layout into ranges of neighbouring parameters of about `cap` bytes of float32 gradients, beginning with the last
/// parameter, whose gradient is ready first. The first bucket is cut at `first_cap`, so that communication starts early. A
/// parameter larger than the cap is a bucket of its own.
pub fn buckets(layout: &Layout, first_cap: usize, cap: usize) -> Vec<Range<usize>> {
    let mut buckets = Vec::new();
    let mut end = layout.count();
    while end > 0 {
        let limit = if buckets.is_empty() { first_cap } else { cap };
        let mut start = end - 1;
        while start > 0 && layout.span(start - 1..end).len() * size_of::<f32>() <= limit {
            start -= 1;
        }
        buckets.push(start..end);
        end = start;
    }
    buckets
}

#[cfg(test)]
mod tests {
    use super::*;
    use phalanx_tensor::{Philox, Shape};

    #[test]
    fn buckets_cover_all_parameters_from_the_last() {
        // 64, 128, 192 and 64 elements with padding.
        let layout = Layout::new(&[[60].into(), [2, 50].into(), [150].into(), [1].into()]);
        let check = |first, cap, want: &[Range<usize>]| {
            assert_eq!(buckets(&layout, first, cap), want, "{first} {cap}")
        };
        check(1 << 20, 1 << 20, std::slice::from_ref(&(0..4)));
        check(256, 1 << 20, &[3..4, 0..3]);
        check(256, 192 * 4, &[3..4, 2..3, 0..2]);
        check(0, 0, &[3..4, 2..3, 1..2, 0..1]);
        assert!(buckets(&Layout::new(&[]), 1, 1).is_empty());
    }

    #[test]
    fn any_layout_is_cut_without_gaps_and_within_the_caps() {
        let random = Philox::new(3, 0);
        for case in 0..200 {
            let word = |i: u64| random.word(case * 100 + i) as usize;
            let shapes: Vec<Shape> =
                (0..word(0) % 20).map(|i| [word(3 + i as u64) % 700 + 1].into()).collect();
            let layout = Layout::new(&shapes);
            let (first_cap, cap) = (word(1) % 4000, word(2) % 8000);
            let cut = buckets(&layout, first_cap, cap);
            let mut end = layout.count();
            for (i, range) in cut.iter().enumerate() {
                assert!(range.end == end && range.start < range.end, "{cut:?}");
                let bytes = |params| layout.span(params).len() * size_of::<f32>();
                let cap = if i == 0 { first_cap } else { cap };
                assert!(range.len() == 1 || bytes(range.clone()) <= cap, "{cut:?} under {cap}");
                let more = range.start > 0 && bytes(range.start - 1..range.end) <= cap;
                assert!(!more, "{cut:?}: bucket {i} had room for another parameter");
                end = range.start;
            }
            assert_eq!(end, 0);
        }
    }
}
