//! Floats of 16 bits on a GPU, and factors that are rounded to 19.

use crate::rig::rig;
use phalanx_tensor::cases::beside::{beside, tolerance};
use phalanx_tensor::cases::{self, Check};
use phalanx_tensor::{
    Arena, Conv2dOptions, DType, Device, Factors, GradSink, Gradients, Grads, Keep, Layout, LeafId, Philox,
    Tensor, autocast, backward,
};

/// Holds a GPU's results in a type beside a CPU's in float64.
struct Halves<'a> {
    device: &'a Device,
    dtype: DType,
}

impl Check for Halves<'_> {
    #[track_caller]
    fn check_at(&self, shift: f64, shapes: &[&[usize]], f: &dyn Fn(&[Tensor]) -> Tensor) {
        for apart in beside(self.device, self.dtype, shift, shapes, f) {
            assert!(apart.by <= tolerance(self.dtype), "{}: {apart:?}, shapes {shapes:?}", self.dtype);
        }
    }
}

#[test]
fn every_operation_is_the_cpus_in_bf16() {
    let Some(rig) = rig(1) else { return };
    cases::families().iter().for_each(|(_, family)| family(&Halves { device: &rig, dtype: DType::BF16 }));
}

#[test]
fn every_operation_is_the_cpus_in_f16() {
    let Some(rig) = rig(2) else { return };
    cases::families().iter().for_each(|(_, family)| family(&Halves { device: &rig, dtype: DType::F16 }));
}

/// Conversions between all pairs, of values that round either way, are too large, or no number.
#[test]
fn casts_are_the_cpus_to_the_bit() {
    let Some(rig) = rig(3) else { return };
    let mut values: Vec<f32> = (0..1000).map(|i| 1.0 + i as f32 / 4096.0).collect();
    values.extend([65519.9, 65520.0, 3.4e38, -1e-8, 6e-8, -0.0, f32::INFINITY, f32::NAN]);
    let types = [DType::F32, DType::F64, DType::BF16, DType::F16];
    for (from, to) in types.iter().flat_map(|from| types.map(|to| (*from, to))) {
        let on = |device: &Device| {
            let x = Tensor::from_slice(device, &values, [2, values.len() / 2]).cast(from);
            let bits = |x: Tensor| x.cast(DType::F32).to_vec::<f32>().into_iter().map(f32::to_bits).collect();
            let seen: [Vec<u32>; 2] = [bits(x.cast(to)), bits(x.t().cast(to))];
            seen
        };
        assert!(on(&rig) == on(&Device::cpu(1)), "{from} to {to}");
    }
}

#[test]
fn factors_are_rounded_where_that_is_allowed_forward_and_backward() {
    let Some(rig) = rig(4) else { return };
    // In the first 10 bits of fraction there is no difference.
    let fine = 1.0 + 2f32.powi(-12);
    let of = |values: &[f32], shape: &[usize]| Tensor::from_slice(&rig, values, shape).requires_grad();
    let product = || {
        let (x, w) = (of(&[fine, fine], &[1, 2]), of(&[1.0, fine], &[1, 2]));
        let y = x.linear(&w, None);
        let grads = y.sum_all().backward();
        (y.item(), grads.get(&w).unwrap().to_vec::<f32>())
    };
    let convolution = || {
        let x = of(&[fine], &[1, 1, 1, 1]);
        x.conv2d(&of(&[1.0], &[1, 1, 1, 1]), None, Conv2dOptions::default()).item()
    };
    let exact = f64::from(fine);
    assert!(product().0 > 2.0 && convolution() == exact);
    rig.set_factors(Factors::Tf32);
    assert_eq!(product(), (2.0, vec![1.0; 2]));
    assert_eq!(convolution(), 1.0);
    // What is 16 bits anyway is not concerned.
    let low = autocast(DType::BF16, || of(&[fine], &[1, 1]).matmul(&of(&[3.0], &[1, 1])));
    assert_eq!((low.dtype(), low.item()), (DType::BF16, 3.0));
    rig.set_factors(Factors::Exact);
    assert!(product().1.iter().all(|&grad| grad == fine) && convolution() == exact);
}

/// Forward, and both ways back, in turn: refused once, it isn't asked for again.
#[test]
fn a_convolution_that_the_library_does_not_do_in_16_bits_is_done_in_32() {
    let Some(rig) = rig(6) else { return };
    let Some(fake) = rig.fake() else { return };
    let halves = Halves { device: &rig, dtype: DType::BF16 };
    let check = |size: usize| {
        halves.check(&[&[2, 3, size, 4], &[6, 3, 3, 3]], |x| {
            x[0].conv2d(&x[1], None, Conv2dOptions::default())
        });
    };
    let widened = |size| {
        let count = || fake.log().iter().filter(|line| *line == "launch from_bf16").count();
        let before = count();
        check(size);
        count() - before
    };
    let as_ever = widened(5);
    // Each size is a convolution of its own in each of the passes, whose descriptions are as long.
    let described = || fake.cudnn().calls("cudnnBackendCreateDescriptor");
    let before = described();
    check(6);
    let descriptors = (described() - before) / 3;
    for pass in 0..3 {
        let size = 7 + pass as usize;
        fake.cudnn().fail("cudnnBackendCreateDescriptor", 1 + pass * descriptors, 3000);
        assert_eq!([widened(size), widened(size)], [as_ever + 2; 2], "pass {pass}");
    }
}

#[test]
fn doubles_are_refused_by_name() {
    let Some(rig) = rig(5) else { return };
    let x = Tensor::zeros(&rig, [2], DType::F64);
    let refused = std::panic::catch_unwind(|| &x + &x).unwrap_err();
    let words = refused.downcast_ref::<String>().unwrap();
    assert!(words.contains("tensors of f64 aren't computed with on a GPU"), "{words}");
}

#[test]
fn cross_entropy_reads_logits_of_16_bits_where_they_lie() {
    let Some(rig) = rig(7) else { return };
    let on = |device: &Device| {
        let values: Vec<f32> = (0..5 * 300).map(|i| (i * 7919 % 1000) as f32 / 100.0 - 5.0).collect();
        let labels = Tensor::from_slice(device, &[3i64, 299, 0, 7, 150], [5]);
        let x = Tensor::from_slice(device, &values, [5, 300]).cast(DType::BF16).requires_grad();
        let loss = autocast(DType::BF16, || x.cross_entropy(&labels, 0.1));
        let grads = loss.backward();
        let grad = grads.get(&x).unwrap();
        assert_eq!((loss.dtype(), grad.dtype()), (DType::F32, DType::BF16));
        (loss, grad.clone())
    };
    let casts = || Some(rig.fake()?.log().iter().filter(|line| line.starts_with("launch from_")).count());
    let (loss, grad) = on(&rig);
    // The values' own, as the test brings them.
    if let Some(casts) = casts() {
        assert_eq!(casts, 1);
    }
    let (want, want_grad) = on(&Device::cpu(1));
    assert!((loss.item() - want.item()).abs() <= 1e-6 * want.item(), "{}, not {}", loss.item(), want.item());
    let wide = |x: Tensor| x.cast(DType::F32).to_vec::<f32>();
    for (got, want) in wide(grad).into_iter().zip(wide(want_grad)) {
        // A last place of bf16, where the two roundings of float32 before it differ.
        assert!((got - want).abs() <= want.abs() / 128.0, "{got}, not {want}");
    }
}

/// A residual branch as a decoder's block has it: the stream stays in f32, normalised rows and what is added to it are in 16 bits.
#[test]
fn a_branch_in_16_bits_of_a_stream_in_f32_is_the_cpus() {
    let Some(rig) = rig(5) else { return };
    for (dtype, [rows, width]) in [(DType::BF16, [70, 64]), (DType::F16, [3, 24]), (DType::BF16, [5, 33])] {
        let on = |device: &Device| {
            let of = |shape: &[usize], stream| {
                let key = Philox::new(9, stream);
                Tensor::uniform(device, shape, -1.0, 2.0, DType::F32, key).requires_grad()
            };
            let (x, weight, bias, w) =
                (of(&[rows, width], 1), of(&[width], 2), of(&[width], 3), of(&[width; 2], 4));
            let branch = autocast(dtype, || {
                x.layer_norm_in(dtype, 1, Some(&weight), Some(&bias), 1e-5).linear_in_out(&w, None)
            });
            let y = &x + &branch;
            assert_eq!((branch.dtype(), y.dtype()), (dtype, DType::F32));
            let grads = (&y * &y).mean(&[0, 1], Keep::No).backward();
            let grads = [&x, &weight, &bias, &w].map(|leaf| grads.get(leaf).unwrap().to_vec::<f32>());
            [vec![y.detach().to_vec::<f32>()], grads.to_vec()].concat()
        };
        for (got, want) in on(&rig).iter().zip(on(&Device::cpu(1))) {
            let largest = want.iter().fold(0f32, |a, b| a.max(b.abs()));
            let apart = got.iter().zip(&want).map(|(a, b)| (a - b).abs()).fold(0f32, f32::max);
            assert!(
                f64::from(apart) <= tolerance(dtype) * f64::from(largest),
                "{dtype}: {apart} of {largest}"
            );
        }
    }
}

/// Two branches behind each other, whose sums, casts and sums of gradients go along with layer norms where a block of threads can hold a
/// row, and don't where it can't.
#[test]
fn what_goes_along_with_a_layer_norm_comes_to_the_same_bits() {
    let Some(rig) = rig(7) else { return };
    let launches = || {
        let log = rig.fake().map(|fake| fake.log()).unwrap_or_default();
        ["add_assign", "from_f32", "sum_in_float"]
            .map(|name| log.iter().filter(|line| **line == format!("launch {name}")).count())
    };
    for (dtype, [rows, width]) in [(DType::BF16, [70, 64]), (DType::F16, [3, 24]), (DType::BF16, [5, 36])] {
        let on = |device: &Device, apart: bool| {
            let of = |shape: &[usize], stream| {
                let key = Philox::new(9, stream);
                Tensor::uniform(device, shape, -1.0, 2.0, DType::F32, key).requires_grad()
            };
            let (x, weight, bias) = (of(&[rows, width], 1), of(&[width], 2), of(&[width], 3));
            let w = [4, 5].map(|stream| of(&[width; 2], stream));
            let stream = &x * 2.0;
            let loss = autocast(dtype, || {
                let branch = stream.layer_norm_in(dtype, 1, Some(&weight), Some(&bias), 1e-5);
                let branch = branch.linear_in_out(&w[0], None);
                let [sum, rows] = match apart {
                    true => {
                        let sum = &stream + &branch;
                        let rows = sum.layer_norm_in(dtype, 1, Some(&weight), Some(&bias), 1e-5);
                        [sum, rows]
                    }
                    false => stream.sum_layer_norm_in(&branch, dtype, 1, Some(&weight), Some(&bias), 1e-5),
                };
                assert_eq!((sum.dtype(), rows.dtype()), (DType::F32, dtype));
                let y = sum + rows.linear_in_out(&w[1], None);
                (&y * &y).mean(&[0, 1], Keep::No)
            });
            let before = launches();
            let grads = loss.backward();
            let after = launches();
            let grads =
                [&x, &weight, &bias, &w[0], &w[1]].map(|leaf| grads.get(leaf).unwrap().to_vec::<f32>());
            ([vec![loss.to_vec::<f32>()], grads.to_vec()].concat(), [0, 1].map(|i| after[i] - before[i]))
        };
        let (got, [sums, casts]) = on(&rig, false);
        assert!(got == on(&rig, true).0, "{dtype}: not the same bits");
        for (got, want) in got.iter().zip(on(&Device::cpu(1), false).0) {
            let largest = want.iter().fold(0f32, |a, b| a.max(b.abs()));
            let apart = got.iter().zip(&want).map(|(a, b)| (a - b).abs()).fold(0f32, f32::max);
            let near = f64::from(apart) <= tolerance(dtype) * f64::from(largest);
            assert!(near, "{dtype}: {apart} of {largest}");
        }
        if rig.fake().is_some() {
            // Of the weight, the bias and `y`, which come twice each, and of the last sum, behind which there is no norm.
            let want = if width.is_multiple_of(8) { [3, 1] } else { [5, 2] };
            assert_eq!([sums, casts], want, "{dtype}, rows of {width}");
        }
    }
}

/// What a sum receives beside a layer norm's gradient may be a view of something else.
#[test]
fn a_branch_gets_all_that_its_sum_receives() {
    let Some(rig) = rig(8) else { return };
    let (rows, width) = (6, 16);
    type Use = fn(&Tensor) -> Tensor;
    let beside: [(&str, Use); 4] = [
        ("a sum", |y| y.sum_all()),
        ("a transposition", |y| (y.t().contiguous() * 3.0).sum_all()),
        ("a part", |y| y.narrow(0, 2, 3).square().sum_all()),
        ("a cat", |y| {
            let x = Tensor::cat(&[y, y], 1);
            (&x * &x).sum_all()
        }),
    ];
    for (what, beside) in beside {
        for before in [false, true] {
            let on = |device: &Device| {
                let of = |shape: &[usize], stream| {
                    let key = Philox::new(9, stream);
                    Tensor::uniform(device, shape, -1.0, 2.0, DType::F32, key).requires_grad()
                };
                let (x, half, w) = (of(&[rows, width], 1), of(&[rows, width], 2), of(&[width; 2], 3));
                let [sum, rows] =
                    x.sum_layer_norm_in(&half.cast(DType::BF16), DType::BF16, 1, None, None, 1e-5);
                let normed = autocast(DType::BF16, || rows.linear_in_out(&w, None).square().sum_all());
                // The one that is last in the loss is walked back first.
                let loss = if before { beside(&sum) + normed } else { normed + beside(&sum) };
                let grads = loss.backward();
                [&x, &half].map(|leaf| grads.get(leaf).unwrap().to_vec::<f32>())
            };
            for (got, want) in on(&rig).iter().zip(on(&Device::cpu(1))) {
                let largest = want.iter().fold(0f32, |a, b| a.max(b.abs()));
                let apart = got.iter().zip(&want).map(|(a, b)| (a - b).abs()).fold(0f32, f32::max);
                let near = f64::from(apart) <= tolerance(DType::BF16) * f64::from(largest);
                assert!(near, "{what}, {before}: {apart} of {largest}");
            }
        }
    }
}

/// Looks at gradients when the last leaf of some is finished, or at none before the end.
struct Looks {
    at: Option<usize>,
    seen: Vec<Vec<f32>>,
}

impl GradSink for Looks {
    fn finished(&mut self, leaf: LeafId, grad: Tensor) {
        if self.looks(&leaf) {
            self.seen.push(grad.to_vec());
        }
    }

    fn looks(&self, leaf: &LeafId) -> bool {
        leaf.slot() == self.at
    }
}

/// Gradients of weights that were cast to 16 bits go to their slots with one launch, and nobody finds one that isn't there.
#[test]
fn casts_of_many_gradients_are_one_launch_unless_somebody_looks() {
    const LAYERS: usize = 40;
    let Some(rig) = rig(6) else { return };
    let layout = Layout::new(&vec![[24, 24].into(); LAYERS]);
    let launches = |name: &str| {
        let log = rig.fake().map(|fake| fake.log()).unwrap_or_default();
        log.iter().filter(|line| **line == format!("launch {name}")).count()
    };
    for dtype in [DType::BF16, DType::F16] {
        let name = if dtype == DType::BF16 { "from_bf16" } else { "from_f16" };
        // All leaves' gradients after each of two passes, which the second adds to, what was seen meanwhile, and the launches of the
        // first: one for each gradient, and one for many.
        let run = |at: Option<usize>, looks: bool| {
            let (values, grads) =
                (Arena::new(&rig, DType::F32, &layout), Grads::new(&rig, DType::F32, &layout));
            let weights: Vec<Tensor> = (0..LAYERS).map(|i| grads.leaf(i, &values)).collect();
            let random = |key| Tensor::uniform(&rig, [24, 24], -0.3, 0.3, DType::F32, Philox::new(5, key));
            weights.iter().zip(0..).for_each(|(weight, key)| weight.copy_from(&random(key)));
            grads.zero();
            let mut found = (Vec::new(), Vec::new(), [0; 2]);
            for pass in 0..2 {
                let x = random(100 + pass);
                // The first weight comes twice.
                let layers = weights.iter().chain([&weights[0]]);
                let loss =
                    autocast(dtype, || layers.fold(x, |x, weight| x.linear(weight, None)).square().sum_all());
                let before = [name, &format!("spread_{name}")].map(launches);
                if looks {
                    let mut all = Gradients::default();
                    backward(&[(&loss, None)], &mut all);
                } else {
                    let mut sink = Looks { at, seen: Vec::new() };
                    backward(&[(&loss, None)], &mut sink);
                    found.1.extend(sink.seen);
                }
                let after = [name, &format!("spread_{name}")].map(launches);
                if pass == 0 {
                    found.2 = [0, 1].map(|i| after[i] - before[i]);
                }
                found.0.push(grads.arena().read_flat::<f32>());
            }
            found
        };
        let (want, _, [alone, none]) = run(None, true);
        let (got, _, [apart, together]) = run(None, false);
        assert!(got == want, "{dtype}: not the same bits");
        // A launch takes 32 of them.
        if rig.fake().is_some() {
            assert_eq!((none, together, alone - apart), (0, 2, LAYERS - 1), "{dtype}");
        }
        let (got, seen, [_, together]) = run(Some(3), false);
        assert!(got == want, "{dtype}: not the same bits");
        assert_eq!(seen.len(), 2);
        for (seen, want) in seen.iter().zip(&want) {
            assert!(*seen == want[layout.range(3)], "{dtype}: seen before it was there");
        }
        if rig.fake().is_some() {
            assert_eq!(together, 3, "{dtype}: after 32, for what was looked at, and at the end");
        }
    }
}
