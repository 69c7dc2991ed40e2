//! How many machines a run has, and how they would meet: what of it makes sense with one, and what is refused.

use super::flags::RunArgs;
use crate::args::WrongUsage;

/// The program's own meeting point: `MASTER_ADDR`, and `MASTER_PORT` where a free one won't do.
type Meeting = (String, Option<u16>);

const BACKENDS: [&str; 4] = ["static", "c10d", "etcd", "etcd-v2"];
const LOCALHOST: &str = "127.0.0.1";

/// Refuses whatever needs several machines; gives where the program meets.
pub(super) fn meeting(args: &RunArgs) -> Result<Meeting, WrongUsage> {
    let refuse = |text: String| Err(WrongUsage(text));
    let (_, most) = nodes(&args.nnodes)?;
    if most > 1 {
        return refuse(format!(
            "--nnodes {}: runs over several machines are not supported yet; leave it out",
            args.nnodes
        ));
    }
    if args.node_rank != 0 {
        return refuse(format!("--node-rank {}: there is one machine, whose rank is 0", args.node_rank));
    }
    let backend = args.rdzv_backend.as_deref().unwrap_or("static");
    if !BACKENDS.contains(&backend) {
        return refuse(format!("--rdzv-backend {backend}: must be one of {}", BACKENDS.join(", ")));
    }
    let node_rank = conf(args.rdzv_conf.as_deref().unwrap_or_default())?
        .into_iter()
        .find(|(key, value)| *key == "rank" && *value != "0");
    if let Some((_, rank)) = node_rank {
        return refuse(format!("--rdzv-conf rank={rank}: there is one machine, whose rank is 0"));
    }
    let endpoint = match args.rdzv_endpoint.as_deref().filter(|text| !text.is_empty()) {
        Some(text) => Some(endpoint(text)?),
        None => None,
    };
    let at_endpoint = endpoint.filter(|_| backend == "static" && !args.standalone);
    let (host, port) = at_endpoint.unwrap_or((LOCALHOST.into(), None));
    Ok((args.master_addr.clone().unwrap_or(host), args.master_port.or(port)))
}

/// N or MIN:MAX, as the least and the most.
fn nodes(text: &str) -> Result<(usize, usize), WrongUsage> {
    let wrong = |why: &str| WrongUsage(format!("--nnodes {text}: {why}"));
    let (least, most) = text.split_once(':').unwrap_or((text, text));
    let number = |text: &str| text.parse::<usize>().map_err(|_| wrong("must be a number, or two as in 1:4"));
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
fn endpoint(text: &str) -> Result<Meeting, WrongUsage> {
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
        pair.filter(|(key, value)| !key.is_empty() && !value.is_empty()).ok_or_else(wrong)
    });
    pairs.collect()
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
    fn how_patiently_machines_meet_is_pairs() {
        let check = |text: &str, want: Option<&[(&str, &str)]>| {
            assert_eq!(conf(text).ok().as_deref(), want, "{text}");
        };
        check("", Some(&[]));
        check("timeout=900", Some(&[("timeout", "900")]));
        check("join_timeout = 60, is_host=1,", Some(&[("join_timeout", "60"), ("is_host", "1")]));
        check("timeout", None);
        check("=3", None);
        check("timeout=", None);
    }
}
