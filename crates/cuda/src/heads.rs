//! The sizes of an attention as its kernels take them.

/// How far apart the rows of heads lie, in numbers: from one sample, one head and one position to the next. The numbers of a row are
/// neighbours.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Apart {
    /// From one sample to the next.
    pub sample: usize,
    /// From one head of a sample to the next.
    pub head: usize,
    /// From one position of a head to the next.
    pub position: usize,
}

/// The sizes of an attention: as `Heads` in `kernels/heads.cuh`.
#[derive(Clone, Copy, Debug)]
pub struct Heads {
    /// Samples.
    pub batch: usize,
    /// Heads of a sample.
    pub heads: usize,
    /// Numbers of a head at a position.
    pub depth: usize,
    /// Positions that have keys.
    pub keys: usize,
    /// The first position whose query is asked.
    pub from: usize,
    /// How many positions' queries are.
    pub asking: usize,
    /// Whether no query sees a later key.
    pub causal: bool,
    /// How many queries have masks of dropout.
    pub dropping: usize,
    /// Which of all heads that have such masks is the first one here.
    pub first: usize,
    /// Random bits below this drop a share, where there is a key.
    pub threshold: u32,
    /// Queries, keys and values.
    pub given: [Apart; 3],
    /// Their gradients.
    pub gradients: [Apart; 3],
    /// What says which keys are hidden, where there is such a mask, and how far it is there from one key to the next.
    pub hiding: (Apart, usize),
    /// What shares that aren't dropped are multiplied by.
    pub keep: f32,
    /// What scores are multiplied by.
    pub scale: f32,
}

/// Whole numbers of the struct.
const WHOLE: usize = 10 + 3 * 7 + 1;

impl Heads {
    /// How many bytes a launch hands over.
    pub const BYTES: usize = WHOLE * size_of::<i64>() + size_of::<[f32; 2]>();

    /// The bytes that a launch hands over.
    pub fn to_bytes(&self) -> [u8; Heads::BYTES] {
        let Heads { batch, heads, depth, keys, from, asking, causal, dropping, first, threshold, .. } = *self;
        let sizes = [
            batch,
            heads,
            depth,
            keys,
            from,
            asking,
            usize::from(causal),
            dropping,
            first,
            threshold as usize,
        ];
        let (hiding, of_key) = self.hiding;
        let apart = self.given.into_iter().chain(self.gradients).chain([hiding]);
        let apart = apart.flat_map(|Apart { sample, head, position }| [sample, head, position]);
        let whole = sizes.into_iter().chain(apart).chain([of_key]).flat_map(|n| (n as i64).to_ne_bytes());
        let factors = [self.keep, self.scale].into_iter().flat_map(f32::to_ne_bytes);
        let mut bytes = [0; Heads::BYTES];
        bytes.iter_mut().zip(whole.chain(factors)).for_each(|(to, byte)| *to = byte);
        bytes
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_stand_in_the_order_of_the_struct() {
        let apart = |first: usize| Apart { sample: first, head: first + 1, position: first + 2 };
        let heads = Heads {
            batch: 1,
            heads: 2,
            depth: 3,
            keys: 4,
            from: 5,
            asking: 6,
            causal: true,
            dropping: 8,
            first: 9,
            threshold: 10,
            given: [11, 14, 17].map(apart),
            gradients: [20, 23, 26].map(apart),
            hiding: (apart(29), 32),
            keep: 33.0,
            scale: 34.0,
        };
        let bytes = heads.to_bytes();
        let (whole, factors) = bytes.split_at(8 * WHOLE);
        let want = (1..=32i64).map(|n| if n == 7 { 1 } else { n });
        assert_eq!(whole, want.flat_map(i64::to_ne_bytes).collect::<Vec<u8>>());
        assert_eq!(factors, [33f32, 34.0].iter().flat_map(|x| x.to_ne_bytes()).collect::<Vec<u8>>());
    }
}
