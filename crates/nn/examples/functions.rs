//! Times of layers and of operations on a CPU, a line each: of a training step (forward, sum, backward) and of a forward pass alone, in ms.
//! `benches/peers/functions.py` has the same by PyTorch, and `benches/functions.sh` runs both in turns.
//!
//! ```sh
//! cargo run --release -p phalanx-nn --example functions -- THREADS [PART OF A NAME]
//! ```

use phalanx_nn::{
    Conv1d, Conv2d, ConvTranspose2d, Ctx, GroupNorm, Gru, Lstm, Module, Parameters, RecurrentConfig, Relu,
    RmsNorm, Sequential, TransformerEncoderLayer, TransformerLayerConfig,
};
use phalanx_tensor::{DType, Device, Interpolation, Keep, Philox, Tensor};
use std::time::Instant;

/// Calls before times count, and calls of which the median is taken.
const CALLS: [usize; 2] = [3, 15];

fn median_ms(mut f: impl FnMut()) -> f64 {
    let time = |f: &mut dyn FnMut()| {
        let start = Instant::now();
        f();
        start.elapsed().as_secs_f64() * 1e3
    };
    (0..CALLS[0]).for_each(|_| f());
    let mut times: Vec<f64> = (0..CALLS[1]).map(|_| time(&mut f)).collect();
    times.sort_by(f64::total_cmp);
    times[times.len() / 2]
}

struct Bench {
    device: Device,
    only: String,
}

impl Bench {
    fn input(&self, shape: &[usize]) -> Tensor {
        Tensor::normal(&self.device, shape, 0.0, 1.0, DType::F32, Philox::new(1, 2))
    }

    fn layer(&self, name: &str, shape: &[usize], mut layer: impl Module) {
        let parameters = Parameters::build(&mut layer, &self.device, 0);
        let samples: Vec<u64> = (0..shape[0] as u64).collect();
        self.op(name, shape, |x| {
            parameters.grads().zero();
            layer.forward(x, &mut Ctx::train(0, 0, samples.clone().into()))
        });
    }

    fn op(&self, name: &str, shape: &[usize], f: impl Fn(&Tensor) -> Tensor) {
        if !name.contains(&self.only) {
            return;
        }
        let (x, constant) = (self.input(shape).requires_grad(), self.input(shape));
        let step = median_ms(|| drop(f(&x).sum_all().backward()));
        let forward = median_ms(|| drop(f(&constant)));
        println!("{name:40} {step:9.2} {forward:9.2}");
    }
}

fn main() {
    let mut args = std::env::args().skip(1);
    let threads = args.next().and_then(|threads| threads.parse().ok()).unwrap_or(1);
    let b = Bench { device: Device::cpu(threads), only: args.next().unwrap_or_default() };
    let recurrent = RecurrentConfig::default();
    let encoder = TransformerLayerConfig {
        width: 256,
        hidden: 1024,
        dropout: 0.0,
        ..TransformerLayerConfig::default()
    };
    b.layer("lstm", &[32, 64, 128], Lstm::new(128, 256, recurrent));
    b.layer("lstm of 64", &[16, 100, 64], Lstm::new(64, 64, recurrent));
    b.layer("gru", &[32, 64, 128], Gru::new(128, 256, recurrent));
    b.layer("encoder", &[16, 64, 256], TransformerEncoderLayer::new(encoder));
    b.layer("group_norm", &[32, 64, 32, 32], GroupNorm::new(8, 64));
    b.layer("rms_norm", &[4096, 512], RmsNorm::new(512));
    b.layer("conv1d", &[32, 64, 256], Conv1d::new(64, 64, 5).padding(2));
    b.layer("conv_transpose", &[32, 64, 16, 16], ConvTranspose2d::new(64, 32, 4).stride(2).padding(1));
    for n in [1, 2, 3, 4, 6] {
        let of = |name: &str, [inputs, outputs, size]: [usize; 3], layer: Conv2d| {
            b.layer(
                &format!("conv {inputs}-{outputs} of {size}{name}, batch {n}"),
                &[n, inputs, size, size],
                layer,
            );
        };
        of("", [16, 16, 64], Conv2d::new(16, 16, 3).padding(1));
        of("", [64, 64, 64], Conv2d::new(64, 64, 3).padding(1));
        of("", [256, 256, 14], Conv2d::new(256, 256, 3).padding(1));
        of("", [512, 512, 7], Conv2d::new(512, 512, 3).padding(1));
        of(", stride 2", [64, 128, 56], Conv2d::new(64, 128, 3).stride(2).padding(1));
        of(", kernel 1", [64, 256, 56], Conv2d::new(64, 256, 1));
        of(", kernel 5", [32, 64, 28], Conv2d::new(32, 64, 5).padding(2));
        of(", kernel 3 dilated", [64, 64, 28], Conv2d::new(64, 64, 3).padding(2).dilation(2));
    }
    for n in [1, 8] {
        let of = |name: &str, [channels, size]: [usize; 2], layer: Conv2d| {
            let name = format!("depthwise {channels} of {size}{name}, batch {n}");
            b.layer(&name, &[n, channels, size, size], layer.groups(channels));
        };
        of("", [144, 56], Conv2d::new(144, 144, 3).padding(1));
        of("", [576, 14], Conv2d::new(576, 576, 3).padding(1));
        of("", [960, 7], Conv2d::new(960, 960, 3).padding(1));
        of(", stride 2", [96, 112], Conv2d::new(96, 96, 3).stride(2).padding(1));
        of(", kernel 7", [96, 56], Conv2d::new(96, 96, 7).padding(3));
        let inverted = Sequential::new()
            .then(Conv2d::new(32, 192, 1))
            .then(Relu)
            .then(Conv2d::new(192, 192, 3).padding(1).groups(192));
        let inverted = inverted.then(Relu).then(Conv2d::new(192, 32, 1));
        b.layer(&format!("inverted bottleneck, batch {n}"), &[n, 32, 28, 28], inverted);
    }
    for n in [1, 2, 4] {
        let through = Sequential::new()
            .then(Conv2d::new(256, 64, 1))
            .then(Relu)
            .then(Conv2d::new(64, 64, 3).padding(1));
        let bottleneck = through.then(Relu).then(Conv2d::new(64, 256, 1));
        b.layer(&format!("bottleneck, batch {n}"), &[n, 256, 56, 56], bottleneck);
    }
    let rows = &[4096, 512];
    let targets = Tensor::uniform(&b.device, [4096, 512], 0.0, 1.0, DType::F32, Philox::new(3, 4));
    b.op("mse_loss", rows, |x| x.mse_loss(&targets));
    b.op("bce_with_logits", rows, |x| x.bce_with_logits(&targets));
    b.op("softmax", rows, |x| x.softmax(1));
    b.op("log_softmax", rows, |x| x.log_softmax(1));
    b.op("logsumexp", rows, |x| x.logsumexp(1, Keep::No));
    b.op("gelu", rows, |x| x.gelu());
    b.op("silu", rows, |x| x.silu());
    b.op("softplus", rows, |x| x.softplus());
    b.op("elu", rows, |x| x.elu(1.0));
    b.op("tanh", rows, |x| x.tanh());
    b.op("ln", rows, |x| x.abs().ln());
    b.op("sin", rows, |x| x.sin());
    b.op("powf", rows, |x| x.abs().powf(1.7));
    b.op("sqrt", rows, |x| x.abs().sqrt());
    b.op("cumsum", rows, |x| x.cumsum(1));
    b.op("cumsum of columns", rows, |x| x.cumsum(0));
    b.op("var", rows, |x| x.var(&[1], Keep::No, 1));
    b.op("sum", rows, |x| x.sum(&[1], Keep::No));
    b.op("max", rows, |x| x.max(1, Keep::No));
    b.op("product", rows, |x| x * x);
    b.op("transpose", rows, |x| x.t().contiguous());
    b.op("heads", &[32, 128, 8, 64], |x| x.transpose(1, 2).contiguous());
    // Half of the samples are filled up from half of their positions on.
    let seen = |i: usize| if i / 512 % 2 == 1 && i % 512 >= 256 { 0.0f32 } else { 1.0 };
    let seen: Vec<f32> = (0..8 * 512).map(seen).collect();
    let seen = Tensor::from_slice(&b.device, &seen, [8, 1, 1, 512]);
    let qkv = &[8, 512, 3 * 512];
    b.op("attention", qkv, |x| x.self_attention(8, None, None));
    b.op("attention masked", qkv, |x| x.self_attention(8, Some(&seen), None));
    b.op("attention causal", qkv, |x| x.causal_attention(8, None));
    let images = &[4, 32, 64, 64];
    b.op("bilinear", images, |x| x.interpolate(&[128, 128], Interpolation::Linear { align_corners: false }));
    b.op("bicubic", images, |x| x.interpolate(&[128, 128], Interpolation::Cubic { align_corners: false }));
    b.op("nearest", images, |x| x.interpolate(&[128, 128], Interpolation::Nearest));
    b.op("bilinear smaller", images, |x| {
        x.interpolate(&[32, 32], Interpolation::Linear { align_corners: false })
    });
    b.op("flip", rows, |x| x.flip(1));
    b.op("cat", rows, |x| Tensor::cat(&[x; 4], 0));
    b.op("masked_fill", rows, |x| x.masked_fill(&x.gt(0.5), 1.0));
    let other = |shape: &[usize]| b.input(shape);
    let (row, short, column, columns) = (other(&[64]), other(&[8]), other(&[100_352, 1]), other(&[1000, 1]));
    b.op("broadcast row of 64", &[100_352, 64], |x| x + &row);
    b.op("broadcast row of 8", &[100_352, 8], |x| x + &short);
    b.op("broadcast column to 8", &[100_352, 8], |x| x * &column);
    b.op("broadcast column to 1000", &[1000, 1000], |x| x * &columns);
    b.op("permuted rows of 4", &[4096, 16, 8, 4], |x| x.transpose(1, 2).contiguous());
    b.op("sum of the middle", &[32, 512, 64], |x| x.sum(&[1], Keep::No));
    b.op("a hundred sums of ten", &[10], |x| (0..100).fold(x.clone(), |sum, _| &sum + x));
}
