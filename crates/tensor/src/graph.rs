//! Eager autograd: the graph that operations record, which [`backward`] walks back through.
//!
//! An operation on tensors that need a gradient makes one [`Node`]: which op it was, the nodes of its inputs, and the values
//! its gradient formula needs. Nodes don't hold the tensors they came from, so a value that no formula needs is free as soon
//! as the forward pass lets it go. Nodes are recycled through the device.

use crate::arena::{Arena, Slot};
use crate::between;
use crate::device::Device;
use crate::dtype::DType;
use crate::op::{Op, Unary};
use crate::ops::across::Crossing;
use crate::ops::again::Again;
use crate::ops::norm::SharedBatch;
use crate::storage::Storage;
use crate::tensor::Tensor;
use crate::walk::backward;
use std::cell::Cell;
use std::hash::{Hash, Hasher};
use std::sync::{Arc, Mutex, MutexGuard};
use std::thread::LocalKey;

/// The most tensors that an op with a gradient takes.
pub(crate) const MAX_INPUTS: usize = 4;
/// The most values that a gradient formula needs.
pub(crate) const MAX_SAVED: usize = 8;

/// The inputs of a recorded op: their nodes, where they need a gradient.
pub(crate) type Inputs = [Option<NodeRef>; MAX_INPUTS];
/// The values kept for a gradient formula.
pub(crate) type Saved = [Option<Tensor>; MAX_SAVED];

/// One recorded operation, or a leaf.
pub(crate) struct Node(Mutex<Body>);

#[derive(Default)]
pub(crate) struct Body {
    pub(crate) kind: Kind,
    pub(crate) inputs: Inputs,
    pub(crate) saved: Saved,
    /// The batch over all of whose parts the sums of a gradient formula go, where the forward pass's did.
    pub(crate) shared: Option<Arc<SharedBatch>>,
    /// Both directions of a map that somebody else knows, where the op is one.
    pub(crate) crossing: Option<Arc<dyn Crossing>>,
    /// How the graph is made that this node stands for, where it stands for one.
    pub(crate) again: Option<Again>,
    /// How saved value 0 is made, where it isn't kept.
    pub(crate) made: Option<Made>,
    /// How often each saved value's buffer had been written when it was saved.
    pub(crate) writes: [u64; MAX_SAVED],
    /// The last walk that came by, to which `grad` and `pending` belong; 0 before the first (WALK-OWN).
    pub(crate) walk: u64,
    /// The sum of the gradients received so far.
    pub(crate) grad: Option<Tensor>,
    /// What is to be added to it, where the op's gradient formula does so itself.
    pub(crate) more: Option<Tensor>,
    /// That sum in the 16 bits of the second input of an [`Op::AddHalf`], where whoever made it has rounded it beside.
    pub(crate) rounded: Option<Tensor>,
    /// How many gradients are still to come in this walk.
    pub(crate) pending: u32,
    /// The next node in whatever list this one waits in.
    pub(crate) next: Option<NodeRef>,
    pub(crate) device: Option<Device>,
}

impl Body {
    /// The nodes that its gradient goes to, by number, a missing one for an input that needs none: the inputs first, then the leaves of
    /// the graph that it stands for. None behind the last.
    pub(crate) fn below(&self, number: usize) -> Option<Option<&NodeRef>> {
        match self.inputs.get(number) {
            Some(input) => Some(input.as_ref()),
            None => self.again.as_ref()?.leaves.get(number - MAX_INPUTS).map(Some),
        }
    }
}

#[derive(Default)]
pub(crate) enum Kind {
    /// A node whose graph was walked already, or a free one.
    #[default]
    Spent,
    Leaf(Option<Slot>),
    Op(Op),
}

/// How a saved value that isn't kept is made again: of others that are, in its place and those behind the second.
#[derive(Clone, Copy)]
pub(crate) enum Made {
    /// This function of value 0.
    Unary(Unary),
    /// Value 0 normalised over its last dimensions, with weight 2 and bias 3, in this type.
    LayerNorm { n_dims: usize, eps: f64, dtype: DType },
}

impl Made {
    /// How the result of an operation is made again, and of what, where that operation keeps it anyway and it costs little.
    pub(crate) fn of(x: &Tensor) -> Option<(Made, [Option<Tensor>; 3])> {
        let body = x.node.as_ref()?.body();
        match body.kind {
            Kind::Op(Op::Unary(f)) if !f.keeps_output() && !f.keeps_nothing() => {
                Some((Made::Unary(f), [body.saved[0].clone(), None, None]))
            }
            Kind::Op(Op::LayerNorm { n_dims, eps, dtype, .. }) => {
                let [x, weight, _, _, bias, ..] = &body.saved;
                Some((Made::LayerNorm { n_dims, eps, dtype }, [x, weight, bias].map(Option::clone)))
            }
            _ => None,
        }
    }

    /// Makes it.
    pub(crate) fn again(self, saved: &Saved) -> Tensor {
        let x = saved[0].as_ref().expect("what it is made of is kept");
        match self {
            Made::Unary(f) => x.mapped(f),
            Made::LayerNorm { n_dims, eps, dtype } => {
                x.layer_norm_in(dtype, n_dims, saved[2].as_ref(), saved[3].as_ref(), eps)
            }
        }
    }
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

    /// What tells the node from all others that are there.
    pub(crate) fn address(&self) -> usize {
        Arc::as_ptr(self.arc()).addr()
    }

    /// Whether both are handles to one node.
    pub(crate) fn is(&self, other: &NodeRef) -> bool {
        Arc::ptr_eq(self.arc(), other.arc())
    }

    /// Whether it is a leaf whose slot is for one of these values.
    pub(crate) fn is_leaf_of(&self, values: &Arena) -> bool {
        matches!(&self.body().kind, Kind::Leaf(Some(slot)) if slot.is_of(values))
    }

    pub(crate) fn body(&self) -> MutexGuard<'_, Body> {
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
pub struct LeafId(pub(crate) NodeRef);

impl LeafId {
    /// The parameter index of a leaf of a gradient arena; `None` for any other leaf.
    pub fn slot(&self) -> Option<usize> {
        match &self.0.body().kind {
            Kind::Leaf(Some(slot)) => Some(slot.index()),
            _ => None,
        }
    }

    /// The same, of a leaf of these parameters alone: a loss may have leaves of other models, too.
    pub fn slot_of(&self, values: &Arena) -> Option<usize> {
        match &self.0.body().kind {
            Kind::Leaf(Some(slot)) if slot.is_of(values) => Some(slot.index()),
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

    /// Whether anyone looks at gradients that were finished, this one or those before, by the time that [`GradSink::finished`] returns, or
    /// gives a GPU work that does. Where nobody does, some may be made later, by the end of the walk.
    fn looks(&self, leaf: &LeafId) -> bool {
        let _ = leaf;
        true
    }
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
    /// Whether ops on this thread record: ambient state, because a forward pass that had to be told through
    /// every layer whether anyone wants its gradient would clutter every signature.
    static RECORDING: Cell<bool> = const { Cell::new(true) };
    /// Whether they keep what costs little to make again. It belongs to the recording, and nobody between whoever runs a model and
    /// its products has to know.
    static KEEPING_CHEAP: Cell<bool> = const { Cell::new(true) };
}

/// Runs `f`, whose products don't keep the results of norms and activation functions, which are in memory as what these were made
/// of anyway: a backward pass makes them again, to the same bits. That costs little time and saves, of a decoder block, a third of what
/// it keeps.
pub fn without_cheap<R>(f: impl FnOnce() -> R) -> R {
    with_set(&KEEPING_CHEAP, false, f)
}

/// Whether products keep what costs little to make again.
pub(crate) fn keeps_cheap() -> bool {
    KEEPING_CHEAP.get()
}

/// Runs `f` with a mark of this thread set so, and puts it back, also after a panic.
pub(crate) fn with_set<T: Copy + 'static, R>(
    mark: &'static LocalKey<Cell<T>>,
    to: T,
    f: impl FnOnce() -> R,
) -> R {
    struct Restore<T: Copy + 'static>(&'static LocalKey<Cell<T>>, T);
    impl<T: Copy + 'static> Drop for Restore<T> {
        fn drop(&mut self) {
            self.0.set(self.1);
        }
    }
    let _restore = Restore(mark, mark.replace(to));
    f()
}

/// Runs `f` without recording: its results need no gradient and nothing is kept for a backward pass.
pub fn no_grad<R>(f: impl FnOnce() -> R) -> R {
    recording(false, f)
}

/// Runs `f` with or without recording, whatever goes on around it.
pub(crate) fn recording<R>(records: bool, f: impl FnOnce() -> R) -> R {
    with_set(&RECORDING, records, f)
}

/// Whether ops of this thread are recorded where an input needs a gradient.
pub(crate) fn is_recording() -> bool {
    RECORDING.get()
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
    between::look();
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

/// Keeps the storage type's name out of the signature above.
pub(crate) fn same_storage(a: &Storage, b: &Storage) -> bool {
    a.is(b)
}
