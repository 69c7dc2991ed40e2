//! cuBLASLt: matrix products, with what comes right before or after them in the same kernel.
//!
//! A [`Product`] is a plain description, in rows as the engine's tensors are; [`Products`] are those of one GPU: the library's
//! handle and, for each description that came by, the algorithm and descriptors that were chosen for it, so that a product of a
//! steady step is one call. The library's heuristic chooses; [`Choices::search`](crate::Choices::search) measures instead. The library
//! computes the same bits in every run with the same algorithm: those that the heuristic chooses stay the same, those that a search
//! chooses may differ from run to run and with them the last bits.
//!
//! The library counts in columns: what is handed to it is the transposed product (`layout.rs`).

pub(crate) mod foreign;
mod layout;
mod plan;
mod product;
mod products;

pub use product::{Epilogue, Kept, Numbers, Operand, Order, Product, Vector};
pub use products::{Alignment, Operands, Products};

use crate::absent;
use crate::error::Error;
use crate::library::Library;
use foreign::{Functions, Status};
use std::ffi::CStr;
use std::fmt;
use std::path::PathBuf;
use std::sync::Arc;

/// The library, opened.
#[derive(Clone)]
pub struct CublasLt {
    functions: Arc<Functions>,
}

impl CublasLt {
    /// Opens the library: from one of `folders` if it is there, else from where the system looks.
    pub fn open(folders: &[PathBuf]) -> Result<CublasLt, Error> {
        Ok(CublasLt { functions: Arc::new(Functions::open(folders)?) })
    }

    /// One that computes nothing, of GPUs that aren't there.
    pub(crate) fn absent() -> CublasLt {
        CublasLt { functions: Arc::new(absent::cublaslt()) }
    }

    /// Its version, as 13.1.0 is written: (13, 1, 0).
    pub fn version(&self) -> (usize, usize, usize) {
        let number = self.functions.number();
        (number / 10_000, number / 100 % 100, number % 100)
    }

    /// The products of the GPU that is current on this thread, each of which may use a workspace of so many bytes. 32 MiB is what
    /// an H100 wants at most, and any number will do.
    pub fn products(&self, workspace_bytes: usize) -> Result<Products, Error> {
        Products::new(&self.functions, workspace_bytes)
    }
}

impl fmt::Debug for CublasLt {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "CublasLt({:?})", self.version())
    }
}

/// Whether `error` is of a product that the library has no way to do on this GPU, so that another way has to be found: it takes no such
/// description, or has no algorithm for it. All other errors are failures, which another way would only hide.
pub fn has_no_way(error: &Error) -> bool {
    matches!(error, Error::LibraryCall { library: Library::CublasLt, call: HEURISTIC, status, .. }
        if ["CUBLAS_STATUS_NOT_SUPPORTED", "CUBLAS_STATUS_INVALID_VALUE"].contains(&status.as_str()))
}

/// The call that chooses.
const HEURISTIC: &str = "cublasLtMatmulAlgoGetHeuristic";

impl Functions {
    /// The library's version as one number.
    fn number(&self) -> usize {
        // SAFETY: a call without arguments.
        unsafe { (self.version)() }
    }

    /// An error where `status` is none of success.
    fn succeeded(&self, call: &'static str, status: Status, what: &dyn fmt::Display) -> Result<(), Error> {
        if status == foreign::SUCCESS {
            return Ok(());
        }
        // SAFETY: both give constant strings for any number.
        let [status_name, words] = unsafe { [(self.status_name)(status), (self.status_string)(status)] }
            // SAFETY: as above.
            .map(|text| unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned());
        let (library, what) = (Library::CublasLt, what.to_string());
        Err(Error::LibraryCall { library, call, what, status: status_name, words, hint: hint(status) })
    }
}

fn hint(status: Status) -> &'static str {
    match status {
        foreign::NOT_INITIALIZED => {
            "a GPU must be current on the thread, and its driver new enough: `nvidia-smi`"
        }
        foreign::ALLOC_FAILED => "memory is short: other programs on the GPU show in `nvidia-smi`",
        foreign::ARCH_MISMATCH => "the library doesn't know this GPU: another version of it may",
        foreign::EXECUTION_FAILED => {
            "the GPU failed, perhaps at an earlier operation: --debug-sync (a program's own: DebugSync::Yes) tells which"
        }
        foreign::NOT_SUPPORTED => {
            "the library has no such product: leading dimensions and addresses that are multiples of 16 bytes, or a plain epilogue, would do"
        }
        foreign::INVALID_VALUE => {
            "this is a bug of the program: CUBLASLT_LOG_LEVEL=2 makes the library tell more"
        }
        _ => "CUBLASLT_LOG_LEVEL=2 makes the library tell more",
    }
}
