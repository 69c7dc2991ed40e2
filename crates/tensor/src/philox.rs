//! Philox 4x32-10: random numbers as a function of a key and a counter.
//!
//! There is no state that depends on who asked first: the same (seed, stream, index) gives the same number on every
//! thread, rank and machine. Source: Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011.

/// A stream of random numbers that is addressed, not consumed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Philox {
    seed: u64,
    stream: u64,
}

const MULTIPLIER: [u32; 2] = [0xD251_1F53, 0xCD9E_8D57];
const WEYL: [u32; 2] = [0x9E37_79B9, 0xBB67_AE85];
const ROUNDS: usize = 10;

impl Philox {
    /// The stream `stream` of seed `seed`; streams don't overlap.
    pub const fn new(seed: u64, stream: u64) -> Philox {
        Philox { seed, stream }
    }

    /// Its seed and its stream, as kernels of GPUs take them.
    pub(crate) fn words(&self) -> [i64; 2] {
        [self.seed as i64, self.stream as i64]
    }

    /// Four independent 32-bit words at position `index`.
    #[inline(always)]
    pub fn block(&self, index: u64) -> [u32; 4] {
        let mut c = [index as u32, (index >> 32) as u32, self.stream as u32, (self.stream >> 32) as u32];
        let mut k = [self.seed as u32, (self.seed >> 32) as u32];
        for _ in 0..ROUNDS {
            let a = u64::from(c[0]) * u64::from(MULTIPLIER[0]);
            let b = u64::from(c[2]) * u64::from(MULTIPLIER[1]);
            c = [(b >> 32) as u32 ^ c[1] ^ k[0], b as u32, (a >> 32) as u32 ^ c[3] ^ k[1], a as u32];
            k = [k[0].wrapping_add(WEYL[0]), k[1].wrapping_add(WEYL[1])];
        }
        c
    }

    /// The blocks at `N` positions from `index` on: each of the four words of all of them, which vectors can make at once.
    #[inline(always)]
    pub(crate) fn blocks<const N: usize>(&self, index: u64) -> [[u32; N]; 4] {
        let mut words = [[0; N]; 4];
        for i in 0..N {
            let block = self.block(index + i as u64);
            for (words, word) in words.iter_mut().zip(block) {
                words[i] = word;
            }
        }
        words
    }

    /// A word at position `index`, of the block that holds it.
    pub fn word(&self, index: u64) -> u32 {
        self.block(index / 4)[(index % 4) as usize]
    }

    /// The numbers that [`Philox::unit`] has at positions `4 * index` to `4 * index + 3`, for a quarter of the work.
    pub fn units(&self, index: u64) -> [f32; 4] {
        self.block(index).map(unit)
    }

    /// A number in [0, 1) at position `index`, with 24 random bits (exact in f32).
    pub fn unit(&self, index: u64) -> f32 {
        unit(self.word(index))
    }
}

/// The number in [0, 1) that 32 random bits stand for; the low 8 bits don't take part.
#[inline(always)]
pub(crate) fn unit(word: u32) -> f32 {
    (word >> 8) as f32 * (1.0 / (1 << 24) as f32)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn known_answers() {
        // The vectors that the authors publish with their code (Random123, kat_vectors, philox4x32 10).
        assert_eq!(Philox::new(0, 0).block(0), [0x6627_e8d5, 0xe169_c58d, 0xbc57_ac4c, 0x9b00_dbd8]);
        let ones = Philox::new(u64::MAX, u64::MAX).block(u64::MAX);
        assert_eq!(ones, [0x408f_276d, 0x41c8_3b0e, 0xa20b_c7c6, 0x6d54_51fd]);
    }

    #[test]
    fn units_are_even() {
        let p = Philox::new(7, 3);
        let mean = (0..10_000).map(|i| f64::from(p.unit(i))).sum::<f64>() / 10_000.0;
        assert!((mean - 0.5).abs() < 0.01, "{mean}");
        assert!((0..10_000).all(|i| (0.0..1.0).contains(&p.unit(i))));
        assert!((0..100).all(|i| p.units(i / 4)[i as usize % 4] == p.unit(i)));
    }
}
