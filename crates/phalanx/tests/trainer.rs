//! What the trainer says of things that can't be trained.

use phalanx::data::{BatchBuffers, Dataset, LinearRegression, Target};
use phalanx::nn::{Linear, Loss, optim::Sgd};
use phalanx::{Quiet, Trainer, Worker};
use std::sync::Arc;

struct Empty;

impl Dataset for Empty {
    fn len(&self) -> usize {
        0
    }

    fn input_dims(&self) -> &[usize] {
        &[1]
    }

    fn target(&self) -> Target<'_> {
        Target::Values(&[1])
    }

    fn batch(&self, _: &[usize], _: &mut BatchBuffers) -> phalanx::data::Result<()> {
        unreachable!("there is no sample to ask for")
    }
}

#[test]
fn data_sets_without_samples_are_named() {
    let points: Arc<dyn Dataset> = Arc::new(LinearRegression::new(4));
    let trainer = Trainer { loss: Loss::Mse, ..Trainer::default() };
    let empty: Arc<dyn Dataset> = Arc::new(Empty);
    for (train, test, what) in [(&empty, &points, "train"), (&points, &empty, "test")] {
        let (train, test) = (Arc::clone(train), Some(Arc::clone(test)));
        let worker = Worker::alone(1);
        let result = trainer.fit(&worker, &mut Linear::new(1, 1), Sgd::new(0.1), train, test, &mut Quiet);
        let error = result.err().expect("nothing to go by").to_string();
        assert!(error.contains(&format!("no samples to {what} on")), "{error}");
    }
}
