//! Matrix products.

use crate::cpu::gemm::{Into, Mat, gemm, gemm_on};
use crate::dtype::{Float, with_float};
use crate::op::Op;
use crate::ops::{keep, recorded};
use crate::shape::{Geometry, Shape, for_each_row};
use crate::tensor::Tensor;

impl Tensor {
    /// The matrix product of the last two dimensions, (..., m, k) with (..., k, n) to (..., m, n); those before broadcast.
    #[track_caller]
    pub fn matmul(&self, other: &Tensor) -> Tensor {
        self.check_partner("matmul", other);
        let Some(shape) = product_shape(self.shape(), other.shape()) else {
            panic!(
                "matmul: shapes {} and {} don't multiply: (..., m, k) with (..., k, n) would",
                self.shape(),
                other.shape()
            );
        };
        let out = Tensor::stale(self.device(), shape, self.dtype);
        with_float!(self.dtype, "matmul", T => multiply::<T>(self, other, &out));
        recorded(out, Op::Matmul(*self.shape(), *other.shape()), &[self, other], |_| {
            [
                if other.needs_grad() { keep(self) } else { None },
                if self.needs_grad() { keep(other) } else { None },
            ]
        })
    }

    /// `self weight^T + bias`: rows (..., in) with a weight of (out, in) and a bias of (out) to rows (..., out).
    #[track_caller]
    pub fn linear(&self, weight: &Tensor, bias: Option<&Tensor>) -> Tensor {
        self.check_partner("linear", weight);
        let n = self.shape().n_dims();
        let fits = n >= 1 && weight.shape().n_dims() == 2 && self.dims()[n - 1] == weight.dims()[1];
        assert!(
            fits,
            "linear: rows of shape {} with a weight of shape {}: (..., in) with (out, in) would do",
            self.shape(),
            weight.shape()
        );
        let (inputs, outputs) = (weight.dims()[1], weight.dims()[0]);
        if let Some(bias) = bias {
            self.check_partner("linear", bias);
            assert!(
                bias.dims() == [outputs],
                "linear: a bias of shape {} with a weight of shape {}",
                bias.shape(),
                weight.shape()
            );
        }
        let (x, w) = (self.contiguous(), weight.contiguous());
        let out = Tensor::stale(self.device(), self.shape().with(n - 1, outputs), self.dtype);
        let rows = self.dims()[..n - 1].iter().product();
        with_float!(self.dtype, "linear", T => {
            let (x, w) = (x.read_contiguous::<T>("linear"), w.read_contiguous::<T>("linear"));
            let mut o = out.write_whole::<T>();
            let into = match bias {
                Some(bias) => {
                    let bias = bias.contiguous();
                    let bias = bias.read_contiguous::<T>("linear");
                    o.chunks_exact_mut(outputs.max(1)).for_each(|row| row.copy_from_slice(&bias));
                    Into::Add
                }
                None => Into::Replace,
            };
            gemm_on(out.device(), &mut o, [rows, outputs, inputs], Mat::rows(&x, inputs), Mat::rows(&w, inputs).t(), into);
        });
        let mut sources = [&x, &w, &w];
        let n_sources = match bias {
            Some(bias) => {
                sources[2] = bias;
                3
            }
            None => 2,
        };
        recorded(out, Op::Linear(*self.shape(), *weight.shape()), &sources[..n_sources], |_| {
            [
                if weight.needs_grad() { keep(&x) } else { None },
                if self.needs_grad() { keep(&w) } else { None },
            ]
        })
    }
}

fn product_shape(a: &Shape, b: &Shape) -> Option<Shape> {
    let (na, nb) = (a.n_dims(), b.n_dims());
    if na < 2 || nb < 2 || a.dims()[na - 1] != b.dims()[nb - 2] {
        return None;
    }
    let batch = Shape::new(&a.dims()[..na - 2]).broadcast(&Shape::new(&b.dims()[..nb - 2]))?;
    let n = batch.n_dims();
    Some(batch.insert(n, a.dims()[na - 2]).insert(n + 1, b.dims()[nb - 1]))
}

/// `out = a b` for every matrix of the batch; `a` and `b` may be any views.
pub(crate) fn multiply<T: Float>(a: &Tensor, b: &Tensor, out: &Tensor) {
    let n_dims = out.shape().n_dims();
    let (m, n) = (out.dims()[n_dims - 2], out.dims()[n_dims - 1]);
    let k = a.dims()[a.shape().n_dims() - 1];
    let batch = Shape::new(&out.dims()[..n_dims - 2]);
    let (a_batch, a_row, a_col) = matrices(a, &batch);
    let (b_batch, b_row, b_col) = matrices(b, &batch);
    let (va, vb, mut vo) = (a.read::<T>(), b.read::<T>(), out.write_whole::<T>());
    if k == 0 || vo.is_empty() {
        return vo.fill(T::ZERO);
    }
    if batch.count() == 1 {
        let (a, b) = (&va[a_batch.offset..], &vb[b_batch.offset..]);
        let (a, b) = (Mat { data: a, row: a_row, col: a_col }, Mat { data: b, row: b_row, col: b_col });
        return gemm_on(out.device(), &mut vo, [m, n, k], a, b, Into::Replace);
    }
    let mut starts = Vec::with_capacity(batch.count());
    for_each_row([&a_batch, &b_batch], |[at, bt], [step_a, step_b], len| {
        starts.extend((0..len).map(|i| (at + i * step_a, bt + i * step_b)));
    });
    let (va, vb) = (&*va, &*vb);
    out.device().for_chunks(&mut vo, m * n, |i, o| {
        let (at, bt) = starts[i];
        let (a, b) = (
            Mat { data: &va[at..], row: a_row, col: a_col },
            Mat { data: &vb[bt..], row: b_row, col: b_col },
        );
        gemm(o, [m, n, k], a, b, Into::Replace);
    });
}

/// The batch dimensions of `t` spread to `batch`, and the strides of its matrices.
fn matrices(t: &Tensor, batch: &Shape) -> (Geometry, usize, usize) {
    let n = t.shape().n_dims();
    let own = Geometry { shape: Shape::new(&t.dims()[..n - 2]), ..t.geometry };
    (own.broadcast_to(*batch), t.geometry.strides[n - 2], t.geometry.strides[n - 1])
}
