//! Grey images in memory, each row without the zeros at its ends.
//!
//! The 60,000 images of MNIST are 47 MB of which most are black margin; trimmed they are 14 MB, which is what every worker
//! of a node holds. Filling a batch is no slower for it: most of a row is one value that is written without being looked up.

use crate::error::Result;
use crate::idx::IdxReader;
use std::io::Read;

/// Images of one size, at most 255 pixels wide.
#[derive(Debug)]
pub(crate) struct Pixels {
    height: usize,
    width: usize,
    /// What remains of all rows, one after the other.
    bytes: Vec<u8>,
    /// The remaining part of each row: where it begins in the row, and its length.
    spans: Vec<[u8; 2]>,
    /// Where each image begins in `bytes`.
    starts: Vec<u32>,
}

impl Pixels {
    /// Reads all images of a file of (N, height, width) values. A gigabyte of them, the most that the reader gives, is
    /// within the reach of `starts`.
    pub(crate) fn read<R: Read>(mut file: IdxReader<R>) -> Result<Pixels> {
        let &[n, height, width] = file.dims() else {
            panic!("Pixels: got an IDX file of sizes {:?}", file.dims())
        };
        assert!(width <= usize::from(u8::MAX), "Pixels: rows of {width} pixels");
        let mut pixels = Pixels { height, width, bytes: Vec::new(), spans: Vec::new(), starts: Vec::new() };
        // So many images a read that the reader needn't buffer them, so few that their bytes stay in the cache.
        const IMAGES: usize = 128;
        let mut raw = vec![0; IMAGES * height * width];
        let mut left = n;
        while left > 0 {
            let some = &mut raw[..left.min(IMAGES) * height * width];
            file.read_exact(some)?;
            left -= left.min(IMAGES);
            some.chunks_exact(height * width).for_each(|image| pixels.push(image));
        }
        file.finish()?;
        pixels.bytes.shrink_to_fit();
        pixels.spans.shrink_to_fit();
        pixels.starts.shrink_to_fit();
        Ok(pixels)
    }

    fn push(&mut self, image: &[u8]) {
        self.starts.push(self.bytes.len() as u32);
        for row in image.chunks_exact(self.width) {
            let (start, end) = middle(row);
            self.spans.push([start as u8, (end - start) as u8]);
            self.bytes.extend_from_slice(&row[start..end]);
        }
    }

    /// How many images there are.
    pub(crate) fn len(&self) -> usize {
        self.starts.len()
    }

    /// Writes image `i` with each pixel replaced by what `lookup` holds for it.
    #[inline]
    pub(crate) fn write<T: Copy>(&self, i: usize, lookup: &[T; 256], into: &mut [T]) {
        into.fill(lookup[0]);
        let mut rest = &self.bytes[self.starts[i] as usize..];
        let spans = &self.spans[i * self.height..][..self.height];
        for (row, &[start, length]) in into.chunks_exact_mut(self.width).zip(spans) {
            let (some, after) = rest.split_at(usize::from(length));
            rest = after;
            for (out, &value) in row[usize::from(start)..].iter_mut().zip(some) {
                *out = lookup[usize::from(value)];
            }
        }
    }
}

/// Where the values other than 0 begin and end; looked for eight at a time, as start-up waits for it.
fn middle(row: &[u8]) -> (usize, usize) {
    let (mut start, mut end) = (0, 0);
    let (eights, rest) = row.as_chunks::<8>();
    let mut tail = [0; 8];
    tail[..rest.len()].copy_from_slice(rest);
    for (k, eight) in eights.iter().chain([&tail]).enumerate() {
        let bits = u64::from_le_bytes(*eight);
        if bits != 0 {
            if end == 0 {
                start = 8 * k + bits.trailing_zeros() as usize / 8;
            }
            end = 8 * k + 8 - bits.leading_zeros() as usize / 8;
        }
    }
    (start, end)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::path::Path;

    fn pixels(n: usize, height: usize, width: usize, values: &[u8]) -> Result<Pixels> {
        let mut file = vec![0, 0, 8, 3];
        for size in [n, height, width] {
            file.extend_from_slice(&(size as u32).to_be_bytes());
        }
        file.extend_from_slice(values);
        Pixels::read(IdxReader::new(Path::new("images"), file.as_slice())?)
    }

    proptest! {
        #[test]
        fn trimming_loses_nothing(n in 0usize..150, seed in any::<u64>(), zeros in 0u64..11) {
            let (height, width) = (3, 21);
            let random = phalanx_tensor::Philox::new(seed, 0);
            let values: Vec<u8> = (0..(n * height * width) as u64)
                .map(|i| { let word = random.word(i); if u64::from(word >> 16) % 10 < zeros { 0 } else { word as u8 } })
                .collect();
            let lookup = std::array::from_fn(|v| v as f32 * 0.5 - 3.0);
            let pixels = pixels(n, height, width, &values).unwrap();
            prop_assert_eq!(pixels.len(), n);
            let mut out = vec![f32::NAN; height * width];
            for i in 0..n {
                pixels.write(i, &lookup, &mut out);
                let plain: Vec<f32> = values[i * height * width..][..height * width].iter().map(|&v| lookup[usize::from(v)]).collect();
                prop_assert_eq!(&out, &plain);
            }
        }
    }

    #[test]
    fn a_short_file_is_refused() {
        assert!(pixels(2, 2, 2, &[1; 7]).is_err());
        assert!(pixels(2, 2, 2, &[1; 9]).is_err());
    }
}
