//! Digests of files, and whether a dataset's files are what its authors published.

use crate::catalog::{FileSpec, Home, Listing, Twin, embedded};
use crate::error::{Error, Result};
use crate::idx::plain;
use crate::places::Location;
use md5::Md5;
use sha2::{Digest, Sha256};
use std::fs::File;
use std::io::{self, BufReader, Read, Write};
use std::path::{Path, PathBuf};

/// A file that was read whole and is as published.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Verified {
    /// The file; of a dataset within the library, its name alone.
    pub path: PathBuf,
    /// Its uncompressed size.
    pub bytes: u64,
    /// The digest of its uncompressed bytes, in hexadecimal: the SHA-256, or the MD5 of a file of the other format.
    pub digest: String,
}

/// Reads all files of a dataset, in the format that the folder holds, and compares their digests with the catalog's.
///
/// # Errors
/// [`Error::Checksum`] for the first file that differs, [`Error::Io`] for one that can't be read, and [`Error::Unsuitable`] for
/// files that the catalog has no digests of.
pub fn verify(listing: &Listing, location: &Location) -> Result<Vec<Verified>> {
    let unsuitable = |reason| Err(Error::Unsuitable { name: listing.name, reason });
    match (listing.home, location) {
        (Home::Given | Home::File { .. }, _) => {
            return unsuitable("it is your own, and nobody published digests of it");
        }
        (Home::Disk { instead: all @ [first, ..], .. }, Location::Folder(folder))
            if folder.join(first.name).exists() && !folder.join(listing.files[0].name).exists() =>
        {
            return all.iter().map(|twin| verify_twin(listing, twin, folder)).collect();
        }
        _ => {}
    }
    listing
        .files
        .iter()
        .map(|file| match location {
            Location::Folder(folder) => verify_file(listing, file, folder),
            Location::File(path) => {
                check(listing, file, path, BufReader::new(File::open(path).map_err(Error::io("open", path))?))
            }
            Location::Library => {
                let bytes = embedded(file.name).expect("the library holds the files that its catalog lists");
                check(listing, file, Path::new(file.name), bytes)
            }
        })
        .collect()
}

/// Verifies one file, raw or compressed, of `folder`.
pub(crate) fn verify_file(listing: &Listing, file: &FileSpec, folder: &Path) -> Result<Verified> {
    let raw = folder.join(file.name);
    let path = if raw.exists() { raw } else { folder.join(format!("{}.gz", file.name)) };
    let stream = File::open(&path).map_err(Error::io("open", &path))?;
    check(listing, file, &path, BufReader::with_capacity(1 << 17, stream))
}

/// Verifies one file of the other format, which is never compressed.
fn verify_twin(listing: &Listing, twin: &Twin, folder: &Path) -> Result<Verified> {
    let path = folder.join(twin.name);
    let mut file = File::open(&path).map_err(Error::io("open", &path))?;
    let copied = hash::<Md5>(&mut file, &mut io::sink(), u64::MAX, |_| {});
    let Digested { bytes, digest } = copied.map_err(Error::io("read", &path))?;
    if digest == twin.md5 {
        return Ok(Verified { path, bytes, digest });
    }
    let (dataset, expected, found) = (listing.name, twin.md5.to_owned(), digest);
    Err(Error::Checksum { dataset, algorithm: "MD5", path, expected, found })
}

fn check(listing: &Listing, file: &FileSpec, path: &Path, stream: impl io::BufRead) -> Result<Verified> {
    let copied = plain(stream).and_then(|mut stream| copy(&mut *stream, &mut io::sink(), file.bytes, |_| {}));
    let digest = match copied {
        Ok(digest) => digest,
        // How flate2 reports a stream that is broken or cut: the file can be read, and isn't what was published.
        Err(error)
            if matches!(
                error.kind(),
                io::ErrorKind::InvalidInput | io::ErrorKind::InvalidData | io::ErrorKind::UnexpectedEof
            ) =>
        {
            return Err(wrong(listing, file, path, format!("a broken gzip stream: {error}")));
        }
        Err(error) => return Err(Error::io("read", path)(error)),
    };
    digest.expect(listing, file, path)?;
    Ok(Verified { path: path.to_path_buf(), bytes: digest.bytes, digest: digest.digest })
}

/// What was copied.
pub(crate) struct Digested {
    pub(crate) bytes: u64,
    pub(crate) digest: String,
}

impl Digested {
    /// Whether this is the file of the catalog.
    pub(crate) fn expect(&self, listing: &Listing, file: &FileSpec, path: &Path) -> Result<()> {
        if self.digest == file.sha256 {
            return Ok(());
        }
        let found = match self.bytes {
            n if n > file.bytes => format!("more than {} bytes", file.bytes),
            n if n < file.bytes => format!("{} (of {n} bytes instead of {})", self.digest, file.bytes),
            _ => self.digest.clone(),
        };
        Err(wrong(listing, file, path, found))
    }
}

fn wrong(listing: &Listing, file: &FileSpec, path: &Path, found: String) -> Error {
    let (dataset, expected) = (listing.name, file.sha256.to_owned());
    Error::Checksum { dataset, algorithm: "SHA-256", path: path.to_path_buf(), expected, found }
}

/// Copies `from` to `to`, but at most one byte more than `limit`, and reports how many bytes there are by now.
pub(crate) fn copy(
    from: &mut dyn Read,
    to: &mut dyn Write,
    limit: u64,
    report: impl FnMut(u64),
) -> io::Result<Digested> {
    hash::<Sha256>(from, to, limit, report)
}

fn hash<D: Digest>(
    from: &mut dyn Read,
    to: &mut dyn Write,
    limit: u64,
    mut report: impl FnMut(u64),
) -> io::Result<Digested> {
    let mut hasher = D::new();
    let mut buffer = vec![0; 1 << 16];
    let mut from = from.take(limit.saturating_add(1));
    let mut bytes = 0;
    loop {
        let n = match from.read(&mut buffer) {
            Ok(0) => break,
            Ok(n) => n,
            Err(e) if e.kind() == io::ErrorKind::Interrupted => continue,
            Err(e) => return Err(e),
        };
        hasher.update(&buffer[..n]);
        to.write_all(&buffer[..n])?;
        bytes += n as u64;
        report(bytes);
    }
    let digest = hasher.finalize().iter().map(|byte| format!("{byte:02x}")).collect();
    Ok(Digested { bytes, digest })
}
