//! From a name to two datasets, ready to train and to be judged by.

use crate::catalog::listing;
use crate::dataset::{Dataset, Reconstruct};
use crate::error::{Error, Result};
use crate::linear::LinearRegression;
use crate::mnist::{Mnist, Part, Scaling};
use crate::places::{Location, Places};
use crate::progress::Progress;
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
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct View {
    /// What pixels become.
    pub pixels: Pixels,
    /// What the model is to predict.
    pub targets: Targets,
}

/// What pixels become.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Pixels {
    /// Mean 0 and deviation 1 over the training images.
    #[default]
    Standard,
    /// 0 to 1.
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
    if listing.name == "linear-regression" {
        if view != View::default() {
            return Err(Error::Unsuitable { name: listing.name, reason: "it holds points and no images" });
        }
        let line: Arc<dyn Dataset> = Arc::new(LinearRegression::new(64));
        return Ok(Split { train: line.clone(), test: line, location: Location::Library });
    }
    let scaling = match (view.pixels, listing.name) {
        (Pixels::Unit, _) => Scaling::UNIT,
        (Pixels::Standard, "fashion-mnist") => Scaling::FASHION_MNIST,
        (Pixels::Standard, _) => Scaling::MNIST,
    };
    let location = places.find(listing, progress)?;
    let part = |part| -> Result<Arc<dyn Dataset>> {
        let images = match &location {
            Location::Library => Mnist::mini(part, scaling),
            Location::Folder(folder) => Mnist::open(folder, part, scaling)?,
        };
        Ok(match view.targets {
            Targets::Own => Arc::new(images),
            Targets::Inputs => Arc::new(Reconstruct::new(images)),
        })
    };
    Ok(Split { train: part(Part::Train)?, test: part(Part::Test)?, location })
}
