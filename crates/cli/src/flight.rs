//! `phalanx flight`: what the flight records of a run's ranks say together.

use crate::args::FlightArgs;
use crate::say::print;
use anyhow::{Context, Result, bail};
use phalanx::comm::diagnosis;
use phalanx::flight::read;

pub(crate) fn flight(args: &FlightArgs) -> Result<u8> {
    let dir = args.dir.display();
    let flights = read(&args.dir).with_context(|| format!("{dir}: can't be read"))?;
    if flights.is_empty() {
        bail!(
            "{dir}: there is no flight record\nhint: give the directory of a run in which ranks lost each other"
        );
    }
    if args.json {
        flights.iter().for_each(|flight| print(serde_json::json!(flight)));
    } else {
        diagnosis(&flights).into_iter().for_each(print);
    }
    Ok(0)
}
