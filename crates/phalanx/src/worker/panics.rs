//! What a panic of this process said, which whoever unwinds because of it can't ask: a hook that notes it on its way to the one before.

use crate::error::Error;
use phalanx_job::Cause;
use phalanx_tensor::Device;
use std::any::Any;
use std::panic;
use std::sync::{Mutex, Once, PoisonError};

/// The latest, of whatever thread: that of a loader may be why this one panics.
static LATEST: Mutex<Option<String>> = Mutex::new(None);

/// The longest message that is told, in characters.
const MOST_WORDS: usize = 2000;

/// Notes from now on what panics say. The hook is the process's, as the panic message on standard error is.
pub(super) fn listen() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        let before = panic::take_hook();
        panic::set_hook(Box::new(move |info| {
            *LATEST.lock().unwrap_or_else(PoisonError::into_inner) = Some(words(info.payload()));
            before(info);
        }));
    });
}

/// The panic of a rank that is a thread.
pub(crate) fn error(rank: usize, panic: &(dyn Any + Send)) -> Error {
    Error::Panicked { rank, message: words(panic) }
}

fn words(payload: &(dyn Any + Send)) -> String {
    let message = payload.downcast_ref::<&str>().copied();
    let message = message.or_else(|| payload.downcast_ref::<String>().map(String::as_str));
    message.unwrap_or_default().chars().take(MOST_WORDS).collect()
}

/// What to tell of a worker that panics, whose device this is. One that found no memory left there would find none again.
pub(super) fn why(device: &Device) -> (String, Cause) {
    if let Some(told) = device.lacked() {
        return (told.to_string(), Cause::Setting);
    }
    let latest = LATEST.lock().unwrap_or_else(PoisonError::into_inner).clone();
    match latest.filter(|words| !words.is_empty()) {
        Some(words) => (format!("it panicked: {words}"), Cause::Unknown),
        None => ("it panicked".to_owned(), Cause::Unknown),
    }
}
