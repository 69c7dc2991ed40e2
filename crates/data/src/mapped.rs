//! The bytes of a whole file: mapped into memory where it holds them as they are, else unpacked.
//!
//! A mapped file costs nothing to open, and all workers of a node share its pages; read into memory, CIFAR-10 would take
//! 180 MB in each of them.

use crate::error::{Error, Result};
use crate::idx::plain;
use memmap2::Mmap;
use std::fs::File;
use std::io::{BufRead, BufReader, Read};
use std::ops::Deref;
use std::path::Path;

/// The bytes of a file.
pub(crate) enum Bytes {
    Mapped(Mmap),
    Held(Vec<u8>),
}

impl Bytes {
    /// The bytes of the file, decompressed where it begins like gzip; more than `limit` of them then are an error.
    pub(crate) fn open(path: &Path, limit: u64) -> Result<Bytes> {
        let file = File::open(path).map_err(Error::io("open", path))?;
        let mut stream = BufReader::new(file);
        if stream.fill_buf().map_err(Error::io("read", path))?.starts_with(&[0x1f, 0x8b]) {
            let mut bytes = Vec::new();
            let most = limit.saturating_add(1);
            let unpacked = plain(stream).and_then(|stream| stream.take(most).read_to_end(&mut bytes));
            if unpacked.map_err(Error::io("decompress", path))? as u64 > limit {
                return Err(Error::Unpacked { path: path.to_path_buf(), limit });
            }
            return Ok(Bytes::Held(bytes));
        }
        Ok(Bytes::Mapped(map(&stream.into_inner()).map_err(Error::io("map", path))?))
    }
}

impl Deref for Bytes {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        match self {
            Bytes::Mapped(map) => map,
            Bytes::Held(bytes) => bytes,
        }
    }
}

#[allow(unsafe_code)]
fn map(file: &File) -> std::io::Result<Mmap> {
    // SAFETY: nobody may shorten or change the file while it is mapped, and that is in the hands of whoever can write to it.
    // This library replaces files of the cache by renaming new ones over them, which leaves a mapped one as it was. A user who
    // cuts a file off under a running job kills that job with SIGBUS; one who writes into it changes images. Any byte is a
    // valid byte, and nothing is concluded from a byte that is read twice.
    unsafe { Mmap::map(file) }
}
