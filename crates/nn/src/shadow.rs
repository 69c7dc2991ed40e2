//! Numbers beside those of an arena, one for each: what an optimizer remembers, a running mean.

use phalanx_tensor::{Arena, DType, Device, Layout, Purpose};
use std::ops::Range;
use std::sync::Arc;

/// As many numbers as an arena has, which lie where that one does: on a CPU an array, on a GPU an arena of their own.
///
/// A clone shares them, and stays as it is: whoever changes numbers that are shared goes on with a copy.
///
/// ```
/// use phalanx_nn::Shadow;
/// let shadow = Shadow::from(vec![1.0, 2.0]);
/// assert_eq!(shadow.with(|numbers| numbers[1]), 2.0);
/// ```
#[derive(Clone)]
pub struct Shadow(Numbers);

#[derive(Clone)]
enum Numbers {
    Host(Arc<Vec<f32>>),
    Gpu(Arena),
}

impl From<Vec<f32>> for Shadow {
    fn from(numbers: Vec<f32>) -> Shadow {
        Shadow(Numbers::Host(Arc::new(numbers)))
    }
}

impl Shadow {
    /// Zeros on a GPU that lie so.
    pub(crate) fn zeros_of(device: &Device, layout: &Layout) -> Shadow {
        Shadow(Numbers::Gpu(Arena::new(device, DType::F32, layout).held_for(Purpose::Optimizer)))
    }

    /// The values of `arena` at the moment.
    pub fn of(arena: &Arena) -> Shadow {
        match arena.device().gpu() {
            None => arena.read_flat().into(),
            Some(_) => Shadow(Numbers::Gpu(copy(arena))),
        }
    }

    /// Calls `f` with the numbers: on a CPU where they lie, from a GPU with a copy, for which it waits.
    pub fn with<R>(&self, f: impl FnOnce(&[f32]) -> R) -> R {
        match &self.0 {
            Numbers::Host(numbers) => f(numbers),
            Numbers::Gpu(arena) => f(&arena.read_flat::<f32>()),
        }
    }

    /// Copies numbers `range` to `into`, which is as long; no others leave a GPU.
    pub fn read_range(&self, range: Range<usize>, into: &mut [f32]) {
        match &self.0 {
            Numbers::Host(numbers) => into.copy_from_slice(&numbers[range]),
            Numbers::Gpu(arena) => arena.read_elements(range, into),
        }
    }

    /// Copies them over what `into` holds.
    pub fn read_into(&self, into: &mut Vec<f32>) {
        match &self.0 {
            Numbers::Host(numbers) => {
                into.clear();
                into.extend_from_slice(numbers);
            }
            Numbers::Gpu(arena) => arena.read_into(into),
        }
    }

    /// How many there are.
    pub(crate) fn count(&self) -> usize {
        match &self.0 {
            Numbers::Host(numbers) => numbers.len(),
            Numbers::Gpu(arena) => arena.layout().len(),
        }
    }

    /// The numbers, to be changed on a CPU. Panics if they lie on a GPU.
    #[track_caller]
    pub(crate) fn host_mut(&mut self) -> &mut [f32] {
        match &mut self.0 {
            Numbers::Host(numbers) => Arc::make_mut(numbers).as_mut_slice(),
            Numbers::Gpu(_) => {
                panic!("numbers beside an arena on a GPU were asked for as a slice of the host's")
            }
        }
    }

    /// The numbers, to be changed on the GPU that `beside` lies on: they are brought there, if they were read from a file.
    #[track_caller]
    pub(crate) fn gpu_mut(&mut self, beside: &Arena) -> &Arena {
        self.gpu_mut_of(beside.device(), beside.layout())
    }

    /// The same, of numbers that lie so on this GPU, or less of them if they come from a file.
    #[track_caller]
    pub(crate) fn gpu_mut_of(&mut self, device: &Device, layout: &Layout) -> &Arena {
        let arena = match &self.0 {
            Numbers::Gpu(arena) if arena.is_unique() => None,
            Numbers::Gpu(arena) => Some(copy(arena)),
            Numbers::Host(numbers) => {
                let arena = Arena::new(device, DType::F32, layout).held_for(Purpose::Optimizer);
                arena.write_flat(&numbers[..]);
                Some(arena)
            }
        };
        if let Some(arena) = arena {
            self.0 = Numbers::Gpu(arena);
        }
        match &self.0 {
            Numbers::Gpu(arena) => arena,
            Numbers::Host(_) => unreachable!("they were brought there just now"),
        }
    }

    /// Exchanges them with the values of `arena`, which are as many and lie on the same device.
    pub fn swap(&mut self, arena: &Arena) {
        match arena.device().gpu() {
            None => self.host_mut().swap_with_slice(&mut arena.flat_mut::<f32>()),
            Some(_) => self.gpu_mut(arena).swap(arena),
        }
    }

    /// Moves each by its `share` of the way to the value of `arena`.
    pub fn follow(&mut self, arena: &Arena, share: f32) {
        match arena.device().gpu() {
            None => self.follow_part(0, &arena.flat::<f32>(), share),
            Some(_) => self.gpu_mut(arena).follow(arena, share),
        }
    }

    /// Exchanges the numbers from `at` on with as many values. Panics if they lie on a GPU.
    #[track_caller]
    pub fn swap_part(&mut self, at: usize, values: &mut [f32]) {
        self.host_mut()[at..at + values.len()].swap_with_slice(values);
    }

    /// Moves the numbers from `at` on by their `share` of the way to as many values. Panics if they lie on a GPU.
    #[track_caller]
    pub fn follow_part(&mut self, at: usize, values: &[f32], share: f32) {
        let numbers = &mut self.host_mut()[at..at + values.len()];
        numbers.iter_mut().zip(values).for_each(|(mean, now)| *mean += share * (now - *mean));
    }
}

fn copy(arena: &Arena) -> Arena {
    let copy = arena.like().held_for(Purpose::Optimizer);
    copy.copy_from(arena);
    copy
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_clone_stays_as_it_is() {
        let mut shadow = Shadow::from(vec![1.0]);
        let at = shadow.with(<[f32]>::as_ptr);
        shadow.host_mut()[0] = 2.0;
        assert_eq!(shadow.with(<[f32]>::as_ptr), at, "nobody else has it");
        let clone = shadow.clone();
        shadow.host_mut()[0] = 3.0;
        assert_eq!([&clone, &shadow].map(|shadow| shadow.with(|numbers| numbers[0])), [2.0, 3.0]);
    }
}
