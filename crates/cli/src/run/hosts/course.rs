//! When the agents of a run are to be told to end, and with which exit code the run ends: pure functions of what has happened.

use phalanx_job::DRAINED;
use signal_hook::consts::SIGTERM;
use std::time::{Duration, Instant};

/// How long agents have to end by themselves after one of them has failed: they tell each other, and say why.
const THEMSELVES: Duration = Duration::from_secs(5);
/// How long beyond their grace period agents may take to end.
const BEYOND: Duration = Duration::from_secs(15);

/// How the agent of a host ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Ended {
    /// With this code.
    Code(u8),
    /// Its session has broken, so nothing is known of it.
    Lost,
}

impl Ended {
    /// Whether the run can have gone well.
    fn is_well(self) -> bool {
        matches!(self, Ended::Code(0 | DRAINED))
    }
}

/// A run on several hosts.
pub(super) struct Course {
    ended: Vec<Option<Ended>>,
    /// The first that ended badly, and when there were too few left.
    first_bad: Option<Ended>,
    too_few: Option<Instant>,
    /// The first signal that asked for the end, if there was one.
    asked: Option<i32>,
    /// When the agents were told to end.
    told: Option<Instant>,
    /// Whether the sessions were cut.
    cut: bool,
    /// The least hosts that the run goes on with.
    least: usize,
    grace: Duration,
}

/// What is to be done.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Next {
    /// Nothing, for so long at most.
    Wait(Option<Duration>),
    /// Hand this signal to the agents.
    Tell(i32),
    /// End the sessions.
    Cut,
    /// All have ended.
    Over,
}

impl Course {
    pub(super) fn new(hosts: usize, least: usize, grace: Duration) -> Course {
        let ended = vec![None; hosts];
        Course { ended, first_bad: None, too_few: None, asked: None, told: None, cut: false, least, grace }
    }

    /// The agent of this host has ended.
    pub(super) fn end(&mut self, host: usize, how: Ended, now: Instant) {
        self.ended[host] = Some(how);
        if !how.is_well() {
            self.first_bad.get_or_insert(how);
            let left = self.ended.iter().filter(|ended| ended.is_none_or(Ended::is_well)).count();
            if left < self.least {
                self.too_few.get_or_insert(now);
            }
        }
    }

    /// A signal that ends the run was handed to the agents.
    pub(super) fn asked(&mut self, signal: i32, now: Instant) {
        self.asked.get_or_insert(signal);
        self.told.get_or_insert(now);
    }

    pub(super) fn has_ended(&self, host: usize) -> bool {
        self.ended[host].is_some()
    }

    /// What follows; what it gives is done at once.
    pub(super) fn next(&mut self, now: Instant) -> Next {
        if self.ended.iter().all(Option::is_some) {
            return Next::Over;
        }
        if let Some(told) = self.told {
            let until = told + self.grace + BEYOND;
            if now < until {
                return Next::Wait(Some(until - now));
            }
            return if std::mem::replace(&mut self.cut, true) { Next::Wait(None) } else { Next::Cut };
        }
        let Some(since) = self.too_few else { return Next::Wait(None) };
        let until = since + THEMSELVES;
        if now < until {
            return Next::Wait(Some(until - now));
        }
        self.told = Some(now);
        Next::Tell(SIGTERM)
    }

    /// The exit code of the run.
    pub(super) fn exit_code(&self) -> u8 {
        let code = |ended: Ended| match ended {
            Ended::Code(code) => code,
            Ended::Lost => 1,
        };
        let all = || self.ended.iter().copied().flatten();
        if self.asked.is_some() {
            // Agents that were asked say so by their codes; a failure on the way counts more than that, unless the run could do without.
            let is_failure = |code: &u8| !matches!(code, 0 | &DRAINED | 128..);
            let (failed, well): (Vec<u8>, Vec<u8>) = all().map(code).partition(is_failure);
            let failed = failed.first().filter(|_| well.len() < self.least);
            return failed.or(well.iter().max()).copied().unwrap_or(0);
        }
        let enough = all().filter(|ended| ended.is_well()).count() >= self.least;
        match self.first_bad {
            // The end of a host that the run can do without.
            Some(bad) if !enough => match code(bad) {
                128.. => 1,
                code => code,
            },
            _ => all().filter(|ended| ended.is_well()).map(code).max().unwrap_or(0),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use signal_hook::consts::SIGINT;

    const GRACE: Duration = Duration::from_secs(30);

    #[test]
    fn exit_codes_are_summed_up() {
        let check = |least, asked: Option<i32>, ends: &[Ended], want: u8| {
            let (mut course, now) = (Course::new(ends.len(), least, GRACE), Instant::now());
            asked.into_iter().for_each(|signal| course.asked(signal, now));
            ends.iter().enumerate().for_each(|(host, how)| course.end(host, *how, now));
            assert_eq!(course.next(now), Next::Over);
            assert_eq!(course.exit_code(), want, "{least} {asked:?} {ends:?}");
        };
        use Ended::{Code, Lost};
        check(2, None, &[Code(0), Code(0)], 0);
        check(2, None, &[Code(0), Code(75)], 75);
        check(2, None, &[Code(1), Code(143)], 1);
        // A host that was lost before, and that the run could do without.
        check(1, Some(SIGINT), &[Code(130), Lost], 130);
        check(1, Some(SIGINT), &[Code(0), Lost], 0);
        check(2, Some(SIGINT), &[Code(130), Lost], 1);
        check(2, None, &[Lost, Code(143)], 1);
        check(2, None, &[Code(2), Code(2)], 2);
        // Somebody else has sent it.
        check(2, None, &[Code(143), Code(1)], 1);
        check(2, Some(SIGINT), &[Code(130), Code(130)], 130);
        check(2, Some(SIGTERM), &[Code(0), Code(143)], 143);
        check(2, Some(SIGTERM), &[Code(1), Code(143)], 1);
        check(2, Some(SIGTERM), &[Lost, Code(143)], 1);
        check(1, None, &[Code(0), Lost], 0);
        check(1, None, &[Lost, Lost], 1);
    }

    #[test]
    fn all_are_ended_when_one_has_failed() {
        let (mut course, start) = (Course::new(3, 3, GRACE), Instant::now());
        assert_eq!(course.next(start), Next::Wait(None));
        course.end(0, Ended::Code(0), start);
        assert_eq!(course.next(start), Next::Wait(None), "one whose work is done");
        course.end(1, Ended::Lost, start);
        assert_eq!(course.next(start), Next::Wait(Some(THEMSELVES)));
        let told = start + THEMSELVES;
        assert_eq!(course.next(told), Next::Tell(SIGTERM));
        assert_eq!(course.next(told), Next::Wait(Some(GRACE + BEYOND)));
        assert_eq!(course.next(told + GRACE + BEYOND), Next::Cut);
        assert_eq!(course.next(told + GRACE + BEYOND), Next::Wait(None));
        course.end(2, Ended::Lost, told);
        assert_eq!((course.next(told), course.exit_code()), (Next::Over, 1));
    }

    #[test]
    fn a_run_that_can_do_without_a_host_does() {
        let (mut course, start) = (Course::new(3, 2, GRACE), Instant::now());
        course.end(0, Ended::Lost, start);
        assert_eq!(course.next(start), Next::Wait(None));
        course.end(1, Ended::Code(1), start);
        assert_eq!(course.next(start + THEMSELVES), Next::Tell(SIGTERM));
    }
}
