//! How fast a device is: whole steps, products, sums and copies. Sizes grow until one takes long enough to be measured, so that a
//! slow device takes no longer than a fast one.

use super::{Extent, Finding};
use phalanx_nn::models::{MnistNet, ResNet, ResNetDepth, ResNetStem};
use phalanx_nn::optim::{Optimizer, Sgd};
use phalanx_nn::{Ctx, Loss, Module, Parameters};
use phalanx_parallel::{SingleDevice, Strategy, Sync};
use phalanx_tensor::{DType, Device, Philox, Tensor};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// How long something is repeated.
const LONG: Duration = Duration::from_millis(300);
/// What takes so long isn't tried in a larger size.
const ENOUGH: Duration = Duration::from_millis(20);

/// What is measured by itself.
#[derive(Clone, Copy)]
enum Piece {
    Product,
    /// In bfloat16, for which GPUs have units of their own.
    HalfProduct,
    Sum,
    Up,
    Down,
}

impl Piece {
    const ALL: [Piece; 5] = [Piece::Product, Piece::HalfProduct, Piece::Sum, Piece::Up, Piece::Down];

    fn name(self) -> &'static str {
        match self {
            Piece::Product => "matrix product",
            Piece::HalfProduct => "matrix product in bfloat16",
            Piece::Sum => "sum of two tensors",
            Piece::Up => "copy to the device",
            Piece::Down => "copy from the device",
        }
    }

    /// Powers of two of its size: from one that anything does at once to one that is enough for any device.
    fn powers(self) -> [u32; 2] {
        match self {
            Piece::Product | Piece::HalfProduct => [5, 13],
            Piece::Sum => [12, 27],
            Piece::Up | Piece::Down => [14, 28],
        }
    }

    /// At this size: how long it takes in seconds, how large it is in words, and how much of what it does in a second.
    fn measured(self, device: &Device, n: usize, quick: bool) -> (f64, String, f64, &'static str) {
        let random =
            |shape: &[usize]| Tensor::uniform(device, shape, -1.0, 1.0, DType::F32, Philox::new(2, 0));
        match self {
            Piece::Product | Piece::HalfProduct => {
                let dtype = if let Piece::HalfProduct = self { DType::BF16 } else { DType::F32 };
                let [a, b] = [(); 2].map(|()| random(&[n, n]).cast(dtype));
                let took = seconds(device, quick, || drop(a.matmul(&b)));
                (took, format!("{n} x {n} x {n}"), 2.0 * (n as f64).powi(3) / took / 1e9, "GFLOP/s")
            }
            Piece::Sum => {
                let (a, b) = (random(&[n]), random(&[n]));
                let took = seconds(device, quick, || drop(&a + &b));
                // Two are read, one is written.
                (took, format!("{n} numbers"), 12.0 * n as f64 / took / 1e9, "GB/s")
            }
            Piece::Up | Piece::Down => {
                let host = vec![0f32; n / 4];
                let there = Tensor::from_slice(device, &host, [n / 4]);
                let took = seconds(device, quick, || match self {
                    Piece::Up => drop(Tensor::from_slice(device, &host, [n / 4])),
                    _ => drop(there.to_vec::<f32>()),
                });
                (took, format!("{n} bytes"), n as f64 / took / 1e9, "GB/s")
            }
        }
    }

    /// At the first power of two that takes long enough, or at the last.
    fn rate(self, device: &Device, quick: bool) -> Finding {
        let [least, most] = self.powers();
        let most = if quick { least + 1 } else { most };
        let mut power = least;
        loop {
            // Roughly, and then well where it ends.
            let (took, ..) = self.measured(device, 1 << power, true);
            if took > ENOUGH.as_secs_f64() || power == most {
                let (_, size, value, unit) = self.measured(device, 1 << power, quick);
                return Finding::Rate { name: self.name(), size, value, unit };
            }
            power += 1;
        }
    }
}

pub(super) fn all(device: &Device, extent: Extent, tell: &mut dyn FnMut(Finding)) {
    let quick = extent == Extent::Quick;
    // On a CPU it is there to be compared with, and slow.
    let is_measured = |piece: &Piece| device.gpu().is_some() || !matches!(piece, Piece::HalfProduct);
    Piece::ALL.into_iter().filter(is_measured).for_each(|piece| tell(piece.rate(device, quick)));
    let digits = || Box::new(MnistNet::new(0.5)) as Box<dyn Module>;
    let batch = if quick { 2 } else { 64 };
    tell(step(device, "training step of mnist", digits(), [batch, 1, 28, 28], Loss::Nll, quick));
    if !quick {
        let resnet = Box::new(ResNet::new(ResNetDepth::D18, ResNetStem::Small, 10));
        let loss = Loss::CrossEntropy { label_smoothing: 0.0 };
        tell(step(device, "training step of resnet18", resnet, [64, 3, 32, 32], loss, quick));
    }
}

/// Waits for what the device was given.
fn settle(device: &Device) {
    if let Some(gpu) = device.gpu() {
        gpu.synchronize().unwrap_or_else(|error| panic!("{error}"));
    }
}

/// How long `work` takes at the median, once it is warm.
fn seconds(device: &Device, quick: bool, mut work: impl FnMut()) -> f64 {
    let mut once = || {
        let start = Instant::now();
        work();
        settle(device);
        start.elapsed()
    };
    let long = if quick { Duration::ZERO } else { LONG };
    once();
    let (start, mut times) = (Instant::now(), Vec::new());
    while times.len() < 3 || start.elapsed() < long {
        times.push(once());
    }
    times.sort_unstable();
    times[times.len() / 2].as_secs_f64()
}

/// Images a second of whole training steps, whose batches are there already.
fn step(
    device: &Device,
    name: &'static str,
    mut model: Box<dyn Module>,
    dims: [usize; 4],
    loss: Loss,
    quick: bool,
) -> Finding {
    let parameters = Parameters::build(&mut model, device, 0);
    let x = Tensor::uniform(device, dims, 0.0, 1.0, DType::F32, Philox::new(1, 0));
    let labels: Vec<i64> = (0..dims[0]).map(|i| (i % 10) as i64).collect();
    let y = Tensor::from_slice(device, &labels, [dims[0]]);
    let samples: Arc<[u64]> = (0..dims[0] as u64).collect();
    let mut optimizer = Optimizer::new(Sgd::new(0.01)).expect("a rate of 0.01 makes sense");
    let (mut strategy, mut number) = (SingleDevice::new(), 0);
    let took = seconds(device, quick, || {
        let mut ctx = Ctx::train(0, number, Arc::clone(&samples));
        let of_batch = loss.of(&model.forward(&x, &mut ctx), &y);
        let alone = "nobody else takes part who could fail";
        strategy.backward(&parameters, Some(&of_batch), 1.0, Sync::Now).expect(alone);
        strategy.finish(&parameters).expect(alone);
        optimizer.step_parameters(&parameters, 1.0);
        number += 1;
    });
    let [n, c, h, w] = dims;
    let size = format!("{n} images of {c} x {h} x {w}, {:.2} ms", took * 1e3);
    Finding::Rate { name, size, value: n as f64 / took, unit: "images/s" }
}
