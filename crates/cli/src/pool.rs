//! `phalanx pool`: the machines of several teams as one pool. What follows from what is decided in `phalanx-pool`; here it is typed,
//! shown, and made into processes: an agent of a job is a `phalanx run`.

mod flags;
mod node;
mod show;
mod submit;

pub(crate) use flags::PoolArgs;

use crate::args::WrongUsage;
use crate::say::{harmless, print, say};
use anyhow::{Context, Result};
use flags::{Pool, ServeArgs, To};
use phalanx_job::{SecretSource, host_name};
use phalanx_pool::{Answer, Ask, Client, JobId, Server, ServerConfig, Shown, default_queues, read_queues};
use phalanx_wire::Secret;
use serde_json::json;
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::iterator::Signals;
use std::net::{SocketAddr, ToSocketAddrs};
use std::path::{Path, PathBuf};
use std::thread;

/// What a proof to a pool is bound to, so that it is worth nothing in a run.
const PURPOSE: &str = "phalanx pool";

pub(crate) fn pool(args: &PoolArgs) -> Result<u8> {
    match &args.what {
        Pool::Serve(args) => serve(args),
        Pool::Node(args) => node::node(args),
        Pool::Submit(args) => submit::submit(args),
        Pool::Show { to, job, json } => show::show(to, job.map(JobId), *json),
        Pool::Wait { to, job, json } => show::wait(to, JobId(*job), *json),
        Pool::Cancel { to, jobs, json } => cancel(to, jobs, *json),
    }
}

/// Ends these; fails if one of them is none.
fn cancel(to: &To, jobs: &[u64], json: bool) -> Result<u8> {
    let (client, mut code) = (dial(to)?, 0);
    for job in jobs {
        let (words, before) = match client.ask(&Ask::Cancel { job: JobId(*job) })? {
            Answer::Canceled { before: None } => (format!("job {job} is to end"), None),
            Answer::Canceled { before: Some(how) } => {
                (format!("job {job} had ended before: {how}"), Some(how))
            }
            Answer::Refused { reason } => {
                say(format_args!("error: {}", harmless(&reason)));
                code = 1;
                continue;
            }
            other => return Err(unasked(&other)),
        };
        match json {
            true => print(json!({"event": "canceled", "job": job, "before": before})),
            false => say(harmless(&words)),
        }
    }
    Ok(code)
}

fn serve(args: &ServeArgs) -> Result<u8> {
    let queues = args.queues.as_deref().map_or_else(|| Ok(default_queues()), read_queues)?;
    let quotas: u64 = queues.values().map(|queue| u64::from(queue.quota)).sum();
    let names = queues.keys().cloned().collect::<Vec<String>>().join(", ");
    let folder = args.dir.clone().map_or_else(state_folder, Ok)?;
    let server = Server::open(ServerConfig {
        listen: address(&args.listen, "--listen")?,
        secret: secret(args.secret_file.as_deref())?,
        queues,
        folder: folder.clone(),
        say: Box::new(|line| say(harmless(line))),
    })?;
    say(format_args!(
        "a pool at {}, with the queues {names} ({quotas} slots are somebody's own)",
        server.address()
    ));
    say(format_args!("its journal is in {}", folder.display()));
    let address = server.address();
    match address.ip() {
        ip if ip.is_loopback() => {
            say("hint: only this machine reaches it; --listen ADDRESS:PORT has others do so")
        }
        ip if ip.is_unspecified() => {
            say(format_args!(
                "hint: on each machine, phalanx pool node --pool {}:{}",
                host_name(),
                address.port()
            ));
        }
        _ => say(format_args!("hint: on each machine, phalanx pool node --pool {address}")),
    }
    let (stopper, mut signals) = (server.stopper(), Signals::new([SIGTERM, SIGINT, SIGHUP])?);
    thread::Builder::new().name("phalanx-signals".into()).spawn(move || {
        signals.forever().next();
        stopper.stop();
    })?;
    server.run()?;
    say("the pool has ended; what runs goes on, and nodes look for the next");
    Ok(0)
}

/// The folder of a user for what programs keep between their runs.
fn state_folder() -> Result<PathBuf> {
    let set = |name: &str| std::env::var_os(name).map(PathBuf::from).filter(|path| path.is_absolute());
    let home = || set("HOME").map(|home| home.join(".local/state"));
    let folder = set("XDG_STATE_HOME").or_else(home).map(|folder| folder.join("phalanx/pool"));
    folder.context("neither HOME nor XDG_STATE_HOME says where a journal could be kept\nhint: --dir DIR")
}

/// What proves that one belongs to the pool.
fn secret(file: Option<&Path>) -> Result<Secret> {
    let kept = || SecretSource::kept(|name| std::env::var(name).ok());
    let source = file.map_or_else(kept, |file| SecretSource::File(file.to_owned()));
    Ok(source.read(PURPOSE)?)
}

fn address(text: &str, flag: &str) -> Result<SocketAddr, WrongUsage> {
    let wrong = |why: String| {
        WrongUsage(format!("{flag} {text}: {why}\nhint: a host and a port, as in 10.0.0.7:29390"))
    };
    let found = text.to_socket_addrs().map_err(|error| wrong(error.to_string()))?;
    // Of a name with addresses of both kinds, as localhost, the usual one.
    let mut found: Vec<SocketAddr> = found.collect();
    found.sort_by_key(SocketAddr::is_ipv6);
    found.first().copied().ok_or_else(|| wrong("it has no address".into()))
}

fn dial(to: &To) -> Result<Client> {
    Ok(Client::dial(address(&to.pool, "--pool")?, &secret(to.secret_file.as_deref())?)?)
}

/// An answer, but for one that refuses.
fn ask(client: &Client, ask: &Ask) -> Result<Answer> {
    match client.ask(ask)? {
        Answer::Refused { reason } => anyhow::bail!("the pool refuses: {reason}"),
        answer => Ok(answer),
    }
}

/// An answer to something else.
fn unasked(answer: &Answer) -> anyhow::Error {
    anyhow::anyhow!("the pool answers what wasn't asked: {answer:?}")
}

/// How the pool is, with all jobs or this one.
fn look(client: &Client, job: Option<JobId>) -> Result<Shown> {
    match ask(client, &Ask::Show { job })? {
        Answer::Shown(shown) => Ok(*shown),
        other => Err(unasked(&other)),
    }
}
