//! The update rules.

use super::groups::Factors;
use thiserror::Error;

/// The most arrays that a rule keeps: see [`Rule::state_names`].
pub(super) const MAX_STATES: usize = 3;

/// A setting of an optimizer that makes no sense.
#[derive(Clone, Debug, PartialEq, Error)]
#[error("optimizer.{field} is {value}: must be {want}")]
pub struct BadValue {
    /// Which setting.
    pub field: &'static str,
    /// What it was set to.
    pub value: f64,
    /// What it may be.
    pub want: &'static str,
}

/// Stochastic gradient descent.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sgd {
    /// Learning rate.
    pub lr: f64,
    /// Share of the last direction that is kept. Default 0.
    pub momentum: f64,
    /// How much of a gradient doesn't enter the momentum. Default 0.
    pub dampening: f64,
    /// Whether to look ahead along the momentum. Default false.
    pub nesterov: bool,
    /// L2 penalty, added to the gradient. Default 0.
    pub weight_decay: f64,
}

impl Sgd {
    /// Plain descent with this learning rate.
    pub const fn new(lr: f64) -> Sgd {
        Sgd { lr, momentum: 0.0, dampening: 0.0, nesterov: false, weight_decay: 0.0 }
    }
}

/// Adam, with weight decay as an L2 penalty.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Adam {
    /// Learning rate. Default 0.001.
    pub lr: f64,
    /// Decay of the two running means. Default (0.9, 0.999).
    pub betas: (f64, f64),
    /// Added to the root of the second. Default 1e-8.
    pub eps: f64,
    /// L2 penalty, added to the gradient. Default 0.
    pub weight_decay: f64,
}

impl Default for Adam {
    fn default() -> Adam {
        Adam { lr: 0.001, betas: (0.9, 0.999), eps: 1e-8, weight_decay: 0.0 }
    }
}

/// Adam, with weight decay apart from the gradient.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AdamW {
    /// Learning rate. Default 0.001.
    pub lr: f64,
    /// Decay of the two running means. Default (0.9, 0.999).
    pub betas: (f64, f64),
    /// Added to the root of the second. Default 1e-8.
    pub eps: f64,
    /// How much of a value is taken away each step, times the learning rate. Default 0.01.
    pub weight_decay: f64,
}

impl Default for AdamW {
    fn default() -> AdamW {
        AdamW { lr: 0.001, betas: (0.9, 0.999), eps: 1e-8, weight_decay: 0.01 }
    }
}

/// Adadelta.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Adadelta {
    /// Learning rate. Default 1.
    pub lr: f64,
    /// Decay of the running means. Default 0.9.
    pub rho: f64,
    /// Added under the roots. Default 1e-6.
    pub eps: f64,
    /// L2 penalty, added to the gradient. Default 0.
    pub weight_decay: f64,
}

impl Default for Adadelta {
    fn default() -> Adadelta {
        Adadelta { lr: 1.0, rho: 0.9, eps: 1e-6, weight_decay: 0.0 }
    }
}

/// RMSprop.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RmsProp {
    /// Learning rate. Default 0.01.
    pub lr: f64,
    /// Decay of the running mean. Default 0.99.
    pub alpha: f64,
    /// Added to the root. Default 1e-8.
    pub eps: f64,
    /// Share of the last direction that is kept. Default 0.
    pub momentum: f64,
    /// Whether to divide by an estimate of the standard deviation. Default false.
    pub centered: bool,
    /// L2 penalty, added to the gradient. Default 0.
    pub weight_decay: f64,
}

impl Default for RmsProp {
    fn default() -> RmsProp {
        RmsProp { lr: 0.01, alpha: 0.99, eps: 1e-8, momentum: 0.0, centered: false, weight_decay: 0.0 }
    }
}

/// Any of the rules.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Rule {
    /// See [`Sgd`].
    Sgd(Sgd),
    /// See [`Adam`].
    Adam(Adam),
    /// See [`AdamW`].
    AdamW(AdamW),
    /// See [`Adadelta`].
    Adadelta(Adadelta),
    /// See [`RmsProp`].
    RmsProp(RmsProp),
}

/// One row a rule.
macro_rules! into_rule {
    ($($name:ident)*) => {$(
        impl From<$name> for Rule {
            fn from(rule: $name) -> Rule {
                Rule::$name(rule)
            }
        }
    )*};
}
into_rule!(Sgd Adam AdamW Adadelta RmsProp);

impl Rule {
    /// The learning rate before any schedule.
    pub fn lr(&self) -> f64 {
        match self {
            Rule::Sgd(r) => r.lr,
            Rule::Adam(r) => r.lr,
            Rule::AdamW(r) => r.lr,
            Rule::Adadelta(r) => r.lr,
            Rule::RmsProp(r) => r.lr,
        }
    }

    /// What the rule remembers of each value, under PyTorch's names.
    pub fn state_names(&self) -> &'static [&'static str] {
        match self {
            Rule::Sgd(r) if r.momentum == 0.0 => &[],
            Rule::Sgd(_) => &["momentum_buffer"],
            Rule::Adam(_) | Rule::AdamW(_) => &["exp_avg", "exp_avg_sq"],
            Rule::Adadelta(_) => &["square_avg", "acc_delta"],
            Rule::RmsProp(r) => match (r.momentum > 0.0, r.centered) {
                (false, false) => &["square_avg"],
                (true, false) => &["square_avg", "momentum_buffer"],
                (false, true) => &["square_avg", "grad_avg"],
                (true, true) => &["square_avg", "momentum_buffer", "grad_avg"],
            },
        }
    }

    pub(super) fn check(&self) -> Result<(), BadValue> {
        let at_least_0 = |field, value: f64| {
            let ok = value >= 0.0 && value.is_finite();
            if ok { Ok(()) } else { Err(BadValue { field, value, want: "a number of at least 0" }) }
        };
        let share = |field, value: f64| {
            if (0.0..1.0).contains(&value) {
                Ok(())
            } else {
                Err(BadValue { field, value, want: "in [0, 1)" })
            }
        };
        at_least_0("lr", self.lr())?;
        match self {
            Rule::Sgd(r) => {
                at_least_0("momentum", r.momentum)?;
                at_least_0("weight_decay", r.weight_decay)?;
                // PyTorch takes any dampening, so a negative one passes here too.
                if !r.dampening.is_finite() {
                    return Err(BadValue { field: "dampening", value: r.dampening, want: "a number" });
                }
                if r.nesterov && (r.momentum == 0.0 || r.dampening != 0.0) {
                    let (field, value) =
                        if r.momentum == 0.0 { ("momentum", 0.0) } else { ("dampening", r.dampening) };
                    return Err(BadValue {
                        field,
                        value,
                        want: "above 0 for momentum and 0 for dampening under nesterov",
                    });
                }
                Ok(())
            }
            Rule::Adam(Adam { betas, eps, weight_decay, .. })
            | Rule::AdamW(AdamW { betas, eps, weight_decay, .. }) => {
                share("betas", betas.0)?;
                share("betas", betas.1)?;
                at_least_0("eps", *eps)?;
                at_least_0("weight_decay", *weight_decay)
            }
            Rule::Adadelta(r) => {
                share("rho", r.rho)?;
                at_least_0("eps", r.eps)?;
                at_least_0("weight_decay", r.weight_decay)
            }
            Rule::RmsProp(r) => {
                share("alpha", r.alpha)?;
                at_least_0("eps", r.eps)?;
                at_least_0("momentum", r.momentum)?;
                at_least_0("weight_decay", r.weight_decay)
            }
        }
    }

    /// Step number `steps` (from 1) of values that are a group, with what `state` keeps of them under each of the names of
    /// [`Rule::state_names`]. As in PyTorch, what is left of 1 is told in double precision and then rounded.
    pub(super) fn apply(
        &self,
        values: &mut [f32],
        grads: &[f32],
        state: [&mut [f32]; MAX_STATES],
        steps: u64,
        factor: f64,
        group: Factors,
    ) {
        let lr = self.lr() * factor * group.lr;
        let pairs = values.iter_mut().zip(grads);
        let [first, second, third] = state;
        let decay = |weight_decay: f64| (weight_decay * group.weight_decay) as f32;
        match self {
            Rule::Sgd(r) => {
                let (lr, momentum, decay) = (lr as f32, r.momentum as f32, decay(r.weight_decay));
                if r.momentum == 0.0 {
                    return pairs.for_each(|(p, &g)| *p -= lr * (g + decay * *p));
                }
                // The first gradient enters the momentum undampened.
                let share = if steps == 1 { 1.0 } else { (1.0 - r.dampening) as f32 };
                if r.nesterov {
                    pairs.zip(first).for_each(|((p, &g), d)| {
                        let g = g + decay * *p;
                        *d = momentum * *d + share * g;
                        *p -= lr * (g + momentum * *d);
                    });
                } else {
                    pairs.zip(first).for_each(|((p, &g), d)| {
                        *d = momentum * *d + share * (g + decay * *p);
                        *p -= lr * *d;
                    });
                }
            }
            Rule::Adam(r) => {
                let decay = decay(r.weight_decay);
                adam(pairs, [first, second], r.betas, r.eps, steps, lr as f32, |p, g| (p, g + decay * p));
            }
            Rule::AdamW(r) => {
                let keep = (1.0 - lr * r.weight_decay * group.weight_decay) as f32;
                adam(pairs, [first, second], r.betas, r.eps, steps, lr as f32, |p, g| (p * keep, g));
            }
            Rule::Adadelta(r) => {
                let (rho, share) = (r.rho as f32, (1.0 - r.rho) as f32);
                let (lr, eps, decay) = (lr as f32, r.eps as f32, decay(r.weight_decay));
                pairs.zip(first.iter_mut().zip(second)).for_each(|((p, &g), (square, moved))| {
                    let g = g + decay * *p;
                    *square = rho * *square + share * g * g;
                    let delta = (*moved + eps).sqrt() / (*square + eps).sqrt() * g;
                    *moved = rho * *moved + share * delta * delta;
                    *p -= lr * delta;
                });
            }
            Rule::RmsProp(r) => {
                let (alpha, share, eps) = (r.alpha as f32, (1.0 - r.alpha) as f32, r.eps as f32);
                let (lr, momentum, decay) = (lr as f32, r.momentum as f32, decay(r.weight_decay));
                let (mut buffer, mut mean) = match (r.momentum > 0.0, r.centered) {
                    (false, false) => (None, None),
                    (false, true) => (None, Some(second)),
                    (true, false) => (Some(second), None),
                    (true, true) => (Some(second), Some(third)),
                };
                for (i, ((p, &g), square)) in pairs.zip(first).enumerate() {
                    let g = g + decay * *p;
                    *square = alpha * *square + share * g * g;
                    let variance = match &mut mean {
                        Some(mean) => {
                            mean[i] += share * (g - mean[i]);
                            *square - mean[i] * mean[i]
                        }
                        None => *square,
                    };
                    let scaled = g / (variance.sqrt() + eps);
                    *p -= lr
                        * match &mut buffer {
                            Some(buffer) => {
                                buffer[i] = momentum * buffer[i] + scaled;
                                buffer[i]
                            }
                            None => scaled,
                        };
                }
            }
        }
    }
}

/// The step that Adam and AdamW share; `decayed` applies weight decay to a value and its gradient.
fn adam<'a>(
    pairs: impl Iterator<Item = (&'a mut f32, &'a f32)>,
    [mean, square]: [&mut [f32]; 2],
    betas: (f64, f64),
    eps: f64,
    steps: u64,
    lr: f32,
    decayed: impl Fn(f32, f32) -> (f32, f32),
) {
    // After so many steps nothing is left to correct.
    let steps = i32::try_from(steps).unwrap_or(i32::MAX);
    let (b1, b2, eps) = (betas.0 as f32, betas.1 as f32, eps as f32);
    let lr = lr / (1.0 - betas.0.powi(steps)) as f32;
    let root = ((1.0 - betas.1.powi(steps)).sqrt()) as f32;
    let (keep1, keep2) = ((1.0 - betas.0) as f32, (1.0 - betas.1) as f32);
    pairs.zip(mean.iter_mut().zip(square)).for_each(|((p, &g), (mean, square))| {
        let (value, g) = decayed(*p, g);
        *mean = b1 * *mean + keep1 * g;
        *square = b2 * *square + keep2 * g * g;
        *p = value - lr * *mean / (square.sqrt() / root + eps);
    });
}
