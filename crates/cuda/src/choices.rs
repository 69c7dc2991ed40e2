//! Which of a library's proposals was measured to be the fastest, kept on disk beside the kernels.
//!
//! There is a file for each description, with the description and the number of the proposal in the order of the library's heuristic,
//! which is the same for the same library and GPU. What is kept first stands: whoever measured something else meanwhile takes that too,
//! so all processes that share a folder compute the same bits, also after they have been started again.

use crate::address::{Address, StreamHandle};
use crate::clock::Clock;
use crate::error::Error;
use sha2::{Digest, Sha256};
use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;
use std::{fs, io, process};

/// Changes when the files do.
const FORMAT: &str = "phalanx choice 1";

/// What a search found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Chosen {
    /// How many proposals were measured.
    pub measured: usize,
    /// Which was the fastest, counted among all that the library makes.
    pub proposal: usize,
    /// How long that one took.
    pub best: Duration,
    /// How long the heuristic's first took that could be measured.
    pub first: Duration,
}

/// Gives the workspace of a search: so many bytes, at a multiple of 256, that no other stream uses until the last proposal was run.
pub type Workspace<'a> = dyn FnMut(usize) -> Address + 'a;

/// A library that proposes several ways to compute the same, of which one is chosen for each description.
pub trait Proposals {
    /// What is computed.
    type Description: fmt::Display;
    /// What it is computed of.
    type Operands;

    /// Whether something was chosen.
    fn is_chosen(&self, what: &Self::Description, operands: &Self::Operands) -> bool;

    /// All that decides what the library proposes, beside the GPU.
    fn described(&self, what: &Self::Description, operands: &Self::Operands) -> String;

    /// Chooses a proposal by its number; `false` where there is no such one.
    fn take(
        &mut self,
        what: &Self::Description,
        operands: &Self::Operands,
        proposal: usize,
    ) -> Result<bool, Error>;

    /// Measures the proposals and chooses the fastest. Which that is may differ from run to run, and with it the last bits. One that
    /// fails is passed over, unless all do.
    ///
    /// # Safety
    /// As for running it: until the stream has done it, the addresses are of the GPU's memory, which holds what was described; nobody
    /// writes what is read, nobody reads or writes what is written, over and over; `workspace` keeps its word; the stream lives.
    unsafe fn search(
        &mut self,
        what: &Self::Description,
        operands: &Self::Operands,
        workspace: &mut Workspace<'_>,
        stream: StreamHandle,
        clock: &mut Clock<'_>,
    ) -> Result<Chosen, Error>;
}

/// Times of proposals, the best of which is kept.
pub(crate) struct Race<T> {
    measured: usize,
    first: Duration,
    best: Option<(Duration, usize, T)>,
    refused: Option<Error>,
}

impl<T> Race<T> {
    pub(crate) fn new() -> Race<T> {
        Race { measured: 0, first: Duration::MAX, best: None, refused: None }
    }

    /// Enters how long a proposal took; a library's refusal is kept for the end, other failures are of the GPU.
    pub(crate) fn enter(
        &mut self,
        proposal: usize,
        took: Result<Duration, Error>,
        way: T,
    ) -> Result<(), Error> {
        let took = match took {
            Ok(took) => took,
            Err(error @ Error::LibraryCall { .. }) => {
                self.refused = Some(error);
                return Ok(());
            }
            Err(error) => return Err(error),
        };
        if self.measured == 0 {
            self.first = took;
        }
        self.measured += 1;
        if self.best.as_ref().is_none_or(|(best, ..)| took < *best) {
            self.best = Some((took, proposal, way));
        }
        Ok(())
    }

    /// The fastest; the last refusal where none came to an end. Panics where none was entered.
    pub(crate) fn end(self) -> Result<(Chosen, T), Error> {
        let Race { measured, first, best, refused } = self;
        match best {
            Some((best, proposal, way)) => Ok((Chosen { measured, proposal, best, first }, way)),
            None => Err(refused.expect("there is a proposal, or an error")),
        }
    }
}

/// What was chosen for one kind of GPU.
pub struct Choices {
    folder: Option<PathBuf>,
    gpu: String,
}

impl Choices {
    /// Those in `folder` for a GPU that is described so; without a folder none are kept.
    pub fn new(folder: Option<PathBuf>, gpu: String) -> Choices {
        Choices { folder, gpu }
    }

    /// Chooses what was kept, and whether there was anything.
    pub fn recall<P: Proposals>(
        &self,
        among: &mut P,
        what: &P::Description,
        operands: &P::Operands,
    ) -> Result<bool, Error> {
        match self.file(&among.described(what, operands)).and_then(|(file, text)| read(&file, &text)) {
            Some(proposal) => among.take(what, operands, proposal),
            None => Ok(false),
        }
    }

    /// Searches, keeps what was found, and chooses what stands then.
    ///
    /// # Safety
    /// As for [`Proposals::search`].
    pub unsafe fn search<P: Proposals>(
        &self,
        among: &mut P,
        what: &P::Description,
        operands: &P::Operands,
        workspace: &mut Workspace<'_>,
        stream: StreamHandle,
        clock: &mut Clock<'_>,
    ) -> Result<Chosen, Error> {
        // SAFETY: the caller's promise.
        let chosen = unsafe { among.search(what, operands, workspace, stream, clock) }?;
        let Some((file, text)) = self.file(&among.described(what, operands)) else { return Ok(chosen) };
        // A folder that can't be written only costs the next start a search.
        let is_first = write(&file, &text, chosen.proposal, Over::Nothing).is_ok();
        let mut stands = || read(&file, &text).map(|proposal| among.take(what, operands, proposal));
        if !is_first && !stands().transpose()?.unwrap_or(false) {
            // What is there is damaged, or of no proposal that there is.
            let _ = write(&file, &text, chosen.proposal, Over::WhatIsThere);
        }
        Ok(chosen)
    }

    /// The file of a description, and what it begins with.
    fn file(&self, described: &str) -> Option<(PathBuf, String)> {
        let text = format!("{FORMAT}\n{described}, on {}\n", self.gpu);
        let digits: String = Sha256::digest(&text)[..16].iter().map(|byte| format!("{byte:02x}")).collect();
        Some((self.folder.as_ref()?.join(format!("{digits}.choice")), text))
    }
}

/// What a file may be written over.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Over {
    Nothing,
    WhatIsThere,
}

/// The proposal in a file that begins so, if it is whole.
fn read(file: &Path, text: &str) -> Option<usize> {
    fs::read_to_string(file).ok()?.strip_prefix(text)?.strip_suffix('\n')?.parse().ok()
}

/// Writes a file whole under another name, and then gives it its own.
fn write(file: &Path, text: &str, proposal: usize, over: Over) -> io::Result<()> {
    static NEXT: AtomicU64 = AtomicU64::new(0);
    let folder = file.parent().expect("a file in a folder");
    fs::create_dir_all(folder)?;
    let own = format!("undecided-{}-{}", process::id(), NEXT.fetch_add(1, Ordering::Relaxed));
    let unfinished = folder.join(own);
    let whole = format!("{text}{proposal}\n");
    let written = fs::write(&unfinished, whole).and_then(|()| match over {
        Over::Nothing => fs::hard_link(&unfinished, file),
        Over::WhatIsThere => fs::rename(&unfinished, file),
    });
    let _ = fs::remove_file(&unfinished);
    written
}

impl fmt::Debug for Choices {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Choices(on {})", self.gpu)
    }
}
