//! Values that go up beside what a GPU computes.

use crate::rig::rig;
use phalanx_tensor::{DType, Tensor, Values};
use std::collections::VecDeque;

/// What is made of the values of step `step`, in work enough for the next ones to come in the meantime.
fn work(x: &Tensor, ids: &Tensor, table: &Tensor) -> Tensor {
    let rows = table.embedding(ids);
    (0..6).fold(x + &rows, |y, i| y.relu() * 1.5 - f64::from(i))
}

#[test]
fn values_of_a_step_come_while_the_step_before_is_computed() {
    // The fake mixes the streams in another way for each.
    for seed in 1..24 {
        let Some(rig) = rig(seed) else { return };
        let table: Vec<f32> = (0..40).map(|i| i as f32).collect();
        let on = |device: &phalanx_tensor::Device| Tensor::from_slice(device, &table, [10, 4]);
        let cpu = phalanx_tensor::Device::cpu(1);
        let (ours, theirs) = (on(&rig), on(&cpu));
        // A part of each step's is longer than in the step before, or shorter.
        let rows = |step: usize| 3 + step * 5 % 7;
        let numbers = |step: usize| (0..rows(step) * 4).map(|i| (i * step) as f32 - 9.0).collect::<Vec<_>>();
        let ids = |step: usize| (0..rows(step)).map(|i| ((i + step) % 10) as i64).collect::<Vec<_>>();
        let send = |step: usize| {
            let (numbers, ids, n) = (numbers(step), ids(step), rows(step));
            rig.upload(&[(Values::F32(&numbers), [n, 4].into()), (Values::I64(&ids), [n].into())]).unwrap()
        };
        let mut coming = send(0);
        let mut made: Vec<Tensor> = Vec::new();
        for step in 0..8 {
            let [x, ids] = coming.tensors().try_into().unwrap();
            made.push(work(&x, &ids, &ours));
            coming = send(step + 1);
        }
        for (step, y) in made.iter().enumerate() {
            let x = Tensor::from_slice(&cpu, &numbers(step), [rows(step), 4]);
            let ids = Tensor::from_slice(&cpu, &ids(step), [rows(step)]);
            let want = work(&x, &ids, &theirs).to_vec::<f32>();
            assert_eq!(y.to_vec::<f32>(), want, "step {step}, seed {seed}");
        }
        // Nobody wants the last ones, and others may land where they did.
        drop(coming);
        let bytes = rig.upload(&[(Values::U8(&[7, 8, 9]), [3].into())]).unwrap().tensors();
        assert_eq!(bytes[0].to_vec::<u8>(), [7, 8, 9]);
    }
}

#[test]
fn values_that_come_step_after_step_take_no_memory() {
    let Some(rig) = rig(1) else { return };
    let Some(fake) = rig.fake() else { return };
    let values = vec![1.0f32; 5000];
    let step = || {
        let coming = rig.upload(&[(Values::F32(&values), [50, 100].into())]).unwrap();
        drop(coming.tensors());
        rig.gpu().unwrap().synchronize().unwrap();
    };
    (0..3).for_each(|_| step());
    let calls =
        || ["cuMemAlloc_v2", "cuMemHostAlloc", "cuMemFree_v2", "cuEventCreate"].map(|c| fake.calls(c));
    let before = calls();
    (0..50).for_each(|_| step());
    assert_eq!(calls(), before);
}

#[test]
fn values_that_do_not_fill_their_shape_are_a_bug() {
    let Some(rig) = rig(1) else { return };
    let send = || rig.upload(&[(Values::F32(&[1.0; 3]), [2, 2].into())]);
    let words = std::panic::catch_unwind(std::panic::AssertUnwindSafe(send)).map(drop).unwrap_err();
    assert!(words.downcast_ref::<String>().unwrap().contains("upload: 3 values for shape"), "{words:?}");
}

/// Landings that are too small for what comes next, some under way at once, some that nobody takes.
#[test]
fn values_of_any_size_land_while_others_are_under_way() {
    const SIZES: [usize; 9] = [1000, 70_000, 140_000, 5, 300_000, 66_000, 400_000, 0, 500_000];
    for seed in 1..8 {
        let Some(rig) = rig(seed) else { return };
        let bytes = |step: usize| -> Vec<u8> {
            (0..SIZES[step % SIZES.len()]).map(|i| (i * 7 + step * 13) as u8).collect()
        };
        let send = |step: usize| {
            let (bytes, number) = (bytes(step), [step as i64]);
            let values = [(Values::U8(&bytes), [bytes.len()].into()), (Values::I64(&number), [1].into())];
            rig.upload(&values).unwrap()
        };
        let mut under_way = VecDeque::from([send(0), send(1), send(2)]);
        let mut kept = Vec::new();
        for step in 0..12 {
            let upload = under_way.pop_front().unwrap();
            if step % 5 == 4 {
                drop(upload)
            } else {
                kept.push((step, upload.tensors()))
            }
            under_way.push_back(send(step + 3));
        }
        for (step, tensors) in kept {
            assert!(tensors[0].to_vec::<u8>() == bytes(step), "seed {seed}, step {step}");
            assert_eq!(tensors[1].to_vec::<i64>(), [step as i64]);
        }
    }
}

#[test]
fn an_upload_takes_memory_that_waits_in_caches() {
    let Some(rig) = rig(1) else { return };
    let Some(fake) = rig.fake() else { return };
    fake.limit_memory(0, 128 << 20);
    for i in 0..3 {
        drop(Tensor::zeros(&rig, [(20 + 3 * i) << 18], DType::F32));
    }
    let values = vec![3u8; 40 << 20];
    let free = rig.gpu().unwrap().memory().unwrap().free;
    assert!(free < values.len() as u64, "{free} bytes are free, and nobody needs the caches");
    let landed = rig.upload(&[(Values::U8(&values), [values.len()].into())]).unwrap();
    assert_eq!(landed.tensors()[0].narrow(0, values.len() - 1, 1).to_vec::<u8>(), [3]);
}

/// What larger batches left, as those of an evaluation.
#[test]
fn where_there_is_no_memory_left_that_which_values_have_landed_in_is_given_back() {
    let Some(rig) = rig(1) else { return };
    let Some(fake) = rig.fake() else { return };
    fake.limit_memory(0, 128 << 20);
    let values = vec![3u8; 20 << 20];
    let send = || rig.upload(&[(Values::U8(&values), [values.len()].into())]).unwrap();
    let both = [send(), send()];
    both.into_iter().for_each(|upload| drop(upload.tensors()));
    let wanted = 50 << 20;
    let free = rig.gpu().unwrap().memory().unwrap().free;
    assert!(free < wanted as u64, "{free} bytes are free, and values lie nowhere");
    let zeros = Tensor::zeros(&rig, [wanted], DType::U8);
    assert_eq!(zeros.narrow(0, wanted - 1, 1).to_vec::<u8>(), [0]);
    drop(zeros);
    assert_eq!(send().tensors()[0].narrow(0, 7, 1).to_vec::<u8>(), [3]);
}
