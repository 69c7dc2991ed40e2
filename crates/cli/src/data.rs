//! `phalanx data`: data sets.

use crate::args::{Data, DataArgs};
use crate::bar::FetchBar;
use crate::say::print;
use anyhow::Result;
use phalanx::data::{CifarSet, Location, Places, catalog, listing, verify};

pub(crate) fn data(args: &DataArgs) -> Result<u8> {
    match &args.what {
        Data::List => {
            for listing in catalog() {
                print(format_args!("{:<20} {}", listing.name, listing.about));
            }
        }
        Data::Fetch { name } => {
            let location = Places::from_env(None).find(listing(name)?, &mut FetchBar::new())?;
            print(format_args!("{name}: {}", place(&location)));
        }
        Data::Verify { name, data } => {
            let listing = listing(name)?;
            let location = Places::from_env(data.clone()).find(listing, &mut FetchBar::new())?;
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
