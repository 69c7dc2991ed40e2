//! Leaving a step in which others are lost. Nothing comes of it any more, and it would be found out only where the others'
//! gradients are waited for. So a rank that makes a step listens meanwhile to whoever leads the run, which learns of a process's
//! end at once, and gives the step up between two operations.

use super::{Worker, locked};
use phalanx_tensor::looking;
use std::cell::Cell;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::rc::Rc;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// How long may pass until a loss is heard of, where operations are short. Listening costs a microsecond.
const LISTEN_EVERY: Duration = Duration::from_millis(2);

/// What a step ends with that is given up: no panic that anybody else is to see.
struct GivenUp;

impl Worker {
    /// Makes a part of a step that ranks make together; none where it was given up, because one of them is lost. The group is
    /// ended then, and what the part was to make is half made.
    pub(crate) fn unless_lost<R>(&self, part: impl FnOnce() -> R) -> Option<R> {
        let Some(link) = self.in_place_link() else { return Some(part()) };
        let (link, next) = (Arc::clone(link), Cell::new(Instant::now() + LISTEN_EVERY));
        let look = move || {
            let now = Instant::now();
            if now >= next.get() {
                next.set(now + LISTEN_EVERY);
                if locked(&link).is_loss_told() {
                    resume_unwind(Box::new(GivenUp));
                }
            }
        };
        // What is half made is made anew from where the step began, or dropped with the membership.
        match catch_unwind(AssertUnwindSafe(|| looking(Rc::new(look), part))) {
            Ok(made) => Some(made),
            Err(panic) if panic.is::<GivenUp>() => {
                self.group().abort("it has heard that another rank is lost");
                None
            }
            Err(panic) => resume_unwind(panic),
        }
    }
}
