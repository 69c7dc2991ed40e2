//! What somebody outside of a run asks of it while it goes on, as a batch system does that wants the machine back. Who asks, and
//! by what signal, is not decided here.

use super::Interruption;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// Flags that any thread, or a signal handler, may set while a run goes on. Clones share them.
///
/// Whichever rank is asked to stop tells the others in the tally that all make once a step, so all end after the same one,
/// and rank 0 takes the checkpoint. A checkpoint is asked of rank 0.
#[derive(Clone, Debug, Default)]
pub struct Requests {
    /// To end after the step at hand, with a checkpoint if the run takes any.
    pub stop: Arc<AtomicBool>,
    /// The same, for a run that is to be started again when there is a machine for it: who ends it says so by its exit code.
    pub drain: Arc<AtomicBool>,
    /// To take a checkpoint after the step at hand, or as soon as the one before is written, and go on. Heeded, it is cleared.
    pub checkpoint: Arc<AtomicBool>,
}

impl Requests {
    /// Whether the run is to end.
    pub fn stop(&self) -> bool {
        self.stop.load(Ordering::Relaxed)
    }

    /// Whether it is to end and to be started again.
    pub fn drain(&self) -> bool {
        self.drain.load(Ordering::Relaxed)
    }

    /// Why the run is to end, if it is.
    pub(crate) fn interruption(&self) -> Option<Interruption> {
        let asked = [(self.stop(), Interruption::Stop), (self.drain(), Interruption::Drain)];
        asked.into_iter().find_map(|(asked, why)| asked.then_some(why))
    }

    /// Whether a checkpoint was asked for since this was called last.
    pub(crate) fn take_checkpoint(&self) -> bool {
        self.checkpoint.swap(false, Ordering::Relaxed)
    }
}
