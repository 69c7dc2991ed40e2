//! A safetensors file, written from arrays where they lie, in row-major order, with a checksum for every chunk. Reading one is
//! [`phalanx_nn::Weights`]' affair, and that of `arrays.rs`, which reads one array at a time.
//!
//! Format: the length of the header in eight bytes, the header as JSON (name, type, shape and place of every array), the
//! arrays one after the other, all little-endian. Source: <https://github.com/huggingface/safetensors#format>

use super::disk::DiskFile;
use super::manifest::CHUNK;
use super::snapshot::Array;
use phalanx_tensor::Shape;
use serde_json::{Map, Value, json};
use std::io;

/// The length of a file and the checksums of its chunks.
pub(super) struct Sums {
    pub(super) bytes: u64,
    pub(super) crc32: Vec<u32>,
}

/// Writes and syncs a file of these arrays.
pub(super) fn write(file: &mut dyn DiskFile, arrays: &[Array<'_>]) -> io::Result<Sums> {
    let shapes = arrays.iter().map(|array| (array.name.as_str(), array.layout.shape(array.index)));
    let mut chunks = Chunks::begin(file, &header(shapes))?;
    let mut bytes = [0; 4096];
    for array in arrays {
        let values = array.layout.row_major(array.index, array.flat);
        for values in values.chunks(bytes.len() / 4) {
            let into = bytes.as_chunks_mut::<4>().0;
            into.iter_mut().zip(values).for_each(|(bytes, value)| *bytes = value.to_le_bytes());
            chunks.put(&bytes[..4 * values.len()])?;
        }
    }
    chunks.finish()
}

/// What stands before arrays of these names and shapes, which follow in this order.
pub(super) fn header<'a>(arrays: impl Iterator<Item = (&'a str, &'a Shape)>) -> String {
    let mut header = Map::new();
    // What PyTorch's users of the format look for.
    header.insert("__metadata__".into(), json!({ "format": "pt" }));
    let mut at = 0;
    for (name, shape) in arrays {
        let end = at + 4 * shape.count();
        let place = json!({ "dtype": "F32", "shape": shape.dims(), "data_offsets": [at, end] });
        header.insert(name.to_owned(), place);
        at = end;
    }
    let mut text = Value::Object(header).to_string();
    // So that the arrays lie as their type likes it when the file is mapped into memory.
    text.extend(std::iter::repeat_n(' ', text.len().next_multiple_of(8) - text.len()));
    text
}

/// Cuts what is put into it into chunks.
pub(super) struct Chunks<'a> {
    file: &'a mut dyn DiskFile,
    chunk: Vec<u8>,
    sums: Sums,
}

impl<'a> Chunks<'a> {
    /// Begins a file with this header.
    pub(super) fn begin(file: &'a mut dyn DiskFile, header: &str) -> io::Result<Chunks<'a>> {
        let sums = Sums { bytes: 0, crc32: Vec::new() };
        let mut chunks = Chunks { file, chunk: Vec::with_capacity(CHUNK), sums };
        chunks.put(&(header.len() as u64).to_le_bytes())?;
        chunks.put(header.as_bytes())?;
        Ok(chunks)
    }

    /// Syncs the file.
    pub(super) fn finish(mut self) -> io::Result<Sums> {
        self.flush()?;
        self.file.sync()?;
        Ok(self.sums)
    }

    pub(super) fn put(&mut self, mut bytes: &[u8]) -> io::Result<()> {
        while !bytes.is_empty() {
            let (now, later) = bytes.split_at(bytes.len().min(CHUNK - self.chunk.len()));
            self.chunk.extend_from_slice(now);
            if self.chunk.len() == CHUNK {
                self.flush()?;
            }
            bytes = later;
        }
        Ok(())
    }

    fn flush(&mut self) -> io::Result<()> {
        if !self.chunk.is_empty() {
            self.file.write(&self.chunk)?;
            self.sums.bytes += self.chunk.len() as u64;
            self.sums.crc32.push(crc32fast::hash(&self.chunk));
            self.chunk.clear();
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use phalanx_nn::Weights;
    use phalanx_tensor::{Layout, Order};

    impl DiskFile for Vec<u8> {
        fn write(&mut self, bytes: &[u8]) -> io::Result<()> {
            self.extend_from_slice(bytes);
            Ok(())
        }

        fn sync(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn a_file_reads_back_as_weights_and_its_sums_are_those_of_its_chunks() {
        let large: Vec<f32> = (0..CHUNK / 2).map(|i| i as f32 * 0.5).collect();
        let kernels: Vec<f32> = (0..8).map(|i| i as f32).collect();
        let row_major = |dims: &[usize]| Layout::new(&[Shape::new(dims)]);
        // (O, I, KH, KW), the first running fastest in memory, then the second.
        let taps = Layout::ordered([([2, 2, 1, 2].into(), Order::Taps)]);
        let rows: [(&str, Layout, &[f32], &[f32]); 5] = [
            ("b.weight", row_major(&[2, CHUNK / 4]), &large, &large),
            ("a\"odd\".name", row_major(&[1, 3]), &[1.0, f32::NAN, -0.0], &[1.0, f32::NAN, -0.0]),
            ("empty", row_major(&[0]), &[], &[]),
            ("step", row_major(&[]), &[7.0], &[7.0]),
            ("kernels", taps, &kernels, &[0.0, 4.0, 2.0, 6.0, 1.0, 5.0, 3.0, 7.0]),
        ];
        let arrays: Vec<_> = rows
            .iter()
            .map(|(name, layout, flat, _)| Array { name: (*name).to_owned(), layout, index: 0, flat })
            .collect();
        let mut file = Vec::new();
        let sums = write(&mut file, &arrays).unwrap();
        assert_eq!(sums.bytes, file.len() as u64);
        assert_eq!(sums.crc32, file.chunks(CHUNK).map(crc32fast::hash).collect::<Vec<_>>());
        let header = u64::from_le_bytes(file[..8].try_into().unwrap());
        assert_eq!(header % 8, 0, "arrays are aligned");
        let read = Weights::from_bytes(&file).unwrap();
        for (name, layout, _, want) in &rows {
            let (found, read) = read.get(name).unwrap();
            let bits = |values: &[f32]| values.iter().map(|v| v.to_bits()).collect::<Vec<_>>();
            assert_eq!((found, bits(read)), (layout.shape(0), bits(want)), "{name}");
        }
    }
}
