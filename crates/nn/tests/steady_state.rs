//! A training step in the steady state takes no memory from the system.

use phalanx_nn::models::{BasicBlock, MnistNet};
use phalanx_nn::optim::{Clip, Group, Members, Optimizer, Sgd};
use phalanx_nn::{
    AdaptiveAvgPool2d, Average, BatchNorm2d, Conv2d, Ctx, Flatten, Linear, MaxPool2d, Module, Parameters,
    Sequential,
};
use phalanx_tensor::{DType, Device, GradSink, LeafId, Philox, Tensor, backward};
use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// The system's allocator, counting.
struct Counting;

static ALLOCATIONS: AtomicUsize = AtomicUsize::new(0);

// SAFETY: every call is handed to the system's allocator as it is.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATIONS.fetch_add(1, Ordering::Relaxed);
        // SAFETY: the caller's promises are passed on.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, ptr: *mut u8, layout: Layout) {
        // SAFETY: the caller's promises are passed on.
        unsafe { System.dealloc(ptr, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

struct Nobody;

impl GradSink for Nobody {
    fn finished(&mut self, _: LeafId, _: Tensor) {}
}

/// Steps in a row that are looked at.
const ROW: u64 = 10;
/// Rows after the first, which makes room for everything.
const ROWS: u64 = 5;

/// Allocations of that row of steps which has the fewest. A thread that gets its first task of a kind late, as on a busy
/// machine, makes room for it late; what steps take again and again is in every row.
fn taken(net: &mut dyn Module, image: [usize; 3], threads: usize) -> usize {
    const BATCH: usize = 64;
    let device = Device::cpu(threads);
    let parameters = Parameters::build(net, &device, 0);
    let mut optimizer = Optimizer::new(Sgd { momentum: 0.5, ..Sgd::new(0.01) }).unwrap();
    let undecayed = Group { of: Members::NormsAndBiases, lr: 1.0, weight_decay: 0.0 };
    optimizer.group(&[undecayed], &parameters).unwrap();
    let clip = Clip { norm: Some(0.1), value: Some(0.05) };
    let mut average = Average::of(&parameters);
    let [c, h, w] = image;
    let x = Tensor::uniform(&device, [BATCH, c, h, w], 0.0, 1.0, DType::F32, Philox::new(1, 0));
    let y = Tensor::from_slice(&device, &(0..BATCH as i64).map(|i| i % 10).collect::<Vec<_>>(), [BATCH]);
    let samples: Arc<[u64]> = (0..BATCH as u64).collect();
    let (mut before, mut fewest) = (0, usize::MAX);
    for step in 0..=(ROWS + 1) * ROW {
        if step % ROW == 0 {
            let now = ALLOCATIONS.load(Ordering::Relaxed);
            fewest = if step > ROW { fewest.min(now - before) } else { fewest };
            before = now;
        }
        let loss = net.forward(&x, &mut Ctx::train(0, step, Arc::clone(&samples))).cross_entropy(&y, 0.1);
        parameters.grads().zero();
        backward(&[(&loss, None)], &mut Nobody);
        clip.apply(&mut parameters.grads().arena().flat_mut::<f32>());
        let grads = parameters.grads().arena().flat::<f32>();
        optimizer.step(&mut parameters.values().flat_mut::<f32>(), &grads, 1.0);
        average.update(&parameters, 0.9);
    }
    fewest
}

/// From few channels to many, blocks with and without a change of shape, images down to one pixel.
fn residual() -> Sequential {
    Sequential::new()
        .then(Conv2d::new(3, 16, 3).padding(1))
        .then(BatchNorm2d::new(16))
        .then(MaxPool2d::new(2))
        .then(BasicBlock::new(16, 16, 1))
        .then(BasicBlock::new(16, 32, 2))
        .then(BasicBlock::new(32, 64, 2))
        .then(AdaptiveAvgPool2d([1, 1]))
        .then(Flatten)
        .then(Linear::new(64, 10))
}

#[test]
fn a_steady_step_allocates_nothing() {
    // One test for all, since the allocator counts those of all threads.
    for threads in [1, 2] {
        let count = taken(&mut MnistNet::new(0.5), [1, 28, 28], threads);
        assert_eq!(count, 0, "allocations of MnistNet in ten steps with {threads} threads");
        let count = taken(&mut residual(), [3, 8, 8], threads);
        assert_eq!(count, 0, "allocations of a residual network in ten steps with {threads} threads");
    }
}
