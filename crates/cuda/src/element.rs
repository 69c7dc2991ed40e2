//! The types of elements that kernels are compiled for.

/// What the tensors of a module hold. Kernels compute in float32 in any case.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Element {
    /// 32-bit IEEE float.
    F32,
    /// The upper half of a 32-bit IEEE float.
    Bf16,
    /// 16-bit IEEE float.
    F16,
}

impl Element {
    /// All of them.
    pub const ALL: [Element; 3] = [Element::F32, Element::Bf16, Element::F16];

    /// Size in bytes.
    pub const fn bytes(self) -> usize {
        match self {
            Element::F32 => 4,
            Element::Bf16 | Element::F16 => 2,
        }
    }

    /// Its name in the kernels' sources.
    pub const fn in_source(self) -> &'static str {
        match self {
            Element::F32 => "float",
            Element::Bf16 => "Bf16",
            Element::F16 => "F16",
        }
    }
}
