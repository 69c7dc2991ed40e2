//! How a graph is computed: what the library proposes, what of that may be taken, and its plan.

use super::convolution::{Convolution, Numbers};
use super::descriptor::{Descriptor, Raw};
use super::foreign::{self, Functions};
use super::graph::{Alignment, Graph, graph};
use super::has_no_way;
use super::target::Target;
use crate::error::Error;
use std::ffi::c_int;
use std::sync::Arc;

/// How many proposals of each heuristic are looked at: more than there are, since those that may not be taken can be the first.
const MOST: usize = 128;

/// The library's heuristics, each with the number of its first proposal: what is kept of a search has such numbers. In strict float32 the
/// quick one may propose nothing but tensor cores, where the thorough one has others; the last knows what does anything at all.
const MODES: [(c_int, usize); 3] =
    [(foreign::HEUR_MODE_A, 0), (foreign::HEUR_MODE_B, 2 * MOST), (foreign::HEUR_MODE_FALLBACK, MOST)];

/// A way to compute a convolution.
pub(super) struct Plan {
    pub(super) plan: Raw,
    pub(super) workspace_bytes: usize,
    /// Its number among all proposals.
    pub(super) proposal: usize,
    _config: Raw,
    _graph: Arc<Graph>,
}

/// Which plans are wanted.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Wanted {
    /// The first so many that may be taken.
    First(usize),
    /// That of this number among all proposals, if it may be taken.
    Only(usize),
}

/// The plans that may be taken, of those that are wanted, the one that the library thinks best first. An error where there is none.
pub(super) fn plans(
    functions: &Arc<Functions>,
    target: &Target,
    convolution: &Convolution,
    alignment: Alignment,
    most_workspace_bytes: usize,
    wanted: Wanted,
) -> Result<Vec<Plan>, Error> {
    let graph = Arc::new(graph(functions, target, convolution, alignment)?);
    let mut plans = Vec::new();
    let mut refused = None;
    for (mode, before) in MODES {
        let is_asked = match wanted {
            // Where the better heuristic has something, the next one has nothing to add.
            Wanted::First(_) => plans.is_empty(),
            Wanted::Only(only) => (before..before + MOST).contains(&only),
        };
        if !is_asked {
            continue;
        }
        let proposals = match proposals(functions, target, convolution, &graph, mode) {
            Ok(proposals) => proposals,
            Err(error) => {
                refused = Some(telling(refused, error));
                continue;
            }
        };
        for (i, config) in proposals.into_iter().enumerate() {
            let proposal = before + i;
            match wanted {
                Wanted::First(most) if plans.len() == most => break,
                Wanted::Only(only) if proposal != only => continue,
                _ => {}
            }
            if !may_be_taken(convolution.numbers, &notes(functions, convolution, &config)?) {
                continue;
            }
            match plan(functions, target, convolution, &graph, config, proposal) {
                Ok(plan) if plan.workspace_bytes <= most_workspace_bytes => plans.push(plan),
                Ok(_) => {}
                // Not every engine that is proposed can do what it is proposed for.
                Err(error) => refused = Some(telling(refused, error)),
            }
        }
    }
    if plans.is_empty() {
        let none = || functions.succeeded("cudnnBackendGetAttribute", foreign::NOT_SUPPORTED, convolution);
        return Err(refused.unwrap_or_else(|| none().expect_err("the status is one of failure")));
    }
    Ok(plans)
}

/// The refusal that says most: that no engine does it, for which there is another way, or else the last.
fn telling(known: Option<Error>, error: Error) -> Error {
    known.filter(has_no_way).unwrap_or(error)
}

/// Configurations of engines that a heuristic proposes.
fn proposals(
    functions: &Arc<Functions>,
    target: &Target,
    convolution: &Convolution,
    graph: &Graph,
    mode: c_int,
) -> Result<Vec<Raw>, Error> {
    let heuristic = target
        .of_heuristic(Descriptor::new(functions, convolution, foreign::ENGINE_HEUR)?)?
        .descriptors(foreign::HEUR_GRAPH, &[&graph.graph])?
        .number(foreign::HEUR_MODE, foreign::TYPE_HEUR_MODE, mode)?
        .finalize()?;
    let empty = |_| Ok(Descriptor::new(functions, convolution, foreign::ENGINE_CONFIG)?.empty());
    let mut configs = (0..MOST).map(empty).collect::<Result<Vec<_>, Error>>()?;
    let filled = heuristic.fill(foreign::HEUR_RESULTS, &configs, convolution)?;
    configs.truncate(filled);
    Ok(configs)
}

/// What an engine says of the numbers that it computes.
fn notes(functions: &Arc<Functions>, convolution: &Convolution, config: &Raw) -> Result<Vec<c_int>, Error> {
    let engine = [Descriptor::new(functions, convolution, foreign::ENGINE)?.empty()];
    config.fill(foreign::CONFIG_ENGINE, &engine, convolution)?;
    engine[0].notes(foreign::ENGINE_NOTE, convolution)
}

/// Whether an engine with these notes computes what was asked for, and the same in every run.
fn may_be_taken(numbers: Numbers, notes: &[c_int]) -> bool {
    notes.iter().all(|&note| match note {
        foreign::NOTE_NOT_DETERMINISTIC | foreign::NOTE_REDUCED_PRECISION => false,
        foreign::NOTE_TENSOR_CORE | foreign::NOTE_DOWN_CONVERT => numbers != Numbers::F32,
        _ => true,
    })
}

fn plan(
    functions: &Arc<Functions>,
    target: &Target,
    convolution: &Convolution,
    graph: &Arc<Graph>,
    config: Raw,
    proposal: usize,
) -> Result<Plan, Error> {
    let plan = target
        .of_plan(Descriptor::new(functions, convolution, foreign::PLAN)?)?
        .descriptors(foreign::PLAN_CONFIG, &[&config])?
        .finalize()?;
    let workspace_bytes = plan.integer(foreign::PLAN_WORKSPACE, convolution)?.max(0) as usize;
    Ok(Plan { plan, workspace_bytes, proposal, _config: config, _graph: graph.clone() })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn engines_are_taken_that_keep_their_word() {
        let rows: [(&[c_int], Numbers, bool); 6] = [
            (&[], Numbers::F32, true),
            (&[foreign::NOTE_TENSOR_CORE], Numbers::F32, false),
            (&[foreign::NOTE_TENSOR_CORE], Numbers::Tf32, true),
            (&[foreign::NOTE_TENSOR_CORE], Numbers::Bf16, true),
            (&[foreign::NOTE_TENSOR_CORE, foreign::NOTE_NOT_DETERMINISTIC], Numbers::Bf16, false),
            (&[foreign::NOTE_REDUCED_PRECISION], Numbers::F16, false),
        ];
        for (notes, numbers, want) in rows {
            assert_eq!(may_be_taken(numbers, notes), want, "{notes:?} for {numbers:?}");
        }
    }
}
