//! Frozen parameters stay what they are under every strategy, and the others learn what they learn on one device.

mod losses;

use losses::Losses;
use phalanx::data::{CifarSet, Places, Silent, open, write_synthetic_cifar};
use phalanx::recipe::LaidOut;
use phalanx::{Recipe, State, Trainer, Worker, spawn};
use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::sync::Mutex;

/// Float32 sums in other orders, through the steps, on losses of about 2 to 6.
const TOLERANCE: f64 = 2e-4;
const STEPS: u64 = 8;
/// Samples of a step.
const BATCH: usize = 24;

/// The loss of every step; values by name, before and after.
struct Trained {
    losses: Vec<f64>,
    values: [BTreeMap<String, Vec<f32>>; 2],
}

/// Trains on so many ranks, of which so many replicas share a step.
fn trained(recipe: &str, data: &Path, ranks: usize, replicas: usize, set: &[&str]) -> Trained {
    let mut recipe =
        Recipe::load(recipe, &set.iter().map(|&set| set.to_owned()).collect::<Vec<_>>()).unwrap();
    recipe.set([format!("train.batch_size={}", BATCH / replicas).as_str()]).unwrap();
    recipe.check_workers(ranks).unwrap();
    let left = Mutex::new(None);
    let data = (recipe.data.name != "mnist-mini").then(|| data.to_owned());
    spawn(ranks, |worker: Worker| {
        let data = open(&recipe.data.name, recipe.view(), &Places::from_env(data.clone()), &mut Silent)?;
        let LaidOut { model, parameters, local, mesh, .. } =
            recipe.lay_out(worker.device(), data.train.input_dims())?;
        parameters.give_first_values();
        let named = |parameters: &phalanx::nn::Parameters| -> BTreeMap<String, Vec<f32>> {
            let weights = parameters.to_weights();
            weights.names().map(|name| (name.to_owned(), weights.get(name).unwrap().1.to_vec())).collect()
        };
        let before = named(&parameters);
        let trainer = Trainer { steps: Some(STEPS), local, mesh, ..recipe.trainer()? };
        let (state, mut losses) = (State::start(recipe.rule()?)?, Losses::default());
        let trained = trainer.resume(&worker, &*model, parameters, state, data.train, None, &mut losses)?;
        if worker.is_first() {
            let values = [before, named(&trained.parameters)];
            *left.lock().unwrap() = Some(Trained { losses: losses.0, values });
        }
        Ok(())
    })
    .unwrap_or_else(|error| panic!("{set:?}: {error}"));
    left.into_inner().unwrap().expect("rank 0 has trained")
}

/// Checks that what fits `frozen` stays to the bit and the rest moves.
#[track_caller]
fn check_who_moves(trained: &Trained, frozen: impl Fn(&str) -> bool, what: &[&str]) {
    let [before, after] = &trained.values;
    assert!(before.keys().eq(after.keys()), "{what:?}");
    for (name, values) in
        before.iter().filter(|(name, _)| !name.contains("running_") && !name.contains("num_batches"))
    {
        assert_eq!(*values == after[name], frozen(name), "{what:?}: {name}");
    }
}

type Way = (usize, usize, &'static [&'static str]);

/// Every way beside one device, with weight decay, which would move what gets no gradient.
#[track_caller]
fn check(recipe: &str, freeze: &str, frozen: impl Fn(&str) -> bool + Copy, more: &[&str], ways: &[Way]) {
    let folder = tempfile::tempdir().unwrap();
    let text = folder.path().join("text");
    fs::write(&text, "those who stay at home learn nothing new, and forget nothing. ".repeat(200)).unwrap();
    let freeze = format!("model.freeze={freeze}");
    let usual = ["optimizer.name=adamw", "optimizer.weight_decay=0.1", "train.clip_norm=0.5", &freeze];
    let usual = [&usual[..], more].concat();
    let want = trained(recipe, &text, 1, 1, &usual);
    assert!(want.losses.len() == STEPS as usize && want.losses[0] != want.losses[1], "{:?}", want.losses);
    check_who_moves(&want, frozen, &usual);
    for (ranks, replicas, set) in ways {
        let got = trained(recipe, &text, *ranks, *replicas, &[&usual[..], set].concat());
        check_who_moves(&got, frozen, set);
        assert_eq!(got.losses.len(), want.losses.len());
        for (step, (got, want)) in got.losses.iter().zip(&want.losses).enumerate() {
            assert!((got - want).abs() < TOLERANCE, "{set:?}: step {step}: a loss of {got}, not {want}");
        }
    }
}

#[test]
fn the_first_layers_and_one_of_the_last_stay_under_every_strategy() {
    let frozen = |name: &str| name.starts_with("conv1.") || name == "fc1.weight";
    let ways: &[Way] = &[
        (2, 2, &[]),
        (3, 3, &["parallel.first_bucket_mb=0.001", "parallel.bucket_mb=0.001"]),
        (2, 2, &["parallel.compress=powersgd", "parallel.start_step=100"]),
        (2, 2, &["parallel.strategy=fsdp"]),
        (4, 4, &["parallel.strategy=fsdp", "parallel.zero=2"]),
        (2, 2, &["parallel.strategy=fsdp", "parallel.zero=1"]),
        (4, 4, &["parallel.strategy=fsdp", "parallel.shard=2"]),
        (1, 1, &["parallel.strategy=dp"]),
        (1, 1, &["parallel.strategy=place"]),
        (1, 1, &["parallel.strategy=pipeline", "parallel.devices=3"]),
        (1, 1, &["parallel.recompute=blocks"]),
        (1, 1, &["parallel.recompute=cheap"]),
        // Two passes a step, each of a half of it.
        (1, 2, &["train.accumulate=2"]),
        (2, 1, &["parallel.tensor=2"]),
        (2, 1, &["parallel.pipeline=2", "parallel.schedule=zb-h1"]),
        (4, 1, &["parallel.pipeline=2", "parallel.tensor=2"]),
        (4, 2, &["parallel.pipeline=2", "parallel.strategy=fsdp"]),
    ];
    check("mnist-mini", r#"["conv1.*", "fc1.weight"]"#, frozen, &[], ways);
}

/// Tables of words that stages share, and the first of the blocks.
#[test]
fn a_language_model_keeps_its_words_and_its_first_block() {
    let frozen = |name: &str| name == "wte.weight" || name.starts_with("h.0.");
    let ways: &[Way] = &[
        (2, 2, &[]),
        (4, 4, &["parallel.strategy=fsdp"]),
        (2, 1, &["parallel.tensor=2", "parallel.sequence=true"]),
        (2, 1, &["parallel.context=2"]),
        (2, 1, &["parallel.pipeline=2"]),
        (2, 1, &["parallel.pipeline=2", "parallel.recompute=blocks"]),
        (4, 2, &["parallel.tensor=2", "parallel.strategy=fsdp"]),
        (
            8,
            2,
            &[
                "parallel.pipeline=2",
                "parallel.tensor=2",
                "parallel.strategy=fsdp",
                "parallel.recompute=cheap",
            ],
        ),
    ];
    let small = ["model.layers=3", "model.width=16", "model.heads=4", "model.context=8"];
    check("gpt", r#"["wte.*", "h.0.*"]"#, frozen, &small, ways);
}

/// As one who has a network's weights learns its head anew. Batch norms see a pass's samples, so losses are the same only where these
/// stay together.
#[test]
fn a_residual_net_learns_its_head_alone() {
    let folder = tempfile::tempdir().unwrap();
    write_synthetic_cifar(&folder.path().join("cifar-10-batches-bin"), CifarSet::Ten, 60).unwrap();
    let usual = ["model.freeze=[conv1.*, bn1.*, layer*]", "data.size=16", "optimizer.weight_decay=0.1"];
    let run = |ranks, replicas, set: &[&str]| {
        let trained =
            trained("cifar10-resnet18", folder.path(), ranks, replicas, &[&usual[..], set].concat());
        check_who_moves(&trained, |name| !name.starts_with("fc."), set);
        trained.losses
    };
    let want = run(1, 1, &[]);
    let together: &[Way] = &[
        (1, 1, &["parallel.strategy=place"]),
        (1, 1, &["parallel.recompute=blocks"]),
        (2, 1, &["parallel.tensor=2"]),
    ];
    for (ranks, replicas, set) in together {
        let got = run(*ranks, *replicas, set);
        for (step, (got, want)) in got.iter().zip(&want).enumerate() {
            assert!((got - want).abs() < TOLERANCE, "{set:?}: step {step}: a loss of {got}, not {want}");
        }
    }
    for (ranks, replicas, set) in [
        (2, 2, &["parallel.sync_batch_norm=true"][..]),
        (2, 2, &["parallel.compress=powersgd", "parallel.start_step=2"]),
        (2, 2, &["parallel.logical_shards=2"]),
        (2, 2, &["parallel.strategy=fsdp"]),
        (2, 1, &["parallel.pipeline=2"]),
    ] {
        run(ranks, replicas, set);
    }
}
