//! `--strategy fsdp`: workers that hold a part of the model each.

mod user;

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use phalanx::nn::Weights;
use serde_json::Value;
use std::fs;
use std::path::Path;
use std::process::Stdio;
use std::time::Duration;
use user::{await_checkpoint, phalanx, text, worker};

const LIMIT: Duration = Duration::from_secs(240);
/// Float32 sums in another order, over some steps, on losses of about 2.
const TOLERANCE: f64 = 1e-3;

fn losses(events: &str) -> Vec<f64> {
    let events = events.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
    let steps = events.filter(|event| event["event"] == "step");
    let mut by_step: Vec<(u64, f64)> =
        steps.map(|step| (step["step"].as_u64().unwrap(), step["loss"].as_f64().unwrap())).collect();
    by_step.sort_by_key(|(step, _)| *step);
    by_step.into_iter().map(|(_, loss)| loss).collect()
}

fn train(folder: &Path, out: &str, more: &str) -> Vec<f64> {
    let job = "train mnist-mini --steps 8 --batch-size 16 --set optimizer.name=adam --set optimizer.lr=0.002";
    let args = format!("{job} --log-interval 1 --json --save-optimizer --out {out} {more}");
    let ran = phalanx(folder).args(args.split_whitespace()).output().unwrap();
    assert_eq!(ran.status.code(), Some(0), "{args}: {}", text(&ran.stderr));
    losses(&text(&ran.stdout))
}

fn check_close(got: &[f64], want: &[f64], what: &str) {
    let close = got.iter().zip(want).all(|(got, want)| (got - want).abs() < TOLERANCE);
    assert!(got.len() == want.len() && close, "{what}: {got:?}, not {want:?}");
}

#[test]
fn workers_learn_the_same_whether_each_holds_all_or_a_part() {
    let folder = tempfile::tempdir().unwrap();
    let want = train(folder.path(), "ddp", "--nproc-per-node 3");
    assert_eq!(want.len(), 8);
    for zero in 1..=3 {
        let more = format!("--nproc-per-node 3 --strategy fsdp --set parallel.zero={zero}");
        check_close(&train(folder.path(), &format!("zero-{zero}"), &more), &want, &more);
    }
    let bytes = |out: &str, file: &str| fs::metadata(folder.path().join(out).join(file)).unwrap().len();
    for file in ["model.safetensors", "optimizer.safetensors"] {
        assert_eq!(bytes("zero-3", file), bytes("ddp", file), "{file}");
    }
    train(folder.path(), "parts", "--nproc-per-node 3 --strategy fsdp --set train.checkpoint=parts");
    for file in ["model.safetensors", "optimizer.safetensors"] {
        let [parts, whole] =
            ["parts", "zero-3"].map(|out| Weights::read(&folder.path().join(out).join(file)).unwrap());
        let same = |name: &str| parts.get(name) == whole.get(name);
        assert!(parts.names().count() == whole.names().count() && parts.names().all(same), "{file}");
    }
}

/// The table of words belongs to the first block, and the last one multiplies with it.
#[test]
fn a_model_that_uses_a_parameter_twice_learns_the_same_in_parts() {
    let folder = tempfile::tempdir().unwrap();
    let text = folder.path().join("text");
    fs::write(&text, "what is said twice is said once more than it was said. ".repeat(400)).unwrap();
    let train = |out: &str, strategy: &str| {
        let job = "train gpt --nproc-per-node 2 --steps 4 --batch-size 4 --log-interval 1 --json";
        let args = format!("{job} --data {} --out {out} --strategy {strategy}", text.display());
        let ran = phalanx(folder.path()).args(args.split_whitespace()).output().unwrap();
        assert_eq!(ran.status.code(), Some(0), "{args}: {}", user::text(&ran.stderr));
        losses(&user::text(&ran.stdout))
    };
    let want = train("ddp", "ddp");
    assert_eq!(want.len(), 4);
    check_close(&train("fsdp", "fsdp"), &want, "fsdp");
    check_close(&train("dp", "dp"), &want, "dp");
    for strategy in ["place", "pipeline"] {
        check_close(
            &train(strategy, &format!("{strategy} --set model.tied=false")),
            &train("own", "ddp --set model.tied=false"),
            strategy,
        );
        let tied = ["train", "gpt", "--strategy", strategy];
        let out = phalanx(folder.path()).args(tied).output().unwrap();
        let said = user::text(&out.stderr);
        let words = format!("model.tied must be false under the strategy {strategy}");
        assert!(out.status.code() == Some(2) && said.contains(&words), "{said}");
    }
}

/// What the lost worker held is nowhere else, so all go on from the newest checkpoint.
#[test]
fn a_lost_worker_costs_the_steps_since_the_newest_checkpoint_and_no_sample() {
    let folder = tempfile::tempdir().unwrap();
    let out = folder.path().join("out");
    let job =
        "train mnist-mini --epochs 30 --nproc-per-node 2 --strategy fsdp --log-interval 1 --max-restarts 2";
    let set = "--set train.checkpoint_every=5 --set train.checkpoint=parts";
    let args = format!("{job} {set} --out {}", out.display());
    let mut run = phalanx(folder.path());
    let run = run.args(args.split_whitespace()).stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
    await_checkpoint(&out, LIMIT);
    kill(Pid::from_raw(worker(&out, 1)), Signal::SIGKILL).unwrap();
    let ended = run.wait_with_output().unwrap();
    let said = text(&ended.stderr);
    assert_eq!(ended.status.code(), Some(0), "{said}");
    assert!(said.contains("the others go on, another takes its place"), "{said}");
    assert!(!said.contains("exited with code"), "{said}");
    let events = fs::read_to_string(out.join("events.jsonl")).unwrap();
    let told: Vec<Value> = events.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let epochs: Vec<&Value> = told.iter().filter(|event| event["event"] == "epoch").collect();
    assert!(epochs.len() == 30 && epochs.iter().all(|epoch| epoch["each_once"] == true), "{epochs:?}");
    assert!(told.iter().any(|event| event["event"] == "resume"), "{said}");
    check_conversion(folder.path());
}

/// The checkpoints of a run of two, as a user looks at them and makes one file of the newest.
fn check_conversion(folder: &Path) {
    let run = |args: &str| {
        let ran = phalanx(folder).args(["checkpoint"]).args(args.split(' ')).output().unwrap();
        assert_eq!(ran.status.code(), Some(0), "{args}: {}", text(&ran.stderr));
        text(&ran.stdout)
    };
    assert!(run("verify out").contains(": whole (4 files, "));
    assert!(run("show out").contains("optimizer-00002-of-00002.safetensors"));
    assert!(run("convert out --out one").contains("model.safetensors "));
    assert!(run("verify one").contains(": whole (2 files, "));
    let newest = fs::read_dir(folder.join("one")).unwrap().next().unwrap().unwrap().path();
    let args = format!("train mnist-mini --steps 1 --init {}/model.safetensors --out next", newest.display());
    let ran = phalanx(folder).args(args.split(' ')).output().unwrap();
    assert_eq!(ran.status.code(), Some(0), "{}", text(&ran.stderr));
    let ran =
        phalanx(folder).args(["checkpoint", "convert", "out", "--parts", "0", "--out", "none"]).output();
    assert!(text(&ran.unwrap().stderr).contains("--parts 0: must be from 1 to 99999"));
}

#[test]
fn what_goes_with_no_part_of_a_model_is_refused_before_anything_starts() {
    let folder = tempfile::tempdir().unwrap();
    for (set, words) in [
        ("parallel.logical_shards=2", "parallel.logical_shards must be left out under the strategy fsdp"),
        ("parallel.compress=bf16", "parallel.compress must be none under the strategy fsdp"),
        ("parallel.zero=4", "parallel.zero must be a whole number from 1 to 3"),
        ("train.checkpoint=bits", "train.checkpoint must be one of whole, parts"),
        ("parallel.offload=true", "parallel.offload=true: a worker on a CPU has all in the host's memory"),
    ] {
        let args = ["train", "mnist-mini", "--strategy", "fsdp", "--set", set];
        let out = phalanx(folder.path()).args(args).output().unwrap();
        let said = text(&out.stderr);
        assert!(out.status.code() == Some(2) && said.contains(words), "{set}: {said}");
    }
    let args = ["train", "mnist-mini", "--set", "train.checkpoint=parts"];
    let said = text(&phalanx(folder.path()).args(args).output().unwrap().stderr);
    assert!(said.contains("train.checkpoint must be whole where each worker has a whole model"), "{said}");
}
