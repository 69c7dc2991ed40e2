//! Files out of a compressed tar archive.
//!
//! Nothing is written by the archive's names: what is wanted is looked for by its whole path, and what is found goes where
//! [`Job::accept`] puts it. So a member that is called `../../.profile` is only one that nobody asked for.

use super::Job;
use crate::catalog::FileSpec;
use crate::error::Result;
use flate2::bufread::GzDecoder;
use std::io::{self, BufRead, BufReader};
use std::path::Path;

/// Takes `files` out of `folder` of the archive in `stream`.
pub(super) fn unpack(
    job: &mut Job<'_>,
    stream: impl BufRead,
    folder: &str,
    files: &[&FileSpec],
) -> Result<()> {
    let mut archive = tar::Archive::new(GzDecoder::new(stream));
    let broken = |job: &Job<'_>, error: io::Error| job.failed(format!("the archive is broken: {error}"));
    let mut left: Vec<&FileSpec> = files.to_vec();
    for entry in archive.entries().map_err(|error| broken(job, error))? {
        let entry = entry.map_err(|error| broken(job, error))?;
        let path = entry.path().map_err(|error| broken(job, error))?.into_owned();
        let wanted = left.iter().position(|file| path == Path::new(folder).join(file.name));
        if let Some(wanted) = wanted.filter(|_| entry.header().entry_type().is_file()) {
            job.accept(left.remove(wanted), &path, BufReader::with_capacity(1 << 17, entry))?;
        }
        if left.is_empty() {
            return Ok(());
        }
    }
    let found = files.len() - left.len();
    Err(job.failed(format!("holds {found} of {} wanted files in {folder}", files.len())))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::catalog::{Home, Listing, Source};
    use flate2::{Compression, write::GzEncoder};
    use proptest::prelude::*;
    use std::io::Write;

    /// The SHA-256 of `abc`.
    const ABC: &str = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad";
    const WANTED: FileSpec = FileSpec { name: "wanted", bytes: 3, sha256: ABC };
    const SOURCE: Source = Source::Archive { url: "http://nowhere/a.tar.gz", folder: "folder", bytes: 0 };
    const LISTING: Listing = Listing { name: "l", about: "", files: &[WANTED], home: Home::Library };

    /// Unpacks an archive into `room/inner`; gives the outcome and what lies in `room` and there afterwards.
    fn unpack_into(room: &Path, stream: &[u8]) -> (Result<()>, Vec<String>) {
        let inner = room.join("inner");
        std::fs::create_dir_all(&inner).unwrap();
        let progress = &mut crate::progress::Silent;
        let mut job = Job {
            listing: &LISTING,
            source: &SOURCE,
            folder: &inner,
            resumable: true,
            arrived: Vec::new(),
            progress,
        };
        let outcome = unpack(&mut job, stream, "folder", &[&WANTED]);
        let names = [room, &inner].into_iter().flat_map(|folder| std::fs::read_dir(folder).unwrap());
        let mut names: Vec<String> =
            names.map(|entry| entry.unwrap().file_name().to_string_lossy().into_owned()).collect();
        names.sort();
        (outcome, names)
    }

    /// An archive whose members may have any name and type.
    fn archive(members: &[(String, u8)]) -> Vec<u8> {
        let mut tar = Vec::new();
        for (name, kind) in members {
            let mut header = tar::Header::new_gnu();
            let field = &mut header.as_old_mut().name;
            let length = name.len().min(field.len());
            field[..length].copy_from_slice(&name.as_bytes()[..length]);
            header.set_entry_type(tar::EntryType::new(*kind));
            header.set_size(3);
            header.set_mode(0o777);
            header.set_cksum();
            tar.extend_from_slice(header.as_bytes());
            tar.extend_from_slice(b"abc");
            tar.resize(tar.len().next_multiple_of(512), 0);
        }
        tar.resize(tar.len() + 1024, 0);
        let mut encoder = GzEncoder::new(Vec::new(), Compression::fast());
        encoder.write_all(&tar).unwrap();
        encoder.finish().unwrap()
    }

    #[test]
    fn members_that_lead_elsewhere_are_written_nowhere() {
        for name in
            ["../wanted", "folder/../../wanted", "/etc/wanted", "folder/../wanted", "wanted", "folder"]
        {
            let room = tempfile::tempdir().unwrap();
            let (outcome, names) = unpack_into(room.path(), &archive(&[(name.to_owned(), b'0')]));
            assert!(outcome.is_err(), "{name}");
            assert_eq!(names, ["inner"], "{name}");
        }
        // Nor is a link of the right name followed or made.
        let room = tempfile::tempdir().unwrap();
        let (outcome, names) = unpack_into(room.path(), &archive(&[("folder/wanted".into(), b'2')]));
        assert!(outcome.is_err() && names == ["inner"], "{names:?}");
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(100))]

        #[test]
        fn whatever_an_archive_holds_only_what_is_wanted_is_written(
            members in proptest::collection::vec(("[./a-zA-Z]{0,12}|folder/wanted|\\PC{0,30}", any::<u8>()), 0..5),
            damage in proptest::option::of((any::<proptest::sample::Index>(), any::<u8>())),
        ) {
            let room = tempfile::tempdir().unwrap();
            let mut bytes = archive(&members);
            if let Some((at, byte)) = damage {
                let at = at.index(bytes.len());
                bytes[at] = byte;
            }
            let (outcome, names) = unpack_into(room.path(), &bytes);
            match outcome {
                Ok(()) => prop_assert_eq!(names, ["inner", "wanted"]),
                Err(_) => prop_assert_eq!(names, ["inner"]),
            }
        }
    }
}
