//! What it costs that workers share cores, beyond their share of the time.
//!
//! With n workers on C cores each gets C/n of one, and a step takes at least `s = n / C` times as long as with a core each. Two
//! things come on top of that, both of them times of the system's scheduler, which gives a core to one process for a slice at least:
//!
//! - Where n isn't a multiple of C some cores have a worker more than others. Those there are the last, by `ceil(s) - s` turns, unless the
//!   scheduler moves workers about meanwhile, as it does after a while: they are late by `q` at most.
//! - Whoever waits for words of another waits also until that one has a core: `w` for each turn beyond the first.
//!
//! How large q and w are is found by the measured counts that share cores. Before any was measured q is taken to be a slice and w half of
//! one, since whoever comes while a slice runs finds half of it left; either to a factor. Each measured point says how likely any pair of
//! them is by how far off it would be. What is foretold is the mean over all pairs by their likelihood, and their spread is its
//! uncertainty.

/// Slices of Linux are so long on one processor, and as much longer for each doubling of processors, up to eight; in milliseconds
/// (`sysctl_sched_base_slice` in its kernel/sched/fair.c).
const SLICE_MS: f64 = 0.7;
const MOST_PROCESSORS: f64 = 8.0;
/// How many slices q and w are likely to be before anything was measured, and the factor within which two of three would find them.
const USUAL: (f64, f64) = (1.0, 0.5);
const FACTOR: f64 = 3.0;
/// The least and the most slices that are looked at, and how many steps there are from one to the next double.
const LEAST: f64 = 1.0 / 64.0;
const DOUBLINGS: i32 = 16;
const STEPS: i32 = 4;

/// A point that shares cores.
#[derive(Clone, Copy, Debug)]
pub(super) struct Shared {
    /// Workers for each core.
    pub(super) turns: f64,
    /// How long a worker has something to do that has a core for itself, in milliseconds.
    pub(super) alone_ms: f64,
}

/// What a step takes beyond `turns * alone_ms`, with its standard deviation.
#[derive(Clone, Copy, Debug)]
pub(super) struct Cost {
    pub(super) ms: f64,
    pub(super) error_ms: f64,
}

/// How likely pairs of q and w are.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Sharing {
    /// q, w and their weight, which add up to 1.
    pairs: Vec<(f64, f64, f64)>,
}

impl Shared {
    /// What a pair of q and w comes to.
    pub(super) fn cost(self, late_ms: f64, wait_ms: f64) -> f64 {
        // A little more than a whole number is rounding.
        let uneven = ((self.turns - 1e-9).ceil() - self.turns).max(0.0);
        (uneven * self.alone_ms).min(late_ms) + wait_ms * (self.turns - 1.0)
    }
}

impl Sharing {
    /// On a machine with so many cores, of which these points were measured.
    pub(super) fn of(cores: f64, measured: &[(Shared, Cost)]) -> Sharing {
        let slice = SLICE_MS * (1.0 + cores.clamp(1.0, MOST_PROCESSORS).log2().floor());
        let square = |off: f64| off * off;
        let sizes = || (0..=DOUBLINGS * STEPS).map(|i| LEAST * (f64::from(i) / f64::from(STEPS)).exp2());
        let before = |size: f64, usual: f64| square((size / usual).ln() / FACTOR.ln());
        let mut pairs = Vec::new();
        for (late, wait) in sizes().flat_map(|late| sizes().map(move |wait| (late, wait))) {
            let (q, w) = (late * slice, wait * slice);
            // A pair stands for all that are nearer to it than to the next.
            let width = (0.5 / f64::from(STEPS)).exp2() - 1.0;
            let off = |(shared, cost): &(Shared, Cost)| {
                let own = shared.cost(q, w);
                square(cost.ms - own) / (square(cost.error_ms) + square(width * own)).max(1e-12)
            };
            let known = before(late, USUAL.0) + before(wait, USUAL.1);
            pairs.push((q, w, -0.5 * (known + measured.iter().map(off).sum::<f64>())));
        }
        let most = pairs.iter().map(|pair| pair.2).fold(f64::NEG_INFINITY, f64::max);
        pairs.iter_mut().for_each(|pair| pair.2 = (pair.2 - most).exp());
        let sum: f64 = pairs.iter().map(|pair| pair.2).sum();
        pairs.iter_mut().for_each(|pair| pair.2 /= sum);
        // Most pairs are out of the question.
        pairs.retain(|pair| pair.2 > 1e-9);
        Sharing { pairs }
    }

    /// What it costs there.
    pub(super) fn cost(&self, shared: Shared) -> Cost {
        let mean = |of: &dyn Fn(f64, f64) -> f64| {
            self.pairs.iter().map(|&(q, w, weight)| weight * of(q, w)).sum::<f64>()
        };
        let ms = mean(&|q, w| shared.cost(q, w));
        Cost { ms, error_ms: mean(&|q, w| (shared.cost(q, w) - ms).powi(2)).sqrt() }
    }

    /// The mean q and w, in milliseconds.
    pub(super) fn means(&self) -> [(&'static str, f64); 2] {
        let mean = |of: fn(&(f64, f64, f64)) -> f64| self.pairs.iter().map(|pair| pair.2 * of(pair)).sum();
        [("q", mean(|pair| pair.0)), ("w", mean(|pair| pair.1))]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(turns: f64, alone_ms: f64) -> Shared {
        Shared { turns, alone_ms }
    }

    #[test]
    fn workers_that_have_one_more_beside_them_are_late_but_not_for_long() {
        let check = |turns: f64, alone: f64, q: f64, w: f64, want: f64| {
            let got = at(turns, alone).cost(q, w);
            assert!((got - want).abs() < 1e-6, "{turns} {alone} {q} {w}: {got}");
        };
        check(1.5, 2.0, 5.0, 0.0, 1.0);
        check(1.5, 20.0, 5.0, 0.0, 5.0);
        check(2.0, 20.0, 5.0, 0.0, 0.0);
        check(2.0, 20.0, 5.0, 0.5, 0.5);
        check(4.0, 20.0, 5.0, 0.5, 1.5);
        check(1.25, 4.0, 9.0, 1.0, 3.25);
    }

    #[test]
    fn what_was_measured_counts_and_more_of_it_is_more_certain() {
        let (q, w) = (2.5, 1.0);
        let point = |turns: f64, alone: f64, error_ms: f64| {
            let shared = at(turns, alone);
            (shared, Cost { ms: shared.cost(q, w), error_ms })
        };
        let unknown = Sharing::of(2.0, &[]);
        let one = Sharing::of(2.0, &[point(1.5, 30.0, 0.3)]);
        let all = Sharing::of(2.0, &[point(1.5, 30.0, 0.3), point(2.0, 30.0, 0.3), point(3.0, 10.0, 0.3)]);
        let held_out = at(2.5, 30.0);
        let want = held_out.cost(q, w);
        let (unknown, one, all) = (unknown.cost(held_out), one.cost(held_out), all.cost(held_out));
        assert!((all.ms - want).abs() < 0.5, "{all:?} and not {want}");
        assert!(
            all.error_ms < one.error_ms && one.error_ms < unknown.error_ms,
            "{all:?} {one:?} {unknown:?}"
        );
        assert!((unknown.ms - want).abs() < 2.0 * unknown.error_ms, "{unknown:?} and not {want}");
    }

    #[test]
    fn nothing_that_is_measured_makes_no_sense() {
        for ms in [-50.0, 0.0, 1e6] {
            let sharing = Sharing::of(2.0, &[(at(1.5, 10.0), Cost { ms, error_ms: 0.0 })]);
            let cost = sharing.cost(at(8.0, 10.0));
            assert!(cost.ms >= 0.0 && cost.ms.is_finite() && cost.error_ms.is_finite(), "{ms}: {cost:?}");
            assert!((sharing.pairs.iter().map(|pair| pair.2).sum::<f64>() - 1.0).abs() < 1e-3);
        }
    }
}
