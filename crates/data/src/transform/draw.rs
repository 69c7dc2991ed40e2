//! Random numbers of one sample in one epoch.
//!
//! Every transform of a pipeline has blocks of its own, so what one draws doesn't depend on how much another one drew.

use phalanx_tensor::Philox;

/// Apart from the streams that parameters, dropout and orders take from the same seed.
const STREAMS: u64 = 0x6175_676d_656e_7400;

/// What decides the random changes of one sample: a function of the run's seed, the epoch and the sample's number alone.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Draws {
    random: Philox,
    sample: u64,
}

impl Draws {
    pub(crate) fn new(seed: u64, epoch: u64, sample: usize) -> Draws {
        Draws { random: Philox::new(seed, Draws::stream(epoch)), sample: sample as u64 }
    }

    /// The stream of an epoch, in which each sample has blocks of its own.
    pub(crate) fn stream(epoch: u64) -> u64 {
        STREAMS.wrapping_add(epoch)
    }

    /// Four words for attempt `attempt` of the transform in place `place`.
    #[inline]
    pub(crate) fn words(&self, place: u8, attempt: u8) -> [u32; 4] {
        self.random.block(self.sample << 16 | u64::from(place) << 8 | u64::from(attempt))
    }
}

/// The number in [0, 1) that a word stands for.
#[inline]
pub(crate) fn unit(word: u32) -> f64 {
    f64::from(word) / (1u64 << 32) as f64
}

/// A number from `low` to `high`.
#[inline]
pub(crate) fn between(word: u32, low: f64, high: f64) -> f64 {
    low + (high - low) * unit(word)
}

/// A whole number below `n`, which is at least 1 and at most 2^32.
#[inline]
pub(crate) fn below(word: u32, n: usize) -> usize {
    ((u64::from(word) * n as u64) >> 32) as usize
}

/// The share of a sample in its mixture with another one: Beta(`alpha`, `alpha`), for an alpha of at most 1.
///
/// Johnk's method: powers of two uniform numbers, taken anew until they add up to at most 1, each as a share of their sum.
/// In logarithms, as the powers of a small alpha are below every float. Source: Johnk, "Erzeugung von betaverteilten und
/// gammaverteilten Zufallszahlen", Metrika 8 (1964).
pub(crate) fn beta(draws: &Draws, place: u8, alpha: f64) -> f64 {
    for attempt in 0..=u8::MAX {
        let [a, b, ..] = draws.words(place, attempt);
        // 1 - unit is above 0, where a logarithm needs it.
        let (x, y) = ((1.0 - unit(a)).ln() / alpha, (1.0 - unit(b)).ln() / alpha);
        if x.exp() + y.exp() <= 1.0 {
            return 1.0 / (1.0 + (y - x).exp());
        }
    }
    // At least every other attempt succeeds.
    unreachable!("256 attempts of Johnk's method failed")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shares_of_mixtures_are_beta_distributed() {
        for (alpha, bound) in [(1.0, 0.01), (0.2, 0.01), (0.01, 0.01)] {
            let shares: Vec<f64> =
                (0..20_000).map(|sample| beta(&Draws::new(1, 2, sample), 7, alpha)).collect();
            let n = shares.len() as f64;
            let mean = shares.iter().sum::<f64>() / n;
            let variance = shares.iter().map(|share| (share - mean).powi(2)).sum::<f64>() / n;
            let expected = 1.0 / (4.0 * (2.0 * alpha + 1.0));
            assert!((mean - 0.5).abs() < bound, "alpha {alpha}: mean {mean}");
            assert!(
                (variance - expected).abs() < bound,
                "alpha {alpha}: variance {variance}, not {expected}"
            );
            assert!(shares.iter().all(|share| (0.0..=1.0).contains(share)));
        }
    }

    #[test]
    fn whole_numbers_reach_both_ends() {
        assert_eq!((below(0, 9), below(u32::MAX, 9), below(u32::MAX, 1)), (0, 8, 0));
        assert!(unit(u32::MAX) < 1.0);
    }
}
