//! Runs in bfloat16, float16 and TF32 on a GPU.

use crate::fake::fake;
use crate::sharded::STAGES;
use crate::{RULE, gpu, gpu_of, net, trainer};
use phalanx::comm::Group;
use phalanx::data::{Places, Silent, View, open};
use phalanx::nn::optim::Clip;
use phalanx::nn::{Parameters, Weights};
use phalanx::parallel::FsdpConfig;
use phalanx::tensor::Device;
use phalanx::{Event, LossScale, Observer, Precision, Progress, State, Trainer, Worker};
use std::sync::Mutex;

/// What losses may be apart on a GPU and on a CPU: both round at the same places, but sum in another order, so that now and then a
/// value is the next one of its type; the steps of a test carry that on.
const BF16_APART: f64 = 3e-2;
const F16_APART: f64 = 4e-3;

/// The loss of each step, the scale it was made with, and whether it was left out.
#[derive(Default)]
struct Told(Vec<(f64, Option<f64>, bool)>);

impl Observer for Told {
    fn event(&mut self, event: &Event) {
        if let Event::Step { loss, loss_scale, skipped, .. } = event {
            self.0.push((*loss, *loss_scale, *skipped));
        }
    }
}

/// What a run of so many ranks has told that began with this scale, and the weights that it left.
fn run(
    trainer: &Trainer,
    ranks: usize,
    scale: f64,
    device: &(dyn Fn(usize) -> Device + Sync),
) -> (Vec<(f64, Option<f64>, bool)>, Weights) {
    let results = Mutex::default();
    std::thread::scope(|scope| {
        for group in Group::threads(ranks) {
            let results = &results;
            scope.spawn(move || {
                let device = device(group.rank().index());
                let worker = Worker::with_device(group, device);
                let data = open("mnist-mini", View::default(), &Places::from_env(None), &mut Silent).unwrap();
                let mut net = net();
                let parameters = Parameters::build(&mut net, worker.device(), 3);
                let loss_scale = Some(LossScale { factor: scale, good_steps: 0 });
                let progress = Progress { loss_scale, ..Progress::default() };
                let state = State { progress, ..State::start(RULE).unwrap() };
                let mut told = Told::default();
                let trained = trainer.resume(&worker, &net, parameters, state, data.train, None, &mut told);
                let trained = trained.unwrap_or_else(|error| panic!("{error}"));
                if worker.is_first() {
                    *results.lock().unwrap() = Some((told.0, trained.parameters.to_weights()));
                }
            });
        }
    });
    results.into_inner().unwrap().expect("the first rank has left its results")
}

fn apart(got: &[(f64, Option<f64>, bool)], want: &[(f64, Option<f64>, bool)]) -> f64 {
    assert_eq!(got.len(), want.len());
    got.iter().zip(want).fold(0.0, |apart, (got, want)| {
        assert_eq!((got.1, got.2), (want.1, want.2), "scales and steps that are left out");
        apart.max((got.0 - want.0).abs())
    })
}

/// So large that the first steps overflow.
const TOO_LARGE: f64 = (1u64 << 18) as f64;

#[test]
fn runs_of_16_bits_are_those_of_a_cpu_on_one_gpu_and_on_two() {
    let Some(fake) = fake() else { return };
    for (precision, allowed) in [(Precision::Bfloat16, BF16_APART), (Precision::Float16, F16_APART)] {
        let clip = Clip { norm: Some(0.25), value: None };
        let trainer = Trainer { precision, clip, steps: Some(5), ..trainer() };
        let alone = [(1, None), (2, None)];
        for (ranks, sharded) in alone.into_iter().chain(STAGES.map(|sharded| (2, Some(sharded)))) {
            let config = |sharded| FsdpConfig { sharded, unit_bytes: 0, ..FsdpConfig::default() };
            let trainer = Trainer { sharded: sharded.map(config), ..trainer.clone() };
            let (told, _) = run(&trainer, ranks, 1024.0, &|rank| gpu_of(&fake, rank));
            let (want, _) = run(&trainer, ranks, 1024.0, &|_| Device::cpu(1));
            let apart = apart(&told, &want);
            assert!(apart <= allowed, "{precision} on {ranks}, {sharded:?}: {apart:.1e}");
        }
    }
    assert_eq!(fake.damage(), [""; 0]);
}

#[test]
fn steps_that_overflow_are_left_out_on_two_gpus() {
    let Some(fake) = fake() else { return };
    for sharded in [None].into_iter().chain(STAGES.map(Some)) {
        let sharded = sharded.map(|sharded| FsdpConfig { sharded, ..FsdpConfig::default() });
        let trainer = Trainer { precision: Precision::Float16, steps: Some(3), sharded, ..trainer() };
        let (told, _) = run(&trainer, 2, TOO_LARGE, &|rank| gpu_of(&fake, rank));
        assert!(told[0].2 && told[0].1 == Some(TOO_LARGE) && told[1].1 == Some(TOO_LARGE / 2.0), "{told:?}");
    }
    assert_eq!(fake.damage(), [""; 0]);
}

/// The weights change between replays and so do their casts; the scale does too.
#[test]
fn replays_have_the_bits_of_passes_that_are_made() {
    let Some(fake) = fake() else { return };
    for precision in [Precision::Tf32, Precision::Bfloat16, Precision::Float16] {
        let trainer = Trainer { precision, steps: Some(8), ..trainer() };
        let before = fake.calls("cuGraphLaunch");
        let made = run(&trainer, 1, TOO_LARGE, &|_| gpu(&fake));
        let replayed = run(&Trainer { graphs: true, ..trainer }, 1, TOO_LARGE, &|_| gpu(&fake));
        assert_eq!(
            fake.calls("cuGraphLaunch") - before,
            6,
            "{precision}: the first is made, the second recorded"
        );
        assert_eq!(made.0, replayed.0, "{precision}");
        assert!(made.1 == replayed.1, "{precision}: not the same bits");
        let left_out = made.0.iter().filter(|step| step.2).count();
        assert_eq!(
            left_out > 1 && left_out < 8,
            precision == Precision::Float16,
            "{left_out} steps left out"
        );
    }
    assert_eq!(fake.damage(), [""; 0]);
}

/// All at once before the first pass, and then by the optimizer as it moves them, replayed or not.
#[test]
fn weights_are_cast_once_and_then_as_they_are_moved() {
    let Some(fake) = fake() else { return };
    let casts = |accumulate, steps, graphs| {
        let precision = Precision::Bfloat16;
        let trainer = Trainer { precision, accumulate, steps: Some(steps), graphs, ..trainer() };
        let count = || fake.log().iter().filter(|line| *line == "launch from_f32").count();
        let before = count();
        run(&trainer, 1, 1.0, &|_| gpu(&fake));
        count() - before
    };
    // What else is cast is as much in each of two passes.
    let [one, two] = [1, 2].map(|steps| casts(1, steps, false));
    assert_eq!(two, casts(2, 1, false));
    // The first pass is made, the second rehearsed and recorded, and later ones launch nothing of their own.
    let [first, second, six] = [1, 2, 6].map(|steps| casts(1, steps, true));
    assert_eq!((first, second, six), (one, one + 2 * (two - one), second));
}

#[test]
fn rounded_factors_make_a_difference_and_a_small_one() {
    let Some(fake) = fake() else { return };
    let losses = |precision| {
        let (told, _) = run(&Trainer { precision, ..trainer() }, 1, 1.0, &|_| gpu(&fake));
        told
    };
    let (exact, rounded) = (losses(Precision::Float32), losses(Precision::Tf32));
    let apart = apart(&rounded, &exact);
    assert!(apart > 1e-6 && apart < 1e-2, "{apart:.1e}");
}
