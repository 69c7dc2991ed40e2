//! The parameters of one model: names, values, gradients.

use crate::module::{Module, Visitor};
use crate::weights::Weights;
use phalanx_tensor::{Arena, DType, Device, Grads, Layout, Philox, Shape, Tensor};
use std::fmt;

/// Random streams of parameters start here, away from those of samples.
const INIT_STREAM: u64 = 1 << 62;

/// Every parameter of a model in one arena, with a gradient arena of the same layout. The model's layers share the memory.
pub struct Parameters {
    names: Vec<String>,
    values: Arena,
    grads: Grads,
}

impl Parameters {
    /// Lays out the parameters of `model` in its visiting order, in float32, and gives them their first values: parameter
    /// `i` is a function of `seed` and `i`, the same on every rank.
    pub fn build(model: &mut dyn Module, device: &Device, seed: u64) -> Parameters {
        let (mut names, mut shapes, mut inits) = (Vec::new(), Vec::<Shape>::new(), Vec::new());
        model.visit(&mut Visitor::new(&mut |name, param| {
            names.push(name.to_owned());
            shapes.push(param.shape);
            inits.push(param.init);
        }));
        let layout = Layout::new(&shapes);
        let values = Arena::new(device, DType::F32, &layout);
        let grads = Grads::new(device, DType::F32, &layout);
        for (i, init) in inits.iter().enumerate() {
            values.tensor(i).with_slice_mut(|v| init.fill(v, Philox::new(seed, INIT_STREAM + i as u64)));
        }
        let mut next = 0;
        model.visit(&mut Visitor::new(&mut |_, param| {
            param.tensor = Some(grads.leaf(next, &values));
            next += 1;
        }));
        Parameters { names, values, grads }
    }

    /// The dotted names, in order.
    pub fn names(&self) -> &[String] {
        &self.names
    }

    /// Which parameter lies where.
    pub fn layout(&self) -> &Layout {
        self.values.layout()
    }

    /// How many numbers the model learns.
    pub fn count(&self) -> usize {
        (0..self.names.len()).map(|i| self.layout().shape(i).count()).sum()
    }

    /// The values.
    pub fn values(&self) -> &Arena {
        &self.values
    }

    /// The gradients.
    pub fn grads(&self) -> &Grads {
        &self.grads
    }

    /// Parameter `i` as a tensor that shares the arena's memory.
    pub fn value(&self, i: usize) -> Tensor {
        self.values.tensor(i)
    }

    /// Copies the values out, for a file.
    pub fn to_weights(&self) -> Weights {
        self.to_weights_from(&self.values.flat::<f32>(), "")
    }

    /// Copies a flat array of this layout out, each part named as its parameter with `suffix`.
    pub fn to_weights_from(&self, flat: &[f32], suffix: &str) -> Weights {
        let mut weights = Weights::default();
        for (i, name) in self.names.iter().enumerate() {
            weights.push(format!("{name}{suffix}"), *self.layout().shape(i), &flat[self.layout().range(i)]);
        }
        weights
    }

    /// Takes the values from a file of weights. Nothing is changed unless every parameter is there with its shape and nothing
    /// else is.
    pub fn load(&self, weights: &Weights) -> Result<(), Mismatch> {
        let mut mismatch = Mismatch::default();
        for (i, name) in self.names.iter().enumerate() {
            match weights.get(name) {
                None => mismatch.missing.push(name.clone()),
                Some((shape, _)) if shape != self.layout().shape(i) => {
                    mismatch.misshaped.push((name.clone(), *shape, *self.layout().shape(i)));
                }
                Some(_) => {}
            }
        }
        mismatch.unexpected =
            weights.names().filter(|name| !self.names.iter().any(|n| n == name)).map(str::to_owned).collect();
        if !mismatch.is_empty() {
            return Err(mismatch);
        }
        let mut flat = self.values.flat_mut::<f32>();
        for (i, name) in self.names.iter().enumerate() {
            let (_, values) = weights.get(name).expect("checked above");
            flat[self.layout().range(i)].copy_from_slice(values);
        }
        Ok(())
    }
}

/// Why weights don't fit a model.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Mismatch {
    /// Parameters that the weights lack.
    pub missing: Vec<String>,
    /// Weights that the model has no parameter for.
    pub unexpected: Vec<String>,
    /// Name, shape in the weights, shape in the model.
    pub misshaped: Vec<(String, Shape, Shape)>,
}

impl Mismatch {
    fn is_empty(&self) -> bool {
        self.missing.is_empty() && self.unexpected.is_empty() && self.misshaped.is_empty()
    }
}

impl fmt::Display for Mismatch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("the weights don't fit the model")?;
        for (what, names) in [("missing", &self.missing), ("unexpected", &self.unexpected)] {
            if !names.is_empty() {
                write!(f, "; {what}: {}", names.join(", "))?;
            }
        }
        for (name, file, model) in &self.misshaped {
            write!(f, "; {name} is {file} in the file and {model} in the model")?;
        }
        Ok(())
    }
}

impl std::error::Error for Mismatch {}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Linear;

    #[test]
    fn values_depend_on_the_seed_alone() {
        let build = |seed, threads| {
            let parameters = Parameters::build(&mut Linear::new(5, 3), &Device::cpu(threads), seed);
            parameters.values().flat::<f32>().to_vec()
        };
        assert_eq!(build(1, 1), build(1, 2));
        assert_ne!(build(1, 1), build(2, 1));
        let bound = 1.0 / 5f32.sqrt();
        assert!(
            build(1, 1).iter().all(|v| v.abs() <= bound) && build(1, 1).iter().any(|v| v.abs() > bound / 2.0)
        );
    }

    #[test]
    fn weights_that_do_not_fit_change_nothing_and_are_named() {
        let parameters = Parameters::build(&mut Linear::new(2, 3), &Device::cpu(1), 0);
        let before = parameters.to_weights();
        let mut other = Weights::default();
        other.push("weight".into(), [2, 2].into(), &[0.0; 4]);
        other.push("scale".into(), [1].into(), &[0.0]);
        let error = parameters.load(&other).unwrap_err();
        let message = error.to_string();
        for part in
            ["missing: bias", "unexpected: scale", "weight is [2, 2] in the file and [3, 2] in the model"]
        {
            assert!(message.contains(part), "{message}");
        }
        assert_eq!(parameters.to_weights(), before);
        parameters.load(&before).unwrap();
    }
}
