//! Files of weights shared with PyTorch, both ways.

use phalanx_nn::models::MnistNet;
use phalanx_nn::{Ctx, Module, Parameters, Weights};
use phalanx_tensor::{Device, Tensor, no_grad};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Float32 rounding through four layers, on log-probabilities of about -3.
const TOLERANCE: f32 = 2e-6;

fn golden(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden").join(name)
}

/// The first eight MNIST test images, normalised.
fn images(device: &Device) -> Tensor {
    let pixels = std::fs::read(golden("first8-images")).unwrap();
    let values: Vec<f32> = pixels.iter().map(|&p| (f32::from(p) / 255.0 - 0.1307) / 0.3081).collect();
    Tensor::from_slice(device, &values, [8, 1, 28, 28])
}

fn log_probabilities() -> Vec<f32> {
    let json: serde_json::Value =
        serde_json::from_slice(&std::fs::read(golden("logits.json")).unwrap()).unwrap();
    let rows = json["log_probabilities"].as_array().unwrap();
    rows.iter().flat_map(|row| row.as_array().unwrap()).map(|x| x.as_f64().unwrap() as f32).collect()
}

fn loaded(device: &Device) -> (MnistNet, Parameters) {
    let mut net = MnistNet::new(0.5);
    let parameters = Parameters::build(&mut net, device, 0);
    parameters.load(&Weights::read(&golden("mnistnet.safetensors")).unwrap()).unwrap();
    (net, parameters)
}

#[test]
fn pytorch_weights_give_pytorch_outputs() {
    let device = Device::cpu(2);
    let (net, _) = loaded(&device);
    let got = no_grad(|| net.forward(&images(&device), &mut Ctx::eval())).to_vec::<f32>();
    for (i, (got, want)) in got.iter().zip(log_probabilities()).enumerate() {
        assert!((got - want).abs() < TOLERANCE, "output {i}: {got}, PyTorch {want}");
    }
}

#[test]
fn pytorch_reads_our_weights() {
    let python = std::env::var("PHALANX_TEST_PYTHON").unwrap_or("python3".into());
    let has = Command::new(&python).args(["-c", "import torch, safetensors.torch"]).output();
    if !has.is_ok_and(|out| out.status.success()) {
        // Not println, which a passing test keeps to itself.
        let why = format!("{python} has no torch and safetensors; set PHALANX_TEST_PYTHON to one that has");
        writeln!(std::io::stderr(), "skipped: pytorch_reads_our_weights: {why}").unwrap();
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("ours.safetensors");
    loaded(&Device::cpu(1)).1.to_weights().save(&path).unwrap();
    let script = "
import json, sys, torch, torch.nn.functional as F, safetensors.torch
w = safetensors.torch.load_file(sys.argv[1])
x = torch.frombuffer(bytearray(open(sys.argv[2], 'rb').read()), dtype=torch.uint8).float().div(255).sub(0.1307).div(0.3081).view(8, 1, 28, 28)
x = F.relu(F.max_pool2d(F.conv2d(x, w['conv1.weight'], w['conv1.bias']), 2))
x = F.relu(F.max_pool2d(F.conv2d(x, w['conv2.weight'], w['conv2.bias']), 2)).flatten(1)
x = F.relu(F.linear(x, w['fc1.weight'], w['fc1.bias']))
print(json.dumps(F.log_softmax(F.linear(x, w['fc2.weight'], w['fc2.bias']), 1).flatten().tolist()))
";
    let out =
        Command::new(&python).args(["-c", script]).arg(&path).arg(golden("first8-images")).output().unwrap();
    assert!(out.status.success(), "{}", String::from_utf8_lossy(&out.stderr));
    let got: Vec<f32> = serde_json::from_slice(&out.stdout).unwrap();
    assert_eq!(got.len(), 80);
    assert!(got.iter().zip(log_probabilities()).all(|(g, w)| (g - w).abs() < TOLERANCE));
}
