//! `phalanx watch` as its users have it: runs on a page, for Prometheus and for TensorBoard, while they go on.

mod user;

use serde_json::Value;
use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};
use user::{LOOK, phalanx, text};

const LIMIT: Duration = Duration::from_secs(60);

fn train(folder: &Path, args: &[&str]) -> Command {
    let mut command = phalanx(folder);
    command.args(["train", "mnist-mini", "--nproc-per-node", "1", "--json"]).args(args);
    command.stdout(Stdio::null()).stderr(Stdio::null());
    command
}

/// A watch, which ends with this.
struct Watch {
    child: Child,
    address: String,
    token: String,
}

impl Drop for Watch {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Watch {
    fn start(folder: &Path, args: &[&str]) -> Watch {
        let mut command = phalanx(folder);
        command.args(["watch", "--json", "--listen", "127.0.0.1:0"]).args(args).stdout(Stdio::piped());
        let mut child = command.stderr(Stdio::null()).spawn().unwrap();
        let mut line = String::new();
        BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
        let told: Value = serde_json::from_str(&line).unwrap();
        let (_, token) = told["url"].as_str().unwrap().split_once("?token=").unwrap();
        Watch { child, address: told["address"].as_str().unwrap().into(), token: token.into() }
    }

    /// What comes of a request: its status, and all else.
    fn ask(&self, path: &str, headers: &str) -> (u16, String) {
        let mut stream = TcpStream::connect(&self.address).unwrap();
        stream.set_read_timeout(Some(LIMIT)).unwrap();
        let asked =
            format!("GET {path} HTTP/1.1\r\nHost: {}\r\nConnection: close\r\n{headers}\r\n", self.address);
        stream.write_all(asked.as_bytes()).unwrap();
        let mut answer = Vec::new();
        stream.read_to_end(&mut answer).unwrap();
        let answer = text(&answer);
        let status = answer.split(' ').nth(1).and_then(|status| status.parse().ok());
        (status.unwrap_or_else(|| panic!("{answer}")), answer)
    }

    /// What the page is given.
    fn json(&self, path: &str) -> Value {
        let (status, answer) = self.ask(path, &format!("Authorization: Bearer {}\r\n", self.token));
        assert_eq!(status, 200, "{answer}");
        let (_, body) = answer.split_once("\r\n\r\n").unwrap();
        serde_json::from_str(body).unwrap_or_else(|_| panic!("{answer}"))
    }
}

#[test]
fn a_run_is_seen_as_it_goes_on_and_after_its_end() {
    let folder = tempfile::tempdir().unwrap();
    let watch = Watch::start(folder.path(), &["--tensorboard", "boards"]);
    assert_eq!(watch.json("/api/runs"), Value::Array(Vec::new()));
    let mut run = train(folder.path(), &["--out", "runs/one", "--epochs", "3"]).spawn().unwrap();
    let start = Instant::now();
    let until = |what: &str, is_so: &dyn Fn(&Value) -> bool| {
        loop {
            let runs = watch.json("/api/runs");
            if is_so(&runs[0]) {
                return runs[0].clone();
            }
            assert!(start.elapsed() < LIMIT, "{what}: {runs}");
            std::thread::sleep(LOOK);
        }
    };
    until("a step", &|run| run["made"].as_u64().is_some_and(|made| made > 0));
    assert!(run.wait().unwrap().success());
    let done = until("the end", &|run| run["state"] == "done");
    assert_eq!((&done["made"], &done["steps"], &done["world_size"]), (&189.into(), &189.into(), &1.into()));
    assert!(done["test_accuracy"].as_f64().unwrap() > 0.5, "{done}");
    let curves = watch.json("/api/run?name=one");
    assert_eq!(curves["step"].as_array().unwrap().len(), 189);
    assert_eq!(curves["loss"].as_array().unwrap().last(), Some(&done["loss"]));
    let steps: Vec<&Value> =
        curves["epochs"].as_array().unwrap().iter().map(|epoch| &epoch["step"]).collect();
    assert_eq!(steps, [63, 126, 189]);
    let (_, metrics) = watch.ask("/metrics", &format!("Authorization: Bearer {}\r\n", watch.token));
    assert!(metrics.contains("phalanx_run_steps_made{run=\"one\"} 189\n"), "{metrics}");
    // Each record with its length, and the checksum of that.
    let records = || {
        let board = fs::read_dir(folder.path().join("boards/one")).ok().and_then(|mut all| all.next());
        let bytes = board.and_then(|file| fs::read(file.unwrap().path()).ok()).unwrap_or_default();
        let (mut at, mut n) = (0, 0);
        while at < bytes.len() {
            let length = u64::from_le_bytes(bytes[at..at + 8].try_into().unwrap()) as usize;
            (at, n) = (at + 16 + length, n + 1);
        }
        assert_eq!(at, bytes.len());
        n
    };
    // Two that begin it, 189 steps, 3 epochs.
    while records() != 2 + 189 + 3 {
        assert!(start.elapsed() < LIMIT, "{} records", records());
        std::thread::sleep(LOOK);
    }
}

#[test]
fn nothing_is_shown_to_who_does_not_know_the_token() {
    let folder = tempfile::tempdir().unwrap();
    fs::create_dir_all(folder.path().join("runs/secret")).unwrap();
    fs::write(
        folder.path().join("runs/secret/events.jsonl"),
        "{\"event\":\"note\",\"message\":\"hidden\"}\n",
    )
    .unwrap();
    let watch = Watch::start(folder.path(), &[]);
    let token = watch.token.clone();
    let wrong = format!("{}x", &token[..token.len() - 1]);
    for path in [
        "/",
        "/page.js",
        "/api/runs",
        "/api/run?name=secret",
        "/metrics",
        "/nowhere",
        &format!("/api/runs?token={token}"),
    ] {
        for headers in [
            "",
            "Authorization: Bearer \r\n",
            &format!("Authorization: Bearer {wrong}\r\n"),
            "Cookie: phalanx-watch-1=x\r\n",
        ] {
            let (status, answer) = watch.ask(path, headers);
            assert_eq!(status, 401, "{path}, {headers}: {answer}");
            assert!(!answer.contains("hidden") && !answer.contains(&token), "{answer}");
        }
    }
    assert_eq!(watch.ask(&format!("/?token={wrong}"), "").0, 401);
    let (status, answer) = watch.ask(&format!("/?token={token}"), "");
    assert_eq!(status, 303, "{answer}");
    let cookie = answer.lines().find_map(|line| line.strip_prefix("set-cookie: ")).unwrap();
    assert!(cookie.contains("HttpOnly; SameSite=Strict"), "{cookie}");
    let (cookie, _) = cookie.split_once(';').unwrap();
    let (status, page) = watch.ask("/", &format!("Cookie: other=1; {cookie}\r\n"));
    assert!(status == 200 && page.contains("content-security-policy: default-src 'none'"), "{page}");
    // No name leads out of the folder.
    let bearer = format!("Authorization: Bearer {token}\r\n");
    for path in ["/api/run?name=..%2F..%2Fetc", "/api/run?name=", "/../../etc/passwd"] {
        assert_eq!(watch.ask(path, &bearer).0, 404, "{path}");
    }
    assert_eq!(watch.ask("/api/run", &bearer).0, 400);
    // Who writes nonsense, or without end, is sent away, and the others are still answered.
    for mad in [&b"\x16\x03\x01\x00\xff\x01"[..], b"GET / HTTP/9\r\n\r\n", &[b'A'; 200_000]] {
        let mut stream = TcpStream::connect(&watch.address).unwrap();
        stream.set_read_timeout(Some(LIMIT)).unwrap();
        // It may hang up in the midst.
        let _ = stream.write_all(mad);
        let _ = stream.write_all(b"\r\n\r\n");
        let mut answer = Vec::new();
        let _ = stream.read_to_end(&mut answer);
        assert!(!text(&answer).contains("200 OK"), "{}", text(&answer));
    }
    let idle: Vec<TcpStream> = (0..300).map(|_| TcpStream::connect(&watch.address).unwrap()).collect();
    assert_eq!(watch.json("/api/runs")[0]["name"], "secret");
    drop(idle);
}

#[test]
fn runs_are_told_once_on_the_terminal_and_mistakes_are_named() {
    let folder = tempfile::tempdir().unwrap();
    assert!(train(folder.path(), &["--out", "runs/mine", "--steps", "3"]).status().unwrap().success());
    let watch = |args: &[&str]| phalanx(folder.path()).arg("watch").args(args).output().unwrap();
    // The folder of runs, and that of one of them.
    for args in [&["--once"][..], &["runs/mine", "--once"], &["runs/mine", "--once", "--json"]] {
        let out = watch(args);
        let told = text(&out.stdout);
        assert!(out.status.success() && told.contains("mine") && told.contains("done"), "{args:?}: {told}");
    }
    let port = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let taken = port.local_addr().unwrap().to_string();
    for (name, token, mode) in [("short", "tooshort", 0o640), ("open", "long-enough-for-a-token", 0o644)] {
        let file = folder.path().join(name);
        fs::write(&file, token).unwrap();
        fs::set_permissions(&file, fs::Permissions::from_mode(mode)).unwrap();
    }
    for (args, code, part) in [
        (&["nowhere", "--once"][..], 2, "no such folder"),
        (&["--listen", "here"], 2, "--listen"),
        (&["--listen", &taken], 1, "127.0.0.1:0 takes any port"),
        (&["--token-file", "short"], 2, "at least 16"),
        (&["--token-file", "open"], 2, "can read the token (mode 0644)\nhint: chmod o= open"),
        (&["--token-file", "missing"], 1, "--token-file missing"),
        (&["--tensorboard", "short/board"], 1, "--tensorboard short/board"),
    ] {
        let out = watch(args);
        let told = text(&out.stderr);
        assert!(out.status.code() == Some(code) && told.contains(part), "{args:?}: {told}");
    }
}

#[test]
fn a_signal_ends_it_with_its_own_code() {
    let folder = tempfile::tempdir().unwrap();
    for (signal, code) in [("INT", 130), ("TERM", 143)] {
        let mut watch = Watch::start(folder.path(), &[]);
        let pid = watch.child.id().to_string();
        assert!(Command::new("kill").args([&format!("-{signal}"), &pid]).status().unwrap().success());
        assert_eq!(watch.child.wait().unwrap().code(), Some(code));
    }
}
