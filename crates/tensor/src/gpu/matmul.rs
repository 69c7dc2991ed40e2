//! Matrix products, by cuBLASLt, and by a plain kernel where that has no way to do one.

use crate::dtype::DType;
use crate::gpu::Engine;
use crate::gpu::engine::succeeded;
use crate::gpu::launch::{Arg, check_float, elements};
use crate::gpu::{elementwise, reduce};
use crate::lock::lock;
use crate::op::{Binary, Unary};
use crate::shape::{Geometry, Shape};
use crate::storage::Lent;
use crate::tensor::Tensor;
use phalanx_cuda::Address;
use phalanx_cuda::cublaslt::{Epilogue, Numbers, Operand, Operands, Order, Product, has_no_way};

/// A factor as the library takes it.
struct Factor {
    tensor: Tensor,
    operand: Operand,
}

/// The matrices of `t`, spread to `batch`: as they are where rows or columns lie without gaps and the batch evenly, else copied.
fn factor(t: &Tensor, batch: &Shape) -> Factor {
    let n = t.shape().n_dims();
    let [rows, columns] = [t.dims()[n - 2], t.dims()[n - 1]];
    let own = Geometry { shape: Shape::new(&t.dims()[..n - 2]), ..t.geometry };
    let [row, column] = [t.geometry.strides[n - 2], t.geometry.strides[n - 1]];
    // Steps along sizes of 1 say nothing.
    let in_rows = columns == 1 || column == 1;
    let in_columns = rows == 1 || row == 1;
    let leading = |width: usize, count: usize, step: usize| if count == 1 { width } else { step };
    let operand = match (in_rows, in_columns) {
        (true, _) if leading(columns, rows, row) >= columns => {
            Some((Order::Rows, leading(columns, rows, row)))
        }
        (_, true) if leading(rows, columns, column) >= rows => {
            Some((Order::Columns, leading(rows, columns, column)))
        }
        _ => None,
    };
    match (operand, step(&own.broadcast_to(*batch))) {
        (Some((order, leading)), Some(stride)) => {
            Factor { tensor: t.detach(), operand: Operand { order, leading, stride } }
        }
        _ => {
            let n = batch.n_dims();
            let shape = batch.insert(n, rows).insert(n + 1, columns);
            let operand = Operand { stride: rows * columns, ..Operand::rows(columns) };
            Factor { tensor: t.detach().broadcast_to(shape).contiguous(), operand }
        }
    }
}

/// The one step that leads from each matrix of a batch to the next, if there is one.
fn step(batch: &Geometry) -> Option<usize> {
    let mut found: Option<(usize, usize)> = None;
    for d in (0..batch.shape.n_dims()).rev().filter(|&d| batch.shape.dims()[d] != 1) {
        let (size, stride) = (batch.shape.dims()[d], batch.strides[d]);
        found = match found {
            None => Some((stride, stride * size)),
            Some((step, next)) if next == stride => Some((step, next * size)),
            Some(_) => return None,
        };
    }
    Some(found.map_or(0, |(step, _)| step))
}

impl Engine {
    /// How products of tensors of this type are formed.
    fn numbers(&self, dtype: DType) -> Numbers {
        match dtype {
            DType::BF16 => Numbers::Bf16,
            DType::F16 => Numbers::F16,
            _ if self.rounds_factors() => Numbers::Tf32,
            _ => Numbers::F32,
        }
    }

    /// Gives the compute stream a product of tensors that lie as it says, with its epilogue; nothing, and `false`, where the library
    /// has no way to do it on this GPU, which is told once. Panics on any other failure.
    #[track_caller]
    fn by_library(&self, product: &Product, [a, b]: [&Tensor; 2], beside: Beside<'_>, out: &Tensor) -> bool {
        let lent = [Of::Read(a), Of::Read(b), Of::Write(out), beside.vector, beside.kept].map(Of::lent);
        let [a, b, to, vector, kept] =
            lent.each_ref().map(|lent| lent.as_ref().map_or(Address::NULL, |(at, _)| *at));
        let operands = Operands { vector, kept, ..Operands::new(a, b, to) };
        let described = (*product, operands.alignment());
        if lock(&self.unplanned).contains(&described) {
            return false;
        }
        succeeded(self.gpu().make_current());
        let (workspace, stream) = (self.workspace.address(), self.stream().handle());
        let mut products = lock(&self.products);
        for start in (0..product.batch).step_by(MOST_BATCH) {
            let piece = Product { batch: MOST_BATCH.min(product.batch - start), ..*product };
            let moved = |address: Address, stride: usize| address.plus(start * stride * out.dtype.bytes());
            let operands = Operands {
                a: moved(operands.a, product.a.stride),
                b: moved(operands.b, product.b.stride),
                out: moved(operands.out, product.out_stride),
                ..operands
            };
            if self.is_to_search(&mut *products, &piece, &operands) {
                // SAFETY: as below; what is written is written over and over, and nothing of it is read.
                unsafe { self.search(&mut *products, &piece, &operands, &mut |_| workspace) };
            }
            succeeded(self.stream().launching());
            // SAFETY: the callers' sizes are those of the tensors, which are borrowed in order (S-STREAM); the workspace is as large
            // as the products were told, and the compute stream alone uses it.
            match unsafe { products.run(&piece, &operands, workspace, stream) } {
                Err(error) if has_no_way(&error) => {
                    let instead = match product.epilogue {
                        Epilogue::None => "a plain kernel of our own does it, slowly",
                        _ => "it is done without its epilogue, which a kernel of our own does",
                    };
                    tracing::warn!("{error}\nit is left out from now on: {instead}");
                    lock(&self.unplanned).insert(described);
                    return false;
                }
                done => {
                    succeeded(done.and_then(|()| self.stream().launched(|| format!("the product {piece}"))))
                }
            }
        }
        true
    }

    /// The same of a product without an epilogue, by a kernel of our own where the library has no way to do it.
    #[track_caller]
    fn product(&self, product: &Product, [a, b]: [&Tensor; 2], out: &Tensor) {
        if self.by_library(product, [a, b], Beside::NOTHING, out) {
            return;
        }
        let steps = |operand: &Operand| match operand.order {
            Order::Rows => [operand.leading, 1, operand.stride],
            Order::Columns => [1, operand.leading, operand.stride],
        };
        let Product { m, n, k, .. } = *product;
        let count = product.batch * m * n;
        let mut args = vec![Arg::In(a), Arg::In(b), Arg::Out(out)];
        args.extend([count, m, n, k].map(Arg::Int));
        args.extend([steps(&product.a), steps(&product.b)].as_flattened().iter().map(|&step| Arg::Int(step)));
        // SAFETY: the callers' sizes and steps are those of the tensors, and the output has as many elements, without gaps.
        unsafe { self.launch("plain_product", elements(count), &args) }
    }
}

/// The most matrices that the library is handed at once: a grid's third dimension has no more blocks.
const MOST_BATCH: usize = 65535;

/// What an epilogue works on beside the product.
#[derive(Clone, Copy)]
struct Beside<'a> {
    /// Its vector.
    vector: Of<'a>,
    /// What is kept of an activation.
    kept: Of<'a>,
}

impl Beside<'_> {
    const NOTHING: Beside<'static> = Beside { vector: Of::None, kept: Of::None };
}

/// What a product does with a tensor.
#[derive(Clone, Copy)]
enum Of<'a> {
    None,
    Read(&'a Tensor),
    Write(&'a Tensor),
}

impl<'a> Of<'a> {
    /// Where the tensor lies, and its borrow.
    #[track_caller]
    fn lent(self) -> Option<(Address, Lent<'a>)> {
        let (tensor, lent) = match self {
            Of::None => return None,
            Of::Read(tensor) => (tensor, tensor.storage.read_on_gpu()),
            Of::Write(tensor) => (tensor, tensor.storage.write_on_gpu()),
        };
        Some((lent.at.plus(tensor.geometry.offset * tensor.dtype.bytes()), lent))
    }
}

/// `out = a b` for every matrix of the batch; `a` and `b` may be any views.
#[track_caller]
pub(crate) fn matmul(engine: &Engine, a: &Tensor, b: &Tensor, out: &Tensor) {
    check_float("matmul", out.dtype);
    let n_dims = out.shape().n_dims();
    let (m, n) = (out.dims()[n_dims - 2], out.dims()[n_dims - 1]);
    let k = a.dims()[a.shape().n_dims() - 1];
    if k == 0 || out.count() == 0 {
        return out.fill(0.0);
    }
    let batch = Shape::new(&out.dims()[..n_dims - 2]);
    let (a, b) = (factor(a, &batch), factor(b, &batch));
    let product = Product {
        a: a.operand,
        b: b.operand,
        batch: batch.count(),
        out_stride: m * n,
        ..Product::new(engine.numbers(out.dtype), [m, n, k])
    };
    engine.product(&product, [&a.tensor, &b.tensor], out);
}

/// All sizes but the last.
fn rows_of(x: &Tensor) -> usize {
    x.dims()[..x.shape().n_dims() - 1].iter().product()
}

/// How a weight (outputs, inputs) lies that is contiguous, or the transpose of what is.
fn weight(w: &Tensor) -> Operand {
    let (outputs, inputs) = (w.dims()[0], w.dims()[1]);
    if w.geometry.strides[1] == 1 { Operand::rows(inputs) } else { Operand::transposed(outputs) }
}

/// `out = x w^T + bias`, with rows of `x`; all contiguous but `w`, which may be the transpose of what is.
#[track_caller]
pub(crate) fn linear(engine: &Engine, x: &Tensor, w: &Tensor, bias: Option<&Tensor>, out: &Tensor) {
    check_float("linear", out.dtype);
    let (outputs, inputs) = (w.dims()[0], w.dims()[1]);
    if inputs == 0 || out.count() == 0 {
        out.fill(0.0);
        return bias.into_iter().for_each(|bias| out.copy_from(&bias.broadcast_to(*out.shape())));
    }
    let plain = rows_times_weight(engine, x, w);
    let Some(bias) = bias else { return engine.product(&plain, [x, w], out) };
    let fused = Product { epilogue: Epilogue::Bias, ..plain };
    let beside = Beside { vector: Of::Read(bias), ..Beside::NOTHING };
    if !engine.by_library(&fused, [x, w], beside, out) {
        let [without, sum] = [out.stale_like(), out.clone()].map(|t| t.reshape([rows_of(x), outputs]));
        engine.product(&plain, [x, w], &without);
        elementwise::binary(engine, Binary::Add, &without, bias, &sum);
    }
}

/// `input = x w^T + bias` and `out = gelu_tanh(input)`, where somebody wants `input` or not; all as in [`linear`].
#[track_caller]
pub(crate) fn linear_gelu(
    engine: &Engine,
    x: &Tensor,
    w: &Tensor,
    bias: &Tensor,
    (input, out): (Option<&Tensor>, &Tensor),
) {
    let kept = with_gelu(rows_times_weight(engine, x, w), Epilogue::BiasGeluKept, out);
    // Where it can't be kept it isn't joined either, so that both ways come to the same bits.
    let fused = match input {
        Some(_) => kept,
        None => kept.map(|kept| Product { epilogue: Epilogue::BiasGelu, ..kept }),
    };
    let beside = Beside { vector: Of::Read(bias), kept: input.map_or(Of::None, Of::Write) };
    if !fused.is_some_and(|fused| engine.by_library(&fused, [x, w], beside, out)) {
        let input = input.map_or_else(|| out.stale_like(), Tensor::clone);
        linear(engine, x, w, Some(bias), &input);
        elementwise::unary(engine, Unary::GeluTanh, &input, out);
    }
}

/// `out = (grad w) gelu_tanh'(input)`: the gradient of the input of GELU, where a product with `w` was given its result; all as in
/// [`linear_input_gradient`].
#[track_caller]
pub(crate) fn linear_gelu_gradient(engine: &Engine, grad: &Tensor, w: &Tensor, input: &Tensor, out: &Tensor) {
    let fused = with_gelu(gradient_times_weight(engine, grad, w), Epilogue::GeluGradient, input);
    let beside = Beside { kept: Of::Read(input), ..Beside::NOTHING };
    if !fused.is_some_and(|fused| engine.by_library(&fused, [grad, w], beside, out)) {
        let of_result = out.stale_like();
        linear_input_gradient(engine, grad, w, &of_result);
        elementwise::unary_gradient(engine, Unary::GeluTanh, input, &of_result, out);
    }
}

/// A product with GELU or its gradient as its epilogue, if that may be: of 16 bits, since nobody says how far the library's hyperbolic
/// tangent is from ours, and where GELU's input lies as the library wants what it keeps, in rows of a multiple of 8 elements.
fn with_gelu(plain: Product, epilogue: Epilogue, input: &Tensor) -> Option<Product> {
    let fused = Product { epilogue, ..plain };
    let fits = fused.kept_bytes() == input.count() * input.dtype.bytes();
    let is_some = plain.m > 0 && plain.n > 0 && plain.k > 0;
    (input.dtype.is_half() && fits && is_some).then_some(fused)
}

/// `x w^T` as a product.
fn rows_times_weight(engine: &Engine, x: &Tensor, w: &Tensor) -> Product {
    let (outputs, inputs) = (w.dims()[0], w.dims()[1]);
    let product = Product::new(engine.numbers(x.dtype), [rows_of(x), outputs, inputs]);
    Product { b: weight(w).turned(), ..product }
}

/// `grad w` as a product.
fn gradient_times_weight(engine: &Engine, grad: &Tensor, w: &Tensor) -> Product {
    let (outputs, inputs) = (w.dims()[0], w.dims()[1]);
    let product = Product::new(engine.numbers(grad.dtype), [rows_of(grad), inputs, outputs]);
    Product { b: weight(w), ..product }
}

/// `out = grad w`: the gradient of the rows. `w` may be the transpose of what is contiguous.
#[track_caller]
pub(crate) fn linear_input_gradient(engine: &Engine, grad: &Tensor, w: &Tensor, out: &Tensor) {
    check_float("linear", out.dtype);
    if w.dims()[0] == 0 || out.count() == 0 {
        return out.fill(0.0);
    }
    engine.product(&gradient_times_weight(engine, grad, w), [grad, w], out);
}

/// `out = grad^T x`: the gradient of the weight; `bias` gets the sum of the rows of `grad`.
#[track_caller]
pub(crate) fn linear_weight_gradient(
    engine: &Engine,
    grad: &Tensor,
    x: &Tensor,
    bias: Option<&Tensor>,
    out: &Tensor,
) {
    rows_times_rows(engine, [grad, x], bias.map(|bias| (Epilogue::SumsOfA, grad, bias)), out);
}

/// As [`linear_weight_gradient`] for a weight that lies the other way around: `out = x^T grad`.
#[track_caller]
pub(crate) fn linear_in_out_weight_gradient(
    engine: &Engine,
    grad: &Tensor,
    x: &Tensor,
    bias: Option<&Tensor>,
    out: &Tensor,
) {
    rows_times_rows(engine, [x, grad], bias.map(|bias| (Epilogue::SumsOfB, grad, bias)), out);
}

/// From so many numbers on, a sum of rows is a launch of its own: what the library adds to a product for it costs more. On an H200, in a
/// step of GPT-2 of 124 million parameters in bfloat16, 31.93 ms became 31.68.
const MANY_TERMS: usize = 4 << 20;

/// `out = a^T b`, with rows of both, all contiguous. With an epilogue that gives the sum of the rows of one of them, that one, and where
/// the sum goes.
#[track_caller]
fn rows_times_rows(
    engine: &Engine,
    [a, b]: [&Tensor; 2],
    sum: Option<(Epilogue, &Tensor, &Tensor)>,
    out: &Tensor,
) {
    check_float("linear", out.dtype);
    let (rows, m, n) = (rows_of(a), out.dims()[0], out.dims()[1]);
    let apart = |(_, of, to): (Epilogue, &Tensor, &Tensor)| {
        reduce::sum(engine, &of.reshape([rows, to.count()]), &to.reshape([1, to.count()]));
    };
    if rows == 0 || out.count() == 0 {
        out.fill(0.0);
        return sum.into_iter().for_each(apart);
    }
    let plain = Product::new(engine.numbers(out.dtype), [m, n, rows]);
    let plain = Product { a: Operand::transposed(m), ..plain };
    let Some((epilogue, of, to)) = sum else { return engine.product(&plain, [a, b], out) };
    let beside = Beside { vector: Of::Write(to), ..Beside::NOTHING };
    if of.count() >= MANY_TERMS || !engine.by_library(&Product { epilogue, ..plain }, [a, b], beside, out) {
        engine.product(&plain, [a, b], out);
        apart((epilogue, of, to));
    }
}
