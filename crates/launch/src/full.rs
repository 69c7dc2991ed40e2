//! What bounds the number of processes and threads, for the message when no more can be started.

use nix::errno::Errno;
use nix::sys::resource::{RLIM_INFINITY, Resource, getrlimit};
use std::path::{Path, PathBuf};
use std::{fs, io};

/// Whether a process or a thread couldn't be started because there are too many.
pub(crate) fn is_full(error: &io::Error) -> bool {
    error.raw_os_error() == Some(Errno::EAGAIN as i32)
}

/// The limits that this process is under, in words.
pub(crate) fn limits() -> String {
    let user =
        getrlimit(Resource::RLIMIT_NPROC).ok().map(|(soft, _)| soft).filter(|&most| most != RLIM_INFINITY);
    let groups = fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
    in_words(user, group(&groups, Path::new("/sys/fs/cgroup")))
}

fn in_words(user: Option<u64>, group: Option<u64>) -> String {
    let user = user.map(|most| format!("this user may have {most} (ulimit -u)"));
    let group = group.map(|most| format!("this control group {most} (pids.max)"));
    let known: Vec<String> = user.into_iter().chain(group).collect();
    if known.is_empty() { "the limit is the system's".into() } else { known.join(", ") }
}

/// The least that the control groups of a process allow which are listed so, of the first or the second version.
fn group(groups: &str, mounted: &Path) -> Option<u64> {
    let paths = groups.lines().filter_map(|line| {
        let (_, named) = line.split_once(':')?;
        let (controllers, path) = named.split_once(':')?;
        let below = match controllers {
            "" => mounted.to_owned(),
            _ if controllers.split(',').any(|name| name == "pids") => mounted.join("pids"),
            _ => return None,
        };
        Some((below.clone(), below.join(path.trim_start_matches('/'))))
    });
    // A group is bound by what those above it allow, too.
    let above = |(top, path): (PathBuf, PathBuf)| {
        let within = path.ancestors().take_while(|above| above.starts_with(&top)).map(Path::to_owned);
        within.collect::<Vec<_>>()
    };
    let most = |folder: PathBuf| fs::read_to_string(folder.join("pids.max")).ok()?.trim().parse::<u64>().ok();
    paths.flat_map(above).filter_map(most).min()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn limits_are_found_and_said() {
        let mounted = tempfile::tempdir().unwrap();
        let write = |path: &str, text: &str| {
            let folder = mounted.path().join(path);
            fs::create_dir_all(&folder).unwrap();
            fs::write(folder.join("pids.max"), text).unwrap();
        };
        write("job/step", "max\n");
        write("job", "70\n");
        write("pids/old", "50\n");
        write("memory/old", "1\n");
        let check =
            |groups: &str, want: Option<u64>| assert_eq!(group(groups, mounted.path()), want, "{groups}");
        check("0::/job/step\n", Some(70));
        check("9:pids:/old\n4:memory:/old\n", Some(50));
        check("0::/\n", None);
        check("", None);
        assert_eq!(
            in_words(Some(12), Some(70)),
            "this user may have 12 (ulimit -u), this control group 70 (pids.max)"
        );
        assert_eq!(in_words(None, None), "the limit is the system's");
    }
}
