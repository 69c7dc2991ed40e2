//! Files out of a compressed tar archive.
//!
//! Nothing is written by the archive's names: what is wanted is looked for by its whole path, and what is found goes where
//! [`Job::accept`] puts it. So a member that is called `../../.profile` is only one that nobody asked for.

use super::Job;
use crate::catalog::FileSpec;
use crate::error::Result;
use flate2::bufread::GzDecoder;
use std::io::{self, BufRead, BufReader, Read};
use std::path::Path;

/// How many bytes the archive may unpack to beside the files of the dataset, also those that are here already: a long name of a member
/// is kept in memory, whoever wrote it.
const ROOM: u64 = 64 << 20;

/// Takes `files` out of `folder` of the archive in `stream`.
pub(super) fn unpack(
    job: &mut Job<'_>,
    stream: impl BufRead,
    folder: &str,
    files: &[&FileSpec],
) -> Result<()> {
    let most = job.listing.files.iter().map(|file| file.bytes).sum::<u64>().saturating_add(ROOM);
    let mut archive = tar::Archive::new(GzDecoder::new(stream).take(most));
    let broken = |job: &Job<'_>, error: io::Error| {
        job.failed(format!("the archive is broken, or unpacks to more than {most} bytes: {error}"))
    };
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

    fn job<'a>(
        listing: &'a Listing,
        folder: &'a Path,
        progress: &'a mut dyn crate::progress::Progress,
    ) -> Job<'a> {
        Job { listing, source: &SOURCE, folder, resumable: true, arrived: Vec::new(), progress }
    }

    /// Unpacks an archive into `room/inner`; gives the outcome and what lies in `room` and there afterwards.
    fn unpack_into(room: &Path, stream: &[u8]) -> (Result<()>, Vec<String>) {
        let inner = room.join("inner");
        std::fs::create_dir_all(&inner).unwrap();
        let progress = &mut crate::progress::Silent;
        let outcome = unpack(&mut job(&LISTING, &inner, progress), stream, "folder", &[&WANTED]);
        let names = [room, &inner].into_iter().flat_map(|folder| std::fs::read_dir(folder).unwrap());
        let mut names: Vec<String> =
            names.map(|entry| entry.unwrap().file_name().to_string_lossy().into_owned()).collect();
        names.sort();
        (outcome, names)
    }

    /// An archive whose members may have any name and type.
    fn archive(members: &[(String, u8)]) -> Vec<u8> {
        packed(
            &members
                .iter()
                .flat_map(|(name, kind)| member(name.as_bytes(), *kind, 3, b"abc"))
                .collect::<Vec<u8>>(),
        )
    }

    /// A member that claims to have `size` bytes.
    fn member(name: &[u8], kind: u8, size: u64, content: &[u8]) -> Vec<u8> {
        let mut header = tar::Header::new_gnu();
        let field = &mut header.as_old_mut().name;
        let length = name.len().min(field.len());
        field[..length].copy_from_slice(&name[..length]);
        header.set_entry_type(tar::EntryType::new(kind));
        header.set_size(size);
        header.set_mode(0o777);
        header.set_cksum();
        let mut bytes = [header.as_bytes(), content].concat();
        bytes.resize(bytes.len().next_multiple_of(512), 0);
        bytes
    }

    fn packed(members: &[u8]) -> Vec<u8> {
        let mut encoder = GzEncoder::new(Vec::new(), Compression::fast());
        encoder.write_all(members).unwrap();
        encoder.write_all(&[0; 1024]).unwrap();
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
        // Nor is a link, hard or symbolic, a device, a folder or a pipe of the right name followed or made.
        for kind in *b"123456" {
            let room = tempfile::tempdir().unwrap();
            let (outcome, names) = unpack_into(room.path(), &archive(&[("folder/wanted".into(), kind)]));
            assert!(outcome.is_err() && names == ["inner"], "{names:?}");
        }
    }

    #[test]
    fn odd_members_are_passed_over_and_bad_ones_are_reasons() {
        let good = member(b"folder/wanted", b'0', 3, b"abc");
        let other = member(b"folder/wanted", b'0', 3, b"xyz");
        let odd = member(b"folder/\xff\xfe\n", b'0', 3, b"abc");
        let link = member(b"folder/wanted", b'2', 0, b"");
        // A name of 80 MiB, which packs to 360 KB.
        let long = member(b"././@LongLink", b'L', 80 << 20, &vec![b'a'; 80 << 20]);
        let rows: &[(&[&[u8]], Option<&str>)] = &[
            (&[&odd, &link, &good], None),
            (&[&good, &other], None),
            (&[&other, &good], Some("wrong SHA-256")),
            (&[&member(b"folder/wanted", b'0', 1 << 33, b"abcd")], Some("more than 3 bytes")),
            (&[&member(b"folder/wanted", b'0', 5, b"abc")], Some("more than 3 bytes")),
            (
                &[&member(b"folder/more", b'0', 1 << 60, b"abc"), &good],
                Some("the archive is broken, or unpacks"),
            ),
            (&[&long, &good], Some("unpacks to more than 67108867 bytes")),
        ];
        for (i, (members, reason)) in rows.iter().enumerate() {
            let room = tempfile::tempdir().unwrap();
            let (outcome, names) = unpack_into(room.path(), &packed(&members.concat()));
            match (outcome, reason) {
                (Ok(()), None) => assert_eq!(names, ["inner", "wanted"], "row {i}"),
                (Err(error), Some(reason)) => {
                    let message = error.to_string();
                    assert!(message.contains(reason) && names == ["inner"], "row {i}: {message}, {names:?}");
                }
                (outcome, _) => panic!("row {i}: {outcome:?}"),
            }
        }
    }

    #[test]
    fn a_file_behind_those_that_are_here_already_is_found() {
        const LARGE: FileSpec = FileSpec { name: "large", bytes: ROOM + (8 << 20), sha256: ABC };
        const BOTH: Listing = Listing { files: &[LARGE, WANTED], ..LISTING };
        let room = tempfile::tempdir().unwrap();
        let large = member(b"folder/large", b'0', LARGE.bytes, &vec![0; LARGE.bytes as usize]);
        let bytes = packed(&[large, member(b"folder/wanted", b'0', 3, b"abc")].concat());
        unpack(&mut job(&BOTH, room.path(), &mut crate::progress::Silent), &bytes[..], "folder", &[&WANTED])
            .unwrap();
        assert!(room.path().join("wanted").exists());
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
