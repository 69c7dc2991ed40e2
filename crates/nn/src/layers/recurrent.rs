//! Recurrent layers with PyTorch's names and numbers, so that its weights fit. Samples come first here, as everywhere: PyTorch's layers are
//! meant with `batch_first=True`.
//!
//! Shapes: B samples, T positions, W numbers a position, H numbers of state. What goes from position to position is one operation of a
//! tensor ([`Tensor::lstm`], [`Tensor::gru`]); a layer makes the inputs' part for all positions before, and puts layers on top of each
//! other.

use crate::module::{Ctx, Module, Visitor};
use crate::param::{Init, Param};
use phalanx_tensor::{Tensor, Toward};

/// What a recurrent layer is like.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RecurrentConfig {
    /// How many layers lie on top of each other. Default 1.
    pub layers: usize,
    /// Whether each layer is gone through from the end to the beginning, too; the states of both ways come side by side. Default no.
    pub both_ways: bool,
    /// The share of the numbers between two layers that dropout zeroes. Default 0.
    pub dropout: f64,
}

impl Default for RecurrentConfig {
    fn default() -> RecurrentConfig {
        RecurrentConfig { layers: 1, both_ways: false, dropout: 0.0 }
    }
}

/// The parameters of one way through a layer.
struct Way {
    /// What their names end with.
    suffix: String,
    toward: Toward,
    /// From inputs to gates, (gates H, W).
    from_inputs: Param,
    /// From the state before to gates, (gates H, H).
    from_state: Param,
    /// Of each of them.
    biases: [Param; 2],
}

/// Layers on top of each other, of so many gates.
struct Stack {
    ways: Vec<Way>,
    width: usize,
    config: RecurrentConfig,
}

impl Stack {
    #[track_caller]
    fn new(what: &str, gates: usize, [inputs, width]: [usize; 2], config: RecurrentConfig) -> Stack {
        let RecurrentConfig { layers, both_ways, dropout } = config;
        assert!(layers > 0 && width > 0, "{what}: {layers} layers of {width} numbers");
        assert!((0.0..1.0).contains(&dropout), "{what}: the dropout must lie in [0, 1), got {dropout}");
        let init = Init::fan_in(width);
        let way = |layer: usize, toward: Toward| {
            let inputs = if layer == 0 { inputs } else { width * (1 + usize::from(both_ways)) };
            let end = if toward == Toward::Beginning { "_reverse" } else { "" };
            Way {
                suffix: format!("l{layer}{end}"),
                toward,
                from_inputs: Param::new([gates * width, inputs], init),
                from_state: Param::new([gates * width, width], init),
                biases: [(); 2].map(|()| Param::new([gates * width], init)),
            }
        };
        let towards = if both_ways { &[Toward::End, Toward::Beginning][..] } else { &[Toward::End] };
        let ways =
            (0..layers).flat_map(|layer| towards.iter().map(move |&toward| way(layer, toward))).collect();
        Stack { ways, width, config }
    }

    fn visit(&mut self, v: &mut Visitor<'_>) {
        for way in &mut self.ways {
            let [of_inputs, of_state] = &mut way.biases;
            v.param(&format!("weight_ih_{}", way.suffix), &mut way.from_inputs);
            v.param(&format!("weight_hh_{}", way.suffix), &mut way.from_state);
            v.param(&format!("bias_ih_{}", way.suffix), of_inputs);
            v.param(&format!("bias_hh_{}", way.suffix), of_state);
        }
    }

    /// Takes (B, T, W) through all layers: the states of the last one, and what `through` leaves of each way, side by side along a new first
    /// dimension. `through` is given a way, its number, and what comes in, (T, B, W).
    #[track_caller]
    fn forward<const N: usize>(
        &self,
        what: &str,
        x: &Tensor,
        ctx: &mut Ctx,
        through: impl Fn(&Way, usize, &Tensor) -> (Tensor, [Tensor; N]),
    ) -> (Tensor, [Tensor; N]) {
        assert!(
            x.dims().len() == 3 && x.dims()[1] > 0,
            "{what}: of shape {}: (B, T, W) with a position or more would do",
            x.shape()
        );
        let each = self.ways.len() / self.config.layers;
        let mut left: [Vec<Tensor>; N] = std::array::from_fn(|_| Vec::new());
        // Positions first within, so that those of a step lie side by side.
        let mut x = x.transpose(0, 1);
        for (layer, ways) in self.ways.chunks(each).enumerate() {
            if layer > 0 && ctx.training() && self.config.dropout > 0.0 {
                x = x.transpose(0, 1).dropout(self.config.dropout, &ctx.dropout_key()).transpose(0, 1);
            }
            let mut states = Vec::new();
            for (way, number) in ways.iter().zip(layer * each..) {
                let (of_way, last) = through(way, number, &x);
                states.push(of_way);
                left.iter_mut().zip(last).for_each(|(left, last)| left.push(last));
            }
            x = Tensor::cat(&states.iter().collect::<Vec<_>>(), 2);
        }
        let left = left.map(|left| Tensor::stack(&left.iter().collect::<Vec<_>>(), 0));
        (x.transpose(0, 1).contiguous(), left)
    }

    /// The state that way `number` begins with: of those given, (layers and ways, B, H), or zeros.
    #[track_caller]
    fn start(&self, what: &str, given: Option<&Tensor>, number: usize, x: &Tensor) -> Tensor {
        let shape = [self.ways.len(), x.dims()[1], self.width];
        match given {
            None => Tensor::zeros(x.device(), &shape[1..], x.dtype()),
            Some(all) => {
                assert!(
                    all.dims() == shape,
                    "{what}: a state of shape {} where {shape:?} would do",
                    all.shape()
                );
                all.narrow(0, number, 1).squeeze(0)
            }
        }
    }
}

/// The state after the last of the positions that a way goes through, of (T, B, H).
fn last(states: &Tensor, toward: Toward) -> Tensor {
    let place = if toward == Toward::End { states.dims()[0] - 1 } else { 0 };
    states.narrow(0, place, 1).squeeze(0)
}

/// A long short-term memory: (B, T, W) to the states after each position, (B, T, H), or (B, T, 2 H) both ways. Parameters `weight_ih_l0` (4
/// H, W), `weight_hh_l0` (4 H, H), `bias_ih_l0` and `bias_hh_l0` (4 H), and the same of `l1` and so on, and of `l0_reverse` the other way,
/// all starting evenly in +-1 / sqrt(H).
///
/// ```
/// use phalanx_nn::{Ctx, Lstm, Module, Parameters, RecurrentConfig};
/// use phalanx_tensor::{DType, Device, Tensor};
///
/// let device = Device::cpu(1);
/// let mut layer = Lstm::new(5, 8, RecurrentConfig { layers: 2, ..RecurrentConfig::default() });
/// let parameters = Parameters::build(&mut layer, &device, 0);
/// assert_eq!(parameters.names()[4..6], ["weight_ih_l1", "weight_hh_l1"]);
/// let x = Tensor::ones(&device, [3, 7, 5], DType::F32);
/// let (y, state) = layer.forward_from(&x, None, &mut Ctx::eval());
/// assert_eq!((y.dims(), state[0].dims()), (&[3, 7, 8][..], &[2, 3, 8][..]));
/// // What comes later goes on from there.
/// let (_, _) = layer.forward_from(&x, Some(&state), &mut Ctx::eval());
/// ```
pub struct Lstm(Stack);

impl Lstm {
    /// From `inputs` numbers a position to states of `width`. Panics without layers or numbers, or with a dropout outside of [0, 1).
    #[track_caller]
    pub fn new(inputs: usize, width: usize, config: RecurrentConfig) -> Lstm {
        Lstm(Stack::new("Lstm", 4, [inputs, width], config))
    }

    /// The same from a state, and with the state that is left: hidden states and cells, each of (layers, B, H), or (2 layers, B, H) both ways,
    /// of a layer first the one way and then the other.
    #[track_caller]
    pub fn forward_from(
        &self,
        x: &Tensor,
        state: Option<&[Tensor; 2]>,
        ctx: &mut Ctx,
    ) -> (Tensor, [Tensor; 2]) {
        self.0.forward("Lstm", x, ctx, |way, number, x| {
            let start = [0, 1].map(|i| self.0.start("Lstm", state.map(|state| &state[i]), number, x));
            // Both biases are added to the same.
            let bias = &*way.biases[0] + &*way.biases[1];
            let gates = x.linear(&way.from_inputs, Some(&bias));
            let [states, cell] = gates.lstm(&way.from_state, start.each_ref(), way.toward);
            let hidden = last(&states, way.toward);
            (states, [hidden, cell])
        })
    }
}

impl Module for Lstm {
    fn forward(&self, x: &Tensor, ctx: &mut Ctx) -> Tensor {
        self.forward_from(x, None, ctx).0
    }

    fn visit(&mut self, v: &mut Visitor<'_>) {
        self.0.visit(v);
    }
}

/// A gated recurrent unit: as [`Lstm`], with three gates and a state of one part.
///
/// ```
/// use phalanx_nn::{Ctx, Gru, Module, Parameters, RecurrentConfig};
/// use phalanx_tensor::{DType, Device, Tensor};
///
/// let device = Device::cpu(1);
/// let mut layer = Gru::new(5, 8, RecurrentConfig { both_ways: true, ..RecurrentConfig::default() });
/// let _parameters = Parameters::build(&mut layer, &device, 0);
/// let x = Tensor::ones(&device, [3, 7, 5], DType::F32);
/// assert_eq!(layer.forward(&x, &mut Ctx::eval()).dims(), [3, 7, 16]);
/// ```
pub struct Gru(Stack);

impl Gru {
    /// From `inputs` numbers a position to states of `width`. Panics as [`Lstm::new`] does.
    #[track_caller]
    pub fn new(inputs: usize, width: usize, config: RecurrentConfig) -> Gru {
        Gru(Stack::new("Gru", 3, [inputs, width], config))
    }

    /// The same from a state, and with the state that is left, as [`Lstm::forward_from`] has its hidden states.
    #[track_caller]
    pub fn forward_from(&self, x: &Tensor, state: Option<&Tensor>, ctx: &mut Ctx) -> (Tensor, Tensor) {
        let (y, [state]) = self.0.forward("Gru", x, ctx, |way, number, x| {
            let start = self.0.start("Gru", state, number, x);
            let gates = x.linear(&way.from_inputs, Some(&way.biases[0]));
            let states = gates.gru(&way.from_state, Some(&way.biases[1]), &start, way.toward);
            let hidden = last(&states, way.toward);
            (states, [hidden])
        });
        (y, state)
    }
}

impl Module for Gru {
    fn forward(&self, x: &Tensor, ctx: &mut Ctx) -> Tensor {
        self.forward_from(x, None, ctx).0
    }

    fn visit(&mut self, v: &mut Visitor<'_>) {
        self.0.visit(v);
    }
}
