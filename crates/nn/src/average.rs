//! A running mean of a model's weights, which often does better on new samples than the weights themselves.

use crate::parameters::{Mismatch, Parameters};
use crate::shadow::Shadow;
use crate::weights::Weights;

/// The exponential moving average of parameters and buffers, as PyTorch's `AveragedModel` with `get_ema_multi_avg_fn` and
/// `use_buffers`. Buffers are averaged too, since the statistics of a batch norm belong to the weights before it.
///
/// ```
/// use phalanx_nn::{Average, Linear, Parameters};
/// use phalanx_tensor::Device;
///
/// let parameters = Parameters::build(&mut Linear::new(1, 1), &Device::cpu(1), 0);
/// parameters.value(0).fill(1.0);
/// let mut average = Average::of(&parameters);
/// parameters.value(0).fill(2.0);
/// average.update(&parameters, 0.75);
/// assert_eq!(average.in_place_of(&parameters, || parameters.value(0).item()), 1.25);
/// assert_eq!(parameters.value(0).item(), 2.0);
/// ```
///
/// It lies where the parameters do; where ranks share these out, each has the average of the values that it holds, one after the other,
/// as an optimizer's state lies then. A clone shares the numbers, and stays as it is: an update that finds them shared goes on with a
/// copy.
#[derive(Clone)]
pub struct Average {
    values: Shadow,
    buffers: Shadow,
}

impl Average {
    /// The average after one update: the values of now.
    pub fn of(parameters: &Parameters) -> Average {
        Average { values: Shadow::of(parameters.values()), buffers: Shadow::of(parameters.buffers()) }
    }

    /// Keeps the share `decay` of the average, and takes the rest from the values of now.
    pub fn update(&mut self, parameters: &Parameters, decay: f64) {
        let share = Average::share(decay);
        self.values.follow(parameters.values(), share);
        self.buffers.follow(parameters.buffers(), share);
    }

    /// How far each number goes to the value of now where the share `decay` of it is kept.
    pub fn share(decay: f64) -> f32 {
        (1.0 - decay) as f32
    }

    /// The average of the parameters, flat, in their layout, or of what is held of them.
    pub fn values(&self) -> &Shadow {
        &self.values
    }

    /// The same and that of the buffers, for one who knows where what is held lies.
    pub fn shadows_mut(&mut self) -> [&mut Shadow; 2] {
        [&mut self.values, &mut self.buffers]
    }

    /// That of the buffers.
    pub fn buffers(&self) -> &Shadow {
        &self.buffers
    }

    /// Runs `f` while `parameters`, and so the model, hold the average.
    pub fn in_place_of<R>(&mut self, parameters: &Parameters, f: impl FnOnce() -> R) -> R {
        self.swap(parameters);
        let result = f();
        self.swap(parameters);
        result
    }

    /// Exchanges the average with the values and buffers of `parameters`.
    pub fn swap(&mut self, parameters: &Parameters) {
        self.values.swap(parameters.values());
        self.buffers.swap(parameters.buffers());
    }

    /// The average of all values for a file, under the names of the model; what `parameters` hold isn't looked at.
    pub fn to_weights(&self, parameters: &Parameters) -> Weights {
        self.values.with(|values| self.buffers.with(|buffers| parameters.to_weights_of(values, buffers)))
    }

    /// An average of these numbers, as [`Average::values`] and [`Average::buffers`] give them.
    pub fn of_arrays(values: impl Into<Shadow>, buffers: impl Into<Shadow>) -> Average {
        Average { values: values.into(), buffers: buffers.into() }
    }

    /// An average that goes on from one that was saved.
    pub fn resume(parameters: &Parameters, weights: &Weights) -> Result<Average, Mismatch> {
        let mut average = Average::of(parameters);
        average.in_place_of(parameters, || parameters.load(weights))?;
        Ok(average)
    }
}
