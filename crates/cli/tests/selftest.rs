//! `phalanx selftest` as a user has it: on the CPU, and on the fake driver, which is found where LD_LIBRARY_PATH says.

#[path = "../../phalanx/tests/gpu/fake.rs"]
mod fake;
mod user;

use fake::fake;
use serde_json::Value;
use user::{events, phalanx, text};

/// What is tried, whatever the device, and on a GPU so many exchanges of numbers.
#[track_caller]
fn check(found: &[Value], device: &str, runs: usize, exchanges: usize) {
    let of = |part: &'static str| found.iter().filter(move |finding| finding["selftest"] == part);
    let is_exchange = |tried: &&Value| tried["name"].as_str().is_some_and(|name| name.contains("xchange"));
    let (exchanged, operations): (Vec<&Value>, Vec<_>) = of("operations").partition(is_exchange);
    // Twenty-two families in each type, and in float32 eleven rows of known values and eight rules of optimizers.
    let in_type = |dtype: &str| operations.iter().filter(|family| family["dtype"] == dtype).count();
    assert_eq!(["f32", "bf16", "f16"].map(in_type), [41, 22, 22]);
    assert_eq!((operations.len(), of("run").count(), exchanged.len()), (85, runs, exchanges));
    for tried in of("operations").chain(of("run")) {
        assert!(tried["failure"].is_null(), "{tried}");
        assert!(tried["apart"].as_f64() <= tried["tolerance"].as_f64(), "{tried}");
    }
    let cases: u64 = of("operations").map(|family| family["cases"].as_u64().unwrap()).sum();
    assert!(cases > 540, "{cases} cases");
    assert!(of("rate").count() >= 5 && of("rate").all(|rate| rate["value"].as_f64() > Some(0.0)));
    let done = found.last().unwrap();
    assert_eq!((&done["selftest"], &done["passed"]), (&Value::from("done"), &Value::from(true)));
    assert!(done["device"].as_str().unwrap().contains(device), "{done}");
}

#[test]
fn a_cpu_is_well() {
    let folder = tempfile::tempdir().unwrap();
    let out = phalanx(folder.path()).args(["selftest", "--quick", "--json"]).output().unwrap();
    check(&events(&out), "cpu", 11, 0);
    let told = phalanx(folder.path()).args(["selftest", "--quick"]).output().unwrap();
    let told = text(&told.stdout);
    assert!(
        ["cpu (", "convolutions", "against PyTorch", "all is well"].iter().all(|part| told.contains(part)),
        "{told}"
    );
}

#[test]
fn a_gpu_is_well_that_is_none() {
    let Some(fake) = fake() else { return };
    let folder = tempfile::tempdir().unwrap();
    let mut command = phalanx(folder.path());
    command.args(["selftest", "--device", "cuda:1", "--quick", "--json"]);
    command.env("LD_LIBRARY_PATH", fake.folder()).env_remove("CUDA_VISIBLE_DEVICES");
    // In each of six types, and two that are recorded.
    check(&events(&command.output().unwrap()), "cuda:1", 15, 8);
}
