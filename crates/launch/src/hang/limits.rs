//! How long workers may make no progress.

use phalanx_job::Section;
use std::str::FromStr;
use std::time::Duration;

/// How long a worker may be in a section without any progress and without waiting for others: usually 10 minutes for its start
/// and 15 for a checkpoint, whose own waits are given up after 10; for a step and for a batch of an evaluation a minute, or 50
/// times the longest so far if that is longer, and 10 minutes for the first.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HangLimits([Limit; Kind::COUNT]);

/// The limit of a kind of section.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Limit {
    Off,
    Fixed(Duration),
    /// Before there was one, after that at least so long, and so many times the longest one.
    Grows {
        first: Duration,
        least: Duration,
        times: u32,
    },
}

/// The kinds of sections that have limits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    Start,
    Step,
    Evaluation,
    Checkpoint,
}

impl Kind {
    pub(super) const COUNT: usize = 4;
    const NAMES: [&str; Kind::COUNT] = ["start", "step", "evaluation", "checkpoint"];

    pub(super) fn of(section: Section) -> Option<Kind> {
        match section {
            Section::Free => None,
            Section::Start => Some(Kind::Start),
            Section::Step(_) => Some(Kind::Step),
            Section::Evaluation => Some(Kind::Evaluation),
            Section::Checkpoint => Some(Kind::Checkpoint),
        }
    }
}

const LONG: Duration = Duration::from_secs(600);
const USUAL: [Limit; Kind::COUNT] = {
    let grows = Limit::Grows { first: LONG, least: Duration::from_secs(60), times: 50 };
    [Limit::Fixed(LONG), grows, grows, Limit::Fixed(Duration::from_secs(900))]
};
/// What is more counts as a slip of the hand.
const MOST: Duration = Duration::from_secs(7 * 24 * 60 * 60);

impl Default for HangLimits {
    fn default() -> HangLimits {
        HangLimits(USUAL)
    }
}

impl HangLimits {
    pub(super) fn of(&self, kind: Kind) -> &Limit {
        &self.0[kind as usize]
    }

    /// Whether there is any.
    pub(crate) fn any(&self) -> bool {
        self.0.iter().any(|limit| *limit != Limit::Off)
    }
}

/// `off`, a number of seconds for all sections, or some by name, as in `start=600,step=60`; the others keep the usual ones. What
/// is given is taken as it is, and 0 or `off` is no limit.
impl FromStr for HangLimits {
    type Err = String;

    fn from_str(text: &str) -> Result<HangLimits, String> {
        if !text.contains('=') {
            return Ok(HangLimits([limit(text)?; Kind::COUNT]));
        }
        let mut limits = HangLimits::default();
        for part in text.split(',') {
            let (name, seconds) = part.split_once('=').unwrap_or((part, ""));
            let known = Kind::NAMES.iter().position(|known| *known == name.trim());
            let known = known.ok_or_else(|| format!("must be of {}", Kind::NAMES.join(", ")))?;
            limits.0[known] = limit(seconds)?;
        }
        Ok(limits)
    }
}

fn limit(text: &str) -> Result<Limit, String> {
    let text = text.trim();
    let seconds = if text == "off" { Some(0.0) } else { text.parse().ok() };
    let limit = seconds.and_then(|seconds| Duration::try_from_secs_f64(seconds).ok());
    match limit.filter(|limit| *limit <= MOST) {
        Some(Duration::ZERO) => Ok(Limit::Off),
        Some(limit) => Ok(Limit::Fixed(limit)),
        None => {
            Err("must be off, seconds up to a week, or seconds by section as in start=600,step=60".into())
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn limits_are_read() {
        let check = |text: &str, want: Result<[Limit; 4], &str>| match (text.parse::<HangLimits>(), want) {
            (Ok(got), Ok(want)) => assert_eq!(got.0, want, "{text}"),
            (Err(error), Err(want)) => assert!(error.contains(want), "{text}: {error}"),
            (got, want) => panic!("{text}: {got:?} and not {want:?}"),
        };
        let [start, _, evaluation, checkpoint] = USUAL;
        let seconds = |seconds: f64| Limit::Fixed(Duration::from_secs_f64(seconds));
        check("off", Ok([Limit::Off; 4]));
        check("0", Ok([Limit::Off; 4]));
        check("90", Ok([seconds(90.0); 4]));
        check("step=60", Ok([start, seconds(60.0), evaluation, checkpoint]));
        check("step = 1.5, checkpoint=off,start=0", Ok([Limit::Off, seconds(1.5), evaluation, Limit::Off]));
        check("", Err("must be off, seconds"));
        check("step=", Err("must be off, seconds"));
        check("-1", Err("must be off, seconds"));
        check("nan", Err("must be off, seconds"));
        check("1e9", Err("up to a week"));
        check("steps=60", Err("start, step, evaluation, checkpoint"));
        check("step=60,9", Err("start, step, evaluation, checkpoint"));
        assert!(HangLimits::default().any() && !"off".parse::<HangLimits>().unwrap().any());
    }
}
