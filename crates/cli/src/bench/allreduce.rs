//! `phalanx bench allreduce`: how long ranks take to sum their slices, in the columns of nccl-tests.
//!
//! With a rank in its environment this process is a worker and measures over the group of its run; without one it is an
//! agent that starts copies of itself, once for each number of ranks. Which way the ranks talk is decided where every worker's
//! is; here it is only asked for, and held against what the group says of itself.

mod asked;
mod gpus;
mod measure;

use super::{at_least_one, start_copies};
use crate::args::{AllReduceArgs, BenchBuffer, BenchTransport, WrongUsage};
use crate::say::{print, tabulate};
use anyhow::{Result, ensure};
use measure::{Measured, Rounds, WrongElement, measure, percentile};
use phalanx::comm::{Algorithm, Error, Group, ReduceOp};
use phalanx::tensor::DebugSync;
use phalanx::{DeviceSpec, Worker};
use phalanx_job::{WorkerEnv, names};
use phalanx_launch::{LaunchSpec, Numa, NumaBinding};
use serde::Serialize;
use std::sync::{Mutex, PoisonError};

/// A line of `bench allreduce`.
#[derive(Serialize)]
struct AllReduceLine<'a> {
    bench: &'static str,
    ranks: usize,
    bytes: usize,
    /// The median of the rounds, each as long as its slowest rank took; on GPUs of bursts, each by how many it has.
    p50_us: f64,
    p99_us: f64,
    /// Bytes of one rank's slice by the median, in GB/s.
    algbw_gbps: f64,
    /// What every rank must at least send at that rate: 2 (n - 1) / n times as much.
    busbw_gbps: f64,
    /// Whether every element of every rank was the exact sum in every round; on GPUs in one before them.
    verified: bool,
    wrong: u64,
    iters: usize,
    /// How the ranks did it.
    algorithm: &'a str,
    /// The same, and why so.
    why: &'a str,
    /// What was measured, as in "2 ranks over shared memory".
    group: &'a str,
    /// Microseconds that NCCL takes when it is left alone, where that was measured.
    #[serde(skip_serializing_if = "Option::is_none")]
    nccl_p50_us: Option<f64>,
    /// How many times as long as that these took.
    #[serde(skip_serializing_if = "Option::is_none")]
    to_nccl: Option<f64>,
}

pub(super) fn allreduce(args: &AllReduceArgs) -> Result<u8> {
    let (ranks, sizes) = (asked::ranks(&args.nproc)?, asked::sizes(&args.sizes)?);
    at_least_one("--iters", args.iters.unwrap_or(1))?;
    let algorithm = args.algorithm.as_deref().map(asked::algorithm).transpose()?;
    let measure_all = |group: &Group| run(&asked_of(group, algorithm), args, &sizes);
    let is_worker = WorkerEnv::from_env()?.is_some();
    let is_of_cpus = args.transport.is_some() || args.algorithm.is_some() || args.buffer.is_some();
    if args.device != DeviceSpec::Cpu && is_of_cpus {
        let text =
            "--transport, --algorithm and --buffer are of sums by CPUs: leave them out beside --device";
        return Err(WrongUsage(text.into()).into());
    }
    if is_worker && args.device != DeviceSpec::Cpu {
        let worker = Worker::arrive_on(args.device, Some(1), DebugSync::No)?.join()?;
        right(gpus::run(&worker, args, &sizes)?)?;
        return Ok(0);
    }
    if args.transport == Some(BenchTransport::Threads) {
        if is_worker {
            let text = "--transport threads: this is a rank of a run already; start it without a launcher";
            return Err(WrongUsage(text.into()).into());
        }
        for n in ranks {
            with_threads(n, measure_all)?;
        }
        return Ok(0);
    }
    if is_worker {
        let worker = Worker::from_environment(Some(1))?;
        check_transport(&worker.group(), args.transport)?;
        right(measure_all(&worker.group())?)?;
        return Ok(0);
    }
    for n in ranks {
        let code = lead(n, args)?;
        if code != 0 {
            return Ok(code);
        }
    }
    Ok(0)
}

/// Starts `n` copies of this process as workers.
fn lead(n: usize, args: &AllReduceArgs) -> Result<u8> {
    // What the agent's own environment says reaches the workers too, unless something was asked for.
    let transport = args.transport.map(|asked| if asked == BenchTransport::Tcp { "tcp" } else { "auto" });
    start_copies(LaunchSpec {
        workers: n,
        variables: transport.map(|way| (names::TRANSPORT.to_owned(), way.to_owned())).into_iter().collect(),
        // Two ranks that wait for each other on one core make a few milliseconds of anything; without a core each, none has its own.
        processors: Numa::of_this_machine().shares(NumaBinding::Exclusive, n).unwrap_or_default(),
        ..LaunchSpec::default()
    })
}

/// The group as it was asked for.
fn asked_of(group: &Group, algorithm: Option<Option<Algorithm>>) -> Group {
    match algorithm {
        Some(algorithm) => group.clone().with_algorithm(algorithm),
        None => group.clone(),
    }
}

/// Measures `n` threads of this process.
fn with_threads(
    n: usize,
    measure_all: impl Fn(&Group) -> Result<Option<WrongElement>, Error> + Sync,
) -> Result<()> {
    let wrong = Mutex::new(None);
    phalanx::spawn(n, |worker| {
        if let Some(found) = measure_all(&worker.group())? {
            wrong.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(found);
        }
        Ok(())
    })?;
    right(wrong.into_inner().unwrap_or_else(PoisonError::into_inner))
}

/// Refuses a group that isn't what was asked for.
fn check_transport(group: &Group, asked: Option<BenchTransport>) -> Result<()> {
    let (flag, wanted) = match asked {
        Some(BenchTransport::Memory) => ("memory", "over shared memory"),
        Some(BenchTransport::Tcp) => ("tcp", "over TCP"),
        Some(BenchTransport::Threads) | None => return Ok(()),
    };
    let is = group.describe();
    ensure!(
        group.world_size() == 1 || is.trim_end_matches(" with TLS").ends_with(wanted),
        "--transport {flag}: these are {is}\nhint: leave it out to measure what there is; {}=tcp makes all ranks of a run use TCP",
        names::TRANSPORT
    );
    Ok(())
}

/// Measures all sizes, as one rank of a group; rank 0 prints. Ends with the first size that comes out wrong, on all ranks;
/// those who have a wrong element give their first.
fn run(group: &Group, args: &AllReduceArgs, sizes: &[usize]) -> Result<Option<WrongElement>, Error> {
    let buffer = args.buffer.unwrap_or(BenchBuffer::Shared);
    let slices = match buffer {
        BenchBuffer::Shared => "in memory that ranks of a host share",
        BenchBuffer::Plain => "in memory of each rank's own",
    };
    head(group, args, slices);
    for &bytes in sizes {
        let rounds = Rounds::of(bytes, args.iters);
        let reduce = |values: &mut [f32]| group.all_reduce(values, ReduceOp::Sum);
        let len = bytes / size_of::<f32>();
        let measured = match buffer {
            BenchBuffer::Shared => measure(group, &mut group.allocate(len)?, rounds, reduce),
            BenchBuffer::Plain => measure(group, &mut vec![0.0; len], rounds, reduce),
        }?;
        tell(group, args, bytes, rounds, &measured);
        if measured.wrong > 0 {
            return Ok(measured.first_wrong);
        }
    }
    Ok(None)
}

/// What stands above the sizes.
fn head(group: &Group, args: &AllReduceArgs, slices: &str) {
    if group.rank().index() > 0 {
        return;
    }
    tabulate(args.json, format_args!("# {}, float32, sum, slices {slices}", group.describe()));
    tabulate(args.json, "# microseconds of the slowest rank, GB/s");
    tabulate(
        args.json,
        format_args!(
            "# {:>10} {:>10} {:>7} {:>11} {:>11} {:>8} {:>8} {:>6} {}",
            "size", "count", "type", "p50", "p99", "algbw", "busbw", "wrong", "algorithm"
        ),
    );
}

/// What came of a size.
fn tell(group: &Group, args: &AllReduceArgs, bytes: usize, rounds: Rounds, measured: &Measured) {
    if group.rank().index() > 0 {
        return;
    }
    let line = line(group, bytes, rounds, measured);
    tabulate(args.json, table_row(&line));
    if args.json {
        print(serde_json::to_string(&line).expect("numbers and words are always JSON"));
    }
}

fn line<'a>(group: &'a Group, bytes: usize, rounds: Rounds, measured: &'a Measured) -> AllReduceLine<'a> {
    let (n, p50_us) = (group.world_size(), measured.percentile(50));
    let nccl_p50_us = measured.alone.as_ref().map(|alone| percentile(alone, 50));
    let algbw_gbps = bytes as f64 / p50_us / 1e3;
    AllReduceLine {
        bench: "allreduce",
        ranks: n,
        bytes,
        p50_us,
        p99_us: measured.percentile(99),
        algbw_gbps,
        busbw_gbps: algbw_gbps * 2.0 * (n - 1) as f64 / n as f64,
        verified: measured.wrong == 0,
        wrong: measured.wrong,
        iters: rounds.counted,
        algorithm: measured.how.split(": ").next().unwrap_or_default(),
        why: &measured.how,
        group: group.describe(),
        nccl_p50_us,
        to_nccl: nccl_p50_us.map(|alone| p50_us / alone),
    }
}

fn table_row(line: &AllReduceLine<'_>) -> String {
    let AllReduceLine { bytes, p50_us, p99_us, algbw_gbps, busbw_gbps, wrong, algorithm, .. } = line;
    let alone = line.nccl_p50_us.zip(line.to_nccl);
    let beside = alone.map_or(String::new(), |(alone, to)| format!(", alone {alone:.2}, {to:.3} times that"));
    format!(
        "  {bytes:>10} {:>10} {:>7} {p50_us:>11.2} {p99_us:>11.2} {algbw_gbps:>8.3} {busbw_gbps:>8.3} {wrong:>6} {algorithm}{beside}",
        bytes / size_of::<f32>(),
        "float32"
    )
}

/// A wrong element fails the process.
fn right(wrong: Option<WrongElement>) -> Result<()> {
    wrong.map_or(Ok(()), |wrong| Err(wrong.into()))
}
