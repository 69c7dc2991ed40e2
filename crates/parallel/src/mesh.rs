//! The mesh: the ranks of a run laid out along named axes, and all arithmetic between a rank and its place there.
//!
//! Ranks are numbered as the digits of a number with mixed bases: the axis that comes last in [`Axis::ALL`] counts fastest, so
//! its neighbours have neighbouring ranks, which share a host where any do. Tensor parallelism talks most and comes last;
//! then what gathers blocks of parameters; then pipelines, which only hand on activations. Replicas come first, so that a
//! machine that is lost takes whole replicas with it and leaves the others whole.

use phalanx_comm::{Error, Group};
use std::fmt;

/// Along which ranks differ in what they hold.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Axis {
    /// Whole copies of the model.
    Replica,
    /// Stages of the row of blocks.
    Pipeline,
    /// Shards of each parameter, gradient and state.
    Shard,
    /// Stretches of each sequence.
    Context,
    /// Parts of each matrix.
    Tensor,
}

impl Axis {
    /// All of them; the last counts fastest.
    pub const ALL: [Axis; 5] = [Axis::Replica, Axis::Pipeline, Axis::Shard, Axis::Context, Axis::Tensor];

    /// What it is called.
    pub fn name(self) -> &'static str {
        match self {
            Axis::Replica => "replica",
            Axis::Pipeline => "pipeline",
            Axis::Shard => "shard",
            Axis::Context => "context",
            Axis::Tensor => "tensor",
        }
    }
}

impl fmt::Display for Axis {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// The place of a rank: its number along each axis.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Coordinates([usize; Axis::ALL.len()]);

impl Coordinates {
    /// The number along `axis`, from 0.
    pub fn along(&self, axis: Axis) -> usize {
        self.0[axis as usize]
    }

    /// The place with another number along `axis`.
    pub fn with(mut self, axis: Axis, number: usize) -> Coordinates {
        self.0[axis as usize] = number;
        self
    }
}

/// Ranks along named axes, each of a size of at least 1.
///
/// ```
/// use phalanx_parallel::{Axis, Mesh};
///
/// let mesh = Mesh::fit(&[(Axis::Pipeline, 2), (Axis::Tensor, 2)], 8, &[])?;
/// assert_eq!(mesh.size(Axis::Replica), 2);
/// assert_eq!(mesh.coordinates(5).along(Axis::Tensor), 1);
/// assert_eq!(mesh.group(5, &[Axis::Pipeline]), [5, 7]);
/// # Ok::<(), phalanx_parallel::MeshError>(())
/// ```
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Mesh {
    sizes: [usize; Axis::ALL.len()],
}

/// What the size of an axis is bound to.
#[derive(Clone, Copy, Debug)]
pub struct Bound {
    /// Whose size.
    pub axis: Axis,
    /// To what.
    pub by: By,
    /// What that number counts, as in "blocks of the model".
    pub what: &'static str,
}

/// How a size is bound.
#[derive(Clone, Copy, Debug)]
pub enum By {
    /// It is at most this.
    AtMost(usize),
    /// This is a multiple of it.
    Divides(usize),
    /// This is a multiple of its product with the size of the other axis.
    DividesWith(Axis, usize),
}

impl Bound {
    /// Whether its axis may have the size that it has among these.
    fn allows(&self, sizes: &[usize; Axis::ALL.len()]) -> bool {
        let size = sizes[self.axis as usize];
        match self.by {
            By::AtMost(most) => size <= most,
            By::Divides(whole) => whole.is_multiple_of(size),
            By::DividesWith(other, whole) => whole.is_multiple_of(size * sizes[other as usize]),
        }
    }

    /// What bounds the axis, where the others have these sizes.
    fn count(&self, sizes: &[usize; Axis::ALL.len()]) -> usize {
        match self.by {
            By::AtMost(count) | By::Divides(count) => count,
            By::DividesWith(other, whole) => whole / sizes[other as usize],
        }
    }
}

/// Why there is no such mesh.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum MeshError {
    /// An axis of no size.
    #[error("parallel.{axis}: 0\nhint: 1 is an axis that isn't used")]
    Nothing {
        /// Which.
        axis: Axis,
    },
    /// The ranks don't fill it.
    #[error("{wanted} are {product} ranks, and {world_size} {}\nhint: {hint}", too_few_or_odd(.product, .world_size))]
    Uneven {
        /// The sizes that were asked for.
        wanted: String,
        /// Their product.
        product: usize,
        /// How many ranks there are.
        world_size: usize,
        /// What would work.
        hint: String,
    },
    /// The model can't be parted so.
    #[error("parallel.{axis}: {size}, where there are {count} {what}\nhint: {hint}")]
    Unfit {
        /// Which axis.
        axis: Axis,
        /// Its size.
        size: usize,
        /// What bounds it.
        count: usize,
        /// What that counts.
        what: &'static str,
        /// What would work.
        hint: String,
    },
}

fn too_few_or_odd(product: &usize, world_size: &usize) -> String {
    let ranks = if *world_size == 1 { "is there" } else { "are there" };
    if world_size < product { format!("{ranks} in all") } else { format!("{ranks}, which is no multiple") }
}

impl Mesh {
    /// The mesh of `world_size` ranks with these sizes; axes that aren't named have size 1, but for the replicas, which then are
    /// as many as fill the ranks.
    ///
    /// # Errors
    /// The sizes don't fill the ranks, or break one of `bounds`: the message names the sizes nearest to them that work.
    pub fn fit(wanted: &[(Axis, usize)], world_size: usize, bounds: &[Bound]) -> Result<Mesh, MeshError> {
        let mut sizes = [1; Axis::ALL.len()];
        for &(axis, size) in wanted {
            if size == 0 {
                return Err(MeshError::Nothing { axis });
            }
            sizes[axis as usize] = size;
        }
        let hint = |of: &str| match Mesh::nearest(wanted, world_size, bounds) {
            Some(near) => format!("the nearest that works for {world_size} ranks is {near}{of}"),
            None => format!("no such mesh has {world_size} ranks{of}"),
        };
        if let Some(bound) = bounds.iter().find(|bound| !bound.allows(&sizes)) {
            let (axis, what, count) = (bound.axis, bound.what, bound.count(&sizes));
            return Err(MeshError::Unfit { axis, size: sizes[axis as usize], count, what, hint: hint("") });
        }
        let product = sizes.iter().fold(1, |product: usize, &size| product.saturating_mul(size));
        let replicas_given = wanted.iter().any(|&(axis, _)| axis == Axis::Replica);
        let fills = if replicas_given { product == world_size } else { world_size.is_multiple_of(product) };
        if !fills || world_size == 0 {
            let named: Vec<String> =
                wanted.iter().map(|(axis, size)| format!("parallel.{axis}={size}")).collect();
            let ranks = if world_size < product {
                format!(", or take {product} ranks")
            } else {
                let below = world_size / product * product;
                format!(", or take {below} or {} ranks", below + product)
            };
            return Err(MeshError::Uneven {
                wanted: named.join(" and "),
                product,
                world_size,
                hint: hint(&ranks),
            });
        }
        if !replicas_given {
            sizes[Axis::Replica as usize] = world_size / product;
        }
        Ok(Mesh { sizes })
    }

    /// The mesh whose sizes are nearest to those that were asked for, by the sum of their ratios, among all that work.
    fn nearest(wanted: &[(Axis, usize)], world_size: usize, bounds: &[Bound]) -> Option<Mesh> {
        let mut best: Option<(f64, Mesh)> = None;
        let replicas_given = wanted.iter().any(|&(axis, _)| axis == Axis::Replica);
        let mut sizes = [1; Axis::ALL.len()];
        let mut consider = |sizes: &[usize; Axis::ALL.len()], left: usize| {
            let mut sizes = *sizes;
            if !replicas_given {
                sizes[Axis::Replica as usize] = left;
            } else if left != 1 {
                return;
            }
            let cost = |&(axis, size): &(Axis, usize)| (sizes[axis as usize] as f64 / size as f64).ln().abs();
            let cost: f64 = wanted.iter().map(cost).sum();
            if best.is_none_or(|(least, _)| cost < least) {
                best = Some((cost, Mesh { sizes }));
            }
        };
        choose(wanted, bounds, world_size, &mut sizes, &mut consider);
        best.map(|(_, mesh)| mesh)
    }

    /// How many ranks there are.
    pub fn world_size(&self) -> usize {
        self.sizes.iter().product()
    }

    /// The size of an axis.
    pub fn size(&self, axis: Axis) -> usize {
        self.sizes[axis as usize]
    }

    /// Where a rank is. Panics if there is no such rank.
    #[track_caller]
    pub fn coordinates(&self, rank: usize) -> Coordinates {
        assert!(rank < self.world_size(), "mesh: rank {rank} of {}", self.world_size());
        let mut left = rank;
        let mut coordinates = Coordinates::default();
        for axis in Axis::ALL.into_iter().rev() {
            coordinates = coordinates.with(axis, left % self.size(axis));
            left /= self.size(axis);
        }
        coordinates
    }

    /// Who is there. Panics if nobody is.
    #[track_caller]
    pub fn rank(&self, at: Coordinates) -> usize {
        Axis::ALL.into_iter().fold(0, |rank, axis| {
            let (number, size) = (at.along(axis), self.size(axis));
            assert!(number < size, "mesh: {number} along an axis {axis} of size {size}");
            rank * size + number
        })
    }

    /// The ranks that differ from `rank` along these axes alone, with `rank` itself, in rising order.
    #[track_caller]
    pub fn group(&self, rank: usize, axes: &[Axis]) -> Vec<usize> {
        let own = self.coordinates(rank);
        let is_of_it = |&other: &usize| {
            let there = self.coordinates(other);
            let same = |axis: &Axis| there.along(*axis) == own.along(*axis);
            Axis::ALL.iter().all(|axis| axes.contains(axis) || same(axis))
        };
        (0..self.world_size()).filter(is_of_it).collect()
    }

    /// The group of the ranks that differ from this one along these axes alone, in their order. All ranks of `world`, which the mesh
    /// is made for, must ask for the same axes at once. Fails if a rank is gone.
    #[track_caller]
    pub fn along(&self, world: &Group, axes: &[Axis]) -> Result<Group, Error> {
        let (rank, n) = (world.rank().index(), world.world_size());
        assert!(n == self.world_size(), "a mesh of {} ranks over a group of {n}", self.world_size());
        let first = self.group(rank, axes)[0];
        let group = world.split(Some(first as u32), 0)?;
        Ok(group.expect("every rank is in the group that its first rank names"))
    }

    /// The rank `by` steps further along `axis`, if the axis goes on so far.
    #[track_caller]
    pub fn neighbour(&self, rank: usize, axis: Axis, by: isize) -> Option<usize> {
        let own = self.coordinates(rank);
        let number = own.along(axis).checked_add_signed(by).filter(|&number| number < self.size(axis))?;
        Some(self.rank(own.with(axis, number)))
    }
}

/// Calls `consider` with every choice of sizes for the axes of `wanted` within `bounds` whose product divides `left`, and with
/// what is left then.
fn choose(
    wanted: &[(Axis, usize)],
    bounds: &[Bound],
    left: usize,
    sizes: &mut [usize; Axis::ALL.len()],
    consider: &mut dyn FnMut(&[usize; Axis::ALL.len()], usize),
) {
    // What isn't chosen yet has size 1, with which every bound is at its widest.
    if !bounds.iter().all(|bound| bound.allows(sizes)) {
        return;
    }
    let Some((&(axis, _), rest)) = wanted.split_first() else {
        return consider(sizes, left);
    };
    for size in (1..=left).filter(|&size| left.is_multiple_of(size)) {
        sizes[axis as usize] = size;
        choose(rest, bounds, left / size, sizes, consider);
    }
    sizes[axis as usize] = 1;
}

/// The axes that are used, as in `pipeline=2 x tensor=4`.
impl fmt::Display for Mesh {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let used = Axis::ALL.into_iter().filter(|&axis| self.size(axis) > 1);
        let named: Vec<String> = used.map(|axis| format!("{axis}={}", self.size(axis))).collect();
        if named.is_empty() { f.write_str("a single rank") } else { f.write_str(&named.join(" x ")) }
    }
}

impl fmt::Debug for Mesh {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Mesh({self})")
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use phalanx_tensor::Philox;

    /// Sizes that a seed says, each up to 3.
    fn random_mesh(case: u64) -> Mesh {
        let random = Philox::new(11, case);
        let wanted: Vec<_> = Axis::ALL.iter().map(|&a| (a, random.word(a as u64) as usize % 3 + 1)).collect();
        let world_size = wanted.iter().map(|(_, size)| size).product();
        Mesh::fit(&wanted, world_size, &[]).unwrap()
    }

    #[test]
    fn coordinates_and_ranks_are_each_others_inverse_in_any_mesh() {
        for case in 0..60 {
            let mesh = random_mesh(case);
            for rank in 0..mesh.world_size() {
                let at = mesh.coordinates(rank);
                assert_eq!(mesh.rank(at), rank, "{mesh}");
                assert!(Axis::ALL.into_iter().all(|axis| at.along(axis) < mesh.size(axis)), "{mesh}");
            }
        }
    }

    #[test]
    fn the_groups_along_an_axis_part_the_ranks_of_any_mesh() {
        for case in 0..60 {
            let mesh = random_mesh(case);
            for axes in
                [&[Axis::Replica][..], &[Axis::Tensor], &[Axis::Replica, Axis::Shard], &Axis::ALL, &[]]
            {
                let size: usize = axes.iter().map(|&axis| mesh.size(axis)).product();
                for rank in 0..mesh.world_size() {
                    let group = mesh.group(rank, axes);
                    assert_eq!(group.len(), size, "{mesh} {axes:?}");
                    assert!(group.is_sorted() && group.contains(&rank));
                    // A relation that all of its members agree on parts the ranks.
                    assert!(group.iter().all(|&other| mesh.group(other, axes) == group), "{mesh} {axes:?}");
                }
            }
        }
    }

    #[test]
    fn neighbours_along_an_axis_are_its_group_in_order() {
        for case in 0..50 {
            let mesh = random_mesh(case);
            for rank in 0..mesh.world_size() {
                for axis in Axis::ALL {
                    let group = mesh.group(rank, &[axis]);
                    let at = mesh.coordinates(rank).along(axis);
                    assert_eq!(group[at], rank);
                    let next = mesh.neighbour(rank, axis, 1);
                    assert_eq!(next, group.get(at + 1).copied(), "{mesh}");
                    assert_eq!(mesh.neighbour(rank, axis, -1), at.checked_sub(1).map(|i| group[i]), "{mesh}");
                }
            }
        }
    }

    #[test]
    fn tensor_parallel_ranks_are_neighbours_and_replicas_are_whole() {
        let mesh = Mesh::fit(&[(Axis::Tensor, 2), (Axis::Pipeline, 2), (Axis::Shard, 3)], 24, &[]).unwrap();
        assert_eq!(mesh.to_string(), "replica=2 x pipeline=2 x shard=3 x tensor=2");
        assert_eq!(mesh.group(13, &[Axis::Tensor]), [12, 13]);
        assert_eq!(mesh.group(13, &[Axis::Shard]), [13, 15, 17]);
        assert_eq!(mesh.group(13, &[Axis::Pipeline]), [13, 19]);
        assert_eq!(
            mesh.group(13, &[Axis::Pipeline, Axis::Shard, Axis::Tensor]),
            (12..24).collect::<Vec<_>>()
        );
    }

    #[test]
    fn an_impossible_mesh_is_refused_with_the_nearest_that_works() {
        use Axis::{Pipeline, Replica, Tensor};
        let blocks = Bound { axis: Pipeline, by: By::AtMost(4), what: "blocks of the model" };
        let heads = Bound { axis: Tensor, by: By::Divides(6), what: "heads" };
        let check = |wanted: &[(Axis, usize)], world_size, bounds: &[Bound], want: &str| {
            let error = Mesh::fit(wanted, world_size, bounds).unwrap_err();
            assert_eq!(error.to_string(), want);
        };
        check(
            &[(Pipeline, 3)],
            8,
            &[],
            "parallel.pipeline=3 are 3 ranks, and 8 are there, which is no multiple\nhint: the nearest that works for 8 ranks is replica=2 x pipeline=4, or take 6 or 9 ranks",
        );
        check(
            &[(Replica, 2), (Tensor, 4)],
            4,
            &[],
            "parallel.replica=2 and parallel.tensor=4 are 8 ranks, and 4 are there in all\nhint: the nearest that works for 4 ranks is tensor=4, or take 8 ranks",
        );
        check(
            &[(Pipeline, 8)],
            8,
            &[blocks],
            "parallel.pipeline: 8, where there are 4 blocks of the model\nhint: the nearest that works for 8 ranks is replica=2 x pipeline=4",
        );
        check(
            &[(Tensor, 4)],
            8,
            &[heads],
            "parallel.tensor: 4, where there are 6 heads\nhint: the nearest that works for 8 ranks is replica=4 x tensor=2",
        );
        let stretches =
            Bound { axis: Tensor, by: By::DividesWith(Axis::Context, 24), what: "positions of a stretch" };
        check(
            &[(Axis::Context, 8), (Tensor, 2)],
            16,
            &[stretches],
            "parallel.tensor: 2, where there are 3 positions of a stretch\nhint: the nearest that works for 16 ranks is replica=2 x context=4 x tensor=2",
        );
        check(&[(Tensor, 0)], 2, &[], "parallel.tensor: 0\nhint: 1 is an axis that isn't used");
    }

    #[test]
    fn what_is_named_as_the_nearest_works() {
        let heads = Bound { axis: Axis::Tensor, by: By::Divides(12), what: "heads" };
        for case in 0..300 {
            let random = Philox::new(5, case);
            let wanted = [Axis::Pipeline, Axis::Shard, Axis::Tensor]
                .map(|axis| (axis, random.word(axis as u64) as usize % 7 + 1));
            let world_size = random.word(9) as usize % 48 + 1;
            let near =
                Mesh::nearest(&wanted, world_size, &[heads]).expect("one rank along each always works");
            let sizes = Axis::ALL.map(|axis| (axis, near.size(axis)));
            assert_eq!(Mesh::fit(&sizes, world_size, &[heads]), Ok(near));
            // Where what was asked for works, nothing is nearer.
            if let Ok(mesh) = Mesh::fit(&wanted, world_size, &[heads]) {
                assert_eq!(near, mesh);
            }
        }
    }
}
