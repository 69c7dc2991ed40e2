//! GPUs that aren't there: a driver and NVIDIA's libraries that take every call, compute nothing, and keep account of memory.
//!
//! So everything above them does what it does on a real GPU, in no time: which kernels are launched, in which order, what is allocated and
//! given back, and what no memory is left for ([`Gpu::open`](crate::Gpu::open) with [`GpuOptions::absent`](crate::GpuOptions::absent)).
//! Numbers that come back are 0. What is not known: how long anything takes, what workspace convolutions would want, and what NCCL takes.
//!
//! Tests that are to find mistakes use `phalanx-fake-cuda`, whose kernels compute and whose streams are late.

mod calls;
mod cublaslt;
mod cudnn;
mod machine;
mod nccl;

pub(crate) use calls::calls;
pub(crate) use cublaslt::cublaslt;
pub(crate) use cudnn::cudnn;
pub(crate) use machine::{register, sent};
pub(crate) use nccl::nccl;

use crate::nvrtc::Architecture;

/// What the driver and NVIDIA's libraries take for themselves. On an H200 a step of MNIST's network had 620 to 624 MB of the card
/// (`benches/runs/2026-11-27-h200`), of which this accounts for 39.
const CONTEXT_BYTES: u64 = 583_000_000;

/// A kind of GPU of which there may be any number, none of them real.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AbsentGpu {
    /// What it is called.
    pub name: &'static str,
    /// What it can do.
    pub architecture: Architecture,
    /// How many multiprocessors it has.
    pub multiprocessors: u32,
    /// Bytes of its memory, as programs are told.
    pub memory: u64,
    /// Whether it gives more than it tells of, which shows how much would be needed.
    pub is_endless: bool,
}

const fn gpu(name: &'static str, architecture: [u32; 2], multiprocessors: u32, mib: u64) -> AbsentGpu {
    let [major, minor] = architecture;
    AbsentGpu {
        name,
        architecture: Architecture { major, minor },
        multiprocessors,
        memory: mib << 20,
        is_endless: false,
    }
}

impl AbsentGpu {
    /// Those that are hired out most. Memory is what CUDA tells programs there, which is less than `nvidia-smi` shows: the least of what
    /// PyTorch's errors say of it in public reports. The rest is of NVIDIA's data sheets.
    pub const KNOWN: [AbsentGpu; 9] = [
        gpu("t4", [7, 5], 40, 14_909),
        gpu("a10g", [8, 6], 80, 22_579),
        gpu("l4", [8, 9], 58, 22_558),
        gpu("l40s", [8, 9], 142, 45_465),
        gpu("a100-40gb", [8, 0], 108, 40_335),
        gpu("a100-80gb", [8, 0], 108, 81_039),
        gpu("h100", [9, 0], 132, 81_039),
        gpu("h200", [9, 0], 132, 143_155),
        gpu("b200", [10, 0], 148, 182_630),
    ];

    /// The known one of this name.
    pub fn named(name: &str) -> Option<AbsentGpu> {
        AbsentGpu::KNOWN.into_iter().find(|known| known.name.eq_ignore_ascii_case(name))
    }
}

/// One row a call that writes a value: its name, what it is given, and what it writes where.
macro_rules! answers {
    ($($name:ident($($argument:ident: $type:ty),*) => *$out:ident = $value:expr;)*) => { $(
        unsafe extern "C" fn $name($($argument: $type),*) -> std::ffi::c_int {
            let value = $value;
            // SAFETY: the caller has the call write one value there, as it has NVIDIA's.
            unsafe { $out.write(value) };
            0
        }
    )* };
}

/// One row a call that succeeds and does nothing, by the number of its arguments.
macro_rules! successes {
    ($($name:ident<$($type:ident),*>;)*) => { $(
        extern "C" fn $name<$($type),*>($(_: $type),*) -> std::ffi::c_int {
            0
        }
    )* };
}

/// What stands for a handle that nobody looks behind.
fn some_handle<T>() -> *mut T {
    std::ptr::without_provenance_mut(1)
}

use {answers, successes};
