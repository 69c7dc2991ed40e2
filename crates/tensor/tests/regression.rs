//! Faults that were found and mended, one test each.

use phalanx_tensor::{
    Arena, ChannelStats, Conv2dOptions, DType, Device, GradSink, Gradients, Grads, Keep, Layout, LeafId,
    Philox, PoolOptions, Shape, Tensor, Then, Toward, autocast, backward,
};
use std::panic::{AssertUnwindSafe, catch_unwind};

fn t(values: &[f32], shape: &[usize]) -> Tensor {
    Tensor::from_slice(&Device::cpu(1), values, shape)
}

fn zeros(device: &Device, shape: impl Into<Shape>) -> Tensor {
    Tensor::zeros(device, shape, DType::F32)
}

/// The message of the panic that `f` ends in.
#[track_caller]
fn panic_of<R>(f: impl FnOnce() -> R) -> String {
    let Err(panic) = catch_unwind(AssertUnwindSafe(f)) else { panic!("should have panicked") };
    let text = panic.downcast_ref::<&str>().map(ToString::to_string);
    panic.downcast_ref::<String>().cloned().or(text).expect("panics carry text")
}

#[test]
fn a_shape_whose_count_wraps_around_is_refused() {
    let k = 6_148_914_691_236_517_206; // times 3: 2^64 + 2
    let message = panic_of(|| t(&[1.0, 2.0], &[3, k]));
    assert!(message.contains("more elements than memory can hold"), "{message}");
    let one = t(&[1.0], &[1, 1]);
    let message = panic_of(|| one.broadcast_to([1 << 40, 1 << 40]));
    assert!(message.contains("more elements than memory can hold"), "{message}");
    let (row, column) = (one.broadcast_to([1, 1 << 40]), one.broadcast_to([1 << 40, 1]));
    let message = panic_of(|| &row + &column);
    assert!(message.contains("more elements than memory can hold"), "{message}");
}

#[test]
fn linear_without_inputs_gives_its_bias() {
    let device = Device::cpu(1);
    let (x, bias) = (zeros(&device, [5, 0]), Tensor::ones(&device, [3], DType::F32).requires_grad());
    let weight = zeros(&device, [3, 0]).requires_grad();
    // What a recycled buffer would show if nothing were written.
    drop(Tensor::full(&device, [5, 3], 9.0, DType::F32));
    assert_eq!(x.linear(&weight, None).to_vec::<f32>(), [0.0; 15]);
    let y = x.linear(&weight, Some(&bias));
    assert_eq!(y.to_vec::<f32>(), [1.0; 15]);
    let grads = y.sum_all().backward();
    assert_eq!(grads.get(&bias).unwrap().to_vec::<f32>(), [5.0; 3]);
    assert_eq!(grads.get(&weight).unwrap().dims(), [3, 0]);
}

#[test]
fn a_batch_of_products_over_nothing_is_zero() {
    let device = Device::cpu(1);
    drop(Tensor::full(&device, [30, 3, 4], 9.0, DType::F32));
    let product = zeros(&device, [30, 3, 0]).matmul(&zeros(&device, [30, 0, 4]));
    assert_eq!(product.to_vec::<f32>(), [0.0; 360]);
}

#[test]
fn empty_views_and_rows_compute_nothing() {
    let device = Device::cpu(2);
    let view = zeros(&device, [4, 16]).narrow(0, 4, 0).narrow(1, 8, 8);
    assert_eq!(view.relu().dims(), [0, 8]);
    assert_eq!((&view + &view).to_vec::<f32>(), []);
    for shape in [[3, 0], [0, 3]] {
        let x = zeros(&device, shape).requires_grad();
        let weight = Tensor::ones(&device, [shape[1]], DType::F32).requires_grad();
        let bias = zeros(&device, [shape[1]]).requires_grad();
        let grads = x.layer_norm(1, Some(&weight), Some(&bias), 1e-5).sum_all().backward();
        assert_eq!(grads.get(&weight).unwrap().to_vec::<f32>(), vec![0.0; shape[1]]);
        assert_eq!(grads.get(&x).unwrap().dims(), shape);
    }
    for shape in [[2, 3, 0], [0, 3, 2], [2, 0, 3]] {
        let x = zeros(&device, shape).requires_grad();
        let grads = x.batch_norm(None, None, 1e-5, Then::Nothing, None, None).out.sum_all().backward();
        assert_eq!(grads.get(&x).unwrap().dims(), shape);
    }
}

#[test]
fn the_largest_window_has_256_pixels() {
    let mut values = [0.0; 256];
    values[255] = 1.0;
    let x = t(&values, &[1, 1, 16, 16]).requires_grad();
    let grads = x.max_pool2d(PoolOptions::square(16)).sum_all().backward();
    assert_eq!(grads.get(&x).unwrap().to_vec::<f32>(), values);
}

#[test]
fn a_power_of_zero_has_gradient_zero_at_zero() {
    let x = t(&[0.0, 2.0], &[2]).requires_grad();
    let grads = x.powf(0.0).sum_all().backward();
    assert_eq!(grads.get(&x).unwrap().to_vec::<f32>(), [0.0; 2]);
}

#[test]
fn a_walk_that_ends_in_a_panic_leaves_nothing_in_its_leaves() {
    let x = t(&[3.0], &[1]).requires_grad();
    let spent = x.affine(1.0, 0.0);
    spent.backward();
    // The walk reaches the leaf on one way before it finds the spent node on another.
    for both in [&x.square() + &spent, &spent + &x.square()] {
        let message = panic_of(|| both.backward());
        assert!(message.contains("already walked back"), "{message}");
        assert_eq!(x.square().backward().get(&x).unwrap().item(), 6.0);
    }
    struct Full;
    impl GradSink for Full {
        fn finished(&mut self, _: LeafId, _: Tensor) {
            panic!("the sink is full");
        }
    }
    assert!(panic_of(|| backward(&[(&(&x + &x.square()), None)], &mut Full)).contains("full"));
    assert_eq!(x.square().backward().get(&x).unwrap().item(), 6.0);
}

#[test]
fn walks_of_two_threads_over_one_leaf_dont_mix() {
    let x = t(&[3.0], &[1]).requires_grad();
    let walk = |_| {
        let grads = (0..8).fold(x.clone(), |sum, _| &sum + &x.square()).backward();
        assert_eq!(grads.get(&x).unwrap().item(), 49.0);
    };
    std::thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| (0..500).for_each(walk));
        }
    });
}

#[test]
fn a_gradient_is_its_receivers_own() {
    let device = Device::cpu(1);
    let (x, y) = (zeros(&device, [2]).requires_grad(), zeros(&device, [2]).requires_grad());
    let grads = x.sum_all().backward();
    grads.get(&x).unwrap().with_slice::<f32, _>(|grad| assert_eq!(grad, [1.0; 2]));
    let seed = Tensor::ones(&device, [2], DType::F32);
    let mut grads = Gradients::default();
    backward(&[(&(&x + &y), Some(&seed))], &mut grads);
    grads.get(&x).unwrap().fill(5.0);
    assert_eq!(grads.get(&y).unwrap().to_vec::<f32>(), [1.0; 2]);
    grads.get(&y).unwrap().fill(6.0);
    assert_eq!(seed.to_vec::<f32>(), [1.0; 2]);
}

#[test]
fn the_result_of_an_operation_doesnt_become_a_leaf() {
    let x = t(&[3.0], &[1]).requires_grad();
    let message = panic_of(|| x.square().requires_grad());
    assert!(message.contains("detach() first"), "{message}");
    assert!(x.square().detach().requires_grad().needs_grad());
}

#[test]
fn a_mean_divides_once_and_truly() {
    let x = t(&[41.0; 4], &[2, 2]);
    assert_eq!((&x / 41.0).to_vec::<f32>(), [1.0; 4]);
    assert_eq!(t(&[1.0; 41], &[41]).mean_all().item(), 1.0);
    assert_eq!(t(&[1.0; 41], &[41]).mean(&[0], Keep::No).item(), 1.0);
    let message = panic_of(|| x.mean(&[0, 0], Keep::No));
    assert!(message.contains("mean: dimension 0") && message.contains("[0, 0]"), "{message}");
}

#[test]
fn uniform_numbers_stay_below_their_bound() {
    let x = Tensor::uniform(&Device::cpu(1), [1 << 10], 1e6, 1e6 + 1.0, DType::F32, Philox::new(0, 0));
    x.with_slice::<f32, _>(|x| assert!(x.iter().all(|v| (1e6..1e6 + 1.0).contains(v))));
}

#[test]
fn a_stretch_that_wraps_around_is_refused() {
    let message = panic_of(|| t(&[1.0], &[1]).narrow(0, usize::MAX, 1));
    assert!(message.contains("narrow: 1 from 18446744073709551615 on"), "{message}");
}

#[test]
fn a_long_sum_of_rows_doesnt_stick() {
    // In single precision 2^24 + 1 is 2^24: adding ones goes no further.
    let rows = (1 << 24) + 64;
    let ones = Tensor::ones(&Device::cpu(1), [1, 2], DType::F32).broadcast_to([rows, 2]);
    assert_eq!(ones.sum(&[0], Keep::No).to_vec::<f32>(), [rows as f32; 2]);
}

#[test]
fn a_saved_value_that_was_overwritten_is_told() {
    let x = t(&[3.0], &[1]).requires_grad();
    let y = x.square();
    x.fill(0.0);
    let message = panic_of(|| y.backward());
    assert!(
        message.contains("Square") && message.contains("overwritten after the forward pass"),
        "{message}"
    );
    // Written before the forward pass, or after the backward pass, it is nobody's concern.
    for value in [1.0, 2.0] {
        x.fill(value);
        assert_eq!(x.square().backward().get(&x).unwrap().item(), 2.0 * value);
    }
    // Running statistics that a layer shares between its passes.
    let device = Device::cpu(1);
    let stats = ChannelStats { mean: zeros(&device, [1]), variance: Tensor::ones(&device, [1], DType::F32) };
    let x = zeros(&device, [2, 1]).requires_grad();
    let y = x.batch_norm_with(&stats, None, None, 1e-5, Then::Nothing).sum_all();
    stats.mean.fill(1.0);
    assert!(panic_of(|| y.backward()).contains("BatchNorm"));
}

#[test]
fn a_repeated_view_is_no_target() {
    let target = t(&[1.0], &[1]).broadcast_to([3]);
    let source = Tensor::from_slice(target.device(), &[1.0f32, 2.0, 3.0], [3]);
    let message = panic_of(|| target.copy_from(&source));
    assert!(message.contains("copy_from: elements of the target of shape [3] are repeated"), "{message}");
}

#[test]
fn a_product_of_one_or_the_same_row_for_all_terms_is_one_like_others() {
    let device = Device::cpu(2);
    let at = |tensor: &Tensor, row: usize| tensor.narrow(0, row, 1).to_vec::<f32>();
    // A dense layer of one input, and its gradients.
    let x = Tensor::full(&device, [50_000, 1], 2.0, DType::F32).requires_grad();
    let w = Tensor::full(&device, [64, 1], 0.5, DType::F32).requires_grad();
    let y = x.linear(&w, None);
    assert_eq!(at(&y, 49_999), [1.0; 64]);
    let grads = y.sum_all().backward();
    assert_eq!(grads.get(&w).unwrap().to_vec::<f32>(), [100_000.0; 64]);
    assert_eq!(at(grads.get(&x).unwrap(), 7), [32.0]);
    // One output.
    let x = Tensor::full(&device, [8192, 512], 0.5, DType::F32).requires_grad();
    let w = Tensor::full(&device, [512, 1], 2.0, DType::F32).requires_grad();
    let grads = x.matmul(&w).sum_all().backward();
    assert_eq!(at(grads.get(&x).unwrap(), 8191), [2.0; 512]);
    // Each by each.
    let v = Tensor::full(&device, [2048, 1], 3.0, DType::F32);
    assert_eq!(at(&v.matmul(&v.t()), 2047), [9.0; 2048]);
    // A gradient that is the same in all rows.
    let x = Tensor::full(&device, [64, 256], 0.5, DType::F32);
    let w = Tensor::full(&device, [256, 256], 1.0, DType::F32).requires_grad();
    let grads = x.matmul(&w).sum(&[0], Keep::No).sum_all().backward();
    assert_eq!(at(grads.get(&w).unwrap(), 255), [32.0; 256]);
}

#[test]
fn the_logarithm_of_a_softmax_holds_beside_large_logits() {
    let x = t(&[1e8, 1e8], &[1, 2]).requires_grad();
    let half = -2.0f32.ln();
    assert_eq!(x.log_softmax(1).to_vec::<f32>(), [half; 2]);
    let labels = Tensor::from_slice(x.device(), &[1i64], [1]);
    let loss = x.cross_entropy(&labels, 0.0);
    assert_eq!(loss.item() as f32, -half);
    assert_eq!(loss.backward().get(&x).unwrap().to_vec::<f32>(), [0.5, -0.5]);
}

#[test]
fn a_batch_norm_reads_views_by_their_channels() {
    let device = Device::cpu(1);
    let uniform = |shape: &[usize]| {
        Tensor::uniform(&device, Shape::new(shape), 0.0, 1.0, DType::F32, Philox::new(3, 0))
    };
    // (C, N, 1, 1) and (H, W, C, N), as views of (N, C, H, W).
    for x in [uniform(&[3, 5, 1, 1]).transpose(0, 1), uniform(&[4, 2, 3, 5]).permute(&[3, 2, 0, 1])] {
        let norm = |x: &Tensor| x.batch_norm(None, None, 1e-5, Then::Nothing, None, None).out.to_vec::<f32>();
        assert_eq!(norm(&x), norm(&x.contiguous()), "{}", x.shape());
    }
}

#[test]
fn means_over_windows_are_made_in_the_type_of_their_images() {
    let x = t(&[1.0; 13 * 13], &[1, 1, 13, 13]);
    let means = autocast(DType::BF16, || x.adaptive_avg_pool2d([6, 6]));
    assert_eq!(means.dtype(), DType::F32);
    assert!(
        means.to_vec::<f32>().iter().all(|mean| (mean - 1.0).abs() < 1e-6),
        "{:?}",
        means.to_vec::<f32>()
    );
}

#[test]
fn a_sum_has_the_same_bits_on_any_number_of_threads() {
    let orders = [[0, 1, 2], [0, 2, 1], [1, 0, 2], [1, 2, 0], [2, 0, 1], [2, 1, 0]];
    let dims: [&[usize]; 6] = [&[0], &[1], &[2], &[0, 1], &[0, 2], &[1, 2]];
    let sums = |sizes: [usize; 3], threads: usize| -> Vec<Vec<f32>> {
        let y = Tensor::uniform(&Device::cpu(threads), sizes, 0.0, 1.0, DType::F32, Philox::new(5, 0));
        let of = |order: &[usize; 3]| dims.map(|dims| y.permute(order).sum(dims, Keep::No).to_vec::<f32>());
        orders.iter().flat_map(of).collect()
    };
    // Of few elements a sum and of many, with sizes of which one is left where threads share them.
    for sizes in [[5, 33, 201], [3, 2, 5500], [65, 600, 1]] {
        let of_one = sums(sizes, 1);
        for threads in [2, 3, 4, 5, 8] {
            assert!(sums(sizes, threads) == of_one, "{sizes:?}, {threads} threads");
        }
    }
}

#[test]
fn buffers_of_one_length_serve_nearly_as_long_tensors() {
    let device = Device::cpu(1);
    // Upwards none of those before is long enough.
    for rows in (512..1024).chain((512..1024).rev()).map(|rows| rows * 4) {
        drop(zeros(&device, [rows, 1024]));
    }
    let (held, longest) = (device.held_bytes(), 4 * 1024 * 1024 * 4);
    assert!(held <= 4 * longest, "{held} bytes are held for one tensor at a time");
    // What is used again and again is kept, whatever lies between.
    let both = || {
        for rows in [2048, 4096] {
            drop(zeros(&device, [rows, 1024]));
        }
    };
    (0..3).for_each(|_| both());
    let kept = device.held_bytes();
    (0..10).for_each(|_| both());
    assert_eq!(device.held_bytes(), kept);
}

#[test]
fn a_parameter_has_one_leaf() {
    let (device, layout) = (Device::cpu(1), Layout::new(&[[2, 2].into()]));
    let values = Arena::new(&device, DType::F32, &layout);
    let grads = Grads::new(&device, DType::F32, &layout);
    values.tensor(0).with_slice_mut(|values: &mut [f32]| values.copy_from_slice(&[1.0, 2.0, 3.0, 4.0]));
    let (a, b) = (grads.leaf(0, &values), grads.leaf(0, &values));
    assert!(a.leaf_id() == b.leaf_id());
    a.linear(&b, None).sum_all().backward();
    // The sum over i and j of sum_k x_ik x_jk: twice the sum of each column.
    assert_eq!(grads.arena().tensor(0).to_vec::<f32>(), [8.0, 12.0, 8.0, 12.0]);
    // Of other values it is another.
    let others = Arena::new(&device, DType::F32, &layout);
    others.tensor(0).fill(1.0);
    grads.zero();
    let other = grads.leaf(0, &others);
    assert!(other.leaf_id() != a.leaf_id());
    a.linear(&other, None).sum_all().backward();
    assert_eq!(grads.arena().tensor(0).to_vec::<f32>(), [6.0, 8.0, 6.0, 8.0]);
}

#[test]
fn a_cast_is_a_copy() {
    let (device, layout) = (Device::cpu(1), Layout::new(&[[2].into()]));
    let values = Arena::new(&device, DType::F32, &layout);
    let leaf = Grads::new(&device, DType::F32, &layout).leaf(0, &values);
    let half = leaf.cast(DType::BF16);
    values.tensor(0).fill(3.0);
    let again = leaf.cast(DType::BF16);
    half.fill(9.0);
    assert_eq!(again.cast(DType::F32).to_vec::<f32>(), [3.0; 2]);
    let ones = Tensor::ones(&device, [2, 1], DType::F32);
    let product = autocast(DType::BF16, || leaf.reshape([1, 2]).matmul(&ones));
    assert_eq!(product.cast(DType::F32).to_vec::<f32>(), [6.0]);
}

#[test]
fn what_is_no_number_stays_where_it_is() {
    let (infinite, nan) = (f32::INFINITY, f32::NAN);
    let x = t(&[infinite, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0], &[1, 1, 2, 4]);
    assert_eq!(x.adaptive_avg_pool2d([2, 2]).to_vec::<f32>(), [infinite, 1.0, 1.0, 1.0]);
    assert_eq!(x.adaptive_avg_pool2d([1, 3]).to_vec::<f32>(), [infinite, 1.0, 1.0]);
    let device = Device::cpu(1);
    let two = |values: [f32; 2]| Tensor::from_slice(&device, &values, [2]);
    let (x, y) = (two([1.0, 3.0]).requires_grad(), two([2.0, 2.0]).requires_grad());
    let mut grads = Gradients::default();
    backward(&[(&x.maximum(&y), Some(&two([nan, infinite])))], &mut grads);
    assert_eq!(grads.get(&x).unwrap().to_vec::<f32>(), [0.0, infinite]);
    assert!(grads.get(&y).unwrap().to_vec::<f32>()[0].is_nan());
    assert_eq!(grads.get(&y).unwrap().to_vec::<f32>()[1], 0.0);
    assert!((t(&[-0.0], &[1]) * 1.0).item().is_sign_negative());
}

#[test]
fn sizes_that_wrap_around_are_refused() {
    let image = t(&[1.0; 16], &[1, 1, 4, 4]);
    let kernel = Tensor::ones(image.device(), [1, 1, 3, 3], DType::F32);
    let huge = 1 << 63;
    let options = Conv2dOptions::default();
    for options in [
        Conv2dOptions { dilation: [huge, 1], ..options },
        Conv2dOptions { dilation: [usize::MAX, 1], ..options },
        Conv2dOptions { padding: [huge, huge], ..options },
        Conv2dOptions { padding: [usize::MAX, 0], ..options },
    ] {
        let message = panic_of(|| image.conv2d(&kernel, None, options));
        assert!(message.contains("don't fit into images of shape [1, 1, 4, 4]"), "{message}");
    }
    let windows = PoolOptions { kernel: [1 << 32; 2], stride: [1, 1], padding: [1 << 31; 2] };
    let message = panic_of(|| image.max_pool2d(windows));
    assert!(message.contains("more than 256 pixels"), "{message}");
}

#[test]
fn memory_that_is_not_there_is_a_panic() {
    // 360 TB, which no process has addresses for.
    let message = panic_of(|| t(&[1.0], &[1, 1]).broadcast_to([300_000, 300_000_000]).contiguous());
    assert!(message.contains("out of memory: a tensor needs") && message.contains("bytes more"), "{message}");
}

#[test]
fn a_pass_within_a_pass_is_refused() {
    struct Again;
    impl GradSink for Again {
        fn finished(&mut self, _: LeafId, grad: Tensor) {
            grad.detach().requires_grad().square().sum_all().backward();
        }
    }
    let x = t(&[3.0], &[1]).requires_grad();
    let message = panic_of(|| backward(&[(&x.square(), None)], &mut Again));
    assert!(message.contains("in the midst of another backward pass"), "{message}");
    assert_eq!(x.square().backward().get(&x).unwrap().item(), 6.0);
}

#[test]
fn a_transposed_tensor_can_be_filled() {
    let x = t(&[1.0; 6], &[2, 3]);
    x.t().fill(2.0);
    x.narrow(1, 1, 1).fill(5.0);
    assert_eq!(x.to_vec::<f32>(), [2.0, 5.0, 2.0, 2.0, 5.0, 2.0]);
}

#[test]
fn deviations_of_16_bits_are_finite_and_those_of_equal_numbers_hand_nothing_back() {
    let numbers: Vec<f32> = (0..1000).map(|i| if i % 2 == 0 { 900.0 } else { -900.0 }).collect();
    let x = t(&numbers, &[1000]);
    for dtype in [DType::F16, DType::BF16] {
        let std = x.cast(dtype).std(&[0], Keep::No, 0);
        assert_eq!((std.dtype(), std.item()), (dtype, 900.0), "{dtype}");
    }
    let equal = t(&[1.0; 3], &[3]).requires_grad();
    let grads = equal.std(&[0], Keep::No, 1).backward();
    assert_eq!(grads.get(&equal).unwrap().to_vec::<f32>(), [0.0; 3]);
}

#[test]
fn the_sine_of_an_angle_does_not_depend_on_those_beside_it() {
    let angles: Vec<f32> = (0..3000).map(|i| (i as f32 - 1500.0) * 0.17).collect();
    let (near, far) = (t(&angles, &[3000]), t(&[&angles[..], &[2e9]].concat(), &[3001]));
    for f in [Tensor::sin, Tensor::cos] {
        let of = |x: &Tensor| {
            let x = x.detach().requires_grad();
            let y = f(&x);
            let grads = y.sum_all().backward();
            [y.to_vec::<f32>(), grads.get(&x).unwrap().to_vec::<f32>()]
        };
        let ([y, grad], [far_y, far_grad]) = (of(&near), of(&far));
        assert!(y == far_y[..3000] && grad == far_grad[..3000]);
    }
    assert_eq!(far.sin().to_vec::<f32>()[3000], 2e9f32.sin());
}

#[test]
fn states_and_weights_of_several_types_go_together_in_recurrent_layers() {
    let device = Device::cpu(1);
    let of = |shape: &[usize], dtype| {
        Tensor::uniform(&device, shape, -1.0, 1.0, DType::F32, Philox::new(1, shape.len() as u64)).cast(dtype)
    };
    let (single, half) = (DType::F32, DType::BF16);
    let of_lstm =
        |x, w, s| of(&[2, 1, 8], x).lstm(&of(&[8, 2], w), [&of(&[1, 2], s), &of(&[1, 2], s)], Toward::End);
    for (x, w, s, want) in
        [(half, half, half, half), (single, single, half, single), (half, single, single, single)]
    {
        let [hidden, cell] = of_lstm(x, w, s);
        assert_eq!([hidden.dtype(), cell.dtype()], [want; 2]);
        let states = of(&[2, 1, 6], x).gru(&of(&[6, 2], w), Some(&of(&[6], s)), &of(&[1, 2], s), Toward::End);
        assert_eq!(states.dtype(), want);
    }
}

#[test]
fn nothing_is_one_stretch_and_has_the_logarithm_of_no_sum() {
    let nothing = t(&[], &[2, 0]);
    let parts = nothing.split(3, 1);
    assert_eq!(Tensor::cat(&parts.iter().collect::<Vec<_>>(), 1).dims(), [2, 0]);
    assert_eq!(nothing.logsumexp(1, Keep::No).to_vec::<f32>(), [f32::NEG_INFINITY; 2]);
    let message = panic_of(|| nothing.pad(1, [usize::MAX, 1], 0.0));
    assert!(message.contains("pad: "), "{message}");
    let message = panic_of(|| Tensor::arange(nothing.device(), 0..3).pad(0, [1, 1], 0.5));
    assert!(message.contains("a whole number of 64 bits would do"), "{message}");
}
