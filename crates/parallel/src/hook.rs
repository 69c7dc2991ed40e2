//! What travels between ranks in place of a bucket of gradients: everything, half of the bits, or less.
//!
//! A [`Hook`] is asked to start the reduction of each bucket as soon as its gradients are there, in the same order on all
//! ranks, and hands back what finishes it. What the bucket then holds must be the same bits on all ranks (D-SAME).
//!
//! One of one's own, which sends bf16:
//!
//! ```
//! use phalanx_comm::{Group, ReduceOp, bf16};
//! use phalanx_parallel::{Bucket, Hook, Pending};
//!
//! struct Half;
//!
//! impl Hook for Half {
//!     fn start(&mut self, mut bucket: Bucket, group: &Group) -> Pending {
//!         let small: Vec<bf16> = bucket.iter().map(|&x| bf16::from_f32(x)).collect();
//!         let work = group.start_all_reduce(small, ReduceOp::Sum);
//!         Box::new(move |deadline| {
//!             let sums = work.wait(deadline)?;
//!             bucket.iter_mut().zip(sums).for_each(|(x, sum)| *x = sum.to_f32());
//!             Ok(())
//!         })
//!     }
//! }
//! ```

mod narrow;
mod power_sgd;

pub use narrow::{Bf16, Fp16};
pub use power_sgd::{PowerSgd, PowerSgdConfig};

use crate::error::Error;
use phalanx_comm::{Buffer, Deadline, Group, ReduceOp};
use phalanx_tensor::{HostSpan, Layout, Order};
use std::collections::BTreeMap;
use std::ops::{Deref, DerefMut, Range};

/// Finishes the reduction of a bucket, which holds the sums afterwards.
pub type Pending = Box<dyn FnOnce(Deadline) -> Result<(), Error> + Send>;

/// How the gradients of a bucket are summed over the ranks.
pub trait Hook: Send {
    /// Starts the reduction of a bucket. It may start operations of the group, and wait for none; what it gives back may do
    /// both.
    fn start(&mut self, bucket: Bucket, group: &Group) -> Pending;

    /// Whether anything is kept from step to step. Default no.
    fn keeps(&self) -> bool {
        false
    }

    /// What this rank keeps from step to step, for a checkpoint: the same names and lengths on all ranks. Asked for between two
    /// steps.
    fn kept(&self) -> Kept {
        Kept::new()
    }

    /// What each of so many ranks goes on with, where another number of them kept all this, in their order. None, as is the default, where
    /// a run goes on with as many ranks as it had alone.
    fn share_out(&self, all: Vec<Kept>, ranks: usize) -> Option<Kept> {
        drop((all, ranks));
        None
    }

    /// Goes on with what [`Hook::kept`] gave on this rank, or [`Hook::share_out`] for it. Called before the first step; what doesn't fit
    /// the gradients is an error of that step.
    fn go_on(&mut self, kept: Kept) {
        drop(kept);
    }
}

/// Numbers that are kept from step to step, by name.
pub type Kept = BTreeMap<String, Vec<f32>>;

/// A range of the gradient arena: this rank's share of the gradients of some parameters. Those of a GPU are a copy in the host's
/// memory, which goes back when the bucket is dropped.
pub struct Bucket {
    number: usize,
    span: HostSpan<f32>,
    parts: Vec<Part>,
}

/// The gradient of one parameter in a bucket.
#[derive(Clone, Debug, PartialEq)]
pub struct Part {
    /// Where it lies in the bucket.
    pub range: Range<usize>,
    /// Rows of the matrix that it is: outputs, or inputs of every kernel tap. One where it is a vector.
    pub rows: usize,
    /// Its columns, which follow each other in memory.
    pub columns: usize,
}

impl Bucket {
    pub(crate) fn new(
        number: usize,
        span: HostSpan<f32>,
        layout: &Layout,
        parameters: Range<usize>,
    ) -> Bucket {
        let start = layout.span(parameters.clone()).start;
        let part = |i: usize| {
            let (range, dims) = (layout.range(i), layout.shape(i).dims());
            let outputs = if dims.len() < 2 { 1 } else { dims[0] };
            let others = range.len() / outputs.max(1);
            let (rows, columns) =
                if layout.order(i) == Order::RowMajor { (outputs, others) } else { (others, outputs) };
            Part { range: range.start - start..range.end - start, rows, columns }
        };
        Bucket { number, span, parts: parameters.map(part).collect() }
    }

    /// Whether its gradients are in the host's memory already: whoever looks at them before waits for them.
    pub(crate) fn is_here(&self) -> bool {
        self.span.is_here()
    }

    /// Which bucket of the model it is, from 0: the same in every step.
    pub fn number(&self) -> usize {
        self.number
    }

    /// The gradients in it, which cover all of it but the padding between them.
    pub fn parts(&self) -> &[Part] {
        &self.parts
    }
}

impl Deref for Bucket {
    type Target = [f32];

    fn deref(&self) -> &[f32] {
        &self.span
    }
}

impl DerefMut for Bucket {
    fn deref_mut(&mut self) -> &mut [f32] {
        &mut self.span
    }
}

impl Buffer for Bucket {
    type Item = f32;

    fn as_mut_slice(&mut self) -> &mut [f32] {
        self
    }
}

/// Everything, as it is and where it is.
pub struct AllReduce;

impl Hook for AllReduce {
    fn start(&mut self, bucket: Bucket, group: &Group) -> Pending {
        let work = group.start_all_reduce(bucket, ReduceOp::Sum);
        Box::new(move |deadline| work.wait(deadline).map(drop).map_err(Error::from))
    }
}
