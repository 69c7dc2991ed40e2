//! Max and average pooling of images whose channels run fastest.

use crate::cpu::pooling::Planes;
use crate::gpu::Engine;
use crate::gpu::launch::{Arg, check_float, elements};
use crate::op::CountPadding;
use crate::shape::Order;
use crate::tensor::Tensor;
use phalanx_cuda::Window;

/// How windows move over images of so many channels.
fn window(p: Planes, channels: usize) -> [u8; Window::BYTES] {
    let (input, output) = ([p.h, p.w], [p.oh, p.ow]);
    // Kernels count pixels in 32 bits. Steps that are longer than that are longer than an image, which has one window then.
    let most = i32::MAX as usize;
    let (kernel, padding) = (p.options.kernel, p.options.padding);
    let is_small = |[h, w]: [usize; 2]| h <= most / 4 && w <= most / 4;
    assert!(
        [input, kernel].into_iter().all(is_small),
        "pooling: windows of {kernel:?} over images of {input:?}"
    );
    let stride = p.options.stride.map(|stride| stride.min(most / 4));
    Window { channels, input, output, kernel, stride, padding }.to_bytes()
}

/// Max-pooling; `position` gets where in its window each largest stands. Images lie in the order of GPUs, whatever `_order` is.
#[track_caller]
pub(crate) fn max_pool(
    engine: &Engine,
    x: &Tensor,
    p: Planes,
    _order: Order,
    out: &Tensor,
    position: &Tensor,
) {
    check_float("max_pool2d", x.dtype);
    let (n, window) = (out.count(), window(p, x.dims()[1]));
    let args = [Arg::In(x), Arg::Out(out), Arg::Out(position), Arg::Struct(&window), Arg::Int(n)];
    // SAFETY: the window has the sizes of the images, and there are n outputs and positions.
    unsafe { engine.launch("max_pool", elements(n), &args) }
}

/// The gradient of [`max_pool`].
#[track_caller]
pub(crate) fn max_pool_gradient(
    engine: &Engine,
    position: &Tensor,
    grad: &Tensor,
    p: Planes,
    _order: Order,
    out: &Tensor,
) {
    check_float("max_pool2d", out.dtype);
    let (n, window) = (out.count(), window(p, out.dims()[1]));
    let args = [Arg::In(position), Arg::In(grad), Arg::Out(out), Arg::Struct(&window), Arg::Int(n)];
    // SAFETY: the window has the sizes of the images, which have n elements.
    unsafe { engine.launch("max_pool_gradient", elements(n), &args) }
}

fn whole(padding: CountPadding) -> Arg<'static> {
    Arg::Int(usize::from(padding == CountPadding::Yes))
}

/// The mean of each window.
#[track_caller]
pub(crate) fn avg_pool(engine: &Engine, x: &Tensor, p: Planes, padding: CountPadding, out: &Tensor) {
    check_float("avg_pool2d", x.dtype);
    let (n, window) = (out.count(), window(p, x.dims()[1]));
    let args = [Arg::In(x), Arg::Out(out), Arg::Struct(&window), whole(padding), Arg::Int(n)];
    // SAFETY: the window has the sizes of the images, and there are n outputs.
    unsafe { engine.launch("average_pool", elements(n), &args) }
}

/// The gradient of [`avg_pool`].
#[track_caller]
pub(crate) fn avg_pool_gradient(
    engine: &Engine,
    grad: &Tensor,
    p: Planes,
    padding: CountPadding,
    out: &Tensor,
) {
    check_float("avg_pool2d", out.dtype);
    let (n, window) = (out.count(), window(p, out.dims()[1]));
    let args = [Arg::In(grad), Arg::Out(out), Arg::Struct(&window), whole(padding), Arg::Int(n)];
    // SAFETY: the window has the sizes of the images, which have n elements.
    unsafe { engine.launch("average_pool_gradient", elements(n), &args) }
}
