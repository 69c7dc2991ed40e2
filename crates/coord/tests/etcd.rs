//! The same promises as those of the coordinator's store, kept by a real etcd (the Debian package `etcd-server`).

mod conformance;

use conformance::{LIMIT, folder, keeps_its_promises, key, soon};
use phalanx_coord::{EtcdConfig, EtcdStore};
use phalanx_job::store::{Change, Refusal, Store, StoreError, Watch};
use std::io::Write;
use std::net::TcpListener;
use std::process::{Child, Command, Stdio};
use std::time::Duration;
use tempfile::TempDir;

/// An etcd of our own; it ends with the test.
struct Etcd {
    process: Child,
    address: String,
    _folder: TempDir,
}

impl Etcd {
    /// None, said aloud, where there is no program `etcd`.
    fn start() -> Option<Etcd> {
        let start = soon();
        // Another process may take a port between its being found free and its being used.
        loop {
            let folder = tempfile::tempdir().unwrap();
            let free = || TcpListener::bind("127.0.0.1:0").unwrap();
            let (clients, peers) = (free(), free());
            let url = |listener: &TcpListener| format!("http://{}", listener.local_addr().unwrap());
            let (address, peer) = (url(&clients), url(&peers));
            drop((clients, peers));
            let spawned = Command::new("etcd")
                .arg("--data-dir")
                .arg(folder.path())
                .args(["--listen-client-urls", &address, "--advertise-client-urls", &address])
                .args(["--listen-peer-urls", &peer, "--initial-advertise-peer-urls", &peer])
                .args(["--initial-cluster", &format!("default={peer}")])
                .stdout(Stdio::null())
                .stderr(Stdio::null())
                .spawn();
            let process = match spawned {
                Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
                    // Not `eprintln!`, which the test harness keeps to itself when a test passes.
                    let text =
                        b"SKIPPED: there is no program `etcd`; the Debian package etcd-server has it\n";
                    std::io::stderr().write_all(text).unwrap();
                    return None;
                }
                spawned => spawned.unwrap(),
            };
            let mut etcd = Etcd { process, address, _folder: folder };
            while etcd.process.try_wait().unwrap().is_none() {
                if EtcdStore::connect(etcd.config(None)).is_ok() {
                    return Some(etcd);
                }
                assert!(!start.expired(), "etcd doesn't answer");
                std::thread::yield_now();
            }
        }
    }

    fn config(&self, login: Option<(&str, &str)>) -> EtcdConfig {
        // The first endpoint is none: port 9 is for discarding, and nobody listens there.
        let endpoints = vec!["http://127.0.0.1:9".into(), self.address.clone()];
        EtcdConfig { endpoints, login: login.map(|(name, password)| (name.into(), password.into())) }
    }

    fn store(&self) -> EtcdStore {
        EtcdStore::connect(self.config(None)).unwrap()
    }

    /// Asks etcd what a [`EtcdStore`] has no need to.
    fn administer(&self, path: &str, question: &str) -> String {
        self.administer_as(None, path, question)
    }

    fn administer_as(&self, token: Option<&str>, path: &str, question: &str) -> String {
        let mut request = ureq::post(format!("{}/v3/{path}", self.address));
        if let Some(token) = token {
            request = request.header("Authorization", token);
        }
        let mut answer = request.send(question).unwrap();
        answer.body_mut().read_to_string().unwrap()
    }
}

impl Drop for Etcd {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

#[test]
fn etcd_keeps_the_same_promises() {
    let Some(etcd) = Etcd::start() else { return };
    keeps_its_promises(|| etcd.store());
}

#[test]
fn a_history_that_etcd_has_compacted_is_not_passed_over_in_silence() {
    let Some(etcd) = Etcd::start() else { return };
    let store = etcd.store();
    let first = store.set(&key("f/a"), b"1", None).unwrap();
    let second = store.set(&key("f/a"), b"2", None).unwrap();
    etcd.administer("kv/compaction", &format!(r#"{{"revision":"{second}"}}"#));
    let error = Watch::new(&store, folder("f/"), first).next(soon()).unwrap_err();
    assert_eq!(error.refusal(), Some(&Refusal::Lagged { from: first, first: second }), "{error}");
    let event = Watch::new(&store, folder("f/"), second).next(soon()).unwrap().unwrap();
    assert!(matches!(event.change, Change::Set { value, .. } if value == *b"2"));
}

#[test]
fn etcd_lets_in_who_has_the_password_alone() {
    let Some(etcd) = Etcd::start() else { return };
    for (path, question) in [
        ("auth/user/add", r#"{"name":"root","password":"right"}"#),
        ("auth/role/add", r#"{"name":"root"}"#),
        ("auth/user/grant", r#"{"user":"root","role":"root"}"#),
        ("auth/enable", "{}"),
    ] {
        etcd.administer(path, question);
    }
    let connect = |login| EtcdStore::connect(etcd.config(login));
    let store = connect(Some(("root", "right"))).unwrap();
    assert_eq!(store.add(&key("n"), 1).unwrap(), 1);
    // Tokens don't last; whoever has the password gets another.
    let login = etcd.administer("auth/authenticate", r#"{"name":"root","password":"right"}"#);
    let token = login.split(r#""token":""#).nth(1).unwrap().split('"').next().unwrap();
    etcd.administer_as(Some(token), "auth/disable", "{}");
    etcd.administer("auth/enable", "{}");
    assert_eq!(store.add(&key("n"), 1).unwrap(), 2);
    let wrong = connect(Some(("root", "wrong"))).err().unwrap().to_string();
    assert!(wrong.contains("user root can't log in") && !wrong.contains("wrong"), "{wrong}");
    assert!(connect(None).is_err());
}

#[test]
fn an_etcd_that_dies_is_an_error_and_not_a_hang() {
    let Some(mut etcd) = Etcd::start() else { return };
    let store = etcd.store();
    let start = soon();
    std::thread::scope(|scope| {
        let waiting = scope.spawn(|| store.wait(&[key("never")], soon()));
        store.set(&key("a"), b"", None).unwrap();
        etcd.process.kill().unwrap();
        etcd.process.wait().unwrap();
        let error = waiting.join().unwrap().unwrap_err();
        assert!(matches!(error, StoreError::Broken { .. }), "{error}");
    });
    let error = store.get(&key("a")).unwrap_err().to_string();
    assert!(error.contains("get a") && error.contains("127.0.0.1"), "{error}");
    assert!(start.waited() < LIMIT - Duration::from_secs(5));
    let nowhere = EtcdConfig { endpoints: Vec::new(), login: None };
    assert!(EtcdStore::connect(nowhere).err().unwrap().to_string().contains("hint:"));
}
