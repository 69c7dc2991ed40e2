//! A model that is shared out among ranks learns what one that isn't learns, and takes the memory of its part.

use phalanx_comm::{Group, Rank};
use phalanx_nn::optim::{Adam, Clip, Optimizer};
use phalanx_nn::{
    Average, Block, Ctx, Dropout, Init, LayerNorm, Linear, Loss, Module, Param, Parameters, Relu, Row,
    Sequential, Visitor,
};
use phalanx_parallel::{
    EvalPass, Fsdp, FsdpConfig, Here, Outputs, Pass, Sharded, SingleDevice, Strategy, Sync,
};
use phalanx_tensor::{Arena, DType, Device, Later, Philox, Tensor, autocast};
use std::cell::RefCell;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Mutex};

const FEATURES: usize = 12;
const ALL: [Sharded; 3] = [Sharded::States, Sharded::Gradients, Sharded::Parameters];

fn net() -> Sequential {
    // Blocks whose parameters don't share out evenly among 3 ranks, and one without any.
    Sequential::new()
        .then(Linear::new(FEATURES, 37))
        .then(Relu)
        .then(Dropout::new(0.25))
        .then(Linear::new(37, 19))
        .then(Relu)
        .then(Linear::new(19, 2))
}

/// Samples `ids`: their inputs and targets are functions of their numbers.
fn samples(device: &Device, ids: &[u64]) -> (Tensor, Tensor) {
    let numbers = |width: usize, stream: u64| -> Vec<f32> {
        let of = |id: u64| (0..width).map(move |i| Philox::new(id, stream).word(i as u64));
        ids.iter().flat_map(|&id| of(id)).map(|word| word as f32 / u32::MAX as f32 - 0.5).collect()
    };
    let tensor = |width, stream| Tensor::from_slice(device, &numbers(width, stream), [ids.len(), width]);
    (tensor(FEATURES, 1), tensor(2, 2))
}

/// What training leaves, and what it told on the way.
#[derive(Debug, Clone)]
struct Outcome {
    values: Vec<f32>,
    losses: Vec<f64>,
    norms: Vec<f64>,
    /// Elements of each of the optimizer's arrays.
    held: usize,
}

const STEPS: u64 = 5;
/// Samples of the steps: the third has fewer than there may be ranks.
const BATCHES: [u64; STEPS as usize] = [13, 8, 2, 13, 9];
/// Backward passes of a step, each of about a half of its samples.
const PASSES: u64 = 2;

/// Trains as rank `rank` of `world`: sample `i` of a pass is rank `i % world`'s.
fn train(strategy: &mut dyn Strategy, net: &Sequential, parameters: &Parameters, device: &Device) -> Outcome {
    let place = strategy.place();
    strategy.prepare(parameters).unwrap();
    let mut optimizer = Optimizer::new(Adam { lr: 0.02, ..Adam::default() }).unwrap();
    let clip = Clip { norm: Some(0.3), value: None };
    let (mut losses, mut norms) = (Vec::new(), Vec::new());
    for step in 0..STEPS {
        let batch = BATCHES[step as usize];
        let mut loss = [0.0];
        for pass in 0..PASSES {
            let all: Vec<u64> = (0..batch).filter(|i| i % PASSES == pass).map(|i| step * 100 + i).collect();
            let own: Vec<u64> = all.iter().copied().skip(place.rank).step_by(place.world_size).collect();
            let (input, target) = samples(device, &own);
            let weight = own.len() as f64 / batch as f64;
            let sync = if pass + 1 == PASSES { Sync::Now } else { Sync::Later };
            let ctx = Ctx::train(3, step, Arc::from(own));
            let pass = Pass { model: net, parameters, loss: Loss::Mse, input, target, ctx, weight, sync };
            loss[0] += strategy.pass(&pass).unwrap() * weight;
        }
        strategy.finish(parameters).unwrap();
        norms.extend(strategy.clip(&clip, parameters, &mut optimizer).unwrap().map(Later::item));
        strategy.step(&mut optimizer, parameters, device, 1.0).unwrap();
        strategy.sum(&mut loss).unwrap();
        losses.push(loss[0]);
    }
    let held = optimizer.state().next().map_or(0, |(_, state)| state.with(<[f32]>::len));
    Outcome { values: Vec::new(), losses, norms, held }
}

fn alone() -> Outcome {
    let (device, mut net) = (Device::cpu(1), net());
    let parameters = Parameters::build(&mut net, &device, 7);
    let outcome = train(&mut SingleDevice::new(), &net, &parameters, &device);
    Outcome { values: parameters.values().flat::<f32>().to_vec(), ..outcome }
}

/// The outputs of an evaluation, if they come to this rank.
fn evaluate(
    strategy: &mut dyn Strategy,
    model: &dyn Module,
    parameters: &Parameters,
    input: &Tensor,
) -> Option<Vec<f32>> {
    let found = RefCell::new(None);
    let judge = |outputs: &Outputs<'_>, _: &mut [f64]| {
        found.replace(Some(outputs.to_vec()?));
        Ok(())
    };
    let pass = EvalPass { model, parameters, input: input.clone(), target: input.clone(), ctx: Ctx::eval() };
    strategy.evaluate(&pass, &judge, &mut []).unwrap();
    found.into_inner()
}

fn sharded(group: Group, replicas: usize, sharded: Sharded, unit_bytes: usize) -> Outcome {
    let (device, mut net) = (Device::cpu(1), net());
    // Rank 0's values count.
    let parameters = Parameters::build(&mut net, &device, if group.rank() == Rank(0) { 7 } else { 8 });
    let config = FsdpConfig { sharded, unit_bytes, ..FsdpConfig::default() };
    let mut fsdp = if replicas == 1 {
        Fsdp::new(group, &net, &parameters, config)
    } else {
        let (shards, rank) = (group.world_size() / replicas, group.rank().index());
        let shard = group.split(Some((rank / shards) as u32), 0).unwrap().unwrap();
        let same = group.split(Some((rank % shards) as u32), 0).unwrap();
        Fsdp::hybrid(group, shard, same, &net, &parameters, config)
    }
    .unwrap();
    let outcome = train(&mut fsdp, &net, &parameters, &device);
    fsdp.gather().unwrap();
    Outcome { values: parameters.values().flat::<f32>().to_vec(), ..outcome }
}

/// Runs `f` as each of `n` ranks.
fn ranks<R: Send>(n: usize, f: impl Fn(Group) -> R + std::marker::Sync) -> Vec<R> {
    std::thread::scope(|scope| {
        let threads: Vec<_> = Group::threads(n).into_iter().map(|group| scope.spawn(|| f(group))).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

fn check(outcomes: &[Outcome], alone: &Outcome, what: &str) {
    for outcome in outcomes {
        assert!(outcome.values == outcomes[0].values, "{what}: ranks differ");
        // Sums over ranks are taken in another order than sums over rows.
        let far = |a: f64, b: f64| (a - b).abs() > 1e-5;
        let [got, want] = [outcome, alone].map(|o| [&o.losses, &o.norms].map(Vec::clone).concat());
        assert!(
            got.len() == want.len() && !got.iter().zip(&want).any(|(a, b)| far(*a, *b)),
            "{what}: {got:?} {want:?}"
        );
        let values = outcome.values.iter().zip(&alone.values);
        let worst = values.map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
        assert!(worst < 2e-4, "{what}: {worst}");
    }
}

#[test]
fn ranks_learn_what_one_learns_whatever_is_shared_out() {
    let alone = alone();
    for n in 1..5 {
        for stage in ALL {
            for unit_bytes in [0, 3000, 1 << 20] {
                let what = format!("{n} ranks, {stage:?}, units of {unit_bytes}");
                let outcomes = ranks(n, |group| sharded(group, 1, stage, unit_bytes));
                check(&outcomes, &alone, &what);
                // Up to as many as there are ranks of each unit can't be shared out.
                let held = outcomes.iter().map(|outcome| outcome.held).max().unwrap();
                assert!(held <= alone.held / n + 6 * n, "{what}: {held} of {}", alone.held);
            }
        }
    }
}

#[test]
fn what_is_shared_out_within_hosts_is_the_same_on_all_of_them() {
    let alone = alone();
    for stage in ALL {
        let outcomes = ranks(6, |group| sharded(group, 2, stage, 0));
        check(&outcomes, &alone, &format!("2 x 3 ranks, {stage:?}"));
    }
}

#[test]
fn the_same_run_has_the_same_bits() {
    let run = || ranks(3, |group| sharded(group, 1, Sharded::Parameters, 0)).remove(0);
    assert!(run().values == run().values);
}

/// A row of equal blocks of some pages each.
fn wide() -> Sequential {
    (0..6).fold(Sequential::new(), |net, _| net.then(Linear::new(128, 128)).then(Relu))
}

/// The norms of steps of two passes with clipped gradients, the second one of `second` samples.
fn norms(
    strategy: &mut dyn Strategy,
    net: &dyn Module,
    parameters: &Parameters,
    second: usize,
    make: fn(&mut dyn Strategy, &Pass<'_>),
) -> Vec<f64> {
    let (device, place) = (parameters.values().device().clone(), strategy.place());
    strategy.prepare(parameters).unwrap();
    let mut optimizer = Optimizer::new(Adam { lr: 1e-3, ..Adam::default() }).unwrap();
    let clip = Clip { norm: Some(0.1), value: None };
    let step = |step: u64| {
        for (pass, sync) in [(0, Sync::Later), (1, Sync::Now)] {
            let count = if pass == 0 { 12 } else { second };
            let own = (0..count).skip(place.rank).step_by(place.world_size);
            let word = |i: usize| Philox::new(step, pass).word(i as u64) as f32 / u32::MAX as f32;
            let values: Vec<f32> =
                own.clone().flat_map(|sample| (0..130).map(move |i| word(130 * sample + i))).collect();
            let n = own.len();
            let input = Tensor::from_slice(&device, &values, [n, 130]);
            let weight = n as f64 / (12 + second) as f64;
            let target = Tensor::ones(&device, [n, 130], DType::F32);
            let ctx = Ctx::train(0, step, (0..n as u64).collect());
            let pass = Pass { model: net, parameters, loss: Loss::Mse, input, target, ctx, weight, sync };
            make(strategy, &pass);
        }
        strategy.finish(parameters).unwrap();
        let norm = strategy.clip(&clip, parameters, &mut optimizer).unwrap();
        strategy.step(&mut optimizer, parameters, &device, 1.0).unwrap();
        norm.expect("it was asked for").item()
    };
    (0..5).map(step).collect()
}

/// A layer with the weight of the first block.
struct Again(Param);

impl Module for Again {
    fn forward(&self, x: &Tensor, _: &mut Ctx) -> Tensor {
        x.linear(&self.0, None)
    }

    fn visit(&mut self, v: &mut Visitor<'_>) {
        v.shared("0.weight", &mut self.0);
    }
}

/// Units use the same pages in turn, which hold whatever the one before left there.
#[test]
fn what_units_leave_in_pages_that_others_use_counts_for_nothing() {
    // Of 130 numbers each layer's bias is followed by some that belong to nobody. The last block's gradient is one of the first unit's.
    let net = || {
        let again = Again(Param::new([130, 130], Init::fan_in(130)));
        let block = |i: usize| Block::new(&i.to_string(), Linear::new(130, 130));
        (0..6).fold(Row::new(), |row, i| row.then(block(i))).then(Block::unprefixed("again", again))
    };
    let pass: fn(&mut dyn Strategy, &Pass<'_>) = |strategy, pass| {
        strategy.pass(pass).unwrap();
    };
    let backward: fn(&mut dyn Strategy, &Pass<'_>) = |strategy, pass| {
        let output = (pass.samples() > 0).then(|| pass.model.forward(&pass.input, &mut pass.ctx.clone()));
        let loss = output.map(|output| pass.loss.of(&output, &pass.target));
        strategy.backward(pass.parameters, loss.as_ref(), pass.weight, pass.sync).unwrap();
    };
    for n in 2..4 {
        let (device, mut model) = (Device::cpu(1), net());
        let whole = Parameters::build(&mut model, &device, 7);
        // The last rank has no sample of the second pass.
        let want = norms(&mut SingleDevice::new(), &model, &whole, n - 1, pass);
        let all = ALL.into_iter().map(|stage| (stage, pass));
        for (stage, make) in all.chain([(Sharded::States, backward), (Sharded::Gradients, backward)]) {
            for got in ranks(n, |group| {
                let mut model = net();
                let parameters = Parameters::build(&mut model, &Device::cpu(1), 7);
                // Three blocks each, of which parts begin and end in the middle.
                let config = FsdpConfig { sharded: stage, unit_bytes: 200_000, ..FsdpConfig::default() };
                let mut fsdp = Fsdp::new(group, &model, &parameters, config).unwrap();
                norms(&mut fsdp, &model, &parameters, n - 1, make)
            }) {
                let close = got.iter().zip(&want).all(|(got, want)| (got / want - 1.0).abs() < 1e-4);
                assert!(close, "{n} ranks, {stage:?}: {got:?}, not {want:?}");
            }
        }
    }
}

/// Of each of 6 units, up to two pages that are shared with the next part.
const SHARED_PAGES: usize = 6 * 2 * 4096;

fn in_memory(arena: &Arena) -> usize {
    arena.region().expect("an arena of its own").resident().unwrap()
}

#[test]
fn a_rank_has_no_more_in_memory_than_its_parts_and_what_it_works_with() {
    let n = 4;
    let held = ranks(n, |group| {
        let (device, mut net) = (Device::cpu(1), wide());
        let parameters = Parameters::build(&mut net, &device, 0);
        let group_rank = group.rank().index();
        let config = FsdpConfig { unit_bytes: 0, ..FsdpConfig::default() };
        let mut fsdp = Fsdp::new(group, &net, &parameters, config).unwrap();
        fsdp.prepare(&parameters).unwrap();
        let mut optimizer = Optimizer::new(Adam { lr: 0.02, ..Adam::default() }).unwrap();
        for _ in 0..2 {
            let pass = Pass {
                model: &net,
                parameters: &parameters,
                loss: Loss::Mse,
                input: Tensor::ones(&device, [2, 128], DType::F32),
                target: Tensor::ones(&device, [2, 128], DType::F32),
                ctx: Ctx::eval(),
                weight: 0.5 / n as f64,
                sync: Sync::Now,
            };
            fsdp.pass(&pass).unwrap();
            // Of most units the gradients were summed and given back while the pass went on.
            let (whole, gradients) = (4 * parameters.layout().len(), in_memory(parameters.grads().arena()));
            assert!(gradients <= whole / n + 2 * whole / 6 + SHARED_PAGES, "{gradients} of {whole}");
            fsdp.finish(&parameters).unwrap();
            fsdp.step(&mut optimizer, &parameters, &device, 1.0).unwrap();
        }
        let away = [parameters.values(), parameters.grads().arena()].map(in_memory);
        // Who uses values that aren't here finds out.
        let used = catch_unwind(AssertUnwindSafe(|| parameters.value(0).to_vec::<f32>()));
        assert!(used.is_err());
        // Two of the twelve parameters, which other ranks ask for, too.
        let params = group_rank..group_rank + 2;
        let states: Vec<_> = optimizer.state().map(|(_, state)| state).collect();
        let part = fsdp.collect(&parameters, &states, params.clone()).unwrap().unwrap();
        let after = in_memory(parameters.values());
        fsdp.gather().unwrap();
        let span = parameters.layout().span(params);
        assert!(part.values == parameters.values().flat::<f32>()[span.clone()]);
        if let Some(whole) = fsdp.whole_state(&optimizer).unwrap().filter(|_| group_rank == 0) {
            assert_eq!(part.beside.len(), 2);
            assert!(part.beside.iter().zip(whole).all(|(part, whole)| *part == whole[span.clone()]));
        }
        let [values, grads] = away;
        (parameters.values().layout().len() * 4, [values, grads, after], in_memory(parameters.values()))
    });
    for (whole, away, gathered) in held {
        assert!(gathered >= whole, "{gathered} of {whole}");
        for bytes in away {
            assert!(bytes <= whole / n + SHARED_PAGES, "{bytes} of {whole}");
        }
    }
}

/// Whatever of a step's values a rank keeps, its mean of them is that of all values.
#[test]
fn ranks_have_the_running_mean_of_what_they_keep() {
    let (device, mut plain) = (Device::cpu(1), net());
    let whole = Parameters::build(&mut plain, &device, 7);
    let moved = |parameters: &Parameters, step: u64| -> Vec<f32> {
        let at = |i: u64| Philox::new(step, 9).unit(i);
        (0..parameters.layout().len() as u64).map(at).collect()
    };
    let mut want = Average::of(&whole);
    for step in 0..3 {
        whole.values().write_flat(&moved(&whole, step));
        want.update(&whole, 0.75);
    }
    let want = want.values().with(<[f32]>::to_vec);
    for (sharded, n) in ALL.into_iter().flat_map(|sharded| [1, 2, 3].map(|n| (sharded, n))) {
        ranks(n, |group| {
            let (mut net, rank) = (net(), group.rank());
            let parameters = Parameters::build(&mut net, &device, 7);
            let config = FsdpConfig { sharded, unit_bytes: 1, ..FsdpConfig::default() };
            let mut fsdp = Fsdp::new(group, &net, &parameters, config).unwrap();
            fsdp.prepare(&parameters).unwrap();
            let mut mean = fsdp.mean(&parameters);
            let held: usize = fsdp.held().unwrap().iter().map(std::ops::Range::len).sum();
            assert_eq!(mean.values().with(<[f32]>::len), held);
            for step in 0..3 {
                fsdp.gather().unwrap();
                parameters.values().write_flat(&moved(&parameters, step));
                fsdp.follow(&parameters, &mut mean, 0.75);
            }
            let now = || parameters.values().read_flat::<f32>();
            for want in [&want, &moved(&parameters, 2)] {
                fsdp.exchange(&parameters, &mut mean).unwrap();
                fsdp.gather().unwrap();
                assert!(now() == *want, "{sharded:?}, rank {rank} of {n}");
            }
            let whole = fsdp.whole_mean(&mean).unwrap().unwrap();
            assert!(rank != Rank(0) || whole.values().with(|values| values == want));
            // The ranks part while the model has the mean.
            fsdp.exchange(&parameters, &mut mean).unwrap();
            fsdp.part(&parameters, None);
            fsdp.swap(&parameters, &mut mean);
            let after = moved(&parameters, 2);
            for held in fsdp.portion(&parameters).elements {
                let mut own = vec![0.0; held.len()];
                fsdp.read_held(&parameters, held.clone(), &mut own);
                assert!(own == after[held], "{sharded:?}, rank {rank} of {n}");
            }
        });
    }
}

#[test]
fn first_values_files_and_evaluations_come_unit_by_unit() {
    let n = 4;
    ranks(n, |group| {
        let (device, mut net, mut plain) = (Device::cpu(1), wide(), wide());
        let (parameters, whole) =
            (Parameters::lay_out(&mut net, &device, 7), Parameters::build(&mut plain, &device, 7));
        let is_first = group.rank() == Rank(0);
        let part = 4 * parameters.layout().len() / n + SHARED_PAGES;
        let has_a_part = |what: &str| {
            let bytes = in_memory(parameters.values());
            assert!(bytes <= part, "{what}: {bytes}, where a part takes {part}");
        };
        let config = FsdpConfig { unit_bytes: 0, ..FsdpConfig::default() };
        let mut fsdp = Fsdp::new(group, &net, &parameters, config).unwrap();
        fsdp.prepare(&parameters).unwrap();
        has_a_part("first values");
        // A rank without samples takes part all the same.
        let input = Tensor::ones(&device, [2, 128], DType::F32);
        let own = if is_first { input.narrow(0, 0, 0) } else { input.clone() };
        let output = evaluate(&mut fsdp, &net, &parameters, &own);
        let want = (!is_first).then(|| plain.forward(&input, &mut Ctx::eval()).to_vec::<f32>());
        assert_eq!(output, want);
        has_a_part("an evaluation");
        for (i, name) in parameters.names().iter().enumerate() {
            let values: Vec<f32> =
                (0..whole.layout().shape(i).count()).map(|at| (i * 100_000 + at) as f32).collect();
            whole.load_one(name, &values);
            fsdp.load_one(&parameters, name, &values);
        }
        has_a_part("a file");
        let same = || parameters.values().read_flat::<f32>() == whole.values().read_flat::<f32>();
        for _ in 0..2 {
            fsdp.gather_on_first().unwrap();
            if is_first {
                assert!(same(), "rank 0 has all of it");
            } else {
                has_a_part("another rank's end");
            }
        }
        fsdp.gather().unwrap();
        assert!(same());
    });
}

#[test]
fn parts_that_are_named_in_another_order_than_they_are_used_are_refused() {
    struct Crossed(Linear, Linear);
    impl Module for Crossed {
        fn forward(&self, x: &Tensor, ctx: &mut Ctx) -> Tensor {
            self.1.forward(&self.0.forward(x, ctx), ctx)
        }
        fn visit(&mut self, v: &mut Visitor<'_>) {
            v.child("last", &mut self.1);
            v.child("first", &mut self.0);
        }
        fn blocks(&self) -> usize {
            2
        }
        fn forward_block(&self, block: usize, x: &Tensor, ctx: &mut Ctx) -> Tensor {
            if block == 0 { self.0.forward(x, ctx) } else { self.1.forward(x, ctx) }
        }
        fn block_of(&self, name: &str) -> usize {
            usize::from(name.starts_with("last"))
        }
    }
    let mut net = Crossed(Linear::new(2, 2), Linear::new(2, 2));
    let parameters = Parameters::build(&mut net, &Device::cpu(1), 0);
    let error = Fsdp::new(Group::solo(), &net, &parameters, FsdpConfig::default()).err().unwrap();
    let want = "first.weight of block 0 comes after last.bias of block 1\nhint: ";
    assert!(error.to_string().starts_with(want), "{error}");
}

/// A layer that hands gradients on and learns nothing.
struct Frozen(Param);

impl Frozen {
    fn new(width: usize) -> Frozen {
        Frozen(Param::new([width, width], Init::fan_in(width)))
    }
}

impl Module for Frozen {
    fn forward(&self, x: &Tensor, _: &mut Ctx) -> Tensor {
        x.linear(&self.0.detach(), None)
    }

    fn visit(&mut self, v: &mut Visitor<'_>) {
        v.param("weight", &mut self.0);
    }
}

#[test]
fn what_is_frozen_stays_and_the_rest_learns_what_it_learns_alone() {
    // At the start, where nothing has gradients, and between what learns.
    let net = || {
        Sequential::new()
            .then(Frozen::new(FEATURES))
            .then(Linear::new(FEATURES, 19))
            .then(Relu)
            .then(Frozen::new(19))
            .then(Linear::new(19, 2))
    };
    let (device, mut model) = (Device::cpu(1), net());
    let parameters = Parameters::build(&mut model, &device, 7);
    let first = parameters.values().read_flat::<f32>();
    let outcome = train(&mut SingleDevice::new(), &model, &parameters, &device);
    let alone = Outcome { values: parameters.values().read_flat(), ..outcome };
    for stage in ALL {
        for unit_bytes in [0, 1 << 20] {
            let outcomes = ranks(3, |group| {
                let (device, mut model) = (Device::cpu(1), net());
                let parameters = Parameters::build(&mut model, &device, 7);
                let config = FsdpConfig { sharded: stage, unit_bytes, ..FsdpConfig::default() };
                let mut fsdp = Fsdp::new(group, &model, &parameters, config).unwrap();
                let outcome = train(&mut fsdp, &model, &parameters, &device);
                fsdp.gather().unwrap();
                Outcome { values: parameters.values().read_flat(), ..outcome }
            });
            check(&outcomes, &alone, &format!("{stage:?}, units of {unit_bytes}"));
            for (i, name) in parameters.names().iter().enumerate() {
                let (range, values) = (parameters.layout().range(i), &outcomes[0].values);
                let is_frozen = ["0.weight", "3.weight"].contains(&name.as_str());
                assert_eq!(values[range.clone()] == first[range], is_frozen, "{name}");
            }
        }
    }
}

/// Weights of norms, which stay float32, one that is cast without a gradient, and one that is used in both types.
fn net_of_both_types() -> Sequential {
    struct Both(Param);
    impl Module for Both {
        fn forward(&self, x: &Tensor, _: &mut Ctx) -> Tensor {
            x.linear(&self.0, None) + self.0.square().mean_all()
        }
        fn visit(&mut self, v: &mut Visitor<'_>) {
            v.param("weight", &mut self.0);
        }
    }
    Sequential::new()
        .then(LayerNorm::new(FEATURES))
        .then(Linear::new(FEATURES, 37))
        .then(Relu)
        .then(Dropout::new(0.25))
        .then(LayerNorm::new(37))
        .then(Linear::new(37, 19))
        .then(Both(Param::new([19, 19], Init::fan_in(19))))
        .then(Frozen::new(19))
        .then(Linear::new(19, 2))
}

/// Where all values stay here, autocast casts them; where they come and go, most come as casts.
#[test]
fn casts_of_units_are_those_of_whole_values_to_the_bit() {
    for dtype in [DType::BF16, DType::F16] {
        for n in [1, 2, 3] {
            let outcomes = |stage, unit_bytes| {
                ranks(n, |group| {
                    let (device, mut model) = (Device::cpu(1), net_of_both_types());
                    let parameters = Parameters::build(&mut model, &device, 7);
                    let config = FsdpConfig { sharded: stage, unit_bytes, ..FsdpConfig::default() };
                    let mut fsdp = Fsdp::new(group, &model, &parameters, config).unwrap();
                    let outcome = autocast(dtype, || train(&mut fsdp, &model, &parameters, &device));
                    // An evaluation between passes, of values that are whole here, and of some that aren't.
                    let (input, _) = samples(&device, &[1, 2]);
                    let evaluated = [0, 1].map(|time| {
                        if time == 1 {
                            fsdp.gather().unwrap();
                        }
                        evaluate(&mut fsdp, &model, &parameters, &input).unwrap()
                    });
                    let in_half = autocast(dtype, || evaluate(&mut fsdp, &model, &parameters, &input));
                    let in_half = in_half.unwrap();
                    fsdp.gather().unwrap();
                    assert!(evaluated[0] == evaluated[1] && evaluated[0] != in_half);
                    let values = parameters.values().read_flat::<f32>();
                    Outcome { values: [values, in_half].concat(), ..outcome }
                })
            };
            for unit_bytes in [0, 3000, 1 << 20] {
                let want = outcomes(Sharded::States, unit_bytes);
                let got = outcomes(Sharded::Parameters, unit_bytes);
                for (got, want) in got.iter().zip(&want) {
                    assert_eq!(got.losses, want.losses, "{dtype}, {n} ranks, units of {unit_bytes}");
                    assert!(got.values == want.values && got.norms == want.norms);
                }
            }
        }
    }
}

/// Notes what of the values is in memory when a pass comes by.
struct Probe(Arc<Mutex<(Option<Arena>, Vec<usize>)>>);

impl Module for Probe {
    fn forward(&self, x: &Tensor, _: &mut Ctx) -> Tensor {
        let (values, seen) = &mut *self.0.lock().unwrap();
        seen.extend(values.as_ref().map(in_memory));
        x.clone()
    }

    fn visit(&mut self, _: &mut Visitor<'_>) {}
}

#[test]
fn once_it_is_known_what_is_cast_no_more_than_casts_is_gathered() {
    const WIDTH: usize = 512;
    let n = 2;
    ranks(n, |group| {
        let (device, notes) = (Device::cpu(1), Arc::new(Mutex::default()));
        let mut model = Sequential::new()
            .then(LayerNorm::new(WIDTH))
            .then(Linear::new(WIDTH, WIDTH))
            .then(Probe(notes.clone()));
        let parameters = Parameters::build(&mut model, &device, 0);
        // One unit.
        let config = FsdpConfig { unit_bytes: usize::MAX, ..FsdpConfig::default() };
        let mut fsdp = Fsdp::new(group, &model, &parameters, config).unwrap();
        fsdp.prepare(&parameters).unwrap();
        fsdp.begin(&parameters, Here::All).unwrap();
        notes.lock().unwrap().0 = Some(parameters.values().clone());
        let mut optimizer = Optimizer::new(Adam { lr: 0.02, ..Adam::default() }).unwrap();
        let whole = 4 * parameters.layout().len();
        for _ in 0..3 {
            let pass = Pass {
                model: &model,
                parameters: &parameters,
                loss: Loss::Mse,
                input: Tensor::ones(&device, [2, WIDTH], DType::F32),
                target: Tensor::ones(&device, [2, WIDTH], DType::F32),
                ctx: Ctx::eval(),
                weight: 0.5,
                sync: Sync::Now,
            };
            autocast(DType::BF16, || fsdp.pass(&pass)).unwrap();
            fsdp.finish(&parameters).unwrap();
            fsdp.step(&mut optimizer, &parameters, &device, 1.0).unwrap();
            let casts = parameters.grads().casts().unwrap();
            assert!(in_memory(&casts) <= 2 * 4096, "{} bytes of casts stay", in_memory(&casts));
        }
        let seen = notes.lock().unwrap().1.clone();
        assert!(seen[0] >= whole, "{seen:?} of {whole}");
        // The norm's weights lie among what the first rank holds.
        assert!(seen[1..].iter().all(|&seen| seen <= whole / n + 4 * 4096), "{seen:?} of {whole}");
    });
}
