//! Runs for a browser and for Prometheus, over HTTP.
//!
//! Nothing is shown to who doesn't give the token: in the address, once, after which the browser keeps it in a cookie; or as a bearer's, as
//! Prometheus does. What comes in is read in bounds, and nothing of it names a file.

use super::prometheus;
use super::run::{Epoch, Mark, Run, Summary};
use super::runs::Runs;
use crate::top::gpus::{self, Shown};
use anyhow::{Context, Result, anyhow};
use axum::Router;
use axum::extract::{Query, Request, State};
use axum::http::header::{
    AUTHORIZATION, CACHE_CONTROL, CONTENT_SECURITY_POLICY, CONTENT_TYPE, COOKIE, LOCATION, REFERRER_POLICY,
    SET_COOKIE, X_CONTENT_TYPE_OPTIONS,
};
use axum::http::{HeaderMap, HeaderValue, StatusCode};
use axum::middleware::{self, Next};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use hyper::server::conn::http1;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use phalanx_cuda::Driver;
use serde::{Deserialize, Serialize};
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;
use subtle::ConstantTimeEq;
use tokio::net::TcpListener;
use tokio::runtime::Runtime;
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::sync::Semaphore;
use tokio::time::timeout;

/// So many connections are answered at once; others wait.
const MOST_CONNECTIONS: usize = 256;
/// How long a connection may take for what it asks, and how long it may last: it is for one request.
const HEADERS: Duration = Duration::from_secs(5);
const CONNECTION: Duration = Duration::from_secs(20);
/// Bytes of what is asked.
const MOST_BYTES: usize = 16 << 10;
/// Points of a curve that a page is given: more than it has pixels.
const MOST_POINTS: usize = 1500;

const PAGE: &str = include_str!("page.html");
const SCRIPT: &str = include_str!("page.js");
const STYLE: &str = include_str!("page.css");

/// What all requests share.
struct Shared {
    runs: Arc<Mutex<Runs>>,
    token: String,
    /// By which the browser keeps the token apart from that of another port of this machine.
    cookie: String,
}

/// A server that listens, and heeds signals from then on.
pub(super) struct Server {
    runtime: Runtime,
    answering: Answering,
}

struct Answering {
    listener: TcpListener,
    address: SocketAddr,
    interrupt: Signal,
    terminate: Signal,
    shared: Arc<Shared>,
}

impl Server {
    pub(super) fn listen(at: SocketAddr, token: String, runs: Arc<Mutex<Runs>>) -> Result<Server> {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
        let runtime = runtime.context("the server's thread")?;
        let answering = runtime.block_on(async {
            let listener = TcpListener::bind(at).await.map_err(|error| {
                anyhow!("--listen {at}: {error}\nhint: --listen 127.0.0.1:0 takes any port that is free")
            })?;
            let address = listener.local_addr()?;
            let [interrupt, terminate] = [SignalKind::interrupt(), SignalKind::terminate()].map(signal);
            let cookie = format!("phalanx-watch-{}", address.port());
            let shared = Arc::new(Shared { runs, token, cookie });
            let (interrupt, terminate) = (interrupt?, terminate?);
            anyhow::Ok(Answering { listener, address, interrupt, terminate, shared })
        })?;
        Ok(Server { runtime, answering })
    }

    pub(super) fn address(&self) -> SocketAddr {
        self.answering.address
    }

    /// Answers until a signal ends it; the exit code is that of the signal.
    pub(super) fn serve(self) -> Result<u8> {
        self.runtime.block_on(self.answering.answer())
    }
}

impl Answering {
    async fn answer(self) -> Result<u8> {
        let Answering { listener, mut interrupt, mut terminate, shared, .. } = self;
        let app = app(shared);
        let room = Arc::new(Semaphore::new(MOST_CONNECTIONS));
        loop {
            let next = async {
                let permit = room.clone().acquire_owned().await;
                (permit, listener.accept().await)
            };
            let (permit, stream) = tokio::select! {
                _ = interrupt.recv() => return Ok(130),
                _ = terminate.recv() => return Ok(143),
                (permit, accepted) = next => match accepted {
                    Ok((stream, _)) => (permit, stream),
                    // No descriptor is free, say: some will be.
                    Err(_) => {
                        tokio::time::sleep(Duration::from_millis(100)).await;
                        continue;
                    }
                },
            };
            let service = TowerToHyperService::new(app.clone());
            tokio::spawn(async move {
                let mut http = http1::Builder::new();
                http.timer(TokioTimer::new()).header_read_timeout(HEADERS).max_buf_size(MOST_BYTES);
                let answered = async {
                    // Before that no clock of the library's runs.
                    if timeout(HEADERS, stream.readable()).await.is_err() {
                        return Ok(());
                    }
                    http.keep_alive(false).serve_connection(TokioIo::new(stream), service).await
                };
                // One that breaks off has lost interest.
                let _ = timeout(CONNECTION, answered).await;
                drop(permit);
            });
        }
    }
}

fn app(shared: Arc<Shared>) -> Router {
    let text = |kind: &'static str, text: &'static str| async move { ([(CONTENT_TYPE, kind)], text) };
    Router::new()
        .route("/", get(move || text("text/html; charset=utf-8", PAGE)))
        .route("/page.js", get(move || text("text/javascript; charset=utf-8", SCRIPT)))
        .route("/page.css", get(move || text("text/css; charset=utf-8", STYLE)))
        .route("/api/runs", get(summaries))
        .route("/api/run", get(curves))
        .route("/metrics", get(metrics))
        .layer(middleware::from_fn_with_state(shared.clone(), admit))
        .with_state(shared)
}

/// Lets those in who have the token.
async fn admit(State(shared): State<Arc<Shared>>, request: Request, next: Next) -> Response {
    let in_address = request.uri().query().and_then(|query| query.strip_prefix("token="));
    let is_page = request.uri().path() == "/";
    let mut response = match in_address {
        // From now on without it, so that it stays out of what the browser remembers.
        Some(token) if is_page && shared.is_token(token) => {
            let cookie = format!("{}={token}; HttpOnly; SameSite=Strict; Path=/", shared.cookie);
            (StatusCode::SEE_OTHER, [(LOCATION, "/".to_owned()), (SET_COOKIE, cookie)]).into_response()
        }
        _ if shared.knows(request.headers()) => next.run(request).await,
        _ => {
            let words = "this wants the token that `phalanx watch` shows when it begins: open the address that it shows, or give it as in `Authorization: Bearer TOKEN`\n";
            (StatusCode::UNAUTHORIZED, [("www-authenticate", "Bearer")], words).into_response()
        }
    };
    let headers = response.headers_mut();
    for (name, value) in [
        (
            CONTENT_SECURITY_POLICY,
            "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; frame-ancestors 'none'; base-uri 'none'; form-action 'none'",
        ),
        (X_CONTENT_TYPE_OPTIONS, "nosniff"),
        (REFERRER_POLICY, "no-referrer"),
        (CACHE_CONTROL, "no-store"),
    ] {
        headers.insert(name, HeaderValue::from_static(value));
    }
    response
}

impl Shared {
    fn is_token(&self, given: &str) -> bool {
        self.token.as_bytes().ct_eq(given.as_bytes()).into()
    }

    /// Whether a request has the token in its headers.
    fn knows(&self, headers: &HeaderMap) -> bool {
        let text = |value: &HeaderValue| value.to_str().unwrap_or_default().to_owned();
        let bearer = headers.get(AUTHORIZATION).map(text);
        let is_bearer = bearer
            .is_some_and(|bearer| bearer.strip_prefix("Bearer ").is_some_and(|token| self.is_token(token)));
        let cookies: Vec<String> = headers.get_all(COOKIE).iter().map(text).collect();
        let own = |cookie: &str| {
            cookie
                .trim()
                .split_once('=')
                .is_some_and(|(name, token)| name == self.cookie && self.is_token(token))
        };
        is_bearer || cookies.iter().any(|cookies| cookies.split(';').any(own))
    }

    fn with<T>(&self, look: impl FnOnce(&Runs) -> T) -> T {
        look(&self.runs.lock().unwrap_or_else(PoisonError::into_inner))
    }

    fn summaries(&self) -> Vec<Summary> {
        self.with(|runs| runs.all().map(Run::summary).collect())
    }
}

fn json(value: &impl Serialize) -> Response {
    // What is no number is null there, as a browser has it.
    let text = serde_json::to_string(value).expect("numbers and texts are always JSON");
    ([(CONTENT_TYPE, "application/json")], text).into_response()
}

async fn summaries(State(shared): State<Arc<Shared>>) -> Response {
    json(&shared.summaries())
}

/// Which run.
#[derive(Deserialize)]
struct Named {
    name: String,
}

/// What a run's curves are drawn of: a list for each number, as long as that of the steps.
#[derive(Serialize)]
struct Curves {
    step: Vec<u64>,
    loss: Vec<f64>,
    lr: Vec<f64>,
    ms: Vec<f64>,
    comm_ms: Vec<f64>,
    input_ms: Vec<f64>,
    workers: Vec<f64>,
    epochs: Vec<Epoch>,
    marks: Vec<Mark>,
}

impl Curves {
    fn of(run: &Run) -> Curves {
        let every = run.made.len().div_ceil(MOST_POINTS).max(1);
        // From the end, so that the newest is there.
        let mut made: Vec<_> = run.made.iter().rev().step_by(every).collect();
        made.reverse();
        let numbers = |of: fn(&super::run::Step) -> f64| made.iter().map(|&step| of(step)).collect();
        Curves {
            step: made.iter().map(|made| made.step).collect(),
            loss: numbers(|step| step.loss),
            lr: numbers(|step| step.lr),
            ms: numbers(|step| step.ms),
            comm_ms: numbers(|step| step.comm_ms),
            input_ms: numbers(|step| step.input_ms),
            workers: numbers(|step| step.world_size as f64),
            epochs: run.epochs.clone(),
            marks: run.marks.clone(),
        }
    }
}

async fn curves(State(shared): State<Arc<Shared>>, Query(Named { name }): Query<Named>) -> Response {
    match shared.with(|runs| runs.named(&name).map(Curves::of)) {
        Some(curves) => json(&curves),
        None => (StatusCode::NOT_FOUND, "there is no such run\n").into_response(),
    }
}

async fn metrics(State(shared): State<Arc<Shared>>) -> Response {
    // NVML may take its time.
    let gpus = tokio::task::spawn_blocking(|| gpus::look_once(&Driver::open(&[])).1).await;
    let gpus: Vec<Shown> = gpus.unwrap_or_default();
    let text = prometheus::text(&shared.summaries(), &gpus);
    ([(CONTENT_TYPE, "text/plain; version=0.0.4; charset=utf-8")], text).into_response()
}
