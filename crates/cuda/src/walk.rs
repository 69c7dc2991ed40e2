//! Views as kernels take them: a shape with a step along each of its dimensions for each tensor.

/// The most dimensions of a walk.
pub const MAX_DIMS: usize = 6;

/// How a kernel goes through `VIEWS` tensors of one shape together; the same bytes as `Walk` in `kernels/strided.cuh`. Dimensions
/// that all views run through evenly are joined, so whole tensors have one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C)]
pub struct Walk<const VIEWS: usize> {
    n_dims: i64,
    sizes: [i64; MAX_DIMS],
    steps: [[i64; MAX_DIMS]; VIEWS],
}

impl<const VIEWS: usize> Walk<VIEWS> {
    /// A walk through `sizes`, the last dimension fastest, with these steps in elements for each view, 0 where an element is
    /// repeated. Panics beyond [`MAX_DIMS`] dimensions.
    #[track_caller]
    pub fn new(sizes: &[usize], steps: [&[usize]; VIEWS]) -> Walk<VIEWS> {
        assert!(
            sizes.len() <= MAX_DIMS && steps.iter().all(|view| view.len() == sizes.len()),
            "walk: sizes {sizes:?} with steps {steps:?}: one step a size and at most {MAX_DIMS} would do"
        );
        let mut walk = Walk { n_dims: 0, sizes: [1; MAX_DIMS], steps: [[0; MAX_DIMS]; VIEWS] };
        for (d, &size) in sizes.iter().enumerate().filter(|&(_, &size)| size != 1) {
            walk.push(size as i64, steps.map(|view| view[d] as i64));
        }
        walk
    }

    /// Adds a dimension inside of the others, or makes the last one longer.
    fn push(&mut self, size: i64, steps: [i64; VIEWS]) {
        let n = self.n_dims as usize;
        let joins = n > 0 && (0..VIEWS).all(|v| self.steps[v][n - 1] == steps[v] * size);
        let at = if joins { n - 1 } else { n };
        self.sizes[at] *= size;
        (0..VIEWS).for_each(|v| self.steps[v][at] = steps[v]);
        self.n_dims = at as i64 + 1;
    }

    /// How many dimensions are left.
    pub fn n_dims(&self) -> usize {
        self.n_dims as usize
    }

    /// The bytes that a launch hands over.
    pub fn as_bytes(&self) -> &[u8] {
        // SAFETY: the struct is laid out as in C and made of numbers of 8 bytes alone, so all its bytes are initialised.
        unsafe { std::slice::from_raw_parts((&raw const *self).cast(), size_of::<Self>()) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn even_dimensions_are_joined() {
        let check = |sizes: &[usize], steps: [&[usize]; 2], want: usize| {
            assert_eq!(Walk::new(sizes, steps).n_dims(), want, "{sizes:?} {steps:?}");
        };
        check(&[2, 3, 4], [&[12, 4, 1], &[12, 4, 1]], 1);
        check(&[2, 3, 4], [&[12, 4, 1], &[0, 0, 1]], 2);
        check(&[2, 3, 4], [&[12, 4, 1], &[0, 0, 0]], 1);
        check(&[2, 3, 4], [&[1, 2, 6], &[12, 4, 1]], 3);
        check(&[1, 1], [&[5, 7], &[0, 0]], 0);
        check(&[], [&[], &[]], 0);
    }

    #[test]
    fn bytes_are_those_of_the_struct() {
        let walk = Walk::new(&[2, 3], [&[1, 2], &[3, 1], &[0, 1]]);
        let numbers = std::iter::once(walk.n_dims).chain(walk.sizes).chain(walk.steps.into_iter().flatten());
        assert_eq!(walk.as_bytes(), numbers.flat_map(i64::to_ne_bytes).collect::<Vec<u8>>());
    }
}
