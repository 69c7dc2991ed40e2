//! The layers of an encoder and of a decoder against PyTorch's. `golden/transformer.py` made the figures.

mod unit;

use phalanx_nn::TransformerDecoderLayer;
use phalanx_nn::{
    Ctx, Module, MultiheadAttention, Parameters, TransformerEncoderLayer, TransformerLayerConfig,
};
use phalanx_tensor::{DType, Device, Shape, Tensor};
use unit::unit;

/// Float32 rounding through a layer, relative to the largest of 1 and the figure.
const TOLERANCE: f64 = 2e-5;
const CONFIG: TransformerLayerConfig = TransformerLayerConfig {
    width: 6,
    heads: 2,
    hidden: 10,
    dropout: 0.0,
    activation: Tensor::relu,
    norm_first: false,
    eps: 1e-5,
};

fn values(device: &Device, k: u64, shape: impl Into<Shape>, factor: f64) -> Tensor {
    let shape = shape.into();
    let values: Vec<f32> = (0..shape.count() as u64).map(|i| (factor * unit(k, i)) as f32).collect();
    Tensor::from_slice(device, &values, shape)
}

#[track_caller]
fn same(what: &str, got: f64, want: &serde_json::Value) {
    let want = want.as_f64().unwrap();
    assert!((got - want).abs() <= TOLERANCE * want.abs().max(1.0), "{what}: {got}, PyTorch {want}");
}

fn norm(x: &Tensor) -> f64 {
    x.to_vec::<f32>().iter().map(|&x| f64::from(x) * f64::from(x)).sum::<f64>().sqrt()
}

/// Values by the formula that PyTorch's were made by.
fn filled(layer: &mut dyn Module, device: &Device) -> Parameters {
    let parameters = Parameters::build(layer, device, 0);
    for k in 0..parameters.names().len() {
        let value = parameters.value(k);
        value.copy_from(&values(device, k as u64, *value.shape(), 0.5));
    }
    parameters
}

#[track_caller]
fn same_outputs(case: &str, y: &Tensor, golden: &serde_json::Value) {
    for (i, (got, want)) in y.to_vec::<f32>().iter().zip(golden["output"].as_array().unwrap()).enumerate() {
        same(&format!("{case}, number {i}"), f64::from(*got), want);
    }
}

/// Names, shapes and gradients.
#[track_caller]
fn same_parameters(case: &str, parameters: &Parameters, golden: &serde_json::Value) {
    let want = golden["parameters"].as_array().unwrap();
    assert_eq!(parameters.names().len(), want.len(), "{case}");
    for (i, (name, want)) in parameters.names().iter().zip(want).enumerate() {
        assert_eq!(*name, want[0].as_str().unwrap(), "{case}");
        assert_eq!(serde_json::json!(parameters.layout().shape(i).dims()), want[1], "{case}, {name}");
        let grad = norm(&parameters.grads().arena().tensor(i));
        same(&format!("{case}, gradient of {name}"), grad, &want[2]);
    }
}

#[test]
fn an_encoders_layer_gives_pytorchs_outputs_and_gradients() {
    let golden: serde_json::Value = serde_json::from_str(include_str!("golden/transformer.json")).unwrap();
    let first = TransformerLayerConfig { norm_first: true, activation: Tensor::gelu, ..CONFIG };
    let cases = [("after", CONFIG, false), ("after, masked", CONFIG, true), ("first, masked", first, true)];
    for (case, config, is_masked) in cases {
        let (device, golden) = (Device::cpu(2), &golden[case]);
        let mut layer = TransformerEncoderLayer::new(config);
        let parameters = filled(&mut layer, &device);
        let seen = Tensor::from_slice(&device, &[1.0f32, 1.0, 1.0, 1.0, 1.0, 1.0, 0.0, 0.0], [2, 1, 1, 4]);
        let x = values(&device, 100, [2, 4, 6], 1.0).requires_grad();
        let y = layer.forward_masked(&x, is_masked.then_some(&seen), &mut Ctx::eval());
        same_outputs(case, &y, golden);
        let grads = (&y * values(&device, 101, [2, 4, 6], 1.0)).sum_all().backward();
        same(&format!("{case}, gradient of the input"), norm(grads.get(&x).unwrap()), &golden["input"]);
        same_parameters(case, &parameters, golden);
    }
}

#[test]
fn a_decoders_layer_gives_pytorchs_outputs_and_gradients() {
    let golden: serde_json::Value = serde_json::from_str(include_str!("golden/transformer.json")).unwrap();
    let first = TransformerLayerConfig { norm_first: true, activation: Tensor::gelu, ..CONFIG };
    for (case, config) in [("decoder, after", CONFIG), ("decoder, first", first)] {
        let (device, golden) = (Device::cpu(2), &golden[case]);
        let mut layer = TransformerDecoderLayer::new(config);
        let parameters = filled(&mut layer, &device);
        let seen = Tensor::from_slice(&device, &[1.0f32, 1.0, 1.0, 1.0, 1.0, 1.0, 0.0, 0.0], [2, 1, 1, 4]);
        let causal = Tensor::ones(&device, [3, 3], DType::F32).tril(0);
        let x = values(&device, 100, [2, 3, 6], 1.0).requires_grad();
        let memory = values(&device, 102, [2, 4, 6], 1.0).requires_grad();
        let y = layer.forward_to(&x, &memory, [Some(&causal), Some(&seen)], &mut Ctx::eval());
        same_outputs(case, &y, golden);
        let grads = (&y * values(&device, 101, [2, 3, 6], 1.0)).sum_all().backward();
        same(&format!("{case}, gradient of the input"), norm(grads.get(&x).unwrap()), &golden["input"]);
        same(
            &format!("{case}, gradient of the memory"),
            norm(grads.get(&memory).unwrap()),
            &golden["memory"],
        );
        same_parameters(case, &parameters, golden);
    }
}

#[test]
fn what_fills_up_a_sample_changes_nothing_of_it() {
    let device = Device::cpu(1);
    let mut layer = TransformerEncoderLayer::new(TransformerLayerConfig { dropout: 0.2, ..CONFIG });
    let _parameters = Parameters::build(&mut layer, &device, 1);
    let ctx = || Ctx::train(3, 5, [7].into());
    let x = values(&device, 1, [1, 3, 6], 1.0);
    let alone = layer.forward_masked(&x, None, &mut Ctx::eval()).to_vec::<f32>();
    let filled = Tensor::cat(&[&x, &values(&device, 2, [1, 2, 6], 1e3)], 1);
    let mask = Tensor::from_slice(&device, &[1.0f32, 1.0, 1.0, 0.0, 0.0], [1, 1, 1, 5]);
    let beside = layer.forward_masked(&filled, Some(&mask), &mut Ctx::eval()).to_vec::<f32>();
    assert!(alone.iter().zip(&beside).all(|(a, b)| (a - b).abs() < 1e-6), "{alone:?} {beside:?}");
    // In training the same pass has the same masks, and others than an evaluation.
    let [once, again] = [0, 1].map(|_| layer.forward(&x, &mut ctx()).to_vec::<f32>());
    assert_eq!(once, again);
    assert_ne!(once, alone);
}

/// The message of the panic that `f` ends with.
fn panic_of<R>(f: impl FnOnce() -> R) -> String {
    let panic = std::panic::catch_unwind(std::panic::AssertUnwindSafe(f)).err().expect("it panics");
    panic.downcast_ref::<String>().expect("a message").clone()
}

#[test]
fn what_a_layer_does_not_take_is_told_with_what_it_would() {
    let device = Device::cpu(1);
    let mut layer = MultiheadAttention::new(6, 2, 0.0);
    let _parameters = Parameters::build(&mut layer, &device, 1);
    let zeros = |shape: &[usize]| Tensor::zeros(&device, shape, DType::F32);
    let to = |x: &[usize], memory: &[usize]| {
        panic_of(|| layer.forward_to(&zeros(x), &zeros(memory), None, &mut Ctx::eval()))
    };
    let flat = panic_of(|| layer.forward(&zeros(&[5, 6]), &mut Ctx::eval()));
    for (message, parts) in [
        (to(&[2, 5, 6], &[3, 4, 6]), ["2 samples of shape [2, 5, 6]", "3 of shape [3, 4, 6]"]),
        (to(&[2, 5, 8], &[2, 4, 6]), ["shape [2, 5, 8]", "width 6: (B, T, W)"]),
        (to(&[2, 5, 6], &[2, 4, 8]), ["shape [2, 4, 8]", "width 6: (B, S, W)"]),
        (flat, ["shape [5, 6]", "width 6: (B, T, W)"]),
    ] {
        assert!(message.starts_with("MultiheadAttention: "), "{message}");
        assert!(parts.iter().all(|part| message.contains(part)), "{message}");
    }
}
