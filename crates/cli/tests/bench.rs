//! `phalanx bench` as a user has it.

use serde_json::Value;
use std::fs;
use std::path::Path;
use std::process::{Command, Output};

fn bench(temporary: &Path, args: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_phalanx"));
    command.arg("bench").args(args).env("TMPDIR", temporary);
    command.env_remove("RANK").output().unwrap()
}

#[test]
fn sizes_that_no_machine_has_are_refused() {
    for (args, most) in [
        (&["bench", "step", "--threads", "100000"][..], 1024),
        (&["bench", "step", "--batch", "99999999"], 1 << 20),
        (&["bench", "step", "--model", "resnet18", "--image", "0"], 1 << 13),
        (&["bench", "recovery", "--workers", "1000000"], 4096),
        (&["bench", "pipeline", "--draw", "--stages", "100000"], 512),
        (&["selftest", "--threads", "1000000", "--quick"], 1024),
    ] {
        let out = Command::new(env!("CARGO_BIN_EXE_phalanx")).args(args).output().unwrap();
        let message = String::from_utf8_lossy(&out.stderr);
        assert_eq!(out.status.code(), Some(2), "{args:?}: {message}");
        assert!(message.contains(&format!("={most}")), "{args:?}: {message}");
    }
}

#[test]
fn what_cannot_be_measured_is_wrong_usage() {
    let folder = tempfile::tempdir().unwrap();
    let rows = [
        ["step", "--batch", "0"],
        ["step", "--steps", "0"],
        ["step", "--threads", "0"],
        ["loader", "--batch", "0"],
        ["loader", "--passes", "0"],
        ["launch", "--workers", "0"],
        ["launch", "--runs", "0"],
        ["allreduce", "--iters", "0"],
    ];
    for args in rows {
        let out = bench(folder.path(), &args);
        let message = String::from_utf8_lossy(&out.stderr).into_owned();
        assert_eq!(out.status.code(), Some(2), "{args:?}: {message}");
        assert!(message.contains(&format!("{} 0: must be at least 1", args[1])), "{message}");
    }
    let recorded = "--graphs: only whole steps of a GPU are recorded\nhint: ";
    for (args, said, hint) in [
        (&["step", "--graphs"][..], recorded, "add --device cuda"),
        (&["step", "--graphs", "--device", "cuda:0", "--forward-only"], recorded, "leave --forward-only out"),
        (&["step", "--search"], "--search: there are several ways", "--device cuda"),
        (
            &["step", "--precision", "tf32"],
            "--precision tf32: a CPU makes products in float32",
            "--device cuda",
        ),
    ] {
        let out = bench(folder.path(), args);
        let message = String::from_utf8_lossy(&out.stderr).into_owned();
        assert_eq!(out.status.code(), Some(2), "{args:?}: {message}");
        assert!(message.contains(said) && message.contains(hint), "{message}");
    }
}

#[test]
fn the_launcher_alone_starts_64_workers_at_once() {
    let folder = tempfile::tempdir().unwrap();
    let args = ["launch", "--workers", "64", "--errand", "nothing", "--runs", "3", "--json"];
    let out = bench(folder.path(), &args);
    assert_eq!(out.status.code(), Some(0), "{}", String::from_utf8_lossy(&out.stderr));
    let line: Value = serde_json::from_slice(&out.stdout).unwrap();
    assert_eq!((line["workers"].as_u64(), line["all_reduces"].as_u64()), (Some(64), Some(0)), "{line}");
    // Half a second is the aim, and a tenth the usual; the rest is for a machine that is busy with other tests.
    assert!(line["median_ms"].as_f64() < Some(5000.0), "{line}");
}

#[test]
fn launching_leaves_nothing_in_the_temporary_folder() {
    let folder = tempfile::tempdir().unwrap();
    // With so few descriptors the run can't even begin.
    for (limit, code) in [("unlimited", 0), ("8", 1)] {
        let script = format!("ulimit -n {limit} 2>/dev/null; exec \"$0\" bench launch --runs 1");
        let mut command = Command::new("bash");
        command.args(["-c", &script, env!("CARGO_BIN_EXE_phalanx")]).env("TMPDIR", folder.path());
        let out = command.env_remove("RANK").output().unwrap();
        assert_eq!(out.status.code(), Some(code), "{}", String::from_utf8_lossy(&out.stderr));
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 0, "ulimit -n {limit}");
    }
}

#[test]
fn a_loader_is_measured_on_images_that_are_made_up_where_there_are_none() {
    let folder = tempfile::tempdir().unwrap();
    let measure = |args: &[&str]| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_phalanx"));
        command.args(["bench", "loader", "--json", "--passes", "1"]).args(args);
        let out = command.env("TMPDIR", folder.path()).env("PHALANX_CACHE", folder.path()).output().unwrap();
        assert_eq!(out.status.code(), Some(0), "{}", String::from_utf8_lossy(&out.stderr));
        serde_json::from_slice::<serde_json::Value>(&out.stdout).unwrap()
    };
    let line = measure(&["--threads", "2", "--batch", "100"]);
    assert!(line["bench"] == "loader" && line["images_per_s"].as_f64().unwrap() > 0.0, "{line}");
    assert_eq!((line["images"].as_u64(), line["data"].as_str()), (Some(50_000), Some("cifar10")));
    assert!(
        ["synthetic", "/usr/share/datasets/cifar10"].contains(&line["location"].as_str().unwrap()),
        "{line}"
    );
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 0, "what was made up is gone");
    let line = measure(&["--data-name", "mnist-mini"]);
    assert_eq!(
        (line["images"].as_u64(), line["location"].as_str()),
        (Some(2000), Some("inside this program"))
    );
    let wrong = bench(folder.path(), &["loader", "--set", "data.flop=true"]);
    let message = String::from_utf8_lossy(&wrong.stderr).into_owned();
    assert!(wrong.status.code() == Some(2) && message.contains("did you mean data.flip?"), "{message}");
}

/// `bench allreduce` of a few rounds, outside of any run.
fn allreduce(temporary: &Path, args: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_phalanx"));
    command.args(["bench", "allreduce", "--json", "--iters", "3"]).args(args).env("TMPDIR", temporary);
    command.env_remove("RANK").env_remove("PHALANX_TRANSPORT").output().unwrap()
}

fn json_lines(out: &Output) -> Vec<Value> {
    assert_eq!(out.status.code(), Some(0), "{}", String::from_utf8_lossy(&out.stderr));
    let lines = String::from_utf8_lossy(&out.stdout).into_owned();
    lines.lines().map(|line| serde_json::from_str(line).expect("nothing but JSON")).collect()
}

#[test]
fn all_reduces_are_measured_and_verified_over_every_transport() {
    let folder = tempfile::tempdir().unwrap();
    let rows = [
        (&[][..], "shared memory"),
        (&["--transport", "memory"], "shared memory"),
        (&["--transport", "tcp"], "TCP"),
        (&["--transport", "threads"], "threads"),
        (&["--algorithm", "doubling"], "shared memory"),
    ];
    for (args, over) in rows {
        let out = allreduce(folder.path(), &[&["--nproc", "2..3", "--sizes", "4,1000,1M"], args].concat());
        let lines = json_lines(&out);
        let places = [(2, 4), (2, 1000), (2, 1 << 20), (3, 4), (3, 1000), (3, 1 << 20)];
        assert_eq!(lines.len(), places.len(), "a line a size: {lines:?}");
        for (line, (ranks, bytes)) in lines.iter().zip(places) {
            let number = |key: &str| line[key].as_f64().unwrap_or_else(|| panic!("{key} in {line}"));
            assert_eq!((&line["bench"], &line["verified"]), (&"allreduce".into(), &true.into()), "{line}");
            assert_eq!((number("ranks"), number("bytes")), (f64::from(ranks), f64::from(bytes)), "{line}");
            assert_eq!((number("iters"), number("wrong")), (3.0, 0.0), "{line}");
            assert_eq!(line["group"], format!("{ranks} ranks over {over}"));
            let (algorithm, why) = (line["algorithm"].as_str().unwrap(), line["why"].as_str().unwrap());
            assert!(why.starts_with(&format!("{algorithm}: ")), "{line}");
            assert_eq!(why == "doubling: asked for", args.contains(&"doubling"), "{line}");
            let (p50, algbw) = (number("p50_us"), number("algbw_gbps"));
            assert!(p50 > 0.0 && p50 <= number("p99_us"), "{line}");
            assert!((algbw * p50 * 1e3 / f64::from(bytes) - 1.0).abs() < 1e-9, "{line}");
            let factor = 2.0 * f64::from(ranks - 1) / f64::from(ranks);
            assert!((number("busbw_gbps") / algbw / factor - 1.0).abs() < 1e-9, "{line}");
        }
        let table = String::from_utf8_lossy(&out.stderr).into_owned();
        let headings = "size      count    type         p50         p99    algbw    busbw  wrong";
        assert_eq!(table.matches(headings).count(), 2, "one for each number of ranks: {table}");
        assert_eq!(table.matches(" float32 ").count(), places.len(), "{table}");
    }
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 0, "nothing is left behind");
}

#[test]
fn ranks_of_a_run_measure_all_reduces_among_themselves() {
    let folder = tempfile::tempdir().unwrap();
    let me = env!("CARGO_BIN_EXE_phalanx");
    let mut command = Command::new(me);
    command.args(["run", "--nproc-per-node", "3", "--no-prefix", "--out"]).arg(folder.path());
    command.args(["--", me, "bench", "allreduce", "--json", "--sizes", "64", "--iters", "1"]);
    command.env_remove("RANK").env_remove("PHALANX_TRANSPORT").env("PHALANX_ALLREDUCE", "tree");
    let lines = json_lines(&command.output().unwrap());
    assert_eq!((lines.len(), lines[0]["ranks"].as_u64()), (1, Some(3)), "{lines:?}");
    assert_eq!(lines[0]["why"], "tree: asked for");
    command.env("PHALANX_ALLREDUCE", "spiral");
    let out = command.output().unwrap();
    let message = String::from_utf8_lossy(&out.stderr);
    let want = "PHALANX_ALLREDUCE is \"spiral\": must be auto, direct, ring, halving, doubling, tree, star, hierarchical";
    assert!(out.status.code() == Some(1) && message.contains(want), "{message}");
}

#[test]
fn ranks_and_sizes_that_cannot_be_are_named_with_what_can() {
    let folder = tempfile::tempdir().unwrap();
    let rows = [
        (["--nproc", "0"], "must be a number of ranks from 1 to 64, or a range of them such as 2..8"),
        (["--nproc", "8..2"], "must be a number of ranks from 1 to 64, or a range of them such as 2..8"),
        (["--sizes", "6"], "must be bytes from 4 to 1024M, a multiple of 4 (float32), as in 4,64K,16M"),
        (["--sizes", "2G"], "must be bytes from 4 to 1024M, a multiple of 4 (float32), as in 4,64K,16M"),
        (
            ["--algorithm", "spiral"],
            "must be auto, direct, ring, halving, doubling, tree, star, hierarchical",
        ),
        (["--transport", "udp"], "[possible values: memory, tcp, threads]"),
    ];
    for (args, allowed) in rows {
        let out = allreduce(folder.path(), &args);
        let message = String::from_utf8_lossy(&out.stderr).into_owned();
        assert_eq!(out.status.code(), Some(2), "{args:?}: {message}");
        assert!(args.iter().all(|word| message.contains(word)) && message.contains(allowed), "{message}");
    }
}

#[test]
fn another_transport_than_the_one_asked_for_is_not_measured() {
    let folder = tempfile::tempdir().unwrap();
    let me = env!("CARGO_BIN_EXE_phalanx");
    let rows = [
        ("tcp", "0", "memory", "--transport memory: these are 2 ranks over TCP"),
        ("tcp", "1", "memory", "--transport memory: these are 2 ranks over TCP with TLS"),
        ("auto", "0", "tcp", "--transport tcp: these are 2 ranks over shared memory"),
        ("auto", "0", "threads", "--transport threads: this is a rank of a run already"),
    ];
    for (given, tls, asked, want) in rows {
        let mut command = Command::new(me);
        command.env_remove("RANK").env("PHALANX_TRANSPORT", given).env("PHALANX_TLS", tls);
        command
            .args(["run", "--nproc-per-node", "2", "--out"])
            .arg(folder.path().join(format!("{asked}{tls}")));
        let out = command.args(["--", me, "bench", "allreduce", "--transport", asked]).output().unwrap();
        let message = String::from_utf8_lossy(&out.stderr).into_owned();
        assert!(out.status.code() == Some(1) && message.contains(want), "{message}");
    }
}

#[test]
fn a_job_is_measured_at_several_counts_and_foretold_at_another() {
    let folder = tempfile::tempdir().unwrap();
    let picture = folder.path().join("scaling.svg");
    let args = [
        "scaling",
        "mnist-mini",
        "--workers",
        "1,2,3",
        "--hold-out",
        "3",
        "--batch",
        "24",
        "--json",
        "--svg",
    ];
    let sizes = ["--runs", "2", "--steps", "8", "--warm-up", "2"];
    let mut command = Command::new(env!("CARGO_BIN_EXE_phalanx"));
    command.arg("bench").args(args).arg(&picture).args(sizes).env("TMPDIR", folder.path());
    for (name, _) in std::env::vars().filter(|(name, _)| name.starts_with("SLURM_")) {
        command.env_remove(name);
    }
    let out = command.env_remove("RANK").output().unwrap();
    assert_eq!(out.status.code(), Some(0), "{}", String::from_utf8_lossy(&out.stderr));
    let line: Value = serde_json::from_slice(&out.stdout).unwrap();
    assert_eq!((line["bench"].as_str(), line["runs"].as_u64()), (Some("scaling"), Some(2)));
    let cores = line["cores"].as_u64().unwrap();
    assert!((0.0..=1.0).contains(&line["busy"].as_f64().unwrap()), "{line}");
    let points = line["points"].as_array().unwrap();
    let seen: Vec<(&str, u64, u64)> = points
        .iter()
        .map(|p| (p["mode"].as_str().unwrap(), p["workers"].as_u64().unwrap(), p["batch"].as_u64().unwrap()))
        .collect();
    let want = [
        ("weak", 1, 24),
        ("weak", 2, 24),
        ("weak", 3, 24),
        ("strong", 1, 24),
        ("strong", 2, 12),
        ("strong", 3, 8),
    ];
    assert_eq!(seen, want);
    for point in points {
        let of = |key: &str| point[key].as_f64().unwrap();
        assert!(of("step_ms") > 0.0 && of("compute_ms") > 0.0 && of("spread_ms") >= 0.0, "{point}");
        let workers = of("workers");
        assert!((of("efficiency") * workers - of("speed_up")).abs() < 1e-9, "{point}");
        // The samples of a step in the time that it takes.
        assert!((of("samples_per_s") * of("step_ms") / 1e3 - workers * of("batch")).abs() < 1e-6, "{point}");
        assert_eq!(point["shares_cores"].as_bool(), Some(workers as u64 > cores), "{point}");
        if workers < 1.5 {
            assert!((of("speed_up") - 1.0).abs() < 1e-9, "{point}");
        }
        let held_out = &point["held_out"];
        assert_eq!(held_out.is_object(), workers > 2.5, "{point}");
        if let Some(ms) = held_out["predicted"]["ms"].as_f64() {
            let error = held_out["error"].as_f64().unwrap();
            assert!(ms > 0.0 && (ms / of("step_ms") - 1.0 - error).abs() < 1e-9, "{point}");
        }
    }
    for mode in line["modes"].as_array().unwrap() {
        assert!(mode["worth"].as_u64() >= Some(1) && mode["worth_here"].as_u64() >= Some(1), "{mode}");
        let expected = mode["expected"].as_array().unwrap();
        assert_eq!(expected.last().unwrap()["workers"].as_u64(), Some(64), "{mode}");
        let within = |e: &Value| {
            e["speed_up_from"].as_f64() <= e["speed_up"].as_f64()
                && e["speed_up"].as_f64() <= e["speed_up_to"].as_f64()
        };
        assert!(expected.iter().all(within), "{mode}");
    }
    assert!(
        line["coefficients"].as_object().unwrap().values().all(|value| value.as_f64() >= Some(0.0)),
        "{line}"
    );
    let picture = fs::read_to_string(picture).unwrap();
    assert!(
        picture.starts_with("<svg") && picture.ends_with("</svg>\n") && !picture.contains("NaN"),
        "{picture}"
    );
    // What was measured is told as it comes, and what doesn't fit the cores is said.
    let said = String::from_utf8_lossy(&out.stderr);
    assert!(said.contains("run 2 of 2, 3 workers, 8 samples each: "), "{said}");
    assert_eq!(said.contains("take turns"), cores < 3, "{said}");
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1, "only the picture is left");
}

#[test]
fn counts_that_say_nothing_are_wrong_usage() {
    let folder = tempfile::tempdir().unwrap();
    for (args, want) in [
        (&["scaling", "--workers", "1"][..], "takes two counts or more"),
        (&["scaling", "--workers", "1,0"], "from 1 to 4096"),
        (&["scaling", "--workers", "1,2,4", "--hold-out", "3"], "--hold-out 3: is none of the counts"),
        (&["scaling", "--workers", "1,2,3"], "--batch 64: isn't dealt evenly to 3 workers\nhint: --batch 66"),
        (&["scaling", "--runs", "0"], "--runs 0: must be at least 1"),
        (&["scaling", "no-such-recipe"], "no-such-recipe"),
    ] {
        let out = bench(folder.path(), args);
        let message = String::from_utf8_lossy(&out.stderr).into_owned();
        assert_eq!(out.status.code(), Some(2), "{args:?}: {message}");
        assert!(message.contains(want), "{args:?}: {message}");
    }
}
