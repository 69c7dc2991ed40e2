//! The products of one GPU: what was chosen for each, and the calls.

use super::foreign::{Algo, Functions, LtHandle};
use super::plan::Descriptors;
use super::product::{Kept, Numbers, Product, Vector};
use crate::address::{Address, StreamHandle};
use crate::choices::{Chosen, Proposals, Race, Workspace};
use crate::clock::Clock;
use crate::error::Error;
use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::ffi::c_void;
use std::fmt;
use std::sync::Arc;

/// How many algorithms a search looks at.
const SEARCHED: usize = 16;
/// The best alignment that any algorithm asks for, in bytes.
const BEST_ALIGNMENT: u32 = 256;

/// How well what a product works on is aligned, in bytes: the first and the second factor of the library, the result, the vector and what is
/// kept. Algorithms are chosen by that and the product.
pub type Alignment = [u32; 5];

/// What a product works on, and with which factors.
#[derive(Clone, Copy, Debug)]
pub struct Operands {
    /// The first factor.
    pub a: Address,
    /// The second factor.
    pub b: Address,
    /// The result.
    pub out: Address,
    /// The epilogue's vector, as the matrices' elements; null where it has none.
    pub vector: Address,
    /// What an activation keeps, [`Product::kept_bytes`]; null where it keeps nothing. At multiples of 16 bytes.
    pub kept: Address,
    /// What the product is multiplied by.
    pub alpha: f64,
    /// What the result that was there is multiplied by before it is added; with 0 it isn't read.
    pub beta: f64,
}

impl Operands {
    /// A product that replaces what was there, without an epilogue.
    pub const fn new(a: Address, b: Address, out: Address) -> Operands {
        Operands { a, b, out, vector: Address::NULL, kept: Address::NULL, alpha: 1.0, beta: 0.0 }
    }

    /// How well all of it is aligned; what isn't there counts as aligned best.
    pub fn alignment(&self) -> Alignment {
        [self.b, self.a, self.out, self.vector, self.kept]
            .map(|Address(at)| 1 << at.trailing_zeros().min(BEST_ALIGNMENT.ilog2()))
    }
}

/// The products of one GPU: the library's handle, and the plan for each product that came by.
pub struct Products {
    functions: Arc<Functions>,
    handle: LtHandle,
    workspace_bytes: usize,
    plans: HashMap<(Product, Alignment), Plan>,
}

/// What was chosen for a product.
struct Plan {
    descriptors: Descriptors,
    algo: Algo,
    workspace_bytes: usize,
}

// SAFETY: a handle may be used by any thread.
unsafe impl Send for Products {}

impl Products {
    pub(super) fn new(functions: &Arc<Functions>, workspace_bytes: usize) -> Result<Products, Error> {
        let mut handle = std::ptr::null_mut();
        // SAFETY: the call writes one pointer.
        let status = unsafe { (functions.create)(&mut handle) };
        functions.succeeded("cublasLtCreate", status, &"a GPU")?;
        Ok(Products { functions: functions.clone(), handle, workspace_bytes, plans: HashMap::new() })
    }

    /// The bytes of the workspace that each call is to be given.
    pub fn workspace_bytes(&self) -> usize {
        self.workspace_bytes
    }

    /// For how many descriptions something was chosen.
    pub fn planned(&self) -> usize {
        self.plans.len()
    }

    /// Computes a product on `stream`, chosen for as the library thinks best if it is new. Panics on sizes that don't fit.
    ///
    /// # Safety
    /// Until the stream has done it: the addresses are of this GPU's memory, which holds what `product` says; nobody writes what
    /// is read, nobody reads or writes what is written; `workspace` has [`Products::workspace_bytes`], at a multiple of 256, and
    /// is used by no other stream; the stream lives.
    #[track_caller]
    pub unsafe fn run(
        &mut self,
        product: &Product,
        operands: &Operands,
        workspace: Address,
        stream: StreamHandle,
    ) -> Result<(), Error> {
        product.check();
        check(product, operands);
        let plan = match self.plans.entry((*product, operands.alignment())) {
            Entry::Occupied(found) => found.into_mut(),
            Entry::Vacant(free) => {
                let found =
                    proposed(&self.functions, self.handle, self.workspace_bytes, product, operands, 1)?;
                free.insert(found.plan(0))
            }
        };
        // SAFETY: the caller's promise.
        unsafe { plan.run(&self.functions, self.handle, product, operands, workspace, stream) }
    }
}

impl Proposals for Products {
    type Description = Product;
    type Operands = Operands;

    fn is_chosen(&self, product: &Product, operands: &Operands) -> bool {
        self.plans.contains_key(&(*product, operands.alignment()))
    }

    fn described(&self, product: &Product, operands: &Operands) -> String {
        let (version, limit) = (self.functions.number(), self.workspace_bytes);
        format!("cuBLASLt {version}: {product:?}, aligned to {:?}, in {limit} bytes", operands.alignment())
    }

    #[track_caller]
    fn take(&mut self, product: &Product, operands: &Operands, proposal: usize) -> Result<bool, Error> {
        let Products { functions, handle, workspace_bytes, plans } = self;
        let found = proposed(functions, *handle, *workspace_bytes, product, operands, SEARCHED)?;
        let is_there = proposal < found.ways.len();
        if is_there {
            plans.insert((*product, operands.alignment()), found.plan(proposal));
        }
        Ok(is_there)
    }

    #[track_caller]
    unsafe fn search(
        &mut self,
        product: &Product,
        operands: &Operands,
        workspace: &mut Workspace<'_>,
        stream: StreamHandle,
        clock: &mut Clock<'_>,
    ) -> Result<Chosen, Error> {
        let Products { functions, handle, workspace_bytes, plans } = self;
        let Proposed { descriptors, ways } =
            proposed(functions, *handle, *workspace_bytes, product, operands, SEARCHED)?;
        let workspace = workspace(ways.iter().map(|way| way.1).max().unwrap_or(0));
        let mut race = Race::new();
        let mut plan = Plan { descriptors, algo: ways[0].0, workspace_bytes: ways[0].1 };
        for (i, &way) in ways.iter().enumerate() {
            (plan.algo, plan.workspace_bytes) = way;
            // SAFETY: the caller's promise.
            let took =
                clock(&mut || unsafe { plan.run(functions, *handle, product, operands, workspace, stream) });
            race.enter(i, took, way)?;
        }
        let (chosen, fastest) = race.end()?;
        (plan.algo, plan.workspace_bytes) = fastest;
        plans.insert((*product, operands.alignment()), plan);
        Ok(chosen)
    }
}

/// What the library proposes for a product: algorithms with the workspaces that they need, the one that it thinks best first.
struct Proposed {
    descriptors: Descriptors,
    ways: Vec<(Algo, usize)>,
}

impl Proposed {
    fn plan(self, proposal: usize) -> Plan {
        let (algo, workspace_bytes) = self.ways[proposal];
        Plan { descriptors: self.descriptors, algo, workspace_bytes }
    }
}

/// Up to `most` proposals. Panics on sizes that don't fit.
#[track_caller]
fn proposed(
    functions: &Arc<Functions>,
    handle: LtHandle,
    workspace_bytes: usize,
    product: &Product,
    operands: &Operands,
    most: usize,
) -> Result<Proposed, Error> {
    product.check();
    check(product, operands);
    let descriptors = Descriptors::new(functions, product)?;
    descriptors.point(product, operands.vector, operands.kept)?;
    let ways = descriptors.algorithms(handle, product, workspace_bytes, operands.alignment(), most)?;
    Ok(Proposed { descriptors, ways })
}

/// Panics where an epilogue lacks what it works on.
#[track_caller]
fn check(product: &Product, operands: &Operands) {
    let vector = product.epilogue.vector() == Vector::None || operands.vector != Address::NULL;
    let kept = product.epilogue.kept() == Kept::None || operands.kept != Address::NULL;
    assert!(vector && kept, "{product}: a vector or what is kept has no address");
}

impl Plan {
    /// # Safety
    /// As for [`Products::run`].
    unsafe fn run(
        &self,
        functions: &Functions,
        handle: LtHandle,
        product: &Product,
        operands: &Operands,
        workspace: Address,
        stream: StreamHandle,
    ) -> Result<(), Error> {
        let Plan { descriptors, algo, workspace_bytes } = self;
        descriptors.point(product, operands.vector, operands.kept)?;
        let wide = [operands.alpha, operands.beta];
        let narrow = wide.map(|factor| factor as f32);
        let [alpha, beta]: [*const c_void; 2] = match product.numbers {
            Numbers::F64 => wide.each_ref().map(|factor| (&raw const *factor).cast()),
            _ => narrow.each_ref().map(|factor| (&raw const *factor).cast()),
        };
        let [a, b, out] = [operands.a, operands.b, operands.out].map(|Address(at)| at as *mut c_void);
        // SAFETY: descriptors and handle live, factors are read before the call returns; the rest is the caller's promise.
        let status = unsafe {
            (functions.matmul)(
                handle,
                descriptors.product.pointer,
                alpha,
                b,
                descriptors.first.pointer,
                a,
                descriptors.second.pointer,
                beta,
                out,
                descriptors.out.pointer,
                out,
                descriptors.out.pointer,
                algo,
                workspace.0 as *mut c_void,
                *workspace_bytes,
                stream,
            )
        };
        functions.succeeded("cublasLtMatmul", status, product)
    }
}

impl Drop for Products {
    fn drop(&mut self) {
        self.plans.clear();
        // SAFETY: made in `new` and ended nowhere else. It can't be helped if that fails.
        unsafe { (self.functions.destroy)(self.handle) };
    }
}

impl fmt::Debug for Products {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Products({} planned)", self.plans.len())
    }
}
