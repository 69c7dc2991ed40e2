//! How functions of NVIDIA's libraries are written down: as tables, one row a function or a constant, which become fields to call
//! and, in tests, assertions that a C++ compiler checks against NVIDIA's own headers (`headers`).

use crate::error::Error;
use crate::library::Library;
use std::mem::ManuallyDrop;

#[cfg(test)]
pub(crate) mod headers;

/// One row a function: the field, the library's name, and its type. Its library stays open.
macro_rules! functions {
    ($(#[$doc:meta])* $name:ident of $library:expr; $($field:ident $symbol:literal ($($parameter:ty),*) -> $result:ty;)*) => {
        $(#[$doc])*
        pub(crate) struct $name {
            $(pub(crate) $field: unsafe extern "C" fn($($parameter),*) -> $result,)*
            // The functions above are its. It stays for good: what it has running in threads, and does when one ends, is its own affair.
            // None where they are ours (`absent`).
            pub(crate) _library: std::mem::ManuallyDrop<Option<libloading::Library>>,
        }

        impl $name {
            /// Opens the library: from one of `folders` if it is there, else from where the system looks.
            pub(crate) fn open(folders: &[std::path::PathBuf]) -> Result<$name, crate::error::Error> {
                let library = $library.open(folders)?;
                // SAFETY: the types are those of the library's header, which a test compares, and the library lies beside them.
                Ok(unsafe {
                    $name {
                        $($field: crate::foreign::symbol(&library, $library, $symbol)?,)*
                        _library: std::mem::ManuallyDrop::new(Some(library)),
                    }
                })
            }

            /// The table, for the test that compares it with the header.
            #[cfg(test)]
            pub(crate) const TABLE: &'static [crate::foreign::Function] = &[$(crate::foreign::Function {
                name: $symbol,
                parameters: &[$(stringify!($parameter)),*],
                result: stringify!($result),
            }),*];
        }
    };
}

/// One row a constant: our name, the library's, and its value. `TABLE` lists them for the test that compares them with the header.
macro_rules! constants {
    ($($name:ident $symbol:literal $value:literal;)*) => {
        $(pub(crate) const $name: std::ffi::c_int = $value;)*

        /// The table, for the test that compares it with the header.
        #[cfg(test)]
        pub(crate) const TABLE: &[(&str, i64)] = &[$(($symbol, $value)),*];
    };
}

pub(crate) use {constants, functions};

/// What lies beside functions that are no library's.
pub(crate) fn no_library() -> ManuallyDrop<Option<libloading::Library>> {
    ManuallyDrop::new(None)
}

/// A function of a library.
///
/// # Safety
/// `F` is its type, and it isn't called after the library is closed.
pub(crate) unsafe fn symbol<F: Copy>(
    open: &libloading::Library,
    library: Library,
    name: &'static str,
) -> Result<F, Error> {
    // SAFETY: the type is the caller's promise.
    let found = unsafe { open.get::<F>(name.as_bytes()) };
    found.map(|symbol| *symbol).map_err(|_| Error::MissingFunction { library, function: name })
}

/// A row of a table of functions, as the words that it is written in.
#[cfg(test)]
pub(crate) struct Function {
    pub(crate) name: &'static str,
    pub(crate) parameters: &'static [&'static str],
    pub(crate) result: &'static str,
}
