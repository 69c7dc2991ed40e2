//! Kernels on the host: the same sources, compiled by the system's C++ compiler with its address and undefined behaviour
//! sanitizers, run thread by thread, and compared with the engine's own operations in float64.

mod compare;
mod program;
mod values;

mod attention;
mod batch_norm;
mod convolution;
mod copy;
mod elementwise;
mod embedding;
mod gradients;
mod layer_norm;
mod loss;
mod optimizer;
mod pooling;
mod product;
mod random;
mod reduce;
mod samples;
mod softmax;
