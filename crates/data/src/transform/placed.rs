//! Pipelines that only move a window: what a device can do to images where they lie.

use super::{CUTOUT, Pipeline, Transform, middle, shorter};
use crate::images::COLOURS;
use phalanx_tensor::SampleImages;

impl Pipeline {
    /// How images of `input` rows and columns become those of the pipeline, but for the numbers that bytes stand for; none where that
    /// takes more than one crop, mirroring after it, and a square that is blanked.
    pub(crate) fn placed(&self, input: [usize; 2]) -> Option<SampleImages> {
        let [height, width] = input;
        let mut how = SampleImages {
            cutout: self.cutout,
            cutout_place: CUTOUT,
            ..SampleImages::whole([COLOURS, height, width])
        };
        let (mut is_cropped, mut is_flipped) = (false, false);
        for (place, step) in self.steps.iter().enumerate() {
            let place = place as u8;
            match *step {
                Transform::Resize(size) if size == how.size => {}
                Transform::ResizeShorter(side) if shorter(how.size, side) == how.size => {}
                Transform::CentreCrop(size) if !is_cropped && !is_flipped => {
                    how.corner = [middle(height, size[0]), middle(width, size[1])];
                    (how.size, is_cropped) = (size, true);
                }
                Transform::RandomCrop { padding, border, size } if !is_cropped && !is_flipped => {
                    how.corner = [-(padding as isize); 2];
                    how.border = border;
                    how.crop = [0, 1].map(|d| input[d] + 2 * padding - size[d] + 1);
                    how.crop_place = place;
                    (how.size, is_cropped) = (size, true);
                }
                Transform::Flip { chance } if !is_flipped => {
                    (how.flip, how.flip_place) = (chance, place);
                    is_flipped = true;
                }
                _ => return None,
            }
        }
        Some(how)
    }
}
