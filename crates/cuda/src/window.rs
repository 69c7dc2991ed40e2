//! How a pooling window moves over images, as kernels take it.

/// Sizes of images and windows, (height, width) each; the same bytes as `Window` in `kernels/pooling.cu`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Window {
    /// Channels of the images.
    pub channels: usize,
    /// Pixels of an image.
    pub input: [usize; 2],
    /// Pixels of what comes out.
    pub output: [usize; 2],
    /// Pixels of the window; at most 256 in all for max-pooling, which counts them in a byte.
    pub kernel: [usize; 2],
    /// Pixels from one window to the next, at least 1.
    pub stride: [usize; 2],
    /// Pixels added on each side, fewer than the window has.
    pub padding: [usize; 2],
}

impl Window {
    /// How many bytes a launch hands over.
    pub const BYTES: usize = 11 * size_of::<i64>();

    /// The bytes that a launch hands over.
    pub fn as_bytes(&self) -> Vec<u8> {
        let pairs = [self.input, self.output, self.kernel, self.stride, self.padding];
        let numbers = std::iter::once(self.channels).chain(pairs.into_iter().flatten());
        numbers.flat_map(|n| (n as i64).to_ne_bytes()).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_are_as_many_as_is_said() {
        let two = [2, 2];
        let window = Window { channels: 3, input: two, output: two, kernel: two, stride: two, padding: two };
        assert_eq!(window.as_bytes().len(), Window::BYTES);
    }
}
