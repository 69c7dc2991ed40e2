//! The last changes of the store, for those who watch.

use phalanx_job::store::{Change, Event, Folder, MAX_VALUE, Refusal, Revision};
use std::collections::VecDeque;

/// The most changes that one answer tells.
const BATCH_EVENTS: usize = 256;

/// Changes in order, the oldest forgotten when there are too many or they are too long.
pub(super) struct History {
    events: VecDeque<Event>,
    bytes: usize,
    max_events: usize,
    max_bytes: usize,
    /// All changes from this revision on are here.
    first: Revision,
}

impl History {
    /// Nothing has changed yet; `first` will be the first change.
    pub(super) fn new(first: Revision, max_events: usize, max_bytes: usize) -> History {
        History { events: VecDeque::new(), bytes: 0, max_events, max_bytes, first }
    }

    pub(super) fn push(&mut self, event: Event) {
        self.bytes += weight(&event);
        self.events.push_back(event);
        while self.events.len() > self.max_events || self.bytes > self.max_bytes {
            let Some(oldest) = self.events.pop_front() else { return };
            self.bytes -= weight(&oldest);
            self.first = oldest.revision.next();
        }
    }

    /// Changes below a folder from a revision on, as many as one answer holds, and from where to ask on.
    pub(super) fn since(&self, folder: &Folder, from: Revision) -> Result<(Vec<Event>, Revision), Refusal> {
        let end = self.events.back().map_or(self.first, |event| event.revision.next());
        if from < self.first {
            return Err(Refusal::Lagged { from, first: self.first });
        }
        if from > end {
            return Err(Refusal::NotYet { from, now: Revision(end.0 - 1) });
        }
        let (mut found, mut bytes) = (Vec::new(), 0);
        let start = self.events.partition_point(|event| event.revision < from);
        for event in self.events.range(start..).filter_map(|event| below(folder, event)) {
            bytes += weight(&event);
            if found.len() == BATCH_EVENTS || (bytes > MAX_VALUE && !found.is_empty()) {
                return Ok((found, event.revision));
            }
            found.push(event);
        }
        Ok((found, end))
    }
}

/// What of a change lies below a folder, if anything.
pub(super) fn below(folder: &Folder, event: &Event) -> Option<Event> {
    let change = match &event.change {
        Change::Set { key, .. } => folder.holds(key).then(|| event.change.clone())?,
        Change::Gone { keys } => {
            let keys: Vec<_> = keys.iter().filter(|key| folder.holds(key)).cloned().collect();
            if keys.is_empty() {
                return None;
            }
            Change::Gone { keys }
        }
    };
    Some(Event { revision: event.revision, change })
}

/// What a change takes in memory, roughly.
fn weight(event: &Event) -> usize {
    const FIXED: usize = 64;
    FIXED
        + match &event.change {
            Change::Set { key, value } => key.as_str().len() + value.len(),
            Change::Gone { keys } => keys.iter().map(|key| FIXED + key.as_str().len()).sum(),
        }
}
