//! Which pixel a tap of a sliding window meets, along one dimension: the arithmetic that convolution and pooling share.

/// How a window moves along a dimension.
#[derive(Clone, Copy)]
pub(crate) struct Slide {
    /// Pixels from one output to the next.
    pub(crate) stride: usize,
    /// Pixels added before the first.
    pub(crate) padding: usize,
}

impl Slide {
    /// The pixel, of `size`, that lies `tap` pixels into the window of output `at`.
    #[inline(always)]
    pub(crate) fn sees(self, at: usize, tap: usize, size: usize) -> Option<usize> {
        (at * self.stride + tap).checked_sub(self.padding).filter(|&pixel| pixel < size)
    }

    /// The output, of `size`, whose window has pixel `at` as the one that lies `tap` pixels into it.
    #[inline(always)]
    pub(crate) fn seen_by(self, at: usize, tap: usize, size: usize) -> Option<usize> {
        let start = (at + self.padding).checked_sub(tap).filter(|at| at.is_multiple_of(self.stride))?;
        Some(start / self.stride).filter(|&output| output < size)
    }
}
