//! From a name to two datasets, ready to train and to be judged by.

use crate::catalog::listing;
use crate::cifar::{Cifar, CifarSet};
use crate::dataset::{Dataset, Reconstruct};
use crate::error::{Error, Result};
use crate::folder::ImageFolder;
use crate::images::Images;
use crate::linear::LinearRegression;
use crate::mnist::{Mnist, Part, Scaling};
use crate::pictures::Pictures;
use crate::places::{Location, Places};
use crate::progress::Progress;
use crate::text::Text;
use crate::transform::Normalise;
use crate::treatment::Treatment;
use std::path::Path;
use std::sync::Arc;

/// The two parts of a dataset.
#[derive(Clone)]
pub struct Split {
    /// The samples to learn from.
    pub train: Arc<dyn Dataset>,
    /// The samples to be judged by; the same ones where a dataset has no others.
    pub test: Arc<dyn Dataset>,
    /// Where they were found.
    pub location: Location,
}

/// How a dataset is presented to the model.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct View {
    /// What pixels become.
    pub pixels: Pixels,
    /// What the model is to predict.
    pub targets: Targets,
    /// What is done to colour images.
    pub treatment: Treatment,
    /// Bytes of a text that a model sees at once. Default 128.
    pub window: Option<usize>,
}

/// What pixels become.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Pixels {
    /// Mean 0 and deviation 1 over the training images.
    #[default]
    Standard,
    /// 0 to 1, unless the treatment says otherwise.
    Unit,
}

/// What the model is to predict.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Targets {
    /// The dataset's own targets.
    #[default]
    Own,
    /// The inputs, flat: see [`Reconstruct`].
    Inputs,
}

/// Bytes of a window where nothing is said of it.
const USUAL_WINDOW: usize = 128;

/// Finds or fetches the dataset called `name`, and reads it.
///
/// ```
/// use phalanx_data::{Places, Silent, View, open};
/// let digits = open("mnist-mini", View::default(), &Places::from_env(None), &mut Silent)?;
/// assert_eq!((digits.train.len(), digits.test.len()), (2000, 500));
/// # Ok::<(), phalanx_data::Error>(())
/// ```
///
/// # Errors
/// An unknown name, data that is nowhere to be had, files that aren't what they should be, and [`Error::Unsuitable`] for a
/// view that the dataset doesn't have.
pub fn open(name: &str, view: View, places: &Places, progress: &mut dyn Progress) -> Result<Split> {
    let listing = listing(name)?;
    let unsuitable = |reason| Err(Error::Unsuitable { name: listing.name, reason });
    let location = places.find(listing, progress)?;
    match (listing.name, &location) {
        ("linear-regression", _) if view != View::default() => unsuitable("it holds points and no images"),
        ("linear-regression", _) => {
            let line: Arc<dyn Dataset> = Arc::new(LinearRegression::new(64));
            Ok(Split { train: line.clone(), test: line, location })
        }
        ("text", Location::File(path)) => {
            let [train, test] = Text::parts(path, view.window.unwrap_or(USUAL_WINDOW))?;
            Ok(Split { train: Arc::new(train), test: Arc::new(test), location })
        }
        ("cifar10", Location::Folder(folder)) => cifar(folder, CifarSet::Ten, Normalise::CIFAR10, view),
        ("cifar100", Location::Folder(folder)) => cifar(folder, CifarSet::Hundred, Normalise::CIFAR100, view),
        ("image-folder", Location::Folder(folder)) => {
            let (train, test) = ImageFolder::parts(folder)?;
            pictures(train, test, Normalise::IMAGENET, view, folder)
        }
        _ if view.treatment != Treatment::default() => unsuitable("it holds no colour images"),
        _ => digits(listing.name, location, view),
    }
}

fn digits(name: &str, location: Location, view: View) -> Result<Split> {
    let scaling = match (view.pixels, name) {
        (Pixels::Unit, _) => Scaling::UNIT,
        (Pixels::Standard, "fashion-mnist") => Scaling::FASHION_MNIST,
        (Pixels::Standard, _) => Scaling::MNIST,
    };
    let part = |part| -> Result<Arc<dyn Dataset>> {
        let images = match &location {
            Location::Library => Mnist::mini(part, scaling),
            Location::Folder(folder) => Mnist::open(folder, part, scaling)?,
            Location::File(_) => unreachable!("digits lie in a folder"),
        };
        Ok(targets(images, view))
    };
    Ok(Split { train: part(Part::Train)?, test: part(Part::Test)?, location })
}

fn cifar(folder: &Path, set: CifarSet, usual: Normalise, view: View) -> Result<Split> {
    let part = |part| Cifar::open(folder, set, part, view.treatment.bad);
    pictures(part(Part::Train)?, part(Part::Test)?, usual, view, folder)
}

/// Two parts of colour images, each under its own pipeline.
fn pictures<I: Images + 'static>(
    train: I,
    test: I,
    usual: Normalise,
    view: View,
    folder: &Path,
) -> Result<Split> {
    let usual = match view.pixels {
        Pixels::Standard => usual,
        Pixels::Unit => Normalise::UNIT,
    };
    let Treatment { seed, bad, .. } = view.treatment;
    let pipelines = view.treatment.pipelines(train.size(), usual)?;
    Ok(Split {
        train: targets(Pictures::new(train, pipelines.train, seed, bad)?, view),
        test: targets(Pictures::new(test, pipelines.test, seed, bad)?, view),
        location: Location::Folder(folder.to_path_buf()),
    })
}

fn targets(images: impl Dataset + 'static, view: View) -> Arc<dyn Dataset> {
    match view.targets {
        Targets::Own => Arc::new(images),
        Targets::Inputs => Arc::new(Reconstruct::new(images)),
    }
}
