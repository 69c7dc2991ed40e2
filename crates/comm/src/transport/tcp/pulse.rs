//! Signs of life for peers elsewhere: a thread that beats on every connection, whether this rank computes or waits.

use super::Line;
use std::io::Result;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak};
use std::time::Duration;

/// How often: several times within any silence that is an error.
pub(crate) const BEAT: Duration = Duration::from_millis(200);

type Lines = Mutex<Vec<Weak<Line>>>;

/// Beats as long as it lives; without a connection there is no thread.
#[derive(Default)]
pub(crate) struct Pulse {
    lines: OnceLock<Arc<Lines>>,
}

impl Pulse {
    /// Beats on a connection until that ends.
    pub(super) fn keep(&self, line: &Arc<Line>) -> Result<()> {
        let lines = match self.lines.get() {
            Some(lines) => lines,
            None => {
                let lines = Arc::new(Lines::default());
                let watched = Arc::downgrade(&lines);
                std::thread::Builder::new().name("phalanx-pulse".into()).spawn(move || beat_on(&watched))?;
                // Where two came first at once, the thread of the other finds its list gone.
                self.lines.get_or_init(|| lines)
            }
        };
        locked(lines).push(Arc::downgrade(line));
        Ok(())
    }
}

fn beat_on(lines: &Weak<Lines>) {
    while let Some(lines) = lines.upgrade() {
        locked(&lines).retain(|line| line.upgrade().is_some_and(|line| line.beat()));
        drop(lines);
        std::thread::sleep(BEAT);
    }
}

/// The list is whole between any two statements that could panic.
fn locked(lines: &Lines) -> MutexGuard<'_, Vec<Weak<Line>>> {
    lines.lock().unwrap_or_else(PoisonError::into_inner)
}
