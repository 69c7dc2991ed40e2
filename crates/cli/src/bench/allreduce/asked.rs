//! Numbers of ranks and sizes, as they are typed.

use crate::args::WrongUsage;
use phalanx::comm::Algorithm;
use std::ops::RangeInclusive;

/// More ranks than this share a machine's cores so thinly that nothing is measured.
const MAX_RANKS: usize = 64;
/// The largest slice.
const MAX_BYTES: usize = 1 << 30;

/// `4`, or `2..8` for each from 2 to 8.
pub(super) fn ranks(text: &str) -> Result<RangeInclusive<usize>, WrongUsage> {
    let (first, last) = text.split_once("..").unwrap_or((text, text));
    let count = |text: &str| text.parse().ok().filter(|count| (1..=MAX_RANKS).contains(count));
    match (count(first), count(last)) {
        (Some(first), Some(last)) if first <= last => Ok(first..=last),
        _ => Err(WrongUsage(format!(
            "--nproc {text}: must be a number of ranks from 1 to {MAX_RANKS}, or a range of them such as 2..8"
        ))),
    }
}

/// `4,1K,64M`: bytes, with K or M for powers of 1024.
pub(super) fn sizes(text: &str) -> Result<Vec<usize>, WrongUsage> {
    text.split(',').map(size).collect()
}

fn size(text: &str) -> Result<usize, WrongUsage> {
    let (number, unit) = match text.as_bytes().last() {
        Some(b'K' | b'k') => (&text[..text.len() - 1], 1 << 10),
        Some(b'M' | b'm') => (&text[..text.len() - 1], 1 << 20),
        _ => (text, 1),
    };
    let bytes = number.parse().ok().and_then(|number: usize| number.checked_mul(unit));
    let whole = |bytes: &usize| (4..=MAX_BYTES).contains(bytes) && bytes.is_multiple_of(size_of::<f32>());
    bytes.filter(whole).ok_or_else(|| {
        WrongUsage(format!(
            "--sizes {text}: must be bytes from 4 to {}M, a multiple of 4 (float32), as in 4,64K,16M",
            MAX_BYTES >> 20
        ))
    })
}

/// The name of an algorithm; none for `auto`.
pub(super) fn algorithm(text: &str) -> Result<Option<Algorithm>, WrongUsage> {
    Algorithm::asked(text).map_err(|want| WrongUsage(format!("--algorithm {text}: {want}")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_number_of_ranks_or_a_range_of_them() {
        for (text, want) in [("1", 1..=1), ("4", 4..=4), ("2..8", 2..=8), ("64..64", 64..=64)] {
            assert_eq!(ranks(text).unwrap(), want, "{text}");
        }
        for text in ["", "0", "65", "8..2", "2..", "..8", "2...8", "2..=8", "-1", "two", "2..65"] {
            let error = ranks(text).unwrap_err().to_string();
            assert!(error.starts_with(&format!("--nproc {text}: ")) && error.contains("1 to 64"), "{error}");
        }
    }

    #[test]
    fn algorithms_are_those_of_an_all_reduce() {
        assert_eq!((algorithm("auto").unwrap(), algorithm("ring").unwrap()), (None, Some(Algorithm::Ring)));
        let error = algorithm("rings").unwrap_err().to_string();
        assert!(error.starts_with("--algorithm rings: must be auto, direct, ring, "), "{error}");
    }

    #[test]
    fn sizes_are_whole_floats_with_units() {
        let want = vec![4, 1000, 1 << 10, 64 << 10, 1 << 20, 1 << 30];
        assert_eq!(sizes("4,1000,1K,64k,1m,1024M").unwrap(), want);
        for text in
            ["", "0", "3", "6", "1025M", "K", "1G", "4 ", "-4", "99999999999999999999", "99999999999999999M"]
        {
            let error = sizes(&format!("4,{text}")).unwrap_err().to_string();
            assert!(
                error.starts_with(&format!("--sizes {text}: ")) && error.contains("4 to 1024M"),
                "{error}"
            );
        }
    }
}
