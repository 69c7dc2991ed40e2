//! Numbers for tests, and how tensors of each type hold them.

use half::{bf16, f16};
use phalanx_cuda::Element;
use phalanx_tensor::Philox;

/// Sizes at the edges of warps, blocks and grids: a grid of these tests has 768 threads at most.
pub(crate) const SIZES: [usize; 8] = [0, 1, 31, 32, 97, 256, 257, 1999];

/// `n` numbers in [low, high), as the type can hold them.
pub(crate) fn random(element: Element, n: usize, low: f64, high: f64, stream: u64) -> Vec<f64> {
    let key = Philox::new(11, stream);
    let numbers = (0..n).map(|i| low + (high - low) * f64::from(key.unit(i as u64)));
    decode(element, &encode(element, &numbers.collect::<Vec<_>>()))
}

/// Numbers as a tensor of the type holds them.
pub(crate) fn encode(element: Element, values: &[f64]) -> Vec<u8> {
    match element {
        Element::F32 => values.iter().flat_map(|&x| (x as f32).to_ne_bytes()).collect(),
        Element::Bf16 => values.iter().flat_map(|&x| bf16::from_f32(x as f32).to_ne_bytes()).collect(),
        Element::F16 => values.iter().flat_map(|&x| f16::from_f32(x as f32).to_ne_bytes()).collect(),
    }
}

/// The numbers that a tensor of the type holds.
pub(crate) fn decode(element: Element, bytes: &[u8]) -> Vec<f64> {
    let pairs = bytes.chunks_exact(2).map(|pair| [pair[0], pair[1]]);
    match element {
        Element::F32 => floats(bytes).iter().map(|&x| f64::from(x)).collect(),
        Element::Bf16 => pairs.map(|pair| bf16::from_ne_bytes(pair).to_f64()).collect(),
        Element::F16 => pairs.map(|pair| f16::from_ne_bytes(pair).to_f64()).collect(),
    }
}

/// The float32 numbers that bytes are.
pub(crate) fn floats(bytes: &[u8]) -> Vec<f32> {
    bytes.chunks_exact(4).map(bytemuck::pod_read_unaligned).collect()
}

/// Room for `n` numbers of the type, filled with what no kernel writes.
pub(crate) fn room(element: Element, n: usize) -> Vec<u8> {
    vec![0xa5; n * element.bytes()]
}
