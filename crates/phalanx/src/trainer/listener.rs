//! Whoever listens to a run, whose time isn't the run's: a terminal may stand still for as long as its reader likes, and a rank
//! that waits for it doesn't hang.

use crate::error::Error;
use crate::event::{Concluded, Event, Observer};
use phalanx_job::{Pulse, Section};

/// An observer, and where it is said that it is its turn.
pub(super) struct Listener<'a> {
    pub(super) observer: &'a mut dyn Observer,
    pub(super) pulse: &'a Pulse,
}

impl Observer for Listener<'_> {
    fn event(&mut self, event: &Event) {
        let _free = self.pulse.enter(Section::Free);
        self.observer.event(event);
    }

    fn about(&mut self, start: &Event) {
        self.observer.about(start);
    }

    fn every(&self) -> u64 {
        self.observer.every()
    }

    fn pass_on(&mut self) -> Vec<Event> {
        self.observer.pass_on()
    }

    fn needs_whole(&self) -> bool {
        self.observer.needs_whole()
    }

    fn conclude(&mut self, end: &mut Concluded<'_>) -> Result<(), Error> {
        let _free = self.pulse.enter(Section::Free);
        self.observer.conclude(end)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use phalanx_job::Monitor;
    use std::os::fd::{AsFd, AsRawFd};

    /// Sees what the launcher would see while it is told.
    struct Looks<'a>(&'a Monitor, Vec<Section>);

    impl Observer for Looks<'_> {
        fn event(&mut self, _: &Event) {
            self.1.push(self.0.look().section);
        }
    }

    #[test]
    fn who_listens_may_take_as_long_as_it_likes() {
        let monitor = Monitor::make().unwrap();
        let pulse = Pulse::inherited(monitor.as_fd().as_raw_fd() as u32);
        let mut looks = Looks(&monitor, Vec::new());
        let _step = pulse.enter(Section::Step(7));
        Listener { observer: &mut looks, pulse: &pulse }.event(&Event::Note { message: String::new() });
        assert_eq!((looks.1, monitor.look().section), (vec![Section::Free], Section::Step(7)));
    }
}
