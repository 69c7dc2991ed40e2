//! Evaluations on a GPU, which is given batches before anyone has looked at what those before came to.

use crate::fake::fake;
use crate::{RULE, gpu};
use phalanx::comm::Group;
use phalanx::data::{BatchBuffers, Dataset, Result, Target};
use phalanx::nn::{Linear, Loss, Metric, WeightedCrossEntropy};
use phalanx::{Evaluation, Event, Observer, Precision, Trainer, Worker};
use phalanx_fake_cuda::FakeCuda;
use std::sync::{Arc, Mutex};

/// What the GPU was given of evaluations, and waited for, whenever samples are taken.
type Seen = Arc<Mutex<Vec<[u64; 2]>>>;

/// So many samples of seven classes.
struct Rows(usize, Option<(Arc<FakeCuda>, Seen)>);

impl Dataset for Rows {
    fn len(&self) -> usize {
        self.0
    }

    fn input_dims(&self) -> &[usize] {
        &[3]
    }

    fn target(&self) -> Target<'_> {
        Target::Classes(7)
    }

    fn batch(&self, samples: &[usize], into: &mut BatchBuffers) -> Result<()> {
        if let Some((fake, seen)) = &self.1 {
            let judged = fake.log().iter().filter(|line| *line == "launch label_places").count();
            let waits = fake.calls("cuStreamSynchronize") + fake.calls("cuEventSynchronize");
            seen.lock().unwrap().push([judged as u64, waits]);
        }
        let numbers = samples.iter().flat_map(|i| [i * 37 % 101, i * 53 % 97, i * 71 % 89]);
        into.inputs().iter_mut().zip(numbers).for_each(|(to, number)| *to = number as f32 / 50.0 - 1.0);
        into.labels().iter_mut().zip(samples).for_each(|(to, i)| *to = (i * 37 % 101 / 15) as i64);
        Ok(())
    }
}

struct Nobody;

impl Observer for Nobody {
    fn event(&mut self, _: &Event) {}
}

fn evaluated(worker: &Worker, loss: &Loss, precision: Precision, test: Rows) -> Evaluation {
    let loss = loss.clone();
    evaluated_by(worker, &Trainer { loss, batch_size: 4, precision, ..Trainer::default() }, test)
}

fn evaluated_by(worker: &Worker, trainer: &Trainer, test: Rows) -> Evaluation {
    let (train, mut net) = (Arc::new(Rows(64, None)), Linear::new(3, 7));
    let trained = trainer.fit(worker, &mut net, RULE, train, Some(Arc::new(test)), &mut Nobody).unwrap();
    trained.evaluation.unwrap()
}

#[test]
fn a_gpu_is_given_the_next_batches_before_anyone_waits_for_what_one_came_to() {
    const SAMPLES: usize = 5_500;
    let plain = Loss::CrossEntropy { label_smoothing: 0.0 };
    let weights = (1..=7).map(|class| 0.5 * class as f32).collect();
    let weighted = WeightedCrossEntropy { weights, ignored: Some(3), ..WeightedCrossEntropy::default() };
    let weighted = Loss::WeightedCrossEntropy(weighted);
    for (seed, loss, precision, off) in [
        (1, &plain, Precision::Float32, 1e-5),
        (2, &plain, Precision::Bfloat16, 2e-2),
        (3, &weighted, Precision::Float32, 1e-5),
    ] {
        let Some(fake) = fake() else { return };
        fake.seed(seed);
        let (fake, seen) = (Arc::new(fake), Seen::default());
        let want = evaluated(&Worker::alone(1), loss, precision, Rows(SAMPLES, None));
        let worker = Worker::with_device(Group::solo(), gpu(&fake));
        let got = evaluated(&worker, loss, precision, Rows(SAMPLES, Some((fake.clone(), seen.clone()))));
        let of = |e: &Evaluation| [e.loss, e.accuracy.unwrap(), e.top5.unwrap()];
        for (got, want) in of(&got).into_iter().zip(of(&want)) {
            assert!((got - want).abs() <= off, "{got} of a GPU, {want} of a CPU");
        }
        assert!(want.accuracy < want.top5 && want.accuracy > Some(0.0), "{want:?}");
        // A GPU takes a thousand such samples at once. Each batch is taken when all before it were given.
        let seen = seen.lock().unwrap();
        let given: Vec<u64> = seen.iter().map(|[judged, _]| *judged).collect();
        assert_eq!(given, [0, 1, 2, 3, 4, 5]);
        assert!(seen[1..=3].iter().all(|[_, waits]| *waits == seen[1][1]), "{seen:?}");
        assert_eq!(fake.damage(), [""; 0]);
    }
}

#[test]
fn the_sums_of_metrics_are_made_on_a_gpu() {
    let Some(fake) = fake() else { return };
    let fake = Arc::new(fake);
    let ignored = WeightedCrossEntropy { ignored: Some(3), ..WeightedCrossEntropy::default() };
    let scores = Metric::mean("scores", |scores, _| scores.clone());
    let metrics = vec![Metric::macro_f1(7), Metric::balanced_accuracy(7), Metric::mean_iou(7), scores];
    for loss in [Loss::CrossEntropy { label_smoothing: 0.0 }, Loss::WeightedCrossEntropy(ignored)] {
        let trainer = Trainer { loss, batch_size: 4, metrics: metrics.clone(), ..Trainer::default() };
        let want = evaluated_by(&Worker::alone(1), &trainer, Rows(50, None)).metrics;
        let worker = Worker::with_device(Group::solo(), gpu(&fake));
        let got = evaluated_by(&worker, &trainer, Rows(50, None)).metrics;
        assert!(want.len() == 4 && want["mean_iou"] > 0.0 && want["mean_iou"] < want["macro_f1"], "{want:?}");
        let near = want.iter().all(|(name, want)| (got[name] - want).abs() < 1e-5);
        assert!(near, "{got:?} of a GPU, {want:?} of a CPU");
    }
}
