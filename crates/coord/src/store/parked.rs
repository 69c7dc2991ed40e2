//! Questions that wait for a change, or for their time to be over.

use super::ledger::Client;
use phalanx_job::store::{Folder, Key};
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

/// A question: of whom, and under which number.
pub(super) type Question = (Client, u64);

/// What a question waits for.
pub(super) enum Wish {
    /// That all of these keys are there; it is looked at again when the one with this index comes, which is missing.
    Keys(Vec<Key>, usize),
    /// A change below this folder.
    News(Folder),
}

impl Wish {
    /// How many keys and folders it holds.
    pub(super) fn weight(&self) -> usize {
        if let Wish::Keys(keys, _) = self { keys.len() } else { 1 }
    }
}

/// All that wait. A change wakes only those that wait for its key, and those that watch.
#[derive(Default)]
pub(super) struct Parked {
    wishes: BTreeMap<Question, (Duration, Wish)>,
    by_end: BTreeSet<(Duration, Question)>,
    by_key: BTreeMap<Key, BTreeSet<Question>>,
    readers: BTreeSet<Question>,
}

impl Parked {
    /// How many keys and folders a client's questions wait for.
    pub(super) fn weight(&self, client: Client) -> usize {
        self.wishes.range((client, 0)..=(client, u64::MAX)).map(|(_, (_, wish))| wish.weight()).sum()
    }

    /// Has a question wait. An older one of the same number is void, which only a confused client can mean.
    pub(super) fn park(&mut self, question: Question, ends: Duration, wish: Wish) {
        self.take(question);
        match &wish {
            Wish::Keys(keys, missing) => {
                self.by_key.entry(keys[*missing].clone()).or_default().insert(question);
            }
            Wish::News(_) => {
                self.readers.insert(question);
            }
        }
        self.by_end.insert((ends, question));
        self.wishes.insert(question, (ends, wish));
    }

    /// Takes a question out, with when its time is over.
    pub(super) fn take(&mut self, question: Question) -> Option<(Duration, Wish)> {
        let (ends, wish) = self.wishes.remove(&question)?;
        self.by_end.remove(&(ends, question));
        self.readers.remove(&question);
        if let Wish::Keys(keys, missing) = &wish
            && let Some(waiting) = self.by_key.get_mut(&keys[*missing])
        {
            waiting.remove(&question);
            if waiting.is_empty() {
                self.by_key.remove(&keys[*missing]);
            }
        }
        Some((ends, wish))
    }

    /// Who waits for this key.
    pub(super) fn waiting_for(&self, key: &Key) -> Vec<Question> {
        self.by_key.get(key).into_iter().flatten().copied().collect()
    }

    /// Who watches.
    pub(super) fn readers(&self) -> impl Iterator<Item = (Question, &Folder)> {
        self.readers.iter().filter_map(|question| match &self.wishes[question].1 {
            Wish::News(folder) => Some((*question, folder)),
            Wish::Keys(..) => None,
        })
    }

    /// The questions of one client.
    pub(super) fn of(&self, client: Client) -> impl Iterator<Item = Question> {
        self.wishes.range((client, 0)..=(client, u64::MAX)).map(|(question, _)| *question)
    }

    /// The question whose time is over first, and when.
    pub(super) fn first_end(&self) -> Option<(Duration, Question)> {
        self.by_end.first().copied()
    }
}
