//! Convolutions, by cuDNN, of images and kernels whose channels run fastest.

use crate::cpu::conv::Plan;
use crate::dtype::DType;
use crate::gpu::Engine;
use crate::gpu::engine::{lock, succeeded};
use crate::gpu::launch::check_float;
use crate::gpu::{copy, elementwise, reduce};
use crate::op::Binary;
use crate::shape::Geometry;
use crate::tensor::Tensor;
use phalanx_cuda::cudnn::{Convolution, Convolutions, Cudnn, Layout, Numbers, Operands, Pass};
use phalanx_cuda::{Address, Error};
use std::collections::HashSet;

/// The most memory that a convolution may use beside its tensors.
const MOST_WORKSPACE_BYTES: usize = 256 << 20;

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
    /// Those that no engine does, of those that there is another way for.
    undone: HashSet<Convolution>,
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
            let convolutions = Cudnn::open(&self.libraries)?.convolutions(MOST_WORKSPACE_BYTES)?;
            *opened = Some(Opened { convolutions, undone: HashSet::new() });
        }
        Ok(opened.as_mut().expect("it was opened just now"))
    }

    /// Opens the library, so that no convolution has to.
    pub(crate) fn prepare_convolutions(&self) -> Result<(), Error> {
        self.opened(&mut lock(&self.convolutions)).map(drop)
    }

    /// Whether an engine does this convolution: that is the library's business, and differs by GPU and sizes.
    #[track_caller]
    fn does(&self, convolution: &Convolution, operands: &Operands) -> bool {
        self.with_cudnn(|Opened { convolutions, undone }| {
            if undone.contains(convolution) {
                return false;
            }
            match convolutions.workspace_bytes(convolution, operands) {
                Ok(_) => true,
                Err(Error::LibraryCall { .. }) => {
                    undone.insert(*convolution);
                    false
                }
                Err(error) => panic!("{error}"),
            }
        })
    }

    /// Gives the compute stream a convolution of tensors that lie as GPUs want them.
    #[track_caller]
    fn convolution(&self, convolution: &Convolution, operands: &Operands, out: &Tensor) {
        self.with_cudnn(|Opened { convolutions, .. }| self.run(convolutions, convolution, operands, out));
    }

    #[track_caller]
    fn run(
        &self,
        convolutions: &mut Convolutions,
        convolution: &Convolution,
        operands: &Operands,
        out: &Tensor,
    ) {
        let bytes = succeeded(convolutions.workspace_bytes(convolution, operands));
        let workspace = Tensor::stale(out.device(), [bytes].into(), DType::U8);
        let lent = workspace.storage.write_on_gpu();
        let stream = self.stream().handle();
        // SAFETY: the callers' tensors have the plan's sizes and are borrowed in order (S-STREAM), and so is the workspace.
        succeeded(unsafe { convolutions.run(convolution, operands, lent.at, stream) });
        succeeded(self.stream().launched(|| format!("the convolution {convolution}")));
    }
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
    let lent = [x.storage.read_on_gpu(), w.storage.read_on_gpu(), out.storage.write_on_gpu()];
    let (images, kernels, outputs) = (at(x, lent[0].at), at(w, lent[1].at), at(out, lent[2].at));
    let plain = Operands { images, kernels, outputs, bias: Address::NULL };
    let Some(b) = b else {
        let convolution = described(engine, Pass::Forward, plan, x.dtype);
        if x.dtype.is_half() && !engine.does(&convolution, &plain) {
            drop(lent);
            return in_f32(engine, out, |out| forward(engine, &x.widened(), &w.widened(), None, plan, out));
        }
        return engine.convolution(&convolution, &plain, out);
    };
    let of_bias = b.storage.read_on_gpu();
    let (fused, operands) =
        (described(engine, Pass::ForwardBias, plan, x.dtype), Operands { bias: at(b, of_bias.at), ..plain });
    if engine.does(&fused, &operands) {
        return engine.convolution(&fused, &operands, out);
    }
    drop((lent, of_bias));
    let without = out.stale_like();
    forward(engine, x, w, None, plan, &without);
    elementwise::binary(engine, Binary::Add, &pixels(&without, plan), b, &pixels(out, plan));
}

/// Rounds to `out` what `f` leaves in f32, where no engine does a convolution in 16 bits, as may be with few channels.
#[track_caller]
fn in_f32(engine: &Engine, out: &Tensor, f: impl FnOnce(&Tensor)) {
    let wide = Tensor::stale_in(out.dense_order(), out.device(), *out.shape(), DType::F32);
    f(&wide);
    copy::convert(engine, &wide, out);
}

/// Outputs as rows of channels, a row a pixel.
fn pixels(outputs: &Tensor, plan: Plan) -> Tensor {
    let rows = Geometry::row_major([plan.n * plan.oh * plan.ow, plan.o].into());
    outputs.seen_as(Geometry { offset: outputs.geometry.offset, ..rows })
}

/// `out =` the gradient with respect to the images.
#[track_caller]
pub(crate) fn image_gradient(engine: &Engine, grad: &Tensor, w: &Tensor, plan: Plan, out: &Tensor) {
    check_float("conv2d", out.dtype);
    if out.count() == 0 {
        return;
    }
    let lent = [out.storage.write_on_gpu(), w.storage.read_on_gpu(), grad.storage.read_on_gpu()];
    let (images, kernels, outputs) = (at(out, lent[0].at), at(w, lent[1].at), at(grad, lent[2].at));
    let operands = Operands { images, kernels, outputs, bias: Address::NULL };
    let convolution = described(engine, Pass::BackwardData, plan, grad.dtype);
    if grad.dtype.is_half() && !engine.does(&convolution, &operands) {
        drop(lent);
        return in_f32(engine, out, |out| image_gradient(engine, &grad.widened(), &w.widened(), plan, out));
    }
    engine.convolution(&convolution, &operands, out);
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
    if grad.dtype.is_half() && !engine.does(&convolution, &operands) {
        drop(lent);
        return in_f32(engine, out, |out| kernel_gradient(engine, &x.widened(), &grad.widened(), plan, out));
    }
    engine.convolution(&convolution, &operands, out);
}

/// `out =` the gradient with respect to the bias: the sum over images and pixels.
#[track_caller]
pub(crate) fn bias_gradient(engine: &Engine, grad: &Tensor, plan: Plan, out: &Tensor) {
    reduce::sum(engine, &pixels(grad, plan), &out.reshape([1, plan.o]));
}
