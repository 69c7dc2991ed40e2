//! `phalanx train --resume` as a user has it: runs that are killed and started again.

mod user;

use serde_json::Value;
use std::fs;
use std::io::{BufRead, BufReader, Read};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::Duration;
use user::{await_checkpoint, phalanx, text};

fn command(folder: &Path, args: &[&str]) -> Command {
    let mut command = phalanx(folder);
    command
        .args(["train", "mnist-mini", "--seed", "4", "--json", "--set", "train.checkpoint_every=5"])
        .args(args);
    command
}

/// Runs to the end; gives what was said to people.
fn done(folder: &Path, args: &[&str]) -> String {
    let out: Output = command(folder, args).output().unwrap();
    assert_eq!(out.status.code(), Some(0), "{}", text(&out.stderr));
    text(&out.stderr)
}

fn events(run: &Path) -> Vec<Value> {
    let text = fs::read_to_string(run.join("events.jsonl")).unwrap();
    text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

/// Every step and epoch that `events.jsonl` tells of, but for times.
fn told(run: &Path) -> Vec<[String; 4]> {
    let kinds = [("step", ["step", "loss", "samples"]), ("epoch", ["epoch", "test_loss", "test_accuracy"])];
    let told = |event: &Value| {
        let (kind, keys) = kinds.iter().find(|(kind, _)| event["event"] == *kind)?;
        let [a, b, c] = keys.map(|key| event[key].to_string());
        Some([(*kind).to_owned(), a, b, c])
    };
    events(run).iter().filter_map(told).collect()
}

/// Kills the process once it has told of step `seen`, and has left a whole checkpoint where one is to go on from; waits until nothing
/// of it is left.
fn kill_after(mut command: Command, seen: u64, left: Option<&Path>) {
    let mut child = command.stdout(Stdio::piped()).stderr(Stdio::null()).spawn().unwrap();
    let mut lines = BufReader::new(child.stdout.take().unwrap());
    let mut line = String::new();
    while lines.read_line(&mut line).unwrap() > 0 {
        let event: Value = serde_json::from_str(&line).unwrap();
        if event["event"] == "step" && event["step"].as_u64() >= Some(seen) {
            break;
        }
        line.clear();
    }
    if let Some(run) = left {
        await_checkpoint(run, Duration::from_secs(60));
    }
    child.kill().unwrap();
    child.wait().unwrap();
    // Workers hold the other end until they are gone.
    lines.read_to_end(&mut Vec::new()).unwrap();
}

#[test]
fn a_run_that_is_killed_again_and_again_ends_with_the_bits_of_one_that_was_not() {
    // A worker by itself, and the agent of two.
    for workers in [1, 2] {
        let folder = tempfile::tempdir().unwrap();
        let (count, batch) = (workers.to_string(), (64 / workers).to_string());
        let training = |out: &'static str, resume: bool| {
            let mut args =
                vec!["--epochs", "4", "--out", out, "--batch-size", &batch, "--nproc-per-node", &count];
            args.extend(["--set", "optimizer.name=adam"]);
            args.extend(resume.then_some("--resume"));
            let mut command = command(folder.path(), &args);
            if workers == 1 {
                command.envs([("RANK", "0"), ("WORLD_SIZE", "1")]);
            }
            command
        };
        assert!(training("whole", false).output().unwrap().status.success());
        // Before the first checkpoint, after it, on the border of the epochs, in the second one. The first is started with
        // --resume as well, as a script that is started again and again would.
        let left = folder.path().join("killed");
        for (seen, left) in [(2, None), (6, None), (31, Some(&*left)), (47, Some(&*left))] {
            kill_after(training("killed", true), seen, left);
        }
        let last = training("killed", true).output().unwrap();
        assert!(last.status.success(), "{}", text(&last.stderr));
        let [whole, killed] = ["whole", "killed"].map(|run| folder.path().join(run));
        let model = |run: &Path| fs::read(run.join("model.safetensors")).unwrap();
        assert!(model(&whole) == model(&killed), "{workers} workers");
        assert_eq!(told(&whole).len(), 4 * 33);
        assert_eq!(told(&whole), told(&killed), "{workers} workers");
        let resumed = events(&killed).iter().filter(|event| event["event"] == "resume").count();
        assert!(resumed >= 2, "{workers} workers: went on from {resumed} checkpoints");
    }
}

/// With one sample a step the first scale is too large, and after 2000 good steps it is doubled again, at step 2027 of this run: how
/// many there were by then is part of the checkpoint.
#[test]
fn a_killed_run_in_float16_goes_on_with_its_losses_and_its_scale() {
    let scales = |run: &Path| -> Vec<[String; 4]> {
        let events = events(run);
        let steps = events.iter().filter(|event| event["event"] == "step");
        steps.map(|step| ["step", "loss", "loss_scale", "skipped"].map(|key| step[key].to_string())).collect()
    };
    let alone = ["--nproc-per-node", "1", "--set", "optimizer.lr=0.001", "--steps", "2050"];
    let shared = ["--nproc-per-node", "2", "--strategy", "fsdp", "--steps", "1500"];
    for (more, kills, doubled) in [(&alone[..], &[3, 1990][..], true), (&shared[..], &[2, 31][..], false)] {
        let folder = tempfile::tempdir().unwrap();
        let training = |out: &str| {
            let mut command = command(folder.path(), &["--batch-size", "1", "--epochs", "9", "--resume"]);
            command.args(["--set", "train.precision=float16", "--set", "train.clip_norm=1", "--out", out]);
            command.args(more);
            command
        };
        assert!(training("whole").output().unwrap().status.success());
        let left = folder.path().join("killed");
        for (&seen, left) in kills.iter().zip([None, Some(&*left)]) {
            kill_after(training("killed"), seen, left);
        }
        let last = training("killed").output().unwrap();
        assert!(last.status.success(), "{}", text(&last.stderr));
        let [whole, killed] = ["whole", "killed"].map(|run| folder.path().join(run));
        let told = scales(&whole);
        assert_eq!(told, scales(&killed), "{more:?}");
        let model = |run: &Path| fs::read(run.join("model.safetensors")).unwrap();
        assert!(model(&whole) == model(&killed), "{more:?}: other weights");
        let resumed = events(&killed).iter().filter(|event| event["event"] == "resume").count();
        assert!(resumed >= 1, "{more:?}: went on from no checkpoint");
        let of = |step: &[String; 4]| step[2].parse::<f64>().unwrap();
        let shrinks = told.windows(2).any(|pair| of(&pair[0]) > of(&pair[1]));
        let grows = told.windows(2).any(|pair| of(&pair[0]) < of(&pair[1]));
        assert!(shrinks && grows == doubled, "{more:?}: {told:?}");
    }
}

/// A run that has told of step 3, with the rest of what it prints.
fn begun(mut command: Command) -> (Child, impl Iterator<Item = Value>) {
    let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let lines = BufReader::new(child.stdout.take().unwrap()).lines();
    let mut events = lines.map(|line| serde_json::from_str::<Value>(&line.unwrap()).unwrap());
    events.find(|event| event["event"] == "step" && event["step"] == 3).unwrap();
    (child, events)
}

fn signal(child: &Child, signal: &str) {
    assert!(Command::new("kill").args([signal, &child.id().to_string()]).status().unwrap().success());
}

#[test]
fn a_batch_system_that_wants_its_machine_back_gets_it_and_no_step_is_lost() {
    // A worker by itself, and the agent of two.
    for workers in [1, 2] {
        let folder = tempfile::tempdir().unwrap();
        let (count, batch) = (workers.to_string(), (20 / workers).to_string());
        let training = |out: &'static str, steps: u64| {
            let (args, steps) = (["--epochs", "1000", "--out", out, "--steps"], steps.to_string());
            let shared = [&steps, "--batch-size", &batch, "--nproc-per-node", &count, "--resume"];
            let seldom = ["--set", "train.checkpoint_every=1000000"];
            let mut command = command(folder.path(), &[&args[..], &shared, &seldom].concat());
            if workers == 1 {
                command.envs([("RANK", "0"), ("WORLD_SIZE", "1")]);
            }
            command
        };
        let (child, mut events) = begun(training("stopped", 100_000));
        signal(&child, "-USR2");
        let taken = events.find(|event| event["event"] == "checkpoint").unwrap();
        assert!(taken["step"].as_u64().unwrap() > 3, "{taken}");
        let after = events.find(|event| event["event"] == "step").unwrap();
        assert!(after["step"].as_u64() >= taken["step"].as_u64(), "the run goes on: {after}");
        signal(&child, "-TERM");
        let last = events.filter(|event| event["event"] == "step").last().unwrap_or(after);
        let out = child.wait_with_output().unwrap();
        let said = text(&out.stderr);
        assert_eq!(out.status.code(), Some(143), "{said}");
        let steps = last["step"].as_u64().unwrap() + 1;
        let words = format!("SIGTERM: stopped after {steps} steps; --resume goes on from there\n");
        assert!(said.contains(&words) && !said.contains("error"), "{said}");
        let run = folder.path().join("stopped");
        assert!(
            checkpoint(&run, steps).join("manifest.json").exists() && !run.join("model.safetensors").exists()
        );
        for out in ["stopped", "whole"] {
            let out = training(out, steps + 5).output().unwrap();
            assert!(out.status.success(), "{}", text(&out.stderr));
        }
        assert!(told(&run).len() as u64 > steps + 5);
        assert_eq!(told(&run), told(&folder.path().join("whole")), "{workers} workers");
    }
}

fn checkpoint(run: &Path, step: u64) -> PathBuf {
    run.join(format!("checkpoints/step-{step}"))
}

#[test]
fn a_broken_checkpoint_is_named_and_the_one_before_is_taken() {
    let folder = tempfile::tempdir().unwrap();
    let run = folder.path().join("run");
    let args = ["--out", "run", "--batch-size", "100", "--resume"];
    // Kept apart, since while one is being written no other is begun.
    for steps in ["5", "10"] {
        done(folder.path(), &[&args[..], &["--steps", steps]].concat());
    }
    let path = checkpoint(&run, 10).join("optimizer.safetensors");
    let mut bytes = fs::read(&path).unwrap();
    *bytes.last_mut().unwrap() ^= 1;
    fs::write(&path, bytes).unwrap();
    let said = done(folder.path(), &[&args[..], &["--steps", "12"]].concat());
    assert!(said.contains("step-10/optimizer.safetensors: the checkpoint is broken: chunk 1 of 1"), "{said}");
    assert_eq!(told(&run).len(), 12 + 2, "{:?}", told(&run));
    assert!(checkpoint(&run, 12).join("manifest.json").exists());
}

#[test]
fn what_a_run_cannot_go_on_from_is_one_clear_error() {
    let folder = tempfile::tempdir().unwrap();
    done(folder.path(), &["--steps", "5", "--out", "run"]);
    let check = |args: &[&str], words: &[&str]| {
        let mut command = command(folder.path(), &["--resume", "--out", "run"]);
        let out = command.args(args).output().unwrap();
        let said = text(&out.stderr);
        assert_eq!(out.status.code(), Some(1), "{args:?}: {said}");
        assert!(words.iter().all(|word| said.contains(word)), "{args:?}: {said}");
        // Rank 0's words are on the terminal already, another one's would be in its log alone.
        let by_rank_0 = said.contains("error: rank 0 (pid");
        assert_eq!(said.contains("it said:"), !by_rank_0, "{args:?}: {said}");
    };
    let layer = "conv1.weight is [10, 1, 5, 5] in the file and [32, 1, 3, 3] in the model";
    check(&["--set", "model.name=mnist-hpc"], &["run/checkpoints/step-5", "is of another model", layer]);
    check(
        &["--batch-size", "10"],
        &["a global batch of 64, and this run has 20", "hint:", "with 2 workers a --batch-size of 32"],
    );
    // Three workers can't share 64 samples evenly.
    check(
        &["--nproc-per-node", "3"],
        &["a global batch of 64, and this run has 96", "with 2 workers a --batch-size of 32"],
    );
    check(&["--no-shuffle"], &["shuffle 1, and this run has 0"]);
    check(
        &["--set", "optimizer.name=adam"],
        &[
            "exp_avg",
            "hint: the recipe isn't that of the checkpoint: ",
            "optimizer.name is \"adam\" and was \"sgd\"",
        ],
    );
    for file in ["manifest.json", "model.safetensors"] {
        let path = checkpoint(&folder.path().join("run"), 5).join(file);
        let whole = fs::read(&path).unwrap();
        fs::write(&path, &whole[..whole.len() / 2]).unwrap();
        check(&[], &["none of its checkpoints can be read", file, "hint:"]);
        fs::write(&path, whole).unwrap();
    }
    done(folder.path(), &["--resume", "--out", "run", "--steps", "6"]);
}

#[test]
fn a_run_that_is_over_without_a_checkpoint_is_not_trained_again() {
    let folder = tempfile::tempdir().unwrap();
    let model = folder.path().join("run/model.safetensors");
    let run = |more: &[&str]| {
        let args = ["train", "mnist-mini", "--seed", "4", "--json", "--steps", "3", "--out", "run"];
        phalanx(folder.path()).args(args).args(more).output().unwrap()
    };
    assert!(run(&[]).status.success());
    let before = fs::read(&model).unwrap();
    assert!(!folder.path().join("run/checkpoints").exists());
    let out = run(&["--resume"]);
    let said = text(&out.stderr);
    let words = "--resume: the run in run is over and has left no checkpoint to go on from\nhint: --init run/model.safetensors";
    assert!(out.status.code() == Some(1) && said.contains(words), "{said}");
    assert_eq!(said.matches("is over").count(), 1, "{said}");
    assert_eq!(fs::read(&model).unwrap(), before);
    // Another run has begun there, and hasn't come to its end.
    let events = folder.path().join("run/events.jsonl");
    let told = fs::read_to_string(&events).unwrap();
    let (begun, _) = told.trim_end().rsplit_once('\n').unwrap();
    fs::write(&events, format!("{begun}\n")).unwrap();
    let out = run(&["--resume"]);
    let said = text(&out.stderr);
    let begins = "holds no checkpoint: starting from the first step";
    assert!(out.status.success() && said.contains(begins), "{said}");
}

#[test]
fn other_settings_than_those_of_the_checkpoint_are_told_and_taken() {
    let folder = tempfile::tempdir().unwrap();
    let run = folder.path().join("run");
    let resume = |steps: &str, set: &[&str]| {
        done(folder.path(), &[&["--out", "run", "--resume", "--steps", steps], set].concat())
    };
    resume("5", &[]);
    let told = "the recipe isn't that of the checkpoint: ";
    let said = resume("6", &[]);
    assert!(!said.contains(told), "{said}");
    let said = resume("7", &["--set", "optimizer.lr=0.5", "--set", "optimizer.weight_decay=0.25"]);
    let changes = "optimizer.lr is 0.5 and was 0.05, optimizer.weight_decay is 0.25 and was the default\n";
    assert!(said.contains(&format!("{told}{changes}")), "{said}");
    let rates: Vec<Value> =
        events(&run).into_iter().filter(|e| e["event"] == "step").map(|e| e["lr"].clone()).collect();
    assert_eq!(rates[5..], [0.05, 0.5]);
    let notes = events(&run).into_iter().filter(|e| e["event"] == "note").count();
    assert_eq!(notes, 1 + 1, "that there was no checkpoint yet, and this one");
}

#[test]
fn without_a_folder_the_newest_run_of_the_recipe_goes_on_and_else_one_begins() {
    let folder = tempfile::tempdir().unwrap();
    let runs = || {
        let mut runs: Vec<PathBuf> =
            fs::read_dir(folder.path().join("runs")).unwrap().map(|e| e.unwrap().path()).collect();
        runs.sort();
        runs
    };
    let said = done(folder.path(), &["--steps", "5", "--resume"]);
    assert!(
        said.contains("no run of mnist-mini in runs has a checkpoint: starting one in runs/mnist-mini-"),
        "{said}"
    );
    done(folder.path(), &["--steps", "8", "--resume"]);
    let [run] = &runs()[..] else { panic!("{:?}", runs()) };
    assert_eq!(events(run).iter().filter(|event| event["event"] == "step").count(), 8);
    let resume = events(run).into_iter().find(|event| event["event"] == "resume").unwrap();
    assert!(resume["path"].as_str().unwrap().ends_with("checkpoints/step-5"), "{resume}");
    done(folder.path(), &["--steps", "5"]);
    assert_eq!(runs().len(), 2, "without --resume a run has a folder of its own");
}

#[test]
#[cfg(target_os = "linux")]
fn a_disk_without_room_for_checkpoints_is_told_and_the_run_goes_on() {
    let folder = tempfile::tempdir().unwrap();
    // The shell limits the size of files to 128 KiB: the model fits, the optimizer's state doesn't.
    let script = "ulimit -f 128; exec \"$0\" \"$@\"";
    let training = command(folder.path(), &["--epochs", "1", "--out", "run", "--set", "optimizer.name=adam"]);
    let mut limited = Command::new("bash");
    limited.args(["-c", script]).arg(training.get_program()).args(training.get_args());
    let out = limited.current_dir(folder.path()).output().unwrap();
    let said = text(&out.stderr);
    assert_eq!(out.status.code(), Some(0), "{said}");
    let words =
        ["no checkpoint after step 5: ", "step-5/optimizer.safetensors: can't be written: File too large"];
    assert!(words.iter().all(|word| said.contains(word)), "{said}");
    assert!(said.matches("the run goes on").count() > 1, "the next one was tried: {said}");
    let run = folder.path().join("run");
    assert!(run.join("model.safetensors").exists());
    let names = fs::read_dir(run.join("checkpoints")).unwrap().map(|entry| entry.unwrap().file_name());
    let left = names.filter(|name| !name.to_string_lossy().starts_with(".writer"));
    assert_eq!(left.count(), 0, "nothing is left of them");
}

#[test]
fn a_disk_with_room_for_the_model_alone_has_the_model() {
    let folder = tempfile::tempdir().unwrap();
    let args = ["--epochs", "1", "--out", "run", "--set", "optimizer.name=adam", "--save-optimizer"];
    let training = command(folder.path(), &args);
    let mut limited = Command::new("bash");
    limited.args(["-c", "ulimit -f 128; exec \"$0\" \"$@\""]);
    limited.arg(training.get_program()).args(training.get_args());
    let out = limited.current_dir(folder.path()).output().unwrap();
    assert_eq!(out.status.code(), Some(1), "{}", text(&out.stderr));
    assert!(text(&out.stderr).contains("optimizer.safetensors: can't be written"), "{}", text(&out.stderr));
    assert!(folder.path().join("run/model.safetensors").exists());
}

/// `phalanx checkpoint`: its exit code, what it printed and what it said.
fn look(folder: &Path, args: &[&str]) -> (Option<i32>, String, String) {
    let out = phalanx(folder).arg("checkpoint").args(args).output().unwrap();
    (out.status.code(), text(&out.stdout), text(&out.stderr))
}

#[test]
fn a_folder_whose_name_is_no_text_is_looked_into() {
    let folder = tempfile::tempdir().unwrap();
    done(folder.path(), &["--out", "run", "--steps", "5"]);
    let odd = folder.path().join(std::ffi::OsStr::from_bytes(b"odd\xff"));
    fs::rename(folder.path().join("run"), &odd).unwrap();
    for what in ["show", "verify"] {
        let out = phalanx(folder.path()).args(["checkpoint", what]).arg(&odd).arg("--json").output().unwrap();
        assert_eq!(out.status.code(), Some(0), "{}", text(&out.stderr));
        let told: Value = serde_json::from_slice(&out.stdout).unwrap();
        assert!(told["checkpoint"].as_str().unwrap().contains("checkpoints/step-5"), "{told}");
    }
}

#[test]
fn a_pipe_in_a_checkpoint_is_no_file() {
    let folder = tempfile::tempdir().unwrap();
    done(folder.path(), &["--out", "run", "--steps", "5"]);
    let manifest = checkpoint(&folder.path().join("run"), 5).join("manifest.json");
    fs::remove_file(&manifest).unwrap();
    assert!(Command::new("mkfifo").arg(&manifest).status().unwrap().success());
    let (code, _, said) = look(folder.path(), &["show", "run"]);
    assert!(code == Some(1) && said.contains("it is no file, but a folder, a pipe or a device"), "{said}");
    let out = command(folder.path(), &["--out", "run", "--resume"]).output().unwrap();
    let said = text(&out.stderr);
    assert!(out.status.code() == Some(1) && said.contains("it is no file, but a folder"), "{said}");
}

#[test]
fn a_manifest_that_cannot_be_believed_hides_no_other_checkpoint() {
    let folder = tempfile::tempdir().unwrap();
    for steps in ["5", "10"] {
        done(folder.path(), &["--steps", steps, "--out", "run", "--resume"]);
    }
    let path = checkpoint(&folder.path().join("run"), 10).join("manifest.json");
    let text = fs::read_to_string(&path).unwrap().replace("\"step\": 10", "\"step\": 11");
    fs::write(&path, text).unwrap();
    let (code, shown, said) = look(folder.path(), &["show", "run"]);
    assert_eq!(code, Some(1));
    let reason = "run/checkpoints/step-10/manifest.json: the checkpoint is broken: the manifest isn't what was written";
    assert!(
        shown.contains("5 steps, 320 samples") && said.contains(&format!("error: {reason}")),
        "{shown}{said}"
    );
    let (code, shown, _) = look(folder.path(), &["show", "--json", "run"]);
    let shown: Vec<Value> = shown.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert_eq!((code, shown.len()), (Some(1), 2));
    assert!(shown[0]["error"].as_str().unwrap().starts_with(reason), "{shown:?}");
    assert_eq!(shown[1]["manifest"]["position"]["step"], 5);
}

#[test]
fn checkpoints_are_shown_and_verified() {
    let folder = tempfile::tempdir().unwrap();
    done(folder.path(), &["--steps", "5", "--out", "run"]);
    for dir in ["run", "run/checkpoints", "run/checkpoints/step-5"] {
        let (code, shown, _) = look(folder.path(), &["show", dir]);
        assert_eq!(code, Some(0));
        for words in ["step-5", "5 steps, 320 samples", "2000 samples shuffled, 64 a step, seed 4, 2 ranks"] {
            assert!(shown.contains(words), "{shown}");
        }
        let (code, shown, _) = look(folder.path(), &["verify", dir]);
        assert!(code == Some(0) && shown.contains("step-5: whole (2 files, "), "{shown}");
    }
    let (_, shown, _) = look(folder.path(), &["show", "--json", "run"]);
    let shown: Value = serde_json::from_str(&shown).unwrap();
    assert_eq!(shown["manifest"]["position"]["step"], 5);
    assert!(shown["manifest"]["recipe"].as_str().unwrap().contains("mnist"));
    let path = checkpoint(&folder.path().join("run"), 5).join("model.safetensors");
    let mut bytes = fs::read(&path).unwrap();
    bytes[900] ^= 16;
    fs::write(&path, bytes).unwrap();
    let (code, _, said) = look(folder.path(), &["verify", "run"]);
    assert_eq!(code, Some(1));
    assert!(
        said.contains("error: run/checkpoints/step-5/model.safetensors: the checkpoint is broken"),
        "{said}"
    );
    let (code, verified, _) = look(folder.path(), &["verify", "--json", "run"]);
    let verified: Value = serde_json::from_str(&verified).unwrap();
    assert_eq!((code, &verified["whole"]), (Some(1), &Value::Bool(false)));
    let (code, _, said) = look(folder.path(), &["show", "."]);
    assert!(code == Some(1) && said.contains("there is no checkpoint\nhint: give a run directory"), "{said}");
}

#[test]
fn a_run_that_is_started_again_before_it_has_a_checkpoint_takes_none_of_another_run() {
    let folder = tempfile::tempdir().unwrap();
    done(folder.path(), &["--steps", "6", "--out", "run"]);
    let again = r#"test "$TORCHELASTIC_RESTART_COUNT" = 0 && exit 3; exec "$0" "$@""#;
    let training = ["train", "mnist-mini", "--steps", "3", "--out", "run"];
    let mut command = phalanx(folder.path());
    command.args(["run", "--max-restarts", "1", "--out", "outer", "--", "sh", "-c", again]);
    let out = command.arg(env!("CARGO_BIN_EXE_phalanx")).args(training).output().unwrap();
    let said = text(&out.stderr);
    assert_eq!(out.status.code(), Some(0), "{said}");
    assert!(said.contains("checkpoints held checkpoints of another run"), "{said}");
    assert!(folder.path().join("run/checkpoints.1/step-6").exists(), "{said}");
    let steps = events(&folder.path().join("run")).into_iter().filter(|event| event["event"] == "step");
    assert_eq!(steps.map(|step| step["step"].as_u64()).max(), Some(Some(2)), "{said}");
}

/// Where the number of nodes is left to chance, the samples of a step aren't.
#[test]
fn a_run_that_comes_back_with_fewer_nodes_takes_the_steps_that_it_would_have_taken() {
    let folder = tempfile::tempdir().unwrap();
    done(folder.path(), &["--steps", "5", "--out", "run", "--nproc-per-node", "2"]);
    let mut command = phalanx(folder.path());
    command.args(["run", "--nnodes", "1:2", "--rdzv-endpoint", "127.0.0.1:0", "--rdzv-id", "back"]);
    command.args(["--rdzv-conf", "last_call_timeout=0.1", "--nproc-per-node", "1", "--"]);
    command.arg(env!("CARGO_BIN_EXE_phalanx")).args(["train", "mnist-mini", "--seed", "4", "--resume"]);
    let out = command.args(["--out", "run", "--steps", "8"]).output().unwrap();
    assert_eq!(out.status.code(), Some(0), "{}", text(&out.stderr));
    let told = events(&folder.path().join("run"));
    let step = told.iter().rfind(|event| event["event"] == "step").unwrap();
    let of_last = ["step", "samples", "world_size"].map(|key| step[key].as_u64().unwrap());
    assert_eq!(of_last, [7, 8 * 64, 1]);
}

/// Who takes the place of another reads the recipe that the run began with, and not what was made of it for the next one.
#[test]
fn a_recipe_that_is_edited_changes_no_run_that_goes_on() {
    let folder = tempfile::tempdir().unwrap();
    let recipe = folder.path().join("mine.toml");
    let printed = phalanx(folder.path()).args(["train", "mnist-mini", "--print"]).output().unwrap();
    fs::write(&recipe, &printed.stdout).unwrap();
    let train = |out: &str| {
        let mut command = phalanx(folder.path());
        command.args(["train", "mine.toml", "--json", "--steps", "1500", "--out", out]);
        command.stdout(Stdio::piped()).stderr(Stdio::piped());
        command.spawn().unwrap()
    };
    let mut child = train("edited");
    let mut lines = BufReader::new(child.stdout.take().unwrap());
    let mut line = String::new();
    while !line.starts_with("{\"event\":\"step\",\"step\":3,") {
        line.clear();
        assert!(lines.read_line(&mut line).unwrap() > 0, "the run has ended");
    }
    let other =
        text(&printed.stdout).replace("lr = 0.05", "lr = 0.5").replace("batch_size = 32", "batch_size = 8");
    fs::write(&recipe, other).unwrap();
    let pid = user::worker(&folder.path().join("edited"), 1).to_string();
    assert!(Command::new("kill").args(["-KILL", &pid]).status().unwrap().success());
    lines.read_to_end(&mut Vec::new()).unwrap();
    let out = child.wait_with_output().unwrap();
    assert!(out.status.success(), "{}", text(&out.stderr));
    assert!(text(&out.stderr).contains("another takes its place"), "{}", text(&out.stderr));
    fs::write(&recipe, &printed.stdout).unwrap();
    assert!(train("whole").wait_with_output().unwrap().status.success());
    let [edited, whole] = ["edited", "whole"].map(|out| told(&folder.path().join(out)));
    assert_eq!((edited.len(), &edited[edited.len() - 1][..2]), (whole.len(), &whole[whole.len() - 1][..2]));
    let samples = |told: &[[String; 4]]| told.iter().rfind(|event| event[0] == "step").unwrap()[3].clone();
    assert_eq!(samples(&edited), samples(&whole));
}

#[test]
fn ranks_that_would_train_otherwise_are_told_how() {
    let folder = tempfile::tempdir().unwrap();
    let mut command = phalanx(folder.path());
    command.args(["run", "--nproc-per-node", "2", "--max-restarts", "1", "--", "sh", "-c"]);
    let program = format!(
        "exec {} train mnist-mini --steps 3 --set optimizer.lr=0.$((RANK+1)) --set train.threads=$((RANK+1))",
        env!("CARGO_BIN_EXE_phalanx")
    );
    let out = command.arg(program).output().unwrap();
    let said = text(&out.stderr);
    assert_eq!(out.status.code(), Some(1), "{said}");
    let words = "rank 1 would train otherwise than rank 0: optimizer.lr is 0.2 there, and 0.1 on rank 0\n";
    assert!(said.contains(words) && said.contains("not started again"), "{said}");
}

#[test]
fn a_run_whose_events_may_not_be_written_ends_at_once() {
    let folder = tempfile::tempdir().unwrap();
    done(folder.path(), &["--steps", "5", "--out", "run"]);
    let events = folder.path().join("run/events.jsonl");
    fs::remove_file(&events).unwrap();
    fs::create_dir(&events).unwrap();
    let begun = std::time::Instant::now();
    let out = command(folder.path(), &["--steps", "9", "--out", "run", "--resume"]).output().unwrap();
    let said = text(&out.stderr);
    assert!(out.status.code() == Some(1) && begun.elapsed() < Duration::from_secs(10), "{said}");
    let words = ["run/events.jsonl: Is a directory", "hint: what happens in the run", "not started again"];
    assert!(words.iter().all(|words| said.contains(words)) && !said.contains("restart 1"), "{said}");
}
