//! Convolutions, by cuDNN, of images and kernels whose channels run fastest.

use crate::cpu::conv::Plan;
use crate::dtype::DType;
use crate::gpu::Engine;
use crate::gpu::engine::{lock, succeeded};
use crate::gpu::launch::check_float;
use crate::gpu::reduce;
use crate::shape::Geometry;
use crate::tensor::Tensor;
use phalanx_cuda::Address;
use phalanx_cuda::cudnn::{Convolution, Cudnn, Layout, Numbers, Operands, Pass};

/// The most memory that a convolution may use beside its tensors.
const MOST_WORKSPACE_BYTES: usize = 256 << 20;

fn described(pass: Pass, p: Plan) -> Convolution {
    Convolution {
        pass,
        numbers: Numbers::F32,
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

impl Engine {
    /// Gives the compute stream a convolution of tensors that lie as GPUs want them. The library is opened for the first one.
    #[track_caller]
    fn convolution(&self, convolution: &Convolution, operands: &Operands, out: &Tensor) {
        let mut opened = lock(&self.convolutions);
        succeeded(self.gpu().make_current());
        let convolutions = opened.get_or_insert_with(|| {
            let cudnn = Cudnn::open(&self.libraries);
            succeeded(cudnn.and_then(|cudnn| cudnn.convolutions(MOST_WORKSPACE_BYTES)))
        });
        let bytes = succeeded(convolutions.workspace_bytes(convolution, operands));
        let workspace = Tensor::stale(out.device(), [bytes].into(), DType::U8);
        let lent = workspace.storage.write_on_gpu();
        let stream = self.stream().handle();
        // SAFETY: the callers' tensors have the plan's sizes and are borrowed in order (S-STREAM), and so is the workspace.
        succeeded(unsafe { convolutions.run(convolution, operands, lent.at, stream) });
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
    let of_bias = b.map(|b| (b, b.storage.read_on_gpu()));
    let operands = Operands {
        images: at(x, lent[0].at),
        kernels: at(w, lent[1].at),
        outputs: at(out, lent[2].at),
        bias: of_bias.as_ref().map_or(Address::NULL, |(b, lent)| at(b, lent.at)),
    };
    let pass = if b.is_some() { Pass::ForwardBias } else { Pass::Forward };
    engine.convolution(&described(pass, plan), &operands, out);
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
    engine.convolution(&described(Pass::BackwardData, plan), &operands, out);
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
    engine.convolution(&described(Pass::BackwardFilter, plan), &operands, out);
}

/// `out =` the gradient with respect to the bias: the sum over images and pixels.
#[track_caller]
pub(crate) fn bias_gradient(engine: &Engine, grad: &Tensor, plan: Plan, out: &Tensor) {
    let rows = Geometry::row_major([plan.n * plan.oh * plan.ow, plan.o].into());
    let rows = grad.seen_as(Geometry { offset: grad.geometry.offset, ..rows });
    reduce::sum(engine, &rows, &out.reshape([1, plan.o]));
}
