//! The queues of a pool: what each may hold, by right and at most.

use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use thiserror::Error;

/// Of a pool whose queues nobody has written down: all jobs are in this one.
const DEFAULT_QUEUE: &str = "default";
/// The longest name of a queue, a node or a job, in bytes.
const MAX_NAME: usize = 64;

/// A queue.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Queue {
    /// Slots that are its own. Others borrow what it doesn't use, and give it back when it asks.
    #[serde(default)]
    pub quota: u32,
    /// The most slots it ever holds; none where that is all there are.
    #[serde(default)]
    pub limit: Option<u32>,
    /// Its part of what all quotas leave over, beside those of the other queues that ask for more.
    #[serde(default = "one")]
    pub weight: u32,
}

fn one() -> u32 {
    1
}

/// All queues by name.
pub type Queues = BTreeMap<String, Queue>;

/// Why there are no queues.
#[derive(Debug, Error)]
pub enum QueuesError {
    /// The file can't be read.
    #[error("the queues in {path}: {source}", path = path.display())]
    Io {
        /// Which file.
        path: PathBuf,
        /// What the system said.
        source: std::io::Error,
    },
    /// It says something else.
    #[error("the queues in {path}: {reason}\nhint: a queue is [queues.NAME] with quota = 4 and, if it is to have them, limit = 8 and weight = 2", path = path.display())]
    Wrong {
        /// Which file.
        path: PathBuf,
        /// What is wrong with it.
        reason: String,
    },
}

/// A file of queues.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Page {
    queues: Queues,
}

/// One queue, in which all is borrowed.
pub fn default_queues() -> Queues {
    Queues::from([(DEFAULT_QUEUE.into(), Queue { quota: 0, limit: None, weight: 1 })])
}

/// Reads a file of queues, as TOML.
pub fn read_queues(path: &Path) -> Result<Queues, QueuesError> {
    let text =
        std::fs::read_to_string(path).map_err(|source| QueuesError::Io { path: path.to_owned(), source })?;
    parse(&text).map_err(|reason| QueuesError::Wrong { path: path.to_owned(), reason })
}

fn parse(text: &str) -> Result<Queues, String> {
    let page: Page = toml::from_str(text).map_err(|error| error.to_string().trim_end().to_owned())?;
    if page.queues.is_empty() {
        return Err("there are none".into());
    }
    for (name, queue) in &page.queues {
        check_name(name)?;
        if queue.weight == 0 {
            return Err(format!("{name}: weight = 0: must be at least 1"));
        }
        if let Some(limit) = queue.limit.filter(|limit| *limit < queue.quota) {
            return Err(format!("{name}: limit = {limit}: must be at least its quota, {}", queue.quota));
        }
    }
    Ok(page.queues)
}

/// Whether something may be called that; if not, why.
pub fn check_name(name: &str) -> Result<(), String> {
    let is_plain = |c: char| c.is_ascii_alphanumeric() || "-_.".contains(c);
    match name.is_empty() || name.len() > MAX_NAME || !name.chars().all(is_plain) {
        true => {
            Err(format!("{name:?}: a name is up to {MAX_NAME} letters, digits, dots, dashes and underscores"))
        }
        false => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_is_queues_or_says_what_is_wrong() {
        let good = parse("[queues.a]\nquota = 4\nlimit = 8\nweight = 2\n[queues.b]\n").unwrap();
        assert_eq!(good["a"], Queue { quota: 4, limit: Some(8), weight: 2 });
        assert_eq!(good["b"], Queue { quota: 0, limit: None, weight: 1 });
        let rows = [
            ("", "missing field `queues`"),
            ("[queues]", "there are none"),
            ("[queues.a]\nquotta = 1", "unknown field `quotta`"),
            ("[queues.a]\nquota = -1", "quota"),
            ("[queues.a]\nweight = 0", "a: weight = 0: must be at least 1"),
            ("[queues.a]\nquota = 3\nlimit = 2", "a: limit = 2: must be at least its quota, 3"),
            ("[queues.'a b']", "\"a b\": a name is up to 64"),
            ("[pool]", "unknown field `pool`"),
        ];
        for (text, want) in rows {
            let why = parse(text).unwrap_err();
            assert!(why.contains(want), "{want} in: {why}");
        }
    }
}
