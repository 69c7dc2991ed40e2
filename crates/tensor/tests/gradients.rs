//! Every op's gradient against central differences in float64.

use phalanx_tensor::{
    ChannelStats, Conv2dOptions, CountPadding, DType, Device, DropoutKey, Keep, Philox, PoolOptions, Tensor,
    Then, backward, no_grad,
};

/// Half the distance of a central difference: its error is about STEP^2 from the formula and 1e-16 / STEP from rounding.
const STEP: f64 = 1e-5;
/// What both errors leave, relative to the largest gradient, with room for functions that bend strongly.
const TOLERANCE: f64 = 1e-7;

fn random(device: &Device, shape: &[usize], stream: u64) -> Tensor {
    Tensor::uniform(device, shape, -1.0, 1.0, DType::F64, Philox::new(42, stream))
}

/// The same images in pixel order: the copy is made of a view in which that is the row-major one.
fn in_pixels(x: &Tensor) -> Tensor {
    x.permute(&[2, 3, 0, 1]).contiguous().permute(&[2, 3, 0, 1])
}

/// Compares the gradients of `sum(f(inputs) * weights)` with differences, for random inputs of the given shapes moved by
/// `shift`, on one and on two threads.
#[track_caller]
fn check_at(shift: f64, shapes: &[&[usize]], f: impl Fn(&[Tensor]) -> Tensor) {
    for threads in [1, 2] {
        let device = Device::cpu(threads);
        let values: Vec<Tensor> =
            shapes.iter().enumerate().map(|(i, shape)| random(&device, shape, i as u64) + shift).collect();
        let leaves: Vec<Tensor> = values.iter().map(|v| v.clone().requires_grad()).collect();
        let out = f(&leaves);
        let weights = random(&device, out.dims(), 99);
        let mut grads = phalanx_tensor::Gradients::default();
        backward(&[(&out, Some(&weights))], &mut grads);
        let loss = |values: &[Tensor]| no_grad(|| (f(values) * &weights).sum_all().item());
        for (i, value) in values.iter().enumerate() {
            let got = grads.get(&leaves[i]).unwrap_or_else(|| panic!("input {i} got no gradient"));
            assert_eq!(got.dims(), value.dims(), "shape of the gradient of input {i}");
            let got = got.to_vec::<f64>();
            let plain = value.to_vec::<f64>();
            let scale = got.iter().fold(1.0, |a: f64, g| a.max(g.abs()));
            for j in 0..plain.len() {
                let moved = |by: f64| {
                    let mut changed = plain.clone();
                    changed[j] += by;
                    let mut values = values.clone();
                    values[i] = Tensor::from_slice(&device, &changed, value.dims());
                    loss(&values)
                };
                let want = (moved(STEP) - moved(-STEP)) / (2.0 * STEP);
                assert!(
                    (got[j] - want).abs() <= TOLERANCE * scale,
                    "input {i}, element {j}: gradient {}, by differences {want}, {threads} threads",
                    got[j]
                );
            }
        }
    }
}

#[track_caller]
fn check(shapes: &[&[usize]], f: impl Fn(&[Tensor]) -> Tensor) {
    check_at(0.0, shapes, f);
}

fn labels(device: &Device, n: usize, classes: usize) -> Tensor {
    let values: Vec<i64> = (0..n).map(|i| (i * 7 % classes) as i64).collect();
    Tensor::from_slice(device, &values, [n])
}

#[test]
fn arithmetic_broadcasts() {
    type Binary = fn(&Tensor, &Tensor) -> Tensor;
    let ops: [Binary; 5] = [Tensor::add, Tensor::sub, Tensor::mul, Tensor::maximum, Tensor::minimum];
    for op in ops {
        check(&[&[2, 3], &[2, 3]], |x| op(&x[0], &x[1]));
        check(&[&[2, 3, 4], &[3, 1]], |x| op(&x[0], &x[1]));
        check(&[&[4], &[2, 1, 4]], |x| op(&x[0], &x[1]));
        check(&[&[], &[3]], |x| op(&x[0], &x[1]));
        check(&[&[3, 3]], |x| op(&x[0], &x[0].t()));
    }
    check_at(2.0, &[&[2, 3], &[3]], |x| x[0].div(&x[1]));
    check_at(2.0, &[&[3], &[2, 1]], |x| x[0].div(&x[1]));
}

#[test]
fn functions() {
    for f in [
        Tensor::neg,
        Tensor::exp,
        Tensor::tanh,
        Tensor::sigmoid,
        Tensor::relu,
        Tensor::gelu,
        Tensor::abs,
        Tensor::square,
    ] {
        check(&[&[2, 5]], |x| f(&x[0]));
        check(&[&[2, 5]], |x| f(&x[0].t()));
    }
    check_at(2.0, &[&[7]], |x| x[0].ln());
    check_at(2.0, &[&[7]], |x| x[0].sqrt());
    check_at(2.0, &[&[7]], |x| x[0].powf(2.5));
    check(&[&[7]], |x| x[0].affine(3.0, -1.0));
    check(&[&[3]], |x| -&(&x[0] * 2.0 - 1.0) / 4.0);
}

#[test]
fn reductions() {
    for keep in [Keep::Yes, Keep::No] {
        check(&[&[2, 3, 4]], |x| x[0].sum(&[1], keep));
        check(&[&[2, 3, 4]], |x| x[0].sum(&[0, 2], keep));
        check(&[&[2, 3, 4]], |x| x[0].mean(&[2], keep));
        check(&[&[2, 3, 4]], |x| x[0].max(1, keep));
        check(&[&[2, 3, 4]], |x| x[0].transpose(0, 2).max(0, keep));
    }
    check(&[&[3, 4]], |x| x[0].sum_all());
    check(&[&[3, 4]], |x| x[0].t().mean_all());
}

#[test]
fn views() {
    check(&[&[2, 3, 4]], |x| x[0].reshape([4, 6]));
    check(&[&[2, 3, 4]], |x| x[0].transpose(0, 2).reshape([8, 3]));
    check(&[&[2, 3, 4]], |x| x[0].permute(&[2, 0, 1]));
    check(&[&[2, 3, 4]], |x| x[0].narrow(1, 1, 2).narrow(2, 0, 3));
    check(&[&[2, 1, 4]], |x| x[0].squeeze(1).unsqueeze(0).flatten_from(1));
    check(&[&[3, 1]], |x| x[0].broadcast_to([2, 3, 4]));
    check(&[&[2, 3], &[2, 1], &[2, 2]], |x| Tensor::cat(&[&x[0], &x[1], &x[2]], 1));
    check(&[&[2, 3]], |x| Tensor::cat(&[&x[0], &x[0].affine(2.0, 0.0)], 0));
}

#[test]
fn products() {
    check(&[&[3, 4], &[4, 2]], |x| x[0].matmul(&x[1]));
    check(&[&[4, 3], &[4, 2]], |x| x[0].t().matmul(&x[1]));
    check(&[&[2, 3, 4], &[2, 4, 2]], |x| x[0].matmul(&x[1]));
    check(&[&[2, 1, 3, 4], &[5, 4, 2]], |x| x[0].matmul(&x[1]));
    check(&[&[2, 3, 4], &[4, 2]], |x| x[0].matmul(&x[1]));
    check(&[&[3, 4], &[2, 4], &[2]], |x| x[0].linear(&x[1], Some(&x[2])));
    check(&[&[2, 3, 4], &[5, 4]], |x| x[0].linear(&x[1], None));
}

#[test]
fn convolutions() {
    let plain = Conv2dOptions::default();
    for options in [
        plain,
        Conv2dOptions { padding: [1, 2], ..plain },
        Conv2dOptions { stride: [2, 1], ..plain },
        Conv2dOptions { stride: [2, 3], padding: [2, 1], dilation: [2, 1], groups: 1 },
    ] {
        check(&[&[2, 2, 6, 7], &[3, 2, 3, 2], &[3]], |x| x[0].conv2d(&x[1], Some(&x[2]), options));
    }
    // Many channels: in pixel order. Few to many: by strips.
    let same = Conv2dOptions { padding: [1, 1], ..plain };
    check(&[&[4, 16, 2, 1], &[16, 16, 3, 3]], |x| x[0].conv2d(&x[1], None, same));
    check(&[&[2, 2, 3, 2], &[16, 2, 3, 3], &[16]], |x| x[0].conv2d(&x[1], Some(&x[2]), same).relu());
    let grouped = Conv2dOptions { padding: [1, 1], groups: 2, ..plain };
    check(&[&[1, 4, 4, 4], &[6, 2, 3, 3], &[6]], |x| x[0].conv2d(&x[1], Some(&x[2]), grouped));
    let depthwise = Conv2dOptions { groups: 3, ..plain };
    check(&[&[2, 3, 4, 5], &[3, 1, 2, 2]], |x| x[0].conv2d(&x[1], None, depthwise));
    // The sizes of the tutorials' network, made smaller, so that the kernel for few channels is under test.
    check(&[&[3, 1, 12, 12], &[5, 1, 5, 5], &[5]], |x| x[0].conv2d(&x[1], Some(&x[2]), plain));
    check(&[&[2, 3, 12, 12], &[4, 3, 5, 5], &[4]], |x| x[0].conv2d(&x[1], Some(&x[2]), plain));
}

#[test]
fn pooling() {
    let odd = PoolOptions { kernel: [3, 2], stride: [2, 1], padding: [1, 1] };
    for options in [PoolOptions::square(2), PoolOptions::square(3), odd] {
        check(&[&[2, 2, 6, 7]], |x| x[0].max_pool2d(options));
        check(&[&[2, 2, 6, 7]], |x| in_pixels(&x[0]).max_pool2d(options));
        for padding in [CountPadding::Yes, CountPadding::No] {
            check(&[&[2, 2, 6, 7]], |x| x[0].avg_pool2d(options, padding));
        }
    }
    check(&[&[2, 1, 5, 5]], |x| x[0].max_pool2d(PoolOptions::square(2)));
    for size in [[1, 1], [2, 3], [4, 1]] {
        check(&[&[2, 2, 6, 7]], |x| x[0].adaptive_avg_pool2d(size));
    }
}

#[test]
fn softmaxes() {
    for dim in 0..3 {
        check(&[&[2, 3, 4]], |x| x[0].softmax(dim));
        check(&[&[2, 3, 4]], |x| x[0].log_softmax(dim));
    }
}

#[test]
fn losses() {
    check(&[&[5, 3]], |x| x[0].nll_loss(&labels(x[0].device(), 5, 3)));
    check(&[&[5, 3]], |x| x[0].cross_entropy(&labels(x[0].device(), 5, 3), 0.0));
    check(&[&[5, 3]], |x| x[0].cross_entropy(&labels(x[0].device(), 5, 3), 0.1));
    check(&[&[4, 3], &[4, 3]], |x| x[0].mse_loss(&x[1]));
    check(&[&[4, 3]], |x| x[0].bce_with_logits(&random(x[0].device(), &[4, 3], 7).sigmoid()));
}

#[test]
fn embedding_and_norm() {
    check(&[&[5, 3]], |x| {
        let ids = Tensor::from_slice(x[0].device(), &[4i64, 0, 4, 2], [2, 2]);
        x[0].embedding(&ids)
    });
    check(&[&[3, 4]], |x| x[0].layer_norm(1, None, None, 1e-5));
    check(&[&[3, 4], &[4]], |x| x[0].layer_norm(1, Some(&x[1]), None, 1e-5));
    check(&[&[2, 3, 4], &[3, 4], &[3, 4]], |x| x[0].layer_norm(2, Some(&x[1]), Some(&x[2]), 1e-5));
}

#[test]
fn batch_norm() {
    let plain = |x: &Tensor, weight: Option<&Tensor>, bias: Option<&Tensor>| {
        x.batch_norm(weight, bias, 1e-5, Then::Nothing, None).out
    };
    check(&[&[4, 3]], |x| plain(&x[0], None, None));
    check(&[&[2, 3, 5], &[3]], |x| plain(&x[0], Some(&x[1]), None));
    check(&[&[2, 3, 4, 2], &[3], &[3]], |x| plain(&x[0], Some(&x[1]), Some(&x[2])));
    check(&[&[2, 3, 4, 2], &[3], &[3]], |x| plain(&in_pixels(&x[0]), Some(&x[1]), Some(&x[2])));
    for arranged in [Tensor::clone, in_pixels] {
        check(&[&[2, 3, 4, 2], &[3], &[3]], |x| {
            arranged(&x[0]).batch_norm(Some(&x[1]), Some(&x[2]), 1e-5, Then::Relu, None).out
        });
        check(&[&[2, 3, 2, 2], &[3], &[3], &[2, 3, 2, 2]], |x| {
            arranged(&x[0]).batch_norm(Some(&x[1]), Some(&x[2]), 1e-5, Then::AddRelu(&x[3]), None).out
        });
    }
    check(&[&[2, 3, 4, 2], &[3], &[3]], |x| {
        let stats = ChannelStats {
            mean: random(x[0].device(), &[3], 8),
            variance: random(x[0].device(), &[3], 9).square(),
        };
        let plain = x[0].batch_norm_with(&stats, Some(&x[1]), Some(&x[2]), 1e-5, Then::Nothing);
        plain + in_pixels(&x[0]).batch_norm_with(&stats, Some(&x[1]), None, 1e-5, Then::Relu)
    });
}

#[test]
fn dropouts() {
    let key = DropoutKey { seed: 1, step: 2, layer: 3, samples: [10, 11, 12].into() };
    check(&[&[3, 4, 5]], |x| x[0].dropout(0.5, &key));
    check(&[&[3, 4, 2, 2]], |x| x[0].dropout2d(0.25, &key));
}

#[test]
fn a_value_used_twice_gets_both_gradients() {
    check(&[&[3]], |x| x[0].square() * &x[0] + &x[0]);
    check(&[&[3, 3]], |x| x[0].matmul(&x[0]).matmul(&x[0]));
}
