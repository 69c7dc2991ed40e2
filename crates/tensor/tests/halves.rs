//! Every operation on floats of 16 bits, forward and backward, against float64 from the same numbers; and what regions cast.

use phalanx_tensor::cases::beside::{beside, tolerance};
use phalanx_tensor::cases::{self, Check};
use phalanx_tensor::{
    Conv2dOptions, DType, Device, Keep, Philox, PoolOptions, Tensor, Then, autocast, autocast_dtype, no_grad,
    without_cheap,
};
use std::cell::Cell;

const HALVES: [DType; 2] = [DType::BF16, DType::F16];

/// Holds a CPU's results in a type beside those in float64, and keeps how many cases there were.
struct Halves {
    device: Device,
    dtype: DType,
    cases: Cell<usize>,
}

impl Check for Halves {
    #[track_caller]
    fn check_at(&self, shift: f64, shapes: &[&[usize]], f: &dyn Fn(&[Tensor]) -> Tensor) {
        self.cases.set(self.cases.get() + 1);
        for apart in beside(&self.device, self.dtype, shift, shapes, f) {
            assert!(apart.by <= tolerance(self.dtype), "{}: {apart:?}, shapes {shapes:?}", self.dtype);
        }
    }
}

#[test]
fn every_operation_rounds_what_it_computes_in_float32() {
    for dtype in HALVES {
        for (name, family) in cases::families::<Halves>() {
            let halves = Halves { device: Device::cpu(1), dtype, cases: Cell::new(0) };
            family(&halves);
            assert!(halves.cases.get() > 0, "{name}");
        }
    }
}

fn single(device: &Device, values: &[f32], shape: &[usize]) -> Tensor {
    Tensor::from_slice(device, values, shape)
}

#[test]
fn casts_round_once_and_give_gradients_back_in_the_type_they_came_from() {
    let device = Device::cpu(1);
    let x = single(&device, &[1.0 + 2f32.powi(-8), -3.0, 70000.0, f32::NAN], &[2, 2]).requires_grad();
    for (dtype, want) in HALVES.into_iter().zip([[1.0, -3.0, 70144.0], [1.003_906_2, -3.0, f32::INFINITY]]) {
        let y = x.cast(dtype);
        assert_eq!(y.dtype(), dtype);
        let back = y.cast(DType::F32);
        let values = back.to_vec::<f32>();
        assert_eq!(values[..3], want);
        assert!(values[3].is_nan());
        let grads = (back * 3.0).sum_all().backward();
        let grad = grads.get(&x).unwrap();
        assert_eq!((grad.dtype(), grad.to_vec::<f32>()), (DType::F32, vec![3.0; 4]));
    }
    // A view is cast as it is seen.
    let view = x.narrow(1, 1, 1).t().cast(DType::BF16);
    assert_eq!(view.cast(DType::F32).to_vec::<f32>()[0], -3.0);
    assert_eq!(view.dims(), [1, 2]);
    assert!(x.cast(DType::F32).leaf_id() == x.leaf_id(), "a cast to its own type is nothing");
}

#[test]
fn random_numbers_are_those_of_float32_rounded() {
    let device = Device::cpu(1);
    for half in [DType::BF16, DType::F16] {
        let of = |dtype| {
            let normal = Tensor::normal(&device, [50], 1.0, 2.0, dtype, Philox::new(1, 2));
            let uniform = Tensor::uniform(&device, [50], -1.0, 1.0, dtype, Philox::new(1, 2));
            [normal, uniform].map(|x| x.cast(half).cast(DType::F32).to_vec::<f32>())
        };
        assert_eq!(of(half), of(DType::F32), "{half}");
    }
}

#[test]
#[should_panic(expected = "cast: from u8 to bf16")]
fn bytes_are_not_cast() {
    Tensor::from_slice(&Device::cpu(1), &[1u8], [1]).cast(DType::BF16);
}

/// Which type each operation gives for f32, and for the region's own type, as PyTorch's autocast does on a GPU.
#[test]
fn regions_cast_as_pytorchs_do() {
    type Operation = (&'static str, fn(&Tensor, &Tensor) -> Tensor, bool);
    let low: [Operation; 9] = [
        ("matmul", |x, w| x.matmul(w), true),
        ("linear", |x, w| x.linear(w, None), true),
        ("linear with bias", |x, w| x.linear(w, Some(&w.narrow(0, 0, 1).reshape([2]))), true),
        ("linear_in_out", |x, w| x.linear_in_out(w, None), true),
        (
            "feed_forward_in_out",
            |x, w| x.feed_forward_in_out((w, &w.narrow(0, 0, 1).reshape([2])), (w, None)),
            true,
        ),
        (
            "conv2d",
            |x, w| x.reshape([1, 1, 2, 2]).conv2d(&w.reshape([1, 1, 2, 2]), None, Conv2dOptions::default()),
            true,
        ),
        ("attention", |x, w| Tensor::cat(&[x, w, x], 1).reshape([1, 2, 6]).causal_attention(2, None), true),
        (
            "attention with a mask",
            |x, w| Tensor::cat(&[x, w, x], 1).reshape([1, 2, 6]).self_attention(2, Some(&x.gt(0.0)), None),
            true,
        ),
        (
            "attention of three",
            |x, w| {
                let [x, w] = [x, w].map(|x| x.reshape([1, 2, 2, 1]));
                x.transpose(1, 2).attention(&w, &x, None, None)
            },
            true,
        ),
    ];
    let single: [Operation; 12] = [
        ("softmax", |x, _| x.softmax(1), false),
        ("log_softmax", |x, _| x.log_softmax(1), false),
        ("exp", |x, _| x.exp(), false),
        ("ln", |x, _| x.ln(), false),
        ("powf", |x, _| x.powf(2.0), false),
        ("square", |x, _| x.square(), false),
        ("sum", |x, _| x.sum(&[1], Keep::No), false),
        ("layer_norm", |x, _| x.layer_norm(1, None, None, 1e-5), false),
        ("nll_loss", |x, _| x.nll_loss(&Tensor::from_slice(x.device(), &[0i64, 1], [2])), false),
        (
            "cross_entropy",
            |x, _| x.cross_entropy(&Tensor::from_slice(x.device(), &[0i64, 1], [2]), 0.0),
            false,
        ),
        ("mse_loss", |x, w| x.mse_loss(w), false),
        ("bce_with_logits", |x, w| x.bce_with_logits(w), false),
    ];
    type Unary = (&'static str, fn(&Tensor) -> Tensor);
    let kept: [Unary; 9] = [
        ("relu", |x| x.relu()),
        ("gelu", |x| x.gelu()),
        ("add", |x| x + x),
        ("mul", |x| x * x),
        ("mean", |x| x.mean(&[0], Keep::No)),
        ("max", |x| x.max(1, Keep::No)),
        ("cat", |x| Tensor::cat(&[x, x], 0)),
        ("max_pool2d", |x| x.reshape([1, 1, 2, 2]).max_pool2d(PoolOptions::square(2))),
        ("batch_norm", |x| x.batch_norm(None, None, 1e-5, Then::Relu, None, None).out),
    ];
    let device = Device::cpu(1);
    for region in HALVES {
        let given = [DType::F32, region].map(|dtype| {
            let of = |values: &[f32]| self::single(&device, values, &[2, 2]).cast(dtype);
            (of(&[0.5, 1.0, 0.25, 2.0]), of(&[1.0, 0.5, 0.75, 0.25]))
        });
        for (x, w) in &given {
            for (name, f, is_low) in low.iter().chain(&single) {
                let want = if *is_low { region } else { DType::F32 };
                assert_eq!(autocast(region, || f(x, w)).dtype(), want, "{name} of {} in {region}", x.dtype());
                assert_eq!(f(x, w).dtype(), x.dtype(), "{name} outside");
            }
            for (name, f) in kept {
                assert_eq!(autocast(region, || f(x)).dtype(), x.dtype(), "{name} in {region}");
            }
        }
        let [(single, _), (half, _)] = &given;
        assert_eq!((single + half).dtype(), DType::F32, "two types meet in f32, also outside");
    }
}

#[test]
fn a_backward_pass_has_the_types_of_its_forward_pass_wherever_it_is_made() {
    let device = Device::cpu(1);
    let x = single(&device, &[0.1, 0.2, 0.3, 0.4, 0.5, 0.6], &[3, 2]);
    let grad = |forward: DType, walk: DType| {
        let w = single(&device, &[0.3, -0.7, 0.9, 0.2], &[2, 2]).requires_grad();
        let loss = autocast(forward, || x.linear(&w, None).tanh().matmul(&w).square().mean_all());
        let grads = autocast(walk, || loss.backward());
        grads.get(&w).unwrap().to_vec::<f32>()
    };
    assert_eq!(grad(DType::F32, DType::BF16), grad(DType::F32, DType::F32));
    assert_eq!(grad(DType::BF16, DType::F16), grad(DType::BF16, DType::F32));
    assert_ne!(grad(DType::BF16, DType::F32), grad(DType::F32, DType::F32));
}

#[test]
fn what_is_computed_again_is_computed_in_its_region() {
    let device = Device::cpu(1);
    let x = single(&device, &[0.1, 0.2, 0.3, 0.4], &[2, 2]);
    let w = single(&device, &[0.3, -0.7, 0.9, 0.2], &[2, 2]).requires_grad();
    let (first, again) = (w.clone(), w.clone());
    let plain = autocast(DType::BF16, || x.linear(&w, None).tanh().linear(&w, None).sum_all()).backward();
    let parts = autocast(DType::BF16, || {
        let part = move |x: &Tensor| x.linear(&first, None).tanh();
        let part_again = move |x: &Tensor| x.linear(&again, None).tanh();
        x.recomputed(part, part_again).linear(&w, None).sum_all()
    });
    let parts = parts.backward();
    assert_eq!(parts.get(&w).unwrap().to_vec::<f32>(), plain.get(&w).unwrap().to_vec::<f32>());
}

#[test]
fn a_region_ends_with_its_function_also_by_a_panic() {
    let device = Device::cpu(1);
    let x = single(&device, &[1.0; 4], &[2, 2]);
    let seen = autocast(DType::F16, || {
        let inner = autocast(DType::F32, || (autocast_dtype(), no_grad(|| x.matmul(&x)).dtype()));
        (inner, autocast_dtype())
    });
    assert_eq!(seen, ((DType::F32, DType::F32), DType::F16));
    let panicked = std::panic::catch_unwind(|| autocast(DType::BF16, || panic!("on purpose")));
    assert!(panicked.is_err());
    assert_eq!((autocast_dtype(), x.matmul(&x).dtype()), (DType::F32, DType::F32));
}

#[test]
fn a_mean_is_right_where_the_sum_is_too_large_for_the_type() {
    let device = Device::cpu(1);
    let x = Tensor::full(&device, [2, 64], 60000.0, DType::F16);
    assert_eq!(x.mean(&[1], Keep::No).cast(DType::F32).to_vec::<f32>(), [60000.0; 2]);
    assert_eq!(x.mean_all().item(), 60000.0);
    assert!(x.sum_all().item().is_infinite());
    assert_eq!(autocast(DType::F16, || x.sum_all()).item(), 128.0 * 60000.0);
}

/// What a GPU joins has the bits of its parts here, forward and backward, also under a pass that makes cheap things again.
#[test]
fn what_is_rounded_as_it_is_made_is_what_is_made_and_then_rounded() {
    let device = Device::cpu(1);
    let of = |shape: &[usize], stream| {
        Tensor::uniform(&device, shape, -1.0, 2.0, DType::F32, Philox::new(5, stream)).requires_grad()
    };
    let (x, weight, bias, w) = (of(&[6, 20], 1), of(&[20], 2), of(&[20], 3), of(&[20, 20], 4));
    for dtype in HALVES {
        let bits = |norm: &dyn Fn() -> Tensor, sum: &dyn Fn(&Tensor, &Tensor) -> Tensor| {
            let branch = autocast(dtype, || norm().linear_in_out(&w, None));
            assert_eq!(branch.dtype(), dtype);
            let y = sum(&x, &branch);
            assert_eq!(y.dtype(), DType::F32);
            let grads = (&y * &y).sum_all().backward();
            let grads = [&x, &weight, &bias, &w].map(|leaf| grads.get(leaf).unwrap().to_vec::<f32>());
            (y.detach().to_vec::<f32>(), grads)
        };
        let apart = || x.layer_norm(1, Some(&weight), Some(&bias), 1e-5).cast(dtype);
        let joined = || x.layer_norm_in(dtype, 1, Some(&weight), Some(&bias), 1e-5);
        assert_eq!((joined().dtype(), joined().detach().dims()), (dtype, &[6, 20][..]));
        let want = bits(&apart, &|x, branch| x + branch.cast(DType::F32));
        assert!(bits(&joined, &|x, branch| x + branch) == want, "{dtype}");
        assert!(bits(&joined, &|x, branch| branch + x) == want, "{dtype}, the other way round");
        let again = without_cheap(|| bits(&joined, &|x, branch| x + branch));
        assert!(again == want, "{dtype}, made again for the weight's gradient");
    }
    // From and to other types.
    let half = x.cast(DType::BF16);
    assert_eq!(half.layer_norm_in(DType::F16, 1, None, None, 1e-5).dtype(), DType::F16);
    assert_eq!(half.layer_norm_in(DType::F32, 1, None, None, 1e-5).dtype(), DType::F32);
}
