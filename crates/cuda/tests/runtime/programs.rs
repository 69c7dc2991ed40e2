//! Programs that chance makes: kernels, copies and fills over a few buffers in a few streams, each of which waits for what it needs
//! and for nothing else. They come to what they come to one step after the other, also as graphs.

use crate::rig::{affine, fake, floats, gpu};
use phalanx_cuda::{DeviceMemory, Error, Event, Gpu, Stream, Timing};
use phalanx_tensor::Philox;

const N: usize = 40;
const BUFFERS: usize = 4;
const STEPS: u64 = 24;
const PROGRAMS: u64 = 40;
const SEEDS: u64 = 5;

/// One step: what is done in which stream, from which buffer to which.
struct Step {
    kind: usize,
    stream: usize,
    from: usize,
    to: usize,
}

fn program(number: u64) -> Vec<Step> {
    let key = Philox::new(number, 0);
    let pick = |i: u64, n: usize| (key.unit(i) * n as f32) as usize;
    let step = |i: u64| {
        let from = pick(4 * i + 2, BUFFERS);
        // A copy isn't to itself.
        let to = (from + 1 + pick(4 * i + 3, BUFFERS - 1)) % BUFFERS;
        Step { kind: pick(4 * i, 3), stream: pick(4 * i + 1, 3), from, to }
    };
    (0..STEPS).map(step).collect()
}

/// What the buffers hold in the end, each `N` times.
fn expected(program: &[Step], mut values: [f32; BUFFERS]) -> [f32; BUFFERS] {
    for step in program {
        values[step.to] = match step.kind {
            0 => 0.5 * values[step.from] + 1.0,
            1 => values[step.from],
            _ => 0.0,
        };
    }
    values
}

/// The steps that last wrote a buffer, and that have read it since.
#[derive(Default)]
struct Uses {
    written: Option<usize>,
    read: Vec<usize>,
}

/// Gives the streams their work. Behind each step an event is recorded, for those who need it.
fn give(gpu: &Gpu, program: &[Step], buffers: &[DeviceMemory], events: &[Event]) -> Result<(), Error> {
    let streams = [gpu.compute(), gpu.copy(), gpu.comm()];
    let [start, ends @ ..] = events else { panic!("an event for the start") };
    let mut uses: [Uses; BUFFERS] = Default::default();
    streams[0].record(start)?;
    streams[1].wait(start)?;
    streams[2].wait(start)?;
    for (i, step) in program.iter().enumerate() {
        let stream = streams[step.stream];
        let before = [&uses[step.from].written, &uses[step.to].written].into_iter().flatten();
        for &earlier in before.chain(&uses[step.to].read) {
            stream.wait(&ends[earlier])?;
        }
        let (from, to) = (&buffers[step.from], &buffers[step.to]);
        match step.kind {
            0 => affine(gpu, stream, from, to, 0.5, 1.0)?,
            1 => stream.copy(from, 0..4 * N, to, 0)?,
            _ => stream.fill(to, 0..4 * N, 0)?,
        }
        stream.record(&ends[i])?;
        uses[step.from].read.push(i);
        uses[step.to] = Uses { written: Some(i), read: Vec::new() };
    }
    // The first stream gathers the others.
    ends[..program.len()].iter().try_for_each(|end| streams[0].wait(end))
}

fn held(stream: &Stream, buffers: &[DeviceMemory]) -> [f32; BUFFERS] {
    let value = |i: usize| {
        let all = floats(&stream.read(&buffers[i], 0..4 * N).unwrap());
        assert!(all.iter().all(|x| *x == all[0]), "{all:?}");
        all[0]
    };
    std::array::from_fn(value)
}

#[test]
fn programs_come_to_the_same_in_every_order_and_as_graphs() {
    let Some(fake) = fake() else { return };
    let gpu = gpu(&fake);
    let buffers: Vec<DeviceMemory> = (0..BUFFERS).map(|_| gpu.alloc(gpu.compute(), 4 * N).unwrap()).collect();
    let events: Vec<Event> = (0..=STEPS).map(|_| gpu.event(Timing::No).unwrap()).collect();
    let mut values = [0.0; BUFFERS];
    for number in 0..PROGRAMS {
        let program = program(number);
        for seed in 0..SEEDS {
            fake.seed(SEEDS * number + seed);
            give(&gpu, &program, &buffers, &events).unwrap();
            values = expected(&program, values);
            assert_eq!(held(gpu.compute(), &buffers), values, "program {number}, seed {seed}");
        }
        let (mut graph, ()) = gpu.compute().capture(|| give(&gpu, &program, &buffers, &events)).unwrap();
        for seed in 0..SEEDS {
            fake.seed(SEEDS * number + seed);
            // SAFETY: the buffers are held to the end.
            unsafe { graph.launch(gpu.compute()) }.unwrap();
            values = expected(&program, values);
            assert_eq!(held(gpu.compute(), &buffers), values, "graph {number}, seed {seed}");
        }
    }
    assert!(fake.damage().is_empty(), "{:?}", fake.damage());
}
