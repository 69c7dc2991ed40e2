use super::*;
use proptest::prelude::*;

const SECOND: Duration = Duration::from_secs(1);

fn look(section: Section, entered: u64) -> Look {
    Look { section, entered, steps: 0, waits: 0, is_waiting: false }
}

fn waiting(section: Section, entered: u64) -> Look {
    Look { is_waiting: true, ..look(section, entered) }
}

/// Looks at workers once a second, and gives what follows from each.
fn verdicts(limits: &str, rows: &[Vec<Look>]) -> Vec<Verdict> {
    let start = Instant::now();
    let limits: HangLimits = limits.parse().unwrap();
    let mut standings: Vec<Standing> = rows[0].iter().map(|look| Standing::new(*look, start)).collect();
    let judged = rows.iter().enumerate().map(|(second, looks)| {
        let now = start + SECOND * second as u32;
        standings.iter_mut().zip(looks).for_each(|(standing, look)| standing.see(*look, now));
        let workers: Vec<(Rank, &Standing)> = (0..).map(Rank).zip(&standings).collect();
        judge(now, &workers, &limits)
    });
    judged.collect()
}

fn last(limits: &str, seconds: usize, looks: &[Look]) -> Verdict {
    verdicts(limits, &vec![looks.to_vec(); seconds + 1]).pop().unwrap()
}

#[test]
fn steps_that_no_look_falls_into_count() {
    let start = Instant::now();
    let at = |ms: u64| start + Duration::from_millis(ms);
    let mut standing = Standing::new(look(Section::Start, 1), start);
    // Three steps between two looks, and then one that never ends.
    standing.see(Look { steps: 3, ..look(Section::Step(3), 5) }, at(250));
    let limits = HangLimits::default();
    let hangs = |ms: u64| matches!(judge(at(ms), &[(Rank(0), &standing)], &limits), Verdict::Hangs(_));
    assert!(!hangs(59_000) && hangs(61_000));
    // The first may take longer.
    let mut standing = Standing::new(look(Section::Start, 1), start);
    standing.see(look(Section::Step(0), 2), at(250));
    assert!(matches!(judge(at(61_000), &[(Rank(0), &standing)], &limits), Verdict::Fine));
}

#[test]
fn one_that_computes_for_too_long_hangs_and_those_that_wait_for_it_do_not() {
    let step = Section::Step(812);
    let looks = [waiting(step, 9), look(step, 9), waiting(step, 9)];
    assert_eq!(last("step=3", 3, &looks), Verdict::Fine);
    let Verdict::Hangs(hang) = last("step=3", 4, &looks) else { panic!("rank 1 hangs") };
    assert_eq!((hang.rank, hang.why().as_str()), (Rank(1), "no progress in step 812 for 4.0 s, limit 3 s"));
    assert_eq!(last("step=off", 1000, &looks), Verdict::Fine);
    assert_eq!(last("start=3,step=off", 1000, &looks), Verdict::Fine);
}

#[test]
fn each_section_has_a_limit_of_its_own() {
    let limits = "start=10,step=20,evaluation=30,checkpoint=40";
    let sections = [Section::Start, Section::Step(0), Section::Evaluation, Section::Checkpoint];
    for (section, limit) in sections.into_iter().zip([10, 20, 30, 40]) {
        assert_eq!(last(limits, limit, &[look(section, 1)]), Verdict::Fine, "{section:?}");
        assert!(matches!(last(limits, limit + 1, &[look(section, 1)]), Verdict::Hangs(_)), "{section:?}");
    }
    assert_eq!(last(limits, 100_000, &[look(Section::Free, 1)]), Verdict::Fine);
}

#[test]
fn where_all_wait_nobody_is_to_blame_and_it_is_said() {
    let (step, free) = (Section::Step(3), Section::Free);
    assert_eq!(last("5", 6, &[waiting(step, 1), waiting(step, 1)]), Verdict::AllWait(SECOND * 6));
    assert_eq!(last("5", 5, &[waiting(step, 1), waiting(step, 1)]), Verdict::Fine);
    // What that one does is nobody's business, and it may come.
    assert_eq!(last("5", 6, &[waiting(step, 1), look(free, 1)]), Verdict::Fine);
    assert_eq!(last("5", 6, &[]), Verdict::Fine);
}

#[test]
fn who_is_stopped_waits_for_nobody() {
    let (start, limits) = (Instant::now(), "step=1,checkpoint=100".parse().unwrap());
    let mut standing = Standing::new(waiting(Section::Checkpoint, 1), start);
    let mut judged = |second: u32, section, is_stopped| {
        let now = start + SECOND * second;
        standing.see_stopped(is_stopped, now);
        standing.see(waiting(section, 1), now);
        judge(now, &[(Rank(0), &standing)], &limits)
    };
    assert_eq!(judged(2, Section::Checkpoint, false), Verdict::Fine);
    assert_eq!(judged(4, Section::Checkpoint, true), Verdict::Fine, "it has waited, and is stopped only now");
    assert_eq!(judged(5, Section::Checkpoint, true), Verdict::Fine);
    let Verdict::Hangs(hang) = judged(6, Section::Checkpoint, true) else { panic!("it hangs") };
    assert_eq!((hang.still, hang.limit), (SECOND * 2, STOPPED));
    assert_eq!(judged(7, Section::Checkpoint, false), Verdict::Fine, "it goes on");
    assert_eq!(judged(8, Section::Step(1), true), Verdict::Fine);
    let Verdict::Hangs(hang) = judged(10, Section::Step(1), true) else { panic!("it hangs") };
    assert_eq!((hang.still, hang.limit), (SECOND * 2, SECOND), "who may take less isn't given more");
}

#[test]
fn who_is_stopped_is_not_waited_for_for_long() {
    let (start, limits) = (Instant::now(), "100".parse().unwrap());
    let sections = [Section::Start, Section::Step(7), Section::Evaluation, Section::Checkpoint];
    for look in sections.into_iter().flat_map(|section| [waiting(section, 1), look(section, 1)]) {
        let mut standing = Standing::new(look, start);
        let mut judged = |ms: u64, is_stopped| {
            let now = start + Duration::from_millis(ms);
            standing.see_stopped(is_stopped, now);
            standing.see(look, now);
            judge(now, &[(Rank(0), &standing)], &limits)
        };
        for (ms, is_stopped) in [(4000, false), (5000, true), (6000, false), (7000, true), (8500, true)] {
            assert_eq!(judged(ms, is_stopped), Verdict::Fine, "{ms}");
        }
        let Verdict::Hangs(hang) = judged(8501, true) else { panic!("it hangs") };
        assert_eq!((hang.still, hang.limit), (Duration::from_millis(1501), STOPPED));
        // Who looks was stopped as well, and both go on.
        assert_eq!(judged(20_000, true), Verdict::Fine);
    }
    let mut standing = Standing::new(look(Section::Start, 1), start);
    standing.see_stopped(true, start);
    let judged = judge(start + SECOND * 50, &[(Rank(0), &standing)], &"start=off".parse().unwrap());
    assert_eq!(judged, Verdict::Fine);
}

#[test]
fn who_is_stopped_does_not_do_what_it_likes() {
    let (start, limits) = (Instant::now(), "100".parse().unwrap());
    let judged = |free: Look, is_stopped: bool| {
        let mut standing = Standing::new(free, start);
        standing.see_stopped(is_stopped, start + SECOND * 2);
        [3, 4].map(|second| judge(start + SECOND * second, &[(Rank(0), &standing)], &limits))
    };
    let [fine, hangs] = judged(look(Section::Free, 1), true);
    assert_eq!(fine, Verdict::Fine);
    let Verdict::Hangs(hang) = hangs else { panic!("it hangs") };
    assert_eq!(hang.why(), "no progress in what it likes for 2.0 s, limit 1.5 s");
    assert_eq!(judged(look(Section::Free, 1), false)[1], Verdict::Fine);
    // A program that isn't ours says nothing.
    assert_eq!(judged(look(Section::Free, 0), true)[1], Verdict::Fine);
}

#[test]
fn who_has_waited_has_its_time_from_then_on() {
    let step = Section::Step(3);
    let after = Look { waits: 1, ..look(step, 1) };
    let mut rows = vec![vec![waiting(step, 1)]; 100];
    rows.extend(vec![vec![after]; 6]);
    assert!(verdicts("5", &rows).iter().all(|verdict| !matches!(verdict, Verdict::Hangs(_))));
    rows.push(vec![after]);
    assert!(matches!(verdicts("5", &rows).last(), Some(Verdict::Hangs(hang)) if hang.still == SECOND * 6));
}

#[test]
fn steps_that_take_long_make_the_usual_limit_longer() {
    let limits = HangLimits::default();
    let start = Instant::now();
    let mut standing = Standing::new(look(Section::Step(0), 1), start);
    let limit = |standing: &Standing| standing.limit(&limits).unwrap().as_secs();
    assert_eq!(limit(&standing), 600, "nobody knows yet how long a step takes");
    standing.see(look(Section::Step(1), 2), start + SECOND / 2);
    assert_eq!(limit(&standing), 60);
    standing.see(look(Section::Step(2), 3), start + SECOND / 2 + SECOND * 4);
    assert_eq!(limit(&standing), 200);
    standing.see(look(Section::Evaluation, 4), start + SECOND * 5);
    assert_eq!(limit(&standing), 600);
}

#[test]
fn a_launcher_that_was_stopped_itself_begins_anew() {
    let (start, limits) = (Instant::now(), "3".parse().unwrap());
    let step = look(Section::Step(0), 1);
    let mut standing = Standing::new(step, start);
    let late = start + SECOND * 100;
    standing.see(step, late);
    assert_eq!(judge(late, &[(Rank(0), &standing)], &limits), Verdict::Fine);
    standing.see(step, late + SECOND * 4);
    assert!(matches!(judge(late + SECOND * 4, &[(Rank(0), &standing)], &limits), Verdict::Hangs(_)));
}

fn any_look() -> impl Strategy<Value = Look> {
    let section = prop_oneof![
        Just(Section::Free),
        Just(Section::Start),
        (0..2u64).prop_map(Section::Step),
        Just(Section::Evaluation),
        Just(Section::Checkpoint),
    ];
    (section, 0..2u64, 0..2u64, any::<bool>()).prop_map(|(section, entered, waits, is_waiting)| Look {
        section,
        entered,
        steps: 0,
        waits,
        is_waiting,
    })
}

proptest! {
    /// Whatever workers do: who is blamed does something that has a limit, doesn't wait, and has shown the same for as long as
    /// it says, which is longer than the limit; and where all are said to wait, all do.
    #[test]
    fn nobody_is_blamed_without_a_reason(
        steps in proptest::collection::vec((proptest::collection::vec(any_look(), 3), 1..9usize), 1..12),
    ) {
        let rows: Vec<Vec<Look>> = steps.iter().flat_map(|(looks, times)| vec![looks.clone(); *times]).collect();
        for (at, verdict) in verdicts("start=2,step=4,evaluation=off,checkpoint=6", &rows).into_iter().enumerate() {
            let limit = |section| match section {
                Section::Start => 2,
                Section::Step(_) => 4,
                Section::Checkpoint => 6,
                Section::Free | Section::Evaluation => usize::MAX,
            };
            // For how many seconds each looks as it does now.
            let still = |i: usize| rows[..=at].iter().rev().take_while(|row| row[i] == rows[at][i]).count() - 1;
            let hangs = |i: usize| !rows[at][i].is_waiting && still(i) > limit(rows[at][i].section);
            match verdict {
                Verdict::Hangs(hang) => {
                    prop_assert!(hangs(hang.rank.index()));
                    prop_assert_eq!(hang.still.as_secs(), still(hang.rank.index()) as u64);
                }
                Verdict::AllWait(_) => prop_assert!(rows[at].iter().all(|look| look.is_waiting)),
                Verdict::Fine => prop_assert!(!(0..3).any(hangs)),
            }
        }
    }
}
