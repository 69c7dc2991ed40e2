//! Images as they are kept: bytes, before anything is done to them.

use crate::error::Result;

/// Red, green and blue.
pub const COLOURS: usize = 3;

/// Labelled colour images by number. [`crate::Pictures`] makes a [`crate::Dataset`] of them.
pub trait Images: Send + Sync {
    /// How many there are.
    fn len(&self) -> usize;

    /// Whether there is none.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// How many classes they are of.
    fn classes(&self) -> usize;

    /// Height and width, if all images have the same.
    fn size(&self) -> Option<[usize; 2]>;

    /// The class of image `i`, below [`Images::classes`].
    ///
    /// # Errors
    /// The label stands for no class.
    fn label(&self, i: usize) -> Result<usize>;

    /// Image `i`, unpacked into `room` where it isn't kept as it is.
    ///
    /// # Errors
    /// Whatever reading and decoding it can meet, with the file's name.
    fn image<'a>(&'a self, i: usize, room: &'a mut Vec<u8>) -> Result<Image<'a>>;
}

/// The bytes of an image: rows from above of the red plane, then of the green and of the blue one.
#[derive(Clone, Copy, Debug)]
pub struct Image<'a> {
    /// Rows.
    pub height: usize,
    /// Columns.
    pub width: usize,
    /// As many as rows, columns and [`COLOURS`] make.
    pub bytes: &'a [u8],
}
