//! What a PyTorch program that failed has said in `TORCHELASTIC_ERROR_FILE`: those that run under `@record` leave the exception there.

use serde::Deserialize;
use std::fs::File;
use std::io::Read;
use std::path::Path;

/// No exception takes more.
const MOST_BYTES: u64 = 1 << 20;

#[derive(Deserialize)]
struct Said {
    message: Message,
}

/// The exception, or of a worker of a worker a line about it.
#[derive(Deserialize)]
#[serde(untagged)]
enum Message {
    Line(String),
    Exception {
        message: String,
        #[serde(rename = "extraInfo", default)]
        more: More,
    },
}

#[derive(Default, Deserialize)]
struct More {
    #[serde(default)]
    py_callstack: String,
}

/// The exception, and its traceback on the lines behind it; none where nothing is there that can be read.
pub(crate) fn of(file: &Path) -> Option<String> {
    let mut text = Vec::new();
    File::open(file).ok()?.take(MOST_BYTES).read_to_end(&mut text).ok()?;
    let said = match serde_json::from_slice::<Said>(&text).ok()?.message {
        Message::Line(line) => line,
        Message::Exception { message, more } => format!("{message}\n{}", more.py_callstack),
    };
    let is_shown = |c: &char| !c.is_control() || *c == '\n' || *c == '\t';
    let said: String = said.trim().chars().filter(is_shown).collect();
    (!said.is_empty()).then_some(said)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_program_says_is_read_and_nothing_else() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("0.error.json");
        assert_eq!(of(&file), None);
        let check = |text: &str, want: Option<&str>| {
            std::fs::write(&file, text).unwrap();
            assert_eq!(of(&file).as_deref(), want, "{text}");
        };
        let exception = r#"{"message": {"message": "ValueError: bad", "extraInfo": {"py_callstack": "Traceback:\n  x\n", "timestamp": "7"}}}"#;
        check(exception, Some("ValueError: bad\nTraceback:\n  x"));
        check(r#"{"message": "Signal 9 (SIGKILL) received"}"#, Some("Signal 9 (SIGKILL) received"));
        check(r#"{"message": {"message": "E: \u001b[2Jx", "errorCode": 3}}"#, Some("E: [2Jx"));
        check(r#"{"message": {"message": ""}}"#, None);
        check("{", None);
        check("", None);
    }
}
