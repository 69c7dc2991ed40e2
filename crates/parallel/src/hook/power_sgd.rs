//! PowerSGD (Vogels, Karimireddy and Jaggi, <https://arxiv.org/abs/1905.13727>): of the gradient of a matrix only the part of
//! low rank travels, found by one step of power iteration a training step.
//!
//! With M_k the share of rank k, n rows and m columns, and Q a guess of m x r: P = sum of M_k Q is made orthonormal; then
//! Q = sum of M_k' P, and P Q' stands for the sum of all M_k. What it lacks, each rank adds to its share of the next step
//! (error feedback), and the next step begins with this step's Q (warm start). r (n + m) numbers travel instead of n m.
//!
//! What is kept, a run that goes on from a checkpoint needs for the same bits. What a rank lacked is its own, so each goes on
//! with its own errors; PyTorch's recipe of saving rank 0's hook would give its errors to all. Another number of ranks shares the
//! sum of the errors out: they are part of shares whose sum is the gradient of the whole step, whatever the number of ranks.

use super::{AllReduce, Bucket, Hook, Kept, Part, Pending};
use crate::error::Error;
use phalanx_comm::{Group, ReduceOp};
use phalanx_tensor::Philox;
use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

/// How [`PowerSgd`] works.
#[derive(Clone, Debug, PartialEq)]
pub struct PowerSgdConfig {
    /// The rank that gradients are brought down to. Default 1.
    pub rank: usize,
    /// Steps before the first that is compressed: early gradients change fast. Default 1000, as in PyTorch.
    pub start_step: u64,
    /// Matrices that wouldn't get this many times as small travel as they are, as vectors do. Default 2.
    pub least_saving: f64,
    /// Whether what a step leaves out is added to the next. Default yes.
    pub error_feedback: bool,
    /// Whether a step begins with what the last one found; else with the first guess again. Default yes.
    pub warm_start: bool,
    /// What the first guess is a function of; the same on all ranks. Default 0.
    pub seed: u64,
}

impl Default for PowerSgdConfig {
    fn default() -> PowerSgdConfig {
        PowerSgdConfig {
            rank: 1,
            start_step: 1000,
            least_saving: 2.0,
            error_feedback: true,
            warm_start: true,
            seed: 0,
        }
    }
}

/// The hook.
pub struct PowerSgd {
    config: PowerSgdConfig,
    /// By bucket; lent to what finishes its step.
    states: HashMap<usize, Arc<Mutex<State>>>,
}

/// What a bucket keeps from step to step.
#[derive(Default)]
struct State {
    steps: u64,
    matrices: Vec<Matrix>,
}

/// What a matrix keeps.
struct Matrix {
    /// Columns x rank: the guess.
    q: Vec<f32>,
    /// What the ranks' shares lacked so far.
    error: Vec<f32>,
}

impl PowerSgd {
    /// With these settings.
    pub fn new(config: PowerSgdConfig) -> PowerSgd {
        PowerSgd { config, states: HashMap::new() }
    }
}

impl PowerSgdConfig {
    /// The rank that a matrix is brought down to, if that pays.
    fn rank_of(&self, part: &Part) -> Option<usize> {
        let rank = self.rank.min(part.rows).min(part.columns);
        let sent = (rank * (part.rows + part.columns)) as f64;
        (rank > 0 && sent * self.least_saving <= part.range.len() as f64).then_some(rank)
    }

    /// Those parts of a bucket that are brought down, with their ranks, and the others.
    fn sort(&self, parts: &[Part]) -> (Vec<(Part, usize)>, Vec<Part>) {
        let (mut low, mut whole) = (Vec::new(), Vec::new());
        for part in parts {
            match self.rank_of(part) {
                Some(rank) => low.push((part.clone(), rank)),
                None => whole.push(part.clone()),
            }
        }
        (low, whole)
    }
}

impl Hook for PowerSgd {
    fn start(&mut self, mut bucket: Bucket, group: &Group) -> Pending {
        let shared = Arc::clone(self.states.entry(bucket.number()).or_default());
        // Nobody panics between two statements that belong together.
        let mut state = shared.lock().unwrap_or_else(PoisonError::into_inner);
        state.steps += 1;
        if state.steps <= self.config.start_step {
            return AllReduce.start(bucket, group);
        }
        let (low, whole) = self.config.sort(bucket.parts());
        if state.matrices.is_empty() {
            state.matrices =
                low.iter().enumerate().map(|(i, low)| self.first_guess(&bucket, i, low)).collect();
        }
        if let Err(other) = state.fits(bucket.number(), &low) {
            return Box::new(|_| Err(other));
        }
        // What travels first: everything that isn't brought down, and every P.
        let mut first: Vec<f32> = Vec::new();
        whole.iter().for_each(|part| first.extend(&bucket[part.range.clone()]));
        for ((part, rank), kept) in low.iter().zip(&state.matrices) {
            let m = &mut bucket[part.range.clone()];
            m.iter_mut().zip(&kept.error).for_each(|(m, error)| *m += error);
            first.extend(times(m, &kept.q, part.columns, *rank));
        }
        drop(state);
        let config = self.config.clone();
        let (work, group) = (group.start_all_reduce(first, ReduceOp::Sum), group.clone());
        Box::new(move |deadline| {
            let first = work.wait(deadline)?;
            let mut state = shared.lock().unwrap_or_else(PoisonError::into_inner);
            let mut rest = &first[..];
            for part in &whole {
                let (these, after) = rest.split_at(part.range.len());
                bucket[part.range.clone()].copy_from_slice(these);
                rest = after;
            }
            let (mut ps, mut qs) = (Vec::new(), Vec::new());
            for (part, rank) in &low {
                let (p, after) = rest.split_at(part.rows * rank);
                rest = after;
                let p = orthonormal(p.to_vec(), *rank);
                qs.extend(transposed_times(&bucket[part.range.clone()], &p, part.columns, *rank));
                ps.push(p);
            }
            group.clone().with_timeout(deadline.remaining()).all_reduce(&mut qs, ReduceOp::Sum)?;
            let mut rest = &qs[..];
            for (((part, rank), p), kept) in low.iter().zip(&ps).zip(&mut state.matrices) {
                let (q, after) = rest.split_at(part.columns * rank);
                rest = after;
                if config.warm_start {
                    guess_next(&mut kept.q, q, p, *rank);
                }
                let m = &mut bucket[part.range.clone()];
                put_product(m, p, q, *rank, group.world_size(), &mut kept.error);
                if !config.error_feedback {
                    kept.error.fill(0.0);
                }
            }
            Ok(())
        })
    }

    fn keeps(&self) -> bool {
        true
    }

    fn kept(&self) -> Kept {
        let mut kept = Kept::new();
        for (&bucket, state) in &self.states {
            state.lock().unwrap_or_else(PoisonError::into_inner).put_into(&mut kept, bucket);
        }
        kept
    }

    fn share_out(&self, all: Vec<Kept>, ranks: usize) -> Option<Kept> {
        let mut shared = all.first()?.clone();
        for (name, share) in shared.iter_mut().filter(|(name, _)| name.ends_with(ERROR)) {
            let errors: Vec<&Vec<f32>> = all.iter().filter_map(|kept| kept.get(name)).collect();
            for (at, x) in share.iter_mut().enumerate() {
                let there = errors.iter().filter_map(|error| error.get(at));
                *x = (there.map(|&x| f64::from(x)).sum::<f64>() / ranks as f64) as f32;
            }
        }
        Some(shared)
    }

    fn go_on(&mut self, mut kept: Kept) {
        let states = (0..).map_while(|bucket| Some((bucket, State::take_from(&mut kept, bucket)?)));
        self.states = states.map(|(bucket, state)| (bucket, Arc::new(Mutex::new(state)))).collect();
    }
}

/// What the name of what a rank's share of a matrix lacked ends with.
const ERROR: &str = ".error";

/// The digits of a number of steps that a float32 holds whatever they are.
const STEPS: u64 = 1 << 24;

impl State {
    /// That it was kept for these matrices.
    fn fits(&self, bucket: usize, low: &[(Part, usize)]) -> Result<(), Error> {
        let check = |name: String, found, needed| match found == needed {
            true => Ok(()),
            false => Err(Error::OtherCompression { bucket, name, found, needed }),
        };
        check("matrices".into(), self.matrices.len(), low.len())?;
        for (i, (kept, (part, rank))) in self.matrices.iter().zip(low).enumerate() {
            check(format!("{i}.q"), kept.q.len(), part.columns * rank)?;
            check(format!("{i}.error"), kept.error.len(), part.range.len())?;
        }
        Ok(())
    }

    /// As numbers with names that begin with the bucket's.
    fn put_into(&self, kept: &mut Kept, bucket: usize) {
        kept.insert(
            format!("{bucket}.steps"),
            [self.steps / STEPS, self.steps % STEPS].map(|x| x as f32).into(),
        );
        for (i, matrix) in self.matrices.iter().enumerate() {
            kept.insert(format!("{bucket}.{i}.q"), matrix.q.clone());
            kept.insert(format!("{bucket}.{i}{ERROR}"), matrix.error.clone());
        }
    }

    /// The way back, if there is anything of this bucket. Whether it fits is seen when its gradients are.
    fn take_from(kept: &mut Kept, bucket: usize) -> Option<State> {
        let steps = kept.remove(&format!("{bucket}.steps"))?;
        let steps = steps.iter().fold(0, |steps, &digit| steps * STEPS + digit as u64);
        let matrix = |i: usize| {
            let q = kept.remove(&format!("{bucket}.{i}.q"))?;
            Some(Matrix { q, error: kept.remove(&format!("{bucket}.{i}{ERROR}")).unwrap_or_default() })
        };
        Some(State { steps, matrices: (0..).map_while(matrix).collect() })
    }
}

impl PowerSgd {
    fn first_guess(&self, bucket: &Bucket, i: usize, (part, rank): &(Part, usize)) -> Matrix {
        let numbers = Philox::new(self.config.seed, ((bucket.number() as u64) << 32) + i as u64);
        let q = (0..part.columns * rank).map(|at| numbers.unit(at as u64) - 0.5).collect();
        Matrix { q, error: vec![0.0; part.range.len()] }
    }
}

/// M Q: `m` has rows of `columns`, `q` columns x rank, the result rows x rank.
fn times(m: &[f32], q: &[f32], columns: usize, rank: usize) -> Vec<f32> {
    let mut p = Vec::with_capacity(m.len() / columns * rank);
    for row in m.chunks_exact(columns) {
        let start = p.len();
        p.resize(start + rank, 0.0);
        for (&x, q) in row.iter().zip(q.chunks_exact(rank)) {
            p[start..].iter_mut().zip(q).for_each(|(p, q)| *p += x * q);
        }
    }
    p
}

/// M' P: `m` has rows of `columns`, `p` rows x rank, the result columns x rank.
fn transposed_times(m: &[f32], p: &[f32], columns: usize, rank: usize) -> Vec<f32> {
    let mut q = vec![0.0; columns * rank];
    for (row, p) in m.chunks_exact(columns).zip(p.chunks_exact(rank)) {
        for (&x, q) in row.iter().zip(q.chunks_exact_mut(rank)) {
            q.iter_mut().zip(p).for_each(|(q, p)| *q += x * p);
        }
    }
    q
}

/// The next step begins with what came of this one. A column of P that vanished, as where a gradient is zero or has less to it, says nothing
/// of the next gradient: there the guess stays, or the column would be zero for good. The others are brought near to 1 by powers of two,
/// which round nothing, as each step multiplies them with the gradient once more.
fn guess_next(guess: &mut [f32], q: &[f32], p: &[f32], rank: usize) {
    for column in 0..rank {
        let of = |rows: &[f32]| rows.chunks_exact(rank).fold(0.0f32, |most, row| most.max(row[column].abs()));
        let largest = of(q);
        if of(p) == 0.0 || !(largest > 0.0 && largest.is_finite()) {
            continue;
        }
        let scale = 2.0f32.powi(-(largest.log2().floor() as i32).clamp(-126, 126));
        let rows = guess.chunks_exact_mut(rank).zip(q.chunks_exact(rank));
        rows.for_each(|(guess, q)| guess[column] = q[column] * scale);
    }
}

/// P with columns that are orthogonal and of length 1 (Gram and Schmidt); a column that is nothing but rounding becomes zero.
fn orthonormal(mut p: Vec<f32>, rank: usize) -> Vec<f32> {
    let dot = |p: &[f32], a: usize, b: usize| -> f64 {
        p.chunks_exact(rank).map(|row| f64::from(row[a]) * f64::from(row[b])).sum()
    };
    for column in 0..rank {
        let before = dot(&p, column, column);
        for other in 0..column {
            let share = dot(&p, column, other) as f32;
            p.chunks_exact_mut(rank).for_each(|row| row[column] -= share * row[other]);
        }
        let length = dot(&p, column, column);
        let scale = if length > before * 1e-12 { 1.0 / length.sqrt() } else { 0.0 };
        p.chunks_exact_mut(rank).for_each(|row| row[column] = (f64::from(row[column]) * scale) as f32);
    }
    p
}

/// `m` becomes P Q', and `error` what it was more than this rank's part of that, of so many ranks.
fn put_product(m: &mut [f32], p: &[f32], q: &[f32], rank: usize, ranks: usize, error: &mut [f32]) {
    let columns = q.len() / rank;
    let rows = m.chunks_exact_mut(columns).zip(error.chunks_exact_mut(columns)).zip(p.chunks_exact(rank));
    for ((m, error), p) in rows {
        for ((m, error), q) in m.iter_mut().zip(error).zip(q.chunks_exact(rank)) {
            let product: f32 = p.iter().zip(q).map(|(p, q)| p * q).sum();
            *error = *m - product / ranks as f32;
            *m = product;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_become_orthonormal_and_what_depends_on_others_zero() {
        // The third column is the sum of the first two.
        let p = orthonormal(vec![3.0, 1.0, 4.0, 4.0, -2.0, 2.0, 0.0, 5.0, 5.0], 3);
        let dot = |a: usize, b: usize| -> f32 { p.chunks_exact(3).map(|row| row[a] * row[b]).sum() };
        assert!((dot(0, 0) - 1.0).abs() < 1e-6 && (dot(1, 1) - 1.0).abs() < 1e-6 && dot(0, 1).abs() < 1e-6);
        assert!(p.chunks_exact(3).all(|row| row[2] == 0.0), "{p:?}");
    }

    #[test]
    fn a_column_that_vanished_is_guessed_again() {
        // Of two columns the second of P is nothing.
        let (mut guess, p) = (vec![0.5, 0.25, 0.5, -0.25], [1.0, 0.0, 0.0, 0.0]);
        guess_next(&mut guess, &[3e-30, 0.0, -1e-30, 0.0], &p, 2);
        assert_eq!([guess[1], guess[3]], [0.25, -0.25]);
        assert!((1.0..2.0).contains(&guess[0]) && (guess[0] / guess[2] + 3.0).abs() < 1e-6, "{guess:?}");
        // A step without any gradient changes nothing.
        let before = guess.clone();
        guess_next(&mut guess, &[0.0; 4], &[0.0; 4], 2);
        assert_eq!(guess, before);
    }
}
