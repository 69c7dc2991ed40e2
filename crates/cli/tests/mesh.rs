//! Replicas that lie on several workers: `parallel.tensor`, `parallel.pipeline`, `parallel.context`, `parallel.shard`, and what is
//! computed again.

mod user;

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use phalanx::nn::Weights;
use serde_json::Value;
use std::fs;
use std::path::Path;
use std::process::Stdio;
use std::time::Duration;
use user::{await_checkpoint, phalanx, worker};

const LIMIT: Duration = Duration::from_secs(240);

/// Float32 sums in another order, over some steps, on losses of about 5.
const TOLERANCE: f64 = 1e-4;
const STEPS: usize = 5;

/// A folder with a text to learn.
fn folder() -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    let text = "what is said by many at once is said by none of them alone. ".repeat(400);
    fs::write(folder.path().join("text"), text).unwrap();
    folder
}

/// The losses of a small language model's steps of eight samples, with dropout on.
fn train(folder: &Path, out: &str, more: &str) -> Vec<f64> {
    let model = "--set model.layers=2 --set model.width=32 --set model.context=16 --set model.dropout=0.2";
    let rest = "--set train.clip_norm=0.5 --log-interval 1 --json --data text";
    let args = format!("train gpt {model} {rest} --out {out} {more}");
    let ran = phalanx(folder).args(args.split_whitespace()).output().unwrap();
    assert_eq!(ran.status.code(), Some(0), "{args}: {}", user::text(&ran.stderr));
    losses(&ran.stdout)
}

/// The losses of the steps that a run tells of.
fn losses(told: &[u8]) -> Vec<f64> {
    let told = user::text(told);
    let events = told.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
    events.filter(|event| event["event"] == "step").map(|step| step["loss"].as_f64().unwrap()).collect()
}

#[track_caller]
fn check_close(what: &str, got: &[f64], want: &[f64]) {
    let close = got.iter().zip(want).all(|(got, want)| (got - want).abs() < TOLERANCE);
    assert!(got.len() == want.len() && close, "{what}: {got:?}, not {want:?}");
}

#[test]
fn four_workers_learn_what_one_learns_however_the_model_lies_on_them() {
    let folder = folder();
    for (tied, meshes) in [
        (
            "",
            &[
                "--batch-size 4 --set parallel.tensor=2",
                "--batch-size 4 --set parallel.tensor=2 --set parallel.sequence=true --strategy fsdp",
                "--batch-size 2 --strategy fsdp --set parallel.shard=2",
                "--batch-size 8 --set parallel.tensor=4 --set parallel.recompute=blocks",
                "--batch-size 4 --set parallel.pipeline=2",
                "--batch-size 4 --set parallel.pipeline=2 --strategy fsdp",
                "--batch-size 4 --set parallel.context=2",
                "--batch-size 8 --set parallel.context=4 --strategy fsdp",
                "--batch-size 8 --set parallel.context=2 --set parallel.tensor=2 --set parallel.sequence=true",
                "--batch-size 8 --set parallel.context=2 --set parallel.pipeline=2",
            ][..],
        ),
        (
            "--set model.tied=false",
            &[
                "--batch-size 4 --set parallel.pipeline=2 --set parallel.cut=2,2",
                "--batch-size 4 --set parallel.pipeline=2 --strategy fsdp",
                "--batch-size 8 --set parallel.pipeline=2 --set parallel.tensor=2 --set parallel.micro_batches=2",
            ],
        ),
    ] {
        let one = format!("--nproc-per-node 1 --steps {STEPS} --batch-size 8 {tied}");
        let want = train(folder.path(), &format!("one{}", tied.len()), &one);
        assert_eq!(want.len(), STEPS);
        for (i, mesh) in meshes.iter().enumerate() {
            let four = format!("--nproc-per-node 4 --steps {STEPS} {tied} {mesh}");
            let out = format!("four{}-{i}", tied.len());
            check_close(mesh, &train(folder.path(), &out, &four), &want);
            let weights =
                |out: &str| fs::metadata(folder.path().join(out).join("model.safetensors")).unwrap().len();
            assert_eq!(
                weights(&out),
                weights(&format!("one{}", tied.len())),
                "{mesh}: the whole model is saved"
            );
        }
    }
}

#[test]
fn digits_are_learned_by_workers_that_have_a_part_of_the_dense_layers() {
    let folder = tempfile::tempdir().unwrap();
    let train = |out: &str, more: &str| -> Vec<f64> {
        let args = format!("train mnist-mini --steps {STEPS} --log-interval 1 --json --out {out} {more}");
        let ran = phalanx(folder.path()).args(args.split_whitespace()).output().unwrap();
        assert_eq!(ran.status.code(), Some(0), "{args}: {}", user::text(&ran.stderr));
        losses(&ran.stdout)
    };
    let want = train("one", "--nproc-per-node 1 --batch-size 8");
    assert_eq!(want.len(), STEPS);
    for mesh in [
        "--nproc-per-node 2 --batch-size 8 --set parallel.tensor=2",
        "--nproc-per-node 4 --batch-size 8 --set parallel.tensor=2 --set parallel.pipeline=2",
    ] {
        check_close(mesh, &train(&mesh.len().to_string(), mesh), &want);
    }
}

#[test]
fn a_run_goes_on_from_a_checkpoint_of_another_mesh() {
    let folder = folder();
    check_that_meshes_go_on(folder.path(), "");
    let parts = folder.path().join("run/checkpoints");
    let there = fs::read_dir(&parts).unwrap().map(|entry| entry.unwrap().path());
    let steps: Vec<_> = there.filter(|path| path.is_dir()).collect();
    assert!(!steps.is_empty() && steps.iter().all(|step| step.join("model.safetensors").exists()));
}

/// Each worker writes some of the whole parameters, wherever their parts lie.
#[test]
fn a_run_goes_on_from_parts_that_another_mesh_has_written() {
    let folder = folder();
    check_that_meshes_go_on(folder.path(), "--set train.checkpoint=parts");
    let checkpoint = |args: &str| {
        let ran = phalanx(folder.path()).args(["checkpoint"]).args(args.split(' ')).output().unwrap();
        assert_eq!(ran.status.code(), Some(0), "{args}: {}", user::text(&ran.stderr));
        user::text(&ran.stdout)
    };
    // Model, optimizer and mean of each of four workers.
    assert!(checkpoint("verify parts").contains(": whole (12 files, "));
    assert!(checkpoint("show parts").contains("model_ema-00004-of-00004.safetensors"));
    checkpoint("convert parts --out one");
    let one = fs::read_dir(folder.path().join("one")).unwrap().next().unwrap().unwrap().path();
    for file in ["model.safetensors", "model_ema.safetensors"] {
        fs::copy(one.join(file), folder.path().join("one").join(file)).unwrap();
        check_same_weights(folder.path(), file, "one", "parts");
    }
}

/// Goes on from mesh to mesh, which write checkpoints as told, in the folder `run`; what the second has left is in `parts`.
#[track_caller]
fn check_that_meshes_go_on(folder: &Path, parts: &str) {
    let checkpoint = "--set train.checkpoint_every=1 --set model.tied=false --set train.ema=0.8";
    let want =
        train(folder, "whole", &format!("--nproc-per-node 1 --steps {STEPS} --batch-size 8 {checkpoint}"));
    let first =
        "--nproc-per-node 4 --batch-size 8 --set parallel.tensor=2 --set parallel.pipeline=2 --steps 2";
    check_close(first, &train(folder, "run", &format!("{first} {checkpoint} {parts}")), &want[..2]);
    let second =
        "--nproc-per-node 4 --batch-size 4 --set parallel.tensor=2 --strategy fsdp --steps 4 --resume";
    check_close(second, &train(folder, "run", &format!("{second} {checkpoint} {parts}")), &want[2..4]);
    copy_folder(&folder.join("run"), &folder.join("parts"));
    let third = format!("--nproc-per-node 2 --batch-size 4 --steps {STEPS} --resume");
    check_close(&third, &train(folder, "run", &format!("{third} {checkpoint}")), &want[4..]);
    for file in ["model.safetensors", "model_ema.safetensors"] {
        check_same_weights(folder, file, "run", "whole");
    }
}

/// The first worker reads them, and each takes what it holds.
#[test]
fn weights_to_begin_with_come_from_a_file_or_from_parts_however_the_model_lies() {
    let folder = folder();
    let own = "--set model.tied=false";
    let parts = "--nproc-per-node 2 --batch-size 4 --strategy fsdp --set train.checkpoint=parts";
    train(folder.path(), "base", &format!("{parts} --steps 3 --set train.checkpoint_every=1 {own}"));
    let file = "--init base/model.safetensors";
    let want =
        train(folder.path(), "one", &format!("--nproc-per-node 1 --batch-size 8 --steps 3 {own} {file}"));
    for (i, mesh) in [
        format!("--nproc-per-node 2 --batch-size 4 --strategy fsdp {file}"),
        "--nproc-per-node 2 --batch-size 4 --strategy fsdp --init base/checkpoints/step-3".into(),
        format!("--nproc-per-node 4 --batch-size 4 --set parallel.tensor=2 --strategy fsdp {file}"),
        "--nproc-per-node 4 --batch-size 8 --set parallel.tensor=2 --set parallel.pipeline=2 --init base/checkpoints/step-3".into(),
    ]
    .iter()
    .enumerate()
    {
        check_close(mesh, &train(folder.path(), &format!("more-{i}"), &format!("{mesh} --steps 3 {own}")), &want);
    }
    // One that goes on from a checkpoint asks for no file.
    let run = format!(
        "--nproc-per-node 2 --batch-size 4 --strategy fsdp --set train.checkpoint_every=1 {own} {file}"
    );
    train(folder.path(), "goes-on", &format!("{run} --steps 2"));
    fs::remove_file(folder.path().join("base/model.safetensors")).unwrap();
    let rest = train(folder.path(), "goes-on", &format!("{run} --steps 3 --resume"));
    check_close("gone on with", &rest, &want[2..]);
}

fn copy_folder(from: &Path, to: &Path) {
    fs::create_dir(to).unwrap();
    for entry in fs::read_dir(from).unwrap() {
        let (path, name) = entry.map(|entry| (entry.path(), entry.file_name())).unwrap();
        if path.is_dir() {
            copy_folder(&path, &to.join(name));
        } else {
            fs::copy(path, to.join(name)).unwrap();
        }
    }
}

/// It is what is evaluated, wherever its parts lie.
#[test]
fn the_mean_of_the_weights_is_that_of_one_worker_however_the_model_lies() {
    let folder = folder();
    let more = format!("--steps {STEPS} --set model.tied=false --set train.ema=0.7");
    train(folder.path(), "one", &format!("--nproc-per-node 1 --batch-size 8 {more}"));
    let judged = |out: &str| {
        let events = fs::read_to_string(folder.path().join(out).join("events.jsonl")).unwrap();
        let events = events.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
        events.filter_map(|event| event["test_loss"].as_f64()).collect::<Vec<_>>()
    };
    assert_eq!(judged("one").len(), 1);
    for (i, mesh) in [
        "--nproc-per-node 2 --batch-size 4 --strategy fsdp",
        "--nproc-per-node 4 --batch-size 4 --set parallel.tensor=2 --set parallel.sequence=true",
        "--nproc-per-node 4 --batch-size 4 --set parallel.tensor=2 --strategy fsdp --set parallel.zero=2",
        "--nproc-per-node 4 --batch-size 4 --set parallel.pipeline=2 --strategy fsdp",
        "--nproc-per-node 4 --batch-size 4 --set parallel.context=2 --strategy fsdp",
    ]
    .into_iter()
    .enumerate()
    {
        let out = format!("mesh-{i}");
        train(folder.path(), &out, &format!("{mesh} {more}"));
        check_close(mesh, &judged(&out), &judged("one"));
        for file in ["model.safetensors", "model_ema.safetensors"] {
            check_same_weights(folder.path(), file, &out, "one");
        }
    }
}

/// Adam makes much of the rounding of a few gradients that are nearly 0, so weights are held against each other all together. A step
/// moves each by about 0.002, and the mean lags some steps behind.
#[track_caller]
fn check_same_weights(folder: &Path, file: &str, got: &str, want: &str) {
    let [read, wanted] = [got, want].map(|out| Weights::read(&folder.join(out).join(file)).unwrap());
    let values = |weights: &Weights| -> Vec<f32> {
        wanted.names().flat_map(|name| weights.get(name).unwrap().1.to_vec()).collect()
    };
    let (got_values, wanted) = (values(&read), values(&wanted));
    let apart: f64 = got_values.iter().zip(&wanted).map(|(a, b)| f64::from((a - b).abs())).sum();
    let apart = apart / wanted.len() as f64;
    assert!(apart < TOLERANCE, "{got}: {file}: {apart}");
}

/// What a lost worker held is nowhere else, so all go on from the newest checkpoint, and use each sample once.
#[test]
fn a_lost_worker_costs_the_steps_since_the_newest_checkpoint() {
    let folder = folder();
    let out = folder.path().join("out");
    let model = "--set model.layers=1 --set model.width=16 --set model.context=8";
    let mesh = "--nproc-per-node 2 --set parallel.tensor=2 --set train.checkpoint_every=5 --max-restarts 2";
    let args = format!("train gpt --data text {model} {mesh} --epochs 4 --batch-size 16 --out out");
    let mut run = phalanx(folder.path());
    let run = run.args(args.split_whitespace()).stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
    await_checkpoint(&out, LIMIT);
    kill(Pid::from_raw(worker(&out, 1)), Signal::SIGKILL).unwrap();
    let ended = run.wait_with_output().unwrap();
    let said = user::text(&ended.stderr);
    assert_eq!(ended.status.code(), Some(0), "{said}");
    assert!(said.contains("the others go on, another takes its place"), "{said}");
    assert!(!said.contains("exited with code"), "{said}");
    let events = fs::read_to_string(out.join("events.jsonl")).unwrap();
    let told: Vec<Value> = events.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let epochs: Vec<&Value> = told.iter().filter(|event| event["event"] == "epoch").collect();
    assert!(epochs.len() == 4 && epochs.iter().all(|epoch| epoch["each_once"] == true), "{epochs:?}");
    assert!(told.iter().any(|event| event["event"] == "resume"), "{said}");
}

#[test]
fn what_no_mesh_can_be_is_refused_before_anything_starts_with_the_nearest_that_can() {
    let folder = folder();
    let refused = |more: &str, words: &str| {
        let args = format!("train gpt --data text {more}");
        let out = phalanx(folder.path()).args(args.split_whitespace()).output().unwrap();
        let said = user::text(&out.stderr);
        assert!(out.status.code() == Some(2) && said.contains(words), "{more}: {said}");
    };
    refused(
        "--nproc-per-node 4 --set parallel.tensor=3",
        "parallel.tensor: 3, where there are 4 heads\nhint: the nearest that works for 4 ranks is tensor=4",
    );
    refused(
        "--nproc-per-node 3 --set parallel.tensor=2",
        "parallel.tensor=2 are 2 ranks, and 3 are there, which is no multiple",
    );
    refused(
        "--nproc-per-node 8 --set parallel.pipeline=8 --set model.tied=false",
        "parallel.pipeline: 8, where there are 6 blocks of the model\nhint: the nearest that works for 8 ranks is",
    );
    refused(
        "--nproc-per-node 8 --set parallel.pipeline=4 --set parallel.schedule=interleaved --set model.tied=false",
        "parallel.pipeline: 4, where there are 3 times as many blocks as a worker has stages\nhint: the nearest that works for 8 ranks is",
    );
    refused(
        "--strategy pipeline --set parallel.devices=9 --set model.tied=false",
        "9 stages of a model of 6 blocks\nhint: a stage has at least one block, so take 6 or fewer",
    );
    refused(
        "--nproc-per-node 2 --set parallel.pipeline=2 --set model.tied=false --set parallel.cut=1,2 --set parallel.stage_mb=3",
        "parallel.stage_mb must be left out beside parallel.cut, got: 3",
    );
    refused("--set parallel.stage_mb=3", "parallel.stage_mb must be left out without --strategy pipeline");
    refused(
        "--nproc-per-node 2 --set parallel.pipeline=2 --set model.tied=false --set parallel.cut=1,2",
        "parallel.cut must be numbers whose sum is 6, the blocks of the model gpt, got: [1.0, 2.0]",
    );
    refused(
        "--set parallel.recompute=blocks --set parallel.recompute_blocks=0,7",
        "parallel.recompute_blocks must be within the 6 blocks of the model gpt, got: [0, 7]",
    );
    refused("--set parallel.sequence=true", "parallel.sequence must be false without parallel.tensor");
    refused(
        "--nproc-per-node 3 --set parallel.context=3 --set model.context=16",
        "parallel.context: 3, where there are 16 positions\nhint: the nearest that works for 3 ranks is replica=3",
    );
    refused(
        "--nproc-per-node 4 --set parallel.context=2 --set parallel.tensor=2 --set parallel.sequence=true --set model.context=6",
        "parallel.tensor: 2, where there are 3 positions of a stretch",
    );
    refused(
        "--set parallel.micro_batches=2",
        "parallel.micro_batches must be left out without --strategy pipeline",
    );
    refused(
        "--strategy place --set parallel.pipeline=2 --set model.tied=false",
        "parallel.pipeline has no meaning for strategy place",
    );
    refused(
        "--set parallel.recompute_blocks=0,2",
        "parallel.recompute_blocks must be two rising whole numbers beside parallel.recompute=blocks",
    );
    for (images, words) in [
        (
            "linear-regression --set parallel.tensor=2",
            "parallel.tensor must be left out for the model linear-regression, which isn't cut so far",
        ),
        (
            "mnist-autoencoder --nproc-per-node 3 --set parallel.tensor=3",
            "parallel.tensor: 3, where there are 32 numbers of the narrowest layer",
        ),
        (
            "cifar10-resnet18 --nproc-per-node 3 --set parallel.tensor=3",
            "parallel.tensor: 3, where there are 64 channels of the narrowest blocks",
        ),
        (
            "mnist-mini --set parallel.tensor=2 --set parallel.sequence=true",
            "parallel.sequence must be false for the model mnist, which knows no sequences",
        ),
        (
            "mnist-mini --nproc-per-node 2 --set parallel.context=2",
            "parallel.context must be left out for the model mnist, which knows no sequences",
        ),
        (
            "mnist-mini --nproc-per-node 4 --set parallel.tensor=4",
            "parallel.tensor: 4, where there are 50 outputs of the first dense layer\nhint: the nearest that works for 4 ranks is replica=2 x tensor=2",
        ),
    ] {
        let args = format!("train {images}");
        let out = phalanx(folder.path()).args(args.split_whitespace()).output().unwrap();
        let said = user::text(&out.stderr);
        assert!(out.status.code() == Some(2) && said.contains(words), "{images}: {said}");
    }
}
