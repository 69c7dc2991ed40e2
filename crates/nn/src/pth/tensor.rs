//! A tensor: which numbers of which storage, in which order.

use super::text;
use half::{bf16, f16};
use phalanx_pickle::Value;
use phalanx_tensor::MAX_DIMS;

/// A dtype of PyTorch.
#[derive(Debug)]
pub(super) struct DType {
    /// The class of storages that hold it.
    pub(super) storage: &'static str,
    pub(super) name: &'static str,
    /// Bytes of one number.
    pub(super) size: usize,
    pub(super) values: Values,
}

/// What becomes of the numbers of a dtype.
#[derive(Clone, Copy, Debug)]
pub(super) enum Values {
    /// They are converted to float32: from their bytes, the lowest first, in a word.
    Float(fn(u64) -> f32),
    /// They are integers or truth values, and left out.
    Whole,
    /// They can't be left out and aren't understood.
    Unread,
}

/// Every dtype that a storage can have. Those without a class of storages appear with the untyped one.
#[rustfmt::skip]
pub(super) const DTYPES: &[DType] = &[
    dtype("torch.FloatStorage", "torch.float32", 4, Values::Float(|word| f32::from_bits(word as u32))),
    dtype("torch.DoubleStorage", "torch.float64", 8, Values::Float(|word| f64::from_bits(word) as f32)),
    dtype("torch.HalfStorage", "torch.float16", 2, Values::Float(|word| f16::from_bits(word as u16).to_f32())),
    dtype("torch.BFloat16Storage", "torch.bfloat16", 2, Values::Float(|word| bf16::from_bits(word as u16).to_f32())),
    dtype("torch.LongStorage", "torch.int64", 8, Values::Whole),
    dtype("torch.IntStorage", "torch.int32", 4, Values::Whole),
    dtype("torch.ShortStorage", "torch.int16", 2, Values::Whole),
    dtype("torch.CharStorage", "torch.int8", 1, Values::Whole),
    dtype("torch.ByteStorage", "torch.uint8", 1, Values::Whole),
    dtype("torch.BoolStorage", "torch.bool", 1, Values::Whole),
    dtype(UNTYPED, "torch.uint16", 2, Values::Whole),
    dtype(UNTYPED, "torch.uint32", 4, Values::Whole),
    dtype(UNTYPED, "torch.uint64", 8, Values::Whole),
    dtype(UNTYPED, "torch.float8_e4m3fn", 1, Values::Unread),
    dtype(UNTYPED, "torch.float8_e5m2", 1, Values::Unread),
    dtype("torch.ComplexFloatStorage", "torch.complex64", 8, Values::Unread),
    dtype("torch.ComplexDoubleStorage", "torch.complex128", 16, Values::Unread),
];

const UNTYPED: &str = "torch.storage.UntypedStorage";

const fn dtype(storage: &'static str, name: &'static str, size: usize, values: Values) -> DType {
    DType { storage, name, size, values }
}

/// The bytes of a storage.
pub(super) struct Storage<'a> {
    pub(super) bytes: &'a [u8],
    pub(super) big_endian: bool,
}

impl Storage<'_> {
    /// The `i`-th number of `size` bytes, at most 8.
    fn word(&self, i: usize, size: usize) -> u64 {
        let mut bytes = [0; 8];
        bytes[..size].copy_from_slice(&self.bytes[i * size..][..size]);
        if self.big_endian {
            bytes[..size].reverse();
        }
        u64::from_le_bytes(bytes)
    }
}

/// Whether `value` is a call that makes a tensor.
pub(super) fn is_tensor(value: &Value) -> bool {
    matches!(value, Value::Object(object) if object.name.starts_with("torch._utils._rebuild_"))
}

/// What a call that makes a tensor says about it.
#[derive(Debug)]
pub(super) struct TensorParts<'v> {
    /// The key of the storage.
    pub(super) storage: &'v str,
    pub(super) dtype: &'static DType,
    /// Which number of the storage is the tensor's first.
    offset: usize,
    pub(super) shape: Vec<usize>,
    /// How many numbers lie from one element of each dimension to the next.
    strides: Vec<usize>,
    /// Whether what is stored is the negative of its elements, as an imaginary part of what was conjugated is.
    is_negative: bool,
}

impl<'v> TensorParts<'v> {
    /// Takes the call apart: `_rebuild_tensor_v2(storage, offset, shape, strides, ...)`, or `_rebuild_parameter(tensor, ...)`.
    pub(super) fn of(value: &'v Value) -> Result<TensorParts<'v>, String> {
        let Value::Object(object) = value else {
            return Err(format!("{} where a tensor was expected", value.kind()));
        };
        match (object.name, object.args.as_slice()) {
            (
                "torch._utils._rebuild_parameter" | "torch._utils._rebuild_parameter_with_state",
                [tensor, ..],
            ) => TensorParts::of(tensor),
            (
                name @ ("torch._utils._rebuild_tensor"
                | "torch._utils._rebuild_tensor_v2"
                | "torch._utils._rebuild_tensor_v3"),
                [storage, offset, shape, strides, rest @ ..],
            ) => {
                let (storage, typed) = storage_of(storage)?;
                // The third version names the dtype after two arguments that don't matter here.
                let named = match rest {
                    [_, _, Value::Global(dtype), ..] if name.ends_with("_v3") => {
                        DTYPES.iter().find(|known| known.name == *dtype)
                    }
                    _ => None,
                };
                let dtype = named.or(typed).ok_or_else(|| format!("storage {storage:?} has no dtype"))?;
                let (shape, strides) = (sizes("shape", shape)?, sizes("strides", strides)?);
                if shape.len() != strides.len() {
                    return Err(format!("shape {shape:?} and strides {strides:?} differ in length"));
                }
                if shape.len() > MAX_DIMS {
                    return Err(format!("{} dimensions, the most is {MAX_DIMS}", shape.len()));
                }
                // Behind what needs gradients, hooks, and in the third version the dtype.
                let metadata = rest.get(if name.ends_with("_v3") { 3 } else { 2 });
                let is_negative = metadata.map_or(Ok(false), is_negative)?;
                let offset = as_size(offset).ok_or("its offset in the storage is not a size")?;
                Ok(TensorParts { storage, dtype, offset, shape, strides, is_negative })
            }
            (name, args) => Err(format!("{name} with {} arguments makes no tensor", args.len())),
        }
    }

    /// The elements in row-major order, `count` of them. Only for dtypes of floats.
    pub(super) fn gather(&self, storage: &Storage, count: usize) -> Result<Vec<f32>, String> {
        let Values::Float(to_f32) = self.dtype.values else { unreachable!("the caller looks at the dtype") };
        if count == 0 {
            return Ok(Vec::new());
        }
        let size = self.dtype.size;
        let n_stored = storage.bytes.len() / size;
        let dims = self.shape.iter().zip(&self.strides);
        let last = dims
            .clone()
            .try_fold(self.offset, |at, (&size, &stride)| at.checked_add((size - 1).checked_mul(stride)?));
        if last.is_none_or(|last| last >= n_stored) {
            return Err(format!(
                "shape {:?} with strides {:?} from {} on reaches beyond its storage {:?}, which has {n_stored} numbers of {}",
                self.shape, self.strides, self.offset, self.storage, self.dtype.name
            ));
        }
        // Where the elements lie: those of the first dimension, and for each of them those of the next.
        let mut values = Vec::with_capacity(count);
        let mut index = vec![0; self.shape.len()];
        let mut at = self.offset;
        loop {
            let value = to_f32(storage.word(at, size));
            values.push(if self.is_negative { -value } else { value });
            let Some(d) = (0..index.len()).rev().find(|&d| index[d] + 1 < self.shape[d]) else {
                return Ok(values);
            };
            for (i, stride) in index.iter_mut().zip(&self.strides).skip(d + 1) {
                at -= *i * stride;
                *i = 0;
            }
            index[d] += 1;
            at += self.strides[d];
        }
    }
}

/// The key and the dtype of a storage that is referred to: `("storage", class, key, device, length)`. An untyped one has none.
pub(super) fn storage_of<'v>(reference: &'v Value) -> Result<(&'v str, Option<&'static DType>), String> {
    let Value::Persistent(id) = reference else {
        return Err(format!("{} where a storage was expected", reference.kind()));
    };
    let (class, key) = match id.elements() {
        Some([tag, Value::Global(class), key, _, _, view @ ..]) if text(tag) == Some("storage") => match view
        {
            [] | [Value::None] => (*class, text(key)),
            _ => {
                return Err("its storage is a part of another, as only the oldest PyTorch wrote it\n\
                 hint: load it in PyTorch and save it again"
                    .into());
            }
        },
        _ => return Err("a reference to something that isn't a storage".into()),
    };
    let key = key.ok_or("the key of a storage isn't text")?;
    if class == UNTYPED {
        return Ok((key, None));
    }
    let dtype = DTYPES.iter().find(|dtype| dtype.storage == class);
    Ok((key, Some(dtype.ok_or_else(|| format!("{class} is no class of storages"))?)))
}

/// What a tensor's metadata says of its sign.
fn is_negative(metadata: &Value) -> Result<bool, String> {
    let pairs = match metadata {
        Value::None => return Ok(false),
        Value::Dict(pairs) => pairs,
        other => return Err(format!("its metadata is {}, where a dict was expected", other.kind())),
    };
    let is_set =
        |name: &str| pairs.iter().any(|(key, value)| text(key) == Some(name) && *value == Value::Bool(true));
    let known = |key: &Value| text(key).is_some_and(|key| ["neg", "conj"].contains(&key));
    match pairs.iter().find(|(key, value)| !known(key) && *value != Value::Bool(false)) {
        Some((key, _)) => Err(format!("its metadata has {key:?}, which isn't known")),
        None => Ok(is_set("neg")),
    }
}

fn sizes(what: &str, value: &Value) -> Result<Vec<usize>, String> {
    // A torch.Size is a call with one tuple.
    let value = match value {
        Value::Object(object) if object.name == "torch.Size" => object.args.first(),
        value => Some(value),
    };
    let elements = value.and_then(Value::elements);
    let sizes = elements.and_then(|elements| elements.iter().map(as_size).collect());
    sizes.ok_or_else(|| format!("its {what} is not a tuple of sizes"))
}

fn as_size(value: &Value) -> Option<usize> {
    value.as_int().and_then(|size| usize::try_from(size).ok())
}
