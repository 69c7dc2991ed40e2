//! Where a number is none: the first NaN or infinity among weights, buffers and gradients.

use crate::parameters::Parameters;
use crate::weights::Weights;
use phalanx_tensor::{Arena, Layout};
use std::fmt;

/// A number that is none, and where it stands.
#[derive(Clone, Debug, PartialEq)]
pub struct NotFinite {
    /// The parameter, buffer or array.
    pub name: String,
    /// Whether it is its gradient that holds the number.
    pub in_gradient: bool,
    /// The first such element of it, in row-major order.
    pub index: usize,
    /// What it is: NaN or an infinity.
    pub number: f32,
}

impl fmt::Display for NotFinite {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let NotFinite { name, in_gradient, index, number } = self;
        let of = if *in_gradient { "the gradient of " } else { "" };
        write!(f, "{of}{name} is {number} at element {index}")
    }
}

/// As [`first`], of parameter `i` in a flat array of this layout.
fn first_in(layout: &Layout, flat: &[f32], names: &[String], in_gradient: bool) -> Option<NotFinite> {
    let bad = |i: &usize| any_not_finite(&flat[layout.range(*i)]);
    let i = (0..names.len()).find(bad)?;
    first(&names[i], in_gradient, &layout.row_major(i, flat))
}

impl NotFinite {
    /// The first number that is none among these values of a parameter, a buffer or an array.
    pub fn first(name: &str, values: &[f32]) -> Option<NotFinite> {
        if any_not_finite(values) { first(name, false, values) } else { None }
    }
}

fn first(name: &str, in_gradient: bool, values: &[f32]) -> Option<NotFinite> {
    let index = values.iter().position(|x| !x.is_finite())?;
    Some(NotFinite { name: name.to_owned(), in_gradient, index, number: values[index] })
}

impl Parameters {
    /// The first number that is none: among the values, else the buffers, else the gradients, each in the model's order.
    /// Values come first because they spoil the rest.
    pub fn first_not_finite(&self) -> Option<NotFinite> {
        self.first_value_not_finite().or_else(|| self.first_gradient_not_finite())
    }

    /// The same among values and buffers alone.
    pub fn first_value_not_finite(&self) -> Option<NotFinite> {
        let of = |arena: &Arena, names| {
            arena.with_flat(|flat: &[f32]| first_in(arena.layout(), flat, names, false))
        };
        of(self.values(), self.names()).or_else(|| of(self.buffers(), self.buffer_names()))
    }

    /// The first number that is none among these, which are the gradient of parameter `i` as it lies in memory.
    pub fn not_finite_in_gradient(&self, i: usize, elements: &[f32]) -> Option<NotFinite> {
        first(&self.names()[i], true, &self.layout().part(i..i + 1).row_major(0, elements))
    }

    /// The first number that is none among the gradients.
    pub fn first_gradient_not_finite(&self) -> Option<NotFinite> {
        let grads = self.grads().arena();
        // Mostly there is none, and one pass over all of them tells.
        if grads.is_finite() {
            return None;
        }
        grads.with_flat(|flat: &[f32]| first_in(self.layout(), flat, self.names(), true))
    }
}

/// Without a branch a number, so that it runs as fast as memory is read.
fn any_not_finite(values: &[f32]) -> bool {
    const BLOCK: usize = 1024;
    values.chunks(BLOCK).any(|block| block.iter().fold(false, |any, x| any | !x.is_finite()))
}

impl Weights {
    /// The first number that is none.
    pub fn first_not_finite(&self) -> Option<NotFinite> {
        self.names().find_map(|name| first(name, false, self.get(name)?.1))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{BatchNorm2d, Conv2d, Sequential};
    use phalanx_tensor::Device;

    #[test]
    fn values_are_named_before_buffers_and_buffers_before_gradients() {
        let mut net = Sequential::new().then(Conv2d::new(1, 2, 1)).then(BatchNorm2d::new(2));
        let parameters = Parameters::build(&mut net, &Device::cpu(1), 0);
        assert_eq!(parameters.first_not_finite(), None);
        let told = || parameters.first_not_finite().unwrap().to_string();
        let put = |tensor: phalanx_tensor::Tensor, index: usize, number: f32| {
            tensor.with_slice_mut(|values: &mut [f32]| values[index] = number);
        };
        put(parameters.grads().arena().tensor(3), 1, f32::NEG_INFINITY);
        assert_eq!(told(), "the gradient of 1.bias is -inf at element 1");
        assert_eq!(parameters.first_gradient_not_finite(), parameters.first_not_finite());
        put(parameters.buffers().tensor(1), 0, f32::NAN);
        assert_eq!(told(), "1.running_var is NaN at element 0");
        put(parameters.value(2), 1, f32::INFINITY);
        assert_eq!(told(), "1.weight is inf at element 1");
        // A file is read in its own order.
        assert_eq!(parameters.to_weights().first_not_finite().unwrap().to_string(), told());
    }

    #[test]
    fn an_element_is_counted_in_row_major_order_however_it_lies() {
        let mut net = Sequential::new().then(Conv2d::new(16, 32, 3));
        let parameters = Parameters::build(&mut net, &Device::cpu(1), 0);
        let shape = *parameters.value(0).shape();
        let mut values = vec![0.0; shape.count()];
        values[1234] = f32::NAN;
        let bad = phalanx_tensor::Tensor::from_slice(parameters.value(0).device(), &values, shape);
        parameters.grads().arena().tensor(0).copy_from(&bad);
        assert_eq!(parameters.first_gradient_not_finite().unwrap().index, 1234);
        parameters.value(0).copy_from(&bad);
        assert_eq!(parameters.first_not_finite().unwrap().index, 1234);
    }

    #[test]
    fn one_number_in_many_is_found() {
        for at in [0, 1023, 1024, 4999] {
            let mut values = vec![1e38f32; 5000];
            assert!(!any_not_finite(&values));
            values[at] = f32::NAN;
            assert!(any_not_finite(&values), "{at}");
        }
    }
}
