//! How busy a machine is with what isn't ours.

use std::fs;
use std::time::Duration;

/// How long it is looked at.
const LOOK: Duration = Duration::from_millis(500);

/// The share of its cores' time that others use at the moment; none where the system doesn't tell.
pub(super) fn busy() -> Option<f64> {
    let look = || fs::read_to_string("/proc/stat").ok();
    let before = look()?;
    std::thread::sleep(LOOK);
    share(&before, &look()?)
}

/// The share between two looks at `/proc/stat`.
fn share(before: &str, after: &str) -> Option<f64> {
    let ticks = |text: &str| -> Option<(f64, f64)> {
        let line = text.lines().find_map(|line| line.strip_prefix("cpu "))?;
        let all: Vec<f64> = line.split_whitespace().map_while(|word| word.parse().ok()).take(8).collect();
        // Idle, and waiting for disks.
        let idle = all.get(3)? + all.get(4)?;
        Some((all.iter().sum(), idle))
    };
    let ((all, idle), (all_after, idle_after)) = (ticks(before)?, ticks(after)?);
    let passed = all_after - all;
    (passed > 0.0).then(|| (1.0 - (idle_after - idle) / passed).clamp(0.0, 1.0))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_not_idle_is_busy() {
        let before = "cpu  100 0 50 800 50 0 0 0 0 0\ncpu0 1 2 3\n";
        let after = "cpu  160 0 70 900 70 0 0 0 0 0\ncpu0 1 2 3\n";
        assert_eq!(share(before, after), Some(0.4));
        assert_eq!(share(before, before), None);
        assert_eq!(share("", after), None);
        assert_eq!(share("cpu  1 2", after), None);
    }
}
