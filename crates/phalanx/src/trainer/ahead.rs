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
    /// What the GPU has waited for the batch that was taken ahead, as far as anybody can tell.
    waited: Duration,
}

impl Ahead {
    /// These batches, for this device.
    pub(super) fn of(batches: Batches, device: &Device) -> Ahead {
        Ahead { batches, device: device.clone(), next: None, waited: Duration::ZERO }
    }

    /// The next batch, and how long it was waited for.
    pub(super) fn take(&mut self) -> (Option<Result<Batch>>, Duration) {
        let since = Instant::now();
        let next = self.next.take().or_else(|| self.batches.next());
        (next, since.elapsed() + std::mem::take(&mut self.waited))
    }

    /// Takes the batch after the one at hand, and sends it: called while the device is busy with that one.
    pub(super) fn look(&mut self) {
        if self.device.gpu().is_none() || self.next.is_some() {
            return;
        }
        let since = Instant::now();
        self.next = self.batches.next();
        if let Some(Ok(batch)) = &mut self.next {
            batch.send(&self.device);
        }
        if self.device.is_idle() {
            // It had nothing to do by the end of that, and may have had nothing from its beginning.
            self.waited = since.elapsed();
        }
    }
}
