//! Where the flight records of a run lie: `flight/<generation>/rank-<r>.json` in its directory, one for each rank of a group that
//! failed. What they say is [`phalanx_comm::diagnosis`]'s affair.

use phalanx_comm::Flight;
use std::fs;
use std::io::{Error, ErrorKind, Result};
use std::path::{Path, PathBuf};

/// The folder of all records of a run.
const FOLDER: &str = "flight";

/// The file of a rank's record of a group. Groups that are a part of the world, of `world_size` ranks, have their members in
/// the name, so many of them at most.
fn file_name(flight: &Flight, world_size: usize) -> String {
    const NAMED: usize = 16;
    let rank = flight.rank;
    if flight.members.len() == world_size {
        return format!("rank-{rank}.json");
    }
    let members: Vec<String> = flight.members.iter().take(NAMED).map(u32::to_string).collect();
    let more = if flight.members.len() > NAMED { "-and-more" } else { "" };
    format!("rank-{rank}-of-{}{more}.json", members.join("-"))
}

/// Writes a record into the directory of a run of `world_size` ranks: the whole of it, or nothing. Gives the file.
pub fn keep(run_dir: &Path, world_size: usize, flight: &Flight) -> Result<PathBuf> {
    let folder = run_dir.join(FOLDER).join(flight.generation.to_string());
    fs::create_dir_all(&folder)?;
    let path = folder.join(file_name(flight, world_size));
    let partial = path.with_extension("partial");
    let written = fs::write(&partial, serde_json::to_vec(flight)?).and_then(|()| fs::rename(&partial, &path));
    if written.is_err() {
        // The first error is the one to tell.
        let _ = fs::remove_file(&partial);
    }
    written.map(|()| path)
}

/// Takes away the record that an earlier run left of a rank in this generation, if one did.
pub(crate) fn clear(run_dir: &Path, generation: u64, rank: u32) -> Result<()> {
    match fs::remove_file(run_dir.join(FOLDER).join(generation.to_string()).join(format!("rank-{rank}.json")))
    {
        Err(error) if error.kind() != ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}

/// The folder of a run's records, if there are any.
pub fn folder(run_dir: &Path) -> Option<PathBuf> {
    Some(run_dir.join(FOLDER)).filter(|folder| folder.is_dir())
}

/// The records of the newest generation in a run directory, its folder `flight`, or one generation's folder; by file name.
pub fn read(dir: &Path) -> Result<Vec<Flight>> {
    let root = folder(dir).unwrap_or_else(|| dir.to_owned());
    let newest = generations(&root)?.into_iter().max().map(|generation| root.join(generation.to_string()));
    let mut files: Vec<PathBuf> = fs::read_dir(newest.unwrap_or(root))?
        .map(|entry| entry.map(|entry| entry.path()))
        .collect::<Result<_>>()?;
    files.retain(|file| file.extension().is_some_and(|extension| extension == "json"));
    files.sort();
    let record = |file: &PathBuf| {
        let of_file = |error: &dyn std::fmt::Display| {
            Error::new(ErrorKind::InvalidData, format!("{} is no flight record: {error}", file.display()))
        };
        let bytes = fs::read(file).map_err(|error| of_file(&error))?;
        serde_json::from_slice(&bytes).map_err(|error| of_file(&error))
    };
    files.iter().map(record).collect()
}

/// The generations that have a folder.
fn generations(root: &Path) -> Result<Vec<u64>> {
    let names = fs::read_dir(root)?.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok());
    Ok(names.collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn flight(generation: u64, rank: u32, members: &[u32]) -> Flight {
        let (members, error) = (members.to_vec(), "enough".to_owned());
        Flight { generation, members, rank, error, operations: Vec::new(), peers: Vec::new() }
    }

    #[test]
    fn the_newest_generation_is_read_from_wherever_a_user_points() {
        let run = tempfile::tempdir().unwrap();
        assert!(folder(run.path()).is_none() && read(run.path()).unwrap().is_empty());
        let old = flight(9, 0, &[0, 1]);
        let new = [flight(10, 0, &[0, 1]), flight(10, 1, &[0, 1])];
        for flight in [&old, &new[0], &new[1]] {
            keep(run.path(), 2, flight).unwrap();
        }
        let records = run.path().join("flight");
        for dir in [run.path().to_owned(), records.clone(), records.join("10")] {
            assert_eq!(read(&dir).unwrap(), new, "{}", dir.display());
        }
        assert_eq!(read(&records.join("9")).unwrap(), [old]);
        clear(run.path(), 10, 1).unwrap();
        clear(run.path(), 10, 1).unwrap();
        assert_eq!(read(run.path()).unwrap(), new[..1]);
        fs::write(records.join("10/rank-7.json"), "{").unwrap();
        assert!(read(run.path()).unwrap_err().to_string().contains("rank-7.json is no flight record"));
    }

    #[test]
    fn parts_of_the_world_have_files_of_their_own() {
        let check = |members: &[u32], want: &str| assert_eq!(file_name(&flight(1, 3, members), 4), want);
        check(&[0, 1, 2, 3], "rank-3.json");
        check(&[3, 1], "rank-3-of-3-1.json");
        let many: Vec<u32> = (0..17).collect();
        check(&many, "rank-3-of-0-1-2-3-4-5-6-7-8-9-10-11-12-13-14-15-and-more.json");
    }
}
