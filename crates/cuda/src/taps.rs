//! How a convolution's kernels move over images, as kernels of ours take it.

use crate::cudnn::Convolution;

/// Sizes of images and kernels, and the steps of these.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Taps([usize; 15]);

impl Taps {
    /// How many bytes a launch hands over.
    pub const BYTES: usize = 15 * size_of::<i64>();

    /// Those of a convolution. Panics where kernels don't fit into images, or channels not into groups.
    #[track_caller]
    pub fn of(convolution: &Convolution) -> Taps {
        let ([_, c, h, w], [oh, ow]) = (convolution.images, convolution.output());
        let Convolution { outputs, kernel, stride, padding, dilation, groups, .. } = *convolution;
        let ([kh, kw], [sh, sw], [ph, pw], [dh, dw]) = (kernel, stride, padding, dilation);
        Taps([c, outputs, groups, h, w, oh, ow, kh, kw, sh, sw, ph, pw, dh, dw])
    }

    /// The bytes that a launch hands over: those of `Taps` in `kernels/convolution.cu`.
    pub fn to_bytes(&self) -> [u8; Taps::BYTES] {
        let mut bytes = [0; Taps::BYTES];
        for (to, number) in bytes.chunks_exact_mut(size_of::<i64>()).zip(self.0) {
            to.copy_from_slice(&(number as i64).to_ne_bytes());
        }
        bytes
    }
}
