//! NCCL: collectives between GPUs, one rank a GPU.
//!
//! A rank makes a [`UniqueId`], which travels to the others by whatever way there is; each then [joins](Nccl::join) with it, and
//! has a [`Communicator`]. Communicators don't block: what takes time is asked for and then watched, so that every wait has a
//! deadline and an abort ([`Communicator::abort`]) ends it from any thread. Operations run on streams, after this side has gone
//! on; [`Communicator::wait`] watches over them. An [`Exchange`] is a communicator with its GPU, and safe: it has operations wait
//! for the compute stream, and that for them, on memory that is [`Lent`].
//!
//! What this module does not decide: how ids travel, which stream an operation runs on, what happens after a failure.

mod calls;
mod communicator;
mod exchange;
mod failure;
pub(crate) mod foreign;
mod messages;
mod number;
mod operation;

pub use calls::{Block, Calls};
pub use communicator::{Communicator, InGraph};
pub use exchange::{Exchange, Exchanged, Lent};
pub use failure::{Cause, Failure};
pub use messages::{Message, Way};
pub use number::{Number, Reduction};
pub use operation::{Kind, Operation};

use crate::absent;
use crate::error::Error;
use foreign::{ForeignId, Functions};
use std::ffi::CStr;
use std::fmt;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

/// By what the ranks of a communicator find each other: bytes that travel as they are. Good for one communicator.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct UniqueId(pub [u8; UniqueId::BYTES]);

impl UniqueId {
    /// How many bytes there are.
    pub const BYTES: usize = 128;
}

impl fmt::Debug for UniqueId {
    /// Without its bytes: they hold an address, and whoever has them can join.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("UniqueId(..)")
    }
}

/// Of how many communicators a graph may hold operations, so that no two graphs, or a graph and what isn't in one, keep each other waiting.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum InGraphs {
    /// Of none.
    None,
    /// Of one.
    One,
    /// Of any number.
    Several,
}

/// What the library goes by before what a communicator is told, and the only thing before 2.29.
const MIXING: &str = "NCCL_GRAPH_MIXING_SUPPORT";

impl InGraphs {
    /// By a version, and by what the environment says.
    fn of(version: (u32, u32, u32), mixing: Option<&str>) -> InGraphs {
        match (version >= (2, 29, 0), mixing.map(str::trim)) {
            (true, None) | (false, Some("0")) => InGraphs::Several,
            // Since there is a choice of its own, this means no graphs at all.
            (true, Some("0")) => InGraphs::None,
            (true, Some(_)) | (false, _) => InGraphs::One,
        }
    }
}

/// Whether the library is set to wait within its calls, whatever communicators are told: then nobody could end one whose other ranks
/// don't come.
pub fn is_made_to_block() -> bool {
    setting("NCCL_COMM_BLOCKING").is_some_and(|value| value.trim() == "1")
}

/// What the library goes by under this name: the environment, and then its files, which it reads itself only when it is used first
/// (<https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html>).
fn setting(name: &str) -> Option<String> {
    let own = match std::env::var_os("NCCL_CONF_FILE") {
        Some(file) => Some(PathBuf::from(file)),
        None => std::env::home_dir().map(|home| home.join(".nccl.conf")),
    };
    let mut files = own.into_iter().chain([PathBuf::from("/etc/nccl.conf")]);
    std::env::var(name).ok().or_else(|| {
        files.find_map(|file| set_in(&std::fs::read_to_string(file).ok()?, name).map(str::to_owned))
    })
}

/// What a file of the library says of a name: the first line that does counts.
fn set_in<'a>(text: &'a str, name: &str) -> Option<&'a str> {
    let lines = text.lines().filter(|line| !line.trim_start().starts_with('#'));
    let mut set = lines.filter_map(|line| line.split_once('='));
    set.find_map(|(known, value)| (known.trim() == name).then(|| value.trim()))
}

/// The library, opened.
#[derive(Clone)]
pub struct Nccl {
    functions: Arc<Functions>,
}

impl Nccl {
    /// Opens the library: from one of `folders` if it is there, else from where the system looks.
    pub fn open(folders: &[PathBuf]) -> Result<Nccl, Error> {
        Ok(Nccl { functions: Arc::new(Functions::open(folders)?) })
    }

    /// One that computes nothing, of GPUs that aren't there.
    pub(crate) fn absent() -> Nccl {
        Nccl { functions: Arc::new(absent::nccl()) }
    }

    /// Its version, as 2.32.3 is written: (2, 32, 3).
    pub fn version(&self) -> Result<(u32, u32, u32), Error> {
        let mut number = 0;
        // SAFETY: the call writes one number.
        let status = unsafe { (self.functions.version)(&mut number) };
        self.functions.succeeded("ncclGetVersion", status, || "the library's version".to_owned())?;
        let number = number.max(0) as u32;
        Ok((number / 10_000, number / 100 % 100, number % 100))
    }

    /// Of how many communicators of this process a graph may hold operations.
    pub fn in_graphs(&self) -> Result<InGraphs, Error> {
        Ok(InGraphs::of(self.version()?, setting(MIXING).as_deref()))
    }

    /// A new id. The process that made it must live until all ranks have joined: they meet there.
    pub fn unique_id(&self) -> Result<UniqueId, Error> {
        let mut id = ForeignId { internal: [0; UniqueId::BYTES] };
        // SAFETY: the call fills the struct.
        let status = unsafe { (self.functions.unique_id)(&mut id) };
        self.functions.succeeded("ncclGetUniqueId", status, || "an id for ranks to meet".to_owned())?;
        Ok(UniqueId(id.internal.map(|byte| byte as u8)))
    }

    /// Begins to join the others as `rank` of `n_ranks`, with the GPU that is current on this thread, and returns at once.
    /// [`Communicator::ready`] waits until all have come, and so does the first operation. No wait of the communicator's own
    /// takes longer than `patience`. Panics if there is no such rank.
    #[track_caller]
    pub fn join(
        &self,
        id: &UniqueId,
        rank: usize,
        n_ranks: usize,
        patience: Duration,
    ) -> Result<Communicator, Error> {
        assert!(rank < n_ranks, "join: rank {rank} among {n_ranks}");
        Communicator::join(&self.functions, id, rank, n_ranks, patience)
    }

    /// Issues all operations of `issue` as one, so that they don't wait for each other: several of one communicator, or those of
    /// several ranks that one thread drives. Locks the communicators for the while; each may be named once.
    ///
    /// Should `issue` fail, what it has issued before may still run: abort the communicators then.
    #[track_caller]
    pub fn group<R>(
        &self,
        communicators: &[&Communicator],
        issue: impl FnOnce(&mut [Calls<'_>]) -> Result<R, Error>,
    ) -> Result<R, Error> {
        calls::group(&self.functions, communicators, issue)
    }
}

impl fmt::Debug for Nccl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Nccl({:?})", self.version())
    }
}

impl Functions {
    /// An error where `status` is none of success, outside of any communicator.
    fn succeeded(
        &self,
        call: &'static str,
        status: foreign::Status,
        what: impl Fn() -> String,
    ) -> Result<(), Error> {
        if status == foreign::SUCCESS {
            return Ok(());
        }
        Err(Error::LibraryCall {
            library: crate::Library::Nccl,
            call,
            what: what(),
            status: failure::name(status),
            words: self.words(status, std::ptr::null_mut()),
            hint: failure::hint(status),
        })
    }

    /// What the library says of a status, and of what went wrong last.
    fn words(&self, status: foreign::Status, comm: foreign::Comm) -> String {
        // SAFETY: both give strings that end in 0 and stay for as long as the library is open, or null; the second takes no
        // communicator as well.
        let (general, last) = unsafe { ((self.error_string)(status), (self.last_error)(comm)) };
        let text = |pointer: *const std::ffi::c_char| match pointer.is_null() {
            true => String::new(),
            // SAFETY: as above.
            false => unsafe { CStr::from_ptr(pointer) }.to_string_lossy().trim().to_owned(),
        };
        match (text(general), text(last)) {
            (general, last) if last.is_empty() => general,
            (general, last) => format!("{general}: {last}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn graphs_hold_what_their_library_can_keep_apart() {
        for (version, mixing, want) in [
            ((2, 27, 7), None, InGraphs::One),
            ((2, 28, 9), Some("1"), InGraphs::One),
            ((2, 28, 9), Some("0"), InGraphs::Several),
            ((2, 29, 0), None, InGraphs::Several),
            ((2, 30, 7), Some("0"), InGraphs::None),
            ((3, 0, 0), Some("1"), InGraphs::One),
        ] {
            assert_eq!(InGraphs::of(version, mixing), want, "{version:?} {mixing:?}");
        }
    }

    #[test]
    fn a_file_sets_what_its_first_line_of_a_name_says() {
        let file =
            "# NCCL_DEBUG=INFO\nNCCL_COMM_BLOCKING = 1\nNCCL_COMM_BLOCKING=0\n\nnothing\nNCCL_DEBUG=WARN=1\n";
        for (name, want) in [
            ("NCCL_COMM_BLOCKING", Some("1")),
            ("NCCL_DEBUG", Some("WARN=1")),
            ("nothing", None),
            ("NCCL_COMM", None),
        ] {
            assert_eq!(set_in(file, name), want, "{name}");
        }
    }
}
