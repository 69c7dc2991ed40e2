//! What the GPUs of ranks exchange by NCCL, as far as a single rank shows it: the library is found and lets a rank meet itself, takes each
//! collective on each type of number, on the stream that groups share and on one of their own, and in a pass that is recorded, and leaves
//! the right numbers. That several ranks come to the same only several GPUs can show.

use super::{Finding, apart, sheltered};
use phalanx_comm::{Deadline, Error, GpuGroup, GpuWork, Group, Rank, ReduceOp, Trail, Unfit, Via, bf16, f16};
use phalanx_tensor::{Arena, Device, Element, GpuSpan, Layout, Room};
use std::sync::Arc;

/// How many numbers an operation has: no multiple of what a thread of NCCL's takes at once.
const NUMBERS: usize = 1_003;
/// What one rank's numbers are multiplied by where a reduction has a factor; a power of two, so that no type rounds.
const FACTOR: f64 = 2.0;
const NAME: &str = "exchanges by NCCL, of one rank";

/// What became of the numbers of a type.
#[derive(Default)]
struct Seen {
    cases: usize,
    apart: f64,
    failure: Option<String>,
}

/// Tells of each type, if the device is a GPU and NCCL is there.
pub(super) fn all(device: &Device, tell: &mut dyn FnMut(Finding)) {
    if device.gpu().is_none() {
        return;
    }
    let met = sheltered(|| [Via::CommStream, Via::OwnStream].map(|via| meet(device, via)));
    let [shared, own] = match met {
        Ok([Ok(Ok(shared)), Ok(Ok(own))]) => [shared, own],
        Ok([Ok(Err(why)), _] | [_, Ok(Err(why))]) => {
            return tell(Finding::Untried { name: NAME.to_owned(), why: why.to_string() });
        }
        Ok([Err(error), _] | [_, Err(error)]) => return tell(failed(error.to_string())),
        Err(words) => return tell(failed(words)),
    };
    let ways = [&shared, &own];
    tell(of_type::<f32>(device, ways));
    tell(of_type::<bf16>(device, ways));
    tell(of_type::<f16>(device, ways));
    tell(of_type::<f64>(device, ways));
    tell(of_type::<i64>(device, ways));
    tell(of_type::<u8>(device, ways));
    for (name, gpus) in [("a recorded exchange", shared), ("a recorded exchange on a stream of its own", own)]
    {
        let seen = seen(|seen| recorded(device, &Arc::new(gpus), seen));
        tell(finding(name, "f32", seen));
    }
}

/// A group of one, with NCCL's of its GPU.
fn meet(device: &Device, via: Via) -> Result<Result<GpuGroup, Unfit>, Error> {
    GpuGroup::over(&Group::solo(), device.gpu().expect("it is a GPU"), via)
}

fn failed(words: String) -> Finding {
    finding(NAME, "f32", Seen { failure: Some(words), ..Seen::default() })
}

fn finding(name: &str, dtype: &str, Seen { cases, apart, failure }: Seen) -> Finding {
    let wrong = || format!("numbers are {apart:.1e} from what one rank's operations leave");
    let failure = failure.or_else(|| (apart > 0.0).then(wrong));
    Finding::Operations {
        name: name.to_owned(),
        dtype: dtype.to_owned(),
        cases,
        apart,
        tolerance: 0.0,
        failure,
    }
}

fn seen(work: impl FnOnce(&mut Seen) -> Result<(), String>) -> Seen {
    let mut seen = Seen::default();
    seen.failure = match sheltered(|| work(&mut seen)) {
        Ok(done) => done.err(),
        Err(words) => Some(words),
    };
    seen
}

fn of_type<T: Element>(device: &Device, ways: [&GpuGroup; 2]) -> Finding {
    let tried = |seen: &mut Seen| {
        ways.into_iter().try_for_each(|gpus| operations::<T>(device, gpus, seen)).map_err(|e| e.to_string())
    };
    finding(NAME, &T::DTYPE.to_string(), seen(tried))
}

/// Every operation, one after the other.
fn operations<T: Element>(device: &Device, gpus: &GpuGroup, seen: &mut Seen) -> Result<(), Error> {
    let reductions = [
        ReduceOp::Sum,
        ReduceOp::Average,
        ReduceOp::Product,
        ReduceOp::Min,
        ReduceOp::Max,
        ReduceOp::PremulSum(FACTOR),
    ];
    for op in reductions {
        let factor = if let ReduceOp::PremulSum(factor) = op { factor } else { 1.0 };
        if factor != 1.0 && !T::DTYPE.is_float() {
            continue;
        }
        in_place::<T>(device, factor, seen, |span| gpus.start_all_reduce(span, op))?;
        in_place::<T>(device, factor, seen, |span| gpus.start_reduce(span, op, Rank(0)))?;
        in_place::<T>(device, factor, seen, |span| gpus.start_reduce_scatter(span, op))?;
    }
    in_place::<T>(device, 1.0, seen, |span| gpus.start_broadcast(span, Rank(0)))?;
    in_place::<T>(device, 1.0, seen, |span| gpus.start_all_gather(span))?;
    in_place::<T>(device, 1.0, seen, |span| gpus.start_gather(span, Rank(0)))?;
    in_place::<T>(device, 1.0, seen, |span| gpus.start_scatter(span, Rank(0)))?;
    let [from, to] = [numbers::<T>(device, 1.0), numbers::<T>(device, 0.0)];
    drop(gpus.start_all_to_all(span::<T>(&from), span::<T>(&to))?.wait(soon())?);
    seen.note::<T>(&to, 1.0);
    let (to, all) = (numbers::<T>(device, 0.0), [NUMBERS]);
    drop(gpus.start_all_to_all_uneven(span::<T>(&from), &all, span::<T>(&to), &all)?.wait(soon())?);
    seen.note::<T>(&to, 1.0);
    gpus.barrier()?;
    seen.cases += 1;
    Ok(())
}

/// An operation that leaves numbers where they were, times `factor`.
fn in_place<T: Element>(
    device: &Device,
    factor: f64,
    seen: &mut Seen,
    start: impl FnOnce(GpuSpan<T>) -> Result<GpuWork<GpuSpan<T>>, Error>,
) -> Result<(), Error> {
    let numbers = numbers::<T>(device, 1.0);
    drop(start(span(&numbers))?.wait(soon())?);
    seen.note::<T>(&numbers, factor);
    Ok(())
}

/// An operation among others of a pass, which is made, recorded, and made again twice.
fn recorded(device: &Device, gpus: &Arc<GpuGroup>, seen: &mut Seen) -> Result<(), String> {
    let (numbers, trail, samples): (_, _, Arc<[u64]>) =
        (numbers::<f32>(device, 1.0), Trail::default(), [0].into());
    let pass = || {
        let work = gpus.start_all_reduce(span::<f32>(&numbers), ReduceOp::PremulSum(FACTOR))?;
        trail.join(gpus, work, usize::MAX).map(drop)
    };
    let words = |error: Error| error.to_string();
    let room = Room::default();
    let (rehearsal, made) = device.rehearse(&room, 0, &samples, pass).expect("it is a GPU");
    made.and_then(|()| trail.settle()).map_err(words)?;
    let mut factor = FACTOR;
    seen.note::<f32>(&numbers, factor);
    if rehearsal.refusal().is_some() {
        // Each tensor has memory of its own.
        return Ok(());
    }
    let (recorded, among) = trail.recorded(|| rehearsal.record(pass));
    let (mut replay, given) = recorded.map_err(|error| error.to_string())?;
    // NCCL ends behind its graphs.
    let _in_graph: Vec<_> = among.iter().map(|gpus| gpus.in_graph()).collect();
    given.map_err(words)?;
    for step in 1..=2 {
        replay.again(step, &samples, &[&numbers], &[]).map_err(|error| error.to_string())?;
        trail.note_all(&among, "a pass that is made again").and_then(|()| trail.settle()).map_err(words)?;
        factor *= FACTOR;
        seen.note::<f32>(&numbers, factor);
    }
    drop(replay);
    Ok(())
}

impl Seen {
    /// Numbers that are to be those of [`numbers`] with this factor.
    fn note<T: Element>(&mut self, numbers: &Arena, factor: f64) {
        let got: Vec<f64> = numbers.tensor(0).to_vec::<T>().into_iter().map(T::to_f64).collect();
        self.cases += 1;
        self.apart = self.apart.max(apart(&got, &first(factor)));
    }
}

/// Whole numbers that every type has, and twice, four and eight times as many.
fn first(factor: f64) -> Vec<f64> {
    (0..NUMBERS).map(|i| (i % 31) as f64 * factor).collect()
}

fn numbers<T: Element>(device: &Device, factor: f64) -> Arena {
    let arena = Arena::new(device, T::DTYPE, &Layout::new(&[[NUMBERS].into()]));
    arena.write_flat(&first(factor).into_iter().map(T::from_f64).collect::<Vec<T>>());
    arena
}

fn span<T: Element>(numbers: &Arena) -> GpuSpan<T> {
    numbers.gpu_span(0..1).expect("they lie on a GPU").lending(0..NUMBERS)
}

fn soon() -> Deadline {
    Deadline::after(Group::solo().timeout())
}
