use super::*;
use proptest::prelude::*;

/// A run of so many ranks that has begun and goes on in place; the members' numbers are their ranks.
fn begun(world_size: u32) -> Membership {
    begun_with(world_size, GoesOn::WithThoseLeft)
}

fn begun_with(world_size: u32, with: GoesOn) -> Membership {
    let mut members = Membership::new(Generation(0), world_size as usize);
    for rank in 0..world_size {
        members.join(Member(rank.into()), Rank(rank), rank.to_string());
    }
    (0..world_size).for_each(|rank| drop(members.goes_on(Member(rank.into()), with)));
    members
}

fn ranks(decision: &Decision) -> Vec<(u64, u32)> {
    match decision {
        Decision::Begin { ranks, .. } => ranks.iter().map(|(member, rank)| (member.0, rank.0)).collect(),
        other => panic!("{other:?}"),
    }
}

fn wait(missing: &[u32]) -> Decision {
    Decision::Wait { missing: missing.to_vec() }
}

#[test]
fn begins_when_all_are_there_and_refuses_the_rest() {
    let mut members = Membership::new(Generation(4), 3);
    assert_eq!(members.join(Member(7), Rank(2), "c".into()), wait(&[0, 1]));
    let refused = |decision| matches!(decision, Decision::Refuse { reason } if reason.contains("already") || reason.contains("world of 3"));
    assert!(refused(members.join(Member(8), Rank(2), "x".into())));
    assert!(refused(members.join(Member(9), Rank(3), "x".into())));
    assert_eq!(members.join(Member(1), Rank(0), "gone".into()), wait(&[1]));
    assert_eq!(members.leave(Member(1)), wait(&[0, 1]));
    assert_eq!(members.join(Member(2), Rank(0), "a".into()), wait(&[1]));
    let begin = members.join(Member(3), Rank(1), "b".into());
    let roster = Roster { generation: Generation(4), addresses: vec!["a".into(), "b".into(), "c".into()] };
    assert_eq!(ranks(&begin), [(2, 0), (3, 1), (7, 2)]);
    assert!(matches!(begin, Decision::Begin { roster: found, .. } if found == roster));
}

#[test]
fn survivors_wait_for_nobody_and_keep_their_ranks_where_they_can() {
    let mut members = begun(4);
    assert_eq!(members.rejoin(Member(2)), wait(&[0, 1, 3]));
    // The one that has left it already needn't be told.
    assert_eq!(members.leave(Member(1)), recall(&[0, 3], Leave::Now));
    assert_eq!(members.rejoin(Member(3)), wait(&[0]));
    let begin = members.rejoin(Member(0));
    assert_eq!(ranks(&begin), [(0, 0), (2, 2), (3, 1)]);
    assert_eq!(members.generation(), Generation(1));
    // The one in its place comes when the others run, and is let in when all of them have left.
    assert_eq!(members.join(Member(9), Rank(1), "new".into()), recall(&[0, 2, 3], Leave::Soon));
    assert_eq!(members.rejoin(Member(0)), wait(&[1, 2]));
    assert_eq!(members.rejoin(Member(2)), wait(&[1]));
    assert_eq!(ranks(&members.rejoin(Member(3))), [(0, 0), (2, 2), (3, 1), (9, 3)]);
}

#[test]
fn survivors_that_need_all_wait_for_those_that_take_the_place_of_the_lost() {
    let mut members = begun_with(3, GoesOn::WithAll);
    assert_eq!(members.leave(Member(0)), recall(&[1, 2], Leave::Now));
    assert_eq!(members.rejoin(Member(1)), wait(&[2]));
    assert_eq!(members.rejoin(Member(2)), wait(&[0]));
    assert_eq!(ranks(&members.join(Member(7), Rank(0), "new".into())), [(1, 1), (2, 2), (7, 0)]);
    assert_eq!(members.settle(), wait(&[0, 1, 2]), "nobody waits to come in");
    // One that comes before the others have left is waited for no longer than they are.
    assert_eq!(members.leave(Member(7)), recall(&[1, 2], Leave::Now));
    assert_eq!(members.join(Member(8), Rank(0), "new".into()), wait(&[1, 2]));
    members.rejoin(Member(1));
    assert_eq!(ranks(&members.rejoin(Member(2))), [(1, 1), (2, 2), (8, 0)]);
    // Of those that nobody expects any more, nobody is waited for.
    assert_eq!(members.leave(Member(2)), recall(&[1, 8], Leave::Now));
    members.rejoin(Member(1));
    assert_eq!(members.rejoin(Member(8)), wait(&[2]));
    let (lost, begin) = members.do_without(2..3);
    assert_eq!((lost, ranks(&begin)), (vec![], vec![(1, 1), (8, 0)]));
}

#[test]
fn another_coordinator_hears_that_all_are_needed_from_those_that_come_back() {
    let workers = [0, 1, 2].map(Rank);
    let mut members = Membership::resume(Generation(4), &workers, 0..3, &BTreeSet::from([0, 1]));
    members.come_back(Member(5), Rank(1), "1".into(), (Generation(4), Rank(1)), GoesOn::WithAll);
    let decision =
        members.come_back(Member(6), Rank(0), "0".into(), (Generation(4), Rank(0)), GoesOn::WithAll);
    assert_eq!(decision, wait(&[2]));
    assert_eq!(ranks(&members.join(Member(7), Rank(2), "2".into())), [(5, 1), (6, 0), (7, 2)]);
}

#[test]
fn those_that_come_anew_wait_for_each_other_where_nobody_holds_the_state() {
    let mut members = begun(2);
    members.leave(Member(0));
    assert_eq!(members.leave(Member(1)), wait(&[0, 1]));
    assert_eq!(members.join(Member(5), Rank(1), "b".into()), wait(&[0]));
    assert_eq!(ranks(&members.join(Member(6), Rank(0), "a".into())), [(5, 1), (6, 0)]);
    assert_eq!(members.generation(), Generation(1));
}

#[test]
fn who_comes_before_the_end_of_another_was_noticed_takes_its_place() {
    let mut members = begun(2);
    assert_eq!(members.join(Member(5), Rank(1), "b".into()), recall(&[0, 1], Leave::Soon));
    members.rejoin(Member(0));
    assert_eq!(ranks(&members.leave(Member(1))), [(0, 0)]);
    assert_eq!(members.settle(), recall(&[0], Leave::Soon));
    assert_eq!(ranks(&members.rejoin(Member(0))), [(0, 0), (5, 1)]);
    assert_eq!(members.settle(), wait(&[0, 1]));
}

#[test]
fn those_that_are_left_go_on_before_others_come_in() {
    let mut members = begun(3);
    assert_eq!(members.join(Member(7), Rank(1), "early".into()), recall(&[0, 1, 2], Leave::Soon));
    assert_eq!(members.leave(Member(1)), recall(&[0, 2], Leave::Now), "that is more than they knew");
    members.rejoin(Member(2));
    assert_eq!(ranks(&members.rejoin(Member(0))), [(0, 0), (2, 1)]);
    assert_eq!(members.settle(), recall(&[0, 2], Leave::Soon));
    // Another is lost before that comes to anything.
    assert_eq!(members.leave(Member(0)), recall(&[2], Leave::Now));
    assert_eq!(ranks(&members.rejoin(Member(2))), [(2, 0)]);
    assert_eq!(members.settle(), recall(&[2], Leave::Soon));
    assert_eq!(ranks(&members.rejoin(Member(2))), [(2, 0), (7, 1)]);
    // Where nobody is lost, they come in with the same membership in which the others leave the last.
    members.expect(3..4);
    assert_eq!(members.join(Member(8), Rank(3), "d".into()), recall(&[2, 7], Leave::Soon));
    members.rejoin(Member(2));
    assert_eq!(ranks(&members.rejoin(Member(7))), [(2, 0), (7, 1), (8, 2)]);
}

#[test]
fn a_run_grows_by_those_who_are_expected_and_shrinks_by_those_who_are_not() {
    let mut members = begun(2);
    let refused = |decision| matches!(decision, Decision::Refuse { .. });
    assert!(refused(members.join(Member(7), Rank(2), "c".into())));
    members.expect(2..4);
    assert_eq!(members.join(Member(8), Rank(3), "d".into()), recall(&[0, 1], Leave::Soon));
    members.rejoin(Member(0));
    // The other one's host is gone, and its connection says nothing of that.
    let (lost, decision) = members.do_without(0..1);
    assert_eq!((lost, decision), (vec![Member(0)], recall(&[1], Leave::Now)));
    assert_eq!(ranks(&members.rejoin(Member(1))), [(1, 0)]);
    assert_eq!(ranks(&members.rejoin(Member(1))), [(1, 0), (8, 1)]);
    // Where nobody holds the state, those are waited for who are still wanted.
    assert_eq!(members.leave(Member(1)), recall(&[8], Leave::Now));
    assert_eq!(members.leave(Member(8)), wait(&[1, 2, 3]));
    assert!(refused(members.join(Member(9), Rank(0), "a".into())));
    assert_eq!(members.join(Member(10), Rank(1), "b".into()), wait(&[2, 3]));
    let (lost, decision) = members.do_without(2..4);
    assert_eq!((lost, ranks(&decision)), (vec![], vec![(10, 0)]));
}

#[test]
fn whoever_is_given_up_is_left_even_if_it_seems_to_be_alive() {
    let mut members = begun(3);
    let (lost, decision) = members.do_without(2..3);
    assert_eq!((lost, decision), (vec![Member(2)], recall(&[0, 1], Leave::Now)));
    members.rejoin(Member(0));
    assert_eq!(ranks(&members.rejoin(Member(1))), [(0, 0), (1, 1)]);
    assert_eq!(members.rejoin(Member(0)), wait(&[1]), "nobody is asked to leave this one");
}

#[test]
fn of_a_run_that_ends_those_go_on_without_the_lost_who_have_something_of_it() {
    let mut members = begun_with(3, GoesOn::WithAll);
    members.leave(Member(2));
    members.rejoin(Member(0));
    assert_eq!(members.rejoin(Member(1)), wait(&[2]));
    let (lost, decision) = members.part_from(2..3);
    assert_eq!((lost, ranks(&decision)), (vec![], vec![(0, 0), (1, 1)]));
    // One that came in the place of another would begin the run anew, by itself.
    let mut members = begun_with(2, GoesOn::WithAll);
    members.leave(Member(0));
    members.join(Member(5), Rank(0), "a".into());
    assert_eq!(members.leave(Member(1)), wait(&[1]));
    let (lost, decision) = members.part_from(1..2);
    assert_eq!((lost, decision), (vec![], wait(&[])));
}

#[test]
fn ranks_that_can_not_go_on_in_place_are_left_alone() {
    let mut members = begun(2);
    members.goes_on(Member(1), GoesOn::Not);
    assert!(matches!(members.rejoin(Member(0)), Decision::Refuse { .. }));
    assert_eq!(members.join(Member(5), Rank(1), "b".into()), wait(&[0, 1]));
    assert_eq!(members.seat_of(Rank(1)), None);
    assert_eq!(members.seat_of(Rank(0)), Some(Rank(0)));
}

#[test]
fn one_whose_connection_was_cut_is_waited_for_until_it_comes_back_or_has_ended() {
    for comes_back in [true, false] {
        let mut members = begun(3);
        assert_eq!(members.cut(Member(0)), wait(&[0, 1, 2]));
        assert_eq!(
            members.join(Member(9), Rank(3), "late".into()),
            Decision::Refuse { reason: "rank 3 in a world of 3".into() }
        );
        members.expect(3..4);
        let soon = recall(&[1, 2], Leave::Soon);
        assert_eq!(members.join(Member(9), Rank(3), "new".into()), soon);
        members.rejoin(Member(1));
        assert_eq!(members.rejoin(Member(2)), wait(&[0]));
        if comes_back {
            let begin = members.come_back(
                Member(10),
                Rank(0),
                "0".into(),
                (Generation(0), Rank(0)),
                GoesOn::WithThoseLeft,
            );
            assert_eq!(ranks(&begin), [(1, 1), (2, 2), (9, 3), (10, 0)]);
        } else {
            let (ended, begin) = members.end(Rank(0));
            assert_eq!((ended.len(), ranks(&begin)), (1, vec![(1, 1), (2, 0)]));
        }
    }
    // It may be back before its end is seen; an older process in its place may not.
    let mut members = begun(2);
    members.rejoin(Member(0));
    let begin =
        members.come_back(Member(5), Rank(1), "1".into(), (Generation(0), Rank(1)), GoesOn::WithThoseLeft);
    assert_eq!(ranks(&begin), [(0, 0), (5, 1)]);
    assert_eq!(members.cut(Member(1)), wait(&[0, 1]), "it is another connection's by now");
    let older =
        members.come_back(Member(6), Rank(1), "1".into(), (Generation(0), Rank(1)), GoesOn::WithThoseLeft);
    assert!(matches!(older, Decision::Refuse { .. }));
}

fn recall(members: &[u64], leave: Leave) -> Decision {
    Decision::Recall { members: members.iter().copied().map(Member).collect(), leave }
}

#[derive(Clone, Debug)]
enum Act {
    /// The worker with this seat is lost.
    Lose(u32),
    /// Its connection is cut.
    Cut(u32),
    /// One is started in this seat, if that is empty.
    Start(u32),
    /// Those that know of a loss or of somebody who waits leave.
    Rejoin(u32),
    /// The coordinator is another.
    Succeed,
}

fn acts() -> impl Strategy<Value = Vec<Act>> {
    let act = prop_oneof![
        (0..5u32).prop_map(Act::Lose),
        (0..5u32).prop_map(Act::Cut),
        (0..5u32).prop_map(Act::Start),
        (0..5u32).prop_map(Act::Rejoin),
        (0..5u32).prop_map(Act::Rejoin),
        Just(Act::Succeed),
    ];
    proptest::collection::vec(act, 0..80)
}

proptest! {
    /// Whatever happens: ranks have no holes, generations only grow, survivors keep ranks that are low enough, nobody is let in
    /// with a loss unless all are needed, and once everybody who can has left twice, everybody has a rank, if there are as many as
    /// are needed.
    #[test]
    fn nobody_is_forgotten(acts in acts(), needs_all: bool) {
        let with = if needs_all { GoesOn::WithAll } else { GoesOn::WithThoseLeft };
        let mut members = begun_with(5, with);
        let mut living: BTreeMap<Member, u32> = (0..5).map(|rank| (Member(rank), rank as u32)).collect();
        let mut held: BTreeMap<Member, Rank> = living.keys().map(|member| (*member, Rank(member.0 as u32))).collect();
        let (mut next, mut last) = (100, Generation(0));
        // Those that another coordinator has left.
        let mut left: BTreeSet<Member> = BTreeSet::new();
        let end = (0..10).map(|number| Act::Rejoin(number % 5));
        for act in acts.into_iter().chain(end) {
            let of = |seat: u32| living.iter().find(|(_, s)| **s == seat).map(|(member, _)| *member);
            let decision = match act {
                Act::Lose(seat) => of(seat).map(|member| {
                    living.remove(&member);
                    if left.remove(&member) { members.end(Rank(seat)).1 } else { members.leave(member) }
                }),
                // One that hadn't come in yet joins again by a connection of its own.
                Act::Cut(seat) => of(seat).filter(|member| held.contains_key(member)).map(|member| match left.insert(member) {
                    true => members.cut(member),
                    false => members.settle(),
                }),
                Act::Start(seat) if of(seat).is_none() => {
                    next += 1;
                    living.insert(Member(next), seat);
                    Some(members.join(Member(next), Rank(seat), next.to_string()))
                }
                Act::Start(_) => None,
                Act::Succeed => {
                    let seat_of = |member: &Member| living.get(member).copied();
                    let mut workers = vec![Rank(u32::MAX); held.len()];
                    for (member, rank) in &held {
                        workers[rank.index()] = Rank(seat_of(member).unwrap_or(u32::MAX));
                    }
                    let live = living.values().copied().collect();
                    members = Membership::resume(last, &workers, 0..5, &live);
                    left = living.keys().copied().filter(|member| held.contains_key(member)).collect();
                    let anew = living.iter().filter(|(member, _)| !left.contains(member));
                    anew.map(|(member, seat)| members.join(*member, Rank(*seat), member.0.to_string())).last()
                }
                Act::Rejoin(seat) if of(seat).is_some_and(|member| left.contains(&member)) => of(seat).map(|member| {
                    left.remove(&member);
                    members.come_back(member, Rank(seat), member.0.to_string(), (last, held[&member]), with)
                }),
                Act::Rejoin(seat) => of(seat).filter(|member| held.contains_key(member) && !members.waits(*member)).map(|member| members.rejoin(member)),
            };
            if let Some(Decision::Begin { ranks, roster }) = decision {
                prop_assert!(roster.generation > last);
                last = roster.generation;
                let is_left = |member: &Member| living.contains_key(member);
                let any_lost = held.keys().any(|member| !is_left(member));
                let holders = held.keys().filter(|member| is_left(member)).count();
                let do_without = any_lost && holders > 0 && !needs_all;
                prop_assert_eq!(ranks.len(), if do_without { holders } else { living.len() });
                prop_assert!(!needs_all || ranks.len() == 5);
                let mut numbers: Vec<usize> = ranks.iter().map(|(_, rank)| rank.index()).collect();
                numbers.sort_unstable();
                prop_assert!(numbers.into_iter().eq(0..ranks.len()));
                for (member, rank) in &ranks {
                    if let Some(before) = held.get(member).filter(|before| before.index() < ranks.len()) {
                        prop_assert_eq!(before, rank);
                    }
                    prop_assert_eq!(&roster.addresses[rank.index()], &members.workers[member].address);
                }
                held = ranks.into_iter().collect();
                held.keys().for_each(|member| drop(members.goes_on(*member, with)));
                members.settle();
            }
        }
        let holders = living.keys().filter(|member| held.contains_key(member)).count();
        let newcomers = living.len() - holders;
        let are_too_few = (holders == 0 || needs_all) && holders + newcomers < 5;
        prop_assert!(are_too_few || living.keys().all(|member| held.contains_key(member)), "{living:?} {held:?}");
    }
}
