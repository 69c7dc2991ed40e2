//! Files over HTTP: with short patience for servers that don't answer, and downloads that go on where they stopped.

use super::Job;
use super::archive::unpack;
use crate::catalog::FileSpec;
use crate::error::{Error, Result};
use crate::progress::FetchEvent;
use std::fs::{self, File, OpenOptions};
use std::io::{BufReader, Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime, UNIX_EPOCH};
use ureq::Agent;
use ureq::http::header::{CONTENT_LENGTH, CONTENT_RANGE, RANGE};

/// Machines without a way to the network often swallow packets, and other sources are waiting: this is how long a name, a
/// connection or a first answer may take.
const PATIENCE: Duration = Duration::from_secs(3);
/// How long a download may pause.
const STALL: Duration = Duration::from_secs(20);
/// How long a download may take: ten minutes, and longer for what is so large that 50 kB/s would not do.
fn whole(bytes: u64) -> Duration {
    Duration::from_secs(600.max(bytes / 50_000))
}
/// A download writes more often than this.
const IDLE: Duration = Duration::from_secs(120);
/// How the name of a file ends that isn't whole yet.
const PART: &str = ".part";
/// How often a download that breaks off is taken up again.
const ATTEMPTS: usize = 4;

/// Gets each of `files` from `base`, compressed.
pub(super) fn get(job: &mut Job<'_>, base: &str, files: &[&FileSpec]) -> Result<()> {
    for file in files {
        let name = format!("{}.gz", file.name);
        let url = format!("{base}{name}");
        let download = Download { url: &url, name: &name, shown: file.name, bytes: file.bytes };
        download.get(job, |job, stream| job.accept(file, Path::new(&url), stream))?;
    }
    Ok(())
}

/// Gets `files` out of `folder` of the archive at `url`.
pub(super) fn archive(
    job: &mut Job<'_>,
    url: &str,
    folder: &str,
    bytes: u64,
    files: &[&FileSpec],
) -> Result<()> {
    let name = url.rsplit('/').next().unwrap_or(url);
    let download = Download { url, name, shown: name, bytes };
    download.get(job, |job, stream| unpack(job, stream, folder, files))
}

/// A file that is to be downloaded.
struct Download<'a> {
    url: &'a str,
    /// Its name there.
    name: &'a str,
    /// What progress calls it.
    shown: &'a str,
    /// About how large it is at most.
    bytes: u64,
}

impl Download<'_> {
    /// Downloads the file and hands it to `accept`.
    fn get(
        &self,
        job: &mut Job<'_>,
        accept: impl FnOnce(&mut Job<'_>, BufReader<File>) -> Result<()>,
    ) -> Result<()> {
        let agent = Agent::new_with_config(
            Agent::config_builder()
                .timeout_resolve(Some(PATIENCE))
                .timeout_connect(Some(PATIENCE))
                .timeout_recv_response(Some(PATIENCE))
                .timeout_per_read(Some(STALL))
                .timeout_global(Some(whole(self.bytes)))
                .http_status_as_error(false)
                .build(),
        );
        let part = self.part(job)?;
        let got = self.download(job, &agent, &part).and_then(|()| {
            let stream = File::open(&part).map_err(Error::io("open", &part))?;
            accept(job, BufReader::with_capacity(1 << 17, stream))
        });
        // Half a file is worth keeping, a wrong one isn't.
        let half = matches!(got, Err(Error::Source { .. }))
            && job.resumable
            && part.metadata().is_ok_and(|m| m.len() > 0);
        if !half {
            let _ = fs::remove_file(&part);
        }
        got
    }

    /// The file that this download writes. Where nobody else of this machine does, it goes on with what an earlier one left, on another
    /// machine too, unless that may still write it.
    fn part(&self, job: &Job<'_>) -> Result<PathBuf> {
        let begins = format!(".{}.", self.name);
        let named = |unique: &str| job.folder.join(format!("{begins}{unique}{PART}"));
        let machine = running_kernel();
        if !job.resumable {
            let moment = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_nanos();
            return Ok(named(&format!("{machine}-{}-{moment:x}", std::process::id())));
        }
        let part = named(&machine);
        if part.exists() {
            return Ok(part);
        }
        // Dated by the clock that what others write is dated by.
        let made = File::create(&part).and_then(|file| file.metadata()?.modified());
        let now = made.map_err(Error::io("create", &part))?;
        for entry in fs::read_dir(job.folder).map_err(Error::io("list", job.folder))?.flatten() {
            let name = entry.file_name().to_string_lossy().into_owned();
            let other = name.starts_with(&begins) && name.ends_with(PART) && entry.path() != part;
            let written = entry.metadata().and_then(|found| found.modified());
            let idle = written.is_ok_and(|then| now.duration_since(then).is_ok_and(|idle| idle > IDLE));
            // Of several that want it one gets it.
            if other && idle && fs::rename(entry.path(), &part).is_ok() {
                break;
            }
        }
        Ok(part)
    }

    /// Downloads into `part`, going on after the bytes that it holds.
    fn download(&self, job: &mut Job<'_>, agent: &Agent, part: &Path) -> Result<()> {
        let mut broken = String::new();
        for _ in 0..ATTEMPTS {
            let mut output = OpenOptions::new()
                .create(true)
                .append(true)
                .read(true)
                .open(part)
                .map_err(Error::io("open", part))?;
            let have = output.seek(SeekFrom::End(0)).map_err(Error::io("read", part))?;
            match self.attempt(job, agent, part, &mut output, have)? {
                Outcome::Whole => return Ok(()),
                Outcome::BrokenOff { reason } => broken = reason,
                // What lies here isn't the beginning of what the server has: all of it is asked for.
                Outcome::Useless { reason } if have > 0 => {
                    output.set_len(0).map_err(Error::io("empty", part))?;
                    broken = reason;
                    continue;
                }
                Outcome::Useless { reason } => return Err(job.failed(reason)),
            }
            let grown = output.seek(SeekFrom::End(0)).map_err(Error::io("read", part))? > have;
            if !grown {
                break;
            }
        }
        Err(job.failed(format!("{}: {broken}", self.name)))
    }

    /// One request, for the bytes after the first `have`.
    fn attempt(
        &self,
        job: &mut Job<'_>,
        agent: &Agent,
        path: &Path,
        output: &mut File,
        have: u64,
    ) -> Result<Outcome> {
        let mut request = agent.get(self.url);
        if have > 0 {
            request = request.header(RANGE, format!("bytes={have}-"));
        }
        let response = request.call().map_err(|error| job.failed(in_words(&error)))?;
        let header = |name| response.headers().get(name).and_then(|value| value.to_str().ok());
        let length = header(CONTENT_LENGTH).and_then(|value| value.parse::<u64>().ok());
        let status = response.status().as_u16();
        let mut done = match status {
            200 => {
                output.set_len(0).map_err(Error::io("empty", path))?;
                0
            }
            206 if header(CONTENT_RANGE)
                .is_some_and(|range| range.starts_with(&format!("bytes {have}-"))) =>
            {
                have
            }
            206 | 416 => {
                return Ok(Outcome::Useless { reason: format!("{}: HTTP status {status}", self.name) });
            }
            _ => return Err(job.failed(format!("{}: HTTP status {status}", self.name))),
        };
        let total = length.map(|length| done + length);
        // Compression never adds as much as this: who sends more isn't sending this file.
        let limit = self.bytes + self.bytes / 100 + 1024;
        let mut body = response.into_body().into_with_config().limit(u64::MAX).reader();
        let mut buffer = vec![0; 1 << 16];
        loop {
            let n = match body.read(&mut buffer) {
                Ok(0) => break,
                Ok(n) => n,
                Err(error) => {
                    return Ok(Outcome::BrokenOff {
                        reason: format!("the download broke off after {done} bytes: {error}"),
                    });
                }
            };
            done += n as u64;
            if done > limit {
                output.set_len(0).map_err(Error::io("empty", path))?;
                return Ok(Outcome::Useless { reason: format!("{}: longer than {limit} bytes", self.name) });
            }
            output.write_all(&buffer[..n]).map_err(Error::io("write", path))?;
            job.progress.event(FetchEvent::Bytes { file: self.shown, done, total });
        }
        match total {
            Some(total) if done < total => Ok(Outcome::BrokenOff {
                reason: format!("the download broke off after {done} of {total} bytes"),
            }),
            _ => Ok(Outcome::Whole),
        }
    }
}

/// Which machine this is, and since when it runs: within that at least locks hold, where the file system knows any.
fn running_kernel() -> String {
    let id = fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
    id.chars().filter(char::is_ascii_hexdigit).take(12).collect()
}

enum Outcome {
    /// The file is complete.
    Whole,
    /// The connection ended early; what arrived is kept.
    BrokenOff { reason: String },
    /// What was asked for doesn't fit what the server has.
    Useless { reason: String },
}

fn in_words(error: &ureq::Error) -> String {
    match error {
        ureq::Error::HostNotFound => "the host's name can't be resolved".to_owned(),
        ureq::Error::Timeout(what) => format!("no answer in time: {what}"),
        ureq::Error::Io(error) => error.to_string(),
        other => other.to_string(),
    }
}
