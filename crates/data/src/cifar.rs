//! CIFAR-10 and CIFAR-100: 32x32 colour images, in the binary and in the Python format that they are published in.
//!
//! The binary format is a row of records, each a label (for CIFAR-100 a coarse and a fine one) and the 3072 bytes of the three
//! planes, which is how [`Images`] gives them out: the files are mapped, and no image is copied. The Python format
//! (`cifar/pickled.rs`) holds the same in pickles.

mod names;
mod pickled;
mod synthetic;

pub use synthetic::write_synthetic_cifar;

use crate::error::{CifarProblem, Error, Result};
use crate::images::{COLOURS, Image, Images};
use crate::mapped::Bytes;
use crate::mnist::Part;
use crate::pictures::BadImages;
use std::path::{Path, PathBuf};

const SIDE: usize = 32;
/// Bytes of an image.
const IMAGE: usize = COLOURS * SIDE * SIDE;
/// No file is larger when unpacked: ten times the largest published one.
const MAX_BYTES: u64 = 1 << 31;

/// Which set, and which of its labels.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CifarSet {
    /// 10 classes.
    Ten,
    /// 100 classes.
    Hundred,
    /// The images of the 100 classes, as 20 classes of 5.
    HundredCoarse,
}

impl CifarSet {
    fn classes(self) -> usize {
        match self {
            CifarSet::Ten => 10,
            CifarSet::Hundred => 100,
            CifarSet::HundredCoarse => 20,
        }
    }

    /// The names of a part's files in the Python format; those of the binary one end in `.bin`.
    fn files(self, part: Part) -> &'static [&'static str] {
        match (self, part) {
            (CifarSet::Ten, Part::Train) => {
                &["data_batch_1", "data_batch_2", "data_batch_3", "data_batch_4", "data_batch_5"]
            }
            (CifarSet::Ten, Part::Test) => &["test_batch"],
            (_, Part::Train) => &["train"],
            (_, Part::Test) => &["test"],
        }
    }

    /// Bytes before an image, and which of them is the label.
    fn header(self) -> (usize, usize) {
        match self {
            CifarSet::Ten => (1, 0),
            CifarSet::Hundred => (2, 1),
            CifarSet::HundredCoarse => (2, 0),
        }
    }

    /// What the Python format calls the labels.
    fn key(self) -> &'static str {
        match self {
            CifarSet::Ten => "labels",
            CifarSet::Hundred => "fine_labels",
            CifarSet::HundredCoarse => "coarse_labels",
        }
    }
}

/// Images of 3 planes of 32x32, with a label each.
pub struct Cifar {
    set: CifarSet,
    files: Vec<Records>,
    /// Of all files, one after the other.
    labels: Vec<u8>,
}

/// The images of a file.
struct Records {
    path: PathBuf,
    bytes: Bytes,
    /// Bytes before each image.
    header: usize,
    n: usize,
}

impl Cifar {
    /// Maps or reads one part from the folder that holds its files: the binary ones (raw, or with `.gz` to their names), else
    /// those of the Python format.
    ///
    /// # Errors
    /// A file is missing, has the length of no whole number of images, is another pickle, or has a label of no class; the last
    /// one isn't looked for if bad images are to be replaced.
    pub fn open(folder: &Path, set: CifarSet, part: Part, bad: BadImages) -> Result<Cifar> {
        let mut cifar = Cifar { set, files: Vec::new(), labels: Vec::new() };
        let pickled = set.files(part).iter().any(|name| folder.join(name).exists());
        for name in set.files(part) {
            let raw = folder.join(format!("{name}.bin"));
            let packed = folder.join(format!("{name}.bin.gz"));
            match (raw.exists(), packed.exists()) {
                (false, true) => cifar.add_binary(packed)?,
                (false, false) if pickled => cifar.add_pickled(folder.join(name))?,
                _ => cifar.add_binary(raw)?,
            }
        }
        if bad == BadImages::Refuse {
            (0..cifar.len()).try_for_each(|i| cifar.label(i).map(drop))?;
        }
        Ok(cifar)
    }

    fn add_binary(&mut self, path: PathBuf) -> Result<()> {
        let bytes = Bytes::open(&path, MAX_BYTES)?;
        let (header, label) = self.set.header();
        let record = header + IMAGE;
        if bytes.is_empty() || bytes.len() % record != 0 {
            let problem = CifarProblem::Length { found: bytes.len(), record };
            return Err(Error::Cifar { path, problem });
        }
        let n = bytes.len() / record;
        self.labels.extend(bytes.chunks_exact(record).map(|record| record[label]));
        self.files.push(Records { path, bytes, header, n });
        Ok(())
    }

    fn add_pickled(&mut self, path: PathBuf) -> Result<()> {
        let bytes = Bytes::open(&path, MAX_BYTES)?;
        let (images, labels) = match pickled::read(&bytes, self.set.key()) {
            Ok(whole) => whole,
            Err(problem) => return Err(Error::Cifar { path, problem }),
        };
        let n = labels.len();
        self.labels.extend(labels);
        self.files.push(Records { path, bytes: Bytes::Held(images), header: 0, n });
        Ok(())
    }

    /// The file of image `i`, and its number there.
    fn find(&self, i: usize) -> (&Records, usize) {
        let mut left = i;
        for file in &self.files {
            if left < file.n {
                return (file, left);
            }
            left -= file.n;
        }
        panic!("Cifar: image {i} of {}", self.labels.len());
    }
}

impl Images for Cifar {
    fn len(&self) -> usize {
        self.labels.len()
    }

    fn classes(&self) -> usize {
        self.set.classes()
    }

    fn size(&self) -> Option<[usize; 2]> {
        Some([SIDE, SIDE])
    }

    fn label(&self, i: usize) -> Result<usize> {
        let (found, classes) = (self.labels[i], self.set.classes());
        if usize::from(found) < classes {
            return Ok(usize::from(found));
        }
        let (file, sample) = self.find(i);
        let problem = CifarProblem::Label { sample, found: found.into(), classes };
        Err(Error::Cifar { path: file.path.clone(), problem })
    }

    fn image<'a>(&'a self, i: usize, _room: &'a mut Vec<u8>) -> Result<Image<'a>> {
        let (file, i) = self.find(i);
        let bytes = &file.bytes[i * (file.header + IMAGE) + file.header..][..IMAGE];
        Ok(Image { height: SIDE, width: SIDE, bytes })
    }
}

#[cfg(test)]
mod tests;
