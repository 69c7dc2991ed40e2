//! A launch of one of our kernels on tensors.

use crate::dtype::DType;
use crate::gpu::Engine;
use crate::gpu::engine::succeeded;
use crate::shape::Geometry;
use crate::storage::Lent;
use crate::tensor::Tensor;
use phalanx_cuda::{Address, Argument, Element, MOST_PARAMETERS, Walk, Work, kernel};

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

impl Engine {
    /// Gives the compute stream a launch of a kernel, as it is for floats of 16 bits where a tensor holds such: all others that the
    /// kernel is handed then hold the same, or what is f32 in any case.
    ///
    /// # Safety
    /// Given its numbers the kernel reads and writes nothing but the elements of the tensors, and bare memory that stays there.
    #[track_caller]
    pub(super) unsafe fn launch(&self, name: &str, work: Work, args: &[Arg<'_>]) {
        let held = |arg: &Arg<'_>| match arg {
            Arg::In(tensor) | Arg::InOrNull(Some(tensor)) | Arg::Out(tensor) => Some(tensor.dtype),
            _ => None,
        };
        let half = args.iter().filter_map(held).find(|dtype| dtype.is_half());
        let known = kernel(name).source.elements();
        let of_half = half.map(element).filter(|element| known.contains(element));
        // SAFETY: as the caller promises.
        unsafe { self.launch_for(of_half.unwrap_or(Element::F32), name, work, args) }
    }

    /// The same of a kernel as it is for these elements.
    ///
    /// # Safety
    /// As for [`Engine::launch`].
    #[track_caller]
    pub(super) unsafe fn launch_for(&self, element: Element, name: &str, work: Work, args: &[Arg<'_>]) {
        let mut lent: [Option<Lent<'_>>; MOST_PARAMETERS] = [const { None }; MOST_PARAMETERS];
        let mut given = [Argument::Null; MOST_PARAMETERS];
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
        succeeded(unsafe { self.gpu().launch(self.stream(), kernel, element, work, &given[..args.len()]) });
    }
}

/// A tensor that is read, or null, where one of `outputs` may lie in the same memory. That is for kernels that have read all that they want
/// of an element's place before they write there.
pub(super) fn read_where_written<'a>(read: Option<&'a Tensor>, outputs: [Option<&Tensor>; 2]) -> Arg<'a> {
    let is_written = |read: &Tensor| outputs.into_iter().flatten().any(|out| out.storage.is(&read.storage));
    match read {
        // Lent to the output alone, since the launch takes both in one go.
        Some(read) if is_written(read) => {
            let start = read.storage.read_on_gpu().at;
            Arg::BareIn(start.plus(read.geometry.offset * read.dtype.bytes()))
        }
        read => Arg::InOrNull(read),
    }
}

/// A tensor that is written beside another, which may be of the same buffer: no element is of both.
pub(super) fn also_written<'a>(out: &'a Tensor, beside: &Tensor) -> Arg<'a> {
    if !out.storage.is(&beside.storage) {
        return Arg::Out(out);
    }
    // Lent to the other alone, since the launch takes both in one go.
    let start = out.storage.write_on_gpu().at;
    Arg::Bare(start.plus(out.geometry.offset * out.dtype.bytes()))
}

/// A tensor that is written, or null.
pub(super) fn out_or_null(out: Option<&Tensor>) -> Arg<'_> {
    out.map_or(Arg::InOrNull(None), Arg::Out)
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
    let computes = matches!(dtype, DType::F32 | DType::BF16 | DType::F16);
    assert!(
        computes,
        "{op}: tensors of {dtype} aren't computed with on a GPU, those of f32, bf16 and f16 are"
    );
}

/// Panics unless it is f32.
#[track_caller]
pub(super) fn check_single(op: &str, dtype: DType) {
    assert!(dtype == DType::F32, "{op}: of {dtype} on a GPU, which does it for f32");
}

/// The type as kernels are compiled for it. Panics if there are none.
#[track_caller]
pub(super) fn element(dtype: DType) -> Element {
    match dtype {
        DType::F32 => Element::F32,
        DType::BF16 => Element::Bf16,
        DType::F16 => Element::F16,
        DType::F64 | DType::I64 | DType::U8 => panic!("no kernel is compiled for elements of {dtype}"),
    }
}

/// How a kernel goes through these views of one shape together.
pub(super) fn walk<const V: usize>(views: [&Geometry; V]) -> Walk<V> {
    let n = views[0].shape.n_dims();
    Walk::new(views[0].shape.dims(), views.map(|view| &view.strides[..n]))
}
