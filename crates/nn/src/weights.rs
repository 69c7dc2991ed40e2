//! Files of weights: safetensors with PyTorch's names and layouts, read and written; `.pth` files, read (`pth.rs`).

use crate::{foreign, pth};
use half::{bf16, f16};
use phalanx_tensor::{MAX_DIMS, Shape};
use safetensors::SafeTensorError;
use safetensors::tensor::{Dtype, Metadata, SafeTensors, TensorView};
use std::collections::HashMap;
use std::fmt;
use std::fs::{self, File};
use std::io::Write;
use std::path::{Path, PathBuf};
use thiserror::Error;

/// Named arrays of float32, in order.
///
/// ```
/// use phalanx_nn::Weights;
///
/// let mut weights = Weights::default();
/// weights.push("layer.weight".into(), [1, 2].into(), &[0.5, -0.5]);
/// let path = std::env::temp_dir().join(format!("weights-{}.safetensors", std::process::id()));
/// weights.save(&path)?;
/// assert_eq!(Weights::read(&path)?, weights);
/// # std::fs::remove_file(path).unwrap();
/// # Ok::<(), phalanx_nn::WeightError>(())
/// ```
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Weights {
    arrays: Vec<(String, Shape, Vec<f32>)>,
    /// Where each name is: files from strangers may have a million.
    places: HashMap<String, usize>,
}

/// Why a file of weights can't be read or written.
#[derive(Error)]
pub enum WeightError {
    /// The system refused.
    #[error("{path}: {action}: {source}", path = path.display())]
    Io {
        /// Which file.
        path: PathBuf,
        /// What was tried.
        action: &'static str,
        /// What the system said.
        source: std::io::Error,
    },
    /// Not a file of weights at all.
    #[error("{path}: expected {expected}, found {found}\nhint: {hint}", path = path.display())]
    Foreign {
        /// Which file.
        path: PathBuf,
        /// What a file of this name should be.
        expected: &'static str,
        /// What it looks like.
        found: String,
        /// What to do about it.
        hint: &'static str,
    },
    /// A broken file of weights, or one that isn't read.
    #[error("{path}: not a readable {format} file: {reason}", path = path.display())]
    Format {
        /// Which file.
        path: PathBuf,
        /// What it was taken for.
        format: &'static str,
        /// What is wrong with it.
        reason: String,
    },
}

/// Its message, which is what a `main` that returns it tells.
impl fmt::Debug for WeightError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

const SAFETENSORS: &str = "safetensors";

impl Weights {
    /// Appends an array; `values` are in row-major order. Panics if there is an array of this name already, or if the number
    /// of values isn't that of the shape.
    #[track_caller]
    pub fn push(&mut self, name: String, shape: Shape, values: &[f32]) {
        assert!(
            shape.count() == values.len(),
            "weights: {} values for {name} of shape {shape}",
            values.len()
        );
        self.add((name, shape, values.to_vec()));
    }

    /// Appends all arrays of `other`. Panics if a name is in both.
    #[track_caller]
    pub fn append(&mut self, other: Weights) {
        other.arrays.into_iter().for_each(|array| self.add(array));
    }

    #[track_caller]
    fn add(&mut self, array: (String, Shape, Vec<f32>)) {
        let (name, shape, _) = &array;
        if let Some((other, _)) = self.get(name) {
            panic!(
                "weights: {name} of shape {shape} is pushed, but shape {other} has that name already: rename one"
            );
        }
        self.places.insert(name.clone(), self.arrays.len());
        self.arrays.push(array);
    }

    /// The same with `prefix` before each name: what several models are saved in one file by, as in `generator.0.weight`.
    ///
    /// ```
    /// # use phalanx_nn::Weights;
    /// # use phalanx_tensor::Shape;
    /// let mut own = Weights::default();
    /// own.push("weight".into(), Shape::from([2]), &[1.0, 2.0]);
    /// let mut both = own.clone().prefixed("generator.");
    /// both.append(own.clone().prefixed("discriminator."));
    /// assert_eq!(both.part("generator."), own);
    /// ```
    pub fn prefixed(self, prefix: &str) -> Weights {
        let mut all = Weights::default();
        self.arrays
            .into_iter()
            .for_each(|(name, shape, values)| all.add((format!("{prefix}{name}"), shape, values)));
        all
    }

    /// Those arrays whose names begin with `prefix`, without it: see [`Weights::prefixed`].
    pub fn part(&self, prefix: &str) -> Weights {
        let mut part = Weights::default();
        for (name, shape, values) in &self.arrays {
            if let Some(name) = name.strip_prefix(prefix) {
                part.add((name.to_owned(), *shape, values.clone()));
            }
        }
        part
    }

    /// The shape and values of an array.
    pub fn get(&self, name: &str) -> Option<(&Shape, &[f32])> {
        let (_, shape, values) = &self.arrays[*self.places.get(name)?];
        Some((shape, values))
    }

    /// All names and shapes.
    pub fn shapes(&self) -> impl Iterator<Item = (&str, &Shape)> {
        self.arrays.iter().map(|(name, shape, _)| (name.as_str(), shape))
    }

    /// All names.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.arrays.iter().map(|(name, ..)| name.as_str())
    }

    /// Reads a file of weights, which its content tells to be a safetensors or a `.pth` file: see [`Weights::from_bytes`].
    pub fn read(path: &Path) -> Result<Weights, WeightError> {
        let bytes = fs::read(path).map_err(|source| WeightError::Io {
            path: path.to_owned(),
            action: "can't be read",
            source,
        })?;
        let format = if pth::is_pth(&bytes) {
            ".pth"
        } else if is_safetensors(&bytes) {
            SAFETENSORS
        } else {
            let (found, hint) = foreign::found(&bytes);
            let expected = foreign::expected(path);
            return Err(WeightError::Foreign { path: path.to_owned(), expected, found, hint });
        };
        Weights::from_bytes(&bytes).map_err(|reason| WeightError::Format {
            path: path.to_owned(),
            format,
            reason,
        })
    }

    /// Reads the content of a file of weights; says what is wrong with it.
    ///
    /// Arrays of f32, f64, f16 and bf16 are taken; those of integers and bools (counters, masks) are left out, and others are errors. Of a
    /// file that `torch.save` wrote, the state dict is taken, which may lie in a checkpoint under `model`, `state_dict`,
    /// `model_state_dict` or `net`. A `module.` that all names begin with, as under DDP, is taken off. No code that a file may contain
    /// is run.
    pub fn from_bytes(bytes: &[u8]) -> Result<Weights, String> {
        if pth::is_pth(bytes) {
            return pth::read(bytes);
        }
        let file = SafeTensors::deserialize(bytes).map_err(|error| wrong(bytes, &error))?;
        let mut weights = Weights::default();
        // In the order of their bytes, so that the same file always reads the same.
        let mut views = file.tensors();
        views.sort_by_key(|(_, view)| view.data().as_ptr().addr());
        let prefix = Weights::prefix_of(views.iter().map(|(name, _)| name.as_str()));
        for (name, view) in views {
            if is_whole(view.dtype()) {
                continue;
            }
            let Some(shape) = Shape::try_new(view.shape()) else {
                let dims = view.shape();
                return Err(format!(
                    "{name} is of shape {dims:?}: at most {MAX_DIMS} dimensions are read, and no more elements than memory can hold"
                ));
            };
            let values: Vec<f32> = match view.dtype() {
                Dtype::F32 => view.data().as_chunks::<4>().0.iter().map(|&b| f32::from_le_bytes(b)).collect(),
                Dtype::F64 => {
                    view.data().as_chunks::<8>().0.iter().map(|&b| f64::from_le_bytes(b) as f32).collect()
                }
                Dtype::BF16 => {
                    view.data().as_chunks::<2>().0.iter().map(|&b| bf16::from_le_bytes(b).to_f32()).collect()
                }
                Dtype::F16 => {
                    view.data().as_chunks::<2>().0.iter().map(|&b| f16::from_le_bytes(b).to_f32()).collect()
                }
                other => return Err(format!("{name} holds {other:?}: F32, F64, BF16 and F16 are read")),
            };
            weights.push(name[prefix.len()..].to_owned(), shape, &values);
        }
        Ok(weights)
    }

    /// What is taken off the names in a file, if each begins with it: what PyTorch puts before those of a model under DDP, of one that
    /// was compiled, and of one that was both.
    pub fn prefix_of<'a>(names: impl Iterator<Item = &'a str>) -> &'static str {
        let mut prefixes = vec!["module._orig_mod.", "_orig_mod.module.", "module.", "_orig_mod."];
        names.for_each(|name| prefixes.retain(|prefix| name.starts_with(prefix)));
        prefixes.first().copied().unwrap_or("")
    }

    /// Writes a safetensors file: whole under a temporary name beside `path`, synced, then renamed. Whatever happens, `path`
    /// holds its old content or all of the new.
    pub fn save(&self, path: &Path) -> Result<(), WeightError> {
        let bytes: Vec<Vec<u8>> =
            self.arrays.iter().map(|(.., v)| v.iter().flat_map(|x| x.to_le_bytes()).collect()).collect();
        let views = self.arrays.iter().zip(&bytes).map(|((name, shape, _), bytes)| {
            let view = TensorView::new(Dtype::F32, shape.dims().to_vec(), bytes)
                .expect("as many bytes as the shape has");
            (name.as_str(), view)
        });
        // As the files of checkpoints say: transformers has refused files that don't.
        let format = HashMap::from([("format".to_owned(), "pt".to_owned())]);
        let content = safetensors::serialize(views, Some(format)).map_err(|error| WeightError::Format {
            path: path.to_owned(),
            format: SAFETENSORS,
            reason: error.to_string(),
        })?;
        write_whole(path, &content)
    }
}

/// What is wrong with a safetensors file; where its length is, how long it should be.
fn wrong(bytes: &[u8], error: &SafeTensorError) -> String {
    let has = bytes.len();
    let header = bytes.first_chunk::<8>().map(|len| u64::from_le_bytes(*len).saturating_add(8));
    let behind = |start: u64| -> Option<u64> {
        let header: Metadata = serde_json::from_slice(bytes.get(8..usize::try_from(start).ok()?)?).ok()?;
        Some(start.saturating_add(header.data_len() as u64))
    };
    match (error, header, header.and_then(behind)) {
        (SafeTensorError::InvalidHeaderLength, Some(header), _) => {
            format!("it has {has} bytes, and its header alone should have {header}: the file was cut off")
        }
        (SafeTensorError::MetadataIncompleteBuffer, _, Some(whole)) => {
            let why =
                if whole > has as u64 { "the file was cut off" } else { "there is more behind its arrays" };
            format!("it has {has} bytes, and by its header should have {whole}: {why}")
        }
        _ => error.to_string(),
    }
}

/// Whether arrays of this type are counters, masks and the like, which no model here has.
fn is_whole(dtype: Dtype) -> bool {
    use Dtype::{BOOL, I8, I16, I32, I64, U8, U16, U32, U64};
    matches!(dtype, BOOL | I8 | I16 | I32 | I64 | U8 | U16 | U32 | U64)
}

/// Whether a file that starts like this is a safetensors file: eight bytes of length, then a header in JSON.
fn is_safetensors(bytes: &[u8]) -> bool {
    bytes.get(8) == Some(&b'{')
}

/// Where a file is written before it gets its name: in the same folder, so that the renaming is one step.
fn temporary(path: &Path) -> PathBuf {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    path.with_file_name(format!(".{name}.{}.partial", std::process::id()))
}

fn write_whole(path: &Path, content: &[u8]) -> Result<(), WeightError> {
    let temporary = temporary(path);
    let failed = |action| move |source| WeightError::Io { path: path.to_owned(), action, source };
    let written = (|| {
        let mut file = File::create(&temporary)?;
        file.write_all(content)?;
        file.sync_all()
    })();
    let renamed = written.and_then(|()| fs::rename(&temporary, path));
    if renamed.is_err() {
        // The first error is the one to tell; a file that can't be removed either is left under its temporary name.
        let _ = fs::remove_file(&temporary);
    }
    renamed.map_err(failed("can't be written"))?;
    let folder = path.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."));
    File::open(folder).and_then(|folder| folder.sync_all()).map_err(failed("can't be made durable"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sample() -> Weights {
        let mut weights = Weights::default();
        weights.push("b.weight".into(), [2, 2].into(), &[1.0, -2.0, 3.5, 0.0]);
        weights.push("a.bias".into(), [1].into(), &[7.0]);
        weights
    }

    #[test]
    fn what_is_saved_is_read_back() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("w.safetensors");
        sample().save(&path).unwrap();
        let read = Weights::read(&path).unwrap();
        assert_eq!(read.get("b.weight"), sample().get("b.weight"));
        assert_eq!(read.get("a.bias"), sample().get("a.bias"));
        let (_, header) = SafeTensors::read_metadata(&fs::read(&path).unwrap()).unwrap();
        assert_eq!(header.metadata().as_ref().unwrap()["format"], "pt");
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1, "no temporary file is left");
    }

    #[test]
    #[should_panic(
        expected = "weights: b.weight of shape [2, 2] is pushed, but shape [2, 2] has that name already"
    )]
    fn two_arrays_of_one_name_are_a_bug() {
        let mut weights = sample();
        weights.append(sample());
    }

    #[test]
    fn a_cut_file_is_an_error_at_every_length() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("w.safetensors");
        sample().save(&path).unwrap();
        let bytes = fs::read(&path).unwrap();
        for len in 0..bytes.len() {
            assert!(Weights::from_bytes(&bytes[..len]).is_err(), "{len} of {} bytes", bytes.len());
        }
        let whole = bytes.len();
        let why = |bytes: &[u8]| Weights::from_bytes(bytes).unwrap_err();
        let cut = format!(
            "it has {} bytes, and by its header should have {whole}: the file was cut off",
            whole - 1
        );
        assert_eq!(why(&bytes[..whole - 1]), cut);
        let more = why(&[&bytes[..], b"more"].concat());
        assert!(more.contains(&format!("should have {whole}: there is more behind its arrays")), "{more}");
        let header = why(&bytes[..20]);
        assert!(header.starts_with("it has 20 bytes, and its header alone should have "), "{header}");
    }

    #[test]
    fn a_failed_save_leaves_the_old_file_and_no_other() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("taken");
        fs::create_dir(&path).unwrap();
        fs::write(path.join("inside"), "x").unwrap();
        let error = sample().save(&path).unwrap_err().to_string();
        assert!(error.contains("taken") && error.contains("can't be written"), "{error}");
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1);
    }

    #[test]
    #[cfg(target_os = "linux")]
    fn no_space_left_is_told_and_leaves_the_old_file_and_no_other() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("w.safetensors");
        fs::write(&path, "old").unwrap();
        // The temporary file leads to a device that is always full.
        std::os::unix::fs::symlink("/dev/full", temporary(&path)).unwrap();
        let error = sample().save(&path).unwrap_err().to_string();
        assert!(error.contains("w.safetensors: can't be written: No space left"), "{error}");
        assert_eq!(fs::read(&path).unwrap(), b"old");
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1);
    }

    #[test]
    fn a_folder_that_is_missing_is_an_error_that_names_the_file() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("no/such/w.safetensors");
        let error = sample().save(&path).unwrap_err().to_string();
        assert!(error.contains("no/such/w.safetensors: can't be written: No such file"), "{error}");
        assert!(Weights::read(&path).unwrap_err().to_string().contains("can't be read"));
    }

    #[test]
    fn a_file_without_weights_is_told_by_what_it_should_be_and_what_it_is() {
        let folder = tempfile::tempdir().unwrap();
        let torch = "a file that torch.save wrote, found";
        let page = b"\n<!DOCTYPE html><html><title>404</title>".as_slice();
        let random: Vec<u8> = (1..100u8).map(|i| i.wrapping_mul(0x9d)).collect();
        let pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a".as_slice();
        let rows: &[(&str, &[u8], &str, &str)] = &[
            ("w.pth", b"", torch, "nothing: it is empty"),
            ("w.PT", page, torch, "a web page\nhint: fetch the file itself"),
            (
                "w.ckpt",
                b"Not Found",
                torch,
                "text that begins with \"Not Found\"\nhint: fetch the file again",
            ),
            ("w.pth", b"{\"error\": 403}", torch, "text that begins with \"{\\\"error\\\": 403}\""),
            ("w.bin", pointer, torch, "a pointer of Git LFS\nhint: `git lfs pull`"),
            ("w.pth", &random, torch, "a file that begins with the bytes 9d 3a d7 74 11 ae 4b e8\nhint:"),
            ("w.safetensors", b"", "expected a safetensors file, found", "nothing"),
            ("w.safetensors", page, "expected a safetensors file, found", "a web page"),
            ("w", b"hm", "expected a safetensors file, or one that torch.save wrote, found", "text"),
        ];
        for (name, bytes, expected, found) in rows {
            let path = folder.path().join(name);
            fs::write(&path, bytes).unwrap();
            let error = Weights::read(&path).unwrap_err().to_string();
            for part in [&format!("/{name}: expected"), *expected, *found] {
                assert!(error.contains(part), "{error}, expected {part}");
            }
        }
    }

    #[test]
    fn foreign_files_are_errors_that_say_why() {
        let check = |bytes: &[u8], why: &str| {
            let error = Weights::from_bytes(bytes).unwrap_err();
            assert!(error.contains(why), "{error}, expected {why}");
        };
        check(b"PK\x03\x04 and what else a .pth file holds", "its zip archive is broken");
        check(b"\x80\x04K\x01.", "none that torch.save wrote");
        check(&[255; 64], "header too large");
        let file = |header: &str, data: usize| {
            let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
            bytes.extend(header.bytes());
            bytes.resize(bytes.len() + data, 0);
            bytes
        };
        check(&file(r#"{"w":{"dtype":"F8_E4M3","shape":[1],"data_offsets":[0,1]}}"#, 1), "w holds F8_E4M3");
        let dims = r#"{"w":{"dtype":"F32","shape":[1,1,1,1,1,1,1],"data_offsets":[0,4]}}"#;
        check(&file(dims, 4), "w is of shape [1, 1, 1, 1, 1, 1, 1]: at most 6 dimensions");
        let empty = r#"{"w":{"dtype":"F32","shape":[0,4294967296,4294967296],"data_offsets":[0,0]}}"#;
        check(&file(empty, 0), "no more elements than memory can hold");
        check(&file(r#"{"w":{"dtype":"F32","shape":[2],"data_offsets":[0,4]}}"#, 4), "invalid shape");
        let huge = r#"{"w":{"dtype":"F32","shape":[4294967296,4294967296],"data_offsets":[0,4]}}"#;
        check(&file(huge, 4), "overflow");
        let counted = r#"{"module.n":{"dtype":"I64","shape":[],"data_offsets":[0,8]},"module.w":{"dtype":"F32","shape":[1],"data_offsets":[8,12]}}"#;
        let weights = Weights::from_bytes(&file(counted, 12)).unwrap();
        assert_eq!(
            weights.names().collect::<Vec<_>>(),
            ["w"],
            "a counter is left out, and what DDP puts before"
        );
        let of = |names: [&'static str; 2]| Weights::prefix_of(names.into_iter());
        assert_eq!(of(["module.w", "module.v"]), "module.");
        assert_eq!(of(["_orig_mod.w", "_orig_mod.v"]), "_orig_mod.");
        assert_eq!(of(["module._orig_mod.w", "module._orig_mod.v"]), "module._orig_mod.");
        assert_eq!(of(["_orig_mod.module.w", "_orig_mod.module.v"]), "_orig_mod.module.");
        assert_eq!(of(["_orig_mod.w", "module.v"]), "");
        let doubles =
            Weights::from_bytes(&file(r#"{"w":{"dtype":"F64","shape":[1,2],"data_offsets":[0,16]}}"#, 16));
        assert_eq!(doubles.unwrap().get("w").unwrap().1, [0.0, 0.0]);
        // 1.5 and -2 in 16 bits.
        for (dtype, halves) in [("BF16", [[0xc0, 0x3f], [0x00, 0xc0]]), ("F16", [[0x00, 0x3e], [0x00, 0xc0]])]
        {
            let header = format!(r#"{{"w":{{"dtype":"{dtype}","shape":[2],"data_offsets":[0,4]}}}}"#);
            let mut bytes = file(&header, 0);
            bytes.extend(halves.as_flattened());
            assert_eq!(Weights::from_bytes(&bytes).unwrap().get("w").unwrap().1, [1.5, -2.0], "{dtype}");
        }
    }
}
