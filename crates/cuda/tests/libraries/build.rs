//! The stand-ins as libraries, made where they aren't there yet.

use std::collections::hash_map::DefaultHasher;
use std::hash::{Hash, Hasher};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Mutex, PoisonError};

const OPTIONS: [&str; 9] =
    ["-std=c++17", "-O2", "-g1", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", "-fvisibility=hidden"];

/// The folder of `source`, compiled as `file`; none where there is no compiler, said aloud.
pub(crate) fn folder(source: &Path, file: &str) -> Option<PathBuf> {
    static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());
    let _guard = ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner);
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR"))
        .join(format!("cuda-libraries-{:016x}", fingerprint(source.parent().unwrap())));
    std::fs::create_dir_all(&folder).unwrap();
    let path = folder.join(file);
    if path.exists() {
        return Some(folder);
    }
    // Other processes may be about the same library.
    let own = PathBuf::from(format!("{}.{}", path.display(), std::process::id()));
    let compiled = Command::new("c++")
        .args(OPTIONS)
        .arg(format!("-Wl,-soname,{file}"))
        .arg("-Wl,-Bsymbolic")
        .arg(source)
        .arg("-o")
        .arg(&own)
        .args(["-pthread", "-ldl"])
        .output();
    let output = match compiled {
        Ok(output) => output,
        Err(error) => {
            eprintln!("skipped: no C++ compiler (package g++): {error}");
            return None;
        }
    };
    assert!(output.status.success(), "{}: {}", source.display(), String::from_utf8_lossy(&output.stderr));
    std::fs::rename(&own, &path).unwrap();
    Some(folder)
}

/// All files beside each other, since one includes another.
fn fingerprint(folder: &Path) -> u64 {
    let mut hasher = DefaultHasher::new();
    OPTIONS.hash(&mut hasher);
    let mut files: Vec<PathBuf> =
        std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()).collect();
    files.retain(|file| file.is_file());
    files.sort();
    files.iter().for_each(|file| std::fs::read(file).unwrap().hash(&mut hasher));
    hasher.finish()
}
