//! Whether a device is well: every operation with its gradients, every update of weights, runs of PyTorch's, two ranks against one under
//! each way to share the work, each way to make a step against the plain one, what GPUs exchange, and how fast it is.
//!
//! Operations are tried at the inputs that the engine's own tests take ([`phalanx_tensor::cases`]), in float32, bfloat16 and float16, against a CPU in
//! float64 from the same numbers. What fails is told and the rest goes on, so one broken kernel doesn't hide another; a device that
//! can't be used at all fails everything from there on, in its own words.

mod exchanges;
mod golden;
mod operations;
mod ranks;
mod rates;
mod updates;

pub use golden::{Golden, Nearness, unit};

use crate::error::Error;
use phalanx_tensor::Device;
use serde::Serialize;
use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};

/// How much is tried.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum Extent {
    /// All of it: a few minutes on a CPU.
    #[default]
    Whole,
    /// Every operation at small sizes, but few steps of the runs, and speeds of small sizes only, which tell little.
    Quick,
}

/// What was found.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(tag = "selftest", rename_all = "lowercase")]
pub enum Finding {
    /// A family of operations, forward and backward.
    Operations {
        /// Which.
        name: String,
        /// The type that the device computed in.
        dtype: String,
        /// How many inputs it was tried at.
        cases: usize,
        /// The largest distance from the right result, relative to the largest of its numbers and 1.
        apart: f64,
        /// What that may be.
        tolerance: f64,
        /// What is wrong, if anything is.
        failure: Option<String>,
    },
    /// A run, held against another one.
    Run {
        /// Which, and against what.
        name: String,
        /// How many steps were made.
        steps: usize,
        /// The largest distance of two losses.
        apart: f64,
        /// What that may be, where it is largest beside it.
        tolerance: f64,
        /// What is wrong, if anything is.
        failure: Option<String>,
    },
    /// What wasn't tried, since something is missing that not every run needs.
    Untried {
        /// What.
        name: String,
        /// What is missing, and what to do.
        why: String,
    },
    /// How fast something is.
    Rate {
        /// What.
        name: &'static str,
        /// Of which size.
        size: String,
        /// So much in each second.
        value: f64,
        /// Of what.
        unit: &'static str,
    },
}

impl Finding {
    /// What is wrong, if anything is.
    pub fn failure(&self) -> Option<&str> {
        match self {
            Finding::Operations { failure, .. } | Finding::Run { failure, .. } => failure.as_deref(),
            Finding::Untried { .. } | Finding::Rate { .. } => None,
        }
    }
}

/// Opens the device for one of so many ranks; each has a handle of its own.
pub type Open<'a> = &'a (dyn Fn(usize) -> Result<Device, Error> + Sync);

/// Tries a device, and tells each finding when it is there. Fails only where the device can't be opened.
pub fn selftest(open: Open<'_>, extent: Extent, tell: &mut dyn FnMut(Finding)) -> Result<(), Error> {
    let device = open(1)?;
    operations::all(&device, extent, tell);
    updates::all(&device, tell);
    exchanges::all(&device, tell);
    golden_runs(open, extent, tell);
    ranks::equality(open, extent, device.gpu().is_some(), tell);
    rates::all(&device, extent, tell);
    Ok(())
}

/// PyTorch's runs.
fn golden_runs(open: Open<'_>, extent: Extent, tell: &mut dyn FnMut(Finding)) {
    const SMALL: usize = 3;
    let (runs, most) = match extent {
        Extent::Whole => (usize::MAX, usize::MAX),
        Extent::Quick => (SMALL, 2),
    };
    for golden in Golden::all().iter().take(runs) {
        let steps = golden.steps().min(most);
        let (nearness, failure) = match sheltered(|| golden.run(1, steps, open)) {
            Ok(Ok(nearness)) => (nearness, nearness.failure()),
            Ok(Err(error)) => (Nearness::default(), Some(error.to_string())),
            Err(words) => (Nearness::default(), Some(words)),
        };
        let Nearness { apart, bound: tolerance, .. } = nearness;
        tell(Finding::Run {
            name: format!("{}, against PyTorch", golden.name),
            steps,
            apart,
            tolerance,
            failure,
        });
    }
}

/// The largest distance of two of these; infinite where one is no number, or where there are more or fewer than there should be.
fn apart<T: Copy + Into<f64>>(got: &[T], want: &[T]) -> f64 {
    let of_two = |(&got, &want): (&T, &T)| {
        let apart = (got.into() - want.into()).abs();
        if apart.is_nan() { f64::INFINITY } else { apart }
    };
    if got.len() != want.len() {
        return f64::INFINITY;
    }
    got.iter().zip(want).map(of_two).fold(0.0, f64::max)
}

/// What `f` gives, or the words of the panic that it ends in: operations on a device that fails have no other way to say so.
fn sheltered<T>(f: impl FnOnce() -> T) -> Result<T, String> {
    catch_unwind(AssertUnwindSafe(f)).map_err(words)
}

fn words(panic: Box<dyn Any + Send>) -> String {
    let text = panic.downcast_ref::<String>().cloned();
    text.or_else(|| panic.downcast_ref::<&str>().map(|text| (*text).to_owned()))
        .unwrap_or_else(|| "it panicked".to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_no_number_or_is_missing_is_near_nothing() {
        assert_eq!(apart(&[1.0f32, 2.0], &[1.0, 1.5]), 0.5);
        for (got, want) in
            [(&[f64::NAN, 1.0][..], &[1.0, 1.0][..]), (&[1.0], &[f64::NAN]), (&[1.0], &[1.0, 1.0])]
        {
            assert_eq!(apart(got, want), f64::INFINITY, "{got:?}, {want:?}");
        }
    }
}
