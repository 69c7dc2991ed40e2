//! Parts of a computation that are made once more in the backward pass, so that nothing is kept of them but where they begin.
//!
//! A part is computed as ever, and then its graph is let go with all that it kept. One node takes its place, which knows the leaves
//! that the graph came to, so that a walk back counts on them; when it comes to the node, the part is computed again, and the
//! node becomes the graph that this leaves (`unfold` in `walk.rs`). Nodes are worked on in the order in which they would have
//! been without all this, so gradients have the same bits, whatever is computed again.

use crate::autocast::{autocast, autocast_dtype};
use crate::graph::{self, NodeRef, record};
use crate::op::Op;
use crate::ops::keep;
use crate::tensor::Tensor;
use std::collections::HashSet;

/// What stands for the graph of a part.
pub(crate) struct Again {
    /// Computes the part from where it begins.
    pub(crate) compute: Box<dyn FnOnce(&Tensor) -> Tensor + Send>,
    /// The leaves of the graph, but for where it begins, each once.
    pub(crate) leaves: Vec<NodeRef>,
}

impl Tensor {
    /// `first` of this tensor, of which nothing is kept for a backward pass but this tensor: that computes what it needs once more,
    /// by `again`, which has to come to the same values by the same operations, in whatever thread. Gradients have the bits
    /// that they would have without.
    ///
    /// ```
    /// use phalanx_tensor::{DType, Device, Tensor};
    ///
    /// let x = Tensor::ones(&Device::cpu(1), [3], DType::F32).requires_grad();
    /// let part = |x: &Tensor| (x * 3.0).square();
    /// let grads = x.recomputed(part, part).sum_all().backward();
    /// assert_eq!(grads.get(&x).unwrap().to_vec::<f32>(), [18.0; 3]);
    /// ```
    #[track_caller]
    pub fn recomputed(
        &self,
        first: impl FnOnce(&Tensor) -> Tensor,
        again: impl FnOnce(&Tensor) -> Tensor + Send + 'static,
    ) -> Tensor {
        if !graph::is_recording() {
            return first(self);
        }
        let start = if self.needs_grad() { self.detach().requires_grad() } else { self.clone() };
        let out = first(&start);
        let Some(end) = &out.node else { return out };
        let begins = start.node.as_ref();
        if begins.is_some_and(|begins| begins.is(end)) {
            // Nothing was done to it.
            return Tensor { node: self.node.clone(), ..out };
        }
        let leaves = leaves_below(end, begins);
        let dtype = autocast_dtype();
        let again = move |start: &Tensor| autocast(dtype, || again(start));
        let node = record(out.device(), Op::Again, &[self], [keep(self)]);
        node.body().again = Some(Again { compute: Box::new(again), leaves });
        Tensor { node: Some(node), ..out }
    }
}

/// The leaves that a graph comes to, each once, but for `begins`.
fn leaves_below(end: &NodeRef, begins: Option<&NodeRef>) -> Vec<NodeRef> {
    let (mut leaves, mut seen) = (Vec::new(), HashSet::from([end.address()]));
    let mut left = vec![end.clone()];
    while let Some(node) = left.pop() {
        if matches!(node.body().kind, graph::Kind::Leaf(_)) {
            if !begins.is_some_and(|begins| begins.is(&node)) {
                leaves.push(node);
            }
            continue;
        }
        let body = node.body();
        let below = (0..).map_while(|i| body.below(i)).flatten();
        left.extend(below.filter(|below| seen.insert(below.address())).cloned());
    }
    leaves
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Arena, DType, Device, DropoutKey, GradSink, Grads, Layout, LeafId, Philox};
    use crate::{backward, backward_inputs, no_grad};

    /// Notes which parameters are handed over, in order.
    #[derive(Default)]
    struct Handed(Vec<usize>);

    impl GradSink for Handed {
        fn finished(&mut self, leaf: LeafId, _: Tensor) {
            self.0.extend(leaf.slot());
        }
    }

    /// Three layers, of which the first two share a weight, with dropout and a skip connection inside each.
    #[derive(Clone)]
    struct Net {
        leaves: Vec<Tensor>,
        grads: Grads,
    }

    impl Net {
        fn new(device: &Device) -> Net {
            let layout = Layout::new(&[[6, 6].into(), [6].into(), [6, 6].into(), [6].into()]);
            let values = Arena::new(device, DType::F32, &layout);
            let grads = Grads::new(device, DType::F32, &layout);
            let leaf = |i: usize| {
                let leaf = grads.leaf(i, &values);
                let key = Philox::new(1, i as u64);
                leaf.copy_from(&Tensor::uniform(device, *leaf.shape(), -1.0, 1.0, DType::F32, key));
                leaf
            };
            Net { leaves: (0..layout.count()).map(leaf).collect(), grads }
        }

        fn layer(&self, layer: usize, x: &Tensor) -> Tensor {
            let [shared, bias, own, last] = &self.leaves[..] else { panic!("four leaves") };
            let key = DropoutKey::new(1, 2, layer as u64, [7, 8, 9].into());
            let y = match layer {
                2 => x.linear(own, Some(last)),
                _ => x.linear(shared, Some(bias)).layer_norm(1, None, None, 1e-5),
            };
            x + y.gelu_tanh().dropout(0.5, &key) * x
        }

        /// The bits of all gradients and of the input's, and in which order the leaves were finished.
        fn pass(
            &self,
            x: &Tensor,
            parts: &[bool],
            walk: fn(&Tensor, &mut dyn GradSink),
        ) -> (Vec<u32>, Vec<usize>) {
            self.grads.zero();
            let x = x.detach().requires_grad();
            let y = (0..3).fold(x.clone(), |x, layer| {
                let net = self.clone();
                let first = |x: &Tensor| self.layer(layer, x);
                if parts[layer] { x.recomputed(first, move |x| net.layer(layer, x)) } else { first(&x) }
            });
            let mut handed = Handed::default();
            walk(&y.square().sum_all(), &mut handed);
            assert!(self.grads.settle().is_empty(), "every leaf has a gradient");
            (self.grads.arena().flat::<f32>().iter().map(|x| x.to_bits()).collect(), handed.0)
        }
    }

    const ALL: [[bool; 3]; 5] = [
        [true, false, false],
        [false, true, false],
        [false, true, true],
        [true, true, false],
        [true, true, true],
    ];

    #[test]
    fn what_is_computed_again_has_the_same_bits_and_leaves_are_finished_in_the_same_order() {
        let device = Device::cpu(1);
        let net = Net::new(&device);
        let x = Tensor::uniform(&device, [3, 6], -1.0, 1.0, DType::F32, Philox::new(2, 0));
        let walks: [fn(&Tensor, &mut dyn GradSink); 2] = [
            |loss, sink| backward(&[(loss, None)], sink),
            |loss, sink| {
                let mut early = Handed::default();
                backward_inputs(&[(loss, None)], &mut early).finish(sink);
            },
        ];
        for walk in walks {
            let want = net.pass(&x, &[false; 3], walk);
            assert!(want.0.iter().any(|&bits| bits != 0));
            for parts in ALL {
                assert!(net.pass(&x, &parts, walk) == want, "{parts:?}");
            }
        }
    }

    #[test]
    fn parts_within_parts_are_computed_again_too() {
        let device = Device::cpu(1);
        let x = Tensor::uniform(&device, [5], -1.0, 1.0, DType::F32, Philox::new(2, 0));
        fn inner(x: &Tensor) -> Tensor {
            (x * 2.0).tanh() * x
        }
        fn outer(x: &Tensor) -> Tensor {
            inner(&x.recomputed(inner, inner).square()).recomputed(inner, inner)
        }
        let grad = |f: &dyn Fn(&Tensor) -> Tensor| {
            let x = x.detach().requires_grad();
            f(&x).sum_all().backward().get(&x).unwrap().to_vec::<f32>()
        };
        let plain = grad(&|x| inner(&inner(&inner(x).square())));
        assert_eq!(grad(&|x| x.recomputed(outer, outer)), plain);
        assert_eq!(grad(&outer), plain);
    }

    #[test]
    fn nothing_is_kept_but_the_beginning() {
        let device = Device::cpu(1);
        let x = Tensor::ones(&device, [1 << 10], DType::F32).requires_grad();
        let part = |x: &Tensor| (0..10).fold(x.clone(), |x, _| x.tanh() * 1.5);
        let held = |again: bool| {
            let before = device.live_bytes();
            let y = if again { x.recomputed(part, part) } else { part(&x) };
            let held = device.live_bytes() - before;
            drop(y);
            assert_eq!(device.live_bytes(), before);
            held
        };
        // Ten outputs of tanh and the end of it all, or the end alone.
        assert_eq!([held(false), held(true)], [11 << 12, 1 << 12]);
    }

    #[test]
    fn what_needs_no_gradient_is_computed_once() {
        let x = Tensor::ones(&Device::cpu(1), [2], DType::F32);
        let never = |_: &Tensor| -> Tensor { panic!("there is no walk back") };
        let twice = |x: &Tensor| x * 2.0;
        assert!(!x.recomputed(twice, never).needs_grad());
        let leaf = x.clone().requires_grad();
        assert!(!no_grad(|| leaf.recomputed(twice, never)).needs_grad());
        assert!(leaf.recomputed(Tensor::clone, never).leaf_id() == leaf.leaf_id(), "nothing was done to it");
    }
}
