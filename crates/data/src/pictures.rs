//! A dataset of images: each is read, transformed and written into the batch in one go.

use crate::bytes::{ByteSamples, Kept, Making};
use crate::dataset::{BatchBuffers, Dataset, Target};
use crate::error::{Error, Result};
use crate::images::{COLOURS, Image, Images};
use crate::transform::{CUTOUT, Draws, PARTNER, Pipeline, Program, Room, SHARE, below, beta};
use phalanx_tensor::SampleImages;
use std::borrow::Cow;

/// What is done about an image that can't be read.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum BadImages {
    /// Its error ends the epoch.
    #[default]
    Refuse,
    /// The next good image by number takes its place, with that one's label, and is counted.
    Replace,
}

/// Images under a [`Pipeline`], as a [`Dataset`] of shape (3, height, width).
///
/// A sample is a function of the seed, the epoch and its number, and so is what takes the place of a bad one.
pub struct Pictures<I> {
    images: I,
    program: Program,
    seed: u64,
    bad: BadImages,
    input_dims: [usize; 3],
    /// One share a class, under mixup.
    value_dims: [usize; 1],
}

impl<I: Images> Pictures<I> {
    /// Images that are changed by `pipeline`, at random as `seed` has it.
    ///
    /// # Errors
    /// [`Error::Pipeline`] if the images can't all come out of it with the same size.
    pub fn new(images: I, pipeline: Pipeline, seed: u64, bad: BadImages) -> Result<Pictures<I>> {
        let size = pipeline.output(images.size()).map_err(|reason| Error::Pipeline { reason })?;
        let (input_dims, value_dims) = ([COLOURS, size[0], size[1]], [images.classes()]);
        Ok(Pictures { images, program: Program::new(pipeline), seed, bad, input_dims, value_dims })
    }

    /// Writes sample `i`, or what takes its place; gives its label.
    fn write(&self, i: usize, epoch: u64, scratch: &mut Scratch, into: &mut [f32]) -> Result<usize> {
        let draws = Draws::new(self.seed, epoch, i);
        self.find(i, scratch, |image, room| self.program.run(image, &draws, room, into))
    }

    /// Has sample `i`, or what takes its place, be written; gives its label.
    fn find(
        &self,
        i: usize,
        scratch: &mut Scratch,
        mut write: impl FnMut(Image<'_>, &mut Room),
    ) -> Result<usize> {
        let mut taken = i;
        loop {
            let read = self.images.label(taken).and_then(|label| {
                write(self.images.image(taken, &mut scratch.read)?, &mut scratch.room);
                Ok(label)
            });
            match read {
                Err(_) if self.bad == BadImages::Replace => {
                    scratch.skipped += usize::from(taken == i);
                    taken = (taken + 1) % self.images.len();
                    if taken == i {
                        return read;
                    }
                }
                read => return read,
            }
        }
    }

    fn making_of(&self, how: SampleImages) -> Making {
        Making::Images { how, table: self.program.table(), seed: self.seed }
    }

    /// Mixes sample `i`, which is written, with another one; gives that one's label, and the share of `i`.
    fn mix(&self, i: usize, epoch: u64, scratch: &mut Scratch, into: &mut [f32]) -> Result<(usize, f32)> {
        let draws = Draws::new(self.seed, epoch, i);
        let share = beta(&draws, SHARE, self.program.pipeline.mixup) as f32;
        // Of all samples and not of the batch, whose composition depends on the number of ranks.
        let partner = below(draws.words(PARTNER, 0)[0], self.images.len());
        let mut other = std::mem::take(&mut scratch.partner);
        other.resize(into.len(), 0.0);
        let label = self.write(partner, epoch, scratch, &mut other);
        into.iter_mut().zip(&other).for_each(|(x, y)| *x = share * *x + (1.0 - share) * y);
        scratch.partner = other;
        Ok((label?, share))
    }
}

impl<I: Images> Dataset for Pictures<I> {
    fn len(&self) -> usize {
        self.images.len()
    }

    fn input_dims(&self) -> &[usize] {
        &self.input_dims
    }

    fn target(&self) -> Target<'_> {
        match self.program.pipeline.mixup > 0.0 {
            false => Target::Classes(self.value_dims[0]),
            true => Target::Values(&self.value_dims),
        }
    }

    fn batch(&self, indices: &[usize], into: &mut BatchBuffers) -> Result<()> {
        let epoch = into.epoch();
        let (inputs, labels, values, scratch) = into.all();
        let size = self.input_dims.iter().product();
        for (slot, (&i, input)) in indices.iter().zip(inputs.chunks_exact_mut(size)).enumerate() {
            let label = self.write(i, epoch, scratch, input)?;
            if self.program.pipeline.mixup > 0.0 {
                let (other, share) = self.mix(i, epoch, scratch, input)?;
                let shares = &mut values[slot * self.images.classes()..][..self.images.classes()];
                shares.fill(0.0);
                shares[label] += share;
                shares[other] += 1.0 - share;
            } else {
                labels[slot] = label as i64;
            }
        }
        Ok(())
    }

    fn as_bytes(&self) -> Option<&dyn ByteSamples> {
        // A mixture is one of numbers.
        (self.program.pipeline.mixup == 0.0).then_some(self)
    }
}

impl<I: Images> ByteSamples for Pictures<I> {
    /// All that changes bytes was done to them.
    fn making(&self) -> Making {
        let cutout = self.program.pipeline.cutout;
        self.making_of(SampleImages { cutout, cutout_place: CUTOUT, ..SampleImages::whole(self.input_dims) })
    }

    fn kept(&self) -> Option<Kept> {
        // Which images can't be read isn't known before they are.
        let size = self.images.size().filter(|_| self.bad == BadImages::Refuse)?;
        let how = self.program.pipeline.placed(size)?;
        Some(Kept { making: self.making_of(how), bytes: self.images.len() * how.bytes() })
    }

    fn all(&self) -> Result<Cow<'_, [u8]>> {
        let (mut all, mut room) = (Vec::new(), Vec::new());
        for i in 0..self.images.len() {
            self.images.label(i)?;
            all.extend_from_slice(self.images.image(i, &mut room)?.bytes);
        }
        Ok(all.into())
    }

    fn write(&self, indices: &[usize], into: &mut BatchBuffers) -> Result<()> {
        let epoch = into.epoch();
        let (bytes, labels, scratch) = into.bytes_and_labels();
        let size = self.input_dims.iter().product();
        for ((&i, bytes), label) in indices.iter().zip(bytes.chunks_exact_mut(size)).zip(labels) {
            let draws = Draws::new(self.seed, epoch, i);
            let write =
                |image: Image<'_>, room: &mut Room| self.program.run_bytes(image, &draws, room, bytes);
            *label = self.find(i, scratch, write)? as i64;
        }
        Ok(())
    }

    fn labels(&self, indices: &[usize], into: &mut [i64]) -> Result<()> {
        for (&i, label) in indices.iter().zip(into) {
            *label = self.images.label(i)? as i64;
        }
        Ok(())
    }
}

/// What a batch of images is prepared in.
#[derive(Debug, Default)]
pub(crate) struct Scratch {
    /// Where images are unpacked.
    read: Vec<u8>,
    room: Room,
    partner: Vec<f32>,
    /// How many samples of the batch something else took the place of.
    pub(crate) skipped: usize,
}
