//! The batches of an epoch, one ahead of the pass at hand where a GPU computes.
//!
//! While the GPU makes a pass, the next batch is taken from the loader and sent to it, so neither takes any of its time. A batch that
//! was taken so and never trained on counts for nothing: who used which samples is told when a pass is made.

use phalanx_data::{Batch, Batches, Result};
use phalanx_tensor::Device;
use std::time::{Duration, Instant};

/// See the module.
pub(super) struct Ahead {
    batches: Batches,
    device: Device,
    next: Option<Result<Batch>>,
    is_wanted: bool,
    /// The most that the GPU can have waited for the batch that was taken ahead.
    waited: Duration,
}

impl Ahead {
    /// These batches, for this device.
    pub(super) fn of(batches: Batches, device: &Device) -> Ahead {
        Ahead { batches, device: device.clone(), next: None, is_wanted: true, waited: Duration::ZERO }
    }

    /// The next batch, and how long it was waited for now.
    pub(super) fn take(&mut self) -> (Option<Result<Batch>>, Duration) {
        let since = Instant::now();
        let next = self.next.take().or_else(|| self.batches.next());
        (next, since.elapsed())
    }

    /// Whether there will be a pass behind the one at hand: else nobody looks for its batch.
    pub(super) fn want_another(&mut self, is_wanted: bool) {
        self.is_wanted = is_wanted;
    }

    /// How long the pass at hand has waited for the batch after it, which is a part of the time of its step.
    pub(super) fn take_waited(&mut self) -> Duration {
        std::mem::take(&mut self.waited)
    }

    /// Takes the batch after the one at hand, and sends it: called while the device is busy with that one.
    pub(super) fn look(&mut self) {
        if self.device.gpu().is_none() || self.next.is_some() || !self.is_wanted {
            return;
        }
        let mut since = Instant::now();
        self.next = self.batches.next();
        let was_idle = self.device.is_idle();
        if !was_idle {
            since = Instant::now();
        }
        if let Some(Ok(batch)) = &mut self.next {
            batch.send(&self.device);
        }
        if self.device.is_idle() {
            // It had nothing to do by the end of that, and may have had nothing from where it was last known to have some.
            self.waited = since.elapsed();
        }
    }
}
