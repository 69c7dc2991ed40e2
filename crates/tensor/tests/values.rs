//! What the operations compute, where a gradient check can't tell.

use phalanx_tensor::cases::{choices, edges};
use phalanx_tensor::{Conv2dOptions, DType, Device, DropoutKey, PoolOptions, Tensor, Within, no_grad};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

fn t(values: &[f32], shape: &[usize]) -> Tensor {
    Tensor::from_slice(&Device::cpu(1), values, shape)
}

/// The message of the panic that `f` ends in.
#[track_caller]
fn panic_of(f: impl FnOnce() -> Tensor) -> String {
    let panic = catch_unwind(AssertUnwindSafe(f)).expect_err("should have panicked");
    panic
        .downcast_ref::<String>()
        .cloned()
        .unwrap_or_else(|| panic.downcast_ref::<&str>().unwrap().to_string())
}

#[test]
fn known_values() {
    edges::known_values(&Device::cpu(1));
}

#[test]
fn comparisons_and_choices() {
    let device = Device::cpu(2);
    choices::comparisons(&device);
    choices::the_largest_come_first(&device);
    choices::whole_numbers(&device);
}

#[test]
fn a_wrong_shape_names_the_op_and_both_shapes() {
    let device = Device::cpu(1);
    let zeros = |shape: &[usize]| Tensor::zeros(&device, shape, DType::F32);
    let (a, b, image) = (zeros(&[2, 3]), zeros(&[2, 4]), zeros(&[1, 1, 4, 4]));
    let check = |op: &str, shapes: [&str; 2], f: &dyn Fn() -> Tensor| {
        let message = panic_of(f);
        assert!(message.starts_with(op) && shapes.iter().all(|s| message.contains(s)), "{message}");
    };
    check("add", ["[2, 3]", "[2, 4]"], &|| &a + &b);
    check("matmul", ["[2, 3]", "[2, 4]"], &|| a.matmul(&b));
    check("linear", ["[2, 3]", "[2, 4]"], &|| a.linear(&b, None));
    check("reshape", ["[2, 3]", "[5]"], &|| a.reshape([5]));
    check("mse_loss", ["[2, 3]", "[2, 4]"], &|| a.mse_loss(&b));
    check("conv2d", ["[1, 1, 4, 4]", "[2, 3]"], &|| image.conv2d(&a, None, Conv2dOptions::default()));
    check("max_pool2d", ["[1, 1, 4, 4]", "[5, 5]"], &|| image.max_pool2d(PoolOptions::square(5)));
    check("attention", ["[1, 1, 4, 4]", "[1, 1, 2, 8]"], &|| {
        image.attention(&image.reshape([1, 1, 2, 8]), &image, None, None)
    });
    check("attention", ["[2, 3]", "[1, 1, 1, 4]"], &|| image.attention(&image, &image, Some(&a), None));
    check("lt", ["[2, 3]", "[2, 4]"], &|| a.lt(&b));
    check("where_cond", ["[2, 3]", "[2, 4]"], &|| a.where_cond(&a, &b));
    check("masked_fill", ["[2, 3]", "[1, 1, 4, 4]"], &|| a.masked_fill(&image, 0.0));
    check("cat", ["[2, 3]", "[2, 4]"], &|| Tensor::cat(&[&a, &b], 0));
    check("broadcast_to", ["[2, 3]", "[2, 4]"], &|| a.broadcast_to([2, 4]));
    let labels = Tensor::from_slice(a.device(), &[3i64, 0], [2]);
    check("nll_loss", ["label 3", "[2, 3]"], &|| a.nll_loss(&labels));
    check("gather", ["[2]", "[2, 3]"], &|| a.gather(1, &labels));
    check("gather", ["place 3", "[2, 3]"], &|| a.gather(1, &labels.reshape([2, 1])));
    check("topk", ["4 of dimension 1", "[2, 3]"], &|| a.topk(4, 1).0);
    check("where_cond", ["f32", "i64"], &|| labels.where_cond(&a, &a));
    check("a tensor of i64", ["0.5", "whole"], &|| labels.lt(0.5));
    check("a quotient by 2, as a mean is one,", ["i64", "cast it to floats"], &|| labels.mean_all());
}

#[test]
fn tensors_of_two_devices_dont_mix() {
    let message = panic_of(|| t(&[1.0], &[1]).add(&t(&[1.0], &[1])));
    assert!(message.contains("different devices"), "{message}");
}

#[test]
fn nan_is_seen_not_lost() {
    edges::nan_is_seen_not_lost(&Device::cpu(1));
}

#[test]
fn gradients_go_where_pytorchs_go_at_nan_zero_and_ties() {
    edges::gradients_go_where_pytorchs_go_at_nan_zero_and_ties(&Device::cpu(1));
}

#[test]
fn a_mask_belongs_to_the_sample_not_to_the_batch() {
    let key = |samples: &[u64]| DropoutKey::new(9, 4, 1, Arc::from(samples));
    let device = Device::cpu(1);
    let ones = |n: usize| Tensor::ones(&device, [n, 100], DType::F32);
    let whole = ones(3).dropout(0.5, &key(&[5, 6, 7])).to_vec::<f32>();
    let alone = ones(1).dropout(0.5, &key(&[6])).to_vec::<f32>();
    assert_eq!(whole[100..200], alone[..]);
    assert_ne!(whole[..100], whole[100..200]);
    let dropped = ones(100).dropout(0.3, &key(&(0..100).collect::<Vec<_>>()));
    let zeros = dropped.to_vec::<f32>().iter().filter(|&&x| x == 0.0).count();
    assert!((2800..3200).contains(&zeros), "{zeros} of 10000 at p = 0.3");
    assert!((dropped.mean_all().item() - 1.0).abs() < 0.03);
}

#[test]
fn a_part_of_a_tensor_has_its_part_of_the_mask() {
    let device = Device::cpu(1);
    let dims = [2, 6, 5, 7];
    let whole = Tensor::ones(&device, dims, DType::F32);
    let key = DropoutKey::new(9, 4, 1, Arc::from([5, 6]));
    let dropped = whole.dropout(0.5, &key);
    for (dim, of) in dims.into_iter().enumerate().skip(1) {
        for (start, len) in [(0, of), (0, 2), (1, 3), (3, 2)] {
            let key = DropoutKey { within: Some(Within { dim, start, of }), ..key.clone() };
            let part = whole.narrow(dim, start, len).contiguous().dropout(0.5, &key);
            let want = dropped.narrow(dim, start, len).to_vec::<f32>();
            assert_eq!(part.to_vec::<f32>(), want, "{len} from {start} along {dim}");
        }
    }
    let beyond = DropoutKey { within: Some(Within { dim: 1, start: 4, of: 6 }), ..key };
    let said = panic_of(|| whole.narrow(1, 0, 3).dropout(0.5, &beyond));
    assert!(said.contains("a mask of shape [2, 3, 5, 7] as the part"), "{said}");
}

#[test]
fn without_recording_there_is_no_graph() {
    let x = t(&[1.0, 2.0], &[2]).requires_grad();
    assert!(x.square().needs_grad());
    assert!(!no_grad(|| x.square()).needs_grad());
    assert!(!x.detach().square().needs_grad());
}

#[test]
fn a_graph_is_walked_once() {
    let loss = t(&[1.0, 2.0], &[2]).requires_grad().square().sum_all();
    assert_eq!(loss.backward().len(), 1);
    let second = catch_unwind(AssertUnwindSafe(|| loss.backward().len()));
    assert!(second.is_err());
}

#[test]
fn a_long_chain_is_let_go_without_recursion() {
    let mut x = t(&[1.0], &[1]).requires_grad();
    for _ in 0..200_000 {
        x = x.affine(1.0, 0.0);
    }
    drop(x);
}
