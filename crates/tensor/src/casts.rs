//! The parameters of a gradient arena in a float of 16 bits, in an arena of their own: each is cast when it is first wanted after its
//! values were written, so once a step, however many passes the step has. On a GPU, where each launch costs, all are cast at
//! once where all were written; an optimizer that moves them there writes their casts along the way, as long as anybody wants them. A
//! pass that is recorded finds these made, as its rehearsal did, and whoever replays it sees to that ([`crate::Grads::renew_casts`]).

use crate::account::Purpose;
use crate::arena::{Arena, Layout, Span};
use crate::cpu;
use crate::device::{Backend, Device};
use crate::dtype::{DType, Element};
use crate::kernel;
use crate::lock::lock;
use crate::tensor::Tensor;
use half::{bf16, f16};
use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard};

/// What was cast so far.
pub(crate) struct Casts {
    layout: Layout,
    made: Mutex<Option<Made>>,
}

struct Made {
    arena: Arena,
    /// How often each parameter had been written when it was cast, if it was.
    writes: Vec<Option<u64>>,
    /// How often each was read for it.
    reads: Vec<u64>,
    /// Whether anybody has wanted one since an optimizer wrote them.
    is_wanted: bool,
}

impl Casts {
    /// Of parameters that lie so; none yet.
    pub(crate) fn new(layout: &Layout) -> Casts {
        Casts { layout: layout.clone(), made: Mutex::default() }
    }

    /// Parameter `i` of `values` in this type. None if it holds no f32, or lies on another device than the first that was asked for.
    pub(crate) fn of(&self, i: usize, values: &Arena, dtype: DType) -> Option<Tensor> {
        let value = &values.tensor(i);
        if value.dtype != DType::F32 {
            return None;
        }
        let mut kept = self.lock();
        let made = self.made_in(&mut kept, value.device(), dtype);
        if made.arena.device() != value.device() {
            return None;
        }
        made.is_wanted = true;
        if let Backend::Gpu(engine) = value.device().backend() {
            // What comes and goes in pieces isn't all here, and is cast by whoever brings it.
            if !values.is_cut() && made.is_stale(0..self.layout.count(), values) {
                engine.cast_arena(values, &made.arena);
                made.note(0..self.layout.count(), values);
            }
        }
        let cast = made.arena.tensor(i);
        if made.is_stale(i..i + 1, values) {
            if !values.is_cut() {
                let why = "casts of parameters that weren't made before, which";
                value.device().private(|pass| pass.is_recording().then(|| pass.refuse(why)));
            }
            kernel::copy::convert(value, &cast);
            made.reads[i] += 1;
            made.note(i..i + 1, values);
        }
        Some(cast)
    }

    /// The arena that they lie in on a GPU, if all are as `values` are now, and wanted so.
    pub(crate) fn of_now(&self, values: &Arena) -> Option<Arena> {
        let kept = self.lock();
        let made = kept.as_ref().filter(|made| made.is_wanted && made.arena.device().gpu().is_some())?;
        let is_whole = !values.is_cut() && !made.arena.is_cut();
        (is_whole && made.is_fresh(values)).then(|| made.arena.clone())
    }

    /// Has `casts`, which lie on a GPU, be what `values` are now.
    pub(crate) fn renew(&self, values: &Arena, casts: &Arena) {
        let mut kept = self.lock();
        let mut made = kept.as_mut().filter(|made| made.are_in(casts));
        if let Some(made) = &mut made {
            made.is_wanted = true;
            if made.is_fresh(values) {
                return;
            }
        }
        if let Backend::Gpu(engine) = values.device().backend() {
            engine.cast_arena(values, casts);
            made.into_iter().for_each(|made| made.note(0..self.layout.count(), values));
        }
    }

    /// Takes note that an optimizer has written `casts` as it moved `values`.
    pub(crate) fn were_moved(&self, values: &Arena, casts: &Arena) {
        if let Some(made) = self.lock().as_mut().filter(|made| made.are_in(casts)) {
            made.note(0..self.layout.count(), values);
            made.is_wanted = false;
        }
    }

    /// The arena that they lie in, once there is one.
    pub(crate) fn arena(&self) -> Option<Arena> {
        self.lock().as_ref().map(|made| made.arena.clone())
    }

    /// What was made in this type: nothing, if it was in another.
    fn made_in<'a>(&self, kept: &'a mut Option<Made>, device: &Device, dtype: DType) -> &'a mut Made {
        let made = match kept.take() {
            Some(made) if made.arena.dtype() == dtype => made,
            _ => Made {
                arena: Arena::new(device, dtype, &self.layout).held_for(Purpose::Casts),
                writes: vec![None; self.layout.count()],
                reads: vec![0; self.layout.count()],
                is_wanted: false,
            },
        };
        kept.insert(made)
    }

    /// The arena for this type.
    pub(crate) fn of_type(&self, device: &Device, dtype: DType) -> Arena {
        self.made_in(&mut self.lock(), device, dtype).arena.clone()
    }

    /// Whether parameter `i` was cast since it was written last.
    pub(crate) fn has(&self, i: usize, values: &Arena) -> bool {
        self.lock().as_ref().is_some_and(|made| !made.is_stale(i..i + 1, values))
    }

    pub(crate) fn note(&self, params: impl IntoIterator<Item = usize>, values: &Arena) {
        if let Some(made) = &mut *self.lock() {
            made.note(params, values);
        }
    }

    pub(crate) fn forget(&self, params: Range<usize>) {
        if let Some(made) = &mut *self.lock() {
            made.writes[params].fill(None);
        }
    }

    /// Nothing is cast any more, and the memory of what was is given back; it comes anew with the next.
    pub(crate) fn give_back(&self) {
        if let Some(made) = &mut *self.lock() {
            made.writes.fill(None);
            let params = 0..self.layout.count();
            match made.arena.dtype() {
                DType::BF16 => give_back(made.arena.set_aside::<bf16>(params)),
                _ => give_back(made.arena.set_aside::<f16>(params)),
            }
        }
    }

    /// How often parameter `i` was read to be cast.
    pub(crate) fn made(&self, i: usize) -> u64 {
        self.lock().as_ref().map_or(0, |made| made.reads[i])
    }

    /// Whatever made a thread panic, what was cast is noted after it was.
    fn lock(&self) -> MutexGuard<'_, Option<Made>> {
        lock(&self.made)
    }
}

fn give_back<T: Element>(mut span: Span<T>) {
    span.give_back(0..span.count());
}

impl Made {
    /// Whether they lie in this arena.
    fn are_in(&self, arena: &Arena) -> bool {
        Arc::ptr_eq(self.arena.memory_of_all(), arena.memory_of_all())
    }

    /// Whether all are as they were cast.
    fn is_fresh(&self, values: &Arena) -> bool {
        (0..self.writes.len()).all(|i| !self.is_stale(i..i + 1, values))
    }

    /// Whether all of these were written since they were cast.
    fn is_stale(&self, mut params: Range<usize>, values: &Arena) -> bool {
        params.all(|i| self.writes[i] != Some(values.writes(i)))
    }

    /// Takes note that these were cast.
    fn note(&mut self, params: impl IntoIterator<Item = usize>, values: &Arena) {
        params.into_iter().for_each(|i| self.writes[i] = Some(values.writes(i)));
    }
}

impl<T: Element> Span<T> {
    /// Overwrites elements from `at` on, counted from the start of the span, with these values, each rounded once as
    /// [`Tensor::cast`] does. Panics if there are too many of them, or on a GPU.
    #[track_caller]
    pub fn cast_from(&mut self, at: usize, values: &[f32]) {
        let device = self.arena().device().clone();
        cpu::copy::convert_elements(&device, values, &mut self[at..at + values.len()]);
    }

    /// The same with elements of a span of values, counted from its start, which lies on the same GPU or, like this, on a CPU.
    #[track_caller]
    pub fn cast_span(&mut self, at: usize, from: &Span<f32>, elements: Range<usize>) {
        let count = elements.len();
        let (source, target) = (from.bytes_of(&elements), self.bytes_of(&(at..at + count)));
        let here = self.arena().device().clone();
        match (here.backend(), from.arena().device().backend()) {
            (Backend::Cpu, Backend::Cpu) => self.cast_from(at, &from[elements]),
            (Backend::Gpu(engine), Backend::Gpu(_)) => {
                assert!(here == *from.arena().device(), "cast_span: spans on two GPUs");
                engine.cast_bytes(
                    (from.arena().memory(), source),
                    (self.arena().memory(), target),
                    T::DTYPE,
                    count,
                );
            }
            _ => panic!("cast_span: spans on a CPU and a GPU: bring one to the other first"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Device, Grads};

    #[test]
    fn a_parameter_is_cast_when_it_was_written_and_not_again() {
        let device = Device::cpu(1);
        let layout = Layout::new(&[[2].into(), [3].into()]);
        let (values, grads) =
            (Arena::new(&device, DType::F32, &layout), Grads::new(&device, DType::F32, &layout));
        let leaf = grads.leaf(1, &values);
        assert!(grads.casts().is_none());
        let writes = |cast: &Tensor| cast.storage.writes();
        leaf.fill(1.5);
        let first = leaf.lowered(DType::BF16);
        let before = writes(&first);
        let again = leaf.lowered(DType::BF16);
        assert!(again.storage.is(&first.storage) && writes(&again) == before);
        assert_eq!(again.cast(DType::F32).to_vec::<f32>(), [1.5; 3]);
        // Somebody else's write counts, a look doesn't.
        assert_eq!(values.flat::<f32>()[layout.range(1)], [1.5; 3]);
        assert_eq!(writes(&leaf.lowered(DType::BF16)), before);
        values.flat_mut::<f32>()[layout.range(1)].fill(2.5);
        assert_eq!(leaf.lowered(DType::BF16).cast(DType::F32).to_vec::<f32>(), [2.5; 3]);
        assert!(writes(&first) > before);
        // Another type has an arena of its own, and what was cast before stays as it is.
        assert_eq!(leaf.lowered(DType::F16).cast(DType::F32).to_vec::<f32>(), [2.5; 3]);
        assert_eq!(grads.casts().unwrap().dtype(), DType::F16);
        assert_eq!(first.cast(DType::F32).to_vec::<f32>(), [2.5; 3]);
    }

    /// As a strategy does whose values come and go.
    #[test]
    fn casts_that_somebody_else_brings_are_taken_for_good_until_he_takes_them_away() {
        let device = Device::cpu(1);
        let layout = Layout::new(&[[2].into(), [3].into()]);
        let (values, grads) =
            (Arena::new(&device, DType::F32, &layout), Grads::new(&device, DType::F32, &layout));
        let leaf = grads.leaf(1, &values);
        leaf.fill(1.0);
        let casts = grads.casts_in(DType::BF16);
        let mut away = casts.set_aside::<half::bf16>(1..2);
        away.cast_from(1, &[1.001, -2.5]);
        drop(away);
        assert!(!grads.is_cast(1, &values));
        grads.were_cast([1], &values);
        assert!(grads.is_cast(1, &values) && !grads.is_cast(0, &values));
        let read = || leaf.lowered(DType::BF16).cast(DType::F32).to_vec::<f32>();
        assert_eq!(read(), [0.0, 1.0, -2.5]);
        assert_eq!(grads.reads_beside_casts(1, &values), 0);
        grads.forget_casts(1..2);
        assert_eq!((read(), grads.reads_beside_casts(1, &values)), (vec![1.0; 3], 0));
        leaf.to_vec::<f32>();
        assert!(grads.reads_beside_casts(1, &values) > 0);
    }

    #[test]
    #[should_panic(expected = "overwritten after the forward pass")]
    fn a_backward_pass_after_its_weights_were_cast_anew_is_refused() {
        let device = Device::cpu(1);
        let layout = Layout::new(&[[1, 2].into()]);
        let (values, grads) =
            (Arena::new(&device, DType::F32, &layout), Grads::new(&device, DType::F32, &layout));
        let leaf = grads.leaf(0, &values);
        let x = Tensor::ones(&device, [1, 2], DType::F32).requires_grad();
        let product = || crate::autocast(DType::BF16, || x.linear(&leaf, None).sum_all());
        let early = product();
        leaf.fill(3.0);
        product().backward();
        early.backward();
    }
}
