//! A training step in the steady state takes no memory from the system.

use phalanx_nn::optim::{Clip, Group, Members, Optimizer, Sgd};
use phalanx_nn::{Average, Ctx, Module, Parameters, models::MnistNet};
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

#[test]
fn a_steady_step_allocates_nothing() {
    for threads in [1, 2] {
        let device = Device::cpu(threads);
        let mut net = MnistNet::new(0.5);
        let parameters = Parameters::build(&mut net, &device, 0);
        let mut optimizer = Optimizer::new(Sgd { momentum: 0.5, ..Sgd::new(0.01) }).unwrap();
        let undecayed = Group { of: Members::NormsAndBiases, lr: 1.0, weight_decay: 0.0 };
        optimizer.group(&[undecayed], &parameters).unwrap();
        let clip = Clip { norm: Some(0.1), value: Some(0.05) };
        let mut average = Average::of(&parameters);
        let x = Tensor::uniform(&device, [64, 1, 28, 28], 0.0, 1.0, DType::F32, Philox::new(1, 0));
        let y = Tensor::from_slice(&device, &(0..64).map(|i| i % 10).collect::<Vec<i64>>(), [64]);
        let samples: Arc<[u64]> = (0..64).collect();
        let mut before = 0;
        for step in 0..20 {
            if step == 10 {
                before = ALLOCATIONS.load(Ordering::Relaxed);
            }
            let loss = net.forward(&x, &mut Ctx::train(0, step, Arc::clone(&samples))).nll_loss(&y);
            parameters.grads().zero();
            backward(&[(&loss, None)], &mut Nobody);
            clip.apply(&mut parameters.grads().arena().flat_mut::<f32>());
            let grads = parameters.grads().arena().flat::<f32>();
            optimizer.step(&mut parameters.values().flat_mut::<f32>(), &grads, 1.0);
            average.update(&parameters, 0.9);
        }
        let taken = ALLOCATIONS.load(Ordering::Relaxed) - before;
        assert_eq!(taken, 0, "allocations in ten steps with {threads} threads");
    }
}
