//! Learning rate schedules: pure functions of where in a run a step lies. What follows evaluations instead is a
//! [`crate::Plateau`].

/// Where in a run a step lies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Moment {
    /// The number of the step, from 0.
    pub step: u64,
    /// How many steps an epoch has.
    pub steps_per_epoch: u64,
    /// How many epochs the run is to have. A run that ends early for another reason follows the same curve.
    pub epochs: u64,
}

/// The factor on the optimizer's learning rate: a curve, after a warm-up.
///
/// All lengths are in epochs, which mean the same whatever the batch size and the number of workers; a part of an epoch counts
/// for its steps. A warm-up may be so many steps, too. The curve begins when the warm-up ends and counts from there, as under PyTorch's `SequentialLR`.
///
/// ```
/// use phalanx_nn::{Curve, Moment, Schedule, Unit, Warmup};
///
/// let halving = Schedule::from(Curve::Step { size: 2.0, gamma: 0.5 });
/// let factor = |schedule: &Schedule, epoch: u64| {
///     schedule.factor(Moment { step: 100 * epoch, steps_per_epoch: 100, epochs: 10 })
/// };
/// assert_eq!([0, 1, 2, 3, 4].map(|epoch| factor(&halving, epoch)), [1.0, 1.0, 0.5, 0.5, 0.25]);
/// let warmup = Warmup { epochs: 4.0, from: 0.0, ..Warmup::default() };
/// let cosine = Schedule { warmup, ..Curve::Cosine { floor: 0.0, epochs: None }.into() };
/// assert_eq!([0, 1, 4, 10].map(|epoch| factor(&cosine, epoch)), [0.0, 0.25, 1.0, 0.0]);
/// ```
#[derive(Clone, Debug, PartialEq, Default)]
pub struct Schedule {
    /// What the factor does after the warm-up. Default: it stays 1.
    pub curve: Curve,
    /// How often the factor changes. Default: every step.
    pub by: Unit,
    /// How a run starts. Default: at once.
    pub warmup: Warmup,
}

impl From<Curve> for Schedule {
    fn from(curve: Curve) -> Schedule {
        Schedule { curve, ..Schedule::default() }
    }
}

/// How often a factor changes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum Unit {
    /// Every step has its own factor.
    #[default]
    Step,
    /// All steps of an epoch have one.
    Epoch,
}

/// A straight line from a share of the learning rate to all of it, as PyTorch's `LinearLR`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Warmup {
    /// How long it takes, in epochs. Default 0: there is none.
    pub epochs: f64,
    /// How many steps it takes beside that. Default 0. Where factors change by epochs it ends with the epoch in which these end.
    pub steps: u64,
    /// The factor of the first step. Default 1/3, as PyTorch has it.
    pub from: f64,
}

impl Default for Warmup {
    fn default() -> Warmup {
        Warmup { epochs: 0.0, steps: 0, from: 1.0 / 3.0 }
    }
}

/// How a factor goes on after the warm-up.
#[derive(Clone, Debug, PartialEq, Default)]
pub enum Curve {
    /// Always 1.
    #[default]
    Constant,
    /// Multiplied by `gamma` after every `size` epochs: `StepLR`.
    Step {
        /// Epochs from one change to the next.
        size: f64,
        /// The factor of each change.
        gamma: f64,
    },
    /// Multiplied by `gamma` at each of the milestones: `MultiStepLR`.
    MultiStep {
        /// Epochs before each change.
        milestones: Vec<f64>,
        /// The factor of each change.
        gamma: f64,
    },
    /// Half a cosine from 1 down to `floor`, where it stays (PyTorch's `CosineAnnealingLR` would rise again).
    Cosine {
        /// The last factor.
        floor: f64,
        /// How long it takes: all epochs after the warm-up, unless said.
        epochs: Option<f64>,
    },
    /// A straight line from 1 down to `floor`, where it stays: `LinearLR` downwards.
    Linear {
        /// The last factor.
        floor: f64,
        /// How long it takes: all epochs after the warm-up, unless said.
        epochs: Option<f64>,
    },
    /// The root of how many times as long as the warm-up it has taken so far, warm-up included, below 1: Vaswani et al., "Attention Is All
    /// You Need", 2017. Without a warm-up, as after one of a step.
    InverseSqrt,
    /// Up to 1 and then down to almost nothing: `OneCycleLR` in two phases. PyTorch's moves the momentum the other way, unless
    /// told not to; here the momentum stays as it is.
    OneCycle(OneCycle),
}

/// See [`Curve::OneCycle`].
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct OneCycle {
    /// How long it takes: all epochs after the warm-up (which it hardly needs), unless said.
    pub epochs: Option<f64>,
    /// The share of it that goes up. Default 0.3.
    pub pct_start: f64,
    /// The first factor is 1 divided by this. Default 25.
    pub div_factor: f64,
    /// The last factor is the first one divided by this. Default 10,000.
    pub final_div_factor: f64,
    /// The way between. Default: half a cosine.
    pub anneal: Anneal,
}

impl Default for OneCycle {
    fn default() -> OneCycle {
        OneCycle {
            epochs: None,
            pct_start: 0.3,
            div_factor: 25.0,
            final_div_factor: 1e4,
            anneal: Anneal::Cosine,
        }
    }
}

/// How one factor becomes another.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum Anneal {
    /// Along half a cosine.
    #[default]
    Cosine,
    /// Along a straight line.
    Linear,
}

impl Anneal {
    /// What lies between `from` and `to` after this share of the way.
    fn between(self, from: f64, to: f64, share: f64) -> f64 {
        match self {
            Anneal::Cosine => to + (from - to) / 2.0 * (1.0 + (std::f64::consts::PI * share).cos()),
            Anneal::Linear => from + (to - from) * share,
        }
    }
}

impl Schedule {
    /// The factor of the step at `at`.
    pub fn factor(&self, at: Moment) -> f64 {
        let per_epoch = at.steps_per_epoch.max(1);
        let (now, units_per_epoch) = match self.by {
            Unit::Step => (at.step, per_epoch as f64),
            Unit::Epoch => (at.step / per_epoch, 1.0),
        };
        let units = |epochs: f64| (epochs * units_per_epoch).round() as u64;
        let steps_of_unit = if self.by == Unit::Step { 1 } else { per_epoch };
        let warmup = units(self.warmup.epochs) + self.warmup.steps.div_ceil(steps_of_unit);
        if now < warmup {
            return Anneal::Linear.between(self.warmup.from, 1.0, now as f64 / warmup as f64);
        }
        let left = units(at.epochs as f64).saturating_sub(warmup);
        self.curve.factor(now - warmup, [warmup, left], units_per_epoch, units)
    }
}

/// What a quotient may lack of the whole number that it is.
const ROUNDING: f64 = 1e-9;

impl Curve {
    /// The factor after `now` of the `left` units of time that are left after those of the warm-up.
    fn factor(
        &self,
        now: u64,
        [warmup, left]: [u64; 2],
        units_per_epoch: f64,
        units: impl Fn(f64) -> u64,
    ) -> f64 {
        let line = |anneal: Anneal, floor: f64, epochs: Option<f64>| {
            let all = epochs.map_or(left, &units).max(1);
            anneal.between(1.0, floor, now.min(all) as f64 / all as f64)
        };
        match self {
            Curve::Constant => 1.0,
            // Part of a unit isn't rounded away: it comes up with every change.
            Curve::Step { size, gamma } => {
                let unit = Some(size * units_per_epoch).filter(|unit| *unit > 0.0).unwrap_or(1.0);
                gamma.powf((now as f64 / unit + ROUNDING).floor())
            }
            Curve::MultiStep { milestones, gamma } => {
                gamma.powf(milestones.iter().filter(|&&epochs| units(epochs) <= now).count() as f64)
            }
            Curve::Cosine { floor, epochs } => line(Anneal::Cosine, *floor, *epochs),
            Curve::Linear { floor, epochs } => line(Anneal::Linear, *floor, *epochs),
            Curve::InverseSqrt => {
                let warmup = warmup.max(1);
                (warmup as f64 / warmup.saturating_add(now) as f64).sqrt()
            }
            Curve::OneCycle(cycle) => cycle.factor(now, cycle.epochs.map_or(left, units)),
        }
    }
}

impl OneCycle {
    /// The factor after `now` of `all` units of time. As in PyTorch, the top is reached one unit early, and the end with the
    /// last unit.
    fn factor(&self, now: u64, all: u64) -> f64 {
        let (first, now) = (1.0 / self.div_factor, now as f64);
        let (top, end) = (self.pct_start * all as f64 - 1.0, all as f64 - 1.0);
        let share = |from: f64, to: f64| if to > from { ((now - from) / (to - from)).min(1.0) } else { 1.0 };
        if now <= top {
            self.anneal.between(first, 1.0, share(0.0, top))
        } else {
            self.anneal.between(1.0, first / self.final_div_factor, share(top, end))
        }
    }
}
