//! What a machine is called, what its clock shows, and how far the clocks of a run may be apart.

use nix::unistd::gethostname;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// Clocks of a run may be so far apart. Beyond that the end of a job's time comes at another moment on each node, and times of logs
/// and of files in a shared folder contradict each other.
pub const CLOCKS_APART: Duration = Duration::from_secs(30);

/// What people call this machine: the name by which Slurm knows it as a node, or else its own, without the domain.
pub fn host_name() -> String {
    let node = std::env::var("SLURMD_NODENAME").ok().filter(|name| !name.is_empty());
    node.unwrap_or_else(|| {
        let host = gethostname().ok().and_then(|name| name.into_string().ok()).unwrap_or_default();
        host.split('.').next().unwrap_or_default().to_owned()
    })
}

/// What this machine's clock shows, in milliseconds since 1970.
pub fn clock_ms() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_millis() as u64
}

/// Why a node whose clock shows `theirs` can't be in a run whose first node's shows `first`, both in milliseconds since 1970, and
/// what to change; none where they are near enough.
pub fn why_too_far_apart(host: &str, theirs: u64, first: u64) -> Option<String> {
    let apart = Duration::from_millis(theirs.abs_diff(first));
    let direction = if theirs > first { "ahead of" } else { "behind" };
    (apart > CLOCKS_APART).then(|| {
        format!(
            "the clock of {host} is {} s {direction} the first node's, and those of a run may be {} s apart: a job's time would be up at another moment on each node\nhint: set it right, as with `sudo timedatectl set-ntp true` on {host}, or leave that node out, under Slurm with #SBATCH --exclude={host}; PHALANX_UNCHECKED=1 begins all the same",
            apart.as_secs(),
            CLOCKS_APART.as_secs()
        )
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn clocks_may_be_half_a_minute_apart() {
        let check = |theirs: u64, first: u64, want: Option<&str>| {
            let why = why_too_far_apart("n2", theirs, first);
            assert_eq!(why.is_some(), want.is_some(), "{why:?}");
            assert!(why.unwrap_or_default().contains(want.unwrap_or_default()), "{theirs} {first}");
        };
        check(100_000, 100_000, None);
        check(130_000, 100_000, None);
        check(70_000, 100_000, None);
        check(3_700_000, 100_000, Some("the clock of n2 is 3600 s ahead of the first node's"));
        check(69_000, 100_000, Some("is 31 s behind the first node's"));
        check(0, u64::MAX, Some("#SBATCH --exclude=n2"));
    }
}
