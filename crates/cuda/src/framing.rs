//! How an image is cut out of the bytes of a sample, as kernels take it.

/// Pairs are (height, width); the same bytes as `Framing` in `kernels/samples.cu`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Framing {
    /// Planes of a sample.
    pub channels: usize,
    /// Pixels of the bytes.
    pub from: [usize; 2],
    /// Pixels of the image.
    pub to: [usize; 2],
    /// Row and column of the bytes that the image begins with, where no crop moves it.
    pub corner: [i64; 2],
    /// Whether the bytes are seen reflected beyond their border; if not, they count as 0 there.
    pub reflects: bool,
    /// How many places there are for a random crop, down and to the right; 1 leaves it where it is.
    pub crop: [usize; 2],
    /// The place of the crop among a sample's draws.
    pub crop_place: u8,
    /// An image is mirrored where a word of 32 bits is below this.
    pub flip_below: u64,
    /// The place of mirroring among a sample's draws.
    pub flip_place: u8,
    /// The side of the square that becomes 0; 0 for none.
    pub cutout: usize,
    /// The place of the square among a sample's draws.
    pub cutout_place: u8,
    /// Whether channels lie next to each other in the image.
    pub channels_last: bool,
    /// Whether samples lie by their numbers, or in the order of the batch.
    pub by_number: bool,
}

impl Framing {
    /// How many bytes a launch hands over.
    pub const BYTES: usize = 17 * size_of::<i64>();

    /// The bytes that a launch hands over.
    pub fn to_bytes(&self) -> [u8; Framing::BYTES] {
        let [from, to, crop] = [self.from, self.to, self.crop].map(|pair| pair.map(|number| number as i64));
        let numbers = [self.channels as i64]
            .into_iter()
            .chain([from, to, self.corner].into_iter().flatten())
            .chain([i64::from(self.reflects)])
            .chain(crop)
            .chain([
                i64::from(self.crop_place),
                self.flip_below as i64,
                i64::from(self.flip_place),
                self.cutout as i64,
                i64::from(self.cutout_place),
                i64::from(self.channels_last),
                i64::from(self.by_number),
            ]);
        let mut bytes = [0; Framing::BYTES];
        for (to, number) in bytes.chunks_exact_mut(size_of::<i64>()).zip(numbers) {
            to.copy_from_slice(&number.to_ne_bytes());
        }
        bytes
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_stand_in_the_order_of_the_struct() {
        let framing = Framing {
            channels: 2,
            from: [3, 4],
            to: [5, 6],
            corner: [-7, -8],
            reflects: true,
            crop: [9, 10],
            crop_place: 11,
            flip_below: 12,
            flip_place: 13,
            cutout: 14,
            cutout_place: 15,
            channels_last: false,
            by_number: true,
        };
        let want = [2i64, 3, 4, 5, 6, -7, -8, 1, 9, 10, 11, 12, 13, 14, 15, 0, 1];
        let bytes = want.into_iter().flat_map(i64::to_ne_bytes).collect::<Vec<u8>>();
        assert_eq!(framing.to_bytes().to_vec(), bytes);
    }
}
