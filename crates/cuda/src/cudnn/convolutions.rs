//! The convolutions of one GPU: what was chosen for each, and the calls.

use super::EXECUTE;
use super::convolution::{Convolution, Pass};
use super::descriptor::Descriptor;
use super::foreign::{self, CudnnHandle, Functions};
use super::graph::{Alignment, BIAS, FILTER, IMAGE, OUTPUT};
use super::plan::{Plan, Wanted, plans};
use super::target::Target;
use crate::address::{Address, StreamHandle};
use crate::choices::{Chosen, Proposals, Race, Workspace};
use crate::clock::Clock;
use crate::error::Error;
use std::collections::HashMap;
use std::fmt;
use std::sync::Arc;

/// How many plans a search measures.
const SEARCHED: usize = 8;
/// The best alignment that any engine asks for, in bytes.
const BEST_ALIGNMENT: u32 = 16;

/// What a convolution works on. The pass says which of them is written; the others are read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Operands {
    /// Images, or their gradient.
    pub images: Address,
    /// Kernels, or their gradient.
    pub kernels: Address,
    /// Outputs, or their gradient.
    pub outputs: Address,
    /// One number an output channel; null in passes without a bias.
    pub bias: Address,
}

impl Operands {
    /// How well all of it is aligned, in bytes.
    pub fn alignment(&self) -> Alignment {
        [self.images, self.kernels, self.outputs, self.bias]
            .map(|Address(at)| 1 << at.trailing_zeros().min(BEST_ALIGNMENT.ilog2()))
    }
}

/// The convolutions of one GPU: the library's handle, and the plan for each that came by.
pub struct Convolutions {
    functions: Arc<Functions>,
    handle: CudnnHandle,
    most_workspace_bytes: usize,
    plans: HashMap<(Convolution, Alignment), Plan>,
}

// SAFETY: a handle may be used by any thread, one at a time, which `&mut self` sees to.
unsafe impl Send for Convolutions {}

impl Convolutions {
    pub(super) fn new(
        functions: &Arc<Functions>,
        most_workspace_bytes: usize,
    ) -> Result<Convolutions, Error> {
        let mut handle = std::ptr::null_mut();
        // SAFETY: the call writes one pointer.
        let status = unsafe { (functions.create)(&mut handle) };
        functions.succeeded("cudnnCreate", status, &"a GPU")?;
        Ok(Convolutions { functions: functions.clone(), handle, most_workspace_bytes, plans: HashMap::new() })
    }

    /// For how many descriptions something was chosen.
    pub fn planned(&self) -> usize {
        self.plans.len()
    }

    /// The bytes of the workspace that a convolution of these operands is to be given, chosen for as the library thinks best if it
    /// is new: that may compile a kernel, so do it before a stream is captured. Panics on sizes that don't fit.
    #[track_caller]
    pub fn workspace_bytes(
        &mut self,
        convolution: &Convolution,
        operands: &Operands,
    ) -> Result<usize, Error> {
        Ok(self.plan(convolution, operands)?.workspace_bytes)
    }

    /// Computes a convolution on `stream`. Panics on sizes that don't fit.
    ///
    /// # Safety
    /// Until the stream has done it: the addresses are of this GPU's memory, which holds what `convolution` says; nobody writes
    /// what is read, nobody reads or writes what is written; `workspace` has [`Convolutions::workspace_bytes`], at a multiple of
    /// 256, and is used by no other stream; the stream lives.
    #[track_caller]
    pub unsafe fn run(
        &mut self,
        convolution: &Convolution,
        operands: &Operands,
        workspace: Address,
        stream: StreamHandle,
    ) -> Result<(), Error> {
        self.plan(convolution, operands)?;
        let plan = &self.plans[&(*convolution, operands.alignment())];
        // SAFETY: the caller's promise.
        unsafe { execute(&self.functions, self.handle, plan, convolution, operands, workspace, stream) }
    }

    #[track_caller]
    fn plan(&mut self, convolution: &Convolution, operands: &Operands) -> Result<&Plan, Error> {
        check(convolution, operands);
        let key = (*convolution, operands.alignment());
        if !self.plans.contains_key(&key) {
            let (target, limit) = (Target::Handle(self.handle), self.most_workspace_bytes);
            let mut found = plans(&self.functions, &target, convolution, key.1, limit, Wanted::First(1))?;
            self.plans.insert(key, found.remove(0));
        }
        Ok(&self.plans[&key])
    }
}

impl Proposals for Convolutions {
    type Description = Convolution;
    type Operands = Operands;

    fn is_chosen(&self, convolution: &Convolution, operands: &Operands) -> bool {
        self.plans.contains_key(&(*convolution, operands.alignment()))
    }

    fn described(&self, convolution: &Convolution, operands: &Operands) -> String {
        let (version, limit) = (self.functions.number(), self.most_workspace_bytes);
        format!("cuDNN {version}: {convolution:?}, aligned to {:?}, in {limit} bytes", operands.alignment())
    }

    #[track_caller]
    fn take(
        &mut self,
        convolution: &Convolution,
        operands: &Operands,
        proposal: usize,
    ) -> Result<bool, Error> {
        check(convolution, operands);
        let key = (*convolution, operands.alignment());
        let Convolutions { functions, handle, most_workspace_bytes: limit, .. } = self;
        let target = Target::Handle(*handle);
        let found = match plans(functions, &target, convolution, key.1, *limit, Wanted::Only(proposal)) {
            Ok(mut found) => found.pop(),
            // It was kept by another version of the driver, perhaps; the search will tell of anything else.
            Err(Error::LibraryCall { .. }) => None,
            Err(error) => return Err(error),
        };
        Ok(found.map(|plan| self.plans.insert(key, plan)).is_some())
    }

    #[track_caller]
    unsafe fn search(
        &mut self,
        convolution: &Convolution,
        operands: &Operands,
        workspace: &mut Workspace<'_>,
        stream: StreamHandle,
        clock: &mut Clock<'_>,
    ) -> Result<Chosen, Error> {
        check(convolution, operands);
        let (functions, handle) = (&self.functions, self.handle);
        let (alignment, limit) = (operands.alignment(), self.most_workspace_bytes);
        let target = Target::Handle(handle);
        let found = plans(functions, &target, convolution, alignment, limit, Wanted::First(SEARCHED))?;
        let workspace = workspace(found.iter().map(|plan| plan.workspace_bytes).max().unwrap_or(0));
        let mut race = Race::new();
        for plan in found {
            let took = clock(&mut || {
                // SAFETY: the caller's promise.
                unsafe { execute(functions, handle, &plan, convolution, operands, workspace, stream) }
            });
            race.enter(plan.proposal, took, plan)?;
        }
        let (chosen, plan) = race.end()?;
        self.plans.insert((*convolution, alignment), plan);
        Ok(chosen)
    }
}

/// Panics where sizes don't fit or a bias has no address.
#[track_caller]
fn check(convolution: &Convolution, operands: &Operands) {
    convolution.output();
    let given = has_bias(convolution.pass) == (operands.bias != Address::NULL);
    assert!(given, "{convolution}: a bias at {:?}", operands.bias);
}

fn has_bias(pass: Pass) -> bool {
    match pass {
        Pass::ForwardBias | Pass::ForwardBiasRelu => true,
        Pass::Forward | Pass::BackwardData | Pass::BackwardFilter => false,
    }
}

/// # Safety
/// As for [`Convolutions::run`].
unsafe fn execute(
    functions: &Arc<Functions>,
    handle: CudnnHandle,
    plan: &Plan,
    convolution: &Convolution,
    operands: &Operands,
    workspace: Address,
    stream: StreamHandle,
) -> Result<(), Error> {
    let Operands { images, kernels, outputs, bias } = *operands;
    let n_tensors = if has_bias(convolution.pass) { 4 } else { 3 };
    let pack = Descriptor::new(functions, convolution, foreign::VARIANT_PACK)?
        .integers(foreign::PACK_IDS, &[IMAGE, FILTER, OUTPUT, BIAS][..n_tensors])?
        .pointers(foreign::PACK_POINTERS, &[images.0, kernels.0, outputs.0, bias.0][..n_tensors])?
        .pointers(foreign::PACK_WORKSPACE, &[workspace.0])?
        .finalize()?;
    // SAFETY: the handle lives.
    let status = unsafe { (functions.set_stream)(handle, stream) };
    functions.succeeded("cudnnSetStream", status, convolution)?;
    // SAFETY: handle, plan and pack live; the rest is the caller's promise.
    let status = unsafe { (functions.execute)(handle, plan.plan.pointer, pack.pointer) };
    functions.succeeded(EXECUTE, status, convolution)
}

impl Drop for Convolutions {
    fn drop(&mut self) {
        self.plans.clear();
        // SAFETY: made in `new` and ended nowhere else. It can't be helped if that fails.
        unsafe { (self.functions.destroy)(self.handle) };
    }
}

impl fmt::Debug for Convolutions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Convolutions({} planned)", self.plans.len())
    }
}
