use super::*;
use crate::{Ctx, Linear, Param};

/// A layer that counts its training passes in a buffer, between a parameter before and one after.
struct Counting {
    before: Linear,
    passes: Param,
    after: Linear,
}

impl Counting {
    fn new() -> Counting {
        let passes = Param::new([2], Init::Constant(3.0));
        Counting { before: Linear::new(5, 3), passes, after: Linear::new(3, 2) }
    }
}

impl Module for Counting {
    fn visit(&mut self, v: &mut Visitor<'_>) {
        v.child("before", &mut self.before);
        v.buffer("passes", &mut self.passes);
        v.child("after", &mut self.after);
    }

    fn forward(&self, x: &Tensor, ctx: &mut Ctx) -> Tensor {
        if ctx.training() {
            self.passes.copy_from(&self.passes.affine(1.0, 1.0));
        }
        self.after.forward(&self.before.forward(x, ctx), ctx)
    }
}

#[test]
fn values_depend_on_the_seed_alone() {
    let build = |seed, threads| {
        let parameters = Parameters::build(&mut Linear::new(5, 3), &Device::cpu(threads), seed);
        parameters.values().flat::<f32>().to_vec()
    };
    assert_eq!(build(1, 1), build(1, 2));
    assert_ne!(build(1, 1), build(2, 1));
    let bound = 1.0 / 5f32.sqrt();
    assert!(
        build(1, 1).iter().all(|v| v.abs() <= bound) && build(1, 1).iter().any(|v| v.abs() > bound / 2.0)
    );
}

#[test]
fn first_values_have_the_moments_they_should() {
    let n = 40_000;
    let moments = |init: Init| {
        let mut values = vec![0.0; n];
        init.fill(&Device::cpu(2), &mut values, Philox::new(7, 1));
        let mean = values.iter().map(|&v| f64::from(v)).sum::<f64>() / n as f64;
        let square = values.iter().map(|&v| f64::from(v) * f64::from(v)).sum::<f64>() / n as f64;
        (mean, square - mean * mean, values)
    };
    // Four standard errors of each moment: 4 sd / sqrt(n) for a mean, 4 sqrt(kurtosis - 1) var / sqrt(n) for a variance.
    let (mean, variance, values) = moments(Init::Uniform { bound: 2.0 });
    assert!(mean.abs() < 0.024 && (variance - 4.0 / 3.0).abs() < 0.024, "{mean} {variance}");
    assert!(values.iter().all(|v| (-2.0..2.0).contains(v)));
    let (mean, variance, values) = moments(Init::Normal { std: 3.0 });
    assert!(mean.abs() < 0.06 && (variance - 9.0).abs() < 0.26, "{mean} {variance}");
    let beyond = values.iter().filter(|v| v.abs() > 6.0).count() as f64 / n as f64;
    assert!((beyond - 0.0455).abs() < 0.0042, "{beyond} of the values lie beyond two standard deviations");
}

#[test]
fn first_values_are_the_ones_at_their_places_on_any_number_of_threads() {
    let key = Philox::new(7, 1);
    let unit = |i: usize| f64::from(key.unit(i as u64));
    let uniform = |i: usize| (2.0 * (2.0 * unit(i) - 1.0)) as f32;
    // Neither whole blocks of random numbers nor whole pieces.
    let n = 10_003;
    let mut normals = vec![0.0; n];
    key.fill_normal(&Device::cpu(2), 3.0, &mut normals);
    let check = |init: Init, wanted: &dyn Fn(usize) -> f32| {
        for threads in [1, 3] {
            let mut values = vec![0.0; n];
            init.fill(&Device::cpu(threads), &mut values, key);
            assert!((0..n).all(|i| values[i] == wanted(i)), "{init:?} on {threads} threads");
        }
    };
    check(Init::Uniform { bound: 2.0 }, &uniform);
    check(Init::Normal { std: 3.0 }, &|i| normals[i]);
}

#[test]
fn weights_that_do_not_fit_change_nothing_and_are_named() {
    let parameters = Parameters::build(&mut Linear::new(2, 3), &Device::cpu(1), 0);
    let before = parameters.to_weights();
    let mut other = Weights::default();
    other.push("weight".into(), [2, 2].into(), &[0.0; 4]);
    other.push("scale".into(), [1].into(), &[0.0]);
    let message = parameters.load(&other).unwrap_err().to_string();
    for part in ["missing: bias", "unexpected: scale", "weight is [2, 2] in the file and [3, 2] in the model"]
    {
        assert!(message.contains(part), "{message}");
    }
    assert_eq!(parameters.to_weights(), before);
    parameters.load(&before).unwrap();
}

#[test]
fn a_long_mismatch_is_told_by_its_beginning() {
    let mismatch = Mismatch { missing: (0..30).map(|i| format!("w{i}")).collect(), ..Mismatch::default() };
    let want = "the weights don't fit the model; missing: w0, w1, w2, w3, w4, w5, w6, w7 and 22 more";
    assert_eq!(mismatch.to_string(), want);
}

#[test]
fn what_fits_can_be_loaded_alone() {
    let device = Device::cpu(1);
    let parameters = Parameters::build(&mut Linear::new(2, 3), &device, 0);
    let weight = parameters.value(0).to_vec::<f32>();
    let mut other = Weights::default();
    other.push("bias".into(), [3].into(), &[1.0, 2.0, 3.0]);
    other.push("weight".into(), [1, 2].into(), &[0.0; 2]);
    let left = parameters.load_matching(&other);
    assert_eq!(left.misshaped.len(), 1);
    assert!(left.missing.is_empty() && left.unexpected.is_empty());
    assert_eq!(parameters.value(1).to_vec::<f32>(), [1.0, 2.0, 3.0]);
    assert_eq!(parameters.value(0).to_vec::<f32>(), weight);
}

#[test]
fn buffers_are_saved_and_loaded_but_not_learned() {
    let device = Device::cpu(1);
    let mut model = Counting::new();
    let parameters = Parameters::build(&mut model, &device, 0);
    assert_eq!(parameters.names(), ["before.weight", "before.bias", "after.weight", "after.bias"]);
    assert_eq!(parameters.buffer_names(), ["passes"]);
    assert_eq!(parameters.count(), 15 + 3 + 6 + 2);
    let x = Tensor::ones(&device, [1, 5], DType::F32);
    for step in 0..2 {
        model.forward(&x, &mut Ctx::train(0, step, [0].into())).sum_all().backward();
    }
    model.forward(&x, &mut Ctx::eval());
    assert_eq!(parameters.buffers().tensor(0).to_vec::<f32>(), [5.0, 5.0]);
    assert_eq!(parameters.grads().settle(), [] as [usize; 0]);

    let saved = parameters.to_weights();
    assert_eq!(saved.get("passes").unwrap().1, [5.0, 5.0]);
    let mut other = Counting::new();
    let loaded = Parameters::build(&mut other, &device, 1);
    loaded.load(&saved).unwrap();
    assert_eq!(loaded.to_weights(), saved);
    assert_eq!(other.passes.to_vec::<f32>(), [5.0, 5.0]);
    let without = loaded.to_weights_from(&loaded.values().flat::<f32>(), "");
    assert_eq!(loaded.load(&without).unwrap_err().missing, ["passes"]);
}

#[test]
fn a_flat_array_of_the_layout_comes_back_from_its_names() {
    let parameters = Parameters::build(&mut Linear::new(2, 3), &Device::cpu(1), 0);
    let flat = parameters.values().flat::<f32>().to_vec();
    let weights = parameters.to_weights_from(&flat, ".exp_avg");
    assert_eq!(parameters.flat_from(&weights, ".exp_avg").unwrap(), flat);
    assert_eq!(parameters.flat_from(&weights, ".other").unwrap_err().missing, ["weight.other", "bias.other"]);
}

#[test]
#[should_panic(expected = "a parameter of shape [3, 2] is used before Parameters::build gave it values")]
fn a_parameter_without_values_says_so() {
    Linear::new(2, 3).forward(&Tensor::ones(&Device::cpu(1), [1, 2], DType::F32), &mut Ctx::eval());
}

/// Says "weight" twice.
struct Twice(Param, Param);

impl Module for Twice {
    fn visit(&mut self, v: &mut Visitor<'_>) {
        v.param("weight", &mut self.0);
        v.buffer("weight", &mut self.1);
    }

    fn forward(&self, x: &Tensor, _: &mut Ctx) -> Tensor {
        x.clone()
    }
}

#[test]
#[should_panic(expected = "two tensors of the model are named weight")]
fn a_name_that_is_taken_twice_is_a_bug() {
    let one = || Param::new([1], Init::Constant(0.0));
    Parameters::build(&mut Twice(one(), one()), &Device::cpu(1), 0);
}

#[test]
fn values_come_later_where_they_are_only_laid_out() {
    let device = Device::cpu(1);
    let built = Parameters::build(&mut Counting::new(), &device, 5);
    let laid_out = || Parameters::lay_out(&mut Counting::new(), &device, 5);
    let all = |parameters: &Parameters| {
        [parameters.values(), parameters.buffers()].map(|arena| arena.flat::<f32>().to_vec())
    };
    let given = laid_out();
    assert!(!given.has_values() && all(&given).concat().iter().all(|v| *v == 0.0));
    given.give_first_values();
    assert!(given.has_values());
    assert_eq!(all(&given), all(&built));

    // Part of a file goes over first values, and what somebody else holds in their place.
    let mut partly = Weights::default();
    partly.push("before.bias".to_owned(), Shape::from([3]), &[1.0, 2.0, 3.0]);
    let (loaded, first) = (laid_out(), laid_out());
    first.give_first_values();
    for parameters in [&loaded, &first] {
        parameters.load_matching(&partly);
    }
    assert_eq!(all(&loaded), all(&first));

    let taken = laid_out();
    let fails = taken.take_values(|values, _| {
        values[0] = 7.0;
        Err::<(), _>("cut off")
    });
    assert!(fails.is_err() && !taken.has_values());
    let fills = taken.take_values(|values, buffers| {
        values.fill(4.0);
        buffers.fill(9.0);
        Ok::<_, &str>(values.len())
    });
    assert!(fills == Ok(taken.layout().len()) && taken.has_values());
    taken.give_first_values();
    assert_eq!(taken.value(1).to_vec::<f32>(), [4.0; 3]);
    assert_eq!(taken.buffers().tensor(0).to_vec::<f32>(), [9.0; 2]);
}
