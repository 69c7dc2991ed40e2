//! Parameters that training leaves as they are.

use crate::module::{Module, Role, Visitor};
use crate::optim::matches;
use thiserror::Error;

/// As many names as somebody reads who has mistaken one.
const TOLD: usize = 12;

/// Parameters that can't be frozen.
#[derive(Clone, Debug, PartialEq, Error)]
pub enum BadFreeze {
    /// Most likely the name is wrong.
    #[error("no parameter is named {pattern}\nhint: the model's parameters are {names}")]
    NoneNamed {
        /// What was looked for.
        pattern: String,
        /// What there is.
        names: String,
    },
    /// A run would change nothing.
    #[error(
        "nothing of the model would be learned: all {parameters} parameters are frozen\nhint: leave the last layers out"
    )]
    All {
        /// How many there are.
        parameters: usize,
    },
}

/// Freezes the parameters of a model with these names, in which `*` stands for any characters, before it is laid out
/// ([`crate::Parameters::build`]): they have values, and no gradient is made of them, nor of anything that only they need; but
/// for a pipeline, whose stages go backward through the ones before whatever these learn. In 16 bits they are cast anew in each pass, where
/// what learns is cast once a step. An optimizer
/// that [`crate::optim::Optimizer::group`] was told of them leaves them alone, also where it decays weights. Buffers such as the running
/// statistics of a batch norm follow the samples all the same, as in PyTorch.
///
/// # Errors
/// A name fits no parameter, or together they fit all; nothing is frozen then.
///
/// ```
/// use phalanx_nn::{Linear, Parameters, Sequential, freeze};
/// use phalanx_tensor::Device;
///
/// let mut net = Sequential::new().then(Linear::new(2, 2)).then(Linear::new(2, 1));
/// freeze(&mut net, &["0.*"])?;
/// let parameters = Parameters::build(&mut net, &Device::cpu(1), 0);
/// assert_eq!([0, 1, 2, 3].map(|i| parameters.is_frozen(i)), [true, true, false, false]);
/// # Ok::<(), phalanx_nn::BadFreeze>(())
/// ```
pub fn freeze(model: &mut dyn Module, patterns: &[impl AsRef<str>]) -> Result<(), BadFreeze> {
    let mut names = Vec::new();
    model.visit(&mut Visitor::new(&mut |name, role, _| {
        if role == Role::Learned {
            names.push(name.to_owned());
        }
    }));
    let fits = |name: &str| patterns.iter().any(|pattern| matches(pattern.as_ref(), name));
    // Enough to see how they are named.
    let told = |names: &[String]| match names.len().checked_sub(TOLD) {
        None | Some(0) => names.join(", "),
        Some(more) => format!("{} and {more} more", names[..TOLD].join(", ")),
    };
    for pattern in patterns.iter().map(AsRef::as_ref) {
        if !names.iter().any(|name| matches(pattern, name)) {
            return Err(BadFreeze::NoneNamed { pattern: pattern.to_owned(), names: told(&names) });
        }
    }
    if !patterns.is_empty() && names.iter().all(|name| fits(name)) {
        return Err(BadFreeze::All { parameters: names.len() });
    }
    model.visit(&mut Visitor::new(&mut |name, role, param| {
        param.frozen |= role == Role::Learned && fits(name)
    }));
    Ok(())
}

/// Has training leave all of a model as it is: of one that others learn by, as a teacher's or a critic's, whose losses they go through.
///
/// ```
/// use phalanx_nn::{Linear, Parameters, freeze_all};
/// use phalanx_tensor::Device;
///
/// let mut teacher = Linear::new(2, 1);
/// freeze_all(&mut teacher);
/// assert!(Parameters::build(&mut teacher, &Device::cpu(1), 0).is_frozen(0));
/// ```
pub fn freeze_all(model: &mut dyn Module) {
    model.visit(&mut Visitor::new(&mut |_, role, param| param.frozen |= role == Role::Learned));
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::optim::{AdamW, Optimizer};
    use crate::{Ctx, Linear, Parameters, Sequential};
    use phalanx_tensor::{DType, Device, Keep, Tensor};

    fn net() -> Sequential {
        Sequential::new().then(Linear::new(3, 2)).then(Linear::new(2, 2)).then(Linear::new(2, 1))
    }

    #[test]
    fn what_is_frozen_gets_no_gradient_and_does_not_move() {
        let mut net = net();
        freeze(&mut net, &["0.*", "1.bias"]).unwrap();
        let device = Device::cpu(1);
        let parameters = Parameters::build(&mut net, &device, 0);
        let mut optimizer = Optimizer::new(AdamW { weight_decay: 0.5, ..AdamW::default() }).unwrap();
        optimizer.group(&[], &parameters).unwrap();
        let before = parameters.to_weights();
        for _ in 0..2 {
            parameters.grads().zero();
            let x = Tensor::ones(&device, [4, 3], DType::F32);
            net.forward(&x, &mut Ctx::eval()).sum(&[0, 1], Keep::No).backward();
            assert_eq!(parameters.grads().made(), [2, 4, 5]);
            parameters.grads().settle();
            optimizer.step_arenas(parameters.values(), parameters.grads().arena(), 1.0);
        }
        let after = parameters.to_weights();
        for (name, stays) in [("0.weight", true), ("0.bias", true), ("1.weight", false), ("1.bias", true)] {
            assert_eq!(before.get(name) == after.get(name), stays, "{name}");
        }
        let moments = optimizer.to_weights(&parameters);
        assert!(moments.get("0.weight.exp_avg").unwrap().1.iter().all(|&m| m == 0.0));
        assert!(moments.get("1.weight.exp_avg").unwrap().1.iter().all(|&m| m != 0.0));
    }

    #[test]
    fn what_no_model_has_or_all_of_it_is_refused() {
        let error = |patterns: &[&str]| freeze(&mut net(), patterns).unwrap_err().to_string();
        assert!(
            error(&["3.*"])
                .starts_with("no parameter is named 3.*\nhint: the model's parameters are 0.weight, 0.bias")
        );
        assert!(error(&["*.weight", "*.bias"]).contains("all 6 parameters are frozen"));
        freeze(&mut net(), &[""; 0]).unwrap();
    }
}
