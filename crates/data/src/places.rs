//! Where data is looked for: the user's folder, the cache, the folders of system packages, and then the network.

use crate::catalog::{Home, Listing};
use crate::error::{Attempt, Error, Result};
use crate::fetch::fetch;
use crate::progress::Progress;
use std::ffi::OsString;
use std::path::{Path, PathBuf};

/// The places of this machine and user.
#[derive(Clone, Debug)]
pub struct Places {
    /// The folder that the user names (`--data`), asked before all others.
    pub data: Option<PathBuf>,
    /// Where fetched data is kept; `None` if the user has no home.
    pub cache: Option<PathBuf>,
    /// Whether data that is nowhere may be fetched.
    pub network: Network,
}

/// Whether data may be fetched.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Network {
    /// From the sources that the catalog lists.
    Allowed,
    /// Not at all.
    Forbidden,
}

/// Where a dataset is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Location {
    /// In this folder, each file raw or compressed.
    Folder(PathBuf),
    /// In this file.
    File(PathBuf),
    /// In the library.
    Library,
}

impl Places {
    /// The user's folder, and the cache in `$PHALANX_CACHE`, else `$XDG_CACHE_HOME/phalanx`, else `~/.cache/phalanx`.
    pub fn from_env(data: Option<PathBuf>) -> Places {
        Places { data, cache: cache_folder(|name| std::env::var_os(name)), network: Network::Allowed }
    }

    /// The user's folder, if a dataset was found elsewhere, since that folder hasn't all files of it.
    pub fn passed_over(&self, found: &Location) -> Option<&Path> {
        let Location::Folder(found) = found else { return None };
        self.data.as_deref().filter(|data| !found.starts_with(data))
    }

    /// Where fetched files of a dataset are kept, if anything can be kept.
    pub fn cache_of(&self, listing: &Listing) -> Option<PathBuf> {
        self.cache.as_ref().map(|cache| cache.join("datasets").join(listing.name))
    }

    /// Finds a dataset, and fetches it into the cache if it is nowhere.
    ///
    /// # Errors
    /// [`Error::MissingFolder`] if the user's folder doesn't exist, [`Error::Inside`] if there is one and nothing to be looked for, [`Error::NoFolder`] if there must be one and is none,
    /// [`Error::Missing`] if the dataset can't be had, with all that was tried; and what fetching meets on the local disk.
    pub fn find(&self, listing: &Listing, progress: &mut dyn Progress) -> Result<Location> {
        if let Home::File { known } = listing.home {
            return self.find_text(known).map(Location::File);
        }
        let missing = self.data.as_ref().filter(|data| !data.is_dir());
        let (below, known) = match (listing.home, missing) {
            (Home::File { .. }, _) => unreachable!("it was found above"),
            (Home::Library, _) => {
                return match &self.data {
                    Some(path) => Err(Error::Inside { name: listing.name, path: path.clone() }),
                    None => Ok(Location::Library),
                };
            }
            (_, Some(data)) => return Err(Error::MissingFolder { path: data.clone() }),
            (Home::Given, None) => {
                let none = || Error::NoFolder { name: listing.name };
                return Ok(Location::Folder(self.data.clone().ok_or_else(none)?));
            }
            (Home::Disk { below, known, .. }, None) => (below, known),
        };
        let mut tried = Vec::new();
        let mut folders = Vec::new();
        if let Some(data) = &self.data {
            folders
                .extend(below.iter().map(|sub| if sub.is_empty() { data.clone() } else { data.join(sub) }));
        }
        let cache = self.cache_of(listing);
        folders.extend(cache.clone());
        folders.extend(known.iter().map(PathBuf::from));
        for folder in folders {
            match missing_file(&folder, listing) {
                None => return Ok(Location::Folder(folder)),
                // The layouts that the user's folder doesn't follow are no news.
                Some(_)
                    if !folder.is_dir()
                        && self.data.as_ref().is_some_and(|data| folder.starts_with(data)) => {}
                Some(reason) => tried.push(Attempt { place: folder.display().to_string(), reason }),
            }
        }
        match (cache, self.network) {
            (_, Network::Forbidden) => {}
            (None, Network::Allowed) => tried.push(Attempt {
                place: "cache".to_owned(),
                reason: "no folder to fetch into, as neither PHALANX_CACHE nor HOME is set".to_owned(),
            }),
            (Some(cache), Network::Allowed) => match fetch(listing, &cache, progress) {
                Ok(()) => return Ok(Location::Folder(cache)),
                Err(Error::Missing { tried: sources, .. }) => tried.extend(sources),
                Err(other) => return Err(other),
            },
        }
        Err(Error::Missing { name: listing.name, tried })
    }
}

impl Places {
    /// The file that the user names, or the first of these that there is.
    fn find_text(&self, known: &'static [&'static str]) -> Result<PathBuf> {
        match &self.data {
            Some(path) if path.is_file() => Ok(path.clone()),
            Some(path) => Err(Error::MissingText { path: path.clone() }),
            None => {
                let found = known.iter().map(PathBuf::from).find(|path| path.is_file());
                found.ok_or(Error::NoText { tried: known })
            }
        }
    }
}

fn cache_folder(var: impl Fn(&str) -> Option<OsString>) -> Option<PathBuf> {
    let set = |name| var(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    set("PHALANX_CACHE")
        // A relative XDG folder is to be ignored, says its specification.
        .or_else(|| set("XDG_CACHE_HOME").filter(|path| path.is_absolute()).map(|path| path.join("phalanx")))
        .or_else(|| set("HOME").map(|home| home.join(".cache/phalanx")))
}

/// Why `folder` doesn't hold the dataset, or `None` if it does.
fn missing_file(folder: &Path, listing: &Listing) -> Option<String> {
    if !folder.is_dir() {
        return Some("no such folder".to_owned());
    }
    let lacks = |name: &str| !folder.join(name).is_file() && !folder.join(format!("{name}.gz")).is_file();
    if let Home::Disk { instead: all, .. } = listing.home
        && !all.is_empty()
        && all.iter().all(|twin| folder.join(twin.name).is_file())
    {
        return None;
    }
    let missing = listing.files.iter().find(|file| lacks(file.name))?;
    Some(format!("holds no {0} or {0}.gz", missing.name))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_cache_follows_the_environment() {
        type Variables = &'static [(&'static str, &'static str)];
        let rows: &[(Variables, Option<&str>)] = &[
            (&[], None),
            (&[("HOME", "/h")], Some("/h/.cache/phalanx")),
            (&[("HOME", "/h"), ("XDG_CACHE_HOME", "/x")], Some("/x/phalanx")),
            (&[("HOME", "/h"), ("XDG_CACHE_HOME", "x")], Some("/h/.cache/phalanx")),
            (&[("HOME", "/h"), ("XDG_CACHE_HOME", "/x"), ("PHALANX_CACHE", "p")], Some("p")),
            (&[("HOME", "/h"), ("PHALANX_CACHE", "")], Some("/h/.cache/phalanx")),
        ];
        for (env, expected) in rows {
            let found = cache_folder(|name| env.iter().find(|(k, _)| *k == name).map(|(_, v)| v.into()));
            assert_eq!(found, expected.map(PathBuf::from), "{env:?}");
        }
    }
}
