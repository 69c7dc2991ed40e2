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
    pub fn to_bytes(&self) -> [u8; Window::BYTES] {
        let pairs = [self.input, self.output, self.kernel, self.stride, self.padding];
        let numbers = std::iter::once(self.channels).chain(pairs.into_iter().flatten());
        let mut bytes = [0; Window::BYTES];
        for (to, number) in bytes.chunks_exact_mut(size_of::<i64>()).zip(numbers) {
            to.copy_from_slice(&(number as i64).to_ne_bytes());
        }
        bytes
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_stand_in_the_order_of_the_struct() {
        let window = Window {
            channels: 1,
            input: [2, 3],
            output: [4, 5],
            kernel: [6, 7],
            stride: [8, 9],
            padding: [10, 11],
        };
        assert_eq!(window.to_bytes().to_vec(), (1..=11i64).flat_map(i64::to_ne_bytes).collect::<Vec<u8>>());
    }
}
