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
) -> ModelParallelConfig {
    let has = |axis| axes.contains(&axis);
    let kind = ScheduleKind::OneFOneB;
    let mut config = ModelParallelConfig {
        mesh: axes.to_vec(),
        model: Arc::new(|| Box::new(Gpt::new(GPT)) as Box<dyn Module>),
        plan: has(TENSOR).then(|| Plan::of_gpt(GPT.heads, Between::Sequence)),
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

/// The gradients that each rank holds after a step, and how many bytes came to the host while they were made whole.
fn gradients(
    config: &ModelParallelConfig,
    ranks: usize,
    device: &(dyn Fn(usize) -> Device + Sync),
    down: &(dyn Fn() -> u64 + Sync),
) -> (Vec<Vec<f32>>, u64) {
    let run = |group: Group| {
        let device = device(group.rank().index());
        let whole = Parameters::build(&mut Gpt::new(GPT), &device, 3);
        let mut strategy = ModelParallel::new(&group, &whole, config).unwrap();
        strategy.prepare(&whole).unwrap();
        strategy.begin(&whole, Here::All).unwrap();
        let words = |by: i64| {
            let words: Vec<i64> = (0..16).map(|i| i * by % 32).collect();
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
        strategy.each_gradient(&whole, &|_| true, &mut |held| all.extend_from_slice(held.values));
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
            gradients(&config(axes, between, sharded), ranks, device, &|| fake.count(Count::BytesDown))
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
