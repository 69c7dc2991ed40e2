//! Values at which operations are easily wrong, for every device: each of these panics where one is.

use crate::cases::{Family, alike, choices};
use crate::{ChannelStats, DType, Device, Keep, PoolOptions, Tensor, Then};

/// Every one of them, by name.
pub const ALL: [Family<Device>; 11] = [
    ("known values", known_values),
    ("NaN is seen", nan_is_seen_not_lost),
    ("gradients at NaN, zero and ties", gradients_go_where_pytorchs_go_at_nan_zero_and_ties),
    ("places of labels", labels_come_where_their_scores_do),
    ("comparisons", choices::comparisons),
    ("largest first", choices::the_largest_come_first),
    ("whole numbers", choices::whole_numbers),
    ("random numbers", alike::random_numbers),
    ("targets", alike::targets),
    ("running statistics", alike::running_statistics),
    ("batches from bytes", alike::batches_from_bytes),
];

/// Figures of PyTorch's.
#[track_caller]
pub fn known_values(device: &Device) {
    let t = |values: &[f32], shape: &[usize]| Tensor::from_slice(device, values, shape);
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

/// The likeliest first, and of equals the one that is listed first.
#[track_caller]
pub fn labels_come_where_their_scores_do(device: &Device) {
    const NAN: f32 = f32::NAN;
    let rows = [[0.1, 0.7, -3.0], [2.0, 2.0, 2.0], [NAN, 1.0, f32::INFINITY], [-0.0, 0.0, 65504.0]];
    let want = [[1.0, 0.0, 2.0], [0.0, 1.0, 2.0], [-1.0, 1.0, 0.0], [1.0, 2.0, 0.0]];
    for dtype in [DType::F32, DType::BF16, DType::F16] {
        let scores = Tensor::from_slice(device, rows.as_flattened(), [4, 3]).cast(dtype);
        for label in 0..3 {
            let labels = Tensor::from_slice(device, &[label as i64; 4], [4]);
            let (got, later) =
                (scores.label_places(&labels), scores.label_places(&labels).to_vec_later::<f32>());
            assert_eq!(got.to_vec::<f32>(), want.map(|row| row[label]), "{dtype}, label {label}");
            assert_eq!(later.to_vec(), got.to_vec::<f32>(), "{dtype}, label {label}");
        }
    }
    // More classes than a block has threads, of which the last is the likeliest.
    let scores: Vec<f32> = (0..3_000).map(|i| i as f32).collect();
    let scores = Tensor::from_slice(device, &scores, [1, 3_000]);
    for label in [0i64, 1, 1_500, 2_999] {
        let place = scores.label_places(&Tensor::from_slice(device, &[label], [1])).item();
        assert_eq!(place, (2_999 - label) as f64, "label {label} of 3000");
    }
}

/// A NaN comes through.
#[track_caller]
pub fn nan_is_seen_not_lost(device: &Device) {
    let t = |values: &[f32], shape: &[usize]| Tensor::from_slice(device, values, shape);
    let x = t(&[f32::NAN, 1.0, 2.0, 3.0], &[1, 1, 2, 2]);
    assert!(x.relu().to_vec::<f32>()[0].is_nan());
    assert!(x.max_pool2d(PoolOptions::square(2)).item().is_nan());
    assert!(x.reshape([4]).max(0, Keep::No).item().is_nan());
    assert!((x.maximum(&Tensor::zeros(x.device(), [], DType::F32))).to_vec::<f32>()[0].is_nan());
}

/// The values, and the gradient of the sum of outputs times 1, 2, 3 and so on, are those of PyTorch 2.15.
pub fn gradients_go_where_pytorchs_go_at_nan_zero_and_ties(device: &Device) {
    const NAN: f32 = f32::NAN;
    const INF: f32 = f32::INFINITY;
    let t = |values: &[f32], shape: &[usize]| Tensor::from_slice(device, values, shape);
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
        let zeros = Tensor::zeros(device, shape, DType::F32);
        for (what, then) in [("norm, relu", Then::Relu), ("norm, sum, relu", Then::AddRelu(&zeros))] {
            let (weight, bias) = (t(&[1.0], &[1]).requires_grad(), t(&[0.0], &[1]).requires_grad());
            let passed = |y: Tensor| y.sum_all().backward().get(&bias).unwrap().item();
            let stats = ChannelStats { mean: t(&[0.0], &[1]), variance: t(&[1.0], &[1]) };
            let given = x.batch_norm_with(&stats, Some(&weight), Some(&bias), 1e-5, then);
            let own = x.batch_norm(Some(&weight), Some(&bias), 1e-5, then, None, None).out;
            assert_eq!([passed(given), passed(own)], [3.0, 4.0], "{what} of {shape:?}");
        }
    }
    // Many such, of which a GPU keeps bits.
    let x = t(&[1.0, NAN, 2.0, -3.0].repeat(525 * 8), &[525, 8, 2, 2]).requires_grad();
    let (of_all, zeros) = (
        |value| Tensor::full(device, [8], value, DType::F32),
        Tensor::zeros(device, [525, 8, 2, 2], DType::F32),
    );
    for then in [Then::Relu, Then::AddRelu(&zeros)] {
        let (weight, bias) = (of_all(1.0), of_all(0.0).requires_grad());
        let stats = ChannelStats { mean: of_all(0.0), variance: of_all(1.0) };
        let y = x.batch_norm_with(&stats, Some(&weight), Some(&bias), 1e-5, then);
        let passed = y.sum_all().backward().get(&bias).unwrap().to_vec::<f32>();
        assert_eq!(passed, [3.0 * 525.0; 8], "{then:?}");
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
