//! What goes between a GPU's arena and pinned memory of the host beside what the GPU computes.

use crate::rig::rig;
use phalanx_fake_cuda::Count;
use phalanx_tensor::{Arena, DType, Device, Layout, Tensor};
use std::panic::{AssertUnwindSafe, catch_unwind};

fn layout() -> Layout {
    Layout::new(&[[640].into(), [64].into()])
}

/// Values come up for what is computed with them, and go down to where the host moves them, step after step.
#[test]
fn values_that_come_up_and_go_down_are_those_of_their_step() {
    // The fake mixes the streams in another way for each.
    for seed in 1..24 {
        let Some(rig) = rig(seed) else { return };
        let host = Device::cpu(1);
        let pinned = || Arena::pinned(&host, &rig, DType::F32, &layout()).unwrap();
        let (values, sums) = (pinned(), pinned());
        let of = |device: &Device| Arena::new(device, DType::F32, &layout());
        let (units, grads) = ([of(&rig), of(&rig)], of(&rig));
        let mut want: Vec<f32> = (0..704).map(|i| (i % 17) as f32).collect();
        values.flat_mut::<f32>()[..704].copy_from_slice(&want);
        for step in 0..6 {
            // Units are used in turn, each while the other comes.
            let unit = &units[step % 2];
            let span =
                unit.flat_mut::<f32>().come_up(&values, &[(0, 64..640), (576, 0..64), (640, 640..704)]);
            let before = (0..4).fold(units[1 - step % 2].tensor(0), |x, _| x.relu() + 1.0);
            // What comes up can be read meanwhile.
            assert_eq!(values.flat::<f32>()[..704], want);
            drop(span.into_span());
            grads.tensor(0).copy_from(&(&unit.tensor(0) * 2.0));
            grads.tensor(1).copy_from(&unit.tensor(1));
            let going =
                grads.flat_mut::<f32>().go_down(&[(0..576, 64), (576..640, 0), (640..704, 640)], &sums);
            drop(before);
            // Whoever writes next to what goes down waits for that.
            drop(going);
            grads.tensor(0).fill(-1.0);
            let sums = sums.flat::<f32>();
            let mut all = values.flat_mut::<f32>();
            for (i, want) in want.iter_mut().enumerate() {
                let sum = if i < 640 { *want * 2.0 } else { *want };
                assert_eq!(sums[i], sum, "element {i} of step {step}, seed {seed}");
                *want = sum % 13.0 + step as f32;
                all[i] = *want;
            }
        }
    }
}

#[test]
fn values_that_come_and_go_take_no_memory_and_no_turn_of_what_is_computed() {
    let Some(rig) = rig(1) else { return };
    let Some(fake) = rig.fake() else { return };
    let pinned = Arena::pinned(&Device::cpu(1), &rig, DType::F32, &layout()).unwrap();
    let unit = Arena::new(&rig, DType::F32, &layout());
    let step = || {
        drop(unit.flat_mut::<f32>().come_up(&pinned, &[(0, 0..704)]).into_span());
        unit.tensor(0).copy_from(&(unit.tensor(0) + 1.0));
        drop(unit.flat_mut::<f32>().go_down(&[(0..640, 0)], &pinned).into_span());
    };
    (0..3).for_each(|_| step());
    let calls = || {
        ["cuMemAlloc_v2", "cuMemHostAlloc", "cuEventCreate", "cuStreamCreateWithPriority"]
            .map(|c| fake.calls(c))
    };
    let (before, beside) = (calls(), fake.count(Count::BytesBeside));
    (0..10).for_each(|_| step());
    assert_eq!(calls(), before);
    assert_eq!(fake.count(Count::BytesBeside) - beside, 10 * 4 * (704 + 640));
    assert_eq!(pinned.flat::<f32>()[..640], [13.0; 640]);
}

/// The host waits for copies that write what it wants to read, and for all before it writes.
#[test]
fn who_reads_waits_for_what_goes_down_alone() {
    let Some(rig) = rig(1) else { return };
    let Some(fake) = rig.fake() else { return };
    let pinned = Arena::pinned(&Device::cpu(1), &rig, DType::F32, &layout()).unwrap();
    let unit = Arena::new(&rig, DType::F32, &layout());
    pinned.flat_mut::<f32>().fill(2.0);
    let looks = || fake.calls("cuEventQuery") + fake.calls("cuEventSynchronize");
    let coming = unit.flat_mut::<f32>().come_up(&pinned, &[(0, 0..704)]);
    let before = looks();
    assert_eq!(pinned.flat::<f32>()[5], 2.0);
    assert_eq!(pinned.tensor(1).to_vec::<f32>(), [2.0; 64]);
    assert_eq!(looks(), before, "nobody writes there");
    pinned.flat_mut::<f32>()[0] = 3.0;
    assert!(looks() > before, "what comes up is to be read first");
    let going = coming.into_span().go_down(&[(0..1, 1)], &pinned);
    assert_eq!(pinned.flat::<f32>()[..3], [3.0, 2.0, 2.0]);
    drop(going);
}

#[test]
fn copies_that_cannot_be_are_bugs() {
    let Some(rig) = rig(1) else { return };
    let host = Device::cpu(1);
    let pinned = Arena::pinned(&host, &rig, DType::F32, &layout()).unwrap();
    let (unit, plain) = (Arena::new(&rig, DType::F32, &layout()), Arena::new(&host, DType::F32, &layout()));
    let words = |work: &dyn Fn()| {
        let panic = catch_unwind(AssertUnwindSafe(work)).unwrap_err();
        panic
            .downcast_ref::<String>()
            .cloned()
            .unwrap_or_else(|| panic.downcast_ref::<&str>().unwrap().to_string())
    };
    let up = |to: &Arena, from: &Arena, runs| drop(to.flat_mut::<f32>().come_up(from, runs));
    assert!(words(&|| up(&plain, &pinned, &[(0, 0..1)])).contains("come_up: the span lies on a CPU"));
    assert!(words(&|| up(&unit, &plain, &[(0, 0..1)])).contains("see Arena::pinned"));
    assert!(words(&|| up(&unit, &pinned, &[(700, 0..5)])).contains("of a span of 704"));
    assert!(words(&|| up(&unit, &pinned, &[(0, 700..705)])).contains("of an arena of 704"));
    let written = pinned.range_mut::<f32>(1..2);
    assert!(
        words(&|| up(&unit, &pinned, &[(0, 0..1)])).contains("is read while its buffer is being written")
    );
    drop(written);
    let read = pinned.flat::<f32>();
    let down = || drop(unit.flat_mut::<f32>().go_down(&[(0..1, 0)], &pinned));
    assert!(words(&down).contains("is to be written while its buffer is being read"));
    drop(read);
    let halves = Arena::pinned(&host, &rig, DType::BF16, &layout()).unwrap();
    assert!(words(&|| up(&unit, &halves, &[(0, 0..1)])).contains("arena: holds bf16, was asked for f32"));
    // None of them kept a borrow.
    up(&unit, &pinned, &[(0, 0..704)]);
    down();
    assert_eq!(Tensor::to_vec::<f32>(&unit.tensor(1)), [0.0; 64]);
}

#[test]
fn memory_that_the_host_has_not_is_told() {
    let Some(rig) = rig(1) else { return };
    let Some(fake) = rig.fake() else { return };
    fake.fail("cuMemHostAlloc", 1, 2);
    let error =
        Arena::pinned(&Device::cpu(1), &rig, DType::F32, &layout()).map(drop).unwrap_err().to_string();
    assert!(error.contains("2816 bytes of the host's memory, pinned"), "{error}");
}
