//! What a run has written down of itself, and whether it can be believed.

use anyhow::{Context, Result, bail, ensure};
use phalanx::Event;
use std::fs;
use std::path::Path;

/// What `events.jsonl` says of a run.
pub(super) struct Record {
    steps: Vec<u64>,
    pub(super) epochs: usize,
    not_once: Vec<u64>,
    pub(super) memberships: usize,
}

impl Record {
    pub(super) fn read(path: &Path) -> Result<Record> {
        let text = fs::read_to_string(path).with_context(|| path.display().to_string())?;
        let mut record = Record { steps: Vec::new(), epochs: 0, not_once: Vec::new(), memberships: 0 };
        for (number, line) in text.lines().enumerate() {
            let event = serde_json::from_str(line);
            match event.with_context(|| format!("{}, line {}", path.display(), number + 1))? {
                Event::Step { step, .. } => record.steps.push(step),
                Event::Members { .. } => record.memberships += 1,
                Event::Epoch { epoch, each_once, .. } => {
                    record.epochs += 1;
                    record.not_once.extend((each_once != Some(true)).then_some(epoch));
                }
                _ => {}
            }
        }
        Ok(record)
    }

    /// Whether a step was told.
    pub(super) fn has(&self, step: Option<u64>) -> bool {
        step.is_none_or(|step| self.steps.contains(&step))
    }

    /// Fails unless each step was made once, and each epoch used its samples once.
    pub(super) fn check(&self, steps: u64) -> Result<()> {
        if let Some((at, step)) = (0..).zip(&self.steps).find(|(at, step)| at != *step) {
            bail!("step {step} was told where step {at} was due");
        }
        ensure!(self.steps.len() as u64 == steps, "{} steps were told of {steps}", self.steps.len());
        ensure!(self.not_once.is_empty(), "not each sample was used once in epochs {:?}", self.not_once);
        Ok(())
    }
}
