//! A product in rows, told in columns. The rows of a matrix are the columns of its transpose, so the library is asked for
//! out^T = b^T a^T: our second factor comes first there, and what we have per column it has per row.

use super::foreign::{self, ComputeType, DataType};
use super::product::{Epilogue, Numbers, Operand, Order, Product};
use std::ffi::c_int;

/// A matrix as it lies in memory, in columns.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Matrix {
    pub(super) rows: usize,
    pub(super) columns: usize,
    pub(super) leading: usize,
    pub(super) stride: usize,
}

/// A product as the library takes it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct InColumns {
    pub(super) data: DataType,
    pub(super) scale: DataType,
    pub(super) compute: ComputeType,
    /// Our `b`, and whether the library is to transpose it.
    pub(super) first: (Matrix, c_int),
    /// Our `a`, and whether the library is to transpose it.
    pub(super) second: (Matrix, c_int),
    pub(super) out: Matrix,
    pub(super) epilogue: c_int,
}

pub(super) fn in_columns(product: &Product) -> InColumns {
    let Product { m, n, k, .. } = *product;
    let (data, scale, compute) = match product.numbers {
        Numbers::F32 => (foreign::REAL_F32, foreign::REAL_F32, foreign::COMPUTE_F32),
        Numbers::Tf32 => (foreign::REAL_F32, foreign::REAL_F32, foreign::COMPUTE_TF32),
        Numbers::F64 => (foreign::REAL_F64, foreign::REAL_F64, foreign::COMPUTE_F64),
        Numbers::Bf16 => (foreign::REAL_BF16, foreign::REAL_F32, foreign::COMPUTE_F32),
        Numbers::F16 => (foreign::REAL_F16, foreign::REAL_F32, foreign::COMPUTE_F32),
    };
    InColumns {
        data,
        scale,
        compute,
        first: factor(product.b, k, n),
        second: factor(product.a, m, k),
        out: Matrix { rows: n, columns: m, leading: product.out_leading, stride: product.out_stride },
        epilogue: epilogue(product.epilogue),
    }
}

/// The transpose of a factor of so many rows and columns.
fn factor(operand: Operand, rows: usize, columns: usize) -> (Matrix, c_int) {
    let Operand { order, leading, stride } = operand;
    match order {
        Order::Rows => (Matrix { rows: columns, columns: rows, leading, stride }, foreign::OP_N),
        Order::Columns => (Matrix { rows, columns, leading, stride }, foreign::OP_T),
    }
}

fn epilogue(epilogue: Epilogue) -> c_int {
    match epilogue {
        Epilogue::None => foreign::EPILOGUE_DEFAULT,
        Epilogue::Bias => foreign::EPILOGUE_BIAS,
        Epilogue::Relu => foreign::EPILOGUE_RELU,
        Epilogue::BiasRelu => foreign::EPILOGUE_RELU_BIAS,
        Epilogue::ReluKept => foreign::EPILOGUE_RELU_AUX,
        Epilogue::BiasReluKept => foreign::EPILOGUE_RELU_AUX_BIAS,
        Epilogue::ReluGradient => foreign::EPILOGUE_DRELU,
        Epilogue::ReluGradientBias => foreign::EPILOGUE_DRELU_BGRAD,
        Epilogue::Gelu => foreign::EPILOGUE_GELU,
        Epilogue::BiasGelu => foreign::EPILOGUE_GELU_BIAS,
        Epilogue::GeluKept => foreign::EPILOGUE_GELU_AUX,
        Epilogue::BiasGeluKept => foreign::EPILOGUE_GELU_AUX_BIAS,
        Epilogue::GeluGradient => foreign::EPILOGUE_DGELU,
        Epilogue::GeluGradientBias => foreign::EPILOGUE_DGELU_BGRAD,
        // The library's second factor is our first.
        Epilogue::SumsOfA => foreign::EPILOGUE_BGRADB,
        Epilogue::SumsOfB => foreign::EPILOGUE_BGRADA,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The element (i, j) of a matrix in columns, as the library finds it.
    fn at((matrix, op): (Matrix, c_int), i: usize, j: usize) -> usize {
        let (i, j) = if op == foreign::OP_T { (j, i) } else { (i, j) };
        assert!(i < matrix.rows && j < matrix.columns && matrix.leading >= matrix.rows, "{matrix:?}");
        i + j * matrix.leading
    }

    #[test]
    fn every_element_is_found_where_it_lies() {
        let [m, n, k] = [3, 5, 4];
        let orders = [Order::Rows, Order::Columns];
        for (a, b) in orders.into_iter().flat_map(|a| orders.map(|b| (a, b))) {
            let operand = |order, width: usize| Operand { order, leading: width + 2, stride: 0 };
            let a = operand(a, if a == Order::Rows { k } else { m });
            let b = operand(b, if b == Order::Rows { n } else { k });
            let product = Product { a, b, out_leading: n + 1, ..Product::new(Numbers::F32, [m, n, k]) };
            let told = in_columns(&product);
            let of = |operand: Operand, i, j| match operand.order {
                Order::Rows => i * operand.leading + j,
                Order::Columns => j * operand.leading + i,
            };
            for (i, j) in (0..m).flat_map(|i| (0..n).map(move |j| (i, j))) {
                assert_eq!(at((told.out, foreign::OP_N), j, i), i * product.out_leading + j);
                for l in 0..k {
                    assert_eq!(at(told.first, j, l), of(b, l, j));
                    assert_eq!(at(told.second, l, i), of(a, i, l));
                }
            }
        }
    }

    #[test]
    fn each_epilogue_has_its_own_number() {
        let mut numbers = Epilogue::ALL.map(epilogue);
        numbers.sort();
        assert!(numbers.windows(2).all(|pair| pair[0] != pair[1]), "{numbers:?}");
    }
}
