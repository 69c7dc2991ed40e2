//! Numbers in memory, with a guard zone around them, and how near a result must be.

use half::{bf16, f16};
use phalanx_cuda::Address;
use phalanx_tensor::Philox;

/// What elements are.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Type {
    F32,
    F64,
    Bf16,
    F16,
}

impl Type {
    pub(crate) fn bytes(self) -> usize {
        match self {
            Type::F64 => 8,
            Type::F32 => 4,
            Type::Bf16 | Type::F16 => 2,
        }
    }

    /// The rounding of a result to the nearest, as a share of it, and a few of float32's for a sum that was formed in another
    /// order than the reference's.
    pub(crate) fn tolerance(self) -> f64 {
        match self {
            Type::F64 => 1e-13,
            Type::F32 => 2e-6,
            Type::Bf16 => 1.0 / 256.0,
            Type::F16 => 1.0 / 2048.0,
        }
    }

    fn encode(self, x: f64) -> Vec<u8> {
        match self {
            Type::F64 => x.to_ne_bytes().to_vec(),
            Type::F32 => (x as f32).to_ne_bytes().to_vec(),
            Type::Bf16 => bf16::from_f64(x).to_ne_bytes().to_vec(),
            Type::F16 => f16::from_f64(x).to_ne_bytes().to_vec(),
        }
    }

    fn decode(self, bytes: &[u8]) -> f64 {
        match self {
            Type::F64 => f64::from_ne_bytes(bytes.try_into().unwrap()),
            Type::F32 => f32::from_ne_bytes(bytes.try_into().unwrap()).into(),
            Type::Bf16 => bf16::from_ne_bytes(bytes.try_into().unwrap()).into(),
            Type::F16 => f16::from_ne_bytes(bytes.try_into().unwrap()).into(),
        }
    }
}

/// Bytes before and behind, which nobody may write.
const GUARD: usize = 256;
const GUARD_BYTE: u8 = 0xa5;

/// Memory, as a GPU would have it.
pub(crate) struct Memory {
    // Words, so that it begins at a multiple of 256.
    words: Vec<[u64; 32]>,
    bytes: usize,
    of: Type,
}

impl Memory {
    /// Room for `n` elements, filled with what no result has.
    pub(crate) fn room(of: Type, n: usize) -> Memory {
        Memory::bytes(of, n * of.bytes())
    }

    pub(crate) fn bytes(of: Type, bytes: usize) -> Memory {
        let words = vec![[u64::from_ne_bytes([GUARD_BYTE; 8]); 32]; bytes.div_ceil(GUARD) + 3];
        Memory { words, bytes, of }
    }

    pub(crate) fn of(of: Type, numbers: &[f64]) -> Memory {
        let mut memory = Memory::room(of, numbers.len());
        memory.set(numbers);
        memory
    }

    /// Overwrites the first of its elements.
    pub(crate) fn set(&mut self, numbers: &[f64]) {
        let bytes: Vec<u8> = numbers.iter().flat_map(|&x| self.of.encode(x)).collect();
        let start = self.start();
        self.all()[start..][..bytes.len()].copy_from_slice(&bytes);
    }

    /// Random numbers in [-1, 1), as the type holds them.
    pub(crate) fn random(of: Type, n: usize, stream: u64) -> Memory {
        let key = Philox::new(5, stream);
        let numbers: Vec<f64> = (0..n).map(|i| f64::from(key.unit(i as u64)) * 2.0 - 1.0).collect();
        Memory::of(of, &numbers)
    }

    pub(crate) fn at(&mut self) -> Address {
        let start = self.start();
        Address(self.all()[start..].as_mut_ptr() as u64)
    }

    pub(crate) fn numbers(&mut self) -> Vec<f64> {
        let (start, bytes, of) = (self.start(), self.bytes, self.of);
        self.all()[start..][..bytes].chunks_exact(of.bytes()).map(|bytes| of.decode(bytes)).collect()
    }

    /// Panics if somebody wrote before or behind it.
    #[track_caller]
    pub(crate) fn check_guards(&mut self) {
        let (start, bytes) = (self.start(), self.bytes);
        let all = self.all();
        let whole = all[..start].iter().chain(&all[start + bytes..]).all(|&byte| byte == GUARD_BYTE);
        assert!(whole, "something was written beyond the end or before the start");
    }

    /// Where a multiple of 256 is, behind the first guard.
    fn start(&mut self) -> usize {
        let at = self.words.as_ptr() as usize;
        (at + GUARD).next_multiple_of(GUARD) - at
    }

    fn all(&mut self) -> &mut [u8] {
        bytemuck::cast_slice_mut(&mut self.words)
    }
}

/// Compares results of a type with what they are to be. `scale` is how large the numbers were that were summed.
#[track_caller]
pub(crate) fn near(what: &str, of: Type, got: &[f64], want: &[f64], scale: f64) {
    assert_eq!(got.len(), want.len(), "{what}");
    for (i, (got, want)) in got.iter().zip(want).enumerate() {
        let allowed = of.tolerance() * want.abs() + Type::F32.tolerance().min(of.tolerance()) * scale;
        assert!((got - want).abs() <= allowed, "{what}, {i}: {got}, not {want} (within {allowed:e})");
    }
}
