//! The arrays of a safetensors file, read one at a time: what a file holds may be more than memory does. `tensors.rs` writes them.

use super::error::CheckpointError;
use super::manifest::FileEntry;
use super::read::{self, unreadable};
use phalanx_tensor::Shape;
use serde::Deserialize;
use serde_json::Value;
use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, BufReader, Read};
use std::ops::Range;
use std::path::Path;

/// A longer header isn't read; safetensors' own limit.
const MAX_HEADER: u64 = 100_000_000;

/// One array, in the order of the file.
pub(super) struct ArrayEntry {
    pub(super) name: String,
    pub(super) shape: Shape,
    /// How many bytes of arrays that are passed over lie before it.
    pub(super) behind: u64,
}

/// What is done about arrays of integers and bools: counters, as PyTorch's batch norms have them, and masks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Wholes {
    /// They are an error.
    Refused,
    /// They are passed over.
    PassedOver,
}

impl ArrayEntry {
    pub(super) fn bytes(&self) -> u64 {
        4 * self.shape.count() as u64
    }
}

/// A file whose arrays are read one after the other.
pub(super) struct ArrayFile {
    file: BufReader<File>,
    header: Vec<u8>,
}

impl ArrayFile {
    /// Reads up to the first array.
    pub(super) fn open(folder: &Path, entry: &FileEntry) -> Result<ArrayFile, CheckpointError> {
        let path = folder.join(&entry.name);
        let mut file = BufReader::new(read::open(&path)?);
        let mut length = [0; 8];
        file.read_exact(&mut length).map_err(unreadable(&path))?;
        let length = u64::from_le_bytes(length);
        if length > MAX_HEADER.min(entry.bytes) {
            let reason = format!("its header is said to have {length} bytes");
            return Err(CheckpointError::Broken { path, reason });
        }
        let mut header = vec![0; length as usize];
        file.read_exact(&mut header).map_err(unreadable(&path))?;
        Ok(ArrayFile { file, header })
    }

    /// The header, which [`arrays_of`] understands.
    pub(super) fn take_header(&mut self) -> Vec<u8> {
        std::mem::take(&mut self.header)
    }

    /// Reads the bytes that come next.
    pub(super) fn read_bytes(
        &mut self,
        folder: &Path,
        entry: &FileEntry,
        into: &mut [u8],
    ) -> Result<(), CheckpointError> {
        let path = folder.join(&entry.name);
        self.file.read_exact(into).map_err(unreadable(&path))
    }

    /// Passes over what comes next.
    pub(super) fn skip(
        &mut self,
        folder: &Path,
        entry: &FileEntry,
        bytes: u64,
    ) -> Result<(), CheckpointError> {
        let path = folder.join(&entry.name);
        let bytes = i64::try_from(bytes).map_err(io::Error::other);
        bytes.and_then(|bytes| self.file.seek_relative(bytes)).map_err(unreadable(&path))
    }

    /// Reads the values that come next.
    pub(super) fn read(
        &mut self,
        folder: &Path,
        entry: &FileEntry,
        into: &mut [f32],
    ) -> Result<(), CheckpointError> {
        let mut bytes = [0; 1 << 16];
        for values in into.chunks_mut(bytes.len() / 4) {
            let bytes = &mut bytes[..4 * values.len()];
            self.read_bytes(folder, entry, bytes)?;
            let found = bytes.as_chunks::<4>().0;
            values.iter_mut().zip(found).for_each(|(value, &bytes)| *value = f32::from_le_bytes(bytes));
        }
        Ok(())
    }
}

#[derive(Deserialize)]
struct Place {
    dtype: String,
    shape: Vec<usize>,
    data_offsets: (u64, u64),
}

/// How many bytes a number of these types has, if they are integers or bools.
fn whole_size(dtype: &str) -> Option<u64> {
    match dtype {
        "BOOL" | "I8" | "U8" => Some(1),
        "I16" | "U16" => Some(2),
        "I32" | "U32" => Some(4),
        "I64" | "U64" => Some(8),
        _ => None,
    }
}

/// The arrays of float32 that the header of a file tells of. All arrays must follow each other and fill the file.
pub(super) fn arrays_of(
    header: &[u8],
    entry: &FileEntry,
    folder: &Path,
    wholes: Wholes,
) -> Result<Vec<ArrayEntry>, CheckpointError> {
    let broken = |reason: String| CheckpointError::Broken { path: folder.join(&entry.name), reason };
    let json = |error: serde_json::Error| broken(format!("its header makes no sense: {error}"));
    let told: BTreeMap<String, Value> = serde_json::from_slice(header).map_err(json)?;
    let mut found: Vec<(Range<u64>, String, Shape, bool)> = Vec::new();
    for (name, place) in told.into_iter().filter(|(name, _)| name != "__metadata__") {
        let Place { dtype, shape, data_offsets: (start, end) } =
            serde_json::from_value(place).map_err(json)?;
        let whole = whole_size(&dtype).filter(|_| wholes == Wholes::PassedOver);
        let size = whole.or((dtype == "F32").then_some(4));
        let Some((shape, size)) = Shape::try_new(&shape).zip(size) else {
            return Err(broken(format!("{name} is no array of float32 that can be read")));
        };
        if end.checked_sub(start) != Some(size * shape.count() as u64) {
            return Err(broken(format!("{name} of shape {shape} can't be the bytes {start} to {end}")));
        }
        found.push((start..end, name, shape, whole.is_some()));
    }
    // Empty ones first where they share a place.
    found.sort_by_key(|(at, ..)| (at.start, at.end));
    let (mut end, mut behind) = (0, 0);
    let mut arrays = Vec::new();
    for (at, name, shape, is_whole) in found {
        if at.start != end {
            return Err(broken(format!("{name} begins at byte {}, and not at {end}", at.start)));
        }
        end = at.end;
        if is_whole {
            behind += at.end - at.start;
        } else {
            arrays.push(ArrayEntry { name, shape, behind: std::mem::take(&mut behind) });
        }
    }
    if (8 + header.len() as u64).checked_add(end) != Some(entry.bytes) {
        return Err(broken(format!(
            "{} bytes of header and {end} of arrays don't fill its {}",
            header.len(),
            entry.bytes
        )));
    }
    Ok(arrays)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::checkpoint::manifest::Holds;
    use proptest::prelude::*;

    fn arrays(header: &str, data: u64) -> Result<Vec<ArrayEntry>, CheckpointError> {
        let bytes = 8 + header.len() as u64 + data;
        let (name, crc32) = ("model.safetensors".into(), Vec::new());
        let entry = FileEntry { name, holds: Holds::Model, bytes, chunk: 1, crc32 };
        arrays_of(header.as_bytes(), &entry, Path::new("step-1"), Wholes::Refused)
    }

    #[test]
    fn arrays_come_in_the_order_of_their_bytes() {
        let header = r#"{"__metadata__":{"format":"pt"},
            "a":{"dtype":"F32","shape":[2,3],"data_offsets":[4,28]},
            "b":{"dtype":"F32","shape":[],"data_offsets":[0,4]},
            "c":{"dtype":"F32","shape":[0],"data_offsets":[4,4]}}   "#;
        let found = arrays(header, 28).unwrap();
        let names: Vec<&str> = found.iter().map(|array| array.name.as_str()).collect();
        assert_eq!(names, ["b", "c", "a"]);
        assert_eq!(found[2].shape, Shape::new(&[2, 3]));
    }

    #[test]
    fn what_no_writer_makes_is_an_error() {
        let array = |dtype: &str, shape: &str, start: u64, end: u64| {
            format!(r#"{{"a":{{"dtype":"{dtype}","shape":{shape},"data_offsets":[{start},{end}]}}}}"#)
        };
        for (header, data, why) in [
            (array("F32", "[2]", 0, 8), 9, "don't fill"),
            (array("F32", "[2]", 4, 12), 12, "begins at byte 4"),
            (array("F32", "[2]", 8, 0), 8, "can't be the bytes 8 to 0"),
            (array("F32", "[3]", 0, 8), 8, "can't be the bytes"),
            (array("F16", "[4]", 0, 8), 8, "no array of float32"),
            (array("F32", "[4294967296,4294967296]", 0, 8), 8, "no array of float32"),
            ("[]".into(), 0, "makes no sense"),
        ] {
            let error = arrays(&header, data).map(|_| ()).unwrap_err().to_string();
            assert!(error.contains(why), "{header}: {error}");
        }
    }

    proptest! {
        #[test]
        fn no_header_is_more_than_an_error(header in "[\\[{\"a:F32,0-9}\\]]{0,60}", data in 0u64..20) {
            let _ = arrays(&header, data);
        }
    }
}
