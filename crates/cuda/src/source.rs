//! The sources of the kernels.

use crate::element::Element;

/// A file of kernels.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Source {
    /// Functions and arithmetic, element by element.
    Elementwise,
    /// Sums and largest values along dimensions.
    Reduce,
    /// Copies between views, and fills.
    Copy,
    /// Softmax and its logarithm.
    Softmax,
    /// Causal self-attention.
    Attention,
    /// The same of floats of 16 bits, by the units for small matrices of them.
    AttentionHalves,
    /// Comparisons, and elements that are taken by what others say.
    Choice,
    /// Losses.
    Loss,
    /// Rows of a table.
    Embedding,
    /// Layer normalisation.
    LayerNorm,
    /// Batch normalisation.
    BatchNorm,
    /// Max and average pooling.
    Pooling,
    /// Random numbers and dropout.
    Random,
    /// Conversions between types.
    Convert,
    /// Steps of recurrent layers.
    Recurrent,
    /// What is done to all gradients together.
    Gradients,
    /// The optimizers' rules.
    Optimizer,
    /// Matrix products that NVIDIA's library doesn't do.
    Product,
    /// Convolutions that NVIDIA's library doesn't do.
    Convolution,
    /// Batches from samples that are kept as bytes.
    Samples,
}

/// The files that sources include, by name.
pub(crate) const HEADERS: [(&str, &str); 10] = [
    ("numbers.cuh", include_str!("../kernels/numbers.cuh")),
    ("grid.cuh", include_str!("../kernels/grid.cuh")),
    ("packs.cuh", include_str!("../kernels/packs.cuh")),
    ("strided.cuh", include_str!("../kernels/strided.cuh")),
    ("columns.cuh", include_str!("../kernels/columns.cuh")),
    ("rows.cuh", include_str!("../kernels/rows.cuh")),
    ("philox.cuh", include_str!("../kernels/philox.cuh")),
    ("key.cuh", include_str!("../kernels/key.cuh")),
    ("heads.cuh", include_str!("../kernels/heads.cuh")),
    ("fragments.cuh", include_str!("../kernels/fragments.cuh")),
];

impl Source {
    /// All of them.
    pub const ALL: [Source; 20] = [
        Source::Elementwise,
        Source::Reduce,
        Source::Copy,
        Source::Softmax,
        Source::Attention,
        Source::AttentionHalves,
        Source::Choice,
        Source::Loss,
        Source::Embedding,
        Source::LayerNorm,
        Source::BatchNorm,
        Source::Pooling,
        Source::Random,
        Source::Convert,
        Source::Recurrent,
        Source::Gradients,
        Source::Optimizer,
        Source::Product,
        Source::Convolution,
        Source::Samples,
    ];

    /// The name of the file in `kernels/`.
    pub const fn file(self) -> &'static str {
        self.parts().0
    }

    /// Its text.
    pub const fn text(self) -> &'static str {
        self.parts().1
    }

    /// The types of elements that it is compiled for: one where it asks for none.
    pub const fn elements(self) -> &'static [Element] {
        match self {
            // Convolutions of 16 bits are done in float32 where the library doesn't do them.
            Source::Copy | Source::Convolution => &[Element::F32],
            Source::AttentionHalves => &[Element::Bf16, Element::F16],
            _ => &Element::ALL,
        }
    }

    const fn parts(self) -> (&'static str, &'static str) {
        match self {
            Source::Elementwise => ("elementwise.cu", include_str!("../kernels/elementwise.cu")),
            Source::Reduce => ("reduce.cu", include_str!("../kernels/reduce.cu")),
            Source::Copy => ("copy.cu", include_str!("../kernels/copy.cu")),
            Source::Softmax => ("softmax.cu", include_str!("../kernels/softmax.cu")),
            Source::Attention => ("attention.cu", include_str!("../kernels/attention.cu")),
            Source::AttentionHalves => {
                ("attention_halves.cu", include_str!("../kernels/attention_halves.cu"))
            }
            Source::Choice => ("choice.cu", include_str!("../kernels/choice.cu")),
            Source::Loss => ("loss.cu", include_str!("../kernels/loss.cu")),
            Source::Embedding => ("embedding.cu", include_str!("../kernels/embedding.cu")),
            Source::LayerNorm => ("layer_norm.cu", include_str!("../kernels/layer_norm.cu")),
            Source::BatchNorm => ("batch_norm.cu", include_str!("../kernels/batch_norm.cu")),
            Source::Pooling => ("pooling.cu", include_str!("../kernels/pooling.cu")),
            Source::Random => ("random.cu", include_str!("../kernels/random.cu")),
            Source::Convert => ("convert.cu", include_str!("../kernels/convert.cu")),
            Source::Recurrent => ("recurrent.cu", include_str!("../kernels/recurrent.cu")),
            Source::Gradients => ("gradients.cu", include_str!("../kernels/gradients.cu")),
            Source::Optimizer => ("optimizer.cu", include_str!("../kernels/optimizer.cu")),
            Source::Product => ("product.cu", include_str!("../kernels/product.cu")),
            Source::Convolution => ("convolution.cu", include_str!("../kernels/convolution.cu")),
            Source::Samples => ("samples.cu", include_str!("../kernels/samples.cu")),
        }
    }
}
