//! The tree along which sums over shards are taken, as pure functions of shard numbers: a sum then has the same bits whoever
//! holds which shard.
//!
//! A node is a range of neighbouring shards. The root is all of them; of two shards or more, the left child has the largest
//! power of two that is smaller than the node, and the right child has the rest. A node's sum is its left child's plus its
//! right child's. Which shards a rank holds is decided here too: neighbours, so that most of them make whole nodes, whose sums
//! a rank takes by itself.

use std::ops::{AddAssign, Range};

/// The shards of rank `rank`: consecutive ones, whose number differs between ranks by at most one.
pub(crate) fn held(shards: usize, world_size: usize, rank: usize) -> Range<usize> {
    let (size, larger) = (shards / world_size, shards % world_size);
    let start = rank * size + rank.min(larger);
    start..start + size + usize::from(rank < larger)
}

/// The children of a node of two shards or more.
fn children(node: &Range<usize>) -> [Range<usize>; 2] {
    let left = node.len().next_power_of_two() / 2;
    [node.start..node.start + left, node.start + left..node.end]
}

/// The nodes that lie within `held` while their parents don't, in order.
pub(crate) fn whole_nodes(root: Range<usize>, held: &Range<usize>) -> Vec<Range<usize>> {
    if root.end <= held.start || held.end <= root.start {
        return Vec::new();
    }
    if held.start <= root.start && root.end <= held.end {
        return vec![root];
    }
    children(&root).into_iter().flat_map(|child| whole_nodes(child, held)).collect()
}

/// How many sums are due once that of `node` is known, where those of all nodes to its left within `held` are: each adds the
/// right child that was just finished to the left child before it.
pub(crate) fn sums_after(root: Range<usize>, held: &Range<usize>, node: &Range<usize>) -> usize {
    let (mut ancestor, mut sums) = (root, 0);
    while ancestor != *node {
        sums += usize::from(ancestor.end == node.end && ancestor.start >= held.start);
        let [left, right] = children(&ancestor);
        ancestor = if node.start < right.start { left } else { right };
    }
    sums
}

/// Adds up rows of `width` numbers, those of the `nodes` that make up the whole tree, in order; the first row gets the sum.
pub(crate) fn add_up<T: Copy + AddAssign>(rows: &mut [T], width: usize, nodes: &[Range<usize>]) {
    let root = 0..nodes.last().map_or(0, |last| last.end);
    let mut unfinished = Vec::with_capacity(nodes.len());
    for (row, node) in nodes.iter().enumerate() {
        unfinished.push(row);
        for _ in 0..sums_after(root.clone(), &root, node) {
            let (right, left) = (unfinished.pop(), unfinished.last());
            let (Some(right), Some(&left)) = (right, left) else {
                unreachable!("a right child has a left one")
            };
            let (before, after) = rows.split_at_mut(right * width);
            let (left, right) = (&mut before[left * width..][..width], &after[..width]);
            left.iter_mut().zip(right).for_each(|(left, &right)| *left += right);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Every number of shards and ranks that a machine of today might have, and a bit beyond.
    fn worlds() -> impl Iterator<Item = (usize, usize)> {
        (1..40).flat_map(|shards| (1..=shards).map(move |world_size| (shards, world_size)))
    }

    /// The sum over a node by its definition.
    fn by_definition(node: Range<usize>) -> String {
        if node.len() == 1 {
            return node.start.to_string();
        }
        let [left, right] = children(&node).map(by_definition);
        format!("({left} {right})")
    }

    #[test]
    fn the_tree_is_the_one_that_it_says() {
        let check = |shards, want| assert_eq!(by_definition(0..shards), want);
        check(1, "0");
        check(2, "(0 1)");
        check(3, "((0 1) 2)");
        check(4, "((0 1) (2 3))");
        check(5, "(((0 1) (2 3)) 4)");
        check(7, "(((0 1) (2 3)) ((4 5) 6))");
    }

    #[test]
    fn ranks_hold_all_shards_once_and_about_as_many_each() {
        for (shards, world_size) in worlds() {
            let all: Vec<Range<usize>> = (0..world_size).map(|rank| held(shards, world_size, rank)).collect();
            assert!(all.iter().cloned().flatten().eq(0..shards), "{shards} on {world_size}: {all:?}");
            let sizes = || all.iter().map(Range::len);
            assert!(sizes().max().unwrap() - sizes().min().unwrap() <= 1);
        }
    }

    #[test]
    fn few_whole_nodes_make_up_what_a_rank_holds() {
        for (shards, world_size) in worlds() {
            for rank in 0..world_size {
                let held = held(shards, world_size, rank);
                let nodes = whole_nodes(0..shards, &held);
                assert!(nodes.iter().cloned().flatten().eq(held.clone()), "{nodes:?} for {held:?}");
                assert!(nodes.len() <= 2 * shards.ilog2() as usize + 1, "{nodes:?} of {shards}");
            }
        }
    }

    /// What remembers how it was summed.
    #[derive(Clone, Copy, Debug, PartialEq)]
    struct Hash(u64);

    impl AddAssign for Hash {
        fn add_assign(&mut self, right: Hash) {
            self.0 = self
                .0
                .wrapping_mul(3)
                .wrapping_add(right.0)
                .rotate_left(23)
                .wrapping_mul(0x9e37_79b9_7f4a_7c15);
        }
    }

    /// The sum over a node by its definition.
    fn hash(node: Range<usize>) -> Hash {
        if node.len() == 1 {
            return Hash(node.start as u64 + 1);
        }
        let [mut left, right] = children(&node).map(hash);
        left += right;
        left
    }

    #[test]
    fn sums_are_those_of_the_tree_whoever_holds_what() {
        for (shards, world_size) in worlds() {
            let (mut nodes, mut sums) = (Vec::new(), Vec::new());
            for rank in 0..world_size {
                let held = held(shards, world_size, rank);
                // As a rank does it, shard by shard.
                let mut unfinished: Vec<Hash> = Vec::new();
                for shard in held.clone() {
                    let mut sum = hash(shard..shard + 1);
                    for _ in 0..sums_after(0..shards, &held, &(shard..shard + 1)) {
                        let right = std::mem::replace(&mut sum, unfinished.pop().unwrap());
                        sum += right;
                    }
                    unfinished.push(sum);
                }
                let own = whole_nodes(0..shards, &held);
                assert!(own.iter().cloned().map(hash).eq(unfinished.iter().copied()), "{held:?} of {shards}");
                nodes.extend(own);
                sums.extend(unfinished);
            }
            add_up(&mut sums, 1, &nodes);
            assert_eq!(sums[0], hash(0..shards), "{shards} shards on {world_size} ranks");
        }
    }

    #[test]
    fn rows_are_added_number_by_number() {
        let mut rows = [1.0, 2.0, 10.0, 20.0, 100.0, 200.0];
        add_up(&mut rows, 2, &[0..1, 1..2, 2..3]);
        assert_eq!(rows[..2], [111.0, 222.0]);
    }
}
