//! The sources of the kernels.

/// A file of kernels.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Source {
    /// Functions and arithmetic, element by element.
    Elementwise,
    /// Sums and largest values along dimensions.
    Reduce,
    /// The optimizers' rules.
    Optimizer,
}

/// The files that sources include, by name.
pub(crate) const HEADERS: [(&str, &str); 3] = [
    ("numbers.cuh", include_str!("../kernels/numbers.cuh")),
    ("grid.cuh", include_str!("../kernels/grid.cuh")),
    ("strided.cuh", include_str!("../kernels/strided.cuh")),
];

impl Source {
    /// All of them.
    pub const ALL: [Source; 3] = [Source::Elementwise, Source::Reduce, Source::Optimizer];

    /// The name of the file in `kernels/`.
    pub const fn file(self) -> &'static str {
        self.parts().0
    }

    /// Its text.
    pub const fn text(self) -> &'static str {
        self.parts().1
    }

    const fn parts(self) -> (&'static str, &'static str) {
        match self {
            Source::Elementwise => ("elementwise.cu", include_str!("../kernels/elementwise.cu")),
            Source::Reduce => ("reduce.cu", include_str!("../kernels/reduce.cu")),
            Source::Optimizer => ("optimizer.cu", include_str!("../kernels/optimizer.cu")),
        }
    }
}
