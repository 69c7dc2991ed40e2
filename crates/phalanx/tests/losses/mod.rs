//! The losses of a run, for tests that hold them against others.

use phalanx::{Event, Observer};

/// That of every step that was told.
#[derive(Default)]
pub(crate) struct Losses(pub(crate) Vec<f64>);

impl Observer for Losses {
    fn event(&mut self, event: &Event) {
        if let Event::Step { loss, .. } = event {
            self.0.push(*loss);
        }
    }
}
