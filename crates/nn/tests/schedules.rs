//! Schedules against PyTorch's, whose figures `golden/schedules.py` made.

use phalanx_nn::{Anneal, Curve, Moment, OneCycle, Plateau, Plateaued, Schedule, Unit, Warmup};

/// PyTorch multiplies from step to step where we have a formula: rounding of float64 over twenty steps.
const TOLERANCE: f64 = 1e-13;

fn golden(name: &str) -> Vec<f64> {
    let golden: serde_json::Value = serde_json::from_str(include_str!("golden/schedules.json")).unwrap();
    golden[name]
        .as_array()
        .unwrap_or_else(|| panic!("no {name}"))
        .iter()
        .map(|x| x.as_f64().unwrap())
        .collect()
}

fn close(name: &str, got: &[f64], want: &[f64]) {
    assert_eq!(got.len(), want.len(), "{name}");
    for (i, (got, want)) in got.iter().zip(want).enumerate() {
        assert!((got - want).abs() <= TOLERANCE, "{name}, unit {i}: {got}, PyTorch {want}");
    }
}

/// By epoch PyTorch's unit is an epoch of 7 steps; by step it is a step, of which an epoch has `per_epoch`, and the lengths of
/// the schedule are in epochs all the same.
fn check(name: &str, per_epoch: u64, schedule: impl Fn(f64) -> Schedule) {
    let want = golden(name);
    let units = want.len() as u64;
    let by_epoch = Schedule { by: Unit::Epoch, ..schedule(1.0) };
    let steps = |first: u64| (0..units).map(move |i| 7 * i + first);
    for first in [0, 6] {
        let at = |step| Moment { step, steps_per_epoch: 7, epochs: units };
        close(name, &steps(first).map(|step| by_epoch.factor(at(step))).collect::<Vec<_>>(), &want);
    }
    assert!(units.is_multiple_of(per_epoch), "{name}: {units} steps are whole epochs");
    let by_step = Schedule { by: Unit::Step, ..schedule(1.0 / per_epoch as f64) };
    let at = |step| Moment { step, steps_per_epoch: per_epoch, epochs: units / per_epoch };
    close(name, &(0..units).map(|step| by_step.factor(at(step))).collect::<Vec<_>>(), &want);
}

#[test]
fn factors_are_pytorchs_learning_rates() {
    check("step", 4, |e| Curve::Step { size: 3.0 * e, gamma: 0.5 }.into());
    let multi_step =
        |at: &[f64], e: f64| Curve::MultiStep { milestones: at.iter().map(|m| m * e).collect(), gamma: 0.3 };
    check("multi_step", 4, |e| multi_step(&[2.0, 5.0, 9.0], e).into());
    check("cosine", 4, |_| Curve::Cosine { floor: 0.0, epochs: None }.into());
    check("cosine_floor", 5, |e| Curve::Cosine { floor: 0.05, epochs: Some(9.0 * e) }.into());
    check("linear", 4, |_| Curve::Linear { floor: 0.0, epochs: None }.into());
    check("linear_floor", 5, |e| Curve::Linear { floor: 0.1, epochs: Some(6.0 * e) }.into());
    check("one_cycle", 5, |_| Curve::OneCycle(OneCycle::default()).into());
    check("one_cycle_linear", 3, |e| {
        let epochs = Some(21.0 * e);
        let anneal = Anneal::Linear;
        Curve::OneCycle(OneCycle {
            epochs,
            pct_start: 0.2,
            div_factor: 10.0,
            final_div_factor: 100.0,
            anneal,
        })
        .into()
    });
}

#[test]
fn a_warm_up_goes_before_any_curve() {
    let warm = |epochs, from, curve| Schedule {
        warmup: Warmup { epochs, from, ..Warmup::default() },
        ..Schedule::from(curve)
    };
    check("warm_constant", 4, |e| warm(5.0 * e, 1.0 / 3.0, Curve::Constant));
    check("warm_step", 4, |e| warm(5.0 * e, 1.0 / 3.0, Curve::Step { size: 3.0 * e, gamma: 0.5 }));
    check("warm_inverse_sqrt", 4, |e| warm(3.0 * e, 0.1, Curve::InverseSqrt));
    let milestones = |e: f64| vec![2.0 * e, 5.0 * e];
    check("warm_multi_step", 4, |e| {
        warm(3.0 * e, 0.01, Curve::MultiStep { milestones: milestones(e), gamma: 0.3 })
    });
    check("warm_cosine", 4, |e| warm(2.0 * e, 0.5, Curve::Cosine { floor: 0.1, epochs: None }));
}

#[test]
fn a_plateau_lowers_the_rate_when_pytorchs_does() {
    let check = |name, plateau: Plateau| {
        let mut state = Plateaued::default();
        let rates = golden("losses").into_iter().map(|loss| {
            state = plateau.judge(state, loss);
            state.factor
        });
        close(name, &rates.collect::<Vec<_>>(), &golden(name));
    };
    let usual = Plateau::default();
    check("plateau", Plateau { patience: 1, ..usual });
    check("plateau_cooldown", Plateau { patience: 1, cooldown: 2, gamma: 0.5, ..usual });
    check("plateau_floor", Plateau { patience: 0, gamma: 0.3, floor: 0.05, threshold: 0.01, ..usual });
}

#[test]
fn no_moment_makes_a_factor_that_is_none() {
    let curves = [
        Curve::Constant,
        Curve::Step { size: 0.0, gamma: 0.1 },
        Curve::MultiStep { milestones: vec![], gamma: 0.1 },
        Curve::Cosine { floor: 0.0, epochs: Some(0.0) },
        Curve::Cosine { floor: 0.1, epochs: None },
        Curve::OneCycle(OneCycle::default()),
        Curve::OneCycle(OneCycle { pct_start: 0.0, ..OneCycle::default() }),
    ];
    for curve in curves {
        for warmup in [0.0, 0.4, 50.0] {
            let schedule = Schedule {
                warmup: Warmup { epochs: warmup, from: 0.0, ..Warmup::default() },
                ..curve.clone().into()
            };
            for (steps_per_epoch, epochs) in [(0, 1), (1, 1), (2, 1), (10, 3)] {
                for step in [0, 1, 2, 9, 29, 30, 1000, u64::MAX] {
                    let factor = schedule.factor(Moment { step, steps_per_epoch, epochs });
                    assert!((0.0..=1.0).contains(&factor), "{schedule:?} in step {step}: {factor}");
                }
            }
        }
    }
}

#[test]
fn a_warm_up_may_be_so_many_steps() {
    let of = |by: Unit, warmup: Warmup| {
        let schedule = Schedule { by, warmup, ..Schedule::from(Curve::Linear { floor: 0.0, epochs: None }) };
        let at = |step| Moment { step, steps_per_epoch: 8, epochs: 4 };
        (0..32).map(|step| schedule.factor(at(step))).collect::<Vec<_>>()
    };
    let (steps, epochs) =
        (Warmup { steps: 12, ..Warmup::default() }, Warmup { epochs: 1.5, ..Warmup::default() });
    assert_eq!(of(Unit::Step, steps), of(Unit::Step, epochs));
    let both = Warmup { epochs: 1.0, steps: 4, ..Warmup::default() };
    assert_eq!(of(Unit::Step, both), of(Unit::Step, epochs));
    // Two epochs: the second one isn't over after 12 steps.
    assert_eq!(of(Unit::Epoch, steps), of(Unit::Epoch, Warmup { epochs: 2.0, ..Warmup::default() }));
    let all = of(Unit::Step, steps);
    assert!(all[12] == 1.0 && (all[31] - 0.05).abs() < 1e-12 && all[0] == 1.0 / 3.0);
}
