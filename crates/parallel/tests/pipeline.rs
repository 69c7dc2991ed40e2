//! Placement, pipelines and data parallel in one process, against plain passes.

use phalanx_comm::Group;
use phalanx_nn::optim::{Optimizer, Sgd};
use phalanx_nn::{
    BatchNorm2d, Conv2d, Ctx, Dropout, Flatten, Init, Linear, Loss, MaxPool2d, Module, Param, Parameters,
    Relu, Sequential,
};
use phalanx_parallel::pipeline::{
    PipelineConfig, Pipelined, RankPipeline, Schedule, ScheduleKind, Shape, micro_batches,
};
use phalanx_parallel::{
    Axis, DataParallel, DataParallelConfig, Ddp, Error, Mesh, Pass, Placeable, SingleDevice, Strategy, Sync,
};
use phalanx_tensor::{DType, Device, GradSink, LeafId, Philox, Tensor, autocast};
use std::ops::Range;
use std::sync::Arc;

/// Eleven blocks, of which some learn nothing, and two drop values at random.
fn net(normed: bool) -> Sequential {
    let net = Sequential::new().then(Conv2d::new(1, 8, 3)).then(Relu);
    let net = if normed { net.then(BatchNorm2d::new(8)) } else { net.then(Relu) };
    net.then(Dropout::new(0.3))
        .then(Conv2d::new(8, 8, 3))
        .then(MaxPool2d::new(2))
        .then(Relu)
        .then(Flatten)
        .then(Dropout::new(0.5))
        .then(Linear::new(8 * 4 * 4, 16))
        .then(Linear::new(16, 5))
}

const BLOCKS: usize = 11;

/// What three steps come to: the losses, then all values and buffers.
type Trained = (Vec<f64>, Vec<f32>);

/// A batch of one step and its labels.
fn batch(device: &Device, step: u64, samples: usize) -> (Tensor, Tensor, Arc<[u64]>) {
    let key = Philox::new(3, step);
    let input = Tensor::uniform(device, [samples, 1, 12, 12], -1.0, 1.0, DType::F32, key);
    let labels: Vec<i64> = (0..samples).map(|i| (i * 3 + step as usize) as i64 % 5).collect();
    let ids = (0..samples as u64).map(|i| 100 * step + i).collect();
    (input, Tensor::from_slice(device, &labels, [samples]), ids)
}

/// Trains three steps with `strategy`, each of `samples` samples in as many passes as `passes` says.
fn train(
    strategy: &mut dyn Strategy,
    model: &dyn Module,
    parameters: &Parameters,
    samples: usize,
    passes: usize,
) -> Trained {
    strategy.prepare(parameters).unwrap();
    let mut optimizer = Optimizer::new(Sgd { momentum: 0.5, ..Sgd::new(0.05) }).unwrap();
    let mut losses = Vec::new();
    for step in 0..3 {
        let (input, target, ids) = batch(parameters.values().device(), step, samples);
        let parts = micro_batches(Some(&input), Some(&target), &Ctx::train(9, step, ids), 1.0, passes);
        let mut loss = 0.0;
        for (i, part) in parts.into_iter().enumerate() {
            let pass = Pass {
                model,
                parameters,
                loss: Loss::CrossEntropy { label_smoothing: 0.0 },
                input: part.input.unwrap(),
                target: part.target.unwrap(),
                ctx: part.ctx,
                weight: part.weight,
                sync: if i + 1 == passes { Sync::Now } else { Sync::Later },
            };
            loss += strategy.pass(&pass).unwrap() * part.weight;
        }
        strategy.finish(parameters).unwrap();
        losses.push(loss);
        let grads = parameters.grads().arena().flat::<f32>();
        optimizer.step(&mut parameters.values().flat_mut::<f32>(), &grads, 1.0);
    }
    let mut numbers = parameters.values().flat::<f32>().to_vec();
    numbers.extend_from_slice(&parameters.buffers().flat::<f32>());
    (losses, numbers)
}

/// One device, with as many passes a step.
fn plain(normed: bool, samples: usize, passes: usize) -> Trained {
    let (device, mut model) = (Device::cpu(1), net(normed));
    let parameters = Parameters::build(&mut model, &device, 4);
    train(&mut SingleDevice::new(), &model, &parameters, samples, passes)
}

/// The row in this many stages, as even as blocks go.
fn cut(stages: usize) -> Vec<Range<usize>> {
    phalanx_parallel::pipeline::parts(BLOCKS, stages).collect()
}

fn pipeline(kind: ScheduleKind, ranks: usize, chunks: usize, n: usize) -> (PipelineConfig, Sequential) {
    let devices: Vec<Device> = (0..ranks).map(|_| Device::cpu(1)).collect();
    let config = PipelineConfig { blocks: cut(ranks * chunks), devices, kind, micro_batches: n };
    (config, net(true))
}

fn build(config: &PipelineConfig, model: &mut Sequential) -> Parameters {
    let of = |block| config.blocks.iter().position(|blocks| blocks.contains(&block)).unwrap();
    Parameters::build_on(model, &config.devices, |block| of(block) % config.devices.len(), 4)
}

fn assert_same_bits(got: &Trained, want: &Trained, of: &str) {
    let bits = |numbers: &[f32]| numbers.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
    let losses = |losses: &[f64]| losses.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
    assert!(losses(&got.0) == losses(&want.0), "{of}: losses {:?}, not {:?}", got.0, want.0);
    assert!(bits(&got.1) == bits(&want.1), "{of}: other values");
}

/// What products may be made in.
const PRODUCTS: [DType; 3] = [DType::F32, DType::BF16, DType::F16];

/// PIPE-SUM and PIPE-KEY: uneven micro-batches, some without samples, dropout and batch norm included.
#[test]
fn a_pipeline_over_devices_has_the_bits_of_plain_passes_over_its_micro_batches() {
    use ScheduleKind::{GPipe, Interleaved, OneFOneB, ZeroBubble};
    let rows = [
        (GPipe, 2, 1, 3),
        (OneFOneB, 1, 1, 2),
        (OneFOneB, 2, 1, 4),
        (OneFOneB, 3, 1, 5),
        (ZeroBubble, 2, 1, 4),
        (ZeroBubble, 3, 1, 4),
        (Interleaved, 2, 2, 4),
        (Interleaved, 2, 3, 4),
        (Interleaved, 1, 2, 3),
    ];
    for (kind, ranks, chunks, n) in rows {
        for samples in [13, 3] {
            for products in PRODUCTS {
                let (config, mut model) = pipeline(kind, ranks, chunks, n);
                let parameters = build(&config, &mut model);
                let mut strategy = SingleDevice::with_local(Pipelined::new(config).unwrap());
                let got = autocast(products, || train(&mut strategy, &model, &parameters, samples, 1));
                let of = format!(
                    "{kind} {ranks} ranks {chunks} chunks {n} micro-batches of {samples}, {products}"
                );
                assert_same_bits(&got, &autocast(products, || plain(true, samples, n)), &of);
            }
        }
    }
}

/// Float32 sums over the batch in another order, through a few steps, on values below 1.
const TOLERANCE: f32 = 1e-5;

fn assert_close(got: &Trained, want: &Trained) {
    let losses = got.0.iter().zip(&want.0).map(|(a, b)| (a - b).abs() as f32);
    let values = got.1.iter().zip(&want.1).map(|(a, b)| (a - b).abs());
    let apart = losses.chain(values).fold(0.0, f32::max);
    assert!(apart < TOLERANCE, "{apart}");
}

#[test]
fn a_pipeline_comes_to_what_the_whole_batch_comes_to() {
    let (config, _) = pipeline(ScheduleKind::OneFOneB, 2, 1, 4);
    let mut model = net(false);
    let parameters = build(&config, &mut model);
    let mut strategy = SingleDevice::with_local(Pipelined::new(config).unwrap());
    assert_close(&train(&mut strategy, &model, &parameters, 14, 1), &plain(false, 14, 1));
}

#[test]
fn a_device_of_a_pipeline_holds_no_more_activations_than_its_schedule_says() {
    let mut alive = Vec::new();
    for kind in [ScheduleKind::GPipe, ScheduleKind::OneFOneB, ScheduleKind::ZeroBubble] {
        let (config, mut model) = pipeline(kind, 2, 1, 6);
        let parameters = build(&config, &mut model);
        let mut local = Pipelined::new(config).unwrap();
        let (input, target, ids) = batch(parameters.values().device(), 0, 12);
        let pass = Pass {
            model: &model,
            parameters: &parameters,
            loss: Loss::CrossEntropy { label_smoothing: 0.0 },
            input,
            target,
            ctx: Ctx::train(9, 0, ids),
            weight: 1.0,
            sync: Sync::Now,
        };
        phalanx_parallel::Local::pass(&mut local, &pass, &mut phalanx_tensor::Gradients::default()).unwrap();
        let timeline = local.timeline().unwrap();
        assert!(timeline.bubble() >= 0.0 && timeline.ranks.iter().all(|row| row.len() >= 12));
        alive.push(local.alive().to_vec());
    }
    assert_eq!(alive, [[6, 6], [2, 1], [2, 2]]);
}

#[test]
fn a_placed_model_trains_with_the_bits_of_one_that_is_not() {
    let devices: Vec<Device> = (0..3).map(|_| Device::cpu(1)).collect();
    for cuts in [vec![0..1, 1..BLOCKS], vec![0..4, 4..5, 5..BLOCKS]] {
        let places = cuts.into_iter().zip(devices.iter().cloned());
        let mut model = net(true).place(places).unwrap();
        let parameters = model.build(4);
        let got = train(&mut SingleDevice::new(), &model, &parameters, 13, 2);
        assert_same_bits(&got, &plain(true, 13, 2), "placed");
    }
    // The same device again and again.
    let places = [(0..3, devices[0].clone()), (3..6, devices[1].clone()), (6..BLOCKS, devices[0].clone())];
    let mut model = net(true).place(places).unwrap();
    let parameters = model.build(4);
    let got = train(&mut SingleDevice::new(), &model, &parameters, 13, 1);
    assert_same_bits(&got, &plain(true, 13, 1), "there and back");
}

#[test]
#[allow(clippy::single_range_in_vec_init, reason = "single ranges are what is meant")]
fn blocks_that_are_not_all_placed_in_order_are_refused() {
    let device = Device::cpu(1);
    let refused = |places: Vec<Range<usize>>| {
        let places = places.into_iter().map(|range| (range, device.clone()));
        net(false).place(places).map(drop).unwrap_err().to_string()
    };
    assert_eq!(
        refused(vec![0..2, 3..BLOCKS]),
        "the blocks 0..2, 3..11 are placed, and the model has the blocks 0..11\nhint: place all of them, in order"
    );
    // None, too few, not from the first, too many, and an empty place.
    for ends in [&[][..], &[0, 2], &[1, BLOCKS], &[0, BLOCKS + 1], &[0, 2, 2, BLOCKS]] {
        let places = ends.windows(2).map(|pair| pair[0]..pair[1]).collect();
        assert!(refused(places).contains("place all of them"));
    }
}

fn copies(n: usize) -> DataParallel {
    copies_of(n, || Box::new(net(false)))
}

fn copies_of(n: usize, model: fn() -> Box<dyn Module>) -> DataParallel {
    let others = (1..n).map(|_| Device::cpu(1)).collect();
    DataParallel::new(&DataParallelConfig { others, model: Arc::new(model) }).unwrap()
}

/// Batch norms, beside so much that is kept with their statistics that to copy it takes longer than the first device's part.
struct Kept {
    net: Sequential,
    large: Param,
}

impl Module for Kept {
    fn forward(&self, x: &Tensor, ctx: &mut Ctx) -> Tensor {
        self.net.forward(x, ctx)
    }

    fn visit(&mut self, v: &mut phalanx_nn::Visitor<'_>) {
        v.child("net", &mut self.net);
        v.buffer("large", &mut self.large);
    }
}

fn kept() -> Box<dyn Module> {
    let large = Param::new([8 << 20], Init::Constant(0.0));
    Box::new(Kept { net: net(true), large })
}

/// Each device's batch norms go by its own part, and the first one's are what is kept, so there is nothing to hold it against.
#[test]
fn copies_take_what_is_kept_before_the_first_device_changes_it() {
    let (device, mut model) = (Device::cpu(1), kept());
    let parameters = Parameters::build(&mut model, &device, 4);
    let mut strategy = SingleDevice::with_local(copies_of(3, kept));
    for _ in 0..3 {
        let (losses, values) = train(&mut strategy, &model, &parameters, 12, 1);
        assert!(losses.iter().all(|loss| loss.is_finite()) && values.iter().all(|value| value.is_finite()));
    }
}

#[test]
fn data_parallel_comes_to_what_one_device_comes_to() {
    for (devices, samples) in [(1, 6), (2, 12), (3, 13), (3, 2)] {
        let (device, mut model) = (Device::cpu(1), net(false));
        let parameters = Parameters::build(&mut model, &device, 4);
        let mut strategy = SingleDevice::with_local(copies(devices));
        // Two passes a step, so the sums of a pass are added to those before.
        let passes = if samples > 6 { 2 } else { 1 };
        let got = train(&mut strategy, &model, &parameters, samples, passes);
        assert_close(&got, &plain(false, samples, passes));
    }
}

/// What every rank of a group of threads makes of `f`, by rank.
fn on_ranks<R: Send>(n: usize, f: impl Fn(Group) -> R + std::marker::Sync) -> Vec<R> {
    std::thread::scope(|scope| {
        let ranks: Vec<_> = Group::threads(n).into_iter().map(|group| scope.spawn(|| f(group))).collect();
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
    })
}

/// Each replica spans several devices, whichever way: two ranks sum to what they sum to with one device each.
#[test]
fn ddp_goes_with_placed_pipelined_and_copied_models() {
    // Ranks take the same samples, so what they sum to is what each has.
    let want = plain(false, 8, 1);
    let half = |strategy: &mut dyn Strategy, model: &dyn Module, parameters: &Parameters| {
        strategy.prepare(parameters).unwrap();
        let mut optimizer = Optimizer::new(Sgd { momentum: 0.5, ..Sgd::new(0.05) }).unwrap();
        let mut losses = Vec::new();
        for step in 0..3 {
            let (input, target, ids) = batch(parameters.values().device(), step, 8);
            let rank = strategy.place().rank;
            let ctx = Ctx::train(9, step, ids);
            let mut parts = micro_batches(Some(&input), Some(&target), &ctx, 1.0, 2);
            let part = parts.swap_remove(rank);
            let pass = Pass {
                model,
                parameters,
                loss: Loss::CrossEntropy { label_smoothing: 0.0 },
                input: part.input.unwrap(),
                target: part.target.unwrap(),
                ctx: part.ctx,
                weight: part.weight,
                sync: Sync::Now,
            };
            let mut loss = [strategy.pass(&pass).unwrap() * part.weight];
            strategy.finish(parameters).unwrap();
            strategy.sum(&mut loss).unwrap();
            losses.push(loss[0]);
            let grads = parameters.grads().arena().flat::<f32>();
            optimizer.step(&mut parameters.values().flat_mut::<f32>(), &grads, 1.0);
        }
        (losses, parameters.values().flat::<f32>().to_vec())
    };
    let piped = on_ranks(2, |group| {
        let (config, _) = pipeline(ScheduleKind::OneFOneB, 2, 1, 2);
        let mut model = net(false);
        let parameters = build(&config, &mut model);
        let local = Pipelined::new(config).unwrap();
        half(&mut Ddp::new(group).with_local(local), &model, &parameters)
    });
    let placed = on_ranks(2, |group| {
        let mut model = net(false).place([(0..5, Device::cpu(1)), (5..BLOCKS, Device::cpu(1))]).unwrap();
        let parameters = model.build(4);
        half(&mut Ddp::new(group), &model, &parameters)
    });
    let copied = on_ranks(2, |group| {
        let (device, mut model) = (Device::cpu(1), net(false));
        let parameters = Parameters::build(&mut model, &device, 4);
        half(&mut Ddp::new(group).with_local(copies(2)), &model, &parameters)
    });
    for got in [piped, placed, copied] {
        assert_same_bits(&got[0], &got[1], "ranks hold the same");
        assert_close(&got[0], &want);
    }
}

#[test]
fn a_stage_that_panics_takes_the_pass_with_it_at_once() {
    struct Broken;
    impl Module for Broken {
        fn forward(&self, _: &Tensor, _: &mut Ctx) -> Tensor {
            panic!("this block is broken")
        }
        fn visit(&mut self, _: &mut phalanx_nn::Visitor<'_>) {}
    }
    for at in 0..2 {
        let row = Sequential::new();
        let mut model = if at == 0 {
            row.then(Broken).then(Linear::new(2, 2))
        } else {
            row.then(Linear::new(2, 2)).then(Broken)
        };
        let devices = vec![Device::cpu(1), Device::cpu(1)];
        let config = PipelineConfig {
            blocks: vec![0..1, 1..2],
            devices: devices.clone(),
            kind: ScheduleKind::OneFOneB,
            micro_batches: 2,
        };
        let parameters = Parameters::build_on(&mut model, &devices, |block| block, 0);
        let pass = Pass {
            model: &model,
            parameters: &parameters,
            loss: Loss::Mse,
            input: Tensor::ones(&devices[0], [4, 2], DType::F32),
            target: Tensor::ones(&devices[0], [4, 2], DType::F32),
            ctx: Ctx::train(0, 0, (0..4).collect()),
            weight: 1.0,
            sync: Sync::Now,
        };
        let panic = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            SingleDevice::with_local(Pipelined::new(config).unwrap()).pass(&pass)
        }));
        let message = panic.unwrap_err();
        assert_eq!(message.downcast_ref::<&str>(), Some(&"this block is broken"));
    }
}

/// What a strategy does with gradients may unwind on the caller's thread, as it does where another worker is lost: the other devices'
/// work ends, and the next pass is as good as the first.
#[test]
fn gradients_come_on_the_callers_thread_which_may_give_the_pass_up() {
    /// Gives up at this gradient.
    struct Fragile {
        at: usize,
        seen: usize,
        thread: std::thread::ThreadId,
    }
    impl GradSink for Fragile {
        fn finished(&mut self, _: LeafId, _: Tensor) {
            assert_eq!(std::thread::current().id(), self.thread);
            self.seen += 1;
            if self.seen > self.at {
                std::panic::panic_any("given up");
            }
        }
    }
    for (kind, ranks, chunks) in [
        (ScheduleKind::GPipe, 3, 1),
        (ScheduleKind::OneFOneB, 4, 1),
        (ScheduleKind::ZeroBubble, 3, 1),
        (ScheduleKind::Interleaved, 2, 2),
    ] {
        let (config, mut model) = pipeline(kind, ranks, chunks, 4);
        let parameters = build(&config, &mut model);
        let leaves = parameters.layout().count();
        let mut local = Pipelined::new(config).unwrap();
        let (input, target, ids) = batch(parameters.values().device(), 0, 12);
        let pass = Pass {
            model: &model,
            parameters: &parameters,
            loss: Loss::CrossEntropy { label_smoothing: 0.0 },
            input,
            target,
            ctx: Ctx::train(9, 0, ids),
            weight: 1.0,
            sync: Sync::Now,
        };
        let mut pass_until = |at: usize| {
            parameters.grads().zero();
            let mut sink = Fragile { at, seen: 0, thread: std::thread::current().id() };
            let made = || phalanx_parallel::Local::pass(&mut local, &pass, &mut sink).unwrap();
            std::panic::catch_unwind(std::panic::AssertUnwindSafe(made))
                .map_err(|panic| *panic.downcast().unwrap())
        };
        let whole = pass_until(leaves);
        assert!(whole.is_ok(), "{kind}: {whole:?}");
        for at in 0..leaves {
            assert_eq!(pass_until(at), Err("given up"), "{kind} at {at} of {leaves}");
            assert_eq!(pass_until(leaves), whole, "{kind} after it gave up at {at}");
        }
    }
}

#[test]
fn an_impossible_schedule_is_refused_before_anything_is_computed() {
    let (config, _) = pipeline(ScheduleKind::Interleaved, 2, 2, 3);
    let error = Pipelined::new(config).map(drop).unwrap_err();
    assert!(
        matches!(error, Error::Schedule(_)) && error.to_string().contains("take 4 of them or 2"),
        "{error}"
    );
}

/// The stages of a pipeline of ranks: each holds its own parameters alone, with the values that the whole model has there.
#[test]
fn a_pipeline_over_ranks_has_the_bits_of_plain_passes_over_its_micro_batches() {
    use ScheduleKind::{GPipe, Interleaved, OneFOneB, ZeroBubble};
    let rows = [
        (GPipe, 2, 1, 3, 13),
        (OneFOneB, 2, 1, 4, 13),
        (OneFOneB, 3, 1, 5, 3),
        (ZeroBubble, 2, 1, 4, 13),
        (Interleaved, 2, 2, 4, 13),
    ];
    let rows = rows.into_iter().flat_map(|row| PRODUCTS.map(|products| (row, products)));
    for ((kind, ranks, chunks, n, samples), products) in rows {
        let (losses, values) = autocast(products, || plain(true, samples, n));
        let names = whole_names();
        let shape = Shape { ranks, chunks, micro_batches: n };
        let of_ranks = on_ranks(ranks, |group| {
            let (device, mut model) = (Device::cpu(1), net(true));
            let schedule = Schedule::new(kind, shape).unwrap();
            let local = RankPipeline::new(group, schedule, cut(ranks * chunks), device.clone());
            let parameters = Parameters::build_part(&mut model, &device, |block| local.holds(block), 4);
            let mut strategy = SingleDevice::with_local(local);
            let trained = autocast(products, || train(&mut strategy, &model, &parameters, samples, 1));
            (trained, parameters.names().to_vec(), parameters.layout().clone())
        });
        let of = format!("{kind} {ranks} ranks {chunks} chunks {n} micro-batches of {samples}, {products}");
        let last = &of_ranks[ranks - 1].0.0;
        assert!(
            losses.iter().zip(last).all(|(a, b)| a.to_bits() == b.to_bits()),
            "{of}: {losses:?}, {last:?}"
        );
        assert!(of_ranks[..ranks - 1].iter().all(|(trained, ..)| trained.0 == [0.0; 3]));
        let mut held: Vec<&String> = of_ranks.iter().flat_map(|(_, names, _)| names).collect();
        held.sort();
        let mut all: Vec<&String> = names.0.iter().collect();
        all.sort();
        assert_eq!(held, all, "each parameter is held by one rank");
        for (trained, own, layout) in &of_ranks {
            for (i, name) in own.iter().enumerate() {
                let there = names.1.range(names.0.iter().position(|other| other == name).unwrap());
                let bits = |numbers: &[f32]| numbers.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
                assert!(bits(&trained.1[layout.range(i)]) == bits(&values[there]), "{of}: {name}");
            }
        }
    }
}

/// The names and places of all parameters of the net.
fn whole_names() -> (Vec<String>, phalanx_tensor::Layout) {
    let mut model = net(true);
    let parameters = Parameters::build(&mut model, &Device::cpu(1), 4);
    (parameters.names().to_vec(), parameters.layout().clone())
}

#[test]
fn a_rank_that_is_lost_ends_the_pass_of_the_others_with_an_error() {
    let errors = on_ranks(2, |group| {
        if group.rank().index() == 1 {
            return None;
        }
        let (device, mut model) = (Device::cpu(1), net(false));
        let schedule = Schedule::new(ScheduleKind::OneFOneB, Shape { ranks: 2, chunks: 1, micro_batches: 2 });
        let local = RankPipeline::new(group, schedule.unwrap(), cut(2), device.clone());
        let parameters = Parameters::build_part(&mut model, &device, |block| local.holds(block), 4);
        let (input, target, ids) = batch(&device, 0, 4);
        let pass = Pass {
            model: &model,
            parameters: &parameters,
            loss: Loss::CrossEntropy { label_smoothing: 0.0 },
            input,
            target,
            ctx: Ctx::train(9, 0, ids),
            weight: 1.0,
            sync: Sync::Now,
        };
        Some(SingleDevice::with_local(local).pass(&pass).unwrap_err())
    });
    assert!(matches!(errors[0], Some(Error::Comm(_))), "{errors:?}");
}

/// Two replicas of two stages each: the mesh says who sums with whom, and who hands on to whom.
#[test]
fn replicas_of_pipelines_come_to_what_one_rank_comes_to() {
    let mesh = Mesh::fit(&[(Axis::Pipeline, 2)], 4, &[]).unwrap();
    let (losses, values) = plain(false, 12, 1);
    let names = {
        let mut model = net(false);
        let parameters = Parameters::build(&mut model, &Device::cpu(1), 4);
        (parameters.names().to_vec(), parameters.layout().clone())
    };
    let of_ranks = on_ranks(4, |world| {
        let at = mesh.coordinates(world.rank().index());
        let (row, copies) =
            (mesh.along(&world, &[Axis::Pipeline]).unwrap(), mesh.along(&world, &[Axis::Replica]).unwrap());
        let (device, mut model) = (Device::cpu(1), net(false));
        let schedule =
            Schedule::new(ScheduleKind::OneFOneB, Shape { ranks: 2, chunks: 1, micro_batches: 3 }).unwrap();
        let local = RankPipeline::new(row, schedule, cut(2), device.clone());
        let parameters = Parameters::build_part(&mut model, &device, |block| local.holds(block), 4);
        let mut strategy = Ddp::new(copies).with_local(local);
        strategy.prepare(&parameters).unwrap();
        let mut optimizer = Optimizer::new(Sgd { momentum: 0.5, ..Sgd::new(0.05) }).unwrap();
        let mut losses = Vec::new();
        for step in 0..3 {
            let (input, target, ids) = batch(&device, step, 12);
            let ctx = Ctx::train(9, step, ids);
            let mut halves = micro_batches(Some(&input), Some(&target), &ctx, 1.0, 2);
            let half = halves.swap_remove(at.along(Axis::Replica));
            let pass = Pass {
                model: &model,
                parameters: &parameters,
                loss: Loss::CrossEntropy { label_smoothing: 0.0 },
                input: half.input.unwrap(),
                target: half.target.unwrap(),
                ctx: half.ctx,
                weight: half.weight,
                sync: Sync::Now,
            };
            let mut loss = [strategy.pass(&pass).unwrap() * half.weight];
            strategy.finish(&parameters).unwrap();
            world.all_reduce(&mut loss, phalanx_comm::ReduceOp::Sum).unwrap();
            losses.push(loss[0]);
            let grads = parameters.grads().arena().flat::<f32>();
            optimizer.step(&mut parameters.values().flat_mut::<f32>(), &grads, 1.0);
        }
        let own = parameters.values().flat::<f32>().to_vec();
        (losses, own, parameters.names().to_vec(), parameters.layout().clone())
    });
    assert_eq!(of_ranks[0].1, of_ranks[2].1, "replicas of the first stage");
    assert_eq!(of_ranks[1].1, of_ranks[3].1, "replicas of the last stage");
    for (got, own, held, layout) in of_ranks {
        assert!(
            got.iter().zip(&losses).all(|(a, b)| ((a - b).abs() as f32) < TOLERANCE),
            "{got:?}, {losses:?}"
        );
        for (i, name) in held.iter().enumerate() {
            let there = names.1.range(names.0.iter().position(|other| other == name).unwrap());
            let apart = own[layout.range(i)].iter().zip(&values[there]).map(|(a, b)| (a - b).abs());
            assert!(apart.fold(0.0, f32::max) < TOLERANCE, "{name}");
        }
    }
}
