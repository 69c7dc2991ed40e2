//! Python's pickles, read as data.
//!
//! A pickle is a program for a small stack machine, and Python's own machine calls whatever function the program names. The one
//! here never does: [`read`] yields plain [`Value`]s, and a call becomes an [`Object`] that says what was to be called with
//! what, for the caller to interpret. The caller also passes the list of names it understands; a pickle that asks for any
//! other is refused at that point.
//!
//! All protocols (0 to 5) are read, from Python 2 too. This crate doesn't decide what a name means, and reads no files.
//!
//! ```
//! use phalanx_pickle::{Error, read};
//!
//! // {"lr": 0.5} by Python's pickle.dumps, protocol 2.
//! let mut bytes: &[u8] = b"\x80\x02}q\x00X\x02\x00\x00\x00lrq\x01G?\xe0\x00\x00\x00\x00\x00\x00s.";
//! let value = read(&mut bytes, &[])?;
//! assert_eq!(value.get("lr").and_then(|lr| lr.as_float()), Some(0.5));
//! assert!(bytes.is_empty());
//!
//! // What would run `ls` in Python.
//! let mut bytes: &[u8] = b"cposix\nsystem\n(S'ls'\ntR.";
//! assert_eq!(read(&mut bytes, &[]), Err(Error::Refused { name: "posix.system".into() }));
//! # Ok::<(), Error>(())
//! ```
#![forbid(unsafe_code)]

mod error;
mod machine;
mod text;
mod tree;
mod value;

pub use error::Error;
pub use machine::{MAX_VALUES, read};
pub use tree::MAX_DEPTH;
pub use value::{Object, Value};
