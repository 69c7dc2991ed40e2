//! Which samples were used, in few words: how many, and a sum that every set of them has its own of, as good as certainly. Ranks
//! add up what they really took, so an epoch in which ranks were lost and others came can show that it used each sample once.

/// Samples that were used.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Used {
    /// How many.
    pub samples: u64,
    /// The sum of a 64-bit hash of each one's number.
    pub digest: u64,
}

/// How many numbers a rank tells the others, which are added up as float64 without loss.
pub(super) const WORDS: usize = 3;

impl Used {
    /// These numbers.
    pub(super) fn of(ids: impl IntoIterator<Item = u64>) -> Used {
        let mut used = Used::default();
        ids.into_iter().for_each(|id| used.add(Used { samples: 1, digest: mixed(id) }));
        used
    }

    pub(super) fn add(&mut self, other: Used) {
        self.samples += other.samples;
        self.digest = self.digest.wrapping_add(other.digest);
    }

    /// For a sum over ranks: halves of 32 bits, which some million ranks can add up exactly.
    pub(super) fn words(self) -> [f64; WORDS] {
        [self.samples as f64, (self.digest >> 32) as f64, (self.digest & u64::from(u32::MAX)) as f64]
    }

    pub(super) fn from_words([samples, high, low]: [f64; WORDS]) -> Used {
        let digest = ((high as u64) << 32).wrapping_add(low as u64);
        Used { samples: samples as u64, digest }
    }
}

/// A bijection of 64-bit numbers that leaves no pattern (the finalizer of SplitMix64, Steele and others 2014).
fn mixed(id: u64) -> u64 {
    let x = id.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_order_and_the_ranks_do_not_matter_and_every_sample_does() {
        let whole = Used::of(0..1000);
        let parts = [Used::of((500..1000).rev()), Used::of(0..123), Used::of(123..500)];
        let mut words = [0.0; WORDS];
        for part in parts {
            words.iter_mut().zip(part.words()).for_each(|(sum, word)| *sum += word);
        }
        assert_eq!(Used::from_words(words), whole);
        assert_ne!(Used::of((0..999).chain([7])), whole, "one twice, and one not at all");
        assert_ne!(Used::of(0..999), whole);
        assert_ne!(Used::of((0..1000).chain([7])), whole);
    }
}
