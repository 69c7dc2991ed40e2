//! What hosts say of themselves, side by side: what differs between them, and what can't work. Pure, so that every case is a row
//! of a test.

use super::words::{Facts, Seen};
use phalanx_job::CLOCKS_APART;
use std::ffi::OsString;
use std::path::Path;

/// Clocks that are further apart are told, and those that are much further are refused: times in logs, limits on the run's time and
/// files of a shared folder would contradict each other.
const APART: f64 = 1.0;
const TOO_FAR: f64 = CLOCKS_APART.as_secs() as f64;

/// A host, and what it said.
#[derive(Clone, Debug)]
pub(super) struct Looked {
    pub(super) name: String,
    /// Workers, as `--nproc-per-node` has it.
    pub(super) workers: String,
    pub(super) facts: Facts,
    /// How far its clock is ahead of ours, and how far that may be wrong, in seconds.
    pub(super) ahead: f64,
    pub(super) within: f64,
    /// Whether it sees the folder of the first host, as far as that is known.
    pub(super) shares: Option<bool>,
}

/// What was asked for on all of them.
pub(super) struct Wanted<'a> {
    /// This command's version, and where its other half lies there.
    pub(super) version: &'a str,
    pub(super) binary: &'a str,
    pub(super) folder: &'a Path,
    pub(super) out: &'a Path,
    pub(super) programs: &'a [OsString],
}

/// What is to be said of them.
#[derive(Debug, Default)]
pub(super) struct Said {
    /// A line a host, and one a difference.
    pub(super) told: Vec<String>,
    /// What can't work, with what to do about it.
    pub(super) refused: Vec<String>,
}

pub(super) fn compare(hosts: &[Looked], wanted: &Wanted<'_>) -> Said {
    let mut said = Said { told: hosts.iter().map(line).collect(), refused: Vec::new() };
    let Some((first, others)) = hosts.split_first() else { return said };
    for host in hosts {
        said.refused.extend(refused(host, wanted));
    }
    let sorted =
        |ahead: fn(f64, f64) -> f64| hosts.iter().map(|host| host.ahead).reduce(ahead).unwrap_or(0.0);
    let (behind, ahead) = (sorted(f64::min), sorted(f64::max));
    if ahead - behind > TOO_FAR {
        for host in hosts.iter().filter(|host| host.ahead.abs() > TOO_FAR / 2.0) {
            let (name, by) = (&host.name, host.ahead);
            said.refused.push(format!(
                "{name}: its clock is {by:+.0} s off this machine's, and clocks of a run may be {TOO_FAR:.0} s apart\nhint: ssh {name} sudo timedatectl set-ntp true"
            ));
        }
    } else if ahead - behind > APART + hosts.iter().map(|host| host.within).fold(0.0, f64::max) {
        said.told.push(format!("clocks are {:.1} s apart: times in logs will differ", ahead - behind));
    }
    for host in others {
        said.told.extend(differences(first, host, wanted));
    }
    if others.iter().any(|host| host.shares == Some(false)) {
        let apart: Vec<&str> =
            others.iter().filter(|h| h.shares == Some(false)).map(|h| h.name.as_str()).collect();
        let (folder, first, out) = (wanted.folder.display(), &first.name, wanted.out.display());
        said.told.push(format!(
            "{folder} of {} isn't that of {first}: each host keeps its own logs there, in {out}, and what the run saves is on {first}",
            apart.join(", ")
        ));
    }
    said
}

/// A host in a line.
fn line(host: &Looked) -> String {
    let Looked { name, workers, facts, ahead, .. } = host;
    let gib = |bytes: u64| bytes as f64 / f64::from(1 << 30);
    let workers = if workers == "1" { "1 worker".into() } else { format!("{workers} workers") };
    format!(
        "{name}: {workers}, {} cores, {:.1} of {:.1} GiB free, {} GPUs, clock {ahead:+.2} s",
        facts.cores,
        gib(facts.free),
        gib(facts.memory),
        facts.gpus
    )
}

/// What can't work on a host.
fn refused(host: &Looked, wanted: &Wanted<'_>) -> Vec<String> {
    let Looked { name, facts, workers, .. } = host;
    let Wanted { version, binary, folder, out, programs } = wanted;
    let mut all = Vec::new();
    if facts.version != *version {
        let other = &facts.version;
        all.push(format!("{name}: {binary} is of version {other}, and this one of {version}\nhint: scp {binary} {name}:{binary}"));
        // What another version says of the rest may mean something else.
        return all;
    }
    if let Some(why) = &facts.no_folder {
        let folder = folder.display();
        all.push(format!("{name}: the folder {folder} can't be used: {why}\nhint: ssh {name} mkdir -p {folder}, or another with --chdir"));
    }
    if let Some(why) = &facts.no_out {
        let out = out.display();
        all.push(format!(
            "{name}: the run's files can't be kept in {out}: {why}\nhint: give another folder with --out"
        ));
    }
    for (typed, seen) in programs.iter().zip(&facts.programs) {
        if let (Seen::Absent(why), None) = (seen, &facts.no_folder) {
            let typed = typed.display();
            all.push(format!("{name}: {typed} isn't there: {why}\nhint: copy it to the same place on all hosts, or name it by its whole path"));
        }
    }
    if let (Some(Seen::Absent(why)), None) = (&facts.data, &facts.no_folder) {
        all.push(format!(
            "{name}: the data isn't there: {why}\nhint: copy it to the same place on all hosts"
        ));
    }
    if workers == "gpu" && facts.gpus == 0 {
        all.push(format!("{name}: {name}:gpu asks for a worker a GPU, and there is none\nhint: give a number, as in {name}:{}", facts.cores));
    }
    all
}

/// What another host has otherwise than the first.
fn differences(first: &Looked, host: &Looked, wanted: &Wanted<'_>) -> Vec<String> {
    let (a, b, name, of) = (&first.facts, &host.facts, &host.name, &first.name);
    let mut all = Vec::new();
    if a.machine == b.machine {
        all.push(format!("{name} is the same machine as {of}: their workers share its cores"));
    }
    if a.binary != b.binary {
        all.push(format!("{name}: {} has other bytes than on {of}, of the same version", wanted.binary));
    }
    let files = a
        .programs
        .iter()
        .zip(&b.programs)
        .zip(wanted.programs)
        .map(|((a, b), typed)| (Some(a), Some(b), typed.display().to_string()));
    let data = (a.data.as_ref(), b.data.as_ref(), "the data".to_owned());
    for (a, b, what) in files.chain([data]) {
        match (a, b) {
            (
                Some(Seen::File { digest: one, bytes: m, .. }),
                Some(Seen::File { digest: other, bytes: n, .. }),
            ) if one != other => {
                all.push(format!("{name}: {what} has other bytes than on {of} ({n} and {m} of them)"));
            }
            (
                Some(Seen::Folder { digest: one, files: k, bytes: m, .. }),
                Some(Seen::Folder { digest: other, files: l, bytes: n, .. }),
            ) if one != other => {
                all.push(format!(
                    "{name}: {what} has other files than on {of}: {l} of {n} bytes, and {k} of {m}"
                ));
            }
            (Some(Seen::File { .. }), Some(Seen::Folder { .. })) => {
                all.push(format!("{name}: {what} is a folder, and on {of} a file"));
            }
            (Some(Seen::Folder { .. }), Some(Seen::File { .. })) => {
                all.push(format!("{name}: {what} is a file, and on {of} a folder"));
            }
            _ => {}
        }
    }
    if a.gpus != b.gpus {
        all.push(format!("{name}: {} GPUs, and {} on {of}", b.gpus, a.gpus));
    }
    if a.free > 2 * b.free || b.free > 2 * a.free {
        let mib = |bytes: u64| bytes >> 20;
        all.push(format!("{name}: {} MiB of memory are free, and {} on {of}", mib(b.free), mib(a.free)));
    }
    all
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::PathBuf;

    fn host(name: &str) -> Looked {
        let program = Seen::File { path: "/p".into(), bytes: 7, digest: "d".into() };
        let facts = Facts {
            version: "1".into(),
            binary: "b".into(),
            machine: name.into(),
            cores: 4,
            memory: 8 << 30,
            free: 6 << 30,
            gpus: 2,
            address: None,
            port: 1,
            no_folder: None,
            no_out: None,
            programs: vec![program],
            data: Some(Seen::Folder { path: "/d".into(), files: 3, bytes: 9, digest: "e".into() }),
        };
        Looked {
            name: name.into(),
            workers: "2".into(),
            facts,
            ahead: 0.01,
            within: 0.02,
            shares: Some(true),
        }
    }

    /// What is said of `a` as it is and of a `b` that this was done to.
    fn check(change: impl FnOnce(&mut Looked), told: &[&str], refused: &[&str]) {
        let (a, mut b) = (host("a"), host("b"));
        change(&mut b);
        let programs = ["./train".into()];
        let (folder, out) = (PathBuf::from("/f"), PathBuf::from("runs/x"));
        let wanted =
            Wanted { version: "1", binary: "/bin/phalanx", folder: &folder, out: &out, programs: &programs };
        let said = compare(&[a, b], &wanted);
        let has = |all: &[String], want: &[&str]| {
            assert_eq!(all.len(), want.len(), "{all:?}");
            all.iter()
                .zip(want)
                .for_each(|(got, want)| assert!(got.contains(want), "{got:?} and not {want:?}"));
        };
        has(&said.told[2..], told);
        has(&said.refused, refused);
        assert!(
            said.refused.iter().all(|line| line.contains("b: ") && line.contains("\nhint: ")),
            "{said:?}"
        );
    }

    #[test]
    fn hosts_that_are_alike_are_a_line_each() {
        check(|_| {}, &[], &[]);
        assert_eq!(line(&host("a")), "a: 2 workers, 4 cores, 6.0 of 8.0 GiB free, 2 GPUs, clock +0.01 s");
    }

    #[test]
    fn what_differs_is_told_and_what_cannot_work_is_refused() {
        check(|b| b.facts.version = "2".into(), &[], &["of version 2, and this one of 1\nhint: scp"]);
        check(|b| b.facts.binary = "c".into(), &["b: /bin/phalanx has other bytes than on a"], &[]);
        let file = |digest: &str| Seen::File { path: "/p".into(), bytes: 8, digest: digest.into() };
        check(
            |b| b.facts.programs[0] = file("x"),
            &["b: ./train has other bytes than on a (8 and 7 of them)"],
            &[],
        );
        let absent = || Seen::Absent("/p: No such file".into());
        check(|b| b.facts.programs[0] = absent(), &[], &["b: ./train isn't there: /p: No such file"]);
        check(|b| b.facts.data = Some(absent()), &[], &["b: the data isn't there"]);
        check(|b| b.facts.data = Some(file("x")), &["b: the data is a file, and on a a folder"], &[]);
        let folder = Seen::Folder { path: "/d".into(), files: 2, bytes: 9, digest: "f".into() };
        check(|b| b.facts.data = Some(folder), &["other files than on a: 2 of 9 bytes, and 3 of 9"], &[]);
        check(|b| b.facts.no_folder = Some("gone".into()), &[], &["b: the folder /f can't be used: gone"]);
        check(|b| b.facts.no_out = Some("read-only".into()), &[], &["kept in runs/x: read-only"]);
        check(|b| b.facts.gpus = 0, &["b: 0 GPUs, and 2 on a"], &[]);
        check(
            |b| (b.facts.gpus, b.workers) = (0, "gpu".into()),
            &["b: 0 GPUs"],
            &["b:gpu asks for a worker a GPU"],
        );
        check(|b| b.facts.free = 1 << 30, &["b: 1024 MiB of memory are free, and 6144 on a"], &[]);
        check(|b| b.facts.machine = "a".into(), &["b is the same machine as a"], &[]);
        check(|b| b.ahead = -2.0, &["clocks are 2.0 s apart"], &[]);
        // What the way to it took says no more.
        check(|b| (b.ahead, b.within) = (2.0, 1.5), &[], &[]);
        check(|b| b.ahead = 93.0, &[], &["b: its clock is +93 s off"]);
        check(|b| b.shares = Some(false), &["/f of b isn't that of a"], &[]);
        check(|b| b.shares = None, &[], &[]);
    }
}
