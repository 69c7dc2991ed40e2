//! cuDNN: convolutions, forward and both ways backward, with bias and ReLU in the same kernel.
//!
//! A [`Convolution`] is a plain description; [`Convolutions`] are those of one GPU: the library's handle and, for each description
//! that came by, the plan that was chosen for it. The library's heuristic chooses; [`Choices::search`](crate::Choices::search) measures
//! instead.
//! Engines whose results differ from run to run are never taken, nor those that round float32 factors unless
//! [`Numbers::Tf32`] allows it, nor those that sum in 16 bits.
//!
//! It is called through its graph API. cuDNN 9 still has the functions of old (`cudnnConvolutionForward` and the searches beside
//! it), but its headers mark all of them as deprecated in favour of graphs, and with bfloat16 in NHWC bias and ReLU are fused by
//! graphs' engines. Of functions the graph API needs ten, and what it may grow into (other fusions, attention) needs no more.
//!
//! Batch norms aren't here: our own kernels compute them in float64 where it matters, fuse ReLU and the residual, and merge the
//! moments of ranks, which cuDNN's don't; what they move through memory is the same. The gradient of a bias is a sum of columns,
//! for which there is a kernel as well.

mod convolution;
mod convolutions;
#[cfg(test)]
mod described;
mod descriptor;
pub(crate) mod foreign;
mod graph;
mod plan;
mod target;

pub use convolution::{Convolution, Layout, Numbers, Pass};
pub use convolutions::{Convolutions, Operands};
pub use graph::Alignment;

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
pub struct Cudnn {
    functions: Arc<Functions>,
}

impl Cudnn {
    /// Opens the library: from one of `folders` if it is there, else from where the system looks. It looks for its own parts
    /// beside itself.
    pub fn open(folders: &[PathBuf]) -> Result<Cudnn, Error> {
        Ok(Cudnn { functions: Arc::new(Functions::open(folders)?) })
    }

    /// One that computes nothing, of GPUs that aren't there.
    pub(crate) fn absent() -> Cudnn {
        Cudnn { functions: Arc::new(absent::cudnn()) }
    }

    /// Its version, as 9.28.0 is written: (9, 28, 0).
    pub fn version(&self) -> (usize, usize, usize) {
        let number = self.functions.number();
        (number / 10_000, number / 100 % 100, number % 100)
    }

    /// The convolutions of the GPU that is current on this thread, none of which may use a workspace of more than so many bytes.
    pub fn convolutions(&self, most_workspace_bytes: usize) -> Result<Convolutions, Error> {
        Convolutions::new(&self.functions, most_workspace_bytes)
    }
}

/// Whether `error` is of a convolution that the library has no engine for on this GPU, so that another way has to be found. All other
/// errors are failures, which another way would only hide.
pub fn has_no_way(error: &Error) -> bool {
    matches!(error, Error::LibraryCall { library: Library::Cudnn, call, status, .. }
        if *call != EXECUTE && status.starts_with("CUDNN_STATUS_NOT_SUPPORTED"))
}

/// The call that computes.
const EXECUTE: &str = "cudnnBackendExecute";

impl fmt::Debug for Cudnn {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Cudnn({:?})", self.version())
    }
}

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
        // SAFETY: the call gives a constant string for any number.
        let name = unsafe { CStr::from_ptr((self.error_string)(status)) }.to_string_lossy().into_owned();
        let mut text = [0; 512];
        // SAFETY: the call writes at most as many bytes as there is room for.
        unsafe { (self.last_error)(text.as_mut_ptr(), text.len()) };
        let text: Vec<u8> = text.iter().map(|&byte| byte as u8).take_while(|&byte| byte != 0).collect();
        let words = String::from_utf8_lossy(&text).trim().to_owned();
        let words = if words.is_empty() { "no more words".to_owned() } else { words };
        let (library, what) = (Library::Cudnn, what.to_string());
        Err(Error::LibraryCall { library, call, what, status: name, words, hint: hint(status) })
    }
}

fn hint(status: Status) -> &'static str {
    match status {
        foreign::NOT_INITIALIZED => {
            "a GPU must be current on the thread, and its driver new enough: `nvidia-smi`"
        }
        foreign::SUBLIBRARY_VERSION_MISMATCH | foreign::SUBLIBRARY_LOADING_FAILED => {
            "the parts of cuDNN must be of one version and lie beside each other, and the driver's libcuda.so.1 must be there: install what is missing"
        }
        foreign::HOST_ALLOCATION_FAILED | foreign::DEVICE_ALLOCATION_FAILED => {
            "memory is short: other programs on the GPU show in `nvidia-smi`"
        }
        foreign::NOT_SUPPORTED..foreign::INTERNAL_ERROR => {
            "no engine of the library does this: a larger workspace, channels in multiples of 8, or bias and activation on their own may do"
        }
        foreign::EXECUTION_FAILED.. => {
            "the GPU failed, perhaps at an earlier operation: --debug-sync (a program's own: DebugSync::Yes) tells which"
        }
        _ => "CUDNN_LOGLEVEL_DBG=2 and CUDNN_LOGDEST_DBG=stderr make the library tell more",
    }
}
