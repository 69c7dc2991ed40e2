//! The models against PyTorch's, filled by the same formula. `golden/models.py` made the figures.

mod unit;

use phalanx_nn::models::{Autoencoder, MnistHpcNet, MnistNet};
use phalanx_nn::{Ctx, Loss, Module, Parameters};
use phalanx_tensor::{Device, Tensor};
use unit::unit;

/// Float32 rounding through up to six layers, relative to the largest of 1 and the figure.
const TOLERANCE: f64 = 2e-5;

fn fill(parameters: &Parameters) {
    for k in 0..parameters.names().len() {
        let shape = *parameters.layout().shape(k);
        let fan_in = if shape.n_dims() > 1 { shape.dims()[1..].iter().product() } else { 100 };
        let scale = (3.0 / fan_in as f64).sqrt();
        let first: Vec<f32> = (0..shape.count() as u64).map(|i| (unit(k as u64, i) * scale) as f32).collect();
        let value = parameters.value(k);
        value.copy_from(&Tensor::from_slice(value.device(), &first, shape));
    }
}

#[track_caller]
fn same(what: &str, got: f64, want: &serde_json::Value) {
    let want = want.as_f64().unwrap();
    assert!((got - want).abs() <= TOLERANCE * want.abs().max(1.0), "{what}: {got}, PyTorch {want}");
}

#[track_caller]
fn check(name: &str, mut model: impl Module, count: usize, loss: impl Fn(&Tensor, &Tensor) -> Tensor) {
    let golden: serde_json::Value = serde_json::from_str(include_str!("golden/models.json")).unwrap();
    let golden = &golden[name];
    let device = Device::cpu(2);
    let parameters = Parameters::build(&mut model, &device, 0);
    assert_eq!(parameters.count(), count, "{name}");
    fill(&parameters);
    let pixels: Vec<f32> = (0..3 * 784).map(|i| ((unit(1000, i) + 1.0) / 2.0) as f32).collect();
    let x = Tensor::from_slice(&device, &pixels, [3, 1, 28, 28]);
    let y = model.forward(&x, &mut Ctx::eval());
    let first_ten = y.narrow(1, 0, 10).to_vec::<f32>();
    for (i, (got, want)) in first_ten.iter().zip(golden["output"].as_array().unwrap()).enumerate() {
        same(&format!("{name}, output {i}"), f64::from(*got), want);
    }
    let loss = loss(&y, &x);
    same(&format!("{name}, loss"), loss.item(), &golden["loss"]);
    loss.backward();
    let want = golden["parameters"].as_array().unwrap();
    assert_eq!(parameters.names().len(), want.len(), "{name}");
    for (i, (parameter, want)) in parameters.names().iter().zip(want).enumerate() {
        assert_eq!(*parameter, want[0].as_str().unwrap(), "{name}");
        let shape = serde_json::json!(parameters.layout().shape(i).dims());
        assert_eq!(shape, want[1], "{name}, {parameter}");
        let grad = parameters.grads().arena().tensor(i).to_vec::<f32>();
        let norm = grad.iter().map(|&g| f64::from(g) * f64::from(g)).sum::<f64>().sqrt();
        same(&format!("{name}, gradient of {parameter}"), norm, &want[2]);
    }
}

#[test]
fn models_have_pytorchs_names_shapes_outputs_and_gradients() {
    let nll = |y: &Tensor, _: &Tensor| Loss::Nll.of(y, &Tensor::from_slice(y.device(), &[0i64, 7, 3], [3]));
    check("mnist", MnistNet::new(0.5), 21_840, nll);
    check("mnist_hpc", MnistHpcNet::new(0.5), 1_199_882, nll);
    let mse = |y: &Tensor, x: &Tensor| Loss::Mse.of(y, &x.flatten_from(1));
    check("autoencoder", Autoencoder::new(), 222_384, mse);
}
