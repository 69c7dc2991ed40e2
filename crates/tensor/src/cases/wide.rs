//! Larger sizes, at which GPUs take other ways than at small ones: 16 bytes of neighbours at once, rows that a block holds whole, channels
//! that several blocks go over, sums in pieces. The numbers around each size of a way, and such as don't fit it, are among them.

use super::{Check, in_pixels, labels};
use crate::{Conv2dOptions, CountPadding, DType, DropoutKey, Interpolation, Keep, PoolOptions, Tensor, Then};

/// Elements and rows of many.
pub fn rows_of_many_numbers(c: &impl Check) {
    for width in [520, 129] {
        c.check(&[&[3, width], &[width]], |x| &x[0] * &x[1] + &x[0]);
        c.check(&[&[3, width], &[3, 1]], |x| x[0].maximum(&x[1]));
        c.check(&[&[3, width]], |x| x[0].gelu_tanh().relu());
        c.check(&[&[3, width]], |x| x[0].softmax(1));
        c.check(&[&[3, width]], |x| x[0].log_softmax(1));
        c.check(&[&[5, width]], |x| x[0].cross_entropy(&labels(x[0].device(), 5, width), 0.0));
        c.check(&[&[5, width]], |x| x[0].cross_entropy(&labels(x[0].device(), 5, width), 0.1));
    }
    c.check(&[&[300, 24]], |x| x[0].sum(&[0], Keep::No));
    c.check(&[&[300, 23]], |x| x[0].sum(&[0], Keep::No));
    c.check(&[&[4, 700]], |x| x[0].mean(&[1], Keep::Yes));
    c.check(&[&[40, 48]], |x| x[0].t().contiguous());
    let key = DropoutKey::new(1, 2, 3, [10, 11, 12].into());
    c.check(&[&[3, 8, 40]], |x| x[0].dropout(0.3, &key));
    c.check(&[&[50, 16]], |x| x[0].embedding(&labels(x[0].device(), 60, 50)));
}

/// Layer norms by the width of their rows, joined to a sum before them and to the type of what comes after them.
pub fn norms_of_rows(c: &impl Check) {
    for width in [16, 30, 520, 2048, 2056] {
        c.check(&[&[3, width], &[width], &[width]], |x| x[0].layer_norm(1, Some(&x[1]), Some(&x[2]), 1e-5));
    }
    // A stream in float32 whose branches are in the type that is tried; a reference in float64 stays that.
    let stream = |x: &Tensor| if x.dtype() == DType::F64 { x.clone() } else { x.cast(DType::F32) };
    for width in [16, 30, 2056] {
        c.check(&[&[3, width], &[width], &[width]], |x| {
            stream(&x[0]).layer_norm_in(x[0].dtype(), 1, Some(&stream(&x[1])), Some(&stream(&x[2])), 1e-5)
        });
        c.check(&[&[3, width], &[3, width], &[width], &[width]], |x| {
            let [weight, bias] = [2, 3].map(|i| stream(&x[i]));
            let [sum, normed] =
                stream(&x[0]).sum_layer_norm_in(&x[1], x[1].dtype(), 1, Some(&weight), Some(&bias), 1e-5);
            sum.cast(normed.dtype()) + normed
        });
    }
}

/// Images of as many channels as networks have, and of many pixels.
pub fn images_of_many_channels(c: &impl Check) {
    let same = Conv2dOptions { padding: [1, 1], ..Conv2dOptions::default() };
    let half = Conv2dOptions { stride: [2, 2], ..same };
    for options in [same, half] {
        c.check(&[&[2, 16, 9, 8], &[24, 16, 3, 3], &[24]], |x| x[0].conv2d(&x[1], Some(&x[2]), options));
    }
    c.check(&[&[2, 32, 5, 6], &[16, 32, 1, 1]], |x| x[0].conv2d(&x[1], None, Conv2dOptions::default()));
    // Up to 2048 values a channel, and more; channels in groups of 16, and such as leave some over. Of many numbers those of a channel are
    // far above or far below zero, in turns, where a ReLU does the same however a type rounds them: some would be on its edge.
    for (shape, far) in [([4, 16, 5, 5], 0.0), ([3, 17, 4, 4], 0.0), ([8, 24, 17, 17], 4.0)] {
        let channels = [shape[1]];
        let moved = |bias: &Tensor| {
            let by: Vec<f32> = (0..shape[1]).map(|c| if c % 3 == 0 { far } else { -far }).collect();
            bias + Tensor::from_slice(bias.device(), &by, channels).cast(bias.dtype())
        };
        c.check(&[&shape, &channels, &channels], |x| {
            let bias = moved(&x[2]);
            in_pixels(&x[0]).batch_norm(Some(&x[1]), Some(&bias), 1e-5, Then::Relu, None, None).out
        });
        c.check(&[&shape, &channels, &channels, &shape], |x| {
            let bias = moved(&x[2]);
            x[0].batch_norm(Some(&x[1]), Some(&bias), 1e-5, Then::AddRelu(&x[3]), None, None).out
        });
    }
    let over = PoolOptions { kernel: [3, 3], stride: [2, 2], padding: [1, 1] };
    c.check(&[&[2, 16, 7, 6]], |x| x[0].max_pool2d(over));
    c.check(&[&[2, 16, 7, 6]], |x| x[0].avg_pool2d(over, CountPadding::No));
    c.check(&[&[2, 24, 6, 5]], |x| x[0].adaptive_avg_pool2d([1, 1]));
    let between = Interpolation::Linear { align_corners: false };
    c.check(&[&[2, 16, 6, 5]], |x| in_pixels(&x[0]).interpolate(&[12, 10], between));
}
