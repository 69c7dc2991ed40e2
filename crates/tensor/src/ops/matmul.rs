//! Matrix products.

use crate::autocast::lowers;
use crate::device::Backend;
use crate::gpu::{self, Engine};
use crate::graph::{self, Made};
use crate::kernel;
use crate::op::Op;
use crate::ops::{keep, recorded, recorded_where};
use crate::shape::Shape;
use crate::tensor::Tensor;

impl Tensor {
    /// The matrix product of the last two dimensions, (..., m, k) with (..., k, n) to (..., m, n); those before broadcast.
    #[track_caller]
    pub fn matmul(&self, other: &Tensor) -> Tensor {
        if let Some(dtype) = lowers([self, other]) {
            return self.lowered(dtype).matmul(&other.lowered(dtype));
        }
        self.check_partner("matmul", other);
        let Some(shape) = product_shape(self.shape(), other.shape()) else {
            panic!(
                "matmul: shapes {} and {} don't multiply: (..., m, k) with (..., k, n) would",
                self.shape(),
                other.shape()
            );
        };
        let out = Tensor::stale(self.device(), shape, self.dtype);
        kernel::matmul::matmul(self, other, &out);
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
        if let Some(dtype) = lowers([self, weight].into_iter().chain(bias)) {
            let bias = bias.map(|bias| bias.lowered(dtype));
            return self.lowered(dtype).linear(&weight.lowered(dtype), bias.as_ref());
        }
        self.check_partner("linear", weight);
        let n = self.shape().n_dims();
        let fits = n >= 1 && weight.shape().n_dims() == 2 && self.dims()[n - 1] == weight.dims()[1];
        assert!(
            fits,
            "linear: rows of shape {} with a weight of shape {}: (..., in) with (out, in) would do",
            self.shape(),
            weight.shape()
        );
        let outputs = weight.dims()[0];
        self.check_bias("linear", weight, outputs, bias);
        let (x, w) = (self.contiguous(), weight.contiguous());
        let out = Tensor::stale(self.device(), self.shape().with(n - 1, outputs), self.dtype);
        let bias = bias.map(Tensor::contiguous);
        kernel::matmul::linear(&x, &w, bias.as_ref(), &out);
        self.recorded_linear(Op::Linear(*self.shape(), *weight.shape()), [&x, &w], bias.as_ref(), out)
    }

    /// `self weight + bias`: as [`Tensor::linear`], with a weight of (in, out), which is how GPT-2's files hold it.
    #[track_caller]
    pub fn linear_in_out(&self, weight: &Tensor, bias: Option<&Tensor>) -> Tensor {
        if let Some(dtype) = lowers([self, weight].into_iter().chain(bias)) {
            let bias = bias.map(|bias| bias.lowered(dtype));
            return self.lowered(dtype).linear_in_out(&weight.lowered(dtype), bias.as_ref());
        }
        let out = self.stale_in_out("linear_in_out", weight, bias);
        let (x, w, bias) = (self.contiguous(), weight.contiguous(), bias.map(Tensor::contiguous));
        kernel::matmul::linear(&x, &w.detach().t(), bias.as_ref(), &out);
        self.recorded_linear(Op::LinearInOut(*self.shape(), *weight.shape()), [&x, &w], bias.as_ref(), out)
    }

    /// Two dense layers with GELU between them, `gelu_tanh(self w_up + b_up) w_down + b_down`: as [`Tensor::linear_in_out`] and
    /// [`Tensor::gelu_tanh`] one after the other, to the bit on a CPU. On a GPU, GELU and its gradient are part of the products in 16
    /// bits, where cuBLASLt can, and what GELU is given is rounded for its gradient alone.
    ///
    /// ```
    /// use phalanx_tensor::{DType, Device, Tensor};
    ///
    /// let device = Device::cpu(1);
    /// let of = |shape: &[usize]| Tensor::ones(&device, shape, DType::F32);
    /// let y = of(&[5, 2]).feed_forward_in_out((&of(&[2, 8]), &of(&[8])), (&of(&[8, 2]), None));
    /// assert_eq!(y.dims(), [5, 2]);
    /// ```
    #[track_caller]
    pub fn feed_forward_in_out(&self, up: (&Tensor, &Tensor), down: (&Tensor, Option<&Tensor>)) -> Tensor {
        let ((w_up, b_up), (w_down, b_down)) = (up, down);
        if let Some(dtype) = lowers([self, w_up, b_up, w_down].into_iter().chain(b_down)) {
            let [x, w_up, b_up, w_down] = [self, w_up, b_up, w_down].map(|tensor| tensor.lowered(dtype));
            let b_down = b_down.map(|bias| bias.lowered(dtype));
            return x.feed_forward_in_out((&w_up, &b_up), (&w_down, b_down.as_ref()));
        }
        match self.device().backend() {
            // What is made again of GELU's input, rounded, has the bits of GELU's own kernel.
            Backend::Gpu(engine) if graph::keeps_cheap() => self.fused_feed_forward(engine, up, down),
            _ => self.linear_in_out(w_up, Some(b_up)).gelu_tanh().linear_in_out(w_down, b_down),
        }
    }

    /// The same on a GPU, recorded as a product, and as one behind GELU.
    #[track_caller]
    fn fused_feed_forward(
        &self,
        engine: &Engine,
        (w_up, b_up): (&Tensor, &Tensor),
        (w_down, b_down): (&Tensor, Option<&Tensor>),
    ) -> Tensor {
        let hidden = self.stale_in_out("feed_forward_in_out", w_up, Some(b_up));
        let (x, w, bias) = (self.contiguous(), w_up.contiguous(), b_up.contiguous());
        // What GELU is given is for a backward pass through it alone.
        let input = graph::records(&[&x, &w, &bias]).then(|| hidden.stale_like());
        gpu::matmul::linear_gelu(engine, &x, &w.detach().t(), &bias, (input.as_ref(), &hidden));
        let Some(input) = input else { return hidden.linear_in_out(w_down, b_down) };
        let op = Op::LinearInOut(*self.shape(), *w_up.shape());
        let input = self.recorded_linear(op, [&x, &w], Some(&bias), input);

        let out = hidden.stale_in_out("feed_forward_in_out", w_down, b_down);
        let (w, bias) = (w_down.contiguous(), b_down.map(Tensor::contiguous));
        gpu::matmul::linear(engine, &hidden, &w.detach().t(), bias.as_ref(), &out);
        let op = Op::GeluLinearInOut(*input.shape(), *w.shape());
        recorded_where(out, op, [Some(&input), Some(&w), bias.as_ref(), None], |_| {
            let kept = |tensor: &Tensor, of: &Tensor| of.needs_grad().then(|| tensor.detach());
            [kept(&hidden, &w), kept(&w, &input), kept(&input, &input)]
        })
    }

    /// Room for the product of these rows with a weight of (in, out). Panics, as `op`, where that or a bias doesn't fit them.
    #[track_caller]
    fn stale_in_out(&self, op: &str, weight: &Tensor, bias: Option<&Tensor>) -> Tensor {
        self.check_partner(op, weight);
        let n = self.shape().n_dims();
        let fits = n >= 1 && weight.shape().n_dims() == 2 && self.dims()[n - 1] == weight.dims()[0];
        assert!(
            fits,
            "{op}: rows of shape {} with a weight of shape {}: (..., in) with (in, out) would do",
            self.shape(),
            weight.shape()
        );
        let outputs = weight.dims()[1];
        self.check_bias(op, weight, outputs, bias);
        Tensor::stale(self.device(), self.shape().with(n - 1, outputs), self.dtype)
    }

    /// The output of a product of rows `x` with a weight, as one of `self` with it and with a bias.
    fn recorded_linear(&self, op: Op, [x, w]: [&Tensor; 2], bias: Option<&Tensor>, out: Tensor) -> Tensor {
        let mut sources = [x, w, w];
        let n_sources = match bias {
            Some(bias) => {
                sources[2] = bias;
                3
            }
            None => 2,
        };
        let is_wanted = w.needs_grad() && graph::is_recording();
        let made = if is_wanted && !graph::keeps_cheap() { Made::of(x) } else { None };
        let how = made.as_ref().map(|(how, _)| *how);
        let out = recorded(out, op, &sources[..n_sources], |_| {
            let w = if x.needs_grad() { keep(w) } else { None };
            match made {
                Some((_, [first, second, third])) => [first, w, second, third],
                None => [if is_wanted { keep(x) } else { None }, w, None, None],
            }
        });
        if let Some(node) = &out.node {
            node.body().made = how;
        }
        out
    }

    #[track_caller]
    fn check_bias(&self, op: &str, weight: &Tensor, outputs: usize, bias: Option<&Tensor>) {
        let Some(bias) = bias else { return };
        self.check_partner(op, bias);
        assert!(
            bias.dims() == [outputs],
            "{op}: a bias of shape {} with a weight of shape {}",
            bias.shape(),
            weight.shape()
        );
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
