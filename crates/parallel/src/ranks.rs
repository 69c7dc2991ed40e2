//! What ranks exchange in the midst of a pass, where nothing can fail. Between ranks with a GPU each it goes by NCCL, and never sees the
//! host, which goes on while its GPU waits: it is told of a rank that is gone two exchanges later, or before anything is read ([`Trail`]).

use phalanx_comm::{Element as Sent, Error, GpuGroup, GpuWork, Group, ReduceOp, Trail, bf16, f16};
use phalanx_tensor::{DType, Element, GpuTensor, Tensor};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Ranks that exchange values in the midst of a pass, as those that hold the parts of a layer do. Layers can't fail, so the first failure
/// is kept for whoever asks after the pass; what comes of it means nothing.
#[derive(Clone)]
pub(crate) struct Ranks {
    group: Group,
    /// Their GPUs, where these exchange values among themselves.
    gpus: Option<Arc<GpuGroup>>,
    /// What this rank's GPU waits for.
    trail: Trail,
    failure: Arc<Mutex<Option<Error>>>,
}

impl Ranks {
    pub(crate) fn of(group: Group) -> Ranks {
        Ranks { group, gpus: None, trail: Trail::default(), failure: Arc::default() }
    }

    /// The same with GPUs that exchange values among themselves, if these do, and what this one waits for.
    pub(crate) fn on(self, gpus: Option<GpuGroup>, trail: &Trail) -> Ranks {
        Ranks { gpus: gpus.map(Arc::new), trail: trail.clone(), ..self }
    }

    /// How many there are.
    pub(crate) fn count(&self) -> usize {
        self.group.world_size()
    }

    /// Which of them this is.
    pub(crate) fn rank(&self) -> usize {
        self.group.rank().index()
    }

    pub(crate) fn group(&self) -> &Group {
        &self.group
    }

    /// The GPUs, where these exchange values among themselves.
    pub(crate) fn gpus(&self) -> Option<&Arc<GpuGroup>> {
        self.gpus.as_ref()
    }

    /// Ends the group, and what GPUs have under way.
    pub(crate) fn abort(&self, because: &str) {
        self.group.abort(because);
        self.gpus.iter().for_each(|gpus| gpus.abort(because));
    }

    /// The first failure since this was asked for last.
    pub(crate) fn take_failure(&self) -> Option<Error> {
        self.failure().take()
    }

    fn failure(&self) -> MutexGuard<'_, Option<Error>> {
        self.failure.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn note(&self, result: Result<(), Error>) {
        if let Err(error) = result {
            self.failure().get_or_insert(error);
        }
    }

    /// The sum over ranks, or the largest: outside of the graph.
    pub(crate) fn reduced(&self, x: &Tensor, op: ReduceOp) -> Tensor {
        match x.dtype() {
            DType::BF16 => self.reduced_as::<bf16>(x, op),
            DType::F16 => self.reduced_as::<f16>(x, op),
            DType::F64 => self.reduced_as::<f64>(x, op),
            _ => self.reduced_as::<f32>(x, op),
        }
    }

    /// The sum over ranks of numbers that nobody else needs; after a failure, where GPUs don't exchange them, no numbers. Outside of the
    /// graph.
    pub(crate) fn sum(&self, numbers: Tensor) -> Tensor {
        match self.gpus {
            Some(_) => self
                .on_gpus(|| numbers.lend(), |gpus, own| gpus.start_all_reduce(own, ReduceOp::Sum))
                .expect("ranks whose GPUs exchange values have them there"),
            None => {
                let sums = self.reduced(&numbers, ReduceOp::Sum);
                // One's own would be taken for those of all.
                if self.failure().is_some() {
                    sums.fill(f64::NAN);
                }
                sums
            }
        }
    }

    pub(crate) fn reduced_as<T: Element + Sent>(&self, x: &Tensor, op: ReduceOp) -> Tensor {
        if let Some(reduced) = self.on_gpus(|| x.to_lend(), |gpus, own| gpus.start_all_reduce(own, op)) {
            return reduced;
        }
        // Graphs are alike (T-ORDER), so all ranks' values lie in the same order.
        let order = x.lies_in().filter(|_| x.device().gpu().is_none());
        let mut values = match order {
            Some(_) => x.with_lying(|values: &[T]| values.to_vec()),
            None => self.on_host::<T>(x),
        };
        self.note(self.group.all_reduce(&mut values, op));
        match order {
            Some(order) => Tensor::from_order(x.device(), &values, *x.shape(), order),
            None => Tensor::from_slice(x.device(), &values, *x.shape()),
        }
    }

    /// The numbers, once a GPU waits for no other rank.
    pub(crate) fn on_host<T: Element>(&self, x: &Tensor) -> Vec<T> {
        self.note(self.trail.settle());
        x.to_vec()
    }

    /// What GPUs make of values among themselves, if they do: of `x` as it is lent, `start` begins it. After a failure it means nothing.
    pub(crate) fn on_gpus(
        &self,
        lend: impl FnOnce() -> Option<GpuTensor>,
        start: impl FnOnce(&GpuGroup, GpuTensor) -> Result<GpuWork<GpuTensor>, Error>,
    ) -> Option<Tensor> {
        let gpus = self.gpus.as_ref()?;
        let own = lend()?;
        let nothing = own.zeros_like();
        let done = start(gpus, own).and_then(|work| self.trail.join(gpus, work, MOST_AHEAD));
        Some(done.map(GpuTensor::into_tensor).unwrap_or_else(|error| {
            self.note(Err(error));
            nothing()
        }))
    }
}

/// Exchanges that the host may have put behind it while its GPU waits for them.
const MOST_AHEAD: usize = 2;
