//! What can become of an operation among ranks, in words.

use super::foreign::{self, Status};
use super::operation::Operation;
use std::fmt;
use std::time::Duration;

/// Why an operation came to nothing.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Failure {
    /// The rank that tells.
    pub rank: usize,
    /// How many ranks there are.
    pub n_ranks: usize,
    /// The operation; for errors that came later, the last one that was issued.
    pub operation: Operation,
    /// How long it was waited for.
    pub waited: Duration,
    /// What happened.
    pub cause: Cause,
}

/// What happened to an operation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Cause {
    /// A call said so.
    Status {
        /// Which call.
        call: &'static str,
        /// The library's number for it.
        code: i32,
        /// What the library says of it.
        words: String,
    },
    /// It isn't done by its deadline.
    Deadline,
    /// The communicator was aborted on this side.
    Aborted,
}

impl std::error::Error for Failure {}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Failure { rank, n_ranks, operation, waited, cause } = self;
        write!(f, "NCCL: rank {rank} of {n_ranks}: {operation}: ")?;
        match cause {
            Cause::Status { call, code, words } => {
                write!(f, "{call} says {}", name(*code))?;
                if !waited.is_zero() {
                    write!(f, " after {waited:?}")?;
                }
                write!(f, ": {words}\nhint: {}", hint(*code))
            }
            Cause::Deadline => write!(
                f,
                "not done after {waited:?}\nhint: a rank may have left, or asked for something else: abort and build the communicator anew; NCCL_DEBUG=INFO makes the library tell more"
            ),
            Cause::Aborted => write!(
                f,
                "the communicator was aborted on this rank after {waited:?}\nhint: build it anew with those who are left"
            ),
        }
    }
}

/// The library's name for a status.
pub(super) fn name(status: Status) -> String {
    match status {
        foreign::UNHANDLED_CUDA_ERROR => "ncclUnhandledCudaError",
        foreign::SYSTEM_ERROR => "ncclSystemError",
        foreign::INTERNAL_ERROR => "ncclInternalError",
        foreign::INVALID_ARGUMENT => "ncclInvalidArgument",
        foreign::INVALID_USAGE => "ncclInvalidUsage",
        foreign::REMOTE_ERROR => "ncclRemoteError",
        foreign::IN_PROGRESS => "ncclInProgress",
        other => return format!("ncclResult_t {other}"),
    }
    .to_owned()
}

/// What to do about it.
pub(super) fn hint(status: Status) -> &'static str {
    match status {
        foreign::UNHANDLED_CUDA_ERROR => {
            "a call of the driver failed within it: NCCL_DEBUG=WARN names it; where the GPU had no memory left for NCCL's buffers, make batches or the model smaller, else `nvidia-smi` and the system's log (`dmesg`) may show a fault of a GPU"
        }
        foreign::SYSTEM_ERROR => {
            "a call of the system failed within it: check the network, NCCL_SOCKET_IFNAME and the size of /dev/shm; NCCL_DEBUG=INFO tells more"
        }
        foreign::INVALID_ARGUMENT => "this is a bug of the program: NCCL_DEBUG=WARN names the argument",
        foreign::INVALID_USAGE => {
            "two ranks may share a GPU, which NCCL refuses, or ranks ask for different operations: one rank a GPU"
        }
        foreign::REMOTE_ERROR => "another rank left or its connection broke: its own log says why",
        _ => "NCCL_DEBUG=INFO makes the library tell more",
    }
}
