//! Finds or fetches a dataset, and measures how long a batch of 64 takes to prepare.
//! Usage: batches [NAME [THREADS]]

use phalanx_data::{ExactSampler, FetchEvent, Loader, LoaderOptions, Order, Places, View, open};
use std::time::Instant;

fn main() -> phalanx_data::Result<()> {
    let mut args = std::env::args().skip(1);
    let name = args.next().unwrap_or_else(|| "mnist-mini".to_owned());
    let threads = args.next().and_then(|n| n.parse().ok()).unwrap_or(0);
    let mut show = |event: FetchEvent<'_>| match event {
        FetchEvent::Bytes { .. } => {}
        other => eprintln!("{other:?}"),
    };
    let start = Instant::now();
    let split = open(&name, View::default(), &Places::from_env(None), &mut show)?;
    println!(
        "{name}: {} samples in {:?}, opened in {:?}",
        split.train.len(),
        split.location,
        start.elapsed()
    );
    let order = Order::Shuffled { seed: 1 };
    let sampler = ExactSampler { len: split.train.len(), world_size: 1, rank: 0, batch_size: 64, order };
    let loader = Loader::new(split.train, sampler, LoaderOptions { threads, ..LoaderOptions::default() });
    for epoch in 0..3 {
        let start = Instant::now();
        let mut samples = 0;
        for batch in loader.epoch(epoch)? {
            samples += batch?.len();
        }
        let took = start.elapsed();
        let batch = took / loader.steps_per_epoch() as u32;
        println!("epoch {epoch}: {samples} samples in {took:?}, {batch:?} a batch with {threads} threads");
    }
    Ok(())
}
