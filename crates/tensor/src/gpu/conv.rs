//! Convolutions, by cuDNN, of images and kernels whose channels run fastest, and by plain kernels where that has no engine for one.
//! Some are products of matrices, and done as such.

use crate::cpu::conv::Plan;
use crate::dtype::DType;
use crate::gpu::Engine;
use crate::gpu::engine::succeeded;
use crate::gpu::launch::{Arg, check_float, elements};
use crate::gpu::{copy, elementwise, matmul, reduce};
use crate::lock::lock;
use crate::op::{Binary, Conv2dOptions};
use crate::shape::Geometry;
use crate::tensor::Tensor;
use phalanx_cuda::cudnn::{
    Alignment, Convolution, Convolutions, Layout, Numbers, Operands, Pass, has_no_way,
};
use phalanx_cuda::{Address, Error, Taps};
use std::collections::HashSet;

/// What the memory that convolutions may use is a multiple of.
const WORKSPACE_STEP_BYTES: u64 = 128 << 20;

/// The most memory that a convolution may use beside its tensors: a 64th of all that the GPU has, in whole steps, and no less than two of
/// them. For large batches of images the library's best engines want as much as the images take.
fn most_workspace_bytes(memory: u64) -> usize {
    ((memory / 64 / WORKSPACE_STEP_BYTES).max(2) * WORKSPACE_STEP_BYTES) as usize
}

fn described(engine: &Engine, pass: Pass, p: Plan, dtype: DType) -> Convolution {
    let numbers = match dtype {
        DType::BF16 => Numbers::Bf16,
        DType::F16 => Numbers::F16,
        _ if engine.rounds_factors() => Numbers::Tf32,
        _ => Numbers::F32,
    };
    Convolution {
        pass,
        numbers,
        layout: Layout::Nhwc,
        images: [p.n, p.c, p.h, p.w],
        outputs: p.o,
        kernel: [p.kh, p.kw],
        stride: p.options.stride,
        padding: p.options.padding,
        dilation: p.options.dilation,
        groups: p.options.groups,
    }
}

/// The library, opened, and what it was found not to do.
pub(crate) struct Opened {
    convolutions: Convolutions,
    /// Those that it has no engine for, each with the alignment of what it was asked for.
    undone: HashSet<(Convolution, Alignment)>,
}

impl Engine {
    /// What `f` makes of the library, which is opened for the first convolution.
    #[track_caller]
    fn with_cudnn<T>(&self, f: impl FnOnce(&mut Opened) -> T) -> T {
        let mut opened = lock(&self.convolutions);
        f(succeeded(self.opened(&mut opened)))
    }

    /// The library, opened if it isn't yet, with its GPU current.
    fn opened<'a>(&self, opened: &'a mut Option<Opened>) -> Result<&'a mut Opened, Error> {
        self.gpu().make_current()?;
        if opened.is_none() {
            let most = most_workspace_bytes(self.gpu().memory()?.total);
            let convolutions = self.gpu().cudnn()?.convolutions(most)?;
            *opened = Some(Opened { convolutions, undone: HashSet::new() });
        }
        Ok(opened.as_mut().expect("it was opened just now"))
    }

    /// Opens the library, so that no convolution has to.
    pub(crate) fn prepare_convolutions(&self) -> Result<(), Error> {
        self.opened(&mut lock(&self.convolutions)).map(drop)
    }

    /// Gives the compute stream a convolution of tensors that lie as GPUs want them; nothing, and `false`, where the library has no engine
    /// for it on this GPU, which is told once with what is done instead. Panics on any other failure.
    #[track_caller]
    fn by_cudnn(&self, convolution: &Convolution, operands: &Operands, out: &Tensor, instead: &str) -> bool {
        let described = (*convolution, operands.alignment());
        self.with_cudnn(|Opened { convolutions, undone }| {
            if undone.contains(&described) {
                return false;
            }
            match self.run(convolutions, convolution, operands, out) {
                Err(error) if has_no_way(&error) => {
                    tracing::warn!("{error}\nit is left out from now on: {instead}");
                    undone.insert(described);
                    false
                }
                done => {
                    succeeded(done);
                    true
                }
            }
        })
    }

    #[track_caller]
    fn run(
        &self,
        convolutions: &mut Convolutions,
        convolution: &Convolution,
        operands: &Operands,
        out: &Tensor,
    ) -> Result<(), Error> {
        if self.is_to_search(convolutions, convolution, operands) {
            let mut workspace = None;
            let mut lend = |bytes: usize| {
                let workspace = workspace.insert(Tensor::stale(out.device(), [bytes].into(), DType::U8));
                workspace.storage.write_on_gpu().at
            };
            // SAFETY: as below; what is written is written over and over, and nothing of it is read. The workspace is dropped behind the
            // last proposal.
            unsafe { self.search(convolutions, convolution, operands, &mut lend) };
        }
        let bytes = convolutions.workspace_bytes(convolution, operands)?;
        let workspace = Tensor::stale(out.device(), [bytes].into(), DType::U8);
        let lent = workspace.storage.write_on_gpu();
        let stream = self.stream().handle();
        self.stream().launching()?;
        // SAFETY: the callers' tensors have the plan's sizes and are borrowed in order (S-STREAM), and so is the workspace.
        unsafe { convolutions.run(convolution, operands, lent.at, stream) }?;
        self.stream().launched(|| format!("the convolution {convolution}"))
    }

    /// The same by whatever does it: where the library has no engine, a kernel of our own, or, in 16 bits, what `again` makes of what is
    /// read, `a` and `b`, in float32. `lent` are the borrows of what the operands lie in.
    #[track_caller]
    fn convolve<L>(
        &self,
        convolution: &Convolution,
        operands: &Operands,
        lent: L,
        [a, b]: [&Tensor; 2],
        out: &Tensor,
        again: impl FnOnce([&Tensor; 2], &Tensor),
    ) {
        let is_half = a.dtype.is_half();
        let instead = match is_half {
            true => "it is done in float32, and rounded",
            false => "a plain kernel of our own does it, slowly",
        };
        let is_done = self.by_cudnn(convolution, operands, out, instead);
        drop(lent);
        match (is_done, is_half) {
            (true, _) => {}
            (false, true) => in_f32(self, out, |out| again([&a.widened(), &b.widened()], out)),
            (false, false) => self.plain(convolution, [a, b], out),
        }
    }

    /// A convolution by a kernel of our own, in float32: `a` and `b` are what it reads, in the order of its parameters.
    #[track_caller]
    fn plain(&self, convolution: &Convolution, [a, b]: [&Tensor; 2], out: &Tensor) {
        let taps = Taps::of(convolution).to_bytes();
        let mut args = vec![Arg::In(a), Arg::In(b), Arg::Out(out), Arg::Int(out.count())];
        let name = match convolution.pass {
            Pass::Forward | Pass::ForwardBias | Pass::ForwardBiasRelu => "plain_convolution",
            Pass::BackwardData => "plain_convolution_images",
            Pass::BackwardFilter => {
                args.push(Arg::Int(convolution.images[0]));
                "plain_convolution_kernels"
            }
        };
        args.push(Arg::Struct(&taps));
        // SAFETY: the callers' tensors have the convolution's sizes, channels last and without gaps.
        unsafe { self.launch(name, elements(out.count()), &args) }
    }
}

/// Whether a convolution is done as a product of rows of channels, one for each pixel, with a matrix of channels: such with kernels of one
/// pixel are products, and in float32 without tensor cores the library has next to no engine that takes channels last as they lie. It turns
/// images around and back, in a workspace as large as both. Kernels' gradients it has such engines for.
fn is_product(engine: &Engine, plan: Plan, dtype: DType) -> bool {
    let is_exact = dtype == DType::F32 && !engine.rounds_factors();
    is_exact && [plan.kh, plan.kw] == [1, 1] && plan.options == Conv2dOptions::default()
}

/// What lies with so many channels last as a matrix with a row for each pixel.
fn rows(tensor: &Tensor, channels: usize) -> Tensor {
    let matrix = Geometry::row_major([tensor.count() / channels.max(1), channels].into());
    tensor.seen_as(Geometry { offset: tensor.geometry.offset, ..matrix })
}

fn at(tensor: &Tensor, start: Address) -> Address {
    start.plus(tensor.geometry.offset * tensor.dtype.bytes())
}

/// `out = x * w + b`.
#[track_caller]
pub(crate) fn forward(engine: &Engine, x: &Tensor, w: &Tensor, b: Option<&Tensor>, plan: Plan, out: &Tensor) {
    check_float("conv2d", x.dtype);
    if out.count() == 0 {
        return;
    }
    if is_product(engine, plan, x.dtype) {
        return matmul::linear(engine, &rows(x, plan.c), &rows(w, plan.c), b, &rows(out, plan.o));
    }
    let lent = [x.storage.read_on_gpu(), w.storage.read_on_gpu(), out.storage.write_on_gpu()];
    let (images, kernels, outputs) = (at(x, lent[0].at), at(w, lent[1].at), at(out, lent[2].at));
    let plain = Operands { images, kernels, outputs, bias: Address::NULL };
    let Some(b) = b else {
        let convolution = described(engine, Pass::Forward, plan, x.dtype);
        let again = |[x, w]: [&Tensor; 2], out: &Tensor| forward(engine, x, w, None, plan, out);
        return engine.convolve(&convolution, &plain, lent, [x, w], out, again);
    };
    let of_bias = b.storage.read_on_gpu();
    let (fused, operands) =
        (described(engine, Pass::ForwardBias, plan, x.dtype), Operands { bias: at(b, of_bias.at), ..plain });
    if engine.by_cudnn(&fused, &operands, out, "it is done without its bias, which a kernel of our own adds")
    {
        return;
    }
    drop((lent, of_bias));
    let without = out.stale_like();
    forward(engine, x, w, None, plan, &without);
    elementwise::binary(engine, Binary::Add, &rows(&without, plan.o), b, &rows(out, plan.o));
}

/// Rounds to `out` what `f` leaves in f32, where no engine does a convolution in 16 bits, as may be with few channels.
#[track_caller]
fn in_f32(engine: &Engine, out: &Tensor, f: impl FnOnce(&Tensor)) {
    let wide = Tensor::stale_in(out.dense_order(), out.device(), *out.shape(), DType::F32);
    f(&wide);
    copy::convert(engine, &wide, out);
}

/// `out =` the gradient with respect to the images.
#[track_caller]
pub(crate) fn image_gradient(engine: &Engine, grad: &Tensor, w: &Tensor, plan: Plan, out: &Tensor) {
    check_float("conv2d", out.dtype);
    if out.count() == 0 {
        return;
    }
    if is_product(engine, plan, out.dtype) {
        return matmul::linear_input_gradient(
            engine,
            &rows(grad, plan.o),
            &rows(w, plan.c),
            &rows(out, plan.c),
        );
    }
    let lent = [out.storage.write_on_gpu(), w.storage.read_on_gpu(), grad.storage.read_on_gpu()];
    let (images, kernels, outputs) = (at(out, lent[0].at), at(w, lent[1].at), at(grad, lent[2].at));
    let operands = Operands { images, kernels, outputs, bias: Address::NULL };
    let convolution = described(engine, Pass::BackwardData, plan, grad.dtype);
    let again = |[grad, w]: [&Tensor; 2], out: &Tensor| image_gradient(engine, grad, w, plan, out);
    engine.convolve(&convolution, &operands, lent, [grad, w], out, again);
}

/// `out =` the gradient with respect to the kernels.
#[track_caller]
pub(crate) fn kernel_gradient(engine: &Engine, x: &Tensor, grad: &Tensor, plan: Plan, out: &Tensor) {
    check_float("conv2d", out.dtype);
    if x.count() == 0 || grad.count() == 0 {
        return out.fill(0.0);
    }
    let lent = [x.storage.read_on_gpu(), out.storage.write_on_gpu(), grad.storage.read_on_gpu()];
    let (images, kernels, outputs) = (at(x, lent[0].at), at(out, lent[1].at), at(grad, lent[2].at));
    let operands = Operands { images, kernels, outputs, bias: Address::NULL };
    let convolution = described(engine, Pass::BackwardFilter, plan, grad.dtype);
    let again = |[x, grad]: [&Tensor; 2], out: &Tensor| kernel_gradient(engine, x, grad, plan, out);
    engine.convolve(&convolution, &operands, lent, [x, grad], out, again);
}

/// `out =` the gradient with respect to the bias: the sum over images and pixels.
#[track_caller]
pub(crate) fn bias_gradient(engine: &Engine, grad: &Tensor, plan: Plan, out: &Tensor) {
    reduce::sum(engine, &rows(grad, plan.o), &out.reshape([1, plan.o]));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_workspace_may_be_a_64th_of_the_memory() {
        let rows = [
            (0, 256),
            (15_828_320_256, 256),
            (25_393_692_672, 256),
            (85_045_280_768, 1152),
            (150_122_987_520, 2176),
        ];
        for (memory, mib) in rows {
            assert_eq!(most_workspace_bytes(memory), mib << 20, "of {memory}");
        }
    }
}
