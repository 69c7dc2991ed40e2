//! Optimizers against the engine's, bit by bit.

use crate::program::{Arg, launch, there_is_a_compiler};
use crate::values::{encode, floats, random, room};
use phalanx_cuda::{Element, Work};
use phalanx_nn::optim::{Adadelta, Adam, AdamW, Clip, Optimizer, RmsProp, Rule, Sgd};
use phalanx_tensor::{Arena, DType, Device, Layout};

const STEPS: i32 = 3;
/// What the loss was multiplied by, so what a step takes out of the gradients.
const LOSS_SCALE: f64 = 1024.0;

/// A step as it lies in device memory, `Step` in the source: the element that it ends before, and its numbers.
fn step_of(end: usize, settings: [f32; 9]) -> Vec<u8> {
    let mut bytes = (end as i64).to_ne_bytes().to_vec();
    bytes.extend(settings.iter().flat_map(|number| number.to_ne_bytes()));
    bytes.extend([0; 4]);
    bytes
}

/// The numbers of each step.
fn settings(rule: &Rule, step: i32) -> [f32; 9] {
    let pair = |keep: f64| [keep as f32, (1.0 - keep) as f32];
    let decay;
    let (mut lr, mut root) = (rule.lr(), 1.0);
    let (mut first, mut second, mut eps) = ([0.0; 2], [0.0; 2], 0.0);
    match rule {
        Rule::Sgd(r) => {
            decay = r.weight_decay;
            first = [r.momentum as f32, if step == 1 { 1.0 } else { (1.0 - r.dampening) as f32 }];
        }
        Rule::Adam(Adam { betas, eps: e, weight_decay, .. })
        | Rule::AdamW(AdamW { betas, eps: e, weight_decay, .. }) => {
            decay = if matches!(rule, Rule::AdamW(_)) { 1.0 - lr * weight_decay } else { *weight_decay };
            (first, second, eps) = (pair(betas.0), pair(betas.1), *e);
            root = (1.0 - betas.1.powi(step)).sqrt();
            // Rounded before and after, as the engine's rate is.
            lr = f64::from(lr as f32 / (1.0 - betas.0.powi(step)) as f32);
        }
        Rule::Adadelta(r) => (decay, second, eps) = (r.weight_decay, pair(r.rho), r.eps),
        Rule::RmsProp(r) => {
            (decay, first, second, eps) = (r.weight_decay, [r.momentum as f32, 0.0], pair(r.alpha), r.eps);
        }
    }
    let inverse_scale = (1.0 / LOSS_SCALE) as f32;
    [
        inverse_scale,
        lr as f32,
        decay as f32,
        first[0],
        first[1],
        second[0],
        second[1],
        root as f32,
        eps as f32,
    ]
}

/// The kernel of a rule, and for each of its states the number of the engine's array, if it is kept.
fn kernel(rule: &Rule) -> (&'static str, Vec<Option<usize>>) {
    match rule {
        Rule::Sgd(r) if r.momentum == 0.0 => ("sgd", vec![]),
        Rule::Sgd(r) => (if r.nesterov { "sgd_nesterov" } else { "sgd_momentum" }, vec![Some(0)]),
        Rule::Adam(_) => ("adam", vec![Some(0), Some(1)]),
        Rule::AdamW(_) => ("adamw", vec![Some(0), Some(1)]),
        Rule::Adadelta(_) => ("adadelta", vec![Some(0), Some(1)]),
        Rule::RmsProp(r) => {
            let momentum = (r.momentum > 0.0).then_some(1);
            ("rmsprop", vec![Some(0), momentum, r.centered.then_some(if momentum.is_some() { 2 } else { 1 })])
        }
    }
}

fn rules() -> Vec<Rule> {
    let rmsprop = RmsProp { weight_decay: 0.01, ..RmsProp::default() };
    vec![
        Sgd { weight_decay: 0.01, ..Sgd::new(0.1) }.into(),
        Sgd { momentum: 0.9, dampening: 0.1, weight_decay: 0.01, ..Sgd::new(0.1) }.into(),
        Sgd { momentum: 0.9, nesterov: true, weight_decay: 0.01, ..Sgd::new(0.1) }.into(),
        Adam { weight_decay: 0.01, ..Adam::default() }.into(),
        AdamW::default().into(),
        Adadelta { weight_decay: 0.01, ..Adadelta::default() }.into(),
        rmsprop.into(),
        RmsProp { momentum: 0.9, ..rmsprop }.into(),
        RmsProp { centered: true, ..rmsprop }.into(),
        RmsProp { momentum: 0.9, centered: true, ..rmsprop }.into(),
    ]
}

/// What of a step only a GPU knows.
#[derive(Default)]
struct Terms<'a> {
    /// The norm of the gradients, and its limit.
    norm: Option<(f64, f64)>,
    /// The loss that the step comes behind, and what was kept of those before.
    behind: Option<(f32, &'a mut i64)>,
}

/// Values and states of a rule in device memory.
struct Slices {
    element: Element,
    values: Vec<u8>,
    copy: Vec<u8>,
    states: Vec<Option<Vec<u8>>>,
}

impl Slices {
    fn step(&mut self, rule: &Rule, step: i32, grads: &[u8]) {
        let all = step_of(self.values.len() / 4, settings(rule, step));
        self.move_by(rule, &all, grads, Terms::default());
    }

    /// Moves the values by these steps, one after the other from element to element.
    fn move_by(&mut self, rule: &Rule, steps: &[u8], grads: &[u8], Terms { norm, behind }: Terms<'_>) {
        let n = self.values.len() / 4;
        let (of_grads, limit) = norm.unzip();
        let of_grads = of_grads.map(f64::to_ne_bytes);
        let (mut loss, mut spoilt) = ([0; 4], [0; 8]);
        let is_behind = behind.is_some();
        if let Some((of, kept)) = &behind {
            (loss, spoilt) = (of.to_ne_bytes(), kept.to_ne_bytes());
        }
        let mut args = vec![Arg::Out(&mut self.values), Arg::In(grads), Arg::Out(&mut self.copy)];
        args.extend(
            self.states.iter_mut().map(|state| state.as_mut().map_or(Arg::Null, |state| Arg::Out(state))),
        );
        args.push(Arg::In(steps));
        args.push(of_grads.as_ref().map_or(Arg::Null, |norm| Arg::In(norm)));
        args.push(Arg::Double(limit.unwrap_or(0.0)));
        args.push(if is_behind { Arg::In(&loss) } else { Arg::Null });
        args.push(if is_behind { Arg::Out(&mut spoilt) } else { Arg::Null });
        args.push(Arg::Int(n as i64));
        launch(kernel(rule).0, self.element, Work::Elements(n as u64), &mut args);
        if let Some((_, kept)) = behind {
            *kept = i64::from_ne_bytes(spoilt);
        }
    }
}

#[test]
fn steps_are_the_engines_bit_by_bit() {
    if !there_is_a_compiler() {
        return;
    }
    for element in Element::ALL {
        for rule in rules() {
            for n in [1, 257, 1999] {
                let start = random(Element::F32, n, -1.0, 1.0, 1);
                let mut values: Vec<f32> = start.iter().map(|&x| x as f32).collect();
                let states = kernel(&rule).1.into_iter().map(|state| state.map(|_| vec![0; 4 * n]));
                let mut slices = Slices {
                    element,
                    values: encode(Element::F32, &start),
                    copy: room(element, n),
                    states: states.collect(),
                };
                let mut optimizer = Optimizer::new(rule).unwrap();
                for step in 1..=STEPS {
                    let grads = random(Element::F32, n, -1.0, 1.0, 10 + step as u64);
                    let scaled: Vec<f64> = grads.iter().map(|g| g * LOSS_SCALE).collect();
                    slices.step(&rule, step, &encode(Element::F32, &scaled));
                    let grads: Vec<f32> = grads.iter().map(|&g| g as f32).collect();
                    optimizer.step(&mut values, &grads, 1.0);
                    assert!(
                        floats(&slices.values) == values,
                        "{rule:?} for {element:?}, step {step} of {n} values"
                    );
                    let rounded: Vec<f64> = values.iter().map(|&x| f64::from(x)).collect();
                    assert!(slices.copy == encode(element, &rounded), "{rule:?}: the copy for {element:?}");
                }
                let kept: Vec<_> = optimizer.state().collect();
                for (state, number) in slices.states.iter().zip(kernel(&rule).1) {
                    let Some(number) = number else { continue };
                    let (name, shadow) = kept[number];
                    let same = shadow.with(|numbers| floats(state.as_ref().unwrap()) == numbers);
                    assert!(same, "{rule:?} for {element:?}: {name}");
                }
            }
        }
    }
}

/// One launch for several groups is a launch for each.
#[test]
fn groups_of_values_are_moved_by_steps_of_their_own() {
    if !there_is_a_compiler() {
        return;
    }
    // One that is shorter than a warp, one that is longer than a grid, an empty one, and the rest.
    let (ends, n) = ([3, 1303, 1303, 1999], 1999);
    for (rule, element) in rules().into_iter().zip(Element::ALL.into_iter().cycle()) {
        let start = random(Element::F32, n, -1.0, 1.0, 1);
        let grads = random(Element::F32, n, -1.0, 1.0, 2);
        let slices_of = |range: std::ops::Range<usize>| Slices {
            element,
            values: encode(Element::F32, &start[range.clone()]),
            copy: room(element, range.len()),
            states: kernel(&rule)
                .1
                .into_iter()
                .map(|state| state.map(|_| encode(Element::F32, &vec![0.5; range.len()])))
                .collect(),
        };
        let numbers = |group: usize| {
            let mut numbers = settings(&rule, 1);
            numbers[1] *= 1.0 + group as f32;
            numbers
        };
        let mut all = slices_of(0..n);
        let steps = ends.iter().enumerate().flat_map(|(group, &end)| step_of(end, numbers(group)));
        all.move_by(&rule, &steps.collect::<Vec<_>>(), &encode(Element::F32, &grads), Terms::default());
        let mut begin = 0;
        for (group, end) in ends.into_iter().enumerate().filter(|(_, end)| *end > 0) {
            let range = std::mem::replace(&mut begin, end)..end;
            let mut part = slices_of(range.clone());
            let own = step_of(range.len(), numbers(group));
            part.move_by(&rule, &own, &encode(Element::F32, &grads[range.clone()]), Terms::default());
            let bytes = 4 * range.start..4 * range.end;
            assert!(part.values == all.values[bytes.clone()], "{rule:?}, group {group}");
            let size = room(element, 1).len();
            assert!(part.copy == all.copy[size * range.start..size * range.end], "{rule:?}, group {group}");
            for (part, all) in part.states.iter().zip(&all.states) {
                assert_eq!(part.as_deref(), all.as_ref().map(|all| &all[bytes.clone()]), "{rule:?}, {group}");
            }
        }
    }
}

#[test]
fn behind_a_loss_that_is_no_number_no_step_changes_anything() {
    if !there_is_a_compiler() {
        return;
    }
    // More than one block of each kernel, so that one finds what another has written.
    const N: usize = 3000;
    for (rule, bad) in
        rules().into_iter().zip([f32::NAN, f32::INFINITY, f32::NEG_INFINITY].into_iter().cycle())
    {
        let start = random(Element::F32, N, -1.0, 1.0, 1);
        let states =
            kernel(&rule).1.into_iter().map(|state| state.map(|_| encode(Element::F32, &vec![0.5; N])));
        let mut slices = Slices {
            element: Element::F16,
            values: encode(Element::F32, &start),
            copy: room(Element::F16, N),
            states: states.collect(),
        };
        let all = |slices: &Slices| (slices.values.clone(), slices.copy.clone(), slices.states.clone());
        let (step, grads) = (step_of(N, settings(&rule, 2)), encode(Element::F32, &vec![512.0; N]));
        let before = all(&slices);
        let mut spoilt = 0;
        slices.move_by(&rule, &step, &grads, Terms { norm: None, behind: Some((0.25, &mut spoilt)) });
        let moved = all(&slices);
        assert!(before.0 != moved.0 && before.1 != moved.1 && spoilt == 0, "{rule:?}");
        // The loss or the norm, and then neither.
        for (loss, of_grads) in [(bad, 1.0), (0.25, f64::from(bad).abs())] {
            spoilt = 0;
            for (loss, of_grads) in [(loss, of_grads), (0.25, 1.0)] {
                let terms = Terms { norm: Some((of_grads, 0.5)), behind: Some((loss, &mut spoilt)) };
                slices.move_by(&rule, &step, &grads, terms);
                let what = format!("{rule:?}: {loss} and {of_grads} behind {bad}");
                assert!(all(&slices) == moved && spoilt == 1, "{what}");
            }
        }
    }
}

#[test]
fn gradients_that_are_too_large_together_are_cut_as_the_engine_cuts_them_bit_by_bit() {
    if !there_is_a_compiler() {
        return;
    }
    const N: usize = 1999;
    for (rule, element) in rules().into_iter().zip(Element::ALL.into_iter().cycle()) {
        let start = random(Element::F32, N, -1.0, 1.0, 1);
        let grads = random(Element::F32, N, -1.0, 1.0, 2);
        let scaled = encode(Element::F32, &grads.iter().map(|g| g * LOSS_SCALE).collect::<Vec<_>>());
        let grads: Vec<f32> = grads.iter().map(|&g| g as f32).collect();
        // One that cuts, one that doesn't, and what has no finite norm, which isn't cut.
        for (limit, of_grads) in [(0.5, None), (1e3, None), (0.5, Some(f64::NAN)), (0.5, Some(f64::INFINITY))]
        {
            let states =
                kernel(&rule).1.into_iter().map(|state| state.map(|_| encode(Element::F32, &[0.0; N])));
            let mut slices = Slices {
                element,
                values: encode(Element::F32, &start),
                copy: room(element, N),
                states: states.collect(),
            };
            let mut values: Vec<f32> = start.iter().map(|&x| x as f32).collect();
            let mut cut = grads.clone();
            let norm = Clip { norm: Some(limit), value: None }.apply(&mut cut).unwrap();
            assert_eq!(cut != grads, limit < norm);
            let want = if of_grads.is_some() { &grads } else { &cut };
            Optimizer::new(rule).unwrap().step(&mut values, want, 1.0);
            let terms = Terms { norm: Some((of_grads.unwrap_or(norm), limit)), behind: None };
            slices.move_by(&rule, &step_of(N, settings(&rule, 1)), &scaled, terms);
            assert!(
                floats(&slices.values) == values,
                "{rule:?}, {element:?}: {norm} of {limit}, {of_grads:?}"
            );
        }
    }
}

#[test]
fn a_running_mean_follows_as_the_engines_does_bit_by_bit() {
    if !there_is_a_compiler() {
        return;
    }
    for n in [1, 257, 1999] {
        let (start, now) = (random(Element::F32, n, -1.0, 1.0, 1), random(Element::F32, n, -1.0, 1.0, 2));
        let [start, now] = [start, now].map(|values| values.iter().map(|&x| x as f32).collect::<Vec<_>>());
        let mut mean: Vec<u8> = bytemuck::cast_slice(&start).to_vec();
        launch(
            "follow",
            Element::F32,
            Work::Elements(n as u64),
            &mut [
                Arg::Out(&mut mean),
                Arg::In(bytemuck::cast_slice(&now)),
                Arg::Float(0.3),
                Arg::Int(n as i64),
            ],
        );
        let device = Device::cpu(1);
        let of = |values: &[f32]| {
            let arena = Arena::new(&device, DType::F32, &Layout::new(&[[n].into()]));
            arena.write_flat(values);
            arena
        };
        let want = of(&start);
        want.follow(&of(&now), 0.3);
        assert!(floats(&mean) == want.tensor(0).to_vec::<f32>(), "{n}");
    }
}
