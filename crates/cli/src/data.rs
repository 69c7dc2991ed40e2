//! `phalanx data`: data sets.

use crate::args::{Data, DataArgs};
use crate::bar::FetchBar;
use crate::say::print;
use anyhow::Result;
use phalanx::data::{Location, Places, catalog, listing, verify};

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
                print(format_args!("{}  {} ({} bytes)", file.sha256, file.path.display(), file.bytes));
            }
        }
    }
    Ok(0)
}

fn place(location: &Location) -> String {
    match location {
        Location::Folder(folder) => folder.display().to_string(),
        Location::Library => "inside this program".into(),
    }
}
