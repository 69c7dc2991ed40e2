//! What a client and the coordinator's store say to each other: one JSON value a frame, after [`crate::FromWorker::OpenStore`].
//! Every question has a number, and its answer bears the same, so that a long wait holds up no other question.

use super::{Entry, Event, Expect, Folder, Key, LeaseId, Refusal, Revision};
use base64::Engine;
use base64::prelude::BASE64_STANDARD;
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use std::fmt;
use std::ops::Deref;
use std::sync::Arc;

/// The longest message in bytes: the longest value as text, or the longest listing, and some.
pub const MAX_STORE_FRAME: usize = 4 << 20;

/// Bytes under a key; they are shared and not copied. In a message they are base64.
#[derive(Clone, PartialEq, Eq)]
pub struct Value(Arc<[u8]>);

/// A question.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FromClient {
    /// Its number, which no open question of this connection has.
    pub id: u64,
    /// The question itself.
    pub ask: Ask,
}

/// What a store is asked; what each means is told by [`super::Store`]'s methods.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
#[expect(missing_docs, reason = "the fields are the arguments of the methods")]
pub enum Ask {
    /// Answered by `Entry`.
    Get { key: Key },
    /// Answered by `Done`.
    Set { key: Key, value: Value, lease: Option<LeaseId> },
    /// Answered by `Sum`.
    Add { key: Key, by: i64 },
    /// Answered by `Done` or `Entry`.
    CompareAndSet { key: Key, expect: Expect, value: Value, lease: Option<LeaseId> },
    /// Answered by `Deleted`.
    Delete { key: Key },
    /// Answered by `Listing`.
    List { folder: Folder },
    /// Answered by `Done` once all are there, or after the time by `Missing`.
    Wait { keys: Vec<Key>, limit_ms: u64 },
    /// Answered by `News`, after the time by one without events.
    Poll { folder: Folder, from: Revision, limit_ms: u64 },
    /// Answered by `Granted`.
    Grant { time_to_live_ms: u64 },
    /// Answered by `Done`.
    KeepAlive { lease: LeaseId },
    /// Answered by `Done`.
    Revoke { lease: LeaseId },
}

/// An answer.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ToClient {
    /// The number of the question.
    pub id: u64,
    /// The answer itself.
    pub answer: Answer,
}

/// What a store answers.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum Answer {
    /// What the key holds.
    Entry(Option<Entry>),
    /// It was done; the store is at this revision.
    Done(Revision),
    /// What the counter holds now.
    Sum(i64),
    /// Whether there was such a key.
    Deleted(bool),
    /// The keys of a folder.
    Listing {
        /// At which revision.
        revision: Revision,
        /// Each, and its revision.
        keys: Vec<(Key, Revision)>,
    },
    /// The time is over and these keys aren't there.
    Missing(Vec<Key>),
    /// Changes of a folder.
    News {
        /// In order.
        events: Vec<Event>,
        /// From where to ask on.
        next: Revision,
    },
    /// A lease.
    Granted(LeaseId),
    /// No.
    Refused(Refusal),
}

impl Deref for Value {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.0
    }
}

impl From<&[u8]> for Value {
    fn from(bytes: &[u8]) -> Value {
        Value(bytes.into())
    }
}

impl From<Vec<u8>> for Value {
    fn from(bytes: Vec<u8>) -> Value {
        Value(bytes.into())
    }
}

impl<const N: usize> PartialEq<[u8; N]> for Value {
    fn eq(&self, other: &[u8; N]) -> bool {
        self.0[..] == other[..]
    }
}

impl fmt::Debug for Value {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0.len() {
            0..=80 => write!(f, "\"{}\"", self.0.escape_ascii()),
            bytes => write!(f, "{bytes} bytes"),
        }
    }
}

impl Serialize for Value {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(&BASE64_STANDARD.encode(&self.0))
    }
}

impl<'de> Deserialize<'de> for Value {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Value, D::Error> {
        let text = String::deserialize(deserializer)?;
        BASE64_STANDARD.decode(text).map(Value::from).map_err(serde::de::Error::custom)
    }
}

#[cfg(test)]
mod tests {
    use super::super::{Change, MAX_KEY, MAX_LISTING, MAX_VALUE};
    use super::*;

    /// The worst key: every byte of it takes two in JSON.
    fn key() -> Key {
        "\"".repeat(MAX_KEY).parse().unwrap()
    }

    #[test]
    fn the_longest_messages_fit_into_a_frame_and_come_back() {
        let value = Value::from(vec![0xff; MAX_VALUE]);
        let revision = Revision(u64::MAX);
        let event = Event { revision, change: Change::Set { key: key(), value } };
        let answers = [
            Answer::News { events: vec![event], next: revision },
            Answer::Listing { revision, keys: vec![(key(), revision); MAX_LISTING] },
        ];
        for answer in answers {
            let message = ToClient { id: u64::MAX, answer };
            let frame = serde_json::to_vec(&message).unwrap();
            assert!(frame.len() <= MAX_STORE_FRAME, "{} bytes", frame.len());
            assert_eq!(serde_json::from_slice::<ToClient>(&frame).unwrap(), message);
        }
    }

    #[test]
    fn unknown_fields_and_bad_names_are_refused() {
        for text in [
            r#"{"id":1,"ask":{"get":{"key":"a//b"}}}"#,
            r#"{"id":1,"ask":{"get":{"key":"a","now":true}}}"#,
            r#"{"id":1,"ask":{"set":{"key":"a","value":"%","lease":null}}}"#,
            r#"{"id":-1,"ask":{"get":{"key":"a"}}}"#,
            r#"{"id":1,"ask":{"get":{"key":"a"}},"more":1}"#,
        ] {
            assert!(serde_json::from_str::<FromClient>(text).is_err(), "{text}");
        }
        let ask = Ask::Get { key: "a".parse().unwrap() };
        let text = r#"{"id":1,"ask":{"get":{"key":"a"}}}"#;
        assert_eq!(serde_json::from_str::<FromClient>(text).unwrap(), FromClient { id: 1, ask });
    }
}
