//! Any file as text to be foretold, byte by byte.

use crate::bytes::{ByteSamples, Kept, Making};
use crate::dataset::{BatchBuffers, Dataset, Input, Target};
use crate::error::{Error, Result};
use crate::mapped::Bytes;
use crate::mnist::Part;
use std::borrow::Cow;
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

/// How many different bytes there are.
pub const BYTES: usize = 256;

/// One in so many bytes, those at the end, is kept from training.
const HELD_OUT: usize = 10;

/// No compressed text may be longer.
const MOST_BYTES: u64 = 1 << 32;

/// A part of a file, whose bytes are the words of a model: a sample is a window of so many bytes, and its target is the same
/// window one byte later. Windows follow each other, so each byte is foretold once an epoch, but for those at the end that fill no
/// window. The last tenth of the file, and at least one window, is kept from training and is what a model is judged by.
///
/// ```
/// use phalanx_data::{BatchBuffers, Dataset, Part, Text};
///
/// let path = std::env::temp_dir().join(format!("text-{}", std::process::id()));
/// std::fs::write(&path, "the more the merrier")?;
/// let text = Text::open(&path, Part::Train, 8)?;
/// let mut buffers = BatchBuffers::new();
/// buffers.fit(&text, 1);
/// text.batch(&[0], &mut buffers)?;
/// let bytes = |ids: &[i64]| ids.iter().map(|&id| id as u8 as char).collect::<String>();
/// assert_eq!((bytes(buffers.ids()), bytes(buffers.labels())), ("the more".into(), "he more ".into()));
/// # std::fs::remove_file(path)?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone)]
pub struct Text {
    bytes: Arc<Bytes>,
    part: Range<usize>,
    dims: [usize; 1],
}

impl Text {
    /// A part of the file at `path`, raw or compressed by gzip, in windows of `window` bytes.
    ///
    /// # Errors
    /// The file can't be read, is too short for a window in each part, or is compressed and unpacks to more than 4 GiB.
    pub fn open(path: &Path, part: Part, window: usize) -> Result<Text> {
        let [train, test] = Text::parts(path, window)?;
        Ok(match part {
            Part::Train => train,
            Part::Test => test,
        })
    }

    /// Both parts.
    pub(crate) fn parts(path: &Path, window: usize) -> Result<[Text; 2]> {
        let bytes = Arc::new(Bytes::open(path, MOST_BYTES)?);
        let (window, len) = (window.max(1), bytes.len());
        // A window needs the byte behind it, too.
        let needed = window.saturating_add(1).saturating_mul(2);
        if len < needed {
            return Err(Error::ShortText { path: path.to_path_buf(), found: len, needed, window });
        }
        let held_out = (len / HELD_OUT).max(window + 1);
        let middle = len - held_out;
        Ok([0..middle, middle..len].map(|part| Text { bytes: Arc::clone(&bytes), part, dims: [window] }))
    }
}

impl Dataset for Text {
    fn len(&self) -> usize {
        (self.part.len() - 1) / self.dims[0]
    }

    fn input_dims(&self) -> &[usize] {
        &self.dims
    }

    fn input(&self) -> Input {
        Input::Ids(BYTES)
    }

    fn target(&self) -> Target<'_> {
        Target::Sequence { len: self.dims[0], classes: BYTES }
    }

    fn batch(&self, indices: &[usize], into: &mut BatchBuffers) -> Result<()> {
        let [window] = self.dims;
        let (ids, labels) = into.sequences();
        for ((ids, labels), &i) in
            ids.chunks_exact_mut(window).zip(labels.chunks_exact_mut(window)).zip(indices)
        {
            let bytes = &self.bytes[self.part.start + i * window..][..window + 1];
            ids.iter_mut().zip(bytes).for_each(|(id, &byte)| *id = i64::from(byte));
            labels.iter_mut().zip(&bytes[1..]).for_each(|(label, &byte)| *label = i64::from(byte));
        }
        Ok(())
    }

    fn as_bytes(&self) -> Option<&dyn ByteSamples> {
        Some(self)
    }
}

impl ByteSamples for Text {
    /// Each window with the byte behind it.
    fn making(&self) -> Making {
        let [window] = self.dims;
        Making::Windows { window, stride: window + 1 }
    }

    fn kept(&self) -> Option<Kept> {
        let [window] = self.dims;
        Some(Kept { making: Making::Windows { window, stride: window }, bytes: self.part.len() })
    }

    fn all(&self) -> Result<Cow<'_, [u8]>> {
        Ok(self.bytes[self.part.clone()].into())
    }

    fn write(&self, indices: &[usize], into: &mut BatchBuffers) -> Result<()> {
        let [window] = self.dims;
        for (bytes, &i) in into.bytes().chunks_exact_mut(window + 1).zip(indices) {
            bytes.copy_from_slice(&self.bytes[self.part.start + i * window..][..window + 1]);
        }
        Ok(())
    }

    fn labels(&self, _: &[usize], _: &mut [i64]) -> Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A file of `len` bytes that count up, until the value is dropped.
    struct File(std::path::PathBuf);

    impl File {
        fn new(name: &str, len: usize) -> File {
            let path = std::env::temp_dir().join(format!("phalanx-text-{name}-{}", std::process::id()));
            std::fs::write(&path, (0..len).map(|i| i as u8).collect::<Vec<u8>>()).unwrap();
            File(path)
        }
    }

    impl Drop for File {
        fn drop(&mut self) {
            std::fs::remove_file(&self.0).unwrap();
        }
    }

    #[test]
    fn each_byte_of_whole_windows_is_foretold_once_and_none_in_both_parts() {
        let file = File::new("windows", 250);
        for (window, train, test) in [(1, 224, 24), (8, 28, 3), (24, 9, 1), (100, 1, 1)] {
            let parts = Text::parts(&file.0, window).unwrap();
            assert_eq!(parts.each_ref().map(Text::len), [train, test], "windows of {window}");
            let mut foretold = Vec::new();
            for text in parts {
                let all: Vec<usize> = (0..text.len()).collect();
                let mut buffers = BatchBuffers::new();
                buffers.fit(&text, all.len());
                text.batch(&all, &mut buffers).unwrap();
                let ids = buffers.ids().to_vec();
                assert!(ids.iter().zip(&*buffers.labels()).all(|(id, label)| id + 1 == *label));
                foretold.extend_from_slice(buffers.labels());
            }
            let count = foretold.len();
            foretold.sort_unstable();
            foretold.dedup();
            assert_eq!((foretold.len(), count), ((train + test) * window, (train + test) * window));
        }
    }

    #[test]
    fn a_file_without_a_window_for_each_part_is_refused() {
        let file = File::new("short", 17);
        assert!(Text::parts(&file.0, 7).is_ok());
        let error = Text::parts(&file.0, 8).err().unwrap().to_string();
        assert!(error.contains("17 bytes") && error.contains("at least 18"), "{error}");
    }
}
