//! What a user sees while data is looked for and fetched.

use std::path::Path;
use std::time::Duration;

/// Is told what happens while a dataset is found and fetched. Closures over [`FetchEvent`] are progress, too.
pub trait Progress {
    /// Something happened. Called often: a display should draw at its own pace.
    fn event(&mut self, event: FetchEvent<'_>);
}

/// What happens while a dataset is found and fetched.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub enum FetchEvent<'a> {
    /// Another process is fetching the same dataset into the same folder; this one waits for it.
    Waiting {
        /// How long nothing may arrive before it gives up.
        patience: Duration,
    },
    /// A source is asked.
    Asking {
        /// The dataset.
        dataset: &'a str,
        /// The source, as a name for people.
        source: &'a str,
    },
    /// A source doesn't deliver; the next one is asked.
    Failed {
        /// The source, as a name for people.
        source: &'a str,
        /// Why.
        reason: &'a str,
    },
    /// Bytes of a file have arrived.
    Bytes {
        /// The file.
        file: &'a str,
        /// How many there are by now.
        done: u64,
        /// How many there will be, where the source says so.
        total: Option<u64>,
    },
    /// All files are there and verified.
    Ready {
        /// The dataset.
        dataset: &'a str,
        /// Where.
        folder: &'a Path,
    },
}

impl<F: FnMut(FetchEvent<'_>)> Progress for F {
    fn event(&mut self, event: FetchEvent<'_>) {
        self(event);
    }
}

/// Shows nothing.
#[derive(Clone, Copy, Debug, Default)]
pub struct Silent;

impl Progress for Silent {
    fn event(&mut self, _event: FetchEvent<'_>) {}
}
