//! `phalanx train --logical-shards`: any number of workers trains the same model, bit for bit.

mod user;

use nix::sys::signal::{self, Signal};
use nix::unistd::Pid;
use phalanx::data::{CifarSet, write_synthetic_cifar};
use serde_json::Value;
use std::fs;
use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Output, Stdio};
use user::{phalanx, text};

fn train(folder: &Path, out: &str, args: &[&str]) -> Output {
    let mut command = phalanx(folder);
    command.arg("train").args(args).args(["--json", "--save-optimizer", "--out", out]).output().unwrap()
}

/// What a run left that may not depend on who made it: files, and what was told but for times and workers.
#[derive(PartialEq)]
struct Left {
    files: Vec<Vec<u8>>,
    told: Vec<String>,
}

/// What the run in `folder/out` left, which ended well.
fn left(folder: &Path, out: &str, ended: &Output) -> Left {
    assert_eq!(ended.status.code(), Some(0), "{}", text(&ended.stderr));
    let read = |name: &str| fs::read(folder.join(out).join(name)).unwrap();
    let names = ["model.safetensors", "optimizer.safetensors", "model_ema.safetensors"];
    let files =
        names.iter().filter(|name| folder.join(out).join(name).exists()).map(|name| read(name)).collect();
    let keys =
        ["event", "step", "loss", "samples", "lr", "grad_norm", "test_loss", "test_accuracy", "test_top5"];
    let events = text(&read("events.jsonl"));
    let events = events.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
    let told = events.filter(|event| event["event"] == "step" || event["event"] == "epoch");
    let told = told.map(|event| keys.map(|key| event[key].to_string()).join(" ")).collect();
    Left { files, told }
}

/// Trains on one worker and on 2, 3 and 4, whose results must be the same; gives how many steps and epochs were told.
fn same_on_all_worlds(folder: &Path, args: &[&str]) -> usize {
    let run = |workers: &str, out: &str, more: &[&str]| {
        let args = [args, &["--logical-shards", "4", "--nproc-per-node", workers], more].concat();
        left(folder, out, &train(folder, out, &args))
    };
    let alone = run("1", "alone", &["--set", "train.threads=3"]);
    for workers in ["2", "3", "4"] {
        let together = run(workers, workers, &[]);
        assert_eq!(together.told, alone.told, "{workers} workers");
        assert!(together.files == alone.files, "{workers} workers");
    }
    assert!(alone.files.len() >= 2);
    alone.told.len()
}

#[test]
fn digits_with_dropout_are_learned_in_the_same_bits_by_1_to_4_workers() {
    let folder = tempfile::tempdir().unwrap();
    let args = ["mnist-mini", "--epochs", "1", "--batch-size", "27", "--set", "train.ema=0.9"];
    let args = [&args[..], &["--set", "optimizer.name=adamw", "--set", "train.clip_norm=0.5"]].concat();
    assert_eq!(same_on_all_worlds(folder.path(), &args), 19 + 1);
}

#[test]
fn images_with_augmentation_and_batch_norm_are_learned_in_the_same_bits_by_1_to_4_workers() {
    let folder = tempfile::tempdir().unwrap();
    write_synthetic_cifar(&folder.path().join("cifar-10-batches-bin"), CifarSet::Ten, 13).unwrap();
    // Of an epoch of 65 images the last step has 1, so three shards are empty.
    let args = ["cifar10-fast", "--data", ".", "--steps", "7", "--batch-size", "4", "--set"];
    assert_eq!(same_on_all_worlds(folder.path(), &[&args[..], &["data.size=16"]].concat()), 7 + 2);
}

#[test]
fn a_run_goes_on_in_the_same_bits_with_other_workers() {
    let folder = tempfile::tempdir().unwrap();
    let run = |out: &str, workers: &str, steps: &str| {
        let args =
            ["mnist-mini", "--logical-shards", "4", "--batch-size", "16", "--resume", "--nproc-per-node"];
        let args = [&args[..], &[workers, "--steps", steps, "--set", "train.checkpoint_every=4"]].concat();
        left(folder.path(), out, &train(folder.path(), out, &args))
    };
    let whole = run("whole", "1", "40");
    for (workers, steps) in [("2", "9"), ("3", "25"), ("1", "33")] {
        run("parts", workers, steps);
    }
    let parts = run("parts", "4", "40");
    assert!(parts.files == whole.files);
    let epoch = |told: &str| told.starts_with("\"epoch\"");
    let steps = |left: &Left| left.told.iter().filter(|told| !epoch(told)).cloned().collect::<Vec<_>>();
    assert_eq!(steps(&parts), steps(&whole));
    let other = ["mnist-mini", "--logical-shards", "2", "--batch-size", "32", "--resume", "--steps", "50"];
    let refused = train(folder.path(), "parts", &other);
    let said = text(&refused.stderr);
    assert_eq!(refused.status.code(), Some(1), "{said}");
    assert!(said.contains("logical shards: 4, and this run has 2"), "{said}");
    assert!(said.contains("hint: go on with --logical-shards 4"), "{said}");
}

/// Kills the worker that was started as this rank last.
fn kill(out: &Path, rank: u32) {
    signal::kill(Pid::from_raw(user::worker(out, rank)), Signal::SIGKILL).unwrap();
}

#[test]
#[cfg(target_os = "linux")]
fn workers_that_are_killed_change_no_bit() {
    let folder = tempfile::tempdir().unwrap();
    write_synthetic_cifar(&folder.path().join("cifar-10-batches-bin"), CifarSet::Ten, 40).unwrap();
    let training = |out: &'static str, workers: &'static str| {
        let args = ["train", "cifar10-fast", "--data", ".", "--epochs", "2", "--batch-size", "4", "--json"];
        let more = ["--set", "data.size=8", "--logical-shards", "4", "--save-optimizer", "--nproc-per-node"];
        let mut command = phalanx(folder.path());
        command.args(args).args(more).args([workers, "--out", out]);
        command
    };
    let whole = left(folder.path(), "whole", &training("whole", "1").output().unwrap());
    let mut agent = training("killed", "3").stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let lines = BufReader::new(agent.stdout.take().unwrap()).lines();
    for line in lines {
        let event: Value = serde_json::from_str(&line.unwrap()).unwrap();
        match (event["event"] == "step", event["step"].as_u64()) {
            (true, Some(4)) => kill(&folder.path().join("killed"), 1),
            (true, Some(15)) => kill(&folder.path().join("killed"), 2),
            _ => {}
        }
    }
    let killed = left(folder.path(), "killed", &agent.wait_with_output().unwrap());
    assert!(killed.files == whole.files);
    assert_eq!(killed.told, whole.told);
}

#[test]
fn shards_that_cannot_be_are_refused_at_once() {
    let folder = tempfile::tempdir().unwrap();
    let check = |args: &[&str], code: i32, words: &[&str]| {
        let out = train(folder.path(), "run", &[&["mnist-mini"], args].concat());
        let said = text(&out.stderr);
        assert_eq!((out.status.code(), out.stdout.len()), (Some(code), 0), "{said}");
        assert!(words.iter().all(|word| said.contains(word)), "{said}");
        assert!(!folder.path().join("run").exists());
    };
    let many = ["--logical-shards", "2", "--nproc-per-node", "3"];
    check(
        &many,
        2,
        &["--nproc-per-node 3: each worker needs a logical shard, of which there are 2", "hint: take 3 or"],
    );
    check(
        &["--logical-shards", "0"],
        2,
        &["parallel.logical_shards must be a whole number from 1 to 65536, got: 0"],
    );
    for (setting, words) in [
        ("train.accumulate=2", "train.accumulate must be 1 beside parallel.logical_shards, got: 2"),
        ("parallel.sync_batch_norm=true", "parallel.sync_batch_norm must be false beside"),
        ("parallel.compress=bf16", "parallel.compress must be \"none\" beside"),
    ] {
        check(&["--logical-shards", "4", "--set", setting], 2, &[words]);
    }
}

#[test]
fn a_shard_of_one_image_is_refused_where_batch_norm_sees_one_pixel_of_it() {
    let folder = tempfile::tempdir().unwrap();
    write_synthetic_cifar(&folder.path().join("cifar-10-batches-bin"), CifarSet::Ten, 10).unwrap();
    let run = |batch: &str| {
        let args = ["cifar10-resnet18", "--data", ".", "--nproc-per-node", "2", "--logical-shards", "4"];
        train(folder.path(), "run", &[&args[..], &["--epochs", "1", "--batch-size", batch]].concat())
    };
    // Of 50 images 2 are left after steps of 16, and none after steps of 100.
    let refused = run("4");
    let said = text(&refused.stderr);
    assert_eq!(refused.status.code(), Some(1), "{said}");
    let words = [
        "50 samples in batches of 4 on 4 logical shards: the last batch of an epoch has 1 sample",
        "drop_last",
    ];
    assert!(words.iter().all(|word| said.contains(word)) && !said.contains("sync_batch_norm"), "{said}");
    assert_eq!(run("25").status.code(), Some(0));
}
