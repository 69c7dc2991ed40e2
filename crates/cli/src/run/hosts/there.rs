//! What runs on a host: the other half of `phalanx run --hosts`, which ssh starts.
//!
//! It answers what it is asked, and then is the agent of its host. Orders come on standard input, which is the ssh session: when that
//! ends, or nothing comes for too long, the agent is asked to end as by SIGTERM, so a session that breaks leaves nothing behind.

use super::super::spec;
use super::facts::facts;
use super::words::{ANSWER, Answer, MOST_BYTES, Order, Start};
use crate::failure;
use crate::say::{print, say};
use anyhow::{Context, Result, bail, ensure};
use nix::sys::memfd::{MFdFlags, memfd_create};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use phalanx_job::SecretSource;
use phalanx_launch::LaunchSpec;
use std::fs::{self, File};
use std::io::{BufRead, Read, Write};
use std::os::fd::AsRawFd;
use std::sync::mpsc::{Receiver, RecvTimeoutError, sync_channel};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// Orders that wait to be heeded.
const QUEUE: usize = 16;
/// How long the first order may take to come.
const FIRST: Duration = Duration::from_secs(60);

/// Serves the session to its end.
pub(crate) fn serve() -> Result<u8> {
    let orders = orders()?;
    let mut patience = FIRST;
    loop {
        let order = match orders.recv_timeout(patience) {
            Ok(order) => order?,
            Err(RecvTimeoutError::Disconnected) => return Ok(0),
            Err(RecvTimeoutError::Timeout) => {
                bail!("no order has come for {} s", patience.as_secs_f64())
            }
        };
        match order {
            Order::Tell(asked) => {
                patience = Duration::try_from_secs_f64(asked.patience).unwrap_or(FIRST);
                answer(&Answer::Facts(Box::new(facts(&asked))))?;
            }
            Order::Clock => answer(&Answer::Clock(now_ms()))?,
            Order::Leave(name) => answer(&Answer::Done(fs::write(&name, "").err().map(|e| e.to_string())))?,
            Order::Look(name) => answer(&Answer::There(fs::exists(&name).unwrap_or(false)))?,
            Order::Take(name) => answer(&Answer::Done(fs::remove_file(&name).err().map(|e| e.to_string())))?,
            Order::Run(start) => return run(*start, orders, patience),
            // There is nobody for a signal yet but this process.
            Order::Signal(_) => return Ok(0),
            Order::Here => {}
        }
    }
}

/// What comes on standard input. The end of the queue is the end of the session.
fn orders() -> Result<Receiver<Result<Order>>> {
    let (sender, orders) = sync_channel(QUEUE);
    let read = move || {
        let mut input = std::io::stdin().lock();
        loop {
            let mut line = Vec::new();
            let order = match (&mut input).take(MOST_BYTES).read_until(b'\n', &mut line) {
                // What breaks the session ends it.
                Ok(0) | Err(_) => return,
                Ok(_) => serde_json::from_slice(&line).context("an order of another version, or none"),
            };
            if sender.send(order).is_err() {
                return;
            }
        }
    };
    std::thread::Builder::new().name("phalanx-orders".into()).spawn(read)?;
    Ok(orders)
}

fn answer(answer: &Answer) -> Result<()> {
    print(format_args!("{ANSWER}{}", serde_json::to_string(answer)?));
    Ok(())
}

fn now_ms() -> f64 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs_f64() * 1e3
}

/// Is the agent.
fn run(start: Start, orders: Receiver<Result<Order>>, patience: Duration) -> Result<u8> {
    let secret = kept(&start.secret)?;
    let mut spec: LaunchSpec = spec(&start.args)?;
    spec.variables.extend(start.variables);
    if let Some(nodes) = &mut spec.nodes {
        nodes.secret = SecretSource::Descriptor(secret.as_raw_fd() as u32);
    }
    // It may have to be ended before it takes signals itself.
    std::thread::Builder::new().name("phalanx-session".into()).spawn(move || heed(&orders, patience))?;
    let (logs, most) = (spec.log_dir.clone().unwrap_or(spec.run_dir.clone()), spec.max_restarts);
    let outcome = phalanx_launch::run(&spec, move |report| failure::tell(&report, most))?;
    Ok(failure::conclude(&outcome, &spec.run_dir, &logs))
}

/// Hands signals to this process, until the session ends: then the last one, which is SIGTERM.
fn heed(orders: &Receiver<Result<Order>>, patience: Duration) {
    let raise = |signal: Signal| {
        // This process is always there.
        let _ = kill(Pid::this(), signal);
    };
    let why = loop {
        match orders.recv_timeout(patience) {
            Ok(Ok(Order::Signal(number))) => {
                Signal::try_from(number).into_iter().for_each(raise);
            }
            Ok(_) => {}
            Err(RecvTimeoutError::Disconnected) => break "the ssh session has ended".to_owned(),
            Err(RecvTimeoutError::Timeout) => {
                break format!(
                    "whoever started this run hasn't been heard of for {} s",
                    patience.as_secs_f64()
                );
            }
        }
    };
    say(format_args!("{why}: stopping the workers of this host"));
    raise(Signal::SIGTERM);
}

/// The secret in memory that has a descriptor and no name.
fn kept(hex: &str) -> Result<File> {
    ensure!(
        hex.len() == 64 && hex.bytes().all(|byte| byte.is_ascii_hexdigit()),
        "the secret isn't 64 hexadecimal digits"
    );
    let byte = |at| u8::from_str_radix(&hex[at..at + 2], 16);
    let bytes: Result<Vec<u8>, _> = (0..64).step_by(2).map(byte).collect();
    let mut file = File::from(memfd_create("phalanx-secret", MFdFlags::MFD_CLOEXEC)?);
    file.write_all(&bytes?)?;
    Ok(file)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_secret_is_kept_where_agents_read_it() {
        let file = kept(&"0a".repeat(32)).unwrap();
        let source = SecretSource::Descriptor(file.as_raw_fd() as u32);
        assert_eq!(source.read("any").unwrap().expose(), &[10; 32]);
        assert!(kept("0a").is_err() && kept(&"xy".repeat(32)).is_err());
    }
}
