//! `phalanx bench pipeline` and the recipes of workers with several devices, as a user has them.

mod user;

use serde_json::Value;
use std::path::Path;
use user::{phalanx, text};

/// How much more than in theory stages may be idle here, where other tests run beside this one.
const SLACK: f64 = 1.5;
/// How often that is tried.
const RUNS: usize = 4;

fn lines(folder: &Path, args: &[&str]) -> Vec<Value> {
    let out = phalanx(folder).args(args).output().unwrap();
    assert_eq!(out.status.code(), Some(0), "{args:?}: {}", text(&out.stderr));
    text(&out.stdout).lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

#[test]
fn a_schedule_is_drawn_for_the_terminal_and_as_svg() {
    let folder = tempfile::tempdir().unwrap();
    let args = "bench pipeline --draw --schedule zb-h1 --stages 2 --micro-batches 3 --svg zb.svg";
    let out = phalanx(folder.path()).args(args.split(' ')).output().unwrap();
    assert_eq!(out.status.code(), Some(0), "{}", text(&out.stderr));
    assert_eq!(
        text(&out.stdout),
        "zb-h1: 2 ranks, 3 micro-batches: a bubble of 10.0% in theory, 10.0% simulated; alive [2, 2]\n\
         rank 0 F0-F1-...I0-W0-F2-I1-W1-I2-W2-\nrank 1 ...F0-I0-F1-I1-W0-F2-I2-W1-W2-\n"
    );
    let picture = std::fs::read_to_string(folder.path().join("zb.svg")).unwrap();
    assert!(picture.starts_with("<svg") && picture.contains("zb-h1: 2 ranks, 3 micro-batches"));
}

#[test]
fn a_schedule_is_told_in_json_and_an_impossible_one_is_wrong_usage() {
    let folder = tempfile::tempdir().unwrap();
    let args = "bench pipeline --draw --schedule interleaved --stages 4 --micro-batches 8 --json";
    let [line] = &lines(folder.path(), &args.split(' ').collect::<Vec<_>>())[..] else { panic!("one line") };
    assert_eq!((line["bench"].as_str(), line["chunks"].as_u64()), (Some("pipeline"), Some(2)));
    let theory = line["bubble_theory"].as_f64().unwrap();
    assert!(
        (theory - 3.0 / 19.0).abs() < 1e-9
            && (line["bubble_simulated"].as_f64().unwrap() - theory).abs() < 1e-9
    );
    assert_eq!(line["actions"][0].as_array().unwrap().len(), 2 * 2 * 8);
    assert_eq!(line["actions"][3][0], "F0@3");
    let args = "bench pipeline --draw --schedule interleaved --stages 4 --micro-batches 6";
    let out = phalanx(folder.path()).args(args.split(' ')).output().unwrap();
    assert_eq!(out.status.code(), Some(2));
    assert!(text(&out.stderr).contains("hint: take 8 of them or 4"), "{}", text(&out.stderr));
    let out = phalanx(folder.path()).args(["bench", "pipeline", "--svg", "ranks.svg"]).output().unwrap();
    let said = text(&out.stderr);
    assert!(out.status.code() == Some(2) && said.contains("--svg ranks.svg: what ranks did"), "{said}");
}

/// Over processes and over devices of one: the same losses.
#[test]
fn a_row_of_blocks_is_trained_through_ranks_and_through_devices() {
    let folder = tempfile::tempdir().unwrap();
    let job = "bench pipeline --blocks 4 --width 64 --batch 32 --micro-batches 4 --steps 3 --json";
    let mut losses = Vec::new();
    for more in ["", " --devices", " --schedule zb-h1", " --schedule interleaved --devices"] {
        let args = format!("{job}{more}");
        let lines = lines(folder.path(), &args.split(' ').collect::<Vec<_>>());
        let [line] = &lines[..] else { panic!("{args}: {lines:?}") };
        let bubble = line["bubble_measured"].as_f64().unwrap();
        assert!((0.0..1.0).contains(&bubble) && line["median_ms"].as_f64() > Some(0.0), "{line}");
        losses.push(line["loss"].as_f64().unwrap());
    }
    assert!(losses[0] > 0.0 && losses.iter().all(|loss| loss == &losses[0]), "{losses:?}");
}

/// Four stages are at work at once on any machine where they only wait; what is idle is the schedule's, and not much more in one of
/// a few runs: a machine that is busy with something else adds to it, and nothing takes from it.
#[test]
fn stages_of_equal_length_are_idle_for_as_long_as_the_schedule_says() {
    let folder = tempfile::tempdir().unwrap();
    let job = "bench pipeline --block-ms 4 --stages 4 --width 16 --batch 16 --steps 3 --json";
    for more in [
        "--schedule gpipe --blocks 4",
        "--schedule 1f1b --blocks 4",
        "--schedule 1f1b --blocks 4 --devices",
        "--schedule interleaved --blocks 8",
        "--schedule zb-h1 --blocks 4",
    ] {
        let args = format!("{job} {more}");
        let mut runs = Vec::new();
        let is_as_foretold = || {
            let line = lines(folder.path(), &args.split(' ').collect::<Vec<_>>()).remove(0);
            let [measured, theory] =
                ["bubble_measured", "bubble_theory"].map(|key| line[key].as_f64().unwrap());
            assert!(theory > 0.05 && measured > 0.98 * theory && line["block_ms"] == 4.0, "{more}: {line}");
            runs.push(line);
            measured < SLACK * theory
        };
        assert!(std::iter::repeat_with(is_as_foretold).take(RUNS).any(|good| good), "{more}: {runs:?}");
    }
    let out = phalanx(folder.path()).args(["bench", "pipeline", "--block-ms=-1"]).output().unwrap();
    let said = text(&out.stderr);
    assert!(out.status.code() == Some(2) && said.contains("--block-ms"), "{said}");
}

/// Two workers of two devices each see the losses that two workers see.
#[test]
fn each_replica_may_span_several_devices() {
    let folder = tempfile::tempdir().unwrap();
    let losses = |more: &str, out: &str| {
        let args =
            format!("train mnist-mini --nproc-per-node 2 --steps 5 --batch-size 16 --json --out {out}{more}");
        let lines = lines(folder.path(), &args.split(' ').collect::<Vec<_>>());
        let steps = lines.into_iter().filter(|line| line["event"] == "step");
        steps.map(|line| line["loss"].as_f64().unwrap()).collect::<Vec<f64>>()
    };
    let want = losses("", "ddp");
    assert_eq!(want.len(), 5);
    assert_eq!(losses(" --strategy place --set parallel.cut=1,3", "place"), want);
    /// Float32 sums in another order, over a few steps, on losses of about 2.
    const TOLERANCE: f64 = 1e-4;
    for strategy in ["pipeline", "dp"] {
        let got = losses(&format!(" --strategy {strategy}"), strategy);
        let close = got.iter().zip(&want).all(|(got, want)| (got - want).abs() < TOLERANCE);
        assert!(got.len() == 5 && close, "{strategy}: {got:?}, not {want:?}");
    }
    let alone = "train mnist-mini --nproc-per-node 1 --steps 1 --strategy dp --out alone";
    let said = text(&phalanx(folder.path()).args(alone.split(' ')).output().unwrap().stderr);
    assert!(said.contains("as many workers with --strategy ddp are faster"), "{said}");
    assert!(said.contains("1.71 ms a step by dp, 1.56 by ddp"), "{said}");
}
