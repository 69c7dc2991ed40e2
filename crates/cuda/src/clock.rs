//! How algorithms are measured: by whoever has streams and events.

use crate::error::Error;
use std::time::Duration;

/// Runs what it is given, as often as it likes, and says how long one run takes on the stream.
pub type Clock<'a> = dyn FnMut(&mut dyn FnMut() -> Result<(), Error>) -> Result<Duration, Error> + 'a;
