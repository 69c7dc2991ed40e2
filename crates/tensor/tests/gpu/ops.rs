//! Every op forward and backward, over the shapes that the CPU's gradients are checked at.

use crate::rig::rig;
use phalanx_tensor::cases::{self, Check, edges};
use phalanx_tensor::{
    ChannelStats, Conv2dOptions, DType, Device, DropoutKey, Factors, Keep, PoolOptions, Running,
    SumOverBatch, Tensor, Then,
};
use std::sync::Arc;

/// One row a family of operations.
macro_rules! families {
    ($($family:ident;)*) => {$(
        #[test]
        fn $family() {
            let Some(rig) = rig(1) else { return };
            cases::$family(&rig);
        }
    )*};
}

families! {
    arithmetic_broadcasts;
    functions;
    reductions;
    views;
    products;
    convolutions;
    pooling;
    batch_norm;
    dropouts;
    attention;
    attention_of_many_positions;
    embedding_and_norm;
    a_value_used_twice_gets_both_gradients;
    softmaxes;
    losses;
}

#[test]
fn choices() {
    let Some(rig) = rig(1) else { return };
    cases::choices::choices(&rig);
}

#[test]
fn larger_sizes_take_their_own_ways() {
    let Some(rig) = rig(1) else { return };
    cases::wide::rows_of_many_numbers(&rig);
    cases::wide::norms_of_rows(&rig);
    cases::wide::images_of_many_channels(&rig);
}

#[test]
fn what_a_cpu_has_to_the_bit_a_gpu_has_so() {
    let Some(rig) = rig(1) else { return };
    for (_, alike) in edges::ALL {
        alike(&rig);
    }
}

#[test]
fn known_values() {
    let Some(rig) = rig(1) else { return };
    edges::known_values(&rig);
}

#[test]
fn nan_is_seen_not_lost() {
    let Some(rig) = rig(1) else { return };
    edges::nan_is_seen_not_lost(&rig);
}

#[test]
fn gradients_go_where_pytorchs_go_at_nan_zero_and_ties() {
    let Some(rig) = rig(1) else { return };
    edges::gradients_go_where_pytorchs_go_at_nan_zero_and_ties(&rig);
}

#[test]
fn a_bias_that_the_library_does_not_add_is_added_after_it() {
    let Some(rig) = rig(1) else { return };
    let Some(fake) = rig.fake() else { return };
    fake.cudnn().fail("cudnnBackendCreateDescriptor", 1, 3000);
    for _ in 0..2 {
        rig.check(&[&[2, 3, 5, 4], &[6, 3, 3, 3], &[6]], |x| {
            x[0].conv2d(&x[1], Some(&x[2]), Conv2dOptions::default())
        });
    }
    let added = fake.log().iter().filter(|line| *line == "launch sum_views").count();
    assert_eq!(added, 2, "once for each convolution");
}

#[test]
fn products_that_the_library_has_no_way_for_are_done_without_it() {
    let Some(rig) = rig(1) else { return };
    let Some(fake) = rig.fake() else { return };
    // CUBLAS_STATUS_NOT_SUPPORTED, of the product with its bias and of the one without.
    let refuse = || fake.cublaslt().fail("cublasLtMatmulAlgoGetHeuristic", 1, 15);
    let launched = |name: &str| fake.log().iter().filter(|line| **line == format!("launch {name}")).count();
    refuse();
    rig.check(&[&[3, 4], &[2, 4], &[2]], |x| x[0].linear(&x[1], Some(&x[2])));
    assert_eq!((launched("plain_product"), launched("sum_views")), (0, 1), "only the bias was refused");
    rig.check(&[&[3, 4], &[4, 5], &[5]], |x| x[0].linear_in_out(&x[1], Some(&x[2])));
    assert_eq!(
        (launched("sum_views"), launched("sum_columns")),
        (1, 0),
        "the bias and its gradient are the product's"
    );
    refuse();
    rig.check(&[&[3, 4], &[4, 6], &[6]], |x| x[0].linear_in_out(&x[1], Some(&x[2])));
    assert_eq!((launched("plain_product"), launched("sum_views")), (0, 2), "only the bias was refused");
    for (shapes, transposed) in [([[5, 7], [7, 3]], false), ([[7, 5], [7, 3]], true)] {
        let before = launched("plain_product");
        for _ in 0..2 {
            refuse();
            let shapes: [&[usize]; 2] = [&shapes[0], &shapes[1]];
            rig.check(&shapes, |x| if transposed { x[0].t().matmul(&x[1]) } else { x[0].matmul(&x[1]) });
        }
        assert!(launched("plain_product") > before, "{shapes:?}");
    }
    refuse();
    rig.check(&[&[2, 1, 3, 4], &[5, 4, 2]], |x| x[0].matmul(&x[1]));
}

#[test]
fn a_product_is_written_off_by_its_alignment_and_only_where_there_is_no_way() {
    let Some(rig) = rig(1) else { return };
    let Some(fake) = rig.fake() else { return };
    let added = || fake.log().iter().filter(|line| *line == "launch sum_views").count();
    let tensor = |shape: &[usize]| {
        let n = shape.iter().product::<usize>();
        Tensor::from_slice(&rig, &(0..n).map(|i| (i % 7) as f32 - 3.0).collect::<Vec<_>>(), shape)
    };
    let (x, w, bias) = (tensor(&[4, 4]), tensor(&[5, 4]), tensor(&[5]));
    let fail = |code: i32| fake.cublaslt().fail("cublasLtMatmulAlgoGetHeuristic", 1, code);
    // CUBLAS_STATUS_INTERNAL_ERROR.
    fail(14);
    let failed = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| x.linear(&w, Some(&bias))));
    let words = *failed.unwrap_err().downcast::<String>().unwrap();
    assert!(words.contains("(4, 4) x (4, 5) in F32") && words.contains("hint:"), "{words}");
    let first = x.narrow(0, 0, 3).linear(&w, Some(&bias)).to_vec::<f32>();
    assert_eq!(added(), 0, "a failure that is over");
    // CUBLAS_STATUS_INVALID_VALUE, of rows that begin 16 bytes further.
    fail(7);
    let later = x.narrow(0, 1, 3).linear(&w, Some(&bias)).to_vec::<f32>();
    assert_eq!((added(), &later[..10]), (1, &first[5..]));
    x.narrow(0, 1, 3).linear(&w, Some(&bias));
    assert_eq!(added(), 2, "and from then on");
    x.narrow(0, 0, 3).linear(&w, Some(&bias));
    assert_eq!(added(), 2, "what begins at a multiple of 256 is another matter");
}

#[test]
fn more_matrices_than_the_library_takes_go_in_pieces() {
    let Some(rig) = rig(1) else { return };
    let n = 65535 + 3;
    let of = |device: &Tensor| device.reshape([n, 1, 2]);
    let values: Vec<f32> = (0..2 * n).map(|i| (i % 11) as f32 - 5.0).collect();
    let x = Tensor::from_slice(&rig, &values, [2 * n]);
    let y = of(&x).matmul(&of(&x).transpose(1, 2)).to_vec::<f32>();
    let want: Vec<f32> = values.chunks(2).map(|pair| pair[0] * pair[0] + pair[1] * pair[1]).collect();
    assert!(y == want);
    if let Some(fake) = rig.fake() {
        assert_eq!(fake.cublaslt().calls("cublasLtMatmul"), 2);
    }
}

#[test]
fn many_terms_are_summed_in_each_of_the_ways() {
    let Some(rig) = rig(2) else { return };
    // By thread, by block, in pieces, and columns in one piece and in several.
    let rows: [(&[usize], &[usize]); 9] = [
        (&[7, 300], &[1]),
        (&[300, 7], &[0]),
        (&[70_000, 3], &[0]),
        (&[20_000], &[0]),
        (&[2, 9000], &[1]),
        (&[3, 200, 5], &[1]),
        (&[100, 4, 100], &[0, 2]),
        (&[64, 65], &[0]),
        (&[1, 500, 1, 40], &[0, 1]),
    ];
    for (shape, dims) in rows {
        rig.check(&[shape], |x| x[0].sum(dims, Keep::No));
    }
    rig.check(&[&[40, 300]], |x| x[0].t().sum(&[1], Keep::No));
    rig.check(&[&[300, 40]], |x| x[0].narrow(1, 3, 20).sum(&[0], Keep::Yes));
}

#[test]
fn long_rows_and_many_of_them_are_right() {
    let Some(rig) = rig(3) else { return };
    rig.check(&[&[5, 700]], |x| x[0].max(1, Keep::No));
    rig.check(&[&[700, 5]], |x| x[0].max(0, Keep::Yes));
    rig.check(&[&[3, 1500]], |x| x[0].softmax(1));
    rig.check(&[&[40, 130]], |x| x[0].log_softmax(0));
    rig.check(&[&[50, 300]], |x| {
        let labels: Vec<i64> = (0..50).map(|i| i * 7 % 300).collect();
        x[0].cross_entropy(&Tensor::from_slice(x[0].device(), &labels, [50]), 0.1)
    });
    rig.check(&[&[90, 120], &[90, 120]], |x| x[0].mse_loss(&x[1]));
    rig.check(&[&[600, 70], &[70], &[70]], |x| x[0].layer_norm(1, Some(&x[1]), Some(&x[2]), 1e-5));
    rig.check(&[&[6, 40, 9, 11], &[40], &[40]], |x| {
        x[0].batch_norm(Some(&x[1]), Some(&x[2]), 1e-5, Then::Nothing, None, None).out
    });
    rig.check(&[&[40, 33]], |x| {
        let ids: Vec<i64> = (0..900).map(|i| i * i % 37).collect();
        x[0].embedding(&Tensor::from_slice(x[0].device(), &ids, [30, 30]))
    });
    rig.check(&[&[2, 5, 40, 37]], |x| x[0].max_pool2d(PoolOptions::square(3)));
}

/// Few rows are a block's, many are cut into pieces, and those of a batch that others have a part of are merged on the way.
#[test]
fn a_batch_norm_of_few_rows_of_many_and_of_a_shared_batch_moves_what_is_running() {
    let Some(rig) = rig(6) else { return };
    let alone: SumOverBatch = Arc::new(|numbers| numbers);
    for (rows, shared) in [(300, None), (4400, None), (300, Some(&alone))] {
        let normed = |x: &Tensor, weight: &Tensor, bias: &Tensor| {
            let of = |value: f64| Tensor::full(x.device(), [6], value, x.dtype());
            let (mean, variance) = (of(0.5), of(1.5));
            let running = Running { mean: &mean, variance: &variance, share: 0.25 };
            let normed = x.batch_norm(Some(weight), Some(bias), 1e-5, Then::Nothing, shared, Some(running));
            (normed, mean, variance)
        };
        rig.check(&[&[rows, 6], &[6], &[6]], |x| {
            let (normed, mean, variance) = normed(&x[0], &x[1], &x[2]);
            // What is found takes part in the result, so that it is compared.
            let found = [&mean, &variance, &normed.stats.mean, &normed.stats.variance];
            found.into_iter().fold(normed.out, |out, found| &out + found)
        });
    }
}

/// What comes of it is used once, twice as where a shortcut begins, three times, by views, or where nobody wants the input's gradient.
#[test]
fn a_batch_norm_gets_the_gradients_of_all_that_use_it() {
    let Some(rig) = rig(9) else { return };
    type Use = fn(&Tensor, &[Tensor]) -> Tensor;
    // With sums that take a launch of their own: of a third gradient, of one that lies otherwise, and of a leaf's.
    let uses: [(Use, usize); 5] = [
        (|y, x| y * &x[3], 0),
        (|y, x| y * &x[3] + y * &x[4], 0),
        (|y, x| y * &x[3] + y * &x[4] + y * &x[4], 2),
        (|y, x| (y * &x[3]).sum_all() + y.sum_all() + (y * &x[4]).sum_all(), 1),
        (|y, x| (y * &x[3]).permute(&[1, 0, 2, 3]) + y.permute(&[1, 0, 2, 3]).square(), 0),
    ];
    for size in [[2, 6, 3, 5], [11, 6, 20, 21], [11, 8, 20, 21]] {
        let shapes: [&[usize]; 5] = [&size, &size[1..2], &size[1..2], &size, &size];
        for (how, _) in uses {
            rig.check(&shapes, |x| {
                let then = Then::AddRelu(&x[4]);
                how(&x[0].batch_norm(Some(&x[1]), Some(&x[2]), 1e-5, then, None, None).out, x)
            });
            rig.check(&shapes, |x| {
                let norm = x[0].detach().batch_norm(Some(&x[1]), Some(&x[2]), 1e-5, Then::Relu, None, None);
                how(&norm.out, x).square().sum_all() + (&x[0] + &x[4]).sum_all()
            });
        }
    }
    // By statistics that are given, and those of a batch that others have a part of.
    let alone: SumOverBatch = Arc::new(|numbers| numbers);
    for size in [[2, 6, 3, 5], [11, 8, 20, 21]] {
        let shapes: [&[usize]; 4] = [&size, &size[1..2], &size[1..2], &size];
        rig.check(&shapes, |x| {
            x[0].batch_norm(Some(&x[1]), Some(&x[2]), 1e-5, Then::AddRelu(&x[3]), Some(&alone), None).out
        });
        rig.check(&shapes, |x| {
            let of = |value: f64| Tensor::full(x[0].device(), [size[1]], value, x[0].dtype());
            let stats = ChannelStats { mean: of(0.25), variance: of(1.5) };
            x[0].batch_norm_with(&stats, Some(&x[1]), Some(&x[2]), 1e-5, Then::AddRelu(&x[3]))
        });
    }
    for (i, (how, sums)) in uses.into_iter().enumerate() {
        // Of a driver that has logged nothing before.
        let Some(rig) = crate::rig::rig(9) else { return };
        let Some(fake) = rig.fake() else { return };
        let launched =
            |name: &str| fake.log().iter().filter(|line| **line == format!("launch {name}")).count();
        let of = |dims: &[usize]| Tensor::ones(&rig, dims, DType::F32).requires_grad();
        let x = [of(&[2, 6, 3, 5]), of(&[6]), of(&[6]), of(&[2, 6, 3, 5]), of(&[2, 6, 3, 5])];
        let norm = x[0].batch_norm(Some(&x[1]), Some(&x[2]), 1e-5, Then::Nothing, None, None);
        let loss = how(&norm.out, &x).sum_all();
        let before = launched("add_assign");
        loss.backward();
        assert_eq!(launched("add_assign") - before, sums, "use {i}");
    }
}

#[test]
fn the_gradient_of_logits_goes_where_they_lie_if_nobody_else_has_them() {
    let Some(rig) = rig(12) else { return };
    let (rows, words) = (64, 600);
    let of = |dims: &[usize]| Tensor::ones(&rig, dims, DType::F32);
    let (x, weight) = (of(&[rows, 4]).requires_grad(), of(&[4, words]).requires_grad());
    let labels = Tensor::from_slice(&rig, &(0..rows as i64).collect::<Vec<_>>(), [rows]);
    let gradients = |is_kept: bool| {
        let scores = x.matmul(&weight);
        let (loss, kept) = (scores.cross_entropy(&labels, 0.1), is_kept.then(|| scores.detach()));
        drop(scores);
        rig.take_most_live_bytes();
        let before = rig.live_bytes();
        let grads = loss.backward();
        let more = (rig.take_most_live_bytes() - before) as f64 / (4 * rows * words) as f64;
        let same = kept.is_none_or(|kept| kept.to_vec::<f32>().iter().all(|&score| score == 4.0));
        assert!(same, "scores that somebody has were overwritten");
        (more, [&x, &weight].map(|of| grads.get(of).unwrap().to_vec::<f32>()))
    };
    let ((alone, of_alone), (beside, of_beside)) = (gradients(false), gradients(true));
    assert!(alone < 0.5 && (1.0..1.5).contains(&beside), "{alone} and {beside} times the scores");
    assert!(of_alone == of_beside && of_alone.iter().flatten().any(|&g| g != 0.0));
    // Of others that are no more needed than here, whose makers keep them, or that lie in one buffer, or are used twice.
    let labels = |x: &Tensor| Tensor::from_slice(x.device(), &[3i64, 0, 8, 5, 2, 1, 7], [7]);
    rig.check(&[&[7, 5], &[5, 9]], |x| x[0].matmul(&x[1]).cross_entropy(&labels(&x[0]), 0.0));
    rig.check(&[&[7, 5], &[5, 9]], |x| x[0].matmul(&x[1]).tanh().cross_entropy(&labels(&x[0]), 0.1));
    rig.check(&[&[14, 5], &[5, 9]], |x| {
        let scores = x[0].matmul(&x[1]);
        let [first, last] = [0, 7].map(|from| scores.narrow(0, from, 7).cross_entropy(&labels(&x[0]), 0.0));
        first + last * 2.0
    });
    rig.check(&[&[7, 5], &[5, 9]], |x| {
        let scores = x[0].matmul(&x[1]);
        let losses = [0.0, 0.2].map(|smoothing| scores.cross_entropy(&labels(&x[0]), smoothing));
        &losses[0] * &losses[1]
    });
}

#[test]
fn of_what_a_large_batch_norm_cuts_off_bits_are_kept_in_the_place_of_what_comes_out() {
    let Some(rig) = rig(11) else { return };
    let kept = |size: [usize; 4], then: fn(&Tensor) -> Then<'_>| {
        let of = |dims: &[usize]| Tensor::ones(&rig, dims, DType::F32);
        let [x, plus, weight, bias] =
            [&size[..], &size, &size[1..2], &size[1..2]].map(|dims| of(dims).requires_grad());
        let before = rig.live_bytes();
        let y = x.batch_norm(Some(&weight), Some(&bias), 1e-5, then(&plus), None, None).out;
        let loss = y.adaptive_avg_pool2d([1, 1]).square().sum_all();
        drop(y);
        let kept = (rig.live_bytes() - before) as f64 / (4 * size.iter().product::<usize>()) as f64;
        drop(loss);
        kept
    };
    // Images with channels last, as norms want them, are kept in any case; then bits, or what came out.
    for then in [|_: &Tensor| Then::Relu, |plus: &Tensor| Then::AddRelu(plus)] as [fn(&Tensor) -> Then<'_>; 2]
    {
        for (size, least, most) in
            [([11, 8, 20, 21], 1.0, 1.5), ([11, 6, 20, 21], 2.0, 2.5), ([2, 8, 32, 30], 2.0, 2.5)]
        {
            let kept = kept(size, then);
            assert!((least..most).contains(&kept), "{size:?}: {kept} images");
        }
    }
}

#[test]
fn the_gradients_of_a_batch_norm_take_no_memory_beside_those_of_what_comes_of_it() {
    for size in [[2, 8, 32, 30], [11, 8, 20, 21]] {
        let Some(rig) = rig(10) else { return };
        let of = |dims: &[usize]| Tensor::ones(&rig, dims, DType::F32);
        let [x, plus, weight, bias] = [&size[..], &size, &[8], &[8]].map(|dims| of(dims).requires_grad());
        let then = Then::AddRelu(&plus);
        let y = x.batch_norm(Some(&weight), Some(&bias), 1e-5, then, None, None).out;
        // Two small gradients become two large ones, which are all that there is.
        let loss = [0, 1].map(|_| y.adaptive_avg_pool2d([1, 1]).square().sum_all());
        let loss = &loss[0] + &loss[1];
        drop(y);
        rig.take_most_live_bytes();
        let before = rig.live_bytes();
        loss.backward();
        let image = 4 * size.iter().product::<usize>();
        let most = rig.take_most_live_bytes() - before;
        // A large gradient, its other part, and one of them once more as it is turned to channels last.
        assert!(most < 7 * image / 2, "{size:?}: {most} bytes, of {image} each");
    }
}

#[test]
fn views_of_every_kind_are_multiplied() {
    let Some(rig) = rig(4) else { return };
    rig.check(&[&[300, 40], &[35, 40], &[35]], |x| x[0].linear(&x[1], Some(&x[2])));
    rig.check(&[&[6, 5], &[7, 5]], |x| x[0].matmul(&x[1].t()));
    rig.check(&[&[6, 9], &[5, 4]], |x| x[0].narrow(1, 2, 5).matmul(&x[1]));
    rig.check(&[&[4, 5, 6], &[6, 3]], |x| x[0].permute(&[2, 0, 1]).matmul(&x[1].t().t().narrow(0, 0, 5)));
    rig.check(&[&[2, 3, 4, 5], &[2, 3, 4, 5]], |x| x[0].transpose(1, 2).matmul(&x[1].permute(&[0, 2, 3, 1])));
    rig.check(&[&[2, 1, 4, 5], &[1, 3, 5, 2]], |x| x[0].matmul(&x[1]));
    rig.check(&[&[5], &[5, 1]], |x| x[0].broadcast_to([3, 5]).matmul(&x[1]));
    rig.check(&[&[1, 5], &[5, 1]], |x| x[0].t().matmul(&x[1].t()));
}

#[test]
fn nothing_is_an_answer_too() {
    let Some(rig) = rig(5) else { return };
    rig.check(&[&[3, 0], &[0, 2]], |x| x[0].matmul(&x[1]));
    rig.check(&[&[0, 4], &[2, 4], &[2]], |x| x[0].linear(&x[1], Some(&x[2])));
    rig.check(&[&[0, 4], &[4, 2], &[2]], |x| x[0].linear_in_out(&x[1], Some(&x[2])));
    rig.check(&[&[0, 3]], |x| x[0].sum(&[0], Keep::No));
    rig.check(&[&[2, 0]], |x| x[0].softmax(0).exp());
    rig.check(&[&[0, 2, 4, 4], &[3, 2, 3, 3], &[3]], |x| {
        x[0].conv2d(&x[1], Some(&x[2]), Conv2dOptions::default())
    });
}

/// As on a CPU: nothing is normalised, and weight and bias learn nothing.
#[test]
fn a_batch_of_nothing_gives_no_gradient_but_zeros() {
    let Some(rig) = rig(7) else { return };
    for shape in [&[0, 3][..], &[2, 3, 0], &[0, 3, 2, 2]] {
        rig.check(&[shape, &[3], &[3]], |x| {
            x[0].batch_norm(Some(&x[1]), Some(&x[2]), 1e-5, Then::Nothing, None, None).out
        });
    }
}

#[test]
#[should_panic(expected = "a weight, bias, mean or variance of shape [1] for 6 channels")]
fn running_statistics_of_another_shape_are_refused_of_a_shared_batch_too() {
    let device = Device::cpu(1);
    let x = Tensor::zeros(&device, [4, 6], DType::F32);
    let [mean, variance] = [0, 1].map(|_| Tensor::zeros(&device, [1], DType::F32));
    let alone: SumOverBatch = Arc::new(|numbers| numbers);
    let running = Running { mean: &mean, variance: &variance, share: 0.5 };
    x.batch_norm(None, None, 1e-5, Then::Nothing, Some(&alone), Some(running));
}

#[test]
fn dropout_stores_no_mask() {
    let Some(rig) = rig(6) else { return };
    let Some(fake) = rig.fake() else { return };
    let key = DropoutKey::new(1, 2, 3, [10, 11, 12].into());
    let launched = |name: &str| fake.log().iter().filter(|line| **line == format!("launch {name}")).count();
    rig.check(&[&[3, 4, 5]], |x| x[0].dropout(0.5, &key));
    assert_eq!((launched("dropout"), launched("dropout_mask")), (2, 0), "forward and backward");
    // Of a view there is a mask that both have.
    rig.check(&[&[4, 3]], |x| x[0].t().dropout(0.5, &key));
    assert_eq!((launched("dropout"), launched("dropout_mask")), (2, 1));
}

#[test]
fn convolutions_that_the_library_has_no_engine_for_are_done_without_it() {
    let Some(rig) = rig(1) else { return };
    let Some(fake) = rig.fake() else { return };
    let launched = |name: &str| fake.log().iter().filter(|line| **line == format!("launch {name}")).count();
    let options = Conv2dOptions { stride: [2, 1], padding: [1, 0], ..Conv2dOptions::default() };
    let names = ["plain_convolution", "plain_convolution_images", "plain_convolution_kernels"];
    // CUDNN_STATUS_NOT_SUPPORTED, of a convolution and of each of its gradients.
    let calls = || fake.cudnn().calls("cudnnBackendCreateDescriptor");
    let check = |height: usize| {
        rig.check(&[&[2, 3, height, 4], &[5, 3, 3, 2]], |x| x[0].conv2d(&x[1], None, options));
    };
    let before = calls();
    check(5);
    // The three take as many calls each; the first of each describe it.
    let each = (calls() - before) / 3;
    for (i, call) in (0..3).flat_map(|pass| (1..=4).map(move |call| pass * each + call)).enumerate() {
        fake.cudnn().fail("cudnnBackendCreateDescriptor", call, 3000);
        // A size of its own, which isn't planned yet.
        check(6 + i);
    }
    assert!(names.iter().all(|name| launched(name) > 0), "{:?}", names.map(launched));
    // What is left out is so from then on, and nothing else is.
    let before = names.map(launched);
    check(5);
    assert_eq!(names.map(launched), before);
    (0..2).for_each(|_| check(6));
    assert_eq!(names.map(launched).iter().sum::<usize>(), before.iter().sum::<usize>() + 2);
}

/// In float32 the library would turn images around and back; else it takes them as they lie.
#[test]
fn a_convolution_of_single_pixels_is_a_product_in_float32() {
    let Some(rig) = rig(1) else { return };
    let convolve = |x: &[Tensor], options| x[0].conv2d(&x[1], x.get(2), options);
    let (plain, apart) =
        (Conv2dOptions::default(), Conv2dOptions { stride: [2, 1], ..Conv2dOptions::default() });
    rig.check(&[&[2, 6, 5, 3], &[4, 6, 1, 1], &[4]], |x| convolve(x, plain));
    rig.check(&[&[3, 2, 4, 4], &[5, 2, 1, 1]], |x| convolve(x, plain));
    // Views: of images whose channels don't run fastest, and of a part of the kernels.
    rig.check(&[&[4, 2, 3, 3], &[7, 4, 1, 1]], |x| {
        x[0].transpose(0, 1).conv2d(&x[1].narrow(0, 2, 3), None, plain)
    });
    let Some(fake) = rig.fake() else { return };
    let runs = || fake.cudnn().calls("cudnnBackendExecute");
    for (options, want) in [
        (plain, 1),
        (apart, 3),
        (Conv2dOptions { padding: [0, 1], ..plain }, 3),
        (Conv2dOptions { groups: 2, ..plain }, 3),
    ] {
        let before = runs();
        let channels = 6 / options.groups;
        rig.check(&[&[2, 6, 5, 3], &[4, channels, 1, 1], &[4]], |x| convolve(x, options));
        assert_eq!(runs() - before, want, "{options:?}: kernels' gradients, or all");
    }
    let before = runs();
    rig.set_factors(Factors::Tf32);
    let [x, w] = [[2, 6, 5, 3], [4, 6, 1, 1]].map(|shape| Tensor::ones(&rig, shape, DType::F32));
    assert_eq!(x.conv2d(&w, None, plain).to_vec::<f32>(), [6.0; 2 * 4 * 5 * 3]);
    rig.set_factors(Factors::Exact);
    assert_eq!(runs() - before, 1);
}

#[test]
fn a_convolution_that_fails_for_another_reason_ends_and_is_not_left_out() {
    let Some(rig) = rig(1) else { return };
    let Some(fake) = rig.fake() else { return };
    let x = Tensor::from_slice(&rig, &[1.0f32; 16], [1, 1, 4, 4]);
    let w = Tensor::from_slice(&rig, &[1.0f32; 4], [1, 1, 2, 2]);
    let convolve = || x.conv2d(&w, None, Conv2dOptions::default());
    // CUDNN_STATUS_EXECUTION_FAILED, and the same of a call that plans.
    for call in ["cudnnBackendExecute", "cudnnBackendFinalize"] {
        fake.cudnn().fail(call, 1, 5000);
        let failed = std::panic::catch_unwind(std::panic::AssertUnwindSafe(convolve));
        let words = *failed.unwrap_err().downcast::<String>().unwrap();
        assert!(words.contains("images [1, 1, 4, 4]") && words.contains("hint:"), "{words}");
        assert_eq!(convolve().to_vec::<f32>(), [4.0; 9]);
    }
    assert!(!fake.log().iter().any(|line| line == "launch plain_convolution"));
}
