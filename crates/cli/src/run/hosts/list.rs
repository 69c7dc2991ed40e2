//! `--hosts`: which machines, and how many workers each has.

use crate::args::WrongUsage;
use phalanx_job::slurm::Hostlist;
use std::fmt;

/// One of the machines.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Host {
    /// As ssh is told: a name, an address or an alias of ssh's own, with a user before it or not.
    pub(super) destination: String,
    /// Workers there, in the words of `--nproc-per-node`, where they were typed.
    pub(super) workers: Option<String>,
}

/// The name alone.
impl fmt::Display for Host {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.destination.rsplit_once('@').map_or(&self.destination, |(_, name)| name))
    }
}

/// `a:8,b:8`, with users (`me@a`), ranges as Slurm writes them (`n[1-4]:8`) and addresses with colons in brackets (`[fe80::1]:8`).
pub(super) fn hosts(text: &str) -> Result<Vec<Host>, WrongUsage> {
    let wrong = |why: String| {
        WrongUsage(format!("--hosts {text}: {why}\nhint: name them as in a:8,b:8, with the workers of each"))
    };
    let mut all: Vec<Host> = Vec::new();
    for part in parts(text) {
        let part = part.trim();
        if part.is_empty() {
            return Err(wrong("a host has no name".into()));
        }
        // What ssh would take for an option could make it run anything.
        if part.starts_with('-') {
            return Err(wrong(format!("{part} is no name of a host")));
        }
        let (user, rest) = part.rsplit_once('@').map_or(("", part), |(user, rest)| (user, rest));
        let (names, workers) = match rest.strip_prefix('[').and_then(|rest| rest.split_once(']')) {
            Some((address, after)) if address.contains(':') => {
                let workers = after.strip_prefix(':').or(after.is_empty().then_some(""));
                let workers = workers.ok_or_else(|| wrong(format!("{after} behind {address}")))?;
                (vec![address.to_owned()], workers)
            }
            _ => {
                let (names, workers) = rest.rsplit_once(':').unwrap_or((rest, ""));
                if names.contains(':') {
                    return Err(wrong(format!("{names} has colons: put it in brackets, as in [{rest}]")));
                }
                let list: Hostlist = names.parse().map_err(|error| wrong(format!("{error}")))?;
                (list.hosts().to_vec(), workers)
            }
        };
        if names.is_empty() || rest.ends_with(':') {
            return Err(wrong(format!(
                "{part} lacks {}",
                if names.is_empty() { "a name" } else { "a number" }
            )));
        }
        let is_count = |word: &str| word.parse::<u32>().is_ok_and(|n| n > 0);
        if !workers.is_empty() && !["auto", "cpu", "gpu"].contains(&workers) && !is_count(workers) {
            return Err(wrong(format!("{workers} workers: must be a number from 1, `auto`, `cpu` or `gpu`")));
        }
        for name in names {
            let is_plain = |c: char| c.is_ascii_alphanumeric() || "-_.:%".contains(c);
            if name.starts_with('-') || !name.chars().all(is_plain) || user.starts_with('-') {
                return Err(wrong(format!("{name} is no name of a host")));
            }
            let destination = if user.is_empty() { name } else { format!("{user}@{name}") };
            if all.iter().any(|host| host.destination == destination) {
                return Err(wrong(format!("{destination} is named twice; give it more workers instead")));
            }
            all.push(Host { destination, workers: Some(workers.to_owned()).filter(|w| !w.is_empty()) });
        }
    }
    Ok(all)
}

/// What stands between the commas that are outside of brackets.
fn parts(text: &str) -> Vec<&str> {
    let (mut depth, mut start, mut all) = (0usize, 0, Vec::new());
    for (at, c) in text.char_indices() {
        match c {
            '[' => depth += 1,
            ']' => depth = depth.saturating_sub(1),
            ',' if depth == 0 => {
                all.push(&text[start..at]);
                start = at + 1;
            }
            _ => {}
        }
    }
    all.push(&text[start..]);
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hosts_have_names_and_workers() {
        let check = |text: &str, want: Result<&[(&str, &str, &str)], &str>| match (hosts(text), want) {
            (Ok(got), Ok(want)) => {
                let got: Vec<(String, String, String)> = got
                    .into_iter()
                    .map(|host| {
                        (host.destination.clone(), host.to_string(), host.workers.unwrap_or_default())
                    })
                    .collect();
                let got: Vec<(&str, &str, &str)> =
                    got.iter().map(|(a, b, c)| (a.as_str(), b.as_str(), c.as_str())).collect();
                assert_eq!(got, want, "{text}");
            }
            (Err(error), Err(want)) => {
                assert!(error.0.contains(want) && error.0.contains("hint: "), "{error}");
            }
            (got, want) => panic!("{text}: {got:?} and not {want:?}"),
        };
        check("a:8,b:8", Ok(&[("a", "a", "8"), ("b", "b", "8")]));
        check("me@a.b.c, b:gpu", Ok(&[("me@a.b.c", "a.b.c", ""), ("b", "b", "gpu")]));
        check("n[1-2,4]:3", Ok(&[("n1", "n1", "3"), ("n2", "n2", "3"), ("n4", "n4", "3")]));
        check("[::1]:2,[fe80::2%eth0]", Ok(&[("::1", "::1", "2"), ("fe80::2%eth0", "fe80::2%eth0", "")]));
        check("me@[::1]:2", Ok(&[("me@::1", "::1", "2")]));
        check("", Err("no name"));
        check("a,,b", Err("no name"));
        check("a:", Err("lacks a number"));
        check(":8", Err("lacks a name"));
        check("a:0", Err("0 workers"));
        check("a:-1", Err("-1 workers"));
        check("a:many", Err("many workers"));
        check("::1", Err("put it in brackets"));
        check("[::1]x", Err("x behind ::1"));
        check("n[1-", Err("makes no sense"));
        check("a:2,a:3", Err("a is named twice"));
        check("-oProxyCommand=true", Err("no name of a host"));
        check("me@-oProxyCommand=true", Err("no name of a host"));
        check("-x@a", Err("no name of a host"));
        check("a b:2", Ok(&[("a", "a", "2"), ("b", "b", "2")]));
        check("a$b", Err("no name of a host"));
        check("a;b", Err("no name of a host"));
    }
}
