//! What each rank of a replica holds of the whole model, and how it gets from there to the whole and back.

use phalanx_nn::{Cut, Parameters};
use phalanx_tensor::{Layout, Tensor};
use std::borrow::Cow;
use std::ops::Range;

/// The parameters and buffers of the whole model that a rank has, whole or in part, in their order.
#[derive(Clone, Debug)]
pub(super) struct Holding {
    params: Vec<Held>,
    buffers: Vec<HeldBuffer>,
    whole: Layout,
}

#[derive(Clone, Debug)]
struct HeldBuffer {
    /// Its number among those of the whole model.
    whole: usize,
    cut: Option<Cut>,
}

#[derive(Clone, Debug)]
struct Held {
    /// Its number in the whole model.
    whole: usize,
    cut: Option<Cut>,
    /// Whether another stage has it first.
    is_copy: bool,
}

impl HeldBuffer {
    /// How many elements are held of it.
    fn count(&self, whole: &Layout) -> usize {
        let shape = whole.shape(self.whole);
        self.cut.map_or(*shape, |cut| cut.shape(shape)).count()
    }
}

impl Holding {
    /// Those whose names `holds` names, cut as `cut` says. It says how they are held; buffers are nobody's copies.
    pub(super) fn of(
        whole: &Parameters,
        holds: impl Fn(&str) -> Option<As>,
        cut: impl Fn(&str) -> Option<Cut>,
    ) -> Holding {
        let held = |(i, name): (usize, &String)| {
            holds(name).map(|held| Held { whole: i, cut: cut(name), is_copy: held == As::Copy })
        };
        let buffers = whole.buffer_names().iter().enumerate().filter(|(_, name)| holds(name).is_some());
        Holding {
            params: whole.names().iter().enumerate().filter_map(held).collect(),
            buffers: buffers.map(|(whole, name)| HeldBuffer { whole, cut: cut(name) }).collect(),
            whole: whole.layout().clone(),
        }
    }

    /// Whether another stage has the rank's own parameter `own` first, and speaks for it.
    pub(super) fn is_copy(&self, own: usize) -> bool {
        self.params[own].is_copy
    }

    /// How many elements the rank's own parameter `own` has.
    pub(super) fn own_len(&self, own: usize) -> usize {
        let Held { whole, cut, .. } = self.params[own];
        let shape = self.whole.shape(whole);
        cut.map_or(*shape, |cut| cut.shape(shape)).count()
    }

    /// The rank's own number of parameter `whole` of the whole model, if it has it.
    pub(super) fn own_number(&self, whole: usize) -> Option<usize> {
        self.params.iter().position(|held| held.whole == whole)
    }

    /// The rank's own numbers of these parameters of the whole model, as far as it has them.
    pub(super) fn own_in(&self, whole: &Range<usize>) -> Range<usize> {
        let before = |end: usize| self.params.partition_point(|held| held.whole < end);
        before(whole.start)..before(whole.end)
    }

    /// All parameters of the whole model.
    pub(super) fn all(&self) -> Range<usize> {
        0..self.whole.count()
    }

    /// Whether a rank has all of its own parameter `own`, as the others along the axis do that cuts the rest.
    pub(super) fn is_uncut(&self, own: usize) -> bool {
        self.params[own].cut.is_none()
    }

    /// How the whole model lies.
    pub(super) fn whole(&self) -> &Layout {
        &self.whole
    }

    /// Of an array of the whole model, the rank's own, which lies as `layout` says.
    pub(super) fn part_of(&self, whole: &[f32], layout: &Layout) -> Vec<f32> {
        let mut own = vec![0.0; layout.len()];
        for (i, held) in self.params.iter().enumerate() {
            let values = self.whole.row_major(held.whole, whole);
            match held.cut {
                Some(cut) => layout.put(i, &cut.take(self.whole.shape(held.whole), &values), &mut own),
                None => layout.put(i, &values, &mut own),
            }
        }
        own
    }

    /// The rank's part of a parameter or buffer of the whole model, whose `values` are in row-major order; none if it has none of it.
    pub(super) fn part_of_one<'a>(
        &self,
        whole: &Parameters,
        name: &str,
        values: &'a [f32],
    ) -> Option<Cow<'a, [f32]>> {
        let (cut, shape) = match whole.index_of(name) {
            Some(i) => (self.params.iter().find(|held| held.whole == i)?.cut, whole.layout().shape(i)),
            None => {
                let i = whole.buffer_names().iter().position(|other| other == name)?;
                let held = self.buffers.iter().find(|held| held.whole == i)?;
                (held.cut, whole.buffers().layout().shape(i))
            }
        };
        Some(cut.map_or(Cow::Borrowed(values), |cut| Cow::Owned(cut.take(shape, values))))
    }

    /// Takes values and buffers from the whole model.
    pub(super) fn take(&self, whole: &Parameters, own: &Parameters) {
        let values = whole.values().with_flat(|flat: &[f32]| self.part_of(flat, own.layout()));
        own.values().write_flat(&values);
        for (i, held) in self.buffers.iter().enumerate() {
            let (part, all) = (own.buffers().tensor(i), whole.buffers().tensor(held.whole));
            part.copy_from(&match held.cut {
                Some(cut) => {
                    let values = cut.take(all.shape(), &all.to_vec());
                    Tensor::from_slice(part.device(), &values, *part.shape())
                }
                None => all,
            });
        }
    }
}

/// How a stage has a parameter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum As {
    /// As the first of the stages that have it.
    First,
    /// As one behind that.
    Copy,
}

/// A rank of a replica, as the others see it.
#[derive(Clone, Debug)]
pub(super) struct Holder {
    pub(super) holding: Holding,
    /// Whether it is the one that tells the others of what isn't cut.
    pub(super) speaks_for_uncut: bool,
}

impl Holder {
    /// What it tells of these parameters of the whole model, with its own numbers.
    fn told(&self, wanted: &Range<usize>) -> impl Iterator<Item = (usize, &Held)> {
        let own = self.holding.own_in(wanted);
        let params = own.clone().zip(&self.holding.params[own]).filter(|(_, held)| !held.is_copy);
        params.filter(|(_, held)| self.speaks_for_uncut || held.cut.is_some())
    }

    /// How many elements it tells of them.
    pub(super) fn len(&self, wanted: &Range<usize>) -> usize {
        let shape = |held: &Held| {
            let whole = self.holding.whole.shape(held.whole);
            held.cut.map_or(*whole, |cut| cut.shape(whole))
        };
        self.told(wanted).map(|(_, held)| shape(held).count()).sum()
    }

    /// What it tells of them of an array of its own parameters from `first` on, which lie so: elements row by row, one parameter after
    /// the other.
    pub(super) fn packed(
        &self,
        wanted: &Range<usize>,
        first: usize,
        layout: &Layout,
        own: &[f32],
    ) -> Vec<f32> {
        self.told(wanted).flat_map(|(i, _)| layout.row_major(i - first, own).into_owned()).collect()
    }

    /// Puts what it told of them to its places in an array that has them alone, which lie so.
    pub(super) fn unpack(&self, wanted: &Range<usize>, packed: &[f32], layout: &Layout, into: &mut [f32]) {
        let mut left = packed;
        for (_, held) in self.told(wanted) {
            let (i, shape) = (held.whole - wanted.start, self.holding.whole.shape(held.whole));
            let count = held.cut.map_or(shape.count(), |cut| cut.shape(shape).count());
            let (now, later) = left.split_at(count);
            match held.cut {
                Some(cut) => {
                    let mut all = layout.row_major(i, into).into_owned();
                    cut.put(shape, now, &mut all);
                    layout.put(i, &all, into);
                }
                None => layout.put(i, now, into),
            }
            left = later;
        }
    }

    /// The buffers that it tells of.
    fn told_buffers(&self) -> impl Iterator<Item = (usize, &HeldBuffer)> {
        let buffers = self.holding.buffers.iter().enumerate();
        buffers.filter(|(_, held)| self.speaks_for_uncut || held.cut.is_some())
    }

    /// How many elements these have.
    pub(super) fn buffers_len(&self, whole: &Layout) -> usize {
        self.told_buffers().map(|(_, held)| held.count(whole)).sum()
    }

    /// What it tells of an array of its own that lies as its buffers do.
    pub(super) fn packed_buffers(&self, layout: &Layout, own: &[f32]) -> Vec<f32> {
        self.told_buffers().flat_map(|(i, _)| layout.row_major(i, own).into_owned()).collect()
    }

    /// Puts what it told to its places in an array that lies as the buffers of the whole model do.
    pub(super) fn unpack_buffers(&self, packed: &[f32], layout: &Layout, whole: &mut [f32]) {
        let mut left = packed;
        for (_, held) in self.told_buffers() {
            let (now, later) = left.split_at(held.count(layout));
            match held.cut {
                Some(cut) => {
                    let mut all = layout.row_major(held.whole, whole).into_owned();
                    cut.put(layout.shape(held.whole), now, &mut all);
                    layout.put(held.whole, &all, whole);
                }
                None => layout.put(held.whole, now, whole),
            }
            left = later;
        }
    }
}
