//! Noise that models draw: what it looks like, and what it is a function of.

use phalanx_nn::Ctx;
use phalanx_tensor::{Device, Tensor};
use std::sync::Arc;

fn values(x: &Tensor) -> Vec<f64> {
    x.to_vec::<f32>().into_iter().map(f64::from).collect()
}

fn mean(x: impl ExactSizeIterator<Item = f64>) -> f64 {
    let n = x.len() as f64;
    x.sum::<f64>() / n
}

/// Bounds are five times the standard deviation of what is estimated.
#[test]
fn it_has_the_moments_of_its_distribution_and_no_two_draws_agree() {
    const ROWS: usize = 500;
    const WIDTH: usize = 200;
    let n = (ROWS * WIDTH) as f64;
    let mut ctx = Ctx::train(3, 8, (100..100 + ROWS as u64).collect());
    let device = Device::cpu(2);
    let uniform = values(&ctx.uniform(&device, [ROWS, WIDTH]));
    assert!(uniform.iter().all(|x| (0.0..1.0).contains(x) && (x * f64::from(1 << 24)).fract() == 0.0));
    assert!((mean(uniform.iter().copied()) - 0.5).abs() < 5.0 / (12.0 * n).sqrt());
    // Each quarter, and each half of the last bits, is met as often.
    let share = |is_in: &dyn Fn(f64) -> bool| mean(uniform.iter().map(|x| f64::from(u8::from(is_in(*x)))));
    let bound = |p: f64| 5.0 * (p * (1.0 - p) / n).sqrt();
    for quarter in 0..4 {
        let share = share(&|x| (x * 4.0) as usize == quarter);
        assert!((share - 0.25).abs() < bound(0.25), "{quarter}: {share}");
    }
    assert!((share(&|x| (x * f64::from(1 << 24)) as u32 % 2 == 1) - 0.5).abs() < bound(0.5));

    let [first, second] = [(); 2].map(|()| values(&ctx.normal(&device, [ROWS, WIDTH])));
    let moment = |power: i32| mean(first.iter().map(|x| x.powi(power)));
    // The k-th powers of normal numbers have these means and variances.
    for (power, want, variance) in [(1, 0.0, 1.0), (2, 1.0, 2.0), (3, 0.0, 15.0), (4, 3.0, 96.0)] {
        let got = moment(power);
        assert!((got - want).abs() < 5.0 * f64::sqrt(variance / n), "moment {power}: {got}");
    }
    let tail = mean(first.iter().map(|x| f64::from(u8::from(x.abs() > 1.959_964))));
    assert!((tail - 0.05).abs() < bound(0.05), "{tail}");
    // Draws, rows and columns have nothing to do with each other.
    let apart = |a: &[f64], b: &[f64]| mean(a.iter().zip(b).map(|(a, b)| a * b));
    assert!(apart(&first, &second).abs() < 5.0 / n.sqrt());
    assert!(apart(&first[WIDTH..], &first).abs() < 5.0 / n.sqrt());
    assert!(apart(&first[1..], &first).abs() < 5.0 / n.sqrt());
}

#[test]
fn it_is_a_function_of_seed_step_sample_and_draw_and_of_nothing_else() {
    let device = Device::cpu(1);
    let noise = |seed, step, samples: &[u64]| {
        let mut ctx = Ctx::train(seed, step, samples.into());
        [(); 2].map(|()| values(&ctx.normal(&device, [samples.len(), 5])))
    };
    let [all, later] = noise(1, 2, &[7, 8, 9]);
    assert_eq!(
        noise(1, 2, &[9, 7]),
        [[&all[10..], &all[..5]].concat(), [&later[10..], &later[..5]].concat()]
    );
    for other in [noise(2, 2, &[7, 8, 9]), noise(1, 3, &[7, 8, 9]), noise(1, 2, &[10, 11, 12])] {
        assert!(other.iter().flatten().zip(all.iter().chain(&later)).all(|(a, b)| a != b));
    }
    assert!(all.iter().zip(&later).all(|(a, b)| a != b));
    // Judged, a sample has its noise whenever that is; where nobody says which it is, a row has.
    let judged = |mut ctx: Ctx| values(&ctx.normal(&device, [2, 5]));
    let samples: Arc<[u64]> = [0, 1].into();
    assert_eq!(judged(Ctx::eval()), judged(Ctx::eval_on(0, Arc::clone(&samples))));
    assert_eq!(judged(Ctx::eval_on(1, Arc::clone(&samples))), judged(Ctx::train(1, 0, samples)));
}

#[test]
#[should_panic(expected = "noise: 3 rows for the 2 samples of the batch")]
fn rows_are_samples() {
    Ctx::train(0, 0, [1, 2].into()).normal(&Device::cpu(1), [3, 4]);
}
