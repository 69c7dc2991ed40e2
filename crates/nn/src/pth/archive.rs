//! The zip archive: `NAME/data.pkl`, `NAME/byteorder`, and a storage in each `NAME/data/KEY`.

use super::{MAX_RATIO, SMALL};
use std::io::{Cursor, Read};
use zip::ZipArchive;
use zip::read::{ArchiveOffset, Config};
use zip::result::ZipError;

pub(super) struct Archive<'a> {
    zip: ZipArchive<Cursor<&'a [u8]>>,
    /// The folder that everything lies in, with its slash; named as the file was when it was written.
    folder: String,
    /// Whether the machine that wrote it puts the high byte of a number first.
    pub(super) big_endian: bool,
    /// How many bytes may still be unpacked (W-BOUND).
    left: u64,
}

impl<'a> Archive<'a> {
    pub(super) fn open(bytes: &'a [u8]) -> Result<Archive<'a>, String> {
        // Said, not guessed: the guess goes wrong for archives of PyTorch whose first entry has a name of 30 bytes, as
        // `checkpoint_state_dict/data.pkl`. They have 76 bytes of zip64 records behind a directory that needs none, and its
        // first header then has the same length.
        let config = Config { archive_offset: ArchiveOffset::Known(0) };
        let zip = ZipArchive::with_config(config, Cursor::new(bytes))
            .map_err(|error| format!("its zip archive is broken: {error}"))?;
        let folder = zip.file_names().filter_map(Result::ok).find_map(|name| {
            let folder = name.strip_suffix("data.pkl")?;
            (folder.ends_with('/') && folder.matches('/').count() == 1).then(|| folder.to_owned())
        });
        let folder = folder.ok_or("it is a zip archive, but none of PyTorch's: it has no data.pkl")?;
        let left = (bytes.len() as u64).saturating_mul(MAX_RATIO).saturating_add(SMALL);
        let mut archive = Archive { zip, folder, big_endian: false, left };
        if archive.has("constants.pkl") {
            return Err("it is a TorchScript program\n\
                 hint: save the weights alone: torch.save(torch.jit.load(path).state_dict(), other_path)"
                .into());
        }
        // PyTorch before 2.1 wrote none, nearly always on little-endian machines.
        if archive.has("byteorder") {
            archive.big_endian = match archive.entry("byteorder")?.as_slice() {
                b"little" => false,
                b"big" => true,
                other => {
                    let other = &other[..other.len().min(40)];
                    return Err(format!(
                        "its byte order is {:?}, not little or big",
                        String::from_utf8_lossy(other)
                    ));
                }
            };
        }
        Ok(archive)
    }

    fn has(&self, name: &str) -> bool {
        self.zip.index_for_name(&format!("{}{name}", self.folder)).is_some()
    }

    /// The content of an entry, whose checksum is right.
    pub(super) fn entry(&mut self, name: &str) -> Result<Vec<u8>, String> {
        let path = format!("{}{name}", self.folder);
        let mut entry = self.zip.by_name(&path).map_err(|error| match error {
            ZipError::FileNotFound => format!("the archive has no {path:?}"),
            error => format!("{path:?} in the archive can't be read: {error}"),
        })?;
        let size = entry.size();
        self.left = self.left.checked_sub(size).ok_or_else(|| {
            format!("{path:?} in the archive unpacks to {size} bytes, too many for a file of this length")
        })?;
        // One byte more than there should be, so that the end is seen, where the checksum is compared.
        let mut content = Vec::new();
        (&mut entry)
            .take(size.saturating_add(1))
            .read_to_end(&mut content)
            .map_err(|error| format!("{path:?} in the archive can't be read: {error}"))?;
        if content.len() as u64 != size {
            return Err(format!(
                "{path:?} in the archive has {} bytes, not {size} as it says",
                content.len()
            ));
        }
        Ok(content)
    }
}
