//! Runs that measure which ways to compute are the fastest.

use super::{TOLERANCE, fake, run, trainer};
use phalanx::Trainer;
use phalanx::tensor::{Device, GpuOptions};
use phalanx_fake_cuda::FakeCuda;
use std::path::Path;

/// A GPU whose kernels and choices are kept.
fn gpu(fake: &FakeCuda, number: usize, kept: &Path) -> Device {
    let options = GpuOptions {
        libraries: vec![fake.folder().to_owned()],
        kernels: Some(kept.to_owned()),
        ..GpuOptions::default()
    };
    Device::cuda(number as u32, &options).unwrap_or_else(|error| panic!("{error}"))
}

/// How many products and convolutions were computed so far, and how many choices are kept.
fn computed(fake: &FakeCuda, kept: &Path) -> [i64; 3] {
    let files = std::fs::read_dir(kept).map_or(0, |files| {
        let names = files.map(|file| file.unwrap().file_name().into_string().unwrap());
        names
            .inspect(|name| assert!(!name.starts_with("undecided"), "{name}"))
            .filter(|name| name.ends_with(".choice"))
            .count() as i64
    });
    [fake.cublaslt().calls("cublasLtMatmul"), fake.cudnn().calls("cudnnBackendExecute"), files]
}

#[test]
fn ways_to_compute_are_searched_for_once_and_kept_for_later_starts() {
    let Some(fake) = fake() else { return };
    let folder = tempfile::tempdir().unwrap();
    let kept = folder.path();
    for graphs in [false, true] {
        let kept = kept.join(graphs.to_string());
        let plain = Trainer { graphs, ..trainer() };
        let searching = Trainer { search: true, ..plain.clone() };
        let ran = |trainer: &Trainer| {
            let before = computed(&fake, &kept);
            let (told, [weights, ..]) = run(trainer, 1, &|_| gpu(&fake, 0, &kept));
            let after = computed(&fake, &kept);
            (told.losses, weights.unwrap(), [0, 1, 2].map(|i| after[i] - before[i]))
        };
        let (losses, _, without) = ran(&plain);
        assert_eq!(without[2], 0, "nothing is kept where nothing is searched for");
        let (found, weights, with) = ran(&searching);
        assert!(with[0] > without[0] && with[1] > without[1] && with[2] > 0, "{with:?}, {without:?}");
        let (later, same, again) = ran(&searching);
        assert_eq!(again, without, "as many calls as without a search, and no choice more");
        assert_eq!((&later, same), (&found, weights), "to the bit");
        for (found, wanted) in found.iter().zip(&losses) {
            assert!((found - wanted).abs() <= TOLERANCE * wanted.abs(), "{found}, not {wanted}");
        }
    }
}

#[test]
fn where_ranks_have_to_compute_the_same_bits_the_libraries_choose() {
    let Some(fake) = fake() else { return };
    let folder = tempfile::tempdir().unwrap();
    let searching = Trainer { search: true, ..trainer() };
    let kept_of = |trainer: &Trainer, ranks: usize| {
        let kept = folder.path().join(format!("{ranks}-{:?}", trainer.logical_shards));
        run(trainer, ranks, &|rank| gpu(&fake, rank, &kept));
        computed(&fake, &kept)[2]
    };
    assert!(kept_of(&searching, 2) > 0);
    assert_eq!(kept_of(&Trainer { logical_shards: Some(2), ..searching }, 2), 0);
}
