//! Files of weights as PyTorch's `torch.save` writes them.
//!
//! Such a file is a pickle and the numbers of its tensors, either in a zip archive (`pth/archive.rs`) or one after the other,
//! as before PyTorch 1.6 (`pth/legacy.rs`). The pickle is read as data by `phalanx-pickle`: nothing that it names is run, and
//! what no file of weights names is refused. This file finds the state dict among the values; `pth/tensor.rs` takes a tensor's
//! numbers from its storage.
//!
//! **W-BOUND**: what is kept is bounded by the file's length. The pickle bounds itself; archives unpack to [`MAX_RATIO`] times
//! their length at most; and tensors, which may repeat the numbers of a storage, are counted before they are made.

mod archive;
mod legacy;
mod tensor;

use crate::weights::Weights;
use archive::Archive;
use phalanx_pickle::{Error as PickleError, Value};
use phalanx_tensor::Shape;
use std::collections::{HashMap, HashSet};
use tensor::{DTYPES, Storage, TensorParts, Values};

/// How many times longer than the file what is in it may be, for each way of packing it smaller.
const MAX_RATIO: u64 = 16;

/// What even the smallest file may unpack to, in bytes.
const SMALL: u64 = 16 << 20;

/// Where checkpoints keep the state dict of the model.
const MODEL_KEYS: [&str; 4] = ["model", "state_dict", "model_state_dict", "net"];

/// What files of weights name beside storages and dtypes: tensors, containers, and what checkpoints hold of options, counters
/// and scores. The latter are passed over.
const GLOBALS: &[&str] = &[
    "torch._utils._rebuild_tensor",
    "torch._utils._rebuild_tensor_v2",
    "torch._utils._rebuild_tensor_v3",
    "torch._utils._rebuild_parameter",
    "torch._utils._rebuild_parameter_with_state",
    "torch.storage.UntypedStorage",
    "torch.Size",
    "torch.device",
    ORDERED_DICT,
    "collections.Counter",
    "collections.defaultdict",
    "argparse.Namespace",
    "__builtin__.dict",
    "__builtin__.set",
    "builtins.dict",
    "builtins.set",
    "_codecs.encode",
    "numpy.dtype",
    "numpy.ndarray",
    "numpy.core.multiarray._reconstruct",
    "numpy.core.multiarray.scalar",
    "numpy._core.multiarray._reconstruct",
    "numpy._core.multiarray.scalar",
];

const ORDERED_DICT: &str = "collections.OrderedDict";

/// Whether a file that starts like this is one of PyTorch's: a zip archive or a pickle. A safetensors file may start with the
/// same two bytes as a pickle, but has a brace after its eight bytes of length.
pub(crate) fn is_pth(bytes: &[u8]) -> bool {
    let pickle = matches!(bytes, [0x80, 0..=5, ..]) && bytes.get(8) != Some(&b'{');
    pickle || bytes.starts_with(b"PK\x03\x04")
}

/// Reads the float tensors of the state dict in a file; says what is wrong with it.
pub(crate) fn read(bytes: &[u8]) -> Result<Weights, String> {
    let len = bytes.len() as u64;
    if bytes.starts_with(b"PK") {
        let mut archive = Archive::open(bytes)?;
        let pickle = archive.entry("data.pkl")?;
        weights(&unpickle(&mut pickle.as_slice())?, &mut Storages::Archive(archive, HashMap::new()), len)
    } else {
        let (object, storages) = legacy::open(bytes)?;
        weights(&object, &mut Storages::Legacy(storages), len)
    }
}

fn unpickle<'a>(input: &mut &'a [u8]) -> Result<Value<'a>, String> {
    let dtypes = DTYPES.iter().flat_map(|dtype| [dtype.storage, dtype.name]);
    let globals: Vec<&str> = GLOBALS.iter().copied().chain(dtypes).collect();
    phalanx_pickle::read(input, &globals).map_err(|error| match error {
        PickleError::Refused { name } => format!(
            "the file asks for {name}, which no file of weights needs: refused\n\
             hint: if you trust where it comes from, load it in PyTorch and save the weights alone: \
             torch.save(model.state_dict(), path)"
        ),
        other => format!("its pickle is broken: {other}"),
    })
}

/// The numbers that tensors refer to, by the key of their storage.
enum Storages<'a> {
    /// With those that were read already: several tensors may share one.
    Archive(Archive<'a>, HashMap<String, Vec<u8>>),
    Legacy(HashMap<String, &'a [u8]>),
}

impl Storages<'_> {
    fn get(&mut self, key: &str) -> Result<Storage<'_>, String> {
        match self {
            Storages::Archive(archive, known) => {
                if !known.contains_key(key) {
                    let bytes = archive.entry(&format!("data/{key}"))?;
                    known.insert(key.to_owned(), bytes);
                }
                Ok(Storage { bytes: &known[key], big_endian: archive.big_endian })
            }
            // PyTorch turned these to the small end on every machine.
            Storages::Legacy(storages) => match storages.get(key) {
                Some(bytes) => Ok(Storage { bytes, big_endian: false }),
                None => Err(format!("there is no storage {key:?}")),
            },
        }
    }
}

/// The float tensors of the state dict in `object`. Those of integers are counters and the like, which no model here has.
fn weights(object: &Value, storages: &mut Storages, file_len: u64) -> Result<Weights, String> {
    let state = state_dict(object)?;
    let prefix = Weights::prefix_of(state.iter().map(|(name, _)| *name));
    let mut weights = Weights::default();
    let mut names = HashSet::new();
    let mut values_left = file_len.saturating_mul(MAX_RATIO).saturating_add(SMALL) / size_of::<f32>() as u64;
    for (name, tensor) in state {
        if !names.insert(name) {
            return Err(format!("{name:?} is there twice"));
        }
        let of_tensor = |reason: String| format!("{name:?}: {reason}");
        let parts = TensorParts::of(tensor).map_err(of_tensor)?;
        match parts.dtype.values {
            Values::Float(_) => {}
            Values::Whole => continue,
            Values::Unread => {
                return Err(format!(
                    "{name:?} holds {}, which is not read\nhint: convert it to torch.float32 in PyTorch",
                    parts.dtype.name
                ));
            }
        }
        let shape = Shape::try_new(&parts.shape).ok_or_else(|| {
            of_tensor(format!("shape {:?} has more elements than there can be", parts.shape))
        })?;
        let count = shape.count();
        values_left = values_left.checked_sub(count as u64).ok_or_else(|| {
            format!("{name:?} and what comes before it repeat their numbers more than a file of {file_len} bytes may")
        })?;
        let storage = storages.get(parts.storage).map_err(of_tensor)?;
        let values = parts.gather(&storage, count).map_err(of_tensor)?;
        weights.push(name[prefix.len()..].to_owned(), shape, &values);
    }
    Ok(weights)
}

/// Names and tensors, in order.
type StateDict<'v, 'a> = Vec<(&'v str, &'v Value<'a>)>;

/// The state dict that `object` is, or has under the one key of [`MODEL_KEYS`] that leads to any.
fn state_dict<'v, 'a>(object: &'v Value<'a>) -> Result<StateDict<'v, 'a>, String> {
    if let Some(state) = as_state_dict(object) {
        return Ok(state);
    }
    let items = items(object).ok_or_else(|| {
        format!(
            "it holds {}, where a state dict or a checkpoint with one was expected\n\
             hint: torch.save(model.state_dict(), path) writes a state dict",
            object.kind()
        )
    })?;
    let under = |key| items.iter().rev().find(|(k, _)| text(k) == Some(key));
    let found =
        MODEL_KEYS.iter().filter_map(|&key| Some((key, as_state_dict(under(key)?.1)?))).collect::<Vec<_>>();
    match <[_; 1]>::try_from(found) {
        Ok([(_, state)]) => Ok(state),
        Err(found) => {
            let what = match found.as_slice() {
                [] => {
                    "it holds no state dict, at the top or under model, state_dict, model_state_dict or net"
                        .into()
                }
                several => {
                    let keys: Vec<&str> = several.iter().map(|(key, _)| *key).collect();
                    format!("it holds several state dicts: {}", keys.join(", "))
                }
            };
            Err(format!(
                "{what}; its keys at the top: {}\n\
                 hint: take the right one in PyTorch and save it alone: torch.save(checkpoint[KEY], path)",
                listed(&items)
            ))
        }
    }
}

/// The first keys, for a message.
fn listed(items: &[(&Value, &Value)]) -> String {
    const MOST: usize = 20;
    let shown = |key: &Value| match text(key) {
        Some(text) => text.chars().take(80).collect::<String>().escape_debug().to_string(),
        None => key.kind(),
    };
    let keys: Vec<String> = items.iter().take(MOST).map(|(key, _)| shown(key)).collect();
    match items.len() {
        0 => "none".to_owned(),
        n if n > MOST => format!("{} and {} more", keys.join(", "), n - MOST),
        _ => keys.join(", "),
    }
}

/// The names and tensors, if everything in `value` is a tensor under a name. What a module keeps as its extra state, which may
/// be anything, is passed over.
fn as_state_dict<'v, 'a>(value: &'v Value<'a>) -> Option<StateDict<'v, 'a>> {
    let mut state = Vec::new();
    for (key, value) in items(value)? {
        let name = text(key)?;
        if tensor::is_tensor(value) {
            state.push((name, value));
        } else if !name.ends_with("_extra_state") {
            return None;
        }
    }
    (!state.is_empty()).then_some(state)
}

/// The keys and values of a dict or an `OrderedDict`, which Python 2 wrote as a call with a list of pairs.
fn items<'v, 'a>(value: &'v Value<'a>) -> Option<Vec<(&'v Value<'a>, &'v Value<'a>)>> {
    match value {
        Value::Dict(items) => Some(items.iter().map(|(key, value)| (key, value)).collect()),
        Value::Object(object) if object.name == ORDERED_DICT => {
            let given = match object.args.as_slice() {
                [] => &[],
                [pairs] => pairs.elements()?,
                _ => return None,
            };
            let given = given.iter().map(|pair| match pair.elements()? {
                [key, value] => Some((key, value)),
                _ => None,
            });
            given.chain(object.items.iter().map(|(key, value)| Some((key, value)))).collect()
        }
        _ => None,
    }
}

/// Text, or a `str` of Python 2 that is UTF-8.
fn text<'v>(value: &'v Value) -> Option<&'v str> {
    match value {
        Value::Str(text) => Some(text),
        Value::Bytes(bytes) => std::str::from_utf8(bytes).ok(),
        _ => None,
    }
}
