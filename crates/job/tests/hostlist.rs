//! Lists of nodes stand for the same hosts here and in Slurm: a table of both, which is held against the `scontrol` of this machine
//! where there is one, and lists made at random.

use phalanx_job::slurm::{Hostlist, MAX_HOSTS};
use proptest::prelude::*;
use proptest::test_runner::TestRunner;
use std::path::PathBuf;
use std::process::Command;

/// Lists, and their hosts.
const TABLE: [(&str, &str); 26] = [
    ("", ""),
    ("a", "a"),
    ("a,b", "a b"),
    ("n[1-3]", "n1 n2 n3"),
    ("n[01-03,7],m", "n01 n02 n03 n7 m"),
    ("n[08-11]", "n08 n09 n10 n11"),
    ("n[8-11]", "n8 n9 n10 n11"),
    ("n[99-101]", "n99 n100 n101"),
    ("n[099-101]", "n099 n100 n101"),
    ("n[00-1]", "n00 n01"),
    ("n[001-3]", "n001 n002 n003"),
    ("n[1-003]", "n1 n2 n3"),
    ("n[007]", "n007"),
    ("tux[2,1-2]", "tux2 tux1 tux2"),
    ("n1,n[1-2]", "n1 n1 n2"),
    ("rack[0-1]_blade[0-1]", "rack0_blade0 rack0_blade1 rack1_blade0 rack1_blade1"),
    ("n[1-2][3-4]", "n13 n14 n23 n24"),
    ("n[1-2]-eth[0,2]", "n1-eth0 n1-eth2 n2-eth0 n2-eth2"),
    ("a[07],b[1-3]", "a07 b1 b2 b3"),
    ("[1-3]", "1 2 3"),
    ("n[1,2],[3]", "n1 n2 3"),
    ("a,,b", "a b"),
    (",a,", "a"),
    (" a b", "a b"),
    ("n-1,a01,a1,a001", "n-1 a01 a1 a001"),
    ("n[18446744073709551615]", "n18446744073709551615"),
];

/// What only newer versions of Slurm take.
const NEWER: [(&str, &str); 2] =
    [("r[1-2]n[3-4].x", "r1n3.x r1n4.x r2n3.x r2n4.x"), ("gpu[1-2].dom,m", "gpu1.dom gpu2.dom m")];

/// What neither takes.
const REFUSED: [&str; 10] =
    ["n[]", "n[3-1]", "n[-1]", "n[a]", "n[1-b]", "n[1-2-3]", "n[1,]", "n[,1]", "n[0x1]", "n[0-65536]"];

fn hosts(list: &str) -> Option<Vec<String>> {
    list.parse::<Hostlist>().ok().map(|hosts| hosts.hosts().to_vec())
}

/// The command of this machine, which wants a configuration, whatever that says.
struct Scontrol {
    _folder: tempfile::TempDir,
    conf: PathBuf,
}

impl Scontrol {
    /// None, aloud, where there is no Slurm.
    fn of_this_machine() -> Option<Scontrol> {
        let folder = tempfile::tempdir().unwrap();
        let conf = folder.path().join("slurm.conf");
        std::fs::write(
            &conf,
            "ClusterName=none\nSlurmctldHost=localhost\nNodeName=n1\nPartitionName=p Nodes=n1\n",
        )
        .unwrap();
        let scontrol = Scontrol { _folder: folder, conf };
        if Command::new("scontrol").arg("--version").env("SLURM_CONF", &scontrol.conf).output().is_err() {
            eprintln!("skipped: there is no scontrol here (Debian's package slurm-client)");
            return None;
        }
        Some(scontrol)
    }

    fn hosts(&self, list: &str) -> Option<Vec<String>> {
        let mut command = Command::new("scontrol");
        command
            .args(["show", "hostnames", list])
            .env("SLURM_CONF", &self.conf)
            .env_remove("SLURM_JOB_NODELIST");
        let out = command.output().unwrap();
        let said = String::from_utf8(out.stderr).unwrap();
        let is_refused = said.contains("Invalid");
        assert!(is_refused || said.is_empty(), "{said}");
        (!is_refused).then(|| String::from_utf8(out.stdout).unwrap().lines().map(str::to_owned).collect())
    }
}

#[test]
fn lists_stand_for_what_the_table_says() {
    for (list, want) in TABLE.iter().chain(&NEWER) {
        let want: Vec<String> = want.split_whitespace().map(str::to_owned).collect();
        assert_eq!(hosts(list), Some(want), "{list}");
    }
    for list in REFUSED {
        assert_eq!(hosts(list), None, "{list}");
    }
    assert_eq!(hosts("n[0-65535]").unwrap().len(), MAX_HOSTS);
}

#[test]
fn scontrol_says_the_same() {
    let Some(scontrol) = Scontrol::of_this_machine() else { return };
    // Without a list it would expand that of its job.
    for (list, _) in TABLE.iter().filter(|(list, _)| !list.is_empty()) {
        assert_eq!(hosts(list), scontrol.hosts(list), "{list}");
    }
    for list in REFUSED {
        assert_eq!(scontrol.hosts(list), None, "{list}");
    }
    // With three brackets it counts in another order, from the same host on.
    let (mut ours, mut theirs) =
        (hosts("n[1-2]a[3-4]b[5,7]").unwrap(), scontrol.hosts("n[1-2]a[3-4]b[5,7]").unwrap());
    assert_eq!(ours[0], theirs[0]);
    ours.sort();
    theirs.sort();
    assert_eq!(ours, theirs);
    let mut runner =
        TestRunner::new(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(200) });
    let same = |list: String| {
        prop_assert_eq!(hosts(&list), scontrol.hosts(&list), "{}", list);
        Ok(())
    };
    runner.run(&sensible_list(), same).unwrap();
}

/// Lists of up to four groups with up to two brackets, as clusters have them.
fn sensible_list() -> impl Strategy<Value = String> {
    let range = (0u32..120, 0u32..9, 0usize..5).prop_map(|(first, more, width)| match more {
        0 => format!("{first:0width$}"),
        _ => format!("{first:0width$}-{:0width$}", first + more),
    });
    let bracket = prop::collection::vec(range, 1..4).prop_map(|ranges| format!("[{}]", ranges.join(",")));
    let part = ("[a-z][a-z-]{0,4}", prop::option::of(bracket))
        .prop_map(|(name, numbers)| name + &numbers.unwrap_or_default());
    let group = prop_oneof![
        part.clone(),
        (part.clone().prop_filter("an end in a bracket", |part| part.ends_with(']')), part)
            .prop_filter("an end in a bracket", |(_, last)| last.ends_with(']'))
            .prop_map(|(first, last)| first + &last),
    ];
    prop::collection::vec(group, 1..5).prop_map(|groups| groups.join(","))
}

proptest! {
    /// Whatever is written there: hosts or an error, at once, and never more than there may be.
    #[test]
    fn no_list_is_too_mad(list in r"([a-c0-9,\[\]\- ]|\[[0-9]{1,22}-[0-9]{1,22}\]|\PC){0,60}") {
        match list.parse::<Hostlist>() {
            Ok(hosts) => {
                prop_assert!(hosts.hosts().len() <= MAX_HOSTS);
                let sane = |host: &String| !host.is_empty() && host.len() <= 255 && !host.contains(['[', ']', ',', ' ']);
                prop_assert!(hosts.hosts().iter().all(sane), "{:?}", hosts);
            }
            Err(error) => prop_assert!(error.column <= list.chars().count(), "{}", error),
        }
    }

    /// The hosts of a list, written out, are a list of the same hosts.
    #[test]
    fn what_a_list_stands_for_is_a_list(list in sensible_list()) {
        let all = hosts(&list).unwrap();
        prop_assert_eq!(hosts(&all.join(",")), Some(all));
    }
}
