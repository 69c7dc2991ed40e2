//! The Python format of CIFAR: a pickled dict of labels and of one NumPy array, a row of 3072 bytes an image.

use super::IMAGE;
use crate::error::CifarProblem;
use phalanx_pickle::{Object, Value};

/// What the pickles may name: how NumPy's arrays are put together again, by its old and new names.
const GLOBALS: &[&str] = &[
    "numpy.core.multiarray._reconstruct",
    "numpy._core.multiarray._reconstruct",
    "numpy.ndarray",
    "numpy.dtype",
];

/// The images and the labels called `key` of a pickle.
pub(super) fn read(bytes: &[u8], key: &str) -> Result<(Vec<u8>, Vec<u8>), CifarProblem> {
    let dict = unpickle(bytes)?;
    let labels = entry(&dict, key)?;
    let byte = |label: &Value<'_>| label.as_int().and_then(|label| u8::try_from(label).ok());
    let all = labels.elements().and_then(|labels| labels.iter().map(byte).collect::<Option<Vec<u8>>>());
    let Some(all) = all else { return wrong("labels from 0 to 255", labels) };
    let data = entry(&dict, "data")?;
    let Some(images) = array(data, all.len()) else {
        return wrong(&format!("data of {} rows of {IMAGE} bytes", all.len()), data);
    };
    Ok((images.to_vec(), all))
}

/// The names of classes called `key` of a pickle.
pub(super) fn names(bytes: &[u8], key: &str) -> Result<Vec<String>, CifarProblem> {
    let dict = unpickle(bytes)?;
    let names = entry(&dict, key)?;
    let text = |name: &Value<'_>| match name {
        Value::Str(text) => Some(text.to_string()),
        Value::Bytes(text) => String::from_utf8(text.to_vec()).ok(),
        _ => None,
    };
    match names.elements().and_then(|names| names.iter().map(text).collect()) {
        Some(names) => Ok(names),
        None => wrong("a list of names", names),
    }
}

fn unpickle(bytes: &[u8]) -> Result<Value<'_>, CifarProblem> {
    let mut input = bytes;
    phalanx_pickle::read(&mut input, GLOBALS).map_err(CifarProblem::Pickle)
}

fn entry<'v, 'a>(dict: &'v Value<'a>, key: &str) -> Result<&'v Value<'a>, CifarProblem> {
    let lacks = || CifarProblem::Contents { what: format!("a dict with {key}"), found: dict.kind() };
    dict.get(key).ok_or_else(lacks)
}

fn wrong<T>(what: &str, found: &Value<'_>) -> Result<T, CifarProblem> {
    Err(CifarProblem::Contents { what: what.to_owned(), found: found.kind() })
}

/// The bytes of a NumPy array of `rows` images.
fn array<'v>(value: &'v Value<'_>, rows: usize) -> Option<&'v [u8]> {
    let Value::Object(array) = value else { return None };
    let Object { name, state: Some(state), .. } = &**array else { return None };
    // (version, shape, dtype, whether columns come first, bytes)
    let [_, shape, Value::Object(dtype), Value::Bool(false), Value::Bytes(bytes)] = state.elements()? else {
        return None;
    };
    let is_byte = |word: &Value<'_>| match word {
        Value::Str(text) => text == "u1",
        Value::Bytes(text) => **text == *b"u1",
        _ => false,
    };
    let sizes: Vec<i128> = shape.elements()?.iter().filter_map(Value::as_int).collect();
    let right = name.ends_with("._reconstruct")
        && dtype.name == "numpy.dtype"
        && dtype.args.first().is_some_and(is_byte)
        && sizes == [rows as i128, IMAGE as i128]
        && rows > 0
        && bytes.len() == rows * IMAGE;
    right.then_some(&**bytes)
}
