//! What a user says about images, and the pipelines that this means for training and for being judged.

use crate::error::{Error, Result};
use crate::pictures::BadImages;
use crate::transform::{Jitter, Normalise, Pipeline, Transform};
use phalanx_tensor::Border;

/// How colour images are presented to a model. The default changes nothing but their scale.
///
/// Both parts are brought to their size and normalised; what is random happens to the training images alone. Random pieces
/// come in the place of resizing, then padded crops, mirroring, colours, cutout and mixup.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Treatment {
    /// Both sides of what the model sees; by default as the images are.
    pub size: Option<usize>,
    /// The shorter side becomes this long, and the middle is what remains of the longer one; by default `size` is reached by
    /// changing the shape.
    pub resize: Option<usize>,
    /// Training images are cut at random after this much was put around them.
    pub crop_padding: usize,
    /// What that shows.
    pub crop_border: Border,
    /// Training images are random pieces of at least this share of the area; by default they are all of it.
    pub crop_area: Option<f64>,
    /// Every other training image is mirrored.
    pub flip: bool,
    /// How much the colours of training images change.
    pub jitter: Jitter,
    /// The side of the square that is cut out of training images: see [`Pipeline::cutout`].
    pub cutout: usize,
    /// See [`Pipeline::mixup`].
    pub mixup: f64,
    /// How bytes become numbers; by default to mean 0 and deviation 1 over the dataset.
    pub normalise: Option<Normalise>,
    /// Whether what is random happens.
    pub augment: Augment,
    /// What random changes are a function of, besides the epoch and the sample.
    pub seed: u64,
    /// What is done about images that can't be read.
    pub bad: BadImages,
}

/// Whether training images are changed at random.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Augment {
    /// As the treatment says.
    #[default]
    On,
    /// Not at all: they are treated as test images are.
    Off,
}

/// The pipelines of the two parts of a dataset.
#[derive(Clone, Debug, PartialEq)]
pub struct Pipelines {
    /// Of the samples to learn from.
    pub train: Pipeline,
    /// Of those to be judged by.
    pub test: Pipeline,
}

impl Treatment {
    /// What this means for images of `input` height and width (`None` if they differ) that are normalised by `usual` if
    /// nothing else is said.
    ///
    /// # Errors
    /// [`Error::Pipeline`] if it can mean nothing.
    pub fn pipelines(&self, input: Option<[usize; 2]>, usual: Normalise) -> Result<Pipelines> {
        let test = Pipeline { steps: self.sizing(), ..Pipeline::new(self.normalise.unwrap_or(usual)) };
        let impossible = |reason| Error::Pipeline { reason };
        let size = test.output(input).map_err(impossible)?;
        if self.augment == Augment::Off {
            return Ok(Pipelines { train: test.clone(), test });
        }
        let mut train = Pipeline { cutout: self.cutout, mixup: self.mixup, ..test.clone() };
        if let Some(least) = self.crop_area {
            let (area, ratio) = ((least, 1.0), (3.0 / 4.0, 4.0 / 3.0));
            train.steps = vec![Transform::RandomResizedCrop { size, area, ratio }];
        }
        if self.crop_padding > 0 {
            train.steps.push(Transform::RandomCrop {
                padding: self.crop_padding,
                border: self.crop_border,
                size,
            });
        }
        if self.flip {
            train.steps.push(Transform::Flip { chance: 0.5 });
        }
        if self.jitter != Jitter::default() {
            train.steps.push(Transform::Jitter(self.jitter));
        }
        train.output(input).map_err(impossible)?;
        Ok(Pipelines { train, test })
    }

    /// What brings images to their size.
    fn sizing(&self) -> Vec<Transform> {
        match (self.resize, self.size) {
            (None, None) => vec![],
            (None, Some(size)) => vec![Transform::Resize([size, size])],
            (Some(side), None) => vec![Transform::ResizeShorter(side)],
            (Some(side), Some(size)) => {
                vec![Transform::ResizeShorter(side), Transform::CentreCrop([size, size])]
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_become_steps_for_both_parts() {
        use Transform::{CentreCrop, Flip, RandomCrop, RandomResizedCrop, Resize, ResizeShorter};
        let jitter = Jitter { brightness: 0.4, ..Jitter::default() };
        let area = RandomResizedCrop { size: [8, 8], area: (0.2, 1.0), ratio: (0.75, 4.0 / 3.0) };
        let none = Treatment::default();
        let crop = |side| RandomCrop { padding: 4, border: Border::Black, size: [side, side] };
        let reflected = RandomCrop { padding: 2, border: Border::Reflect, size: [32, 32] };
        let rows: &[(Treatment, &[Transform], &[Transform])] = &[
            (none, &[], &[]),
            (Treatment { crop_padding: 4, flip: true, ..none }, &[crop(32), Flip { chance: 0.5 }], &[]),
            (Treatment { crop_padding: 2, crop_border: Border::Reflect, ..none }, &[reflected], &[]),
            (
                Treatment { size: Some(8), crop_padding: 4, ..none },
                &[Resize([8, 8]), crop(8)],
                &[Resize([8, 8])],
            ),
            (
                Treatment { size: Some(8), resize: Some(9), crop_area: Some(0.2), jitter, ..none },
                &[area, Transform::Jitter(jitter)],
                &[ResizeShorter(9), CentreCrop([8, 8])],
            ),
            (
                Treatment { flip: true, cutout: 3, mixup: 0.2, jitter, augment: Augment::Off, ..none },
                &[],
                &[],
            ),
        ];
        for (treatment, train, test) in rows {
            let pipelines = treatment.pipelines(Some([32, 32]), Normalise::UNIT).unwrap();
            assert_eq!((&*pipelines.train.steps, &*pipelines.test.steps), (*train, *test), "{treatment:?}");
            assert_eq!((pipelines.test.cutout, pipelines.test.mixup), (0, 0.0));
            let off = treatment.augment == Augment::Off;
            assert_eq!(pipelines.train.cutout, if off { 0 } else { treatment.cutout });
        }
    }

    #[test]
    fn images_of_many_sizes_need_one() {
        let none = Treatment::default();
        for (treatment, works) in [
            (none, false),
            (Treatment { resize: Some(8), ..none }, false),
            (Treatment { size: Some(8), ..none }, true),
            (Treatment { resize: Some(9), size: Some(8), ..none }, true),
        ] {
            let pipelines = treatment.pipelines(None, Normalise::UNIT);
            assert_eq!(pipelines.is_ok(), works, "{treatment:?}");
            if let Err(error) = pipelines {
                assert!(error.to_string().contains("different sizes"), "{error}");
            }
        }
    }
}
