//! Samples as the bytes that they are kept in, for devices that make the numbers of a batch themselves.

use crate::dataset::BatchBuffers;
use crate::error::Result;
use phalanx_tensor::SampleImages;
use std::borrow::Cow;

/// Samples that are bytes before they are numbers: a quarter of them to bring to a GPU, which makes the rest of it, or nothing at all
/// where they lie there already. [`Dataset::as_bytes`](crate::Dataset::as_bytes) tells of them. What comes out is what
/// [`Dataset::batch`](crate::Dataset::batch) writes, to the bit.
pub trait ByteSamples: Send + Sync {
    /// What makes a sample of the bytes that [`ByteSamples::write`] writes for it.
    fn making(&self) -> Making;

    /// The same of all samples as they are kept, where a device can do everything that is done to them.
    fn kept(&self) -> Option<Kept>;

    /// The bytes of all samples as they are kept, one after the other.
    ///
    /// # Errors
    /// As [`Dataset::batch`](crate::Dataset::batch).
    fn all(&self) -> Result<Cow<'_, [u8]>>;

    /// Writes the bytes of the samples `indices` into [`BatchBuffers::bytes`], which is sized for them, and their labels.
    ///
    /// # Errors
    /// As [`Dataset::batch`](crate::Dataset::batch).
    fn write(&self, indices: &[usize], into: &mut BatchBuffers) -> Result<()>;

    /// Writes their labels alone, where each sample has one; else there is no room for any, and nothing to do.
    ///
    /// # Errors
    /// As [`Dataset::batch`](crate::Dataset::batch).
    fn labels(&self, indices: &[usize], into: &mut [i64]) -> Result<()>;
}

/// What makes a sample of bytes.
#[derive(Clone, Debug, PartialEq)]
pub enum Making {
    /// An image of f32 with a label.
    Images {
        /// How it is cut out.
        how: SampleImages,
        /// The number that each byte of each channel becomes: 256 a channel.
        table: Vec<f32>,
        /// What random changes are a function of, besides the epoch and the sample.
        seed: u64,
    },
    /// Ids, and as labels the same one byte later.
    Windows {
        /// How many ids.
        window: usize,
        /// Bytes from one sample to the next.
        stride: usize,
    },
}

/// All samples as they are kept.
#[derive(Clone, Debug, PartialEq)]
pub struct Kept {
    /// What makes a sample of them.
    pub making: Making,
    /// How many bytes they are.
    pub bytes: usize,
}

impl Making {
    /// Bytes of a sample where those of a batch follow each other.
    pub(crate) fn bytes(&self) -> usize {
        match self {
            Making::Images { how, .. } => how.bytes(),
            Making::Windows { stride, .. } => *stride,
        }
    }

    /// Labels of a sample that the host has to give.
    pub(crate) fn labels(&self) -> usize {
        match self {
            Making::Images { .. } => 1,
            Making::Windows { .. } => 0,
        }
    }
}
