//! The lines of a script that are for `sbatch`.

use super::flag;

/// Whether it is meant to be one, well written or not.
pub(super) fn is_directive(line: &str) -> bool {
    line.starts_with("#SBATCH")
}

/// What they ask for.
#[derive(Default)]
pub(super) struct Directives {
    pub(super) all: Vec<Directive>,
}

/// One of them.
pub(super) struct Directive {
    pub(super) line: usize,
    pub(super) text: String,
    words: Vec<String>,
    /// Whether a command stands before it, so that it is a comment.
    pub(super) is_late: bool,
}

impl Directives {
    pub(super) fn add(&mut self, line: usize, text: &str, is_late: bool) {
        let rest = text.trim_start_matches("#SBATCH");
        // What follows a # is a comment there, too.
        let rest = rest.split(" #").next().unwrap_or_default();
        let words = rest.split_whitespace().map(str::to_owned).collect();
        self.all.push(Directive { line, text: text.to_owned(), words, is_late });
    }

    /// The line and the value of an option, the last one counts; empty for one without a value.
    pub(super) fn get(&self, names: &[&str]) -> Option<(usize, String)> {
        let mut heeded = self.all.iter().rev().filter(|directive| !directive.is_late);
        heeded.find_map(|directive| Some((directive.line, flag(&directive.words, names)?)))
    }

    pub(super) fn number(&self, names: &[&str]) -> Option<(usize, u64)> {
        let (line, value) = self.get(names)?;
        Some((line, value.parse().ok()?))
    }

    /// Whether there are several sets of them, each for nodes of its own.
    pub(super) fn is_several_jobs(&self) -> bool {
        self.all.iter().any(|directive| {
            directive.words.first().is_some_and(|word| ["hetjob", "packjob"].contains(&word.as_str()))
        })
    }

    /// The most nodes that it may have.
    pub(super) fn nodes(&self) -> u64 {
        let most = |(_, value): (usize, String)| value.rsplit('-').next().and_then(|most| most.parse().ok());
        self.get(&["--nodes", "-N"]).and_then(most).unwrap_or(1)
    }

    /// GPUs of a node.
    pub(super) fn gpus(&self) -> Option<u64> {
        let last = |value: &str| value.rsplit(':').next().and_then(|count| count.parse().ok());
        let per_node = self.get(&["--gpus-per-node"]).and_then(|(_, value)| last(&value));
        let gres = || {
            let (_, value) = self.get(&["--gres"])?;
            if value == "gpu" { Some(1) } else { value.strip_prefix("gpu:").and_then(last) }
        };
        per_node.or_else(gres)
    }
}
