//! MNIST and the sets that are published in its form: 28x28 grey images of ten classes.

use crate::bytes::{ByteSamples, Kept, Making};
use crate::dataset::{BatchBuffers, Dataset, Target};
use crate::error::{Error, IdxProblem, Result};
use crate::idx::{IdxReader, Plain, plain, read_values};
use crate::pixels::Pixels;
use crate::transform::SAME;
use phalanx_tensor::SampleImages;
use std::borrow::Cow;
use std::io::Read;
use std::path::{Path, PathBuf};

const SIDE: usize = 28;
const CLASSES: usize = 10;

/// Which half of a dataset.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Part {
    /// The samples to learn from.
    Train,
    /// The samples to be judged by.
    Test,
}

impl Part {
    fn images(self) -> &'static str {
        match self {
            Part::Train => "train-images-idx3-ubyte",
            Part::Test => "t10k-images-idx3-ubyte",
        }
    }

    fn labels(self) -> &'static str {
        match self {
            Part::Train => "train-labels-idx1-ubyte",
            Part::Test => "t10k-labels-idx1-ubyte",
        }
    }
}

/// How a pixel from 0 to 255 becomes a number: `(pixel / 255 - mean) / std`, computed in that order in `f32`, as
/// torchvision's `ToTensor` and `Normalize` do.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Scaling {
    /// What becomes 0.
    pub mean: f32,
    /// What becomes a distance of 1.
    pub std: f32,
}

impl Scaling {
    /// From 0 to 1.
    pub const UNIT: Scaling = Scaling { mean: 0.0, std: 1.0 };
    /// Mean 0 and deviation 1 over the training images of MNIST.
    pub const MNIST: Scaling = Scaling { mean: 0.1307, std: 0.3081 };
    /// Mean 0 and deviation 1 over the training images of Fashion-MNIST.
    pub const FASHION_MNIST: Scaling = Scaling { mean: 0.2860, std: 0.3530 };

    /// The result for each pixel value.
    fn lookup(self) -> Box<[f32; 256]> {
        Box::new(std::array::from_fn(|pixel| (pixel as f32 / 255.0 - self.mean) / self.std))
    }
}

/// Images of shape (1, 28, 28) with labels from 0 to 9.
///
/// ```
/// use phalanx_data::{Dataset, Mnist, Part, Scaling};
/// let mini = Mnist::mini(Part::Train, Scaling::MNIST);
/// assert_eq!((mini.len(), mini.input_dims()), (2000, &[1, 28, 28][..]));
/// ```
#[derive(Debug)]
pub struct Mnist {
    pixels: Pixels,
    labels: Vec<u8>,
    lookup: Box<[f32; 256]>,
}

impl Mnist {
    /// Reads one half from the folder that holds its two files, each raw or with `.gz` to its name.
    ///
    /// # Errors
    /// A file is missing, isn't a whole IDX file, has other sizes, or holds a label above 9. The error names it, what was
    /// expected and what was found.
    pub fn open(folder: &Path, part: Part, scaling: Scaling) -> Result<Mnist> {
        let images = IdxReader::open(&in_folder(folder, part.images()))?;
        let labels = IdxReader::open(&in_folder(folder, part.labels()))?;
        Mnist::read(images, labels, scaling)
    }

    /// The first 2,000 training and the first 500 test images of MNIST, which are part of this library.
    pub fn mini(part: Part, scaling: Scaling) -> Mnist {
        let open = |name| {
            let bytes = crate::catalog::embedded(name).expect("the library holds the files of mnist-mini");
            IdxReader::new(Path::new(name), plain(bytes).expect("memory can be read"))
        };
        open(part.images())
            .and_then(|images| Mnist::read(images, open(part.labels())?, scaling))
            .expect("the files of mnist-mini in this library are whole")
    }

    /// The label of each sample.
    pub fn labels(&self) -> &[u8] {
        &self.labels
    }

    fn read(
        images: IdxReader<Plain<'static>>,
        labels: IdxReader<Plain<'static>>,
        scaling: Scaling,
    ) -> Result<Mnist> {
        let n = match *images.dims() {
            [n, SIDE, SIDE] => n,
            _ => return Err(wrong_sizes(&images, format!("[N, {SIDE}, {SIDE}]"))),
        };
        if *labels.dims() != [n] {
            return Err(wrong_sizes(&labels, format!("[{n}], a label for each of the images")));
        }
        let judge = |labels: &[u8]| labels.iter().position(|&label| usize::from(label) >= CLASSES);
        let path_of_labels = labels.path().to_path_buf();
        let (_, labels) = read_values(labels)?;
        if let Some(sample) = judge(&labels) {
            let problem = IdxProblem::Label { sample, found: labels[sample], classes: CLASSES };
            return Err(Error::Idx { path: path_of_labels, problem });
        }
        Ok(Mnist { pixels: Pixels::read(images)?, labels, lookup: scaling.lookup() })
    }
}

impl Dataset for Mnist {
    fn len(&self) -> usize {
        self.pixels.len()
    }

    fn input_dims(&self) -> &[usize] {
        &[1, SIDE, SIDE]
    }

    fn target(&self) -> Target<'_> {
        Target::Classes(CLASSES)
    }

    fn batch(&self, indices: &[usize], into: &mut BatchBuffers) -> Result<()> {
        for (image, &i) in into.inputs().chunks_exact_mut(SIDE * SIDE).zip(indices) {
            self.pixels.write(i, &self.lookup, image);
        }
        ByteSamples::labels(self, indices, into.labels())
    }

    fn as_bytes(&self) -> Option<&dyn ByteSamples> {
        Some(self)
    }
}

impl ByteSamples for Mnist {
    fn making(&self) -> Making {
        Making::Images { how: SampleImages::whole([1, SIDE, SIDE]), table: self.lookup.to_vec(), seed: 0 }
    }

    fn kept(&self) -> Option<Kept> {
        Some(Kept { making: self.making(), bytes: self.len() * SIDE * SIDE })
    }

    fn all(&self) -> Result<Cow<'_, [u8]>> {
        let mut all = vec![0; self.len() * SIDE * SIDE];
        for (i, image) in all.chunks_exact_mut(SIDE * SIDE).enumerate() {
            self.pixels.write(i, &SAME[0], image);
        }
        Ok(all.into())
    }

    fn write(&self, indices: &[usize], into: &mut BatchBuffers) -> Result<()> {
        let (bytes, labels, _) = into.bytes_and_labels();
        for (image, &i) in bytes.chunks_exact_mut(SIDE * SIDE).zip(indices) {
            self.pixels.write(i, &SAME[0], image);
        }
        ByteSamples::labels(self, indices, labels)
    }

    fn labels(&self, indices: &[usize], into: &mut [i64]) -> Result<()> {
        into.iter_mut().zip(indices).for_each(|(label, &i)| *label = i64::from(self.labels[i]));
        Ok(())
    }
}

fn wrong_sizes<R: Read>(file: &IdxReader<R>, expected: String) -> Error {
    file.problem(IdxProblem::Dims { expected, found: file.dims().to_vec() })
}

/// The raw file if it is there, else the compressed one; if neither is, errors name the raw one.
fn in_folder(folder: &Path, name: &str) -> PathBuf {
    let raw = folder.join(name);
    let packed = folder.join(format!("{name}.gz"));
    if !raw.exists() && packed.exists() { packed } else { raw }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn idx(dims: &[u32], values: &[u8]) -> IdxReader<Plain<'static>> {
        let mut file = vec![0, 0, 8, dims.len() as u8];
        dims.iter().for_each(|size| file.extend_from_slice(&size.to_be_bytes()));
        file.extend_from_slice(values);
        IdxReader::new(Path::new("some-file"), Box::new(std::io::Cursor::new(file)) as Plain<'static>)
            .unwrap()
    }

    #[test]
    fn files_that_do_not_fit_each_other_are_refused() {
        let images = || idx(&[2, 28, 28], &[0; 2 * 784]);
        let rows = [
            (
                idx(&[2, 14, 56], &[0; 2 * 784]),
                idx(&[2], &[1, 2]),
                "expected [N, 28, 28], found: [2, 14, 56]",
            ),
            (idx(&[4], &[1, 2, 3, 4]), idx(&[4], &[1, 2, 3, 4]), "expected [N, 28, 28], found: [4]"),
            (images(), idx(&[3], &[1, 2, 3]), "expected [2], a label for each of the images, found: [3]"),
            (
                images(),
                idx(&[2], &[9, 10]),
                "label of sample 1 out of range: expected less than 10, found: 10",
            ),
        ];
        for (images, labels, expected) in rows {
            let message = Mnist::read(images, labels, Scaling::UNIT).unwrap_err().to_string();
            assert!(message.contains(expected), "{message}");
            assert!(message.starts_with("some-file: ") && message.contains("\nhint: "), "{message}");
        }
        assert_eq!(Mnist::read(images(), idx(&[2], &[9, 0]), Scaling::UNIT).unwrap().labels(), [9, 0]);
    }

    /// The numbers are PyTorch's, bit for bit: `torch.arange(256).float().div(255).sub(0.1307).div(0.3081)`, whose bit
    /// patterns `b` are folded by `h = 31 * h + b` modulo 2**64.
    #[test]
    fn pixels_scale_bit_for_bit_as_in_pytorch() {
        let lookup = Scaling::MNIST.lookup();
        for (pixel, expected) in [(0, 0xbed9_3271), (77, 0x3f0e_4ce9), (128, 0x3f9a_3d7a), (255, 0x4034_933d)]
        {
            assert_eq!(lookup[pixel].to_bits(), expected, "{pixel}: {}", lookup[pixel]);
        }
        let fold = |h: u64, v: &f32| h.wrapping_mul(31).wrapping_add(u64::from(v.to_bits()));
        assert_eq!(lookup.iter().fold(0, fold), 0xb66f_5c0a_9b41_e22f);
        assert_eq!((Scaling::UNIT.lookup()[0], Scaling::UNIT.lookup()[255]), (0.0, 1.0));
    }
}
