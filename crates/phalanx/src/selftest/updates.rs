//! The optimizers' rules, limits on gradients and mean weights on a device, against a CPU from the same gradients: to the bit, if the device's
//! divisions and roots are exact, as they are to be.

use super::{Finding, apart, sheltered};
use phalanx_nn::optim::{Adadelta, Adam, AdamW, Clip, Group, Members, Optimizer, RmsProp, Rule, Sgd};
use phalanx_nn::{Average, Linear, Parameters};
use phalanx_tensor::{DType, Device, Philox};

/// What a weight may be off by, of those of about 1: a rounding or two.
const TOLERANCE: f64 = 2.0 * f32::EPSILON as f64;
/// An odd number of weights, of which 16 bytes hold four.
const SIZES: [usize; 2] = [37, 29];
const STEPS: u64 = 4;

pub(super) fn all(device: &Device, tell: &mut dyn FnMut(Finding)) {
    let rules: [(&str, Rule); 8] = [
        ("sgd", Sgd { weight_decay: 0.01, ..Sgd::new(0.1) }.into()),
        ("sgd with momentum", Sgd { momentum: 0.9, dampening: 0.1, ..Sgd::new(0.1) }.into()),
        ("sgd that looks ahead", Sgd { momentum: 0.9, nesterov: true, ..Sgd::new(0.1) }.into()),
        ("adam", Adam { weight_decay: 0.01, ..Adam::default() }.into()),
        ("adamw", AdamW::default().into()),
        ("adadelta", Adadelta { weight_decay: 0.01, ..Adadelta::default() }.into()),
        ("rmsprop", RmsProp::default().into()),
        (
            "rmsprop with momentum, centered",
            RmsProp { momentum: 0.5, centered: true, ..RmsProp::default() }.into(),
        ),
    ];
    for (name, rule) in rules {
        let moved = sheltered(|| [device, &Device::cpu(1)].map(|device| moved(device, rule)));
        let (apart, failure) = match moved {
            Ok([got, want]) => {
                let apart = apart(&got, &want);
                (apart, (apart > TOLERANCE).then(|| format!("a weight or its mean is {apart:.1e} off")))
            }
            Err(words) => (0.0, Some(words)),
        };
        tell(Finding::Operations {
            name: format!("updates by {name}"),
            dtype: DType::F32.to_string(),
            cases: STEPS as usize,
            apart,
            tolerance: TOLERANCE,
            failure,
        });
    }
}

/// The weights and their running means after some steps, two of them with gradients that are cut.
fn moved(device: &Device, rule: Rule) -> Vec<f32> {
    let [inputs, outputs] = SIZES;
    let parameters = Parameters::build(&mut Linear::new(inputs, outputs), device, 3);
    let mut optimizer = Optimizer::new(rule).expect("these settings make sense");
    let undecayed = Group { of: Members::NormsAndBiases, lr: 0.5, weight_decay: 0.0 };
    optimizer.group(&[undecayed], &parameters).expect("a layer has a bias");
    let mut mean = Average::of(&parameters);
    for step in 0..STEPS {
        // Squares that add up alike in any order, so that the norm has the same bits.
        let grads: Vec<f32> = (0..parameters.layout().len() as u64)
            .map(|i| if Philox::new(4, step).unit(i) < 0.5 { 0.5 } else { -0.25 })
            .collect();
        parameters.grads().arena().write_flat(&grads);
        let clip = Clip { norm: (step % 2 == 1).then_some(0.75), value: None };
        clip.apply_to(parameters.grads().arena(), &mut optimizer);
        optimizer.step_arenas(parameters.values(), parameters.grads().arena(), 0.5);
        mean.update(&parameters, 0.9);
    }
    let [weights, means] = [parameters.to_weights(), mean.to_weights(&parameters)];
    let all = [&weights, &means].map(|weights| {
        let names: Vec<&str> = weights.names().collect();
        let values = |name: &str| weights.get(name).expect("it is there").1.to_vec();
        names.into_iter().flat_map(values).collect::<Vec<f32>>()
    });
    all.concat()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rules_that_differ_by_decay_alone_are_told_apart() {
        let [adam, adamw] =
            [moved(&Device::cpu(1), Adam::default().into()), moved(&Device::cpu(1), AdamW::default().into())];
        assert!(apart(&adam, &adamw) > TOLERANCE);
    }
}
