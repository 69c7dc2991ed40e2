//! What of cublasLt.h is called.

use crate::address::StreamHandle;
use crate::foreign::{constants, functions};
use crate::library::Library;
use std::ffi::{c_char, c_int, c_void};

pub(crate) type Status = c_int;
pub(crate) type LtHandle = *mut c_void;
pub(crate) type MatmulDesc = *mut c_void;
pub(crate) type MatrixLayout = *mut c_void;
pub(crate) type Preference = *mut c_void;
pub(crate) type DescAttribute = c_int;
pub(crate) type LayoutAttribute = c_int;
pub(crate) type PreferenceAttribute = c_int;
pub(crate) type ComputeType = c_int;
pub(crate) type DataType = c_int;

/// How a product is computed, in the library's own words.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub(crate) struct Algo {
    pub(crate) data: [u64; 8],
}

/// An algorithm that the library proposes.
#[derive(Clone, Copy, Debug, Default)]
#[repr(C)]
pub(crate) struct HeuristicResult {
    pub(crate) algo: Algo,
    pub(crate) workspace_size: usize,
    pub(crate) state: Status,
    pub(crate) waves_count: f32,
    pub(crate) reserved: [c_int; 4],
}

functions! {
    /// The functions of cuBLASLt.
    Functions of Library::CublasLt;
    version "cublasLtGetVersion" () -> usize;
    status_name "cublasLtGetStatusName" (Status) -> *const c_char;
    status_string "cublasLtGetStatusString" (Status) -> *const c_char;
    create "cublasLtCreate" (*mut LtHandle) -> Status;
    destroy "cublasLtDestroy" (LtHandle) -> Status;
    desc_create "cublasLtMatmulDescCreate" (*mut MatmulDesc, ComputeType, DataType) -> Status;
    desc_destroy "cublasLtMatmulDescDestroy" (MatmulDesc) -> Status;
    desc_set "cublasLtMatmulDescSetAttribute" (MatmulDesc, DescAttribute, *const c_void, usize) -> Status;
    layout_create "cublasLtMatrixLayoutCreate" (*mut MatrixLayout, DataType, u64, u64, i64) -> Status;
    layout_destroy "cublasLtMatrixLayoutDestroy" (MatrixLayout) -> Status;
    layout_set "cublasLtMatrixLayoutSetAttribute" (MatrixLayout, LayoutAttribute, *const c_void, usize) -> Status;
    preference_create "cublasLtMatmulPreferenceCreate" (*mut Preference) -> Status;
    preference_destroy "cublasLtMatmulPreferenceDestroy" (Preference) -> Status;
    preference_set "cublasLtMatmulPreferenceSetAttribute" (Preference, PreferenceAttribute, *const c_void, usize) -> Status;
    heuristic "cublasLtMatmulAlgoGetHeuristic" (LtHandle, MatmulDesc, MatrixLayout, MatrixLayout, MatrixLayout, MatrixLayout, Preference, c_int, *mut HeuristicResult, *mut c_int) -> Status;
    matmul "cublasLtMatmul" (LtHandle, MatmulDesc, *const c_void, *const c_void, MatrixLayout, *const c_void, MatrixLayout, *const c_void, *const c_void, MatrixLayout, *mut c_void, MatrixLayout, *const Algo, *mut c_void, usize, StreamHandle) -> Status;
}

constants! {
    SUCCESS "CUBLAS_STATUS_SUCCESS" 0;
    NOT_INITIALIZED "CUBLAS_STATUS_NOT_INITIALIZED" 1;
    ALLOC_FAILED "CUBLAS_STATUS_ALLOC_FAILED" 3;
    INVALID_VALUE "CUBLAS_STATUS_INVALID_VALUE" 7;
    ARCH_MISMATCH "CUBLAS_STATUS_ARCH_MISMATCH" 8;
    EXECUTION_FAILED "CUBLAS_STATUS_EXECUTION_FAILED" 13;
    NOT_SUPPORTED "CUBLAS_STATUS_NOT_SUPPORTED" 15;

    OP_N "CUBLAS_OP_N" 0;
    OP_T "CUBLAS_OP_T" 1;

    REAL_F32 "CUDA_R_32F" 0;
    REAL_F64 "CUDA_R_64F" 1;
    REAL_F16 "CUDA_R_16F" 2;
    REAL_BF16 "CUDA_R_16BF" 14;

    COMPUTE_F32 "CUBLAS_COMPUTE_32F" 68;
    COMPUTE_F64 "CUBLAS_COMPUTE_64F" 70;
    COMPUTE_TF32 "CUBLAS_COMPUTE_32F_FAST_TF32" 77;

    DESC_TRANS_A "CUBLASLT_MATMUL_DESC_TRANSA" 3;
    DESC_TRANS_B "CUBLASLT_MATMUL_DESC_TRANSB" 4;
    DESC_EPILOGUE "CUBLASLT_MATMUL_DESC_EPILOGUE" 7;
    DESC_BIAS_POINTER "CUBLASLT_MATMUL_DESC_BIAS_POINTER" 8;
    DESC_AUX_POINTER "CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER" 11;
    DESC_AUX_LD "CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD" 12;

    LAYOUT_BATCH_COUNT "CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT" 5;
    LAYOUT_BATCH_STRIDE "CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET" 6;

    PREFERENCE_WORKSPACE "CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES" 1;
    PREFERENCE_REDUCTIONS "CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK" 3;
    PREFERENCE_ALIGNMENT_A "CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES" 5;
    PREFERENCE_ALIGNMENT_B "CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES" 6;
    PREFERENCE_ALIGNMENT_C "CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES" 7;
    PREFERENCE_ALIGNMENT_D "CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES" 8;

    REDUCTION_COMPUTE_TYPE "CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE" 2;

    EPILOGUE_DEFAULT "CUBLASLT_EPILOGUE_DEFAULT" 1;
    EPILOGUE_RELU "CUBLASLT_EPILOGUE_RELU" 2;
    EPILOGUE_BIAS "CUBLASLT_EPILOGUE_BIAS" 4;
    EPILOGUE_RELU_BIAS "CUBLASLT_EPILOGUE_RELU_BIAS" 6;
    EPILOGUE_RELU_AUX "CUBLASLT_EPILOGUE_RELU_AUX" 130;
    EPILOGUE_RELU_AUX_BIAS "CUBLASLT_EPILOGUE_RELU_AUX_BIAS" 134;
    EPILOGUE_DRELU "CUBLASLT_EPILOGUE_DRELU" 136;
    EPILOGUE_DRELU_BGRAD "CUBLASLT_EPILOGUE_DRELU_BGRAD" 152;
    EPILOGUE_GELU "CUBLASLT_EPILOGUE_GELU" 32;
    EPILOGUE_GELU_BIAS "CUBLASLT_EPILOGUE_GELU_BIAS" 36;
    EPILOGUE_GELU_AUX "CUBLASLT_EPILOGUE_GELU_AUX" 160;
    EPILOGUE_GELU_AUX_BIAS "CUBLASLT_EPILOGUE_GELU_AUX_BIAS" 164;
    EPILOGUE_DGELU "CUBLASLT_EPILOGUE_DGELU" 192;
    EPILOGUE_DGELU_BGRAD "CUBLASLT_EPILOGUE_DGELU_BGRAD" 208;
    EPILOGUE_BGRADA "CUBLASLT_EPILOGUE_BGRADA" 256;
    EPILOGUE_BGRADB "CUBLASLT_EPILOGUE_BGRADB" 512;
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::foreign::headers::check;

    #[test]
    fn it_is_as_the_header_says() {
        let names = [
            ("Status", "cublasStatus_t"),
            ("LtHandle", "cublasLtHandle_t"),
            ("MatmulDesc", "cublasLtMatmulDesc_t"),
            ("MatrixLayout", "cublasLtMatrixLayout_t"),
            ("Preference", "cublasLtMatmulPreference_t"),
            ("DescAttribute", "cublasLtMatmulDescAttributes_t"),
            ("LayoutAttribute", "cublasLtMatrixLayoutAttribute_t"),
            ("PreferenceAttribute", "cublasLtMatmulPreferenceAttributes_t"),
            ("ComputeType", "cublasComputeType_t"),
            ("DataType", "cudaDataType_t"),
            ("Algo", "cublasLtMatmulAlgo_t"),
            ("HeuristicResult", "cublasLtMatmulHeuristicResult_t"),
        ];
        let sizes = format!(
            "static_assert(sizeof(cublasLtMatmulAlgo_t) == {}, \"size\");\nstatic_assert(sizeof(cublasLtMatmulHeuristicResult_t) == {}, \"size\");\nstatic_assert(offsetof(cublasLtMatmulHeuristicResult_t, workspaceSize) == {}, \"workspaceSize\");\nstatic_assert(offsetof(cublasLtMatmulHeuristicResult_t, state) == {}, \"state\");\n",
            size_of::<Algo>(),
            size_of::<HeuristicResult>(),
            std::mem::offset_of!(HeuristicResult, workspace_size),
            std::mem::offset_of!(HeuristicResult, state),
        );
        check("cublasLt.h", Functions::TABLE, TABLE, &names, &sizes);
    }
}
