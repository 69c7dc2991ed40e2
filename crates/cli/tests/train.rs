//! `phalanx train` as a user has it, on the digits inside the program.

mod user;

use serde_json::Value;
use std::fs;
use std::path::Path;
use std::process::{Command, Output};
use user::{events, phalanx, text};

fn command(folder: &Path, args: &[&str]) -> Command {
    let mut command = phalanx(folder);
    command.arg("train").args(args);
    command
}

fn train(folder: &Path, args: &[&str]) -> Output {
    command(folder, args).output().unwrap()
}

fn losses(out: &Output) -> Vec<f64> {
    events(out).iter().filter(|e| e["event"] == "step").map(|e| e["loss"].as_f64().unwrap()).collect()
}

/// On any workers and by any strategy, to what the run itself has told in the end.
#[test]
fn weights_in_a_file_are_judged_and_nothing_is_trained() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    let told = train(folder, &["mnist-mini", "--epochs", "2", "--json", "--out", "run"]);
    let told = events(&told);
    let epoch = told.iter().rfind(|event| event["event"] == "epoch").unwrap();
    let files = |run: &str| -> Vec<_> {
        let entries = fs::read_dir(folder.join(run)).unwrap().map(|entry| entry.unwrap().file_name());
        entries.filter(|name| name != "logs").collect()
    };
    let left = files("run").len();
    let judge = ["mnist-mini", "--evaluate", "run/model.safetensors", "--out", "judged"];
    let ways: [&[&str]; 4] = [
        &["--nproc-per-node", "1"],
        &["--strategy", "fsdp"],
        &["--strategy", "dp", "--nproc-per-node", "1"],
        &["--logical-shards", "3", "--batch-size", "7"],
    ];
    for way in ways {
        let out = train(folder, &[&judge[..], &["--json"], way].concat());
        let [judged] = &events(&out)[..] else { panic!("{way:?}: {out:?}") };
        assert_eq!(judged["event"], "evaluation", "{way:?}: {judged}");
        assert_eq!(judged["samples"], 500, "{way:?}: {judged}");
        for exact in ["test_accuracy", "test_top5"] {
            assert_eq!(judged[exact], epoch[exact], "{way:?}: {judged}, not {epoch}");
        }
        let loss = |event: &Value| event["test_loss"].as_f64().unwrap();
        assert!((loss(judged) - loss(epoch)).abs() < 1e-5, "{way:?}: {judged}, not {epoch}");
        assert!(files("judged").is_empty(), "{way:?}: {:?}", files("judged"));
    }
    let out = train(folder, &[&judge[..], &["--set", "train.metrics=[macro_f1]"]].concat());
    assert!(out.stdout.is_empty(), "{out:?}");
    let accuracy = 100.0 * epoch["test_accuracy"].as_f64().unwrap();
    for words in ["500 samples, 2 workers: ", &format!("test accuracy {accuracy:.2}%"), ", macro_f1 0."] {
        assert!(text(&out.stderr).contains(words), "{words} in {}", text(&out.stderr));
    }
    assert_eq!(files("run").len(), left);
    for (args, code, words) in [
        (
            &["linear-regression", "--evaluate", "run/model.safetensors"][..],
            1,
            "the weights don't fit the model",
        ),
        (&["mnist-mini", "--evaluate", "run/none"], 1, "run/none: can't be read"),
        (&["mnist-mini", "--evaluate", "run/model.safetensors", "--resume"], 2, "cannot be used with"),
    ] {
        let out = train(folder, args);
        let said = text(&out.stderr);
        assert!(out.status.code() == Some(code) && said.contains(words), "{args:?}: {out:?}");
    }
    assert!(!folder.join("runs").exists(), "what is refused leaves nothing");
}

#[test]
fn two_workers_learn_the_digits_and_save_what_they_learned() {
    let folder = tempfile::tempdir().unwrap();
    let out =
        train(folder.path(), &["mnist-mini", "--epochs", "5", "--json", "--out", "run", "--save-optimizer"]);
    let events = events(&out);
    let last = events.last().unwrap();
    assert_eq!(last["event"], "done");
    assert!(last["test_accuracy"].as_f64().unwrap() > 0.85, "{last}");
    let epoch = events.iter().rfind(|e| e["event"] == "epoch").unwrap();
    assert!(epoch["test_top5"].as_f64().unwrap() > epoch["test_accuracy"].as_f64().unwrap(), "{epoch}");
    let step = events.iter().rfind(|e| e["event"] == "step").unwrap();
    assert_eq!((step["world_size"].as_u64(), step["samples"].as_u64()), (Some(2), Some(10_000)));
    assert!(["step", "epoch", "loss", "ms"].iter().all(|key| step[key].is_number()), "{step}");
    // What a step's time was spent on beside computing is part of it.
    let of = |key: &str| step[key].as_f64().unwrap();
    assert!(
        of("input_ms") >= 0.0 && of("comm_ms") > 0.0 && of("input_ms") + of("comm_ms") < of("ms"),
        "{step}"
    );
    let run = folder.path().join("run");
    for file in ["model.safetensors", "optimizer.safetensors", "spec.toml", "events.jsonl"] {
        assert!(run.join(file).exists(), "{file}");
    }
    assert_eq!(fs::read_to_string(run.join("events.jsonl")).unwrap(), text(&out.stdout));
    // What was saved is where the next run starts.
    let again = train(
        folder.path(),
        &[
            "mnist-mini",
            "--steps",
            "1",
            "--json",
            "--init",
            "run/model.safetensors",
            "--set",
            "model.dropout=0",
        ],
    );
    assert!(losses(&again)[0] < 1.0);
}

#[test]
fn the_same_run_gives_the_same_bits_and_any_number_of_workers_the_same_losses() {
    let folder = tempfile::tempdir().unwrap();
    let run = |workers: &str, batch: &str| {
        let args = [
            "mnist-mini",
            "--steps",
            "20",
            "--seed",
            "3",
            "--json",
            "--nproc-per-node",
            workers,
            "--batch-size",
            batch,
        ];
        losses(&train(folder.path(), &args))
    };
    let (one, two, again, four) = (run("1", "32"), run("2", "16"), run("2", "16"), run("4", "8"));
    assert_eq!(two, again);
    assert_eq!(one.len(), 20);
    // Dropout is on: masks belong to samples, not to workers. Float32 sums in another order, growing over twenty steps.
    for (other, workers) in [(&two, 2), (&four, 4)] {
        for (step, (a, b)) in one.iter().zip(other).enumerate() {
            assert!((a - b).abs() < 1e-4, "step {step}: {a} on one worker, {b} on {workers}");
        }
    }
}

#[test]
fn the_best_epoch_and_the_running_mean_are_saved_and_patience_ends_the_run() {
    let folder = tempfile::tempdir().unwrap();
    // From the second epoch on nothing moves, so none of them is better than the first.
    let still = ["schedule.name=multi-step", "schedule.milestones=[1]", "schedule.gamma=0"];
    let judging = [
        "train.metrics=[macro_f1, balanced_accuracy]",
        "train.watch=macro_f1",
        "train.patience=2",
        "train.keep_best=true",
        "model.dropout=0",
    ];
    let settings: Vec<&str> = still.iter().chain(&judging).flat_map(|setting| ["--set", setting]).collect();
    let run =
        |more: &[&str]| train(folder.path(), &[&["mnist-mini", "--json"], &settings[..], more].concat());
    let events = events(&run(&["--out", "plain", "--epochs", "9"]));
    let done = events.last().unwrap();
    assert_eq!(
        (&done["epochs"], &done["best_epoch"], &done["stopped_early"]),
        (&3.into(), &0.into(), &true.into())
    );
    // One that makes all its epochs isn't ended by the last of them.
    let whole = train(folder.path(), &[&["mnist-mini", "--json", "--epochs", "3"], &settings[..]].concat());
    assert_eq!(self::events(&whole).last().unwrap()["stopped_early"], false);
    let epochs: Vec<_> =
        events.iter().filter(|e| e["event"] == "epoch").map(|e| &e["test_metrics"]).collect();
    // The digits are about equally many, and none is much harder than the others.
    let [f1, balanced] = ["macro_f1", "balanced_accuracy"].map(|name| epochs[0][name].as_f64().unwrap());
    let accuracy = done["test_accuracy"].as_f64().unwrap();
    assert!(
        (f1 - accuracy).abs() < 0.05 && (balanced - accuracy).abs() < 0.05 && f1 != balanced,
        "{epochs:?}"
    );
    assert!(epochs.iter().all(|epoch| *epoch == epochs[0]), "{epochs:?}");
    assert!(done["best_model"].as_str().unwrap().ends_with("plain/best.safetensors"), "{done}");
    let same = |run: &str, one: &str, other: &str| {
        let read = |name: &str| fs::read(folder.path().join(run).join(name)).unwrap();
        read(one) == read(other)
    };
    assert!(
        same("plain", "best.safetensors", "model.safetensors"),
        "the weights of the first epoch are the last"
    );
    assert!(!folder.path().join("plain/model_ema.safetensors").exists());
    let averaged = run(&["--out", "mean", "--set", "train.ema=0.5", "--epochs", "1"]);
    assert_eq!(averaged.status.code(), Some(0), "{}", text(&averaged.stderr));
    assert!(
        same("mean", "best.safetensors", "model_ema.safetensors"),
        "what is evaluated is the running mean"
    );
    assert!(!same("mean", "best.safetensors", "model.safetensors"));
}

#[test]
fn the_tutorials_line_is_printed_on_request() {
    let folder = tempfile::tempdir().unwrap();
    let out = train(
        folder.path(),
        &[
            "mnist-mini",
            "--epochs",
            "1",
            "--log-interval",
            "10",
            "--nproc-per-node",
            "1",
            "--batch-size",
            "64",
        ],
    );
    let line = text(&out.stdout).lines().nth(1).unwrap().to_owned();
    assert!(line.starts_with("Train Epoch: 1 [640/2000 (31%)]\tLoss: "), "{line}");
}

#[test]
fn a_listener_that_is_gone_ends_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let tutorial = ["mnist-mini", "--steps", "3", "--log-interval", "1", "--out", "run"];
    for args in [&["--list"][..], &["mnist", "--print"], &tutorial] {
        let (_, gone) = std::io::pipe().unwrap();
        let mut command = command(folder.path(), args);
        let out = command.stdout(gone.try_clone().unwrap()).stderr(gone).output().unwrap();
        assert_eq!(out.status.code(), Some(0), "{args:?}");
    }
    assert!(folder.path().join("run/model.safetensors").exists());
}

#[test]
fn a_result_that_a_full_disk_loses_is_an_error() {
    let folder = tempfile::tempdir().unwrap();
    for args in [&["--list"][..], &["mnist-mini", "--print"]] {
        let full = fs::OpenOptions::new().write(true).open("/dev/full").unwrap();
        let out = command(folder.path(), args).stdout(full).output().unwrap();
        let said = text(&out.stderr);
        assert_eq!(out.status.code(), Some(1), "{args:?}: {said}");
        assert!(said.contains("standard output can't be written") && said.contains("hint:"), "{said}");
    }
}

#[test]
fn a_run_whose_words_a_full_disk_loses_is_done_once_and_says_so() {
    let folder = tempfile::tempdir().unwrap();
    for (out, telling) in [("a", &["--json"][..]), ("b", &["--log-interval", "1"])] {
        let full = fs::OpenOptions::new().write(true).open("/dev/full").unwrap();
        let mut command = command(folder.path(), &["mnist-mini", "--steps", "3", "--out", out]);
        let done = command.args(telling).stdout(full).output().unwrap();
        let said = text(&done.stderr);
        assert_eq!(done.status.code(), Some(1), "{said}");
        assert!(said.contains("standard output can't be written") && !said.contains("restart 1"), "{said}");
        assert!(folder.path().join(out).join("model.safetensors").exists(), "{said}");
    }
}

/// What lies there stays as it is, whoever reads it: nothing is started again.
#[test]
fn data_that_is_not_what_it_should_be_is_told_once() {
    let folder = tempfile::tempdir().unwrap();
    let data = folder.path().join("data");
    fs::create_dir(&data).unwrap();
    let whole = Path::new(env!("CARGO_MANIFEST_DIR")).join("../data/assets/mnist-mini");
    for file in fs::read_dir(whole).unwrap().map(|entry| entry.unwrap().path()) {
        fs::copy(&file, data.join(file.file_name().unwrap())).unwrap();
    }
    let images = data.join("train-images-idx3-ubyte.gz");
    fs::write(&images, &fs::read(&images).unwrap()[..5000]).unwrap();
    // Of two workers both may come to tell it before the other is stopped.
    let out = train(folder.path(), &["mnist", "--data", "data", "--steps", "1", "--nproc-per-node", "1"]);
    let said = text(&out.stderr);
    assert_eq!(out.status.code(), Some(1), "{said}");
    assert_eq!(said.matches("truncated IDX file").count(), 1, "{said}");
    assert!(said.contains("not started again: another worker would fail in the same way"), "{said}");

    // Verified is what was named, and nothing in its place.
    fs::remove_file(images).unwrap();
    let out = phalanx(folder.path()).args(["data", "verify", "mnist", "--data", "data"]).output().unwrap();
    assert_ne!(out.status.code(), Some(0), "{}", text(&out.stdout));
}

#[test]
fn a_run_that_is_refused_leaves_what_tells_of_the_one_before() {
    let folder = tempfile::tempdir().unwrap();
    let run = ["--out", "run", "--set", "train.checkpoint_every=2"];
    let first = train(folder.path(), &[&["mnist-mini", "--steps", "3"], &run[..]].concat());
    assert!(first.status.success(), "{}", text(&first.stderr));
    let [spec, events] = ["spec.toml", "events.jsonl"].map(|name| folder.path().join("run").join(name));
    let before = [&spec, &events].map(|path| fs::read(path).unwrap());
    let other = train(folder.path(), &[&["linear-regression", "--resume"], &run[..]].concat());
    assert_eq!(other.status.code(), Some(1), "{}", text(&other.stderr));
    assert!([&spec, &events].map(|path| fs::read(path).unwrap()) == before);
}

#[test]
fn shells_get_their_completions() {
    let folder = tempfile::tempdir().unwrap();
    for (shell, word) in
        [("bash", "complete -F _phalanx"), ("zsh", "#compdef phalanx"), ("fish", "complete -c")]
    {
        let out = phalanx(folder.path()).args(["completions", shell]).output().unwrap();
        assert!(out.status.success() && text(&out.stdout).contains(word), "{shell}");
    }
}

#[test]
fn recipes_are_listed_and_printed() {
    let folder = tempfile::tempdir().unwrap();
    let list = text(&train(folder.path(), &["--list"]).stdout);
    for name in
        ["mnist", "mnist-mini", "mnist-hpc", "fashion-mnist", "mnist-autoencoder", "linear-regression"]
    {
        assert!(list.lines().any(|line| line.split_whitespace().next() == Some(name)), "{name}: {list}");
    }
    let printed = train(folder.path(), &["mnist-mini", "--print", "--set", "optimizer.lr=0.25"]);
    let toml = text(&printed.stdout);
    assert!(toml.contains("lr = 0.25"), "{toml}");
    fs::write(folder.path().join("mine.toml"), toml).unwrap();
    assert_eq!(losses(&train(folder.path(), &["mine.toml", "--steps", "2", "--json"])).len(), 2);
}

#[test]
fn mistakes_get_one_clear_error_and_leave_nothing() {
    let folder = tempfile::tempdir().unwrap();
    fs::create_dir(folder.path().join("empty")).unwrap();
    fs::write(folder.path().join("cut.safetensors"), [8, 0, 0, 0, 0, 0, 0, 0, b'{']).unwrap();
    let check = |args: &[&str], code: i32, words: &[&str]| {
        let out = train(folder.path(), args);
        let message = text(&out.stderr);
        assert_eq!(out.status.code(), Some(code), "{args:?}: {message}");
        assert!(words.iter().all(|word| message.contains(word)), "{args:?}: {message}");
        assert_eq!(message.matches("error:").count(), 1, "{args:?}: {message}");
        assert!(!folder.path().join("runs").exists(), "{args:?} left a run");
    };
    check(&["mnits"], 2, &["mnits", "did you mean mnist"]);
    check(&["mnist-mini", "--set", "optimizer.rl=1"], 2, &["optimizer.rl", "did you mean optimizer.lr"]);
    check(&["mnist-mini", "--set", "optimizer.lr=-1"], 2, &["optimizer.lr", "-1"]);
    check(&["mnist-mini", "--nproc-per-node", "0"], 2, &["--nproc-per-node 0"]);
    check(&["mnist-mini", "--nproc-per-node", "1000000000"], 2, &["--nproc-per-node 1000000000", "4096"]);
    check(&["mnist-mini", "--seed", "-1"], 2, &["'-1'", "--seed"]);
    check(&["mnist-mini", "--data", "empty"], 1, &["--data empty", "inside this program", "hint:"]);
    check(&["mnist-mini", "--batch-size", "0"], 2, &["batch"]);
    check(&["mnist-mini", "--noshuffle"], 2, &["'--no-shuffle'"]);
    check(&["mnist", "--data", "missing"], 1, &["missing", "hint:"]);
    check(&["mnist-mini", "--init", "nothing.safetensors"], 1, &["nothing.safetensors"]);
    check(
        &["mnist-mini", "--init", "cut.safetensors"],
        1,
        &["cut.safetensors", "not a readable safetensors file"],
    );
    let mut spoilt = phalanx::nn::Weights::default();
    spoilt.push("conv1.bias".into(), [3].into(), &[0.0, f32::NAN, 0.0]);
    spoilt.save(&folder.path().join("nan.safetensors")).unwrap();
    let init = ["mnist-mini", "--init", "nan.safetensors"];
    check(&init, 1, &["nan.safetensors: conv1.bias is NaN at element 1", "hint:"]);
    let ignored = [&init[..], &["--set", "train.on_nan=ignore"]].concat();
    check(&ignored, 1, &["nan.safetensors: the weights don't fit the model"]);
    // A worker starts no others, and says so.
    for (flag, value) in [("--nproc-per-node", "8"), ("--max-restarts", "2"), ("--hang-timeout", "60")] {
        let mut worker = command(folder.path(), &["mnist-mini", flag, value]);
        let out = worker.envs([("RANK", "0"), ("WORLD_SIZE", "1")]).output().unwrap();
        let message = text(&out.stderr);
        assert_eq!(out.status.code(), Some(2), "{message}");
        assert!(message.contains(&format!("{flag} {value}: this process is a worker")), "{message}");
        assert!(
            message.contains(&format!("hint: phalanx run {flag} {value}"))
                || message.contains("workers of this node: 1")
        );
    }
    for (variable, value) in
        [("PHALANX_TRANSPORT", "udp"), ("PHALANX_ALLREDUCE", "best"), ("PHALANX_THREADS", "100000")]
    {
        let out = command(folder.path(), &["mnist-mini"]).env(variable, value).output().unwrap();
        let message = text(&out.stderr);
        assert_eq!(out.status.code(), Some(2), "{message}");
        assert!(message.contains(&format!("{variable} is \"{value}\"")), "{message}");
    }
}

#[test]
fn the_folder_that_was_named_is_used_before_that_of_the_agent_and_one_is_always_made() {
    let folder = tempfile::tempdir().unwrap();
    let training = ["mnist-mini", "--steps", "1"];
    let saved = |run: &str| {
        let files = ["model.safetensors", "events.jsonl", "spec.toml"];
        files.map(|file| folder.path().join(run).join(file).exists())
    };
    // As a program of `phalanx run`, with a folder of its own and without.
    for (out, named) in [("b", &["--out", "b"][..]), ("a", &[])] {
        let mut command = phalanx(folder.path());
        command.args(["run", "--out", "a", "--", env!("CARGO_BIN_EXE_phalanx"), "train"]);
        let done = command.args(training).args(named).output().unwrap();
        assert_eq!(done.status.code(), Some(0), "{}", text(&done.stderr));
        assert_eq!(saved(out), [true; 3], "{out}");
        assert_eq!(saved("a"), [out == "a"; 3], "{out}");
    }
    // As a program of torchrun, which knows no such folder.
    let torchrun = |named: &[&str]| {
        let mut command = command(folder.path(), &training);
        command.args(named).envs([("RANK", "0"), ("WORLD_SIZE", "1"), ("TORCHELASTIC_RUN_ID", "seven")]);
        let done = command.output().unwrap();
        assert_eq!(done.status.code(), Some(0), "{}", text(&done.stderr));
    };
    torchrun(&["--out", "deep/c"]);
    assert_eq!(saved("deep/c"), [true; 3]);
    torchrun(&[]);
    assert_eq!(saved("runs/mnist-mini-seven"), [true; 3]);
    assert_eq!(saved("."), [false; 3]);
}

#[test]
fn weights_of_another_model_are_refused_by_name() {
    let folder = tempfile::tempdir().unwrap();
    let line = train(folder.path(), &["linear-regression", "--epochs", "1", "--out", "line"]);
    assert_eq!(line.status.code(), Some(0), "{}", text(&line.stderr));
    let out = train(folder.path(), &["mnist-mini", "--init", "line/model.safetensors"]);
    let message = text(&out.stderr);
    assert_eq!(out.status.code(), Some(1));
    assert!(
        message.contains("missing: conv1.weight") && message.contains("unexpected: bias, weight"),
        "{message}"
    );
}
