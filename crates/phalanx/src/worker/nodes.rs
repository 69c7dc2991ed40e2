//! What the nodes of a run have to have alike, as ranks find it out from each other: the time, and the folder that the run is kept in.
//!
//! Where agents have started the ranks, these have compared the clocks.

use super::Worker;
use crate::error::Error;
use phalanx_comm::{Group, Rank};
use phalanx_job::{clock_ms, host_name, why_too_far_apart};
use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// The bytes of a host's name that are told.
const NAME: usize = 64;
/// How long what the first rank has written may take to be seen elsewhere, and how often it is looked for.
const SEEN: Duration = Duration::from_secs(2);
const LOOK: Duration = Duration::from_millis(50);

/// Fails on all ranks alike where the clock of one is too far from the first rank's.
pub(super) fn compare_clocks(group: &Group) -> Result<(), Error> {
    // Whoever comes late would have read its clock late.
    group.barrier()?;
    let mut clocks = vec![0; group.world_size()];
    group.all_gather(&[clock_ms()], &mut clocks)?;
    let first = clocks[0];
    let names = names(group)?;
    let why = clocks.iter().zip(&names).find_map(|(&clock, name)| why_too_far_apart(name, clock, first));
    why.map_or(Ok(()), |why| Err(Error::Join(why)))
}

/// What the hosts of all ranks are called.
fn names(group: &Group) -> Result<Vec<String>, Error> {
    let (host, mut own) = (host_name(), [0; NAME]);
    let bytes = &host.as_bytes()[..host.len().min(NAME)];
    own[..bytes.len()].copy_from_slice(bytes);
    let mut all = vec![0; NAME * group.world_size()];
    group.all_gather(&own, &mut all)?;
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).trim_end_matches('\0').to_owned();
    Ok(all.chunks(NAME).map(text).collect())
}

/// Gives all ranks the bytes that `root` has.
pub(crate) fn share(group: &Group, root: Rank, mut bytes: Vec<u8>) -> Result<Vec<u8>, Error> {
    let mut length = [bytes.len() as u64];
    group.broadcast(&mut length, root)?;
    bytes.resize(length[0] as usize, 0);
    group.broadcast(&mut bytes, root)?;
    Ok(bytes)
}

impl Worker {
    /// Fails on all ranks alike, with [`Error::NotShared`], where one of them doesn't see the first rank's `folder`, which has to be there
    /// and is asked for on that rank alone. All ranks have to ask.
    pub fn look_for_folder(&self, folder: Option<&Path>) -> Result<(), Error> {
        let group = self.group();
        let token = folder.map(Token::leave).transpose()?;
        let path =
            token.as_ref().map_or_else(Vec::new, |token| token.0.to_string_lossy().into_owned().into_bytes());
        let path = PathBuf::from(String::from_utf8_lossy(&share(&group, Rank(0), path)?).into_owned());
        let mut seen = vec![0u8; group.world_size()];
        group.all_gather(&[u8::from(is_seen(&path))], &mut seen)?;
        let Some(rank) = seen.iter().position(|&seen| seen == 0) else { return Ok(()) };
        let hosts = names(&group)?;
        let folder = path.parent().unwrap_or(&path).to_owned();
        Err(Error::NotShared { folder, rank, host: hosts[rank].clone(), first: hosts[0].clone() })
    }
}

/// A file that is there as long as this is.
struct Token(PathBuf);

impl Token {
    /// Of a name that nobody has looked for, so that no file system can remember that it wasn't there.
    fn leave(folder: &Path) -> Result<Token, Error> {
        let path = folder.join(format!(".seen-{}-{}", std::process::id(), clock_ms()));
        match fs::write(&path, "") {
            Ok(()) => Ok(Token(path)),
            Err(source) => Err(Error::Io { path, source }),
        }
    }
}

impl Drop for Token {
    fn drop(&mut self) {
        // One that stays is empty and hurts nobody.
        let _ = fs::remove_file(&self.0);
    }
}

fn is_seen(path: &Path) -> bool {
    let start = Instant::now();
    while !path.exists() {
        if start.elapsed() > SEEN {
            return false;
        }
        std::thread::sleep(LOOK);
    }
    true
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicUsize, Ordering};

    #[test]
    fn a_folder_that_all_see_is_shared_and_left_as_it_was() {
        let folder = tempfile::tempdir().unwrap();
        crate::spawn(3, |worker| {
            let own = worker.is_first().then_some(folder.path());
            worker.look_for_folder(own)?;
            compare_clocks(&worker.group())
        })
        .unwrap();
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 0);
    }

    #[test]
    fn a_folder_that_the_first_rank_has_not_is_told_by_it() {
        let folder = tempfile::tempdir().unwrap();
        let (gone, failed) = (folder.path().join("gone"), AtomicUsize::new(0));
        let error = crate::spawn(2, |worker| {
            let looked = worker.look_for_folder(worker.is_first().then_some(&gone));
            looked.inspect_err(|_| _ = failed.fetch_add(1, Ordering::Relaxed))
        });
        assert!(error.unwrap_err().to_string().contains("gone/.seen-"));
        assert_eq!(failed.into_inner(), 2);
    }
}
