//! How a worker gets on, for who started it: a page of shared memory in which the thread that trains says what it is doing, and
//! whether it waits for other ranks just now. Saying it is a few stores; the launcher looks now and then, and whoever has made
//! no progress from look to look for too long hangs. How long that is, is not decided here, and no time is written down: the
//! launcher's own clock is enough, since it sees when the page changes.
//!
//! A program that isn't ours writes nothing and is never judged. One that is says nothing where nobody listens.

use crate::stack;
use nix::unistd::{getpid, gettid};
use phalanx_memory::{Words, unnamed_file};
use std::fs::File;
use std::io::{Error, ErrorKind, Result};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::fs::FileExt;
use std::sync::Arc;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};
use std::time::{Duration, Instant};

/// What a worker's thread is doing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Section {
    /// What may take as long as it likes.
    Free,
    /// What comes before the first step.
    Start,
    /// The step of this number.
    Step(u64),
    /// A batch of an evaluation.
    Evaluation,
    /// What training waits for when a checkpoint is taken, or the last one written.
    Checkpoint,
}

impl Section {
    fn words(self) -> (u64, u64) {
        match self {
            Section::Free => (0, 0),
            Section::Start => (1, 0),
            Section::Step(step) => (2, step),
            Section::Evaluation => (3, 0),
            Section::Checkpoint => (4, 0),
        }
    }

    /// Whatever a worker may have written there.
    fn of(kind: u64, step: u64) -> Section {
        match kind {
            1 => Section::Start,
            2 => Section::Step(step),
            3 => Section::Evaluation,
            4 => Section::Checkpoint,
            _ => Section::Free,
        }
    }
}

/// What the words of the page are, by their place.
mod at {
    /// Written by the launcher.
    pub(super) const VERSION: usize = 0;
    /// The section's kind, and above [`super::COUNT`] how often one was entered.
    pub(super) const SECTION: usize = 1;
    pub(super) const STEP: usize = 2;
    /// How many waits the thread is in, and above [`super::COUNT`] how many have ended.
    pub(super) const WAITS: usize = 3;
    /// The thread's process and its own number.
    pub(super) const THREAD: usize = 4;
    /// Whether its threads would write down their stacks.
    pub(super) const OFFERED: usize = 5;
    /// Whether the launcher wants that.
    pub(super) const ASKED: usize = 6;
    /// How many bytes of text there are then, and one more.
    pub(super) const WRITTEN: usize = 7;
    /// How often a step was left.
    pub(super) const STEPS: usize = 8;
}

const VERSION: u64 = 1;
/// One more in the upper part of a word.
const COUNT: u64 = 1 << 8;
/// The words have a page of their own; the text of a stack comes after it.
const PAGE: u64 = 4096;
const TEXT: usize = 128 << 10;
const BYTES: usize = PAGE as usize + TEXT;
/// How often one looks whether a stack is there.
const NAP: Duration = Duration::from_millis(10);

pub(crate) struct Page {
    words: Words,
    file: File,
}

impl Page {
    fn load(&self, at: usize) -> u64 {
        self.words[at].load(Relaxed)
    }

    fn store(&self, at: usize, word: u64) {
        self.words[at].store(word, Relaxed);
    }

    fn enter(&self, (kind, step): (u64, u64)) {
        let thread = this_thread();
        if self.load(at::THREAD) != thread {
            // The other one's waits aren't this one's.
            self.store(at::WAITS, (self.load(at::WAITS) & !(COUNT - 1)) + COUNT);
            self.store(at::THREAD, thread);
        }
        if let Section::Step(_) = Section::of(self.load(at::SECTION) % COUNT, 0) {
            self.store(at::STEPS, self.load(at::STEPS) + 1);
        }
        self.store(at::STEP, step);
        self.store(at::SECTION, (self.load(at::SECTION) & !(COUNT - 1)) + COUNT + kind);
    }

    /// Moves the word of the waits, if it is this thread's.
    fn wait(&self, change: impl FnOnce(u64) -> u64) {
        if self.load(at::THREAD) == this_thread() {
            self.store(at::WAITS, change(self.load(at::WAITS)));
        }
    }

    pub(crate) fn offer_stack(&self) {
        self.store(at::OFFERED, 1);
    }

    pub(crate) fn is_asked_for_stack(&self) -> bool {
        self.load(at::ASKED) != 0
    }

    pub(crate) fn write_stack(&self, text: &str) {
        let text = &text.as_bytes()[..text.len().min(TEXT)];
        // Where that can't be done, the launcher has what the system knows.
        if self.file.write_all_at(text, PAGE).is_ok() {
            self.words[at::WRITTEN].store(text.len() as u64 + 1, Release);
        }
    }
}

/// This process and this thread. The system is asked once a thread.
fn this_thread() -> u64 {
    thread_local! {
        static NUMBER: u64 = (getpid().as_raw() as u64) << 32 | gettid().as_raw() as u64;
    }
    NUMBER.with(|number| *number)
}

/// A worker's end: where its thread says what it is doing. Clones are the same.
///
/// ```
/// use phalanx_job::{Pulse, Section};
/// let pulse = Pulse::none(); // a worker of `phalanx run` has one that is listened to
/// for step in 0..10 {
///     let _step = pulse.enter(Section::Step(step));
///     // ... and when it ends, the thread is where it was before.
/// }
/// ```
#[derive(Clone, Default)]
pub struct Pulse(Option<Arc<Page>>);

impl Pulse {
    /// Nobody listens.
    pub fn none() -> Pulse {
        Pulse(None)
    }

    /// The memory behind an inherited descriptor; none that is listened to if it is something else by now. From then on this
    /// process answers the launcher who asks for a stack.
    pub fn inherited(fd: u32) -> Pulse {
        // Opened anew through /proc, so that this process has one of its own.
        let opened = File::options().read(true).write(true).open(format!("/proc/self/fd/{fd}"));
        let page = opened.and_then(Page::open).map(Arc::new).ok();
        if let Some(page) = &page {
            stack::offer(page);
        }
        Pulse(page)
    }

    /// Says that this thread does this now, until what is returned is dropped; then it does again what it did before.
    pub fn enter(&self, section: Section) -> Entered {
        let before = self.0.as_ref().map(|page| {
            let before = (page.load(at::SECTION) % COUNT, page.load(at::STEP));
            page.enter(section.words());
            (Arc::clone(page), before)
        });
        Entered(before)
    }

    /// Says that this thread waits for other ranks, who are to blame if it waits for long, until what is returned is dropped.
    pub fn wait(&self) -> Waiting {
        self.wait_begins();
        Waiting(self.clone())
    }

    /// As [`Pulse::wait`], up to [`Pulse::wait_ends`].
    pub fn wait_begins(&self) {
        if let Some(page) = &self.0 {
            page.wait(|waits| waits + 1);
        }
    }

    /// The other end of [`Pulse::wait_begins`].
    pub fn wait_ends(&self) {
        if let Some(page) = &self.0 {
            // Whoever began to wait before it was this thread's turn is in none.
            page.wait(|waits| if waits % COUNT > 0 { waits - 1 + COUNT } else { waits });
        }
    }
}

/// A section that the thread is in.
#[must_use = "it ends when dropped"]
pub struct Entered(Option<(Arc<Page>, (u64, u64))>);

impl Drop for Entered {
    fn drop(&mut self) {
        if let Some((page, before)) = &self.0 {
            page.enter(*before);
        }
    }
}

/// A wait that the thread is in.
#[must_use = "it ends when dropped"]
pub struct Waiting(Pulse);

impl Drop for Waiting {
    fn drop(&mut self) {
        self.0.wait_ends();
    }
}

/// The launcher's end of a pulse.
pub struct Monitor(Page);

/// What the launcher sees; as long as it is the same, the worker makes no progress.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Look {
    /// What the thread is doing.
    pub section: Section,
    /// How often it has entered a section.
    pub entered: u64,
    /// How often it has left a step.
    pub steps: u64,
    /// How many waits for other ranks have ended.
    pub waits: u64,
    /// Whether it is in one.
    pub is_waiting: bool,
}

impl Monitor {
    /// Of a worker that is to be started.
    pub fn make() -> Result<Monitor> {
        let file = unnamed_file("phalanx-pulse", BYTES)?;
        let page = Page::map(file)?;
        page.store(at::VERSION, VERSION);
        Ok(Monitor(page))
    }

    /// What the worker is doing.
    pub fn look(&self) -> Look {
        let page = &self.0;
        let (section, waits) = (page.load(at::SECTION), page.load(at::WAITS));
        Look {
            section: Section::of(section % COUNT, page.load(at::STEP)),
            entered: section / COUNT,
            steps: page.load(at::STEPS),
            waits: waits / COUNT,
            is_waiting: waits % COUNT > 0,
        }
    }

    /// The process and the thread that said so last, if one did.
    pub fn thread(&self) -> Option<(i32, i32)> {
        let thread = self.0.load(at::THREAD);
        (thread != 0).then_some(((thread >> 32) as i32, thread as i32))
    }

    /// Has a thread of that process write down its stack, once `signal` has sent it [`crate::STACK_SIGNAL`]; it does nothing else from
    /// then on. None if it can't, or not so soon.
    pub fn stack(&self, signal: impl FnOnce(), patience: Duration) -> Option<String> {
        if self.0.load(at::OFFERED) == 0 {
            return None;
        }
        self.0.store(at::WRITTEN, 0);
        self.0.store(at::ASKED, 1);
        signal();
        let until = Instant::now() + patience;
        let written = loop {
            match self.0.words[at::WRITTEN].load(Acquire) {
                0 if Instant::now() >= until => return None,
                0 => std::thread::sleep(NAP),
                written => break (written - 1) as usize,
            }
        };
        let mut text = vec![0; written.min(TEXT)];
        self.0.file.read_exact_at(&mut text, PAGE).ok()?;
        Some(String::from_utf8_lossy(&text).into_owned())
    }
}

/// What the worker is to inherit.
impl AsFd for Monitor {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.file.as_fd()
    }
}

impl Page {
    fn map(file: File) -> Result<Page> {
        Ok(Page { words: Words::open(file.try_clone()?, BYTES)?, file })
    }

    /// What a launcher has made.
    fn open(file: File) -> Result<Page> {
        let page = Page::map(file)?;
        match page.load(at::VERSION) {
            VERSION => Ok(page),
            other => Err(Error::new(ErrorKind::InvalidData, format!("a pulse of version {other}"))),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::fd::AsRawFd;

    fn pair() -> (Monitor, Pulse) {
        let monitor = Monitor::make().unwrap();
        let pulse = Pulse::inherited(monitor.as_fd().as_raw_fd() as u32);
        assert!(pulse.0.is_some());
        (monitor, pulse)
    }

    #[test]
    fn what_the_thread_says_is_seen_and_ends_where_it_began() {
        let (monitor, pulse) = pair();
        assert_eq!(
            (monitor.look().section, monitor.look().entered, monitor.thread()),
            (Section::Free, 0, None)
        );
        let start = pulse.enter(Section::Start);
        assert_eq!(monitor.thread(), Some((getpid().as_raw(), gettid().as_raw())));
        let step = pulse.enter(Section::Step(1 << 40));
        assert_eq!(monitor.look().section, Section::Step(1 << 40));
        drop(step);
        assert_eq!((monitor.look().section, monitor.look().entered), (Section::Start, 3));
        drop(start);
        assert_eq!(monitor.look().section, Section::Free);
    }

    #[test]
    fn waits_lie_in_each_other_and_are_those_of_the_thread_that_trains() {
        let (monitor, pulse) = pair();
        let _step = pulse.enter(Section::Step(0));
        let before = monitor.look().waits;
        let seen = || (monitor.look().waits - before, monitor.look().is_waiting);
        let outer = pulse.wait();
        let inner = pulse.wait();
        drop(inner);
        assert_eq!(seen(), (1, true));
        drop(outer);
        assert_eq!(seen(), (2, false));
        std::thread::scope(|scope| {
            scope.spawn(|| {
                pulse.wait_begins();
                assert_eq!(seen(), (2, false));
                let _evaluation = pulse.enter(Section::Evaluation);
                pulse.wait_ends();
                assert!(!monitor.look().is_waiting);
            });
        });
    }

    #[test]
    fn what_is_no_pulse_is_not_written_to() {
        let other = unnamed_file("other", BYTES).unwrap();
        for fd in [other.as_raw_fd() as u32, u32::MAX] {
            assert!(Pulse::inherited(fd).0.is_none());
        }
        drop(Pulse::none().enter(Section::Start));
        let mut bytes = [1; 64];
        other.read_exact_at(&mut bytes, 0).unwrap();
        assert_eq!(bytes, [0; 64]);
    }
}
