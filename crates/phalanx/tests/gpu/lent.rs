//! Gradients that ranks of a replica share, or have parts of: summed by NCCL, or by way of the host, to what CPUs come to.

use crate::fake::fake;
use crate::mesh::{PIPELINE, TENSOR, on};
use crate::{Count, TOLERANCE, gpu_of};
use phalanx::comm::Group;
use phalanx::nn::models::{Gpt, GptConfig, Head};
use phalanx::nn::{Ctx, Loss, Module, Parameters};
use phalanx::parallel::pipeline::ScheduleKind;
use phalanx::parallel::{
    Axis, Between, BetweenGpus, FsdpConfig, Here, ModelParallel, ModelParallelConfig, Pass, Plan, Sharded,
    StagesConfig, Strategy,
};
use phalanx::tensor::{Device, Tensor};
use std::sync::Arc;

const GPT: GptConfig =
    GptConfig { layers: 2, width: 16, heads: 4, context: 8, vocabulary: 32, dropout: 0.0, head: Head::Tied };

/// A tied table is the first and the last stage's; between parts of layers each rank has a stretch of each sequence.
fn config(
    axes: &[(Axis, usize)],
    between_gpus: BetweenGpus,
    sharded: Option<Sharded>,
    between: Between,
) -> ModelParallelConfig {
    let has = |axis| axes.contains(&axis);
    let kind = ScheduleKind::OneFOneB;
    let mut config = ModelParallelConfig {
        mesh: axes.to_vec(),
        model: Arc::new(|| Box::new(Gpt::new(GPT)) as Box<dyn Module>),
        plan: has(TENSOR).then(|| Plan::of_gpt(GPT.heads, between)),
        stages: has(PIPELINE).then(|| StagesConfig { blocks: vec![0..2, 2..4], kind, micro_batches: 2 }),
        sharded: sharded.map(|sharded| FsdpConfig {
            sharded,
            unit_bytes: 0,
            between_gpus,
            ..FsdpConfig::default()
        }),
        ..on(&[], kind).mesh.unwrap()
    };
    config.ddp.between_gpus = between_gpus;
    config
}

/// The gradients that each rank holds after a step, of those parameters that `of` names, and how many bytes came to the host while they were made whole.
fn gradients(
    config: &ModelParallelConfig,
    ranks: usize,
    device: &(dyn Fn(usize) -> Device + Sync),
    down: &(dyn Fn() -> u64 + Sync),
    of: &(dyn Fn(&str) -> bool + Sync),
) -> (Vec<Vec<f32>>, u64) {
    let run = |group: Group| {
        let device = device(group.rank().index());
        let whole = Parameters::build(&mut Gpt::new(GPT), &device, 3);
        let mut strategy = ModelParallel::new(&group, &whole, config).unwrap();
        strategy.prepare(&whole).unwrap();
        strategy.begin(&whole, Here::All).unwrap();
        // Replicas see other words.
        let first = strategy.place().rank as i64;
        let words = |by: i64| {
            let words: Vec<i64> = (0..16).map(|i| (first + i * by) % 32).collect();
            Tensor::from_slice(&device, &words, [2, 8])
        };
        let pass = Pass {
            model: &Gpt::new(GPT),
            parameters: &whole,
            loss: Loss::CrossEntropy { label_smoothing: 0.0 },
            input: words(5),
            target: words(11),
            ctx: Ctx::train(0, 0, vec![0, 1].into()),
            weight: 1.0 / strategy.place().world_size as f64,
            sync: phalanx::parallel::Sync::Now,
        };
        strategy.pass(&pass).unwrap();
        group.barrier().unwrap();
        let before = down();
        group.barrier().unwrap();
        strategy.finish(&whole).unwrap();
        group.barrier().unwrap();
        let came = down() - before;
        group.barrier().unwrap();
        let mut all = Vec::new();
        let names = strategy.own_parameters(&whole).names().to_vec();
        let asked = |parameter: usize| of(&names[parameter]);
        strategy.each_gradient(&whole, &asked, &mut |held| all.extend_from_slice(held.values));
        (all, came)
    };
    std::thread::scope(|scope| {
        let run = &run;
        let ranks: Vec<_> =
            Group::threads(ranks).into_iter().map(|group| scope.spawn(move || run(group))).collect();
        let ranks: Vec<_> = ranks.into_iter().map(|rank| rank.join().unwrap()).collect();
        let came = ranks.iter().map(|rank| rank.1).max().unwrap();
        (ranks.into_iter().map(|rank| rank.0).collect(), came)
    })
}

#[test]
fn what_ranks_of_a_replica_share_is_summed_where_it_lies() {
    let Some(fake) = fake() else { return };
    fake.gpus(4);
    const SHARDS: (Axis, usize) = (Axis::Shard, 2);
    for (axes, sharded, ranks) in [
        (&[PIPELINE][..], None, 2),
        (&[TENSOR], None, 2),
        (&[PIPELINE, TENSOR], None, 4),
        (&[SHARDS, TENSOR], Some(Sharded::States), 4),
        (&[SHARDS, TENSOR], Some(Sharded::Gradients), 4),
        (&[SHARDS, TENSOR], Some(Sharded::Parameters), 4),
    ] {
        let of = |between, device: &(dyn Fn(usize) -> Device + Sync)| {
            let config = config(axes, between, sharded, Between::Sequence);
            gradients(&config, ranks, device, &|| fake.count(Count::BytesDown), &|_| true)
        };
        let (want, _) = of(BetweenGpus::Host, &|_| Device::cpu(1));
        let (by_nccl, none) = of(BetweenGpus::Nccl, &|rank| gpu_of(&fake, rank));
        let (by_host, some) = of(BetweenGpus::Host, &|rank| gpu_of(&fake, rank));
        for got in [by_nccl, by_host] {
            for (got, want) in got.iter().zip(&want) {
                assert_eq!(got.len(), want.len(), "{axes:?}, {sharded:?}");
                let near = |(got, want): (&f32, &f32)| f64::from((got - want).abs()) <= TOLERANCE;
                assert!(got.iter().zip(want).all(near), "{axes:?}, {sharded:?}");
            }
        }
        assert!(none == 0 && some > 0, "{axes:?}, {sharded:?}: {none} bytes by NCCL, {some} by the host");
    }
    assert_eq!((fake.damage(), fake.nccl().live()), (Vec::new(), 0));
}

/// Each rank of a tensor group has replicas of its own, which NCCL adds up in an order of its own: they go by the first rank's sum. By
/// the host, which adds up in one order, nothing is told.
#[test]
fn what_is_not_cut_has_the_same_bits_beside_three_replicas() {
    let Some(fake) = fake() else { return };
    fake.gpus(6);
    let is_uncut = |name: &str| name.contains("ln_") || name == "wpe.weight" || name.ends_with("c_proj.bias");
    for (axes, sharded) in [
        (&[TENSOR][..], None),
        (&[TENSOR, (Axis::Shard, 3)], Some(Sharded::States)),
        (&[TENSOR, (Axis::Shard, 3)], Some(Sharded::Parameters)),
    ] {
        let of = |between, device: &(dyn Fn(usize) -> Device + Sync)| {
            let config = config(axes, between, sharded, Between::Whole);
            gradients(&config, 6, device, &|| fake.count(Count::BytesDown), &is_uncut)
        };
        let told = || fake.nccl().calls("ncclBroadcast");
        let (want, _) = of(BetweenGpus::Host, &|_| Device::cpu(1));
        let before = told();
        let (by_host, _) = of(BetweenGpus::Host, &|rank| gpu_of(&fake, rank));
        assert_eq!(told(), before, "nobody needs to be told by the host's order");
        let (by_nccl, down) = of(BetweenGpus::Nccl, &|rank| gpu_of(&fake, rank));
        // Six ranks bring up to two numbers of each of four units there, which three of them can't share out.
        let most = if sharded.is_some() { 6 * 2 * 4 * 4 } else { 0 };
        assert!(told() > before && down <= most, "{axes:?}, {sharded:?}: {down} bytes came to the host");
        for got in [by_nccl, by_host] {
            for (pair, want) in got.chunks(2).zip(want.chunks(2)) {
                assert!(
                    !pair[0].is_empty() && pair[0] == pair[1],
                    "{axes:?}, {sharded:?}: not the same bits"
                );
                let near = |(got, want): (&f32, &f32)| f64::from((got - want).abs()) <= TOLERANCE;
                assert!(pair[0].len() == want[0].len() && pair[0].iter().zip(&want[0]).all(near));
            }
        }
    }
    assert_eq!((fake.damage(), fake.nccl().live()), (Vec::new(), 0));
}
