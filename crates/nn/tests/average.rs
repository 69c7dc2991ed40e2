//! The running mean of weights against PyTorch's, whose figures `golden/average.py` made.

use phalanx_nn::{Average, BatchNorm2d, Conv2d, Parameters, Sequential, Weights};
use phalanx_tensor::Device;

/// Rounding of float32 over five steps, on values of about 1.
const TOLERANCE: f32 = 2e-6;

fn model() -> Parameters {
    let mut net = Sequential::new().then(Conv2d::new(1, 2, 1).without_bias()).then(BatchNorm2d::new(2));
    Parameters::build(&mut net, &Device::cpu(1), 0)
}

/// The arrays under `golden` with the names and shapes of the model.
fn weights(parameters: &Parameters, golden: &serde_json::Value) -> Weights {
    let like = parameters.to_weights();
    let mut weights = Weights::default();
    for name in like.names() {
        let values: Vec<f32> =
            golden[name].as_array().unwrap().iter().map(|x| x.as_f64().unwrap() as f32).collect();
        weights.push(name.to_owned(), *like.get(name).unwrap().0, &values);
    }
    weights
}

#[test]
fn weights_and_statistics_are_averaged_as_pytorch_does() {
    let golden: Vec<serde_json::Value> = serde_json::from_str(include_str!("golden/average.json")).unwrap();
    let parameters = model();
    let mut average: Option<Average> = None;
    for (i, step) in golden.iter().enumerate() {
        let now = weights(&parameters, &step["net"]);
        parameters.load(&now).unwrap();
        match &mut average {
            None => average = Some(Average::of(&parameters)),
            Some(average) => average.update(&parameters, 0.9),
        }
        let (got, want) =
            (average.as_mut().unwrap().to_weights(&parameters), weights(&parameters, &step["average"]));
        assert_eq!(parameters.to_weights(), now, "what was swapped in is swapped out");
        for name in want.names() {
            for (got, want) in got.get(name).unwrap().1.iter().zip(want.get(name).unwrap().1) {
                assert!((got - want).abs() <= TOLERANCE, "step {i}, {name}: {got}, PyTorch {want}");
            }
        }
    }
    assert_eq!(golden.len(), 5);
}

#[test]
fn an_average_goes_on_from_a_file() {
    let parameters = model();
    let mut average = Average::of(&parameters);
    parameters.value(0).fill(3.0);
    average.update(&parameters, 0.5);
    let saved = average.to_weights(&parameters);
    let mut resumed = Average::resume(&parameters, &saved).unwrap();
    parameters.value(0).fill(-1.0);
    for average in [&mut average, &mut resumed] {
        average.update(&parameters, 0.5);
    }
    assert_eq!(resumed.to_weights(&parameters), average.to_weights(&parameters));
    let error = Average::resume(&parameters, &Weights::default()).err().unwrap().to_string();
    assert!(error.contains("missing: 0.weight"), "{error}");
}
