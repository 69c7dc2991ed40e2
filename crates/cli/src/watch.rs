//! `phalanx watch`: runs as they go on, on a page for a browser, as numbers for Prometheus, and in files for TensorBoard.
//!
//! All of it is read from the runs' own `events.jsonl`, so runs know nothing of it and lose no time to it, and those that are over are
//! shown like those that go on.

mod prometheus;
mod run;
mod runs;
mod serve;
mod tensorboard;

use crate::args::WrongUsage;
use crate::say::{harmless, print, say};
use anyhow::{Context, Result};
use clap::Args;
use run::Summary;
use runs::Runs;
use serde_json::json;
use serve::Server;
use std::fs;
use std::net::SocketAddr;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::Duration;
use tensorboard::Boards;

/// `phalanx watch`.
#[derive(Args)]
pub(crate) struct WatchArgs {
    /// The folder of runs, or that of one run.
    #[arg(default_value = "runs")]
    folder: PathBuf,
    /// Where to show them: an address of this machine, and a port, 0 for any that is free.
    #[arg(long, value_name = "ADDRESS:PORT", default_value = "127.0.0.1:6006")]
    listen: SocketAddr,
    /// A file with the token that a browser or Prometheus has to give [default: one that is made up, and shown].
    #[arg(long, value_name = "FILE")]
    token_file: Option<PathBuf>,
    /// Write what happens into this folder, too, for TensorBoard.
    #[arg(long, value_name = "DIR")]
    tensorboard: Option<PathBuf>,
    /// Tell of the runs as they are now, on the terminal, and end.
    #[arg(long)]
    once: bool,
    /// Print one JSON object a line on standard output.
    #[arg(long)]
    json: bool,
}

/// Between two looks at the files.
const LOOK: Duration = Duration::from_secs(1);
/// The fewest characters of a token: as many as nobody guesses.
const SHORTEST_TOKEN: usize = 16;

pub(crate) fn watch(args: &WatchArgs) -> Result<u8> {
    if args.once && !args.folder.is_dir() {
        let folder = args.folder.display();
        let hint = "phalanx train keeps its runs in the folder runs, or where --out says";
        return Err(WrongUsage(format!("{folder}: there is no such folder\nhint: {hint}")).into());
    }
    let mut runs = Runs::new(args.folder.clone());
    let mut boards = args.tensorboard.clone().map(Boards::open).transpose()?;
    runs.look();
    let written = boards.as_mut().map_or(Ok(()), |boards| boards.write(&runs));
    if args.once {
        written?;
        tell(&runs, args.json);
        return Ok(0);
    }
    let token = args.token_file.as_deref().map_or_else(made_up, read_token)?;
    let runs = Arc::new(Mutex::new(runs));
    let server = Server::listen(args.listen, token.clone(), runs.clone())?;
    let shown = if args.token_file.is_some() { "..." } else { &token };
    let url = format!("http://{}/?token={shown}", server.address());
    if !args.folder.exists() {
        say(format_args!("note: {}: there is no such folder yet", args.folder.display()));
    }
    match (args.json, args.token_file.is_some()) {
        (true, _) => print(json!({"watch": "listening", "address": server.address(), "url": url})),
        (false, false) => say(format_args!("watching {}: {url}", args.folder.display())),
        (false, true) => {
            say(format_args!("watching {}: {url} (the token of the file)", args.folder.display()));
        }
    }
    if !args.listen.ip().is_loopback() {
        say(
            "note: what is shown isn't encrypted, the token neither\nhint: --listen 127.0.0.1:6006 and, from elsewhere, ssh -L 6006:127.0.0.1:6006 this-machine",
        );
    }
    let looks = move || {
        let _ends_with_it = EndsAll;
        let mut told = String::new();
        loop {
            thread::sleep(LOOK);
            let mut runs = runs.lock().unwrap_or_else(PoisonError::into_inner);
            runs.look();
            let written = boards.as_mut().map_or(Ok(()), |boards| boards.write(&runs));
            // Once, however long a disk is full.
            let words = written.err().map_or_else(String::new, |error| format!("{error:#}"));
            if !words.is_empty() && words != told {
                say(harmless(&words));
            }
            told = words;
        }
    };
    thread::Builder::new()
        .name("watch-files".into())
        .spawn(looks)
        .context("a thread that reads the files")?;
    server.serve()
}

/// Ends the program where the thread that reads the files panics: what is shown would be old, and nobody would know.
struct EndsAll;

impl Drop for EndsAll {
    fn drop(&mut self) {
        if thread::panicking() {
            std::process::exit(1);
        }
    }
}

/// A line for each run.
fn tell(runs: &Runs, as_json: bool) {
    let summaries: Vec<Summary> = runs.all().map(|run| run.summary()).collect();
    if as_json {
        return summaries.iter().for_each(|run| print(json!(run)));
    }
    let longest = summaries.iter().map(|run| run.name.chars().count()).max().unwrap_or(0).max(4);
    print(format_args!(
        "{:<longest$} {:<9} {:>15} {:>6} {:>10} {:>9} {:>9} {:>8}",
        "run", "state", "step", "epoch", "loss", "ms", "accuracy", "workers"
    ));
    for run in &summaries {
        let some = |number: Option<f64>, digits: usize| {
            number.map_or("-".to_owned(), |number| format!("{number:.digits$}"))
        };
        print(format_args!(
            "{:<longest$} {:<9} {:>15} {:>6} {:>10} {:>9} {:>9} {:>8}",
            harmless(&run.name),
            run.state.name(),
            format!("{} of {}", run.made, run.steps),
            run.epoch,
            some(run.loss, 4),
            some(run.ms, 2),
            some(run.test_accuracy, 4),
            run.world_size
        ));
    }
}

/// A token that nobody knows.
fn made_up() -> Result<String> {
    let mut bytes = [0; 16];
    getrandom::fill(&mut bytes).context("no random numbers for a token")?;
    Ok(bytes.iter().map(|byte| format!("{byte:02x}")).collect())
}

fn read_token(file: &Path) -> Result<String> {
    let name = format!("--token-file {}", file.display());
    let text = fs::read_to_string(file).with_context(|| name.clone())?;
    let mode = fs::metadata(file).with_context(|| name.clone())?.permissions().mode() & 0o777;
    // Prometheus may read it by its group.
    if mode & 0o007 != 0 {
        let hint = format!("chmod o= {}", file.display());
        let what = "everybody on this machine can read the token";
        return Err(WrongUsage(format!("{name}: {what} (mode {mode:04o})\nhint: {hint}")).into());
    }
    let token = text.trim();
    let is_good = |c: char| c.is_ascii_alphanumeric() || c == '-' || c == '_';
    if token.len() < SHORTEST_TOKEN || !token.chars().all(is_good) {
        let wanted =
            format!("must hold at least {SHORTEST_TOKEN} letters, digits, - and _, and nothing else");
        let make = "head -c 16 /dev/urandom | sha256sum | head -c 32";
        let hint = format!("(umask 077; {make} > {})", file.display());
        return Err(WrongUsage(format!("{name}: {wanted}\nhint: {hint}")).into());
    }
    Ok(token.to_owned())
}
