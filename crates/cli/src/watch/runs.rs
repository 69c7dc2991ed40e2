//! The runs of a folder, as far as they were read.

use super::run::Run;
use crate::events::{EVENTS, Tail};
use phalanx::Event;
use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

/// More are no folder of runs.
const MOST_RUNS: usize = 2000;

/// All of them.
pub(super) struct Runs {
    folder: PathBuf,
    read: BTreeMap<String, (Run, Tail)>,
}

impl Runs {
    pub(super) fn new(folder: PathBuf) -> Runs {
        Runs { folder, read: BTreeMap::new() }
    }

    /// Reads what is new; runs that are gone are forgotten.
    pub(super) fn look(&mut self) {
        let found = found(&self.folder);
        self.read.retain(|name, _| found.iter().any(|(found, _)| found == name));
        for (name, path) in found {
            let (run, tail) = self
                .read
                .entry(name.clone())
                .or_insert_with(|| (Run::new(name.clone()), Tail::new(path.join(EVENTS), 0)));
            loop {
                let look = tail.look();
                if look.was_cut {
                    // A run that goes on from a checkpoint cuts what it will tell again: all is read anew.
                    run.begin_anew();
                    *tail = Tail::new(path.join(EVENTS), 0);
                    continue;
                }
                let events = look.lines.iter().filter_map(|line| serde_json::from_slice::<Event>(line).ok());
                events.for_each(|event| run.hear(&event));
                if !look.has_more {
                    break;
                }
            }
            run.written = fs::metadata(path.join(EVENTS)).and_then(|file| file.modified()).ok();
        }
    }

    /// By their names.
    pub(super) fn all(&self) -> impl Iterator<Item = &Run> {
        self.read.values().map(|(run, _)| run)
    }

    pub(super) fn named(&self, name: &str) -> Option<&Run> {
        self.read.get(name).map(|(run, _)| run)
    }
}

/// The run directories of a folder, with their names; or the folder itself if it is one.
fn found(folder: &Path) -> Vec<(String, PathBuf)> {
    let name = |path: &Path| path.file_name().unwrap_or_default().to_string_lossy().into_owned();
    if folder.join(EVENTS).is_file() {
        let whole = fs::canonicalize(folder).unwrap_or_else(|_| folder.to_owned());
        return vec![(name(&whole), folder.to_owned())];
    }
    let entries = fs::read_dir(folder).into_iter().flatten().filter_map(|entry| Some(entry.ok()?.path()));
    let runs = entries.filter(|path| path.join(EVENTS).is_file());
    runs.map(|path| (name(&path), path)).take(MOST_RUNS).collect()
}

#[cfg(test)]
mod tests {
    use super::super::run::tests::step;
    use super::*;
    use crate::events::line_of;
    use std::io::Write;

    #[test]
    fn runs_come_grow_are_cut_and_go() {
        let folder = tempfile::tempdir().unwrap();
        let (a, b) = (folder.path().join("a"), folder.path().join("b"));
        let mut runs = Runs::new(folder.path().to_owned());
        runs.look();
        assert_eq!(runs.all().count(), 0);
        fs::create_dir(&a).unwrap();
        fs::create_dir(&b).unwrap();
        let mut file = fs::File::create(a.join(EVENTS)).unwrap();
        let mut write = |bytes: &[u8]| file.write_all(bytes).unwrap();
        (0..3).for_each(|i| write(&line_of(&step(i, if i == 1 { f64::NAN } else { 1.0 }))));
        // A line that isn't whole yet, and one that is none of ours.
        write(b"{\"event\":\"wonder\"}\n");
        let half = line_of(&step(3, 0.5));
        write(&half[..20]);
        runs.look();
        let made = |runs: &Runs| runs.named("a").map(|run| run.steps_made());
        assert_eq!((runs.all().count(), made(&runs)), (1, Some(3)));
        write(&half[20..]);
        runs.look();
        assert_eq!(made(&runs), Some(4));
        fs::write(a.join(EVENTS), line_of(&step(0, 1.0))).unwrap();
        runs.look();
        assert_eq!(made(&runs), Some(1));
        // One run by itself.
        let mut one = Runs::new(a.clone());
        one.look();
        assert_eq!(made(&one), Some(1));
        fs::remove_dir_all(&a).unwrap();
        runs.look();
        assert_eq!(runs.all().count(), 0);
    }
}
