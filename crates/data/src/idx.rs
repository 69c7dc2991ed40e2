//! The IDX format: big-endian sizes and then the values, the files that MNIST and its kin are published as.
//!
//! A file begins with two zero bytes, the type of its values (8 for unsigned bytes, the only one that image sets use and the
//! only one read here) and its number of dimensions; then each size as four bytes, then the values in row-major order.
//! Files may be compressed with gzip; what tells is their first bytes, not their name. Nothing is allocated on the word of
//! a header, and a file that is shorter or longer than its header says is refused.

use crate::error::{Error, IdxProblem, Result};
use flate2::bufread::MultiGzDecoder;
use std::fs::File;
use std::io::{self, BufRead, BufReader, Read};
use std::path::{Path, PathBuf};

/// More values than this are taken for a broken header.
const MAX_BYTES: u64 = 1 << 30;
const MAX_DIMS: usize = 4;
const UNSIGNED_BYTE: u8 = 8;

/// An IDX file that is read from front to back.
pub(crate) struct IdxReader<R> {
    path: PathBuf,
    dims: Vec<usize>,
    bytes: u64,
    done: u64,
    /// Whether a gzip stream ended before its own end mark.
    cut: bool,
    source: R,
}

/// A stream of a file's bytes, after decompression.
pub(crate) type Plain<'a> = Box<dyn Read + 'a>;

/// The plain bytes of `stream`, decompressed where it begins like gzip.
pub(crate) fn plain<'a>(mut stream: impl BufRead + 'a) -> io::Result<Plain<'a>> {
    let gzip = stream.fill_buf()?.starts_with(&[0x1f, 0x8b]);
    Ok(if gzip { Box::new(MultiGzDecoder::new(stream)) } else { Box::new(stream) })
}

impl IdxReader<Plain<'static>> {
    /// Opens a file, compressed or not, and reads its header.
    pub(crate) fn open(path: &Path) -> Result<IdxReader<Plain<'static>>> {
        let file = File::open(path).map_err(Error::io("open", path))?;
        let source = plain(BufReader::with_capacity(1 << 16, file)).map_err(Error::io("read", path))?;
        IdxReader::new(path, source)
    }
}

impl<R: Read> IdxReader<R> {
    /// Reads the header of plain bytes; `path` is what errors name.
    pub(crate) fn new(path: &Path, source: R) -> Result<IdxReader<R>> {
        let path = path.to_path_buf();
        let mut reader = IdxReader { path, dims: Vec::new(), bytes: 0, done: 0, cut: false, source };
        let mut magic = [0; 4];
        let n = reader.fill(&mut magic)?;
        let n_dims = usize::from(magic[3]);
        if n < 4 || magic[..3] != [0, 0, UNSIGNED_BYTE] || !(1..=MAX_DIMS).contains(&n_dims) {
            return Err(reader.problem(IdxProblem::Foreign { found: magic[..n].to_vec() }));
        }
        let mut sizes = [0; 4 * MAX_DIMS];
        let sizes = &mut sizes[..4 * n_dims];
        let n = reader.fill(sizes)?;
        if n < sizes.len() {
            return Err(reader.problem(IdxProblem::Foreign { found: [&magic[..], &sizes[..n]].concat() }));
        }
        for size in sizes.chunks_exact(4) {
            reader.dims.push(u32::from_be_bytes([size[0], size[1], size[2], size[3]]) as usize);
        }
        let bytes = reader.dims.iter().try_fold(1u64, |product, &size| product.checked_mul(size as u64));
        match bytes {
            Some(bytes) if bytes <= MAX_BYTES => reader.bytes = bytes,
            _ => {
                let dims = reader.dims.clone();
                return Err(reader.problem(IdxProblem::TooLarge { dims, limit: MAX_BYTES }));
            }
        }
        Ok(reader)
    }

    /// The sizes, outermost first.
    pub(crate) fn dims(&self) -> &[usize] {
        &self.dims
    }

    /// What errors name.
    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// The next values, exactly as many as fit.
    pub(crate) fn read_exact(&mut self, into: &mut [u8]) -> Result<()> {
        let n = self.fill(into)?;
        self.done += n as u64;
        if n < into.len() {
            return Err(self.problem(IdxProblem::Truncated { expected: self.bytes, found: self.done }));
        }
        Ok(())
    }

    /// Checks that nothing follows the last value. All values must have been read.
    pub(crate) fn finish(mut self) -> Result<()> {
        debug_assert_eq!(self.done, self.bytes, "values of {} were left unread", self.path.display());
        match self.fill(&mut [0])? {
            0 if self.cut => {
                let reason = "it ends before its checksum".to_owned();
                Err(self.problem(IdxProblem::Gzip { reason }))
            }
            0 => Ok(()),
            _ => Err(self.problem(IdxProblem::TooLong { expected: self.bytes })),
        }
    }

    pub(crate) fn problem(&self, problem: IdxProblem) -> Error {
        Error::Idx { path: self.path.clone(), problem }
    }

    /// Reads until `into` is full or the stream ends.
    fn fill(&mut self, into: &mut [u8]) -> Result<usize> {
        let mut n = 0;
        while n < into.len() {
            match self.source.read(&mut into[n..]) {
                Ok(0) => break,
                Ok(more) => n += more,
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Err(e) if e.kind() == io::ErrorKind::UnexpectedEof => {
                    self.cut = true;
                    break;
                }
                // How flate2 reports a broken stream.
                Err(e) if matches!(e.kind(), io::ErrorKind::InvalidInput | io::ErrorKind::InvalidData) => {
                    return Err(self.problem(IdxProblem::Gzip { reason: e.to_string() }));
                }
                Err(e) => return Err(Error::io("read", &self.path)(e)),
            }
        }
        Ok(n)
    }
}

/// All values of a file, with its sizes.
///
/// ```
/// # let dir = tempfile::tempdir()?;
/// # let path = dir.path().join("labels");
/// std::fs::write(&path, [0, 0, 8, 1, 0, 0, 0, 3, 7, 2, 1])?;
/// assert_eq!(phalanx_data::read_idx(&path)?, (vec![3], vec![7, 2, 1]));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// # Errors
/// [`Error::Io`] if the file can't be read and [`Error::Idx`] if it isn't a whole IDX file of at most a gigabyte.
pub fn read_idx(path: &Path) -> Result<(Vec<usize>, Vec<u8>)> {
    read_values(IdxReader::open(path)?)
}

/// The sizes and the values of a file whose header has been read.
pub(crate) fn read_values<R: Read>(mut reader: IdxReader<R>) -> Result<(Vec<usize>, Vec<u8>)> {
    const CHUNK: u64 = 1 << 16;
    let mut values = Vec::new();
    // Chunk by chunk, so that a header alone makes nobody allocate a gigabyte.
    while (values.len() as u64) < reader.bytes {
        let start = values.len();
        values.resize(start + CHUNK.min(reader.bytes - start as u64) as usize, 0);
        reader.read_exact(&mut values[start..])?;
    }
    let dims = reader.dims.clone();
    reader.finish()?;
    Ok((dims, values))
}

#[cfg(test)]
mod tests {
    use super::*;
    use flate2::{Compression, write::GzEncoder};
    use proptest::prelude::*;
    use std::io::Write;

    fn parse(bytes: &[u8]) -> Result<(Vec<usize>, Vec<u8>), IdxProblem> {
        let path = Path::new("some-file");
        let stream = plain(bytes).expect("memory can be read");
        match IdxReader::new(path, stream).and_then(read_values) {
            Ok(whole) => Ok(whole),
            Err(Error::Idx { path: named, problem }) => {
                assert_eq!(named, path);
                Err(problem)
            }
            Err(other) => panic!("unexpected kind of error: {other}"),
        }
    }

    fn gzip(bytes: &[u8]) -> Vec<u8> {
        let mut encoder = GzEncoder::new(Vec::new(), Compression::fast());
        encoder.write_all(bytes).unwrap();
        encoder.finish().unwrap()
    }

    const WHOLE: [u8; 18] = [0, 0, 8, 2, 0, 0, 0, 2, 0, 0, 0, 3, 1, 2, 3, 4, 5, 6];

    #[test]
    fn raw_and_gzip_read_the_same() {
        let expected = Ok((vec![2, 3], vec![1, 2, 3, 4, 5, 6]));
        assert_eq!(parse(&WHOLE), expected);
        assert_eq!(parse(&gzip(&WHOLE)), expected);
        assert_eq!(parse(&[0, 0, 8, 1, 0, 0, 0, 0]), Ok((vec![0], vec![])));
    }

    #[test]
    fn refuses_with_expected_and_found() {
        let long = [&WHOLE[..], &[0]].concat();
        let rows: &[(&[u8], IdxProblem)] = &[
            (b"", IdxProblem::Foreign { found: vec![] }),
            (b"<htm", IdxProblem::Foreign { found: b"<htm".to_vec() }),
            (&[0, 0, 13, 1, 0, 0, 0, 1], IdxProblem::Foreign { found: vec![0, 0, 13, 1] }),
            (&[0, 0, 8, 0], IdxProblem::Foreign { found: vec![0, 0, 8, 0] }),
            (&[0, 0, 8, 5], IdxProblem::Foreign { found: vec![0, 0, 8, 5] }),
            (&WHOLE[..9], IdxProblem::Foreign { found: WHOLE[..9].to_vec() }),
            (&WHOLE[..17], IdxProblem::Truncated { expected: 6, found: 5 }),
            (&long, IdxProblem::TooLong { expected: 6 }),
            (
                &[0, 0, 8, 2, 255, 255, 255, 255, 255, 255, 255, 255],
                IdxProblem::TooLarge { dims: vec![u32::MAX as usize; 2], limit: MAX_BYTES },
            ),
        ];
        for (bytes, expected) in rows {
            assert_eq!(parse(bytes).as_ref(), Err(expected), "{bytes:?}");
            assert_eq!(parse(&gzip(bytes)).as_ref(), Err(expected), "{bytes:?} in gzip");
        }
    }

    #[test]
    fn a_cut_gzip_stream_is_truncated_and_a_damaged_one_broken() {
        let values: Vec<u8> = (0..0x4000u32).map(|i| (i * i % 251) as u8).collect();
        let packed = gzip(&[&[0, 0, 8, 1, 0, 0, 0x40, 0][..], &values].concat());
        let half = parse(&packed[..packed.len() / 2]);
        assert!(matches!(half, Err(IdxProblem::Truncated { expected: 0x4000, found }) if found < 0x4000));
        assert!(matches!(parse(&packed[..packed.len() - 3]), Err(IdxProblem::Gzip { .. })));
        let mut damaged = packed.clone();
        let checksum = damaged.len() - 6;
        damaged[checksum] ^= 1;
        assert!(matches!(parse(&damaged), Err(IdxProblem::Gzip { .. })), "{:?}", parse(&damaged));
    }

    proptest! {
        #[test]
        fn no_bytes_make_it_panic(
            mut bytes in proptest::collection::vec(any::<u8>(), 0..200),
            header in any::<bool>(),
            packed in any::<bool>(),
        ) {
            if header && bytes.len() >= 8 {
                bytes[..3].copy_from_slice(&[0, 0, 8]);
                bytes[3] %= 5;
                bytes[4..7].fill(0);
            }
            let bytes = if packed { gzip(&bytes) } else { bytes };
            if let Ok((dims, values)) = parse(&bytes) {
                prop_assert_eq!(dims.iter().product::<usize>(), values.len());
            }
        }

        #[test]
        fn every_cut_is_noticed(cut in 0..WHOLE.len()) {
            prop_assert!(parse(&WHOLE[..cut]).is_err());
            let packed = gzip(&WHOLE);
            prop_assert!(parse(&packed[..cut]).is_err());
        }
    }
}
