//! Who sits where in a generation: the numbers of nodes, and the ranks of their workers.

use super::NodeId;
use phalanx_job::{Node, Seat};
use phalanx_wire::Generation;

/// A node that is to have a seat.
pub(super) struct Seated<'a> {
    pub(super) id: NodeId,
    pub(super) node: &'a Node,
    /// Its number in the generation before, if it had one.
    pub(super) number: Option<u32>,
}

/// Deals numbers from 0 on, and ranks in their order. Who was given a number on the command line has that, who had one that
/// still exists keeps it; the others fill the holes, first those that had one, then of those that are new the one that leads: what
/// the first rank has hold of, as the folder of a run that nodes share, nobody else misses then who goes on without it.
pub(super) fn deal(generation: Generation, restarts: u32, mut nodes: Vec<Seated<'_>>) -> Vec<(NodeId, Seat)> {
    nodes.sort_by_key(|seated| {
        let Node { node_rank, leads, .. } = seated.node;
        (node_rank.is_none(), seated.number.is_none(), seated.number, !leads, seated.id)
    });
    let mut dealt: Vec<Option<Seated<'_>>> = nodes.iter().map(|_| None).collect();
    let mut homeless = Vec::new();
    for seated in nodes {
        let wish = seated.node.node_rank.or(seated.number);
        match wish.and_then(|number| dealt.get_mut(number as usize)) {
            Some(place @ None) => *place = Some(seated),
            _ => homeless.push(seated),
        }
    }
    let holes = dealt.iter_mut().filter(|place| place.is_none());
    holes.zip(homeless).for_each(|(hole, seated)| *hole = Some(seated));
    let dealt: Vec<Seated<'_>> = dealt.into_iter().flatten().collect();
    let workers_of = |role: &str, nodes: &[Seated<'_>]| -> u32 {
        nodes.iter().map(|seated| seated.node).filter(|node| node.role == role).map(|node| node.workers).sum()
    };
    let all = |nodes: &[Seated<'_>]| -> u32 { nodes.iter().map(|seated| seated.node.workers).sum() };
    let master =
        dealt.first().map_or((String::new(), 0), |first| (first.node.address.clone(), first.node.port));
    let seat = |number: usize, seated: &Seated<'_>| Seat {
        generation,
        restarts,
        node: number as u32,
        nodes: dealt.len() as u32,
        first_rank: all(&dealt[..number]),
        world_size: all(&dealt),
        first_role_rank: workers_of(&seated.node.role, &dealt[..number]),
        role_world_size: workers_of(&seated.node.role, &dealt),
        master: master.clone(),
    };
    dealt.iter().enumerate().map(|(number, seated)| (seated.id, seat(number, seated))).collect()
}
