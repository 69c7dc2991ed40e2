//! An ssh session: a process of the system's `ssh` that runs our other half on a host.

use super::words::{ANSWER, Answer, MOST_BYTES, Order};
use crate::say::say;
use anyhow::{Context, Result};
use phalanx_launch::shell::quoted;
use std::collections::VecDeque;
use std::convert::Infallible;
use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{SyncSender, sync_channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Orders that wait for a session which doesn't take them; one that has so many is lost.
const QUEUE: usize = 64;
/// Lines of what ssh says that are kept until the agent runs.
const LAST: usize = 8;
/// How long a session whose output has ended may take to say what went wrong, and to end.
const END: Duration = Duration::from_secs(5);
const LOOK: Duration = Duration::from_millis(5);

/// What is heard of the session of this number.
pub(super) enum Heard {
    Answer(usize, Box<Answer>),
    /// Nothing more will come.
    End(usize),
    /// This process got a signal.
    Signal(i32),
}

/// A session. Its process is killed when this is dropped.
pub(super) struct Session {
    process: Child,
    orders: SyncSender<Vec<u8>>,
    shown: Arc<Shown>,
}

/// How what the host writes is shown.
struct Shown {
    /// What our lines begin with.
    own: String,
    /// What workers' lines begin with; none where their standard output is shown as it is.
    workers: Option<String>,
    /// Whether the agent was told to run: what is written before is kept.
    runs: AtomicBool,
    said: Mutex<VecDeque<String>>,
}

impl Session {
    /// Starts `ssh ... destination exec binary host`. What comes is told under this number.
    pub(super) fn start(
        ssh: &[String],
        (number, destination, name): (usize, &str, &str),
        binary: &str,
        has_prefix: bool,
        heard: &SyncSender<Heard>,
    ) -> Result<Session> {
        let [program, args @ ..] = ssh else { anyhow::bail!("no program for ssh") };
        let mut command = Command::new(program);
        // Several sessions can't ask for passwords at once. One that breaks silently is given up.
        let options =
            ["BatchMode=yes", "ConnectTimeout=20", "ServerAliveInterval=5", "ServerAliveCountMax=6"];
        command.args(args).arg("-T").args(options.iter().flat_map(|option| ["-o", option]));
        command.args(["--", destination, &format!("exec {} host", quoted(binary))]);
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        // Ctrl-C is for this process, which tells the agents.
        command.process_group(0);
        let mut process = command.spawn().with_context(|| {
            format!(
                "{program}: can't be started\nhint: name the ssh of this machine with --ssh or PHALANX_SSH"
            )
        })?;
        let (mut input, out, err) = (
            process.stdin.take().context("no standard input")?,
            process.stdout.take().context("no standard output")?,
            process.stderr.take().context("no standard error")?,
        );
        let (orders, queue) = sync_channel::<Vec<u8>>(QUEUE);
        let (own, workers) = (format!("[{name}]: "), has_prefix.then(|| worker_prefix(name)));
        let shown = Arc::new(Shown { own, workers, runs: AtomicBool::new(false), said: Mutex::default() });
        let named = |what: &str| std::thread::Builder::new().name(format!("phalanx-ssh-{what}"));
        // A session that has ended takes nothing more.
        named("in").spawn(move || {
            let _ = queue.iter().try_for_each(|line| input.write_all(&line).and_then(|()| input.flush()));
        })?;
        let (told, heard) = (Arc::clone(&shown), heard.clone());
        let (no_more, errors_over) = sync_channel::<Infallible>(0);
        named("out").spawn(move || {
            lines(out, |line| {
                let answer = if told.runs.load(Ordering::Acquire) { None } else { answer_in(line) };
                match answer.map(serde_json::from_slice) {
                    Some(Ok(answer)) => drop(heard.send(Heard::Answer(number, answer))),
                    Some(Err(_)) => {}
                    None => told.show(line, told.workers.is_some(), &mut std::io::stdout()),
                }
            });
            // What is said last is said there. A process that ssh leaves behind to keep the connection may hold it open.
            let _ = errors_over.recv_timeout(END);
            let _ = heard.send(Heard::End(number));
        })?;
        let told = Arc::clone(&shown);
        named("err").spawn(move || {
            lines(err, |line| told.show(line, true, &mut std::io::stderr()));
            drop(no_more);
        })?;
        Ok(Session { process, orders, shown })
    }

    /// Tells it something; one that doesn't take it is as good as gone, which is heard otherwise.
    pub(super) fn order(&self, order: &Order) {
        if matches!(order, Order::Run(_)) {
            self.shown.runs.store(true, Ordering::Release);
        }
        let mut line = serde_json::to_vec(order).expect("orders are always JSON");
        line.push(b'\n');
        let _ = self.orders.try_send(line);
    }

    /// How it ended, once its output has.
    pub(super) fn ended(&mut self) -> Option<ExitStatus> {
        let until = Instant::now() + END;
        loop {
            match self.process.try_wait() {
                Ok(Some(status)) => return Some(status),
                Ok(None) if Instant::now() < until => std::thread::sleep(LOOK),
                _ => return None,
            }
        }
    }

    /// Ends it, which its host takes for the end of the run.
    pub(super) fn cut(&mut self) {
        // One that has ended is beyond it.
        let _ = self.process.kill();
    }

    /// The last that was said before the agent ran.
    pub(super) fn said(&self) -> Vec<String> {
        self.shown.said().iter().cloned().collect()
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        self.cut();
        let _ = self.process.wait();
    }
}

impl Shown {
    fn said(&self) -> std::sync::MutexGuard<'_, VecDeque<String>> {
        self.said.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Shows a line, with a prefix unless it has one, or keeps it.
    fn show(&self, line: &[u8], has_prefix: bool, to: &mut dyn Write) {
        if !self.runs.load(Ordering::Acquire) {
            let mut said = self.said();
            said.push_back(String::from_utf8_lossy(line).trim_end().to_owned());
            while said.len() > LAST {
                said.pop_front();
            }
            return;
        }
        let mut bytes = Vec::with_capacity(line.len() + 16);
        // A bar begins where its line does.
        let text = &line[line.iter().take_while(|&&byte| byte == b'\r').count()..];
        let is_workers = self.workers.as_ref().is_some_and(|prefix| text.starts_with(prefix.as_bytes()));
        if has_prefix && !is_workers {
            bytes.extend_from_slice(self.own.as_bytes());
        }
        bytes.extend_from_slice(line);
        // A console that is gone doesn't end the run.
        let _ = to.write_all(&bytes);
    }
}

/// What stands behind the mark of an answer, before which a login file may have written what has no end.
fn answer_in(line: &[u8]) -> Option<&[u8]> {
    let mark = ANSWER.as_bytes();
    let at = line.windows(mark.len()).position(|part| part == mark)?;
    Some(&line[at + mark.len()..])
}

/// What workers' lines begin with.
fn worker_prefix(name: &str) -> String {
    format!("[{name} rank")
}

/// The template of it, in which a dollar is two.
pub(super) fn template(name: &str) -> String {
    format!("{}${{rank}}]: ", worker_prefix(name).replace('$', "$$"))
}

/// Hands over each line with its end; one that is too long in pieces.
fn lines(stream: impl Read, mut take: impl FnMut(&[u8])) {
    let mut stream = BufReader::new(stream);
    let mut line = Vec::new();
    while let Ok(1..) = (&mut stream).take(MOST_BYTES).read_until(b'\n', &mut line) {
        take(&line);
        line.clear();
    }
}

/// Why a session has ended that hasn't answered, and what to do about it.
pub(super) fn why_silent(
    name: &str,
    destination: &str,
    binary: &str,
    status: Option<ExitStatus>,
    said: &[String],
) -> String {
    let last = said.iter().rev().find(|line| !line.is_empty()).cloned().unwrap_or_default();
    let last = if last.is_empty() { String::new() } else { format!(": {last}") };
    match status.and_then(|status| status.code()) {
        Some(126 | 127) => format!(
            "{name}: there is no phalanx at {binary}{last}\nhint: scp {binary} {destination}:{binary}, or name where it lies there with --remote-phalanx"
        ),
        Some(255) => {
            let says = |words: &[&str]| words.iter().any(|word| last.contains(word));
            let hint = if says(&["Could not resolve", "Name or service not known"]) {
                "see how --hosts spells it: no resolver knows that name, and no Host of ~/.ssh/config".into()
            } else if says(&["Connection refused", "No route to host", "timed out"]) {
                format!(
                    "see whether sshd listens there, and at which port: ssh -v {destination}, or --ssh \"ssh -p PORT\""
                )
            } else if says(&["Host key verification failed", "REMOTE HOST IDENTIFICATION"]) {
                format!("connect once by hand to see and take its key: ssh {destination}")
            } else {
                format!(
                    "`ssh {destination} true` has to work without a password: ssh-copy-id {destination}, or an agent (ssh-add)"
                )
            };
            format!("{name}: ssh has failed{last}\nhint: {hint}")
        }
        Some(2) if last.contains("host") || last.contains("help") => {
            format!("{name}: {binary} is of another version{last}\nhint: scp {binary} {destination}:{binary}")
        }
        Some(code) => format!(
            "{name}: {binary} ended with code {code} before it answered{last}\nhint: try it by itself: ssh {destination} {binary} --version"
        ),
        None => format!(
            "{name}: the ssh session has broken{last}\nhint: try it by itself: ssh {destination} true"
        ),
    }
}

/// Says what was kept.
pub(super) fn tell_said(name: &str, said: &[String]) {
    said.iter().filter(|line| !line.is_empty()).for_each(|line| say(format_args!("[{name}]: {line}")));
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::process::ExitStatusExt;

    #[test]
    fn an_answer_is_found_behind_what_has_no_end() {
        let line = format!("\u{1b}]0;host\u{7}{ANSWER}{{}}");
        assert_eq!(answer_in(line.as_bytes()), Some(&b"{}"[..]));
        assert_eq!(answer_in(b"welcome"), None);
    }

    #[test]
    fn a_session_without_an_answer_is_told_with_what_to_do() {
        let check = |code: Option<i32>, said: &[&str], want: &[&str]| {
            let said: Vec<String> = said.iter().map(|&line| line.to_owned()).collect();
            let status = code.map(|code| ExitStatus::from_raw(code << 8));
            let told = why_silent("b", "me@b", "/bin/phalanx", status, &said);
            assert!(told.starts_with("b: ") && want.iter().all(|word| told.contains(word)), "{told}");
        };
        check(
            Some(127),
            &["sh: 1: /bin/phalanx: not found"],
            &["not found", "scp /bin/phalanx me@b:/bin/phalanx"],
        );
        check(Some(255), &["Permission denied (publickey).", ""], &["Permission denied", "ssh-copy-id me@b"]);
        check(Some(2), &["error: unrecognized subcommand 'host'"], &["another version"]);
        check(Some(1), &[], &["ended with code 1", "--version"]);
        check(None, &[], &["has broken"]);
    }

    #[test]
    fn lines_of_workers_are_told_from_others() {
        assert_eq!(template("n$1"), "[n$$1 rank${rank}]: ");
        let shown = Shown {
            own: "[b]: ".into(),
            workers: Some(worker_prefix("b")),
            runs: AtomicBool::new(false),
            said: Mutex::default(),
        };
        let mut out = Vec::new();
        shown.show(b"early\n", true, &mut out);
        shown.runs.store(true, Ordering::Release);
        shown.show(b"[b rank3]: hello\n", true, &mut out);
        shown.show(b"rank 3 failed\n", true, &mut out);
        assert_eq!(String::from_utf8(out).unwrap(), "[b rank3]: hello\n[b]: rank 3 failed\n");
        assert_eq!(shown.said().make_contiguous(), ["early"]);
    }
}
