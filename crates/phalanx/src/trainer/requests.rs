//! What somebody outside of a run asks of it while it goes on, as a batch system does that wants the machine back. Who asks, and
//! by what signal, is not decided here.

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
    /// To take a checkpoint after the step at hand, or as soon as the one before is written, and go on. Heeded, it is cleared.
    pub checkpoint: Arc<AtomicBool>,
}

impl Requests {
    /// Whether the run is to end.
    pub fn stop(&self) -> bool {
        self.stop.load(Ordering::Relaxed)
    }

    /// Whether a checkpoint was asked for since this was called last.
    pub(crate) fn take_checkpoint(&self) -> bool {
        self.checkpoint.swap(false, Ordering::Relaxed)
    }
}
