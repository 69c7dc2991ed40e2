//! PyTorch's runs: the same first values, samples and settings give the same losses, on any number of ranks and any device.
//!
//! First values come from an integer hash, so nothing needs storing: element i of the k-th parameter is
//! `unit(k, i) * sqrt(3 / fan_in)`, with fan_in the product of all dimensions but the first (100 for one dimension).

use super::Open;
use super::ranks::{Losses, on_ranks};
use crate::error::Error;
use crate::trainer::{State, Trainer};
use phalanx_data::{BatchBuffers, Dataset, Places, Silent, Target, View, open};
use phalanx_nn::models::{MnistNet, ResNet, ResNet9, ResNetDepth, ResNetStem};
use phalanx_nn::optim::{Adam, AdamW, Rule, Sgd};
use phalanx_nn::{Linear, Loss, Module, Parameters};
use phalanx_parallel::DdpConfig;
use phalanx_tensor::Tensor;
use std::sync::{Arc, Mutex};

/// A number in [-1, 1) for stream `k` and index `i`, exact in float32.
pub fn unit(k: u64, i: u64) -> f64 {
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

/// Images of 3 x side x side from the hash that first values come from; image j has label j % 10.
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

    fn batch(&self, indices: &[usize], into: &mut BatchBuffers) -> phalanx_data::Result<()> {
        let size = 3 * SIDE * SIDE;
        for (image, &j) in into.inputs().chunks_exact_mut(size).zip(indices) {
            image.iter_mut().enumerate().for_each(|(i, x)| *x = unit(1000, (j * size + i) as u64) as f32);
        }
        into.labels().iter_mut().zip(indices).for_each(|(label, &j)| *label = (j % 10) as i64);
        Ok(())
    }
}

/// One of PyTorch's runs.
pub struct Golden {
    /// Which.
    pub name: &'static str,
    /// A line a step: its number, and PyTorch's loss before it in float32 and in float64; then `norm` and that of the parameters in the
    /// end. Lines that begin with `#` are comments.
    pub losses: &'static str,
    /// The optimizer.
    pub rule: Rule,
    /// The loss.
    pub loss: Loss,
    /// Samples of a step of all ranks together.
    pub batch: usize,
    /// What is learned, in order.
    pub data: Arc<dyn Dataset>,
    /// The model.
    pub model: fn() -> Box<dyn Module>,
}

/// How near a run came to PyTorch's.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Nearness {
    /// The step whose loss is furthest away, measured by what it may be.
    pub step: usize,
    /// How far it is from PyTorch's in float64.
    pub apart: f64,
    /// How far it may be: ten times the largest distance so far of PyTorch's own runs in float32 and float64, and 1e-5.
    pub bound: f64,
    /// The norm of the parameters after all steps, and PyTorch's, if all were made.
    pub norms: Option<[f64; 2]>,
}

impl Nearness {
    /// What is wrong, if anything is.
    pub fn failure(&self) -> Option<String> {
        let Nearness { step, apart, bound, norms } = *self;
        // A loss that is no number is not within anything.
        if apart.is_nan() || apart > bound {
            return Some(format!(
                "the loss of step {step} is {apart:.1e} from PyTorch's, {bound:.1e} at most"
            ));
        }
        let [got, want] = norms.filter(|[got, want]| got.is_nan() || (got - want).abs() >= 1e-4 * want)?;
        Some(format!("the parameters have the norm {got}, PyTorch's {want}"))
    }
}

/// Samples that are in the library.
fn data(name: &str) -> Arc<dyn Dataset> {
    let found = open(name, View::default(), &Places::from_env(None), &mut Silent);
    found.expect("these samples are in the library").train
}

impl Golden {
    /// All of them, those of small models first.
    pub fn all() -> [Golden; 6] {
        [
            Golden::mnist_sgd(),
            Golden::mnist_adamw(),
            Golden::linear_regression(),
            Golden::resnet18_sgd(),
            Golden::resnet18_adam(),
            Golden::resnet9_sgd(),
        ]
    }

    /// The tutorials' network on the first digits, without dropout.
    pub fn mnist_sgd() -> Golden {
        Golden {
            name: "mnist with sgd",
            losses: include_str!("golden/mnist_sgd.txt"),
            rule: Sgd { momentum: 0.5, ..Sgd::new(0.01) }.into(),
            loss: Loss::Nll,
            batch: 64,
            data: data("mnist-mini"),
            model: || Box::new(MnistNet::new(0.0)),
        }
    }

    /// The same with another optimizer.
    pub fn mnist_adamw() -> Golden {
        let losses = include_str!("golden/mnist_adamw.txt");
        Golden { name: "mnist with adamw", losses, rule: AdamW::default().into(), ..Golden::mnist_sgd() }
    }

    /// A line through points.
    pub fn linear_regression() -> Golden {
        Golden {
            name: "linear regression with sgd",
            losses: include_str!("golden/linear_regression.txt"),
            rule: Sgd::new(0.1).into(),
            loss: Loss::Mse,
            batch: 64,
            data: data("linear-regression"),
            model: || Box::new(Linear::new(1, 1)),
        }
    }

    /// torchvision's ResNet-18.
    pub fn resnet18_sgd() -> Golden {
        Golden {
            name: "resnet18 with sgd",
            losses: include_str!("golden/resnet18_sgd.txt"),
            rule: Sgd { momentum: 0.9, weight_decay: 0.0005, ..Sgd::new(0.001) }.into(),
            loss: Loss::CrossEntropy { label_smoothing: 0.0 },
            batch: 16,
            data: Arc::new(FormulaImages::<128, 64>),
            model: || Box::new(ResNet::new(ResNetDepth::D18, ResNetStem::Imagenet, 10)),
        }
    }

    /// The same with another optimizer.
    pub fn resnet18_adam() -> Golden {
        let (losses, rule) =
            (include_str!("golden/resnet18_adam.txt"), Adam { lr: 1e-5, ..Adam::default() }.into());
        Golden { name: "resnet18 with adam", losses, rule, ..Golden::resnet18_sgd() }
    }

    /// The smaller network of the recipe cifar10-fast; `golden/resnet9.py` made the figures.
    pub fn resnet9_sgd() -> Golden {
        Golden {
            name: "resnet9 with sgd",
            losses: include_str!("golden/resnet9_sgd.txt"),
            rule: Sgd { momentum: 0.9, nesterov: true, weight_decay: 0.0005, ..Sgd::new(0.0005) }.into(),
            loss: Loss::CrossEntropy { label_smoothing: 0.1 },
            batch: 4,
            data: Arc::new(FormulaImages::<32, 32>),
            model: || Box::new(ResNet9::new(10)),
        }
    }

    fn lines(&self) -> Vec<Vec<f64>> {
        let lines = self.losses.lines().filter(|line| !line.starts_with('#'));
        let numbers = lines.map(|line| line.split(' ').skip(1).map(|text| text.parse().expect("a number")));
        numbers.map(Iterator::collect).collect()
    }

    /// How many steps PyTorch made.
    pub fn steps(&self) -> usize {
        self.lines().len() - 1
    }

    /// Makes the first steps of the run on so many ranks of a device, with the same global batch, by which several ranks normalise.
    pub fn run(&self, ranks: usize, steps: usize, open: Open<'_>) -> Result<Nearness, Error> {
        let lines = self.lines();
        let (norm, losses) = lines.split_last().expect("a run has its norm");
        let (got, got_norm) = (Mutex::default(), Mutex::new(0.0));
        on_ranks(ranks, open, |worker| {
            let mut model = (self.model)();
            let parameters = Parameters::build(&mut model, worker.device(), 0);
            fill(&parameters);
            let trainer = Trainer {
                loss: self.loss.clone(),
                epochs: 1000,
                steps: Some(steps as u64),
                batch_size: self.batch / ranks,
                shuffle: false,
                ddp: DdpConfig { sync_batch_norm: ranks > 1, ..DdpConfig::default() },
                ..Trainer::default()
            };
            let (state, train) = (State::start(self.rule)?, Arc::clone(&self.data));
            let trained =
                trainer.resume(&worker, &model, parameters, state, train, None, &mut Losses(&got))?;
            if worker.is_first() {
                let square = |values: &[f32]| values.iter().map(|&v| f64::from(v).powi(2)).sum::<f64>();
                *got_norm.lock().expect("nobody panics while it holds this") =
                    trained.parameters.values().with_flat(square).sqrt();
            }
            Ok(())
        })?;
        let got: Vec<f64> = got.into_inner().expect("nobody panics while it holds this");
        assert!(got.len() == steps.min(losses.len()), "{} losses of {steps} steps", got.len());
        let norms = [got_norm.into_inner().expect("nobody panics while it holds this"), norm[0]];
        let mut nearness =
            Nearness { norms: (steps == losses.len()).then_some(norms), ..Nearness::default() };
        let (mut pytorchs, mut worst) = (0.0f64, -1.0);
        for (step, (got, line)) in got.iter().zip(losses).enumerate() {
            pytorchs = pytorchs.max((line[0] - line[1]).abs());
            let (apart, bound) = ((got - line[1]).abs(), 10.0 * pytorchs + 1e-5);
            if apart.is_nan() || apart / bound > worst {
                worst = apart / bound;
                nearness = Nearness { step, apart, bound, ..nearness };
            }
        }
        Ok(nearness)
    }
}
