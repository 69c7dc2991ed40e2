//! What a pickle holds.

use std::borrow::Cow;

/// A value of a pickle. Text and bytes are borrowed from the pickle wherever it holds them as they are.
#[derive(Clone, Debug, PartialEq)]
pub enum Value<'a> {
    /// `None`.
    None,
    /// `True` or `False`.
    Bool(bool),
    /// An integer; those beyond 128 bits aren't read.
    Int(i128),
    /// A float.
    Float(f64),
    /// `bytes`, `bytearray`, or a `str` of Python 2, whose encoding only its writer knows.
    Bytes(Cow<'a, [u8]>),
    /// Text.
    Str(Cow<'a, str>),
    /// A list.
    List(Vec<Value<'a>>),
    /// A tuple.
    Tuple(Vec<Value<'a>>),
    /// A set or a frozen set, in the order of writing.
    Set(Vec<Value<'a>>),
    /// A dict, in the order of writing; of two equal keys the later one counts.
    Dict(Vec<(Value<'a>, Value<'a>)>),
    /// A function or class by its name: one of those that the caller listed.
    Global(&'a str),
    /// A call of a function or class, not carried out.
    Object(Box<Object<'a>>),
    /// A reference to something outside of the pickle.
    Persistent(Box<Value<'a>>),
}

/// A call that Python would carry out, and what it would then do to the result.
#[derive(Clone, Debug, PartialEq)]
pub struct Object<'a> {
    /// The function or class: one of the names that the caller listed.
    pub name: &'a str,
    /// What it is called with.
    pub args: Vec<Value<'a>>,
    /// What `__setstate__` would get, or `__dict__` be updated with.
    pub state: Option<Value<'a>>,
    /// What would be set by `object[key] = value`, in order.
    pub items: Vec<(Value<'a>, Value<'a>)>,
}

impl<'a> Value<'a> {
    /// The text, if it is text.
    pub fn as_str(&self) -> Option<&str> {
        match self {
            Value::Str(text) => Some(text),
            _ => None,
        }
    }

    /// The integer, if it is one.
    pub fn as_int(&self) -> Option<i128> {
        match self {
            Value::Int(number) => Some(*number),
            _ => None,
        }
    }

    /// The float, if it is one.
    pub fn as_float(&self) -> Option<f64> {
        match self {
            Value::Float(number) => Some(*number),
            _ => None,
        }
    }

    /// The elements of a list or tuple.
    pub fn elements(&self) -> Option<&[Value<'a>]> {
        match self {
            Value::List(elements) | Value::Tuple(elements) => Some(elements),
            _ => None,
        }
    }

    /// What a dict has under `key`, written as text or as a `str` of Python 2.
    pub fn get(&self, key: &str) -> Option<&Value<'a>> {
        let Value::Dict(items) = self else { return None };
        let is_key = |k: &Value| match k {
            Value::Str(text) => text == key,
            Value::Bytes(bytes) => **bytes == *key.as_bytes(),
            _ => false,
        };
        items.iter().rev().find(|(k, _)| is_key(k)).map(|(_, value)| value)
    }

    /// What it is, for messages: `a list`, or `a call of NAME`.
    pub fn kind(&self) -> String {
        let kind = match self {
            Value::None => "None",
            Value::Bool(_) => "a bool",
            Value::Int(_) => "an integer",
            Value::Float(_) => "a float",
            Value::Bytes(_) => "bytes",
            Value::Str(_) => "text",
            Value::List(_) => "a list",
            Value::Tuple(_) => "a tuple",
            Value::Set(_) => "a set",
            Value::Dict(_) => "a dict",
            Value::Global(name) => return (*name).to_owned(),
            Value::Object(object) => return format!("a call of {}", object.name),
            Value::Persistent(_) => "a reference to something outside",
        };
        kind.to_owned()
    }
}
