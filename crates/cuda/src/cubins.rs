//! Machine code on disk, so that a start doesn't wait for the compiler.
//!
//! A file's name is a hash of all that decides its content. It is written under another name and then renamed, so that no process
//! ever sees half of it, and it begins with a checksum: what is damaged all the same is compiled anew and written over. The folder
//! only saves time, so that it can't be read or written is no error; [`KernelCache`] tells.

use crate::element::Element;
use crate::error::Error;
use crate::library::Version;
use crate::lock::lock;
use crate::nvrtc::{Target, options};
use crate::source::{HEADERS, Source};
use sha2::{Digest, Sha256};
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::{fs, io, process};

/// Changes when the files do.
const FORMAT: &[u8] = b"phalanx cubin 1\n";
const CHECKSUM: usize = 32;

/// Where a GPU's kernels came from so far.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct KernelCache {
    /// Modules that were on disk.
    pub from_disk: u64,
    /// Modules that were compiled.
    pub compiled: u64,
    /// Why the last one that couldn't be written wasn't.
    pub not_kept: Option<String>,
}

pub(crate) struct Cubins {
    folder: Option<PathBuf>,
    report: Mutex<KernelCache>,
}

impl Cubins {
    /// Without a folder everything is compiled.
    pub(crate) fn new(folder: Option<PathBuf>) -> Cubins {
        Cubins { folder, report: Mutex::default() }
    }

    pub(crate) fn report(&self) -> KernelCache {
        lock(&self.report).clone()
    }

    /// The machine code of a module, from disk or from `compile`.
    pub(crate) fn get(
        &self,
        source: Source,
        element: Element,
        target: Target,
        compiler: Version,
        compile: impl FnOnce() -> Result<Vec<u8>, Error>,
    ) -> Result<Vec<u8>, Error> {
        let file = self.folder.as_ref().map(|folder| folder.join(name(source, element, target, compiler)));
        if let Some(cubin) = file.as_deref().and_then(read) {
            lock(&self.report).from_disk += 1;
            return Ok(cubin);
        }
        let cubin = compile()?;
        let kept =
            file.map_or(Ok(()), |file| write(&file, &cubin).map_err(|e| format!("{}: {e}", file.display())));
        let mut report = lock(&self.report);
        report.compiled += 1;
        report.not_kept = kept.err().or(report.not_kept.take());
        Ok(cubin)
    }
}

/// A file's name.
fn name(source: Source, element: Element, target: Target, compiler: Version) -> String {
    let mut hash = Sha256::new();
    let options = options(element, target, compiler);
    let compiler = compiler.to_string();
    let texts = HEADERS.iter().flat_map(|(name, text)| [*name, *text]);
    let texts = texts.chain(options.iter().map(String::as_str));
    for text in texts.chain([source.text(), &compiler]) {
        // With its length, so that nothing can wander from one text to the next.
        hash.update((text.len() as u64).to_le_bytes());
        hash.update(text);
    }
    let digits: String = hash.finalize()[..16].iter().map(|byte| format!("{byte:02x}")).collect();
    let stem = source.file().trim_end_matches(".cu");
    format!("{stem}-{}-{target}-{digits}.cubin", element.in_source())
}

/// The machine code in a file, if it is whole.
fn read(file: &Path) -> Option<Vec<u8>> {
    let bytes = fs::read(file).ok()?;
    let (sum, cubin) = bytes.strip_prefix(FORMAT)?.split_at_checked(CHECKSUM)?;
    (Sha256::digest(cubin)[..] == *sum).then(|| cubin.to_vec())
}

fn write(file: &Path, cubin: &[u8]) -> io::Result<()> {
    static NEXT: AtomicU64 = AtomicU64::new(0);
    let folder = file.parent().expect("a file in a folder");
    fs::create_dir_all(folder)?;
    let own = format!("unfinished-{}-{}", process::id(), NEXT.fetch_add(1, Ordering::Relaxed));
    let unfinished = folder.join(own);
    let whole = [FORMAT, &Sha256::digest(cubin)[..], cubin].concat();
    let written = fs::write(&unfinished, whole).and_then(|()| fs::rename(&unfinished, file));
    written.inspect_err(|_| {
        let _ = fs::remove_file(&unfinished);
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::nvrtc::{Architecture, Form};

    #[test]
    fn all_that_decides_the_code_decides_the_name() {
        let targets = [(8, Form::Cubin), (9, Form::Cubin), (9, Form::Ptx)]
            .map(|(major, form)| Target { architecture: Architecture { major, minor: 0 }, form });
        let (old, new) = (Version { major: 13, minor: 0 }, Version { major: 13, minor: 1 });
        let mut names = Vec::new();
        for source in Source::ALL {
            for &element in source.elements() {
                for target in targets {
                    for compiler in [old, new] {
                        names.push(name(source, element, target, compiler));
                        assert_eq!(names.last(), Some(&name(source, element, target, compiler)));
                    }
                }
            }
        }
        let all = names.len();
        names.sort();
        names.dedup();
        assert_eq!(names.len(), all);
    }
}
