//! The instruction set that kernels are compiled for at run time.
//!
//! [`pulp::Arch`] would do but for the time that a build takes: through it all kernels become parts of the functions that share work out
//! among threads ([`crate::device`]), and those are one unit of code, on which one core is busy for minutes. Here a kernel is compiled as a
//! method of its own type, which belongs to that type's module.

#[cfg(target_arch = "x86_64")]
use pulp::x86::{V3, V4};
use pulp::{Scalar, WithSimd};

/// An instruction set that this machine has.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Arch(pulp::Arch);

impl Arch {
    /// The best of this machine.
    pub(crate) fn best() -> Arch {
        Arch(pulp::Arch::new())
    }

    /// No vectors but those that every machine of its kind has.
    #[cfg(test)]
    pub(crate) fn scalar() -> Arch {
        Arch(pulp::Arch::Scalar)
    }

    /// AVX2 and what comes with it, if it is there.
    #[cfg(all(test, target_arch = "x86_64"))]
    pub(crate) fn v3() -> Option<Arch> {
        V3::try_new().map(|v3| Arch(pulp::Arch::V3(v3)))
    }

    /// Calls a kernel, compiled for the instruction set. What it calls is compiled so, too, where it is always inlined.
    #[inline(always)]
    pub(crate) fn dispatch<K: WithSimd>(self, kernel: K) -> K::Output {
        match self.0 {
            // SAFETY: nobody has a `V4` of pulp's on a machine without these instructions.
            #[cfg(target_arch = "x86_64")]
            pulp::Arch::V4(simd) => unsafe { kernel.on_v4(simd) },
            // SAFETY: likewise.
            #[cfg(target_arch = "x86_64")]
            pulp::Arch::V3(simd) => unsafe { kernel.on_v3(simd) },
            #[cfg(target_arch = "x86_64")]
            _ => kernel.on_scalar(),
            #[cfg(not(target_arch = "x86_64"))]
            other => other.dispatch(kernel),
        }
    }
}

/// A kernel, compiled for each instruction set.
#[cfg(target_arch = "x86_64")]
trait Compiled: WithSimd {
    fn on_scalar(self) -> Self::Output;

    /// # Safety
    /// The machine has the instructions that `simd` stands for.
    unsafe fn on_v3(self, simd: V3) -> Self::Output;

    /// # Safety
    /// The machine has the instructions that `simd` stands for.
    unsafe fn on_v4(self, simd: V4) -> Self::Output;
}

#[cfg(target_arch = "x86_64")]
impl<K: WithSimd> Compiled for K {
    #[inline(never)]
    fn on_scalar(self) -> K::Output {
        self.with_simd(Scalar)
    }

    #[inline(never)]
    #[target_feature(enable = "sse,sse2,fxsr,sse3,ssse3,sse4.1,sse4.2,popcnt,avx,avx2,bmi1,bmi2,fma,lzcnt")]
    unsafe fn on_v3(self, simd: V3) -> K::Output {
        self.with_simd(simd)
    }

    #[inline(never)]
    #[target_feature(enable = "sse,sse2,fxsr,sse3,ssse3,sse4.1,sse4.2,popcnt,avx,avx2,bmi1,bmi2,fma,lzcnt")]
    #[target_feature(enable = "avx512f,avx512bw,avx512cd,avx512dq,avx512vl")]
    unsafe fn on_v4(self, simd: V4) -> K::Output {
        self.with_simd(simd)
    }
}
