//! `phalanx data`: data sets.

use crate::args::{Data, DataArgs, WrongUsage};
use crate::bar::FetchBar;
use crate::say::print;
use anyhow::{Result, bail};
use phalanx::data::{CifarSet, Listing, Location, Network, Places, catalog, listing, verify};

pub(crate) fn data(args: &DataArgs) -> Result<u8> {
    match &args.what {
        Data::List => {
            for listing in catalog() {
                print(format_args!("{:<20} {}", listing.name, listing.about));
            }
        }
        Data::Fetch { name } => {
            let location = Places::from_env(None).find(known(name)?, &mut FetchBar::new())?;
            print(format_args!("{name}: {}", place(&location)));
        }
        Data::Verify { name, data } => {
            let listing = known(name)?;
            // What isn't in a folder that is named isn't fetched in its stead.
            let network = if data.is_some() { Network::Forbidden } else { Network::Allowed };
            let places = Places { network, ..Places::from_env(data.clone()) };
            let location = places.find(listing, &mut FetchBar::new())?;
            if let Some(data) = places.passed_over(&location) {
                let (data, found) = (data.display(), place(&location));
                bail!(
                    "--data {data}: not all files of {name} are there\nhint: leave --data out to verify those in {found}"
                );
            }
            for file in verify(listing, &location)? {
                print(format_args!("{}  {} ({} bytes)", file.digest, file.path.display(), file.bytes));
            }
            if let Some(classes) = class_names(listing.name, &location)? {
                print(format_args!("{} classes: {}", classes.len(), classes.join(", ")));
            }
        }
    }
    Ok(0)
}

/// The data set of this name; another one is a slip of whoever typed it.
fn known(name: &str) -> Result<&'static Listing> {
    Ok(listing(name).map_err(|error| WrongUsage(error.to_string()))?)
}

/// What the classes are called, where that lies beside the images.
fn class_names(name: &str, location: &Location) -> Result<Option<Vec<String>>> {
    let Location::Folder(folder) = location else { return Ok(None) };
    Ok(match name {
        "cifar10" => CifarSet::Ten.class_names(folder)?,
        "cifar100" => CifarSet::Hundred.class_names(folder)?,
        _ => None,
    })
}

fn place(location: &Location) -> String {
    match location {
        Location::Folder(path) | Location::File(path) => path.display().to_string(),
        Location::Library => "inside this program".into(),
    }
}
