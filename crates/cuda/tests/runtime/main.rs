//! The runtime on a fake driver: the real kernels, run on the host, by a driver that puts everything off for as long as it may and
//! mixes streams as a seed says.

mod counting;
mod rig;

mod errors;
mod graphs;
mod kernels_on_disk;
mod launches;
mod memory;
mod programs;
mod steady;
mod streams;
mod threads;
