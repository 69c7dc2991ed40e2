//! etcd's JSON gateway: questions as HTTP requests, numbers as strings, bytes as base64.

use phalanx_job::store::{Refusal, StoreError, Value};
use phalanx_wire::Deadline;
use serde::de::{DeserializeOwned, Error as _};
use serde::{Deserialize, Deserializer};
use std::io::{BufRead, BufReader, Read};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard};
use std::time::Duration;
use ureq::http::Response;
use ureq::{Agent, Body, Timeout};

/// How long an answer may take that has nothing to wait for.
pub(super) const ANSWER_LIMIT: Duration = Duration::from_secs(10);
/// A watch with less time than this would end before etcd could say what it knows already.
const SHORTEST_WATCH: Duration = Duration::from_millis(100);
/// The longest answer in bytes: a thousand changes of some length.
const MAX_ANSWER: u64 = 64 << 20;
/// gRPC's code for a lease or user that isn't there.
const NOT_FOUND: i64 = 5;
/// gRPC's code for a token that is none, or no longer.
const UNAUTHENTICATED: i64 = 16;

/// Some etcd servers of one cluster.
pub(super) struct Gateway {
    agent: Agent,
    endpoints: Vec<String>,
    /// The endpoint that answered last.
    current: AtomicUsize,
    login: Option<(String, String)>,
    token: Mutex<Option<String>>,
}

/// Why etcd didn't do it.
pub(super) enum Trouble {
    /// There is no such lease.
    NotFound,
    /// Anything else.
    Error(StoreError),
}

impl From<StoreError> for Trouble {
    fn from(error: StoreError) -> Trouble {
        Trouble::Error(error)
    }
}

impl Trouble {
    /// An error that says no where no such lease is there.
    pub(super) fn or_refused(self, operation: &str, refusal: Refusal) -> StoreError {
        match self {
            Trouble::NotFound => StoreError::refused(operation, refusal),
            Trouble::Error(error) => error,
        }
    }
}

#[derive(Deserialize)]
struct Failure {
    message: String,
    #[serde(default)]
    code: i64,
}

#[derive(Deserialize)]
struct Token {
    token: String,
}

impl Gateway {
    pub(super) fn new(endpoints: Vec<String>, login: Option<(String, String)>) -> Gateway {
        let config = Agent::config_builder()
            .http_status_as_error(false)
            .timeout_resolve(Some(ANSWER_LIMIT))
            .timeout_connect(Some(ANSWER_LIMIT))
            .timeout_send_request(Some(ANSWER_LIMIT))
            .timeout_send_body(Some(ANSWER_LIMIT))
            .timeout_recv_response(Some(ANSWER_LIMIT))
            // A cluster's own servers aren't reached through the proxy that leads to the web.
            .proxy(None)
            .build();
        let agent = Agent::new_with_config(config);
        Gateway { agent, endpoints, current: AtomicUsize::new(0), login, token: Mutex::default() }
    }

    /// Asks, and reads the whole answer.
    pub(super) fn ask<T: DeserializeOwned>(
        &self,
        operation: &str,
        path: &str,
        question: &serde_json::Value,
    ) -> Result<T, Trouble> {
        let mut answer = self.send(operation, path, question, ANSWER_LIMIT)?;
        let mut text = Vec::new();
        answer.read_to_end(&mut text).map_err(|error| self.failed(operation, error.into()))?;
        serde_json::from_slice(&text)
            .map_err(|error| self.broken(operation, format!("an unreadable answer: {error}")).into())
    }

    /// The changes that match a question, from its revision on: what the first message that tells any holds, or nothing if
    /// none comes in time.
    pub(super) fn watch(
        &self,
        operation: &str,
        question: &serde_json::Value,
        deadline: Deadline,
    ) -> Result<Watched, StoreError> {
        let limit = deadline.remaining().max(SHORTEST_WATCH);
        let sent = self.send(operation, "watch", question, limit);
        let answer = sent.map_err(|trouble| self.unexpected(operation, trouble))?;
        let mut lines = BufReader::new(answer);
        let (mut now, mut line) = (None, Vec::new());
        loop {
            line.clear();
            match lines.read_until(b'\n', &mut line) {
                Ok(0) => return Err(self.broken(operation, "it ended the watch".into())),
                Ok(_) => {}
                Err(error) => {
                    let error = ureq::Error::from(error);
                    let is_over = matches!(error, ureq::Error::Timeout(Timeout::RecvBody));
                    return match now.filter(|_| is_over) {
                        Some(now) => Ok(Watched { now, events: Vec::new(), compacted: 0 }),
                        None => Err(self.failed(operation, error)),
                    };
                }
            }
            let Streamed { result } = serde_json::from_slice(&line)
                .map_err(|error| self.broken(operation, format!("an unreadable message: {error}")))?;
            if result.canceled && result.compact_revision == 0 {
                return Err(self.broken(operation, "it ended the watch".into()));
            }
            // The first message says where the store was when the watch began.
            let began = *now.get_or_insert(result.header.revision);
            if result.canceled
                || !result.events.is_empty()
                || began.saturating_add(1) < first_wanted(question)
            {
                return Ok(Watched { now: began, events: result.events, compacted: result.compact_revision });
            }
        }
    }

    /// Sends a question with the proof of who asks; gives the answer to be read.
    fn send(
        &self,
        operation: &str,
        path: &str,
        question: &serde_json::Value,
        body_limit: Duration,
    ) -> Result<impl Read + use<>, Trouble> {
        let mut has_tried_again = false;
        loop {
            let token = self.logged_in(operation)?;
            let mut answer = self.post(operation, path, question, token.as_deref(), body_limit)?;
            if answer.status().is_success() {
                return Ok(answer.into_body().into_with_config().limit(MAX_ANSWER).reader());
            }
            let text = answer.body_mut().read_to_string().unwrap_or_default();
            let failure = serde_json::from_str(&text).unwrap_or(Failure { message: text, code: 0 });
            match failure.code {
                NOT_FOUND => return Err(Trouble::NotFound),
                // Tokens last for some minutes. A question that was refused for its token hasn't been looked at.
                UNAUTHENTICATED if token.is_some() && !has_tried_again => {
                    has_tried_again = true;
                    *self.token() = None;
                }
                _ => return Err(self.broken(operation, failure.message).into()),
            }
        }
    }

    /// Sends to the endpoint that answered last, or to the next if it can't be reached. Nothing is sent twice but what was
    /// never heard.
    fn post(
        &self,
        operation: &str,
        path: &str,
        question: &serde_json::Value,
        token: Option<&str>,
        body_limit: Duration,
    ) -> Result<Response<Body>, StoreError> {
        let mut unreachable = 0;
        loop {
            let current = self.current.load(Ordering::Relaxed);
            let address = format!("{}/v3/{path}", self.endpoint());
            let mut request = self.agent.post(&address).config().timeout_recv_body(Some(body_limit)).build();
            if let Some(token) = token {
                request = request.header("Authorization", token);
            }
            match request.send(question.to_string()) {
                Ok(answer) => return Ok(answer),
                Err(error) if is_unheard(&error) && unreachable + 1 < self.endpoints.len() => {
                    unreachable += 1;
                    let next = (current + 1) % self.endpoints.len();
                    // Another thread may have gone on already.
                    let _ =
                        self.current.compare_exchange(current, next, Ordering::Relaxed, Ordering::Relaxed);
                }
                Err(error) => return Err(self.failed(operation, error)),
            }
        }
    }

    /// The token that proves who asks, where that is wanted.
    fn logged_in(&self, operation: &str) -> Result<Option<String>, StoreError> {
        let Some((name, password)) = &self.login else { return Ok(None) };
        let mut token = self.token();
        if token.is_none() {
            let question = serde_json::json!({ "name": name, "password": password });
            let mut answer = self.post(operation, "auth/authenticate", &question, None, ANSWER_LIMIT)?;
            let text = answer.body_mut().read_to_string().map_err(|error| self.failed(operation, error))?;
            let given: Token = serde_json::from_str(&text)
                .map_err(|_| self.broken(operation, format!("user {name} can't log in: {text}")))?;
            *token = Some(given.token);
        }
        Ok(token.clone())
    }

    fn token(&self) -> MutexGuard<'_, Option<String>> {
        self.token.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    fn endpoint(&self) -> &str {
        &self.endpoints[self.current.load(Ordering::Relaxed) % self.endpoints.len()]
    }

    fn failed(&self, operation: &str, error: ureq::Error) -> StoreError {
        match error {
            ureq::Error::Timeout(_) => StoreError::Late {
                address: self.endpoint().to_owned(),
                operation: operation.to_owned(),
                waited: ANSWER_LIMIT,
            },
            error => self.broken(operation, error.to_string()),
        }
    }

    /// An error for a question in which nothing is named that might not be there.
    pub(super) fn unexpected(&self, operation: &str, trouble: Trouble) -> StoreError {
        match trouble {
            Trouble::NotFound => self.broken(operation, "it says that there is no such thing".into()),
            Trouble::Error(error) => error,
        }
    }

    pub(super) fn broken(&self, operation: &str, reason: String) -> StoreError {
        StoreError::Broken { address: self.endpoint().to_owned(), operation: operation.into(), reason }
    }
}

/// Whether the question can't have reached the server.
fn is_unheard(error: &ureq::Error) -> bool {
    match error {
        ureq::Error::HostNotFound | ureq::Error::ConnectionFailed => true,
        ureq::Error::Timeout(Timeout::Resolve | Timeout::Connect) => true,
        ureq::Error::Io(error) => error.kind() == std::io::ErrorKind::ConnectionRefused,
        _ => false,
    }
}

/// The revision that a watch wants to begin with.
fn first_wanted(question: &serde_json::Value) -> u64 {
    let text = question["create_request"]["start_revision"].as_str();
    text.and_then(|text| text.parse().ok()).unwrap_or(0)
}

/// What a watch brought.
pub(super) struct Watched {
    /// Where the store was when it began.
    pub(super) now: u64,
    /// The changes.
    pub(super) events: Vec<RawEvent>,
    /// If not 0, changes before this one are forgotten, and some of these were wanted.
    pub(super) compacted: u64,
}

#[derive(Deserialize)]
struct Streamed {
    result: WatchResponse,
}

#[derive(Deserialize, Default)]
#[serde(default)]
struct WatchResponse {
    header: Header,
    canceled: bool,
    #[serde(deserialize_with = "number")]
    compact_revision: u64,
    events: Vec<RawEvent>,
}

/// A change as etcd tells it.
#[derive(Deserialize)]
pub(super) struct RawEvent {
    /// `DELETE`, or nothing for a new value.
    #[serde(default, rename = "type")]
    pub(super) kind: String,
    pub(super) kv: KeyValue,
}

#[derive(Deserialize, Default)]
pub(super) struct Header {
    #[serde(default, deserialize_with = "number")]
    pub(super) revision: u64,
}

#[derive(Deserialize)]
pub(super) struct KeyValue {
    pub(super) key: Value,
    #[serde(deserialize_with = "number")]
    pub(super) mod_revision: u64,
    #[serde(default = "empty")]
    pub(super) value: Value,
}

#[derive(Deserialize, Default)]
#[serde(default)]
pub(super) struct Range {
    pub(super) header: Header,
    pub(super) kvs: Vec<KeyValue>,
    #[serde(deserialize_with = "number")]
    pub(super) count: u64,
    pub(super) more: bool,
}

#[derive(Deserialize)]
pub(super) struct Put {
    pub(super) header: Header,
}

#[derive(Deserialize)]
pub(super) struct Deleted {
    #[serde(default, deserialize_with = "number")]
    pub(super) deleted: u64,
}

#[derive(Deserialize)]
pub(super) struct Transaction {
    pub(super) header: Header,
    #[serde(default)]
    pub(super) succeeded: bool,
    #[serde(default)]
    pub(super) responses: Vec<Part>,
}

#[derive(Deserialize)]
pub(super) struct Part {
    #[serde(default)]
    pub(super) response_range: Range,
}

#[derive(Deserialize)]
pub(super) struct Granted {
    #[serde(rename = "ID", deserialize_with = "number")]
    pub(super) id: u64,
    #[serde(rename = "TTL", deserialize_with = "number")]
    pub(super) seconds: u64,
}

#[derive(Deserialize)]
pub(super) struct KeptAlive {
    pub(super) result: Kept,
}

#[derive(Deserialize)]
pub(super) struct Kept {
    /// Nothing if the lease has ended.
    #[serde(default, rename = "TTL", deserialize_with = "number")]
    pub(super) seconds: u64,
}

/// An answer that says nothing but that it was done.
#[derive(Deserialize)]
pub(super) struct Done {}

fn empty() -> Value {
    Value::from(Vec::new())
}

fn number<'de, D: Deserializer<'de>>(deserializer: D) -> Result<u64, D::Error> {
    let text = String::deserialize(deserializer)?;
    text.parse().map_err(|_| D::Error::custom(format!("{text:?} where a number should be")))
}
