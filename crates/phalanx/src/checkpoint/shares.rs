//! Who writes what of a checkpoint that ranks write together: each rank some parameters that follow each other, whole ones, so that
//! its files are files of weights like any other.

use phalanx_tensor::Layout;
use std::ops::Range;

/// The parameters of each rank: all of them once, with about as many elements for each rank as whole parameters allow.
pub(super) fn of(layout: &Layout, ranks: usize) -> Vec<Range<usize>> {
    let sizes: Vec<u64> = (0..layout.count()).map(|i| layout.shape(i).count() as u64).collect();
    split(&sizes, ranks)
}

/// Cuts a row of sizes into this many parts of about the same size. Some may be empty.
pub(super) fn split(sizes: &[u64], parts: usize) -> Vec<Range<usize>> {
    let total: u128 = sizes.iter().map(|&size| u128::from(size)).sum();
    let (mut before, mut next) = (0, 0);
    let mut ranges = Vec::with_capacity(parts);
    for part in 0..parts {
        let (first, until) = (next, total * (part as u128 + 1) / parts as u128);
        // What lies more in this part than in the next is of this part.
        while let Some(&size) = sizes.get(next).filter(|&&size| before + u128::from(size) / 2 < until) {
            before += u128::from(size);
            next += 1;
        }
        ranges.push(first..if part + 1 == parts { sizes.len() } else { next });
    }
    ranges
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn each_is_of_one_part_and_no_part_is_much_too_large(
            sizes in prop::collection::vec(0u64..1000, 0..40), parts in 1usize..9,
        ) {
            let ranges = split(&sizes, parts);
            prop_assert_eq!(ranges.len(), parts);
            prop_assert_eq!(ranges.iter().cloned().flatten().collect::<Vec<_>>(), (0..sizes.len()).collect::<Vec<_>>());
            let largest = sizes.iter().copied().max().unwrap_or(0);
            let fair = sizes.iter().sum::<u64>() / parts as u64;
            for range in ranges {
                prop_assert!(sizes[range].iter().sum::<u64>() <= fair + largest + 1);
            }
        }
    }
}
