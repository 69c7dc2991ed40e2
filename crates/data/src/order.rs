//! The order of samples in an epoch, as a function that is asked and not as a list that is made.
//!
//! A shuffle is a Feistel network over the smallest power of two that holds all samples: some bits are split into a left and
//! a right half, and each round mixes a hash of one half into the other, which is a bijection whatever the hash. A result
//! outside of the range is sent through again until it falls inside (cycle walking), which keeps it a bijection on the range.
//! So the sample at any position is known at once, in any epoch, without memory and without having shuffled what lies before.
//! Source: Black and Rogaway, "Ciphers with arbitrary finite domains", CT-RSA 2002.

use phalanx_tensor::Philox;

/// How the samples of an epoch follow each other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Order {
    /// As they are numbered: file order, in every epoch.
    Stored,
    /// Mixed anew in each epoch.
    Shuffled {
        /// The seed of the run.
        seed: u64,
    },
}

impl Order {
    /// The order of `len` samples in epoch `epoch`.
    pub fn epoch(self, len: usize, epoch: u64) -> Permutation {
        match self {
            Order::Stored => Permutation { len, shuffle: None },
            Order::Shuffled { seed } => Permutation { len, shuffle: Some(Feistel::new(len, seed, epoch)) },
        }
    }
}

/// Each of the numbers below `len` exactly once.
///
/// ```
/// use phalanx_data::Order;
/// let order = Order::Shuffled { seed: 1 }.epoch(1000, 0);
/// let mut all: Vec<usize> = (0..1000).map(|position| order.index(position)).collect();
/// all.sort();
/// assert_eq!(all, (0..1000).collect::<Vec<_>>());
/// ```
#[derive(Clone, Copy, Debug)]
pub struct Permutation {
    len: usize,
    shuffle: Option<Feistel>,
}

impl Permutation {
    /// How many numbers there are.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there is no number.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The number at `position`. Panics if there is no such position.
    #[track_caller]
    pub fn index(&self, position: usize) -> usize {
        assert!(position < self.len, "Permutation: position {position} of {}", self.len);
        let Some(feistel) = &self.shuffle else { return position };
        let mut x = feistel.permute(position as u64);
        while x >= self.len as u64 {
            x = feistel.permute(x);
        }
        x as usize
    }
}

/// Enough for small ranges, whose halves hold a bit or two each; more than the four that large ranges need.
const ROUNDS: usize = 10;

#[derive(Clone, Copy, Debug)]
struct Feistel {
    keys: [u64; ROUNDS],
    right_bits: u32,
    left_mask: u64,
    right_mask: u64,
}

impl Feistel {
    fn new(len: usize, seed: u64, epoch: u64) -> Feistel {
        // Apart from the streams that parameters and dropout take from the same seed.
        const STREAMS: u64 = 0x7368_7566_666c_6500;
        let random = Philox::new(seed, STREAMS.wrapping_add(epoch));
        let keys = std::array::from_fn(|round| {
            let [a, b, ..] = random.block(round as u64);
            u64::from(a) << 32 | u64::from(b)
        });
        let bits = (len.max(4) as u64 - 1).ilog2() + 1;
        let left_bits = bits / 2;
        let right_bits = bits - left_bits;
        Feistel { keys, right_bits, left_mask: (1 << left_bits) - 1, right_mask: (1 << right_bits) - 1 }
    }

    #[inline]
    fn permute(&self, x: u64) -> u64 {
        let (mut left, mut right) = (x >> self.right_bits, x & self.right_mask);
        for pair in self.keys.chunks_exact(2) {
            left ^= hash(right ^ pair[0]) & self.left_mask;
            right ^= hash(left ^ pair[1]) & self.right_mask;
        }
        left << self.right_bits | right
    }
}

/// The finaliser of SplitMix64: every input bit reaches every output bit.
#[inline]
fn hash(mut x: u64) -> u64 {
    x = (x ^ (x >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    x = (x ^ (x >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    x ^ (x >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn all(order: Order, len: usize, epoch: u64) -> Vec<usize> {
        let permutation = order.epoch(len, epoch);
        (0..len).map(|position| permutation.index(position)).collect()
    }

    proptest! {
        #[test]
        fn every_shuffle_is_a_permutation(len in 0usize..3000, seed in any::<u64>(), epoch in any::<u64>()) {
            let mut shuffled = all(Order::Shuffled { seed }, len, epoch);
            shuffled.sort_unstable();
            prop_assert!(shuffled.into_iter().eq(0..len));
        }
    }

    #[test]
    fn epochs_and_seeds_differ_and_repeat_themselves() {
        let order = |seed, epoch| all(Order::Shuffled { seed }, 100, epoch);
        assert_eq!(order(1, 2), order(1, 2));
        assert_ne!(order(1, 2), order(1, 3));
        assert_ne!(order(1, 2), order(2, 2));
        assert_ne!(order(1, 2), order(2, 1));
        assert!(all(Order::Stored, 9, 4).into_iter().eq(0..9));
    }

    /// Each sample must be as likely at each position, and each pair as likely to follow each other. The bound lies five
    /// standard deviations of a chi-squared value above its mean, for fixed seeds, so this passes always or never.
    #[test]
    fn shuffles_are_even() {
        for len in [2usize, 3, 5, 7, 8, 10, 13, 16] {
            let epochs = 4000;
            let mut at = vec![0f64; len * len];
            let mut follows = vec![0f64; len * len];
            for epoch in 0..epochs {
                let order = all(Order::Shuffled { seed: 9 }, len, epoch);
                order.iter().enumerate().for_each(|(position, &sample)| at[position * len + sample] += 1.0);
                order.windows(2).for_each(|pair| follows[pair[0] * len + pair[1]] += 1.0);
            }
            let chi_squared = |counts: &[f64], expected: f64| -> f64 {
                counts.iter().filter(|&&c| c > 0.0).map(|c| (c - expected).powi(2) / expected).sum()
            };
            let bound = |freedom: f64| freedom + 5.0 * (2.0 * freedom).sqrt();
            let n = len as f64;
            let positions = chi_squared(&at, epochs as f64 / n);
            assert!(positions < bound((n - 1.0).powi(2)), "{len} samples, positions: {positions}");
            let pairs = chi_squared(&follows, epochs as f64 / n);
            assert!(pairs < bound(n * n - n), "{len} samples, neighbours: {pairs}");
            assert_eq!(
                follows.iter().filter(|&&c| c == 0.0).count(),
                len,
                "every pair but a sample with itself"
            );
        }
    }

    #[test]
    fn a_shuffle_leaves_few_samples_where_they_were() {
        let still =
            all(Order::Shuffled { seed: 3 }, 60_000, 0).iter().enumerate().filter(|&(p, &i)| p == i).count();
        assert!(still < 8, "{still} of 60000, where a random shuffle leaves 1 on average");
    }
}
