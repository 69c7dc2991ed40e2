//! Parameters that an optimizer treats in their own way: PyTorch's parameter groups, as ranges of the arena.

use super::rested::Rested;
use crate::parameters::Parameters;
use phalanx_tensor::Shape;
use std::ops::Range;
use thiserror::Error;

/// What is different for some parameters. Of several groups that a parameter would belong to, the first one has it.
///
/// ```
/// use phalanx_nn::optim::{Group, Members, Optimizer, Sgd};
/// use phalanx_nn::{Linear, Parameters};
/// use phalanx_tensor::Device;
///
/// let parameters = Parameters::build(&mut Linear::new(1, 1), &Device::cpu(1), 0);
/// let mut optimizer = Optimizer::new(Sgd { weight_decay: 0.5, ..Sgd::new(1.0) })?;
/// optimizer.group(&[Group { of: Members::NormsAndBiases, lr: 1.0, weight_decay: 0.0 }], &parameters)?;
/// (0..2).for_each(|i| parameters.value(i).fill(1.0));
/// let grads = vec![0.0; parameters.layout().len()];
/// optimizer.step(&mut parameters.values().flat_mut::<f32>(), &grads, 1.0);
/// assert_eq!([0, 1].map(|i| parameters.value(i).item()), [0.5, 1.0]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Debug, PartialEq)]
pub struct Group {
    /// Which parameters.
    pub of: Members,
    /// The factor on the rule's learning rate.
    pub lr: f64,
    /// The factor on the rule's weight decay.
    pub weight_decay: f64,
}

/// Which parameters a group has.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Members {
    /// Those of at most one dimension: biases, and the weights of normalisations.
    NormsAndBiases,
    /// Those with this name, in which `*` stands for any characters: `fc.*`, `*.bias`.
    Named(String),
}

impl Members {
    fn have(&self, name: &str, shape: &Shape) -> bool {
        match self {
            Members::NormsAndBiases => shape.n_dims() <= 1,
            Members::Named(pattern) => matches(pattern, name),
        }
    }
}

/// Whether `name` is what `pattern` says: the first piece is how it begins, the last how it ends, and the others lie between
/// in their order.
pub(crate) fn matches(pattern: &str, name: &str) -> bool {
    let Some((first, rest)) = pattern.split_once('*') else { return pattern == name };
    let Some(mut name) = name.strip_prefix(first) else { return false };
    let mut pieces = rest.split('*').peekable();
    while let Some(piece) = pieces.next() {
        if pieces.peek().is_none() {
            return name.ends_with(piece);
        }
        let Some(at) = name.find(piece) else { return false };
        name = &name[at + piece.len()..];
    }
    unreachable!("splitting gives a piece at least")
}

/// A group that can't be made.
#[derive(Clone, Debug, PartialEq, Error)]
pub enum BadGroup {
    /// Most likely its name is wrong.
    #[error("no parameter is named {pattern}\nhint: the model's parameters are {names}")]
    Empty {
        /// What was looked for.
        pattern: String,
        /// What there is.
        names: String,
    },
    /// A factor that makes no sense.
    #[error("the factor on {of} of a group is {value}: must be a number of at least 0")]
    Factor {
        /// `lr` or `weight_decay`.
        of: &'static str,
        /// What it was set to.
        value: f64,
    },
}

/// The factors on what a rule says.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Factors {
    pub(super) lr: f64,
    pub(super) weight_decay: f64,
}

impl Factors {
    pub(super) const NONE: Factors = Factors { lr: 1.0, weight_decay: 1.0 };
}

/// Whether a model of these parameters has what the groups are of, and their factors are some.
pub(super) fn check(groups: &[Group], parameters: &Parameters) -> Result<(), BadGroup> {
    for group in groups {
        for (of, value) in [("lr", group.lr), ("weight_decay", group.weight_decay)] {
            if !(value >= 0.0 && value.is_finite()) {
                return Err(BadGroup::Factor { of, value });
            }
        }
        let names = parameters.names();
        if let Members::Named(pattern) = &group.of
            && !names.iter().any(|name| matches(pattern, name))
        {
            return Err(BadGroup::Empty { pattern: pattern.clone(), names: names.join(", ") });
        }
    }
    Ok(())
}

/// Some of the values that move, one behind the other, and how they do.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Alike {
    pub(super) range: Range<usize>,
    pub(super) factors: Factors,
    /// Steps of the optimizer that they were left out of.
    pub(super) rested: u64,
}

impl Alike {
    /// All values, where nothing is special about any.
    pub(super) const ALL: [Alike; 1] = [Alike { range: 0..usize::MAX, factors: Factors::NONE, rested: 0 }];
}

/// What the groups say of the parameters that move, with where they lie, in order.
pub(super) fn moving<'a>(
    groups: &'a [Group],
    parameters: &'a Parameters,
) -> impl Iterator<Item = (&'a str, Range<usize>, Factors)> {
    let names = parameters.names().iter().enumerate().filter(|(i, _)| !parameters.is_frozen(*i));
    names.map(move |(i, name)| {
        let group = groups.iter().find(|group| group.of.have(name, parameters.layout().shape(i)));
        let factors = group.map_or(Factors::NONE, |g| Factors { lr: g.lr, weight_decay: g.weight_decay });
        (name.as_str(), parameters.layout().span(i..i + 1), factors)
    })
}

/// The arena in order, cut where neighbours move in other ways: as few ranges as can be, since each is a pass of its own.
pub(super) fn ranges<'a>(
    moving: impl Iterator<Item = (&'a str, Range<usize>, Factors)>,
    rested: &Rested,
) -> Vec<Alike> {
    let mut ranges: Vec<Alike> = Vec::new();
    for (name, span, factors) in moving {
        let rested = rested.get(name).copied().unwrap_or(0);
        match ranges.last_mut() {
            Some(last) if (last.factors, last.rested, last.range.end) == (factors, rested, span.start) => {
                last.range.end = span.end;
            }
            _ => ranges.push(Alike { range: span, factors, rested }),
        }
    }
    ranges
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Linear, Sequential};
    use phalanx_tensor::Device;

    #[test]
    fn a_star_stands_for_anything() {
        let rows = [
            ("fc.bias", "fc.bias", true),
            ("fc.bias", "fc.bias2", false),
            ("fc.*", "fc.bias", true),
            ("fc.*", "xfc.bias", false),
            ("*.bias", "fc.bias", true),
            ("*.bias", "fc.weight", false),
            ("layer*.bn?.*", "layer1.0.bn1.weight", false),
            ("layer*.bn*.weight", "layer1.0.bn1.weight", true),
            ("a*a", "a", false),
            ("*ab*ab", "ab", false),
            ("*", "", true),
            ("", "x", false),
        ];
        for (pattern, name, want) in rows {
            assert_eq!(matches(pattern, name), want, "{pattern} {name}");
        }
    }

    #[test]
    fn neighbours_of_one_group_are_one_range() {
        let mut net =
            Sequential::new().then(Linear::new(2, 2)).then(Linear::new(2, 2)).then(Linear::new(2, 2));
        let parameters = Parameters::build(&mut net, &Device::cpu(1), 0);
        let check = |groups: &[(&str, f64)], want: &[(Range<usize>, f64)]| {
            let group = |(pattern, lr): &(&str, f64)| {
                let of = Members::Named((*pattern).to_owned());
                Group { of, lr: *lr, weight_decay: 1.0 }
            };
            let groups: Vec<Group> = groups.iter().map(group).collect();
            let got = ranges(moving(&groups, &parameters), &Rested::new());
            // Each parameter takes a cache line of 16 or a multiple.
            let line = parameters.layout().span(0..1).len();
            let lines = |it: Alike| (it.range.start / line..it.range.end / line, it.factors.lr);
            let got: Vec<_> = got.into_iter().map(lines).collect();
            assert_eq!(got, want);
        };
        check(&[], &[(0..6, 1.0)]);
        check(&[("1.*", 2.0)], &[(0..2, 1.0), (2..4, 2.0), (4..6, 1.0)]);
        check(&[("0.bias", 2.0), ("*", 3.0)], &[(0..1, 3.0), (1..2, 2.0), (2..6, 3.0)]);
        check(&[("2.*", 1.0)], &[(0..6, 1.0)]);
    }

    #[test]
    fn groups_that_make_no_sense_are_named() {
        let parameters = Parameters::build(&mut Linear::new(2, 2), &Device::cpu(1), 0);
        let error = |pattern: &str, lr| {
            let group = Group { of: Members::Named(pattern.into()), lr, weight_decay: 1.0 };
            check(&[group], &parameters).unwrap_err().to_string()
        };
        assert_eq!(
            error("fc.*", 1.0),
            "no parameter is named fc.*\nhint: the model's parameters are weight, bias"
        );
        assert!(error("weight", f64::NAN).contains("the factor on lr of a group is NaN"));
    }
}
