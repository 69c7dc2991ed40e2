//! What can go wrong between a dataset's name and a batch.

use std::fmt;
use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// The result of this crate's fallible operations.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Everything that can go wrong in finding, fetching, reading and loading data.
#[derive(thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The system refused a file operation.
    #[error("cannot {action} {}: {error}{}", path.display(), hint_for(action, error))]
    Io {
        /// What was attempted, as a verb.
        action: &'static str,
        /// The file or folder.
        path: PathBuf,
        /// What the system answered.
        error: io::Error,
    },
    /// A file isn't the IDX file that was expected.
    #[error("{}: {problem}{}", path.display(), problem.hint())]
    Idx {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        problem: IdxProblem,
    },
    /// A file isn't the CIFAR file that was expected.
    #[error("{}: {problem}{}", path.display(), problem.hint())]
    Cifar {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        problem: CifarProblem,
    },
    /// An image can't be read.
    #[error(
        "{}: {reason}\nhint: replace or remove the file; with --skip-bad (data.skip_bad) another image takes its place",
        path.display()
    )]
    Image {
        /// The file.
        path: PathBuf,
        /// Why, in words.
        reason: String,
    },
    /// A folder isn't one of images.
    #[error("{}: {problem}\nhint: images lie in DIR/train/CLASS/... and DIR/val/CLASS/... (or test)", path.display())]
    Folder {
        /// The folder.
        path: PathBuf,
        /// What is wrong with it.
        problem: FolderProblem,
    },
    /// Samples that are to lie in a GPU's memory can't.
    #[error(
        "the samples can't lie in the GPU's memory: {reason}\nhint: data.resident=auto brings those of each batch there"
    )]
    NotResident {
        /// Why, in words.
        reason: String,
    },
    /// A [`Dataset`](crate::Dataset) of somebody else's failed.
    #[error(transparent)]
    Other(Box<dyn std::error::Error + Send + Sync>),
    /// A text too short to learn from.
    #[error("{}: a text of {found} bytes: windows of {window} bytes need at least {needed}\nhint: take a longer text, or a smaller model.context", path.display())]
    ShortText {
        /// The file.
        path: PathBuf,
        /// Its bytes.
        found: usize,
        /// The fewest that do.
        needed: usize,
        /// The bytes of a window.
        window: usize,
    },
    /// A compressed file that holds more than is read into memory.
    #[error("{}: it unpacks to more than {limit} bytes, the most that are held in memory\nhint: unpack it: a plain file is read where it lies", path.display())]
    Unpacked {
        /// The file.
        path: PathBuf,
        /// The most.
        limit: u64,
    },
    /// The text that the user named isn't there.
    #[error("{}: {}\nhint: --data FILE takes any file", no_text(path), path.display())]
    MissingText {
        /// The file.
        path: PathBuf,
    },
    /// No text was named, and none lies where systems keep some.
    #[error("no text to learn from: none of these is there: {}\nhint: --data FILE takes any file", tried.join(", "))]
    NoText {
        /// Where one was looked for.
        tried: &'static [&'static str],
    },
    /// Images can't be brought to the form that a model needs.
    #[error("the images can't be transformed: {reason}\nhint: see `data.` in `phalanx train RECIPE --print`")]
    Pipeline {
        /// Why, in words.
        reason: String,
    },
    /// No dataset has this name.
    #[error("no dataset is called: {name}{}", nearest_hint(*nearest))]
    UnknownDataset {
        /// The name that was asked for.
        name: String,
        /// The known name that looks most like it.
        nearest: Option<&'static str>,
    },
    /// The folder that the user named doesn't exist, or is none.
    #[error("{}: {}\nhint: leave --data out to use or fill the cache, or name a folder that holds the files", no_folder(path), path.display())]
    MissingFolder {
        /// The folder.
        path: PathBuf,
    },
    /// A place was named for a dataset that lies in none.
    #[error("--data {}: dataset {name} is inside this program, and nothing is read for it\nhint: leave --data out", path.display())]
    Inside {
        /// The dataset.
        name: &'static str,
        /// What was named.
        path: PathBuf,
    },
    /// A dataset of the user's own without the folder that it is in.
    #[error("dataset {name} is your own: no folder was given\nhint: --data DIR")]
    NoFolder {
        /// The dataset.
        name: &'static str,
    },
    /// A dataset is nowhere to be found and could not be fetched.
    #[error(
        "dataset {name} was not found and could not be fetched{}\n\
         hint: where there is a network, run `phalanx data fetch {name}`; compute nodes see it through a shared home or --data DIR\n\
         hint: `phalanx train mnist-mini` needs no data and no network",
        List(tried)
    )]
    Missing {
        /// The dataset.
        name: &'static str,
        /// Each place and source in the order in which it was tried.
        tried: Vec<Attempt>,
    },
    /// A file's contents aren't what the dataset's authors published.
    #[error("{}: wrong {algorithm}\n  expected: {expected}\n  found:    {found}\nhint: remove the file and run `phalanx data fetch {dataset}`", path.display())]
    Checksum {
        /// The dataset that the file belongs to.
        dataset: &'static str,
        /// What the digest is.
        algorithm: &'static str,
        /// The file, or where it came from.
        path: PathBuf,
        /// The digest in the catalog, in hexadecimal.
        expected: String,
        /// The digest of the bytes that were read, in hexadecimal.
        found: String,
    },
    /// A source doesn't deliver.
    #[error("{source_name}: {reason}")]
    Source {
        /// The source, as in [`crate::Source`]'s display.
        source_name: String,
        /// Why, in words.
        reason: String,
    },
    /// Another process holds the dataset's lock for too long.
    #[error("{} is locked by another process that fetches it: nothing has arrived for {waited:?}\nhint: end that process", path.display())]
    Locked {
        /// The lock file.
        path: PathBuf,
        /// For how long nothing has arrived.
        waited: Duration,
    },
    /// A loader thread delivers nothing.
    #[error(
        "no batch from the data loader for step {step} of epoch {epoch}: waited {waited:?}\nhint: is the file system that holds the data reachable?"
    )]
    LoaderStalled {
        /// The epoch.
        epoch: u64,
        /// The step within the epoch.
        step: usize,
        /// How long the training loop waited.
        waited: Duration,
    },
    /// The system gives the loader no thread.
    #[error(
        "cannot start a data loader thread: {error}\nhint: the loader works without threads, too: set threads to 0 in its options"
    )]
    Thread {
        /// What the system answered.
        error: io::Error,
    },
    /// A dataset can't be presented as asked.
    #[error("dataset {name}: {reason}")]
    Unsuitable {
        /// The dataset.
        name: &'static str,
        /// Why, in words.
        reason: &'static str,
    },
}

/// Its message, which is what a `main` that returns it tells.
impl fmt::Debug for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl Error {
    /// Whether whoever reads the same again meets the same: what lies there isn't what it should be, or isn't there.
    pub fn is_for_good(&self) -> bool {
        match self {
            Error::Idx { .. }
            | Error::Cifar { .. }
            | Error::Folder { .. }
            | Error::ShortText { .. }
            | Error::Unpacked { .. }
            | Error::MissingText { .. }
            | Error::NoText { .. }
            | Error::Pipeline { .. }
            | Error::UnknownDataset { .. }
            | Error::MissingFolder { .. }
            | Error::NoFolder { .. }
            | Error::Checksum { .. }
            | Error::Inside { .. }
            | Error::Unsuitable { .. } => true,
            Error::Io { .. }
            | Error::Other(_)
            | Error::Image { .. }
            | Error::NotResident { .. }
            | Error::Missing { .. }
            | Error::Source { .. }
            | Error::Locked { .. }
            | Error::LoaderStalled { .. }
            | Error::Thread { .. } => false,
        }
    }
}

/// A place that was looked at or a source that was asked, with the outcome.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Attempt {
    /// The folder or source.
    pub place: String,
    /// Why it gave nothing.
    pub reason: String,
}

/// What is wrong with an IDX file.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum IdxProblem {
    /// The first four bytes aren't those of an IDX file of bytes.
    Foreign {
        /// The first bytes, as many as there were.
        found: Vec<u8>,
    },
    /// The file ends early.
    Truncated {
        /// How many bytes of values the header announces.
        expected: u64,
        /// How many there are.
        found: u64,
    },
    /// The file goes on after the last value.
    TooLong {
        /// How many bytes of values the header announces.
        expected: u64,
    },
    /// The header announces more than this reader is willing to hold.
    TooLarge {
        /// The sizes in the header.
        dims: Vec<usize>,
        /// The bound, in bytes.
        limit: u64,
    },
    /// The sizes aren't those of the dataset.
    Dims {
        /// What the dataset has, in words.
        expected: String,
        /// The sizes in the header.
        found: Vec<usize>,
    },
    /// A label that stands for no class.
    Label {
        /// The sample.
        sample: usize,
        /// Its label.
        found: u8,
        /// How many classes there are.
        classes: usize,
    },
    /// The gzip stream is broken.
    Gzip {
        /// What the decoder says.
        reason: String,
    },
}

/// What is wrong with a folder of images.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum FolderProblem {
    /// It has no folder for one of the parts.
    NoPart {
        /// Which.
        part: String,
    },
    /// It has no folder, and so no class.
    NoClasses,
    /// The folder of a class has no image.
    EmptyClass,
    /// The folder of a class that there is nothing to learn about from.
    UnknownClass {
        /// Which.
        class: String,
    },
}

impl fmt::Display for FolderProblem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            FolderProblem::NoPart { part } => write!(f, "holds no folder {part}"),
            FolderProblem::NoClasses => f.write_str("holds no folders of classes"),
            FolderProblem::EmptyClass => f.write_str("the folder of a class holds no JPEG or PNG file"),
            FolderProblem::UnknownClass { class } => {
                write!(f, "a class to be tested that the training images don't have: {class}")
            }
        }
    }
}

/// What is wrong with a CIFAR file.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub enum CifarProblem {
    /// The file holds no whole number of images.
    Length {
        /// Its bytes.
        found: usize,
        /// The bytes of an image and its labels.
        record: usize,
    },
    /// A label that stands for no class.
    Label {
        /// The image, from 0 in its file.
        sample: usize,
        /// Its label.
        found: usize,
        /// How many classes there are.
        classes: usize,
    },
    /// It is no pickle, or one that asks for more than data needs.
    Pickle(phalanx_pickle::Error),
    /// The pickle holds something else.
    Contents {
        /// What it should hold.
        what: String,
        /// What is there.
        found: String,
    },
}

impl CifarProblem {
    fn hint(&self) -> &'static str {
        match self {
            CifarProblem::Label { .. } => {
                "\nhint: is this file of that dataset? With --skip-bad (data.skip_bad) another image takes the bad one's place"
            }
            _ => {
                "\nhint: put a whole file in its place, or remove it and run `phalanx data fetch` with the data set's name"
            }
        }
    }
}

impl fmt::Display for CifarProblem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            CifarProblem::Length { found, record } => {
                write!(f, "not a whole number of images of {record} bytes: found {found} bytes")
            }
            CifarProblem::Label { sample, found, classes } => {
                write!(
                    f,
                    "label of image {sample} out of range: expected less than {classes}, found: {found}"
                )
            }
            CifarProblem::Pickle(error) => write!(f, "not the pickle that was expected: {error}"),
            CifarProblem::Contents { what, found } => write!(f, "expected {what}, found: {found}"),
        }
    }
}

impl IdxProblem {
    fn hint(&self) -> &'static str {
        match self {
            IdxProblem::Dims { .. } | IdxProblem::Label { .. } => {
                "\nhint: are the images and labels files of one dataset?"
            }
            _ => {
                "\nhint: put a whole file in its place, or remove it and run `phalanx data fetch` with the data set's name"
            }
        }
    }
}

impl fmt::Display for IdxProblem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            IdxProblem::Foreign { found } => {
                write!(
                    f,
                    "not an IDX file of bytes: expected it to begin with 00 00 08 and the number of dimensions, found:"
                )?;
                found.iter().try_for_each(|byte| write!(f, " {byte:02x}"))?;
                if found.is_empty() { f.write_str(" nothing") } else { Ok(()) }
            }
            IdxProblem::Truncated { expected, found } => {
                write!(f, "truncated IDX file: expected {expected} bytes of values, found: {found}")
            }
            IdxProblem::TooLong { expected } => {
                write!(
                    f,
                    "IDX file goes on after its last value: expected {expected} bytes of values, found: more"
                )
            }
            IdxProblem::TooLarge { dims, limit } => {
                write!(f, "IDX file too large: expected at most {limit} bytes, found sizes: {dims:?}")
            }
            IdxProblem::Dims { expected, found } => {
                write!(f, "IDX file of the wrong sizes: expected {expected}, found: {found:?}")
            }
            IdxProblem::Label { sample, found, classes } => {
                write!(
                    f,
                    "label of sample {sample} out of range: expected less than {classes}, found: {found}"
                )
            }
            IdxProblem::Gzip { reason } => write!(f, "broken gzip stream: {reason}"),
        }
    }
}

impl Error {
    pub(crate) fn io(action: &'static str, path: &Path) -> impl FnOnce(io::Error) -> Error {
        move |error| Error::Io { action, path: path.to_path_buf(), error }
    }

    pub(crate) fn source(source: &impl fmt::Display, reason: impl Into<String>) -> Error {
        Error::Source { source_name: source.to_string(), reason: reason.into() }
    }
}

fn hint_for(action: &str, error: &io::Error) -> &'static str {
    let reads = ["open", "list", "look at", "read", "map", "decompress"].contains(&action);
    match error.kind() {
        io::ErrorKind::PermissionDenied if reads => {
            "\nhint: `ls -ld` shows who may read it, for each folder of its path"
        }
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => {
            "\nhint: free some space, or set PHALANX_CACHE to a folder on another disk"
        }
        io::ErrorKind::PermissionDenied | io::ErrorKind::ReadOnlyFilesystem => {
            "\nhint: set PHALANX_CACHE to a folder that you may write to"
        }
        _ => "",
    }
}

fn no_folder(path: &Path) -> &'static str {
    if path.exists() { "the data folder is no folder" } else { "the data folder does not exist" }
}

fn no_text(path: &Path) -> &'static str {
    if path.exists() { "the text is no file" } else { "no such text file" }
}

fn nearest_hint(nearest: Option<&'static str>) -> String {
    match nearest {
        Some(name) => format!("\nhint: did you mean {name}? `phalanx data list` names them all"),
        None => "\nhint: `phalanx data list` names them all".to_owned(),
    }
}

/// Attempts as indented lines.
struct List<'a>(&'a [Attempt]);

impl fmt::Display for List<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|Attempt { place, reason }| {
            // The reasons of package clients span lines; they stay under their place.
            write!(f, "\n  {place}: {}", reason.replace('\n', "\n    "))
        })
    }
}
