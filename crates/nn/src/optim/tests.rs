//! Each rule against PyTorch, whose figures `tests/golden/optimizers.py` made.

use super::*;

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

#[test]
fn a_value_that_makes_no_sense_is_named() {
    let error = |rule: Rule| Optimizer::new(rule).err().unwrap().to_string();
    assert_eq!(error(Sgd::new(-1.0).into()), "optimizer.lr is -1: must be a number of at least 0");
    assert_eq!(
        error(Adam { betas: (0.9, 1.0), ..Adam::default() }.into()),
        "optimizer.betas is 1: must be in [0, 1)"
    );
    assert!(error(Sgd { nesterov: true, ..Sgd::new(0.1) }.into()).contains("momentum"));
    assert!(error(Adadelta { lr: f64::NAN, ..Adadelta::default() }.into()).contains("lr is NaN"));
}
