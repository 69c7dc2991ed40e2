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
//! [`backward_inputs`] puts off what nothing else of the walk waits for: the gradients of weights of products and convolutions.
//! [`WeightGradients`] holds what they need, and computes them when it is told to.

use crate::device::Device;
use crate::dtype::DType;
use crate::gradient::gradient;
use crate::graph::{Body, GradSink, Inputs, Kind, LeafId, MAX_INPUTS, NodeRef, Saved};
use crate::op::Op;
use crate::ops::norm::SumOverBatch;
use crate::shape::{Order, Shape};
use crate::tensor::Tensor;
use std::sync::MutexGuard;

/// What the gradient table asks of the walk: which inputs want a gradient, and where it should be written.
pub(crate) struct Wanted<'a> {
    inputs: &'a Inputs,
    device: &'a Device,
    /// How sums go over all parts of a batch, where the op's did.
    pub(crate) shared: Option<SumOverBatch>,
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
        if let Some(node) = &self.inputs[input] {
            let body = node.body();
            if let (Kind::Leaf(Some(slot)), 1, None) = (&body.kind, body.pending, &body.grad)
                && slot.is_stale()
                && slot.tensor().geometry.lies_in(order)
            {
                return slot.tensor();
            }
        }
        Tensor::stale_in(order, self.device, shape, dtype)
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

/// As [`backward`], but what the weights of products, convolutions and tables get from there is put off, so that the gradients of
/// what came in are there sooner. Leaves that lack such a part aren't handed to `sink`: [`WeightGradients::finish`] hands them
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
        let mut list = List::default();
        for (output, _) in outputs {
            let node = output.node.as_ref().expect("checked by count");
            let ready = {
                let mut body = node.body();
                // An output that is named twice is worked on once.
                body.pending == 0 && std::mem::take(&mut body.walk) == walk.number
            };
            if ready {
                list.push(node);
            }
        }
        while let Some(node) = list.pop() {
            work(node, &mut list, sink, put_off);
        }
        return;
    }
}

/// A walk that goes on, and that has its devices for itself.
struct Walk<'a> {
    number: u64,
    devices: (&'a Device, &'a [Device]),
    _held: (Option<MutexGuard<'a, u64>>, Vec<MutexGuard<'a, u64>>),
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
        for i in 0..MAX_INPUTS {
            let input = node.body().inputs[i].clone();
            if let Some(input) = input {
                if let Some(device) = walk.lacks(&input.body()) {
                    return Some(device);
                }
                visit(&input, walk.number, &mut list);
                input.body().pending += 1;
            }
        }
    }
    None
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
    shared: Option<SumOverBatch>,
    grad: Tensor,
    device: Device,
}

impl WeightGradients {
    /// Adds what was put off to the slots of the weights, and hands them to `sink`. No walk may go on in this thread.
    pub fn finish(self, sink: &mut dyn GradSink) {
        for Part { op, inputs, saved, shared, grad, device } in self.parts {
            let walk = device.begin_walk();
            for input in inputs.iter().flatten() {
                let mut body = input.body();
                if std::mem::replace(&mut body.walk, *walk) != *walk {
                    (body.pending, body.grad) = (0, None);
                }
                body.pending += 1;
            }
            let grads = gradient(&op, &grad, &saved, &Wanted { inputs: &inputs, device: &device, shared });
            for (input, grad) in inputs.iter().zip(grads) {
                if let (Some(input), Some(grad)) = (input, grad)
                    && let Kind::Leaf(Some(slot)) = &input.body().kind
                {
                    slot.settle_with(&grad);
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
        rest: (&Option<SumOverBatch>, &Tensor, &Device),
    ) {
        if !matches!(op, Op::Linear(..) | Op::Conv2d(_) | Op::Matmul(..) | Op::Embedding { .. }) {
            return;
        }
        let is_weight = |input: &NodeRef| matches!(input.body().kind, Kind::Leaf(Some(_)));
        let mut weights = Inputs::default();
        for (weight, input) in weights.iter_mut().zip(inputs) {
            if input.as_ref().is_some_and(is_weight) {
                *weight = input.take();
            }
        }
        for weight in weights.iter().flatten() {
            weight.body().pending -= 1;
            if !self.lacks(weight) {
                self.leaves.push(weight.clone());
            }
        }
        if weights.iter().any(Option::is_some) {
            let (shared, grad, device) = (rest.0.clone(), rest.1.clone(), rest.2.clone());
            self.parts.push(Part { op: *op, inputs: weights, saved: saved.clone(), shared, grad, device });
        }
    }

    fn lacks(&self, leaf: &NodeRef) -> bool {
        self.leaves.iter().any(|other| other.is(leaf))
    }
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
        (body.pending, body.grad) = (0, None);
        drop(body);
        list.push(node);
    }
}

/// Adds a gradient to what a node has received.
fn receive(node: &NodeRef, grad: Tensor) {
    let mut body = node.body();
    body.grad = Some(match body.grad.take() {
        None => grad,
        Some(sum) => sum.plus_in_place(&grad),
    });
}

/// Finishes one node that has all of its gradients.
#[track_caller]
fn work(node: NodeRef, list: &mut List, sink: &mut dyn GradSink, put_off: &mut Option<WeightGradients>) {
    let (op, mut inputs, saved, shared, grad, device) = {
        let mut body = node.body();
        let grad = body.grad.take();
        match std::mem::take(&mut body.kind) {
            Kind::Leaf(slot) => {
                let finished = match (&slot, grad) {
                    (_, None) => None,
                    // It becomes the caller's, who may write to it.
                    (None, Some(grad)) => Some(grad.into_own()),
                    (Some(slot), Some(grad)) => Some(slot.settle_with(&grad)),
                };
                body.kind = Kind::Leaf(slot);
                drop(body);
                let is_whole = put_off.as_ref().is_none_or(|put_off| !put_off.lacks(&node));
                if let Some(grad) = finished.filter(|_| is_whole) {
                    sink.finished(LeafId(node), grad);
                }
                return;
            }
            Kind::Spent => unreachable!("the walk has found this node fresh, and works on it once"),
            Kind::Op(op) => {
                let device = body.device.clone().expect("a recorded node has a device");
                check_saved(&op, &body);
                let (inputs, saved) = (std::mem::take(&mut body.inputs), std::mem::take(&mut body.saved));
                (op, inputs, saved, body.shared.take(), grad, device)
            }
        }
    };
    if let (Some(put_off), Some(grad)) = (put_off.as_mut(), &grad) {
        put_off.put_off(&op, &mut inputs, &saved, (&shared, grad, &device));
    }
    let mut grads = match &grad {
        Some(grad) if inputs.iter().any(Option::is_some) => {
            gradient(&op, grad, &saved, &Wanted { inputs: &inputs, device: &device, shared })
        }
        _ => Default::default(),
    };
    drop((saved, grad));
    for (input, grad) in inputs.into_iter().zip(&mut grads) {
        let Some(input) = input else { continue };
        if let Some(grad) = grad.take() {
            receive(&input, grad);
        }
        let ready = {
            let mut body = input.body();
            body.pending -= 1;
            body.pending == 0
        };
        if ready {
            let is_leaf = matches!(input.body().kind, Kind::Leaf(_));
            if is_leaf { work(input, list, sink, put_off) } else { list.push(&input) }
        }
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
