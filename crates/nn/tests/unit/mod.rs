//! Numbers that scripts under `golden` make as well.

/// A number in [-1, 1) for stream `k` and index `i`, as in `golden/models.py` and `golden/gpt.py`.
pub(crate) fn unit(k: u64, i: u64) -> f64 {
    let mut z = (k << 40).wrapping_add(i).wrapping_add(1).wrapping_mul(0x9E37_79B9_7F4A_7C15);
    z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^= z >> 31;
    (z >> 40) as f64 / f64::from(1 << 23) - 1.0
}
