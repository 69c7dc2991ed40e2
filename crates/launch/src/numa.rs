//! Which processors a worker keeps to on a machine whose memory is nearer to some of them than to others: torchrun's
//! `--numa-binding`. What is read of the machine is plain data; who gets what is a pure function of it.
//!
//! Workers are dealt to the nodes in order, as devices usually are: the first ones to the first node.

use nix::sched::sched_getaffinity;
use nix::unistd::Pid;
use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

/// What a worker keeps to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NumaBinding {
    /// All processors of its node.
    Node,
    /// All processors of its node's socket.
    Socket,
    /// Cores of its node that no other worker keeps to.
    Exclusive,
    /// Those processors of its node that share one last cache, another one for each worker while there are any.
    CoreComplex,
}

/// One processor that this process may use, and what it shares with others.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Processor {
    number: usize,
    node: usize,
    socket: usize,
    /// The lowest processor of the same core.
    core: usize,
    /// The lowest processor behind the same last cache.
    complex: usize,
}

/// The processors that this process may use.
#[derive(Clone, Debug)]
pub struct Numa(Vec<Processor>);

impl Numa {
    /// Those of this machine. What its kernel doesn't tell is taken for one of a kind.
    pub fn of_this_machine() -> Numa {
        Numa::read(Path::new("/sys/devices/system"), |number| {
            sched_getaffinity(Pid::from_raw(0)).is_ok_and(|allowed| allowed.is_set(number).unwrap_or(false))
        })
    }

    fn read(system: &Path, allowed: impl Fn(usize) -> bool) -> Numa {
        let text = |path: String| fs::read_to_string(system.join(path)).unwrap_or_default();
        let first = |path: String| list(&text(path)).and_then(|numbers| numbers.into_iter().min());
        let nodes = list(&text("node/online".into())).unwrap_or_default();
        let of_node = |node: usize| {
            let numbers = list(&text(format!("node/node{node}/cpulist"))).unwrap_or_default();
            numbers.into_iter().map(move |number| (node, number))
        };
        let processors = nodes.into_iter().flat_map(of_node).filter(|(_, number)| allowed(*number));
        let processor = |(node, number)| {
            let cpu = format!("cpu/cpu{number}");
            let socket = text(format!("{cpu}/topology/physical_package_id")).trim().parse().unwrap_or(0);
            let core = first(format!("{cpu}/topology/thread_siblings_list")).unwrap_or(number);
            let complex = first(format!("{cpu}/cache/index3/shared_cpu_list")).unwrap_or(core);
            Processor { number, node, socket, core, complex }
        };
        Numa(processors.map(processor).collect())
    }

    /// How many nodes there are.
    pub fn nodes(&self) -> usize {
        grouped(&self.0, |p| p.node).len()
    }

    /// The processors of each of so many workers; an error if there aren't enough of them to be exclusive.
    pub fn shares(&self, binding: NumaBinding, workers: usize) -> Result<Vec<Vec<usize>>, String> {
        let nodes = grouped(&self.0, |p| p.node);
        let node_of = |worker: usize| worker * nodes.len() / workers;
        let share = |worker: usize| {
            let (node, own) = &nodes[node_of(worker)];
            let first = (0..workers).find(|&other| node_of(other) == node_of(worker)).unwrap_or(worker);
            let here = (0..workers).filter(|&other| node_of(other) == node_of(worker)).count();
            let place = worker - first;
            let chosen: Vec<Processor> = match binding {
                NumaBinding::Node => own.clone(),
                NumaBinding::Socket => {
                    let same = |p: &&Processor| own.iter().any(|o| o.socket == p.socket);
                    self.0.iter().filter(same).copied().collect()
                }
                NumaBinding::Exclusive => {
                    let cores = grouped(own, |p| p.core);
                    if cores.len() < here {
                        return Err(format!("node {node} has {} cores for {here} workers", cores.len()));
                    }
                    let range = place * cores.len() / here..(place + 1) * cores.len() / here;
                    cores[range].iter().flat_map(|(_, processors)| processors.clone()).collect()
                }
                NumaBinding::CoreComplex => {
                    let complexes = grouped(own, |p| p.complex);
                    complexes[place % complexes.len()].1.clone()
                }
            };
            Ok(chosen.iter().map(|p| p.number).collect())
        };
        (0..if nodes.is_empty() { 0 } else { workers }).map(share).collect()
    }
}

/// Processors that share something, in the order of what they share.
fn grouped(processors: &[Processor], by: impl Fn(&Processor) -> usize) -> Vec<(usize, Vec<Processor>)> {
    let mut groups = BTreeMap::<usize, Vec<Processor>>::new();
    for processor in processors {
        groups.entry(by(processor)).or_default().push(*processor);
    }
    groups.into_iter().collect()
}

/// The kernel's lists of numbers, as in `0-3,8`; none if it isn't one.
fn list(text: &str) -> Option<Vec<usize>> {
    let mut numbers = Vec::new();
    for part in text.trim().split(',').filter(|part| !part.is_empty()) {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        numbers.extend(first.parse::<usize>().ok()?..=last.parse().ok()?);
    }
    Some(numbers)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Two sockets of two nodes of four processors: two cores with two threads each, a last cache a core.
    fn machine() -> Numa {
        let processor = |number: usize| Processor {
            number,
            node: number / 4,
            socket: number / 8,
            core: number / 2 * 2,
            complex: number / 2 * 2,
        };
        Numa((0..16).map(processor).collect())
    }

    #[test]
    fn workers_are_dealt_to_the_nodes_and_share_what_was_asked_for() {
        let check = |binding, workers, want: &[&[usize]]| {
            assert_eq!(machine().shares(binding, workers).unwrap(), want, "{binding:?} of {workers}");
        };
        check(NumaBinding::Node, 2, &[&[0, 1, 2, 3], &[8, 9, 10, 11]]);
        check(NumaBinding::Node, 4, &[&[0, 1, 2, 3], &[4, 5, 6, 7], &[8, 9, 10, 11], &[12, 13, 14, 15]]);
        check(NumaBinding::Socket, 1, &[&[0, 1, 2, 3, 4, 5, 6, 7]]);
        check(NumaBinding::Exclusive, 1, &[&[0, 1, 2, 3]]);
        let pairs: Vec<Vec<usize>> = (0..8).map(|i| vec![2 * i, 2 * i + 1]).collect();
        let pairs: Vec<&[usize]> = pairs.iter().map(Vec::as_slice).collect();
        check(NumaBinding::Exclusive, 8, &pairs);
        check(NumaBinding::CoreComplex, 8, &pairs);
        let error = machine().shares(NumaBinding::Exclusive, 9).unwrap_err();
        assert_eq!(error, "node 0 has 2 cores for 3 workers");
        assert_eq!(Numa(Vec::new()).shares(NumaBinding::Node, 3).unwrap(), Vec::<Vec<usize>>::new());
    }

    #[test]
    fn a_machine_is_read_from_its_kernels_files() {
        let folder = tempfile::tempdir().unwrap();
        let write = |path: &str, text: &str| {
            let path = folder.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        };
        write("node/online", "0-1\n");
        write("node/node0/cpulist", "0,2\n");
        write("node/node1/cpulist", "1,3\n");
        for number in [0, 1, 2, 3] {
            write(&format!("cpu/cpu{number}/topology/physical_package_id"), &format!("{}\n", number % 2));
            write(&format!("cpu/cpu{number}/topology/thread_siblings_list"), &format!("{number}\n"));
        }
        write("cpu/cpu2/cache/index3/shared_cpu_list", "0,2\n");
        let numa = Numa::read(folder.path(), |number| number != 3);
        let (node, socket) = (0, 0);
        assert_eq!(numa.nodes(), 2);
        assert_eq!(numa.0[1], Processor { number: 2, node, socket, core: 2, complex: 0 });
        assert_eq!(numa.shares(NumaBinding::Node, 2).unwrap(), [vec![0, 2], vec![1]]);
        assert_eq!(Numa::read(Path::new("/nowhere"), |_| true).nodes(), 0);
    }

    #[test]
    fn the_kernels_lists_are_read() {
        let check = |text: &str, want: Option<&[usize]>| assert_eq!(list(text).as_deref(), want, "{text:?}");
        check("0-3,8\n", Some(&[0, 1, 2, 3, 8]));
        check("7\n", Some(&[7]));
        check("\n", Some(&[]));
        check("x", None);
        check("3-", None);
    }
}
