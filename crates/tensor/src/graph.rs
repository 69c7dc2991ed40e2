//! Eager autograd: the graph that operations record, and the walk back through it.
//!
//! An operation on tensors that need a gradient makes one [`Node`]: which op it was, the nodes of its inputs, and the values
//! its gradient formula needs. Nodes don't hold the tensors they came from, so a value that no formula needs is free as soon
//! as the forward pass lets it go. [`backward`] first counts how many gradients each node will receive, then walks from the
//! outputs down; a node is worked on once all of its gradients are there. A leaf is finished at that very moment and handed
//! to the [`GradSink`], while the rest of the walk is still to come: that is what lets communication start early. The order
//! follows from the graph alone, so it is the same in every run and on every rank.
//!
//! What a walk notes in a node belongs to that walk: it carries the walk's number, and the next walk that comes by begins
//! anew (invariant **WALK-OWN**). So a walk that ended in a panic leaves nothing behind. Walks of one device, whose graphs
//! may share leaves, wait for each other.
//!
//! Nodes are recycled through the device and linked through themselves while they wait, so a walk allocates nothing.

use crate::arena::Slot;
use crate::device::Device;
use crate::dtype::DType;
use crate::gradient::gradient;
use crate::op::Op;
use crate::shape::Shape;
use crate::storage::Storage;
use crate::tensor::Tensor;
use std::cell::Cell;
use std::hash::{Hash, Hasher};
use std::sync::{Arc, Mutex, MutexGuard};

/// The most tensors that an op with a gradient takes.
pub(crate) const MAX_INPUTS: usize = 3;
/// The most values that a gradient formula needs.
pub(crate) const MAX_SAVED: usize = 4;

/// The inputs of a recorded op: their nodes, where they need a gradient.
pub(crate) type Inputs = [Option<NodeRef>; MAX_INPUTS];
/// The values kept for a gradient formula.
pub(crate) type Saved = [Option<Tensor>; MAX_SAVED];

/// One recorded operation, or a leaf.
pub(crate) struct Node(Mutex<Body>);

#[derive(Default)]
struct Body {
    kind: Kind,
    inputs: Inputs,
    saved: Saved,
    /// How often each saved value's buffer had been written when it was saved.
    writes: [u64; MAX_SAVED],
    /// The last walk that came by, to which `grad` and `pending` belong; 0 before the first (WALK-OWN).
    walk: u64,
    /// The sum of the gradients received so far.
    grad: Option<Tensor>,
    /// How many gradients are still to come in this walk.
    pending: u32,
    /// The next node in whatever list this one waits in.
    next: Option<NodeRef>,
    device: Option<Device>,
}

#[derive(Default)]
enum Kind {
    /// A node whose graph was walked already, or a free one.
    #[default]
    Spent,
    Leaf(Option<Slot>),
    Op(Op),
}

/// A shared handle to a node, which returns to its device when the last handle goes.
pub(crate) struct NodeRef(Option<Arc<Node>>);

impl NodeRef {
    fn new(device: &Device, body: Body) -> NodeRef {
        let body = Body { device: Some(device.clone()), ..body };
        let shell = match device.take_node() {
            Some(mut shell) => {
                let node = Arc::get_mut(&mut shell).expect("a free node has one owner");
                *node.0.get_mut().unwrap_or_else(|poisoned| poisoned.into_inner()) = body;
                shell
            }
            None => Arc::new(Node(Mutex::new(body))),
        };
        NodeRef(Some(shell))
    }

    fn arc(&self) -> &Arc<Node> {
        self.0.as_ref().expect("a node handle holds its node until it is dropped")
    }

    fn body(&self) -> MutexGuard<'_, Body> {
        self.arc().0.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    /// Empties the node and gives it back if this was the last handle; the handles it held are returned to be let go next.
    fn release(&mut self) -> Option<(Inputs, Option<NodeRef>)> {
        let mut shell = self.0.take()?;
        let node = Arc::get_mut(&mut shell)?;
        let body = std::mem::take(node.0.get_mut().unwrap_or_else(|poisoned| poisoned.into_inner()));
        let Body { inputs, next, device, .. } = body;
        if let Some(device) = device {
            device.give_node(shell);
        }
        Some((inputs, next))
    }
}

impl Clone for NodeRef {
    fn clone(&self) -> NodeRef {
        NodeRef(Some(Arc::clone(self.arc())))
    }
}

impl Drop for NodeRef {
    fn drop(&mut self) {
        // A chain of ops that was never walked back is let go link by link, not by recursion: it may be very long.
        let Some((inputs, next)) = self.release() else { return };
        let mut rest: Vec<NodeRef> = inputs.into_iter().flatten().chain(next).collect();
        while let Some(mut node) = rest.pop() {
            if let Some((inputs, next)) = node.release() {
                rest.extend(inputs.into_iter().flatten().chain(next));
            }
        }
    }
}

/// Names a leaf: a tensor that was made with [`Tensor::requires_grad`] or [`crate::Grads::leaf`].
#[derive(Clone)]
pub struct LeafId(NodeRef);

impl LeafId {
    /// The parameter index of a leaf of a gradient arena; `None` for any other leaf.
    pub fn slot(&self) -> Option<usize> {
        match &self.0.body().kind {
            Kind::Leaf(Some(slot)) => Some(slot.index()),
            _ => None,
        }
    }
}

impl PartialEq for LeafId {
    fn eq(&self, other: &LeafId) -> bool {
        Arc::ptr_eq(self.0.arc(), other.0.arc())
    }
}

impl Eq for LeafId {}

impl Hash for LeafId {
    fn hash<H: Hasher>(&self, state: &mut H) {
        Arc::as_ptr(self.0.arc()).hash(state);
    }
}

impl std::fmt::Debug for LeafId {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self.slot() {
            Some(slot) => write!(f, "LeafId(parameter {slot})"),
            None => write!(f, "LeafId({:p})", Arc::as_ptr(self.0.arc())),
        }
    }
}

/// Receives each leaf's gradient at the moment it is complete.
pub trait GradSink {
    /// `leaf` will get no more gradients in this walk. For a leaf of a gradient arena, `grad` is its slot.
    fn finished(&mut self, leaf: LeafId, grad: Tensor);
}

/// Gradients by leaf, in the order in which they were finished.
#[derive(Default)]
pub struct Gradients(Vec<(LeafId, Tensor)>);

impl Gradients {
    /// The gradient of `leaf`, if it took part.
    pub fn get(&self, leaf: &Tensor) -> Option<&Tensor> {
        let id = leaf.leaf_id()?;
        self.0.iter().find(|(other, _)| *other == id).map(|(_, grad)| grad)
    }

    /// How many leaves got a gradient.
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// Whether no leaf got a gradient.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

impl GradSink for Gradients {
    fn finished(&mut self, leaf: LeafId, grad: Tensor) {
        self.0.push((leaf, grad));
    }
}

thread_local! {
    /// Whether ops on this thread record: the one piece of ambient state, because a forward pass that had to be told through
    /// every layer whether anyone wants its gradient would clutter every signature.
    static RECORDING: Cell<bool> = const { Cell::new(true) };
}

/// Runs `f` without recording: its results need no gradient and nothing is kept for a backward pass.
pub fn no_grad<R>(f: impl FnOnce() -> R) -> R {
    struct Restore(bool);
    impl Drop for Restore {
        fn drop(&mut self) {
            RECORDING.set(self.0);
        }
    }
    let _restore = Restore(RECORDING.replace(false));
    f()
}

/// Whether an op on these inputs is to be recorded.
pub(crate) fn records(inputs: &[&Tensor]) -> bool {
    RECORDING.get() && inputs.iter().any(|t| t.node.is_some())
}

/// Records `op` on `inputs`. Call only where [`records`] says so.
pub(crate) fn record<const S: usize>(
    device: &Device,
    op: Op,
    inputs: &[&Tensor],
    saved: [Option<Tensor>; S],
) -> NodeRef {
    let mut nodes: Inputs = Default::default();
    for (to, from) in nodes.iter_mut().zip(inputs) {
        to.clone_from(&from.node);
    }
    let (mut kept, mut writes) = (Saved::default(), [0; MAX_SAVED]);
    for ((to, writes), from) in kept.iter_mut().zip(&mut writes).zip(saved) {
        *writes = from.as_ref().map_or(0, |from| from.storage.writes());
        *to = from;
    }
    NodeRef::new(device, Body { kind: Kind::Op(op), inputs: nodes, saved: kept, writes, ..Body::default() })
}

pub(crate) fn leaf(device: &Device, slot: Option<Slot>) -> NodeRef {
    NodeRef::new(device, Body { kind: Kind::Leaf(slot), ..Body::default() })
}

impl Tensor {
    /// This tensor as a leaf: operations on it are recorded and [`backward`] gives its gradient. Values are shared. Panics if
    /// the tensor is the result of a recorded operation, whose inputs would silently get no gradient from here.
    #[track_caller]
    pub fn requires_grad(mut self) -> Tensor {
        assert!(self.dtype().is_float(), "requires_grad: needs a float tensor, got {}", self.dtype());
        assert!(
            !self.needs_grad() || self.leaf_id().is_some(),
            "requires_grad: the tensor of shape {} is the result of an operation and needs a gradient already: \
             call detach() first for a leaf with the same values",
            self.shape()
        );
        self.node = Some(leaf(&self.device().clone(), None));
        self
    }

    /// The same values outside of the graph.
    pub fn detach(&self) -> Tensor {
        Tensor { node: None, ..self.clone() }
    }

    /// Whether operations on this tensor are recorded.
    pub fn needs_grad(&self) -> bool {
        self.node.is_some()
    }

    /// The name of this leaf; `None` for a tensor that isn't one.
    pub fn leaf_id(&self) -> Option<LeafId> {
        let node = self.node.as_ref()?;
        let is_leaf = matches!(node.body().kind, Kind::Leaf(_));
        is_leaf.then(|| LeafId(node.clone()))
    }

    /// The gradients of this scalar with respect to every leaf it depends on.
    ///
    /// ```
    /// use phalanx_tensor::{DType, Device, Tensor};
    /// let x = Tensor::from_slice(&Device::cpu(1), &[1f32, 2.0, 3.0], [3]).requires_grad();
    /// let grads = x.square().sum_all().backward();
    /// assert_eq!(grads.get(&x).unwrap().to_vec::<f32>(), [2.0, 4.0, 6.0]);
    /// ```
    #[track_caller]
    pub fn backward(&self) -> Gradients {
        let mut sink = Gradients::default();
        backward(&[(self, None)], &mut sink);
        sink
    }
}

/// What the gradient table asks of the walk: which inputs want a gradient, and where it should be written.
pub(crate) struct Wanted<'a> {
    inputs: &'a Inputs,
    device: &'a Device,
}

impl Wanted<'_> {
    pub(crate) fn wants(&self, input: usize) -> bool {
        self.inputs[input].is_some()
    }

    /// A tensor of stale contents to write input `input`'s gradient to: the slot of the gradient arena itself when this is
    /// the only gradient that the leaf will get, so that nothing is copied afterwards.
    pub(crate) fn place(&self, input: usize, shape: Shape, dtype: DType) -> Tensor {
        if let Some(node) = &self.inputs[input] {
            let body = node.body();
            if let (Kind::Leaf(Some(slot)), 1, None) = (&body.kind, body.pending, &body.grad)
                && slot.is_stale()
            {
                return slot.tensor();
            }
        }
        Tensor::stale(self.device, shape, dtype)
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
    let (op, inputs, saved, grad, device) = {
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
                (op, std::mem::take(&mut body.inputs), std::mem::take(&mut body.saved), grad, device)
            }
        }
    };
    let mut grads = match &grad {
        Some(grad) => gradient(&op, grad, &saved, &Wanted { inputs: &inputs, device: &device }),
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

/// Keeps the storage type's name out of the signature above.
pub(crate) fn same_storage(a: &Storage, b: &Storage) -> bool {
    a.is(b)
}
