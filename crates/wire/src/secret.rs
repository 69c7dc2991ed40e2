//! The secret of a run, and where it may be kept.

use hmac::{Hmac, KeyInit, Mac};
use sha2::Sha256;
use std::fmt;
use std::fs::{self, OpenOptions};
use std::io::Write;
use std::os::unix::fs::{OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use thiserror::Error;
use zeroize::Zeroize;

/// 32 random bytes that all processes of a run share; wiped from memory when dropped, never printed.
#[derive(Clone, PartialEq)]
pub struct Secret([u8; 32]);

/// Why there is no secret.
#[derive(Debug, Error)]
pub enum SecretError {
    /// The system refused.
    #[error("the secret file {path}: {source}\nhint: PHALANX_SECRET_FILE names one that every rank can read and nobody else; make it with `head -c32 /dev/urandom | xxd -p -c64 > FILE; chmod 600 FILE`", path = path.display())]
    Io {
        /// Which file.
        path: PathBuf,
        /// What the system said.
        source: std::io::Error,
    },
    /// Others can read it.
    #[error("the secret file {path} can be read by others (mode {mode:o})\nhint: chmod 600 {path}", path = path.display())]
    Exposed {
        /// Which file.
        path: PathBuf,
        /// Its permission bits.
        mode: u32,
    },
    /// Not 64 hexadecimal digits.
    #[error("the secret file {path} doesn't hold 64 hexadecimal digits\nhint: make one with `head -c32 /dev/urandom | xxd -p -c64`", path = path.display())]
    Malformed {
        /// Which file.
        path: PathBuf,
    },
    /// The system has no random numbers.
    #[error("the system gives no random numbers: {0}")]
    NoRandom(String),
}

impl Secret {
    /// A new one.
    pub fn random() -> Result<Secret, SecretError> {
        let mut bytes = [0; 32];
        getrandom::fill(&mut bytes).map_err(|error| SecretError::NoRandom(error.to_string()))?;
        Ok(Secret(bytes))
    }

    /// The one with these bytes.
    pub fn from_bytes(bytes: [u8; 32]) -> Secret {
        Secret(bytes)
    }

    /// Its bytes, for handing it on.
    pub fn expose(&self) -> &[u8; 32] {
        &self.0
    }

    /// The one written as 64 hexadecimal digits.
    pub fn from_hex(text: &str) -> Option<Secret> {
        let digits = text.trim().as_bytes();
        if digits.len() != 64 {
            return None;
        }
        let mut bytes = [0; 32];
        for (byte, pair) in bytes.iter_mut().zip(digits.as_chunks::<2>().0) {
            let digit = |d: u8| char::from(d).to_digit(16);
            *byte = (digit(pair[0])? * 16 + digit(pair[1])?) as u8;
        }
        Some(Secret(bytes))
    }

    /// As 64 hexadecimal digits, for a file.
    pub fn to_hex(&self) -> String {
        self.0.iter().map(|byte| format!("{byte:02x}")).collect()
    }

    /// Reads a file that only its owner can read.
    pub fn read_file(path: &Path) -> Result<Secret, SecretError> {
        let io = |source| SecretError::Io { path: path.to_owned(), source };
        let mode = fs::metadata(path).map_err(io)?.permissions().mode() & 0o777;
        if mode & 0o077 != 0 {
            return Err(SecretError::Exposed { path: path.to_owned(), mode });
        }
        let mut text = fs::read_to_string(path).map_err(io)?;
        let secret = Secret::from_hex(&text).ok_or_else(|| SecretError::Malformed { path: path.to_owned() });
        text.zeroize();
        secret
    }

    /// Reads the file, or makes it with a new secret and mode 0600. Of two processes that make it at once, one wins and both
    /// use its secret.
    pub fn load_or_create(path: &Path) -> Result<Secret, SecretError> {
        if path.exists() {
            return Secret::read_file(path);
        }
        let io = |source| SecretError::Io { path: path.to_owned(), source };
        if let Some(folder) = path.parent() {
            fs::create_dir_all(folder).map_err(io)?;
        }
        // Written whole under another name and then linked, so that nobody reads half a secret.
        // Its name is random too: two threads of one process may do this at once.
        let secret = Secret::random()?;
        let temporary = path.with_extension(format!("{}.partial", &Secret::random()?.to_hex()[..16]));
        let written = (|| {
            let mut file =
                OpenOptions::new().write(true).create(true).truncate(true).mode(0o600).open(&temporary)?;
            writeln!(file, "{}", secret.to_hex())?;
            file.sync_all()?;
            match fs::hard_link(&temporary, path) {
                Err(error) if error.kind() != std::io::ErrorKind::AlreadyExists => Err(error),
                _ => Ok(()),
            }
        })();
        let _ = fs::remove_file(&temporary);
        written.map_err(io)?;
        Secret::read_file(path)
    }

    /// The secret of one run, so that a proof made in one run is worth nothing in another.
    pub fn bind(&self, run_id: &str) -> Secret {
        Secret(self.sign(&[b"phalanx run", run_id.as_bytes()]))
    }

    /// HMAC-SHA256 over the parts, each with its length before it.
    pub(crate) fn sign(&self, parts: &[&[u8]]) -> [u8; 32] {
        let mut mac = Hmac::<Sha256>::new_from_slice(&self.0).expect("HMAC takes a key of any length");
        for part in parts {
            mac.update(&(part.len() as u64).to_le_bytes());
            mac.update(part);
        }
        mac.finalize().into_bytes().into()
    }
}

impl Drop for Secret {
    fn drop(&mut self) {
        self.0.zeroize();
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Secret(..)")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_is_made_once_for_its_owner_alone() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("deep/secret");
        let made = Secret::load_or_create(&path).unwrap();
        assert!(Secret::load_or_create(&path).unwrap() == made);
        assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
        assert_eq!(fs::read_dir(path.parent().unwrap()).unwrap().count(), 1);
        fs::set_permissions(&path, fs::Permissions::from_mode(0o644)).unwrap();
        let error = Secret::read_file(&path).unwrap_err().to_string();
        assert!(error.contains("644") && error.contains("chmod 600"), "{error}");
    }

    #[test]
    fn many_that_make_it_at_once_agree() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("secret");
        let made: Vec<Secret> = std::thread::scope(|scope| {
            let threads: Vec<_> =
                (0..8).map(|_| scope.spawn(|| Secret::load_or_create(&path).unwrap())).collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        });
        assert!(made.iter().all(|secret| *secret == made[0]));
    }

    #[test]
    fn hex_is_exact_or_nothing() {
        let secret = Secret::random().unwrap();
        assert!(Secret::from_hex(&secret.to_hex()).unwrap() == secret);
        let hex = secret.to_hex();
        for bad in ["", &hex[..63], &format!("{hex}0"), &hex.replacen(|_| true, "g", 1)] {
            assert!(Secret::from_hex(bad).is_none(), "{bad}");
        }
        assert_eq!(format!("{secret:?}"), "Secret(..)");
        assert!(secret.bind("a") != secret.bind("b"));
    }
}
