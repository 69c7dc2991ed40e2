//! `phalanx train --device cuda` as a user has it, on the fake driver, which is found as the real one is: where LD_LIBRARY_PATH
//! says. Where there is no C++ compiler, tests say so and pass.

#[path = "../../phalanx/tests/gpu/fake.rs"]
mod fake;
mod user;

use fake::fake;
use std::fs;
use std::path::Path;
use std::process::{Command, Output};
use user::{events, phalanx, text};

/// What losses may be off by: roundings of float32 in another order, which the steps of a test carry on.
const TOLERANCE: f64 = 2e-4;

/// A run over the first digits, small enough for a driver that plays a GPU.
fn command(folder: &Path, libraries: &Path, args: &[&str]) -> Command {
    let mut command = phalanx(folder);
    command.args(["train", "mnist-mini", "--batch-size", "8", "--json"]).args(args);
    if !args.contains(&"--steps") {
        command.args(["--steps", "3"]);
    }
    command.env("LD_LIBRARY_PATH", libraries).env_remove("CUDA_VISIBLE_DEVICES");
    command
}

fn train(folder: &Path, libraries: &Path, args: &[&str]) -> Output {
    command(folder, libraries, args).output().unwrap()
}

/// The losses of the steps, and that of the evaluation.
fn losses(out: &Output) -> Vec<f64> {
    let all = events(out);
    let of = |name: &'static str, key: &'static str| {
        all.iter().filter(move |e| e["event"] == name).filter_map(move |e| e[key].as_f64())
    };
    of("step", "loss").chain(of("epoch", "test_loss")).collect()
}

#[track_caller]
fn near(got: &[f64], want: &[f64]) {
    assert_eq!((got.len(), want.len()), (4, 4), "three steps and an evaluation");
    let same = got.iter().zip(want).all(|(got, want)| (got - want).abs() <= TOLERANCE);
    assert!(same, "{got:?}, not {want:?}");
}

#[test]
fn training_on_a_gpu_has_the_losses_of_a_cpu() {
    let Some(fake) = fake() else { return };
    let folder = tempfile::tempdir().unwrap();
    let one = ["--nproc-per-node", "1"];
    let want = losses(&train(folder.path(), fake.folder(), &one));
    let whole =
        train(folder.path(), fake.folder(), &[&one[..], &["--device", "cuda", "--out", "run"]].concat());
    near(&losses(&whole), &want);
    // Compiled kernels stay, and what was learned is a file like any other.
    assert!(fs::read_dir(folder.path().join("cache/kernels")).unwrap().next().is_some());
    let args = ["--device", "cuda:1", "--init", "run/model.safetensors", "--set", "model.dropout=0"];
    let again = train(folder.path(), fake.folder(), &[&one[..], &args].concat());
    assert!(losses(&again)[0] < want[0]);
}

#[test]
fn a_worker_a_gpu_and_workers_on_one_have_the_losses_of_cpus() {
    let Some(fake) = fake() else { return };
    let folder = tempfile::tempdir().unwrap();
    let want = losses(&train(folder.path(), fake.folder(), &[]));
    for args in [&["--nproc-per-node", "gpu"][..], &["--device", "cuda:0"]] {
        let out = train(folder.path(), fake.folder(), args);
        assert!(
            events(&out).iter().filter(|e| e["event"] == "step").all(|e| e["world_size"] == 2),
            "{args:?}"
        );
        near(&losses(&out), &want);
    }
}

#[test]
fn a_run_on_a_gpu_goes_on_from_its_checkpoint() {
    let Some(fake) = fake() else { return };
    let folder = tempfile::tempdir().unwrap();
    let args = ["--nproc-per-node", "1", "--device", "cuda", "--set", "train.checkpoint_every=2"];
    let of = |more: &[&str]| losses(&train(folder.path(), fake.folder(), &[&args[..], more].concat()));
    let whole = of(&["--out", "whole"]);
    of(&["--out", "parts", "--steps", "2"]);
    assert_eq!(of(&["--out", "parts", "--resume"])[..], whole[2..]);
}

#[track_caller]
fn refused(out: &Output, parts: &[&str]) {
    let told = text(&out.stderr);
    assert_eq!(out.status.code(), Some(1), "{told}");
    assert!(parts.iter().all(|part| told.contains(part)), "{told}");
}

#[test]
fn what_is_missing_is_named_at_once_with_its_package() {
    let Some(fake) = fake() else { return };
    let folder = tempfile::tempdir().unwrap();
    // What a machine with some of the libraries has. One with a real GPU has them all, wherever it finds them.
    let some = folder.path().join("libraries");
    fs::create_dir(&some).unwrap();
    let has = |file: &str| fs::copy(fake.folder().join(file), some.join(file)).map(drop).unwrap();
    fs::copy(fake.folder().join("modules"), some.join("modules")).unwrap();
    let on_gpu = ["--device", "cuda", "--nproc-per-node", "1"];
    let steps = [
        ("libcuda.so.1", "no NVIDIA driver", "nvidia-driver"),
        ("libnvrtc.so.13", "NVRTC isn't on this machine", "nvidia-cuda-nvrtc"),
        ("libcublasLt.so.13", "cuBLASLt isn't on this machine", "nvidia-cublas"),
        ("libcudnn.so.9", "cuDNN isn't on this machine", "nvidia-cudnn-cu13"),
    ];
    for (file, words, package) in steps {
        let elsewhere = Command::new("ldconfig").arg("-p").output();
        if elsewhere.is_ok_and(|list| text(&list.stdout).contains(file)) {
            eprintln!("skipped: this machine has {file}");
        } else {
            refused(&train(folder.path(), &some, &on_gpu), &[words, package, "hint:"]);
        }
        has(file);
    }
    let out = train(folder.path(), &some, &["--device", "cuda", "--nproc-per-node", "3"]);
    refused(&out, &["there is no GPU 2", "--device cuda:0"]);
    refused(&train(folder.path(), &some, &["--device", "cuda:2"]), &["there is no GPU 2", "there are 2"]);
    let sharded = train(folder.path(), &some, &["--device", "cuda:0", "--strategy", "fsdp"]);
    assert_eq!(sharded.status.code(), Some(2));
    assert!(text(&sharded.stderr).contains("--strategy ddp"), "{}", text(&sharded.stderr));
    let wrong = train(folder.path(), &some, &["--device", "gpu"]);
    assert_eq!(wrong.status.code(), Some(2));
    assert!(text(&wrong.stderr).contains("cuda:N"), "{}", text(&wrong.stderr));
}
