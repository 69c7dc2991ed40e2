//! The GPUs of this machine, as people are shown them.

use super::ranks::{self, Rank};
use phalanx_cuda::nvml::{Nvml, Part, Process, State, Used};
use phalanx_cuda::{Driver, Error};
use serde::Serialize;
use std::fmt;

/// A GPU at one moment. What it doesn't tell is null.
#[derive(Serialize, Default)]
pub(crate) struct Shown {
    /// By the bus, as `nvidia-smi` counts.
    pub(crate) index: usize,
    pub(crate) name: Option<String>,
    uuid: Option<String>,
    /// Which device it is to programs with this one's environment: `cuda:N`. None where they don't see it.
    device: Option<String>,
    pub(crate) busy_percent: Option<u32>,
    pub(crate) used_bytes: Option<u64>,
    pub(crate) total_bytes: Option<u64>,
    pub(crate) power_w: Option<f64>,
    power_limit_w: Option<f64>,
    pub(crate) temperature_c: Option<u32>,
    parts: Vec<ShownPart>,
    /// Those that no part has. Null where who is on it isn't told.
    processes: Option<Vec<ShownProcess>>,
    /// Why it can't be asked.
    pub(crate) failure: Option<String>,
}

/// A part of a GPU.
#[derive(Serialize)]
struct ShownPart {
    name: String,
    uuid: String,
    device: Option<String>,
    used_bytes: Option<u64>,
    total_bytes: Option<u64>,
    /// Null where who is on it isn't told.
    processes: Option<Vec<ShownProcess>>,
}

/// A process on a GPU.
#[derive(Serialize)]
struct ShownProcess {
    pid: u32,
    bytes: Option<u64>,
    #[serde(flatten)]
    rank: Option<Rank>,
}

/// What this process's environment lets programs see.
pub(super) struct Visible(Vec<String>);

impl Visible {
    /// In the order of CUDA's numbers. A driver that can't be asked shows none.
    pub(super) fn of(driver: &Result<Driver, Error>) -> Visible {
        let uuids = driver.as_ref().ok().and_then(|driver| driver.uuids().ok());
        Visible(uuids.unwrap_or_default())
    }

    /// The name that programs have for what NVML calls so.
    fn device(&self, uuid: &str) -> Option<String> {
        let (_, own) = uuid.split_once('-')?;
        let number = self.0.iter().position(|seen| seen.eq_ignore_ascii_case(own))?;
        Some(format!("cuda:{number}"))
    }
}

/// One look at all GPUs, with the library that was asked. None are shown where there is none.
pub(crate) fn look_once(driver: &Result<Driver, Error>) -> (Result<Nvml, Error>, Vec<Shown>) {
    let nvml = Nvml::open(&[]);
    let shown = nvml.as_ref().map_err(Error::clone).and_then(|nvml| look(nvml, &Visible::of(driver)));
    match shown {
        Ok(shown) => (nvml, shown),
        Err(error) => (Err(error), Vec::new()),
    }
}

pub(super) fn look(nvml: &Nvml, visible: &Visible) -> Result<Vec<Shown>, Error> {
    let shown = |(index, state)| match state {
        Ok(state) => shown(index, state, visible, ranks::of_process),
        Err(error) => {
            let error: Error = error;
            Shown { index, failure: Some(error.to_string()), ..Shown::default() }
        }
    };
    Ok(nvml.look()?.into_iter().enumerate().map(shown).collect())
}

fn shown(index: usize, state: State, visible: &Visible, rank: impl Fn(u32) -> Option<Rank>) -> Shown {
    let watts = |mw: Option<u32>| mw.map(|mw| f64::from(mw) / 1000.0);
    let (used_bytes, total_bytes) = split(state.memory);
    let process = |one: Process| ShownProcess { pid: one.pid, bytes: one.bytes, rank: rank(one.pid) };
    let part = |part: Part| {
        let (used_bytes, total_bytes) = split(part.memory);
        let device = visible.device(&part.uuid);
        let processes = part.processes.map(|all| all.into_iter().map(process).collect());
        ShownPart { name: part.name, uuid: part.uuid, device, used_bytes, total_bytes, processes }
    };
    let of_parts: Vec<u32> =
        state.parts.iter().filter_map(|part| part.processes.as_ref()).flatten().map(|one| one.pid).collect();
    let processes = state
        .processes
        .map(|all| all.into_iter().filter(|one| !of_parts.contains(&one.pid)).map(process).collect());
    Shown {
        index,
        device: visible.device(&state.uuid),
        name: Some(state.name),
        uuid: Some(state.uuid),
        busy_percent: state.busy_percent,
        used_bytes,
        total_bytes,
        power_w: watts(state.power_mw),
        power_limit_w: watts(state.power_limit_mw),
        temperature_c: state.temperature_c,
        parts: state.parts.into_iter().map(part).collect(),
        processes,
        failure: None,
    }
}

fn split(memory: Option<Used>) -> (Option<u64>, Option<u64>) {
    (memory.map(|memory| memory.used), memory.map(|memory| memory.total))
}

/// Bytes, as people compare them.
pub(crate) fn gib(bytes: u64) -> String {
    match bytes {
        // Of which nothing would be left in tenths of the larger unit.
        1..0x400_0000 => format!("{:.1} MiB", bytes as f64 / f64::from(1 << 20)),
        _ => format!("{:.1} GiB", bytes as f64 / f64::from(1 << 30)),
    }
}

/// What isn't told.
const UNKNOWN: &str = "?";

fn or_unknown<T: fmt::Display>(value: Option<T>) -> String {
    value.map_or(UNKNOWN.into(), |value| value.to_string())
}

fn memory(used: Option<u64>, total: Option<u64>) -> String {
    let number = |bytes: Option<u64>| {
        or_unknown(bytes.map(|bytes| format!("{:.1}", bytes as f64 / f64::from(1 << 30))))
    };
    format!("{} of {} GiB", number(used), number(total))
}

fn device(name: Option<&String>) -> &str {
    name.map_or("not seen by CUDA", String::as_str)
}

impl fmt::Display for Shown {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:<16} ", format!("GPU {}", self.index))?;
        if let Some(failure) = &self.failure {
            return write!(f, "{}", failure.replace('\n', &format!("\n{:<17}", "")));
        }
        let watts = |watts: Option<f64>| or_unknown(watts.map(|watts| format!("{watts:.0}")));
        write!(
            f,
            "{}, {}: {}% busy, {}, {} of {} W, {} C",
            or_unknown(self.name.as_ref()),
            if self.parts.is_empty() { device(self.device.as_ref()) } else { "in parts" },
            or_unknown(self.busy_percent),
            memory(self.used_bytes, self.total_bytes),
            watts(self.power_w),
            watts(self.power_limit_w),
            or_unknown(self.temperature_c)
        )?;
        for part in &self.parts {
            let (name, uuid) = (&part.name, &part.uuid);
            let held = memory(part.used_bytes, part.total_bytes);
            write!(f, "\n{:<17}{name}, {}: {held}, {uuid}", "", device(part.device.as_ref()))?;
            write_processes(f, part.processes.as_deref())?;
        }
        // Parts tell their own.
        if self.processes.is_none() && !self.parts.is_empty() {
            return Ok(());
        }
        write_processes(f, self.processes.as_deref())
    }
}

/// A line for each process, if they are told.
fn write_processes(f: &mut fmt::Formatter<'_>, processes: Option<&[ShownProcess]>) -> fmt::Result {
    let Some(processes) = processes else {
        return write!(f, "\n{:<17}whose processes are on it isn't told to this user", "");
    };
    processes.iter().try_for_each(|process| write!(f, "\n{:<17}{process}", ""))
}

impl fmt::Display for ShownProcess {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.rank {
            Some(Rank { rank, run }) => write!(f, "rank {rank} of {run} (process {})", self.pid)?,
            None => write!(f, "process {}, of no run of this user's", self.pid)?,
        }
        self.bytes.map_or(Ok(()), |bytes| write!(f, ": {}", gib(bytes)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn state() -> State {
        State {
            name: "H".into(),
            uuid: "GPU-AB01".into(),
            memory: Some(Used { used: 3 << 29, total: 80 << 30 }),
            busy_percent: Some(50),
            power_mw: Some(250_400),
            power_limit_mw: None,
            temperature_c: Some(41),
            processes: Some(vec![Process { pid: 7, bytes: Some(1 << 30) }, Process { pid: 8, bytes: None }]),
            parts: Vec::new(),
        }
    }

    fn told(state: State, visible: &[&str]) -> String {
        let visible = Visible(visible.iter().map(|uuid| (*uuid).to_owned()).collect());
        let rank = |pid| (pid == 7).then(|| Rank { rank: 3, run: "digits".into() });
        shown(2, state, &visible, rank).to_string()
    }

    #[test]
    fn processes_are_told_by_their_ranks() {
        let want = [
            "GPU 2            H, cuda:1: 50% busy, 1.5 of 80.0 GiB, 250 of ? W, 41 C",
            "                 rank 3 of digits (process 7): 1.0 GiB",
            "                 process 8, of no run of this user's",
        ];
        assert_eq!(told(state(), &["ff", "ab01"]), want.join("\n"));
    }

    #[test]
    fn what_is_hidden_or_not_told_is_said() {
        let hidden = told(State { processes: None, busy_percent: None, ..state() }, &[]);
        assert!(hidden.contains("not seen by CUDA: ?% busy") && hidden.contains("isn't told"), "{hidden}");
    }

    #[test]
    fn parts_have_devices_of_their_own() {
        let processes = Some(vec![Process { pid: 7, bytes: Some(1 << 30) }]);
        let part = Part { name: "H 1g".into(), uuid: "MIG-cd".into(), memory: None, processes };
        let seen = told(State { parts: vec![part.clone()], ..state() }, &["cd"]);
        let want = [
            "GPU 2            H, in parts: 50% busy, 1.5 of 80.0 GiB, 250 of ? W, 41 C",
            "                 H 1g, cuda:0: ? of ? GiB, MIG-cd",
            "                 rank 3 of digits (process 7): 1.0 GiB",
            "                 process 8, of no run of this user's",
        ];
        assert_eq!(seen, want.join("\n"));
        // Who is on all of them is told to administrators.
        let seen = told(State { parts: vec![part], processes: None, ..state() }, &["cd"]);
        assert_eq!(seen, want[..3].join("\n"));
    }
}
