//! What arrives in the queue that the supervising thread empties.

use phalanx_coord::Notice;
use phalanx_wire::{Generation, Rank};

/// Everything that arrives.
pub(crate) enum News {
    /// A worker's process is over, and whether that was well.
    Exited(Rank, bool),
    /// Nothing is left of it.
    Ended(Rank),
    /// This process was sent a signal.
    Signal(i32),
    /// From the coordinator, about a worker of this generation.
    Notice(Generation, Notice),
    /// One of the threads that write to the console has written everything.
    Shown,
}
