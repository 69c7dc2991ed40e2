//! Attention on a GPU beside the rest of what an attention on a CPU is tested for.

use crate::rig::{Rig, near, rig};
use phalanx_tensor::{DType, Device, DropoutKey, Philox, Tensor, Within};

fn numbers(device: &Device, shape: [usize; 3]) -> Tensor {
    Tensor::uniform(device, shape, -1.0, 1.0, DType::F32, Philox::new(3, 1))
}

#[test]
fn what_is_kept_does_not_grow_with_the_square_of_the_positions() {
    let held = |time: usize| {
        let rig = rig(1)?;
        numbers(&rig, [1, time, 3 * 16]).requires_grad().causal_attention(1, None).sum_all().backward();
        Some(rig.held_bytes())
    };
    let (Some(few), Some(many)) = (held(256), held(1024)) else { return };
    assert!(many < 5 * few, "{many} and {few} bytes");
}

#[test]
fn some_of_the_heads_drop_what_they_drop_among_all() {
    let Some(rig) = rig(2) else { return };
    let (time, heads, depth) = (40, 4, 8);
    let key = DropoutKey::new(5, 6, 7, [8, 4].into());
    let of = |device: &Device| numbers(device, [2, time, 3 * heads * depth]);
    let whole = of(&Device::cpu(1)).causal_attention(heads, Some((0.3, &key)));
    let (start, some) = (1, 2);
    let by_head = of(&rig).reshape([2, time, 3, heads * depth]).narrow(3, start * depth, some * depth);
    let part = by_head.contiguous().reshape([2, time, 3 * some * depth]);
    let within = Some(Within { dim: 1, start, of: heads });
    let got = part.causal_attention(some, Some((0.3, &DropoutKey { within, ..key })));
    let want = whole.narrow(2, start * depth, some * depth).to_vec::<f32>();
    near("some heads", &got.to_vec(), &want.into_iter().map(f64::from).collect::<Vec<f64>>());
}

/// What the GPU was given, by the names of the kernels.
fn launched(rig: &Rig, start: &str) -> Option<usize> {
    let start = format!("launch {start}");
    Some(rig.fake()?.log().iter().filter(|line| line.starts_with(&start)).count())
}

#[test]
fn a_head_that_is_too_large_is_done_in_steps() {
    let Some(rig) = rig(3) else { return };
    let of = |depth: usize| {
        let got = numbers(&rig, [1, 3, 3 * depth]).causal_attention(1, None).to_vec();
        let want = numbers(&Device::cpu(1), [1, 3, 3 * depth]).causal_attention(1, None).to_vec::<f32>();
        near("a head", &got, &want.into_iter().map(f64::from).collect::<Vec<f64>>());
        Some([launched(&rig, "attention")?, launched(&rig, "softmax")?])
    };
    let Some(by_kernel) = of(256) else { return };
    assert_eq!((by_kernel, of(257)), ([1, 0], Some([1, 1])));
}

#[test]
fn nothing_is_an_answer_too() {
    let Some(rig) = rig(4) else { return };
    for shape in [[0, 4, 6], [2, 0, 6], [2, 4, 0]] {
        let qkv = Tensor::zeros(&rig, shape, DType::F32).requires_grad();
        let y = qkv.causal_attention(2, None);
        let grad = y.sum_all().backward().get(&qkv).unwrap().to_vec::<f32>();
        assert_eq!((y.to_vec::<f32>(), grad), (vec![], vec![]), "{shape:?}");
    }
}

#[test]
fn floats_of_16_bits_are_multiplied_as_small_matrices_where_they_lie_so() {
    let Some(rig) = rig(5) else { return };
    // Numbers of a head, where queries, keys and values begin in their buffer, in which type.
    let of = |depth: usize, start: usize, dtype: DType| {
        let count = 4 * 3 * depth;
        let all = numbers(&rig, [1, 1, start + count]).cast(dtype).reshape([start + count]);
        let qkv = all.narrow(0, start, count).reshape([1, 4, 3 * depth]);
        let before = launched(&rig, "halves_attention")?;
        assert_eq!(qkv.causal_attention(1, None).dims(), [1, 4, depth]);
        Some(launched(&rig, "halves_attention")? - before)
    };
    let rows = [
        ([16, 0], DType::BF16, 1),
        ([128, 8], DType::F16, 1),
        ([16, 0], DType::F32, 0),
        ([20, 0], DType::F16, 0),
        ([136, 0], DType::BF16, 0),
        ([16, 1], DType::BF16, 0),
    ];
    for ([depth, start], dtype, want) in rows {
        let Some(got) = of(depth, start, dtype) else { return };
        assert_eq!(got, want, "{dtype}, {depth} numbers from {start} on");
    }
}
