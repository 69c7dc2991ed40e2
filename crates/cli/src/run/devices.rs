//! What of this machine the workers are dealt: how many there are, which GPU each sees, which processors it keeps to.

use super::flags::Binding;
use crate::args::WrongUsage;
use phalanx_cuda::nvml::Nvml;
use phalanx_launch::{LocalRank, MOST_WORKERS, Numa, NumaBinding};
use std::path::Path;

/// What says which GPUs are seen, where they are NVIDIA's and where they are AMD's. Images for both kinds set both.
const VISIBLE: [&str; 2] = ["CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"];

/// Linux on Windows (WSL 2) has this device for all GPUs of the machine, of which the driver's library tells how many are NVIDIA's.
const OF_WINDOWS: &str = "/dev/dxg";

/// The GPUs that a program would see.
pub(crate) struct Gpus {
    /// The variable that says so, or would.
    variable: &'static str,
    /// None where no variable says so.
    visible: Option<Vec<String>>,
    /// How many the machine has.
    present: usize,
}

impl Gpus {
    pub(crate) fn of_this_machine() -> Gpus {
        let is_gpu = |name: &str| {
            name.strip_prefix("nvidia")
                .is_some_and(|n| !n.is_empty() && n.bytes().all(|b| b.is_ascii_digit()))
        };
        let devices = std::fs::read_dir("/dev").into_iter().flatten().flatten();
        let mut present = devices.filter(|entry| entry.file_name().to_str().is_some_and(is_gpu)).count();
        if present == 0 && Path::new(OF_WINDOWS).exists() {
            present = Nvml::open(&[]).and_then(|nvml| nvml.look()).map_or(0, |gpus| gpus.len());
        }
        let amds = present == 0 && Path::new("/dev/kfd").exists();
        Gpus::told(|name| std::env::var(name).ok(), present, amds)
    }

    fn told(get: impl Fn(&str) -> Option<String>, present: usize, amds: bool) -> Gpus {
        let variable = VISIBLE[usize::from(amds)];
        Gpus { variable, visible: get(variable).map(|text| named(&text)), present }
    }

    pub(crate) fn count(&self) -> usize {
        let named = self.visible.as_ref().map(Vec::len);
        match (named, self.parts()) {
            // A GPU has several.
            (_, Some(parts)) => parts.len(),
            (Some(named), None) => named.min(self.present),
            (None, None) => self.present,
        }
    }

    /// The parts of GPUs (MIG) that are named, if any are. A process sees the first of those that it is told of, and no other GPU,
    /// so several workers must be told of one each.
    pub(crate) fn parts(&self) -> Option<Vec<String>> {
        let of = |visible: &Vec<String>| -> Vec<String> {
            visible.iter().filter(|name| name.starts_with("MIG-")).cloned().collect()
        };
        self.visible.as_ref().map(of).filter(|parts| !parts.is_empty())
    }

    /// The variable that says which GPUs a program sees, and what each of so many is called there, if no fewer are named.
    pub(crate) fn named(self, wanted: usize) -> (&'static str, Vec<String>) {
        let counted = || (0..wanted).map(|n| n.to_string()).collect();
        (self.variable, self.visible.unwrap_or_else(counted))
    }

    /// A GPU for each worker, which sees no other.
    pub(super) fn virtual_ranks(self, workers: usize) -> Result<LocalRank, WrongUsage> {
        let (variable, devices) = self.named(workers);
        if devices.len() < workers {
            let list = devices.join(",");
            return Err(WrongUsage(format!(
                "--virtual-local-rank: {variable}={list} has {} devices for {workers} workers; name as many as there are workers",
                devices.len()
            )));
        }
        Ok(LocalRank::Virtual { variable, devices })
    }
}

/// The GPUs that a list names: up to the first entry that is none, as the driver reads it. So -1 hides all, and NoDevFiles, which Slurm
/// puts there.
fn named(list: &str) -> Vec<String> {
    let is_gpu = |name: &&str| {
        let is_number = !name.is_empty() && name.bytes().all(|byte| byte.is_ascii_digit());
        is_number || name.starts_with("GPU-") || name.starts_with("MIG-")
    };
    list.split(',').map(str::trim).take_while(is_gpu).map(str::to_owned).collect()
}

/// How many workers this machine has or has room for, as `flag` says it.
pub(crate) fn worker_count(flag: &str, text: &str, cores: usize, gpus: &Gpus) -> Result<usize, WrongUsage> {
    match (text, gpus.count()) {
        ("auto" | "cpu", 0) | ("cpu", _) => Ok(cores),
        ("gpu", 0) => Err(WrongUsage(format!(
            "{flag} gpu: no GPU is to be seen on this machine; use a number or `auto`"
        ))),
        ("auto" | "gpu", n) => Ok(n),
        (number, _) => number_of_workers(flag, number),
    }
}

/// A number of workers, as it is typed.
pub(crate) fn number_of_workers(flag: &str, text: &str) -> Result<usize, WrongUsage> {
    let refused = |why: &str| Err(WrongUsage(format!("{flag} {text}: {why}")));
    match text.parse() {
        Ok(0) => refused("a run needs at least one worker"),
        Ok(n) if n > MOST_WORKERS => refused(&format!("{MOST_WORKERS} is the most that one machine starts")),
        Ok(n) => Ok(n),
        Err(_) => refused("must be a number, `auto`, `cpu` or `gpu`"),
    }
}

/// What `--numa-binding` comes to.
pub(super) enum Bound {
    /// The processors of each worker.
    To(Vec<Vec<usize>>),
    /// There is nothing to choose.
    OneNode,
}

pub(super) fn bound(binding: Binding, workers: usize, machine: &Numa) -> Result<Bound, WrongUsage> {
    if machine.nodes() < 2 && matches!(binding, Binding::Node | Binding::Socket) {
        return Ok(Bound::OneNode);
    }
    let kind = match binding {
        Binding::Node => NumaBinding::Node,
        Binding::Socket => NumaBinding::Socket,
        Binding::Exclusive => NumaBinding::Exclusive,
        Binding::CoreComplex => NumaBinding::CoreComplex,
    };
    machine.shares(kind, workers).map(Bound::To).map_err(|why| WrongUsage(format!("--numa-binding: {why}")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn workers_are_counted_by_what_there_is() {
        let check = |text: &str, visible: Option<&str>, present, want: Option<usize>| {
            let get = |name: &str| visible.filter(|_| name == "CUDA_VISIBLE_DEVICES").map(str::to_owned);
            assert_eq!(
                worker_count("--nproc-per-node", text, 6, &Gpus::told(get, present, false)).ok(),
                want,
                "{text} {visible:?} {present}"
            );
        };
        check("3", None, 0, Some(3));
        check("auto", None, 0, Some(6));
        check("auto", None, 4, Some(4));
        check("cpu", None, 4, Some(6));
        check("gpu", None, 4, Some(4));
        check("gpu", Some("1,3"), 4, Some(2));
        check("gpu", Some(""), 4, None);
        for none in ["-1", "NoDevFiles", "-1,0", "no"] {
            check("gpu", Some(none), 4, None);
            check("auto", Some(none), 4, Some(6));
        }
        check("gpu", Some("0,-1,1"), 4, Some(1));
        check("gpu", Some("GPU-8f2a, 3"), 4, Some(2));
        check("gpu", Some("MIG-a,MIG-b,MIG-c"), 1, Some(3));
        check("auto", Some(""), 4, Some(6));
        check("gpu", None, 0, None);
        check("0", None, 4, None);
        check("xpu", None, 4, None);
    }

    #[test]
    fn one_numa_node_has_cores_to_share_out_but_no_other_node() {
        let (machine, bound) = (Numa::of_this_machine(), |how| bound(how, 1, &Numa::of_this_machine()).ok());
        if machine.nodes() == 1 {
            assert!(matches!(bound(Binding::Node), Some(Bound::OneNode)));
            assert!(matches!(bound(Binding::Socket), Some(Bound::OneNode)));
        }
        assert!(
            matches!(bound(Binding::Exclusive), Some(Bound::To(all)) if all.len() == machine.nodes().min(1))
        );
    }

    #[test]
    fn each_worker_sees_a_gpu_of_those_that_are_seen() {
        let check_on = |amds: bool, set: &[(&str, &str)], want: Option<(&str, &[&str])>| {
            let get = |name: &str| set.iter().find(|(n, _)| *n == name).map(|(_, value)| (*value).to_owned());
            let got = Gpus::told(get, 8, amds).virtual_ranks(2).ok();
            let Some(LocalRank::Virtual { variable, devices }) = got else {
                return assert!(want.is_none(), "{set:?}");
            };
            let devices: Vec<&str> = devices.iter().map(String::as_str).collect();
            assert_eq!(Some((variable, &devices[..])), want, "{set:?}");
        };
        let check = |set: &[(&str, &str)], want| check_on(false, set, want);
        check(&[], Some(("CUDA_VISIBLE_DEVICES", &["0", "1"])));
        check(&[("CUDA_VISIBLE_DEVICES", "4, 7,2")], Some(("CUDA_VISIBLE_DEVICES", &["4", "7", "2"])));
        let both = [("CUDA_VISIBLE_DEVICES", "4,7"), ("HIP_VISIBLE_DEVICES", "1,0")];
        check(&both, Some(("CUDA_VISIBLE_DEVICES", &["4", "7"])));
        check_on(true, &both, Some(("HIP_VISIBLE_DEVICES", &["1", "0"])));
        check(&[("CUDA_VISIBLE_DEVICES", "4")], None);
    }
}
