//! Resizing: linear interpolation, and where an image shrinks the mean over all pixels that fall together.
//!
//! The results are those of Pillow's `resize` with `BILINEAR` to the last bit (and so torchvision's on its images): weights of
//! a triangle as wide as a pixel of the smaller image, in fixed point, first along the rows and then along the columns, with
//! rounding to bytes between. (Pillow 13 takes columns first where the height shrinks much more than the width, which can change
//! a byte by one.) `tests/transforms.rs` holds what Pillow made.

use crate::images::{COLOURS, Image};

/// Bits after the point of a weight: what 32 bits leave beside a byte and the sum's sign and carry.
const PRECISION: u32 = 32 - 8 - 2;

/// What each pixel of a resized row or column is made of.
#[derive(Debug, Default)]
struct Weights {
    /// The first pixel that takes part, and where its weight lies; one more entry closes the last row.
    starts: Vec<(usize, usize)>,
    weights: Vec<i32>,
}

impl Weights {
    fn plan(&mut self, from: usize, to: usize) {
        self.starts.clear();
        self.weights.clear();
        let scale = from as f64 / to as f64;
        // Growing images are interpolated between neighbours, shrinking ones averaged.
        let reach = scale.max(1.0);
        for i in 0..to {
            let centre = (i as f64 + 0.5) * scale;
            let first = (centre - reach + 0.5).max(0.0) as usize;
            let last = ((centre + reach + 0.5) as usize).min(from);
            let weight = |j: usize| (1.0 - ((j as f64 - centre + 0.5) / reach).abs()).max(0.0);
            let total: f64 = (first..last).map(weight).sum();
            self.starts.push((first, self.weights.len()));
            let fixed = |weight: f64| (weight / total * f64::from(1 << PRECISION) + 0.5) as i32;
            self.weights.extend((first..last).map(|j| fixed(weight(j))));
        }
        self.starts.push((0, self.weights.len()));
    }

    /// The first pixel and the weights of pixel `i`.
    fn of(&self, i: usize) -> (usize, &[i32]) {
        let ((first, start), (_, end)) = (self.starts[i], self.starts[i + 1]);
        (first, &self.weights[start..end])
    }
}

/// The memory of a resize.
#[derive(Debug, Default)]
pub(crate) struct Resizer {
    weights: Weights,
    /// The image after its rows were resized.
    narrow: Vec<u8>,
    sums: Vec<i32>,
}

impl Resizer {
    /// Writes `image` at another size over `into`.
    pub(crate) fn resize(&mut self, image: Image<'_>, [height, width]: [usize; 2], into: &mut Vec<u8>) {
        let Resizer { weights, narrow, sums } = self;
        narrow.resize(COLOURS * image.height * width, 0);
        weights.plan(image.width, width);
        for (row, out) in image.bytes.chunks_exact(image.width).zip(narrow.chunks_exact_mut(width)) {
            for (x, out) in out.iter_mut().enumerate() {
                let (first, weights) = weights.of(x);
                let sum = row[first..].iter().zip(weights).map(|(&byte, &weight)| i32::from(byte) * weight);
                *out = rounded(HALF + sum.sum::<i32>());
            }
        }
        into.resize(COLOURS * height * width, 0);
        weights.plan(image.height, height);
        sums.resize(width, 0);
        let planes = narrow.chunks_exact(image.height * width).zip(into.chunks_exact_mut(height * width));
        for (plane, out) in planes {
            for (y, out) in out.chunks_exact_mut(width).enumerate() {
                let (first, weights) = weights.of(y);
                sums.fill(HALF);
                for (row, &weight) in plane[first * width..].chunks_exact(width).zip(weights) {
                    sums.iter_mut().zip(row).for_each(|(sum, &byte)| *sum += i32::from(byte) * weight);
                }
                out.iter_mut().zip(&*sums).for_each(|(out, &sum)| *out = rounded(sum));
            }
        }
    }
}

const HALF: i32 = 1 << (PRECISION - 1);

fn rounded(sum: i32) -> u8 {
    (sum >> PRECISION).clamp(0, 255) as u8
}
