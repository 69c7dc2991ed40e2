//! Each operation: its numbers, its order, calls that can't be, and ranks that are lost in it.

use crate::{OnGpu, fake, make_nothing_new, ranks, soon};
use phalanx_comm::{Deadline, Error, GpuTransfer, GpuWork, Rank, ReduceOp, bf16, f16};
use phalanx_fake_cuda::FakeCuda;
use phalanx_tensor::{Element, GpuSpan, GpuTensor, Tensor};
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

/// Number `i` of a rank: one that every type has, and no other rank.
fn value(rank: usize, i: usize) -> f64 {
    (rank * 60 + i % 60) as f64
}

/// What no rank has.
const NOBODYS: f64 = 250.0;

fn numbers<T: Element>(values: impl IntoIterator<Item = f64>) -> Vec<T> {
    values.into_iter().map(T::from_f64).collect()
}

/// A rank's first numbers.
fn first<T: Element>(rank: usize, n: usize) -> Vec<T> {
    numbers((0..n).map(|i| value(rank, i)))
}

fn nobodys<T: Element>(n: usize) -> Vec<T> {
    numbers(vec![NOBODYS; n])
}

/// A copy on the rank's GPU, to be lent.
fn lent<T: Element>(own: &OnGpu, values: &[T]) -> GpuTensor {
    Tensor::from_slice(own.arena.device(), values, [values.len()]).to_lend().unwrap()
}

fn back<T: Element>(lent: GpuTensor) -> Vec<T> {
    lent.into_tensor().to_vec()
}

fn done<L>(work: Result<GpuWork<L>, Error>) -> L {
    work.unwrap().wait(soon()).unwrap()
}

/// All numbers on the rank that gathers or scatters, and elsewhere the rank's part.
fn share(own: &OnGpu, root: Rank, part: Range<usize>) -> GpuSpan<f32> {
    if own.group.rank() == root { own.span() } else { own.span().lending(part) }
}

#[test]
fn every_operation_has_the_numbers_that_it_should() {
    let Some(fake) = fake() else { return };
    for (seed, n_ranks) in [(1, 1), (2, 2), (3, 3), (4, 4)] {
        fake.seed(seed);
        // As many as a slot of an arena has without padding.
        let n = 384;
        ranks(&fake, n_ranks, n, |own| {
            let (rank, part) = (own.rank(), n / n_ranks);
            let all: Vec<Vec<f32>> = (0..n_ranks).map(|rank| own.start(rank)).collect();
            let reduced = |op: fn(f32, f32) -> f32| -> Vec<f32> {
                (0..n).map(|i| all.iter().map(|of| of[i]).reduce(op).unwrap()).collect()
            };
            let sum = reduced(|a, b| a + b);
            let own_part = rank * part..(rank + 1) * part;
            let reset = || {
                let mut values = vec![-1.0; own.arena.layout().len()];
                values[own.arena.layout().range(0)].copy_from_slice(&all[rank]);
                own.arena.write_flat(&values);
            };
            let ops: [(ReduceOp, Vec<f32>); 6] = [
                (ReduceOp::Sum, sum.clone()),
                (ReduceOp::Product, reduced(|a, b| a * b)),
                (ReduceOp::Average, sum.iter().map(|x| x / n_ranks as f32).collect()),
                (ReduceOp::Max, reduced(f32::max)),
                (ReduceOp::Min, reduced(f32::min)),
                (ReduceOp::PremulSum(0.5), sum.iter().map(|x| x * 0.5).collect()),
            ];
            for (op, want) in ops {
                reset();
                drop(own.gpus.start_all_reduce(own.span(), op).unwrap().wait(soon()).unwrap());
                assert_eq!(own.numbers(), want, "{op:?} of {n_ranks} ranks");
            }
            reset();
            let last = Rank(n_ranks as u32 - 1);
            drop(own.gpus.start_reduce(own.span(), ReduceOp::Sum, last).unwrap().wait(soon()).unwrap());
            assert_eq!(own.numbers(), if rank == last.index() { sum.clone() } else { all[rank].clone() });
            reset();
            drop(own.gpus.start_broadcast(own.span(), last).unwrap().wait(soon()).unwrap());
            assert_eq!(own.numbers(), all[last.index()]);
            reset();
            drop(own.gpus.start_all_gather(own.span()).unwrap().wait(soon()).unwrap());
            let want: Vec<f32> = (0..n).map(|i| all[i / part][i]).collect();
            assert_eq!(own.numbers(), want);
            reset();
            drop(own.gpus.start_reduce_scatter(own.span(), ReduceOp::Sum).unwrap().wait(soon()).unwrap());
            assert_eq!(own.numbers()[own_part.clone()], sum[own_part.clone()]);
            for root in [Rank(0), last] {
                reset();
                drop(done(own.gpus.start_gather(share(&own, root, own_part.clone()), root)));
                let want = (0..n).map(|i| all[if rank == root.index() { i / part } else { rank }][i]);
                assert_eq!(own.numbers(), want.collect::<Vec<_>>(), "gather to rank {root} of {n_ranks}");
                reset();
                drop(done(own.gpus.start_scatter(share(&own, root, own_part.clone()), root)));
                let want = (0..n).map(|i| all[if own_part.contains(&i) { root.index() } else { rank }][i]);
                assert_eq!(own.numbers(), want.collect::<Vec<_>>(), "scatter from rank {root} of {n_ranks}");
            }
            reset();
            let room = lent(&own, &vec![-1.0f32; n]);
            let (input, output) = done(own.gpus.start_all_to_all(own.span(), room));
            drop(input);
            assert_eq!(own.numbers(), all[rank], "what was sent stays");
            let want = (0..n).map(|i| all[i / part][own_part.start + i % part]);
            assert_eq!(back::<f32>(output), want.collect::<Vec<_>>(), "all-to-all of {n_ranks}");
            own.gpus.barrier().unwrap();
            // What lies behind them stays.
            assert_eq!(own.arena.tensor(1).to_vec::<f32>(), [-1.0]);
            moved::<f32>(&own, n_ranks);
            moved::<f64>(&own, n_ranks);
            moved::<bf16>(&own, n_ranks);
            moved::<f16>(&own, n_ranks);
            moved::<i64>(&own, n_ranks);
            moved::<u8>(&own, n_ranks);
            if n_ranks == 2 {
                reset();
                let peer = Rank(1 - rank as u32);
                let work = match rank {
                    0 => own.gpus.start_send(own.span(), peer),
                    _ => own.gpus.start_receive(own.span(), peer),
                };
                drop(work.unwrap().wait(soon()).unwrap());
                assert_eq!(own.numbers(), all[0]);
            }
        });
    }
    assert_eq!((fake.damage(), fake.nccl().live()), (Vec::new(), 0));
}

/// Operations that are made of messages, of numbers of one type.
fn moved<T: Element>(own: &OnGpu, n_ranks: usize) {
    let (rank, gpus) = (own.rank(), &own.gpus);
    let of = T::DTYPE;
    for (part, root) in [0, 1, 5].into_iter().flat_map(|part| [0, n_ranks - 1].map(|root| (part, root))) {
        let whole = first::<T>(root, n_ranks * part);
        let own_part = rank * part..(rank + 1) * part;

        let mut parts = nobodys::<T>(n_ranks * part);
        parts[own_part.clone()].copy_from_slice(&first::<T>(rank, part));
        let sent = if rank == root { &parts[..] } else { &parts[own_part.clone()] };
        let got = back::<T>(done(gpus.start_gather(lent(own, sent), Rank(root as u32))));
        let all: Vec<T> = (0..n_ranks).flat_map(|rank| first::<T>(rank, part)).collect();
        let want = if rank == root { all } else { first::<T>(rank, part) };
        assert_eq!(got, want, "gather of {part} {of} to rank {root} of {n_ranks}");

        let room = if rank == root { whole.clone() } else { nobodys::<T>(part) };
        let got = back::<T>(done(gpus.start_scatter(lent(own, &room), Rank(root as u32))));
        let want = if rank == root { whole } else { whole[own_part].to_vec() };
        assert_eq!(got, want, "scatter of {part} {of} from rank {root} of {n_ranks}");

        let (input, room) = (first::<T>(rank, n_ranks * part), nobodys::<T>(n_ranks * part));
        let (sent, got) = done(gpus.start_all_to_all(lent(own, &input), lent(own, &room)));
        let parts = (0..n_ranks * part).map(|i| value(i / part, rank * part + i % part));
        assert_eq!(back::<T>(got), numbers::<T>(parts), "all-to-all of {part} {of}, {n_ranks} ranks");
        assert_eq!(back::<T>(sent), input, "what was sent stays");
    }

    // Some parts are empty, and so is all that the last rank sends.
    let length = |from: usize, to: usize| if from == 3 { 0 } else { (2 * from + 3 * to) % 4 };
    let sends: Vec<usize> = (0..n_ranks).map(|to| length(rank, to)).collect();
    let receives: Vec<usize> = (0..n_ranks).map(|from| length(from, rank)).collect();
    let (input, room) = (first::<T>(rank, sends.iter().sum()), nobodys::<T>(receives.iter().sum()));
    let work = gpus.start_all_to_all_uneven(lent(own, &input), &sends, lent(own, &room), &receives);
    let (sent, got) = done(work);
    let part = |from: usize| {
        let before: usize = (0..rank).map(|to| length(from, to)).sum();
        (before..before + length(from, rank)).map(move |i| value(from, i))
    };
    let want = numbers::<T>((0..n_ranks).flat_map(part));
    assert_eq!(back::<T>(got), want, "uneven all-to-all of {of}, {n_ranks} ranks");
    assert_eq!(back::<T>(sent), input, "what was sent stays");

    // Two messages and one of nothing to the next rank, each of them, and as many from the one before.
    let (next, previous) = ((rank + 1) % n_ranks, (rank + n_ranks - 1) % n_ranks);
    let lengths = if n_ranks > 1 { [2, 0, 3] } else { [0; 3] };
    let mut transfers = Vec::new();
    for (i, &length) in lengths.iter().enumerate().filter(|_| n_ranks > 1) {
        let values = numbers::<T>((0..length).map(|at| value(rank, 10 * i + at)));
        transfers.push(GpuTransfer::Send { values: lent(own, &values), to: Rank(next as u32) });
        let values = lent(own, &nobodys::<T>(length));
        transfers.push(GpuTransfer::Receive { values, from: Rank(previous as u32) });
    }
    let came = done(gpus.start_exchange(transfers));
    let want = lengths.iter().enumerate().filter(|_| n_ranks > 1).flat_map(|(i, &length)| {
        [rank, previous].map(|of| numbers::<T>((0..length).map(|at| value(of, 10 * i + at))))
    });
    let came: Vec<Vec<T>> = came.into_iter().map(back::<T>).collect();
    assert_eq!(came, want.collect::<Vec<_>>(), "exchange of {of}, {n_ranks} ranks");
}

/// Each finds on the GPU what the one before leaves there, and the host waits for none of them.
#[test]
fn messages_come_behind_what_the_gpu_had_and_before_what_it_is_given() {
    let Some(fake) = fake() else { return };
    for seed in 0..8 {
        fake.seed(seed);
        let got = ranks(&fake, 3, 4, |own| {
            let (rank, gpus) = (own.rank(), &own.gpus);
            let copy = |tensor: &Tensor| tensor.to_lend().unwrap();
            let mut all = Tensor::from_slice(own.arena.device(), &first::<f32>(rank, 6), [6]);
            for _ in 0..2 {
                let room = copy(&all);
                let (_, other) = gpus.start_all_to_all(copy(&all), room).unwrap().join().unwrap();
                all = other.into_tensor();
            }
            let room = if rank == 1 { copy(&all) } else { copy(&all.narrow(0, 0, 2)) };
            let part = gpus.start_scatter(room, Rank(1)).unwrap().join().unwrap().into_tensor();
            let part = if rank == 1 { part.narrow(0, 2, 2) } else { part };
            let [next, previous] = [1, 2].map(|by| Rank((rank as u32 + by) % 3));
            let transfers = vec![
                GpuTransfer::Send { values: copy(&part), to: next },
                GpuTransfer::Receive { values: copy(&part), from: previous },
            ];
            let mut came = gpus.start_exchange(transfers).unwrap().join().unwrap();
            let came = came.pop().unwrap().into_tensor();
            let share = if rank == 2 { came.to_lend_among(3, 2).unwrap() } else { copy(&came) };
            gpus.start_gather(share, Rank(2)).unwrap().join().unwrap().into_tensor().to_vec::<f32>()
        });
        let want = [4, 5, 0, 1, 2, 3].map(|i| value(1, i));
        assert_eq!(got[2], numbers::<f32>(want), "seed {seed}");
        assert_eq!(got[..2], [numbers::<f32>([64.0, 65.0]), numbers::<f32>([60.0, 61.0])], "seed {seed}");
    }
    assert_eq!(fake.damage(), [""; 0]);
}

/// Also where the library has yet to connect the ranks when the operation is let go.
#[test]
fn what_nobody_waits_for_is_done_before_its_numbers_are_used() {
    let Some(fake) = fake() else { return };
    for seed in 0..8 {
        fake.seed(seed);
        ranks(&fake, 3, 384, |own| {
            let (rank, all) = (own.rank(), own.start(0));
            drop(own.gpus.start_scatter(share(&own, Rank(0), rank * 128..(rank + 1) * 128), Rank(0)));
            let own_part = rank * 128..(rank + 1) * 128;
            assert_eq!(own.numbers()[own_part.clone()], all[own_part], "seed {seed}");
        });
    }
    assert_eq!((fake.damage(), fake.nccl().live()), (Vec::new(), 0));
}

/// The library connects two ranks when both ask for it, and gives a stream nothing before.
#[test]
fn the_first_messages_are_under_way_once_their_ranks_have_asked() {
    let Some(fake) = fake() else { return };
    ranks(&fake, 2, 4, |own| {
        let (rank, peer) = (own.rank(), Rank(1 - own.rank() as u32));
        let word = lent(&own, &[value(rank, 0)]);
        if rank == 1 {
            own.group.receive(&mut [0u8], peer).unwrap();
            let work = own.gpus.start_exchange(vec![GpuTransfer::Receive { values: word, from: peer }]);
            drop(done(own.gpus.start_all_reduce(own.span(), ReduceOp::Sum)));
            assert_eq!(back::<f64>(done(work).pop().unwrap()), [value(0, 0)]);
        } else {
            let work = own.gpus.start_exchange(vec![GpuTransfer::Send { values: word, to: peer }]);
            let mut work = work.unwrap();
            assert!((0..20).all(|_| !work.poll()), "nobody receives it yet");
            own.group.send(&[0u8], peer).unwrap();
            // What comes next waits for the library to be done with it.
            drop(done(own.gpus.start_all_reduce(own.span(), ReduceOp::Sum)));
            drop(work.wait(soon()).unwrap());
        }
        assert_eq!(own.numbers()[..2], [5.0, 10.0]);
    });
    assert_eq!((fake.damage(), fake.nccl().live()), (Vec::new(), 0));
}

#[test]
fn a_barrier_is_passed_once_all_gpus_have_come_to_it() {
    let Some(fake) = fake() else { return };
    for seed in 0..4 {
        fake.seed(seed);
        let (came, ends) = (AtomicUsize::new(0), Mutex::new(Vec::new()));
        ranks(&fake, 3, 4, |own| {
            let gpu = own.arena.device().gpu().unwrap();
            // Much to do for each GPU, with an event at its end.
            let work: Vec<GpuTensor> = (0..100).map(|_| own.arena.tensor(0).to_lend().unwrap()).collect();
            let end = gpu.event(phalanx_cuda::Timing::No).unwrap();
            gpu.compute().record(&end).unwrap();
            ends.lock().unwrap().push(end);
            came.fetch_add(1, Ordering::SeqCst);
            own.gpus.barrier().unwrap();
            assert_eq!(came.load(Ordering::SeqCst), 3, "seed {seed}");
            let all_done = ends.lock().unwrap().iter().all(|end| end.is_done().unwrap());
            assert!(all_done, "seed {seed}: a GPU has yet to come");
            drop(work);
        });
    }
    assert_eq!((fake.damage(), fake.nccl().live()), (Vec::new(), 0));
}

#[test]
fn steps_make_no_events_and_no_memory_for_messages() {
    let Some(fake) = fake() else { return };
    let made = || (fake.calls("cuEventCreate"), fake.calls("cuMemAlloc_v2"));
    let begin = |own: &OnGpu| lent(own, &[0.0f32; 384]);
    make_nothing_new(&fake, (384, made), begin, |own, room| {
        let (_, room) = done(own.gpus.start_all_to_all(own.span(), room));
        drop(done(own.gpus.start_gather(share(own, Rank(0), 0..192), Rank(0))));
        own.gpus.barrier().unwrap();
        room
    });
}

#[test]
fn calls_that_cannot_be_are_refused_by_name_before_nccl_hears_of_them() {
    let Some(fake) = fake() else { return };
    let of = |own: &OnGpu, n: usize| lent(own, &vec![0.0f32; n]);
    type Call<'a> = &'a (dyn Fn(&OnGpu) + Sync);
    let rows: [(&str, Call<'_>); 14] = [
        ("gather: rank 3 among 3 ranks", &|own| drop(own.gpus.start_gather(of(own, 6), Rank(3)))),
        ("gather: 7 numbers can't be 3 equal parts", &|own| {
            drop(own.gpus.start_gather(of(own, 7), own.group.rank()))
        }),
        ("scatter: rank 9 among 3 ranks", &|own| drop(own.gpus.start_scatter(of(own, 6), Rank(9)))),
        ("scatter: 7 numbers can't be 3 equal parts", &|own| {
            drop(own.gpus.start_scatter(of(own, 7), own.group.rank()))
        }),
        ("all_to_all: 7 numbers in, 7 out, 3 ranks", &|own| {
            drop(own.gpus.start_all_to_all(of(own, 7), of(own, 7)))
        }),
        ("all_to_all: 6 numbers in, 9 out, 3 ranks", &|own| {
            drop(own.gpus.start_all_to_all(of(own, 6), of(own, 9)))
        }),
        ("all_to_all: float32 in, float64 out", &|own| {
            drop(own.gpus.start_all_to_all(of(own, 6), lent(own, &[0.0f64; 6])))
        }),
        ("all_to_all: parts of [1, 2] numbers of 3 in, 3 ranks", &|own| {
            drop(own.gpus.start_all_to_all_uneven(of(own, 3), &[1, 2], of(own, 3), &[1; 3]))
        }),
        ("all_to_all: parts of [1, 1, 2] numbers of 3 out, 3 ranks", &|own| {
            drop(own.gpus.start_all_to_all_uneven(of(own, 3), &[1; 3], of(own, 3), &[1, 1, 2]))
        }),
        // Their sum is 3, if it overflows.
        ("all_to_all: parts of [18446744073709551615, 2, 2] numbers of 3 in", &|own| {
            drop(own.gpus.start_all_to_all_uneven(of(own, 3), &[usize::MAX, 2, 2], of(own, 3), &[1; 3]))
        }),
        ("sends itself 1 numbers and expects 0", &|own| {
            let mut receives = [1; 3];
            receives[own.rank()] = 0;
            drop(own.gpus.start_all_to_all_uneven(of(own, 3), &[1; 3], of(own, 2), &receives))
        }),
        ("exchange: rank 3 among 3 ranks", &|own| {
            drop(own.gpus.start_exchange(vec![GpuTransfer::Send { values: of(own, 1), to: Rank(3) }]))
        }),
        ("exchange: a message between rank", &|own| {
            let from = own.group.rank();
            drop(own.gpus.start_exchange(vec![GpuTransfer::Receive { values: of(own, 1), from }]))
        }),
        ("Broadcast(3): there are 3 ranks", &|own| drop(own.gpus.start_broadcast(own.span(), Rank(3)))),
    ];
    ranks(&fake, 3, 384, |own| {
        for (words, call) in rows {
            let panic = catch_unwind(AssertUnwindSafe(|| call(&own))).expect_err(words);
            let said = panic.downcast_ref::<String>().unwrap();
            assert!(said.contains(words), "{said}");
        }
        own.group.barrier().unwrap();
        assert_eq!(fake.nccl().calls("ncclGroupStart"), 0);
        own.group.barrier().unwrap();
        let (_, got) = done(own.gpus.start_all_to_all(of(&own, 6), lent(&own, &nobodys::<f32>(6))));
        assert_eq!(back::<f32>(got), [0.0; 6]);
    });
    assert_eq!((fake.damage(), fake.nccl().live()), (Vec::new(), 0));
}

#[test]
fn a_message_that_nccl_refuses_is_told_with_its_operation_and_ends_the_group() {
    let Some(fake) = fake() else { return };
    for (call, code, says) in [
        ("ncclGroupStart", 1, "ncclGroupStart"),
        ("ncclSend", 3, "send of 64 float32 to rank 0 (operation 1): ncclSend says ncclInternalError"),
        ("ncclRecv", 5, "receive of 64 float32 from rank 0 (operation 2): ncclRecv says ncclInvalidUsage"),
        ("ncclGroupEnd", 2, "rank 0 of 1 up to receive of 64 float32"),
    ] {
        ranks(&fake, 1, 4, |own| {
            fake.nccl().fail(call, 1, code);
            let room = lent(&own, &[0.0f32; 64]);
            let words = own.gpus.start_all_to_all(own.span(), room).err().unwrap().to_string();
            let parts = ["all-to-all of 64 float32", says, "hint:"];
            assert!(parts.iter().all(|part| words.contains(part)), "{words}");
            assert!(own.group.barrier().is_err(), "the group has ended with it");
        });
    }
    assert_eq!((fake.damage(), fake.nccl().live()), (Vec::new(), 0));
}

#[test]
fn parts_that_ranks_disagree_on_end_the_group() {
    let Some(fake) = fake() else { return };
    let errors = ranks(&fake, 2, 4, |own| {
        // The other means 2.
        let n = if own.rank() == 0 { 6 } else { 2 };
        let work = own.gpus.start_gather(lent(&own, &vec![0.0f32; n]), Rank(0)).unwrap();
        // Who looks at its GPU alone may see it done.
        work.wait(soon()).and_then(|_| own.gpus.barrier()).err().unwrap()
    });
    let says = |error: &Error| error.to_string().contains("mismatch");
    assert!(errors.iter().any(says), "{errors:?}");
}

type Wait<'a> = Box<dyn FnOnce() -> Result<(), Error> + 'a>;
type Start = for<'a> fn(&'a OnGpu) -> Wait<'a>;

fn wait<'a, L: 'a>(work: Result<GpuWork<L>, Error>) -> Wait<'a> {
    let work = work.unwrap();
    Box::new(|| work.wait(soon()).map(|_| ()))
}

/// Operations of three ranks that the others can't do without rank 1.
const OPERATIONS: [(&str, Start); 5] = [
    ("gather of 1", |own| wait(own.gpus.start_gather(share(own, Rank(1), 0..128), Rank(1)))),
    ("scatter of 1", |own| wait(own.gpus.start_scatter(share(own, Rank(1), 0..128), Rank(1)))),
    ("all-to-all of 384 float32", |own| {
        wait(own.gpus.start_all_to_all(own.span(), lent(own, &[0.0f32; 384])))
    }),
    ("exchange of ", |own| {
        let one = || lent(own, &[0.0f32]);
        let with = |other: u32| {
            let other = Rank(other);
            [
                GpuTransfer::Send { values: one(), to: other },
                GpuTransfer::Receive { values: one(), from: other },
            ]
        };
        let others: &[u32] = if own.rank() == 1 { &[0, 2] } else { &[1] };
        wait(own.gpus.start_exchange(others.iter().flat_map(|&other| with(other)).collect()))
    }),
    ("barrier", |own| Box::new(|| own.gpus.barrier())),
];

/// What the others come to where rank 1 does this in the place of the operation; all have done it once before where they have met.
fn without_one(fake: &FakeCuda, start: Start, have_met: bool, instead: impl Fn(&OnGpu) + Sync) -> Vec<Error> {
    let results = ranks(fake, 3, 384, |own| {
        if have_met {
            start(&own)().unwrap();
        }
        if own.rank() == 1 {
            // Not before the others are in it.
            [0, 2].into_iter().for_each(|other| own.group.receive(&mut [0u8], Rank(other)).unwrap());
            instead(&own);
            return None;
        }
        let wait = start(&own);
        own.group.send(&[0u8], Rank(1)).unwrap();
        let error = wait().expect_err("one rank is missing");
        // What the GPU had of it has ended, so that it isn't waited for in vain.
        own.arena.tensor(1).to_vec::<f32>();
        Some(error)
    });
    results.into_iter().flatten().collect()
}

#[test]
fn a_rank_that_ends_the_group_ends_each_operation() {
    let Some(fake) = fake() else { return };
    for ((name, start), have_met) in
        OPERATIONS.into_iter().flat_map(|row| [false, true].map(|met| (row, met)))
    {
        for error in without_one(&fake, start, have_met, |own| own.group.abort("it has had enough")) {
            let by_it = matches!(&error, Error::Aborted { by: Rank(1), .. });
            assert!(by_it, "{name}, have met: {have_met}: {error}");
        }
    }
    assert_eq!((fake.damage(), fake.nccl().live()), (Vec::new(), 0));
}

#[test]
fn a_rank_that_leaves_is_missed_in_each_operation() {
    // It goes without a word of failure, and whoever sees that first, after some seconds, tells the other.
    let lose = |(name, start): (&str, Start), have_met| {
        let Some(fake) = fake() else { return };
        let found = without_one(&fake, start, have_met, |_| ());
        let names_it = |error: &Error| error.to_string().contains(name);
        assert!(found.iter().any(names_it), "{name}: {found:?}");
        let lost = |error: &Error| matches!(error, Error::PeerLost { peer: Rank(1), .. });
        assert!(found.iter().all(lost), "{name}: {found:?}");
    };
    std::thread::scope(|scope| {
        for (i, row) in OPERATIONS.into_iter().enumerate() {
            scope.spawn(move || lose(row, i % 2 == 0));
        }
    });
}

/// Who gathers can't do without any of the others, who can do without each other.
#[test]
fn a_rank_that_is_to_be_gathered_from_is_missed_by_the_one_who_gathers() {
    let Some(fake) = fake() else { return };
    for scatters in [false, true] {
        ranks(&fake, 3, 384, |own| {
            let start = || {
                let lent = share(&own, Rank(0), 0..128);
                if scatters {
                    own.gpus.start_scatter(lent, Rank(0))
                } else {
                    own.gpus.start_gather(lent, Rank(0))
                }
            };
            drop(done(start()));
            own.group.barrier().unwrap();
            if own.rank() == 1 {
                own.group.receive(&mut [0u8], Rank(0)).unwrap();
                return own.group.abort("it has had enough");
            }
            if own.rank() == 0 {
                let work = start().unwrap();
                own.group.send(&[0u8], Rank(1)).unwrap();
                let error = work.wait(soon()).err().expect("one rank is missing");
                assert!(matches!(&error, Error::Aborted { by: Rank(1), .. }), "{error}");
            } else {
                // It may be done with its part.
                let _ = start().and_then(|work| work.wait(soon()));
            }
            own.arena.tensor(1).to_vec::<f32>();
        });
    }
    assert_eq!((fake.damage(), fake.nccl().live()), (Vec::new(), 0));
}

#[test]
fn a_deadline_names_an_operation_of_messages_and_ends_it() {
    let Some(fake) = fake() else { return };
    for have_met in [false, true] {
        ranks(&fake, 2, 384, |own| {
            let start = || own.gpus.start_all_to_all(own.span(), lent(&own, &[0.0f32; 384]));
            if have_met {
                drop(done(start()));
            }
            if own.rank() == 1 {
                // Alive, in the group, and elsewhere.
                while own.group.barrier().is_ok() {}
                return;
            }
            let error = start().unwrap().wait(Deadline::after(Duration::from_millis(50)));
            let error = error.err().unwrap();
            let late = matches!(&error, Error::Timeout { missing, .. } if *missing == [Rank(1)]);
            assert!(late && error.to_string().contains("all-to-all of 384 float32 by NCCL"), "{error}");
            own.arena.tensor(1).to_vec::<f32>();
        });
    }
    assert_eq!((fake.damage(), fake.nccl().live()), (Vec::new(), 0));
}
