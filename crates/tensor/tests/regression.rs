//! Faults that were found and mended, one test each.

use phalanx_tensor::{DType, Device, PoolOptions, Shape, Tensor};
use std::panic::{AssertUnwindSafe, catch_unwind};

fn t(values: &[f32], shape: &[usize]) -> Tensor {
    Tensor::from_slice(&Device::cpu(1), values, shape)
}

fn zeros(device: &Device, shape: impl Into<Shape>) -> Tensor {
    Tensor::zeros(device, shape, DType::F32)
}

/// The message of the panic that `f` ends in.
#[track_caller]
fn panic_of<R>(f: impl FnOnce() -> R) -> String {
    let Err(panic) = catch_unwind(AssertUnwindSafe(f)) else { panic!("should have panicked") };
    let text = panic.downcast_ref::<&str>().map(ToString::to_string);
    panic.downcast_ref::<String>().cloned().or(text).expect("panics carry text")
}

#[test]
fn a_shape_whose_count_wraps_around_is_refused() {
    let k = 6_148_914_691_236_517_206; // times 3: 2^64 + 2
    let message = panic_of(|| t(&[1.0, 2.0], &[3, k]));
    assert!(message.contains("more elements than memory can hold"), "{message}");
    let one = t(&[1.0], &[1, 1]);
    let message = panic_of(|| one.broadcast_to([1 << 40, 1 << 40]));
    assert!(message.contains("more elements than memory can hold"), "{message}");
    let (row, column) = (one.broadcast_to([1, 1 << 40]), one.broadcast_to([1 << 40, 1]));
    let message = panic_of(|| &row + &column);
    assert!(message.contains("more elements than memory can hold"), "{message}");
}

#[test]
fn linear_without_inputs_gives_its_bias() {
    let device = Device::cpu(1);
    let (x, bias) = (zeros(&device, [5, 0]), Tensor::ones(&device, [3], DType::F32).requires_grad());
    let weight = zeros(&device, [3, 0]).requires_grad();
    // What a recycled buffer would show if nothing were written.
    drop(Tensor::full(&device, [5, 3], 9.0, DType::F32));
    assert_eq!(x.linear(&weight, None).to_vec::<f32>(), [0.0; 15]);
    let y = x.linear(&weight, Some(&bias));
    assert_eq!(y.to_vec::<f32>(), [1.0; 15]);
    let grads = y.sum_all().backward();
    assert_eq!(grads.get(&bias).unwrap().to_vec::<f32>(), [5.0; 3]);
    assert_eq!(grads.get(&weight).unwrap().dims(), [3, 0]);
}

#[test]
fn a_batch_of_products_over_nothing_is_zero() {
    let device = Device::cpu(1);
    drop(Tensor::full(&device, [30, 3, 4], 9.0, DType::F32));
    let product = zeros(&device, [30, 3, 0]).matmul(&zeros(&device, [30, 0, 4]));
    assert_eq!(product.to_vec::<f32>(), [0.0; 360]);
}

#[test]
fn empty_views_and_rows_compute_nothing() {
    let device = Device::cpu(2);
    let view = zeros(&device, [4, 16]).narrow(0, 4, 0).narrow(1, 8, 8);
    assert_eq!(view.relu().dims(), [0, 8]);
    assert_eq!((&view + &view).to_vec::<f32>(), []);
    for shape in [[3, 0], [0, 3]] {
        let x = zeros(&device, shape).requires_grad();
        let weight = Tensor::ones(&device, [shape[1]], DType::F32).requires_grad();
        let bias = zeros(&device, [shape[1]]).requires_grad();
        let grads = x.layer_norm(1, Some(&weight), Some(&bias), 1e-5).sum_all().backward();
        assert_eq!(grads.get(&weight).unwrap().to_vec::<f32>(), vec![0.0; shape[1]]);
        assert_eq!(grads.get(&x).unwrap().dims(), shape);
    }
    for shape in [[2, 3, 0], [0, 3, 2], [2, 0, 3]] {
        let x = zeros(&device, shape).requires_grad();
        let grads = x.batch_norm(None, None, 1e-5).0.sum_all().backward();
        assert_eq!(grads.get(&x).unwrap().dims(), shape);
    }
}

#[test]
fn the_largest_window_has_256_pixels() {
    let mut values = [0.0; 256];
    values[255] = 1.0;
    let x = t(&values, &[1, 1, 16, 16]).requires_grad();
    let grads = x.max_pool2d(PoolOptions::square(16)).sum_all().backward();
    assert_eq!(grads.get(&x).unwrap().to_vec::<f32>(), values);
}
