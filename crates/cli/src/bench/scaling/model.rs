//! How long a step takes on so many workers: a small model, fitted to what was measured.
//!
//! With n workers of t threads each on C cores, and B samples a worker and step, let `s = n t / C` say how many workers each core has, and
//! be 1 where each worker has its own, and `u = (min(n t, C) - t) / (C - t)` how many of the other cores are busy, from 0 to 1. A step is
//! the sum of four parts:
//!
//! - computing takes `s (a B + b + g B u)`: work by sample, work by step, and what busy neighbours cost (caches, clocks, memory);
//! - input takes `s e B`;
//! - communication takes nothing on one worker and else `s (c log2 m + d (m-1)/m)`, where m is n, or as many as run at once: rounds, and
//!   bytes (each worker sends and gets that share of the gradients twice);
//! - where workers share cores they wait for each other's turns, too, which `sharing` tells of.
//!
//! The first three are fitted to counts at which each worker had its cores: where they take turns, one that waits for another's turn
//! can't be told from one that waits for its words. What the other counts take beyond them is what sharing cores costs.
//!
//! Coefficients aren't negative, and only as many of a part are used as explain it: of all subsets the one whose squared errors,
//! relative to the whole step, are least for the points that it leaves free. What is left of the errors, or what repeated runs
//! differ by if that is more, is the uncertainty, which grows with the distance from what was measured.

use super::sharing::{Cost, Shared, Sharing};
use serde::Serialize;

/// How the machine is used at a point.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct At {
    pub(super) workers: usize,
    /// Samples of each worker.
    pub(super) batch: f64,
    /// Cores that the workers share, in units of what one of them uses: at least one.
    pub(super) cores: f64,
}

/// What was measured there: the middle half of the steps of the middle run, in milliseconds.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Measured {
    pub(super) at: At,
    pub(super) parts: Parts,
    /// The whole step, and how far the other runs are from it, as a standard deviation.
    pub(super) step_ms: f64,
    pub(super) spread_ms: f64,
}

/// The parts of a step, in milliseconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub(super) struct Parts {
    pub(super) compute_ms: f64,
    pub(super) comm_ms: f64,
    pub(super) input_ms: f64,
}

impl Parts {
    pub(super) fn sum(self) -> f64 {
        self.compute_ms + self.comm_ms + self.input_ms
    }
}

/// A step that wasn't measured.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub(super) struct Predicted {
    pub(super) ms: f64,
    /// Two standard deviations: where the model holds, 19 of 20 steps' medians are nearer than that.
    pub(super) within_ms: f64,
    #[serde(flatten)]
    pub(super) parts: Parts,
}

/// The model with its coefficients.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Model {
    /// Computing and communication.
    work: Fit,
    input: Fit,
    /// What waiting for turns costs.
    sharing: Sharing,
    /// What repeated runs of a point differ by, relative to its step.
    spread: f64,
}

/// Names of the coefficients, in milliseconds each.
const WORK: [&str; 5] = ["a", "b", "g", "c", "d"];
const INPUT: [&str; 1] = ["e"];

/// How exact the two terms of sharing are at best, as a part of the step: how the scheduler deals with a count is a matter of luck, too.
const LEAST_ERROR: f64 = 0.05;

impl At {
    /// How many workers each core has.
    fn turns(self) -> f64 {
        (self.workers as f64 / self.cores).max(1.0)
    }

    /// Whether workers share cores.
    fn shares(self) -> bool {
        self.turns() > 1.0 + 1e-9
    }

    /// How many of the other cores are busy.
    fn busy(self) -> f64 {
        let others = (self.workers as f64).min(self.cores) - 1.0;
        if self.cores > 1.0 { (others / (self.cores - 1.0)).max(0.0) } else { 0.0 }
    }

    fn compute(self) -> [f64; 3] {
        let (b, s) = (self.batch, self.turns());
        [b * s, s, b * s * self.busy()]
    }

    fn comm(self) -> [f64; 2] {
        let (m, s) = ((self.workers as f64).min(self.cores), self.turns());
        [s * m.log2(), s * (m - 1.0) / m]
    }

    fn input(self) -> [f64; 1] {
        [self.batch * self.turns()]
    }

    /// The terms of computing and communication, as far as they are asked for.
    fn work(self, computes: bool, talks: bool) -> Vec<f64> {
        let ([a, b, g], [c, d]) = (self.compute(), self.comm());
        let only = |is_asked: bool, term: f64| if is_asked { term } else { 0.0 };
        vec![only(computes, a), only(computes, b), only(computes, g), only(talks, c), only(talks, d)]
    }
}

impl Model {
    /// The model of these points, one of which has to be a count at which each worker had its cores.
    pub(super) fn fit(points: &[Measured]) -> Model {
        let (sharers, owners): (Vec<Measured>, Vec<Measured>) =
            points.iter().partition(|point| point.at.shares());
        let weight = |point: &Measured| 1.0 / point.step_ms.max(1e-9);
        let (mut rows, mut values, mut weights) = (Vec::new(), Vec::new(), Vec::new());
        for point in &owners {
            let Parts { compute_ms, comm_ms, .. } = point.parts;
            let parts = [(point.at.work(true, false), compute_ms), (point.at.work(false, true), comm_ms)];
            for (row, value) in parts {
                rows.push(row);
                values.push(value.max(0.0));
                weights.push(weight(point));
            }
        }
        let input_rows: Vec<Vec<f64>> = owners.iter().map(|point| point.at.input().to_vec()).collect();
        let inputs: Vec<f64> = owners.iter().map(|point| point.parts.input_ms.max(0.0)).collect();
        let input_weights: Vec<f64> = owners.iter().map(weight).collect();
        let spreads = points.iter().map(|point| (point.spread_ms / point.step_ms.max(1e-9)).powi(2));
        let mut model = Model {
            work: Fit::of(&rows, &values, &weights),
            input: Fit::of(&input_rows, &inputs, &input_weights),
            sharing: Sharing::of(1.0, &[]),
            spread: (spreads.sum::<f64>() / points.len().max(1) as f64).sqrt(),
        };
        let cost = |point: &Measured| {
            let (worked, within) = model.worked(point.at);
            // That the rest is foretold well, is no more certain than that.
            let error_ms = (within + (model.spread.max(LEAST_ERROR) * point.step_ms).powi(2)).sqrt();
            (model.shared(point.at), Cost { ms: point.step_ms - worked.sum(), error_ms })
        };
        let costs: Vec<(Shared, Cost)> = sharers.iter().map(cost).collect();
        let cores = points.iter().map(|point| point.at.cores).fold(1.0, f64::max);
        model.sharing = Sharing::of(cores, &costs);
        model
    }

    /// What is done in a step, and the variance of that.
    fn worked(&self, at: At) -> (Parts, f64) {
        let [compute_ms, comm_ms] =
            [(true, false), (false, true)].map(|(computes, talks)| self.work.at(&at.work(computes, talks)));
        let parts = Parts { compute_ms, comm_ms, input_ms: self.input.at(&at.input()) };
        let ms = parts.sum();
        (parts, self.work.variance(&at.work(true, true), ms) + self.input.variance(&at.input(), ms))
    }

    fn shared(&self, at: At) -> Shared {
        let turns = at.turns();
        Shared { turns, alone_ms: self.worked(at).0.sum() / turns }
    }

    pub(super) fn predict(&self, at: At) -> Predicted {
        let (mut parts, mut variance) = self.worked(at);
        if at.shares() {
            let Cost { ms, error_ms } = self.sharing.cost(self.shared(at));
            // Who waits for a turn waits for words that come later.
            parts.comm_ms += ms;
            variance += error_ms * error_ms;
        }
        let ms = parts.sum();
        let within_ms = 2.0 * (variance + (self.spread * ms).powi(2)).sqrt();
        Predicted { ms, within_ms, parts }
    }

    /// The coefficients by name, in milliseconds.
    pub(super) fn coefficients(&self) -> Vec<(&'static str, f64)> {
        let fits = [(&self.work, &WORK[..]), (&self.input, &INPUT)];
        let named = |(fit, names): (&Fit, &[&'static str])| {
            names.iter().copied().zip(fit.coefficients.iter().copied()).collect::<Vec<_>>()
        };
        fits.into_iter().flat_map(named).chain(self.sharing.means()).collect()
    }
}

/// A sum of terms with coefficients that aren't negative.
#[derive(Clone, Debug, PartialEq)]
struct Fit {
    coefficients: Vec<f64>,
    /// Which terms are used, and the inverse of their weighted squares.
    used: Vec<usize>,
    inverse: Vec<Vec<f64>>,
    /// The variance of what isn't explained, relative to the whole step.
    variance: f64,
}

impl Fit {
    /// `values` as sums of the terms in `rows`, with errors weighed by `weights`.
    fn of(rows: &[Vec<f64>], values: &[f64], weights: &[f64]) -> Fit {
        let terms = rows.first().map_or(0, Vec::len);
        let nothing =
            || Fit { coefficients: vec![0.0; terms], used: Vec::new(), inverse: Vec::new(), variance: 0.0 };
        let square = |error: f64| error * error;
        let left: f64 = values.iter().zip(weights).map(|(y, w)| square(y * w)).sum();
        let mut best = nothing();
        best.variance = left / values.len().max(1) as f64;
        // With few terms all subsets can be looked at, which finds the best for certain.
        for set in 1usize..1 << terms {
            let used: Vec<usize> = (0..terms).filter(|term| set >> term & 1 == 1).collect();
            if used.len() > values.len() {
                continue;
            }
            let Some((found, inverse)) = least_squares(rows, values, weights, &used) else { continue };
            if found.iter().any(|c| *c < 0.0 || !c.is_finite()) {
                continue;
            }
            let mut coefficients = vec![0.0; terms];
            used.iter().zip(&found).for_each(|(&term, &c)| coefficients[term] = c);
            let error = |i: usize| values[i] - dot(&rows[i], &coefficients);
            let left: f64 = (0..values.len()).map(|i| square(error(i) * weights[i])).sum();
            // As many terms as points explain anything; such a fit only counts where there is nothing else.
            let free = values.len() - used.len();
            let variance = if free > 0 { left / free as f64 } else { best.variance.min(left.max(1e-12)) };
            let is_better = match free {
                0 => best.used.is_empty(),
                // What explains all is as good with fewer terms.
                _ => variance < 0.999 * best.variance - 1e-18,
            };
            if is_better {
                best = Fit { coefficients, used, inverse, variance };
            }
        }
        best
    }

    fn at(&self, row: &[f64]) -> f64 {
        dot(row, &self.coefficients)
    }

    /// The variance of a value at this row, where the whole step is that long: what single points differ by, and what isn't known of
    /// the coefficients.
    fn variance(&self, row: &[f64], step: f64) -> f64 {
        let row: Vec<f64> = self.used.iter().map(|&term| row[term]).collect();
        let of_coefficients: f64 = row.iter().zip(&self.inverse).map(|(x, line)| x * dot(&row, line)).sum();
        self.variance * (step * step + of_coefficients.max(0.0))
    }
}

fn dot(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

/// The coefficients of the used terms by weighted least squares, and the inverse of the terms' squares; none where terms can't be told
/// apart at these points.
fn least_squares(
    rows: &[Vec<f64>],
    values: &[f64],
    weights: &[f64],
    used: &[usize],
) -> Option<(Vec<f64>, Vec<Vec<f64>>)> {
    let k = used.len();
    // The matrix of squares, with a unit matrix beside it that becomes its inverse.
    let mut m = vec![vec![0.0; 2 * k]; k];
    let mut right = vec![0.0; k];
    for ((row, y), w) in rows.iter().zip(values).zip(weights) {
        let w = w * w;
        for i in 0..k {
            right[i] += w * row[used[i]] * y;
            for j in 0..k {
                m[i][j] += w * row[used[i]] * row[used[j]];
            }
        }
    }
    // In units in which each term is 1, so that a small pivot means terms that are alike.
    let scale: Vec<f64> = (0..k).map(|i| m[i][i].sqrt()).collect();
    if scale.iter().any(|s| !s.is_finite() || *s <= 0.0) {
        return None;
    }
    for i in 0..k {
        for j in 0..k {
            m[i][j] /= scale[i] * scale[j];
        }
        m[i][k + i] = 1.0;
    }
    for column in 0..k {
        let size = |row: &usize| m[*row][column].abs();
        let pivot = (column..k).max_by(|a, b| size(a).total_cmp(&size(b)))?;
        if m[pivot][column].abs() < 1e-9 {
            return None;
        }
        m.swap(column, pivot);
        let by = m[column][column];
        m[column].iter_mut().for_each(|x| *x /= by);
        let line = m[column].clone();
        for row in (0..k).filter(|row| *row != column) {
            let by = m[row][column];
            m[row].iter_mut().zip(&line).for_each(|(x, y)| *x -= by * y);
        }
    }
    let inverse: Vec<Vec<f64>> =
        (0..k).map(|i| (0..k).map(|j| m[i][k + j] / (scale[i] * scale[j])).collect()).collect();
    let found = inverse.iter().map(|line| dot(line, &right)).collect();
    Some((found, inverse))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// A machine that follows the model.
    #[derive(Clone, Copy, Debug)]
    struct Machine {
        compute: [f64; 3],
        comm: [f64; 2],
        input: f64,
        /// q and w.
        turns: [f64; 2],
    }

    impl Machine {
        fn parts(&self, at: At) -> Parts {
            Parts {
                compute_ms: dot(&at.compute(), &self.compute),
                comm_ms: dot(&at.comm(), &self.comm),
                input_ms: dot(&at.input(), &[self.input]),
            }
        }

        fn step_ms(&self, at: At) -> f64 {
            let (worked, [late, wait]) = (self.parts(at).sum(), self.turns);
            let shared = Shared { turns: at.turns(), alone_ms: worked / at.turns() };
            worked + if at.shares() { shared.cost(late, wait) } else { 0.0 }
        }

        /// Points with an error of this part of each step, up and down in turn.
        fn measure(&self, places: &[At], error: f64) -> Vec<Measured> {
            let point = |(i, &at): (usize, &At)| {
                let (mut parts, step_ms) = (self.parts(at), self.step_ms(at));
                let off = if i % 2 == 0 { error } else { -error } * step_ms;
                parts.compute_ms += off;
                Measured { at, parts, step_ms: step_ms + off, spread_ms: 0.0 }
            };
            places.iter().enumerate().map(point).collect()
        }
    }

    /// Weak and strong points of these counts.
    fn places(counts: &[usize], cores: f64) -> Vec<At> {
        let both = |&workers: &usize| {
            let weak = At { workers, batch: 64.0, cores };
            [weak, At { batch: 64.0 / workers as f64, ..weak }]
        };
        let mut all: Vec<At> = counts.iter().flat_map(both).collect();
        all.dedup();
        all
    }

    fn machine() -> impl Strategy<Value = Machine> {
        let some = |most: f64| prop_oneof![Just(0.0), 0.0..most];
        let (compute, comm) = ((0.01f64..2.0, some(5.0), some(1.0)), (some(3.0), some(20.0)));
        let turns = (0.5f64..4.0, 0.1f64..1.0);
        (compute, comm, some(0.1), turns).prop_map(|((a, b, g), (c, d), input, (late, wait))| Machine {
            compute: [a, b, g],
            comm: [c, d],
            input,
            turns: [late, wait],
        })
    }

    proptest! {
        /// What follows the model is found, and foretold where it wasn't measured: with cores for all as it is, else as near as is told.
        #[test]
        fn a_machine_that_follows_the_model_is_foretold(
            machine in machine(),
            cores in prop::sample::select(vec![2.0, 4.0, 64.0]),
            held_out in prop::sample::select(vec![3usize, 6, 16]),
        ) {
            let counts = [1, 2, 4, 8, 12];
            let model = Model::fit(&machine.measure(&places(&counts, cores), 0.0));
            let at = At { workers: held_out, batch: 64.0, cores };
            let (want, got) = (machine.step_ms(at), model.predict(at));
            let near = 1e-3 * want + if at.shares() { got.within_ms } else { 0.0 };
            prop_assert!((got.ms - want).abs() < near, "{got:?} and not {want}: {:?}", model.coefficients());
        }

        /// No coefficient is negative and no time is, whatever was measured.
        #[test]
        fn nothing_is_negative(
            times in prop::collection::vec((0.0f64..100.0, 0.0f64..100.0, 0.0f64..10.0), 1..9),
            workers in 1usize..300,
        ) {
            let places = places(&[1, 2, 3, 4, 8], 4.0);
            let point = |(&at, &(compute_ms, comm_ms, input_ms)): (&At, &(f64, f64, f64))| {
                let parts = Parts { compute_ms, comm_ms, input_ms };
                Measured { at, parts, step_ms: parts.sum(), spread_ms: 0.1 }
            };
            let points: Vec<Measured> = places.iter().zip(&times).map(point).collect();
            let model = Model::fit(&points);
            prop_assert!(model.coefficients().iter().all(|(_, c)| *c >= 0.0 && c.is_finite()), "{model:?}");
            let predicted = model.predict(At { workers, batch: 64.0, cores: 4.0 });
            prop_assert!(predicted.ms >= 0.0 && predicted.within_ms >= 0.0 && predicted.within_ms.is_finite());
        }

        /// Errors of what was measured are told as uncertainty, and more of it further away.
        #[test]
        fn errors_become_uncertainty(machine in machine(), error in 0.01f64..0.1) {
            let places = places(&[1, 2, 4, 8], 64.0);
            let (exact, rough) = (machine.measure(&places, 0.0), machine.measure(&places, error));
            let at = |workers| At { workers, batch: 64.0, cores: 64.0 };
            let (exact, rough) = (Model::fit(&exact), Model::fit(&rough));
            prop_assert!(exact.predict(at(4)).within_ms < rough.predict(at(4)).within_ms);
            let (near, far) = (rough.predict(at(4)), rough.predict(at(4096)));
            prop_assert!(near.within_ms > 0.0 && far.within_ms >= 0.9 * near.within_ms, "{near:?} {far:?}");
        }
    }

    #[test]
    fn one_point_is_a_model_too() {
        let at = At { workers: 1, batch: 10.0, cores: 2.0 };
        let parts = Parts { compute_ms: 5.0, comm_ms: 0.0, input_ms: 1.0 };
        let model = Model::fit(&[Measured { at, parts, step_ms: 6.0, spread_ms: 0.3 }]);
        let same = model.predict(at);
        assert!((same.ms - 6.0).abs() < 1e-9 && same.within_ms >= 0.6 - 1e-9, "{same:?}");
    }

    #[test]
    fn cores_are_given_out_in_turns_when_there_are_too_few() {
        let at = |workers, cores| At { workers, batch: 1.0, cores };
        assert_eq!((at(1, 2.0).turns(), at(2, 2.0).turns(), at(4, 2.0).turns()), (1.0, 1.0, 2.0));
        assert_eq!((at(3, 2.0).turns(), at(5, 2.0).turns(), at(3, 1.0).turns()), (1.5, 2.5, 3.0));
        assert_eq!((at(2, 2.0).shares(), at(3, 2.0).shares()), (false, true));
        assert_eq!((at(1, 4.0).busy(), at(2, 4.0).busy(), at(8, 4.0).busy()), (0.0, 1.0 / 3.0, 1.0));
        assert_eq!(at(3, 1.0).busy(), 0.0);
    }
}
