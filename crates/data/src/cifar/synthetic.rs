//! Files in the form of CIFAR with images that a network can learn: for tests and benchmarks where the real ones are out of
//! reach.

use super::{CifarSet, IMAGE, SIDE};
use crate::error::{Error, Result};
use crate::mnist::Part;
use phalanx_tensor::Philox;
use std::fs::{self, File};
use std::io::{BufWriter, Write};
use std::path::Path;

/// Writes all files of the binary format, each with `per_file` images, into `folder`, which is made if need be. Every class
/// has waves of its own direction, length and colour, under noise; classes take turns.
///
/// # Errors
/// A file can't be written.
pub fn write_synthetic_cifar(folder: &Path, set: CifarSet, per_file: usize) -> Result<()> {
    fs::create_dir_all(folder).map_err(Error::io("create", folder))?;
    let patterns: Vec<Vec<u8>> = (0..set.classes()).map(pattern).collect();
    let names = [Part::Train, Part::Test].into_iter().flat_map(|part| set.files(part));
    for (number, name) in names.enumerate() {
        let path = folder.join(format!("{name}.bin"));
        let mut file = BufWriter::new(File::create(&path).map_err(Error::io("create", &path))?);
        let mut record = vec![0; set.header().0 + IMAGE];
        for i in 0..per_file {
            let class = i % set.classes();
            record[..set.header().0].fill((class / 5).min(19) as u8);
            record[set.header().1] = class as u8;
            let noise = Philox::new(number as u64, i as u64);
            let pixels = record[set.header().0..].chunks_exact_mut(16).zip(patterns[class].chunks_exact(16));
            for (block, (out, pattern)) in pixels.enumerate() {
                let words = noise.block(block as u64).map(u32::to_le_bytes);
                for ((out, pattern), noise) in out.iter_mut().zip(pattern).zip(words.as_flattened()) {
                    *out = pattern + noise / 4;
                }
            }
            file.write_all(&record).map_err(Error::io("write", &path))?;
        }
        file.flush().map_err(Error::io("write", &path))?;
    }
    Ok(())
}

/// Waves from 0 to 191, which leaves room for the noise.
fn pattern(class: usize) -> Vec<u8> {
    // Directions by the golden angle, which brings no two classes close.
    let angle = class as f64 * 2.399_963;
    let length = 6.0 + (class % 4) as f64 * 3.0;
    let (dx, dy) = (angle.cos() / length, angle.sin() / length);
    let value = |i: usize| {
        let (colour, y, x) = (i / (SIDE * SIDE), i / SIDE % SIDE, i % SIDE);
        let wave = (std::f64::consts::TAU * (x as f64 * dx + y as f64 * dy)).sin();
        let strength = if class % 3 == colour { 1.0 } else { 0.4 };
        (95.5 * (1.0 + strength * wave)) as u8
    };
    (0..IMAGE).map(value).collect()
}
