//! A launch of one of our kernels on tensors.

use crate::dtype::DType;
use crate::gpu::Engine;
use crate::gpu::engine::succeeded;
use crate::shape::Geometry;
use crate::storage::Lent;
use crate::tensor::Tensor;
use phalanx_cuda::{Address, Argument, Element, Walk, Work, kernel};

/// What a kernel is handed. Tensors are handed over by where their first element lies, and borrowed until the launch is given.
#[derive(Clone, Copy)]
pub(super) enum Arg<'a> {
    In(&'a Tensor),
    InOrNull(Option<&'a Tensor>),
    Out(&'a Tensor),
    /// Memory that is no tensor's, which the kernel may read and write.
    Bare(Address),
    /// The same, which the kernel only reads.
    BareIn(Address),
    Int(usize),
    /// A whole number that may be any.
    Bits(i64),
    Float(f64),
    Double(f64),
    Struct(&'a [u8]),
}

/// The most arguments of a launch.
const MOST: usize = 13;

impl Engine {
    /// Gives the compute stream a launch of a kernel.
    ///
    /// # Safety
    /// Given its numbers the kernel reads and writes nothing but the elements of the tensors, and bare memory that stays there.
    #[track_caller]
    pub(super) unsafe fn launch(&self, name: &str, work: Work, args: &[Arg<'_>]) {
        let mut lent: [Option<Lent<'_>>; MOST] = [const { None }; MOST];
        let mut given = [Argument::Null; MOST];
        let kernel = kernel(name);
        for ((arg, lent), given) in args.iter().zip(&mut lent).zip(&mut given) {
            let at = |tensor: &Tensor, lent: &Lent<'_>| {
                lent.at.plus(tensor.geometry.offset * tensor.dtype.bytes())
            };
            *given = match *arg {
                Arg::In(tensor) | Arg::InOrNull(Some(tensor)) => {
                    Argument::Read(at(tensor, lent.insert(tensor.storage.read_on_gpu())))
                }
                Arg::Out(tensor) => Argument::Write(at(tensor, lent.insert(tensor.storage.write_on_gpu()))),
                Arg::InOrNull(None) => Argument::Null,
                Arg::Bare(at) => Argument::Write(at),
                Arg::BareIn(at) => Argument::Read(at),
                Arg::Int(n) => Argument::Int(n as i64),
                Arg::Bits(n) => Argument::Int(n),
                Arg::Float(x) => Argument::Float(x as f32),
                Arg::Double(x) => Argument::Double(x),
                Arg::Struct(bytes) => Argument::Struct(bytes),
            };
        }
        // SAFETY: what is read and written is the caller's promise; it is there when the stream comes to it, since buffers that are
        // dropped are written by later work of this stream (S-STREAM), and memory is given back after all work.
        succeeded(unsafe {
            self.gpu().launch(self.stream(), kernel, Element::F32, work, &given[..args.len()])
        });
    }
}

/// Work element by element.
pub(super) fn elements(n: usize) -> Work {
    Work::Elements(n as u64)
}

/// Work row by row.
pub(super) fn rows(rows: usize, width: usize) -> Work {
    Work::Rows { rows: rows as u64, width: width as u64 }
}

/// Panics unless the kernels compute with this type.
#[track_caller]
pub(super) fn check_float(op: &str, dtype: DType) {
    assert!(dtype == DType::F32, "{op}: tensors of {dtype} aren't computed with on a GPU, those of f32 are");
}

/// How a kernel goes through these views of one shape together.
pub(super) fn walk<const V: usize>(views: [&Geometry; V]) -> Walk<V> {
    let n = views[0].shape.n_dims();
    Walk::new(views[0].shape.dims(), views.map(|view| &view.strides[..n]))
}
