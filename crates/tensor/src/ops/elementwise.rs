//! Elementwise arithmetic and functions, with NumPy's broadcasting. What a float of 16 bits and another f32 or float of 16 bits come to
//! is f32. Whole numbers of 64 bits are computed with where that gives whole numbers; too large ones wrap around.

use crate::dtype::DType;
use crate::graph;
use crate::kernel;
use crate::op::{Binary, Op, Unary};
use crate::ops::choice::Comparand;
use crate::ops::{keep, recorded};
use crate::shape::Order;
use crate::tensor::Tensor;

impl Tensor {
    #[track_caller]
    fn with(
        &self,
        other: &Tensor,
        name: &str,
        f: Binary,
        op: fn(crate::Shape, crate::Shape) -> Op,
    ) -> Tensor {
        if self.dtype != other.dtype && [self.dtype, other.dtype].map(DType::wide) == [DType::F32; 2] {
            return self.widened().with(&other.widened(), name, f, op);
        }
        self.check_partner(name, other);
        let Some(shape) = self.shape().broadcast(other.shape()) else {
            panic!("{name}: shapes {} and {} don't broadcast", self.shape(), other.shape());
        };
        let order = if *self.shape() == shape { self.order() } else { None };
        let out = Tensor::stale_in(order.unwrap_or_default(), self.device(), shape, self.dtype);
        kernel::elementwise::binary(f, self, other, &out);
        let op = op(*self.shape(), *other.shape());
        recorded(out, op, &[self, other], |out| match op {
            Op::Mul(..) => [
                if other.needs_grad() { keep(self) } else { None },
                if self.needs_grad() { keep(other) } else { None },
            ],
            Op::Div(..) => [keep(other), if other.needs_grad() { keep(out) } else { None }],
            Op::Maximum(..) | Op::Minimum(..) => [keep(self), keep(other)],
            _ => [None, None],
        })
    }

    /// `self`, which is f32, plus a tensor of 16 bits and the same shape, in one pass over memory: what that is in f32 is written
    /// nowhere.
    #[track_caller]
    fn add_half(&self, half: &Tensor) -> Tensor {
        let out =
            Tensor::stale_in(self.order().unwrap_or_default(), self.device(), *self.shape(), DType::F32);
        kernel::elementwise::binary(Binary::Add, self, half, &out);
        recorded(out, Op::AddHalf(half.dtype), &[self, half], |_| [None])
    }

    pub(crate) fn mapped(&self, f: Unary) -> Tensor {
        if f.is_steep() && self.is_raised() {
            return self.widened().mapped(f);
        }
        let x = self.dense();
        let out = x.stale_like();
        kernel::elementwise::unary(f, &x, &out);
        recorded(out, Op::Unary(f), &[&x], |out| {
            [if f.keeps_nothing() { None } else { keep(if f.keeps_output() { out } else { &x }) }]
        })
    }

    /// `self + other`, broadcasting.
    #[track_caller]
    pub fn add(&self, other: &Tensor) -> Tensor {
        match (self.dtype, other.dtype) {
            _ if self.shape() != other.shape() || self.device() != other.device() => {}
            (DType::F32, half) if half.is_half() => return self.add_half(other),
            (half, DType::F32) if half.is_half() => return other.add_half(self),
            _ => {}
        }
        self.with(other, "add", Binary::Add, Op::Add)
    }

    /// `self - other`, broadcasting.
    #[track_caller]
    pub fn sub(&self, other: &Tensor) -> Tensor {
        self.with(other, "sub", Binary::Sub, Op::Sub)
    }

    /// `self * other`, elementwise, broadcasting.
    #[track_caller]
    pub fn mul(&self, other: &Tensor) -> Tensor {
        self.with(other, "mul", Binary::Mul, Op::Mul)
    }

    /// `self / other`, broadcasting.
    #[track_caller]
    pub fn div(&self, other: &Tensor) -> Tensor {
        self.with(other, "div", Binary::Div, Op::Div)
    }

    /// The larger of each pair, broadcasting; NaN wins.
    #[track_caller]
    pub fn maximum(&self, other: &Tensor) -> Tensor {
        self.with(other, "maximum", Binary::Maximum, Op::Maximum)
    }

    /// The smaller of each pair, broadcasting; NaN wins.
    #[track_caller]
    pub fn minimum(&self, other: &Tensor) -> Tensor {
        self.with(other, "minimum", Binary::Minimum, Op::Minimum)
    }

    /// Whole numbers divided by others, or by a number, and rounded down, broadcasting. Dividing by 0 panics on a CPU; a GPU gives 0.
    ///
    /// ```
    /// use phalanx_tensor::{Device, Tensor};
    /// // Rows and columns of pixels 5 to 8 of an image that is 3 wide.
    /// let pixels = Tensor::arange(&Device::cpu(1), 5..9);
    /// assert_eq!(pixels.floor_div(3.0).to_vec::<i64>(), [1, 2, 2, 2]);
    /// assert_eq!(pixels.remainder(3.0).to_vec::<i64>(), [2, 0, 1, 2]);
    /// ```
    #[track_caller]
    pub fn floor_div(&self, other: impl Comparand) -> Tensor {
        self.divided("floor_div", &other.beside(self), Binary::FloorDiv)
    }

    /// What whole numbers leave when they are divided as by [`Tensor::floor_div`]: it has the sign of the divisor, as in Python.
    #[track_caller]
    pub fn remainder(&self, other: impl Comparand) -> Tensor {
        self.divided("remainder", &other.beside(self), Binary::Remainder)
    }

    #[track_caller]
    fn divided(&self, name: &str, other: &Tensor, f: Binary) -> Tensor {
        assert!(self.dtype == DType::I64, "{name}: of whole numbers, i64, got {}", self.dtype);
        self.check_partner(name, other);
        let Some(shape) = self.shape().broadcast(other.shape()) else {
            panic!("{name}: shapes {} and {} don't broadcast", self.shape(), other.shape());
        };
        let out = Tensor::stale(self.device(), shape, self.dtype);
        kernel::elementwise::binary(f, self, other, &out);
        out
    }

    /// x where it is above 0, and elsewhere this multiple of it.
    pub fn leaky_relu(&self, slope: f64) -> Tensor {
        self.mapped(Unary::LeakyRelu(slope))
    }

    /// x where it is above 0, and elsewhere `alpha` (1 in most networks) times e^x - 1.
    pub fn elu(&self, alpha: f64) -> Tensor {
        self.mapped(Unary::Elu(alpha))
    }

    /// `mul * self + add`.
    pub fn affine(&self, mul: f64, add: f64) -> Tensor {
        self.mapped(Unary::Affine { mul, add })
    }

    /// `self` to the power of `p`.
    pub fn powf(&self, p: f64) -> Tensor {
        self.mapped(Unary::Powf(p))
    }
}

/// One row a function: its doc, its name, its entry in the op table.
macro_rules! functions {
    ($($doc:literal $name:ident => $op:ident;)*) => {
        impl Tensor {$(
            #[doc = $doc]
            pub fn $name(&self) -> Tensor {
                self.mapped(Unary::$op)
            }
        )*}
    };
}
functions! {
    "-x" neg => Neg;
    "e to the power of x." exp => Exp;
    "Natural logarithm." ln => Ln;
    "Square root." sqrt => Sqrt;
    "Hyperbolic tangent." tanh => Tanh;
    "1 / (1 + exp(-x))." sigmoid => Sigmoid;
    "max(x, 0)." relu => Relu;
    "x times the standard normal distribution function of x, exactly (PyTorch's default form)." gelu => Gelu;
    "x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))) / 2: GELU as GPT-2 approximates it." gelu_tanh => GeluTanh;
    "x / (1 + exp(-x)): also known as swish." silu => Silu;
    "ln(1 + exp(x)): max(x, 0) with a round corner." softplus => Softplus;
    "Sine of an angle in radians." sin => Sin;
    "Cosine of an angle in radians." cos => Cos;
    "Absolute value." abs => Abs;
    "x squared." square => Square;
}

/// One row an operator: for two tensors, and for a tensor and a number.
macro_rules! operators {
    ($($tr:ident $method:ident, |$x:ident, $number:ident| $affine:expr;)*) => {$(
        impl std::ops::$tr<&Tensor> for &Tensor {
            type Output = Tensor;
            #[track_caller]
            fn $method(self, other: &Tensor) -> Tensor { Tensor::$method(self, other) }
        }
        impl std::ops::$tr<Tensor> for &Tensor {
            type Output = Tensor;
            #[track_caller]
            fn $method(self, other: Tensor) -> Tensor { Tensor::$method(self, &other) }
        }
        impl std::ops::$tr<&Tensor> for Tensor {
            type Output = Tensor;
            #[track_caller]
            fn $method(self, other: &Tensor) -> Tensor { Tensor::$method(&self, other) }
        }
        impl std::ops::$tr<Tensor> for Tensor {
            type Output = Tensor;
            #[track_caller]
            fn $method(self, other: Tensor) -> Tensor { Tensor::$method(&self, &other) }
        }
        impl std::ops::$tr<f64> for &Tensor {
            type Output = Tensor;
            fn $method(self, $number: f64) -> Tensor { let $x = self; $affine }
        }
        impl std::ops::$tr<f64> for Tensor {
            type Output = Tensor;
            fn $method(self, $number: f64) -> Tensor { let $x = &self; $affine }
        }
    )*};
}
operators! {
    Add add, |x, number| x.affine(1.0, number);
    Sub sub, |x, number| x.affine(1.0, -number);
    // What is added changes no number, not even the sign of a zero.
    Mul mul, |x, number| x.affine(number, -0.0);
    Div div, |x, number| x.mapped(Unary::Over(number));
}

impl std::ops::Neg for &Tensor {
    type Output = Tensor;
    fn neg(self) -> Tensor {
        Tensor::neg(self)
    }
}

impl Tensor {
    /// The same elements in row-major order without gaps: this tensor itself where they lie so already.
    pub fn contiguous(&self) -> Tensor {
        self.arranged(Order::RowMajor)
    }

    /// The same elements without gaps in `order`: this tensor itself where they lie so already.
    #[track_caller]
    pub(crate) fn arranged(&self, order: Order) -> Tensor {
        if self.geometry.lies_in(order) {
            return self.clone();
        }
        let out = Tensor::stale_in(order, self.device(), *self.shape(), self.dtype);
        kernel::copy::copy(self, &out);
        if !graph::records(&[self]) {
            return out;
        }
        recorded(out, Op::Arrange, &[self], |_| [None])
    }

    /// The same elements without gaps in whatever order they are.
    pub(crate) fn dense(&self) -> Tensor {
        self.arranged(self.order().unwrap_or_default())
    }
}
