//! The format before PyTorch 1.6: five pickles (a magic number, the version, facts on the machine, the object, the storages'
//! keys), then the storages in the order of the keys, each as its length and its numbers.

use super::tensor::{DType, storage_of};
use super::{text, unpickle};
use phalanx_pickle::Value;
use std::collections::HashMap;

const MAGIC: i128 = 0x1950_a86a_20f9_469c_fc6c;
const VERSION: i128 = 1001;

/// The object, and the bytes of each storage by its key.
pub(super) fn open(bytes: &[u8]) -> Result<(Value<'_>, HashMap<String, &[u8]>), String> {
    let mut rest = bytes;
    if unpickle(&mut rest)?.as_int() != Some(MAGIC) {
        return Err("it is a pickle, but none that torch.save wrote\n\
             hint: torch.save(model.state_dict(), path) writes one"
            .into());
    }
    let version = unpickle(&mut rest)?;
    if version.as_int() != Some(VERSION) {
        return Err(format!("its version is {version:?}: only {VERSION} is known"));
    }
    unpickle(&mut rest)?;
    let object = unpickle(&mut rest)?;
    let keys = unpickle(&mut rest)?;
    let mut dtypes = HashMap::new();
    collect_storages(&object, &mut dtypes)?;

    let mut storages = HashMap::new();
    for key in keys.elements().ok_or("its storages have no list of keys")? {
        let key = text(key).ok_or_else(|| format!("a storage has {} for its key", key.kind()))?;
        let dtype = dtypes.get(key).ok_or_else(|| format!("no tensor refers to storage {key:?}"))?;
        let cut = |wanted: u64, left: usize| {
            format!("it ends early: storage {key:?} has {wanted} bytes, and {left} are left")
        };
        let (len, after) = rest.split_first_chunk::<8>().ok_or_else(|| cut(8, rest.len()))?;
        let len = u64::from_le_bytes(*len);
        let wanted = len.saturating_mul(dtype.size as u64);
        let split = usize::try_from(wanted).ok().and_then(|wanted| after.split_at_checked(wanted));
        let (content, after) = split.ok_or_else(|| cut(wanted, after.len()))?;
        rest = after;
        storages.insert(key.to_owned(), content);
    }
    Ok((object, storages))
}

/// Which dtype each storage has that is referred to from anywhere in `value`: the storages themselves don't say it, and to find
/// one those before it must be passed over. It recurses no deeper than the pickle's reader let `value` be.
fn collect_storages<'v>(value: &'v Value, into: &mut HashMap<&'v str, &'static DType>) -> Result<(), String> {
    let mut all = |values: &'v [Value]| values.iter().try_for_each(|value| collect_storages(value, into));
    match value {
        Value::List(values) | Value::Tuple(values) | Value::Set(values) => all(values),
        Value::Dict(items) => items.iter().try_for_each(|(key, value)| {
            collect_storages(key, into)?;
            collect_storages(value, into)
        }),
        Value::Object(object) => {
            all(&object.args)?;
            object.state.iter().try_for_each(|state| collect_storages(state, into))?;
            object.items.iter().try_for_each(|(key, value)| {
                collect_storages(key, into)?;
                collect_storages(value, into)
            })
        }
        Value::Persistent(_) => {
            let (key, dtype) = storage_of(value)?;
            let Some(dtype) = dtype else { return Err(format!("storage {key:?} has no dtype")) };
            into.insert(key, dtype);
            Ok(())
        }
        _ => Ok(()),
    }
}
