//! What is kept of a product between its calls: descriptors and an algorithm.

use super::HEURISTIC;
use super::foreign::{self, Algo, Functions, HeuristicResult, LtHandle, MatmulDesc, MatrixLayout, Status};
use super::layout::{InColumns, Matrix, in_columns};
use super::product::{Kept, Product};
use super::products::Alignment;
use crate::address::Address;
use crate::error::Error;
use std::ffi::{c_int, c_void};
use std::sync::Arc;

/// How parts of a sum that several blocks make may be added up: in the type that is computed in, and never in that of the result, which may
/// have 16 bits.
const REDUCTIONS: u32 = foreign::REDUCTION_COMPUTE_TYPE as u32;

/// The descriptors of a product.
pub(super) struct Descriptors {
    pub(super) product: Owned,
    pub(super) first: Owned,
    pub(super) second: Owned,
    pub(super) out: Owned,
}

/// Something of the library's that ends with this.
pub(super) struct Owned {
    functions: Arc<Functions>,
    pub(super) pointer: *mut c_void,
    destroy: unsafe extern "C" fn(*mut c_void) -> Status,
}

// SAFETY: descriptors belong to no thread.
unsafe impl Send for Owned {}

impl Drop for Owned {
    fn drop(&mut self) {
        // SAFETY: made by the library and ended nowhere else. It can't be helped if that fails.
        unsafe { (self.destroy)(self.pointer) };
    }
}

impl Descriptors {
    pub(super) fn new(functions: &Arc<Functions>, product: &Product) -> Result<Descriptors, Error> {
        let told = in_columns(product);
        let descriptors = Descriptors {
            product: matmul(functions, product, &told)?,
            first: layout(functions, product, &told, told.first.0)?,
            second: layout(functions, product, &told, told.second.0)?,
            out: layout(functions, product, &told, told.out)?,
        };
        descriptors.describe(foreign::DESC_TRANS_A, &told.first.1, product)?;
        descriptors.describe(foreign::DESC_TRANS_B, &told.second.1, product)?;
        descriptors.describe(foreign::DESC_EPILOGUE, &told.epilogue, product)?;
        if product.epilogue.kept() != Kept::None {
            descriptors.describe(foreign::DESC_AUX_LD, &(product.kept_leading() as i64), product)?;
        }
        Ok(descriptors)
    }

    /// Where the epilogue's vector and what it keeps lie. The heuristic looks at how they are aligned.
    pub(super) fn point(&self, product: &Product, vector: Address, kept: Address) -> Result<(), Error> {
        if product.epilogue.vector() != super::Vector::None {
            self.describe(foreign::DESC_BIAS_POINTER, &vector.0, product)?;
        }
        if product.epilogue.kept() != Kept::None {
            self.describe(foreign::DESC_AUX_POINTER, &kept.0, product)?;
        }
        Ok(())
    }

    fn describe<T>(&self, attribute: c_int, value: &T, product: &Product) -> Result<(), Error> {
        let Owned { functions, pointer, .. } = &self.product;
        // SAFETY: the descriptor lives, and the call copies as many bytes as the value has.
        let status =
            unsafe { (functions.desc_set)(*pointer, attribute, (&raw const *value).cast(), size_of::<T>()) };
        functions.succeeded("cublasLtMatmulDescSetAttribute", status, product)
    }

    /// Up to `most` algorithms that need no more workspace than this and no better alignment, the one that the library thinks
    /// best first. An error where there is none.
    pub(super) fn algorithms(
        &self,
        handle: LtHandle,
        product: &Product,
        workspace_bytes: usize,
        alignment: Alignment,
        most: usize,
    ) -> Result<Vec<(Algo, usize)>, Error> {
        let functions = &self.product.functions;
        let preference = preference(functions, product, workspace_bytes, alignment)?;
        let mut results = vec![HeuristicResult::default(); most];
        let mut found = 0;
        let out = self.out.pointer;
        // SAFETY: all descriptors live, and the call writes at most as many results as there is room for.
        let status = unsafe {
            (functions.heuristic)(
                handle,
                self.product.pointer,
                self.first.pointer,
                self.second.pointer,
                out,
                out,
                preference.pointer,
                most as c_int,
                results.as_mut_ptr(),
                &mut found,
            )
        };
        functions.succeeded(HEURISTIC, status, product)?;
        let good = results[..found as usize].iter().filter(|result| result.state == foreign::SUCCESS);
        let good: Vec<_> = good.map(|result| (result.algo, result.workspace_size)).collect();
        if good.is_empty() {
            functions.succeeded(HEURISTIC, foreign::NOT_SUPPORTED, product)?;
        }
        Ok(good)
    }
}

fn matmul(functions: &Arc<Functions>, product: &Product, told: &InColumns) -> Result<Owned, Error> {
    let mut pointer: MatmulDesc = std::ptr::null_mut();
    // SAFETY: the call writes one pointer.
    let status = unsafe { (functions.desc_create)(&mut pointer, told.compute, told.scale) };
    functions.succeeded("cublasLtMatmulDescCreate", status, product)?;
    Ok(Owned { functions: functions.clone(), pointer, destroy: functions.desc_destroy })
}

fn layout(
    functions: &Arc<Functions>,
    product: &Product,
    told: &InColumns,
    matrix: Matrix,
) -> Result<Owned, Error> {
    let Matrix { rows, columns, leading, stride } = matrix;
    let mut pointer: MatrixLayout = std::ptr::null_mut();
    // SAFETY: the call writes one pointer.
    let status = unsafe {
        (functions.layout_create)(&mut pointer, told.data, rows as u64, columns as u64, leading as i64)
    };
    functions.succeeded("cublasLtMatrixLayoutCreate", status, product)?;
    let layout = Owned { functions: functions.clone(), pointer, destroy: functions.layout_destroy };
    if product.batch != 1 {
        let (batch, stride) = (product.batch as i32, stride as i64);
        // SAFETY: the layout lives, and each call copies as many bytes as its value has.
        let statuses = unsafe {
            let set = functions.layout_set;
            [
                set(pointer, foreign::LAYOUT_BATCH_COUNT, (&raw const batch).cast(), size_of::<i32>()),
                set(pointer, foreign::LAYOUT_BATCH_STRIDE, (&raw const stride).cast(), size_of::<i64>()),
            ]
        };
        for status in statuses {
            functions.succeeded("cublasLtMatrixLayoutSetAttribute", status, product)?;
        }
    }
    Ok(layout)
}

fn preference(
    functions: &Arc<Functions>,
    product: &Product,
    workspace_bytes: usize,
    [first, second, out, ..]: Alignment,
) -> Result<Owned, Error> {
    let mut pointer = std::ptr::null_mut();
    // SAFETY: the call writes one pointer.
    let status = unsafe { (functions.preference_create)(&mut pointer) };
    functions.succeeded("cublasLtMatmulPreferenceCreate", status, product)?;
    let preference = Owned { functions: functions.clone(), pointer, destroy: functions.preference_destroy };
    let (workspace, reductions) = (workspace_bytes as u64, REDUCTIONS);
    let rows: [(c_int, *const c_void, usize); 6] = [
        (foreign::PREFERENCE_WORKSPACE, (&raw const workspace).cast(), 8),
        (foreign::PREFERENCE_REDUCTIONS, (&raw const reductions).cast(), 4),
        (foreign::PREFERENCE_ALIGNMENT_A, (&raw const first).cast(), 4),
        (foreign::PREFERENCE_ALIGNMENT_B, (&raw const second).cast(), 4),
        (foreign::PREFERENCE_ALIGNMENT_C, (&raw const out).cast(), 4),
        (foreign::PREFERENCE_ALIGNMENT_D, (&raw const out).cast(), 4),
    ];
    for (attribute, value, bytes) in rows {
        // SAFETY: the preference lives, and the call copies as many bytes as the value has.
        let status = unsafe { (functions.preference_set)(pointer, attribute, value, bytes) };
        functions.succeeded("cublasLtMatmulPreferenceSetAttribute", status, product)?;
    }
    Ok(preference)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cublaslt::{Epilogue, Numbers};

    /// Descriptors need no GPU, so that NVIDIA's own library can judge them anywhere.
    #[test]
    fn cublaslt_itself_takes_the_descriptors() {
        let Some(folders) = crate::foreign::headers::libraries() else { return };
        let functions = Arc::new(Functions::open(&folders).unwrap_or_else(|error| panic!("{error}")));
        for (epilogue, numbers) in Epilogue::ALL.into_iter().flat_map(|epilogue| {
            [Numbers::F32, Numbers::Tf32, Numbers::F64, Numbers::Bf16, Numbers::F16].map(|n| (epilogue, n))
        }) {
            let one = Product { epilogue, ..Product::new(numbers, [16, 24, 8]) };
            let many = Product { batch: 3, out_stride: 16 * 24, ..Product::new(numbers, [16, 24, 8]) };
            for product in [one, many] {
                let made = Descriptors::new(&functions, &product).and_then(|descriptors| {
                    descriptors.point(&product, Address(256), Address(512))?;
                    preference(&functions, &product, 1 << 20, [256, 128, 16, 4, 16])
                });
                assert!(made.is_ok(), "{}", made.err().unwrap());
            }
        }
    }
}
