//! The attention that stores no scores against the one that is made of other operations.

use phalanx_tensor::{DType, Device, DropoutKey, Gradients, Philox, Tensor, Within, backward};

/// What sums of some hundreds of products of numbers below 1 round to in float32.
const TOLERANCE: f32 = 2e-6;

type Attention = fn(&Tensor, usize, Option<(f64, &DropoutKey)>) -> Tensor;

/// Queries, keys and values: (samples, positions, 3 * width).
fn numbers(device: &Device, shape: [usize; 3], scale: f64) -> Tensor {
    Tensor::uniform(device, shape, -scale, scale, DType::F32, Philox::new(3, 1))
}

/// The output, and the gradient of the input where the output's is random.
fn of(
    attention: Attention,
    qkv: &Tensor,
    heads: usize,
    dropout: Option<(f64, &DropoutKey)>,
) -> [Vec<f32>; 2] {
    let qkv = qkv.clone().requires_grad();
    let y = attention(&qkv, heads, dropout);
    let push = Tensor::uniform(y.device(), y.shape(), -1.0, 1.0, DType::F32, Philox::new(3, 2));
    let mut grads = Gradients::default();
    backward(&[(&y, Some(&push))], &mut grads);
    [y.to_vec(), grads.get(&qkv).unwrap().to_vec()]
}

fn key(samples: &[u64]) -> DropoutKey {
    DropoutKey::new(5, 6, 7, samples.into())
}

#[test]
fn it_agrees_with_the_definition_at_every_size() {
    let device = Device::cpu(2);
    // Parts of a block, whole blocks and several, in positions; parts of a vector, whole ones and several, in a head's numbers.
    for (time, heads, depth) in
        [(1, 1, 1), (2, 3, 5), (15, 2, 16), (64, 1, 64), (65, 2, 33), (200, 1, 80), (130, 4, 8)]
    {
        let qkv = numbers(&device, [2, time, 3 * heads * depth], 1.0);
        for dropout in [None, Some((0.3, &key(&[8, 4])))] {
            let got = of(Tensor::causal_attention, &qkv, heads, dropout);
            let want = of(Tensor::causal_attention_in_steps, &qkv, heads, dropout);
            for (what, got, want) in [("output", &got[0], &want[0]), ("gradient", &got[1], &want[1])] {
                let most = want.iter().fold(1.0f32, |most, x| most.max(x.abs()));
                for (i, (got, want)) in got.iter().zip(want).enumerate() {
                    assert!(
                        (got - want).abs() <= TOLERANCE * most,
                        "{what} {i} of {time} positions, {heads} heads of {depth}: {got}, not {want}"
                    );
                }
            }
        }
    }
}

/// What an attention of three leaves: the output, and the gradients of queries, keys and values where the output's is random.
fn of_three(attend: &dyn Fn([&Tensor; 3]) -> Tensor, three: [&Tensor; 3]) -> [Vec<f32>; 4] {
    let leaves = three.map(|x| x.copied().requires_grad());
    // Each lies otherwise: by positions, by heads, and turned.
    let [q, k, v] = leaves.each_ref();
    let q = q.transpose(1, 2).contiguous().transpose(1, 2);
    let v = v.transpose(2, 3).contiguous().transpose(2, 3);
    let y = attend([&q, k, &v]);
    let push = Tensor::uniform(y.device(), y.shape(), -1.0, 1.0, DType::F32, Philox::new(3, 2));
    let mut grads = Gradients::default();
    backward(&[(&y, Some(&push))], &mut grads);
    let [q, k, v] = leaves.each_ref().map(|leaf| grads.get(leaf).unwrap().to_vec());
    [y.to_vec(), q, k, v]
}

#[test]
fn all_keys_that_are_not_hidden_are_seen_as_the_definition_says() {
    let device = Device::cpu(2);
    // Heads, numbers of a head, queries, keys.
    for [heads, depth, queries, keys] in
        [[1, 1, 1, 1], [2, 5, 3, 70], [1, 16, 64, 64], [2, 33, 130, 17], [1, 8, 65, 200], [3, 24, 100, 100]]
    {
        let of = |positions: usize, stream: u64| {
            let shape = [2, heads, positions, depth];
            Tensor::uniform(&device, shape, -1.0, 1.0, DType::F32, Philox::new(3, stream))
        };
        let three = [&of(queries, 4), &of(keys, 5), &of(keys, 6)];
        // Of keys alone, with a long row of hidden ones; of queries; of all; and one that isn't f32.
        let seen = |shape: [usize; 4]| {
            Tensor::uniform(&device, shape, -1.0, 1.0, DType::F32, Philox::new(3, 7)).gt(-0.3)
        };
        let long = Tensor::cat(
            &[&Tensor::zeros(&device, [2, 1, 1, keys - keys / 2], DType::F32), &seen([2, 1, 1, keys / 2])],
            3,
        );
        let masks = [
            None,
            Some(long),
            Some(seen([1, 1, queries, 1])),
            Some(seen([2, heads, queries, keys])),
            Some(seen([1, heads, 1, keys]).cast(DType::I64)),
        ];
        for (mask, dropout) in masks.iter().flat_map(|mask| [None, Some(0.3)].map(|p| (mask.as_ref(), p))) {
            let key = key(&[8, 4]);
            let dropout = dropout.map(|p| (p, &key));
            let got = of_three(&|[q, k, v]| q.attention(k, v, mask, dropout), three);
            let want = of_three(&|[q, k, v]| q.attention_in_steps(k, v, mask, dropout), three);
            for (i, (got, want)) in got.iter().zip(&want).enumerate() {
                let most = want.iter().fold(1.0f32, |most, x| most.max(x.abs()));
                let bad = got
                    .iter()
                    .zip(want)
                    .position(|(got, want)| (got - want).abs() > TOLERANCE * most || got.is_nan());
                assert_eq!(
                    (bad, got.len()),
                    (None, want.len()),
                    "{i} of {heads} heads of {depth}, {queries} queries to {keys} keys, a mask of {:?}, {:?}",
                    mask.map(Tensor::dims),
                    dropout.map(|(p, _)| p)
                );
            }
            // The same where all three are one tensor.
            if queries == keys && mask.is_none_or(|mask| mask.dtype() == DType::F32) {
                let qkv = numbers(&device, [2, keys, 3 * heads * depth], 1.0);
                let of = |f: &dyn Fn(&Tensor) -> Tensor| {
                    let qkv = qkv.clone().requires_grad();
                    let y = f(&qkv);
                    let mut grads = Gradients::default();
                    backward(&[(&(&y * &y).sum_all(), None)], &mut grads);
                    [y.to_vec::<f32>(), grads.get(&qkv).unwrap().to_vec::<f32>()]
                };
                let got = of(&|qkv| qkv.self_attention(heads, mask, dropout));
                let want = of(&|qkv| qkv.self_attention_in_steps(heads, mask, dropout));
                for (got, want) in got.iter().flatten().zip(want.iter().flatten()) {
                    assert!((got - want).abs() <= 1e-5 * (1.0 + want.abs()), "{got}, not {want}");
                }
            }
        }
    }
}

#[test]
fn what_is_hidden_may_be_anything_but_where_it_is_weighed() {
    let device = Device::cpu(1);
    let three = |bad: f32| {
        let mut keys = vec![0.5f32; 70 * 4];
        keys[40 * 4] = bad;
        let of = |values: &[f32]| Tensor::from_slice(&device, values, [1, 1, 70, 4]).requires_grad();
        [of(&[0.25; 280]), of(&keys), of(&[0.125; 280])]
    };
    let mut seen = [1.0f32; 70];
    seen[40] = 0.0;
    let seen = Tensor::from_slice(&device, &seen, [1, 1, 1, 70]);
    for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
        let [q, k, v] = three(bad);
        let y = q.attention(&k, &v, Some(&seen), None);
        let grads = (&y * &y).sum_all().backward();
        assert!(y.to_vec::<f32>().iter().all(|x| (x - 0.125).abs() < 1e-6), "{bad}");
        for leaf in [&k, &v] {
            let grad = grads.get(leaf).unwrap().to_vec::<f32>();
            assert!(grad.iter().all(|x| x.is_finite()), "{bad}: {grad:?}");
            assert_eq!(grad[160..164], [0.0; 4], "{bad}");
        }
    }
}

#[test]
fn what_is_kept_of_masked_attention_does_not_grow_with_the_square_either() {
    let held = |time: usize| {
        let device = Device::cpu(1);
        let x = numbers(&device, [1, time, 3 * 64], 1.0).requires_grad();
        let seen = Tensor::ones(&device, [1, 1, 1, time], DType::F32);
        x.self_attention(1, Some(&seen), None).sum_all().backward();
        device.held_bytes()
    };
    assert!(held(2048) < 5 * held(512), "{} and {} bytes", held(2048), held(512));
}

#[test]
fn the_bits_do_not_depend_on_the_number_of_threads_nor_on_the_batch() {
    let shape = [3, 100, 3 * 2 * 24];
    let on = |threads: usize| {
        let qkv = numbers(&Device::cpu(threads), shape, 2.0);
        of(Tensor::causal_attention, &qkv, 2, Some((0.2, &key(&[1, 2, 3]))))
    };
    let alone = on(1);
    for threads in [2, 3, 7] {
        assert!(on(threads) == alone, "{threads} threads");
    }
    let last = numbers(&Device::cpu(1), shape, 2.0).narrow(0, 2, 1).contiguous();
    let y = last.causal_attention(2, Some((0.2, &key(&[3])))).to_vec::<f32>();
    assert_eq!(y, alone[0][2 * y.len()..]);
}

#[test]
fn scores_of_any_size_are_shared_out() {
    let device = Device::cpu(1);
    // Scores of tens of thousands: their exponentials alone would be infinite.
    let qkv = numbers(&device, [1, 80, 3 * 32], 300.0);
    let got = of(Tensor::causal_attention, &qkv, 1, None);
    assert!(got.iter().flatten().all(|x| x.is_finite()));
    // The first position sees itself alone.
    assert_eq!(got[0][..32], qkv.to_vec::<f32>()[64..96]);
}

#[test]
fn a_nan_is_seen_by_later_positions_and_by_no_earlier_one() {
    let device = Device::cpu(1);
    let mut values = numbers(&device, [1, 70, 3 * 4], 1.0).to_vec::<f32>();
    values[30 * 12 + 4] = f32::NAN;
    let y = Tensor::from_slice(&device, &values, [1, 70, 12]).causal_attention(1, None).to_vec::<f32>();
    assert!(y[..30 * 4].iter().all(|x| x.is_finite()));
    assert!(y[30 * 4..].iter().all(|x| x.is_nan()));
}

#[test]
fn nothing_is_an_answer_too() {
    for shape in [[0, 4, 6], [2, 0, 6], [2, 4, 0]] {
        let qkv = Tensor::zeros(&Device::cpu(1), shape, DType::F32);
        assert_eq!(of(Tensor::causal_attention, &qkv, 2, None), [vec![], vec![]], "{shape:?}");
        let all: Attention = |qkv, heads, dropout| qkv.self_attention(heads, None, dropout);
        assert_eq!(of(all, &qkv, 2, None), [vec![], vec![]], "{shape:?}");
    }
    // Queries that have no keys come to zeros, and keys without queries get none.
    let device = Device::cpu(1);
    for (queries, keys) in [(3, 0), (0, 3)] {
        let of = |positions: usize| Tensor::ones(&device, [1, 2, positions, 4], DType::F32);
        let [y, q, k, v] =
            of_three(&|[q, k, v]| q.attention(k, v, None, None), [&of(queries), &of(keys), &of(keys)]);
        assert_eq!([y, q], [vec![0.0; 8 * queries], vec![0.0; 8 * queries]]);
        assert_eq!([k, v], [vec![0.0; 8 * keys], vec![0.0; 8 * keys]]);
    }
}

#[test]
fn what_is_kept_does_not_grow_with_the_square_of_the_positions() {
    let held = |time: usize| {
        let device = Device::cpu(1);
        let qkv = numbers(&device, [1, time, 3 * 64], 1.0).requires_grad();
        let y = qkv.causal_attention(1, None);
        y.sum_all().backward();
        device.held_bytes()
    };
    assert!(held(2048) < 5 * held(512), "{} and {} bytes", held(2048), held(512));
}

#[test]
fn some_queries_have_the_bits_that_they_have_among_all() {
    let device = Device::cpu(2);
    let (time, heads, depth) = (150, 2, 12);
    let qkv = numbers(&device, [2, time, 3 * heads * depth], 1.0).requires_grad();
    let push = Tensor::uniform(&device, [2, time, heads * depth], -1.0, 1.0, DType::F32, Philox::new(3, 2));
    for dropout in [None, Some((0.3, &key(&[8, 4])))] {
        let gradient = |y: &Tensor, push: &Tensor| {
            let mut grads = Gradients::default();
            backward(&[(y, Some(push))], &mut grads);
            grads.get(&qkv).unwrap().to_vec::<f32>()
        };
        let all = qkv.causal_attention(heads, dropout);
        let want = gradient(&all, &push);
        let mut sum = vec![0.0f32; want.len()];
        for asked in [0..50, 50..50, 50..51, 51..64, 64..150] {
            let part = |x: &Tensor| x.narrow(1, asked.start, asked.len());
            let some = qkv.causal_attention_of(asked.clone(), heads, dropout);
            assert_eq!(some.to_vec::<f32>(), part(&all).to_vec::<f32>(), "{asked:?}");
            let grads = gradient(&some, &part(&push));
            sum.iter_mut().zip(&grads).for_each(|(sum, grad)| *sum += grad);
            // What others ask is nobody's business here.
            let by_group = Tensor::from_slice(&device, &grads, [2, time, 3, heads * depth]);
            let before = by_group.narrow(2, 0, 1).narrow(1, 0, asked.start);
            assert!(before.to_vec::<f32>().iter().all(|&grad| grad == 0.0), "{asked:?}");
        }
        let most = want.iter().fold(1.0f32, |most, x| most.max(x.abs()));
        assert!(sum.iter().zip(&want).all(|(sum, want)| (sum - want).abs() <= TOLERANCE * most));
    }
}

#[test]
#[should_panic(expected = "the queries at 2..4 of 3 positions")]
fn queries_behind_the_last_position_are_a_bug() {
    Tensor::zeros(&Device::cpu(1), [2, 3, 6], DType::F32).causal_attention_of(2..4, 1, None);
}

#[test]
#[should_panic(expected = "queries, keys and values of shape [2, 3, 8] for 2 heads")]
fn a_width_that_the_heads_do_not_divide_is_a_bug() {
    Tensor::zeros(&Device::cpu(1), [2, 3, 8], DType::F32).causal_attention(2, None);
}

#[test]
fn some_of_the_heads_drop_what_they_drop_among_all() {
    let device = Device::cpu(1);
    let (time, heads, depth) = (70, 4, 8);
    let qkv = numbers(&device, [2, time, 3 * heads * depth], 1.0);
    let key = key(&[8, 4]);
    for attention in [Tensor::causal_attention, Tensor::causal_attention_in_steps] {
        let [whole, _] = of(attention, &qkv, heads, Some((0.3, &key)));
        let whole = Tensor::from_slice(&device, &whole, [2, time, heads * depth]);
        for (start, some) in [(0, 1), (1, 2), (3, 1)] {
            let by_head = qkv.reshape([2, time, 3, heads * depth]).narrow(3, start * depth, some * depth);
            let part = by_head.contiguous().reshape([2, time, 3 * some * depth]);
            let key = DropoutKey { within: Some(Within { dim: 1, start, of: heads }), ..key.clone() };
            let [got, _] = of(attention, &part, some, Some((0.3, &key)));
            assert_eq!(
                got,
                whole.narrow(2, start * depth, some * depth).to_vec::<f32>(),
                "{some} from {start}"
            );
        }
    }
}
