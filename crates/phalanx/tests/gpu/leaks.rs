//! Ten thousand steps, after which a run has what it had after some hundreds.

use crate::fake::fake;
use crate::{RULE, gpu};
use phalanx::comm::Group;
use phalanx::data::LinearRegression;
use phalanx::nn::{Dropout, Linear, Loss, Sequential};
use phalanx::{Event, Observer, Trainer, Worker};
use phalanx_fake_cuda::{Count, FakeCuda};
use std::sync::Arc;

/// By then there were batches of each size, graphs, and full caches.
const WARM: u64 = 500;

/// What there is, after the step of each number, in a run of so many.
struct Counting<'a>(&'a FakeCuda, Vec<(u64, [u64; 7])>, u64);

impl Observer for Counting<'_> {
    fn event(&mut self, event: &Event) {
        let Event::Step { step, .. } = event else { return };
        if *step >= WARM && (*step % 500 == 0 || *step + 1 == self.2) {
            let all = [
                Count::Pieces,
                Count::Bytes,
                Count::Pinned,
                Count::Streams,
                Count::Events,
                Count::Graphs,
                Count::Modules,
            ];
            self.1.push((*step, all.map(|what| self.0.count(what))));
        }
    }
}

#[track_caller]
fn check(steps: u64, graphs: bool) {
    let Some(fake) = fake() else { return };
    let worker = Worker::with_device(Group::solo(), gpu(&fake));
    let mut net = Sequential::new().then(Linear::new(1, 2)).then(Dropout::new(0.25)).then(Linear::new(2, 1));
    // Every tenth step ends an epoch, with a smaller batch.
    let data = LinearRegression::new(19);
    let trainer = Trainer {
        loss: Loss::Mse,
        batch_size: 2,
        steps: Some(steps),
        epochs: steps,
        graphs,
        ..Trainer::default()
    };
    let mut counting = Counting(&fake, Vec::new(), steps);
    trainer.fit(&worker, &mut net, RULE, Arc::new(data), None, &mut counting).unwrap();
    let (first, last) = (counting.1[0], counting.1[counting.1.len() - 1]);
    assert_eq!((first.0, last.0), (WARM, steps - 1));
    for (step, counts) in &counting.1 {
        assert_eq!(*counts, first.1, "after step {step}, and after {WARM}");
    }
    drop((worker, net));
    assert_eq!([Count::Pieces, Count::Pinned, Count::Graphs].map(|what| fake.count(what)), [0; 3]);
    assert_eq!(fake.damage(), [""; 0]);
}

#[test]
fn ten_thousand_steps_leave_nothing_behind() {
    // All but the last of each epoch are replays.
    check(10_000, true);
}

#[test]
fn thousands_of_steps_without_replays_leave_nothing_behind() {
    check(3000, false);
}
