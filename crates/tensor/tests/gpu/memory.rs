//! What is told where a GPU has no memory left: who holds it, which adds up, and what would fit.

use crate::rig::rig;
use phalanx_cuda::Amount;
use phalanx_fake_cuda::Count;
use phalanx_tensor::{Arena, DType, Grads, Layout, OutOfMemory, Purpose, Room, Tensor, Values};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

const KIB: usize = 1 << 10;
const MIB: usize = 1 << 20;

/// The bytes of one of its lines.
fn of(told: &OutOfMemory, words: &str) -> usize {
    let found: Vec<u64> =
        told.held.iter().filter(|(what, _)| what.contains(words)).map(|(_, bytes)| *bytes).collect();
    assert_eq!(found.len(), 1, "{words}: {told:?}");
    found[0] as usize
}

#[test]
fn who_holds_a_gpus_memory_is_told_and_adds_up() {
    let Some(rig) = rig(1) else { return };
    let Some(fake) = rig.fake() else { return };
    let gpu = rig.gpu().unwrap();
    let at_first = fake.count(Count::Bytes) as usize;
    let layout = |kib: usize| Layout::new(&[[kib * KIB / 4].into()]);
    let values = Arena::new(&rig, DType::F32, &layout(768)).held_for(Purpose::Values);
    let grads = Grads::new(&rig, DType::F32, &layout(768));
    let state = Arena::new(&rig, DType::F32, &layout(1536)).held_for(Purpose::Optimizer);
    let others = Arena::new(&rig, DType::F32, &layout(64));
    let unused = Arena::new(&rig, DType::F32, &layout(512)).held_for(Purpose::Values);
    for arena in [&values, grads.arena(), &state, &others] {
        arena.copy_from(&arena.like());
    }
    // One whose pieces come and go lies in buffers, and is counted all the same.
    let cut = Arena::new(&rig, DType::F32, &Layout::new(&[[64 * KIB].into(), [64 * KIB].into()]));
    let cut = cut.held_for(Purpose::Casts);
    cut.cut(&[0..1, 1..2]);
    cut.tensor(0).fill(1.0);
    let samples = Tensor::zeros(&rig, [MIB], DType::U8).held_for(Purpose::Samples);
    let room = Room::default();
    let pass = || drop(Tensor::zeros(&rig, [128 * KIB], DType::U8));
    let (rehearsal, ()) = rig.rehearse(&room, 0, &Arc::from([0]), pass).unwrap();
    drop(rehearsal);
    let batch = vec![1u8; 192 * KIB];
    let landed = rig.upload(&[(Values::U8(&batch), [batch.len()].into())]).unwrap();
    let foreign = gpu.alloc(gpu.compute(), 320 * KIB).unwrap();
    // What waits is given back before anything fails.
    drop(Tensor::zeros(&rig, [2 * MIB], DType::U8));
    rig.begin_pass(8);
    let activations: Vec<Tensor> = (0..3).map(|_| Tensor::zeros(&rig, [256 * KIB], DType::U8)).collect();
    let free = 300 * KIB;
    rig.release_cached();
    fake.limit_memory(0, fake.count(Count::Bytes) + free as u64);
    let failed = catch_unwind(AssertUnwindSafe(|| Tensor::zeros(&rig, [768 * KIB], DType::U8)));
    let words = *failed.unwrap_err().downcast::<String>().unwrap();
    let told = rig.lacked().expect("it was told just now").clone();
    assert_eq!(told.to_string(), words);
    assert_eq!((told.gpu, told.asked as usize, told.purpose), (0, 768 * KIB, Purpose::Pass));
    for (what, bytes) in [
        ("values of parameters", 768 * KIB),
        ("gradients", 768 * KIB),
        ("optimizer's state", 1536 * KIB),
        ("casts", 256 * KIB),
        ("resident samples", MIB),
        ("activations", 768 * KIB),
        ("batches on their way", 192 * KIB),
        ("workspace", at_first),
        ("other arenas", 64 * KIB),
        ("recorded passes", 128 * KIB),
        ("wait to be used again", 0),
    ] {
        assert_eq!(of(&told, what), bytes, "{what}: {words}");
        assert_eq!(words.contains(&format!("{} by", Amount(bytes as u64))), bytes > 0, "{what}: {words}");
    }
    assert_eq!(told.others as usize, 320 * KIB, "what isn't the device's: {words}");
    let held: u64 = told.held.iter().map(|(_, bytes)| bytes).sum();
    assert_eq!(held + told.others + told.free, told.total, "{words}");
    assert_eq!((told.free as usize, told.total), (free, fake.count(Count::Bytes) + free as u64));
    // 1536 KiB for 8 samples, of 768 + 300 that there are for a pass.
    assert_eq!(told.fits, Some((8, 5)), "{words}");
    for part in
        ["about 5 of the 8 samples", "--batch-size", "train.accumulate 2 times", "data.resident=never"]
    {
        assert!(words.contains(part), "{part}: {words}");
    }
    drop((samples, activations, landed, foreign, room, unused, cut));
}

#[test]
fn what_is_dropped_or_used_for_something_else_is_counted_no_more() {
    let Some(rig) = rig(1) else { return };
    let Some(fake) = rig.fake() else { return };
    let zeros = || Tensor::zeros(&rig, [512 * KIB], DType::U8);
    drop(zeros().held_for(Purpose::Samples));
    let again = zeros();
    {
        let room = Room::default();
        let pass = || drop(Tensor::zeros(&rig, [MIB], DType::U8));
        drop(rig.rehearse(&room, 0, &Arc::from([0]), pass).unwrap());
    }
    drop(rig.upload(&[(Values::U8(&[1; 64 * KIB]), [64 * KIB].into())]));
    let arena = Arena::new(&rig, DType::F32, &Layout::new(&[[1024].into()])).held_for(Purpose::Values);
    arena.copy_from(&arena.like());
    drop(arena);
    assert_eq!(rig.live_bytes(), 512 * KIB);
    assert_eq!(rig.lacked(), None);
    fake.limit_memory(0, fake.count(Count::Bytes));
    let more = Arena::new(&rig, DType::F32, &Layout::new(&[[MIB].into()])).held_for(Purpose::Gradients);
    let failed = catch_unwind(AssertUnwindSafe(|| more.tensor(0).fill(1.0)));
    let told = rig.lacked().expect("it was told").clone();
    let words = *failed.unwrap_err().downcast::<String>().unwrap();
    assert_eq!(told.purpose, Purpose::Gradients);
    for (what, bytes) in
        [("samples", 0), ("activations", 512 * KIB), ("recorded", 0), ("values of parameters", 0)]
    {
        assert_eq!(of(&told, what), bytes, "{what}: {words}");
    }
    let held: u64 = told.held.iter().map(|(_, bytes)| bytes).sum();
    assert_eq!((held + told.free, told.others), (told.total, 0), "{words}");
    assert_eq!(told.fits, None, "no pass was told of");
    assert_eq!(rig.live_bytes(), 512 * KIB, "what there is no memory for isn't in use");
    drop(again);
}
