//! A checkpoint that goes through every way in which a model can lie, from files to files, keeps every bit: weights, what the optimizer
//! remembers, the running mean, buffers. No step is made on the way, so nothing is rounded.

use super::super::*;
use super::names;
use crate::recipe::{LaidOut, Recipe};
use crate::trainer::{Trainer, strategy};
use crate::worker::spawn;
use phalanx_comm::Rank;
use phalanx_nn::Weights;
use phalanx_parallel::Here;
use phalanx_tensor::Philox;
use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

const RUN: RunFacts = RunFacts {
    seed: 1,
    shuffle: true,
    dataset: 1000,
    samples_per_epoch: 1000,
    global_batch: 16,
    world_size: 1,
    logical_shards: 0,
};
const STEP: u64 = 7;

/// A model, the settings that make it small, and the shape of a sample.
struct Net {
    recipe: &'static str,
    set: &'static [&'static str],
    sample: &'static [usize],
}

const MNIST: Net = Net { recipe: "mnist-mini", set: &[], sample: &[1, 28, 28] };
const RESNET: Net = Net { recipe: "cifar10-fast", set: &[], sample: &[3, 16, 16] };
const GPT: &[&str] =
    &["model.layers=4", "model.width=24", "model.heads=4", "model.context=8", "model.tied=false"];
const TIED: &[&str] =
    &["model.layers=4", "model.width=24", "model.heads=4", "model.context=8", "model.tied=true"];

/// Workers, how the model lies on them, and whether each writes a part.
type Way = (usize, &'static [&'static str], bool);

/// In an order in which what lies in one way comes to another kind of way.
const WAYS: &[Way] = &[
    (2, &["parallel.strategy=fsdp"], true),
    (2, &["parallel.strategy=ddp"], false),
    (4, &["parallel.tensor=2", "parallel.pipeline=2"], true),
    (3, &["parallel.strategy=fsdp", "parallel.zero=1"], false),
    (4, &["parallel.pipeline=2", "parallel.schedule=zb-h1", "parallel.strategy=fsdp"], true),
    (4, &["parallel.strategy=fsdp", "parallel.shard=2"], true),
    (3, &["parallel.strategy=fsdp", "parallel.zero=2"], true),
    (2, &["parallel.pipeline=2", "parallel.schedule=interleaved"], false),
    (
        8,
        &["parallel.tensor=2", "parallel.pipeline=2", "parallel.strategy=fsdp", "parallel.recompute=blocks"],
        true,
    ),
    (2, &["parallel.tensor=2"], true),
    (4, &["parallel.tensor=2", "parallel.strategy=fsdp", "parallel.zero=1"], true),
];

/// On devices of one worker, where nothing may be on two of them.
const ON_DEVICES: &[Way] = &[
    (1, &["parallel.strategy=dp", "parallel.devices=2"], false),
    (1, &["parallel.strategy=place", "parallel.devices=2"], false),
    (2, &["parallel.strategy=place", "parallel.devices=2"], false),
    (1, &["parallel.strategy=pipeline", "parallel.devices=3"], false),
    (2, &["parallel.strategy=pipeline", "parallel.schedule=interleaved"], false),
];

const OF_SEQUENCES: &[Way] = &[
    (4, &["parallel.context=2", "parallel.strategy=fsdp"], true),
    (4, &["parallel.tensor=2", "parallel.sequence=true"], false),
    (8, &["parallel.context=2", "parallel.tensor=2", "parallel.pipeline=2"], true),
    (16, &["parallel.context=2", "parallel.tensor=2", "parallel.pipeline=2", "parallel.strategy=fsdp"], true),
];

/// Layers that are cut as often as this model lets them be.
const WIDE: &[Way] = &[(4, &["parallel.tensor=4"], false)];
const WIDE_DIGITS: &[Way] = &[(5, &["parallel.tensor=5"], false)];

struct Quiet;

impl Observer for Quiet {
    fn event(&mut self, event: &Event) {
        assert!(!matches!(event, Event::Note { .. }), "{event:?}");
    }
}

/// Goes on from the checkpoint in `from`, if there is one, else from numbers that no rule makes, and leaves one in `to`.
fn pass(net: &Net, (ranks, set, parts): Way, from: Option<&Path>, to: &Path) {
    let mut recipe =
        Recipe::load(net.recipe, &net.set.iter().map(|&set| set.to_owned()).collect::<Vec<_>>()).unwrap();
    recipe
        .set(["optimizer.name=adamw", "train.ema=0.9", "train.batch_size=16"].iter().chain(set).copied())
        .unwrap();
    recipe.check_workers(ranks).unwrap();
    let passed = spawn(ranks, |worker| {
        let LaidOut { model, parameters, local, mesh, .. } = recipe.lay_out(worker.device(), net.sample)?;
        let trainer = Trainer { local, mesh, ..recipe.trainer()? };
        let (group, rule) = (worker.group(), recipe.rule()?);
        let mut strategy = strategy(&trainer, &group, &*model, &parameters, Rank(0))?;
        strategy.prepare(&parameters)?;
        let state = match from {
            None => made_up(&parameters, rule),
            Some(from) => {
                let resumed =
                    resume::resume(from, Wanted::Newest, &worker, RUN, &parameters, rule, &mut *strategy)?;
                resumed.expect("there is a checkpoint").state
            }
        };
        strategy.begin(&parameters, Here::All)?;
        let config = CheckpointConfig { parts, ..CheckpointConfig::new(to.to_owned()) };
        let mut none = State::start(rule)?;
        let mut checkpoints = Checkpoints::begin(
            &config,
            false,
            &worker,
            RUN,
            &parameters,
            &mut none,
            &mut *strategy,
            &mut Quiet,
        )?;
        assert_eq!(checkpoints.in_parts(), parts, "{set:?}");
        checkpoints.ask();
        checkpoints.finish(&state, &parameters, &mut *strategy, &mut Quiet)
    });
    passed.unwrap_or_else(|error| panic!("{}, {ranks} ranks, {set:?}: {error}", net.recipe));
}

/// A state of which no two numbers are likely to be the same.
fn made_up(parameters: &Parameters, rule: phalanx_nn::optim::Rule) -> State {
    let numbers = |stream, count: usize| -> Vec<f32> {
        (0..count as u64).map(|i| Philox::new(3, stream).word(i) as f32 / 1e10 - 0.2).collect()
    };
    let mut state = State::start(rule).unwrap();
    state.progress = Progress { step: STEP, epoch: 1, step_in_epoch: 2, samples: 112, ..Progress::default() };
    for step in 0..2 {
        let grads = numbers(step, parameters.layout().len());
        state.optimizer.step(&mut parameters.values().flat_mut::<f32>(), &grads, 1.0);
        let buffers = numbers(8 + step, parameters.buffers().layout().len());
        parameters.buffers().flat_mut::<f32>().copy_from_slice(&buffers);
        match &mut state.average {
            None => state.average = Some(Average::of(parameters)),
            Some(mean) => mean.update(parameters, 0.7),
        }
    }
    state
}

/// Every array of a checkpoint, by what its file holds and its name: its shape and bits.
fn arrays(root: &Path) -> BTreeMap<(String, String), (Vec<usize>, Vec<u32>)> {
    let folder = store::folder(root, STEP);
    let manifest = Manifest::read(&folder).unwrap();
    manifest.verify(&folder).unwrap();
    let mut arrays = BTreeMap::new();
    for file in &manifest.files {
        let weights = Weights::read(&folder.join(&file.name)).unwrap();
        for name in weights.names() {
            let (shape, values) = weights.get(name).unwrap();
            let bits = values.iter().map(|value| value.to_bits()).collect();
            let key = (format!("{:?}", file.holds), name.to_owned());
            assert!(arrays.insert(key, (shape.dims().to_vec(), bits)).is_none(), "{name} is there twice");
        }
    }
    arrays
}

/// Through all ways, and back to a file each, the very ones.
fn check_walk(net: &Net, ways: &[&[Way]]) {
    let folder = tempfile::tempdir().unwrap();
    let root = |i: usize| folder.path().join(i.to_string());
    let alone: Way = (1, &["parallel.strategy=ddp"], false);
    pass(net, alone, None, &root(0));
    let want = arrays(&root(0));
    let of = |holds: &str| want.keys().filter(|(of, _)| of == holds).count();
    assert!(of("Average") == of("Model") && of("Optimizer") > of("Model"), "{:?}", want.keys());
    let ways: Vec<Way> = ways.iter().copied().flatten().copied().chain([alone]).collect();
    for (i, way) in ways.iter().enumerate() {
        pass(net, *way, Some(&root(i)), &root(i + 1));
        let got = arrays(&root(i + 1));
        assert!(got.keys().eq(want.keys()), "{}: {way:?}: other arrays", net.recipe);
        let other = want.iter().find(|(key, array)| got[*key] != **array);
        assert!(
            other.is_none(),
            "{}: {way:?}: {:?} isn't what it was",
            net.recipe,
            other.map(|(key, _)| key)
        );
        if i > 0 {
            fs::remove_dir_all(root(i)).unwrap();
        }
    }
    let [first, last] = [0, ways.len()].map(|i| store::folder(&root(i), STEP));
    assert_eq!(names(&first).len(), 4);
    for file in names(&first) {
        assert!(fs::read(first.join(&file)).unwrap() == fs::read(last.join(&file)).unwrap(), "{file}");
    }
}

#[test]
fn of_the_net_of_digits_it_keeps_every_bit_in_every_way() {
    check_walk(&MNIST, &[WAYS, WIDE_DIGITS, ON_DEVICES]);
}

#[test]
fn of_a_residual_net_with_its_buffers_it_keeps_every_bit_in_every_way() {
    check_walk(&RESNET, &[WAYS, WIDE, ON_DEVICES]);
}

#[test]
fn of_a_language_model_it_keeps_every_bit_in_every_way() {
    let net = |set| Net { recipe: "gpt", set, sample: &[8] };
    check_walk(&net(GPT), &[WAYS, WIDE, ON_DEVICES, OF_SEQUENCES]);
    check_walk(&net(TIED), &[WAYS, WIDE, OF_SEQUENCES]);
}
