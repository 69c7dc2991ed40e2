//! What has a number for each direction of an image.

mod sealed {
    pub trait Sealed {}
    impl Sealed for usize {}
    impl Sealed for [usize; 2] {}
}

/// A number of pixels: the same in both directions, or `[height, width]`.
pub trait Pair: sealed::Sealed {
    /// Down and across.
    #[doc(hidden)]
    fn pair(self) -> [usize; 2];
}

impl Pair for usize {
    fn pair(self) -> [usize; 2] {
        [self; 2]
    }
}

impl Pair for [usize; 2] {
    fn pair(self) -> [usize; 2] {
        self
    }
}
