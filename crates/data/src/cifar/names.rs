//! What the classes of CIFAR are called: the files of names that lie beside the images, in either format.
//!
//! Training goes by numbers and needs no names, so a folder without them is none the worse.

use super::{CifarSet, pickled};
use crate::error::{CifarProblem, Error, Result};
use std::fs::File;
use std::io::Read;
use std::path::Path;

/// No file of names is longer: the longest published one has 1.5 KB.
const MAX_BYTES: u64 = 1 << 20;

impl CifarSet {
    /// The files of names: of the binary format, and of the Python one with what it calls them.
    fn names(self) -> (&'static str, &'static str, &'static str) {
        match self {
            CifarSet::Ten => ("batches.meta.txt", "batches.meta", "label_names"),
            CifarSet::Hundred => ("fine_label_names.txt", "meta", "fine_label_names"),
            CifarSet::HundredCoarse => ("coarse_label_names.txt", "meta", "coarse_label_names"),
        }
    }

    /// The names of the classes, by number; `None` if the folder holds no file of them.
    ///
    /// # Errors
    /// The file can't be read, or names another number of classes.
    pub fn class_names(self, folder: &Path) -> Result<Option<Vec<String>>> {
        let (text, pickle, key) = self.names();
        let (text, pickle) = (folder.join(text), folder.join(pickle));
        let (path, is_text) = match (text.exists(), pickle.exists()) {
            (true, _) => (text, true),
            (false, true) => (pickle, false),
            (false, false) => return Ok(None),
        };
        let mut bytes = Vec::new();
        let file = File::open(&path).map_err(Error::io("open", &path))?;
        file.take(MAX_BYTES).read_to_end(&mut bytes).map_err(Error::io("read", &path))?;
        let names = if is_text { Ok(lines(&bytes)) } else { pickled::names(&bytes, key) };
        let refused = |problem| Error::Cifar { path: path.clone(), problem };
        let names = names.map_err(refused)?;
        if names.len() == self.classes() {
            return Ok(Some(names));
        }
        let what = format!("the names of {} classes", self.classes());
        Err(refused(CifarProblem::Contents { what, found: format!("{} of them", names.len()) }))
    }
}

/// A name a line; the published files end with an empty one.
fn lines(bytes: &[u8]) -> Vec<String> {
    let text = String::from_utf8_lossy(bytes);
    text.lines().map(str::trim).filter(|line| !line.is_empty()).map(str::to_owned).collect()
}
