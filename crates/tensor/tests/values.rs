//! What the operations compute, where a gradient check can't tell.

use phalanx_tensor::{
    ChannelStats, Conv2dOptions, DType, Device, DropoutKey, Keep, PoolOptions, Tensor, Then, no_grad,
};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

fn t(values: &[f32], shape: &[usize]) -> Tensor {
    Tensor::from_slice(&Device::cpu(1), values, shape)
}

/// The message of the panic that `f` ends in.
#[track_caller]
fn panic_of(f: impl FnOnce() -> Tensor) -> String {
    let panic = catch_unwind(AssertUnwindSafe(f)).expect_err("should have panicked");
    panic
        .downcast_ref::<String>()
        .cloned()
        .unwrap_or_else(|| panic.downcast_ref::<&str>().unwrap().to_string())
}

#[test]
fn known_values() {
    let x = t(&[1.0, -2.0, 3.0, 0.0], &[2, 2]);
    let check = |got: Tensor, want: &[f32]| {
        got.to_vec::<f32>()
            .iter()
            .zip(want)
            .for_each(|(g, w)| assert!((g - w).abs() < 1e-6, "{got:?} {want:?}"));
        assert_eq!(got.count(), want.len());
    };
    check(x.relu(), &[1.0, 0.0, 3.0, 0.0]);
    // Figures of torch.nn.functional.gelu and torch.log_softmax.
    check(x.gelu(), &[0.841_344_7, -0.045_500_264, 2.995_950_2, 0.0]);
    check(x.log_softmax(1), &[-0.048_587_35, -3.048_587_3, -0.048_587_35, -3.048_587_3]);
    check(x.sum(&[0], Keep::No), &[4.0, -2.0]);
    check(x.matmul(&x), &[-5.0, -2.0, 3.0, -6.0]);
    check(x.reshape([1, 1, 2, 2]).max_pool2d(PoolOptions::square(2)), &[3.0]);
    assert_eq!(x.argmax(1).to_vec::<i64>(), [0, 0]);
    assert_eq!(x.argmax(0).to_vec::<i64>(), [1, 1]);
}

#[test]
fn a_wrong_shape_names_the_op_and_both_shapes() {
    let device = Device::cpu(1);
    let zeros = |shape: &[usize]| Tensor::zeros(&device, shape, DType::F32);
    let (a, b, image) = (zeros(&[2, 3]), zeros(&[2, 4]), zeros(&[1, 1, 4, 4]));
    let check = |op: &str, shapes: [&str; 2], f: &dyn Fn() -> Tensor| {
        let message = panic_of(f);
        assert!(message.starts_with(op) && shapes.iter().all(|s| message.contains(s)), "{message}");
    };
    check("add", ["[2, 3]", "[2, 4]"], &|| &a + &b);
    check("matmul", ["[2, 3]", "[2, 4]"], &|| a.matmul(&b));
    check("linear", ["[2, 3]", "[2, 4]"], &|| a.linear(&b, None));
    check("reshape", ["[2, 3]", "[5]"], &|| a.reshape([5]));
    check("mse_loss", ["[2, 3]", "[2, 4]"], &|| a.mse_loss(&b));
    check("conv2d", ["[1, 1, 4, 4]", "[2, 3]"], &|| image.conv2d(&a, None, Conv2dOptions::default()));
    check("max_pool2d", ["[1, 1, 4, 4]", "[5, 5]"], &|| image.max_pool2d(PoolOptions::square(5)));
    check("cat", ["[2, 3]", "[2, 4]"], &|| Tensor::cat(&[&a, &b], 0));
    check("broadcast_to", ["[2, 3]", "[2, 4]"], &|| a.broadcast_to([2, 4]));
    let labels = Tensor::from_slice(a.device(), &[3i64, 0], [2]);
    check("nll_loss", ["label 3", "[2, 3]"], &|| a.nll_loss(&labels));
}

#[test]
fn tensors_of_two_devices_dont_mix() {
    let message = panic_of(|| t(&[1.0], &[1]).add(&t(&[1.0], &[1])));
    assert!(message.contains("different devices"), "{message}");
}

#[test]
fn nan_is_seen_not_lost() {
    let x = t(&[f32::NAN, 1.0, 2.0, 3.0], &[1, 1, 2, 2]);
    assert!(x.relu().to_vec::<f32>()[0].is_nan());
    assert!(x.max_pool2d(PoolOptions::square(2)).item().is_nan());
    assert!(x.reshape([4]).max(0, Keep::No).item().is_nan());
    assert!((x.maximum(&Tensor::zeros(x.device(), [], DType::F32))).to_vec::<f32>()[0].is_nan());
}

/// The values, and the gradient of the sum of outputs times 1, 2, 3 and so on, are those of PyTorch 2.15.
#[test]
fn gradients_go_where_pytorchs_go_at_nan_zero_and_ties() {
    const NAN: f32 = f32::NAN;
    const INF: f32 = f32::INFINITY;
    let device = Device::cpu(1);
    let t = |values: &[f32], shape: &[usize]| Tensor::from_slice(&device, values, shape);
    let check = |what: &str, f: &dyn Fn(&Tensor) -> Tensor, x: &Tensor, want: &[f32], want_grad: &[f32]| {
        let x = x.clone().requires_grad();
        let y = f(&x);
        let grads: Vec<f32> = (1..=y.count()).map(|i| i as f32).collect();
        let sum = (&y * &Tensor::from_slice(x.device(), &grads, *y.shape())).sum_all();
        let grad = sum.backward().get(&x).unwrap().to_vec::<f32>();
        let same = |a: &[f32], b: &[f32]| a.iter().zip(b).all(|(a, b)| a == b || a.is_nan() && b.is_nan());
        assert!(same(&y.to_vec::<f32>(), want), "{what}: {:?}, PyTorch {want:?}", y.to_vec::<f32>());
        assert!(same(&grad, want_grad), "{what}, gradient: {grad:?}, PyTorch {want_grad:?}");
    };
    let line = t(&[NAN, 0.0, -0.0, 1.0, -1.0, INF, -INF], &[7]);
    let passed = [1.0, 0.0, 0.0, 4.0, 0.0, 6.0, 0.0];
    check("relu", &Tensor::relu, &line, &[NAN, 0.0, 0.0, 1.0, 0.0, INF, 0.0], &passed);

    let other = t(&[1.0, NAN, 0.0, 1.0, 0.0, INF, INF], &[7]);
    let (larger, smaller) = ([NAN, NAN, 0.0, 1.0, 0.0, INF, INF], [NAN, NAN, 0.0, 1.0, -1.0, INF, -INF]);
    let won = [1.0, 2.0, 1.5, 2.0, 0.0, 3.0, 0.0];
    check("maximum", &|x| x.maximum(&other), &line, &larger, &won);
    let won = [1.0, 2.0, 1.5, 2.0, 5.0, 3.0, 7.0];
    check("minimum", &|x| x.minimum(&other), &line, &smaller, &won);

    // A fused batch norm of rows, and one of planes with a ReLU after it. By given statistics one value of four is NaN and one
    // cut off; by the batch's own all are NaN.
    let values = t(&[1.0, NAN, 2.0, -3.0], &[4]);
    for shape in [[4, 1, 1, 1], [1, 1, 2, 2]] {
        let x = values.reshape(shape);
        let zeros = Tensor::zeros(&device, shape, DType::F32);
        for (what, then) in [("norm, relu", Then::Relu), ("norm, sum, relu", Then::AddRelu(&zeros))] {
            let (weight, bias) = (t(&[1.0], &[1]).requires_grad(), t(&[0.0], &[1]).requires_grad());
            let passed = |y: Tensor| y.sum_all().backward().get(&bias).unwrap().item();
            let stats = ChannelStats { mean: t(&[0.0], &[1]), variance: t(&[1.0], &[1]) };
            let given = x.batch_norm_with(&stats, Some(&weight), Some(&bias), 1e-5, then);
            let own = x.batch_norm(Some(&weight), Some(&bias), 1e-5, then, None).out;
            assert_eq!([passed(given), passed(own)], [3.0, 4.0], "{what} of {shape:?}");
        }
    }

    let some = [1.0, NAN, 2.0, NAN, 3.0, 4.0, NAN, 5.0, 0.0, 0.0, 0.0, 0.0, 0.0, NAN, NAN, 0.0];
    let square = |kernel: usize, stride: usize, padding: usize| PoolOptions {
        kernel: [kernel; 2],
        stride: [stride; 2],
        padding: [padding; 2],
    };
    let (tiled, padded, dense) = (square(2, 2, 0), square(3, 2, 1), square(2, 1, 0));
    // Where the gradient of each output goes: to the last NaN of the window, else to the first of the largest.
    let rows: &[(PoolOptions, [f32; 16], &[usize])] = &[
        (tiled, some, &[1, 6, 13, 14]),
        (tiled, [-INF; 16], &[0, 2, 8, 10]),
        (tiled, [NAN; 16], &[5, 7, 13, 15]),
        (padded, some, &[1, 6, 13, 14]),
        (padded, [0.0; 16], &[0, 1, 4, 5]),
        (padded, [NAN; 16], &[5, 7, 13, 15]),
        (dense, some, &[1, 6, 6, 5, 6, 6, 13, 14, 14]),
        (dense, [-INF; 16], &[0, 1, 2, 4, 5, 6, 8, 9, 10]),
        (dense, [NAN; 16], &[5, 6, 7, 9, 10, 11, 13, 14, 15]),
    ];
    for (pool, values, winners) in rows {
        let want: Vec<f32> = winners.iter().map(|&at| values[at]).collect();
        let mut want_grad = [0.0; 16];
        winners.iter().enumerate().for_each(|(i, &at)| want_grad[at] += (i + 1) as f32);
        let x = t(values, &[1, 1, 4, 4]);
        check(&format!("{pool:?}"), &|x| x.max_pool2d(*pool), &x, &want, &want_grad);
    }
}

#[test]
fn a_mask_belongs_to_the_sample_not_to_the_batch() {
    let key = |samples: &[u64]| DropoutKey { seed: 9, step: 4, layer: 1, samples: Arc::from(samples) };
    let device = Device::cpu(1);
    let ones = |n: usize| Tensor::ones(&device, [n, 100], DType::F32);
    let whole = ones(3).dropout(0.5, &key(&[5, 6, 7])).to_vec::<f32>();
    let alone = ones(1).dropout(0.5, &key(&[6])).to_vec::<f32>();
    assert_eq!(whole[100..200], alone[..]);
    assert_ne!(whole[..100], whole[100..200]);
    let dropped = ones(100).dropout(0.3, &key(&(0..100).collect::<Vec<_>>()));
    let zeros = dropped.to_vec::<f32>().iter().filter(|&&x| x == 0.0).count();
    assert!((2800..3200).contains(&zeros), "{zeros} of 10000 at p = 0.3");
    assert!((dropped.mean_all().item() - 1.0).abs() < 0.03);
}

#[test]
fn without_recording_there_is_no_graph() {
    let x = t(&[1.0, 2.0], &[2]).requires_grad();
    assert!(x.square().needs_grad());
    assert!(!no_grad(|| x.square()).needs_grad());
    assert!(!x.detach().square().needs_grad());
}

#[test]
fn a_graph_is_walked_once() {
    let loss = t(&[1.0, 2.0], &[2]).requires_grad().square().sum_all();
    assert_eq!(loss.backward().len(), 1);
    let second = catch_unwind(AssertUnwindSafe(|| loss.backward().len()));
    assert!(second.is_err());
}

#[test]
fn a_long_chain_is_let_go_without_recursion() {
    let mut x = t(&[1.0], &[1]).requires_grad();
    for _ in 0..200_000 {
        x = x.affine(1.0, 0.0);
    }
    drop(x);
}
