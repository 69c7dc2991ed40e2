//! Kernels for the CPU: plain functions from borrowed values to an output that they fill whole. They check nothing but what
//! memory safety needs; shapes were checked by the op that calls them.

pub(crate) mod arch;
pub(crate) mod attention;
pub(crate) mod batch_norm;
pub(crate) mod choice;
pub(crate) mod conv;
pub(crate) mod copy;
pub(crate) mod dropout;
pub(crate) mod elementwise;
pub(crate) mod embedding;
pub(crate) mod few_rows;
pub(crate) mod few_terms;
pub(crate) mod gemm;
pub(crate) mod group_norm;
pub(crate) mod in_lanes;
pub(crate) mod lanes;
pub(crate) mod loss;
pub(crate) mod matmul;
pub(crate) mod norm;
pub(crate) mod pooling;
pub(crate) mod recurrent;
pub(crate) mod reduce;
pub(crate) mod resample;
pub(crate) mod samples;
pub(crate) mod small_gemm;
pub(crate) mod softmax;
pub(crate) mod tile;
pub(crate) mod wide;
pub(crate) mod window;

/// Work below this many elements (or multiply-adds) is not worth waking another thread for: about ten microseconds.
pub(crate) const SERIAL_LIMIT: usize = 1 << 15;

/// How many elements of an output each thread takes: all of them when there are few.
pub(crate) fn share(device: &crate::Device, count: usize) -> usize {
    if count < SERIAL_LIMIT { count.max(1) } else { count.div_ceil(device.threads()).next_multiple_of(64) }
}
