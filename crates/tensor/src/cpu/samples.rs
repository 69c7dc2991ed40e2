//! Batches from samples that are kept as bytes, each place by its definition.

use crate::ops::samples::{SampleImages, SampleOrder};
use crate::philox::Philox;
use crate::tensor::Tensor;

/// A whole number below `n`.
fn below(word: u32, n: usize) -> i64 {
    ((u64::from(word) * n as u64) >> 32) as i64
}

/// Images (n, channels, height, width) of the samples that `words` names.
#[track_caller]
pub(crate) fn images(
    bytes: &Tensor,
    words: &Tensor,
    table: &Tensor,
    how: &SampleImages,
    order: SampleOrder,
    out: &Tensor,
) {
    let bytes = bytes.read_contiguous::<u8>("sample_images");
    let words = words.read_contiguous::<i64>("sample_images");
    let table = table.read_contiguous::<f32>("sample_images");
    let mut out = out.write_whole::<f32>();
    let ([channels, from_height, from_width], [height, width]) = (how.from, how.size);
    let random = Philox::new(words[0] as u64, words[1] as u64);
    for (i, image) in out.chunks_exact_mut((channels * height * width).max(1)).enumerate() {
        let sample = words[2 + i];
        let draw = |place: u8| random.block((sample as u64) << 16 | u64::from(place) << 8);
        let at = match order {
            SampleOrder::ByNumber => sample as usize,
            SampleOrder::AsInBatch => i,
        };
        let bytes = &bytes[at * how.bytes()..][..how.bytes()];
        let [down, across, ..] = draw(how.crop_place);
        let top = how.corner[0] as i64 + below(down, how.crop[0]);
        let left = how.corner[1] as i64 + below(across, how.crop[1]);
        let is_mirrored = u64::from(draw(how.flip_place)[0]) < how.flip_below();
        let [down, across, ..] = draw(how.cutout_place);
        let square = [below(down, height), below(across, width)].map(|centre| {
            let start = centre - (how.cutout / 2) as i64;
            start..start + how.cutout as i64
        });
        for (place, value) in image.iter_mut().enumerate() {
            let [channel, y, x] = [place / width / height, place / width % height, place % width];
            let row = top + y as i64;
            let column = left + if is_mirrored { width - 1 - x } else { x } as i64;
            let seen = how.border.seen(row, from_height).zip(how.border.seen(column, from_width));
            let byte =
                seen.map_or(0, |(row, column)| bytes[(channel * from_height + row) * from_width + column]);
            let is_cut = square[0].contains(&(y as i64)) && square[1].contains(&(x as i64));
            *value = if is_cut { 0.0 } else { table[channel * 256 + usize::from(byte)] };
        }
    }
}

/// Ids and labels (n, window) of the samples that `words` names.
#[track_caller]
pub(crate) fn windows(bytes: &Tensor, words: &Tensor, stride: usize, order: SampleOrder, out: [&Tensor; 2]) {
    let bytes = bytes.read_contiguous::<u8>("sample_windows");
    let words = words.read_contiguous::<i64>("sample_windows");
    let window = out[0].dims()[1];
    for (out, later) in out.into_iter().zip([0, 1]) {
        for (i, row) in out.write_whole::<i64>().chunks_exact_mut(window.max(1)).enumerate() {
            let at = match order {
                SampleOrder::ByNumber => words[2 + i] as usize,
                SampleOrder::AsInBatch => i,
            };
            let seen = &bytes[at * stride + later..][..window];
            row.iter_mut().zip(seen).for_each(|(id, &byte)| *id = i64::from(byte));
        }
    }
}
