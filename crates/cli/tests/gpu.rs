//! `phalanx train --device cuda` as a user has it, on the fake driver, which is found as the real one is: where LD_LIBRARY_PATH
//! says. Where there is no C++ compiler, tests say so and pass.

#[path = "../../phalanx/tests/gpu/fake.rs"]
mod fake;
mod user;

use fake::fake;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::{Value, json};
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::Path;
use std::process::{Command, Output, Stdio};
use std::thread;
use std::time::{Duration, Instant};
use user::{events, phalanx, text, worker};

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
    let by_host = ["--nproc-per-node", "gpu", "--set", "parallel.between_gpus=host"];
    let by_nccl = ["--nproc-per-node", "gpu", "--set", "parallel.between_gpus=nccl"];
    for args in [&by_nccl[..], &by_host, &["--nproc-per-node", "2", "--device", "cuda:0"]] {
        let out = train(folder.path(), fake.folder(), args);
        assert!(
            events(&out).iter().filter(|e| e["event"] == "step").all(|e| e["world_size"] == 2),
            "{args:?}"
        );
        near(&losses(&out), &want);
    }
}

/// Each stage of ZeRO, on a GPU a worker and on one that they share, and a file that holds the whole model in the end.
#[test]
fn workers_that_share_out_a_model_have_the_losses_of_cpus() {
    let Some(fake) = fake() else { return };
    let folder = tempfile::tempdir().unwrap();
    let want = losses(&train(folder.path(), fake.folder(), &["--out", "cpu"]));
    let size = |out: &str| fs::metadata(folder.path().join(out).join("model.safetensors")).unwrap().len();
    for (stage, precision) in [("1", "float32"), ("2", "float32"), ("3", "float32"), ("3", "bfloat16")] {
        for device in [
            &["--nproc-per-node", "gpu", "--set", "parallel.between_gpus=nccl"][..],
            &["--nproc-per-node", "2", "--device", "cuda:0"],
        ] {
            let zero = format!("parallel.zero={stage}");
            let precision = format!("train.precision={precision}");
            let args = ["--strategy", "fsdp", "--set", &zero, "--set", &precision, "--out", "gpu"];
            let out = train(folder.path(), fake.folder(), &[device, &args].concat());
            let got = losses(&out);
            assert_eq!(got.len(), 4, "{}", text(&out.stderr));
            let allowed = if precision.ends_with("float32") { TOLERANCE } else { 3e-2 };
            let near = got.iter().zip(&want).all(|(got, want)| (got - want).abs() <= allowed);
            assert!(near, "{args:?}: {got:?}, not {want:?}");
            assert_eq!(size("gpu"), size("cpu"), "{args:?}");
        }
    }
}

/// A language model whose matrices, sequences and stages lie on two workers, with dropout on.
#[test]
fn replicas_on_several_workers_have_the_losses_of_cpus() {
    let Some(fake) = fake() else { return };
    let folder = tempfile::tempdir().unwrap();
    fs::write(folder.path().join("text"), "what many say at once. ".repeat(200)).unwrap();
    let trained = |args: &str| {
        let model = "--set model.layers=1 --set model.width=8 --set model.heads=2 --set model.context=8";
        let steps = "--batch-size 4 --steps 3 --nproc-per-node 2 --log-interval 1 --json";
        let mut command = phalanx(folder.path());
        command.args(format!("train gpt --data text {model} {steps} {args}").split_whitespace());
        let out = command.env("LD_LIBRARY_PATH", fake.folder()).env_remove("CUDA_VISIBLE_DEVICES").output();
        let out = out.unwrap();
        assert_eq!(out.status.code(), Some(0), "{args}: {}", text(&out.stderr));
        losses(&out)
    };
    for (mesh, device) in [
        ("--set parallel.tensor=2 --set parallel.sequence=true", "--device cuda:0"),
        ("--set parallel.pipeline=2", "--device cuda"),
        // Letters cross: nobody waits for what it sends.
        ("--set parallel.pipeline=2", "--device cuda --debug-sync"),
    ] {
        near(&trained(&format!("{mesh} {device} --out gpu")), &trained(&format!("{mesh} --out cpu")));
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
    let placed = train(folder.path(), &some, &["--device", "cuda:0", "--strategy", "dp"]);
    assert_eq!(placed.status.code(), Some(2));
    assert!(text(&placed.stderr).contains("--strategy ddp or fsdp"), "{}", text(&placed.stderr));
    let wrong = train(folder.path(), &some, &["--device", "gpu"]);
    assert_eq!(wrong.status.code(), Some(2));
    assert!(text(&wrong.stderr).contains("cuda:N"), "{}", text(&wrong.stderr));
}

fn world_size(out: &Output) -> u64 {
    let all = events(out);
    all.iter().find(|e| e["event"] == "step").and_then(|e| e["world_size"].as_u64()).unwrap()
}

#[test]
fn workers_are_as_many_as_gpus_and_parts_that_are_to_be_seen() {
    let Some(fake) = fake() else { return };
    let folder = tempfile::tempdir().unwrap();
    let parts = "MIG-00000000-0000-0000-0000-000000000001,MIG-00000000-0000-0000-0000-000000000002";
    for (visible, want) in [("1", 1), ("GPU-02020202-0202-0202-0202-020202020202,0", 2), (parts, 2)] {
        let mut command = command(folder.path(), fake.folder(), &["--nproc-per-node", "gpu", "--steps", "1"]);
        let out = command.env("CUDA_VISIBLE_DEVICES", visible).output().unwrap();
        assert_eq!(world_size(&out), want, "{visible}");
    }
    // Where nobody says how many, no two share one.
    for (visible, device, want) in
        [("1", "cuda", 1), ("1,0", "cuda", 2), (parts, "cuda", 2), ("1,0", "cuda:0", 1), ("0", "cpu", 2)]
    {
        let mut command = command(folder.path(), fake.folder(), &["--device", device, "--steps", "1"]);
        let out = command.env("CUDA_VISIBLE_DEVICES", visible).output().unwrap();
        assert_eq!(world_size(&out), want, "{visible}, {device}");
    }
    let mut three = command(folder.path(), fake.folder(), &["--device", "cuda", "--nproc-per-node", "3"]);
    refused(
        &three.env("CUDA_VISIBLE_DEVICES", parts).output().unwrap(),
        &["there is no GPU 2", "there are 2"],
    );
    let mut none = command(folder.path(), fake.folder(), &["--nproc-per-node", "gpu"]);
    refused(&none.env("CUDA_VISIBLE_DEVICES", "").output().unwrap(), &["CUDA_VISIBLE_DEVICES"]);
}

/// What a command without a run prints under `--json`.
fn told(folder: &Path, libraries: &Path, args: &[&str], code: i32) -> Vec<Value> {
    let mut command = phalanx(folder);
    command.args(args).arg("--json").env("LD_LIBRARY_PATH", libraries).env_remove("CUDA_VISIBLE_DEVICES");
    let out = command.output().unwrap();
    assert_eq!(out.status.code(), Some(code), "{}", text(&out.stderr));
    text(&out.stdout).lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

/// Whether this machine has NVML of its own.
fn has_nvml() -> bool {
    let list = Command::new("ldconfig").arg("-p").output();
    list.is_ok_and(|list| text(&list.stdout).contains("libnvidia-ml.so.1"))
}

#[test]
fn top_shows_gpus_with_the_ranks_that_are_on_them() {
    let Some(fake) = fake() else { return };
    let folder = tempfile::tempdir().unwrap();
    // What the run was started with is what makes it a rank.
    let mut rank = Command::new("sleep");
    rank.arg("600").env("RANK", "3").env("TORCHELASTIC_RUN_ID", "top-of-a-test");
    let mut rank = rank.spawn().unwrap();
    let pid = rank.id();
    // It is there a moment before what it was started with is.
    let is_told = || {
        fs::read(format!("/proc/{pid}/environ")).is_ok_and(|all| text(&all).contains("TORCHELASTIC_RUN_ID"))
    };
    let deadline = Instant::now() + Duration::from_secs(20);
    while !is_told() {
        assert!(Instant::now() < deadline, "process {pid} never told its environment");
        thread::sleep(Duration::from_millis(1));
    }
    fake.nvml_sees(&format!("gpu 40 1 8 100 700 50\nprocess {pid} 512\nprocess 1 -\ngpu 0 0 8 70 700 30\n"));
    let lines = told(folder.path(), fake.folder(), &["top"], 0);
    rank.kill().unwrap();
    rank.wait().unwrap();
    let gpus: Vec<&Value> = lines.iter().filter(|line| line["top"] == "gpu").collect();
    assert_eq!((gpus.len(), &gpus[0]["busy_percent"], &gpus[0]["device"]), (2, &json!(40), &json!("cuda:0")));
    let own = json!({"pid": pid, "bytes": 512 << 20, "run": "top-of-a-test", "rank": 3});
    assert_eq!(gpus[0]["processes"], json!([own, {"pid": 1, "bytes": null}]));
    let worker = lines.iter().find(|line| line["top"] == "worker" && line["pid"] == pid).unwrap();
    assert_eq!((&worker["run"], &worker["rank"]), (&json!("top-of-a-test"), &json!(3)));
    assert!(worker["memory_bytes"].as_u64() > Some(0), "{worker}");
    assert_eq!(lines.last().unwrap()["top"], "look");
}

#[test]
fn doctor_tells_what_is_there_and_what_is_missing() {
    let Some(fake) = fake() else { return };
    let folder = tempfile::tempdir().unwrap();
    let lines = told(folder.path(), fake.folder(), &["doctor"], 0);
    let of = |what: &'static str| lines.iter().filter(move |line| line["doctor"] == what);
    assert_eq!((of("machine").count(), of("library").count(), of("gpu").count()), (1, 6, 2));
    assert!(of("library").all(|library| library["missing"].is_null()), "{lines:?}");
    assert!(of("library").any(|library| library["version"] == "13.0, for GPUs from sm_80 on"), "{lines:?}");
    assert_eq!(of("done").next().unwrap()["trouble"], json!([]));
    if has_nvml() {
        return eprintln!("skipped: this machine has NVIDIA's driver");
    }
    // GPUs without the libraries that compute on them.
    let some = folder.path().join("libraries");
    fs::create_dir(&some).unwrap();
    for file in ["libcuda.so.1", "libnvidia-ml.so.1", "modules"] {
        fs::copy(fake.folder().join(file), some.join(file)).unwrap();
    }
    let lines = told(folder.path(), &some, &["doctor"], 1);
    let trouble = lines.last().unwrap()["trouble"].to_string();
    assert!(
        ["nvidia-cuda-nvrtc", "nvidia-cublas", "nvidia-cudnn-cu13", "nvidia-nccl-cu13"]
            .iter()
            .all(|package| trouble.contains(package)),
        "{trouble}"
    );
    // Neither driver nor GPU: nothing is wrong.
    let none = folder.path().join("none");
    fs::create_dir(&none).unwrap();
    let lines = told(folder.path(), &none, &["doctor"], 0);
    let missing: Vec<&str> = lines.iter().filter_map(|line| line["missing"].as_str()).collect();
    assert_eq!(missing.len(), 6, "{lines:?}");
    let lines = told(folder.path(), &none, &["top"], 0);
    let why = lines.last().unwrap()["why_no_gpus"].as_str().unwrap().to_owned();
    assert!(why.contains("NVML") && why.contains("phalanx doctor"), "{why}");
}

/// The line of `bench step` with these words more.
fn step_line(libraries: &Path, more: &str) -> Value {
    let folder = tempfile::tempdir().unwrap();
    let args = format!("bench step --batch 4 --steps 5 --json {more}");
    let mut command = phalanx(folder.path());
    command.args(args.split_whitespace()).env("LD_LIBRARY_PATH", libraries);
    let out = command.env_remove("CUDA_VISIBLE_DEVICES").output().unwrap();
    assert_eq!(out.status.code(), Some(0), "{more}: {}", text(&out.stderr));
    serde_json::from_slice(&out.stdout).unwrap()
}

#[test]
fn a_step_is_measured_on_a_gpu_as_training_makes_it() {
    let Some(fake) = fake() else { return };
    let gpt = "--model gpt --layers 2 --width 32 --heads 4 --seq 16 --vocabulary 300 --tied";
    for (job, precision, graphs, search) in [
        ("--model mnist", "float32", false, false),
        ("--model mnist", "tf32", true, true),
        ("--model mnist", "bfloat16", true, false),
        (gpt, "bfloat16", false, true),
        (gpt, "bfloat16", true, false),
    ] {
        let word = |is_asked: bool, word: &'static str| if is_asked { word } else { "" };
        let more = [word(graphs, "--graphs"), word(search, "--search")].join(" ");
        let more = format!("{job} --device cuda:1 --precision {precision} {more}");
        let line = step_line(fake.folder(), &more);
        let told = ["device", "precision", "graphs", "search"].map(|key| line[key].clone());
        assert_eq!(told, [json!("cuda:1"), json!(precision), json!(graphs), json!(search)], "{line}");
        let above_zero = |key: &str| line[key].as_f64().is_some_and(|number| number > 0.0);
        assert!(["median_ms", "p95_ms", "gflops", "gpu_mb"].into_iter().all(above_zero), "{line}");
    }
}

#[test]
fn a_worker_that_is_killed_between_sums_of_gpus_is_replaced_and_the_others_go_on() {
    let Some(fake) = fake() else { return };
    let folder = tempfile::tempdir().unwrap();
    let args = ["--nproc-per-node", "gpu", "--steps", "14", "--set", "parallel.between_gpus=nccl"];
    let want = train(folder.path(), fake.folder(), &[&args[..], &["--out", "whole"]].concat());
    let of = |out: &Output| -> Vec<(u64, f64)> {
        let steps = events(out).into_iter().filter(|e| e["event"] == "step");
        steps.map(|e| (e["step"].as_u64().unwrap(), e["loss"].as_f64().unwrap())).collect()
    };
    let want = of(&want);
    for graphs in ["train.graphs=false", "train.graphs=true"] {
        let out = folder.path().join(graphs);
        let args = [&args[..], &["--out", graphs, "--set", graphs]].concat();
        let mut command = command(folder.path(), fake.folder(), &args);
        command.env("PHALANX_LOG", TELLS_RECORDINGS);
        let run = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        until_steps(&out, 3);
        kill(Pid::from_raw(worker(&out, 1)), Signal::SIGKILL).unwrap();
        let run = run.wait_with_output().unwrap();
        assert_eq!(recordings(&run) >= 2, graphs == "train.graphs=true", "before and after the loss");
        let got = of(&run);
        assert_eq!(got.len(), 14, "each step is told once");
        let apart = got.iter().zip(&want).map(|(a, b)| (a.1 - b.1).abs()).fold(0.0, f64::max);
        assert!(
            got.iter().zip(&want).all(|(a, b)| a.0 == b.0) && apart <= 10.0 * TOLERANCE,
            "{graphs}, {apart}: {got:?}, not {want:?}"
        );
    }
}

/// It would be at fault for another worker, too.
#[test]
fn a_worker_whose_gpu_is_at_fault_leaves_and_the_others_go_on() {
    let Some(fake) = fake() else { return };
    let alone = "train mnist-mini --nproc-per-node gpu --out out";
    let binary = env!("CARGO_BIN_EXE_phalanx");
    // By an agent that is told by a coordinator what follows.
    let led = "run --nnodes 1:2 --rdzv-endpoint 127.0.0.1:0 --rdzv-id led --rdzv-conf last_call_timeout=0.1";
    let led = format!(
        "{led} --nproc-per-node 2 --max-restarts 3 --no-prefix --out out -- {binary} train mnist-mini --device cuda"
    );
    for (code, by, more, goes_back) in [
        (214, alone, "parallel.between_gpus=nccl", false),
        (220, led.as_str(), "parallel.between_gpus=host", false),
        // The part that is lost comes from the checkpoint, and is held by who is left.
        (214, alone, "train.checkpoint_every=2 --strategy fsdp", true),
    ] {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("fault");
        let args = format!("{by} --batch-size 8 --steps 14 --log-interval 1 --json --set {more}");
        let mut command = phalanx(folder.path());
        command.args(args.split_whitespace());
        command.env("LD_LIBRARY_PATH", fake.folder()).env_remove("CUDA_VISIBLE_DEVICES");
        command.env("PHALANX_FAKE_FAULT", format!("1 {code} {}", file.display()));
        let run = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        until_steps(&folder.path().join("out"), 3);
        fs::write(file, "").unwrap();
        let run = run.wait_with_output().unwrap();
        let said = text(&run.stderr);
        assert_eq!(run.status.code(), Some(0), "{said}");
        let told =
            said.lines().find(|line| line.contains("no other is started for rank 1, the others go on"));
        assert!(told.is_some_and(|line| line.contains(&format!("CUDA error {code}"))), "{said}");
        let events = events(&run);
        let steps = events.iter().filter(|event| event["event"] == "step");
        let mut steps: Vec<u64> = steps.map(|event| event["step"].as_u64().unwrap()).collect();
        if goes_back {
            steps.sort_unstable();
            steps.dedup();
        }
        assert_eq!(steps, (0..14).collect::<Vec<_>>(), "no step is lost");
    }
}

/// A run of which this worker's GPU meets a fault once three steps are told, and what is done then.
fn at_fault(libraries: &Path, gpu: u32, more: &str, then: impl FnOnce(&Path)) -> Output {
    let folder = tempfile::tempdir().unwrap();
    let (file, out) = (folder.path().join("fault"), folder.path().join("out"));
    let args = format!("--steps 500 --log-interval 1 --out out {more}");
    let mut command = command(folder.path(), libraries, &args.split_whitespace().collect::<Vec<_>>());
    command.env("PHALANX_FAKE_FAULT", format!("{gpu} 214 {}", file.display()));
    let run = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    until_steps(&out, 3);
    fs::write(file, "").unwrap();
    then(&out);
    run.wait_with_output().unwrap()
}

#[test]
fn a_fault_of_the_last_gpu_ends_the_run_and_one_that_others_got_over_is_not_blamed() {
    let Some(fake) = fake() else { return };
    let run = at_fault(fake.folder(), 0, "--nproc-per-node 1 --device cuda:0", |_| {});
    let said = text(&run.stderr);
    assert_eq!(run.status.code(), Some(1), "{said}");
    assert!(said.contains("no other is started for rank 0: ") && said.contains("CUDA error 214"), "{said}");
    assert!(said.contains("another worker would fail in the same way"), "{said}");
    assert!(!said.contains("starting all workers again") && !said.contains("restart 1"), "{said}");
    // The fault uses up no restart, and what ends the run later is something else.
    let run = at_fault(fake.folder(), 1, "--nproc-per-node gpu --max-restarts 1", |out| {
        let told = |event: &str| {
            let events = fs::read_to_string(out.join("events.jsonl")).unwrap_or_default();
            events.lines().filter(|line| line.contains(event)).count()
        };
        let until = |what: &str, is: &dyn Fn() -> bool| {
            let start = Instant::now();
            while !is() {
                assert!(start.elapsed() < Duration::from_secs(120), "{what}");
                std::thread::sleep(Duration::from_millis(5));
            }
        };
        until("rank 0 goes on alone", &|| told("\"world_size\":1") > 0);
        // Losses within a second of each other are one event.
        std::thread::sleep(Duration::from_millis(1500));
        for kills in 1..=2 {
            let pid = worker(out, 0);
            kill(Pid::from_raw(pid), Signal::SIGKILL).unwrap();
            if kills == 1 {
                let steps = told("\"step\"");
                until("another makes steps", &|| told("\"step\"") > steps + 3 && worker(out, 0) != pid);
                std::thread::sleep(Duration::from_millis(1500));
            }
        }
    });
    let said = text(&run.stderr);
    assert_eq!(run.status.code(), Some(1), "{said}");
    assert!(said.contains("no other is started for rank 1, the others go on"), "{said}");
    let (_, end) = said.rsplit_once("error: ").unwrap();
    assert!(end.starts_with("rank 0 ") && end.contains("was killed by SIGKILL"), "{said}");
    assert!(end.contains("all restarts of --max-restarts 1 are used"), "{said}");
}

/// Returns when so many steps of the run of this folder are told.
fn until_steps(out: &Path, steps: usize) {
    let told = || fs::read_to_string(out.join("events.jsonl")).unwrap_or_default();
    let start = Instant::now();
    while told().lines().filter(|line| line.contains("\"step\"")).count() < steps {
        assert!(start.elapsed() < Duration::from_secs(120), "no steps are made: {}", told());
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// With which what a worker records is told.
const TELLS_RECORDINGS: &str = "warn,phalanx_parallel=debug";

/// How many passes the first worker has recorded, whose lines are shown.
fn recordings(out: &Output) -> usize {
    text(&out.stderr).matches("a pass was recorded").count()
}

/// Where each worker holds a part of the model, what is lost with one is nowhere else: all go on from the newest checkpoint, each
/// in its place. Where two hold each part, nothing is lost.
#[test]
fn workers_that_share_out_a_model_on_gpus_go_on_when_one_is_lost() {
    let Some(fake) = fake() else { return };
    let folder = tempfile::tempdir().unwrap();
    let trained = |name: &str, args: &str, killed: bool| {
        let args: Vec<&str> = args.split_whitespace().chain(["--steps", "14", "--out", name]).collect();
        let mut command = command(folder.path(), fake.folder(), &args);
        let run = command
            .env("PHALANX_LOG", TELLS_RECORDINGS)
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let out = folder.path().join(name);
        if killed {
            until_steps(&out, 5);
            kill(Pid::from_raw(worker(&out, 1)), Signal::SIGKILL).unwrap();
        }
        let run = run.wait_with_output().unwrap();
        let said = text(&run.stderr).to_owned();
        assert_eq!(run.status.code(), Some(0), "{said}");
        assert_eq!(said.matches("another takes its place").count(), usize::from(killed), "{said}");
        assert!(!said.contains("starting all workers again"), "{said}");
        let steps = events(&run).into_iter().filter(|e| e["event"] == "step");
        let steps = steps.map(|e| (e["step"].as_u64().unwrap(), e["loss"].as_f64().unwrap()));
        let steps: BTreeMap<u64, f64> = steps.collect();
        (steps, fs::read(out.join("model.safetensors")).unwrap(), recordings(&run))
    };
    let graphs = "--set train.graphs=true";
    let on = "--strategy fsdp --max-restarts 2 --log-interval 1 --set train.clip_norm=0.5";
    for (number, (args, hurt_ones)) in [
        ("--nproc-per-node gpu --set train.checkpoint_every=2 --set train.checkpoint=parts", ["", graphs]),
        ("--nproc-per-node 4 --device cuda:0 --set parallel.shard=2", ["", ""]),
        ("--nproc-per-node gpu --set parallel.zero=1 --set train.checkpoint_every=2", ["", graphs]),
        ("--nproc-per-node gpu --set parallel.offload=true --set train.checkpoint_every=2", ["", ""]),
    ]
    .into_iter()
    .enumerate()
    {
        let args = format!("{on} {args}");
        let (want, whole, _) = trained(&format!("whole-{number}"), &args, false);
        for more in hurt_ones.into_iter().collect::<BTreeSet<_>>() {
            let args = format!("{args} {more}");
            let (got, hurt, recorded) =
                trained(&format!("hurt-{number}{more}").replace(' ', "-"), &args, true);
            assert_eq!(got, want, "{args}");
            assert!(hurt == whole, "{args}: other weights in the end");
            // One before the loss, and one when they go on.
            assert_eq!(recorded >= 2, more == graphs, "{args}: {recorded} recordings");
        }
    }
}

/// Also where passes would be replayed, which are made as ever then; else what fails is told at some later call.
#[test]
fn an_illegal_access_within_a_library_is_told_with_its_operation() {
    let Some(fake) = fake() else { return };
    let folder = tempfile::tempdir().unwrap();
    let graphs = "--nproc-per-node 1 --set train.graphs=true";
    for (call, args, words) in [
        ("cublasLtMatmul 5", "--nproc-per-node 1", "the product ("),
        ("cudnnBackendExecute 9", graphs, "the convolution "),
        ("ncclAllReduce 2", "--nproc-per-node gpu", "all-reduce of "),
    ] {
        for named in [true, false] {
            let mut args: Vec<&str> = args.split_whitespace().collect();
            args.extend(["--device", "cuda", "--max-restarts", "0"]);
            args.extend(named.then_some("--debug-sync"));
            let mut command = command(folder.path(), fake.folder(), &args);
            let out = command.env("PHALANX_FAKE_ILLEGAL", call).env("RUST_BACKTRACE", "0").output().unwrap();
            let said = text(&out.stderr);
            assert_eq!(out.status.code(), Some(1), "{call}: {said}");
            assert!(said.contains("CUDA_ERROR_ILLEGAL_ADDRESS"), "{call}: {said}");
            assert!(said.contains("with --debug-sync (a program's own: DebugSync::Yes)"), "{call}: {said}");
            let told =
                said.lines().find(|line| line.contains("an access to memory that isn't there")).unwrap();
            // Whoever waits for a collective may be told by that, too, which one it was.
            if named || !call.starts_with("nccl") {
                assert_eq!(told.contains(words), named, "{call}: {said}");
            }
            let warned = said.matches("passes aren't recorded, since with --debug-sync").count();
            assert_eq!(warned, usize::from(named && args.contains(&"train.graphs=true")), "{call}: {said}");
        }
    }
}

/// Whoever is started again would ask for as much. Before the workers meet, where a GPU hasn't room for the model, and in a pass.
#[test]
fn a_run_without_memory_ends_at_once_and_says_who_has_it() {
    let Some(fake) = fake() else { return };
    // What the engine takes itself is 32 MiB.
    for (workers, bytes, parts) in [
        ("1", (32 << 20) + (4 << 10), &["for values of parameters"][..]),
        (
            "1",
            34 << 20,
            &[
                "for activations",
                "samples of a pass would fit",
                "train.accumulate",
                "by values of parameters",
            ],
        ),
        ("gpu", 34 << 20, &["for activations", "the 256 samples of a pass", "by values of parameters"]),
    ] {
        let folder = tempfile::tempdir().unwrap();
        let args = format!("--device cuda --nproc-per-node {workers} --max-restarts 3 --batch-size 256");
        let mut command = phalanx(folder.path());
        command.args(["train", "mnist-mini", "--steps", "3"]).args(args.split_whitespace());
        command.env("LD_LIBRARY_PATH", fake.folder()).env_remove("CUDA_VISIBLE_DEVICES");
        command.env("PHALANX_FAKE_MEMORY", bytes.to_string()).env("RUST_BACKTRACE", "0");
        let out = command.output().unwrap();
        let said = text(&out.stderr);
        assert!(out.status.code().is_some_and(|code| code != 0), "{said}");
        let always = [
            "out of memory on GPU",
            "this process holds",
            "32.0 MiB",
            "another worker would fail in the same way",
        ];
        for part in always.iter().chain(parts) {
            assert!(said.contains(part), "{part}: {said}");
        }
        assert!(!said.contains("starting all workers again") && !said.contains("takes its place"), "{said}");
    }
}

/// Whoever leads the run knows what a worker's panic said, also if nobody sees its lines.
#[test]
fn what_a_panic_says_is_why_a_worker_failed() {
    let Some(fake) = fake() else { return };
    let folder = tempfile::tempdir().unwrap();
    let binary = env!("CARGO_BIN_EXE_phalanx");
    let args = "run --nproc-per-node 2 --max-restarts 0 --out out --";
    let args =
        format!("{args} {binary} train mnist-mini --batch-size 8 --steps 3 --device cuda:0 --debug-sync");
    let mut command = phalanx(folder.path());
    command.args(args.split_whitespace()).env("LD_LIBRARY_PATH", fake.folder());
    command.env_remove("CUDA_VISIBLE_DEVICES").env("PHALANX_FAKE_ILLEGAL", "cublasLtMatmul 5");
    let out = command.output().unwrap();
    let said = text(&out.stderr);
    assert!(out.status.code().is_some_and(|code| code != 0), "{said}");
    let told = said.lines().find(|line| line.contains("it said: it panicked: "));
    assert!(told.is_some_and(|line| line.contains("the product (")), "{said}");
}

/// Sums are verified, and timed beside NCCL left alone; a GPU that two ranks share is refused.
#[test]
fn all_reduces_from_gpu_to_gpu_are_measured_beside_nccl_alone() {
    let Some(fake) = fake() else { return };
    let folder = tempfile::tempdir().unwrap();
    let measured = |more: &str| {
        let args = format!("bench allreduce --json --iters 12 --sizes 4,1000,64K --device {more}");
        let mut command = phalanx(folder.path());
        command.args(args.split_whitespace()).env("LD_LIBRARY_PATH", fake.folder());
        command.env_remove("CUDA_VISIBLE_DEVICES").output().unwrap()
    };
    for ranks in [1, 2] {
        let out = measured(&format!("cuda --nproc {ranks}"));
        let lines = events(&out);
        assert_eq!(
            lines.iter().filter_map(|line| line["bytes"].as_u64()).collect::<Vec<_>>(),
            [4, 1000, 65536]
        );
        for line in &lines {
            let number = |key: &str| line[key].as_f64().unwrap_or_else(|| panic!("{key} in {line}"));
            assert_eq!(
                (number("ranks"), number("iters"), number("wrong")),
                (f64::from(ranks), 20.0, 0.0),
                "{line}"
            );
            assert_eq!((&line["verified"], &line["algorithm"]), (&true.into(), &"nccl".into()), "{line}");
            let ratio = number("p50_us") / number("nccl_p50_us");
            assert!((number("to_nccl") / ratio - 1.0).abs() < 1e-9, "{line}");
        }
        let table = text(&out.stderr);
        assert_eq!(
            (table.matches(" times that").count(), table.matches(" on GPUs, 10 at a time").count()),
            (3, 1)
        );
    }
    for of_cpus in ["--transport tcp", "--algorithm ring", "--buffer shared"] {
        let refused = measured(&format!("cuda {of_cpus}"));
        let said = text(&refused.stderr);
        assert!(
            refused.status.code() == Some(2) && said.contains("leave them out beside --device"),
            "{said}"
        );
    }
    let refused = measured("cuda:0 --nproc 2");
    let said = text(&refused.stderr);
    assert!(refused.status.code() == Some(1) && said.contains("ranks 0 and 1 compute on one GPU"), "{said}");
}

/// Once, by the first of the workers, and not where passes are replayed.
#[test]
fn what_keeps_passes_from_being_replayed_is_told_when_workers_meet() {
    let Some(fake) = fake() else { return };
    let folder = tempfile::tempdir().unwrap();
    // What NCCL 2.29 and later make of it: 1 as they would by themselves, 0 no graphs at all.
    let mixing = |value: &'static str| Some(("NCCL_GRAPH_MIXING_SUPPORT", value));
    let might_wait = Some("NCCL might keep graphs waiting");
    for (args, why, set) in [
        ("--nproc-per-node gpu", None, mixing("1")),
        ("--nproc-per-node gpu", might_wait, mixing("0")),
        ("--nproc-per-node gpu --set parallel.sync_batch_norm=true", might_wait, mixing("1")),
    ]
    .into_iter()
    .chain(
        [
            (
                "--nproc-per-node gpu --set parallel.between_gpus=host",
                Some("gradients go by way of the host"),
            ),
            ("--nproc-per-node gpu --set parallel.compress=bf16", Some("gradients that are compressed")),
            ("--nproc-per-node gpu --set parallel.sync_batch_norm=true", None),
            ("--nproc-per-node 2 --device cuda:0 --strategy fsdp", Some("values and gradients go by way")),
            (
                "--nproc-per-node gpu --strategy fsdp --set parallel.offload=true",
                Some("values lie in the host's"),
            ),
        ]
        .map(|(args, why)| (args, why, None)),
    ) {
        let args: Vec<&str> = args.split_whitespace().chain(["--set", "train.graphs=true"]).collect();
        let mut run = command(folder.path(), fake.folder(), &args);
        let run = run.env("PHALANX_LOG", TELLS_RECORDINGS).envs(set).output().unwrap();
        let said = text(&run.stderr);
        assert_eq!(run.status.code(), Some(0), "{said}");
        assert_eq!(
            said.matches("not replayed, since").count(),
            usize::from(why.is_some()),
            "{args:?}: {said}"
        );
        assert!(why.is_none_or(|why| said.contains(why)), "{args:?}: {said}");
        assert_eq!(recordings(&run), usize::from(why.is_none()), "{args:?}: {said}");
    }
}

/// What is lost of a mesh on GPUs comes from another replica, by way of the host: no step is lost, and no bit.
#[test]
fn a_part_that_is_lost_with_its_worker_comes_from_another_replica_on_gpus_too() {
    let Some(fake) = fake() else { return };
    let folder = tempfile::tempdir().unwrap();
    fs::write(folder.path().join("text"), "what one has lost another has kept. ".repeat(200)).unwrap();
    let trained = |out: &str, killed: Option<u32>| {
        let model = "--set model.layers=1 --set model.width=8 --set model.heads=2 --set model.context=8";
        let mesh = "--nproc-per-node 4 --device cuda:0 --set parallel.tensor=2 --max-restarts 2";
        let rest = "--batch-size 4 --steps 12 --set train.clip_norm=0.5 --log-interval 1 --json";
        let mut command = phalanx(folder.path());
        command.args(format!("train gpt --data text {model} {mesh} {rest} --out {out}").split_whitespace());
        command.env("LD_LIBRARY_PATH", fake.folder()).env_remove("CUDA_VISIBLE_DEVICES");
        let run = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        let out = folder.path().join(out);
        if let Some(rank) = killed {
            until_steps(&out, 3);
            kill(Pid::from_raw(worker(&out, rank)), Signal::SIGKILL).unwrap();
        }
        let run = run.wait_with_output().unwrap();
        let said = text(&run.stderr).to_owned();
        assert_eq!(run.status.code(), Some(0), "{said}");
        assert_eq!(said.matches("another takes its place").count(), usize::from(killed.is_some()), "{said}");
        assert!(!said.contains("starting all workers again"), "{said}");
        let steps: Vec<(Value, Value)> = events(&run)
            .into_iter()
            .filter(|e| e["event"] == "step")
            .map(|e| (e["step"].clone(), e["loss"].clone()))
            .collect();
        (steps, fs::read(out.join("model.safetensors")).unwrap())
    };
    let (want, weights) = trained("whole", None);
    for rank in [1, 2] {
        let (got, hurt) = trained(&format!("hurt-{rank}"), Some(rank));
        assert_eq!(got, want, "rank {rank} was killed");
        assert!(hurt == weights, "other weights in the end: rank {rank} was killed");
    }
}
