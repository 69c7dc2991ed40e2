//! Words for people on standard error, results on standard output. Who listens there may be gone (`2>&1 | head`, a terminal
//! that was closed): then they are lost, and nothing else is. `println!` and its like would panic, so this crate has none.

use std::fmt::Display;
use std::io::Write;

/// A line for people.
pub(crate) fn say(line: impl Display) {
    let _ = std::io::stderr().lock().write_all(format!("{line}\n").as_bytes());
}

/// A line of the result.
pub(crate) fn print(line: impl Display) {
    let _ = std::io::stdout().lock().write_all(format!("{line}\n").as_bytes());
}
