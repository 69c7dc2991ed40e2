//! The smallest regression there is: points on a line.

use crate::dataset::{BatchBuffers, Dataset, Target};
use crate::error::Result;

/// `n` points of y = 3x + 2, with x evenly spaced from -1 to 1, both ends included.
///
/// ```
/// use phalanx_data::{BatchBuffers, Dataset, LinearRegression};
/// let line = LinearRegression::new(64);
/// let mut buffers = BatchBuffers::new();
/// buffers.fit(&line, 2);
/// line.batch(&[0, 63], &mut buffers)?;
/// assert_eq!(buffers.inputs(), [-1.0, 1.0]);
/// assert_eq!(buffers.values(), [-1.0, 5.0]);
/// # Ok::<(), phalanx_data::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct LinearRegression {
    xs: Vec<f32>,
}

impl LinearRegression {
    /// `n` points; at least 2. Panics otherwise.
    #[track_caller]
    pub fn new(n: usize) -> LinearRegression {
        assert!(n >= 2, "LinearRegression: needs at least 2 points, got {n}");
        let step = 2.0 / (n - 1) as f32;
        // Counted from the nearer end, as PyTorch's linspace does, so that both ends are exact.
        let x = |i: usize| if i < n / 2 { -1.0 + step * i as f32 } else { 1.0 - step * (n - 1 - i) as f32 };
        LinearRegression { xs: (0..n).map(x).collect() }
    }
}

impl Dataset for LinearRegression {
    fn len(&self) -> usize {
        self.xs.len()
    }

    fn input_dims(&self) -> &[usize] {
        &[1]
    }

    fn target(&self) -> Target<'_> {
        Target::Values(&[1])
    }

    fn batch(&self, indices: &[usize], into: &mut BatchBuffers) -> Result<()> {
        for (x, &i) in into.inputs().iter_mut().zip(indices) {
            *x = self.xs[i];
        }
        for (y, &i) in into.values().iter_mut().zip(indices) {
            *y = 3.0 * self.xs[i] + 2.0;
        }
        Ok(())
    }
}
