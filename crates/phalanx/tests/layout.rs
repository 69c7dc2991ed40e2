//! Recipes of workers with several devices: they come to what one device comes to.

use phalanx::data::{Places, Silent, open};
use phalanx::nn::Ctx;
use phalanx::parallel::LocalConfig;
use phalanx::parallel::pipeline::measure;
use phalanx::recipe::LaidOut;
use phalanx::tensor::{DType, Tensor};
use phalanx::{Event, Observer, Recipe, State, Trainer, Worker};
use std::ops::Range;

/// The loss of every step, and what the test samples say at the end.
#[derive(Default)]
struct Losses {
    steps: Vec<f64>,
    test: Option<f64>,
}

impl Observer for Losses {
    fn event(&mut self, event: &Event) {
        match event {
            Event::Step { loss, .. } => self.steps.push(*loss),
            Event::Epoch { test, .. } => self.test = test.test_loss,
            _ => {}
        }
    }
}

/// Trains some steps, of batches that fall into parts unevenly, with dropout on.
fn trained(assignments: &[&str]) -> (Losses, Vec<f32>) {
    let set: Vec<String> = assignments.iter().map(|&set| set.to_owned()).collect();
    let mut recipe = Recipe::load("mnist-mini", &set).unwrap();
    recipe.set(["train.batch_size=30"]).unwrap();
    let data = open("mnist-mini", recipe.view(), &Places::from_env(None), &mut Silent).unwrap();
    let worker = Worker::alone(2);
    let laid_out = recipe.lay_out(worker.device(), data.train.input_dims()).unwrap();
    let LaidOut { model, parameters, local, mesh, foretold: _ } = laid_out;
    let trainer = Trainer { steps: Some(12), local, mesh, ..recipe.trainer().unwrap() };
    let (state, mut losses) = (State::start(recipe.rule().unwrap()).unwrap(), Losses::default());
    let (train, test) = (data.train, Some(data.test));
    let trained = trainer.resume(&worker, &*model, parameters, state, train, test, &mut losses).unwrap();
    let values = trained.parameters.values().flat::<f32>().to_vec();
    (losses, values)
}

/// Float32 sums over a batch in other orders, through twelve steps, on losses of about 2.
const TOLERANCE: f64 = 1e-4;

#[test]
fn workers_of_several_devices_train_as_one_device_does() {
    let (want, values) = trained(&[]);
    assert!(want.steps.len() == 12 && want.test.is_some());
    let (placed, placed_values) = trained(&["parallel.strategy=place", "parallel.cut=[1, 3]"]);
    assert_eq!((placed.steps, placed.test, placed_values), (want.steps.clone(), want.test, values));
    for assignments in [
        &["parallel.strategy=pipeline"][..],
        &["parallel.strategy=pipeline", "parallel.schedule=gpipe", "parallel.cut=[2, 2]"],
        &["parallel.strategy=pipeline", "parallel.schedule=zb-h1", "parallel.devices=3"],
        &["parallel.strategy=pipeline", "parallel.schedule=interleaved"],
        &["parallel.strategy=dp", "parallel.devices=3"],
        &["parallel.recompute=blocks"],
        &["parallel.recompute=blocks", "parallel.recompute_blocks=[1, 3]"],
        &["parallel.strategy=pipeline", "parallel.recompute=blocks"],
        &["parallel.strategy=dp", "parallel.recompute=blocks"],
    ] {
        let (got, _) = trained(assignments);
        let tests = [(got.test.unwrap(), want.test.unwrap())];
        for (got, want) in got.steps.iter().zip(&want.steps).map(|(a, b)| (*a, *b)).chain(tests) {
            assert!((got - want).abs() < TOLERANCE, "{assignments:?}: a loss of {got}, not {want}");
        }
    }
}

/// Blocks on several devices, and blocks that are computed again, have the products' type too, and the bits of one device. Copies and
/// micro-batches round a gradient before they add theirs up: three digits of bfloat16 through twelve steps.
#[test]
fn several_devices_train_as_one_in_bfloat16() {
    const APART: f64 = 3e-2;
    let in_half = |assignments: &[&str]| trained(&[assignments, &["train.precision=bfloat16"]].concat());
    let (want, values) = in_half(&[]);
    let (single, _) = trained(&[]);
    assert_ne!(want.steps, single.steps);
    for assignments in [
        &["parallel.strategy=place", "parallel.cut=[1, 3]"][..],
        &["parallel.recompute=blocks"],
        &["parallel.recompute=cheap"],
    ] {
        let (got, got_values) = in_half(assignments);
        assert_eq!((got.steps, got.test), (want.steps.clone(), want.test), "{assignments:?}");
        assert!(got_values == values, "{assignments:?}: not the same bits");
    }
    for strategy in ["parallel.strategy=dp", "parallel.strategy=pipeline"] {
        let (got, _) = in_half(&[strategy, "parallel.devices=3"]);
        let apart = got.steps.iter().zip(&want.steps).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max);
        assert!(got.steps.len() == 12 && apart < APART, "{strategy}: {apart:.1e}");
    }
}

#[test]
fn what_is_to_be_expected_of_a_pipeline_is_foretold_where_blocks_were_measured() {
    let foretold = |name: &str, set: &[&str]| {
        let set: Vec<String> = set.iter().map(|&set| set.to_owned()).collect();
        let recipe = Recipe::load(name, &set).unwrap();
        let device = phalanx::tensor::Device::cpu(2);
        recipe.lay_out(&device, &[1, 28, 28]).unwrap().foretold
    };
    let of_three = foretold("mnist-pipeline", &["parallel.devices=3", "parallel.schedule=1f1b"]).unwrap();
    // 4 micro-batches through 3 stages take 6 times as long as one through one of them, where equal stages did 12 such pieces.
    assert!(
        of_three.starts_with("stages of blocks 0 to ") && of_three.contains("equal ones would be 2.00 times")
    );
    assert_eq!(of_three.matches(" to ").count(), 3, "{of_three}");
    assert_eq!(foretold("mnist-pipeline", &["parallel.cut=[1, 3]"]), None, "nothing was measured");
    assert_eq!(foretold("mnist", &["parallel.strategy=place"]), None, "it is no pipeline");
}

/// As measured blocks fit, whatever is fastest.
#[test]
fn a_cut_goes_by_the_memory_that_stages_may_take() {
    let device = || phalanx::tensor::Device::cpu(2);
    let recipe = |mb: f64| {
        let set = ["parallel.strategy=pipeline".to_owned(), format!("parallel.stage_mb={mb}")];
        Recipe::load("mnist", &set).unwrap()
    };
    // As the recipe's batches of 64 fall into 4 parts.
    let input = Tensor::zeros(&device(), [16, 1, 28, 28], DType::F32);
    let mut model = recipe(1.0).model().unwrap();
    let costs = measure(&mut *model, 1, &input, &Ctx::train(0, 0, (0..16).collect()));
    let bytes = |blocks: Range<usize>| costs[blocks].iter().map(|cost| cost.bytes).sum::<usize>();
    for at in 1..costs.len() {
        let most = bytes(0..at).max(bytes(at..costs.len()));
        let fits = |other: usize| bytes(0..other) <= most && bytes(other..costs.len()) <= most;
        let laid_out = recipe(most as f64 / f64::from(1 << 20)).lay_out(&device(), &[1, 28, 28]).unwrap();
        let LocalConfig::Pipeline(config) = laid_out.local else { panic!("a pipeline") };
        assert!(fits(config.blocks[0].end), "{:?} of {costs:?} within {most}", config.blocks);
    }
    let error = recipe(0.5 / f64::from(1 << 10)).lay_out(&device(), &[1, 28, 28]).err().unwrap();
    assert!(error.to_string().starts_with("no cut into 2 stages fits 512 bytes a stage"), "{error}");
}

#[test]
fn a_model_of_too_few_blocks_is_refused_by_name_and_number() {
    let set = ["parallel.strategy=pipeline".to_owned(), "parallel.devices=5".to_owned()];
    let recipe = Recipe::load("mnist", &set).unwrap();
    let laid_out = recipe.lay_out(&phalanx::tensor::Device::cpu(1), &[1, 28, 28]);
    // Before anything starts as well.
    for error in [laid_out.err().unwrap(), recipe.check_workers(1).unwrap_err()] {
        assert_eq!(
            error.to_string(),
            "5 stages of a model of 4 blocks\nhint: a stage has at least one block, so take 4 or fewer"
        );
    }
}
