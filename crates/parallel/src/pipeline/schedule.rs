//! Which stage works on which micro-batch, in which order: schedules as plain lists.
//!
//! A model is a row of *stages*, and a step's batch is cut into *micro-batches*. Each rank holds one stage, or with an interleaved
//! schedule several chunks of the row, stage `s` being rank `s % ranks`'s. A schedule is a list of actions a rank, and says
//! nothing of how long they take or how values travel. Every schedule works on the micro-batches in rising order, in each
//! stage and each direction, so gradients are summed in one order whatever the schedule.
//!
//! - **GPipe** (Huang et al., <https://arxiv.org/abs/1811.06965>): all forwards, then all backwards. Every micro-batch's
//!   activations are alive in between.
//! - **1F1B** (Narayanan et al., <https://arxiv.org/abs/2104.04473>): a backward as soon as it can be, so that rank `r` of `p` never
//!   holds more than `p - r` micro-batches. The bubble is GPipe's.
//! - **Interleaved 1F1B** (the same paper): each rank has `v` chunks of the row, so filling the pipeline takes a `v`th of the
//!   time, for more messages and more activations. Micro-batches go in rounds of `p`.
//! - **ZB-H1** (Qi et al., <https://arxiv.org/abs/2401.10241>): 1F1B with backwards in two parts. The gradient of a stage's input
//!   is what the stage before waits for; those of its weights can wait, and fill the bubble. Rank `r` puts them off by `r`
//!   micro-batches, so that no rank holds more than `p`.

use std::fmt;
use std::str::FromStr;
use thiserror::Error;

/// Which schedule.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ScheduleKind {
    /// All forwards, then all backwards.
    GPipe,
    /// Backwards as soon as they can be.
    OneFOneB,
    /// The same with several chunks a rank.
    Interleaved,
    /// The same with backwards in two parts.
    ZeroBubble,
}

impl ScheduleKind {
    /// All of them.
    pub const ALL: [ScheduleKind; 4] =
        [ScheduleKind::GPipe, ScheduleKind::OneFOneB, ScheduleKind::Interleaved, ScheduleKind::ZeroBubble];

    /// What it is called.
    pub fn name(self) -> &'static str {
        match self {
            ScheduleKind::GPipe => "gpipe",
            ScheduleKind::OneFOneB => "1f1b",
            ScheduleKind::Interleaved => "interleaved",
            ScheduleKind::ZeroBubble => "zb-h1",
        }
    }
}

impl fmt::Display for ScheduleKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for ScheduleKind {
    type Err = String;

    fn from_str(text: &str) -> Result<ScheduleKind, String> {
        let names = ScheduleKind::ALL.map(ScheduleKind::name).join(", ");
        let found = ScheduleKind::ALL.into_iter().find(|kind| kind.name() == text);
        found.ok_or_else(|| format!("no schedule is called: {text}\nhint: there are {names}"))
    }
}

/// What is done with a micro-batch in a stage.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Work {
    /// The stage's output.
    Forward,
    /// All gradients.
    Backward,
    /// The gradient of the stage's input; those of its weights come later.
    BackwardInput,
    /// Those.
    BackwardWeight,
}

/// One thing that a rank does.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Action {
    /// What.
    pub work: Work,
    /// In which stage of the row.
    pub stage: usize,
    /// With which micro-batch.
    pub micro_batch: usize,
}

/// As people write it: `F3`, or `F3.1` of a rank's second chunk.
impl fmt::Display for Action {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let letter = match self.work {
            Work::Forward => 'F',
            Work::Backward => 'B',
            Work::BackwardInput => 'I',
            Work::BackwardWeight => 'W',
        };
        write!(f, "{letter}{}", self.micro_batch)
    }
}

/// What a schedule is made for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shape {
    /// Ranks, or devices.
    pub ranks: usize,
    /// Stages of each: 1 but for interleaved schedules.
    pub chunks: usize,
    /// Micro-batches of a step.
    pub micro_batches: usize,
}

/// Why there is no such schedule.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum ScheduleError {
    /// Nothing to do, or nobody to do it.
    #[error("a pipeline of {} ranks with {} stages each and {} micro-batches\nhint: there must be at least one of each", .0.ranks, .0.chunks, .0.micro_batches)]
    Nothing(Shape),
    /// A schedule of one stage a rank.
    #[error("{kind} with {chunks} stages a rank\nhint: only interleaved has more than 1")]
    Chunks {
        /// Which schedule.
        kind: ScheduleKind,
        /// How many.
        chunks: usize,
    },
    /// Rounds that aren't full.
    #[error(
        "interleaved with {micro_batches} micro-batches over {ranks} ranks: micro-batches go in rounds of {ranks}\nhint: take {} of them{}",
        .micro_batches.next_multiple_of(*.ranks),
        fewer(.micro_batches, .ranks)
    )]
    Rounds {
        /// How many.
        micro_batches: usize,
        /// A round.
        ranks: usize,
    },
}

fn fewer(micro_batches: &usize, ranks: &usize) -> String {
    let below = micro_batches / ranks * ranks;
    if below > 0 { format!(" or {below}") } else { String::new() }
}

/// A list of actions a rank.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Schedule {
    pub(super) kind: ScheduleKind,
    shape: Shape,
    pub(super) actions: Vec<Vec<Action>>,
}

impl Schedule {
    /// The schedule of this kind and shape.
    ///
    /// # Errors
    /// There is nothing to do, a schedule of one stage a rank is to have more, or the micro-batches of an interleaved one don't
    /// fill its rounds.
    pub fn new(kind: ScheduleKind, shape: Shape) -> Result<Schedule, ScheduleError> {
        let Shape { ranks, chunks, micro_batches } = shape;
        if ranks == 0 || chunks == 0 || micro_batches == 0 {
            return Err(ScheduleError::Nothing(shape));
        }
        if kind == ScheduleKind::Interleaved {
            if !micro_batches.is_multiple_of(ranks) {
                return Err(ScheduleError::Rounds { micro_batches, ranks });
            }
        } else if chunks > 1 {
            return Err(ScheduleError::Chunks { kind, chunks });
        }
        let of_rank = |rank: usize| match kind {
            ScheduleKind::GPipe => gpipe(rank, shape),
            ScheduleKind::OneFOneB => one_f_one_b(rank, shape),
            ScheduleKind::Interleaved => interleaved(rank, shape),
            ScheduleKind::ZeroBubble => zero_bubble(rank, shape),
        };
        Ok(Schedule { kind, shape, actions: (0..ranks).map(of_rank).collect() })
    }

    /// The same order of forward passes, and nothing else.
    pub(super) fn forward_alone(&self) -> Schedule {
        let is_forward = |action: &&Action| action.work == Work::Forward;
        let of_rank = |actions: &Vec<Action>| actions.iter().filter(is_forward).copied().collect();
        Schedule { actions: self.actions.iter().map(of_rank).collect(), ..*self }
    }

    /// Which schedule it is.
    pub fn kind(&self) -> ScheduleKind {
        self.kind
    }

    /// What it is made for.
    pub fn shape(&self) -> Shape {
        self.shape
    }

    /// How long the row of stages is.
    pub fn stages(&self) -> usize {
        self.shape.ranks * self.shape.chunks
    }

    /// What `rank` does, in this order.
    pub fn actions(&self, rank: usize) -> &[Action] {
        &self.actions[rank]
    }

    /// Whose stage it is.
    pub fn rank_of(&self, stage: usize) -> usize {
        stage % self.shape.ranks
    }

    /// The stages of a rank, in the order of the row.
    pub fn stages_of(&self, rank: usize) -> impl Iterator<Item = usize> + use<> {
        let Shape { ranks, chunks, .. } = self.shape;
        (0..chunks).map(move |chunk| chunk * ranks + rank)
    }

    /// What `action` needs the result of before it can begin, be it of this rank or of another.
    pub fn needs(&self, action: Action) -> [Option<Action>; 2] {
        let Action { work, stage, micro_batch } = action;
        let other = |work, stage| Some(Action { work, stage, micro_batch });
        let forward = other(Work::Forward, stage);
        match work {
            Work::Forward => [stage.checked_sub(1).and_then(|before| other(Work::Forward, before)), None],
            Work::Backward | Work::BackwardInput if stage + 1 == self.stages() => [forward, None],
            // The gradient comes from the stage behind, as that stage makes it.
            Work::Backward | Work::BackwardInput => [other(work, stage + 1), forward],
            Work::BackwardWeight => [other(Work::BackwardInput, stage), None],
        }
    }

    /// The most micro-batches of which `rank` has to hold the activations at a time, counted a stage, as the schedule promises.
    pub fn most_alive(&self, rank: usize) -> usize {
        let Shape { ranks, chunks, micro_batches } = self.shape;
        match self.kind {
            ScheduleKind::GPipe => micro_batches,
            ScheduleKind::OneFOneB => (ranks - rank).min(micro_batches),
            ScheduleKind::Interleaved => (warm_up(rank, self.shape) + 1).min(micro_batches * chunks),
            ScheduleKind::ZeroBubble => ranks.min(micro_batches),
        }
    }

    /// The share of the ranks' time in a step that passes idly, where every stage takes as long as every other, messages take no
    /// time, and there are at least as many micro-batches as ranks. ZB-H1's is exact where forward, input and weight take equally
    /// long, and else a lower bound.
    pub fn bubble(&self, times: Times) -> f64 {
        let Shape { ranks, chunks, micro_batches } = self.shape;
        let Times { forward, input, weight } = times;
        let stage = forward + input + weight;
        let idle = (ranks - 1) as f64
            * match self.kind {
                ScheduleKind::ZeroBubble => (forward + input - weight).max(0.0),
                _ => stage,
            };
        idle / (idle + stage * (chunks * micro_batches) as f64)
    }
}

/// How long a stage takes for a micro-batch, in any unit.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Times {
    /// Forward.
    pub forward: f64,
    /// The gradient of its input.
    pub input: f64,
    /// Those of its weights.
    pub weight: f64,
}

impl Times {
    /// Each the same: what matrix products come to.
    pub const EQUAL: Times = Times { forward: 1.0, input: 1.0, weight: 1.0 };

    /// How long `work` takes.
    pub fn of(&self, work: Work) -> f64 {
        match work {
            Work::Forward => self.forward,
            Work::Backward => self.input + self.weight,
            Work::BackwardInput => self.input,
            Work::BackwardWeight => self.weight,
        }
    }
}

fn act(work: Work, stage: usize, micro_batch: usize) -> Action {
    Action { work, stage, micro_batch }
}

fn gpipe(rank: usize, shape: Shape) -> Vec<Action> {
    let all = |work| (0..shape.micro_batches).map(move |micro_batch| act(work, rank, micro_batch));
    all(Work::Forward).chain(all(Work::Backward)).collect()
}

/// Forwards ahead of the first backward but one: as many as there are ranks behind this one.
fn one_f_one_b(rank: usize, shape: Shape) -> Vec<Action> {
    let ahead = (shape.ranks - rank - 1).min(shape.micro_batches);
    let mut actions: Vec<Action> = (0..ahead).map(|i| act(Work::Forward, rank, i)).collect();
    for i in 0..shape.micro_batches {
        if ahead + i < shape.micro_batches {
            actions.push(act(Work::Forward, rank, ahead + i));
        }
        actions.push(act(Work::Backward, rank, i));
    }
    actions
}

/// Forwards of an interleaved schedule ahead of the first backward but one: two for each rank behind this one, whose answer has
/// to come back through them, and a round for each chunk before the last.
fn warm_up(rank: usize, shape: Shape) -> usize {
    let Shape { ranks, chunks, micro_batches } = shape;
    ((ranks - rank - 1) * 2 + (chunks - 1) * ranks).min(micro_batches * chunks)
}

fn interleaved(rank: usize, shape: Shape) -> Vec<Action> {
    let Shape { ranks, chunks, micro_batches } = shape;
    let (total, ahead) = (micro_batches * chunks, warm_up(rank, shape));
    // A round is `ranks` micro-batches through one chunk; a lap is a round in every chunk.
    let lap = ranks * chunks;
    let micro_batch = |i: usize| i / lap * ranks + i % ranks;
    let forward = |i: usize| act(Work::Forward, i % lap / ranks * ranks + rank, micro_batch(i));
    let backward =
        |i: usize| act(Work::Backward, (chunks - 1 - i % lap / ranks) * ranks + rank, micro_batch(i));
    let mut actions: Vec<Action> = (0..ahead).map(forward).collect();
    for i in 0..total {
        if ahead + i < total {
            actions.push(forward(ahead + i));
        }
        actions.push(backward(i));
    }
    actions
}

fn zero_bubble(rank: usize, shape: Shape) -> Vec<Action> {
    let n = shape.micro_batches;
    let ahead = (shape.ranks - rank - 1).min(n);
    let mut actions: Vec<Action> = (0..ahead).map(|i| act(Work::Forward, rank, i)).collect();
    for i in 0..n {
        if ahead + i < n {
            actions.push(act(Work::Forward, rank, ahead + i));
        }
        actions.push(act(Work::BackwardInput, rank, i));
        if let Some(put_off) = i.checked_sub(rank) {
            actions.push(act(Work::BackwardWeight, rank, put_off));
        }
    }
    let done = n.saturating_sub(rank);
    actions.extend((done..n).map(|i| act(Work::BackwardWeight, rank, i)));
    actions
}
