//! The walk back through the graph that operations recorded.
//!
//! [`backward`] first counts how many gradients each node will receive, then walks from the outputs down; a node is worked on
//! once all of its gradients are there. A leaf is finished at that very moment and handed to the [`GradSink`], while the rest
//! of the walk is still to come: that is what lets communication start early. The order follows from the graph alone, so it
//! is the same in every run and on every rank.
//!
//! What a walk notes in a node belongs to that walk: it carries the walk's number, and the next walk that comes by begins
//! anew (invariant **WALK-OWN**). So a walk that ended in a panic leaves nothing behind. Walks of one device, whose graphs
//! may share leaves, wait for each other. A walk that comes to another device begins anew with both, under a number that
//! neither has seen; devices are taken in one order, so walks that cross never wait for each other for good.
//!
//! Nodes are linked through themselves while they wait, so a walk of one device allocates nothing.
//!
//! [`backward_inputs`] puts off what nothing else of the walk waits for: the gradients of weights of products and convolutions, and what
//! comes to a weight through a [`Crossing`].
//! [`WeightGradients`] holds what they need, and computes them when it is told to.
//!
//! A node may stand for a whole graph ([`Tensor::recomputed`]), which takes its place when the walk comes to it.

use crate::autocast::autocast;
use crate::between;
use crate::device::{Backend, CurrentWalk, Device};
use crate::dtype::DType;
use crate::gpu;
use crate::gradient::gradient;
use crate::graph::{Body, GradSink, Inputs, Kind, LeafId, NodeRef, Saved, recording, same_storage};
use crate::kernel;
use crate::op::Op;
use crate::ops::across::Crossing;
use crate::ops::again::Again;
use crate::ops::norm::SharedBatch;
use crate::shape::{Order, Shape};
use crate::tensor::Tensor;
use phalanx_cuda::Spread;
use std::cell::RefCell;
use std::sync::Arc;

/// What the gradient table asks of the walk: which inputs want a gradient, and where it should be written.
pub(crate) struct Wanted<'a> {
    inputs: &'a Inputs,
    device: &'a Device,
    /// How sums go over all parts of a batch, where the op's did.
    pub(crate) shared: Option<Arc<SharedBatch>>,
    /// Who knows the way back, where the op is a map of somebody else.
    pub(crate) crossing: Option<Arc<dyn Crossing>>,
    /// Where casts wait that may come later, if any may.
    late: Option<&'a LateCasts>,
    /// What is to be added to the op's own gradient, which [`receive`] has left to its formula.
    pub(crate) more: Option<Tensor>,
    /// The op's own gradient in the 16 bits of its second input, if whoever made it has rounded it, too.
    pub(crate) rounded: Option<Tensor>,
}

/// Gradients that were made in 16 bits, on their way to their slots in float32: of a GPU, where each launch costs, several go with one.
#[derive(Default)]
struct LateCasts(RefCell<Vec<(Tensor, Tensor)>>);

/// So many bytes of 16-bit gradients wait at most: few enough to be still near when they are read.
const MOST_LATE_BYTES: usize = 16 << 20;

impl LateCasts {
    /// Makes the casts that wait.
    fn make(&self) {
        for pairs in self.0.take().chunk_by(|(a, _), (b, _)| a.device() == b.device()) {
            if let Backend::Gpu(engine) = pairs[0].0.device().backend() {
                gpu::copy::convert_all(engine, pairs);
            }
        }
    }

    /// Has a cast wait, unless that makes many.
    fn push(&self, from: &Tensor, to: &Tensor) {
        self.0.borrow_mut().push((from.clone(), to.clone()));
        let bytes = |(from, _): &(Tensor, Tensor)| from.count() * from.dtype.bytes();
        let are_many = {
            let pairs = self.0.borrow();
            pairs.len() >= Spread::MOST || pairs.iter().map(bytes).sum::<usize>() >= MOST_LATE_BYTES
        };
        if are_many {
            self.make();
        }
    }
}

impl Wanted<'_> {
    pub(crate) fn wants(&self, input: usize) -> bool {
        self.inputs[input].is_some()
    }

    /// Where input `input` lives, which wants a gradient.
    pub(crate) fn device_of(&self, input: usize) -> Device {
        let device = self.inputs[input].as_ref().and_then(|node| node.body().device.clone());
        device.expect("a node in use has a device")
    }

    /// A tensor of stale contents, dense in `order`, to write input `input`'s gradient to: the slot of the gradient arena
    /// itself when it lies so and this is the only gradient that the leaf will get, so that nothing is copied afterwards.
    pub(crate) fn place(&self, input: usize, order: Order, shape: Shape, dtype: DType) -> Tensor {
        let stale = || Tensor::stale_in(order, self.device, shape, dtype);
        self.slot(input, order, dtype).unwrap_or_else(stale)
    }

    /// The same in rows for what is computed in any case: somewhere, if the input wants no gradient.
    pub(crate) fn place_or_stale(&self, input: usize, shape: Shape, dtype: DType) -> Tensor {
        match self.wants(input) {
            true => self.place(input, Order::RowMajor, shape, dtype),
            false => Tensor::stale(self.device, shape, dtype),
        }
    }

    /// The same for what may as well go where `free` lies, which is dense and of that order, shape and type.
    pub(crate) fn place_or(&self, input: usize, order: Order, free: Tensor) -> Tensor {
        self.slot(input, order, free.dtype).unwrap_or(free)
    }

    fn slot(&self, input: usize, order: Order, dtype: DType) -> Option<Tensor> {
        let tensor = {
            let body = self.inputs[input].as_ref()?.body();
            let (Kind::Leaf(Some(slot)), 1, None) = (&body.kind, body.pending, &body.grad) else {
                return None;
            };
            let tensor = slot.tensor();
            let fits = slot.is_stale() && tensor.geometry.lies_in(order) && tensor.dtype == dtype;
            fits.then_some(tensor)?
        };
        // A leaf of the same parameter with other values has the same slot.
        let is_there = |node: &NodeRef| matches!(&node.body().kind, Kind::Leaf(Some(slot)) if same_storage(&slot.tensor().storage, &tensor.storage));
        let others = self.inputs.iter().enumerate().filter(|(other, _)| *other != input);
        let is_taken = others.filter_map(|(_, node)| node.as_ref()).any(is_there);
        (!is_taken).then_some(tensor)
    }

    /// Takes what input `input` has received so far, for one who gives it the sum of that and its own: if it is no leaf, and that is in
    /// rows, of this device, shape and type, and `suits`.
    pub(crate) fn received(
        &self,
        input: usize,
        (device, shape, dtype): (&Device, &Shape, DType),
        suits: impl Fn(&Tensor) -> bool,
    ) -> Option<Tensor> {
        let mut body = self.inputs[input].as_ref()?.body();
        let fits = |grad: &mut Tensor| {
            (grad.device(), grad.shape(), grad.dtype) == (device, shape, dtype)
                && grad.geometry.is_contiguous()
                && suits(grad)
        };
        let is_all = body.more.is_none() && matches!(body.kind, Kind::Op(_));
        if is_all { body.grad.take_if(fits) } else { None }
    }

    /// In which 16 bits input `input` hands its gradient on to an input of its own, if this gradient is all that is still to come, and
    /// nothing is left of what it has received ([`Wanted::received`]).
    pub(crate) fn rounds(&self, input: usize) -> Option<DType> {
        let body = self.inputs[input].as_ref()?.body();
        match body.kind {
            Kind::Op(Op::AddHalf(half)) => {
                let is_all = body.pending == 1 && body.grad.is_none();
                (is_all && body.inputs[1].is_some()).then_some(half)
            }
            _ => None,
        }
    }

    /// Hands input `input` what it rounds.
    pub(crate) fn give_rounded(&self, input: usize, rounded: Tensor) {
        if let Some(node) = &self.inputs[input] {
            node.body().rounded = Some(rounded);
        }
    }

    /// Fills `to`, which is the place of input `input`'s gradient, with the elements of `from`, which lie alike: at once, or where `to` is
    /// a slot that nobody looks at so soon, later.
    pub(crate) fn cast(&self, input: usize, from: &Tensor, to: &Tensor) {
        let is_slot = |node: &NodeRef| matches!(&node.body().kind, Kind::Leaf(Some(slot)) if same_storage(&slot.tensor().storage, &to.storage));
        let late = self.late.filter(|_| from.dtype.is_half() && to.dtype == DType::F32 && to.count() > 0);
        match late.filter(|_| self.inputs[input].as_ref().is_some_and(is_slot)) {
            Some(late) => late.push(from, to),
            None => kernel::copy::convert(from, to),
        }
    }

    /// The slot of the gradient arena that input `input`'s gradient may be added to where it is computed, in rows, since it has one and
    /// this is the only one that the leaf will get in this walk.
    pub(crate) fn sum(&self, input: usize, dtype: DType) -> Option<Tensor> {
        let body = self.inputs[input].as_ref()?.body();
        let (Kind::Leaf(Some(slot)), 1, None) = (&body.kind, body.pending, &body.grad) else { return None };
        let tensor = slot.tensor();
        (!slot.is_stale() && tensor.geometry.is_contiguous() && tensor.dtype == dtype).then_some(tensor)
    }
}

/// Walks back from the outputs, each with its gradient (`None` stands for 1 and needs a single element), and hands the
/// gradient of every leaf to `sink` as soon as it is complete. The graph is spent by it, also where it lies on other devices.
///
/// All outputs live on one device, and walks of one device run one after the other: the sink must not wait for another.
#[track_caller]
pub fn backward(outputs: &[(&Tensor, Option<&Tensor>)], sink: &mut dyn GradSink) {
    walk_back(outputs, sink, &mut None);
}

/// As [`backward`], but what the weights of products, convolutions and tables get from there, and what goes a [`Crossing`]'s way back to
/// a leaf, is put off, so that the gradients of what came in are there sooner. Leaves that lack such a part aren't handed to `sink`: [`WeightGradients::finish`] hands them
/// over.
#[track_caller]
pub fn backward_inputs(outputs: &[(&Tensor, Option<&Tensor>)], sink: &mut dyn GradSink) -> WeightGradients {
    let mut put_off = Some(WeightGradients::default());
    walk_back(outputs, sink, &mut put_off);
    put_off.unwrap_or_default()
}

#[track_caller]
fn walk_back(
    outputs: &[(&Tensor, Option<&Tensor>)],
    sink: &mut dyn GradSink,
    put_off: &mut Option<WeightGradients>,
) {
    // Formulas are of the types that operations had.
    autocast(DType::F32, || walk(outputs, sink, put_off));
}

#[track_caller]
fn walk(
    outputs: &[(&Tensor, Option<&Tensor>)],
    sink: &mut dyn GradSink,
    put_off: &mut Option<WeightGradients>,
) {
    let Some((first, _)) = outputs.first() else { return };
    let mut others = Vec::new();
    loop {
        let walk = Walk::begin(first.device(), &others);
        let found = count(outputs, &walk);
        if let Some(device) = found {
            drop(walk);
            others.push(device);
            continue;
        }
        let (list, late) = (List::default(), LateCasts::default());
        let mut ahead = Ahead { number: walk.number, list, sink, put_off, late };
        for (output, _) in outputs {
            let node = output.node.as_ref().expect("checked by count");
            let ready = {
                let mut body = node.body();
                // An output that is named twice is worked on once.
                body.pending == 0 && std::mem::take(&mut body.walk) == walk.number
            };
            if ready {
                ahead.list.push(node);
            }
        }
        while let Some(node) = ahead.list.pop() {
            ahead.work(node);
        }
        ahead.late.make();
        return;
    }
}

/// A walk that goes on, and that has its devices for itself.
struct Walk<'a> {
    number: u64,
    devices: (&'a Device, &'a [Device]),
    _held: (Option<CurrentWalk<'a>>, Vec<CurrentWalk<'a>>),
}

impl<'a> Walk<'a> {
    fn begin(first: &'a Device, others: &'a [Device]) -> Walk<'a> {
        let devices = (first, others);
        if others.is_empty() {
            let held = first.begin_walk();
            return Walk { number: *held, devices, _held: (Some(held), Vec::new()) };
        }
        let mut all: Vec<&Device> = others.iter().chain([first]).collect();
        all.sort_by_key(|device| device.address());
        let mut held: Vec<_> = all.into_iter().map(Device::begin_walk).collect();
        let number = held.iter().map(|number| **number).max().expect("at least two devices");
        held.iter_mut().for_each(|own| **own = number);
        Walk { number, devices, _held: (None, held) }
    }

    /// The device of this node, if the walk doesn't have it.
    fn lacks(&self, body: &Body) -> Option<Device> {
        let (first, others) = self.devices;
        let device = body.device.as_ref()?;
        (device != first && !others.contains(device)).then(|| device.clone())
    }
}

/// Counts, for every node below the outputs, the gradients that it will get, and gives the outputs theirs. Ends early with a
/// device that the graph goes on to and the walk lacks.
#[track_caller]
fn count(outputs: &[(&Tensor, Option<&Tensor>)], walk: &Walk<'_>) -> Option<Device> {
    let (first, _) = outputs.first()?;
    let mut list = List::default();
    for (output, grad) in outputs {
        let Some(node) = &output.node else {
            panic!(
                "backward: the output of shape {} depends on no tensor that needs a gradient",
                output.shape()
            );
        };
        assert!(
            output.device() == first.device(),
            "backward: the outputs of shapes {} and {} live on different devices: walk back from each alone",
            first.shape(),
            output.shape()
        );
        let grad = match grad {
            Some(grad) => {
                let (got, want) = (grad.shape(), output.shape());
                assert!(got == want, "backward: a gradient of shape {got} for an output of shape {want}");
                let (got, want) = (grad.dtype(), output.dtype());
                assert!(got == want, "backward: a gradient of {got} for an output of {want}");
                (*grad).detach()
            }
            None => {
                let shape = output.shape();
                assert!(
                    shape.count() == 1,
                    "backward: an output of shape {shape} needs a gradient; only a scalar has 1 by default"
                );
                Tensor::ones(output.device(), *shape, output.dtype())
            }
        };
        visit(node, walk.number, &mut list);
        receive(node, grad);
    }
    while let Some(node) = list.pop() {
        assert!(
            !matches!(node.body().kind, Kind::Spent),
            "backward: this graph was already walked back; a second walk needs a second forward pass"
        );
        for below in all_below(&node) {
            if let Some(device) = walk.lacks(&below.body()) {
                return Some(device);
            }
            expect_one_more(&below, walk.number, &mut list);
        }
    }
    None
}

/// The nodes that a node's gradient goes to.
fn all_below(node: &NodeRef) -> impl Iterator<Item = NodeRef> {
    (0..).map_while(|i| node.body().below(i).map(|below| below.cloned())).flatten()
}

/// Notes that a node will get a gradient more; if this walk comes to it for the first time, it is put into the list.
fn expect_one_more(node: &NodeRef, walk: u64, list: &mut List) {
    visit(node, walk, list);
    node.body().pending += 1;
}

/// Gradients of weights that a walk back put off, with all that they need.
#[derive(Default)]
#[must_use = "the weights have no gradients before `finish`"]
pub struct WeightGradients {
    parts: Vec<Part>,
    /// The leaves that lack a part, each once, in the order of the walk.
    leaves: Vec<NodeRef>,
}

/// What one operation gives to weights.
struct Part {
    op: Op,
    inputs: Inputs,
    saved: Saved,
    shared: Option<Arc<SharedBatch>>,
    crossing: Option<Arc<dyn Crossing>>,
    grad: Tensor,
    device: Device,
}

impl WeightGradients {
    /// Adds what was put off to the slots of the weights, and hands them to `sink`. No walk may go on in this thread.
    pub fn finish(self, sink: &mut dyn GradSink) {
        autocast(DType::F32, || self.add_up(sink));
    }

    fn add_up(self, sink: &mut dyn GradSink) {
        for Part { op, inputs, saved, shared, crossing, grad, device } in self.parts {
            let walk = device.begin_walk();
            for input in inputs.iter().flatten() {
                let mut body = input.body();
                if std::mem::replace(&mut body.walk, *walk) != *walk {
                    (body.pending, body.grad) = (0, None);
                }
                body.pending += 1;
            }
            let wanted = Wanted {
                inputs: &inputs,
                device: &device,
                shared,
                crossing,
                late: None,
                more: None,
                rounded: None,
            };
            let grads = gradient(&op, &grad, &saved, &wanted);
            for (input, grad) in inputs.iter().zip(grads) {
                if let (Some(input), Some(grad)) = (input, grad)
                    && let Kind::Leaf(Some(slot)) = &input.body().kind
                {
                    // Where the operation was given a cast of the weight.
                    slot.settle_with(&grad.cast(slot.tensor().dtype));
                }
            }
        }
        for leaf in self.leaves {
            let slot = match &leaf.body().kind {
                Kind::Leaf(Some(slot)) => slot.tensor(),
                _ => unreachable!("only leaves with a slot are put off"),
            };
            sink.finished(LeafId(leaf), slot);
        }
    }

    /// Takes the weights among the inputs of an operation out of them.
    fn put_off(
        &mut self,
        op: &Op,
        inputs: &mut Inputs,
        saved: &Saved,
        (shared, crossing): (&Option<Arc<SharedBatch>>, &Option<Arc<dyn Crossing>>),
        (grad, device): (&Tensor, &Device),
    ) {
        let is_behind_gelu = matches!(op, Op::GeluLinearInOut(..));
        let is_for_weights = matches!(
            op,
            Op::Linear(..)
                | Op::LinearInOut(..)
                | Op::Conv2d(_)
                | Op::ConvTranspose2d(_)
                | Op::Matmul(..)
                | Op::Embedding { .. }
                | Op::Across
        );
        if !is_for_weights && !is_behind_gelu {
            return;
        }
        let mut weights = Inputs::default();
        for (weight, input) in weights.iter_mut().zip(inputs) {
            if let Some(leaf) = input.as_ref().and_then(weight_behind) {
                // The walk doesn't come to a cast in between.
                (*weight, *input) = (Some(leaf), None);
            }
        }
        for weight in weights.iter().flatten() {
            let mut body = weight.body();
            body.pending -= 1;
            // What it got from elsewhere has nothing more to wait for in this walk.
            if body.pending == 0
                && let Some(grad) = body.grad.take()
                && let Kind::Leaf(Some(slot)) = &body.kind
            {
                slot.settle_with(&grad);
            }
            drop(body);
            if !self.lacks(weight) {
                self.leaves.push(weight.clone());
            }
        }
        if weights.iter().any(Option::is_some) {
            let mut saved = saved.clone();
            if is_behind_gelu {
                // What GELU was given is for the gradient of the rows alone.
                saved[2] = None;
            }
            self.parts.push(Part {
                op: *op,
                inputs: weights,
                saved,
                shared: shared.clone(),
                crossing: crossing.clone(),
                grad: grad.clone(),
                device: device.clone(),
            });
        }
    }

    fn lacks(&self, leaf: &NodeRef) -> bool {
        self.leaves.iter().any(|other| other.is(leaf))
    }
}

/// The weight that an operation was given: as it is, or cast for this operation alone.
fn weight_behind(input: &NodeRef) -> Option<NodeRef> {
    let is_weight = |node: &NodeRef| matches!(node.body().kind, Kind::Leaf(Some(_)));
    if is_weight(input) {
        return Some(input.clone());
    }
    let cast = {
        let body = input.body();
        match (&body.kind, body.pending, &body.grad) {
            // One that has received a gradient hands that on itself.
            (Kind::Op(Op::Cast(_)), 1, None) => body.below(0).flatten().cloned(),
            _ => None,
        }
    };
    cast.filter(is_weight)
}

/// Nodes that wait, linked through themselves. None keeps its link, even if a walk ends early.
#[derive(Default)]
struct List(Option<NodeRef>);

impl List {
    fn push(&mut self, node: &NodeRef) {
        node.body().next = self.0.take();
        self.0 = Some(node.clone());
    }

    fn pop(&mut self) -> Option<NodeRef> {
        let node = self.0.take()?;
        self.0 = node.body().next.take();
        Some(node)
    }
}

impl Drop for List {
    fn drop(&mut self) {
        while self.pop().is_some() {}
    }
}

/// Puts a node that this walk comes to for the first time into the list, with nothing received yet.
fn visit(node: &NodeRef, walk: u64, list: &mut List) {
    let mut body = node.body();
    if std::mem::replace(&mut body.walk, walk) != walk {
        (body.pending, body.grad, body.more, body.rounded) = (0, None, None, None);
        drop(body);
        list.push(node);
    }
}

/// Adds a gradient to what a node has received.
fn receive(node: &NodeRef, grad: Tensor) {
    let mut body = node.body();
    let Some(mut sum) = body.grad.take() else {
        body.grad = Some(grad);
        return;
    };
    if let Some(more) = body.more.take() {
        sum = sum.plus_in_place(&more);
    }
    (body.grad, body.more) = match adds_up_itself(&body, &sum, &grad) {
        true => (Some(sum), Some(grad)),
        false => (Some(sum.plus_in_place(&grad)), None),
    };
}

/// Whether the gradient formula of a node's op reads two gradients that lie alike as it reads one: a batch norm's on a GPU does.
fn adds_up_itself(body: &Body, sum: &Tensor, grad: &Tensor) -> bool {
    matches!(body.kind, Kind::Op(Op::BatchNorm { .. }))
        && body.shared.is_none()
        && sum.device().gpu().is_some()
        && (sum.device(), sum.dtype, sum.shape()) == (grad.device(), grad.dtype, grad.shape())
        && sum.order().is_some()
        && sum.order() == grad.order()
}

/// What is left of a walk: the nodes that have all of their gradients, and what is done with those of leaves.
struct Ahead<'a> {
    number: u64,
    list: List,
    sink: &'a mut dyn GradSink,
    put_off: &'a mut Option<WeightGradients>,
    late: LateCasts,
}

impl Ahead<'_> {
    /// Finishes one node that has all of its gradients.
    #[track_caller]
    fn work(&mut self, node: NodeRef) {
        let (op, mut inputs, mut saved, (lent, made), (grad, more, rounded), device) = {
            let mut body = node.body();
            let (grad, more, rounded) = (body.grad.take(), body.more.take(), body.rounded.take());
            if let Kind::Leaf(slot) = &body.kind {
                // It stays one, also where its slot can't be written to just now.
                let finished = match (slot, grad) {
                    (_, None) => None,
                    // It becomes the caller's, who may write to it.
                    (None, Some(grad)) => Some(grad.into_own()),
                    (Some(slot), Some(grad)) => Some(slot.settle_with(&grad)),
                };
                drop(body);
                let is_whole = self.put_off.as_ref().is_none_or(|put_off| !put_off.lacks(&node));
                if let Some(grad) = finished.filter(|_| is_whole) {
                    let leaf = LeafId(node);
                    if self.sink.looks(&leaf) {
                        self.late.make();
                    }
                    self.sink.finished(leaf, grad);
                }
                return;
            }
            match std::mem::take(&mut body.kind) {
                Kind::Leaf(_) => unreachable!("leaves were dealt with above"),
                Kind::Spent => unreachable!("the walk has found this node fresh, and works on it once"),
                Kind::Op(op) => {
                    let device = body.device.clone().expect("a recorded node has a device");
                    check_saved(&op, &body);
                    let (inputs, saved) = (std::mem::take(&mut body.inputs), std::mem::take(&mut body.saved));
                    let lent = (body.shared.take(), body.crossing.take(), body.again.take());
                    (op, inputs, saved, (lent, body.made.take()), (grad, more, rounded), device)
                }
            }
        };
        between::look();
        let (shared, crossing, again) = lent;
        if let Some(again) = again {
            let start = saved[0].take().expect("a part that is computed again has a beginning");
            return self.unfold(again, Tensor { node: inputs[0].take(), ..start }, grad);
        }
        if let Some(made) = made.filter(|_| grad.is_some()) {
            saved[0] = Some(made.again(&saved));
        }
        if let (Some(put_off), Some(grad)) = (self.put_off.as_mut(), &grad) {
            put_off.put_off(&op, &mut inputs, &saved, (&shared, &crossing), (grad, &device));
        }
        let mut grads = match &grad {
            Some(grad) if inputs.iter().any(Option::is_some) => {
                let late = Some(&self.late).filter(|_| self.may_be_late(&op, &inputs, &device));
                let (inputs, device) = (&inputs, &device);
                let wanted = Wanted { inputs, device, shared, crossing, late, more, rounded };
                gradient(&op, grad, &saved, &wanted)
            }
            _ => Default::default(),
        };
        drop((saved, grad));
        for (input, grad) in inputs.into_iter().zip(&mut grads) {
            let Some(input) = input else { continue };
            if let Some(grad) = grad.take() {
                receive(&input, grad);
            }
            self.one_came(input);
        }
    }

    /// Whether the gradient of what was cast to 16 bits for this op is that of a leaf which nobody looks at yet.
    fn may_be_late(&self, op: &Op, inputs: &Inputs, device: &Device) -> bool {
        let (Op::Cast(DType::F32), Some(leaf)) = (op, &inputs[0]) else { return false };
        let is_leaf = matches!(leaf.body().kind, Kind::Leaf(Some(_)));
        is_leaf && device.gpu().is_some() && !self.sink.looks(&LeafId(leaf.clone()))
    }

    /// A gradient that a node waited for has come, or won't.
    #[track_caller]
    fn one_came(&mut self, node: NodeRef) {
        let ready = {
            let mut body = node.body();
            body.pending -= 1;
            body.pending == 0
        };
        if ready {
            let is_leaf = matches!(node.body().kind, Kind::Leaf(_));
            if is_leaf { self.work(node) } else { self.list.push(&node) }
        }
    }

    /// Computes a part once more, and puts the graph that this leaves in the place of the node that stood for it. The walk goes
    /// through that as if it had been there from the start: its end is worked on next, and where it begins and its leaves wait for
    /// each gradient that it has for them, instead of for the one that the node counted as.
    #[track_caller]
    fn unfold(&mut self, again: Again, start: Tensor, grad: Option<Tensor>) {
        let Again { compute, leaves } = again;
        let below: Vec<NodeRef> = leaves.into_iter().chain(start.node.clone()).collect();
        if let Some(grad) = grad {
            let end = recording(true, || compute(&start));
            assert!(
                end.shape() == grad.shape(),
                "backward: what was computed again has shape {}, and had {} before",
                end.shape(),
                grad.shape()
            );
            let end = end.node.expect("what was recorded the first time is recorded again");
            let mut list = List::default();
            visit(&end, self.number, &mut list);
            while let Some(node) = list.pop() {
                all_below(&node).for_each(|below| expect_one_more(&below, self.number, &mut list));
            }
            receive(&end, grad);
            self.list.push(&end);
        }
        below.into_iter().for_each(|node| self.one_came(node));
    }
}

/// Panics if a value that `op` saved has been overwritten since, and so isn't what the gradient formula needs.
#[track_caller]
fn check_saved(op: &Op, body: &Body) {
    for (saved, &then) in body.saved.iter().zip(&body.writes) {
        let Some(saved) = saved else { continue };
        assert!(
            saved.storage.writes() == then,
            "backward: a value of shape {} that {op:?} needs was overwritten after the forward pass: write to it after \
             the backward pass, or give the forward pass a copy (such as x * 1.0)",
            saved.shape()
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Arena, Conv2dOptions, DType, Grads, Layout, Philox};

    /// Notes which parameters are handed over, in order.
    #[derive(Default)]
    struct Handed(Vec<usize>);

    impl GradSink for Handed {
        fn finished(&mut self, leaf: LeafId, _: Tensor) {
            self.0.extend(leaf.slot());
        }
    }

    /// Half of what comes in, whose gradient is doubled.
    struct Halved;

    impl Crossing for Halved {
        fn forth(&self, x: &Tensor) -> Tensor {
            x * 0.5
        }

        fn back(&self, grad: &Tensor) -> Tensor {
            grad * 2.0
        }
    }

    /// What a small net of all that can be put off comes to, with a weight that is used twice and a bias that is also added.
    fn loss(leaves: &[Tensor], x: &Tensor) -> Tensor {
        let [kernel, weight, bias, square, scale, crossed] = leaves else { panic!("six leaves") };
        let y = x.conv2d(kernel, None, Conv2dOptions::default()).flatten_from(1);
        let y = y.linear(weight, Some(bias)).tanh() + bias;
        let halved: Arc<dyn Crossing> = Arc::new(Halved);
        let y = y.matmul(square).matmul(square) * scale + crossed.across(&halved);
        y.square().sum_all()
    }

    #[test]
    fn what_was_put_off_adds_up_to_the_same_bits_and_is_handed_over_once() {
        let device = Device::cpu(1);
        let layout = [[2, 1, 2, 2].into(), [3, 8].into(), [3].into(), [3, 3].into(), [3].into(), [3].into()];
        let layout = Layout::new(&layout);
        let (values, grads) =
            (Arena::new(&device, DType::F32, &layout), Grads::new(&device, DType::F32, &layout));
        let leaves: Vec<Tensor> = (0..layout.count()).map(|i| grads.leaf(i, &values)).collect();
        for (i, leaf) in leaves.iter().enumerate() {
            leaf.copy_from(&Tensor::uniform(
                &device,
                *leaf.shape(),
                -1.0,
                1.0,
                DType::F32,
                Philox::new(1, i as u64),
            ));
        }
        let batch = |i| Tensor::uniform(&device, [4, 1, 3, 3], -1.0, 1.0, DType::F32, Philox::new(2, i));
        // What is put off is the weight's part, whether a product was given the weight or its cast.
        for dtype in [DType::F32, DType::BF16] {
            // Two walks add up; in the second run all forwards and inputs come before any weight.
            grads.zero();
            for i in 0..2 {
                autocast(dtype, || loss(&leaves, &batch(i))).backward();
            }
            let whole = grads.arena().flat::<f32>().to_vec();
            grads.zero();
            let (mut early, mut late) = (Handed::default(), Handed::default());
            let losses = [0, 1].map(|i| autocast(dtype, || loss(&leaves, &batch(i))));
            let put_off = losses.map(|loss| backward_inputs(&[(&loss, None)], &mut early));
            assert_eq!(early.0, [4, 4], "only the scale is no weight of a product");
            put_off.into_iter().for_each(|weights| weights.finish(&mut late));
            late.0.chunks_mut(5).for_each(<[usize]>::sort_unstable);
            assert_eq!(late.0, [0, 1, 2, 3, 5, 0, 1, 2, 3, 5], "each once a walk");
            let bits = |values: &[f32]| values.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
            let parts = grads.arena().flat::<f32>();
            for i in [0, 1, 4, 5] {
                assert_eq!(
                    bits(&parts[layout.range(i)]),
                    bits(&whole[layout.range(i)]),
                    "parameter {i}, {dtype}"
                );
            }
            // What has several parts in a walk is summed in another order.
            for i in [2, 3] {
                let apart =
                    parts[layout.range(i)].iter().zip(&whole[layout.range(i)]).map(|(a, b)| (a - b).abs());
                assert!(apart.fold(0.0, f32::max) < 1e-5, "parameter {i}, {dtype}");
            }
        }
    }

    #[test]
    fn one_cast_of_a_weight_in_two_products_loses_neithers_gradient() {
        let (device, layout) = (Device::cpu(1), Layout::new(&[[2, 3].into()]));
        let (values, grads) =
            (Arena::new(&device, DType::F32, &layout), Grads::new(&device, DType::F32, &layout));
        let cast = grads.leaf(0, &values).cast(DType::BF16);
        let x = Tensor::ones(&device, [4, 3], DType::BF16);
        let sum = (x.linear(&cast, None) + x.linear(&cast, None)).sum_all();
        backward_inputs(&[(&sum, None)], &mut Handed::default()).finish(&mut Handed::default());
        assert_eq!(grads.arena().tensor(0).to_vec::<f32>(), [8.0; 6]);
    }

    #[test]
    fn weights_that_lie_the_other_way_around_are_put_off_too() {
        let device = Device::cpu(1);
        let layout = Layout::new(&[[3, 2].into(), [2].into()]);
        let (values, grads) =
            (Arena::new(&device, DType::F32, &layout), Grads::new(&device, DType::F32, &layout));
        let [weight, bias] = [0, 1].map(|i| grads.leaf(i, &values));
        let x = Tensor::ones(&device, [4, 3], DType::F32);
        let put_off = backward_inputs(
            &[(&x.linear_in_out(&weight, Some(&bias)).sum_all(), None)],
            &mut Handed::default(),
        );
        assert_eq!(grads.settle(), [0, 1], "neither has any yet");
        grads.zero();
        put_off.finish(&mut Handed::default());
        let [of_weight, of_bias] = [0, 1].map(|i| grads.arena().tensor(i).to_vec::<f32>());
        assert_eq!((of_weight, of_bias), (vec![4.0; 6], vec![4.0; 2]));
    }

    #[test]
    fn products_that_are_added_to_a_slot_have_the_bits_of_sums() {
        let sizes = [
            (1, 8, 40),
            (7, 300, 33),
            (64, 260, 310),
            (128, 100, 513),
            (128, 1030, 65),
            (130, 64, 96),
            // Where the crate would round sum and product at once.
            (1, 1500, 1501),
            (2, 1500, 1501),
            (64, 40_000, 1),
            (64, 1, 40_000),
        ];
        for (threads, (rows, inputs, outputs)) in [1, 2].into_iter().flat_map(|t| sizes.map(|of| (t, of))) {
            let device = Device::cpu(threads);
            let random = |shape: [usize; 2], key| {
                Tensor::uniform(&device, shape, -1.0, 1.0, DType::F32, Philox::new(3, key))
            };
            for in_out in [false, true] {
                let shape = if in_out { [inputs, outputs] } else { [outputs, inputs] };
                let layout = Layout::new(&[shape.into()]);
                let (values, grads) =
                    (Arena::new(&device, DType::F32, &layout), Grads::new(&device, DType::F32, &layout));
                let weight = grads.leaf(0, &values);
                weight.copy_from(&random(shape, 1));
                let pass = |key| {
                    let x = random([rows, inputs], key);
                    let y = if in_out { x.linear_in_out(&weight, None) } else { x.linear(&weight, None) };
                    backward(&[(&y, Some(&random([rows, outputs], key + 10)))], &mut Handed::default());
                    grads.arena().tensor(0).to_vec::<f32>()
                };
                grads.zero();
                pass(1);
                let both = pass(2);
                let alone = [1, 2].map(|key| {
                    grads.zero();
                    pass(key)
                });
                let sums = alone[0].iter().zip(&alone[1]).map(|(a, b)| a + b);
                assert!(
                    both.iter().zip(sums).all(|(both, sum)| both.to_bits() == sum.to_bits()),
                    "{rows} rows, {shape:?}, {threads} threads"
                );
            }
        }
    }

    #[test]
    fn rows_get_their_gradient_through_a_weight_that_learns_nothing() {
        let device = Device::cpu(1);
        let weight = Tensor::ones(&device, [3, 2], DType::F32);
        for in_out in [false, true] {
            let x = Tensor::ones(&device, [4, if in_out { 3 } else { 2 }], DType::F32).requires_grad();
            let y = if in_out { x.linear_in_out(&weight, None) } else { x.linear(&weight, None) };
            let mut gradients = crate::Gradients::default();
            backward(&[(&y.sum_all(), None)], &mut gradients);
            let want = if in_out { vec![2.0; 12] } else { vec![3.0; 8] };
            assert_eq!(gradients.get(&x).unwrap().to_vec::<f32>(), want);
        }
    }

    #[test]
    fn the_gradient_of_what_came_in_is_there_before_the_weights_are() {
        let device = Device::cpu(1);
        let layout = Layout::new(&[[2, 3].into()]);
        let (values, grads) =
            (Arena::new(&device, DType::F32, &layout), Grads::new(&device, DType::F32, &layout));
        let weight = grads.leaf(0, &values);
        weight.fill(2.0);
        let x = Tensor::ones(&device, [1, 3], DType::F32).requires_grad();
        let mut inputs = crate::Gradients::default();
        let put_off = backward_inputs(&[(&x.linear(&weight, None).sum_all(), None)], &mut inputs);
        assert_eq!(inputs.get(&x).unwrap().to_vec::<f32>(), [4.0; 3]);
        assert_eq!(grads.settle(), [0], "the weight has none yet");
        grads.zero();
        put_off.finish(&mut Handed::default());
        assert_eq!(grads.arena().tensor(0).to_vec::<f32>(), [1.0; 6]);
    }
}
