//! What a checkpoint is written from: a copy of everything that changes from step to step, in memory that is kept for the next
//! one. Copying is one pass over the arenas and allocates nothing once warm; it is done from what is [`Lent`], so that it needs
//! no standstill.

use super::manifest::Holds;
use super::position::Position;
use crate::trainer::State;
use phalanx_nn::optim::Optimizer;
use phalanx_nn::{Average, Parameters, Shadow};
use phalanx_parallel::{Collected, Kept};
use phalanx_tensor::{Arena, Layout, Shape};
use std::ops::Range;

/// How the arenas of a model are named and laid out, which no step changes.
pub(super) struct Contents {
    names: Vec<String>,
    layout: Layout,
    buffer_names: Vec<String>,
    buffer_layout: Layout,
    /// That of a count of the optimizer's steps.
    scalar: Layout,
    /// Whether these counts are here.
    has_counts: bool,
}

impl Contents {
    pub(super) fn of(parameters: &Parameters) -> Contents {
        Contents {
            names: parameters.names().to_vec(),
            layout: parameters.layout().clone(),
            buffer_names: parameters.buffer_names().to_vec(),
            buffer_layout: parameters.buffers().layout().clone(),
            scalar: Layout::new(&[Shape::new(&[])]),
            has_counts: true,
        }
    }

    /// Of a checkpoint that ranks write together, what a rank has to write: these parameters; on the first one with the buffers and
    /// the counts of steps.
    pub(super) fn part(&self, params: Range<usize>, is_first: bool) -> Contents {
        Contents {
            names: self.names[params.clone()].to_vec(),
            layout: self.layout.part(params),
            buffer_names: if is_first { self.buffer_names.clone() } else { Vec::new() },
            buffer_layout: if is_first { self.buffer_layout.clone() } else { Layout::new(&[]) },
            scalar: self.scalar.clone(),
            has_counts: is_first,
        }
    }

    /// Parameters and buffers under the names of the model.
    fn model<'a>(&'a self, values: &'a [f32], buffers: &'a [f32]) -> Vec<Array<'a>> {
        let mut model = arrays(&self.names, "", &self.layout, values);
        model.extend(arrays(&self.buffer_names, "", &self.buffer_layout, buffers));
        model
    }
}

/// What is to be copied. The passes of the next step only read the values, and leave the optimizer's state and the running
/// mean alone, so these are lent until that step moves them; the buffers, which a pass may change, are small.
pub(super) struct Lent {
    position: Position,
    values: Arena,
    buffers: Vec<f32>,
    optimizer_steps: Counts,
    states: Vec<(&'static str, Shadow)>,
    average: Option<Average>,
    kept: Vec<Kept>,
}

/// What ranks have brought together beside the values.
#[derive(Default)]
pub(super) struct Beside {
    /// The optimizer's state, where this rank holds only a part of it.
    pub(super) states: Option<Vec<Vec<f32>>>,
    /// The running mean, likewise.
    pub(super) average: Option<Average>,
    /// What each rank's compression of gradients keeps.
    pub(super) kept: Vec<Kept>,
}

impl Lent {
    pub(super) fn of(parameters: &Parameters, state: &State, beside: Beside) -> Lent {
        let State { progress, optimizer, average } = state;
        let held = optimizer.state().map(|(name, state)| (name, state.clone()));
        let states = match beside.states {
            None => held.collect(),
            Some(whole) => held.zip(whole).map(|((name, _), whole)| (name, whole.into())).collect(),
        };
        Lent {
            position: progress.into(),
            values: parameters.values().clone(),
            buffers: parameters.buffers().read_flat(),
            optimizer_steps: Counts::of(optimizer),
            states,
            average: beside.average.or_else(|| average.clone()),
            kept: beside.kept,
        }
    }
}

/// How many steps an optimizer has made, and of which parameters fewer, under their names in a file.
#[derive(Default)]
struct Counts(Vec<(String, [f32; 1])>);

impl Counts {
    fn of(optimizer: &Optimizer) -> Counts {
        Counts(optimizer.counts().into_iter().map(|(name, steps)| (name, [steps])).collect())
    }
}

/// The arenas at one moment, flat, with their padding.
#[derive(Default)]
pub(super) struct Snapshot {
    pub(super) position: Position,
    values: Vec<f32>,
    buffers: Vec<f32>,
    optimizer_steps: Counts,
    states: Vec<(&'static str, Vec<f32>)>,
    /// Values and buffers.
    average: Option<[Vec<f32>; 2]>,
    /// What ranks keep, with its name and how it lies.
    kept: Vec<(String, Layout, Vec<f32>)>,
}

/// An array of a file: one parameter of a flat array.
pub(super) struct Array<'a> {
    pub(super) name: String,
    pub(super) layout: &'a Layout,
    pub(super) index: usize,
    pub(super) flat: &'a [f32],
}

impl Snapshot {
    /// Copies everything, over what was copied before, and gives it back.
    pub(super) fn copy(&mut self, lent: Lent) {
        let Lent { position, values, buffers, optimizer_steps, states, average, kept } = lent;
        self.position = position;
        values.read_into(&mut self.values);
        self.buffers = buffers;
        self.optimizer_steps.0.clone_from(&optimizer_steps.0);
        self.states.resize_with(states.len(), Default::default);
        for ((name, into), (state, from)) in self.states.iter_mut().zip(&states) {
            *name = state;
            from.read_into(into);
        }
        match &average {
            Some(average) => {
                let [values, buffers] = self.average.get_or_insert_default();
                average.values().read_into(values);
                average.buffers().read_into(buffers);
            }
            None => self.average = None,
        }
        let of_rank = |(rank, kept): (usize, Kept)| {
            kept.into_iter().map(move |(name, numbers)| {
                let layout = Layout::new(&[Shape::new(&[numbers.len()])]);
                (rank_name(rank, &name), layout, numbers)
            })
        };
        self.kept = kept.into_iter().enumerate().flat_map(of_rank).collect();
    }

    /// Takes what a rank writes of a checkpoint, in the place of what was copied before. Beside its values are the arrays of the
    /// optimizer's state, and the running mean behind them if there is one. Buffers are all of them, and their mean likewise.
    pub(super) fn take(
        &mut self,
        state: &State,
        part: Collected,
        buffers: Vec<f32>,
        mean_of_buffers: Option<Vec<f32>>,
    ) {
        let State { progress, optimizer, .. } = state;
        let mut beside = part.beside;
        let values = |beside: &mut Vec<_>| beside.pop().expect("the mean is the last");
        let average = mean_of_buffers.map(|buffers| [values(&mut beside), buffers]);
        let names = optimizer.state().map(|(name, _)| name);
        *self = Snapshot {
            position: progress.into(),
            values: part.values,
            buffers,
            optimizer_steps: Counts::of(optimizer),
            states: names.zip(beside).collect(),
            average,
            kept: Vec::new(),
        };
    }

    /// What each file holds.
    pub(super) fn files<'a>(&'a self, contents: &'a Contents) -> Vec<(Holds, Vec<Array<'a>>)> {
        // As `Optimizer::to_weights` names them, which `Optimizer::resume` reads.
        let counts = if contents.has_counts { self.optimizer_steps.0.as_slice() } else { &[] };
        let count = |(name, steps): &'a (String, [f32; 1])| Array {
            name: name.clone(),
            layout: &contents.scalar,
            index: 0,
            flat: steps,
        };
        let mut optimizer: Vec<Array> = counts.iter().map(count).collect();
        for (state, flat) in &self.states {
            optimizer.extend(arrays(&contents.names, &format!(".{state}"), &contents.layout, flat));
        }
        let model = contents.model(&self.values, &self.buffers);
        let mut files = vec![(Holds::Model, model), (Holds::Optimizer, optimizer)];
        if let Some([values, buffers]) = &self.average {
            files.push((Holds::Average, contents.model(values, buffers)));
        }
        if !self.kept.is_empty() {
            let array = |(name, layout, flat): &'a (String, Layout, Vec<f32>)| Array {
                name: name.clone(),
                layout,
                index: 0,
                flat,
            };
            files.push((Holds::Compression, self.kept.iter().map(array).collect()));
        }
        files
    }
}

/// What a rank's numbers are called in a file.
pub(super) fn rank_name(rank: usize, name: &str) -> String {
    format!("rank.{rank}.{name}")
}

fn arrays<'a>(names: &[String], suffix: &str, layout: &'a Layout, flat: &'a [f32]) -> Vec<Array<'a>> {
    let array =
        |(index, name): (usize, &String)| Array { name: format!("{name}{suffix}"), layout, index, flat };
    names.iter().enumerate().map(array).collect()
}
