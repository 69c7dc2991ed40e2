//! Names in the store.

use phalanx_wire::Generation;
use serde::{Deserialize, Serialize};
use std::borrow::Borrow;
use std::fmt;
use std::str::FromStr;
use thiserror::Error;

/// The longest name in bytes.
pub const MAX_KEY: usize = 256;

/// The name of a value: parts with `/` between them, at most [`MAX_KEY`] bytes of UTF-8, no part empty and no control
/// characters.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Key(String);

/// Where keys lie: nothing, which is the whole store, or what could be a key with a `/` behind it. So `rank/1/` holds
/// nothing of rank 10.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Folder(String);

/// A name that isn't one.
#[derive(Clone, PartialEq, Debug, Error)]
#[error("{name:?} can't be a name in the store: {reason}")]
pub struct BadKey {
    /// The name, or as much of it as is worth showing.
    pub name: String,
    /// Why not.
    pub reason: &'static str,
}

impl Key {
    /// The name.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl Folder {
    /// The whole store.
    pub fn root() -> Folder {
        Folder(String::new())
    }

    /// The folder that belongs to one generation of one run alone.
    pub fn of_run(run_id: &str, generation: Generation) -> Result<Folder, BadKey> {
        if run_id.contains('/') {
            return Err(bad(run_id, "a run's id has no /"));
        }
        format!("phalanx/{run_id}/{generation}/").parse()
    }

    /// The name, empty or with a `/` at its end.
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// Whether a key lies below.
    pub fn holds(&self, key: &Key) -> bool {
        key.0.starts_with(&self.0)
    }

    /// The key of this name below.
    pub fn key(&self, name: &Key) -> Result<Key, BadKey> {
        format!("{}{}", self.0, name.0).parse()
    }

    /// The folder of this name below.
    pub fn folder(&self, name: &Folder) -> Result<Folder, BadKey> {
        format!("{}{}", self.0, name.0).parse()
    }

    /// What a key below is called from here.
    pub fn strip(&self, key: &Key) -> Option<Key> {
        key.0.strip_prefix(&self.0)?.parse().ok()
    }
}

fn bad(name: &str, reason: &'static str) -> BadKey {
    BadKey { name: name.chars().take(80).collect(), reason }
}

fn check(name: &str) -> Result<(), BadKey> {
    let reason = if name.len() > MAX_KEY {
        "it has more than 256 bytes"
    } else if name.split('/').any(str::is_empty) {
        "a part between its slashes is empty"
    } else if name.chars().any(char::is_control) {
        "it holds a control character"
    } else {
        return Ok(());
    };
    Err(bad(name, reason))
}

impl FromStr for Key {
    type Err = BadKey;

    fn from_str(name: &str) -> Result<Key, BadKey> {
        check(name).map(|()| Key(name.to_owned()))
    }
}

impl FromStr for Folder {
    type Err = BadKey;

    fn from_str(name: &str) -> Result<Folder, BadKey> {
        match name.strip_suffix('/') {
            Some(path) => check(path)?,
            None if name.is_empty() => {}
            None => return Err(bad(name, "a folder ends with /")),
        }
        Ok(Folder(name.to_owned()))
    }
}

impl TryFrom<String> for Key {
    type Error = BadKey;

    fn try_from(name: String) -> Result<Key, BadKey> {
        check(&name).map(|()| Key(name))
    }
}

impl TryFrom<String> for Folder {
    type Error = BadKey;

    fn try_from(name: String) -> Result<Folder, BadKey> {
        name.parse()
    }
}

/// A key is ordered and found by its name.
impl Borrow<str> for Key {
    fn borrow(&self) -> &str {
        &self.0
    }
}

impl From<Key> for String {
    fn from(key: Key) -> String {
        key.0
    }
}

impl From<Folder> for String {
    fn from(folder: Folder) -> String {
        folder.0
    }
}

impl fmt::Display for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl fmt::Display for Folder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if self.0.is_empty() { "the whole store" } else { &self.0 })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_taken_or_refused_with_a_reason() {
        fn check<T: FromStr<Err = BadKey>>(name: &str, want: &str) {
            match name.parse::<T>() {
                Ok(_) => assert_eq!(want, "", "{name:?} was taken"),
                Err(error) => {
                    assert!(
                        !want.is_empty() && error.to_string().contains(want),
                        "{name:?}: {error}, not {want:?}"
                    )
                }
            }
        }
        let long = "k".repeat(MAX_KEY);
        for name in ["a", "rank/0/address", "gr\u{fc}n", "a b", ".", long.as_str()] {
            check::<Key>(name, "");
            check::<Folder>(&format!("{name}/"), "");
            check::<Folder>(name, "ends with /");
        }
        for name in ["", "/", "/a", "a/", "a//b"] {
            check::<Key>(name, "empty");
        }
        check::<Folder>("", "");
        check::<Folder>("/", "empty");
        check::<Folder>("a//", "empty");
        check::<Key>("a\nb", "control");
        check::<Key>(&format!("{long}k"), "256 bytes");
        assert!(serde_json::from_str::<Key>("\"a//b\"").is_err());
    }

    #[test]
    fn runs_and_generations_share_no_key() {
        let folder = |run, generation| Folder::of_run(run, Generation(generation)).unwrap();
        let key: Key = "rank/0".parse().unwrap();
        let ours = folder("abc", 1).key(&key).unwrap();
        assert_eq!(folder("abc", 1).strip(&ours), Some(key));
        for other in [folder("abc", 11), folder("abc", 2), folder("abcd", 1), folder("ab", 1)] {
            assert!(!other.holds(&ours) && other.strip(&ours).is_none(), "{other}");
        }
        assert!(Folder::of_run("abc/1", Generation(0)).is_err());
        assert!(Folder::of_run("", Generation(0)).is_err());
    }
}
