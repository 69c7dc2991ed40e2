//! `phalanx bench loader`: how many images a second the loader prepares, with nobody training.

use super::at_least_one;
use crate::args::{LoaderArgs, WrongUsage};
use crate::say::print;
use anyhow::{Context, Result, ensure};
use phalanx::Recipe;
use phalanx::data::{
    CifarSet, Error, ExactSampler, Loader, LoaderOptions, Location, Network, Order, Places, Silent, Split,
    open, write_synthetic_cifar,
};
use serde::Serialize;
use std::time::Instant;

/// A line of `bench loader`.
#[derive(Serialize)]
struct LoaderLine<'a> {
    bench: &'static str,
    /// The median of the passes over all images.
    images_per_s: f64,
    slowest: f64,
    fastest: f64,
    passes: usize,
    images: usize,
    batch: usize,
    threads: usize,
    data: &'a str,
    /// Where the images lie, or `synthetic`.
    location: String,
    /// The recipe whose transforms are measured.
    recipe: &'a str,
}

/// As many images in each file as CIFAR has, so that caches are as much use as there.
const PER_FILE: usize = 10_000;

pub(super) fn loader(args: &LoaderArgs) -> Result<()> {
    at_least_one("--batch", args.batch)?;
    at_least_one("--passes", args.passes)?;
    let (name, settings) = transforms(&args.data_name);
    let settings = settings.iter().map(|setting| (*setting).to_owned()).chain(args.set.clone());
    let settings: Vec<String> = settings.chain([format!("data.name={}", args.data_name)]).collect();
    let recipe = Recipe::load(name, &settings).map_err(|error| WrongUsage(error.to_string()))?;
    // Gone with all that is in it, however this ends.
    let folder = tempfile::tempdir().context("no folder for images can be made")?;
    let (split, location) = match find(&recipe, args) {
        Err(Error::Missing { .. }) if args.data_name.starts_with("cifar") => {
            let set = if args.data_name == "cifar100" { CifarSet::Hundred } else { CifarSet::Ten };
            write_synthetic_cifar(folder.path(), set, PER_FILE)?;
            let places =
                Places { data: Some(folder.path().into()), cache: None, network: Network::Forbidden };
            (open(&args.data_name, recipe.view(), &places, &mut Silent)?, "synthetic".to_owned())
        }
        found => {
            let split = found?;
            let location = match &split.location {
                Location::Folder(path) | Location::File(path) => path.display().to_string(),
                Location::Library => "inside this program".to_owned(),
            };
            (split, location)
        }
    };
    let (images, batch_size) = (split.train.len(), args.batch);
    let order = Order::Shuffled { seed: recipe.train.seed };
    let sampler = ExactSampler { len: images, world_size: 1, rank: 0, batch_size, order };
    let options = LoaderOptions { threads: args.threads, ..LoaderOptions::default() };
    let loader = Loader::new(split.train, sampler, options);
    let mut rates =
        (0..=args.passes as u64).map(|epoch| pass(&loader, epoch)).collect::<Result<Vec<f64>>>()?;
    // The first pass brings the files into memory.
    rates.remove(0);
    rates.sort_by(f64::total_cmp);
    let line = LoaderLine {
        bench: "loader",
        images_per_s: rates[rates.len() / 2],
        slowest: rates[0],
        fastest: rates[rates.len() - 1],
        passes: args.passes,
        images,
        batch: args.batch,
        threads: args.threads,
        data: &args.data_name,
        location,
        recipe: name,
    };
    if args.json {
        print(serde_json::to_string(&line)?);
    } else {
        let LoaderLine { images_per_s, slowest, fastest, passes, threads, location, .. } = &line;
        print(format_args!(
            "{} ({location}), transforms of {name}, batch {batch_size}, {threads} threads: median {images_per_s:.0} images/s, \
             {slowest:.0} to {fastest:.0} in {passes} passes over {images} images",
            args.data_name
        ));
    }
    Ok(())
}

/// The recipe that has transforms for a dataset, and what is to be set in it.
fn transforms(data: &str) -> (&'static str, &'static [&'static str]) {
    match data {
        "mnist" | "mnist-mini" | "fashion-mnist" => ("mnist", &[]),
        "linear-regression" => ("linear-regression", &[]),
        "image-folder" => ("cifar10-resnet18", &["model.head=1", "data.size=224", "data.crop_area=0.08"]),
        _ => ("cifar10-resnet18", &[]),
    }
}

fn find(recipe: &Recipe, args: &LoaderArgs) -> Result<Split, Error> {
    let places = Places { network: Network::Forbidden, ..Places::from_env(args.data.clone()) };
    open(&recipe.data.name, recipe.view(), &places, &mut Silent)
}

/// Images a second of one epoch.
fn pass(loader: &Loader, epoch: u64) -> Result<f64> {
    let (start, mut images) = (Instant::now(), 0);
    for batch in loader.epoch(epoch)? {
        let batch = batch?;
        std::hint::black_box(batch.inputs());
        images += batch.len();
    }
    ensure!(images == loader.dataset().len(), "{images} images of {} came", loader.dataset().len());
    Ok(images as f64 / start.elapsed().as_secs_f64())
}
