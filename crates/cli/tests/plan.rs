//! `phalanx plan` as its users have it: what a run would hold on GPUs that aren't there.

mod user;

use serde_json::Value;
use std::path::Path;
use std::process::Output;
use user::{phalanx, text};

fn plan(folder: &Path, args: &[&str]) -> Output {
    phalanx(folder).arg("plan").args(args).output().unwrap()
}

/// The lines of a plan that is made.
fn lines(folder: &Path, args: &[&str], code: i32) -> Vec<Value> {
    let output = plan(folder, &[&["--json"], args].concat());
    assert_eq!(output.status.code(), Some(code), "{}", text(&output.stderr));
    text(&output.stdout).lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

#[test]
fn a_plan_tells_of_every_way_what_a_worker_holds_and_sends() {
    let folder = tempfile::tempdir().unwrap();
    let asked =
        ["--gpu", "h100", "--workers", "4", "mnist-mini", "--epochs", "3", "--set", "model.name=mnist-hpc"];
    let told = lines(folder.path(), &asked, 0);
    let run = &told[0];
    assert_eq!((&run["plan"], &run["samples"], &run["steps"]), (&"run".into(), &2000.into(), &48.into()));
    let parameters = run["parameters"].as_u64().unwrap();
    let ways: Vec<&Value> = told.iter().filter(|line| line["plan"] == "way").collect();
    let names: Vec<&str> = ways.iter().map(|way| way["way"].as_str().unwrap()).collect();
    let none_in_blocks = ["ddp", "fsdp, zero 1", "fsdp, zero 2", "fsdp, zero 3"];
    assert_eq!(names[..4], none_in_blocks);
    for (i, way) in ways.iter().enumerate() {
        assert_eq!((&way["asked"], &way["fits"]), (&(i == 0).into(), &true.into()), "{way}");
        let parts: u64 = way["parts"].as_object().unwrap().values().map(|part| part.as_u64().unwrap()).sum();
        assert_eq!(way["bytes"].as_u64(), Some(parts), "{way}");
        assert_eq!(way["workers_bytes"].as_array().unwrap().len(), 4);
        // All samples there are; of what hosts keep nobody tries.
        let offloads = way["way"].as_str().unwrap().contains("offload");
        assert_eq!(way["largest_batch"], if offloads { Value::Null } else { 500.into() }, "{way}");
    }
    let values = |i: usize| ways[i]["parts"]["values of parameters"].as_u64().unwrap();
    assert!(values(0) >= 4 * parameters && values(3) < 2 * parameters, "{} and {}", values(0), values(3));
    let sent = ways[0]["sent_bytes"].as_u64().unwrap();
    assert!(sent >= 6 * parameters && sent < 7 * parameters, "{sent} of {parameters}");
    // Nothing was trained, and nothing is left behind.
    assert_eq!(folder.path().read_dir().unwrap().count(), 0);
}

#[test]
fn what_does_not_fit_ends_with_1_and_names_what_would() {
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("text"), [b'x'; 200_000]).unwrap();
    let sizes = ["--set", "model.layers=12", "--set", "model.width=512", "--set", "model.heads=8"];
    let asked =
        [&["--gpu", "t4", "--memory", "1400MB", "--workers", "8", "gpt", "--data", "text"], &sizes[..]]
            .concat();
    let output = plan(folder.path(), &asked);
    let told = text(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{told}");
    for part in ["ddp doesn't fit: out of memory on GPU", "others hold", "hint: fsdp", "--set parallel.zero="]
    {
        assert!(told.contains(part), "{part}: {told}");
    }
    assert!(!told.contains("panicked"), "{told}");
    // What was named fits, and so does the batch that the plan says.
    let ways = lines(folder.path(), &asked, 1);
    let fits = ways.iter().find(|way| way["fits"] == true).expect("a way that fits");
    let set: Vec<&str> =
        fits["set"].as_array().unwrap().iter().flat_map(|set| ["--set", set.as_str().unwrap()]).collect();
    lines(folder.path(), &[&asked[..], &set].concat(), 0);
    let ddp = ways.iter().find(|way| way["way"] == "ddp").unwrap();
    assert!(ddp["lacks"].as_str().unwrap().contains("out of memory"), "{ddp}");
    let batch = ddp["largest_batch"].as_u64().unwrap();
    assert!((1..64).contains(&batch), "{ddp}");
    lines(folder.path(), &[&asked[..], &["--batch-size", &batch.to_string()]].concat(), 0);
}

#[test]
fn time_is_measured_on_cores_and_told_for_gpus() {
    let folder = tempfile::tempdir().unwrap();
    let here = lines(folder.path(), &["mnist-mini"], 0);
    let time = here.last().unwrap();
    assert!(time["plan"] == "time" && time["step_ms"].as_f64().unwrap() > 0.0, "{time}");
    let asked = ["--gpu", "h200", "--workers", "4", "--step-ms", "10", "--link", "0.1", "mnist-mini"];
    let told = lines(folder.path(), &asked, 0);
    let time = told.last().unwrap();
    // Three quarters of 21,840 gradients, twice, at 0.1 GB a second: 1.3 ms.
    let [from, to] = ["ms_from", "ms_to"].map(|key| time["here"][key].as_f64().unwrap());
    assert!(from == 10.0 && (11.2..11.5).contains(&to), "{time}");
    let worth = time["worth_from"].as_u64().unwrap();
    assert!((4..32).contains(&worth) && worth <= time["worth_to"].as_u64().unwrap(), "{time}");
    let output = plan(folder.path(), &asked);
    assert!(text(&output.stdout).contains("worth asking for: "), "{}", text(&output.stdout));
    // Four passes a step take four times as long.
    let accumulated = lines(folder.path(), &[&asked[..], &["--set", "train.accumulate=4"]].concat(), 0);
    assert_eq!(accumulated.last().unwrap()["here"]["ms_from"], 40.0);
    // What only evaluations are judged by changes nothing.
    for judged in ["train.patience=3", "schedule.name=plateau", "train.metrics=[macro_f1]"] {
        let planned = lines(folder.path(), &[&asked[..], &["--set", judged]].concat(), 0);
        assert_eq!(planned.last().unwrap()["here"]["ms_from"], 10.0, "{judged}");
    }
    // Nobody counts what goes by way of the hosts, so there is no time with it.
    let compressed = lines(folder.path(), &[&asked[..], &["--set", "parallel.compress=bf16"]].concat(), 0);
    assert_eq!(compressed.last().unwrap().get("here"), None);
    assert!(!compressed[0]["skipped"].as_array().unwrap().is_empty(), "{}", compressed[0]);
}

#[test]
fn what_makes_no_plan_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    for (args, part) in [
        (&["--gpu", "h1000", "mnist-mini"][..], "h100, h200"),
        (&["--memory", "40", "--gpu", "h100", "mnist-mini"], "40GB"),
        (&["--memory", "40GB", "mnist-mini"], "--gpu"),
        (&["--workers", "0", "mnist-mini"], "1 to 512"),
        (&["--gpu", "h100", "mnist-mini", "--nproc-per-node", "gpu"], "--workers"),
        (&["--gpu", "h100", "mnist-mini", "--device", "cpu"], "leave --device out"),
        (&["--step-ms", "-1", "mnist-mini"], "above 0"),
        (&["--step-ms", "1e300", "mnist-mini"], "to a billion"),
        (&["--link", "3", "mnist-mini"], "--step-ms MS"),
        (&["mnist-mini", "--resume"], "leave it out"),
        (&["--gpu", "h100", "--workers", "3", "gpt", "--set", "parallel.tensor=2"], "parallel.tensor"),
        (&["mnist-mini", "--set", "train.batchsize=3"], "batch_size"),
        (&[], "RECIPE"),
    ] {
        let output = plan(folder.path(), args);
        let told = text(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{args:?}: {told}");
        assert!(told.contains(part), "{args:?}: {told}");
    }
}
