//! How many machines a run has, and how they meet.

use super::flags::RunArgs;
use crate::args::WrongUsage;
use phalanx_job::{SecretSource, is_unchecked};
use phalanx_launch::{Nodes, Patience};
use std::ffi::OsString;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::path::Path;
use std::time::Duration;

/// The program's own meeting point: `MASTER_ADDR`, and `MASTER_PORT` where a free one won't do.
type Meeting = (String, Option<u16>);

/// What several machines call a run that nobody named; torchrun does.
pub(super) const UNNAMED: &str = "none";
/// torchrun's ports, where machines meet at an endpoint and at a master address.
const ENDPOINT_PORT: u16 = 29400;
const MASTER_PORT: u16 = 29500;

const BACKENDS: [&str; 4] = ["static", "c10d", "etcd", "etcd-v2"];
const LOCALHOST: &str = "127.0.0.1";
/// So many bytes of arguments are told as they are.
const MOST_SHOWN: usize = 1 << 14;

/// Where the program meets, and the other machines of the run, if it has any. `typed` is the program and its arguments.
pub(super) fn meeting(args: &RunArgs, typed: &[OsString]) -> Result<(Meeting, Option<Nodes>), WrongUsage> {
    let refuse = |text: String| Err(WrongUsage(text));
    let nnodes = args.nnodes.as_deref().unwrap_or("1");
    let (least, most) = nodes(nnodes)?;
    let backend = args.rdzv_backend.as_deref().unwrap_or("static");
    if !BACKENDS.contains(&backend) {
        return refuse(format!("--rdzv-backend {backend}: must be one of {}", BACKENDS.join(", ")));
    }
    let conf = conf(args.rdzv_conf.as_deref().unwrap_or_default())?;
    let node_rank = node_rank(args, &conf, (least, most))?;
    let endpoint = match args.rdzv_endpoint.as_deref().filter(|text| !text.is_empty()) {
        Some(text) => Some(endpoint(text)?),
        None => None,
    };
    if args.stand_by && args.spares == 0 {
        return refuse("--stand-by: say on all machines how many do, as in --spares 1".into());
    }
    if args.stand_by && node_rank.is_some() {
        return refuse("--stand-by: a machine that stands by has no number: leave --node-rank out".into());
    }
    if most == 1 && args.spares == 0 {
        let at_endpoint = endpoint.filter(|_| backend == "static" && !args.standalone);
        let (host, port) = at_endpoint.unwrap_or((LOCALHOST.into(), None));
        return Ok(((args.master_addr.clone().unwrap_or(host), args.master_port.or(port)), None));
    }
    if args.standalone {
        let beside = if args.spares > 0 { format!(" and --spares {}", args.spares) } else { String::new() };
        return refuse(format!("--standalone: is for one machine, and --nnodes is {nnodes}{beside}"));
    }
    if backend.starts_with("etcd") {
        let instead = "several machines meet at the first one: use c10d with --rdzv-endpoint";
        return refuse(format!("--rdzv-backend {backend}: not supported for --nnodes {nnodes}; {instead}"));
    }
    let (endpoint, port) = match (endpoint, &args.master_addr) {
        (Some((host, port)), _) => ((host, port.unwrap_or(ENDPOINT_PORT)), args.master_port),
        // The port is the coordinator's then, and the program has a free one.
        (None, Some(host)) => ((host.clone(), args.master_port.unwrap_or(MASTER_PORT)), None),
        (None, None) => {
            let hint =
                "--rdzv-endpoint HOST:PORT, the first node and a free port of it, the same on all nodes";
            return refuse(format!("--nnodes {nnodes}: the machines have to meet: add {hint}"));
        }
    };
    let words = typed.iter().skip(1).map(|word| word.to_string_lossy().into_owned());
    let program = typed.first().and_then(|name| Path::new(name).file_name()).unwrap_or_default();
    let kept = || SecretSource::kept(|name| std::env::var(name).ok());
    let several = Nodes {
        endpoint,
        node_rank,
        spare: args.stand_by,
        hosts: hosts(&conf)?.or(node_rank.map(|rank| rank == 0)).or(args.stand_by.then_some(false)),
        least: least as u32,
        most: most as u32,
        spares: args.spares,
        patience: patience(&conf)?,
        secret: args.secret_file.clone().map_or_else(kept, SecretSource::File),
        address: args.local_addr.clone(),
        program: program.to_string_lossy().into_owned(),
        arguments: compared(words.collect()),
        unchecked: unchecked(args)?,
    };
    Ok(((LOCALHOST.into(), port), Some(several)))
}

/// Arguments as nodes hold them against each other: very long ones by their number and a sum over them, since they go to every node.
fn compared(words: Vec<String>) -> Vec<String> {
    let bytes: usize = words.iter().map(String::len).sum();
    if bytes <= MOST_SHOWN {
        return words;
    }
    let mut sum = DefaultHasher::new();
    words.hash(&mut sum);
    vec![format!("{} arguments of {bytes} bytes, {:016x}", words.len(), sum.finish())]
}

/// Whether it doesn't matter in what nodes differ.
pub(super) fn unchecked(args: &RunArgs) -> Result<bool, WrongUsage> {
    let set = is_unchecked(|name| std::env::var(name).ok()).map_err(|error| WrongUsage(error.to_string()))?;
    Ok(args.unchecked || set)
}

/// The number that this machine was given, if it was given one: by its flag, or as a setting of the rendezvous.
fn node_rank(
    args: &RunArgs,
    conf: &[(&str, &str)],
    (least, most): (usize, usize),
) -> Result<Option<u32>, WrongUsage> {
    let set = conf.iter().find(|(key, _)| *key == "rank");
    let (name, rank) = match (args.node_rank, set) {
        (Some(rank), _) => (format!("--node-rank {rank}"), rank),
        (None, Some((_, text))) => {
            let wrong = |_| WrongUsage(format!("--rdzv-conf rank={text}: must be a number"));
            (format!("--rdzv-conf rank={text}"), text.parse().map_err(wrong)?)
        }
        (None, None) => return Ok(None),
    };
    let nodes = args.nnodes.as_deref().unwrap_or("1");
    if rank as usize >= most {
        let why = format!("must be below the number of machines, --nnodes {nodes}");
        return Err(WrongUsage(format!("{name}: {why}")));
    }
    if least != most {
        let why =
            format!("machines that come and go (--nnodes {nodes}) are counted as they come; leave it out");
        return Err(WrongUsage(format!("{name}: {why}")));
    }
    Ok(Some(rank))
}

/// Whether this machine hosts the coordinator, where that is a setting of the rendezvous.
fn hosts(conf: &[(&str, &str)]) -> Result<Option<bool>, WrongUsage> {
    let Some((_, text)) = conf.iter().find(|(key, _)| *key == "is_host") else { return Ok(None) };
    match text.to_ascii_lowercase().as_str() {
        "1" | "true" | "t" | "yes" | "y" => Ok(Some(true)),
        "0" | "false" | "f" | "no" | "n" => Ok(Some(false)),
        _ => Err(WrongUsage(format!("--rdzv-conf is_host={text}: must be true or false"))),
    }
}

/// What torchrun has of these where only one is given.
const KEEP_ALIVE: (Duration, u32) = (Duration::from_secs(5), 3);
/// Machines that are busy are late by some beats.
const LEAST_SILENCE: Duration = Duration::from_secs(1);

/// How long machines are waited for.
fn patience(conf: &[(&str, &str)]) -> Result<Patience, WrongUsage> {
    let value = |name: &str| conf.iter().find(|(key, _)| *key == name).map(|(_, text)| *text);
    let seconds = |name: &str| -> Result<Option<Duration>, WrongUsage> {
        let Some(text) = value(name) else { return Ok(None) };
        let wrong =
            || WrongUsage(format!("--rdzv-conf {name}={text}: must be a number of seconds, up to a day"));
        let limit = text.parse().ok().and_then(|seconds| Duration::try_from_secs_f64(seconds).ok());
        limit.filter(|limit| *limit <= phalanx_launch::MAX_GRACE).ok_or_else(wrong).map(Some)
    };
    let whole = |name: &str| -> Result<Option<u32>, WrongUsage> {
        let Some(text) = value(name) else { return Ok(None) };
        let wrong = || WrongUsage(format!("--rdzv-conf {name}={text}: must be a number from 1 to 1000"));
        text.parse().ok().filter(|n| (1..=1000).contains(n)).ok_or_else(wrong).map(Some)
    };
    let usual = Patience::default();
    let (interval, attempts) = (seconds("keep_alive_interval")?, whole("keep_alive_max_attempt")?);
    let silence = match (interval, attempts) {
        (None, None) => usual.silence,
        _ => interval.unwrap_or(KEEP_ALIVE.0) * attempts.unwrap_or(KEEP_ALIVE.1),
    };
    if !(LEAST_SILENCE..=Patience::MOST_SILENCE).contains(&silence) {
        let [least, most] = [LEAST_SILENCE, Patience::MOST_SILENCE].map(|limit| limit.as_secs());
        let found = silence.as_secs_f64();
        return Err(WrongUsage(format!(
            "--rdzv-conf: keep_alive_interval times keep_alive_max_attempt is {found} s: must be from {least} to {most} s"
        )));
    }
    Ok(Patience {
        silence,
        join: seconds("join_timeout")?.unwrap_or(usual.join),
        last_call: seconds("last_call_timeout")?.unwrap_or(usual.last_call),
        ..usual
    })
}

/// N or MIN:MAX, as the least and the most.
pub(super) fn nodes(text: &str) -> Result<(usize, usize), WrongUsage> {
    let wrong = |why: &str| WrongUsage(format!("--nnodes {text}: {why}"));
    let (least, most) = text.split_once(':').unwrap_or((text, text));
    let number = |text: &str| match text.parse::<u32>() {
        Ok(number) => Ok(number as usize),
        Err(_) => Err(wrong("must be a number, or two as in 1:4")),
    };
    let (least, most) = (number(least)?, number(most)?);
    if least == 0 {
        return Err(wrong("a run needs at least one machine"));
    }
    if least > most {
        return Err(wrong("the first number is the least and must not be above the second, the most"));
    }
    Ok((least, most))
}

/// HOST or HOST:PORT, with brackets around an address that has colons.
pub(super) fn endpoint(text: &str) -> Result<Meeting, WrongUsage> {
    let wrong = || {
        WrongUsage(format!(
            "--rdzv-endpoint {text}: must be a host, or a host and a port as in localhost:29400"
        ))
    };
    let (host, port) = match text.strip_prefix('[').and_then(|rest| rest.split_once(']')) {
        Some((host, "")) => (host, None),
        Some((host, rest)) => (host, Some(rest.strip_prefix(':').ok_or_else(wrong)?)),
        None => text.split_once(':').map_or((text, None), |(host, port)| (host, Some(port))),
    };
    let port = port.map(str::parse).transpose().map_err(|_| wrong())?;
    if host.is_empty() { Err(wrong()) } else { Ok((host.to_owned(), port.filter(|port| *port != 0))) }
}

/// Keys and values, as in `join_timeout=60,timeout=900`.
fn conf(text: &str) -> Result<Vec<(&str, &str)>, WrongUsage> {
    let wrong = || {
        WrongUsage(format!("--rdzv-conf {text}: must be keys and values, as in join_timeout=60,timeout=900"))
    };
    let parts = text.split(',').filter(|part| !part.trim().is_empty());
    let pairs = parts.map(|part| {
        let (key, value) = part.split_once('=').ok_or_else(wrong)?;
        let pair = Some((key.trim(), value.trim()));
        if let Some(meant) = misspelt(key.trim()) {
            return Err(WrongUsage(format!(
                "--rdzv-conf {part}: there is no {key}\nhint: did you mean {meant}?"
            )));
        }
        pair.filter(|(key, value)| !key.is_empty() && !value.is_empty()).ok_or_else(wrong)
    });
    pairs.collect()
}

/// What is heeded of `--rdzv-conf`. Torchrun's backends have others, and so may a backend that only it knows.
const HEEDED: [&str; 6] =
    ["join_timeout", "last_call_timeout", "rank", "is_host", "keep_alive_interval", "keep_alive_max_attempt"];
/// Torchrun's own that are like these, and mean nothing here.
const IDLE: [&str; 3] = ["timeout", "read_timeout", "close_timeout"];

/// The one that is heeded of which a key is but a letter or two away.
fn misspelt(key: &str) -> Option<&'static str> {
    let known = HEEDED.iter().chain(&IDLE).any(|name| *name == key);
    HEEDED.into_iter().find(|name| !known && strsim::levenshtein(name, key) <= 2)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn machines_are_counted() {
        let check = |text: &str, want: Result<(usize, usize), &str>| match (nodes(text), want) {
            (Ok(got), Ok(want)) => assert_eq!(got, want, "{text}"),
            (Err(error), Err(want)) => assert!(error.0.contains(want) && error.0.contains(text), "{error}"),
            (got, want) => panic!("{text}: {got:?} and not {want:?}"),
        };
        check("1", Ok((1, 1)));
        check("1:1", Ok((1, 1)));
        check("2:5", Ok((2, 5)));
        check("5:2", Err("must not be above"));
        check("0", Err("at least one machine"));
        check("0:2", Err("at least one machine"));
        check("1:2:3", Err("must be a number"));
        check(":", Err("must be a number"));
        check("-1", Err("must be a number"));
        check("4294967297", Err("must be a number"));
    }

    #[test]
    fn long_arguments_are_compared_by_a_sum() {
        let long = |last: &str| compared(vec!["x".repeat(1 << 20), last.into()]);
        assert!(long("a") == long("a") && long("a") != long("b"));
        assert!(long("a")[0].starts_with("2 arguments of 1048577 bytes, "), "{:?}", long("a"));
        assert_eq!(compared(vec!["--lr".into(), "1".into()]), ["--lr", "1"]);
    }

    #[test]
    fn an_endpoint_is_a_host_and_maybe_a_port() {
        let check = |text: &str, want: Option<(&str, Option<u16>)>| {
            let got = endpoint(text).ok();
            assert_eq!(got.as_ref().map(|(host, port)| (host.as_str(), *port)), want, "{text}");
        };
        check("localhost", Some(("localhost", None)));
        check("localhost:29400", Some(("localhost", Some(29400))));
        check("localhost:0", Some(("localhost", None)));
        check("[::1]:29400", Some(("::1", Some(29400))));
        check("[::1]", Some(("::1", None)));
        check("[::1]x", None);
        check(":29400", None);
        check("h:port", None);
        check("h:70000", None);
        check("h:1:2", None);
    }

    #[test]
    fn who_hosts_may_be_said() {
        let check =
            |text: &str, want: Option<bool>| assert_eq!(hosts(&[("is_host", text)]).ok().flatten(), want);
        ["1", "true", "Yes"].into_iter().for_each(|text| check(text, Some(true)));
        ["0", "False", "n"].into_iter().for_each(|text| check(text, Some(false)));
        check("maybe", None);
        assert_eq!(hosts(&[]).ok(), Some(None));
    }

    #[test]
    fn how_patiently_machines_meet_is_pairs() {
        let check = |text: &str, want: Option<&[(&str, &str)]>| {
            assert_eq!(conf(text).ok().as_deref(), want, "{text}");
        };
        check("", Some(&[]));
        check("timeout=900", Some(&[("timeout", "900")]));
        check("join_timeout = 60, is_host=1,", Some(&[("join_timeout", "60"), ("is_host", "1")]));
        check("timeout", None);
        check("join_timout=60", None);
        check("last_call_timeouts=1", None);
        check("read_timeout=60,ranking=1", Some(&[("read_timeout", "60"), ("ranking", "1")]));
        check("=3", None);
        check("timeout=", None);
    }
}
