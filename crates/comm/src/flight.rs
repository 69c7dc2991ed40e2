//! The flight record: what a rank knew of a group when that failed, and what the records of all its ranks say together.
//!
//! Where a record is kept is not decided here: a group hands it to whoever asked with [`Group::on_flight`](crate::Group::on_flight).

use crate::recorder::Record;
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

/// What one rank knew.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Flight {
    /// Which membership of the run the group belonged to.
    pub generation: u64,
    /// The group's ranks, as the run numbers them.
    pub members: Vec<u32>,
    /// Whose record this is, as the run numbers it.
    pub rank: u32,
    /// Why the group failed.
    pub error: String,
    /// The last operations, the oldest first.
    pub operations: Vec<Record>,
    /// The other ranks.
    pub peers: Vec<Peer>,
}

/// What was known of another rank.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Peer {
    /// As the run numbers it.
    pub rank: u32,
    /// Bytes that went there, headers included.
    pub sent: u64,
    /// The operation that its last message belonged to, if one ever came.
    pub heard: Option<String>,
    /// How long before the failure that was; zero if none ever came.
    pub ago: Duration,
}

/// How far a rank came.
struct Progress<'a> {
    rank: u32,
    finished: Option<&'a Record>,
    /// The first that isn't done.
    current: Option<&'a Record>,
}

impl Flight {
    fn progress(&self) -> Progress<'_> {
        let finished = self.operations.iter().rfind(|record| record.took.is_some());
        let current = self.operations.iter().find(|record| record.took.is_none());
        Progress { rank: self.rank, finished, current }
    }
}

/// What the records of a group's ranks say together: who left none, who is ahead of whom, and who understood what otherwise.
/// Three lines a group, the newest generation first.
pub fn diagnosis(flights: &[Flight]) -> Vec<String> {
    let mut groups: BTreeMap<(u64, &[u32]), Vec<&Flight>> = BTreeMap::new();
    for flight in flights {
        groups.entry((flight.generation, &flight.members)).or_default().push(flight);
    }
    groups
        .iter()
        .rev()
        .flat_map(|((generation, members), flights)| of_group(*generation, members, flights))
        .collect()
}

fn of_group(generation: u64, members: &[u32], flights: &[&Flight]) -> [String; 3] {
    let silent: Vec<u32> =
        members.iter().copied().filter(|rank| flights.iter().all(|flight| flight.rank != *rank)).collect();
    let who = match silent.len() {
        0 => "all left a record".into(),
        _ => format!("{} left no record: killed, or never at a loss", ranks(&silent)),
    };
    let head = format!("generation {generation}, {}: {who}", ranks(members));
    let progress: Vec<Progress<'_>> = flights.iter().map(|flight| flight.progress()).collect();
    [head, whereabouts(&progress), disagreement(flights)]
}

/// Which ranks are in which operation, those that are furthest first.
fn whereabouts(progress: &[Progress<'_>]) -> String {
    let mut places: BTreeMap<(u64, String), Vec<u32>> = BTreeMap::new();
    for Progress { rank, finished, current } in progress {
        let place = match (current, finished) {
            (Some(record), _) => (
                record.sequence,
                format!("in {} for {:.1} s", record.operation, record.issued_ago.as_secs_f64()),
            ),
            (None, Some(record)) => {
                (record.sequence, format!("done with {} and in none since", record.operation))
            }
            (None, None) => (0, "in no operation yet".into()),
        };
        places.entry(place).or_default().push(*rank);
    }
    let furthest = places.keys().next_back().map_or(0, |(sequence, _)| *sequence);
    let parts = places.iter().rev().map(|((sequence, place), who)| {
        let behind =
            if *sequence < furthest { format!(", {} behind", furthest - sequence) } else { String::new() };
        format!("{} {place}{behind}", ranks(who))
    });
    parts.collect::<Vec<_>>().join("; ")
}

/// The first operation that ranks understood differently.
fn disagreement(flights: &[&Flight]) -> String {
    let mut understood: BTreeMap<u64, BTreeMap<&str, Vec<u32>>> = BTreeMap::new();
    for flight in flights {
        for record in &flight.operations {
            let ranks = understood.entry(record.sequence).or_default().entry(&record.operation).or_default();
            ranks.push(flight.rank);
        }
    }
    let Some((_, sides)) = understood.iter().find(|(_, sides)| sides.len() > 1) else {
        return "no rank understood an operation otherwise than the others".into();
    };
    let sides: Vec<String> =
        sides.iter().map(|(operation, who)| format!("{} understood {operation}", ranks(who))).collect();
    format!("a mismatch: {}", sides.join(", but "))
}

/// "rank 3", "ranks 1, 2" or "ranks 0 to 7".
fn ranks(ranks: &[u32]) -> String {
    let ordered: Vec<u32> = ranks.iter().copied().collect::<BTreeSet<_>>().into_iter().collect();
    match ordered[..] {
        [] => "no rank".into(),
        [one] => format!("rank {one}"),
        [first, .., last] if ordered.len() > 3 && (last - first) as usize == ordered.len() - 1 => {
            format!("ranks {first} to {last}")
        }
        _ => format!("ranks {}", ordered.iter().map(u32::to_string).collect::<Vec<_>>().join(", ")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    fn record(sequence: u64, operation: &str, took: Option<Duration>) -> Record {
        let operation = format!("{operation} #{sequence} (4 x f32)");
        let (issued_ago, moved_bytes) = (Duration::from_millis(1500), None);
        Record { sequence, operation, algorithm: "ring".into(), issued_ago, took, moved_bytes }
    }

    fn flight(rank: u32, operations: Vec<Record>) -> Flight {
        let (members, error) = ((0..4).collect(), "rank 2 is gone".into());
        Flight { generation: 3, members, rank, error, operations, peers: Vec::new() }
    }

    #[test]
    fn records_of_all_ranks_say_together_who_is_missing_behind_and_mistaken() {
        let done = |sequence| record(sequence, "barrier", Some(Duration::ZERO));
        let check = |flights: &[Flight], want: &[&str]| assert_eq!(diagnosis(flights), want);
        check(&[], &[]);
        let ahead = |rank| flight(rank, vec![done(1), record(2, "all-reduce", None)]);
        check(
            &[ahead(0), ahead(1), flight(3, vec![done(1)])],
            &[
                "generation 3, ranks 0 to 3: rank 2 left no record: killed, or never at a loss",
                "ranks 0, 1 in all-reduce #2 (4 x f32) for 1.5 s; rank 3 done with barrier #1 (4 x f32) and in none since, 1 behind",
                "no rank understood an operation otherwise than the others",
            ],
        );
        let mistaken = flight(2, vec![done(1), record(2, "broadcast", None)]);
        check(
            &[ahead(0), ahead(1), mistaken, flight(3, Vec::new())],
            &[
                "generation 3, ranks 0 to 3: all left a record",
                "rank 2 in broadcast #2 (4 x f32) for 1.5 s; ranks 0, 1 in all-reduce #2 (4 x f32) for 1.5 s; rank 3 in no operation yet, 2 behind",
                "a mismatch: ranks 0, 1 understood all-reduce #2 (4 x f32), but rank 2 understood broadcast #2 (4 x f32)",
            ],
        );
    }

    #[test]
    fn the_newest_generation_comes_first() {
        let old = Flight { generation: 2, members: vec![0, 5], ..flight(5, Vec::new()) };
        let lines = diagnosis(&[old, flight(0, Vec::new())]);
        assert_eq!(lines.len(), 6);
        assert!(lines[0].starts_with("generation 3, ranks 0 to 3"), "{}", lines[0]);
        assert!(lines[3].starts_with("generation 2, ranks 0, 5: rank 0 left no record"), "{}", lines[3]);
    }
}
