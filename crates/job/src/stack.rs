//! The stacks of a worker's threads, when its launcher wants them before it kills the worker.

use crate::pulse::Page;
use nix::unistd::gettid;
use std::backtrace::Backtrace;
use std::os::raw::c_int;
use std::sync::Arc;
use std::time::Duration;

/// What the launcher sends to a thread whose stack it wants: a real-time signal that no C library keeps for itself.
pub const STACK_SIGNAL: c_int = 42;

/// Lets this process answer from now on. Where the system doesn't allow that, the launcher has to do without.
///
/// The answer isn't async-signal-safe: it takes memory, and reads the program's symbols. A thread that was interrupted while it
/// did the same stays stuck in here, or spoils what it shares with nobody; so the launcher waits for a moment only, and this
/// thread never goes on with what it was doing. The launcher kills the process next. A signal that nobody who looks at this
/// page has sent does nothing.
#[allow(unsafe_code, reason = "a signal handler; its block has its note")]
pub(crate) fn offer(page: &Arc<Page>) {
    let own = Arc::clone(page);
    let answer = move || {
        if own.is_asked_for_stack() {
            own.write_stack(&format!("\nthread {}:\n{}", gettid(), Backtrace::force_capture()));
            loop {
                std::thread::sleep(Duration::MAX);
            }
        }
    };
    // SAFETY: unless the launcher has asked, the handler is one atomic load. If it has, the handler may block for ever or leave
    // the allocator half changed, which harms no memory that a thread goes on to use: this one never leaves the handler, and the
    // others don't share what isn't behind a lock.
    let registered = unsafe { signal_hook::low_level::register(STACK_SIGNAL, answer) };
    if registered.is_ok() {
        page.offer_stack();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pulse::{Monitor, Pulse, Section};
    use signal_hook::low_level::raise;
    use std::os::fd::{AsFd, AsRawFd};
    use std::sync::mpsc::channel;

    #[test]
    fn a_thread_that_is_asked_says_where_it_is_and_does_nothing_else_from_then_on() {
        let monitor = Monitor::make().unwrap();
        let pulse = Pulse::inherited(monitor.as_fd().as_raw_fd() as u32);
        let (ask, asked) = channel();
        let thread = std::thread::spawn(move || {
            let _step = pulse.enter(Section::Step(0));
            // Nobody wants anything yet.
            raise(STACK_SIGNAL).unwrap();
            asked.recv().unwrap();
            raise(STACK_SIGNAL).unwrap();
        });
        let stack = monitor.stack(|| ask.send(()).unwrap(), Duration::from_secs(60)).unwrap();
        let (_, tid) = monitor.thread().unwrap();
        assert!(
            stack.starts_with(&format!("\nthread {tid}:\n")) && stack.contains("low_level::raise"),
            "{stack}"
        );
        assert!(!thread.is_finished());
    }
}
