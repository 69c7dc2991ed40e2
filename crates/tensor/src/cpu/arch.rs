//! The instruction set that kernels are compiled for at run time.
//!
//! [`pulp::Arch`] would do but for the time that a build takes: what its `dispatch` calls is compiled where that is called, and so all
//! kernels would become parts of the functions that share work out among threads ([`crate::device`]), one unit of code, on which one core is
//! busy for minutes. Here it is called in a method of the kernel's own type, which is compiled with that type's module.

use pulp::WithSimd;

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
        pulp::x86::V3::try_new().map(|v3| Arch(pulp::Arch::V3(v3)))
    }

    /// Calls a kernel, compiled for the instruction set. What it calls is compiled so, too, where it is always inlined.
    #[inline(always)]
    pub(crate) fn dispatch<K: WithSimd>(self, kernel: K) -> K::Output {
        kernel.on(self.0)
    }

    /// The same of a closure, which has to be `#[inline(always)]`, and so has what it calls.
    ///
    /// Not by [`Arch::dispatch`]: what is called there once is called through a shim of the compiler's, which isn't compiled for the
    /// instruction set unless it happens to be inlined; with all of a large closure in it it isn't. A softmax took sixty times as long.
    #[inline(always)]
    pub(crate) fn run<R>(self, f: impl FnMut() -> R) -> R {
        self.dispatch(Run(f))
    }
}

struct Run<F>(F);

impl<R, F: FnMut() -> R> WithSimd for Run<F> {
    type Output = R;

    #[inline(always)]
    fn with_simd<S: pulp::Simd>(mut self, _: S) -> R {
        (self.0)()
    }
}

/// A kernel, compiled for each instruction set.
trait Compiled: WithSimd {
    fn on(self, arch: pulp::Arch) -> Self::Output;
}

impl<K: WithSimd> Compiled for K {
    #[inline(never)]
    fn on(self, arch: pulp::Arch) -> K::Output {
        arch.dispatch(self)
    }
}
