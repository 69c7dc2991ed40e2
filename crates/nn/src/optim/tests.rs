//! Each rule against PyTorch, whose figures `tests/golden/optimizers.py` made.

use super::*;
use crate::{Linear, Parameters};
use phalanx_tensor::Device;

/// Rounding of float32 over six steps, relative to values of about 1.
const TOLERANCE: f32 = 2e-6;

fn check(name: &str, rule: impl Into<Rule>) {
    let golden: serde_json::Value =
        serde_json::from_str(include_str!("../../tests/golden/optimizers.json")).unwrap();
    let mut optimizer = Optimizer::new(rule).unwrap();
    let mut values = [0.5f32, -1.0, 2.0, 0.0];
    for (step, want) in golden[name].as_array().unwrap().iter().enumerate() {
        let push = [0.1f32, -0.2, 0.3, 0.4].map(|g| g * (step + 1) as f32);
        let grads: Vec<f32> = values.iter().zip(push).map(|(v, g)| v * 0.5 + g).collect();
        optimizer.step(&mut values, &grads, 1.0);
        for (got, want) in values.iter().zip(want.as_array().unwrap()) {
            let want = want.as_f64().unwrap() as f32;
            assert!(
                (got - want).abs() <= TOLERANCE * want.abs().max(1.0),
                "{name}, step {step}: {got}, PyTorch {want}"
            );
        }
    }
}

#[test]
fn rules_step_as_pytorch_does() {
    check("sgd", Sgd::new(0.1));
    check("sgd_decay", Sgd { weight_decay: 0.1, ..Sgd::new(0.1) });
    check("sgd_momentum", Sgd { momentum: 0.9, dampening: 0.2, weight_decay: 0.01, ..Sgd::new(0.1) });
    check("sgd_nesterov", Sgd { momentum: 0.9, nesterov: true, ..Sgd::new(0.1) });
    check("adam", Adam { lr: 0.01, betas: (0.8, 0.95), eps: 1e-6, weight_decay: 0.1 });
    check("adamw", AdamW { lr: 0.01, ..AdamW::default() });
    check("adadelta", Adadelta { weight_decay: 0.01, ..Adadelta::default() });
    check("rmsprop", RmsProp::default());
    check("rmsprop_all", RmsProp { momentum: 0.9, centered: true, weight_decay: 0.1, ..RmsProp::default() });
}

/// Three ranges and a bit: a weight, a bias without weight decay, and a second layer that is slow.
fn check_groups(name: &str, rule: impl Into<Rule>) {
    let golden: serde_json::Value =
        serde_json::from_str(include_str!("../../tests/golden/groups.json")).unwrap();
    let mut net = crate::Sequential::new().then(Linear::new(2, 2)).then(Linear::new(2, 1));
    let parameters = Parameters::build(&mut net, &Device::cpu(1), 0);
    let start: [&[f32]; 4] = [&[0.5, -1.0, 2.0, 0.0], &[1.0, -2.0], &[0.25, 1.5], &[3.0]];
    for (i, start) in start.into_iter().enumerate() {
        parameters.value(i).with_slice_mut(|values: &mut [f32]| values.copy_from_slice(start));
    }
    let mut optimizer = Optimizer::new(rule).unwrap();
    let second = Group { of: Members::Named("1.*".into()), lr: 0.1, weight_decay: 1.0 };
    let biases = Group { of: Members::NormsAndBiases, lr: 1.0, weight_decay: 0.0 };
    optimizer.group(&[second, biases], &parameters).unwrap();
    for (step, want) in golden[name].as_array().unwrap().iter().enumerate() {
        let mut grads = vec![0.0; parameters.layout().len()];
        for i in 0..4 {
            let push = [0.1f32, -0.2, 0.3, 0.4].map(|g| g * (step + 1) as f32);
            let values = parameters.value(i).to_vec::<f32>();
            for (grad, (v, g)) in grads[parameters.layout().range(i)].iter_mut().zip(values.iter().zip(push))
            {
                *grad = v * 0.5 + g;
            }
        }
        optimizer.step(&mut parameters.values().flat_mut::<f32>(), &grads, 1.0);
        for (i, parameter) in parameters.names().iter().enumerate() {
            let want = want[parameter].as_array().unwrap().iter().map(|x| x.as_f64().unwrap() as f32);
            for (got, want) in parameters.value(i).to_vec::<f32>().into_iter().zip(want) {
                assert!(
                    (got - want).abs() <= TOLERANCE * want.abs().max(1.0),
                    "{name}, step {step}, {parameter}: {got}, PyTorch {want}"
                );
            }
        }
    }
}

#[test]
fn groups_step_as_pytorchs_do() {
    check_groups("sgd", Sgd { momentum: 0.9, weight_decay: 0.1, ..Sgd::new(0.1) });
    check_groups("adam", Adam { lr: 0.01, weight_decay: 0.1, ..Adam::default() });
    check_groups("adamw", AdamW { lr: 0.01, weight_decay: 0.1, ..AdamW::default() });
    check_groups("adadelta", Adadelta { weight_decay: 0.1, ..Adadelta::default() });
    check_groups("rmsprop", RmsProp { momentum: 0.9, weight_decay: 0.1, ..RmsProp::default() });
}

#[test]
fn a_state_that_is_held_stays_as_it_is() {
    let mut optimizer = Optimizer::new(Sgd { momentum: 0.5, ..Sgd::new(0.1) }).unwrap();
    optimizer.step(&mut [0.0], &[1.0], 1.0);
    let first = |shadow: &Shadow| shadow.with(|numbers| numbers[0]);
    let held = optimizer.state().next().unwrap().1.clone();
    optimizer.step(&mut [0.0], &[1.0], 1.0);
    assert_eq!((first(&held), first(optimizer.state().next().unwrap().1)), (1.0, 1.5));
}

#[test]
fn what_is_left_of_one_is_told_in_double_precision() {
    let state = |rule: Rule, grads: &[f32]| {
        let mut optimizer = Optimizer::new(rule).unwrap();
        grads.iter().for_each(|&g| optimizer.step(&mut [0.0], &[g], 1.0));
        optimizer.state().next().unwrap().1.with(|numbers| numbers[0])
    };
    // 1 - 0.9 in single precision is 0.100000024.
    assert_eq!(state(Adadelta { rho: 0.9, ..Adadelta::default() }.into(), &[1.0]), 0.1);
    assert_eq!(state(RmsProp { alpha: 0.9, ..RmsProp::default() }.into(), &[1.0]), 0.1);
    let sgd = Sgd { momentum: 0.5, dampening: 0.9, ..Sgd::new(0.1) };
    assert_eq!(state(sgd.into(), &[0.0, 1.0]), 0.1);
}

#[test]
fn more_steps_than_an_i32_counts_are_steps_like_others() {
    for rule in [Adam::default().into(), Rule::from(AdamW::default())] {
        let mut optimizer = Optimizer::new(rule).unwrap();
        let mut values = [1.0];
        optimizer.step(&mut values, &[1.0], 1.0);
        optimizer.steps = 3_000_000_000;
        optimizer.step(&mut values, &[1.0], 1.0);
        assert!(values[0].is_finite() && values[0] < 1.0, "{rule:?}: {values:?}");
    }
}

#[test]
fn no_rule_keeps_more_arrays_than_a_step_has_room_for() {
    let most = RmsProp { momentum: 0.9, centered: true, ..RmsProp::default() };
    assert_eq!(Rule::from(most).state_names().len(), MAX_STATES);
    assert!(rules().iter().all(|rule| rule.state_names().len() <= MAX_STATES));
}

/// Every rule, with each of its states in use.
fn rules() -> [Rule; 7] {
    [
        Sgd { weight_decay: 0.1, ..Sgd::new(0.1) }.into(),
        Sgd { momentum: 0.9, dampening: 0.2, ..Sgd::new(0.1) }.into(),
        Adam { weight_decay: 0.1, ..Adam::default() }.into(),
        AdamW::default().into(),
        Adadelta::default().into(),
        RmsProp { momentum: 0.9, ..RmsProp::default() }.into(),
        RmsProp { centered: true, ..RmsProp::default() }.into(),
    ]
}

/// Gradients that depend on the element and the step.
fn push(values: &[f32], step: usize) -> Vec<f32> {
    values.iter().enumerate().map(|(i, v)| v * 0.3 + ((i * 7 + step * 3) % 11) as f32 * 0.1 - 0.5).collect()
}

#[test]
fn a_shard_is_only_a_shorter_slice() {
    // 37 elements leave a rest whatever the width of a vector is.
    let start: Vec<f32> = (0..37).map(|i| i as f32 * 0.1 - 1.5).collect();
    for rule in rules() {
        let mut whole = start.clone();
        let mut optimizer = Optimizer::new(rule).unwrap();
        let mut parts: Vec<(Vec<f32>, Optimizer)> =
            [0..5, 5..6, 6..37].map(|range| (start[range].to_vec(), Optimizer::new(rule).unwrap())).into();
        for step in 0..4 {
            let grads = push(&whole, step);
            let mut at = 0;
            for (values, optimizer) in &mut parts {
                let end = at + values.len();
                optimizer.step(values, &grads[at..end], 0.5);
                at = end;
            }
            optimizer.step(&mut whole, &grads, 0.5);
        }
        let joined: Vec<f32> = parts.into_iter().flat_map(|(values, _)| values).collect();
        assert_eq!(joined, whole, "{rule:?}");
        assert!(whole.iter().zip(&start).all(|(now, then)| now != then && now.is_finite()), "{rule:?}");
    }
}

#[test]
fn a_resumed_run_takes_the_steps_that_the_whole_run_takes() {
    for rule in rules() {
        // After no step there is no state, after one the first step must not be taken for the first again.
        for saved_after in [0, 1, 3] {
            let parameters = Parameters::build(&mut Linear::new(3, 5), &Device::cpu(1), 0);
            let step = |optimizer: &mut Optimizer, step| {
                let mut values = parameters.values().flat_mut::<f32>();
                let grads = push(&values, step);
                optimizer.step(&mut values, &grads, 1.0);
            };
            let mut optimizer = Optimizer::new(rule).unwrap();
            (0..saved_after).for_each(|s| step(&mut optimizer, s));
            let (state, values) = (optimizer.to_weights(&parameters), parameters.to_weights());
            (saved_after..6).for_each(|s| step(&mut optimizer, s));
            let whole = parameters.to_weights();

            parameters.load(&values).unwrap();
            let mut resumed = Optimizer::resume(rule, &parameters, &state).unwrap();
            assert_eq!(resumed.steps(), saved_after as u64);
            (saved_after..6).for_each(|s| step(&mut resumed, s));
            assert_eq!(parameters.to_weights(), whole, "{rule:?} after {saved_after}");
            assert_eq!(resumed.to_weights(&parameters), optimizer.to_weights(&parameters));
        }
    }
}

#[test]
fn a_state_of_another_rule_or_model_is_refused_and_named() {
    let parameters = Parameters::build(&mut Linear::new(3, 5), &Device::cpu(1), 0);
    let mut optimizer = Optimizer::new(Adam::default()).unwrap();
    let grads = vec![1.0; parameters.layout().len()];
    optimizer.step(&mut parameters.values().flat_mut::<f32>(), &grads, 1.0);
    let state = optimizer.to_weights(&parameters);
    let refused = |rule: Rule, parameters: &Parameters, state: &crate::Weights| {
        Optimizer::resume(rule, parameters, state).err().unwrap().to_string()
    };
    let message = refused(Adadelta::default().into(), &parameters, &state);
    assert!(message.contains("square_avg") && message.contains("missing: weight.square_avg"), "{message}");
    let other = Parameters::build(&mut Linear::new(3, 4), &Device::cpu(1), 0);
    let message = refused(Adam::default().into(), &other, &state);
    assert!(message.contains("weight.exp_avg is [5, 3] in the file and [4, 3] in the model"), "{message}");
    let message = refused(Adam::default().into(), &parameters, &parameters.to_weights());
    assert!(message.contains("no count of steps"), "{message}");
}

#[test]
fn a_value_that_makes_no_sense_is_named() {
    let error = |rule: Rule| Optimizer::new(rule).err().unwrap().to_string();
    assert_eq!(error(Sgd::new(-1.0).into()), "optimizer.lr is -1: must be a number of at least 0");
    assert_eq!(
        error(Adam { betas: (0.9, 1.0), ..Adam::default() }.into()),
        "optimizer.betas is 1: must be in [0, 1)"
    );
    assert!(error(Sgd { nesterov: true, ..Sgd::new(0.1) }.into()).contains("momentum"));
    assert!(error(Sgd { dampening: f64::NAN, ..Sgd::new(0.1) }.into()).contains("dampening is NaN"));
    assert!(error(RmsProp { alpha: 1.5, ..RmsProp::default() }.into()).contains("alpha is 1.5"));
    assert!(error(AdamW { weight_decay: -0.1, ..AdamW::default() }.into()).contains("weight_decay is -0.1"));
    assert!(error(Adadelta { lr: f64::NAN, ..Adadelta::default() }.into()).contains("lr is NaN"));
}

#[test]
fn threads_share_a_step_and_change_nothing() {
    let values: Vec<f32> = (0..3 * super::PIECE + 5).map(|i| (i % 17) as f32 - 8.0).collect();
    let grads: Vec<f32> = values.iter().map(|v| v * 0.3 - 1.0).collect();
    let rules: [Rule; 3] = [
        Sgd::new(0.1).into(),
        Adam::default().into(),
        RmsProp { momentum: 0.9, centered: true, ..RmsProp::default() }.into(),
    ];
    for rule in rules {
        let (mut alone, mut shared) = (values.clone(), values.clone());
        let (mut one, mut many) = (Optimizer::new(rule).unwrap(), Optimizer::new(rule).unwrap());
        for _ in 0..3 {
            one.step(&mut alone, &grads, 0.5);
            many.step_on(&phalanx_tensor::Device::cpu(3), &mut shared, &grads, 0.5);
        }
        assert_eq!(alone, shared, "{rule:?}");
        let state = |optimizer: &Optimizer| -> Vec<Vec<f32>> {
            optimizer.state().map(|(_, shadow)| shadow.with(<[f32]>::to_vec)).collect()
        };
        assert_eq!(state(&one), state(&many));
    }
}

#[test]
fn room_made_before_changes_nothing_and_is_used_where_it_fits() {
    let (values, grads) = (vec![1.0f32; 3000], vec![0.5f32; 3000]);
    let after = |room: Option<usize>| {
        let mut optimizer = Optimizer::new(Adam::default()).unwrap();
        room.into_iter().for_each(|len| optimizer.make_room(len));
        let mut values = values.clone();
        (0..2).for_each(|_| optimizer.step(&mut values, &grads, 1.0));
        values
    };
    let plain = after(None);
    assert_eq!(after(Some(3000)), plain);
    // That of another model.
    assert_eq!(after(Some(7)), plain);

    let mut optimizer = Optimizer::new(Adam::default()).unwrap();
    optimizer.make_room(3000);
    let taken: Vec<Vec<f32>> = (0..3).map(|_| optimizer.take_room(3000)).collect();
    assert!(taken.iter().all(|array| *array == vec![0.0; 3000]), "two were made, and another one is new");
}

#[test]
fn a_group_without_a_member_in_a_part_is_one_of_the_whole() {
    let whole = Parameters::build(
        &mut crate::Sequential::new().then(Linear::new(2, 2)).then(Linear::new(2, 1)),
        &Device::cpu(1),
        0,
    );
    let part = Parameters::build(&mut crate::Sequential::new().then(Linear::new(2, 2)), &Device::cpu(1), 0);
    let mut optimizer = Optimizer::new(Sgd::new(0.1)).unwrap();
    let groups = [Group { of: Members::Named("1.*".into()), lr: 0.1, weight_decay: 1.0 }];
    optimizer.group_part(&groups, &whole, &part).unwrap();
    let nobody = optimizer.group(&groups, &part).unwrap_err().to_string();
    assert!(nobody.contains("1.*"), "{nobody}");
}

/// As long as a head is learned alone what lies before it grows no older, also in a file.
#[test]
fn what_was_frozen_goes_on_at_its_own_age() {
    let build = |frozen: &[&str]| {
        let mut net = crate::Sequential::new().then(Linear::new(3, 2)).then(Linear::new(2, 1));
        crate::freeze(&mut net, frozen).unwrap();
        Parameters::build(&mut net, &Device::cpu(1), 0)
    };
    let rules: [Rule; 3] = [
        Adam { lr: 0.1, ..Adam::default() }.into(),
        AdamW { lr: 0.1, ..AdamW::default() }.into(),
        Sgd { momentum: 0.9, dampening: 0.5, ..Sgd::new(0.1) }.into(),
    ];
    for rule in rules {
        let (whole, headless) = (build(&[]), build(&["0.*"]));
        let grads: Vec<f32> = (0..whole.layout().len()).map(|i| (i % 7) as f32 - 3.0).collect();
        let step = |optimizer: &mut Optimizer, parameters: &Parameters| {
            optimizer.step(&mut parameters.values().flat_mut::<f32>(), &grads, 1.0);
        };
        let layer = |parameters: &Parameters, i: usize| parameters.value(i).to_vec::<f32>();
        // Freed for two steps, frozen for 100, and free again.
        let mut optimizer = Optimizer::new(rule).unwrap();
        optimizer.group(&[], &whole).unwrap();
        (0..2).for_each(|_| step(&mut optimizer, &whole));
        headless.values().flat_mut::<f32>().copy_from_slice(&whole.values().flat::<f32>());
        optimizer.group(&[], &headless).unwrap();
        (0..100).for_each(|_| step(&mut optimizer, &headless));
        assert_eq!(layer(&headless, 0), layer(&whole, 0), "{rule:?}");
        let saved = optimizer.to_weights(&headless);
        let count = |name: &str| saved.get(name).map(|(_, steps)| steps[0]);
        assert_eq!(["step", "0.weight.step", "1.weight.step"].map(count), [Some(102.0), Some(2.0), None]);
        // Beside one that was never frozen.
        let other = build(&[]);
        let mut always = Optimizer::new(rule).unwrap();
        (0..2).for_each(|_| step(&mut always, &other));
        for is_grouped in [false, true] {
            let mut resumed = Optimizer::resume(rule, &whole, &saved).unwrap();
            if is_grouped {
                resumed.group(&[], &whole).unwrap();
            }
            let (free, want) = (build(&[]), build(&[]));
            free.values().flat_mut::<f32>().copy_from_slice(&headless.values().flat::<f32>());
            want.values().flat_mut::<f32>().copy_from_slice(&other.values().flat::<f32>());
            let mut never_frozen = Optimizer::resume(rule, &want, &always.to_weights(&want)).unwrap();
            for _ in 0..3 {
                step(&mut resumed, &free);
                step(&mut never_frozen, &want);
            }
            for i in 0..2 {
                assert_eq!(layer(&free, i), layer(&want, i), "{rule:?}, parameter {i} of the first layer");
            }
            assert_ne!(layer(&free, 2), layer(&want, 2), "{rule:?}: the head is older");
            assert_eq!(resumed.rested().get("0.bias"), Some(&100));
        }
    }
}

#[test]
fn a_count_of_a_parameter_that_makes_no_sense_is_named() {
    let parameters = Parameters::build(&mut Linear::new(2, 1), &Device::cpu(1), 0);
    let mut optimizer = Optimizer::new(Adam::default()).unwrap();
    let grads = vec![1.0; parameters.layout().len()];
    optimizer.step(&mut parameters.values().flat_mut::<f32>(), &grads, 1.0);
    for steps in [2.0, -1.0, 0.5, f32::NAN] {
        let mut state = optimizer.to_weights(&parameters);
        state.push("bias.step".into(), phalanx_tensor::Shape::new(&[]), &[steps]);
        let error = Optimizer::resume(Adam::default(), &parameters, &state).err().unwrap().to_string();
        assert!(error.starts_with(&format!("bias.step is {steps} in the")), "{error}");
    }
}
