//! The heads of an attention, as kernels take them.

/// Sizes, and what is done to shares; the same bytes as `Heads` in `kernels/heads.cuh`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Heads {
    /// Samples.
    pub batch: usize,
    /// Positions of a sample.
    pub time: usize,
    /// Heads of a sample.
    pub heads: usize,
    /// Numbers of a head at a position.
    pub depth: usize,
    /// The first position whose query is asked.
    pub from: usize,
    /// How many positions' queries are.
    pub asking: usize,
    /// Which of all heads that have masks is the first one here.
    pub first: usize,
    /// Random bits below this drop a share, where there is a key.
    pub threshold: u32,
    /// What the others are multiplied by.
    pub keep: f32,
    /// What scores are multiplied by.
    pub scale: f32,
}

impl Heads {
    /// How many bytes a launch hands over.
    pub const BYTES: usize = size_of::<[i64; 8]>() + size_of::<[f32; 2]>();

    /// The bytes that a launch hands over.
    pub fn to_bytes(&self) -> [u8; Heads::BYTES] {
        let Heads { batch, time, heads, depth, from, asking, first, threshold, .. } = *self;
        let sizes = [batch, time, heads, depth, from, asking, first, threshold as usize];
        let sizes = sizes.into_iter().flat_map(|size| (size as i64).to_ne_bytes());
        let factors = [self.keep, self.scale].into_iter().flat_map(f32::to_ne_bytes);
        let mut bytes = [0; Heads::BYTES];
        bytes.iter_mut().zip(sizes.chain(factors)).for_each(|(to, byte)| *to = byte);
        bytes
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_stand_in_the_order_of_the_struct() {
        let heads = Heads {
            batch: 1,
            time: 2,
            heads: 3,
            depth: 4,
            from: 5,
            asking: 6,
            first: 7,
            threshold: 8,
            keep: 9.0,
            scale: 10.0,
        };
        let bytes = heads.to_bytes();
        let (sizes, factors) = bytes.split_at(64);
        assert_eq!(sizes, (1..=8i64).flat_map(i64::to_ne_bytes).collect::<Vec<u8>>());
        assert_eq!(factors, [9f32, 10.0].iter().flat_map(|x| x.to_ne_bytes()).collect::<Vec<u8>>());
    }
}
