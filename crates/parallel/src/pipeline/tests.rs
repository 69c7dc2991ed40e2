//! Schedules of many shapes, played.

use super::*;
use phalanx_tensor::Philox;

/// Shapes for a kind: small ones in full, and larger ones here and there.
fn shapes(kind: ScheduleKind) -> Vec<Shape> {
    let chunks: &[usize] = if kind == ScheduleKind::Interleaved { &[1, 2, 3, 5] } else { &[1] };
    let mut shapes = Vec::new();
    for ranks in [1, 2, 3, 4, 5, 8, 13] {
        for &chunks in chunks {
            for micro_batches in [1, 2, 3, 4, 5, 7, 8, 16, 39] {
                let micro_batches =
                    if kind == ScheduleKind::Interleaved { micro_batches * ranks } else { micro_batches };
                shapes.push(Shape { ranks, chunks, micro_batches });
            }
        }
    }
    shapes
}

fn all() -> impl Iterator<Item = Schedule> {
    let of = |kind| shapes(kind).into_iter().map(move |shape| Schedule::new(kind, shape).unwrap());
    ScheduleKind::ALL.into_iter().flat_map(of)
}

#[test]
fn every_schedule_plays_to_its_end_within_its_bounds() {
    for schedule in all() {
        let Shape { ranks, chunks, micro_batches } = schedule.shape();
        let played = check(&schedule)
            .unwrap_or_else(|fault| panic!("{} {:?}: {fault}", schedule.kind(), schedule.shape()));
        // A row of stages is crossed once forth and once back by every micro-batch, wherever two ranks meet.
        let borders = if ranks == 1 { 0 } else { ranks * chunks - 1 };
        assert_eq!(played.messages, 2 * borders * micro_batches);
        assert!(played.waiting <= micro_batches);
    }
}

#[test]
fn every_schedule_takes_micro_batches_in_rising_order_in_each_stage_and_direction() {
    for schedule in all() {
        for stage in 0..schedule.stages() {
            for work in [Work::Forward, Work::Backward, Work::BackwardInput, Work::BackwardWeight] {
                let actions = schedule.actions(schedule.rank_of(stage)).iter();
                let order: Vec<usize> =
                    actions.filter(|a| a.stage == stage && a.work == work).map(|a| a.micro_batch).collect();
                assert!(order.is_sorted(), "{} {:?} {work:?}: {order:?}", schedule.kind(), schedule.shape());
            }
        }
    }
}

/// 1F1B and what comes of it hold no more micro-batches than there are ranks; GPipe holds all of them.
#[test]
fn what_is_alive_is_bounded_by_the_ranks_and_not_by_the_batch() {
    let alive = |kind, chunks| {
        let schedule = Schedule::new(kind, Shape { ranks: 4, chunks, micro_batches: 32 }).unwrap();
        check(&schedule).unwrap().alive
    };
    assert_eq!(alive(ScheduleKind::GPipe, 1), [32, 32, 32, 32]);
    assert_eq!(alive(ScheduleKind::OneFOneB, 1), [4, 3, 2, 1]);
    assert_eq!(alive(ScheduleKind::ZeroBubble, 1), [4, 4, 4, 4]);
    assert_eq!(alive(ScheduleKind::Interleaved, 2), [11, 9, 7, 5]);
}

#[test]
fn the_bubble_is_the_theorys_where_there_are_enough_micro_batches() {
    let times = [
        Times::EQUAL,
        Times { forward: 1.0, input: 1.1, weight: 0.9 },
        Times { forward: 0.3, input: 0.4, weight: 0.5 },
    ];
    for schedule in all().filter(|s| s.shape().micro_batches >= s.shape().ranks) {
        // What fills ZB-H1's gaps fits them exactly where all parts are equally long.
        let may_be_more = |times| schedule.kind() == ScheduleKind::ZeroBubble && times != Times::EQUAL;
        for times in times {
            let (simulated, theory) =
                (Timeline::simulate(&schedule, times, 0.0).bubble(), schedule.bubble(times));
            assert!(
                (simulated - theory).abs() < 1e-9 || may_be_more(times) && simulated > theory,
                "{} {:?} {times:?}: {simulated} simulated, {theory} in theory",
                schedule.kind(),
                schedule.shape()
            );
        }
    }
}

#[test]
fn a_timeline_keeps_to_the_order_and_to_what_each_action_needs() {
    for schedule in all() {
        let random = Philox::new(7, schedule.stages() as u64);
        let time = |i| 0.1 + f64::from(random.unit(i));
        let times = Times { forward: time(0), input: time(1), weight: time(2) };
        let timeline = Timeline::simulate(&schedule, times, 0.25);
        let end = |action: Action| {
            let row = &timeline.ranks[schedule.rank_of(action.stage)];
            row.iter().find(|done| done.action == action).expect("everything is done").end
        };
        if schedule.shape().micro_batches > 8 {
            continue;
        }
        for row in &timeline.ranks {
            assert!(row.windows(2).all(|pair| pair[0].end <= pair[1].start));
            for done in row {
                for needed in schedule.needs(done.action).into_iter().flatten() {
                    let travels = schedule.rank_of(needed.stage) != schedule.rank_of(done.action.stage);
                    assert!(end(needed) + if travels { 0.25 } else { 0.0 } <= done.start + 1e-12);
                }
            }
        }
    }
}

/// Waits go, and what one action alone takes longer stays.
#[test]
fn a_timeline_without_its_waits_has_the_bubble_of_its_actions() {
    for schedule in all() {
        let slow = Timeline::simulate(&schedule, Times::EQUAL, 0.25);
        let best = Timeline::simulate(&schedule, Times::EQUAL, 0.0);
        assert!((slow.without_waits(&schedule).length() - best.length()).abs() < 1e-9);

        let mut uneven = best.clone();
        let last =
            uneven.ranks.iter_mut().map(|row| row.last_mut().unwrap()).max_by(|a, b| a.end.total_cmp(&b.end));
        last.unwrap().end += 2.0;
        assert!((uneven.without_waits(&schedule).length() - best.length() - 2.0).abs() < 1e-9);
    }
}

/// Stages that differ: the slowest works all the time, but for what the others do before and behind it.
#[test]
fn a_pipeline_of_uneven_stages_takes_as_long_as_its_slowest() {
    let of = |kind, seconds: &[f64]| {
        let shape = Shape { ranks: seconds.len(), chunks: 1, micro_batches: 4 };
        let schedule = Schedule::new(kind, shape).unwrap();
        Timeline::foretell(&schedule, seconds, Times::EQUAL).length()
    };
    for kind in [ScheduleKind::GPipe, ScheduleKind::OneFOneB] {
        // A forward pass of the other stage before it, and a backward pass behind it.
        assert!((of(kind, &[3.0, 9.0]) - (1.0 + 4.0 * 9.0 + 2.0)).abs() < 1e-9);
    }
    // All forwards come before any backward, so the first stage waits for the other once; or finds its gradient there.
    assert!((of(ScheduleKind::GPipe, &[9.0, 3.0]) - (4.0 * 9.0 + 3.0)).abs() < 1e-9);
    assert!((of(ScheduleKind::OneFOneB, &[9.0, 3.0]) - 4.0 * 9.0).abs() < 1e-9);
    // The last gradients of weights fill the time in which the first stage goes back.
    assert!((of(ScheduleKind::ZeroBubble, &[3.0, 9.0]) - (1.0 + 4.0 * 9.0)).abs() < 1e-9);
}

#[test]
fn faults_of_a_schedule_are_found_and_named() {
    let shape = Shape { ranks: 2, chunks: 1, micro_batches: 2 };
    let good = Schedule::new(ScheduleKind::OneFOneB, shape).unwrap();
    let check_changed = |change: &dyn Fn(&mut Vec<Vec<Action>>), want: &str| {
        let mut schedule = good.clone();
        change(&mut schedule.actions);
        assert_eq!(check(&schedule).unwrap_err().to_string(), want);
    };
    check_changed(&|actions| actions[1].truncate(3), "B1 of stage 1 is never done");
    check_changed(
        &|actions| {
            let first = actions[0][0];
            actions[0].push(first);
        },
        "F0 of stage 0 is done twice",
    );
    check_changed(&|actions| actions.swap(0, 1), "rank 0 is to do F0 of stage 1, which is another rank's");
    // Each waits for what the other does afterwards.
    check_changed(
        &|actions| actions[0].swap(0, 2),
        "nobody can go on: rank 0 waits before B0 of stage 0 for B0 of stage 1, rank 1 waits before F0 of stage 1 for F0 of stage 0",
    );
    let mut gpipe = Schedule::new(ScheduleKind::GPipe, shape).unwrap();
    gpipe.kind = ScheduleKind::OneFOneB;
    assert_eq!(check(&gpipe).unwrap_err(), Fault::Alive { rank: 1, alive: 2, most: 1 });
}

#[test]
fn what_cannot_be_scheduled_is_refused_with_what_can() {
    let refused = |kind, ranks, chunks, micro_batches| {
        Schedule::new(kind, Shape { ranks, chunks, micro_batches }).unwrap_err().to_string()
    };
    assert_eq!(
        refused(ScheduleKind::Interleaved, 4, 2, 6),
        "interleaved with 6 micro-batches over 4 ranks: micro-batches go in rounds of 4\nhint: take 8 of them or 4"
    );
    assert_eq!(
        refused(ScheduleKind::Interleaved, 4, 2, 3),
        "interleaved with 3 micro-batches over 4 ranks: micro-batches go in rounds of 4\nhint: take 4 of them"
    );
    assert_eq!(
        refused(ScheduleKind::GPipe, 2, 2, 3),
        "gpipe with 2 stages a rank\nhint: only interleaved has more than 1"
    );
    assert!(refused(ScheduleKind::GPipe, 0, 1, 3).contains("at least one of each"));
    assert_eq!(
        "2f2b".parse::<ScheduleKind>().unwrap_err(),
        "no schedule is called: 2f2b\nhint: there are gpipe, 1f1b, interleaved, zb-h1"
    );
}
