//! Chains of operations on images of many channels, which lie in pixel order, against the same chains in row-major order:
//! there each image meets the kernels alone, and nothing is fused.

use phalanx_tensor::{
    Arena, Conv2dOptions, DType, Device, Grads, Layout, Order, Philox, PoolOptions, Shape, Tensor, Then,
};
use proptest::prelude::*;

/// Doubles added up in another order, a few thousand of them.
const TOLERANCE: f64 = 1e-9;

fn numbers(device: &Device, shape: impl Into<Shape>, stream: u64) -> Tensor {
    Tensor::uniform(device, shape, -1.0, 1.0, DType::F64, Philox::new(7, stream))
}

#[track_caller]
fn close(got: &[f64], want: &[f64], what: &str) {
    assert_eq!(got.len(), want.len(), "{what}");
    for (i, (g, w)) in got.iter().zip(want).enumerate() {
        assert!((g - w).abs() < TOLERANCE * (1.0 + w.abs()), "{what}, element {i}: {g}, row-major {w}");
    }
}

/// Whether a chain is computed as it usually is, or in the plain way.
#[derive(Clone, Copy, PartialEq)]
enum Way {
    Usual,
    Plain,
}

fn conv(x: &Tensor, w: &Tensor, b: Option<&Tensor>, options: Conv2dOptions, way: Way) -> Tensor {
    match way {
        Way::Usual => x.conv2d(w, b, options),
        Way::Plain => {
            // So few images take no kernel of pixel order.
            let one = |i| x.narrow(0, i, 1).contiguous().conv2d(w, b, options).contiguous();
            let images: Vec<Tensor> = (0..x.dim(0)).map(one).collect();
            Tensor::cat(&images.iter().collect::<Vec<_>>(), 0)
        }
    }
}

/// Sizes of a chain.
#[derive(Clone, Copy, Debug)]
struct Sizes {
    n: usize,
    c: usize,
    middle: usize,
    h: usize,
    w: usize,
    kernel: usize,
    options: Conv2dOptions,
    pool: PoolOptions,
}

fn sizes() -> impl Strategy<Value = Sizes> {
    let channels = prop_oneof![Just(1usize), Just(3), Just(16), Just(48)];
    let options = (1..=3usize, 0..=2usize, 1..=2usize).prop_map(|(stride, padding, dilation)| {
        Conv2dOptions { stride: [stride, 1], padding: [padding, 1], dilation: [1, dilation], groups: 1 }
    });
    let pool = (1..=3usize, 1..=3usize, 0..=1usize).prop_map(|(kernel, stride, padding)| PoolOptions {
        kernel: [kernel, 2],
        stride: [stride, 1],
        padding: [padding.min(kernel / 2), 1],
    });
    (1..=9usize, channels, 1..=3usize, (1..=7usize, 1..=7usize), 1..=3usize, options, pool)
        .prop_map(|(n, c, blocks, (h, w), kernel, options, pool)| Sizes {
            n,
            c,
            middle: 16 * blocks,
            h,
            w,
            kernel,
            options,
            pool,
        })
        .prop_filter("kernels and windows fit", |s| {
            let out = |d: usize, size: usize| {
                let reach = s.options.dilation[d] * (s.kernel - 1) + 1;
                let padded = size + 2 * s.options.padding[d];
                (padded >= reach).then(|| (padded - reach) / s.options.stride[d] + 1)
            };
            let pools = |d: usize, size: usize| size + 2 * s.pool.padding[d] >= s.pool.kernel[d];
            let (Some(h), Some(w)) = (out(0, s.h), out(1, s.w)) else { return false };
            s.n * h * w > 1 && pools(0, h) && pools(1, w)
        })
}

/// Convolution, batch norm, a sum with a shortcut, ReLU, max pooling, another convolution: the output, then the gradients of
/// all that went in.
fn chain(device: &Device, s: Sizes, way: Way) -> Vec<Vec<f64>> {
    let x = numbers(device, [s.n, s.c, s.h, s.w], 0).requires_grad();
    let w = numbers(device, [s.middle, s.c, s.kernel, s.kernel], 1).requires_grad();
    let b = numbers(device, [s.middle], 2).requires_grad();
    let (scale, shift) =
        (numbers(device, [s.middle], 3).requires_grad(), numbers(device, [s.middle], 4).requires_grad());
    let last = numbers(device, [32, s.middle, 1, 1], 5).requires_grad();
    let y = conv(&x, &w, Some(&b), s.options, way);
    let shortcut = numbers(device, y.shape(), 6).requires_grad();
    let normal = |then| y.batch_norm(Some(&scale), Some(&shift), 1e-5, then, None, None).out;
    let y = match way {
        Way::Usual => normal(Then::AddRelu(&shortcut)),
        Way::Plain => normal(Then::Nothing).contiguous().add(&shortcut).relu(),
    };
    let pooled = y.max_pool2d(s.pool);
    let out = conv(&pooled, &last, None, Conv2dOptions::default(), way);
    let seed = numbers(device, out.shape(), 8);
    let loss = (&out * &seed).sum_all();
    let grads = loss.backward();
    let mut all = vec![out.to_vec::<f64>()];
    all.extend(
        [&x, &w, &b, &scale, &shift, &last, &shortcut].map(|leaf| grads.get(leaf).unwrap().to_vec::<f64>()),
    );
    all
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 96, ..ProptestConfig::default() })]

    #[test]
    fn a_chain_in_pixel_order_is_the_chain_in_row_major_order(s in sizes()) {
        let got = chain(&Device::cpu(1), s, Way::Usual);
        let want = chain(&Device::cpu(1), s, Way::Plain);
        let names = ["output", "x", "kernels", "bias", "scale", "shift", "last kernels", "shortcut"];
        for ((got, want), name) in got.iter().zip(&want).zip(names) {
            close(got, want, name);
        }
        for threads in [2, 3] {
            prop_assert_eq!(&chain(&Device::cpu(threads), s, Way::Usual), &got, "{} threads", threads);
        }
    }
}

/// A leaf of a gradient arena, as a kernel lies tap by tap, that starts as `values`.
fn leaf_by_taps(device: &Device, values: &Tensor) -> (Grads, Tensor) {
    let layout = Layout::ordered([(*values.shape(), Order::Taps)]);
    let (arena, grads) = (Arena::new(device, DType::F64, &layout), Grads::new(device, DType::F64, &layout));
    let leaf = grads.leaf(0, &arena);
    leaf.copy_from(values);
    (grads, leaf)
}

#[test]
fn a_row_major_gradient_of_a_leaf_that_lies_tap_by_tap_is_put_where_it_belongs() {
    let device = Device::cpu(1);
    let shape = [16, 16, 2, 3];
    let (values, seed) = (numbers(&device, shape, 0), numbers(&device, [16 * 16 * 6], 1));
    let want: Vec<f64> = seed.to_vec::<f64>().iter().map(|g| 2.0 * g).collect();
    let (grads, leaf) = leaf_by_taps(&device, &values);
    // The gradient comes through `reshape`, so row-major.
    ((&leaf * 2.0).reshape([16 * 16 * 6]) * &seed).sum_all().backward();
    close(&grads.arena().tensor(0).to_vec::<f64>(), &want, "gradient");
}

#[test]
fn a_leaf_that_lies_tap_by_tap_and_got_no_gradient_is_settled_with_zeros() {
    let device = Device::cpu(1);
    let (grads, leaf) = leaf_by_taps(&device, &numbers(&device, [16, 16, 3, 3], 0));
    leaf.square().sum_all().backward();
    grads.zero();
    assert_eq!(grads.settle(), [0]);
    assert_eq!(grads.arena().tensor(0).to_vec::<f64>(), [0.0; 16 * 16 * 9]);
}

#[test]
fn the_bias_gradient_of_a_part_of_a_larger_gradient_is_that_of_the_part() {
    let device = Device::cpu(1);
    let grads = |way: Way| {
        let b: Vec<Tensor> = (0..2).map(|i| numbers(&device, [16], i).requires_grad()).collect();
        let (x, w) = (numbers(&device, [4, 16, 2, 3], 3), numbers(&device, [16, 16, 1, 1], 4));
        let parts = [0, 1].map(|i| conv(&x, &w, Some(&b[i]), Conv2dOptions::default(), way));
        // Joined along the dimension that runs slowest in pixel order, so that both parts of the gradient are dense.
        let joined = Tensor::cat(&[&parts[0], &parts[1]], 2);
        let out = conv(&joined, &w, None, Conv2dOptions::default(), way);
        let grads = (&out * &numbers(&device, out.shape(), 5)).sum_all().backward();
        [0, 1].map(|i: usize| grads.get(&b[i]).unwrap().to_vec::<f64>())
    };
    for (got, want) in grads(Way::Usual).iter().zip(&grads(Way::Plain)) {
        close(got, want, "bias");
    }
}

#[test]
fn images_without_a_pixel_but_with_padding_are_all_padding() {
    let device = Device::cpu(1);
    for (n, c) in [(5, 3), (5, 16)] {
        let b = numbers(&device, [16], 0).requires_grad();
        let w = numbers(&device, [16, c, 3, 3], 1).requires_grad();
        let x = Tensor::zeros(&device, [n, c, 0, 4], DType::F64);
        let out = x.conv2d(&w, Some(&b), Conv2dOptions { padding: [2, 1], ..Conv2dOptions::default() });
        assert_eq!(out.dims(), [n, 16, 2, 4]);
        assert_eq!(out.narrow(1, 3, 1).to_vec::<f64>(), vec![b.to_vec::<f64>()[3]; n * 8]);
        let grads = out.sum_all().backward();
        assert_eq!(grads.get(&b).unwrap().to_vec::<f64>(), [n as f64 * 8.0; 16]);
        assert!(grads.get(&w).unwrap().to_vec::<f64>().iter().all(|&g| g == 0.0));
    }
}

#[test]
fn a_batch_without_images_goes_through_and_gives_zeros() {
    let device = Device::cpu(2);
    for c in [3, 16] {
        let w = numbers(&device, [16, c, 3, 3], 1).requires_grad();
        let b = numbers(&device, [16], 2).requires_grad();
        let x = Tensor::zeros(&device, [0, c, 5, 4], DType::F64);
        let out = x.conv2d(&w, Some(&b), Conv2dOptions::default()).relu().max_pool2d(PoolOptions::square(2));
        let grads = out.sum_all().backward();
        assert_eq!(out.dims(), [0, 16, 1, 1]);
        assert!(grads.get(&w).unwrap().to_vec::<f64>().iter().all(|&g| g == 0.0));
        assert_eq!(grads.get(&b).unwrap().to_vec::<f64>(), [0.0; 16]);
    }
}

#[test]
fn nan_and_infinities_go_through_in_pixel_order_as_in_row_major_order() {
    let device = Device::cpu(1);
    let n = 4 * 16 * 6 * 5;
    let strange = [f64::NAN, f64::INFINITY, f64::NEG_INFINITY, -0.0, 0.0, 1.0, -1.0];
    let key = Philox::new(3, 3);
    let values: Vec<f64> = (0..n).map(|i| strange[(key.unit(i as u64) * 7.0) as usize]).collect();
    let rows = Tensor::from_slice(&device, &values, [4, 16, 6, 5]);
    let (_, pixels) = leaf_by_taps(&device, &rows);
    let bits = |t: &Tensor| t.to_vec::<f64>().iter().map(|x| x.to_bits()).collect::<Vec<_>>();
    let same = |what: &str, f: &dyn Fn(&Tensor) -> Tensor| {
        let [(y, grad), (y_pixels, grad_pixels)] = [&rows, &pixels].map(|x| {
            let x = x.detach().requires_grad();
            let y = f(&x);
            // Whole numbers, whose sums are the same in any order.
            let seed: Vec<f64> = (0..y.count()).map(|i| (i % 64) as f64).collect();
            let grads = (&y * &Tensor::from_slice(&device, &seed, *y.shape())).sum_all().backward();
            (bits(&y), grads.get(&x).unwrap().to_vec::<f64>())
        });
        assert_eq!(y, y_pixels, "{what}");
        assert_eq!(grad, grad_pixels, "{what}, gradient");
    };
    for (kernel, stride) in [(2, 2), (3, 2), (2, 1), (3, 1)] {
        let pool = PoolOptions { kernel: [kernel; 2], stride: [stride; 2], padding: [kernel / 2; 2] };
        same(&format!("{pool:?}"), &|x| x.max_pool2d(pool));
    }
    same("relu", &Tensor::relu);
}
