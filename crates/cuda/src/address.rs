//! The two words by which NVIDIA's libraries know what a program has on a GPU.

use std::ffi::c_void;

/// Where something lies in the memory of a GPU. It may be computed with, but not followed on this side.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[repr(transparent)]
pub struct Address(pub u64);

impl Address {
    /// No memory: what stands for a missing argument.
    pub const NULL: Address = Address(0);

    /// The address so many bytes further on.
    pub const fn plus(self, bytes: usize) -> Address {
        Address(self.0 + bytes as u64)
    }
}

/// A stream of a GPU, as the libraries are told which one to work on. It is as good as the stream that it was taken from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(transparent)]
pub struct StreamHandle(pub *mut c_void);
