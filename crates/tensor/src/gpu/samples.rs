//! Batches from samples that are kept as bytes.

use crate::gpu::Engine;
use crate::gpu::launch::{Arg, elements, rows};
use crate::ops::samples::{Border, SampleImages, SampleOrder};
use crate::shape::Order;
use crate::tensor::Tensor;
use phalanx_cuda::Framing;

/// Images (n, channels, height, width) of the samples that `words` names.
#[track_caller]
pub(crate) fn images(
    engine: &Engine,
    bytes: &Tensor,
    words: &Tensor,
    table: &Tensor,
    how: &SampleImages,
    order: SampleOrder,
    out: &Tensor,
) {
    let [channels, height, width] = how.from;
    let framing = Framing {
        channels,
        from: [height, width],
        to: how.size,
        corner: how.corner.map(|place| place as i64),
        reflects: how.border == Border::Reflect,
        crop: how.crop,
        crop_place: how.crop_place,
        flip_below: how.flip_below(),
        flip_place: how.flip_place,
        cutout: how.cutout,
        cutout_place: how.cutout_place,
        channels_last: out.dense_order() == Order::ChannelsLast,
        by_number: order == SampleOrder::ByNumber,
    }
    .to_bytes();
    let n = out.dims()[0];
    let args = [
        Arg::In(bytes),
        Arg::In(words),
        Arg::In(table),
        Arg::Out(out),
        Arg::Struct(&framing),
        Arg::Int(bytes.count() / how.bytes()),
        Arg::Int(n),
    ];
    let size = channels * how.size[0] * how.size[1];
    // SAFETY: the bytes are as many samples, of which another is none; there are n numbers of samples behind two words, a table row
    // for each channel, and room for n images.
    unsafe { engine.launch("sample_images", rows(n, size), &args) }
}

/// Ids and labels (n, window) of the samples that `words` names.
#[track_caller]
pub(crate) fn windows(
    engine: &Engine,
    bytes: &Tensor,
    words: &Tensor,
    stride: usize,
    order: SampleOrder,
    out: [&Tensor; 2],
) {
    let &[n, window] = out[0].dims() else { unreachable!("ids are (n, window)") };
    let args = [
        Arg::In(bytes),
        Arg::In(words),
        Arg::Out(out[0]),
        Arg::Out(out[1]),
        Arg::Int(window),
        Arg::Int(stride),
        Arg::Int(usize::from(order == SampleOrder::ByNumber)),
        Arg::Int(bytes.count()),
        Arg::Int(n),
    ];
    // SAFETY: there are n numbers of samples behind two words, and room for n windows twice; what lies beyond the bytes isn't read.
    unsafe { engine.launch("sample_windows", elements(n * window), &args) }
}
