//! A decoder that learns a text byte by byte, as a user has it.

mod user;

use serde_json::Value;
use std::fmt::Write;
use std::path::Path;
use std::process::Output;
use user::{events, phalanx, text};

/// What sums over ranks, and their order in a batch, leave of float32 losses after some steps.
const BOUND: f64 = 2e-4;

/// A made-up text: counting in words, which takes knowing what stands some bytes before.
fn write_text(folder: &Path) -> Vec<u8> {
    let digits = ["nought ", "one ", "two ", "three ", "four ", "five ", "six ", "seven ", "eight ", "nine "];
    let mut text = String::new();
    for number in 0..1200 {
        for digit in number.to_string().bytes() {
            text += digits[usize::from(digit - b'0')];
        }
        writeln!(text, "is {number}").unwrap();
    }
    std::fs::write(folder.join("numbers.txt"), &text).unwrap();
    text.into_bytes()
}

/// Bits a byte that the shares of single bytes come to: what is known of a text without its order.
fn unigram_bits(text: &[u8]) -> f64 {
    let mut counts = [0.0; 256];
    text.iter().for_each(|&byte| counts[usize::from(byte)] += 1.0);
    let share = counts.map(|count| count / text.len() as f64);
    -share.iter().filter(|share| **share > 0.0).map(|share| share * share.log2()).sum::<f64>()
}

fn train(folder: &Path, more: &[&str]) -> Output {
    let mut command = phalanx(folder);
    command.args(["train", "gpt", "--data", "numbers.txt", "--json"]);
    for size in ["layers=2", "width=32", "heads=2", "context=32"] {
        command.args(["--set", &format!("model.{size}")]);
    }
    command.args(more).output().unwrap()
}

fn losses(events: &[Value]) -> Vec<f64> {
    events.iter().filter(|e| e["event"] == "step").map(|e| e["loss"].as_f64().unwrap()).collect()
}

#[test]
fn it_learns_more_than_how_often_each_byte_comes() {
    let folder = tempfile::tempdir().unwrap();
    let unigram = unigram_bits(&write_text(folder.path()));
    let args = ["--nproc-per-node", "1", "--epochs", "4", "--batch-size", "16", "--set", "optimizer.lr=0.01"];
    let out = train(folder.path(), &args);
    assert!(out.status.success(), "{}", text(&out.stderr));
    let events = events(&out);
    let epoch = events.iter().rfind(|e| e["event"] == "epoch").unwrap();
    let [loss, bits, perplexity] =
        ["test_loss", "test_bits_per_byte", "test_perplexity"].map(|key| epoch[key].as_f64().unwrap());
    assert!(bits < 0.6 * unigram, "{bits} bits a byte, by single bytes {unigram}");
    assert!((bits - loss / 2f64.ln()).abs() < 1e-9 && (perplexity - loss.exp()).abs() < 1e-9, "{epoch}");
    assert!(epoch["test_accuracy"].is_null(), "{epoch}");
    // A loss of softened labels says something else.
    let softened = train(
        folder.path(),
        &["--nproc-per-node", "1", "--epochs", "1", "--set", "train.label_smoothing=0.1"],
    );
    let softened = self::events(&softened);
    let epoch = softened.iter().rfind(|e| e["event"] == "epoch").unwrap();
    assert!(epoch["test_loss"].is_number() && epoch["test_bits_per_byte"].is_null(), "{epoch}");
    // Before the first step all bytes are nearly alike.
    let first = losses(&events)[0];
    assert!((first - 256f64.ln()).abs() < 0.2, "{first}");
}

#[test]
fn two_workers_learn_as_one_does() {
    let folder = tempfile::tempdir().unwrap();
    write_text(folder.path());
    let run = |workers: &str, batch: &str| {
        let out = train(folder.path(), &["--steps", "8", "--nproc-per-node", workers, "--batch-size", batch]);
        assert!(out.status.success(), "{}", text(&out.stderr));
        losses(&events(&out))
    };
    let (one, two) = (run("1", "8"), run("2", "4"));
    assert_eq!((one.len(), two.len()), (8, 8));
    for (step, (one, two)) in one.iter().zip(&two).enumerate() {
        assert!((one - two).abs() <= BOUND, "step {step}: {two} by two workers, {one} by one");
    }
}

#[test]
fn a_text_that_is_not_there_or_too_short_is_told() {
    let folder = tempfile::tempdir().unwrap();
    let told = |wanted: &[&str]| {
        let out = train(folder.path(), &["--nproc-per-node", "1"]);
        let error = text(&out.stderr);
        assert!(!out.status.success() && wanted.iter().all(|word| error.contains(word)), "{error}");
    };
    told(&["no such text file: numbers.txt", "hint: --data FILE"]);
    std::fs::write(folder.path().join("numbers.txt"), "one").unwrap();
    told(&["numbers.txt: a text of 3 bytes", "windows of 32 bytes need at least 66"]);
}
