//! GPT-2's decoder against PyTorch's. `golden/gpt.py` made the figures.

mod unit;

use phalanx_nn::models::{Gpt, GptConfig, Head};
use phalanx_nn::optim::{Adam, Optimizer};
use phalanx_nn::{Ctx, Loss, Module, Parameters, Weights};
use phalanx_tensor::{Device, GradSink, LeafId, Tensor, backward};
use unit::unit;

/// Float32 rounding through two blocks, relative to the largest of 1 and the figure.
const TOLERANCE: f64 = 2e-5;

const SMALL: GptConfig =
    GptConfig { layers: 2, width: 12, heads: 3, context: 9, vocabulary: 17, dropout: 0.0, head: Head::Tied };
const LOSS: Loss = Loss::CrossEntropy { label_smoothing: 0.0 };

#[track_caller]
fn same(what: &str, got: f64, want: &serde_json::Value) {
    let want = want.as_f64().unwrap();
    assert!((got - want).abs() <= TOLERANCE * want.abs().max(1.0), "{what}: {got}, PyTorch {want}");
}

/// Three samples of seven words, each `factor(i)`.
fn words(device: &Device, word: fn(i64) -> i64) -> Tensor {
    let words: Vec<i64> = (0..21).map(|i| word(i) % 17).collect();
    Tensor::from_slice(device, &words, [3, 7])
}

#[test]
fn names_shapes_outputs_and_gradients_are_those_of_gpt_2() {
    let golden: serde_json::Value = serde_json::from_str(include_str!("golden/gpt.json")).unwrap();
    for (case, head) in [("tied", Head::Tied), ("own", Head::Own)] {
        let golden = &golden[case];
        let device = Device::cpu(2);
        let mut gpt = Gpt::new(GptConfig { head, ..SMALL });
        let parameters = Parameters::build(&mut gpt, &device, 0);
        for k in 0..parameters.names().len() {
            let value = parameters.value(k);
            let first: Vec<f32> =
                (0..value.count() as u64).map(|i| (0.5 * unit(k as u64, i)) as f32).collect();
            value.copy_from(&Tensor::from_slice(&device, &first, value.shape()));
        }
        let y = gpt.forward(&words(&device, |i| i * i * 7), &mut Ctx::eval());
        assert_eq!(y.dims(), [3, 7, 17]);
        let logits = y.narrow(0, 1, 1).narrow(1, 3, 1).to_vec::<f32>();
        for (i, (got, want)) in logits.iter().zip(golden["output"].as_array().unwrap()).enumerate() {
            same(&format!("{case}, logit {i}"), f64::from(*got), want);
        }
        let loss = LOSS.of(&y, &words(&device, |i| i * 5));
        same(&format!("{case}, loss"), loss.item(), &golden["loss"]);
        loss.backward();
        let want = golden["parameters"].as_array().unwrap();
        assert_eq!(parameters.names().len(), want.len(), "{case}");
        for (i, (parameter, want)) in parameters.names().iter().zip(want).enumerate() {
            assert_eq!(*parameter, want[0].as_str().unwrap(), "{case}");
            let shape = serde_json::json!(parameters.layout().shape(i).dims());
            assert_eq!(shape, want[1], "{case}, {parameter}");
            let grad = parameters.grads().arena().tensor(i).to_vec::<f32>();
            let norm = grad.iter().map(|&g| f64::from(g) * f64::from(g)).sum::<f64>().sqrt();
            same(&format!("{case}, gradient of {parameter}"), norm, &want[2]);
        }
    }
}

#[test]
fn the_smallest_gpt_2_has_as_many_numbers_as_its_authors_say() {
    let mut count = 0;
    let mut gpt = Gpt::new(GptConfig::default());
    let blocks: Vec<String> = gpt.row().all().iter().map(|block| block.name().to_owned()).collect();
    assert_eq!((blocks.len(), &*blocks[0], &*blocks[12], &*blocks[13]), (14, "embedding", "h.11", "head"));
    gpt.visit(&mut phalanx_nn::Visitor::new(&mut |_, role, param| {
        if role == phalanx_nn::Role::Learned {
            count += param.declared_shape().count();
        }
    }));
    assert_eq!(count, 124_439_808);
}

struct Nobody;

impl GradSink for Nobody {
    fn finished(&mut self, _: LeafId, _: Tensor) {}
}

/// The losses of some steps on random words, with dropout.
fn losses(threads: usize, samples: &[u64]) -> Vec<f64> {
    let device = Device::cpu(threads);
    let mut gpt = Gpt::new(GptConfig { dropout: 0.2, ..SMALL });
    let parameters = Parameters::build(&mut gpt, &device, 3);
    let mut optimizer = Optimizer::new(Adam::default()).unwrap();
    let ids: Vec<i64> =
        samples.iter().flat_map(|s| (0..7).map(move |t| ((s * 31 + t * t) % 17) as i64)).collect();
    let ids = Tensor::from_slice(&device, &ids, [samples.len(), 7]);
    (0..4)
        .map(|step| {
            let loss = LOSS.of(&gpt.forward(&ids, &mut Ctx::train(3, step, samples.into())), &ids);
            parameters.grads().zero();
            backward(&[(&loss, None)], &mut Nobody);
            let grads = parameters.grads().arena().flat::<f32>();
            optimizer.step_on(&device, &mut parameters.values().flat_mut::<f32>(), &grads, 1.0);
            loss.item()
        })
        .collect()
}

#[test]
fn training_has_the_same_bits_on_any_number_of_threads() {
    let alone = losses(1, &[4, 5, 6]);
    assert!(alone[3] < alone[0], "{alone:?}");
    assert_eq!(losses(3, &[4, 5, 6]), alone);
}

#[test]
fn a_later_word_changes_no_earlier_logit() {
    let device = Device::cpu(1);
    let mut gpt = Gpt::new(SMALL);
    let _parameters = Parameters::build(&mut gpt, &device, 1);
    let logits = |last: i64| {
        let ids = Tensor::from_slice(&device, &[1, 2, 3, last], [1, 4]);
        gpt.forward(&ids, &mut Ctx::eval()).to_vec::<f32>()
    };
    let (a, b) = (logits(4), logits(5));
    assert_eq!(a[..3 * 17], b[..3 * 17]);
    assert_ne!(a[3 * 17..], b[3 * 17..]);
}

#[test]
fn files_of_others_fit() {
    let device = Device::cpu(1);
    let own = Parameters::build(&mut Gpt::new(SMALL), &device, 1).to_weights();
    let mut file = Weights::default();
    for name in own.names() {
        let (shape, values) = own.get(name).unwrap();
        file.push(format!("transformer.{name}"), *shape, values);
    }
    let words = own.get("wte.weight").unwrap();
    file.push("lm_head.weight".into(), *words.0, words.1);
    file.push("transformer.h.0.attn.bias".into(), [1, 1, 2, 2].into(), &[1.0, 0.0, 1.0, 1.0]);
    file.push("transformer.h.1.attn.masked_bias".into(), [].into(), &[-1e4]);
    let other = Parameters::build(&mut Gpt::new(SMALL), &device, 2);
    assert!(other.load(&file).is_err());
    other.load(&Gpt::weights_of(&file, Head::Tied)).unwrap();
    assert_eq!(other.to_weights(), own);
}

#[test]
fn a_row_runs_in_parts_as_in_one() {
    let device = Device::cpu(1);
    let mut gpt = Gpt::new(GptConfig { dropout: 0.3, ..SMALL });
    let _parameters = Parameters::build(&mut gpt, &device, 1);
    let ids = words(&device, |i| i * 3);
    let ctx = || Ctx::train(1, 2, [7, 8, 9].into());
    let whole = gpt.forward(&ids, &mut ctx()).to_vec::<f32>();
    assert_eq!(gpt.blocks(), 4);
    let parts = (0..4).fold(ids, |x, block| gpt.forward_block(block, &x, &mut ctx()));
    assert_eq!(parts.to_vec::<f32>(), whole);
    let names = ["wte.weight", "wpe.weight", "h.1.mlp.c_fc.bias", "ln_f.weight"];
    assert_eq!(names.map(|name| gpt.block_of(name)), [0, 0, 2, 3]);
}

#[test]
#[should_panic(expected = "a width of 12 doesn't fall into 5 heads")]
fn heads_that_do_not_divide_the_width_are_a_bug() {
    let _ = Gpt::new(GptConfig { heads: 5, ..SMALL });
}
