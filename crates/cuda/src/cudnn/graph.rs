//! A convolution as a graph of operations: one, or one with a bias and ReLU behind it.

use super::convolution::{Convolution, Pass};
use super::descriptor::{Descriptor, Raw};
use super::foreign::{self, Functions};
use super::target::Target;
use crate::error::Error;
use std::sync::Arc;

/// By which the library knows a tensor when it is given memory for it. What is passed on inside of a graph comes after these.
pub(super) const IMAGE: i64 = 1;
pub(super) const FILTER: i64 = 2;
pub(super) const OUTPUT: i64 = 3;
pub(super) const BIAS: i64 = 4;
const SUMS: i64 = 5;
const BIASED: i64 = 6;

/// A graph, with all that it is made of.
pub(super) struct Graph {
    pub(super) graph: Raw,
    _parts: Vec<Raw>,
}

/// How each of image, filter, output and bias is aligned, in bytes.
pub type Alignment = [u32; 4];

pub(super) fn graph(
    functions: &Arc<Functions>,
    target: &Target,
    convolution: &Convolution,
    alignment: Alignment,
) -> Result<Graph, Error> {
    let Operations { operations, mut parts } = operations(functions, convolution, alignment)?;
    let graph = target
        .of_graph(Descriptor::new(functions, convolution, foreign::OPERATION_GRAPH)?)?
        .descriptors(foreign::GRAPH_OPERATIONS, &operations.iter().collect::<Vec<_>>())?
        .finalize()?;
    parts.extend(operations);
    Ok(Graph { graph, _parts: parts })
}

/// The operations of a graph, and what they are made of.
struct Operations {
    operations: Vec<Raw>,
    parts: Vec<Raw>,
}

fn operations(
    functions: &Arc<Functions>,
    convolution: &Convolution,
    alignment: Alignment,
) -> Result<Operations, Error> {
    let build = Build { functions, convolution };
    let [image, filter, output] = convolution.sizes();
    let tensor = |id: i64, sizes| build.tensor(id, sizes, Some(alignment[id as usize - 1]));
    let bias = || tensor(BIAS, [1, output[1], 1, 1]);
    let passed_on = |id| build.tensor(id, output, None);
    let (description, x, w) = (build.convolution()?, tensor(IMAGE, image)?, tensor(FILTER, filter)?);
    let y = tensor(OUTPUT, output)?;
    let mut operations = Vec::new();
    let mut parts = Vec::new();
    match convolution.pass {
        Pass::Forward | Pass::BackwardData | Pass::BackwardFilter => {
            operations.push(build.operation([&description, &x, &w, &y])?);
        }
        Pass::ForwardBias => {
            let (bias, sums) = (bias()?, passed_on(SUMS)?);
            operations.push(build.operation([&description, &x, &w, &sums])?);
            operations.push(build.pointwise(foreign::POINTWISE_ADD, &sums, Some(&bias), &y, &mut parts)?);
            parts.extend([bias, sums]);
        }
        Pass::ForwardBiasRelu => {
            let (bias, sums, biased) = (bias()?, passed_on(SUMS)?, passed_on(BIASED)?);
            operations.push(build.operation([&description, &x, &w, &sums])?);
            operations.push(build.pointwise(
                foreign::POINTWISE_ADD,
                &sums,
                Some(&bias),
                &biased,
                &mut parts,
            )?);
            operations.push(build.pointwise(foreign::POINTWISE_RELU, &biased, None, &y, &mut parts)?);
            parts.extend([bias, sums, biased]);
        }
    }
    parts.extend([description, x, w, y]);
    Ok(Operations { operations, parts })
}

struct Build<'a> {
    functions: &'a Arc<Functions>,
    convolution: &'a Convolution,
}

impl<'a> Build<'a> {
    fn descriptor(&self, kind: foreign::DescriptorType) -> Result<Descriptor<'a>, Error> {
        Descriptor::new(self.functions, self.convolution, kind)
    }

    /// A tensor of so many elements along (N, C, H, W): in memory, or passed on in float32 where it has no alignment.
    fn tensor(&self, id: i64, sizes: [i64; 4], alignment: Option<u32>) -> Result<Raw, Error> {
        let Convolution { numbers, layout, .. } = self.convolution;
        let kind = if alignment.is_some() { numbers.foreign() } else { foreign::DATA_FLOAT };
        self.descriptor(foreign::TENSOR)?
            .integers(foreign::TENSOR_ID, &[id])?
            .number(foreign::TENSOR_TYPE, foreign::TYPE_DATA_TYPE, kind)?
            .integers(foreign::TENSOR_SIZES, &sizes)?
            .integers(foreign::TENSOR_STRIDES, &layout.strides(sizes))?
            .integers(foreign::TENSOR_ALIGNMENT, &[i64::from(alignment.unwrap_or(16))])?
            .flag(foreign::TENSOR_VIRTUAL, alignment.is_none())?
            .finalize()
    }

    fn convolution(&self) -> Result<Raw, Error> {
        let pair = |pair: [usize; 2]| pair.map(|pixels| pixels as i64);
        let Convolution { stride, padding, dilation, .. } = *self.convolution;
        self.descriptor(foreign::CONVOLUTION)?
            .number(foreign::CONVOLUTION_TYPE, foreign::TYPE_DATA_TYPE, foreign::DATA_FLOAT)?
            .number(foreign::CONVOLUTION_MODE, foreign::TYPE_CONVOLUTION_MODE, foreign::CROSS_CORRELATION)?
            .integers(foreign::CONVOLUTION_SPATIAL_DIMS, &[2])?
            .integers(foreign::CONVOLUTION_STRIDES, &pair(stride))?
            .integers(foreign::CONVOLUTION_PRE_PADDINGS, &pair(padding))?
            .integers(foreign::CONVOLUTION_POST_PADDINGS, &pair(padding))?
            .integers(foreign::CONVOLUTION_DILATIONS, &pair(dilation))?
            .finalize()
    }

    /// The convolution itself, of its description, images, kernels and outputs. The number of groups shows in the channels.
    fn operation(&self, parts: [&Raw; 4]) -> Result<Raw, Error> {
        // The attributes in the order of `parts`, then the two factors.
        let (kind, attributes, [alpha, beta]) = match self.convolution.pass {
            Pass::Forward | Pass::ForwardBias | Pass::ForwardBiasRelu => (
                foreign::OPERATION_FORWARD,
                [foreign::FORWARD_CONVOLUTION, foreign::FORWARD_X, foreign::FORWARD_W, foreign::FORWARD_Y],
                [foreign::FORWARD_ALPHA, foreign::FORWARD_BETA],
            ),
            Pass::BackwardData => (
                foreign::OPERATION_BACKWARD_DATA,
                [foreign::DATA_CONVOLUTION, foreign::DATA_DX, foreign::DATA_W, foreign::DATA_DY],
                [foreign::DATA_ALPHA, foreign::DATA_BETA],
            ),
            Pass::BackwardFilter => (
                foreign::OPERATION_BACKWARD_FILTER,
                [foreign::FILTER_CONVOLUTION, foreign::FILTER_X, foreign::FILTER_DW, foreign::FILTER_DY],
                [foreign::FILTER_ALPHA, foreign::FILTER_BETA],
            ),
        };
        let mut operation = self.descriptor(kind)?;
        for (attribute, part) in attributes.into_iter().zip(parts) {
            operation = operation.descriptors(attribute, &[part])?;
        }
        operation.float(alpha, 1.0)?.float(beta, 0.0)?.finalize()
    }

    /// What is done element by element to `x`, or to `x` and `b`, for `y`.
    fn pointwise(
        &self,
        mode: foreign::AttributeType,
        x: &Raw,
        b: Option<&Raw>,
        y: &Raw,
        parts: &mut Vec<Raw>,
    ) -> Result<Raw, Error> {
        let kind = self
            .descriptor(foreign::POINTWISE)?
            .number(foreign::POINTWISE_MODE, foreign::TYPE_POINTWISE_MODE, mode)?
            .number(foreign::POINTWISE_PRECISION, foreign::TYPE_DATA_TYPE, foreign::DATA_FLOAT)?
            .finalize()?;
        let mut operation = self
            .descriptor(foreign::OPERATION_POINTWISE)?
            .descriptors(foreign::OPERATION_POINTWISE_KIND, &[&kind])?
            .descriptors(foreign::OPERATION_POINTWISE_X, &[x])?;
        if let Some(b) = b {
            operation = operation.descriptors(foreign::OPERATION_POINTWISE_B, &[b])?;
        }
        parts.push(kind);
        operation.descriptors(foreign::OPERATION_POINTWISE_Y, &[y])?.finalize()
    }
}
