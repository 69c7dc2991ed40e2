//! What each rank keeps of a model from step to step, and how it gets from those that have it to those that are to have it, when the
//! ranks of a run are others than before.
//!
//! A *part* of a replica is what one of its ranks has a model of its own of, with an arena of its own; where each rank has a whole
//! model, there is one part. A *portion* is some elements of a part's arena: all of them, or those that a rank holds between two steps
//! where they are shared out. Whether anything is lost, and who hands what to whom, is a pure function of the portions that ranks have
//! and of those that they are to have, which all of them come to alike.

use crate::error::Error;
use phalanx_comm::{Group, Rank};
use std::ops::Range;

/// Elements of the arena of a part.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Portion {
    /// Which part of a replica.
    pub part: usize,
    /// How many elements its arena has.
    pub len: usize,
    /// Which of them, in rising order. Arrays beside them, such as an optimizer's state, have these alone, one after the other.
    pub elements: Vec<Range<usize>>,
}

impl Portion {
    /// All of a model of so many elements, which lies on a rank as a whole.
    pub fn whole(len: usize) -> Portion {
        Portion { part: 0, len, elements: vec![Range { start: 0, end: len }] }
    }

    /// How many elements it has.
    pub fn count(&self) -> usize {
        self.elements.iter().map(Range::len).sum()
    }

    /// Where neighbouring elements of the arena lie in an array that has those of the portion alone. Panics if it hasn't all of them
    /// side by side.
    #[track_caller]
    pub fn place_of(&self, elements: &Range<usize>) -> Range<usize> {
        let mut before = 0;
        for held in &self.elements {
            if held.start <= elements.start && elements.end <= held.end {
                let start = before + elements.start - held.start;
                return start..start + elements.len();
            }
            before += held.len();
        }
        panic!("elements {elements:?} aren't in the portion {:?}", self.elements)
    }

    fn to_words(&self) -> Vec<u64> {
        let ends = self.elements.iter().flat_map(|range| [range.start as u64, range.end as u64]);
        [self.part as u64, self.len as u64].into_iter().chain(ends).collect()
    }

    /// None of no words.
    fn of_words(words: &[u64]) -> Option<Portion> {
        let (&[part, len], ends) = words.split_first_chunk::<2>()?;
        let elements =
            ends.as_chunks::<2>().0.iter().map(|&[start, end]| start as usize..end as usize).collect();
        Some(Portion { part: part as usize, len: len as usize, elements })
    }
}

/// Elements of a part that one rank hands to another, or keeps where both are the same.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Handed {
    from: usize,
    to: usize,
    elements: Range<usize>,
}

/// Who hands what to whom.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HandOver {
    elements: Vec<Handed>,
    /// From whom the buffers of its part come to each rank.
    buffers: Vec<usize>,
}

impl HandOver {
    /// What ranks have to do so that each has what it is to have. A rank that has it keeps it, else the lowest that has hands it over;
    /// none if nobody does.
    fn of(held: &[Option<Portion>], wanted: &[Portion]) -> Option<HandOver> {
        let of_part =
            |part| move |held: &Option<Portion>| held.as_ref().filter(|held| held.part == part).cloned();
        let mut handed = HandOver { elements: Vec::new(), buffers: Vec::new() };
        for (to, wanted) in wanted.iter().enumerate() {
            let there: Vec<Option<Portion>> = held.iter().map(of_part(wanted.part)).collect();
            let by_choice = || std::iter::once(to).chain(0..there.len());
            handed.buffers.push(by_choice().find(|&rank| there[rank].is_some())?);
            for range in wanted.elements.iter().filter(|range| !range.is_empty()) {
                let mut at = range.start;
                while at < range.end {
                    let has = |rank: usize| {
                        let held = there[rank].iter().flat_map(|held| &held.elements);
                        held.clone().find(|held| held.contains(&at)).map(|held| (rank, held.end))
                    };
                    let (from, end) = by_choice().find_map(has)?;
                    let elements = at..end.min(range.end);
                    at = elements.end;
                    handed.elements.push(Handed { from, to, elements });
                }
            }
        }
        Some(handed)
    }

    /// The same, where each rank of `group` says what it has, if it has anything, and what it is to have. None if something of it is
    /// nowhere. All ranks must ask, and come to the same.
    pub fn among(group: &Group, held: Option<&Portion>, wanted: &Portion) -> Result<Option<HandOver>, Error> {
        let held = told_by_all(group, held.map_or_else(Vec::new, Portion::to_words))?;
        let wanted = told_by_all(group, wanted.to_words())?;
        let held: Vec<_> = held.iter().map(|words| Portion::of_words(words)).collect();
        let wanted: Option<Vec<_>> = wanted.iter().map(|words| Portion::of_words(words)).collect();
        Ok(wanted.and_then(|wanted| HandOver::of(&held, &wanted)))
    }

    /// Carries it out for one array: `read` copies out elements that this rank has, `write` puts elements to their place that come to
    /// it. What a rank keeps goes through both. All ranks must ask.
    pub fn carry_out(
        &self,
        group: &Group,
        mut read: impl FnMut(Range<usize>, &mut [f32]),
        mut write: impl FnMut(Range<usize>, &[f32]),
    ) -> Result<(), Error> {
        let mut values = Vec::new();
        for Handed { from, to, elements } in &self.elements {
            for start in elements.clone().step_by(PIECE) {
                let piece = start..elements.end.min(start + PIECE);
                values.resize(piece.len(), 0.0);
                hand(
                    group,
                    [*from, *to],
                    &mut values,
                    |values| read(piece.clone(), values),
                    |values| {
                        write(piece.clone(), values);
                    },
                )?;
            }
        }
        Ok(())
    }

    /// The same for the buffers of the parts, whole: `len` is how many numbers those of this rank's part are.
    pub fn carry_buffers(
        &self,
        group: &Group,
        len: usize,
        mut read: impl FnMut(&mut [f32]),
        mut write: impl FnMut(&[f32]),
    ) -> Result<(), Error> {
        let mut values = vec![0.0; len];
        for (to, from) in self.buffers.iter().enumerate().filter(|_| len > 0) {
            hand(group, [*from, to], &mut values, &mut read, &mut write)?;
        }
        Ok(())
    }
}

/// Hands values from one rank to another, as far as this rank is one of the two.
fn hand(
    group: &Group,
    [from, to]: [usize; 2],
    values: &mut [f32],
    read: impl FnOnce(&mut [f32]),
    write: impl FnOnce(&[f32]),
) -> Result<(), Error> {
    let (rank, other) = (group.rank().index(), |rank: usize| Rank(rank as u32));
    if from == rank {
        read(values);
    }
    match (from == rank, to == rank) {
        (true, false) => group.send(values, other(to))?,
        (false, true) => group.receive(values, other(from))?,
        _ => {}
    }
    if to == rank {
        write(values);
    }
    Ok(())
}

/// Numbers that are handed over at a time: few enough to stay in the cache.
const PIECE: usize = 1 << 17;

/// What every rank says, by rank.
fn told_by_all(group: &Group, mut own: Vec<u64>) -> Result<Vec<Vec<u64>>, Error> {
    let mut lens = vec![0u64; group.world_size()];
    group.all_gather(&[own.len() as u64], &mut lens)?;
    // As long as the longest.
    let longest = lens.iter().copied().max().unwrap_or(0) as usize;
    own.resize(longest, 0);
    let mut all = vec![0u64; longest * lens.len()];
    group.all_gather(&own, &mut all)?;
    Ok((0..).zip(lens).map(|(rank, len)| all[rank * longest..][..len as usize].to_vec()).collect())
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn portion(part: usize, len: usize, elements: &[Range<usize>]) -> Portion {
        Portion { part, len, elements: elements.to_vec() }
    }

    fn handed(from: usize, to: usize, elements: Range<usize>) -> Handed {
        Handed { from, to, elements }
    }

    #[test]
    fn what_a_lost_rank_held_comes_from_its_replica() {
        let halves =
            [portion(0, 10, std::slice::from_ref(&(0..5))), portion(0, 10, std::slice::from_ref(&(5..10)))];
        let wanted: Vec<Portion> = halves.iter().cycle().take(4).cloned().collect();
        let mut held: Vec<Option<Portion>> = wanted.iter().cloned().map(Some).collect();
        held[1] = None;
        let own = |rank: usize| handed(rank, rank, wanted[rank].elements[0].clone());
        let over = HandOver::of(&held, &wanted).unwrap();
        assert_eq!(over.elements, [own(0), handed(3, 1, 5..10), own(2), own(3)]);
        assert_eq!(over.buffers, [0, 0, 2, 3]);
        held[3] = None;
        assert_eq!(HandOver::of(&held, &wanted), None, "nobody has the second half");
    }

    #[test]
    fn parts_are_not_taken_for_each_other() {
        let whole = |part| portion(part, 4, std::slice::from_ref(&(0..4)));
        let wanted = [whole(0), whole(1), whole(0), whole(1)];
        let held = [None, Some(whole(1)), Some(whole(0)), None];
        let over = HandOver::of(&held, &wanted).unwrap();
        assert_eq!(over.elements.iter().map(|handed| handed.from).collect::<Vec<_>>(), [2, 1, 2, 1]);
        assert_eq!(over.buffers, [2, 1, 2, 1]);
        assert_eq!(HandOver::of(&[None, None, Some(whole(0)), None], &wanted), None);
        // A part without elements may have buffers, which somebody must know.
        let empty = portion(2, 0, &[]);
        assert_eq!(HandOver::of(&[None], std::slice::from_ref(&empty)), None);
        assert!(HandOver::of(&[Some(empty.clone())], &[empty]).is_some());
    }

    /// Some ranges of so many elements, as bits say.
    fn of_bits(bits: &[bool]) -> Portion {
        let mut elements: Vec<Range<usize>> = Vec::new();
        for (i, _) in bits.iter().enumerate().filter(|(_, bit)| **bit) {
            match elements.last_mut().filter(|last| last.end == i) {
                Some(last) => last.end = i + 1,
                None => elements.push(i..i + 1),
            }
        }
        portion(0, bits.len(), &elements)
    }

    proptest! {
        /// Ranks have what a bit each says, some nothing at all, and are to have what others say.
        #[test]
        fn every_rank_gets_what_it_is_to_have_if_anybody_has_it(
            held in prop::collection::vec(prop::option::of(prop::collection::vec(any::<bool>(), 12)), 1..5),
            wanted in prop::collection::vec(prop::collection::vec(any::<bool>(), 12), 5),
        ) {
            let wanted: Vec<Portion> = wanted[..held.len()].iter().map(|bits| of_bits(bits)).collect();
            let portions: Vec<Option<Portion>> = held.iter().map(|bits| bits.as_deref().map(of_bits)).collect();
            let anybody = |i: usize| held.iter().flatten().any(|bits| bits[i]);
            let is_there = held.iter().any(Option::is_some)
                && wanted.iter().flat_map(|wanted| wanted.elements.clone()).flatten().all(anybody);
            let over = HandOver::of(&portions, &wanted);
            prop_assert_eq!(over.is_some(), is_there);
            let Some(over) = over else { return Ok(()) };
            let groups = Group::threads(held.len());
            let arrays: Vec<Vec<f32>> = std::thread::scope(|scope| {
                let rank = |(rank, group): (usize, Group)| {
                    let (portions, wanted) = (&portions, &wanted);
                    let over = &over;
                    scope.spawn(move || {
                        let found = HandOver::among(&group, portions[rank].as_ref(), &wanted[rank]).unwrap();
                        assert_eq!(found.as_ref(), Some(over), "all ranks come to the same");
                        let mut array = vec![0.0; wanted[rank].count()];
                        // An element's value is its number.
                        let held = portions[rank].as_ref();
                        let compact: Vec<f32> = held.iter().flat_map(|held| held.elements.iter().cloned().flatten()).map(|i| i as f32).collect();
                        let read = |range: Range<usize>, values: &mut [f32]| {
                            values.copy_from_slice(&compact[held.unwrap().place_of(&range)]);
                        };
                        over.carry_out(&group, read, |range, values| {
                            array[wanted[rank].place_of(&range)].copy_from_slice(values);
                        }).unwrap();
                        array
                    })
                };
                let ranks: Vec<_> = groups.into_iter().enumerate().map(rank).collect();
                ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
            });
            for (array, wanted) in arrays.iter().zip(&wanted) {
                let want: Vec<f32> = wanted.elements.iter().cloned().flatten().map(|i| i as f32).collect();
                prop_assert_eq!(array, &want);
            }
        }
    }
}
