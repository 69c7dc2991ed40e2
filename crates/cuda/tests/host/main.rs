//! Kernels on the host: the same sources, compiled by the system's C++ compiler with its address and undefined behaviour
//! sanitizers, run thread by thread, and compared with the engine's own operations in float64.

mod compare;
mod program;
mod values;

mod copy;
mod elementwise;
mod gradients;
mod loss;
mod optimizer;
mod random;
mod reduce;
mod softmax;
