//! Why a pickle isn't read.

use thiserror::Error;

/// Why a pickle isn't read. Places are bytes from the start of the pickle.
#[derive(Clone, Debug, Error, PartialEq)]
pub enum Error {
    /// It names a function or class that the caller didn't list. Nothing was done with it.
    #[error("it asks for {name}, which is not on the list: refused")]
    Refused {
        /// The module and the name in it; shortened when long, with escapes for what can't be printed.
        name: String,
    },
    /// It ends too early.
    #[error("it ends in byte {at}, where {wanted} more were expected")]
    Cut {
        /// Where the missing bytes should start.
        at: usize,
        /// How many bytes were expected there.
        wanted: u64,
    },
    /// It is no pickle, a broken one, or one that does what data needs not.
    #[error("byte {at}: {reason}")]
    Invalid {
        /// Where.
        at: usize,
        /// What is wrong there.
        reason: String,
    },
    /// It holds more values than its length justifies, or than are ever read.
    #[error("it unfolds to more than {limit} values")]
    TooLarge {
        /// The most values for a pickle of this length.
        limit: usize,
    },
    /// Its values lie too deep in each other, or one holds itself.
    #[error("its values nest deeper than {limit}, or hold themselves")]
    TooDeep {
        /// The deepest that is read.
        limit: usize,
    },
}
