//! A matrix product as a description.

use std::fmt;

/// What matrices hold, and how their products are formed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Numbers {
    /// Float32 throughout.
    F32,
    /// Float32, whose factors are rounded to 10 bits of fraction: several times faster.
    Tf32,
    /// Float64 throughout.
    F64,
    /// Bfloat16, summed in float32.
    Bf16,
    /// Float16, summed in float32.
    F16,
}

impl Numbers {
    /// Size of an element in bytes.
    pub const fn bytes(self) -> usize {
        match self {
            Numbers::F32 | Numbers::Tf32 => 4,
            Numbers::F64 => 8,
            Numbers::Bf16 | Numbers::F16 => 2,
        }
    }
}

/// How a factor lies in memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Order {
    /// Row after row of the matrix that is meant.
    Rows,
    /// Column after column of it: in memory lie the rows of its transpose.
    Columns,
}

/// A factor in memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Operand {
    /// How it lies.
    pub order: Order,
    /// Elements from one row in memory to the next.
    pub leading: usize,
    /// Elements from one matrix of a batch to the next; 0 where all share one.
    pub stride: usize,
}

impl Operand {
    /// A matrix, row after row, without gaps between its rows of `width`.
    pub const fn rows(width: usize) -> Operand {
        Operand { order: Order::Rows, leading: width, stride: 0 }
    }

    /// The transpose of a matrix in memory, whose own rows have `width` elements and no gaps between them.
    pub const fn transposed(width: usize) -> Operand {
        Operand { order: Order::Columns, leading: width, stride: 0 }
    }

    /// The transpose of the matrix that this is.
    pub const fn turned(self) -> Operand {
        let order = match self.order {
            Order::Rows => Order::Columns,
            Order::Columns => Order::Rows,
        };
        Operand { order, ..self }
    }
}

/// What comes of a product in the same kernel. GELU is the one with the hyperbolic tangent, not the exact one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Epilogue {
    /// Nothing.
    None,
    /// Plus a bias for each column.
    Bias,
    /// ReLU.
    Relu,
    /// Plus a bias, then ReLU.
    BiasRelu,
    /// ReLU, with a mask kept for the gradient.
    ReluKept,
    /// Plus a bias, then ReLU, with a mask kept for the gradient.
    BiasReluKept,
    /// Times the gradient of ReLU, by the mask.
    ReluGradient,
    /// Times the gradient of ReLU, by the mask; the column sums of that are the bias's gradient.
    ReluGradientBias,
    /// GELU.
    Gelu,
    /// Plus a bias, then GELU.
    BiasGelu,
    /// GELU, with its input kept for the gradient.
    GeluKept,
    /// Plus a bias, then GELU, with its input kept for the gradient.
    BiasGeluKept,
    /// Times the gradient of GELU at its input.
    GeluGradient,
    /// Times the gradient of GELU at its input; the column sums of that are the bias's gradient.
    GeluGradientBias,
    /// Beside the product, the sums of `a` along k, one for each row: in a weight's gradient, the bias's.
    SumsOfA,
    /// Beside the product, the sums of `b` along k, one for each column.
    SumsOfB,
}

/// A vector that an epilogue reads or writes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Vector {
    /// None.
    None,
    /// One element a column.
    PerColumn,
    /// One element a row.
    PerRow,
}

/// What an activation keeps for its gradient.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kept {
    /// Nothing.
    None,
    /// A bit an element.
    Mask,
    /// Its input.
    Matrix,
}

impl Epilogue {
    /// All of them.
    pub const ALL: [Epilogue; 16] = [
        Epilogue::None,
        Epilogue::Bias,
        Epilogue::Relu,
        Epilogue::BiasRelu,
        Epilogue::ReluKept,
        Epilogue::BiasReluKept,
        Epilogue::ReluGradient,
        Epilogue::ReluGradientBias,
        Epilogue::Gelu,
        Epilogue::BiasGelu,
        Epilogue::GeluKept,
        Epilogue::BiasGeluKept,
        Epilogue::GeluGradient,
        Epilogue::GeluGradientBias,
        Epilogue::SumsOfA,
        Epilogue::SumsOfB,
    ];

    /// The vector that it reads or writes.
    pub const fn vector(self) -> Vector {
        match self {
            Epilogue::Bias
            | Epilogue::BiasRelu
            | Epilogue::BiasReluKept
            | Epilogue::ReluGradientBias
            | Epilogue::BiasGelu
            | Epilogue::BiasGeluKept
            | Epilogue::GeluGradientBias
            | Epilogue::SumsOfB => Vector::PerColumn,
            Epilogue::SumsOfA => Vector::PerRow,
            Epilogue::None
            | Epilogue::Relu
            | Epilogue::ReluKept
            | Epilogue::ReluGradient
            | Epilogue::Gelu
            | Epilogue::GeluKept
            | Epilogue::GeluGradient => Vector::None,
        }
    }

    /// What it writes for the gradient, or reads for it.
    pub const fn kept(self) -> Kept {
        match self {
            Epilogue::ReluKept
            | Epilogue::BiasReluKept
            | Epilogue::ReluGradient
            | Epilogue::ReluGradientBias => Kept::Mask,
            Epilogue::GeluKept
            | Epilogue::BiasGeluKept
            | Epilogue::GeluGradient
            | Epilogue::GeluGradientBias => Kept::Matrix,
            _ => Kept::None,
        }
    }
}

/// `out (m, n) = epilogue(alpha a (m, k) b (k, n) + beta out)`, for each of a batch. The factors alpha and beta come with the call.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Product {
    /// What all matrices hold.
    pub numbers: Numbers,
    /// Rows of `a` and of the result.
    pub m: usize,
    /// Columns of `b` and of the result.
    pub n: usize,
    /// Columns of `a`, rows of `b`.
    pub k: usize,
    /// The first factor.
    pub a: Operand,
    /// The second factor.
    pub b: Operand,
    /// Elements from one row of the result to the next.
    pub out_leading: usize,
    /// How many products there are.
    pub batch: usize,
    /// Elements from one result of the batch to the next.
    pub out_stride: usize,
    /// What comes of it in the same kernel.
    pub epilogue: Epilogue,
}

impl Product {
    /// A single product of matrices in rows without gaps.
    pub const fn new(numbers: Numbers, [m, n, k]: [usize; 3]) -> Product {
        Product {
            numbers,
            m,
            n,
            k,
            a: Operand::rows(k),
            b: Operand::rows(n),
            out_leading: n,
            batch: 1,
            out_stride: 0,
            epilogue: Epilogue::None,
        }
    }

    /// Elements, or bits of a mask, from one row of what an activation keeps to the next.
    pub(super) const fn kept_leading(&self) -> usize {
        match self.epilogue.kept() {
            Kept::None => 0,
            Kept::Mask => self.n.next_multiple_of(128),
            Kept::Matrix => self.n.next_multiple_of(8),
        }
    }

    /// The bytes of what an activation keeps. They are the library's own business, but for those of GELU's input, which lies in
    /// rows that are a multiple of 8 elements long.
    pub const fn kept_bytes(&self) -> usize {
        match self.epilogue.kept() {
            Kept::None => 0,
            Kept::Mask => self.m * self.kept_leading() / 8,
            Kept::Matrix => self.m * self.kept_leading() * self.numbers.bytes(),
        }
    }

    /// Panics where sizes are 0, rows overlap, or an epilogue of one product meets a batch.
    #[track_caller]
    pub(super) fn check(&self) {
        let widths = [
            (self.a, if self.a.order == Order::Rows { self.k } else { self.m }),
            (self.b, if self.b.order == Order::Rows { self.n } else { self.k }),
        ];
        let fits =
            widths.iter().all(|(operand, width)| operand.leading >= *width) && self.out_leading >= self.n;
        let is_some = self.m > 0 && self.n > 0 && self.k > 0 && self.batch > 0;
        let one_each = self.batch == 1 || self.out_stride >= (self.m - 1) * self.out_leading + self.n;
        assert!(fits && is_some && one_each, "{self}: sizes and leading dimensions don't fit: {self:?}");
        let alone = self.epilogue.vector() == Vector::None && self.epilogue.kept() == Kept::None;
        assert!(self.batch == 1 || alone, "{self}: {:?} is for one product", self.epilogue);
    }
}

impl fmt::Display for Product {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Product { numbers, m, n, k, batch, epilogue, .. } = self;
        write!(f, "({m}, {k}) x ({k}, {n}) in {numbers:?}")?;
        if *batch != 1 {
            write!(f, ", {batch} times")?;
        }
        let orders = [("a", self.a), ("b", self.b)];
        for (name, operand) in orders {
            if operand.order == Order::Columns {
                write!(f, ", {name} transposed")?;
            }
        }
        if *epilogue != Epilogue::None {
            write!(f, ", with {epilogue:?}")?;
        }
        Ok(())
    }
}
