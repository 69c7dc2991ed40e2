//! Each layer and loss against PyTorch, forward and backward. `golden/layers.py` made the figures.

use phalanx_nn::{
    AvgPool1d, AvgPool2d, BatchNorm1d, Conv1d, Conv2d, ConvTranspose1d, ConvTranspose2d, Ctx, Dropout,
    Dropout2d, Elu, Embedding, Flatten, Gelu, GroupNorm, Gru, Init, LayerNorm, LeakyRelu, Linear, LogSoftmax,
    Loss, Lstm, MaxPool1d, MaxPool2d, Module, PRelu, Param, Parameters, RecurrentConfig, Relu, RmsNorm,
    Sequential, Sigmoid, Silu, Softplus, Tanh, Upsample, Visitor, Weights, module,
};
use phalanx_tensor::{DType, Device, Interpolation, Philox, PoolOptions, Shape, Tensor};
use serde_json::Value;

/// Rounding of float32 sums of up to a hundred products of numbers of about 1.
const TOLERANCE: f32 = 5e-6;

fn golden() -> Value {
    serde_json::from_str(include_str!("golden/layers.json")).unwrap()
}

fn shape(of: &Value) -> Shape {
    let dims: Vec<usize> =
        of["shape"].as_array().unwrap().iter().map(|d| d.as_u64().unwrap() as usize).collect();
    Shape::new(&dims)
}

fn values(of: &Value) -> Vec<f32> {
    of["values"].as_array().unwrap().iter().map(|v| v.as_f64().unwrap() as f32).collect()
}

#[track_caller]
fn same(what: &str, got: &Tensor, want: &Value) {
    assert_eq!(*got.shape(), shape(want), "{what}");
    for (i, (got, want)) in got.to_vec::<f32>().iter().zip(values(want)).enumerate() {
        assert!((got - want).abs() <= TOLERANCE * want.abs().max(1.0), "{what} {i}: {got}, PyTorch {want}");
    }
}

/// Holds a module's output, and the gradients of its input and parameters, against the case of this name.
#[track_caller]
fn check(device: &Device, name: &str, module: impl Module) {
    check_in(device, name, module, Ctx::eval());
}

#[track_caller]
fn check_in(device: &Device, name: &str, mut module: impl Module, mut ctx: Ctx) {
    let golden = golden();
    let case = &golden["cases"][name];
    let parameters = Parameters::build(&mut module, device, 0);
    let mut weights = Weights::default();
    for (name, value) in case["parameters"].as_object().unwrap() {
        weights.push(name.clone(), shape(value), &values(value));
    }
    let left = parameters.load_matching(&weights);
    assert!(left.missing.iter().all(|name| parameters.buffer_names().contains(name)), "{left:?}");
    assert!(left.unexpected.is_empty() && left.misshaped.is_empty(), "{left:?}");
    let ids = case.get("dx").is_none();
    let x = if ids {
        let ids: Vec<i64> = values(&case["x"]).iter().map(|&v| v as i64).collect();
        Tensor::from_slice(device, &ids, shape(&case["x"]))
    } else {
        Tensor::from_slice(device, &values(&case["x"]), shape(&case["x"])).requires_grad()
    };
    let y = module.forward(&x, &mut ctx);
    same(&format!("{name}, output"), &y, &case["y"]);
    let push = Tensor::from_slice(device, &values(&case["push"]), shape(&case["push"]));
    let grads = (&y * &push).sum_all().backward();
    if !ids {
        same(&format!("{name}, gradient of the input"), grads.get(&x).unwrap(), &case["dx"]);
    }
    for (i, parameter) in parameters.names().iter().enumerate() {
        let got = parameters.grads().arena().tensor(i);
        same(&format!("{name}, gradient of {parameter}"), &got, &case["gradients"][parameter]);
    }
}

/// Images of this size.
struct Resized([usize; 2], Interpolation);

impl Module for Resized {
    fn forward(&self, x: &Tensor, _: &mut Ctx) -> Tensor {
        x.interpolate(&self.0, self.1)
    }

    fn visit(&mut self, _: &mut Visitor<'_>) {}
}

#[test]
fn layers_compute_what_pytorch_computes() {
    let device = Device::cpu(2);
    check(&device, "linear", Linear::new(5, 3));
    check(&device, "linear_without_bias", Linear::new(5, 3).without_bias());
    check(&device, "conv", Conv2d::new(2, 3, 3));
    check(&device, "conv_all_options", Conv2d::new(4, 6, 3).stride(2).padding(2).dilation(2).groups(2));
    check(&device, "conv_depthwise_without_bias", Conv2d::new(3, 3, 3).without_bias().padding(1).groups(3));
    check(&device, "max_pool", MaxPool2d::new(2));
    check(&device, "avg_pool", AvgPool2d::new(2));
    let windows = PoolOptions { kernel: [3, 3], stride: [2, 2], padding: [1, 1] };
    check(&device, "max_pool_all_options", MaxPool2d(windows));
    check(&device, "avg_pool_all_options", AvgPool2d(windows));
    check(&device, "embedding", Embedding::new(6, 3));
    check(&device, "layer_norm", LayerNorm::new(6));
    check(&device, "relu", Relu);
    check(&device, "gelu", Gelu);
    check(&device, "tanh", Tanh);
    check(&device, "sigmoid", Sigmoid);
    check(&device, "log_softmax", LogSoftmax);
    let layers = Sequential::new().then(Conv2d::new(1, 2, 3)).then(Relu).then(Flatten);
    check(&device, "sequential", layers.then(Linear::new(12, 3)).then(Tanh));
    check(&device, "silu", Silu);
    check(&device, "softplus", Softplus);
    check(&device, "leaky_relu", LeakyRelu(0.01));
    check(&device, "elu", Elu(1.5));
    check(&device, "group_norm", GroupNorm::new(2, 6));
    check(&device, "group_norm_of_rows", GroupNorm::new(2, 6));
    check(&device, "instance_norm", GroupNorm::new(3, 3));
    check(&device, "rms_norm", RmsNorm::new(6));
}

#[test]
fn layers_of_sequences_and_transposed_ones_compute_what_pytorch_computes() {
    let device = Device::cpu(2);
    check(&device, "conv1d", Conv1d::new(2, 3, 3));
    check(&device, "conv1d_all_options", Conv1d::new(4, 6, 3).stride(2).padding(2).dilation(2).groups(2));
    check(&device, "conv_transpose", ConvTranspose2d::new(3, 2, 3));
    let all = ConvTranspose2d::new(4, 6, 3).stride(3).padding(2).output_padding(1).dilation(2).groups(2);
    check(&device, "conv_transpose_all_options", all);
    let without = ConvTranspose2d::new(2, 3, 4).stride(2).padding(1).without_bias();
    check(&device, "conv_transpose_without_bias", without);
    check(&device, "max_pool1d", MaxPool1d::new(3).stride(2).padding(1));
    check(&device, "avg_pool1d", AvgPool1d::new(3).stride(2).padding(1));
    check(&device, "upsample", Upsample::new(2));
    let [edges, corners] = [false, true];
    for (name, size, how) in [
        ("bilinear", [5, 8], Interpolation::Linear { align_corners: edges }),
        ("bilinear_to_corners", [4, 7], Interpolation::Linear { align_corners: corners }),
        ("bicubic", [7, 3], Interpolation::Cubic { align_corners: edges }),
        ("bicubic_to_corners", [6, 6], Interpolation::Cubic { align_corners: corners }),
        ("area", [2, 5], Interpolation::Area),
    ] {
        check(&device, name, Resized(size, how));
    }
    for name in ["linear_of_sequences", "trilinear"] {
        let scale = if name == "trilinear" { 2 } else { 3 };
        check(&device, name, Upsample::new(scale).mode(Interpolation::Linear { align_corners: edges }));
    }
    let rows = Conv2d::new(2, 3, [1, 3]).stride([2, 1]).padding([0, 2]).dilation([1, 2]);
    check(&device, "conv_of_rows", rows);
    let columns = ConvTranspose2d::new(2, 3, [3, 2]).stride([2, 1]).padding([1, 0]).output_padding([1, 0]);
    check(&device, "conv_transpose_of_columns", columns);
    check(&device, "max_pool_of_rows", MaxPool2d::new([1, 3]).stride([2, 1]));
    check(&device, "conv_transpose1d", ConvTranspose1d::new(3, 2, 3));
    let all = ConvTranspose1d::new(4, 6, 3).stride(3).padding(2).output_padding(1).dilation(2).groups(2);
    check(&device, "conv_transpose1d_all_options", all);
    check(&device, "prelu", PRelu::new(1));
    check(&device, "prelu_of_channels", PRelu::new(3));
    check(&device, "embedding_with_padding", Embedding::new(6, 3).padding_idx(2));
    let training = || Ctx::train(0, 0, [0, 1].into());
    check_in(&device, "batch_norm1d", BatchNorm1d::new(3), training());
    check_in(&device, "batch_norm1d_of_sequences", BatchNorm1d::new(3), training());
}

#[test]
fn recurrent_layers_compute_what_pytorch_computes() {
    let device = Device::cpu(2);
    let plain = RecurrentConfig::default();
    let all = RecurrentConfig { layers: 2, both_ways: true, ..plain };
    check(&device, "lstm", Lstm::new(3, 5, plain));
    check(&device, "lstm_all_options", Lstm::new(3, 4, all));
    check(&device, "gru", Gru::new(3, 5, plain));
    check(&device, "gru_all_options", Gru::new(3, 4, all));
}

#[test]
fn a_sequence_in_two_parts_comes_to_what_it_comes_to_in_one() {
    let device = Device::cpu(1);
    let config = RecurrentConfig { layers: 2, ..RecurrentConfig::default() };
    let (mut lstm, mut gru) = (Lstm::new(3, 4, config), Gru::new(3, 4, config));
    let _parameters = [Parameters::build(&mut lstm, &device, 1), Parameters::build(&mut gru, &device, 2)];
    let x = Tensor::normal(&device, [2, 7, 3], 0.0, 1.0, DType::F32, Philox::new(3, 4));
    let (first, second) = (x.narrow(1, 0, 3), x.narrow(1, 3, 4));
    let mut ctx = Ctx::eval();
    let near = |a: &Tensor, b: &Tensor| {
        let pairs = a.to_vec::<f32>().into_iter().zip(b.to_vec::<f32>());
        assert!(pairs.into_iter().all(|(a, b)| (a - b).abs() < 1e-6), "{a:?} {b:?}");
    };
    let (whole, state) = lstm.forward_from(&x, None, &mut ctx);
    let (a, between) = lstm.forward_from(&first, None, &mut ctx);
    let (b, end) = lstm.forward_from(&second, Some(&between), &mut ctx);
    near(&whole, &Tensor::cat(&[&a, &b], 1));
    state.iter().zip(&end).for_each(|(a, b)| near(a, b));
    near(&state[0].narrow(0, 1, 1).squeeze(0), &whole.narrow(1, 6, 1).squeeze(1));
    let (whole, state) = gru.forward_from(&x, None, &mut ctx);
    let (a, between) = gru.forward_from(&first, None, &mut ctx);
    let (b, end) = gru.forward_from(&second, Some(&between), &mut ctx);
    near(&whole, &Tensor::cat(&[&a, &b], 1));
    near(&state, &end);
}

#[test]
fn dropout_between_recurrent_layers_belongs_to_samples() {
    let device = Device::cpu(1);
    let mut lstm = Lstm::new(3, 8, RecurrentConfig { layers: 2, both_ways: true, dropout: 0.5 });
    let _parameters = Parameters::build(&mut lstm, &device, 1);
    let x = Tensor::normal(&device, [3, 5, 3], 0.0, 1.0, DType::F32, Philox::new(3, 4));
    let run = |x: &Tensor, samples: &[u64]| lstm.forward(x, &mut Ctx::train(1, 2, samples.into()));
    let both = run(&x, &[4, 7, 9]);
    let alone = run(&x.narrow(0, 1, 1), &[7]);
    assert_eq!(both.narrow(0, 1, 1).to_vec::<f32>(), alone.to_vec::<f32>());
    assert_ne!(alone.to_vec::<f32>(), lstm.forward(&x.narrow(0, 1, 1), &mut Ctx::eval()).to_vec::<f32>());
}

#[test]
fn a_list_of_modules_is_a_part_like_any_other() {
    module! {
        struct Deep(layers: usize) {
            hidden: Vec<Linear> = (0..layers).map(|_| Linear::new(3, 3)).collect(),
            out: Linear = Linear::new(3, 1),
        }

        fn forward(&self, x: &Tensor, ctx: &mut Ctx) -> Tensor {
            self.out.forward(&self.hidden.iter().fold(x.clone(), |x, layer| layer.forward(&x, ctx).relu()), ctx)
        }
    }
    let (mut deep, device) = (Deep::new(2), Device::cpu(1));
    let parameters = Parameters::build(&mut deep, &device, 0);
    assert_eq!(parameters.names()[..3], ["hidden.0.weight", "hidden.0.bias", "hidden.1.weight"]);
    let x = Tensor::ones(&device, [2, 3], DType::F32);
    assert_eq!(deep.forward(&x, &mut Ctx::eval()).dims(), [2, 1]);
}

/// A loss as a module, so that it is checked like one.
struct Against(Loss, Tensor);

impl Module for Against {
    fn visit(&mut self, _: &mut phalanx_nn::Visitor<'_>) {}

    fn forward(&self, x: &Tensor, _: &mut Ctx) -> Tensor {
        self.0.of(x, &self.1)
    }
}

#[test]
fn losses_compute_what_pytorch_computes() {
    let (golden, device) = (golden(), Device::cpu(1));
    let labels: Vec<i64> = golden["labels"].as_array().unwrap().iter().map(|v| v.as_i64().unwrap()).collect();
    let labels = Tensor::from_slice(&device, &labels, [4]);
    let soft = Tensor::from_slice(&device, &values(&golden["soft"]), shape(&golden["soft"]));
    check(&device, "nll", Against(Loss::Nll, labels.clone()));
    check(&device, "cross_entropy", Against(Loss::CrossEntropy { label_smoothing: 0.0 }, labels.clone()));
    check(&device, "cross_entropy_smoothed", Against(Loss::CrossEntropy { label_smoothing: 0.2 }, labels));
    check(&device, "mse", Against(Loss::Mse, soft.clone()));
    check(&device, "bce_with_logits", Against(Loss::BceWithLogits, soft));
}

fn ones(shape: impl Into<Shape>) -> Tensor {
    Tensor::ones(&Device::cpu(1), shape, DType::F32)
}

#[test]
fn dropout_drops_its_share_and_keeps_the_mean_in_training_only() {
    let samples = (0..100).collect();
    let x = ones([100, 400]);
    let y = Dropout::new(0.3).forward(&x, &mut Ctx::train(1, 0, samples)).to_vec::<f32>();
    let dropped = y.iter().filter(|&&v| v == 0.0).count() as f64 / y.len() as f64;
    // Four standard errors of a share of 0.3 among 40,000.
    assert!((dropped - 0.3).abs() < 0.0092, "{dropped} of the elements are dropped");
    assert!(y.iter().all(|&v| v == 0.0 || (v - 1.0 / 0.7).abs() < 1e-6));
    assert_eq!(Dropout::new(0.3).forward(&x, &mut Ctx::eval()).to_vec::<f32>(), x.to_vec::<f32>());
}

#[test]
fn dropout2d_drops_whole_channels() {
    let y = Dropout2d(0.5).forward(&ones([8, 16, 3, 3]), &mut Ctx::train(1, 0, (0..8).collect()));
    let y = y.to_vec::<f32>();
    let channels = y.as_chunks::<9>().0;
    assert!(channels.iter().all(|c| *c == [0.0; 9] || *c == [2.0; 9]), "a channel is in part");
    let dropped = channels.iter().filter(|c| c[0] == 0.0).count();
    assert!((32..96).contains(&dropped), "{dropped} of 128 channels are dropped");
}

#[test]
fn a_mask_belongs_to_a_sample_a_step_a_layer_and_a_seed() {
    let mask = |seed, step, layer: usize, samples: &[u64]| {
        let mut ctx = Ctx::train(seed, step, samples.into());
        (0..layer).for_each(|_| drop(ctx.dropout_key()));
        let y = Dropout::new(0.5).forward(&ones([samples.len(), 64]), &mut ctx);
        (0..samples.len()).map(|row| y.narrow(0, row, 1).to_vec::<f32>()).collect::<Vec<_>>()
    };
    let batch = mask(1, 2, 0, &[10, 11, 12]);
    assert_eq!(mask(1, 2, 0, &[12, 10]), [batch[2].clone(), batch[0].clone()]);
    let others = [mask(2, 2, 0, &[10]), mask(1, 3, 0, &[10]), mask(1, 2, 1, &[10]), vec![batch[1].clone()]];
    for other in others {
        assert_ne!(other[0], batch[0]);
    }
}

#[test]
fn the_bias_and_kernel_of_a_grouped_convolution_start_within_its_own_fan_in() {
    let parameters = Parameters::build(&mut Conv2d::new(8, 8, 3).groups(4), &Device::cpu(1), 3);
    let bound = 1.0 / (2.0 * 9.0f32).sqrt();
    for i in 0..2 {
        let largest = parameters.value(i).to_vec::<f32>().into_iter().fold(0.0, |a: f32, v| a.max(v.abs()));
        assert!(largest <= bound && largest > bound / 2.0, "{largest} within {bound}");
    }
}

#[test]
fn a_grouped_convolution_keeps_the_first_values_that_were_asked_for() {
    for mut layer in [
        Conv2d::new(4, 4, 3).init(Init::Constant(0.5)).groups(2),
        Conv2d::new(4, 4, 3).groups(2).init(Init::Constant(0.5)),
    ] {
        let parameters = Parameters::build(&mut layer, &Device::cpu(1), 0);
        assert_eq!(parameters.value(0).to_vec::<f32>(), [0.5; 72]);
        assert!(parameters.value(1).to_vec::<f32>().iter().all(|&bias| bias != 0.5));
    }
}

#[test]
#[should_panic(expected = "Conv2d: 4 and 6 channels don't fall into 3 groups")]
fn channels_that_do_not_fall_into_groups_are_a_bug() {
    let _ = Conv2d::new(4, 6, 3).groups(3);
}

/// Something learned that is one pixel large, made as large as an image whose channels run fastest.
struct Spread(Param);

impl Module for Spread {
    fn forward(&self, x: &Tensor, _: &mut Ctx) -> Tensor {
        let in_pixels = x.permute(&[2, 3, 0, 1]).contiguous().permute(&[2, 3, 0, 1]);
        // The gradient of a square lies as the sum does.
        (in_pixels + self.0.interpolate(&[x.dim(2), x.dim(3)], Interpolation::Nearest)).square()
    }

    fn visit(&mut self, v: &mut Visitor<'_>) {
        v.param("weight", &mut self.0);
    }
}

/// Of a single pixel it can't be told in which order it lies.
#[test]
fn what_is_one_pixel_large_gets_the_gradients_of_its_channels() {
    let device = Device::cpu(1);
    let mut layer = Spread(Param::new([1, 2, 1, 1], Init::Constant(1.0)));
    let parameters = Parameters::build(&mut layer, &device, 0);
    let x = Tensor::from_slice(&device, &[1.0f32, 2.0, 3.0, 4.0, 50.0, 60.0, 70.0, 80.0], [1, 2, 2, 2]);
    layer.forward(&x, &mut Ctx::eval()).sum_all().backward();
    assert_eq!(parameters.gradient(0).to_vec::<f32>(), [2.0 * (10.0 + 4.0), 2.0 * (260.0 + 4.0)]);
}
