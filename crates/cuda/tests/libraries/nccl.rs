//! Ranks as threads.

use crate::stream::{TestStream, fake};
use phalanx_cuda::nccl::{Block, Calls, Cause, Communicator, Kind, Nccl, Number, Reduction, UniqueId};
use phalanx_cuda::{Address, Error};
use phalanx_fake_cuda::FakeCuda;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// Longer than anything takes that goes well.
const LONG: Duration = Duration::from_secs(60);
/// Of what is to fail by it.
const SHORT: Duration = Duration::from_millis(30);

fn stand_in() -> Option<(FakeCuda, Nccl)> {
    let fake = fake()?;
    let nccl = Nccl::open(&[fake.folder().to_owned()]).unwrap();
    Some((fake, nccl))
}

/// Runs `rank` on a thread for each of `n` ranks, and collects what they give.
fn ranks<R: Send>(
    fake: &FakeCuda,
    nccl: &Nccl,
    n: usize,
    patience: Duration,
    rank: impl Fn(Communicator, &TestStream) -> R + Sync,
) -> Vec<R> {
    let id = nccl.unique_id().unwrap();
    let run = |i| {
        let stream = TestStream::on(fake, i);
        let communicator = nccl.join(&id, i, n, patience).unwrap();
        communicator.ready().unwrap();
        rank(communicator, &stream)
    };
    std::thread::scope(|scope| {
        let threads: Vec<_> = (0..n).map(|i| scope.spawn(move || run(i))).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

/// Numbers and where they lie, for as long as they do.
fn at<T>(numbers: &mut [T]) -> Address {
    Address(numbers.as_mut_ptr() as u64)
}

fn block<T>(numbers: &mut [T], number: Number) -> Block {
    assert_eq!(size_of::<T>(), number.bytes());
    Block { at: at(numbers), count: numbers.len(), number }
}

/// What a rank has before an operation.
fn start(rank: usize, n: usize) -> Vec<f32> {
    (0..n).map(|i| ((rank + 2) * (i % 7 + 1)) as f32).collect()
}

fn words(result: Result<(), Error>) -> String {
    result.unwrap_err().to_string()
}

fn contains(words: &str, parts: &[&str]) {
    assert!(parts.iter().all(|part| words.contains(part)), "{parts:?} aren't all in: {words}");
}

#[test]
fn the_version_is_read_and_ids_differ() {
    let Some((_fake, nccl)) = stand_in() else { return };
    assert_eq!(nccl.version().unwrap(), (2, 30, 7));
    let ids: [UniqueId; 2] = [nccl.unique_id().unwrap(), nccl.unique_id().unwrap()];
    assert_ne!(ids[0], ids[1]);
    assert_eq!(format!("{:?}", ids[0]), "UniqueId(..)");
}

#[test]
fn reductions_have_the_numbers_of_all_ranks() {
    let Some((fake, nccl)) = stand_in() else { return };
    type Row = (Reduction, fn(&[f32]) -> f32);
    let rows: [Row; 5] = [
        (Reduction::Sum, |x| x.iter().sum()),
        (Reduction::Product, |x| x.iter().product()),
        (Reduction::Max, |x| x.iter().copied().fold(f32::MIN, f32::max)),
        (Reduction::Min, |x| x.iter().copied().fold(f32::MAX, f32::min)),
        (Reduction::Mean, |x| x.iter().sum::<f32>() / x.len() as f32),
    ];
    for (n, count) in (1..=5).flat_map(|n| [1, 7, 1000].map(|count| (n, count))) {
        for (reduction, want) in rows {
            ranks(&fake, &nccl, n, LONG, |communicator, stream| {
                let rank = communicator.rank();
                // Numbers beyond the end stay as they are.
                let mut numbers = start(rank, count);
                numbers.push(-1.0);
                let to = Block { at: at(&mut numbers), count, number: Number::F32 };
                // SAFETY: the numbers live until the stream has done its work.
                unsafe { communicator.all_reduce(to.at, to, reduction, stream.handle()) }.unwrap();
                communicator.wait(LONG, || Ok(stream.idle())).unwrap();
                for (i, got) in numbers[..count].iter().enumerate() {
                    let all: Vec<f32> = (0..n).map(|rank| start(rank, count)[i]).collect();
                    assert_eq!(*got, want(&all), "{reduction:?} of {n} ranks, rank {rank}, {i}");
                }
                assert_eq!(numbers[count], -1.0);
                communicator.finalize().unwrap();
            });
        }
    }
    assert_eq!(fake.nccl().live(), 0);
}

#[test]
fn factors_are_of_each_rank_and_end_with_their_call() {
    let Some((fake, nccl)) = stand_in() else { return };
    ranks(&fake, &nccl, 3, LONG, |communicator, stream| {
        let factor = [0.5, 0.25, 2.0][communicator.rank()];
        let mut numbers = [8.0_f64; 4];
        let to = block(&mut numbers, Number::F64);
        // SAFETY: the numbers live until the stream has done its work.
        unsafe { communicator.all_reduce(to.at, to, Reduction::SumTimes(factor), stream.handle()) }.unwrap();
        communicator.wait(LONG, || Ok(stream.idle())).unwrap();
        assert_eq!(numbers, [22.0; 4]);
        let mut halves = [half::bf16::from_f32(4.0); 2];
        let to = block(&mut halves, Number::Bf16);
        // SAFETY: as above.
        unsafe { communicator.all_reduce(to.at, to, Reduction::SumTimes(factor), stream.handle()) }.unwrap();
        communicator.wait(LONG, || Ok(stream.idle())).unwrap();
        assert_eq!(halves.map(f32::from), [11.0; 2]);
    });
    let (made, ended) =
        (fake.nccl().calls("ncclRedOpCreatePreMulSum"), fake.nccl().calls("ncclRedOpDestroy"));
    assert_eq!((made, ended, fake.nccl().live()), (6, 6, 0));
}

#[test]
fn everything_else_moves_numbers_where_they_belong() {
    let Some((fake, nccl)) = stand_in() else { return };
    for (n, count) in (1..=5).flat_map(|n| [1, 13].map(|count| (n, count))) {
        ranks(&fake, &nccl, n, LONG, |communicator, stream| {
            let (rank, stream_handle) = (communicator.rank(), stream.handle());
            let root = n / 2;
            let sum = |i: usize| (0..n).map(|rank| start(rank, n * count)[i]).sum::<f32>();

            let (mut from, mut to) = (start(rank, count), vec![-1.0_f32; count]);
            // SAFETY: all numbers of this test live until the stream has done its work, which is awaited each time.
            unsafe {
                communicator.reduce(
                    block(&mut from, Number::F32),
                    at(&mut to),
                    Reduction::Sum,
                    root,
                    stream_handle,
                )
            }
            .unwrap();
            communicator.wait(LONG, || Ok(stream.idle())).unwrap();
            let want: Vec<f32> = (0..count).map(|i| if rank == root { sum(i) } else { -1.0 }).collect();
            assert_eq!(to, want, "reduce");

            // SAFETY: as above.
            unsafe {
                communicator.broadcast(at(&mut from), block(&mut to, Number::F32), root, stream_handle)
            }
            .unwrap();
            communicator.wait(LONG, || Ok(stream.idle())).unwrap();
            assert_eq!(to, start(root, count), "broadcast");

            // In place: this rank's part lies among all.
            let mut all = vec![-1.0_f32; n * count];
            all[rank * count..][..count].copy_from_slice(&start(rank, count));
            let part = block(&mut all[rank * count..][..count], Number::F32);
            // SAFETY: as above.
            unsafe { communicator.all_gather(part, at(&mut all), stream_handle) }.unwrap();
            communicator.wait(LONG, || Ok(stream.idle())).unwrap();
            let want: Vec<f32> = (0..n).flat_map(|rank| start(rank, count)).collect();
            assert_eq!(all, want, "all-gather");

            let (mut from, mut to) = (start(rank, n * count), vec![-1.0_f32; count]);
            let into = block(&mut to, Number::F32);
            // SAFETY: as above.
            unsafe { communicator.reduce_scatter(at(&mut from), into, Reduction::Sum, stream_handle) }
                .unwrap();
            communicator.wait(LONG, || Ok(stream.idle())).unwrap();
            let want: Vec<f32> = (0..count).map(|i| sum(rank * count + i)).collect();
            assert_eq!(to, want, "reduce-scatter");

            // Around the ring, in a group so that nobody waits for another's receive.
            let (next, previous) = ((rank + 1) % n, (rank + n - 1) % n);
            let mut from = start(rank, count);
            let (from, to_block) = (block(&mut from, Number::F32), block(&mut to, Number::F32));
            nccl.group(&[&communicator], |calls| {
                // SAFETY: as above.
                unsafe {
                    calls[0].send(from, next, stream_handle)?;
                    calls[0].receive(to_block, previous, stream_handle)
                }
            })
            .unwrap();
            communicator.wait(LONG, || Ok(stream.idle())).unwrap();
            assert_eq!(to, start(previous, count), "send and receive");
            communicator.finalize().unwrap();
        });
    }
    assert_eq!(fake.nccl().calls("ncclGroupStart"), fake.nccl().calls("ncclGroupEnd"));
    assert_eq!(fake.nccl().live(), 0);
}

#[test]
fn every_type_of_number_is_called_by_its_own_number() {
    let Some((fake, nccl)) = stand_in() else { return };
    for number in Number::ALL {
        ranks(&fake, &nccl, 2, LONG, |communicator, stream| {
            let bytes = 3 * number.bytes();
            let mut numbers = vec![communicator.rank() as u8; bytes + 1];
            let to = Block { at: at(&mut numbers), count: 3, number };
            // SAFETY: the numbers live until the stream has done its work.
            unsafe { communicator.broadcast(to.at, to, 1, stream.handle()) }.unwrap();
            communicator.wait(LONG, || Ok(stream.idle())).unwrap();
            assert_eq!(numbers[..bytes], vec![1; bytes], "{number}");
            assert_eq!(numbers[bytes], communicator.rank() as u8, "{number}: beyond its end");
        });
    }
}

/// A small number as the type holds it.
fn encoded(number: Number, x: u8) -> Vec<u8> {
    let (whole, float) = (i64::from(x), f64::from(x));
    match number {
        Number::I8 | Number::U8 => vec![x],
        Number::I32 | Number::U32 => (whole as i32).to_ne_bytes().to_vec(),
        Number::I64 | Number::U64 => whole.to_ne_bytes().to_vec(),
        Number::F16 => half::f16::from_f64(float).to_ne_bytes().to_vec(),
        Number::Bf16 => half::bf16::from_f64(float).to_ne_bytes().to_vec(),
        Number::F32 => (float as f32).to_ne_bytes().to_vec(),
        Number::F64 => float.to_ne_bytes().to_vec(),
        Number::F8E4M3 | Number::F8E5M2 => panic!("the stand-in has no sums of them"),
    }
}

#[test]
fn sums_and_means_are_right_in_every_type() {
    let Some((fake, nccl)) = stand_in() else { return };
    for number in Number::ALL.into_iter().filter(|number| !matches!(number, Number::F8E4M3 | Number::F8E5M2))
    {
        for (reduction, want) in [(Reduction::Sum, 9), (Reduction::Mean, 3), (Reduction::Product, 24)] {
            ranks(&fake, &nccl, 3, LONG, |communicator, stream| {
                let mut bytes = encoded(number, communicator.rank() as u8 + 2);
                let to = Block { at: at(&mut bytes), count: 1, number };
                // SAFETY: the number lives until the stream has done its work.
                unsafe { communicator.all_reduce(to.at, to, reduction, stream.handle()) }.unwrap();
                communicator.wait(LONG, || Ok(stream.idle())).unwrap();
                assert_eq!(bytes, encoded(number, want), "{reduction:?} of {number}");
            });
        }
    }
}

#[test]
fn one_thread_may_drive_several_ranks() {
    let Some((fake, nccl)) = stand_in() else { return };
    let id = nccl.unique_id().unwrap();
    let streams = [0, 1].map(|gpu| TestStream::on(&fake, gpu));
    let join = |rank: usize| {
        streams[rank].make_current();
        nccl.join(&id, rank, 2, LONG).unwrap()
    };
    let (a, b) = (join(0), join(1));
    let mut numbers = [[1_i32, 2], [10, 20]];
    let blocks = numbers.each_mut().map(|numbers| block(numbers, Number::I32));
    nccl.group(&[&a, &b], |calls| {
        for (rank, one) in calls.iter_mut().enumerate() {
            // SAFETY: the numbers live until the streams have done their work.
            unsafe { one.all_reduce(blocks[rank].at, blocks[rank], Reduction::Sum, streams[rank].handle())? };
        }
        Ok(())
    })
    .unwrap();
    streams.iter().for_each(TestStream::synchronize);
    assert_eq!(numbers, [[11, 22]; 2]);
}

#[test]
fn groups_end_whatever_happens_in_them() {
    let Some((fake, nccl)) = stand_in() else { return };
    ranks(&fake, &nccl, 1, LONG, |communicator, stream| {
        let mut numbers = [1_i32];
        let to = block(&mut numbers, Number::I32);
        fake.nccl().fail("ncclAllReduce", 1, 4);
        let failed = nccl.group(&[&communicator], |calls| {
            // SAFETY: the numbers live until the stream has done its work.
            unsafe { calls[0].all_reduce(to.at, to, Reduction::Sum, stream.handle()) }
        });
        contains(&words(failed), &["rank 0 of 1", "all-reduce of 1 int32", "ncclInvalidArgument", "hint:"]);
        let panics = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            nccl.group(&[&communicator], |_| -> Result<(), Error> { panic!("on purpose") })
        }));
        assert!(panics.is_err());
        fake.nccl().fail("ncclGroupEnd", 1, 3);
        let failed = nccl.group(&[&communicator], |_| Ok(()));
        contains(&words(failed), &["NCCL", "ncclGroupEnd", "rank 0 of 1", "ncclInternalError", "hint:"]);
        // And the next one is as good as the first.
        // SAFETY: as above.
        unsafe { communicator.all_reduce(to.at, to, Reduction::Sum, stream.handle()) }.unwrap();
        communicator.wait(LONG, || Ok(stream.idle())).unwrap();
    });
    assert_eq!(fake.nccl().calls("ncclGroupStart"), 3);
    assert_eq!(fake.nccl().calls("ncclGroupEnd"), 3);
}

#[test]
fn an_abort_frees_those_who_wait_and_their_streams() {
    let Some((fake, nccl)) = stand_in() else { return };
    let done = AtomicBool::new(false);
    ranks(&fake, &nccl, 2, LONG, |communicator, stream| {
        if communicator.rank() == 1 {
            // Lives until the other is through, and takes no part.
            let began = Instant::now();
            while !done.load(Ordering::Acquire) {
                assert!(began.elapsed() < LONG, "rank 0 isn't through");
                std::thread::yield_now();
            }
            return;
        }
        let mut numbers = [1.0_f32; 8];
        let to = block(&mut numbers, Number::F32);
        // SAFETY: the numbers live until the stream is awaited below.
        unsafe { communicator.all_reduce(to.at, to, Reduction::Sum, stream.handle()) }.unwrap();
        let failed = std::thread::scope(|scope| {
            let waiting = scope.spawn(|| communicator.wait(LONG, || Ok(stream.idle())));
            communicator.check().unwrap();
            communicator.abort().unwrap();
            waiting.join().unwrap()
        });
        stream.synchronize();
        let failed = failed.unwrap_err();
        let Error::Nccl(failure) = &failed else { panic!("{failed}") };
        assert_eq!(
            (failure.rank, failure.operation.kind, failure.operation.sequence),
            (0, Kind::AllReduce, 1)
        );
        assert_eq!(failure.cause, Cause::Aborted);
        contains(&failed.to_string(), &["rank 0 of 2", "all-reduce of 8 float32", "aborted", "hint:"]);
        // It stays ended, and ending it again does nothing.
        communicator.abort().unwrap();
        // SAFETY: nothing is issued.
        let again = unsafe { communicator.all_reduce(to.at, to, Reduction::Sum, stream.handle()) };
        contains(&words(again), &["aborted"]);
        done.store(true, Ordering::Release);
    });
    assert_eq!(fake.nccl().live(), 0);
}

#[test]
fn a_wait_ends_by_its_deadline_and_says_what_for() {
    let Some((fake, nccl)) = stand_in() else { return };
    ranks(&fake, &nccl, 2, LONG, |communicator, stream| {
        let mut numbers = [1_u8; 5];
        let to = block(&mut numbers, Number::U8);
        if communicator.rank() == 1 {
            // The first message connects the two.
            // SAFETY: the numbers live until the stream is awaited below.
            unsafe { communicator.send(to, 0, stream.handle()) }.unwrap();
            return stream.synchronize();
        }
        // SAFETY: as above.
        unsafe { communicator.receive(to, 1, stream.handle()) }.unwrap();
        // SAFETY: as above.
        unsafe { communicator.receive(to, 1, stream.handle()) }.unwrap();
        let failed = words(communicator.wait(SHORT, || Ok(stream.idle())));
        communicator.abort().unwrap();
        stream.synchronize();
        contains(&failed, &["rank 0 of 2", "receive of 5 uint8 from rank 1", "not done after", "hint:"]);
    });
}

#[test]
fn joining_ends_by_its_deadline_too() {
    let Some((fake, nccl)) = stand_in() else { return };
    let id = nccl.unique_id().unwrap();
    let alone = nccl.join(&id, 0, 2, SHORT).unwrap();
    contains(&words(alone.ready()), &["rank 0 of 2", "joining the others", "not done after"]);
    drop(alone);
    assert_eq!((fake.nccl().calls("ncclCommAbort"), fake.nccl().live()), (1, 0));
}

#[test]
fn errors_that_come_later_name_rank_and_operation() {
    let Some((fake, nccl)) = stand_in() else { return };
    ranks(&fake, &nccl, 1, LONG, |communicator, stream| {
        let mut numbers = [1_i64; 3];
        let to = block(&mut numbers, Number::I64);
        // SAFETY: the numbers live until the stream is awaited below.
        unsafe { communicator.all_reduce(to.at, to, Reduction::Max, stream.handle()) }.unwrap();
        stream.synchronize();
        fake.nccl().fail("ncclCommGetAsyncError", 2, 6);
        let failed = communicator.wait(LONG, || Ok(false)).unwrap_err();
        let Error::Nccl(failure) = &failed else { panic!("{failed}") };
        assert_eq!(failure.operation.sequence, 1);
        contains(
            &failed.to_string(),
            &["rank 0 of 1", "all-reduce of 3 int64", "ncclRemoteError", "another rank left", "asynchronous"],
        );
    });
}

#[test]
fn two_ranks_on_one_gpu_are_refused() {
    let Some((fake, nccl)) = stand_in() else { return };
    let id = nccl.unique_id().unwrap();
    let _stream = TestStream::on(&fake, 3);
    let (a, b) = (nccl.join(&id, 0, 2, LONG).unwrap(), nccl.join(&id, 1, 2, LONG).unwrap());
    for communicator in [a, b] {
        let parts = ["of 2", "joining the others", "ncclInvalidUsage", "Duplicate GPU", "one rank a GPU"];
        contains(&words(communicator.ready()), &parts);
    }
}

/// Where both may be under way at once, graphs with operations of several communicators have been seen to hang.
#[test]
fn a_communicator_is_at_one_graph_or_at_other_operations() {
    let Some((fake, nccl)) = stand_in() else { return };
    ranks(&fake, &nccl, 2, LONG, |communicator, _| communicator.finalize().unwrap());
    let told = fake.nccl().log();
    let joined: Vec<_> = told.iter().filter(|line| line.starts_with("ncclCommInitRankConfig")).collect();
    assert!(joined.len() == 2 && joined.iter().all(|line| line.ends_with("of=2 graphs=1")), "{joined:?}");
}

/// As the real ones do, which makes groups of them necessary.
#[test]
fn messages_wait_for_their_receivers_but_for_those_of_a_group() {
    let Some((fake, nccl)) = stand_in() else { return };
    ranks(&fake, &nccl, 2, LONG, |communicator, stream| {
        let (rank, peer) = (communicator.rank(), 1 - communicator.rank());
        let (mut from, mut to) = ([rank as i32 + 1; 3], [0; 3]);
        let (sent, into) = (block(&mut from, Number::I32), block(&mut to, Number::I32));
        let both = |calls: &mut [Calls<'_>]| {
            // SAFETY: the numbers live until the stream is awaited.
            unsafe {
                calls[0].send(sent, peer, stream.handle())?;
                calls[0].receive(into, peer, stream.handle())
            }
        };
        nccl.group(&[&communicator], both).unwrap();
        communicator.wait(LONG, || Ok(stream.idle())).unwrap();
        assert_eq!(to, [peer as i32 + 1; 3]);
        // SAFETY: as above.
        unsafe { communicator.send(sent, peer, stream.handle()) }.unwrap();
        // SAFETY: as above.
        unsafe { communicator.receive(into, peer, stream.handle()) }.unwrap();
        let failed = words(communicator.wait(SHORT, || Ok(stream.idle())));
        contains(&failed, &["receive of 3 int32", "not done after"]);
        communicator.abort().unwrap();
        stream.synchronize();
    });
    assert_eq!(fake.nccl().live(), 0);
}

/// Several of a graph, launched twice, and others between.
#[test]
fn messages_of_a_graph_are_sent_with_each_launch() {
    let Some((fake, nccl)) = stand_in() else { return };
    ranks(&fake, &nccl, 2, LONG, |communicator, stream| {
        let (rank, peer) = (communicator.rank(), 1 - communicator.rank());
        let (mut from, mut to) = ([0_i64; 2], [0_i64; 2]);
        let (sent, into) = (block(&mut from, Number::I64), block(&mut to, Number::I64));
        let both = || {
            nccl.group(&[&communicator], |calls| {
                // SAFETY: the numbers live until the stream is awaited.
                unsafe {
                    calls[0].send(sent, peer, stream.handle())?;
                    calls[0].receive(into, peer, stream.handle())
                }
            })
        };
        both().unwrap();
        let (mut graph, ()) = stream.stream().capture(both).unwrap();
        for launch in 1..4_i64 {
            // SAFETY: nobody else has the numbers while the stream has work.
            unsafe { (sent.at.0 as *mut [i64; 2]).write([10 * launch + rank as i64; 2]) };
            match launch {
                2 => both().unwrap(),
                // SAFETY: the numbers live until the stream is awaited below.
                _ => unsafe { graph.launch(stream.stream()) }.unwrap(),
            }
            communicator.wait(LONG, || Ok(stream.idle())).unwrap();
            // SAFETY: as above.
            let came = unsafe { (into.at.0 as *const [i64; 2]).read() };
            assert_eq!(came, [10 * launch + peer as i64; 2]);
        }
        drop(graph);
        communicator.finalize().unwrap();
    });
    assert_eq!(fake.nccl().live(), 0);
}

#[test]
fn messages_of_a_group_that_cannot_be_are_refused() {
    let Some((fake, nccl)) = stand_in() else { return };
    ranks(&fake, &nccl, 1, LONG, |communicator, stream| {
        let mut numbers = [1_u8; 6];
        let all = block(&mut numbers, Number::U8);
        let part = |at: usize| Block { at: all.at.plus(at), count: 3, ..all };
        // SAFETY: the numbers live until the stream is awaited below, here and in all that follows.
        let alone = words(unsafe { communicator.send(all, 0, stream.handle()) });
        contains(&alone, &["send of 6 uint8 to rank 0", "ncclInvalidUsage", "self without a matching recv"]);
        let pair = |from: Block, to: Block| {
            // SAFETY: as above.
            nccl.group(&[&communicator], |calls| unsafe {
                calls[0].send(from, 0, stream.handle())?;
                calls[0].receive(to, 0, stream.handle())
            })
        };
        contains(&words(pair(part(0), part(2))), &["ncclGroupEnd", "ncclInvalidUsage", "overlap"]);
        pair(part(0), part(3)).unwrap();
        communicator.wait(LONG, || Ok(stream.idle())).unwrap();
    });
    assert_eq!(fake.nccl().live(), 0);
}

#[test]
fn operations_that_do_not_match_are_refused() {
    let Some((fake, nccl)) = stand_in() else { return };
    let failed = ranks(&fake, &nccl, 2, LONG, |communicator, stream| {
        let mut numbers = [1.0_f32; 8];
        let to = Block { count: 8 - communicator.rank(), ..block(&mut numbers, Number::F32) };
        // SAFETY: the numbers live until the stream is awaited below.
        let issued = unsafe { communicator.all_reduce(to.at, to, Reduction::Sum, stream.handle()) };
        // The streams get on while somebody looks at them. That one is idle says nothing here: it failed.
        let failed = words(issued.and_then(|()| {
            communicator.wait(LONG, || {
                stream.idle();
                Ok(false)
            })
        }));
        stream.synchronize();
        failed
    });
    failed.iter().for_each(|failed| contains(failed, &["ncclInvalidUsage", "count=8", "count=7"]));
}

#[test]
fn splits_have_ranks_of_their_own() {
    let Some((fake, nccl)) = stand_in() else { return };
    ranks(&fake, &nccl, 5, LONG, |communicator, stream| {
        let rank = communicator.rank();
        // Even ranks in reverse, rank 1 and 3 as they are; nobody asks for rank 4.
        let color = (rank != 4).then_some(rank as u32 % 2);
        let key = if rank % 2 == 0 { 10 - rank as u32 } else { rank as u32 };
        let part = communicator.split(color, key).unwrap();
        assert_eq!(part.is_none(), rank == 4);
        if let Some(part) = part {
            assert_eq!((part.rank(), part.n_ranks()), ([1, 0, 0, 1][rank], 2));
            let mut numbers = [rank as i32];
            let to = block(&mut numbers, Number::I32);
            // SAFETY: the numbers live until the stream has done its work.
            unsafe { part.all_reduce(to.at, to, Reduction::Sum, stream.handle()) }.unwrap();
            part.wait(LONG, || Ok(stream.idle())).unwrap();
            assert_eq!(numbers, [if rank % 2 == 0 { 2 } else { 4 }]);
            part.finalize().unwrap();
        }
        communicator.finalize().unwrap();
    });
    assert_eq!(fake.nccl().live(), 0);
}

#[test]
fn each_call_that_fails_is_named() {
    let Some((fake, nccl)) = stand_in() else { return };
    fake.nccl().fail("ncclGetUniqueId", 1, 2);
    contains(
        &nccl.unique_id().unwrap_err().to_string(),
        &["NCCL", "ncclGetUniqueId", "ncclSystemError", "hint:"],
    );
    fake.nccl().fail("ncclCommInitRankConfig", 1, 1);
    let id = nccl.unique_id().unwrap();
    let failed = nccl.join(&id, 0, 1, LONG).unwrap_err().to_string();
    contains(&failed, &["ncclCommInitRankConfig", "rank 0 of 1", "ncclUnhandledCudaError", "nvidia-smi"]);
    let communicator = nccl.join(&id, 0, 1, LONG).unwrap();
    fake.nccl().fail("ncclCommSplit", 1, 5);
    contains(&words(communicator.split(None, 0).map(|_| ())), &["ncclCommSplit", "ncclInvalidUsage"]);
    fake.nccl().fail("ncclCommFinalize", 1, 3);
    contains(&words(communicator.finalize()), &["ncclCommFinalize", "ncclInternalError"]);
    assert_eq!(fake.nccl().live(), 0);
}

#[test]
fn nothing_is_left_of_ten_thousand_calls() {
    let Some((fake, nccl)) = stand_in() else { return };
    ranks(&fake, &nccl, 1, LONG, |communicator, stream| {
        let mut numbers = [1.0_f32; 2];
        let to = block(&mut numbers, Number::F32);
        for i in 0..10_000 {
            let reduction = if i % 2 == 0 { Reduction::Sum } else { Reduction::SumTimes(1.0) };
            // SAFETY: the numbers live until the stream is awaited below.
            unsafe { communicator.all_reduce(to.at, to, reduction, stream.handle()) }.unwrap();
        }
        stream.synchronize();
    });
    assert_eq!(fake.nccl().live(), 0);
    let (made, ended) =
        (fake.nccl().calls("ncclRedOpCreatePreMulSum"), fake.nccl().calls("ncclRedOpDestroy"));
    assert_eq!((made, ended), (5000, 5000));
    assert_eq!(fake.nccl().counts()["ncclCommInitRankConfig"], 1);
}
