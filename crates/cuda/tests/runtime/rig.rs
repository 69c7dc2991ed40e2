//! A fake driver with a GPU of it, and the few lines that tests share.

use phalanx_cuda::{Argument, Element, Error, Gpu, GpuOptions, KERNELS, Source, Stream, Work, kernel};
use phalanx_fake_cuda::{FakeCuda, Module};
use phalanx_tensor::Philox;
use std::path::Path;

/// A fake driver of a test's own; none, said aloud, where there is no compiler.
pub(crate) fn fake() -> Option<FakeCuda> {
    let modules = Source::ALL.into_iter().flat_map(|source| {
        source.elements().iter().map(move |element| Module {
            file: source.file(),
            element: element.in_source(),
            kernels: KERNELS
                .iter()
                .filter(|kernel| kernel.source == source)
                .map(|kernel| kernel.name)
                .collect(),
        })
    });
    let kernels = Path::new(env!("CARGO_MANIFEST_DIR")).join("kernels");
    FakeCuda::new(Path::new(env!("CARGO_TARGET_TMPDIR")), &kernels, &modules.collect::<Vec<_>>())
}

pub(crate) fn options(fake: &FakeCuda) -> GpuOptions {
    GpuOptions { libraries: vec![fake.folder().to_owned()], ..GpuOptions::default() }
}

pub(crate) fn gpu(fake: &FakeCuda) -> Gpu {
    Gpu::open(0, &options(fake)).unwrap()
}

/// A launch of a test, whose memory is long enough and outlives it.
#[track_caller]
pub(crate) fn launch(
    gpu: &Gpu,
    stream: &Stream,
    name: &str,
    element: Element,
    work: Work,
    arguments: &[Argument<'_>],
) -> Result<(), Error> {
    // SAFETY: the fake driver finds what the test gets wrong, and runs nothing on memory that isn't there.
    unsafe { gpu.launch(stream, kernel(name), element, work, arguments) }
}

/// Launches `affine`: `out = factor * x + shift`, `n` float32 numbers.
#[track_caller]
pub(crate) fn affine(
    gpu: &Gpu,
    stream: &Stream,
    from: &phalanx_cuda::DeviceMemory,
    to: &phalanx_cuda::DeviceMemory,
    factor: f32,
    shift: f32,
) -> Result<(), Error> {
    let n = from.bytes() / 4;
    let arguments = [
        Argument::Read(from.address()),
        Argument::Write(to.address()),
        Argument::Int(n as i64),
        Argument::Float(factor),
        Argument::Float(shift),
    ];
    launch(gpu, stream, "affine", Element::F32, Work::Elements(n as u64), &arguments)
}

/// `n` numbers in [-1, 1).
pub(crate) fn numbers(n: usize, stream: u64) -> Vec<f32> {
    let key = Philox::new(7, stream);
    (0..n).map(|i| 2.0 * key.unit(i as u64) - 1.0).collect()
}

pub(crate) fn floats(bytes: &[u8]) -> Vec<f32> {
    bytes.chunks_exact(4).map(bytemuck::pod_read_unaligned).collect()
}

pub(crate) fn bytes(floats: &[f32]) -> &[u8] {
    bytemuck::cast_slice(floats)
}

/// A step of an optimizer over values before `end`, as its kernels find it.
pub(crate) fn step_of(end: usize, numbers: [f32; 9]) -> Vec<u8> {
    [&(end as i64).to_ne_bytes(), bytes(&numbers), &[0; 4]].concat()
}
