//! Batches from samples that are kept as bytes: what a loader would do to each, done where the bytes lie.
//!
//! `words` is i64: the seed and the stream that random changes are functions of, then the numbers of the batch's samples, and
//! perhaps more. Random changes are those of the crate `data`, to the bit, and so are the numbers in float32.

use crate::dtype::DType;
use crate::kernel;
use crate::tensor::Tensor;

/// What is seen beyond the border of an image.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Border {
    /// Black: bytes of 0.
    #[default]
    Black,
    /// The image once more, reflected in its first and last rows and columns, as often as it takes; those stand there once, as with
    /// torchvision's `padding_mode="reflect"`.
    Reflect,
}

impl Border {
    /// Which of `n` rows or columns, of which there is one at least, is seen at a place before, among or behind them; none where it is
    /// black.
    pub fn seen(self, place: i64, n: usize) -> Option<usize> {
        let n = n as i64;
        if (0..n).contains(&place) || self == Border::Black {
            return (0..n).contains(&place).then_some(place as usize);
        }
        if n == 1 {
            return Some(0);
        }
        let (period, there) = (2 * (n - 1), place.rem_euclid(2 * (n - 1)));
        Some(there.min(period - there) as usize)
    }
}

/// How an image is made of the bytes of a sample.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SampleImages {
    /// Planes, rows and columns of a sample.
    pub from: [usize; 3],
    /// Rows and columns of the image.
    pub size: [usize; 2],
    /// The row and the column of the bytes that the image begins with, where no crop moves it.
    pub corner: [isize; 2],
    /// What is seen beyond the bytes.
    pub border: Border,
    /// How many places there are for a random crop, down and to the right; 1 leaves it where it is.
    pub crop: [usize; 2],
    /// The place of the crop among a sample's draws.
    pub crop_place: u8,
    /// How likely the image is mirrored.
    pub flip: f64,
    /// The place of mirroring among a sample's draws.
    pub flip_place: u8,
    /// The side of the square around a random pixel that becomes 0; 0 for none.
    pub cutout: usize,
    /// The place of the square among a sample's draws.
    pub cutout_place: u8,
}

/// Where the bytes of a batch's sample are found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SampleOrder {
    /// Its number tells: all samples are there.
    ByNumber,
    /// Its place in the batch tells: only those of the batch are there.
    AsInBatch,
}

impl SampleImages {
    /// All of an image, as it is.
    pub fn whole(from: [usize; 3]) -> SampleImages {
        let [_, height, width] = from;
        SampleImages {
            from,
            size: [height, width],
            corner: [0, 0],
            border: Border::Black,
            crop: [1, 1],
            crop_place: 0,
            flip: 0.0,
            flip_place: 0,
            cutout: 0,
            cutout_place: 0,
        }
    }

    /// Bytes of a sample.
    pub fn bytes(&self) -> usize {
        self.from.iter().product()
    }

    /// An image is mirrored where a word of 32 bits is below this.
    pub(crate) fn flip_below(&self) -> u64 {
        // A product with a power of 2 is exact.
        (self.flip.clamp(0.0, 1.0) * (1u64 << 32) as f64).ceil() as u64
    }
}

impl Tensor {
    /// Images (n, channels, height, width) of float32 from these bytes, u8 of samples one after the other, for the first `n` samples
    /// that `words` names. `table` (channels, 256) has a number for each byte. On a GPU they lie as its convolutions want them.
    #[track_caller]
    pub fn sample_images(
        &self,
        words: &Tensor,
        table: &Tensor,
        how: &SampleImages,
        order: SampleOrder,
        n: usize,
    ) -> Tensor {
        let [channels, ..] = how.from;
        self.check_samples("sample_images", words, n);
        assert!(
            how.bytes() > 0 && self.count().is_multiple_of(how.bytes()),
            "sample_images: {} bytes for samples of {:?}",
            self.count(),
            how.from
        );
        assert!(
            table.dims() == [channels, 256] && table.dtype() == DType::F32,
            "sample_images: a table of shape {} of {} for {channels} channels",
            table.shape(),
            table.dtype()
        );
        let shape = [n, channels, how.size[0], how.size[1]].into();
        let out = Tensor::stale_in(self.device().image_order(), self.device(), shape, DType::F32);
        kernel::samples::images(self, words, table, how, order, &out);
        out
    }

    /// Ids and labels, i64 (n, `window`) each, from these bytes, u8 of a text: sample `i` begins at `i * stride`, and its labels are the
    /// bytes one further on. `words` is as for [`Tensor::sample_images`].
    #[track_caller]
    pub fn sample_windows(
        &self,
        words: &Tensor,
        window: usize,
        stride: usize,
        order: SampleOrder,
        n: usize,
    ) -> [Tensor; 2] {
        self.check_samples("sample_windows", words, n);
        let out = [(); 2].map(|()| Tensor::stale(self.device(), [n, window].into(), DType::I64));
        kernel::samples::windows(self, words, stride, order, [&out[0], &out[1]]);
        out
    }

    #[track_caller]
    fn check_samples(&self, op: &str, words: &Tensor, n: usize) {
        assert!(
            self.dtype() == DType::U8 && words.dtype() == DType::I64 && words.count() >= 2 + n,
            "{op}: bytes of {}, and {} words of {} for {n} samples",
            self.dtype(),
            words.count(),
            words.dtype()
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::Device;

    #[test]
    fn a_mirrored_crop_shows_what_its_definition_says() {
        let device = Device::cpu(1);
        let bytes = Tensor::from_slice(&device, &[1u8, 2, 3, 4, 5, 6], [1, 6]);
        let table: Vec<f32> = (0..256).map(|byte| byte as f32).collect();
        let table = Tensor::from_slice(&device, &table, [1, 256]);
        let words = Tensor::from_slice(&device, &[0i64, 0, 0], [3]);
        let whole = SampleImages::whole([1, 2, 3]);
        let seen = |how: SampleImages| {
            bytes.sample_images(&words, &table, &how, SampleOrder::ByNumber, 1).to_vec::<f32>()
        };
        assert_eq!(seen(whole), [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]);
        assert_eq!(seen(SampleImages { flip: 1.0, ..whole }), [3.0, 2.0, 1.0, 6.0, 5.0, 4.0]);
        let moved = SampleImages { corner: [-1, 1], size: [3, 3], flip: 1.0, ..whole };
        assert_eq!(seen(moved), [0.0, 0.0, 0.0, 0.0, 3.0, 2.0, 0.0, 6.0, 5.0]);
        let reflected = SampleImages { border: Border::Reflect, ..moved };
        assert_eq!(seen(reflected), [5.0, 6.0, 5.0, 2.0, 3.0, 2.0, 5.0, 6.0, 5.0]);
        assert_eq!(seen(SampleImages { cutout: 9, ..whole }), [0.0; 6]);
    }

    #[test]
    fn beyond_a_border_is_nothing_or_what_lies_before_it() {
        for (n, places) in [
            (4, &[2, 1, 0, 1, 2, 3, 2, 1, 0, 1, 2, 3, 2, 1][..]),
            (2, &[0, 1, 0, 1, 0, 1, 0]),
            (1, &[0, 0, 0, 0, 0]),
        ] {
            for (place, &seen) in (-2i64..).zip(places) {
                assert_eq!(Border::Reflect.seen(place, n), Some(seen), "{place} of {n}");
                let within = (0..n as i64).contains(&place).then_some(seen);
                assert_eq!(Border::Black.seen(place, n), within, "{place} of {n}");
            }
        }
        assert_eq!(Border::Reflect.seen(-25, 4), Some(1));
    }

    #[test]
    fn a_chance_is_a_number_of_words() {
        for (flip, below) in [(0.0, 0), (0.5, 1 << 31), (1.0, 1 << 32), (1e-12, 1), (0.75, 3 << 30)] {
            let how = SampleImages { flip, ..SampleImages::whole([1, 1, 1]) };
            assert_eq!(how.flip_below(), below, "{flip}");
        }
    }
}
