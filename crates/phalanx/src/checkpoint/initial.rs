//! Weights that a run begins with. Rank 0 reads them, one array at a time, and hands each to the others, which take what they hold of
//! it: no rank ever has all of them, however large the file, unless it is one that only comes as a whole (what `torch.save` wrote, or
//! a file with arrays of another type than float32), which rank 0 has then.

use super::arrays::{ArrayEntry, ArrayFile, Wholes, arrays_of};
use super::error::CheckpointError;
use super::manifest::{FileEntry, Holds};
use super::read::unreadable;
use crate::error::Error;
use crate::worker::share;
use phalanx_comm::{Group, Rank};
use phalanx_nn::{NotFinite, Parameters, Weights};
use phalanx_parallel::Strategy;
use phalanx_tensor::Shape;
use std::collections::HashSet;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

/// Where the weights are that a run begins with, and what is taken of them.
#[derive(Clone, Debug)]
pub struct InitialWeights {
    /// A file of weights, as [`Weights::read`] takes it, or a folder of safetensors files with arrays of float32: `model.safetensors`, or
    /// all of its parts, as a checkpoint has them. Arrays of integers and bools are passed over.
    pub path: PathBuf,
    /// What is taken of the head.
    pub head: Head,
    /// What is done about numbers that are none.
    pub spoilt: Spoilt,
}

/// What is taken of a model's head ([`Parameters::head`]).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Head {
    /// All of it, as of the rest: one that doesn't fit is an error.
    All,
    /// All of it where it fits; else it starts anew.
    IfItFits,
}

/// What is done about weights that hold a NaN or an infinity.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Spoilt {
    /// They are an error.
    Refused,
    /// They are taken.
    Taken,
}

impl InitialWeights {
    /// Reads all of them, an array at a time, and finds out whether a run of a model with these parameters can begin with them; gives
    /// the names of what starts anew. The parameters stay what they are.
    ///
    /// # Errors
    /// The file can't be read, is of another model, or holds a number that is none.
    pub fn check(&self, parameters: &Parameters) -> Result<Vec<String>, Error> {
        let mut source = Source::open(&self.path)?;
        source.each(|name, _, values| self.look(name, values))?;
        self.fresh(parameters, &source.shapes())
    }

    /// Has `strategy` take them on all ranks of `group`, which must ask at once; gives the names of what kept its first values.
    pub(crate) fn load(
        &self,
        group: &Group,
        parameters: &Parameters,
        strategy: &mut dyn Strategy,
    ) -> Result<Vec<String>, Error> {
        let own = (group.rank() == Rank(0)).then(|| Source::open(&self.path)).transpose()?;
        let told = own.as_ref().map_or_else(Vec::new, |source| to_text(&source.shapes()));
        let shapes = of_text(&share(group, Rank(0), told)?).ok_or_else(|| self.broken())?;
        let fresh = self.fresh(parameters, &shapes)?;
        let mut take = |name: &str, values: &[f32]| {
            if !fresh.iter().any(|other| other == name) {
                strategy.load_one(parameters, name, values);
            }
        };
        match own {
            Some(mut source) => source.each(|name, _, values| {
                self.look(name, values)?;
                group.broadcast(values, Rank(0))?;
                take(name, values);
                Ok(())
            })?,
            None => {
                let mut values = Vec::new();
                for (name, shape) in &shapes {
                    values.resize(shape.count(), 0.0);
                    group.broadcast(&mut values, Rank(0))?;
                    take(name, &values);
                }
            }
        }
        Ok(fresh)
    }

    /// What starts anew of a model where arrays are of these shapes.
    fn fresh(&self, parameters: &Parameters, shapes: &[(String, Shape)]) -> Result<Vec<String>, Error> {
        let mismatch = parameters.compare_shapes(shapes.iter().map(|(name, shape)| (name.as_str(), shape)));
        if mismatch.is_empty() {
            return Ok(Vec::new());
        }
        if self.head == Head::IfItFits && parameters.concerns_head_alone(&mismatch) {
            return Ok(parameters.head().into_iter().map(str::to_owned).collect());
        }
        Err(Error::Mismatch { path: self.path.clone(), mismatch })
    }

    fn look(&self, name: &str, values: &[f32]) -> Result<(), Error> {
        match NotFinite::first(name, values).filter(|_| self.spoilt == Spoilt::Refused) {
            Some(place) => Err(Error::SpoiltWeights { path: self.path.clone(), place }),
            None => Ok(()),
        }
    }

    fn broken(&self) -> CheckpointError {
        let reason = "what rank 0 tells of its arrays makes no sense".into();
        CheckpointError::Broken { path: self.path.clone(), reason }
    }
}

/// The names and shapes of arrays, as ranks tell each other of them.
fn to_text(shapes: &[(String, Shape)]) -> Vec<u8> {
    let told: Vec<_> = shapes.iter().map(|(name, shape)| (name, shape.dims())).collect();
    serde_json::to_vec(&told).expect("names and numbers are always JSON")
}

fn of_text(text: &[u8]) -> Option<Vec<(String, Shape)>> {
    let told: Vec<(String, Vec<usize>)> = serde_json::from_slice(text).ok()?;
    told.into_iter().map(|(name, dims)| Some((name, Shape::try_new(&dims)?))).collect()
}

/// Files of weights that are read once, from their beginning.
enum Source {
    /// One array at a time.
    Arrays(Vec<OpenFile>),
    Whole(Weights),
}

struct OpenFile {
    folder: PathBuf,
    entry: FileEntry,
    arrays: Vec<ArrayEntry>,
    file: ArrayFile,
}

impl Source {
    fn open(path: &Path) -> Result<Source, Error> {
        if path.is_dir() {
            let files = parts_in(path)?.into_iter().map(|name| OpenFile::open(path, &name));
            return Ok(Source::of_arrays(once_each(path, files.collect::<Result<_, _>>()?)?));
        }
        if fs::metadata(path).is_ok_and(|found| !found.is_file()) {
            let why = "it is no file, but a pipe or a device, and weights are read several times: write them to a file";
            return Err(unreadable(path)(io::Error::other(why)).into());
        }
        let folder = path.parent().unwrap_or(Path::new(""));
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        match OpenFile::open(folder, &name) {
            Ok(file) => Ok(Source::of_arrays(vec![file])),
            // Whether it is of another kind, or what is wrong with it, is for others to say.
            Err(_) => Ok(Source::Whole(Weights::read(path)?)),
        }
    }

    /// The arrays of files, by the names that a model has for them.
    fn of_arrays(mut files: Vec<OpenFile>) -> Source {
        let names = files.iter().flat_map(|file| &file.arrays).map(|array| array.name.as_str());
        let prefix = Weights::prefix_of(names).len();
        files.iter_mut().flat_map(|file| &mut file.arrays).for_each(|array| drop(array.name.drain(..prefix)));
        Source::Arrays(files)
    }

    fn shapes(&self) -> Vec<(String, Shape)> {
        match self {
            Source::Whole(weights) => {
                weights.shapes().map(|(name, shape)| (name.to_owned(), *shape)).collect()
            }
            Source::Arrays(files) => {
                let arrays = files.iter().flat_map(|file| &file.arrays);
                arrays.map(|array| (array.name.clone(), array.shape)).collect()
            }
        }
    }

    /// Hands every array on, in the order of [`Source::shapes`].
    fn each(
        &mut self,
        mut take: impl FnMut(&str, &Shape, &mut [f32]) -> Result<(), Error>,
    ) -> Result<(), Error> {
        let mut values = Vec::new();
        match self {
            Source::Whole(weights) => {
                for (name, shape) in weights.shapes() {
                    let (_, found) = weights.get(name).expect("a name of its own");
                    values.clear();
                    values.extend_from_slice(found);
                    take(name, shape, &mut values)?;
                }
            }
            Source::Arrays(files) => {
                for OpenFile { folder, entry, arrays, file } in files {
                    for array in arrays {
                        values.resize(array.shape.count(), 0.0);
                        file.skip(folder, entry, array.behind)?;
                        file.read(folder, entry, &mut values)?;
                        take(&array.name, &array.shape, &mut values)?;
                    }
                }
            }
        }
        Ok(())
    }
}

impl OpenFile {
    fn open(folder: &Path, name: &str) -> Result<OpenFile, CheckpointError> {
        let path = folder.join(name);
        let bytes = fs::metadata(&path).map_err(unreadable(&path))?.len();
        let entry =
            FileEntry { name: name.to_owned(), holds: Holds::Model, bytes, chunk: 0, crc32: Vec::new() };
        let mut file = ArrayFile::open(folder, &entry)?;
        let arrays = arrays_of(&file.take_header(), &entry, folder, Wholes::PassedOver)?;
        Ok(OpenFile { folder: folder.to_owned(), entry, arrays, file })
    }
}

/// The files of a folder, if no two of them hold an array of the same name.
fn once_each(folder: &Path, files: Vec<OpenFile>) -> Result<Vec<OpenFile>, CheckpointError> {
    let mut known = HashSet::new();
    let twice = files.iter().flat_map(|file| &file.arrays).find(|array| !known.insert(&array.name));
    match twice {
        None => Ok(files),
        Some(array) => {
            let reason = format!("two of its files hold {}", array.name);
            Err(CheckpointError::Broken { path: folder.to_owned(), reason })
        }
    }
}

/// The files of a folder that hold a model's weights together, in order.
fn parts_in(folder: &Path) -> Result<Vec<String>, CheckpointError> {
    let mut names = Vec::new();
    for entry in fs::read_dir(folder).map_err(unreadable(folder))? {
        names.push(entry.map_err(unreadable(folder))?.file_name().to_string_lossy().into_owned());
    }
    if names.iter().any(|name| name == "model.safetensors") {
        return Ok(vec!["model.safetensors".into()]);
    }
    names.retain(|name| parts_of(name).is_some());
    names.sort_unstable();
    match names.first().and_then(|name| parts_of(name)) {
        Some(of) if names.len() == of && names.iter().all(|name| parts_of(name) == Some(of)) => Ok(names),
        _ => Err(CheckpointError::NoWeights { path: folder.to_owned() }),
    }
}

/// Of how many parts a file of this name is one.
fn parts_of(name: &str) -> Option<usize> {
    let numbers = name.strip_prefix("model-")?.strip_suffix(".safetensors")?;
    let (number, of) = numbers.split_once("-of-")?;
    number.parse::<usize>().ok()?;
    of.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use phalanx_nn::Linear;
    use phalanx_tensor::Device;

    fn from(path: &Path) -> InitialWeights {
        InitialWeights { path: path.to_owned(), head: Head::All, spoilt: Spoilt::Refused }
    }

    #[test]
    fn a_folder_has_all_parts_or_none() {
        let folder = tempfile::tempdir().unwrap();
        let parameters = Parameters::build(&mut Linear::new(3, 2), &Device::cpu(1), 0);
        let whole = parameters.to_weights();
        let save = |name: &str, file: &str| {
            let mut part = Weights::default();
            let (shape, values) = whole.get(name).unwrap();
            part.push(name.into(), *shape, values);
            part.save(&folder.path().join(file)).unwrap();
        };
        let refused = || from(folder.path()).check(&parameters).unwrap_err().to_string();
        assert!(refused().contains("neither model.safetensors nor all of its parts"));
        save("weight", "model-00001-of-00002.safetensors");
        // Others may lie beside them.
        save("weight", "model_ema-00001-of-00002.safetensors");
        assert!(refused().contains("neither model.safetensors nor all of its parts"));
        save("bias", "model-00002-of-00002.safetensors");
        assert_eq!(from(folder.path()).check(&parameters).unwrap(), [""; 0]);
        save("weight", "model-00002-of-00002.safetensors");
        assert!(refused().contains("two of its files hold weight"), "{}", refused());
    }

    #[test]
    fn arrays_come_one_at_a_time_unless_the_file_comes_as_a_whole() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("w.safetensors");
        let parameters = Parameters::build(&mut Linear::new(3, 2), &Device::cpu(1), 0);
        parameters.to_weights().save(&path).unwrap();
        assert!(matches!(Source::open(&path).unwrap(), Source::Arrays(_)));
        let found = |header: &str, data: &[u8]| {
            let length = (header.len() as u64).to_le_bytes();
            fs::write(&path, [&length, header.as_bytes(), data].concat()).unwrap();
            let mut source = Source::open(&path).unwrap();
            let mut found = Vec::new();
            let read = source.each(|name, _, values| {
                found.push((name.to_owned(), values.to_vec()));
                Ok(())
            });
            read.unwrap();
            (matches!(source, Source::Whole(_)), found)
        };
        let halves = r#"{"w":{"dtype":"F16","shape":[1],"data_offsets":[0,2]}}"#;
        assert_eq!(found(halves, &[0x00, 0x3e]), (true, vec![("w".to_owned(), vec![1.5])]));
        // As PyTorch's batch norms under DDP: a counter before, between and behind.
        let counted = r#"{"module.n":{"dtype":"I64","shape":[],"data_offsets":[0,8]},
            "module.v":{"dtype":"F32","shape":[1],"data_offsets":[8,12]},
            "module.m":{"dtype":"BOOL","shape":[3],"data_offsets":[12,15]},
            "module.w":{"dtype":"F32","shape":[1],"data_offsets":[15,19]},
            "module.o":{"dtype":"I16","shape":[1],"data_offsets":[19,21]}}"#;
        let data = [&[9; 8][..], &1.5f32.to_le_bytes(), &[1; 3], &2.5f32.to_le_bytes(), &[7; 2]].concat();
        let both = vec![("v".to_owned(), vec![1.5]), ("w".to_owned(), vec![2.5])];
        assert_eq!(found(counted, &data), (false, both));
        // What is no file of weights is told as such.
        fs::write(&path, "<!DOCTYPE html>").unwrap();
        let error = from(&path).check(&parameters).unwrap_err().to_string();
        assert!(error.contains("a web page"), "{error}");
    }
}
