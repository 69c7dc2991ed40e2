//! All fast ways of convolution against the loops of [`super::reference`].

use super::{Plan, channels, direct, lowered, pixels, reference, strips, winograd};
use crate::cpu::arch::Arch;
use crate::cpu::lanes::Lanes;
use crate::device::Device;
use crate::dtype::DType;
use crate::op::Conv2dOptions;
use crate::ops::convolution::conv_plan;
use crate::philox::Philox;
use crate::storage::Storage;

/// Sums of a few hundred products of numbers below 1, in another order.
const TOLERANCE: f64 = 1e-12;
/// The same in single precision, up to some ten thousand products.
const SINGLE_TOLERANCE: f64 = 1e-3;

/// Numbers that single precision holds exactly.
fn numbers(n: usize, stream: u64) -> Vec<f64> {
    let key = Philox::new(5, stream);
    (0..n).map(|i| f64::from(key.unit(i as u64) - 0.5)).collect()
}

fn as_type<T: Lanes>(values: &[f64]) -> Vec<T> {
    values.iter().map(|&x| T::from_f64(x)).collect()
}

#[track_caller]
fn close<T: Lanes>(got: &[T], want: &[f64], what: &str, p: &Plan) {
    let tolerance = if T::DTYPE == DType::F32 { SINGLE_TOLERANCE } else { TOLERANCE };
    assert_eq!(got.len(), want.len());
    for (i, (g, w)) in got.iter().zip(want).enumerate() {
        let g = g.to_f64();
        assert!((g - w).abs() < tolerance, "{what}, element {i}: {g}, by the definition {w}; {p:?}");
    }
}

/// This machine with a few numbers of threads, then as if it had fewer instructions.
fn devices() -> Vec<Device> {
    let mut all = vec![Device::cpu(1), Device::cpu(3), Device::with_arch(1, Arch::scalar())];
    #[cfg(target_arch = "x86_64")]
    all.extend(Arch::v3().map(|v3| Device::with_arch(2, v3)));
    all
}

/// The same kernels tap by tap.
fn by_taps<T: Copy>(kernels: &[T], [o, i, h, w]: [usize; 4]) -> Vec<T> {
    let rows = (0..h * w).flat_map(|tap| (0..i).map(move |input| (tap, input)));
    rows.flat_map(|(tap, input)| (0..o).map(move |output| kernels[(output * i + input) * h * w + tap]))
        .collect()
}

/// The same numbers in pixel order.
fn in_pixels<T: Copy>(values: &[T], [n, c, h, w]: [usize; 4]) -> Vec<T> {
    let rows = (0..h * w).flat_map(|pixel| (0..n).map(move |sample| (pixel, sample)));
    rows.flat_map(|(pixel, sample)| (0..c).map(move |channel| values[(sample * c + channel) * h * w + pixel]))
        .collect()
}

/// Leaves what is no number in all buffers of up to a mebibyte that the device takes next.
fn spoil(device: &Device) {
    let sizes = (8..20).flat_map(|power| (4..8).map(move |quarters| quarters << (power - 2)));
    let buffers: Vec<Storage> =
        sizes.flat_map(|bytes| [bytes; 4]).map(|bytes| Storage::stale(device, bytes)).collect();
    buffers.iter().for_each(|buffer| buffer.write::<f32>().fill(f32::from_bits(u32::MAX)));
}

fn check(x: [usize; 4], w: [usize; 4], options: Conv2dOptions) {
    let p = conv_plan(&x.into(), &w.into(), options);
    let (image, kernel) = (numbers(x.iter().product(), 0), numbers(w.iter().product(), 1));
    let (bias, grad) = (numbers(p.o, 2), numbers(p.n * p.out_image(), 3));
    let want = (
        reference::forward(&image, &kernel, Some(&bias), p),
        reference::image_gradient(&grad, &kernel, p),
        reference::kernel_gradient(&image, &grad, p),
    );
    for device in &devices() {
        let inputs = [&image, &kernel, &bias, &grad];
        check_on::<f64>(device, [x, w], p, inputs, [&want.0, &want.1, &want.2]);
        check_on::<f32>(device, [x, w], p, inputs, [&want.0, &want.1, &want.2]);
    }
}

fn check_on<T: Lanes>(
    device: &Device,
    [x, w]: [[usize; 4]; 2],
    p: Plan,
    inputs: [&Vec<f64>; 4],
    want: [&Vec<f64>; 3],
) {
    let [image, kernel, bias, grad] = inputs.map(|values| as_type::<T>(values));
    let nines = |count: usize| vec![T::from_f64(9.0); count];
    let (mut out, mut to_image, mut to_kernel) = (nines(grad.len()), nines(image.len()), nines(kernel.len()));
    lowered::forward(device, &image, &kernel, Some(&bias), p, &mut out);
    lowered::image_gradient(device, &grad, &kernel, p, &mut to_image);
    lowered::kernel_gradient(device, &image, &grad, p, &mut to_kernel);
    close(&out, want[0], "lowered forward", &p);
    close(&to_image, want[1], "lowered image gradient", &p);
    close(&to_kernel, want[2], "lowered kernel gradient", &p);
    spoil(device);
    if direct::takes(&p) {
        direct::forward(device, &image, &kernel, Some(&bias), p, &mut out);
        direct::image_gradient(device, &grad, &kernel, p, &mut to_image);
        direct::kernel_gradient(device, &image, &grad, p, &mut to_kernel);
        close(&out, want[0], "direct forward", &p);
        close(&to_image, want[1], "direct image gradient", &p);
        close(&to_kernel, want[2], "direct kernel gradient", &p);
    }
    let output = [p.n, p.o, p.oh, p.ow];
    spoil(device);
    if pixels::takes(&p) {
        let (image, kernel, grad) = (in_pixels(&image, x), by_taps(&kernel, w), in_pixels(&grad, output));
        pixels::forward(device, &image, &kernel, Some(&bias), p, &mut out);
        pixels::image_gradient(device, &grad, &kernel, p, &mut to_image);
        pixels::kernel_gradient(device, &image, &grad, p, &mut to_kernel);
        close(&out, &in_pixels(want[0], output), "forward by pixels", &p);
        close(&to_image, &in_pixels(want[1], x), "image gradient by pixels", &p);
        close(&to_kernel, &by_taps(want[2], w), "kernel gradient by pixels", &p);
    }
    spoil(device);
    if channels::takes(&p) {
        let (image, kernel, grad) = (in_pixels(&image, x), by_taps(&kernel, w), in_pixels(&grad, output));
        channels::forward(device, &image, &kernel, Some(&bias), p, &mut out);
        channels::image_gradient(device, &grad, &kernel, p, &mut to_image);
        channels::kernel_gradient(device, &image, &grad, p, &mut to_kernel);
        close(&out, &in_pixels(want[0], output), "forward by channels", &p);
        close(&to_image, &in_pixels(want[1], x), "image gradient by channels", &p);
        close(&to_kernel, &by_taps(want[2], w), "kernel gradient by channels", &p);
    }
    spoil(device);
    if winograd::takes(&p) {
        let (image, kernel, grad) = (in_pixels(&image, x), by_taps(&kernel, w), in_pixels(&grad, output));
        let inputs = [&image, &kernel, &bias, &grad];
        let want = [&in_pixels(want[0], output), &in_pixels(want[1], x), &by_taps(want[2], w)];
        by_winograd::<T, winograd::Small, 2, 4>(device, p, inputs, want);
        spoil(device);
        by_winograd::<T, winograd::Large, 4, 6>(device, p, inputs, want);
    }
    spoil(device);
    if strips::takes(&p) {
        strips::forward(device, &image, &by_taps(&kernel, w), Some(&bias), p, &mut out);
        strips::kernel_gradient(device, &image, &in_pixels(&grad, output), p, &mut to_kernel);
        close(&out, &in_pixels(want[0], output), "forward by strips", &p);
        close(&to_kernel, &by_taps(want[2], w), "kernel gradient by strips", &p);
    }
}

fn by_winograd<T: Lanes, F: winograd::Form<M, N>, const M: usize, const N: usize>(
    device: &Device,
    p: Plan,
    [image, kernel, bias, grad]: [&Vec<T>; 4],
    want: [&Vec<f64>; 3],
) {
    let nines = |count: usize| vec![T::from_f64(9.0); count];
    let (mut out, mut to_image, mut to_kernel) = (nines(grad.len()), nines(image.len()), nines(kernel.len()));
    winograd::forward_in::<T, F, M, N>(device, image, kernel, Some(bias), p, &mut out);
    winograd::image_gradient_in::<T, F, M, N>(device, grad, kernel, p, &mut to_image);
    winograd::kernel_gradient_in::<T, F, M, N>(device, image, grad, p, &mut to_kernel);
    close(&out, want[0], &format!("forward by Winograd in squares of {M}"), &p);
    close(&to_image, want[1], &format!("image gradient by Winograd in squares of {M}"), &p);
    close(&to_kernel, want[2], &format!("kernel gradient by Winograd in squares of {M}"), &p);
}

#[test]
fn pixels_and_strips_agree_with_the_definition() {
    let plain = Conv2dOptions::default();
    let same = Conv2dOptions { padding: [1, 1], ..plain };
    let half = Conv2dOptions { stride: [2, 2], padding: [1, 1], ..plain };
    let skew = Conv2dOptions { dilation: [2, 1], padding: [0, 2], stride: [1, 2], ..plain };
    // Samples around the rows of a tile, channels around its columns, images smaller than the kernels.
    for (n, c, o, h, w, options) in [
        (8, 16, 64, 4, 4, same),
        (9, 64, 48, 1, 1, same),
        (4, 32, 128, 2, 3, same),
        (7, 16, 16, 5, 7, half),
        (17, 80, 16, 2, 2, half),
        (10, 16, 32, 6, 5, skew),
        (5, 3, 16, 6, 5, skew),
        (1, 1, 64, 9, 4, same),
        (3, 15, 48, 8, 8, half),
        // Few samples: rows of pixels that see the same taps, with borders on either side, and rows that are all border.
        (1, 16, 48, 3, 21, same),
        (2, 32, 16, 4, 7, Conv2dOptions { dilation: [1, 3], padding: [2, 2], ..plain }),
        (3, 16, 64, 4, 30, Conv2dOptions { stride: [2, 1], padding: [0, 1], ..plain }),
        (1, 16, 16, 5, 3, Conv2dOptions { dilation: [1, 2], padding: [1, 2], ..plain }),
        (1, 16, 32, 4, 40, plain),
        (6, 16, 16, 3, 11, Conv2dOptions { stride: [1, 3], padding: [1, 2], ..plain }),
    ] {
        check([n, c, h, w], [o, c, 3, 3], options);
    }
    // Squares inside and at the edges, odd and even, with every padding.
    for (n, c, o, h, w, padding) in [
        (4, 16, 32, 4, 4, 1),
        (5, 48, 16, 5, 9, 1),
        (66, 16, 16, 7, 6, 0),
        (4, 16, 16, 4, 5, 2),
        (40, 32, 16, 12, 4, 1),
        (17, 16, 48, 9, 11, 1),
        (6, 48, 80, 4, 6, 1),
        (1, 16, 32, 13, 21, 1),
        (2, 32, 16, 4, 7, 2),
        (3, 16, 16, 9, 5, 0),
    ] {
        check([n, c, h, w], [o, c, 3, 3], Conv2dOptions { padding: [padding; 2], ..plain });
    }
    check([8, 32, 3, 3], [64, 32, 1, 1], plain);
    check([1, 32, 5, 7], [48, 32, 1, 1], plain);
    check([3, 16, 4, 5], [16, 16, 1, 1], same);
    check([2, 16, 5, 4], [32, 16, 1, 1], Conv2dOptions { stride: [2, 1], ..plain });
    check([1, 16, 9, 30], [16, 16, 5, 4], Conv2dOptions { padding: [2, 1], ..plain });
    // Kernel gradients of a block of rows and more, of a pixel that is more than a block, with columns of a half panel.
    check([9, 16, 6, 6], [256, 16, 1, 1], plain);
    check([260, 16, 1, 2], [272, 16, 1, 1], plain);
    check([5, 16, 4, 3], [304, 16, 3, 3], half);
    check([8, 16, 5, 5], [16, 16, 1, 1], Conv2dOptions { stride: [2, 2], ..plain });
    check([8, 16, 6, 4], [16, 16, 2, 3], plain);
    check([2, 3, 20, 17], [16, 3, 7, 7], Conv2dOptions { stride: [2, 2], padding: [3, 3], ..plain });
    check([300, 16, 9, 9], [16, 16, 3, 3], same);
    // Of as many sums as one thread cuts into tasks.
    check([4, 64, 2, 2], [512, 64, 3, 3], same);
    // Sums of more than a chain, in panels.
    check([4, 528, 2, 2], [16, 528, 3, 3], same);
    check([4, 16, 2, 2], [528, 16, 3, 3], same);
    check([4, 528, 4, 4], [16, 528, 3, 3], same);
    check([9, 16, 1, 1], [16, 16, 5, 5], Conv2dOptions { padding: [2, 2], ..plain });
    // Strips of several blocks of pixels, and of one that is more than a block.
    check([130, 2, 4, 4], [16, 2, 3, 3], same);
    check([40, 3, 12, 10], [48, 3, 3, 3], same);
}

#[test]
fn channels_by_themselves_agree_with_the_definition() {
    let of = |stride: [usize; 2], padding: [usize; 2], dilation: [usize; 2]| {
        move |groups: usize| Conv2dOptions { stride, padding, dilation, groups }
    };
    let (plain, same) = (of([1, 1], [0, 0], [1, 1]), of([1, 1], [1, 1], [1, 1]));
    let (half, skew) = (of([2, 2], [1, 1], [1, 1]), of([1, 3], [0, 2], [2, 1]));
    // Channels of one vector and several; samples around the rows of a tile; images smaller than kernels, and rows wider than a stretch.
    for (n, c, h, w) in
        [(1, 16, 5, 7), (2, 48, 9, 4), (7, 16, 3, 3), (9, 32, 1, 2), (17, 80, 4, 6), (1, 32, 2, 140)]
    {
        for options in [&same as &dyn Fn(usize) -> Conv2dOptions, &half, &of([1, 1], [3, 3], [1, 1])] {
            check([n, c, h, w], [c, 1, 3, 3], options(c));
        }
    }
    check([3, 16, 6, 9], [16, 1, 3, 3], skew(16));
    check([2, 16, 9, 8], [16, 1, 7, 7], of([1, 1], [3, 3], [1, 1])(16));
    check([4, 32, 6, 5], [32, 1, 1, 1], plain(32));
    check([4, 32, 6, 5], [32, 1, 2, 5], of([2, 1], [0, 2], [1, 1])(32));
    check([130, 16, 4, 3], [16, 1, 3, 3], same(16));
    // Of these the channels are too few, or the kernels see several.
    check([2, 8, 5, 5], [8, 1, 3, 3], same(8));
    check([2, 32, 5, 5], [64, 1, 3, 3], same(32));
    check([2, 32, 5, 5], [32, 2, 3, 3], same(16));
}

#[test]
fn kernel_gradients_of_channels_have_the_same_bits_on_any_number_of_threads() {
    let options = Conv2dOptions { padding: [1, 1], groups: 48, ..Conv2dOptions::default() };
    let p = conv_plan(&[5, 48, 37, 6].into(), &[48, 1, 3, 3].into(), options);
    let [images, grads] =
        [p.n * p.image(), p.n * p.out_image()].map(|count| as_type::<f32>(&numbers(count, count as u64)));
    let of = |threads: usize| {
        let mut sums = vec![9.0; 9 * 48];
        channels::kernel_gradient(&Device::cpu(threads), &images, &grads, p, &mut sums);
        sums
    };
    let one = of(1);
    assert!([2, 3, 5, 16].into_iter().all(|threads| of(threads) == one));
}

/// However taps and channels are shared out: one task or several for a thread, of all taps and of some.
#[test]
fn kernel_gradients_by_pixels_have_the_same_bits_on_any_number_of_threads() {
    let same = Conv2dOptions { padding: [1, 1], ..Conv2dOptions::default() };
    for (x, w) in [
        ([4, 64, 3, 3], [512, 64, 3, 3]),
        ([9, 48, 4, 4], [16, 48, 3, 3]),
        ([140, 32, 2, 2], [64, 32, 1, 1]),
        ([6, 112, 2, 3], [48, 112, 3, 2]),
    ] {
        let p = conv_plan(&x.into(), &w.into(), same);
        let [images, grads] =
            [p.n * p.image(), p.n * p.out_image()].map(|count| as_type::<f32>(&numbers(count, count as u64)));
        let of = |threads: usize| {
            let mut sums = vec![9.0; p.o * p.c * p.kh * p.kw];
            pixels::kernel_gradient(&Device::cpu(threads), &images, &grads, p, &mut sums);
            sums
        };
        let one = of(1);
        for threads in [2, 3, 5, 7, 16] {
            assert!(of(threads) == one, "{threads} threads; {p:?}");
        }
    }
}

#[test]
fn the_others_agree_with_the_definition() {
    let plain = Conv2dOptions::default();
    // The tutorials' layers, then widths around the block, channels around the tile, and kernels of every width.
    check([3, 1, 28, 28], [10, 1, 5, 5], plain);
    check([9, 10, 12, 12], [20, 10, 5, 5], plain);
    for (channels, outputs, kernel, size) in [
        (1, 1, 1, 8),
        (2, 3, 2, 10),
        (3, 4, 3, 12),
        (1, 6, 4, 19),
        (2, 7, 5, 17),
        (2, 3, 7, 16),
        (1, 11, 3, 26),
        (40, 40, 1, 9),
    ] {
        check([2, channels, size + 1, size], [outputs, channels, kernel, kernel], plain);
        check([1, channels, size, size], [outputs, channels, 1, kernel], plain);
    }
    check(
        [2, 4, 9, 8],
        [6, 2, 3, 3],
        Conv2dOptions { stride: [2, 1], padding: [1, 2], dilation: [1, 2], groups: 2 },
    );
    check(
        [2, 3, 11, 9],
        [4, 3, 3, 2],
        Conv2dOptions { stride: [3, 2], padding: [2, 0], dilation: [2, 1], groups: 1 },
    );
    check([1, 2, 3, 3], [2, 2, 3, 3], Conv2dOptions { padding: [4, 4], ..plain });
}

/// How far numbers are from what they should be, in the mean, beside how large those are.
fn error(got: &[f32], want: &[f64]) -> f64 {
    let squares = got.iter().zip(want).map(|(&got, want)| (f64::from(got) - want).powi(2));
    (squares.sum::<f64>() / want.iter().map(|want| want.powi(2)).sum::<f64>()).sqrt()
}

#[test]
fn winograds_large_squares_round_a_few_times_what_plain_sums_do() {
    let (x, w) = ([8, 64, 12, 12], [32, 64, 3, 3]);
    let p = conv_plan(&x.into(), &w.into(), Conv2dOptions { padding: [1, 1], ..Conv2dOptions::default() });
    let output = [p.n, p.o, p.oh, p.ow];
    let [image, kernel, grad] =
        [p.n * p.image(), p.o * p.c * 9, p.n * p.out_image()].map(|count| numbers(count, count as u64));
    let outputs = in_pixels(&reference::forward(&image, &kernel, None, p), output);
    let to_kernel = by_taps(&reference::kernel_gradient(&image, &grad, p), w);
    let images = as_type::<f32>(&in_pixels(&image, x));
    let grads = as_type::<f32>(&in_pixels(&grad, output));
    let kernels = as_type::<f32>(&by_taps(&kernel, w));
    let (device, mut out, mut sums) = (Device::cpu(2), vec![0.0; outputs.len()], vec![0.0; to_kernel.len()]);
    pixels::forward(&device, &images, &kernels, None, p, &mut out);
    pixels::kernel_gradient(&device, &images, &grads, p, &mut sums);
    let plain = [error(&out, &outputs), error(&sums, &to_kernel)];
    winograd::forward_in::<f32, winograd::Large, 4, 6>(&device, &images, &kernels, None, p, &mut out);
    winograd::kernel_gradient_in::<f32, winograd::Large, 4, 6>(&device, &images, &grads, p, &mut sums);
    let large = [error(&out, &outputs), error(&sums, &to_kernel)];
    assert!(large[0] < 8.0 * plain[0] && large[1] < 4.0 * plain[1], "{large:?}, and {plain:?} of plain sums");
}
