//! Batches: in order, the same whatever the number of threads, from recycled memory, and no longer than somebody wants them.

use phalanx_data::{
    BatchBuffers, Dataset, DistributedSampler, Error, ExactSampler, LinearRegression, Loader, LoaderOptions,
    Mnist, Order, Part, Reconstruct, Result, Scaling, Target,
};
use phalanx_tensor::{DType, Device};
use std::collections::HashSet;
use std::path::PathBuf;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

fn threads(threads: usize) -> LoaderOptions {
    LoaderOptions { threads, ..LoaderOptions::default() }
}

fn exact(len: usize, world_size: usize, rank: usize, batch_size: usize) -> ExactSampler {
    ExactSampler { len, world_size, rank, batch_size, order: Order::Shuffled { seed: 4 } }
}

type Seen = Vec<(usize, Vec<u64>, Vec<f32>, Vec<i64>)>;

fn see(loader: &Loader, epoch: u64) -> Seen {
    let batches = loader.epoch(epoch).unwrap().map(Result::unwrap);
    batches.map(|b| (b.step(), b.sample_ids().to_vec(), b.inputs().to_vec(), b.labels().to_vec())).collect()
}

#[test]
fn the_number_of_threads_changes_nothing() {
    let mini = Arc::new(Mnist::mini(Part::Test, Scaling::MNIST));
    let loader = |n| Loader::new(mini.clone(), exact(500, 3, 1, 16), threads(n));
    let inline = see(&loader(0), 2);
    assert_eq!(inline.len(), 11);
    assert!(inline.iter().map(|batch| batch.0).eq(0..11));
    for n in [1, 2, 3, 7, 40] {
        assert!(see(&loader(n), 2) == inline, "{n} threads");
    }
    assert!(see(&loader(2), 3) != inline, "another epoch");
}

#[test]
fn batches_hold_the_samples_that_they_name() {
    let mini = Mnist::mini(Part::Train, Scaling::MNIST);
    let labels = mini.labels().to_vec();
    let device = Device::cpu(1);
    let loader = Loader::new(mini, exact(2000, 1, 0, 300), threads(2));
    let mut seen = HashSet::new();
    for batch in loader.epoch(0).unwrap() {
        let batch = batch.unwrap();
        assert_eq!(batch.labels().len(), batch.len());
        for (&id, &label) in batch.sample_ids().iter().zip(batch.labels()) {
            assert_eq!(i64::from(labels[id as usize]), label);
            assert!(seen.insert(id));
        }
        let (inputs, targets) = (batch.input_tensor(&device), batch.target_tensor(&device));
        assert_eq!((inputs.dims(), inputs.dtype()), (&[batch.len(), 1, 28, 28][..], DType::F32));
        assert_eq!((targets.dims(), targets.dtype()), (&[batch.len()][..], DType::I64));
        assert_eq!(batch.global_samples(), batch.len());
    }
    assert_eq!(seen.len(), 2000);
}

#[test]
fn the_first_test_image_is_mnists_seven() {
    // Row 7 of the image, as everyone knows it, is the bar of a seven.
    const BAR: [u8; 16] = [84, 185, 159, 151, 60, 36, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0];
    let loader = Loader::new(
        Mnist::mini(Part::Test, Scaling::UNIT),
        ExactSampler { len: 500, world_size: 1, rank: 0, batch_size: 1, order: Order::Stored },
        threads(0),
    );
    let batch = loader.epoch(0).unwrap().next().unwrap().unwrap();
    let row: Vec<u8> = batch.inputs()[7 * 28 + 6..][..16].iter().map(|v| (v * 255.0).round() as u8).collect();
    assert_eq!((batch.labels(), row), (&[7][..], BAR.to_vec()));
}

#[test]
fn an_epoch_goes_on_where_it_was_left() {
    for n in [0, 2] {
        let line = LinearRegression::new(64);
        let loader = Loader::new(line, exact(64, 1, 0, 10), threads(n));
        let rest: Vec<usize> = loader.epoch_from(1, 4).unwrap().map(|b| b.unwrap().step()).collect();
        assert_eq!(rest, [4, 5, 6]);
        assert_eq!(loader.epoch_from(1, 7).unwrap().count(), 0, "nothing is left");
    }
}

#[test]
fn a_rank_without_samples_still_has_its_step() {
    let loader = Loader::new(LinearRegression::new(3), exact(3, 5, 4, 2), threads(1));
    let batch = loader.epoch(0).unwrap().next().unwrap().unwrap();
    assert!(batch.is_empty());
    assert_eq!((batch.global_samples(), batch.input_shape().dims()), (3, &[0, 1][..]));
    let device = Device::cpu(1);
    assert_eq!(batch.target_tensor(&device).dims(), [0, 1]);
}

#[test]
fn padded_sampling_gives_every_rank_the_same_sizes() {
    let sizes = |rank| -> Vec<usize> {
        let sampler = DistributedSampler {
            len: 10,
            world_size: 4,
            rank,
            batch_size: 2,
            order: Order::Stored,
            drop_last: false,
        };
        Loader::new(LinearRegression::new(10), sampler, threads(0))
            .epoch(0)
            .unwrap()
            .map(|b| b.unwrap().len())
            .collect()
    };
    assert!((0..4).all(|rank| sizes(rank) == [2, 1]));
}

#[test]
fn reconstruction_predicts_its_inputs() {
    let pixels = Reconstruct::new(Mnist::mini(Part::Test, Scaling::UNIT));
    assert_eq!((pixels.input_dims(), pixels.target()), (&[784][..], Target::Values(&[784])));
    let loader = Loader::new(pixels, exact(500, 1, 0, 20), threads(1));
    for batch in loader.epoch(0).unwrap() {
        let batch = batch.unwrap();
        assert_eq!(batch.inputs(), batch.values());
        assert_eq!(batch.input_shape().dims(), [batch.len(), 784]);
        assert!(batch.labels().is_empty());
    }
}

#[test]
fn memory_is_used_again() {
    for n in [0, 2] {
        let loader = Loader::new(Mnist::mini(Part::Train, Scaling::MNIST), exact(2000, 1, 0, 10), threads(n));
        let mut addresses = HashSet::new();
        for epoch in 0..3 {
            for batch in loader.epoch(epoch).unwrap() {
                let batch = batch.unwrap();
                addresses.insert((batch.inputs().as_ptr() as usize, batch.sample_ids().as_ptr() as usize));
            }
        }
        let bound = 3 * n + 2;
        assert!(
            addresses.len() <= bound,
            "{n} threads: {} buffers for 600 batches, at most {bound}",
            addresses.len()
        );
    }
}

#[test]
fn ids_that_somebody_keeps_stay_as_they_are() {
    let loader = Loader::new(LinearRegression::new(64), exact(64, 1, 0, 8), threads(0));
    let kept: Vec<(Arc<[u64]>, Vec<u64>)> = loader
        .epoch(0)
        .unwrap()
        .map(|b| b.unwrap())
        .map(|b| (b.sample_ids().clone(), b.sample_ids().to_vec()))
        .collect();
    assert!(kept.iter().all(|(shared, copied)| **shared == copied[..]));
}

/// A dataset that counts its batches, and waits for leave to fill each if there is a gate.
struct Gated {
    filled: Arc<AtomicUsize>,
    gate: Option<Mutex<Receiver<()>>>,
}

impl Gated {
    fn open() -> (Gated, Arc<AtomicUsize>) {
        let filled = Arc::new(AtomicUsize::new(0));
        (Gated { filled: filled.clone(), gate: None }, filled)
    }

    fn closed() -> (Gated, Sender<()>) {
        let (leave, gate) = channel();
        (Gated { filled: Arc::default(), gate: Some(Mutex::new(gate)) }, leave)
    }
}

impl Dataset for Gated {
    fn len(&self) -> usize {
        1000
    }

    fn input_dims(&self) -> &[usize] {
        &[1]
    }

    fn target(&self) -> Target<'_> {
        Target::Classes(2)
    }

    fn batch(&self, indices: &[usize], _into: &mut BatchBuffers) -> Result<()> {
        if let Some(gate) = &self.gate {
            let _ = gate.lock().unwrap().recv();
        }
        self.filled.fetch_add(1, Ordering::SeqCst);
        match indices {
            [13] => Err(Error::MissingFolder { path: PathBuf::from("/thirteen") }),
            [666] => panic!("sample 666 is cursed"),
            _ => Ok(()),
        }
    }
}

fn stored(batch_size: usize) -> ExactSampler {
    ExactSampler { len: 1000, world_size: 1, rank: 0, batch_size, order: Order::Stored }
}

#[test]
fn preparation_is_bounded_and_ends_with_the_iterator() {
    let (dataset, filled) = Gated::open();
    let dataset = Arc::new(dataset);
    let options = LoaderOptions { threads: 3, ahead: 2, ..LoaderOptions::default() };
    let loader = Loader::new(dataset.clone(), stored(1), options);
    let mut batches = loader.epoch(0).unwrap();
    batches.next().unwrap().unwrap();
    drop(batches);
    drop(loader);
    // The threads hold the dataset; when they are gone this is its only owner.
    let deadline = Instant::now() + Duration::from_secs(20);
    while Arc::strong_count(&dataset) > 1 {
        assert!(Instant::now() < deadline, "loader threads outlive their loader");
        std::thread::yield_now();
    }
    // Two in each queue, one in the hands of each thread, and the one that was taken made room for one more.
    assert!(filled.load(Ordering::SeqCst) <= 3 * 3 + 1, "{filled:?} batches were prepared");
}

#[test]
fn an_error_arrives_at_its_step_and_the_next_batches_after_it() {
    for n in [0, 2] {
        let loader = Loader::new(Gated::open().0, stored(1), threads(n));
        let results: Vec<bool> = loader.epoch(0).unwrap().take(16).map(|batch| batch.is_ok()).collect();
        assert!(results.iter().enumerate().all(|(step, &ok)| ok == (step != 13)), "{n} threads: {results:?}");
    }
}

#[test]
fn a_stalled_dataset_is_an_error_and_hangs_nobody() {
    let (dataset, leave) = Gated::closed();
    let options =
        LoaderOptions { threads: 1, timeout: Duration::from_millis(30), ..LoaderOptions::default() };
    let loader = Loader::new(dataset, stored(1), options);
    let mut batches = loader.epoch(5).unwrap();
    let error = batches.next().unwrap().unwrap_err();
    assert!(matches!(error, Error::LoaderStalled { epoch: 5, step: 0, .. }), "{error}");
    // The late batch of step 0 isn't given out as that of step 1.
    drop(leave);
    assert!(batches.next().is_none());
}

#[test]
#[should_panic(expected = "sample 666 is cursed")]
fn a_panic_in_a_dataset_is_the_training_loops_too() {
    let loader = Loader::new(Gated::open().0, stored(1), threads(2));
    loader.epoch(0).unwrap().for_each(drop);
}
