//! Words for people on standard error, results on standard output. Who listens there may be gone (`2>&1 | head`, a terminal
//! that was closed): then they are lost, and nothing else is. `println!` and its like would panic, so this crate has none.
//! Results that can't be kept for another reason, a full disk say, are an error of the command, once it has ended.

use std::fmt::Display;
use std::io::{ErrorKind, Write};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};

/// Whether whoever read the result has gone.
static GONE: AtomicBool = AtomicBool::new(false);
/// Why a line of the result was lost, though somebody may want it.
static LOST: OnceLock<String> = OnceLock::new();

/// A line for people.
pub(crate) fn say(line: impl Display) {
    let _ = std::io::stderr().lock().write_all(format!("{line}\n").as_bytes());
}

/// Text with names from foreign files in it, without what a terminal would do for them.
pub(crate) fn harmless(text: &str) -> String {
    let is_harmful = |c: char| c.is_control() && c != '\n' && c != '\t';
    text.chars().fold(String::new(), |mut harmless, c| {
        match is_harmful(c) {
            true => harmless.extend(c.escape_default()),
            false => harmless.push(c),
        }
        harmless
    })
}

/// A line of the result.
pub(crate) fn print(line: impl Display) {
    match std::io::stdout().lock().write_all(format!("{line}\n").as_bytes()) {
        Err(error) if error.kind() == ErrorKind::BrokenPipe => GONE.store(true, Ordering::Relaxed),
        Err(error) => drop(LOST.set(error.to_string())),
        Ok(()) => {}
    }
}

/// A line of a table that is the result, unless that is asked for in `json`: then it is for people.
pub(crate) fn tabulate(json: bool, line: impl Display) {
    if json { say(line) } else { print(line) }
}

/// Whether anybody may still read what is printed.
pub(crate) fn is_read() -> bool {
    !GONE.load(Ordering::Relaxed)
}

/// Why the result isn't whole, if it isn't.
pub(crate) fn lost() -> Option<String> {
    let why = LOST.get()?;
    Some(format!(
        "standard output can't be written, and what was told is lost: {why}\nhint: is the disk full that it goes to?"
    ))
}
