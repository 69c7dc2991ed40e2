//! The folder `runs`, where a run is kept that wasn't told where.

use crate::events::{self, EVENTS};
use phalanx::Recipe;
use phalanx::checkpoint::{Manifest, checkpoints};
use std::fs;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

const RUNS: &str = "runs";

/// The folder of checkpoints in a run directory.
pub(crate) fn checkpoints_of(run_dir: &Path) -> PathBuf {
    run_dir.join("checkpoints")
}

/// Whether a run has a checkpoint, as far as can be found out.
pub(crate) fn has_checkpoint(run_dir: &Path) -> bool {
    checkpoints(&checkpoints_of(run_dir)).map_or(true, |steps| !steps.is_empty())
}

/// Whether the run that was in a folder last has told its end.
pub(crate) fn is_over(run_dir: &Path) -> bool {
    events::is_over(&run_dir.join(EVENTS))
}

/// Where a run with this id is kept.
pub(crate) fn default_out(recipe: &Recipe, run_id: &str) -> PathBuf {
    PathBuf::from(format!("{RUNS}/{}-{run_id}", recipe.name))
}

/// The run of this recipe whose checkpoint is the newest; none if none has any.
pub(crate) fn newest(recipe: &Recipe) -> Option<PathBuf> {
    newest_in(Path::new(RUNS), &recipe.name)
}

fn newest_in(runs: &Path, recipe: &str) -> Option<PathBuf> {
    let folders = fs::read_dir(runs).into_iter().flatten().filter_map(|entry| Some(entry.ok()?.path()));
    let is_run = |folder: &PathBuf| {
        let name = folder.file_name().unwrap_or_default().to_string_lossy();
        // Ids have no dash, so that a run of mnist-mini is none of mnist.
        let id = name.strip_prefix(recipe).and_then(|rest| rest.strip_prefix('-'));
        id.is_some_and(|id| !id.contains('-'))
    };
    let dated = |folder: PathBuf| Some((last_checkpoint(&folder)?, folder));
    folders.filter(is_run).filter_map(dated).max().map(|(_, folder)| folder)
}

/// When the newest checkpoint of a run was committed.
fn last_checkpoint(run_dir: &Path) -> Option<SystemTime> {
    let dir = checkpoints_of(run_dir);
    let step = *checkpoints(&dir).ok()?.first()?;
    fs::metadata(Manifest::path(&dir, step)).and_then(|file| file.modified()).ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    #[test]
    fn the_newest_run_of_a_recipe_is_the_one_with_the_newest_checkpoint() {
        let runs = tempfile::tempdir().unwrap();
        assert_eq!(newest_in(&runs.path().join("missing"), "mnist"), None);
        let start = SystemTime::UNIX_EPOCH + Duration::from_secs(1_000_000);
        let made = [("mnist-b", 3), ("mnist-a", 5), ("mnist-mini-c", 9), ("mnist-mini-d", 7), ("other-e", 8)];
        for (name, seconds) in made {
            let manifest = Manifest::path(&checkpoints_of(&runs.path().join(name)), 12);
            fs::create_dir_all(manifest.parent().unwrap()).unwrap();
            let file = fs::File::create(manifest).unwrap();
            file.set_modified(start + Duration::from_secs(seconds)).unwrap();
        }
        fs::create_dir_all(runs.path().join("mnist-empty/checkpoints/step-3")).unwrap();
        fs::write(runs.path().join("mnist-file"), "").unwrap();
        let check = |recipe: &str, name: Option<&str>| {
            assert_eq!(newest_in(runs.path(), recipe), name.map(|name| runs.path().join(name)));
        };
        check("mnist", Some("mnist-a"));
        check("mnist-mini", Some("mnist-mini-c"));
        check("fashion-mnist", None);
    }
}
