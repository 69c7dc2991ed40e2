//! The GPU that graphs are made for.

use super::descriptor::Descriptor;
use super::foreign::{self, CudnnHandle};
use crate::error::Error;

/// The GPU that graphs are made for.
pub(super) enum Target {
    /// That of a handle.
    Handle(CudnnHandle),
    /// One whose properties are described: the library proposes engines for it, and makes plans, where there is no GPU, too.
    #[cfg(test)]
    Described(super::described::Gpu),
}

impl Target {
    pub(super) fn of_graph<'a>(&self, graph: Descriptor<'a>) -> Result<Descriptor<'a>, Error> {
        match self {
            Target::Handle(handle) => graph.handle(foreign::GRAPH_HANDLE, *handle),
            #[cfg(test)]
            Target::Described(_) => Ok(graph),
        }
    }

    pub(super) fn of_heuristic<'a>(&self, heuristic: Descriptor<'a>) -> Result<Descriptor<'a>, Error> {
        match self {
            Target::Handle(_) => Ok(heuristic),
            #[cfg(test)]
            Target::Described(gpu) => gpu.of_heuristic(heuristic),
        }
    }

    pub(super) fn of_plan<'a>(&self, plan: Descriptor<'a>) -> Result<Descriptor<'a>, Error> {
        match self {
            Target::Handle(handle) => plan.handle(foreign::PLAN_HANDLE, *handle),
            #[cfg(test)]
            Target::Described(gpu) => gpu.of_plan(plan),
        }
    }
}
