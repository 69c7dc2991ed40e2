//! The walk back through the graph that operations recorded.
//!
//! [`backward`] first counts how many gradients each node will receive, then walks from the outputs down; a node is worked on
//! once all of its gradients are there. A leaf is finished at that very moment and handed to the [`GradSink`], while the rest
//! of the walk is still to come: that is what lets communication start early. The order follows from the graph alone, so it
//! is the same in every run and on every rank.
//!
//! What a walk notes in a node belongs to that walk: it carries the walk's number, and the next walk that comes by begins
//! anew (invariant **WALK-OWN**). So a walk that ended in a panic leaves nothing behind. Walks of one device, whose graphs
//! may share leaves, wait for each other.
//!
//! Nodes are linked through themselves while they wait, so a walk allocates nothing.

use crate::device::Device;
use crate::dtype::DType;
use crate::gradient::gradient;
use crate::graph::{Body, GradSink, Inputs, Kind, LeafId, MAX_INPUTS, NodeRef};
use crate::op::Op;
use crate::ops::norm::SumOverBatch;
use crate::shape::{Order, Shape};
use crate::tensor::Tensor;

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
/// gradient of every leaf to `sink` as soon as it is complete. The graph is spent by it.
///
/// All outputs live on one device, and walks of one device run one after the other: the sink must not wait for another.
#[track_caller]
pub fn backward(outputs: &[(&Tensor, Option<&Tensor>)], sink: &mut dyn GradSink) {
    let Some((first, _)) = outputs.first() else { return };
    let walk = first.device().begin_walk();
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
        visit(node, *walk, &mut list);
        receive(node, grad);
    }
    // Count, for every node below the outputs, the gradients it will get.
    while let Some(node) = list.pop() {
        assert!(
            !matches!(node.body().kind, Kind::Spent),
            "backward: this graph was already walked back; a second walk needs a second forward pass"
        );
        for i in 0..MAX_INPUTS {
            let input = node.body().inputs[i].clone();
            if let Some(input) = input {
                visit(&input, *walk, &mut list);
                input.body().pending += 1;
            }
        }
    }
    for (output, _) in outputs {
        let node = output.node.as_ref().expect("checked above");
        let ready = {
            let mut body = node.body();
            // An output that is named twice is worked on once.
            body.pending == 0 && std::mem::take(&mut body.walk) == *walk
        };
        if ready {
            list.push(node);
        }
    }
    while let Some(node) = list.pop() {
        work(node, &mut list, sink);
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
fn work(node: NodeRef, list: &mut List, sink: &mut dyn GradSink) {
    let (op, inputs, saved, shared, grad, device) = {
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
                if let Some(grad) = finished {
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
    let mut grads = match &grad {
        Some(grad) => gradient(&op, grad, &saved, &Wanted { inputs: &inputs, device: &device, shared }),
        None => Default::default(),
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
            if is_leaf { work(input, list, sink) } else { list.push(&input) }
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
