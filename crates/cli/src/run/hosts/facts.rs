//! What is on this machine, for whoever starts a run on it.

use super::super::devices::Gpus;
use super::words::{Asked, Facts, Seen};
use crate::meminfo::Meminfo;
use nix::unistd::{AccessFlags, access, gethostname};
use phalanx::cores;
use sha2::{Digest, Sha256};
use std::ffi::OsStr;
use std::fs::{self, File};
use std::io::{self, Read};
use std::net::TcpListener;
use std::path::{Path, PathBuf};

/// Files of a data folder that are looked at: more say no more.
const MOST_FILES: usize = 100_000;

/// Looks at everything that was asked for; the folder is this process's from now on.
pub(super) fn facts(asked: &Asked) -> Facts {
    let no_folder = std::env::set_current_dir(&asked.folder).err().map(|error| error.to_string());
    let memory = Meminfo::read();
    let boot = fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
    let host = gethostname().ok().and_then(|name| name.into_string().ok()).unwrap_or_default();
    let binary = std::env::current_exe().and_then(|path| digest(&path));
    let port = TcpListener::bind("0.0.0.0:0").and_then(|listener| listener.local_addr());
    Facts {
        version: env!("CARGO_PKG_VERSION").into(),
        binary: binary.unwrap_or_default(),
        machine: format!("{host} {}", boot.trim()),
        cores: cores(),
        memory: memory.bytes("MemTotal:").unwrap_or(0),
        free: memory.bytes("MemAvailable:").unwrap_or(0),
        gpus: Gpus::of_this_machine().count(),
        address: std::env::var("SSH_CONNECTION").ok().as_deref().and_then(own_address),
        port: port.map_or(0, |address| address.port()),
        no_out: match no_folder.is_some() {
            true => None,
            false => unwritable(&asked.out).err().map(|error| error.to_string()),
        },
        no_folder,
        programs: asked.programs.iter().map(|name| program(name)).collect(),
        data: asked.data.as_deref().map(seen),
    }
}

/// The third of the four words in which sshd tells of a connection; an address that only means something on one link is left out.
fn own_address(connection: &str) -> Option<String> {
    let address = connection.split_whitespace().nth(2)?;
    (!address.contains('%')).then(|| address.to_owned())
}

/// A program by its path, or by its name in PATH or in this folder, as it will be started.
fn program(name: &OsStr) -> Seen {
    let path = Path::new(name);
    if path.components().count() > 1 || path.is_absolute() {
        return seen(path);
    }
    let folders = std::env::var_os("PATH").unwrap_or_default();
    let found = std::env::split_paths(&folders).chain([".".into()]).map(|folder| folder.join(path));
    let found = found.into_iter().find(|path| path.is_file());
    let absent = || Seen::Absent(format!("no program {} in PATH or in the folder", path.display()));
    found.as_deref().map_or_else(absent, seen)
}

/// What is at a path.
fn seen(path: &Path) -> Seen {
    let absent = |error: io::Error| Seen::Absent(format!("{}: {error}", path.display()));
    let looked = || -> io::Result<Seen> {
        let metadata = fs::metadata(path)?;
        let path = path.to_owned();
        if metadata.is_file() {
            return Ok(Seen::File { bytes: metadata.len(), digest: digest(&path)?, path });
        }
        let mut files = Vec::new();
        walk(&path, &path, &mut files)?;
        files.sort();
        let mut names = Sha256::new();
        for (name, bytes) in &files {
            names.update(format!("{}\0{bytes}\0", name.display()));
        }
        let bytes = files.iter().map(|(_, bytes)| bytes).sum();
        Ok(Seen::Folder { path, files: files.len(), bytes, digest: hex(&names.finalize()) })
    };
    looked().unwrap_or_else(absent)
}

fn walk(top: &Path, folder: &Path, files: &mut Vec<(PathBuf, u64)>) -> io::Result<()> {
    for entry in fs::read_dir(folder)? {
        let path = entry?.path();
        if files.len() >= MOST_FILES {
            return Ok(());
        }
        // A link may lead back up.
        let metadata = fs::symlink_metadata(&path)?;
        if metadata.is_dir() {
            walk(top, &path, files)?;
        } else {
            let bytes = fs::metadata(&path).map_or(0, |metadata| metadata.len());
            files.push((path.strip_prefix(top).unwrap_or(&path).to_owned(), bytes));
        }
    }
    Ok(())
}

fn digest(path: &Path) -> io::Result<String> {
    let (mut file, mut hash, mut part) = (File::open(path)?, Sha256::new(), vec![0; 1 << 20]);
    loop {
        match file.read(&mut part)? {
            0 => return Ok(hex(&hash.finalize())),
            n => hash.update(&part[..n]),
        }
    }
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Fails if no folder of this name can be there.
fn unwritable(out: &Path) -> io::Result<()> {
    let there = out.ancestors().find(|path| path.exists()).filter(|path| !path.as_os_str().is_empty());
    let there = there.unwrap_or(Path::new("."));
    if !there.is_dir() {
        return Err(io::Error::other(format!("{} is no folder", there.display())));
    }
    access(there, AccessFlags::W_OK | AccessFlags::X_OK)
        .map_err(|error| io::Error::other(format!("{}: {}", there.display(), error.desc())))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn folders_are_the_same_by_names_and_lengths() {
        let folder = tempfile::tempdir().unwrap();
        let make = |name: &str, files: &[(&str, &str)]| {
            let top = folder.path().join(name);
            for (file, text) in files {
                let path = top.join(file);
                fs::create_dir_all(path.parent().unwrap()).unwrap();
                fs::write(path, text).unwrap();
            }
            match seen(&top) {
                Seen::Folder { files, bytes, digest, .. } => (files, bytes, digest),
                other => panic!("{other:?}"),
            }
        };
        let one = make("one", &[("a", "xy"), ("b/c", "z")]);
        assert_eq!((one.0, one.1), (2, 3));
        assert_eq!(one, make("two", &[("b/c", "q"), ("a", "12")]));
        assert_ne!(one.2, make("three", &[("a", "xy"), ("b/d", "z")]).2);
        assert_ne!(one.2, make("four", &[("a", "xyz"), ("b/c", "")]).2);
        assert!(
            matches!(seen(&folder.path().join("none")), Seen::Absent(why) if why.contains("No such file"))
        );
    }

    #[test]
    fn what_is_on_this_machine_is_told() {
        let folder = tempfile::tempdir().unwrap();
        assert_eq!(own_address("10.0.0.9 50000 10.0.0.1 22").as_deref(), Some("10.0.0.1"));
        assert_eq!(own_address("fe80::9%eth0 50000 fe80::1%eth0 22"), None);
        assert_eq!(own_address(""), None);
        assert!(matches!(program(OsStr::new("sh")), Seen::File { digest, .. } if digest.len() == 64));
        assert!(matches!(program(OsStr::new("no-such-program")), Seen::Absent(_)));
        assert!(unwritable(&folder.path().join("runs/new")).is_ok());
        let file = folder.path().join("file");
        fs::write(&file, "").unwrap();
        assert!(unwritable(&file.join("run")).unwrap_err().to_string().contains("is no folder"));
    }
}
