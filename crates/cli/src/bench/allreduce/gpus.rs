//! All-reduces from GPU to GPU: as buckets of gradients are summed, and by NCCL left alone, in turns.
//!
//! A round is a burst of them over the same part of an arena, one behind the other, as the buckets of a step come: on a GPU one by itself
//! would be mostly its host's waiting. Their values are zeros, which no number of sums makes too large; whether sums are right is found out
//! before.

use super::measure::{Measured, Rounds, WrongElement, brought_and_summed, fill, of_slowest, wrong_of};
use super::{head, tell};
use crate::args::AllReduceArgs;
use anyhow::{Context, Result, bail};
use phalanx::Worker;
use phalanx::comm::{Deadline, Error, GpuGroup, Group, ReduceOp, Via};
use phalanx::tensor::{Arena, DType, Device, GpuSpan, Layout, Shape};
use std::time::{Duration, Instant};

/// All-reduces of a round.
const BURST: usize = 10;
/// How long one of them may take.
const PATIENCE: Duration = Duration::from_secs(60);

/// Measures all sizes, as one rank of a run; rank 0 prints.
pub(super) fn run(worker: &Worker, args: &AllReduceArgs, sizes: &[usize]) -> Result<Option<WrongElement>> {
    let (group, device) = (worker.group(), worker.device());
    let gpu = device.gpu().context("--device: no GPU was opened")?;
    let gpus = match GpuGroup::over(&group, gpu, Via::CommStream)? {
        Ok(gpus) => gpus,
        Err(unfit) => bail!("GPUs can't sum among themselves: {unfit}"),
    };
    head(&group, args, &format!("on GPUs, {BURST} at a time"));
    for &bytes in sizes {
        let Rounds { warm_up, counted } = Rounds::of(bytes, args.iters);
        let [warm_up, counted] = [warm_up, counted].map(|n| n.next_multiple_of(BURST));
        let rounds = Rounds { warm_up, counted };
        let measured = measure(&gpus, device, bytes / size_of::<f32>(), rounds)?;
        tell(&group, args, bytes, rounds, &measured);
        if measured.wrong > 0 {
            return Ok(measured.first_wrong);
        }
    }
    Ok(None)
}

fn measure(gpus: &GpuGroup, device: &Device, len: usize, rounds: Rounds) -> Result<Measured, Error> {
    let group = gpus.group();
    let arena = Arena::new(device, DType::F32, &Layout::new(&[Shape::from([len])]));
    let (wrong, first_wrong) = verified(gpus, &arena)?;
    arena.write_flat(&vec![0.0f32; arena.layout().len()]);
    let (mut ours, mut alone) = (Vec::new(), Vec::new());
    let [warm_up, counted] = [rounds.warm_up, rounds.counted].map(|n| n / BURST);
    for round in 0..warm_up + counted {
        let counts = round >= warm_up;
        // Who comes first changes, so that neither has the better place.
        for is_ours in [round % 2 == 0, round % 2 == 1] {
            let time = timed(
                group,
                || {
                    if is_ours {
                        return (0..BURST).try_for_each(|_| {
                            gpus.start_all_reduce(span(&arena), ReduceOp::Sum)?.join().map(drop)
                        });
                    }
                    gpus.start_all_reduces(span(&arena), ReduceOp::Sum, BURST)?.join().map(drop)
                },
                gpus,
            )?;
            if counts {
                if is_ours { &mut ours } else { &mut alone }.push(time);
            }
        }
    }
    let times = of_slowest(group, ours)?;
    let alone = Some(of_slowest(group, alone)?);
    Ok(Measured { times, wrong, first_wrong, how: "nccl: from GPU to GPU".to_owned(), alone })
}

/// Microseconds of each of a burst that `give` gives the GPU, until all of it is done.
fn timed(group: &Group, give: impl FnOnce() -> Result<(), Error>, gpus: &GpuGroup) -> Result<f64, Error> {
    group.barrier()?;
    let start = Instant::now();
    give()?;
    gpus.watch("a burst of all-reduces", Deadline::after(PATIENCE * BURST as u32))?;
    Ok(start.elapsed().as_secs_f64() * 1e6 / BURST as f64)
}

/// Wrong elements of all ranks in a sum, and this rank's first.
fn verified(gpus: &GpuGroup, arena: &Arena) -> Result<(u64, Option<WrongElement>), Error> {
    let group = gpus.group();
    let [own, sum] = brought_and_summed(group, 0);
    let mut values = vec![0.0; arena.layout().len()];
    let len = arena.layout().range(0).len();
    fill(&mut values[..len], &own);
    arena.write_flat(&values);
    drop(gpus.start_all_reduce(span(arena), ReduceOp::Sum)?.wait(Deadline::after(PATIENCE))?);
    let summed = arena.read_flat::<f32>();
    let (wrong, first) = wrong_of(&summed[..len], &sum, group.rank().index(), 0);
    let mut everywhere = [wrong];
    group.all_reduce(&mut everywhere, ReduceOp::Sum)?;
    Ok((everywhere[0], first))
}

fn span(arena: &Arena) -> GpuSpan<f32> {
    arena.gpu_span(0..1).expect("the arena lies on a GPU")
}
