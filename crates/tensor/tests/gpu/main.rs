//! The engine on a GPU, against the engine on a CPU: on the fake driver, or on the real GPU whose number `PHALANX_TEST_GPU` is.
//! Without either, where there is no C++ compiler, tests say so and pass.

mod rig;

mod attention;
mod feed_forward;
mod halves;
mod host;
mod memory;
mod network;
mod ops;
mod replay;
mod transit;
mod upload;
