//! The parameters of one model: names, values, gradients; and its buffers.

use crate::module::{Module, Role, Visitor};
use crate::param::Init;
use crate::seam::Cut;
use crate::weights::Weights;
use phalanx_tensor::{Arena, DType, Device, Grads, Layout, Order, Philox, Purpose, Shape, Tensor, bring_in};
use std::collections::BTreeMap;
use std::fmt;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};

/// Random streams of parameters start here, away from those of samples.
const INIT_STREAM: u64 = 1 << 62;

/// Every parameter of a model in one arena, with a gradient arena of the same layout, and its buffers in a third. The model's
/// layers share the memory.
pub struct Parameters {
    names: Vec<String>,
    values: Arena,
    grads: Grads,
    /// Those that a later part of the model has as well.
    shared: Vec<String>,
    /// Which training leaves as they are.
    frozen: Vec<bool>,
    buffer_names: Vec<String>,
    buffers: Arena,
    /// First values, of parameters and then buffers, which are functions of this seed and of their numbers.
    firsts: Vec<First>,
    seed: u64,
    /// Whether there are any values yet.
    given: AtomicBool,
}

/// What a parameter starts as.
#[derive(Clone, Copy)]
struct First {
    init: Init,
    /// Of all that the model declares.
    number: usize,
    /// As it is declared, of which there may be a part.
    whole: Shape,
    cut: Option<Cut>,
}

/// What a model declares of one role, in visiting order.
#[derive(Default)]
struct Declared {
    names: Vec<String>,
    places: Vec<(Shape, Order)>,
    frozen: Vec<bool>,
    /// With their numbers among those of their role.
    firsts: Vec<First>,
}

/// Those of them that are to lie anywhere.
struct Held {
    declared: Declared,
    /// The device of each.
    on: Vec<usize>,
    /// Which number each has among all that the model declares of its role.
    numbers: Vec<usize>,
    /// How many that are.
    of: usize,
}

impl Declared {
    fn held(self, on: impl Fn(&str) -> Option<usize>) -> Held {
        let of = self.names.len();
        let mut held = Held { declared: Declared::default(), on: Vec::new(), numbers: Vec::new(), of };
        let places = self.places.into_iter().zip(self.frozen);
        for ((name, (place, frozen)), first) in self.names.into_iter().zip(places).zip(self.firsts) {
            let Some(device) = on(&name) else { continue };
            held.declared.names.push(name);
            held.declared.places.push(place);
            held.declared.frozen.push(frozen);
            held.declared.firsts.push(first);
            held.on.push(device);
            held.numbers.push(first.number);
        }
        held
    }
}

impl Held {
    fn arena(&self, devices: &[Device]) -> Arena {
        let layout = Layout::ordered(self.declared.places.iter().copied());
        Arena::spread(&devices[0], DType::F32, &layout, |i| &devices[self.on[i]])
    }
}

impl Parameters {
    /// Lays out the parameters of `model` in its visiting order, in float32, and gives them their first values: parameter
    /// `i` is a function of `seed` and `i`, the same on every rank. Panics if two of them have one name, or if one is shared
    /// ([`Visitor::shared`]) that no part before it has.
    #[track_caller]
    pub fn build(model: &mut dyn Module, device: &Device, seed: u64) -> Parameters {
        let parameters = Parameters::lay_out(model, device, seed);
        parameters.give_first_values();
        parameters
    }

    /// The same without first values, since one who comes to a run that has begun takes those of others. Everything is 0 until
    /// [`Parameters::give_first_values`] or one of those that bring other values is called.
    #[track_caller]
    pub fn lay_out(model: &mut dyn Module, device: &Device, seed: u64) -> Parameters {
        Parameters::lay_out_on(model, std::slice::from_ref(device), |_| 0, seed)
    }

    /// As [`Parameters::lay_out_on`], with first values.
    #[track_caller]
    pub fn build_on(
        model: &mut dyn Module,
        devices: &[Device],
        of: impl Fn(usize) -> usize,
        seed: u64,
    ) -> Parameters {
        let parameters = Parameters::lay_out_on(model, devices, of, seed);
        parameters.give_first_values();
        parameters
    }

    /// As [`Parameters::lay_out`], with the parameters and buffers of block `b` on device `devices[of(b)]`. They lie in one run of
    /// memory all the same, the first device's, so several devices have to be CPUs. First values don't depend on where they lie.
    /// Panics if `of` names no device.
    #[track_caller]
    pub fn lay_out_on(
        model: &mut dyn Module,
        devices: &[Device],
        of: impl Fn(usize) -> usize,
        seed: u64,
    ) -> Parameters {
        Parameters::lay_out_blocks(model, devices, |block| Some(of(block)), seed)
    }

    /// As [`Parameters::build`], of the blocks that `holds` names alone, as a rank has them that holds a part of a row; what such a block
    /// shares with one before it is held, too. Their names and first values are those that they have in the whole model; what
    /// isn't held stays without a place.
    #[track_caller]
    pub fn build_part(
        model: &mut dyn Module,
        device: &Device,
        holds: impl Fn(usize) -> bool,
        seed: u64,
    ) -> Parameters {
        let parameters = Parameters::lay_out_part(model, device, holds, seed);
        parameters.give_first_values();
        parameters
    }

    /// The same without first values.
    #[track_caller]
    pub fn lay_out_part(
        model: &mut dyn Module,
        device: &Device,
        holds: impl Fn(usize) -> bool,
        seed: u64,
    ) -> Parameters {
        let of = |block| holds(block).then_some(0);
        Parameters::lay_out_blocks(model, std::slice::from_ref(device), of, seed)
    }

    /// The parameters of those blocks that lie anywhere.
    #[track_caller]
    fn lay_out_blocks(
        model: &mut dyn Module,
        devices: &[Device],
        of: impl Fn(usize) -> Option<usize>,
        seed: u64,
    ) -> Parameters {
        let device = &devices[0];
        let (mut learned, mut kept) = (Declared::default(), Declared::default());
        model.visit(&mut Visitor::new(&mut |name, role, param| {
            if role == Role::Shared {
                let known = learned.names.iter().position(|other| other == name);
                let known = known.unwrap_or_else(|| {
                    panic!("Parameters::build: a part shares {name}, which no part before it has")
                });
                let (found, wanted) = (learned.firsts[known].whole, param.shape);
                assert!(
                    found == wanted,
                    "Parameters::build: {name} of shape {found} is shared as shape {wanted}"
                );
                return;
            }
            let taken = learned.names.iter().chain(&kept.names).any(|other| other == name);
            assert!(!taken, "Parameters::build: two tensors of the model are named {name}");
            let declared = match role {
                Role::Learned => &mut learned,
                Role::Kept => &mut kept,
                Role::Shared => unreachable!("it was declared before"),
            };
            declared.names.push(name.to_owned());
            let number = declared.firsts.len();
            declared.places.push((param.held_shape(), param.order.on(device)));
            declared.frozen.push(param.frozen);
            declared.firsts.push(First { init: param.init, number, whole: param.shape, cut: param.cut });
        }));
        // A model of one block may not say whose each part is.
        let on = |name: &str| {
            let first = if model.blocks() == 1 { 0 } else { model.block_of(name) };
            of(first).or_else(|| model.shared_by(name).into_iter().find_map(&of))
        };
        let (learned, kept) = (learned.held(on), kept.held(on));
        let values = learned.arena(devices).held_for(Purpose::Values);
        let grads = Grads::over(learned.arena(devices));
        let buffers = kept.arena(devices);
        let (mut next_learned, mut next_kept) = (0.., 0..);
        let mut leaves = Vec::<(String, Tensor)>::new();
        let mut shared = Vec::new();
        model.visit(&mut Visitor::new(&mut |name, role, param| {
            let place = |held: &Held, number| held.numbers.binary_search(&number).ok();
            param.tensor = match role {
                Role::Learned => place(&learned, next_learned.next().expect("endless")).map(|i| {
                    let leaf = if param.frozen { values.tensor(i) } else { grads.leaf(i, &values) };
                    leaves.push((name.to_owned(), leaf));
                    leaves[leaves.len() - 1].1.clone()
                }),
                Role::Kept => place(&kept, next_kept.next().expect("endless")).map(|i| buffers.tensor(i)),
                // It may lie with another rank, as may the part that shares it.
                Role::Shared => leaves.iter().find(|(other, _)| other == name).map(|(_, leaf)| {
                    shared.push(name.to_owned());
                    leaf.clone()
                }),
            };
        }));
        // Buffers count on after the parameters, so that adding one to a layer changes no parameter.
        let own = learned.declared.firsts;
        let behind = |first: First| First { number: learned.of + first.number, ..first };
        Parameters {
            names: learned.declared.names,
            shared,
            frozen: learned.declared.frozen,
            values,
            grads,
            buffer_names: kept.declared.names,
            buffers,
            firsts: own.into_iter().chain(kept.declared.firsts.into_iter().map(behind)).collect(),
            seed,
            given: AtomicBool::new(false),
        }
    }

    /// Gives every parameter and buffer its first value, unless they have values already.
    pub fn give_first_values(&self) {
        if !self.given.swap(true, Ordering::Relaxed) {
            self.give_firsts(self.tensors().zip(&self.firsts));
        }
    }

    /// Gives these parameters alone their first values, whether there are others or not: for those that are filled piece by piece.
    pub fn give_first_values_of(&self, params: Range<usize>) {
        let chosen = self.tensors().zip(&self.firsts).take(params.end).skip(params.start);
        self.give_firsts(chosen);
    }

    /// The same for the buffers.
    pub fn give_first_buffers(&self) {
        self.give_firsts(self.tensors().zip(&self.firsts).skip(self.names.len()));
    }

    fn give_firsts<'a>(&self, chosen: impl Iterator<Item = ((&'a str, Tensor), &'a First)>) {
        let mut first = Vec::new();
        for ((_, tensor), First { init, number, whole, cut }) in chosen {
            let device = tensor.device();
            if !device.computes() {
                // What comes from the host takes memory on its way.
                tensor.copy_from(&Tensor::zeros(device, tensor.shape(), tensor.dtype()));
                continue;
            }
            first.resize(whole.count(), 0.0);
            init.fill(device, &mut first, Philox::new(self.seed, INIT_STREAM + *number as u64));
            let part = cut.map(|cut| cut.take(whole, &first));
            tensor.copy_from(&Tensor::from_slice(device, part.as_ref().unwrap_or(&first), tensor.shape()));
        }
    }

    /// What first values are functions of, beside the parameter.
    pub fn seed(&self) -> u64 {
        self.seed
    }

    /// Whether there are values, first or other ones.
    pub fn has_values(&self) -> bool {
        self.given.load(Ordering::Relaxed)
    }

    /// Says that what was brought here means nothing any more: first values may be given again.
    pub fn count_as_lost(&self) {
        self.given.store(false, Ordering::Relaxed);
    }

    /// Says that values were brought here without any of these ways.
    pub fn count_as_given(&self) {
        self.given.store(true, Ordering::Relaxed);
    }

    /// On a CPU, has the system bring in the memory of values and buffers, which it has only promised until something is written. They
    /// stay what they are.
    pub fn make_room(&self) {
        if self.values.device().gpu().is_none() {
            for arena in [&self.values, &self.buffers] {
                bring_in(&mut arena.host_span::<f32>(0..arena.layout().count()));
            }
        }
    }

    /// Has `fill` write all values and buffers, flat as they lie. If it fails, what it wrote stays, and they count as given only if
    /// they did before.
    pub fn take_values<T, E>(
        &self,
        fill: impl FnOnce(&mut [f32], &mut [f32]) -> Result<T, E>,
    ) -> Result<T, E> {
        let whole = |arena: &Arena| arena.host_span(0..arena.layout().count());
        let filled = fill(&mut whole(&self.values), &mut whole(&self.buffers))?;
        self.given.store(true, Ordering::Relaxed);
        Ok(filled)
    }

    /// The dotted names, in order.
    pub fn names(&self) -> &[String] {
        &self.names
    }

    /// Whether a later part of the model has parameter `i` as well ([`Visitor::shared`]).
    pub fn is_shared(&self, i: usize) -> bool {
        self.shared.contains(&self.names[i])
    }

    /// Whether training leaves parameter `i` as it is ([`crate::freeze`]).
    pub fn is_frozen(&self, i: usize) -> bool {
        self.frozen[i]
    }

    /// The number of the parameter with this name.
    pub fn index_of(&self, name: &str) -> Option<usize> {
        self.names.iter().position(|other| other == name)
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

    /// The gradients: a backward pass adds those of parameters up here, and not to what [`Tensor::backward`](phalanx_tensor::Tensor::backward)
    /// gives.
    pub fn grads(&self) -> &Grads {
        &self.grads
    }

    /// The gradient of parameter `i`, as a tensor that shares the arena's memory: what backward passes have added up since
    /// [`Grads::zero`], or what a strategy has made of it.
    ///
    /// ```
    /// use phalanx_nn::{Ctx, Linear, Module, Parameters};
    /// use phalanx_tensor::{DType, Device, Tensor};
    ///
    /// let device = Device::cpu(1);
    /// let mut layer = Linear::new(2, 1).without_bias();
    /// let parameters = Parameters::build(&mut layer, &device, 0);
    /// let x = Tensor::from_slice(&device, &[3.0f32, 4.0], [1, 2]);
    /// parameters.grads().zero();
    /// layer.forward(&x, &mut Ctx::eval()).sum_all().backward();
    /// assert_eq!(parameters.gradient(0).to_vec::<f32>(), [3.0, 4.0]);
    /// ```
    pub fn gradient(&self, i: usize) -> Tensor {
        self.grads.arena().tensor(i)
    }

    /// Parameter `i` as a tensor that shares the arena's memory. It is no part of a graph: its gradient is [`Parameters::gradient`].
    pub fn value(&self, i: usize) -> Tensor {
        self.values.tensor(i)
    }

    /// The dotted names of the buffers, in order.
    pub fn buffer_names(&self) -> &[String] {
        &self.buffer_names
    }

    /// The buffers.
    pub fn buffers(&self) -> &Arena {
        &self.buffers
    }

    /// Copies the parameters and buffers out, for a file.
    pub fn to_weights(&self) -> Weights {
        let of = |values: &[f32]| self.buffers.with_flat(|buffers| self.to_weights_of(values, buffers));
        self.values.with_flat(of)
    }

    /// Copies flat arrays out that lie as the values and the buffers do.
    pub(crate) fn to_weights_of(&self, values: &[f32], buffers: &[f32]) -> Weights {
        let (mut weights, layout) = (self.to_weights_from(values, ""), self.buffers.layout());
        for (i, name) in self.buffer_names.iter().enumerate() {
            weights.push(name.clone(), *layout.shape(i), &layout.row_major(i, buffers));
        }
        weights
    }

    /// Copies a flat array of this layout out, each part named as its parameter with `suffix`.
    pub fn to_weights_from(&self, flat: &[f32], suffix: &str) -> Weights {
        let mut weights = Weights::default();
        for (i, name) in self.names.iter().enumerate() {
            weights.push(
                format!("{name}{suffix}"),
                *self.layout().shape(i),
                &self.layout().row_major(i, flat),
            );
        }
        weights
    }

    /// The way back from [`Parameters::to_weights_from`]: the flat array whose parts are named as the parameters with
    /// `suffix`. Other arrays in `weights` are passed over.
    pub fn flat_from(&self, weights: &Weights, suffix: &str) -> Result<Vec<f32>, Mismatch> {
        let mut flat = vec![0.0; self.layout().len()];
        let mut mismatch = Mismatch::default();
        for (i, name) in self.names.iter().enumerate() {
            if let Some(values) = mismatch.take(weights, &format!("{name}{suffix}"), self.layout().shape(i)) {
                self.layout().put(i, values, &mut flat);
            }
        }
        if mismatch.is_empty() { Ok(flat) } else { Err(mismatch) }
    }

    /// Takes the values from a file of weights. Nothing is changed unless every parameter and buffer is there with its shape
    /// and nothing else is.
    pub fn load(&self, weights: &Weights) -> Result<(), Mismatch> {
        let mismatch = self.compare(weights);
        if !mismatch.is_empty() {
            return Err(mismatch);
        }
        self.load_matching(weights);
        Ok(())
    }

    /// Takes the values of those parameters and buffers that `weights` has under their name with their shape, as when a
    /// trained body gets a new head; says what was left out.
    pub fn load_matching(&self, weights: &Weights) -> Mismatch {
        self.load_where(weights, |_| true);
        self.compare(weights)
    }

    /// Takes the values of the parameter or buffer of this name, in row-major order; one that there isn't is passed over. For files
    /// that are read piece by piece: whether all fits is for [`Parameters::compare_shapes`] to say before.
    #[track_caller]
    pub fn load_one(&self, name: &str, values: &[f32]) {
        self.give_first_values();
        if let Some((_, tensor)) = self.tensors().find(|(other, _)| *other == name) {
            tensor.copy_from(&Tensor::from_slice(tensor.device(), values, *tensor.shape()));
        }
    }

    /// Takes those values that fit from those arrays that `wanted` picks.
    pub(crate) fn load_where(&self, weights: &Weights, wanted: impl Fn(&str) -> bool) {
        self.give_first_values();
        for (name, tensor) in self.tensors().filter(|(name, _)| wanted(name)) {
            if let Some((shape, values)) = weights.get(name)
                && shape == tensor.shape()
            {
                tensor.copy_from(&Tensor::from_slice(tensor.device(), values, shape));
            }
        }
    }

    /// Every parameter and buffer with its name.
    fn tensors(&self) -> impl Iterator<Item = (&str, Tensor)> {
        let values = self.names.iter().enumerate().map(|(i, name)| (name.as_str(), self.values.tensor(i)));
        let buffers = self.buffer_names.iter().enumerate();
        values.chain(buffers.map(|(i, name)| (name.as_str(), self.buffers.tensor(i))))
    }

    /// What doesn't fit.
    pub(crate) fn compare(&self, weights: &Weights) -> Mismatch {
        self.compare_shapes(weights.shapes())
    }

    /// What doesn't fit of arrays of these names and shapes.
    pub fn compare_shapes<'a>(&self, found: impl Iterator<Item = (&'a str, &'a Shape)>) -> Mismatch {
        let mut mismatch = Mismatch::default();
        let found: BTreeMap<&str, &Shape> = found.collect();
        for (name, tensor) in self.tensors() {
            match found.get(name) {
                None => mismatch.missing.push(name.to_owned()),
                Some(&shape) if shape != tensor.shape() => {
                    mismatch.misshaped.push((name.to_owned(), *shape, *tensor.shape()));
                }
                Some(_) => {}
            }
        }
        // A counter that PyTorch keeps beside every batch norm, and nothing here needs.
        let known = |name: &str| {
            name.ends_with(".num_batches_tracked")
                || self.names.iter().chain(&self.buffer_names).any(|other| other == name)
        };
        mismatch.unexpected = found.into_keys().filter(|name| !known(name)).map(str::to_owned).collect();
        mismatch
    }
}

/// Why weights don't fit a model.
#[derive(Clone, Default, PartialEq)]
pub struct Mismatch {
    /// Parameters and buffers that the weights lack.
    pub missing: Vec<String>,
    /// Weights that the model has no parameter for.
    pub unexpected: Vec<String>,
    /// Name, shape in the weights, shape in the model.
    pub misshaped: Vec<(String, Shape, Shape)>,
}

impl Mismatch {
    /// Whether everything fits.
    pub fn is_empty(&self) -> bool {
        self.missing.is_empty() && self.unexpected.is_empty() && self.misshaped.is_empty()
    }

    /// The values under `name`, if they are there in this shape; notes why not otherwise.
    fn take<'a>(&mut self, weights: &'a Weights, name: &str, shape: &Shape) -> Option<&'a [f32]> {
        match weights.get(name) {
            None => self.missing.push(name.to_owned()),
            Some((found, _)) if found != shape => self.misshaped.push((name.to_owned(), *found, *shape)),
            Some((_, values)) => return Some(values),
        }
        None
    }
}

/// How many of each kind a message names: enough to tell whose weights they are.
const SHOWN: usize = 8;

/// Says how many were left out.
fn more(f: &mut fmt::Formatter<'_>, count: usize) -> fmt::Result {
    if count > SHOWN { write!(f, " and {} more", count - SHOWN) } else { Ok(()) }
}

impl fmt::Display for Mismatch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("the weights don't fit the model")?;
        for (what, names) in [("missing", &self.missing), ("unexpected", &self.unexpected)] {
            if !names.is_empty() {
                write!(f, "; {what}: {}", names[..names.len().min(SHOWN)].join(", "))?;
                more(f, names.len())?;
            }
        }
        for (name, file, model) in self.misshaped.iter().take(SHOWN) {
            write!(f, "; {name} is {file} in the file and {model} in the model")?;
        }
        more(f, self.misshaped.len())
    }
}

/// Its message, which is what a `main` that returns it tells.
impl fmt::Debug for Mismatch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl std::error::Error for Mismatch {}

#[cfg(test)]
mod tests;
