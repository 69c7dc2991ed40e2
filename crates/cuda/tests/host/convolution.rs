//! Convolutions against the engine's in float64, whose images are (N, C, H, W) where the kernels' are (N, H, W, C).

use crate::compare::near;
use crate::program::{Arg, launch, there_is_a_compiler};
use crate::values::{decode, encode, random, room};
use phalanx_cuda::cudnn::{Convolution, Numbers};
use phalanx_cuda::{Element, Taps, Work};
use phalanx_tensor::{Conv2dOptions, Device, Tensor};

/// Roundings of float32 of a sum of some hundred terms.
const STEPS: f64 = 60.0;

fn cases() -> Vec<Convolution> {
    let new = |images, outputs, kernel| Convolution::new(Numbers::F32, images, outputs, kernel);
    vec![
        new([1, 1, 1, 1], 1, [1, 1]),
        new([2, 3, 5, 4], 7, [1, 1]),
        Convolution { padding: [1, 1], ..new([3, 8, 6, 7], 4, [3, 3]) },
        Convolution { padding: [3, 2], stride: [2, 3], ..new([2, 3, 11, 9], 5, [7, 5]) },
        Convolution { padding: [2, 0], dilation: [2, 3], ..new([2, 4, 7, 9], 3, [3, 2]) },
        Convolution { padding: [1, 1], groups: 2, ..new([2, 6, 5, 5], 4, [3, 3]) },
        Convolution { stride: [2, 2], groups: 6, ..new([1, 6, 8, 6], 12, [2, 3]) },
        // Pixels that no output sees, and outputs that see padding alone.
        Convolution { stride: [4, 3], ..new([1, 2, 10, 8], 2, [2, 1]) },
        Convolution { padding: [4, 4], ..new([1, 2, 2, 3], 2, [2, 2]) },
    ]
}

/// Values whose channels come second, as those whose channels come last.
fn channels_last(x: &Tensor) -> Vec<f64> {
    x.permute(&[0, 2, 3, 1]).to_vec()
}

#[test]
fn convolutions_and_their_gradients_are_right() {
    if !there_is_a_compiler() {
        return;
    }
    let device = Device::cpu(1);
    for convolution in cases() {
        let ([n, c, h, w], [kh, kw], [oh, ow]) =
            (convolution.images, convolution.kernel, convolution.output());
        let (o, own) = (convolution.outputs, c / convolution.groups);
        let sizes = [[n, h, w, c], [o, kh, kw, own], [n, oh, ow, o]];
        let values =
            [0, 1, 2].map(|i| random(Element::F32, sizes[i].iter().product(), -1.0, 1.0, 1 + i as u64));
        let second =
            |i: usize| Tensor::from_slice(&device, &values[i], sizes[i]).permute(&[0, 3, 1, 2]).contiguous();
        let Convolution { stride, padding, dilation, groups, .. } = convolution;
        let (x, k, grad) = (second(0).requires_grad(), second(1).requires_grad(), second(2));
        let y = x.conv2d(&k, None, Conv2dOptions { stride, padding, dilation, groups });
        let grads = (&y * &grad).sum_all().backward();
        let wanted = [&y.detach(), grads.get(&x).unwrap(), grads.get(&k).unwrap()].map(channels_last);
        let [images, kernels, outputs] = values.each_ref().map(|values| encode(Element::F32, values));
        let runs = [
            ("plain_convolution", &images, &kernels, None),
            ("plain_convolution_images", &outputs, &kernels, None),
            ("plain_convolution_kernels", &images, &outputs, Some(n)),
        ];
        for ((name, a, b, batch), want) in runs.into_iter().zip(&wanted) {
            let mut out = room(Element::F32, want.len());
            let mut args = vec![Arg::In(a), Arg::In(b), Arg::Out(&mut out), Arg::Int(want.len() as i64)];
            args.extend(batch.map(|batch| Arg::Int(batch as i64)));
            args.push(Arg::Struct(Taps::of(&convolution).to_bytes().to_vec()));
            launch(name, Element::F32, Work::Elements(want.len() as u64), &mut args);
            near(
                &format!("{name}, {convolution}"),
                Element::F32,
                &decode(Element::F32, &out),
                want,
                1.0,
                STEPS,
            );
        }
    }
}
