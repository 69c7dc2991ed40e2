//! A file system in memory that knows what would outlive a crash of the machine: the content of a file that was synced,
//! and the names in a folder that was synced. It fails at any request it is told to.

use crate::checkpoint::disk::{Disk, DiskFile};
use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard};

/// What goes wrong at a request.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Fault {
    /// The process ends there: a write gets half of its bytes out, and no request after it does anything.
    Kill,
    /// The disk is full for this one request.
    Full,
}

/// How the machine fared.
#[derive(Clone, Copy, Debug)]
pub(super) enum After {
    /// Only the process ended: all that it did is there.
    Kill,
    /// What wasn't synced is lost.
    PowerLoss,
    /// Names were on their way to the disk before contents: files that weren't synced are empty.
    PowerLossThatKeptNames,
    /// The same, of the last change of a name alone.
    PowerLossThatKeptTheLastName,
}

#[derive(Clone, Copy)]
enum Node {
    Folder,
    File(usize),
}

type Names = BTreeMap<PathBuf, Node>;

/// A change of the names in a folder.
#[derive(Clone)]
struct Change {
    gone: Option<PathBuf>,
    there: Option<(PathBuf, Node)>,
}

#[derive(Default)]
struct State {
    /// Content, and content that was synced.
    files: Vec<(Vec<u8>, Vec<u8>)>,
    names: Names,
    synced: Names,
    /// Changes that were not synced.
    unsynced: Vec<Change>,
    /// Requests until the fault.
    fault: Option<(usize, Fault)>,
    dead: bool,
}

/// The machine; clones are the same one.
#[derive(Clone)]
pub(super) struct Machine(Arc<Mutex<State>>);

/// A machine with the folder of a run and nothing in it.
impl Default for Machine {
    fn default() -> Machine {
        let names = Names::from([(PathBuf::from("run"), Node::Folder)]);
        Machine(Arc::new(Mutex::new(State { synced: names.clone(), names, ..State::default() })))
    }
}

impl Machine {
    fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap()
    }

    /// Lets the request after the next `requests` fail.
    pub(super) fn fault_at(&self, requests: usize, fault: Fault) {
        self.state().fault = Some((requests, fault));
    }

    /// Whether the fault is still to come; if so, it never does.
    pub(super) fn is_spared(&self) -> bool {
        self.state().fault.take().is_some()
    }

    pub(super) fn flip_a_byte(&self, path: &Path) {
        let mut state = self.state();
        let Node::File(file) = state.names[path] else { panic!("{path:?} is a folder") };
        let (content, synced) = &mut state.files[file];
        let at = content.len() / 2;
        content[at] ^= 1;
        synced[at] ^= 1;
    }

    /// Writes what is left into a real folder.
    pub(super) fn leaves(&self, after: After, into: &Path) {
        let state = self.state();
        let mut names = state.synced.clone();
        match after {
            After::Kill => names = state.names.clone(),
            After::PowerLoss => {}
            After::PowerLossThatKeptNames => {
                state.unsynced.iter().for_each(|change| apply(&mut names, change))
            }
            After::PowerLossThatKeptTheLastName => {
                state.unsynced.last().iter().for_each(|change| apply(&mut names, change));
            }
        }
        // In order, so a folder comes before what is in it; what lost its folder is lost.
        for (path, node) in &names {
            let path = into.join(path);
            match node {
                _ if !path.parent().unwrap().exists() => {}
                Node::Folder => std::fs::create_dir(path).unwrap(),
                Node::File(file) => {
                    let (content, synced) = &state.files[*file];
                    let kept = if matches!(after, After::Kill) { content } else { synced };
                    std::fs::write(path, kept).unwrap();
                }
            }
        }
    }
}

fn apply(names: &mut Names, change: &Change) {
    if let Some(path) = &change.gone {
        names.remove(path);
    }
    names.extend(change.there.clone());
}

impl State {
    /// Counts a request.
    fn request(&mut self) -> io::Result<()> {
        if self.dead {
            return Err(io::Error::other("killed"));
        }
        match &mut self.fault {
            Some((0, fault)) => {
                let fault = *fault;
                self.fault = None;
                self.dead = fault == Fault::Kill;
                const ENOSPC: i32 = 28;
                Err(if self.dead { io::Error::other("killed") } else { io::Error::from_raw_os_error(ENOSPC) })
            }
            Some((left, _)) => {
                *left -= 1;
                Ok(())
            }
            None => Ok(()),
        }
    }

    fn change(&mut self, gone: Option<&Path>, there: Option<(&Path, Node)>) {
        let there = there.map(|(path, node)| (path.to_owned(), node));
        let change = Change { gone: gone.map(Path::to_owned), there };
        apply(&mut self.names, &change);
        self.unsynced.push(change);
    }

    fn find(&self, path: &Path) -> io::Result<Node> {
        self.names.get(path).copied().ok_or_else(|| io::ErrorKind::NotFound.into())
    }
}

impl Disk for Machine {
    fn create_dir(&self, path: &Path) -> io::Result<()> {
        let mut state = self.state();
        state.request()?;
        let mut above: Vec<&Path> = path.ancestors().filter(|p| !p.as_os_str().is_empty()).collect();
        above.reverse();
        for path in above {
            if !state.names.contains_key(path) {
                state.change(None, Some((path, Node::Folder)));
            }
        }
        Ok(())
    }

    fn create(&self, path: &Path) -> io::Result<Box<dyn DiskFile>> {
        let mut state = self.state();
        state.request()?;
        state.files.push(Default::default());
        let index = state.files.len() - 1;
        state.change(None, Some((path, Node::File(index))));
        Ok(Box::new(OpenFile { machine: self.clone(), index }))
    }

    fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
        let mut state = self.state();
        state.request()?;
        let node = state.find(from)?;
        state.change(Some(from), Some((to, node)));
        Ok(())
    }

    fn remove_file(&self, path: &Path) -> io::Result<()> {
        let mut state = self.state();
        state.request()?;
        state.find(path)?;
        state.change(Some(path), None);
        Ok(())
    }

    fn remove_dir(&self, path: &Path) -> io::Result<()> {
        let mut state = self.state();
        state.request()?;
        state.find(path)?;
        assert!(!state.names.keys().any(|other| other.parent() == Some(path)), "{path:?} isn't empty");
        state.change(Some(path), None);
        Ok(())
    }

    fn sync_dir(&self, path: &Path) -> io::Result<()> {
        let mut state = self.state();
        state.request()?;
        let in_folder = |change: &Change| {
            let path_of = change.gone.as_deref().or(change.there.as_ref().map(|(path, _)| path.as_path()));
            path_of.and_then(Path::parent) == Some(path)
        };
        let changes = std::mem::take(&mut state.unsynced);
        let (now, later): (Vec<Change>, Vec<Change>) = changes.into_iter().partition(in_folder);
        now.iter().for_each(|change| apply(&mut state.synced, change));
        state.unsynced = later;
        Ok(())
    }

    fn list(&self, path: &Path) -> io::Result<Vec<String>> {
        let mut state = self.state();
        state.request()?;
        let inside = state.names.keys().filter(|name| name.parent() == Some(path));
        Ok(inside.map(|name| name.file_name().unwrap().to_string_lossy().into_owned()).collect())
    }
}

struct OpenFile {
    machine: Machine,
    index: usize,
}

impl DiskFile for OpenFile {
    fn write(&mut self, bytes: &[u8]) -> io::Result<()> {
        let mut state = self.machine.state();
        let was_dead = state.dead;
        let result = state.request();
        let written = match result {
            Ok(()) => bytes.len(),
            // The one that is interrupted gets half of its bytes out.
            Err(_) if !was_dead => bytes.len() / 2,
            Err(_) => 0,
        };
        state.files[self.index].0.extend_from_slice(&bytes[..written]);
        result
    }

    fn sync(&mut self) -> io::Result<()> {
        let mut state = self.machine.state();
        state.request()?;
        let (content, synced) = &mut state.files[self.index];
        synced.clone_from(content);
        Ok(())
    }
}
