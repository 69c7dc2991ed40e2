//! `phalanx train` on colour images: files of the form of CIFAR-10 that hold patterns a network can learn, and folders.

mod user;

use phalanx::data::{CifarSet, write_synthetic_cifar};
use phalanx::nn::models::{ResNet, ResNetDepth, ResNetStem};
use phalanx::nn::{Parameters, Weights};
use phalanx::tensor::Device;
use std::fs;
use std::path::Path;
use std::process::Output;
use user::{events, phalanx, text};

fn train(folder: &Path, args: &[&str]) -> Output {
    let mut command = phalanx(folder);
    command.args(["train"]).args(args).args(["--json", "--out", "run"]).output().unwrap()
}

/// Ten images in each of the six files.
fn images(folder: &Path) {
    write_synthetic_cifar(&folder.join("cifar-10-batches-bin"), CifarSet::Ten, 10).unwrap();
}

#[test]
fn resnet18_learns_to_tell_patterns_apart() {
    let folder = tempfile::tempdir().unwrap();
    images(folder.path());
    let args =
        ["cifar10-resnet18", "--data", ".", "--steps", "20", "--batch-size", "8", "--nproc-per-node", "1"];
    let events = events(&train(folder.path(), &args));
    let losses: Vec<f64> =
        events.iter().filter(|e| e["event"] == "step").map(|e| e["loss"].as_f64().unwrap()).collect();
    let mean = |losses: &[f64]| losses.iter().sum::<f64>() / losses.len() as f64;
    assert_eq!(losses.len(), 20);
    assert!(mean(&losses[15..]) < 0.8 * mean(&losses[..5]), "{losses:?}");
    assert!(events.iter().all(|e| e["skipped"].is_null()), "no image is bad");
}

/// The losses of the steps of a run on the images of this folder.
#[track_caller]
fn losses(folder: &Path, args: &str) -> Vec<f64> {
    let args = format!("{args} --data . --batch-size 8");
    let out = train(folder, &args.split_whitespace().collect::<Vec<_>>());
    assert_eq!(out.status.code(), Some(0), "{args}: {}", text(&out.stderr));
    events(&out).iter().filter(|e| e["event"] == "step").map(|e| e["loss"].as_f64().unwrap()).collect()
}

/// Two convolutions of each block lie on two workers, in one stage or in two, which changes no bit.
#[test]
fn resnet18_is_cut_over_workers() {
    let folder = tempfile::tempdir().unwrap();
    images(folder.path());
    let losses = |mesh: &str| losses(folder.path(), &format!("cifar10-resnet18 --steps 2 {mesh}"));
    let want = losses("--nproc-per-node 1");
    let two = losses("--nproc-per-node 2 --set parallel.tensor=2");
    let pipeline = "--set parallel.pipeline=2 --set parallel.micro_batches=1";
    assert_eq!(losses(&format!("--nproc-per-node 4 --set parallel.tensor=2 {pipeline}")), two);
    // Roundings of the first step move the second loss.
    assert!((two[0] - want[0]).abs() < 1e-5 && (two[1] - want[1]).abs() < 5e-3, "{two:?}, not {want:?}");
}

/// Blocks on two devices, in turn or as a pipeline, and on two workers: the bits of one device, as far as batch norms see the same.
#[test]
fn resnet18_lies_on_two_devices_or_goes_through_them() {
    let folder = tempfile::tempdir().unwrap();
    images(folder.path());
    let losses = |args: &str| losses(folder.path(), &format!("{args} --steps 3 --set train.threads=2"));
    let whole = losses("cifar10-resnet18 --nproc-per-node 1");
    assert_eq!(whole.len(), 3);
    let recipe = "cifar10-resnet18-model-parallel";
    assert_eq!(losses(&format!("{recipe} --nproc-per-node 1")), whole);
    let parts = |n: usize| format!("--set parallel.micro_batches={n}");
    let devices =
        |n| losses(&format!("cifar10-resnet18 --nproc-per-node 1 --strategy pipeline {}", parts(n)));
    let workers =
        |n| losses(&format!("cifar10-resnet18 --nproc-per-node 2 --set parallel.pipeline=2 {}", parts(n)));
    assert_eq!((devices(1), workers(1)), (whole.clone(), whole));
    assert_eq!(devices(4), workers(4));
}

/// Blocks are measured by the workers, who would find the same if they were started again.
#[test]
fn stages_that_may_not_take_as_much_as_a_block_does_end_the_run_at_once() {
    let folder = tempfile::tempdir().unwrap();
    images(folder.path());
    for set in ["--strategy pipeline", "--nproc-per-node 2 --set parallel.pipeline=2"] {
        let args = format!("cifar10-resnet18 --data . --batch-size 8 --set parallel.stage_mb=10 {set}");
        let out = train(folder.path(), &args.split_whitespace().collect::<Vec<_>>());
        let said = text(&out.stderr);
        assert_eq!(out.status.code(), Some(1), "{said}");
        assert!(said.contains("no cut into 2 stages fits 10485760 bytes a stage"), "{said}");
        assert!(said.contains("another worker would fail in the same way"), "{said}");
        assert!(!said.contains("starting all workers again"), "{said}");
    }
}

#[test]
fn a_batch_of_one_image_is_refused_before_the_run_where_batch_norm_sees_one_pixel_of_it() {
    let folder = tempfile::tempdir().unwrap();
    images(folder.path());
    let run = |workers: &str, batch: &str, more: &[&str]| {
        let args = ["cifar10-resnet18", "--data", ".", "--nproc-per-node", workers, "--batch-size", batch];
        train(folder.path(), &[&args[..], &["--epochs", "1"], more].concat())
    };
    let refused = |workers: &str, batch: &str, words: &[&str]| {
        let out = run(workers, batch, &[]);
        let message = text(&out.stderr);
        assert_eq!((out.status.code(), out.stdout.len()), (Some(1), 0), "{message}");
        assert!(words.iter().all(|word| message.contains(word)), "{message}");
    };
    let last =
        "the last batch of an epoch has 1 sample, of which this model's batch norm sees 1 value per channel";
    refused(
        "1",
        "7",
        &["error: 50 samples in batches of 7 on 1 rank: ", last, "hint: ", "train.drop_last=true"],
    );
    refused(
        "2",
        "8",
        &["error: 50 samples in batches of 8 on 2 ranks: ", last, "parallel.sync_batch_norm=true"],
    );
    refused("1", "1", &["batches of 1 on 1 rank: each batch has 1 sample", "a --batch-size of at least 2"]);
    // Blocks that are shared out by how long they take are measured before that is known.
    for (strategy, batch, words) in [
        ("place", "1", "each batch has 1 sample"),
        ("pipeline", "4", "one of the 4 parts that each batch falls into has 1 sample"),
        ("pipeline", "22", "one of the 4 parts that the last batch of an epoch falls into has 1 sample"),
    ] {
        let out = run("1", batch, &["--strategy", strategy]);
        let message = text(&out.stderr);
        assert_eq!(out.status.code(), Some(1), "{message}");
        assert!(
            message.contains(words) && message.contains("hint: take a") && !message.contains("panicked"),
            "{message}"
        );
    }
    let steps = |out: &Output| events(out).iter().filter(|e| e["event"] == "step").count();
    assert_eq!(steps(&run("1", "7", &["--set", "train.drop_last=true"])), 7);
    assert_eq!(steps(&run("2", "8", &["--set", "parallel.sync_batch_norm=true"])), 4);
    // Neither a run that ends before nor a network that sees four pixels of such an image minds.
    assert_eq!(steps(&run("1", "7", &["--steps", "7"])), 7);
    assert_eq!(steps(&run("1", "49", &["--set", "data.size=64"])), 2);
}

#[test]
fn bad_images_end_a_run_or_are_counted() {
    let folder = tempfile::tempdir().unwrap();
    images(folder.path());
    let file = folder.path().join("cifar-10-batches-bin/data_batch_2.bin");
    let mut bytes = fs::read(&file).unwrap();
    bytes[3 * 3073] = 10;
    fs::write(&file, &bytes).unwrap();
    let args = "cifar10-resnet18 --data . --epochs 1 --batch-size 25 --set data.mixup=0.2 --set train.watch=accuracy";
    let args: Vec<&str> = args.split_whitespace().collect();
    let out = train(folder.path(), &args);
    let message = text(&out.stderr);
    assert_eq!(out.status.code(), Some(1), "{message}");
    for part in ["data_batch_2.bin: label of image 3 out of range", "found: 10", "--skip-bad"] {
        assert!(message.contains(part), "{part} in: {message}");
    }
    let events = events(&train(folder.path(), &[&args[..], &["--skip-bad"]].concat()));
    let epoch = events.iter().find(|e| e["event"] == "epoch").unwrap();
    // Once in its own place, and perhaps as a partner in a mixture.
    assert!((1..5).contains(&epoch["skipped"].as_u64().unwrap()), "{epoch}");
    fs::write(&file, &bytes[1..]).unwrap();
    let message = text(&train(folder.path(), &args).stderr);
    assert!(message.contains("data_batch_2.bin: not a whole number of images"), "{message}");
}

#[test]
fn folders_of_images_are_trained_on_and_bad_ones_counted() {
    const JPEG: &[u8] = include_bytes!("../../data/tests/golden/baseline.jpg");
    const PNG: &[u8] = include_bytes!("../../data/tests/golden/bits.png");
    let folder = tempfile::tempdir().unwrap();
    for part in ["train", "val"] {
        for (class, kind, bytes) in [("colour", "jpg", JPEG), ("plain", "png", PNG)] {
            let class = folder.path().join("images").join(part).join(class);
            fs::create_dir_all(&class).unwrap();
            (0..6).for_each(|i| fs::write(class.join(format!("{i}.{kind}")), bytes).unwrap());
        }
    }
    let recipe = "data.name=image-folder data.size=32 data.jitter=[0.2,0.2,0.2,0.1] data.crop_area=0.5";
    let settings: Vec<&str> = recipe.split(' ').flat_map(|setting| ["--set", setting]).collect();
    let train = |head: &str, more: &[&str]| {
        let head = format!("model.head={head}");
        let fixed = ["cifar10-resnet18", "--data", "images", "--batch-size", "6", "--set", &head];
        train(folder.path(), &[&fixed, &settings[..], more].concat())
    };
    // All twelve images a step: batch norms of fewer are too noisy for an accuracy after so few steps to mean anything.
    let events = user::events(&train("2", &["--epochs", "10"]));
    let last = events.iter().rfind(|e| e["event"] == "epoch").unwrap();
    assert!(last["test_accuracy"].as_f64().unwrap() > 0.9, "colour and plain are easy to tell apart: {last}");
    let few = train("1", &[]);
    let message = text(&few.stderr);
    assert!(message.contains("model.head must be at least 2, the classes of the images"), "{message}");
    fs::write(folder.path().join("images/train/colour/3.jpg"), &JPEG[..900]).unwrap();
    let message = text(&train("2", &["--epochs", "1"]).stderr);
    assert!(message.contains("colour/3.jpg: the JPEG is cut off"), "{message}");
    let events = user::events(&train("2", &["--skip-bad", "--epochs", "1"]));
    let epoch = events.iter().find(|e| e["event"] == "epoch").unwrap();
    assert_eq!(epoch["skipped"], 1, "{epoch}");
}

#[test]
fn a_trained_network_gets_a_new_head() {
    let folder = tempfile::tempdir().unwrap();
    images(folder.path());
    let mut imagenet = ResNet::new(ResNetDepth::D18, ResNetStem::Imagenet, 1000);
    let weights = Parameters::build(&mut imagenet, &Device::cpu(1), 7).to_weights();
    weights.save(&folder.path().join("resnet18.safetensors")).unwrap();
    let args =
        "cifar10-resnet18 --data . --steps 1 --batch-size 4 --nproc-per-node 2 --init resnet18.safetensors";
    let args: Vec<&str> = args.split(' ').chain(["--set", "optimizer.lr=0"]).collect();
    let out = train(folder.path(), &args);
    let message = text(&out.stderr);
    assert_eq!(out.status.code(), Some(1), "{message}");
    for part in ["fc.weight is [1000, 512] in the file and [10, 512] in the model", "--set model.head=10"] {
        assert!(message.contains(part), "{message}");
    }
    let out = train(folder.path(), &[&args[..], &["--set", "model.head=10"]].concat());
    let message = text(&out.stderr);
    let told = "resnet18.safetensors: all its weights but fc.weight and fc.bias, which start anew";
    assert_eq!(message.matches(told).count(), 1, "{message}");
    events(&out);
    // With a learning rate of 0 the first step leaves all as it was.
    let saved = Weights::read(&folder.path().join("run/model.safetensors")).unwrap();
    assert_eq!(saved.get("layer4.1.conv2.weight"), weights.get("layer4.1.conv2.weight"));
    assert_eq!(saved.get("fc.weight").unwrap().0.dims(), [10, 512]);
}
