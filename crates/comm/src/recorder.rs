//! The last operations of a group, always recorded: what to look at when ranks disagree about where they are.
//!
//! A record is a few words in a ring of fixed size; it is written out only when somebody asks.

use crate::schedule::Choice;
use crate::signature::Signature;
use serde::{Deserialize, Serialize};
use std::collections::VecDeque;
use std::time::{Duration, Instant};

/// How many operations are kept.
const KEPT: usize = 512;

/// An operation that a rank took part in.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Record {
    /// Its number: collectives of a group are counted from 1.
    pub sequence: u64,
    /// What it was: its name, number, elements, and reduction or root.
    pub operation: String,
    /// How it was, or is, carried out, and why so.
    pub algorithm: String,
    /// How long ago it was issued.
    pub issued_ago: Duration,
    /// How long it took from then on, zero if that was over before anybody looked at the clock; none if it isn't done.
    pub took: Option<Duration>,
    /// Bytes that had come and gone of the one that the group failed in, where that is known.
    pub moved_bytes: Option<u64>,
}

#[derive(Clone, Copy)]
struct Entry {
    signature: Signature,
    choice: Choice,
    issued: Instant,
    took: Option<Duration>,
}

/// A rank's records of a group.
#[derive(Default)]
pub(crate) struct Recorder {
    entries: VecDeque<Entry>,
    /// How many there were before the first that is kept.
    dropped: u64,
    /// The collective that was being played when the group failed, and how many of its bytes had moved.
    last: Option<(u64, u64)>,
}

impl Recorder {
    /// A collective was issued; they are numbered from 1.
    pub(crate) fn issued(&mut self, signature: Signature, choice: Choice, now: Instant) {
        if self.entries.len() == KEPT {
            self.entries.pop_front();
            self.dropped += 1;
        }
        self.entries.push_back(Entry { signature, choice, issued: now, took: None });
    }

    /// What the collective of this number was, if that is still kept.
    pub(crate) fn signature(&self, sequence: u64) -> Option<Signature> {
        let at = sequence.checked_sub(self.dropped + 1)?;
        self.entries.get(at as usize).map(|entry| entry.signature)
    }

    /// The collective of this number is done; the clock was last looked at then.
    pub(crate) fn done(&mut self, sequence: u64, clock: Instant) {
        let at = sequence.checked_sub(self.dropped + 1);
        if let Some(entry) = at.and_then(|at| self.entries.get_mut(at as usize)) {
            // A look at the clock costs a tenth of a small operation.
            let took = if clock > entry.issued { entry.issued.elapsed() } else { Duration::ZERO };
            entry.took = Some(took);
        }
    }

    /// So much of a collective had moved when the group failed.
    pub(crate) fn failed_in(&mut self, sequence: u64, bytes: u64) {
        self.last = Some((sequence, bytes));
    }

    /// All that is kept, the oldest first.
    pub(crate) fn records(&self) -> Vec<Record> {
        let record = |entry: &Entry| Record {
            sequence: entry.signature.sequence,
            operation: entry.signature.describe(),
            algorithm: entry.choice.to_string(),
            issued_ago: entry.issued.elapsed(),
            took: entry.took,
            moved_bytes: self.last.filter(|last| last.0 == entry.signature.sequence).map(|last| last.1),
        };
        self.entries.iter().map(record).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::element::Element;
    use crate::schedule::Algorithm;
    use crate::signature::Kind;

    #[test]
    fn the_last_operations_are_kept_and_know_whether_they_are_done() {
        let mut recorder = Recorder::default();
        for sequence in 1..=KEPT as u64 + 10 {
            let signature = Signature {
                kind: Kind::Barrier,
                op: None,
                algorithm: None,
                detail: 0,
                at: 0,
                sequence,
                element: u8::KIND,
                count: 0,
            };
            recorder.issued(signature, Choice::only(Algorithm::Dissemination), Instant::now());
            // One that is long forgotten is done, too.
            recorder.done(sequence.saturating_sub(KEPT as u64 + 5), Instant::now());
            if sequence.is_multiple_of(2) {
                recorder.done(sequence, Instant::now());
            }
        }
        let records = recorder.records();
        assert_eq!(records.len(), KEPT);
        assert!(records[0].operation.starts_with("barrier #11 "), "{:?}", records[0]);
        assert!(records.iter().enumerate().all(|(i, record)| record.took.is_some() == (i % 2 == 1)));
    }
}
