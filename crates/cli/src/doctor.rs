//! `phalanx doctor`: what this machine has for training, and what is missing, with what to do about it.
//!
//! No GPU is touched: the libraries are opened and asked for their versions.

use crate::args::DoctorArgs;
use crate::meminfo::Meminfo;
use crate::say::print;
use crate::top::gpus::{self, Shown};
use anyhow::Result;
use phalanx_cuda::cublaslt::CublasLt;
use phalanx_cuda::cudnn::Cudnn;
use phalanx_cuda::nccl::Nccl;
use phalanx_cuda::nvml::Nvml;
use phalanx_cuda::{Driver, Error, Library, Nvrtc};
use serde::Serialize;
use std::fmt;
use std::fs;

/// A line of `--json`.
#[derive(Serialize)]
#[serde(tag = "doctor", rename_all = "lowercase")]
enum Line<'a> {
    Machine(Machine),
    Library(&'a Found),
    Gpu(&'a Shown),
    /// The last one.
    Done {
        gpus: usize,
        /// What keeps this machine's GPUs from being trained on.
        trouble: &'a [String],
    },
}

/// What all programs have.
#[derive(Serialize)]
struct Machine {
    /// Processors that this process may use, and those that are there.
    cores: usize,
    all_cores: usize,
    memory_bytes: Option<u64>,
    /// What is free in `/dev/shm`, which NCCL shares memory by.
    shared_memory_bytes: Option<u64>,
}

/// A library of NVIDIA's.
#[derive(Serialize)]
struct Found {
    library: &'static str,
    version: Option<String>,
    /// Why there is none that works.
    missing: Option<String>,
}

impl Found {
    fn new(library: Library, version: Result<String, Error>) -> Found {
        let (version, missing) = match version {
            Ok(version) => (Some(version), None),
            Err(error) => (None, Some(error.to_string())),
        };
        Found { library: library.name(), version, missing }
    }
}

pub(crate) fn doctor(args: &DoctorArgs) -> Result<u8> {
    let machine = Machine::this();
    let driver = Driver::open(&[]);
    let (nvml, seen) = gpus::look_once(&driver);
    let found = libraries(&driver, &nvml);
    // A machine without GPUs lacks nothing.
    let has_gpus = !seen.is_empty() || driver.as_ref().is_ok_and(|driver| driver.gpus() > 0);
    let lost = seen.iter().filter_map(|gpu| gpu.failure.clone());
    let missing = found.iter().filter_map(|found| found.missing.clone());
    let trouble: Vec<String> = if has_gpus { missing.chain(lost).collect() } else { Vec::new() };
    if args.json {
        let lines = std::iter::once(Line::Machine(machine))
            .chain(found.iter().map(Line::Library))
            .chain(seen.iter().map(Line::Gpu))
            .chain([Line::Done { gpus: seen.len(), trouble: &trouble }]);
        for line in lines {
            print(serde_json::to_string(&line)?);
        }
    } else {
        print(&machine);
        found.iter().for_each(print);
        seen.iter().for_each(print);
        print(verdict(has_gpus, &trouble));
    }
    Ok(u8::from(!trouble.is_empty()))
}

fn libraries(driver: &Result<Driver, Error>, nvml: &Result<Nvml, Error>) -> Vec<Found> {
    let dotted = |(a, b, c): (usize, usize, usize)| format!("{a}.{b}.{c}");
    let number = nvml.as_ref().ok().and_then(|nvml| nvml.driver_version().ok());
    let driver = driver.as_ref().map_err(Error::clone).map(|driver| match number {
        Some(number) => format!("{number}, for CUDA up to {}", driver.version()),
        None => format!("for CUDA up to {}", driver.version()),
    });
    let nccl = Nccl::open(&[]).and_then(|nccl| nccl.version());
    vec![
        Found::new(Library::Driver, driver),
        Found::new(Library::Nvml, nvml.as_ref().map_err(Error::clone).map(|_| "that of the driver".into())),
        Found::new(Library::Nvrtc, Nvrtc::open(&[]).map(compiler)),
        Found::new(Library::CublasLt, CublasLt::open(&[]).map(|library| dotted(library.version()))),
        Found::new(Library::Cudnn, Cudnn::open(&[]).map(|library| dotted(library.version()))),
        Found::new(Library::Nccl, nccl.map(|(a, b, c)| format!("{a}.{b}.{c}"))),
    ]
}

/// A compiler's version, and the GPUs that it compiles for: newer ones take what it makes for the last of them.
fn compiler(nvrtc: Nvrtc) -> String {
    let oldest = nvrtc.known().iter().min().map(|oldest| format!(", for GPUs from sm_{oldest} on"));
    format!("{}{}", nvrtc.version(), oldest.unwrap_or_default())
}

fn verdict(has_gpus: bool, trouble: &[String]) -> String {
    match (has_gpus, trouble.len()) {
        (false, _) => {
            "no GPU of NVIDIA's is to be seen here: runs take --device cpu, which is the default".into()
        }
        (true, 0) => "runs can take --device cuda; `phalanx selftest --device cuda` tries it".into(),
        (true, 1) => "1 of these is missing or at fault: runs that need it can't take --device cuda".into(),
        (true, n) => {
            format!("{n} of these are missing or at fault: runs that need them can't take --device cuda")
        }
    }
}

impl Machine {
    fn this() -> Machine {
        let online = fs::read_to_string("/sys/devices/system/cpu/online").unwrap_or_default();
        let cores = phalanx::cores();
        let shared = nix::sys::statvfs::statvfs("/dev/shm").ok();
        Machine {
            cores,
            all_cores: count(&online).unwrap_or(cores),
            memory_bytes: Meminfo::read().bytes("MemTotal:"),
            shared_memory_bytes: shared.map(|fs| fs.blocks_available() * fs.fragment_size()),
        }
    }
}

/// How many numbers a list as `0-3,7` has.
fn count(list: &str) -> Option<usize> {
    let of = |part: &str| {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        last.parse::<usize>().ok()?.checked_sub(first.parse().ok()?)?.checked_add(1)
    };
    list.trim().split(',').map(of).sum()
}

impl fmt::Display for Machine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Machine { cores, all_cores, .. } = self;
        write!(f, "{:<16} {cores} of {all_cores} cores", "this machine")?;
        if let Some(bytes) = self.memory_bytes {
            write!(f, ", {} of memory", gpus::gib(bytes))?;
        }
        if let Some(bytes) = self.shared_memory_bytes {
            write!(f, ", {} free in /dev/shm", gpus::gib(bytes))?;
        }
        Ok(())
    }
}

impl fmt::Display for Found {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let words = self.version.as_ref().or(self.missing.as_ref()).map_or("", String::as_str);
        write!(f, "{:<16} {}", self.library, words.replace('\n', &format!("\n{:<17}", "")))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn processors_are_counted_as_the_system_lists_them() {
        for (list, want) in
            [("0\n", Some(1)), ("0-15", Some(16)), ("0-3,8,10-11\n", Some(7)), ("", None), ("3-1", None)]
        {
            assert_eq!(count(list), want, "{list:?}");
        }
    }

    #[test]
    fn what_is_missing_is_trouble_where_there_are_gpus() {
        assert!(verdict(false, &["no driver".into()]).contains("--device cpu"));
        assert!(verdict(true, &[]).contains("selftest"));
        let one = "no cuDNN".to_owned();
        assert!(verdict(true, std::slice::from_ref(&one)).starts_with("1 of these is"));
        assert!(verdict(true, &[one.clone(), one]).starts_with("2 of these are"));
    }
}
