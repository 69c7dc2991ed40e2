//! Passes that are recorded once and replayed.

use crate::rig::{Rig, rig};
use phalanx_tensor::{DType, Device, DropoutKey, Philox, Replay, Room, Tensor};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

const SHAPE: [usize; 2] = [3, 50];

fn samples(first: u64) -> Arc<[u64]> {
    (first..first + SHAPE[0] as u64).collect()
}

/// Two dropouts with sums around them: buffers of every size are used before and after keys are read.
fn pass(x: &Tensor, step: u64, samples: &Arc<[u64]>) -> Tensor {
    let key = |layer| DropoutKey::new(7, step, layer, Arc::clone(samples));
    let mean = x.mean_all() + 1.0;
    let once = (x + &mean).dropout(0.5, &key(1));
    ((once.mean_all() * 2.0 + once).dropout(0.25, &key(2)) * x).detach()
}

fn random(device: &Device, seed: u64) -> Tensor {
    Tensor::uniform(device, SHAPE, -1.0, 1.0, DType::F32, Philox::new(seed, 0))
}

/// A recorded pass, with the tensors that it reads and leaves.
fn recorded(rig: &Rig) -> (Replay, Tensor, Tensor) {
    recorded_in(&Room::default(), rig)
}

/// The same in the buffers of this room.
fn recorded_in(room: &Room, rig: &Rig) -> (Replay, Tensor, Tensor) {
    let (x, of) = (random(rig, 1), samples(10));
    let (mut rehearsal, first) = rig.rehearse(room, 0, &of, || pass(&x, 0, &of)).expect("it is a GPU");
    assert_eq!((rehearsal.refusal(), first.to_vec::<f32>()), (None, pass(&x, 0, &of).to_vec::<f32>()));
    rehearsal.take_back(first);
    let (replay, left) = rehearsal.record(|| pass(&x, 0, &of)).unwrap_or_else(|error| panic!("{error}"));
    (replay, x, left)
}

#[test]
fn a_replay_has_the_bits_of_the_pass_that_it_stands_for() {
    for seed in 0..4 {
        let Some(rig) = rig(seed) else { return };
        let (mut replay, x, left) = recorded(&rig);
        for step in 1..5 {
            let of = samples(100 * step);
            x.copy_from(&random(&rig, step));
            let copies = || rig.fake().map(|fake| fake.calls("cuMemcpyHtoDAsync_v2"));
            let before = copies();
            replay.again(step, &of, &[], &[]).unwrap();
            assert_eq!(copies(), before.map(|before| before + 1), "both keys and the samples go up at once");
            // Read in between or not.
            if step != 2 {
                assert_eq!(
                    left.to_vec::<f32>(),
                    pass(&x, step, &of).to_vec::<f32>(),
                    "step {step}, seed {seed}"
                );
            }
        }
    }
}

#[test]
fn passes_of_one_room_use_the_same_buffers_one_after_the_other() {
    let Some(rig) = rig(7) else { return };
    let more = |room: &Room| {
        let before = rig.held_bytes();
        let recorded = recorded_in(room, &rig);
        (recorded, rig.held_bytes() - before)
    };
    let room = Room::default();
    let ((first, own), (second, shared)) = (more(&room), more(&room));
    // What they leave, and what they are fed, each has for itself.
    assert!(shared < own, "{shared} bytes behind {own}");
    let mut both = [first, second];
    for step in 1..5 {
        let of = samples(100 * step);
        for (i, (replay, x, _)) in both.iter_mut().enumerate() {
            x.copy_from(&random(&rig, step + 10 * i as u64));
            replay.again(step, &of, &[], &[]).unwrap();
        }
        for (i, (_, x, left)) in both.iter().enumerate() {
            assert_eq!(left.to_vec::<f32>(), pass(x, step, &of).to_vec::<f32>(), "step {step}, pass {i}");
        }
    }
}

#[test]
fn attention_is_replayed_with_its_mask_and_its_dropout() {
    let Some(rig) = rig(2) else { return };
    let numbers = |seed| Tensor::uniform(&rig, [2, 5, 12], -1.0, 1.0, DType::F32, Philox::new(seed, 0));
    let attend = |x: &Tensor, step: u64, samples: &Arc<[u64]>| {
        let key = DropoutKey::new(7, step, 1, Arc::clone(samples));
        (x * 2.0).causal_attention(2, Some((0.5, &key))).detach()
    };
    let (x, of): (Tensor, Arc<[u64]>) = (numbers(0), [4, 9].into());
    let (mut rehearsal, first) = rig.rehearse(&Room::default(), 0, &of, || attend(&x, 0, &of)).unwrap();
    assert_eq!(rehearsal.refusal(), None);
    rehearsal.take_back(first);
    let (mut replay, left) =
        rehearsal.record(|| attend(&x, 0, &of)).unwrap_or_else(|error| panic!("{error}"));
    for step in 1..4 {
        let of: Arc<[u64]> = [step, 20 + step].into();
        x.copy_from(&numbers(step));
        replay.again(step, &of, &[], &[]).unwrap();
        assert_eq!(left.to_vec::<f32>(), attend(&x, step, &of).to_vec::<f32>(), "step {step}");
    }
}

#[test]
fn nobody_elses_values_are_overwritten() {
    let Some(rig) = rig(3) else { return };
    let (mut replay, x, left) = recorded(&rig);
    // As many as there could be buffers of the pass that anybody might have got.
    let kept: Vec<Tensor> = (0..40).map(|seed| random(&rig, seed)).collect();
    let words: Vec<Tensor> = (0..40).map(|i| Tensor::full(&rig, [3], f64::from(i), DType::F32)).collect();
    replay.again(1, &samples(5), &[], &[]).unwrap();
    for (seed, kept) in kept.iter().enumerate() {
        assert_eq!(kept.to_vec::<f32>(), random(&rig, seed as u64).to_vec::<f32>());
    }
    assert!(words.iter().enumerate().all(|(i, words)| words.to_vec::<f32>() == [i as f32; 3]));
    // What it left stays what it is until the next one.
    let before = left.to_vec::<f32>();
    drop((kept, words));
    pass(&random(&rig, 9), 9, &samples(9));
    assert_eq!(left.to_vec::<f32>(), before);
    drop((replay, x));
}

#[test]
fn what_would_be_wrong_in_a_replay_is_refused_and_still_right_once() {
    let Some(rig) = rig(5) else { return };
    let (x, of) = (random(&rig, 1), samples(0));
    type Row<'a> = (&'a dyn Fn() -> Tensor, &'a str);
    let brings = || &x * Tensor::from_slice(&rig, &[2.0f32], [1]);
    let reads = || &x * f64::from(x.to_vec::<f32>()[0]);
    let other = || x.dropout(0.5, &DropoutKey::new(0, 4, 1, samples(0)));
    let fewer = || x.narrow(0, 0, 2).dropout(0.5, &DropoutKey::new(0, 3, 1, samples(0)[..2].into()));
    let rows: [Row<'_>; 4] = [
        (&brings, "values of the host"),
        (&reads, "values of the GPU that are read"),
        (&other, "another step or other samples"),
        (&fewer, "another step or other samples"),
    ];
    for (work, why) in rows {
        let (rehearsal, left) = rig.rehearse(&Room::default(), 3, &of, work).unwrap();
        assert_eq!(left.to_vec::<f32>(), work().to_vec::<f32>(), "{why}");
        assert!(
            rehearsal.refusal().is_some_and(|refusal| refusal.contains(why)),
            "{:?}",
            rehearsal.refusal()
        );
        let words = rehearsal.record(work).expect_err("it was refused").to_string();
        assert!(words.contains("can't be recorded as a graph") && words.contains(why), "{words}");
    }
}

#[test]
fn a_pass_that_panics_leaves_the_device_as_it_was() {
    let Some(rig) = rig(6) else { return };
    let (x, of) = (random(&rig, 1), samples(0));
    let fails = || -> Tensor { panic!("on purpose, with {:?}", (&x + 1.0).dims()) };
    assert!(catch_unwind(AssertUnwindSafe(|| rig.rehearse(&Room::default(), 0, &of, fails))).is_err());
    let (rehearsal, first) = rig.rehearse(&Room::default(), 0, &of, || pass(&x, 0, &of)).unwrap();
    drop(first);
    assert!(catch_unwind(AssertUnwindSafe(|| rehearsal.record(fails))).is_err());
    let (mut replay, x, left) = recorded(&rig);
    replay.again(1, &of, &[], &[]).unwrap();
    assert_eq!(left.to_vec::<f32>(), pass(&x, 1, &of).to_vec::<f32>());
}

#[test]
fn a_cpu_has_nothing_to_record() {
    let made = Device::cpu(1).rehearse(&Room::default(), 0, &samples(0), || panic!("it isn't made"));
    assert!(made.is_none());
}
