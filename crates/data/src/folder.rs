//! Images of one's own: a folder for training and one for testing, in each a folder a class, in these JPEG and PNG files.
//!
//! Classes are numbered in the order of their names, as torchvision's `ImageFolder` does. Files are listed once and decoded
//! when they are asked for (`folder/decode.rs`), each time anew.

mod decode;

use crate::error::{Error, FolderProblem, Result};
use crate::images::{Image, Images};
use std::fs::{self, Metadata};
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

/// How deep below its class a file may lie.
const MAX_DEPTH: usize = 8;

/// The images of one part.
#[derive(Debug)]
pub struct ImageFolder {
    classes: Vec<String>,
    /// The class and the path of each image, class after class, in the order of the paths.
    files: Vec<(u32, PathBuf)>,
}

impl ImageFolder {
    /// Lists the images in a folder of classes.
    ///
    /// # Errors
    /// [`Error::Io`] if it can't be read and [`Error::Folder`] if it has no class or one of them no image.
    pub fn open(folder: &Path) -> Result<ImageFolder> {
        let problem = |path: &Path, problem| Err(Error::Folder { path: path.to_path_buf(), problem });
        let mut found = ImageFolder { classes: Vec::new(), files: Vec::new() };
        for class in sorted(folder)? {
            if !is_folder(&class)? {
                continue;
            }
            let number = found.classes.len() as u32;
            let mut paths = Vec::new();
            list(&class, &mut Vec::new(), &mut paths)?;
            if paths.is_empty() {
                return problem(&class, FolderProblem::EmptyClass);
            }
            found.files.extend(paths.into_iter().map(|path| (number, path)));
            found.classes.push(name(&class));
        }
        if found.classes.is_empty() { problem(folder, FolderProblem::NoClasses) } else { Ok(found) }
    }

    /// The parts to learn from and to be judged by: `train`, and `val` or else `test`, below `root`.
    ///
    /// # Errors
    /// As [`ImageFolder::open`], and if one of them is missing or the second has a class that the first lacks.
    pub fn parts(root: &Path) -> Result<(ImageFolder, ImageFolder)> {
        let problem = |path: &Path, problem| Err(Error::Folder { path: path.to_path_buf(), problem });
        let (train, val, test) = (root.join("train"), root.join("val"), root.join("test"));
        let judged = if is_folder(&val)? { val } else { test };
        for part in [&train, &judged] {
            if !is_folder(part)? {
                return problem(root, FolderProblem::NoPart { part: name(part) });
            }
        }
        let (train, mut test) = (ImageFolder::open(&train)?, ImageFolder::open(&judged)?);
        for (class, path) in &mut test.files {
            let name = &test.classes[*class as usize];
            match train.classes.iter().position(|known| known == name) {
                Some(number) => *class = number as u32,
                None => {
                    let path = path.parent().unwrap_or(&judged).to_path_buf();
                    return problem(&path, FolderProblem::UnknownClass { class: name.clone() });
                }
            }
        }
        test.classes.clone_from(&train.classes);
        Ok((train, test))
    }

    /// The names of the classes, by number.
    pub fn class_names(&self) -> &[String] {
        &self.classes
    }
}

impl Images for ImageFolder {
    fn len(&self) -> usize {
        self.files.len()
    }

    fn classes(&self) -> usize {
        self.classes.len()
    }

    fn size(&self) -> Option<[usize; 2]> {
        None
    }

    fn label(&self, i: usize) -> Result<usize> {
        Ok(self.files[i].0 as usize)
    }

    fn image<'a>(&'a self, i: usize, room: &'a mut Vec<u8>) -> Result<Image<'a>> {
        let path = &self.files[i].1;
        let bad = |reason| Error::Image { path: path.clone(), reason };
        // A file that is gone or locked is as bad as one that can't be decoded.
        let file = fs::read(path).map_err(|error| bad(error.to_string()))?;
        let [height, width] = decode::decode(&file, room).map_err(bad)?;
        Ok(Image { height, width, bytes: room })
    }
}

/// The image files of a class, in a folder below those that are known by their devices and numbers.
fn list(folder: &Path, above: &mut Vec<(u64, u64)>, files: &mut Vec<PathBuf>) -> Result<()> {
    let own = fs::metadata(folder).map_err(Error::io("look at", folder))?;
    let own = (own.dev(), own.ino());
    // A link that leads back has nothing of its own.
    if above.contains(&own) {
        return Ok(());
    }
    above.push(own);
    for path in sorted(folder)? {
        match look_at(&path)? {
            Some(found) if found.is_dir() && above.len() <= MAX_DEPTH => list(&path, above, files)?,
            // Whoever reads a pipe or a device waits, perhaps for ever. A link to nothing is an image that can't be read.
            Some(found) if !found.is_file() => {}
            _ if is_image(&path) => files.push(path),
            _ => {}
        }
    }
    above.pop();
    Ok(())
}

/// What is at a path, if anything is. That nobody may look is no answer: images would be left out, and nobody told.
fn look_at(path: &Path) -> Result<Option<Metadata>> {
    match fs::metadata(path) {
        Ok(found) => Ok(Some(found)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(Error::io("look at", path)(error)),
    }
}

fn is_folder(path: &Path) -> Result<bool> {
    Ok(look_at(path)?.is_some_and(|found| found.is_dir()))
}

/// What torchvision takes for images. Those of other kinds than JPEG and PNG can't be read, which is told when they are to be: who has
/// some is not to lose a part of the data and hear nothing of it.
const EXTENSIONS: [&str; 9] = ["jpg", "jpeg", "png", "ppm", "bmp", "pgm", "tif", "tiff", "webp"];

fn is_image(path: &Path) -> bool {
    let extension = path.extension().map(|extension| extension.to_ascii_lowercase());
    extension.is_some_and(|extension| EXTENSIONS.iter().any(|known| extension == *known))
}

/// What a folder holds, by name, without what is hidden.
fn sorted(folder: &Path) -> Result<Vec<PathBuf>> {
    let entries = fs::read_dir(folder).map_err(Error::io("list", folder))?;
    let paths = entries.map(|entry| entry.map(|entry| entry.path()).map_err(Error::io("list", folder)));
    let mut paths = paths.collect::<Result<Vec<PathBuf>>>()?;
    paths.retain(|path| !name(path).starts_with('.'));
    paths.sort();
    Ok(paths)
}

fn name(path: &Path) -> String {
    path.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default()
}

#[cfg(test)]
mod tests;
