//! What a job is to do that somebody submits to a scheduler.

use serde::{Deserialize, Serialize};
use std::path::Path;

/// What is to be done.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Work {
    /// Train a recipe, with these arguments of `phalanx train`, the recipe first.
    Train(Vec<String>),
    /// Run a program, with its arguments.
    Program(Vec<String>),
}

impl Work {
    /// All words, the recipe or program first.
    pub fn words(&self) -> &[String] {
        let (Work::Train(words) | Work::Program(words)) = self;
        words
    }

    /// What a job is called that nobody has named: its recipe or program, in letters, digits, dots and dashes.
    pub fn name(&self) -> String {
        let first = self.words().first().map(Path::new).and_then(Path::file_stem).unwrap_or_default();
        let is_plain = |c: char| c.is_ascii_alphanumeric() || "-_.".contains(c);
        first.to_string_lossy().replace(|c| !is_plain(c), "-")
    }
}
