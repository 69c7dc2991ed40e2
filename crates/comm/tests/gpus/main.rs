//! Groups over NCCL: ranks as threads with a fake GPU each, whose streams do what they are given as late as events allow. Where
//! there is no C++ compiler, tests say so and pass.

#[path = "../ranks/meeting.rs"]
mod meeting;
mod operations;

use meeting::Meeting;
use phalanx_comm::{Deadline, Error, GpuGroup, Group, Rank, ReduceOp, Trail, Unfit, Via};
use phalanx_fake_cuda::FakeCuda;
use phalanx_tensor::{Arena, DType, Device, GpuOptions, GpuSpan, Layout, Tensor};
use std::fmt::Debug;
use std::path::Path;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

/// Longer than anything takes that goes well.
const LONG: Duration = Duration::from_secs(60);

fn fake() -> Option<FakeCuda> {
    let manifest = Path::new(env!("CARGO_MANIFEST_DIR"));
    let fake = FakeCuda::new(Path::new(env!("CARGO_TARGET_TMPDIR")), &manifest.join("../cuda/kernels"), &[])?;
    fake.gpus(8);
    Some(fake)
}

fn device(fake: &FakeCuda, gpu: usize) -> Device {
    let options = GpuOptions { libraries: vec![fake.folder().to_owned()], ..GpuOptions::default() };
    Device::cuda(gpu as u32, &options).unwrap_or_else(|error| panic!("{error}"))
}

/// A rank with its group, its GPU, and numbers on it: two parameters whose numbers lie behind each other. What is lent has the
/// padding between them, too, so that it is a multiple of 64 numbers.
struct OnGpu {
    group: Group,
    gpus: GpuGroup,
    arena: Arena,
    n: usize,
}

impl OnGpu {
    fn span(&self) -> GpuSpan<f32> {
        self.arena.gpu_span(0..1).unwrap()
    }

    /// What each rank has before an operation, and what lies behind it.
    fn start(&self, rank: usize) -> Vec<f32> {
        (0..self.n).map(|i| ((rank + 2) * (i % 7 + 1)) as f32).collect()
    }

    fn numbers(&self) -> Vec<f32> {
        self.arena.tensor(0).to_vec()
    }

    fn rank(&self) -> usize {
        self.group.rank().index()
    }
}

/// Runs `f` on so many ranks with a GPU each, which holds `n` numbers of the rank's own; gives what they give, by rank.
fn ranks<R: Send>(fake: &FakeCuda, ranks: usize, n: usize, f: impl Fn(OnGpu) -> R + Sync) -> Vec<R> {
    let (f, all_joined) = (&f, Meeting::of(ranks));
    std::thread::scope(|scope| {
        let run = |group: Group| {
            let device = device(fake, group.rank().index());
            let gpus = GpuGroup::over(&group, device.gpu().unwrap(), Via::CommStream).unwrap().unwrap();
            // Whoever ends the group next would end it for one who is still joining.
            all_joined.wait();
            let arena = Arena::new(&device, DType::F32, &Layout::new(&[[n].into(), [1].into()]));
            let on_gpu = OnGpu { group, gpus, arena, n };
            let mut all = vec![-1.0; on_gpu.arena.layout().len()];
            all[on_gpu.arena.layout().range(0)].copy_from_slice(&on_gpu.start(on_gpu.rank()));
            on_gpu.arena.write_flat(&all);
            f(on_gpu)
        };
        let threads: Vec<_> =
            Group::threads(ranks).into_iter().map(|group| scope.spawn(move || run(group))).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

fn soon() -> Deadline {
    Deadline::after(LONG)
}

#[test]
fn numbers_that_come_before_and_are_used_after_need_no_wait() {
    let Some(fake) = fake() else { return };
    for seed in 0..8 {
        fake.seed(seed);
        let left = ranks(&fake, 2, 4, |own| {
            // Three sums, each of what the one before left: all are given before any is waited for.
            let first = own.gpus.start_all_reduce(own.span(), ReduceOp::Sum).unwrap();
            drop(first);
            let second = own.gpus.start_all_reduce(own.span(), ReduceOp::Sum).unwrap();
            drop(second);
            let third = own.gpus.start_all_reduce(own.span(), ReduceOp::Sum).unwrap();
            drop(third.wait(soon()).unwrap());
            own.numbers()
        });
        let want: Vec<f32> = (1..=4).map(|i| (5 * 4 * i) as f32).collect();
        assert_eq!(left, [want.clone(), want], "seed {seed}");
    }
    assert_eq!(fake.damage(), [""; 0]);
}

#[test]
#[should_panic(expected = "being written")]
fn numbers_are_nobody_elses_while_they_are_lent() {
    let Some(fake) = fake() else { panic!("being written, if there were a compiler") };
    let group = Group::solo();
    let device = device(&fake, 0);
    let gpus = GpuGroup::over(&group, device.gpu().unwrap(), Via::CommStream).unwrap().unwrap();
    let arena = Arena::new(&device, DType::F32, &Layout::new(&[[4].into()]));
    let _work = gpus.start_all_reduce(arena.gpu_span::<f32>(0..1).unwrap(), ReduceOp::Sum).unwrap();
    arena.tensor(0).to_vec::<f32>();
}

/// Holds two ranks' steps to making nothing that `made` counts, from the third on. What a rank begins with goes from step to step.
fn make_nothing_new<T, M: PartialEq + Debug + Send>(
    fake: &FakeCuda,
    (n, made): (usize, impl Fn() -> M + Sync),
    begin: impl Fn(&OnGpu) -> T + Sync,
    step: impl Fn(&OnGpu, T) -> T + Sync,
) {
    let counts = Mutex::new(Vec::new());
    ranks(fake, 2, n, |own| {
        let mut with = begin(&own);
        for _ in 0..6 {
            with = step(&own, with);
            own.group.barrier().unwrap();
            if own.rank() == 0 {
                counts.lock().unwrap().push(made());
            }
            own.group.barrier().unwrap();
        }
    });
    let counts = counts.into_inner().unwrap();
    assert!(counts[2..].windows(2).all(|pair| pair[0] == pair[1]), "{counts:?}");
}

#[test]
fn steps_make_no_new_events() {
    let Some(fake) = fake() else { return };
    let made = || fake.calls("cuEventCreate");
    make_nothing_new(
        &fake,
        (4, made),
        |_| (),
        |own, ()| {
            own.gpus.start_all_reduce(own.span(), ReduceOp::Sum).unwrap().wait(soon()).unwrap();
        },
    );
}

#[test]
fn why_nccl_cannot_be_used_is_told_on_all_ranks() {
    let Some(fake) = fake() else { return };
    let meet = |gpus: [usize; 3], without: Option<usize>| {
        let (fake, bare) = (&fake, tempfile::tempdir().unwrap());
        for entry in std::fs::read_dir(fake.folder()).unwrap() {
            let path = entry.unwrap().path();
            let name = path.file_name().unwrap().to_owned();
            if name != "libnccl.so.2" && path.is_file() {
                std::fs::copy(&path, bare.path().join(name)).unwrap();
            }
        }
        let meet = |group: Group| {
            let rank = group.rank().index();
            let folder = if without == Some(rank) { bare.path() } else { fake.folder() };
            let options = GpuOptions { libraries: vec![folder.to_owned()], ..GpuOptions::default() };
            let device = Device::cuda(gpus[rank] as u32, &options).unwrap();
            let met = GpuGroup::over(&group, device.gpu().unwrap(), Via::CommStream).unwrap();
            // The group is as good as before.
            group.barrier().unwrap();
            met.err()
        };
        std::thread::scope(|scope| {
            let threads: Vec<_> =
                Group::threads(3).into_iter().map(|group| scope.spawn(move || meet(group))).collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect::<Vec<_>>()
        })
    };
    let shared = Some(Unfit::SharedGpu { ranks: [Rank(0), Rank(2)] });
    assert_eq!(meet([0, 1, 0], None), [shared.clone(), shared.clone(), shared]);
    if std::process::Command::new("ldconfig")
        .arg("-p")
        .output()
        .is_ok_and(|list| String::from_utf8_lossy(&list.stdout).contains("libnccl.so.2"))
    {
        return eprintln!("skipped: this machine has NCCL");
    }
    let missing = meet([0, 1, 2], Some(1));
    for (rank, why) in missing.into_iter().enumerate() {
        let why = why.unwrap();
        assert!(matches!(why, Unfit::Missing { rank: Rank(1), .. }), "rank {rank}: {why}");
        let words = why.to_string();
        assert!(words.contains("rank 1") && words.contains("nvidia-nccl-cu13"), "{words}");
        assert_eq!(words.contains("libnccl.so.2"), rank == 1, "what was tried is known there: {words}");
    }
}

/// What the others come to, and after how long, where rank 1 does this and not the operation.
fn without_one(fake: &FakeCuda, instead: impl Fn(&OnGpu) + Sync) -> Vec<(Error, Duration)> {
    let results = ranks(fake, 3, 4, |own| {
        if own.rank() == 1 {
            // Not before the others are in it.
            [0, 2].into_iter().for_each(|other| own.group.receive(&mut [0u8], Rank(other)).unwrap());
            instead(&own);
            return None;
        }
        let work = own.gpus.start_all_reduce(own.span(), ReduceOp::Sum).unwrap();
        own.group.send(&[0u8], Rank(1)).unwrap();
        let start = Instant::now();
        let error = work.wait(soon()).err().expect("one rank is missing");
        // What the GPU had of it has ended, so that it isn't waited for in vain.
        own.arena.tensor(1).to_vec::<f32>();
        Some((error, start.elapsed()))
    });
    results.into_iter().flatten().collect()
}

#[test]
fn a_rank_that_ends_the_group_ends_what_gpus_wait_for() {
    let Some(fake) = fake() else { return };
    for (error, waited) in without_one(&fake, |own| own.group.abort("it has had enough")) {
        let by_it = matches!(&error, Error::Aborted { by: Rank(1), reason } if reason == "it has had enough");
        assert!(by_it && waited < LONG / 2, "{error} after {waited:?}");
    }
    assert_eq!((fake.damage(), fake.nccl().live()), (Vec::new(), 0));
}

#[test]
fn a_rank_that_leaves_is_missed_by_the_others() {
    let Some(fake) = fake() else { return };
    // It goes without a word of failure, and whoever sees that first tells the other.
    let found = without_one(&fake, |_| ());
    let names_it = |error: &Error| error.to_string().contains("all-reduce of 64 float32 by NCCL");
    assert!(found.iter().any(|(error, _)| names_it(error)), "{found:?}");
    for (error, waited) in found {
        let lost = matches!(&error, Error::PeerLost { peer: Rank(1), .. });
        assert!(lost && waited < LONG / 2, "{error} after {waited:?}");
    }
}

#[test]
fn a_deadline_names_the_operation_and_ends_it() {
    let Some(fake) = fake() else { return };
    ranks(&fake, 2, 4, |own| {
        if own.rank() == 1 {
            // Alive, in the group, and elsewhere.
            while own.group.barrier().is_ok() {}
            return;
        }
        let work = own.gpus.start_all_reduce(own.span(), ReduceOp::Sum).unwrap();
        let error = work.wait(Deadline::after(Duration::from_millis(50))).err().unwrap();
        let words = error.to_string();
        let late = matches!(&error, Error::Timeout { missing, .. } if *missing == [Rank(1)]);
        assert!(late && words.contains("all-reduce of 64 float32 by NCCL"), "{words}");
    });
}

#[test]
fn what_is_joined_is_waited_for_in_its_order_before_it_is_read() {
    let Some(fake) = fake() else { return };
    const SUMS: usize = 3;
    ranks(&fake, 2, 4, |own| {
        let (span, gpus, trail) = (own.span(), Arc::new(own.gpus), Trail::default());
        let sum = |span, most| trail.join(&gpus, gpus.start_all_reduce(span, ReduceOp::Sum)?, most);
        if own.group.rank() == Rank(1) {
            // Later than the other has gone on from its first ones.
            own.group.receive(&mut [0u8], Rank(0)).unwrap();
            let summed = (0..SUMS).try_fold(span, |span, _| sum(span, SUMS)).unwrap();
            drop(summed);
            return trail.settle().unwrap();
        }
        let span = (1..SUMS).try_fold(span, |span, _| sum(span, SUMS)).unwrap();
        own.group.send(&[0u8], Rank(1)).unwrap();
        drop(sum(span, 0).unwrap());
        // The others' 3 and this one's 2, doubled by each further sum.
        assert_eq!(own.arena.tensor(0).to_vec::<f32>()[..2], [5.0 * 4.0, 10.0 * 4.0]);
        // The other has left by now, or will.
        let error = sum(own.arena.gpu_span(0..1).unwrap(), SUMS).and_then(|_| trail.settle()).unwrap_err();
        assert!(matches!(&error, Error::PeerLost { peer: Rank(1), .. }), "{error}");
        own.arena.tensor(1).to_vec::<f32>();
    });
    assert_eq!(fake.damage(), [""; 0]);
}

/// Of a recording that fails there is nothing to wait for: streams and numbers are as usable as before.
#[test]
fn what_was_recorded_in_vain_is_given_back() {
    let Some(fake) = fake() else { return };
    ranks(&fake, 2, 4, |own| {
        let gpu = own.arena.device().gpu().unwrap();
        let mut work = None;
        let recorded = gpu.compute().capture(|| {
            work = Some(own.gpus.start_all_reduce(own.span(), ReduceOp::Sum).unwrap());
            Err::<(), _>(phalanx_cuda::Error::NotRecorded { what: "a rank that is lost".to_owned() })
        });
        assert!(recorded.is_err());
        drop(work);
        assert!(!gpu.compute().is_capturing().unwrap());
        assert_eq!(own.numbers(), own.start(own.rank()), "nobody has summed anything");
        drop(own.gpus.start_all_reduce(own.span(), ReduceOp::Sum).unwrap().wait(soon()).unwrap());
        assert_eq!(own.numbers()[..2], [5.0, 10.0]);
    });
    assert_eq!((fake.damage(), fake.nccl().live()), (Vec::new(), 0));
}

#[test]
fn a_trail_waits_again_after_a_recording_that_was_given_up() {
    let Some(fake) = fake() else { return };
    ranks(&fake, 2, 4, |own| {
        let (span, gpus, trail) = (own.span(), Arc::new(own.gpus), Trail::default());
        let given_up = || trail.recorded(|| std::panic::resume_unwind(Box::new("a rank is lost")));
        assert!(std::panic::catch_unwind(std::panic::AssertUnwindSafe(given_up)).is_err());
        if own.group.rank() == Rank(1) {
            // It leaves, once the other waits.
            return own.group.receive(&mut [0u8], Rank(0)).unwrap();
        }
        let summed = trail.join(&gpus, gpus.start_all_reduce(span, ReduceOp::Sum).unwrap(), usize::MAX);
        drop(summed.unwrap());
        own.group.send(&[0u8], Rank(1)).unwrap();
        let error = trail.settle().unwrap_err();
        assert!(matches!(&error, Error::PeerLost { peer: Rank(1), .. }), "{error}");
    });
}

/// Where silence is no error, either: each group is waited with for longer than one that has left is given time.
#[test]
fn a_rank_that_leaves_is_missed_in_the_turn_of_its_group() {
    let Some(fake) = fake() else { return };
    let run = |group: Group| {
        let group = group.with_silence(None).with_timeout(LONG);
        let device = device(&fake, group.rank().index());
        let gpu = device.gpu().unwrap();
        let of = |ranks: [u32; 2]| {
            let two = group.subgroup(&ranks.map(Rank)).unwrap();
            two.map(|two| Arc::new(GpuGroup::over(&two, gpu, Via::OwnStream).unwrap().unwrap()))
        };
        let both = [of([0, 1]), of([0, 2])];
        group.barrier().unwrap();
        let [Some(first), Some(second)] = both else {
            // The last one leaves at once, the other when the first has found that out.
            return if group.rank() == Rank(1) {
                drop(group.receive(&mut [0u8], Rank(0)))
            };
        };
        let arena = Arena::new(&device, DType::F32, &Layout::new(&[[4].into()]));
        let (trail, start) = (Trail::default(), Instant::now());
        let sum = second.start_all_reduce(arena.gpu_span::<f32>(0..1).unwrap(), ReduceOp::Sum);
        drop(sum.and_then(|sum| sum.join()).unwrap());
        trail.note_all(&[first, second], "a pass that is replayed").unwrap();
        let error = trail.settle().unwrap_err();
        let lost = matches!(&error, Error::PeerLost { .. });
        assert!(lost && start.elapsed() < LONG / 2, "{error} after {:?}", start.elapsed());
        let _ = group.send(&[0u8], Rank(1));
    };
    std::thread::scope(|scope| {
        Group::threads(3).into_iter().for_each(|group| drop(scope.spawn(|| run(group))));
    });
}

#[test]
fn what_nccl_says_is_told_with_what_was_done() {
    let Some(fake) = fake() else { return };
    ranks(&fake, 1, 4, |own| {
        // What a remote rank's end looks like from here.
        fake.nccl().fail("ncclCommGetAsyncError", 2, 6);
        let failed = own.gpus.start_all_reduce(own.span(), ReduceOp::Sum);
        let error = failed.and_then(|work| work.wait(soon())).err().unwrap();
        let words = error.to_string();
        let parts = ["all-reduce of 64 float32", "remote process exited", "hint:"];
        assert!(parts.iter().all(|part| words.contains(part)), "{words}");
        assert!(own.group.barrier().is_err(), "the group has ended with it");
    });
}

#[test]
fn a_group_that_is_rebuilt_has_a_communicator_of_its_own() {
    let Some(fake) = fake() else { return };
    let sums = ranks(&fake, 3, 4, |own| {
        if own.rank() == 2 {
            [0, 1].into_iter().for_each(|other| own.group.receive(&mut [0u8], Rank(other)).unwrap());
            own.group.abort("it leaves");
            return None;
        }
        let work = own.gpus.start_all_reduce(own.span(), ReduceOp::Sum).unwrap();
        own.group.send(&[0u8], Rank(2)).unwrap();
        work.wait(soon()).err().expect("one rank is missing");
        let OnGpu { group, gpus, arena, .. } = own;
        drop(gpus);
        let group = group.rebuild(&[Rank(0), Rank(1)], phalanx_comm::Generation(1)).unwrap();
        let gpus = GpuGroup::over(&group, arena.device().gpu().unwrap(), Via::CommStream).unwrap().unwrap();
        arena.write_flat(&vec![2.0f32; arena.layout().len()]);
        drop(
            gpus.start_all_reduce(arena.gpu_span::<f32>(0..1).unwrap(), ReduceOp::Sum)
                .unwrap()
                .wait(soon())
                .unwrap(),
        );
        Some(arena.tensor(0).to_vec::<f32>())
    });
    assert_eq!(sums, [Some(vec![4.0; 4]), Some(vec![4.0; 4]), None]);
    assert_eq!(fake.nccl().live(), 0);
}

/// By one communicator both would wait for the other to receive.
#[test]
fn two_that_send_to_each_other_first_have_a_stream_for_each_way() {
    let Some(fake) = fake() else { return };
    let run = |group: Group| {
        let device = device(&fake, group.rank().index());
        let ways = [[Rank(0), Rank(1)], [Rank(1), Rank(0)], [Rank(1), Rank(2)]];
        let own = GpuGroup::pairs(&group, device.gpu().unwrap(), &ways).unwrap().unwrap();
        let rank = group.rank();
        let of: Vec<[Rank; 2]> = own.iter().map(|(pair, _)| *pair).collect();
        assert_eq!(of, ways.into_iter().filter(|pair| pair.contains(&rank)).collect::<Vec<_>>());
        let deadline = Deadline::after(LONG);
        let lent = |word: u32| Tensor::from_slice(&device, &[f64::from(word); 100], [100]).to_lend().unwrap();
        let sends = |[from, _]: [Rank; 2]| from == rank;
        let sent = own.iter().filter(|(pair, _)| sends(*pair));
        let sent: Vec<_> = sent.map(|(_, two)| two.start_send(lent(rank.0 + 1), Rank(1)).unwrap()).collect();
        for ([from, _], two) in own.iter().filter(|(pair, _)| !sends(*pair)) {
            let came = two.start_receive(lent(0), Rank(0)).unwrap().wait(deadline).unwrap();
            assert_eq!(came.into_tensor().to_vec::<f64>(), [f64::from(from.0 + 1); 100]);
        }
        sent.into_iter().for_each(|work| drop(work.wait(deadline).unwrap()));
    };
    std::thread::scope(|scope| {
        Group::threads(3).into_iter().for_each(|group| drop(scope.spawn(|| run(group))));
    });
}
