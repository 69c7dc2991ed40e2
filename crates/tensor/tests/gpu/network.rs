//! A small network of the tutorials' kind, trained on a GPU and on a CPU.

use crate::rig::{Rig, rig};
use phalanx_tensor::{
    Arena, Conv2dOptions, DType, Device, DropoutKey, GradSink, Grads, Layout, LeafId, Order, Philox,
    PoolOptions, Shape, Tensor, Then, backward, no_grad,
};
use std::sync::Arc;

const BATCH: usize = 6;
const CLASSES: usize = 5;
/// What losses may be off by: roundings of float32, which steps carry on and rarely make larger.
const TOLERANCE: f64 = 2e-4;

/// Kernels and biases of two convolutions, a batch norm, a linear layer.
fn layout() -> Layout {
    let shapes: [&[usize]; 8] =
        [&[4, 1, 3, 3], &[4], &[8, 4, 3, 3], &[8], &[8], &[8], &[CLASSES, 8 * 3 * 3], &[CLASSES]];
    Layout::ordered(shapes.map(|shape| {
        let order = if shape.len() == 4 { Order::ChannelsLast } else { Order::RowMajor };
        (Shape::new(shape), order)
    }))
}

struct Network {
    grads: Grads,
    leaves: Vec<Tensor>,
    x: Tensor,
    labels: Tensor,
}

/// Gradients lie in their arena already.
struct Nobody;

impl GradSink for Nobody {
    fn finished(&mut self, _: LeafId, _: Tensor) {}
}

impl Network {
    fn new(device: &Device) -> Network {
        let layout = layout();
        let (values, grads) =
            (Arena::new(device, DType::F32, &layout), Grads::new(device, DType::F32, &layout));
        let key = Philox::new(1, 0);
        values.write_flat(&(0..layout.len()).map(|i| key.unit(i as u64) - 0.5).collect::<Vec<f32>>());
        let leaves = (0..layout.count()).map(|i| grads.leaf(i, &values)).collect();
        let pixels = BATCH * 10 * 10;
        let x: Vec<f32> = (0..pixels).map(|i| Philox::new(2, 0).unit(i as u64)).collect();
        let labels: Vec<i64> = (0..BATCH).map(|i| (i * 3 % CLASSES) as i64).collect();
        Network {
            grads,
            leaves,
            x: Tensor::from_slice(device, &x, [BATCH, 1, 10, 10]),
            labels: Tensor::from_slice(device, &labels, [BATCH]),
        }
    }

    fn loss(&self, step: u64) -> Tensor {
        let [k1, b1, k2, b2, weight, bias, w, b] = &self.leaves[..] else { unreachable!("eight parameters") };
        let padded = Conv2dOptions { padding: [1, 1], ..Conv2dOptions::default() };
        let key = DropoutKey::new(3, step, 0, (0..BATCH as u64).collect::<Arc<[u64]>>());
        let x = self.x.conv2d(k1, Some(b1), padded).relu().max_pool2d(PoolOptions::square(2));
        let x = x.conv2d(k2, Some(b2), Conv2dOptions::default());
        let x = x.batch_norm(Some(weight), Some(bias), 1e-5, Then::Relu, None, None).out;
        let x = x.dropout2d(0.25, &key).flatten_from(1);
        x.linear(w, Some(b)).cross_entropy(&self.labels, 0.1)
    }

    /// One step of SGD; the loss before it, still on the device.
    fn step(&self, step: u64) -> Tensor {
        let loss = self.loss(step);
        self.grads.zero();
        backward(&[(&loss, None)], &mut Nobody);
        no_grad(|| {
            for (i, leaf) in self.leaves.iter().enumerate() {
                let value = leaf.detach();
                value.copy_from(&(&value - &self.grads.arena().tensor(i) * 0.1));
            }
        });
        loss.detach()
    }
}

fn losses(device: &Device) -> Vec<f64> {
    let network = Network::new(device);
    // All are given before any is read.
    let losses: Vec<Tensor> = (0..6).map(|step| network.step(step)).collect();
    losses.iter().map(Tensor::item).collect()
}

#[test]
fn a_network_learns_the_same_on_a_gpu_as_on_a_cpu() {
    let want = losses(&Device::cpu(1));
    assert!(want[5] < want[0], "it learns: {want:?}");
    for seed in 1..5 {
        let Some(rig) = rig(seed) else { return };
        for (got, want) in losses(&rig).iter().zip(&want) {
            assert!((got - want).abs() <= TOLERANCE * want, "{got}, not {want}, with seed {seed}");
        }
    }
}

#[test]
fn two_runs_come_to_the_same_bits() {
    let Some(rig) = rig(1) else { return };
    assert_eq!(losses(&rig), losses(&rig));
}

/// How often each call was made that takes memory or waits.
fn costs(rig: &Rig) -> Option<[u64; 6]> {
    let fake = rig.fake()?;
    Some(
        [
            "cuMemAlloc_v2",
            "cuMemFree_v2",
            "cuMemHostAlloc",
            "cuStreamSynchronize",
            "cuCtxSynchronize",
            "cuEventSynchronize",
        ]
        .map(|call| fake.calls(call)),
    )
}

#[test]
fn a_steady_step_takes_no_memory_and_waits_for_nothing() {
    let Some(rig) = rig(1) else { return };
    let network = Network::new(&rig);
    for step in 0..8 {
        let Some(before) = costs(&rig) else { return };
        network.step(step);
        let after = costs(&rig).unwrap();
        if step >= 3 {
            assert_eq!(after, before, "step {step}");
        }
        // A GPU would have got on meanwhile.
        rig.gpu().unwrap().synchronize().unwrap();
    }
}
