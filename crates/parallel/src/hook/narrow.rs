//! Half of the bits: gradients are rounded to 16 before they travel, and so is every sum of two on the way.

use super::{Bucket, Hook, Pending};
use phalanx_comm::{Element, Group, ReduceOp, bf16, f16};

/// bfloat16: the range of single precision, and 8 bits of its digits.
pub struct Bf16;

/// IEEE half precision: 11 bits of digits; gradients above 65504 overflow, and below 6e-8 they vanish.
pub struct Fp16;

impl Hook for Bf16 {
    fn start(&mut self, bucket: Bucket, group: &Group) -> Pending {
        sum_as(bucket, group, bf16::from_f32, bf16::to_f32)
    }
}

impl Hook for Fp16 {
    fn start(&mut self, bucket: Bucket, group: &Group) -> Pending {
        sum_as(bucket, group, f16::from_f32, f16::to_f32)
    }
}

fn sum_as<T: Element>(
    mut bucket: Bucket,
    group: &Group,
    narrow: fn(f32) -> T,
    widen: fn(T) -> f32,
) -> Pending {
    let work = group.start_all_reduce(bucket.iter().map(|&x| narrow(x)).collect::<Vec<_>>(), ReduceOp::Sum);
    Box::new(move |deadline| {
        let sums = work.wait(deadline)?;
        bucket.iter_mut().zip(sums).for_each(|(x, sum)| *x = widen(sum));
        Ok(())
    })
}
