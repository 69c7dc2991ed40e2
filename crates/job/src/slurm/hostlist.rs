//! Slurm's lists of nodes, such as `gpu[07-09,12],login`, and what they stand for.
//!
//! A list is groups with commas between them. A group is a name with numbers in brackets, single ones or ranges, and stands for
//! one host a number; several brackets multiply, the last of them running fastest. A range has as many digits as its first number is
//! written with, so `[08-11]` is 08, 09, 10, 11. Order and duplicates are kept.
//!
//! `scontrol show hostnames` is the reference: whatever both take means the same hosts (`tests/hostlist.rs`). What it takes and
//! makes nonsense of, such as `n[1` or `n[1, 2]`, is refused here. A name may go on after its last bracket, which only newer
//! versions of Slurm allow. With three brackets and more Slurm 22.05 counts in another order, from the same first host on.

use std::str::FromStr;
use thiserror::Error;

/// The most hosts that a list may stand for: a cluster of Slurm has no more nodes.
pub const MAX_HOSTS: usize = 65_536;
/// The longest name of a host, in bytes.
const MAX_NAME: usize = 255;

/// The hosts of a list, in its order.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Hostlist(Vec<String>);

/// Why a list isn't one.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
#[error(
    "the hostlist {list:?} makes no sense at column {column}: {why}\nhint: hosts are listed as in n[01-03,7],login, which `scontrol show hostnames` expands"
)]
pub struct HostlistError {
    /// The list, or its beginning.
    pub list: String,
    /// Which of its characters the trouble begins with, from 1.
    pub column: usize,
    /// What is wrong there.
    pub why: String,
}

impl Hostlist {
    /// All of them, which may be none.
    pub fn hosts(&self) -> &[String] {
        &self.0
    }

    /// The first of them.
    pub fn first(&self) -> Option<&str> {
        self.0.first().map(String::as_str)
    }
}

impl FromStr for Hostlist {
    type Err = HostlistError;

    /// Fails where brackets don't match or hold no numbers, where a range runs backwards, and where there would be more than
    /// [`MAX_HOSTS`] hosts or names of more than 255 bytes, before memory is taken for them.
    fn from_str(list: &str) -> Result<Hostlist, HostlistError> {
        let mut hosts = Vec::new();
        let groups = groups(list).and_then(|groups| {
            groups
                .into_iter()
                .try_for_each(|(start, group)| expand(group, &mut hosts).map_err(|e| e.behind(start)))
        });
        match groups {
            Ok(()) => Ok(Hostlist(hosts)),
            Err(Wrong { at, why }) => {
                let column = list[..at].chars().count() + 1;
                let is_long = list.chars().count() > 80;
                let shown: String = list
                    .chars()
                    .take(80)
                    .chain(is_long.then_some("...").into_iter().flat_map(str::chars))
                    .collect();
                Err(HostlistError { list: shown, column, why })
            }
        }
    }
}

/// What is wrong, and at which byte.
struct Wrong {
    at: usize,
    why: String,
}

impl Wrong {
    fn behind(self, start: usize) -> Wrong {
        Wrong { at: self.at + start, ..self }
    }
}

fn wrong<T>(at: usize, why: impl Into<String>) -> Result<T, Wrong> {
    Err(Wrong { at, why: why.into() })
}

/// The groups of a list, each with the byte at which it begins. Commas in brackets divide none.
fn groups(list: &str) -> Result<Vec<(usize, &str)>, Wrong> {
    let (mut groups, mut start, mut open) = (Vec::new(), 0, None);
    for (at, c) in list.char_indices() {
        match c {
            '[' if open.is_some() => return wrong(at, "there are brackets in brackets"),
            '[' => open = Some(at),
            ']' if open.take().is_none() => return wrong(at, "the bracket was never opened"),
            c if (c == ',' || c.is_ascii_whitespace()) && open.is_none() => {
                groups.push((start, &list[start..at]));
                start = at + 1;
            }
            c if c.is_control() => return wrong(at, "a control character is part of no name"),
            _ => {}
        }
    }
    if let Some(open) = open {
        return wrong(open, "the bracket is never closed");
    }
    groups.push((start, &list[start..]));
    groups.retain(|(_, group)| !group.is_empty());
    Ok(groups)
}

/// Numbers of one bracket, from the first on.
struct Range {
    first: u64,
    last: u64,
    /// Digits, with zeros before them.
    width: usize,
}

impl Range {
    fn count(&self) -> usize {
        usize::try_from(self.last - self.first).map_or(usize::MAX, |more| more.saturating_add(1))
    }

    /// Of the longest number.
    fn digits(&self) -> usize {
        self.width.max(self.last.to_string().len())
    }
}

/// Appends the hosts of a group, whose brackets match.
fn expand(group: &str, hosts: &mut Vec<String>) -> Result<(), Wrong> {
    let (mut names, mut at) = (vec![String::new()], 0);
    while at < group.len() {
        let open = group[at..].find('[').map_or(group.len(), |found| at + found);
        has_room(&names, open - at, at)?;
        names.iter_mut().for_each(|name| name.push_str(&group[at..open]));
        let Some(close) = group[open..].find(']').map(|found| open + found) else { break };
        let ranges = ranges(&group[open + 1..close]).map_err(|e| e.behind(open + 1))?;
        has_room(&names, ranges.iter().map(Range::digits).max().unwrap_or(0), open)?;
        let numbers = ranges.iter().fold(0, |sum: usize, range| sum.saturating_add(range.count()));
        fits(names.len().saturating_mul(numbers).saturating_add(hosts.len()), open)?;
        let of = |name: &String| {
            let number = |range: &Range| {
                let (name, width) = (name.clone(), range.width);
                (range.first..=range.last).map(move |number| format!("{name}{number:0width$}"))
            };
            ranges.iter().flat_map(number).collect::<Vec<_>>()
        };
        names = names.iter().flat_map(of).collect();
        at = close + 1;
    }
    fits(hosts.len() + names.len(), 0)?;
    hosts.append(&mut names);
    Ok(())
}

fn fits(hosts: usize, at: usize) -> Result<(), Wrong> {
    if hosts > MAX_HOSTS { wrong(at, format!("that would be more than {MAX_HOSTS} hosts")) } else { Ok(()) }
}

fn has_room(names: &[String], more: usize, at: usize) -> Result<(), Wrong> {
    let longest = names.iter().map(String::len).max().unwrap_or(0);
    if longest + more > MAX_NAME {
        wrong(at, format!("a name has more than {MAX_NAME} bytes"))
    } else {
        Ok(())
    }
}

/// What stands between two brackets.
fn ranges(inside: &str) -> Result<Vec<Range>, Wrong> {
    let (mut ranges, mut at) = (Vec::new(), 0);
    for part in inside.split(',') {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        let range =
            Range { first: number(first, at, part)?, last: number(last, at, part)?, width: first.len() };
        if range.first > range.last {
            return wrong(at, format!("the range {part} runs backwards"));
        }
        ranges.push(range);
        at += part.len() + 1;
    }
    Ok(ranges)
}

fn number(text: &str, at: usize, part: &str) -> Result<u64, Wrong> {
    if text.is_empty() || !text.bytes().all(|byte| byte.is_ascii_digit()) {
        return wrong(at, format!("{part:?} is neither a number nor a range such as 1-3"));
    }
    text.parse().or_else(|_| wrong(at, format!("the number {text} is too large")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_makes_no_sense_is_told_with_its_place() {
        let check = |list: &str, column: usize, why: &str| {
            let error = list.parse::<Hostlist>().unwrap_err();
            assert!(error.column == column && error.why.contains(why), "{list}: {error}");
        };
        check("n[", 2, "never closed");
        check("m,n[1,2", 4, "never closed");
        check("n1]", 3, "never opened");
        check("n[1-2]]", 7, "never opened");
        check("n[[1]]", 3, "brackets in brackets");
        check("n[]", 3, "\"\" is neither a number nor a range");
        check("a,n[1,x-2]", 7, "\"x-2\" is neither");
        check("\u{e9}[3-1]", 3, "the range 3-1 runs backwards");
        check("n[1-]", 3, "\"1-\" is neither");
        check("n[1-2-3]", 3, "neither");
        check("n[+1]", 3, "neither");
        check("n[1, 2]", 5, "\" 2\" is neither");
        check("n[18446744073709551616]", 3, "too large");
        check("n[0-65536]", 2, "more than 65536 hosts");
        check("a,n[0-65535]", 4, "more than 65536 hosts");
        check("n[0-65535],a", 12, "more than 65536 hosts");
        check("n[0-18446744073709551615]", 2, "more than 65536 hosts");
        check("n[0-9999][0-9999][0-9999]", 10, "more than 65536 hosts");
        check(&"n".repeat(256), 1, "more than 255 bytes");
        check("n\u{7}", 2, "control character");
        let error = format!("{}[", "n".repeat(500)).parse::<Hostlist>().unwrap_err().to_string();
        assert!(error.contains("n...\"") && error.len() < 400 && error.contains("hint: "), "{error}");
    }

    #[test]
    fn a_long_name_takes_no_memory_many_times_over() {
        let list = format!("{}[0-65535]", "n".repeat(100_000));
        assert!(list.parse::<Hostlist>().unwrap_err().why.contains("255 bytes"));
    }
}
