//! The manifest of a checkpoint: what run it is of, how far that was, and which files hold the rest, with a checksum for every
//! chunk of them. It is JSON, and its last entry is the checksum of all the text before, so a manifest is whole or none.
//!
//! A reader takes any manifest up to its [`VERSION`] and passes over entries that it doesn't know. What would make an old reader
//! go on wrongly raises the version.

use super::error::CheckpointError;
use super::position::Position;
use serde::{Deserialize, Serialize};
use std::path::Path;

/// The newest format, which is read as all older ones are.
pub const VERSION: u32 = 4;

/// The format of a checkpoint of these files and facts: the oldest that has them, so that an older reader takes what it can.
pub(super) fn version_of(files: &[FileEntry], run: &RunFacts) -> u32 {
    let of = |holds| files.iter().filter(|file| file.holds == holds).count();
    if of(Holds::Model) > 1 {
        return 4;
    }
    match files.iter().any(|file| file.holds == Holds::Compression) {
        _ if run.logical_shards > 0 => 3,
        true => 2,
        false => 1,
    }
}

/// What a file with this name is the sign of: a checkpoint that is whole.
pub(super) const FILE: &str = "manifest.json";

/// How much of a file one checksum stands for.
pub(super) const CHUNK: usize = 1 << 20;
/// The most that a reader holds in memory, should writers ever take longer ones.
const MOST_CHUNK: u64 = 64 << 20;

/// What a checkpoint holds.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Manifest {
    /// The oldest format that has all that it holds.
    pub version: u32,
    /// How far the run was.
    pub position: Position,
    /// What its steps are functions of.
    pub run: RunFacts,
    /// Whose it is.
    #[serde(flatten)]
    pub origin: Origin,
    /// The files beside the manifest. Since format 4 several may hold parts of the same, whose arrays then belong together.
    pub files: Vec<FileEntry>,
}

/// What a run says of itself in its checkpoints.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Origin {
    /// The recipe as TOML, if the run has one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub recipe: Option<String>,
    /// The run's id, if it has one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub run_id: Option<String>,
}

/// What decides, beside the recipe's numbers, which samples a step takes and which random numbers it draws.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RunFacts {
    /// The seed.
    pub seed: u64,
    /// Whether samples were shuffled.
    pub shuffle: bool,
    /// How many samples the data set had.
    pub dataset: u64,
    /// How many of them an epoch trains on; 0 where that wasn't told.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub samples_per_epoch: u64,
    /// Samples of a step, of all ranks and passes.
    pub global_batch: u64,
    /// How many ranks there were; another number is fine.
    pub world_size: u64,
    /// Into how many logical shards a step was cut; 0 where ranks shared it. Since format 3.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub logical_shards: u64,
}

fn is_zero(number: &u64) -> bool {
    *number == 0
}

/// One file of a checkpoint.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct FileEntry {
    /// Its name in the folder of the manifest.
    pub name: String,
    /// What is in it.
    pub holds: Holds,
    /// Its length.
    pub bytes: u64,
    /// How many of them one checksum stands for.
    pub chunk: u64,
    /// CRC-32 of every chunk, in order.
    #[serde(with = "hex")]
    pub crc32: Vec<u32>,
}

/// What a file is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Holds {
    /// Parameters and buffers, under PyTorch's names.
    Model,
    /// The optimizer's state, an array `<parameter>.<state>` each, and the count of its steps.
    Optimizer,
    /// The running mean of parameters and buffers, under the same names as these.
    Average,
    /// What each rank's compression of gradients keeps from step to step, as arrays `rank.<rank>.<name>`. Since format 2.
    Compression,
}

impl Manifest {
    /// The text of the file.
    pub(super) fn to_text(&self) -> String {
        let mut text = serde_json::to_string_pretty(self).expect("a manifest is always JSON");
        let end = text.trim_end_matches(['\n', '}']).len();
        text.truncate(end);
        let sum = crc32fast::hash(text.as_bytes());
        text.push_str(&seal(sum));
        text
    }

    /// Reads the text of the file at `path`.
    pub(super) fn parse(path: &Path, text: &[u8]) -> Result<Manifest, CheckpointError> {
        let broken =
            |reason: &str| CheckpointError::Broken { path: path.to_owned(), reason: reason.to_owned() };
        let Some((body, end)) = text.split_at_checked(text.len().saturating_sub(SEAL)) else {
            return Err(broken("the manifest is cut off"));
        };
        if end != seal(crc32fast::hash(body)).as_bytes() {
            return Err(broken("the manifest isn't what was written: its checksum is wrong"));
        }
        #[derive(Deserialize)]
        struct Version {
            version: u32,
        }
        let json = |error: serde_json::Error| broken(&format!("the manifest makes no sense: {error}"));
        let Version { version } = serde_json::from_slice(text).map_err(json)?;
        if version > VERSION {
            return Err(CheckpointError::Newer { path: path.to_owned(), version });
        }
        let manifest: Manifest = serde_json::from_slice(text).map_err(json)?;
        for file in &manifest.files {
            file.check().map_err(|reason| broken(&format!("the manifest makes no sense: {reason}")))?;
        }
        Ok(manifest)
    }
}

/// The end of a manifest: its last entry and the closing brace.
fn seal(sum: u32) -> String {
    format!(",\n  \"crc32\": \"{sum:08x}\"\n}}\n")
}

/// The length of every [`seal`].
const SEAL: usize = ",\n  \"crc32\": \"00000000\"\n}\n".len();

impl FileEntry {
    /// Says what is wrong with an entry that no writer makes.
    fn check(&self) -> Result<(), String> {
        let FileEntry { name, bytes, chunk, crc32, .. } = self;
        // A name is one of this folder, whatever it holds.
        if name.is_empty()
            || name.starts_with('.')
            || name.contains(['/', '\\'])
            || name.contains(char::is_control)
        {
            return Err(format!("{name:?} is no name of a file of a checkpoint"));
        }
        if *chunk > MOST_CHUNK {
            return Err(format!("{name} has chunks of {chunk} bytes, and the most is {MOST_CHUNK}"));
        }
        if *chunk == 0 || bytes.div_ceil(*chunk) != crc32.len() as u64 {
            return Err(format!(
                "{name} has {} checksums of {chunk} bytes each for {bytes} bytes",
                crc32.len()
            ));
        }
        Ok(())
    }
}

/// Checksums as one string of eight hexadecimal digits each: a large checkpoint has thousands.
mod hex {
    use serde::de::Error;
    use serde::{Deserialize, Deserializer, Serializer};
    use std::fmt::Write;

    pub(super) fn serialize<S: Serializer>(sums: &[u32], to: S) -> Result<S::Ok, S::Error> {
        let text = sums.iter().fold(String::new(), |mut text, sum| {
            write!(text, "{sum:08x}").expect("a string takes all");
            text
        });
        to.serialize_str(&text)
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<Vec<u32>, D::Error> {
        let text = String::deserialize(from)?;
        let (sums, rest) = text.as_bytes().as_chunks::<8>();
        let sum = |digits: &[u8; 8]| {
            let digits = std::str::from_utf8(digits).ok().filter(|text| !text.starts_with('+'));
            digits.and_then(|digits| u32::from_str_radix(digits, 16).ok())
        };
        let sums: Option<Vec<u32>> = sums.iter().map(sum).collect();
        sums.filter(|_| rest.is_empty()).ok_or_else(|| D::Error::custom("checksums are eight digits each"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn sample() -> Manifest {
        Manifest {
            version: 1,
            position: Position { step: 12, epoch: 1, step_in_epoch: 2, samples: 768, ..Position::default() },
            run: RunFacts {
                seed: 3,
                shuffle: true,
                dataset: 640,
                samples_per_epoch: 640,
                global_batch: 64,
                world_size: 2,
                logical_shards: 4,
            },
            origin: Origin {
                recipe: Some("[model]\nname = \"mnist\"\n".into()),
                run_id: Some("hfqkmz4n".into()),
            },
            files: vec![FileEntry {
                name: "model.safetensors".into(),
                holds: Holds::Model,
                bytes: CHUNK as u64 + 1,
                chunk: CHUNK as u64,
                crc32: vec![0xdead_beef, 7],
            }],
        }
    }

    fn parse(text: &[u8]) -> Result<Manifest, CheckpointError> {
        Manifest::parse(Path::new("step-12/manifest.json"), text)
    }

    /// `text` with its right checksum, as a mad writer would have it.
    fn sealed(text: &str) -> Vec<u8> {
        let body = text.trim_end_matches(['\n', '}']);
        format!("{body}{}", seal(crc32fast::hash(body.as_bytes()))).into_bytes()
    }

    #[test]
    fn an_entry_that_would_take_memory_or_the_terminal_is_refused() {
        let check = |change: fn(&mut FileEntry), words: &str| {
            let mut manifest = sample();
            change(&mut manifest.files[0]);
            let error = parse(manifest.to_text().as_bytes()).unwrap_err().to_string();
            assert!(error.contains(words), "{error}");
        };
        let huge = |entry: &mut FileEntry| (entry.bytes, entry.chunk) = (3 << 30, (3 << 30) / 2);
        check(huge, "chunks of 1610612736 bytes, and the most is 67108864");
        check(|entry| entry.name = "\u{1b}[2Jmodel".into(), "\"\\u{1b}[2Jmodel\" is no name of a file");
    }

    #[test]
    fn what_is_written_is_read_and_is_json() {
        let text = sample().to_text();
        assert_eq!(parse(text.as_bytes()).unwrap(), sample());
        let json: serde_json::Value = serde_json::from_str(&text).unwrap();
        assert_eq!(json["files"][0]["crc32"], "deadbeef00000007");
    }

    #[test]
    fn a_cut_or_altered_manifest_is_broken_at_every_byte() {
        let text = sample().to_text().into_bytes();
        for at in 0..text.len() {
            let cut = parse(&text[..at]).unwrap_err();
            assert!(matches!(cut, CheckpointError::Broken { .. }), "cut at {at}: {cut}");
            let mut flipped = text.clone();
            flipped[at] ^= 1;
            let flipped = parse(&flipped).unwrap_err();
            assert!(matches!(flipped, CheckpointError::Broken { .. }), "flipped at {at}: {flipped}");
        }
    }

    #[test]
    fn a_manifest_of_a_later_version_says_so_and_one_with_more_entries_is_read() {
        let text = sample().to_text();
        let error = parse(&sealed(&text.replace("\"version\": 1", "\"version\": 5"))).unwrap_err();
        assert!(matches!(error, CheckpointError::Newer { version: 5, .. }), "{error}");
        assert!(error.to_string().contains("format 5, and this version reads formats up to 4"), "{error}");
        // Later versions may hold things that this one can't read.
        let error = parse(&sealed("{\n  \"version\": 5,\n  \"position\": 0\n}\n")).unwrap_err();
        assert!(matches!(error, CheckpointError::Newer { version: 5, .. }), "{error}");
        let more = text.replace("\"version\": 1", "\"version\": 1,\n  \"weather\": \"fair\"");
        assert_eq!(parse(&sealed(&more)).unwrap(), sample());
    }

    #[test]
    fn entries_that_no_writer_makes_are_refused() {
        let check = |change: fn(&mut FileEntry), why: &str| {
            let mut manifest = sample();
            change(&mut manifest.files[0]);
            let error = parse(manifest.to_text().as_bytes()).unwrap_err().to_string();
            assert!(error.contains(why), "{error}");
        };
        check(|file| file.name = "../model".into(), "no name of a file");
        check(|file| file.name = String::new(), "no name of a file");
        check(|file| file.name = "..".into(), "no name of a file");
        check(
            |file| file.bytes = u64::MAX,
            "2 checksums of 1048576 bytes each for 18446744073709551615 bytes",
        );
        check(|file| file.chunk = 0, "2 checksums of 0 bytes");
        let odd = sample().to_text().replace("deadbeef00000007", "deadbeef0000000");
        assert!(parse(&sealed(&odd)).unwrap_err().to_string().contains("eight digits"));
    }

    proptest! {
        #[test]
        fn no_text_is_more_than_an_error(text in proptest::collection::vec(any::<u8>(), 0..300)) {
            prop_assert!(parse(&text).is_err());
            prop_assert!(parse(&sealed(&String::from_utf8_lossy(&text))).is_err());
        }

        #[test]
        fn no_change_of_a_word_is_more_than_an_error(at in 0usize..600, with in ".{0,12}") {
            let mut text = sample().to_text();
            let at = at % (text.len() - SEAL);
            let end = (at + with.len()).min(text.len() - SEAL);
            text.replace_range(at..end, &with);
            // Sealed again, it may even be a manifest; what it must not do is panic.
            let _ = parse(&sealed(&text));
        }
    }
}
