//! What is called of NVIDIA's libraries, against stand-ins for them that work on the host's memory, are built by the system's C++
//! compiler, write down each call and fail on demand. Where there is no compiler, tests say so and pass.

mod numbers;
mod stream;

mod cublaslt;
mod cudnn;
mod nccl;
mod nvml;
mod real;
