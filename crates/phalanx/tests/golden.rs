//! PyTorch's runs, reproduced: the same first values, samples and settings give the same losses, on any number of workers.
//!
//! First values come from an integer hash, so nothing needs storing: element i of the k-th parameter is
//! `unit(k, i) * sqrt(3 / fan_in)`, with fan_in the product of all dimensions but the first (100 for one dimension).

use phalanx::data::{BatchBuffers, Dataset, Places, Silent, Target, View, open};
use phalanx::nn::models::{MnistNet, ResNet, ResNet9, ResNetDepth, ResNetStem};
use phalanx::nn::optim::{Adam, AdamW, Rule, Sgd};
use phalanx::nn::{Linear, Loss, Module, Parameters};
use phalanx::parallel::DdpConfig;
use phalanx::tensor::Tensor;
use phalanx::{Event, Observer, State, Trainer, spawn};
use std::sync::{Arc, Mutex};

/// A number in [-1, 1) for stream `k` and index `i`, exact in float32.
fn unit(k: u64, i: u64) -> f64 {
    let mut z = (k << 40).wrapping_add(i).wrapping_add(1).wrapping_mul(0x9E37_79B9_7F4A_7C15);
    z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^= z >> 31;
    (z >> 40) as f64 / f64::from(1 << 23) - 1.0
}

fn fill(parameters: &Parameters) {
    for k in 0..parameters.names().len() {
        let (name, dims) = (&parameters.names()[k], parameters.layout().shape(k).dims().to_vec());
        // Of the layers here only a normalisation has a weight of one dimension.
        let is_norm = |name: &str| {
            let weight = name.strip_suffix("bias").map_or(name.to_owned(), |layer| format!("{layer}weight"));
            parameters.index_of(&weight).is_some_and(|i| parameters.layout().shape(i).n_dims() == 1)
        };
        if is_norm(name) {
            parameters.value(k).fill(if name.ends_with("weight") { 1.0 } else { 0.0 });
            continue;
        }
        let fan_in = if dims.len() > 1 { dims[1..].iter().product() } else { 100 };
        let scale = (3.0 / fan_in as f64).sqrt();
        let value = parameters.value(k);
        let first: Vec<f32> = (0..value.count() as u64).map(|i| (unit(k as u64, i) * scale) as f32).collect();
        value.copy_from(&Tensor::from_slice(value.device(), &first, value.shape()));
    }
}

struct Losses<'a>(&'a Mutex<Vec<f64>>);

impl Observer for Losses<'_> {
    fn event(&mut self, event: &Event) {
        if let Event::Step { loss, .. } = event {
            self.0.lock().unwrap().push(*loss);
        }
    }
}

/// Images of 3 x side x side from the same hash; image j has label j % 10.
struct FormulaImages<const N: usize, const SIDE: usize>;

impl<const N: usize, const SIDE: usize> Dataset for FormulaImages<N, SIDE> {
    fn len(&self) -> usize {
        N
    }

    fn input_dims(&self) -> &[usize] {
        &[3, SIDE, SIDE]
    }

    fn target(&self) -> Target<'_> {
        Target::Classes(10)
    }

    fn batch(&self, indices: &[usize], into: &mut BatchBuffers) -> phalanx::data::Result<()> {
        let size = 3 * SIDE * SIDE;
        for (image, &j) in into.inputs().chunks_exact_mut(size).zip(indices) {
            image.iter_mut().enumerate().for_each(|(i, x)| *x = unit(1000, (j * size + i) as u64) as f32);
        }
        into.labels().iter_mut().zip(indices).for_each(|(label, &j)| *label = (j % 10) as i64);
        Ok(())
    }
}

fn named(data: &str) -> Arc<dyn Dataset> {
    open(data, View::default(), &Places::from_env(None), &mut Silent).unwrap().train
}

/// One of PyTorch's runs.
struct Golden {
    losses: &'static str,
    rule: Rule,
    loss: Loss,
    batch: usize,
    data: Arc<dyn Dataset>,
    model: fn() -> Box<dyn Module>,
}

/// Trains on so many workers with the same global batch and holds every loss against PyTorch's.
fn check(all_workers: &[usize], golden: Golden) {
    let Golden { losses: golden, rule, loss, batch, data, model } = golden;
    let lines: Vec<Vec<&str>> =
        golden.lines().filter(|l| !l.starts_with('#')).map(|l| l.split(' ').collect()).collect();
    let (norm, losses) = lines.split_last().unwrap();
    let number = |text: &str| text.parse::<f64>().unwrap();
    for &workers in all_workers {
        let got = Mutex::new(Vec::new());
        let got_norm = Mutex::new(0.0);
        spawn(workers, |worker| {
            let mut model = model();
            let parameters = Parameters::build(&mut model, worker.device(), 0);
            fill(&parameters);
            let steps = Some(losses.len() as u64);
            let trainer = Trainer {
                loss,
                epochs: 1000,
                steps,
                batch_size: batch / workers,
                shuffle: false,
                ddp: DdpConfig { sync_batch_norm: true, ..DdpConfig::default() },
                ..Trainer::default()
            };
            let train = Arc::clone(&data);
            let trained = trainer.resume(
                &worker,
                &model,
                parameters,
                State::start(rule)?,
                train,
                None,
                &mut Losses(&got),
            )?;
            if worker.is_first() {
                let values = trained.parameters.values().flat::<f32>();
                *got_norm.lock().unwrap() = values.iter().map(|&v| f64::from(v).powi(2)).sum::<f64>().sqrt();
            }
            Ok(())
        })
        .unwrap();
        let got = got.into_inner().unwrap();
        assert_eq!(got.len(), losses.len());
        let mut apart = 0.0f64;
        for (step, (got, line)) in got.iter().zip(losses).enumerate() {
            let (f32_loss, f64_loss) = (number(line[1]), number(line[2]));
            apart = apart.max((f32_loss - f64_loss).abs());
            let bound = 10.0 * apart + 1e-5;
            let off = (got - f64_loss).abs();
            assert!(
                off <= bound,
                "step {step} on {workers} workers: loss {got}, PyTorch {f64_loss}: {off:.1e} above {bound:.1e}"
            );
        }
        let (got, want) = (got_norm.into_inner().unwrap(), number(norm[1]));
        assert!((got - want).abs() < 1e-4 * want, "parameter norm {got}, PyTorch {want}, {workers} workers");
    }
}

#[test]
fn mnist_with_sgd() {
    let losses = include_str!("golden/mnist_sgd.txt");
    let rule = Sgd { momentum: 0.5, ..Sgd::new(0.01) }.into();
    let data = named("mnist-mini");
    check(
        &[1, 2, 4],
        Golden { losses, rule, loss: Loss::Nll, batch: 64, data, model: || Box::new(MnistNet::new(0.0)) },
    );
}

#[test]
fn mnist_with_adamw() {
    let losses = include_str!("golden/mnist_adamw.txt");
    let (rule, data) = (AdamW::default().into(), named("mnist-mini"));
    check(
        &[1, 2, 4],
        Golden { losses, rule, loss: Loss::Nll, batch: 64, data, model: || Box::new(MnistNet::new(0.0)) },
    );
}

#[test]
fn linear_regression() {
    let losses = include_str!("golden/linear_regression.txt");
    let (rule, data) = (Sgd::new(0.1).into(), named("linear-regression"));
    check(
        &[1, 2, 4],
        Golden { losses, rule, loss: Loss::Mse, batch: 64, data, model: || Box::new(Linear::new(1, 1)) },
    );
}

/// One worker: with more, each normalises by its own share of the batch, as PyTorch's would.
fn check_resnet(losses: &'static str, rule: Rule) {
    let model: fn() -> Box<dyn Module> = || Box::new(ResNet::new(ResNetDepth::D18, ResNetStem::Imagenet, 10));
    let loss = Loss::CrossEntropy { label_smoothing: 0.0 };
    check(&[1, 2], Golden { losses, rule, loss, batch: 16, data: Arc::new(FormulaImages::<128, 64>), model });
}

#[test]
fn resnet18_with_sgd() {
    let rule = Sgd { momentum: 0.9, weight_decay: 0.0005, ..Sgd::new(0.001) };
    check_resnet(include_str!("golden/resnet18_sgd.txt"), rule.into());
}

#[test]
fn resnet18_with_adam() {
    check_resnet(include_str!("golden/resnet18_adam.txt"), Adam { lr: 1e-5, ..Adam::default() }.into());
}

/// `golden/resnet9.py` made the figures.
#[test]
fn resnet9_with_sgd() {
    let losses = include_str!("golden/resnet9_sgd.txt");
    let rule = Sgd { momentum: 0.9, nesterov: true, weight_decay: 0.0005, ..Sgd::new(0.0005) }.into();
    let loss = Loss::CrossEntropy { label_smoothing: 0.1 };
    let data = Arc::new(FormulaImages::<32, 32>);
    check(&[1, 2], Golden { losses, rule, loss, batch: 4, data, model: || Box::new(ResNet9::new(10)) });
}
