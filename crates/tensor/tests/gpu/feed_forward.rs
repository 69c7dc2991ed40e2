//! GELU as part of the products around it.

use crate::rig::{Rig, rig};
use phalanx_tensor::cases::random;
use phalanx_tensor::{
    Arena, DType, Device, GradSink, Grads, Layout, LeafId, Philox, Room, Tensor, autocast, backward,
    backward_inputs, no_grad, without_cheap,
};

/// Rows, their width, and that of what lies between the products.
const SIZES: [usize; 3] = [5, 8, 16];
/// Of the library's epilogues: a bias, then GELU, whose input is kept; times the gradient of GELU.
const GELU: &str = "epilogue=164";
const GELU_GRADIENT: &str = "epilogue=192";
/// A bias, then GELU, of which nothing is kept.
const GELU_ALONE: &str = "epilogue=36";
/// CUBLAS_STATUS_NOT_SUPPORTED.
const NO_WAY: i32 = 15;

/// Rows, and the weights and biases of two layers.
fn leaves(device: &Device, [rows, width, hidden]: [usize; 3]) -> [Tensor; 5] {
    let shapes: [&[usize]; 5] = [&[rows, width], &[width, hidden], &[hidden], &[hidden, width], &[width]];
    let single = Tensor::zeros(device, [], DType::F32);
    let mut stream = 0..;
    shapes.map(|shape| random(&single, shape, stream.next().expect("there is always a next")).requires_grad())
}

fn fused(x: &[Tensor; 5]) -> Tensor {
    x[0].feed_forward_in_out((&x[1], &x[2]), (&x[3], Some(&x[4])))
}

/// The same as operations one after the other.
fn in_steps(x: &[Tensor; 5]) -> Tensor {
    x[0].linear_in_out(&x[1], Some(&x[2])).gelu_tanh().linear_in_out(&x[3], Some(&x[4]))
}

/// Leaves in the order in which they were finished, with their gradients.
#[derive(Default)]
struct Finished(Vec<(LeafId, Tensor)>);

impl GradSink for Finished {
    fn finished(&mut self, leaf: LeafId, grad: Tensor) {
        self.0.push((leaf, grad));
    }
}

/// The output and the gradients by the numbers of their leaves, in the order in which these were finished.
type Results = (Vec<f32>, Vec<(usize, Vec<f32>)>);

/// What `f` comes to in a region of this type. Between the ways forth and back `then` is called.
fn results(
    device: &Device,
    dtype: DType,
    sizes: [usize; 3],
    f: fn(&[Tensor; 5]) -> Tensor,
    then: impl FnOnce(),
) -> Results {
    let leaves = leaves(device, sizes);
    let out = autocast(dtype, || f(&leaves)).cast(DType::F32);
    then();
    let weights = random(&out.detach(), out.dims(), 99);
    let mut finished = Finished::default();
    backward(&[(&out, Some(&weights))], &mut finished);
    let number = |id: &LeafId| leaves.iter().position(|leaf| leaf.leaf_id().as_ref() == Some(id));
    let grads = finished.0.iter().map(|(id, grad)| (number(id).expect("a leaf"), grad.to_vec())).collect();
    (out.to_vec(), grads)
}

/// How often GELU's own kernels were launched: forth, and back.
fn kernels(rig: &Rig) -> Option<[usize; 2]> {
    let log = rig.fake()?.log();
    Some(
        ["gelu_tanh", "gelu_tanh_gradient"]
            .map(|name| log.iter().filter(|line| **line == format!("launch {name}")).count()),
    )
}

/// The products that cuBLASLt was given, in order.
fn products(rig: &Rig) -> Vec<String> {
    let log = rig.fake().expect("a fake driver counts").cublaslt().log();
    log.into_iter().filter(|line| line.starts_with("cublasLtMatmul algo")).collect()
}

/// How far apart the largest two numbers are, where leaves are finished in one order.
#[track_caller]
fn apart(got: &Results, want: &Results) -> f32 {
    let all = |(out, grads): &Results| {
        [out.clone()].into_iter().chain(grads.iter().map(|(_, grad)| grad.clone())).flatten().collect()
    };
    let order = |(_, grads): &Results| grads.iter().map(|(leaf, _)| *leaf).collect::<Vec<usize>>();
    assert_eq!(order(got), order(want), "leaves are finished in the order that they always are");
    let [got, want]: [Vec<f32>; 2] = [all(got), all(want)];
    got.iter().zip(&want).map(|(got, want)| (got - want).abs()).fold(0.0, f32::max)
}

#[test]
fn gelu_is_part_of_both_products_in_16_bits() {
    // A sum of sixteen products below 1, of factors that were rounded twice.
    for (dtype, tolerance) in [(DType::BF16, 0.1), (DType::F16, 0.0125)] {
        let Some(rig) = rig(1) else { return };
        let got = results(&rig, dtype, SIZES, fused, || ());
        if kernels(&rig).is_some() {
            assert_eq!(kernels(&rig), Some([0, 0]), "{dtype}");
            let given = |epilogue| products(&rig).iter().filter(|line| line.ends_with(epilogue)).count();
            assert_eq!([given(GELU), given(GELU_GRADIENT), products(&rig).len()], [1, 1, 6], "{dtype}");
        }
        let apart = apart(&got, &results(&rig, dtype, SIZES, in_steps, || ()));
        assert!(apart > 0.0 && apart < tolerance, "{dtype}: {apart}");
    }
}

#[test]
fn nothing_is_kept_of_gelu_where_no_gradient_is_wanted_and_the_bits_are_the_same() {
    for dtype in [DType::BF16, DType::F16] {
        let Some(rig) = rig(4) else { return };
        let leaves = leaves(&rig, SIZES);
        let made = || autocast(dtype, || fused(&leaves)).detach().cast(DType::F32).to_vec::<f32>();
        let (recorded, alone) = (made(), no_grad(made));
        assert!(recorded == alone, "{dtype}");
        if kernels(&rig).is_some() {
            let given = |epilogue| products(&rig).iter().filter(|line| line.ends_with(epilogue)).count();
            assert_eq!([given(GELU), given(GELU_ALONE), products(&rig).len()], [1, 1, 4], "{dtype}");
        }
    }
}

#[test]
fn elsewhere_it_is_what_the_operations_come_to_to_the_bit() {
    let check = |device: &Device, dtype, sizes, run: fn(&dyn Fn() -> Results) -> Results, what: &str| {
        let [got, want] = [fused, in_steps].map(|f| run(&|| results(device, dtype, sizes, f, || ())));
        assert!(got == want, "{what}");
    };
    let plainly: fn(&dyn Fn() -> Results) -> Results = |pass| pass();
    for dtype in [DType::F32, DType::BF16, DType::F16] {
        check(&Device::cpu(2), dtype, SIZES, plainly, "on a CPU");
        check(&Device::cpu(1), dtype, SIZES, |pass| without_cheap(pass), "on a CPU, made again");
    }
    let Some(rig) = rig(2) else { return };
    check(&rig, DType::F32, SIZES, plainly, "in float32");
    check(&rig, DType::BF16, [5, 8, 12], plainly, "rows that are no multiple of 8");
    check(&rig, DType::BF16, [0, 8, 16], plainly, "no rows");
    check(&rig, DType::BF16, SIZES, |pass| without_cheap(pass), "made again");
    if let Some(launched) = kernels(&rig) {
        // Three pairs of passes, of which the last makes GELU's result again; no rows are nothing to launch.
        assert_eq!(launched, [8, 6]);
    }
}

#[test]
fn a_product_that_the_library_does_not_do_with_gelu_is_done_without() {
    let sizes = SIZES;
    let Some(first) = rig(3) else { return };
    if first.fake().is_none() {
        return;
    }
    results(&first, DType::BF16, sizes, fused, || ());
    // Each is a product of its own, so the library was asked for each right before it was given it.
    let forth = products(&first).iter().position(|line| line.ends_with(GELU)).unwrap();
    let back = products(&first).iter().position(|line| line.ends_with(GELU_GRADIENT)).unwrap();
    let both_forth = 2;
    for (refused, want) in [([true, false], [1, 0]), ([false, true], [0, 1]), ([true, true], [1, 1])] {
        let Some(rig) = rig(3) else { return };
        let fake = rig.fake().expect("as before");
        let refuse = |is_refused: bool, nth: usize| {
            if is_refused {
                fake.cublaslt().fail("cublasLtMatmulAlgoGetHeuristic", 1 + nth as i64, NO_WAY);
            }
        };
        refuse(refused[0], forth);
        let got = results(&rig, DType::BF16, sizes, fused, || refuse(refused[1], back - both_forth));
        assert_eq!(kernels(&rig), Some(want), "{refused:?}");
        let again = results(&rig, DType::BF16, sizes, fused, || ());
        assert!(got == again, "{refused:?}: what was refused isn't asked for again");
        assert_eq!(kernels(&rig), Some(want.map(|n| 2 * n)), "{refused:?}");
        let apart = apart(&got, &results(&rig, DType::BF16, sizes, in_steps, || ()));
        assert!(apart < 0.1 && (apart == 0.0) == (refused == [true; 2]), "{refused:?}: {apart}");
    }
}

#[test]
fn as_much_is_kept_as_the_operations_keep() {
    let Some(rig) = rig(4) else { return };
    let leaves = leaves(&rig, [64, 32, 128]);
    let held = |f: fn(&[Tensor; 5]) -> Tensor| {
        let before = rig.live_bytes();
        let out = autocast(DType::BF16, || f(&leaves));
        let held = rig.live_bytes() - before;
        drop(out);
        held
    };
    assert_eq!(held(fused), held(in_steps));
}

/// Gradients of weights may come later: to the same bits, and with as much kept until then as the operations keep.
#[test]
fn weights_that_are_put_off_keep_what_gelu_gave_and_not_what_it_was_given() {
    let Some(rig) = rig(5) else { return };
    let layout = Layout::new(&[[8, 16].into(), [16].into(), [16, 8].into(), [8].into()]);
    let (values, grads) = (Arena::new(&rig, DType::F32, &layout), Grads::new(&rig, DType::F32, &layout));
    let rows = leaves(&rig, SIZES);
    let all = [0, 1, 2, 3, 4].map(|i| if i == 0 { rows[0].clone() } else { grads.leaf(i - 1, &values) });
    (1..5).for_each(|i| all[i].copy_from(&rows[i].detach()));
    let pass = |f: fn(&[Tensor; 5]) -> Tensor, is_put_off: bool| {
        grads.zero();
        let loss = autocast(DType::BF16, || f(&all)).cast(DType::F32).square().sum_all();
        let mut held = 0;
        if is_put_off {
            let put_off = backward_inputs(&[(&loss, None)], &mut Finished::default());
            drop(loss);
            held = rig.live_bytes();
            assert_eq!(grads.settle(), [0, 1, 2, 3], "none has any yet");
            grads.zero();
            put_off.finish(&mut Finished::default());
        } else {
            backward(&[(&loss, None)], &mut Finished::default());
        }
        assert_eq!(grads.settle(), [0; 0]);
        (held, (0..4).map(|i| grads.arena().tensor(i).to_vec::<f32>()).collect::<Vec<_>>())
    };
    let (_, want) = pass(fused, false);
    let (held, got) = pass(fused, true);
    assert_eq!(got, want);
    assert_eq!(held, pass(in_steps, true).0);
}

#[test]
fn a_replay_has_the_bits_of_the_pass() {
    for seed in 0..4 {
        let Some(rig) = rig(seed) else { return };
        let [x, rest @ ..] = leaves(&rig, SIZES);
        let x = x.detach();
        let pass = |x: &Tensor| {
            let leaf = x.clone().requires_grad();
            let all = [&leaf, &rest[0], &rest[1], &rest[2], &rest[3]].map(Tensor::clone);
            let grads = autocast(DType::BF16, || fused(&all)).cast(DType::F32).square().sum_all().backward();
            grads.get(&leaf).expect("it took part").clone()
        };
        let none = [].into();
        let (mut rehearsal, first) =
            rig.rehearse(&Room::default(), 0, &none, || pass(&x)).expect("it is a GPU");
        rehearsal.take_back(first);
        let (mut replay, left) = rehearsal.record(|| pass(&x)).unwrap_or_else(|error| panic!("{error}"));
        for step in 1..4 {
            x.copy_from(&Tensor::uniform(&rig, *x.shape(), -1.0, 1.0, DType::F32, Philox::new(step, 0)));
            replay.again(step, &none, &[], &[]).unwrap();
            assert_eq!(left.to_vec::<f32>(), pass(&x).to_vec::<f32>(), "step {step}, seed {seed}");
        }
    }
}
