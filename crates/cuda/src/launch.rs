//! Launches: a kernel, what it is handed, and the work that it shares out.

use crate::address::Address;
use crate::element::Element;
use crate::error::Error;
use crate::geometry::{Geometry, Work};
use crate::gpu::Gpu;
use crate::kernels::{Kernel, MOST_PARAMETERS, Parameter};
use crate::stream::Stream;
use std::ffi::c_void;
use std::ptr;

/// Blocks of a grid for each multiprocessor: two rounds of the eight blocks of 256 threads that it can hold.
const BLOCKS_PER_MULTIPROCESSOR: u32 = 16;

/// What a kernel is handed for one of its parameters.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Argument<'a> {
    /// Memory that it reads.
    Read(Address),
    /// Memory that it writes.
    Write(Address),
    /// No memory, where the kernel can do without.
    Null,
    /// A whole number.
    Int(i64),
    /// A float32.
    Float(f32),
    /// A float64.
    Double(f64),
    /// A struct, as [`Walk::as_bytes`](crate::Walk::as_bytes), [`Window::to_bytes`](crate::Window::to_bytes) and
    /// [`Framing::to_bytes`](crate::Framing::to_bytes) give it.
    Struct(&'a [u8]),
}

impl Argument<'_> {
    /// Whether a kernel that wants `parameter` can take it.
    pub fn fits(&self, parameter: Parameter) -> bool {
        match self {
            Argument::Read(_) => matches!(parameter, Parameter::Read | Parameter::ReadOrNull),
            Argument::Write(_) => matches!(parameter, Parameter::Write | Parameter::WriteOrNull),
            Argument::Null => matches!(parameter, Parameter::ReadOrNull | Parameter::WriteOrNull),
            Argument::Int(_) => parameter == Parameter::Int,
            Argument::Float(_) => parameter == Parameter::Float,
            Argument::Double(_) => parameter == Parameter::Double,
            Argument::Struct(bytes) => parameter == Parameter::Struct(bytes.len()),
        }
    }

    /// The bytes of a number or an address, in the order of the machine, and a 0 behind a float32.
    fn cell(&self) -> u64 {
        match self {
            Argument::Read(address) | Argument::Write(address) => address.0,
            Argument::Null | Argument::Struct(_) => 0,
            Argument::Int(n) => *n as u64,
            // Every machine with such a GPU has the low bytes first.
            Argument::Float(x) => u64::from(x.to_bits()),
            Argument::Double(x) => x.to_bits(),
        }
    }
}

impl Gpu {
    /// Gives `stream` a launch of `kernel` for tensors of `element` over all of `work`; nothing where there is nothing to do. The
    /// kernel is compiled, or read from disk, when it is first used for the type ([`Gpu::prepare`]).
    ///
    /// Panics where the arguments aren't what the kernel takes. Fails where the kernel can't be loaded or launched, where work that
    /// was given to the GPU before has failed, and with [`DebugSync::Yes`](crate::DebugSync) where this launch itself fails.
    ///
    /// # Safety
    /// All that the kernel reads and writes, given its numbers, lies in memory of this GPU, which is still there when the stream
    /// comes to it.
    #[track_caller]
    pub unsafe fn launch(
        &self,
        stream: &Stream,
        kernel: &'static Kernel,
        element: Element,
        work: Work,
        arguments: &[Argument<'_>],
    ) -> Result<(), Error> {
        stream.of_one_gpu(kernel.name, self.context());
        check(kernel, arguments);
        let most_blocks = self.multiprocessors() * BLOCKS_PER_MULTIPROCESSOR;
        let Some(Geometry { blocks, threads }) = kernel.geometry(work, most_blocks) else { return Ok(()) };
        let function = self.modules().function(self.context(), kernel, element)?;
        let about = || {
            let element = element.in_source();
            format!("kernel {} of {element} over {work:?} in {blocks} blocks of {threads}", kernel.name)
        };
        let mut cells = [0u64; MOST_PARAMETERS];
        let mut parameters = [ptr::null_mut::<c_void>(); MOST_PARAMETERS];
        for ((cell, parameter), argument) in cells.iter_mut().zip(&mut parameters).zip(arguments) {
            *cell = argument.cell();
            *parameter = match argument {
                // It is only read.
                Argument::Struct(bytes) => bytes.as_ptr().cast_mut().cast(),
                _ => (&raw mut *cell).cast(),
            };
        }
        stream.launching()?;
        // SAFETY: function and stream are alive; there are as many arguments of such sizes as the kernel takes, which the call
        // copies; what they lead to is the caller's promise.
        let code = unsafe {
            let launch = self.context().enter()?.launch;
            let extra = ptr::null_mut();
            launch(
                function.raw(),
                blocks,
                1,
                1,
                threads,
                1,
                1,
                0,
                stream.raw(),
                parameters.as_mut_ptr(),
                extra,
            )
        };
        self.context().succeeded("cuLaunchKernel", code, about)?;
        stream.launched(about)
    }
}

#[track_caller]
fn check(kernel: &Kernel, arguments: &[Argument<'_>]) {
    let wanted = kernel.parameters;
    assert!(
        arguments.len() == wanted.len(),
        "{}: {} arguments for {} parameters",
        kernel.name,
        arguments.len(),
        wanted.len()
    );
    for (i, (argument, &parameter)) in arguments.iter().zip(wanted).enumerate() {
        assert!(
            argument.fits(parameter),
            "{}: argument {i} is {argument:?}, but the kernel takes {parameter:?}",
            kernel.name
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernels::kernel;
    use std::panic::catch_unwind;

    #[test]
    fn arguments_are_checked_one_by_one() {
        let at = Address(4096);
        let right = [
            Argument::Read(at),
            Argument::Write(at),
            Argument::Int(1),
            Argument::Float(0.0),
            Argument::Float(0.0),
        ];
        check(kernel("relu"), &right);
        for (i, wrong) in [
            (0, Argument::Write(at)),
            (1, Argument::Read(at)),
            (1, Argument::Null),
            (2, Argument::Float(1.0)),
            (3, Argument::Double(0.0)),
            (4, Argument::Int(0)),
            (4, Argument::Struct(&[0; 4])),
        ] {
            let mut arguments = right;
            arguments[i] = wrong;
            assert!(catch_unwind(|| check(kernel("relu"), &arguments)).is_err(), "{i}: {wrong:?}");
        }
        assert!(catch_unwind(|| check(kernel("relu"), &right[..4])).is_err());
        let walk = Argument::Struct(&[0; 5]);
        let copy = [Argument::Read(at), Argument::Write(at), walk, Argument::Int(1)];
        assert!(catch_unwind(|| check(kernel("copy_4"), &copy)).is_err(), "a struct of another size");
    }
}
