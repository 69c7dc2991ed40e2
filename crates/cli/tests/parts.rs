//! Workers that are killed where each has a part of the model: those that are left keep their processes, and the run goes on to the same
//! numbers, with what a replica of the lost has, or from the newest checkpoint.

mod user;

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::Value;
use std::collections::BTreeMap;
use std::fs;
use std::io::{BufRead, BufReader, Read};
use std::path::Path;
use std::process::Stdio;
use std::time::{Duration, Instant};
use user::{await_checkpoint, phalanx, worker};

const LIMIT: Duration = Duration::from_secs(240);
const STEPS: usize = 60;

/// What a run left.
struct Left {
    /// The loss of each step, told once or again.
    losses: BTreeMap<u64, Vec<f64>>,
    told: Vec<Value>,
    said: String,
    weights: Vec<u8>,
    /// The running mean of the weights, of a run that has one.
    mean: Option<Vec<u8>>,
}

impl Left {
    /// The numbers that were told, each of which has to be the same whenever it was.
    fn losses(&self) -> Vec<f64> {
        let same = |(step, told): (&u64, &Vec<f64>)| {
            assert!(told.iter().all(|loss| *loss == told[0]), "step {step}: {told:?}\n{}", self.said);
            told[0]
        };
        self.losses.iter().map(same).collect()
    }

    /// All others have kept their processes.
    #[track_caller]
    fn check_who_was_replaced(&self, kills: &[(u64, &[u32])]) {
        let killed: usize = kills.iter().map(|(_, ranks)| ranks.len()).sum();
        assert_eq!(self.said.matches("another takes its place").count(), killed, "{}", self.said);
        assert!(!self.said.contains("starting all workers again"), "{}", self.said);
    }

    fn count(&self, event: &str) -> usize {
        self.told.iter().filter(|told| told["event"] == event).count()
    }
}

/// A folder with a text to learn.
fn folder() -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    let text = "what one of them has lost the others have kept for it. ".repeat(600);
    fs::write(folder.path().join("text"), text).unwrap();
    folder
}

/// Trains a small language model with dropout on, and kills each of these ranks once that step is told, and a checkpoint is whole where
/// any is soon taken.
fn train(folder: &Path, out: &str, more: &str, kills: &[(u64, &[u32])]) -> Left {
    let model = "--set model.layers=2 --set model.width=32 --set model.context=16 --set model.dropout=0.2";
    let rest = format!("--set train.clip_norm=0.5 --steps {STEPS} --log-interval 1 --json");
    let restarts = if more.contains("--max-restarts") { "" } else { "--max-restarts 9" };
    let args = format!("train gpt --data text {model} {rest} {restarts} --out {out} {more}");
    let mut run = phalanx(folder);
    run.args(args.split_whitespace()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut run = run.spawn().unwrap();
    let out = folder.join(out);
    let lines = BufReader::new(run.stdout.take().unwrap()).lines();
    let (start, mut kills) = (Instant::now(), kills.iter());
    let mut next = kills.next();
    let (losses, told, said) = (BTreeMap::new(), Vec::new(), String::new());
    let mut left = Left { losses, told, said, weights: Vec::new(), mean: None };
    for line in lines {
        assert!(start.elapsed() < LIMIT, "{args}: {:?}", left.told.last());
        let event: Value = serde_json::from_str(&line.unwrap()).unwrap();
        if event["event"] == "step" {
            let step = event["step"].as_u64().unwrap();
            left.losses.entry(step).or_default().push(event["loss"].as_f64().unwrap());
            if let Some((_, ranks)) = next.filter(|(at, _)| step >= *at) {
                if args.contains("checkpoint_every=4") {
                    await_checkpoint(&out, LIMIT);
                }
                for pid in ranks.iter().map(|rank| worker(&out, *rank)) {
                    kill(Pid::from_raw(pid), Signal::SIGKILL).unwrap();
                }
                next = kills.next();
            }
        }
        left.told.push(event);
    }
    run.stderr.take().unwrap().read_to_string(&mut left.said).unwrap();
    assert_eq!(run.wait().unwrap().code(), Some(0), "{args}: {}", left.said);
    assert!(next.is_none(), "{args}: nobody was killed at {next:?}");
    left.weights = fs::read(out.join("model.safetensors")).unwrap();
    left.mean = fs::read(out.join("model_ema.safetensors")).ok();
    assert_eq!(left.losses.len(), STEPS, "{args}");
    left
}

/// A run of four in which these are lost, beside one in which nobody is.
#[track_caller]
fn check_a_replica_helps(more: &str, kills: &[(u64, &[u32])]) {
    let folder = folder();
    let more = format!("--nproc-per-node 4 {more}");
    let whole = train(folder.path(), "whole", &more, &[]);
    let hurt = train(folder.path(), "hurt", &more, kills);
    assert_eq!(hurt.losses(), whole.losses(), "{more}: {}", hurt.said);
    assert!(hurt.weights == whole.weights, "{more}: other weights in the end");
    assert!(hurt.mean == whole.mean, "{more}: another mean of them");
    assert_eq!(hurt.mean.is_some(), more.contains("ema"), "{more}");
    assert_eq!(hurt.count("members"), kills.len(), "{more}: {}", hurt.said);
    assert_eq!(hurt.count("resume"), 0, "{more}: {}", hurt.said);
    hurt.check_who_was_replaced(kills);
}

#[test]
fn parts_of_matrices_come_from_another_replica() {
    let tensor = "--batch-size 4 --set parallel.tensor=2 --set train.ema=0.9";
    // The last step is followed by an evaluation, which the ranks of a replica make together.
    check_a_replica_helps(tensor, &[(5, &[1]), (20, &[0]), (40, &[3]), (59, &[2])]);
}

#[test]
fn shards_come_from_those_that_hold_them_again() {
    let fsdp = "--batch-size 2 --strategy fsdp --set parallel.shard=2 --set optimizer.name=adam";
    // The last step is followed by an evaluation with the mean.
    check_a_replica_helps(&format!("{fsdp} --set train.ema=0.9"), &[(5, &[2]), (21, &[0, 1]), (59, &[3])]);
    check_a_replica_helps(&format!("{fsdp} --set parallel.zero=1"), &[(7, &[1]), (30, &[0])]);
}

#[test]
fn stages_come_from_another_pipeline() {
    let stages = "--batch-size 4 --set parallel.pipeline=2";
    check_a_replica_helps(&format!("{stages} --set model.tied=false"), &[(6, &[3]), (25, &[0])]);
    // The first stage and the last have the table of words.
    check_a_replica_helps(&format!("{stages} --set train.ema=0.9"), &[(6, &[3]), (25, &[0]), (59, &[1])]);
}

/// Whoever has another stretch of the same sequences has the same of the model.
#[test]
fn what_a_worker_with_a_stretch_holds_comes_from_one_with_another() {
    let context = "--batch-size 8 --set parallel.context=4 --set train.ema=0.9";
    check_a_replica_helps(context, &[(5, &[1]), (20, &[0, 3])]);
}

/// The scale of the loss is part of where the run is, and a step that some leave out is one that all do.
#[test]
fn runs_in_16_bits_lose_no_step_either() {
    let half = |precision: &str, more: &str| format!("--set train.precision={precision} {more}");
    let shards = "--batch-size 2 --strategy fsdp --set parallel.shard=2";
    check_a_replica_helps(&half("float16", shards), &[(1, &[2]), (21, &[0, 1])]);
    check_a_replica_helps(&half("float16", "--batch-size 4 --set parallel.tensor=2"), &[(9, &[3])]);
    let stages = "--batch-size 4 --set parallel.pipeline=2 --set model.tied=false";
    check_a_replica_helps(&half("bfloat16", stages), &[(6, &[3]), (25, &[0])]);
}

#[test]
fn what_nobody_has_any_more_comes_from_the_newest_checkpoint() {
    for (i, more) in [
        "--nproc-per-node 2 --strategy fsdp --set train.checkpoint=parts --batch-size 4 --set train.precision=float16 --set train.ema=0.9",
        "--nproc-per-node 2 --strategy fsdp --set parallel.zero=2 --batch-size 4",
        "--nproc-per-node 2 --set parallel.tensor=2 --batch-size 4",
        "--nproc-per-node 4 --set parallel.tensor=2 --batch-size 4 --set train.checkpoint=parts",
        "--nproc-per-node 4 --set parallel.pipeline=2 --strategy fsdp --set model.tied=false --batch-size 4 --set train.ema=0.9 --set train.checkpoint=parts",
        "--nproc-per-node 2 --strategy fsdp --set parallel.zero=1 --set train.ema=0.9 --batch-size 4",
        "--nproc-per-node 2 --set parallel.context=2 --strategy fsdp --batch-size 4 --set train.checkpoint=parts",
    ]
    .into_iter()
    .enumerate()
    {
        let folder = folder();
        // Steps long enough for the run to be there still when its first checkpoint is whole.
        let longer = "--set model.width=96 --set model.context=64";
        let more = format!("{more} {longer} --set train.checkpoint_every=4");
        let whole = train(folder.path(), "whole", &more, &[]);
        // Of four, both that have the second part.
        let lost: &[u32] = if i == 3 { &[1, 3] } else { &[1] };
        let kills = [(15, lost), (33, lost)];
        let hurt = train(folder.path(), "hurt", &more, &kills);
        assert_eq!(hurt.losses(), whole.losses(), "{more}: {}", hurt.said);
        assert!(hurt.weights == whole.weights, "{more}: other weights in the end");
        assert!(hurt.mean == whole.mean, "{more}: another mean of them");
        assert_eq!(hurt.mean.is_some(), more.contains("ema"), "{more}");
        assert_eq!(hurt.count("resume"), 2, "{more}: {}", hurt.said);
        hurt.check_who_was_replaced(&kills);
        let events = fs::read_to_string(folder.path().join("hurt/events.jsonl")).unwrap();
        let steps = events.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
        let steps =
            steps.filter(|event| event["event"] == "step").map(|event| event["step"].as_u64().unwrap());
        assert!(steps.eq(0..STEPS as u64), "each step is written down once");
    }
}

#[test]
fn a_run_that_has_lost_a_part_and_has_no_checkpoint_begins_again() {
    let folder = folder();
    // Steps long enough for the kill to come before the last, however late a busy machine lets this process read of the tenth.
    let more = "--nproc-per-node 2 --strategy fsdp --batch-size 32 --set train.checkpoint_every=1000 --max-restarts 1";
    let whole = train(folder.path(), "whole", more, &[]);
    for (out, rank) in [("second", 1), ("first", 0)] {
        let hurt = train(folder.path(), out, more, &[(9, &[rank])]);
        assert_eq!(hurt.losses(), whole.losses(), "{}", hurt.said);
        assert!(hurt.weights == whole.weights);
        // Who is left says why.
        let why = format!("rank {} (pid ", 1 - rank);
        let says =
            |line: &str| line.starts_with(&why) && line.contains("there is no checkpoint to go on from");
        assert!(hurt.said.lines().any(says), "{}", hurt.said);
        // One worker was lost, which is one restart, whatever was started because of it.
        assert!(hurt.said.contains("(restart 1 of 1)"), "{}", hurt.said);
        assert!(hurt.said.contains("restarts: 1; what went wrong each time:"), "{}", hurt.said);
    }
}
