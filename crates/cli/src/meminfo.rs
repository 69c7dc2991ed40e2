//! How much memory this machine has.

use std::fs;

/// What `/proc/meminfo` says.
pub(crate) struct Meminfo(String);

impl Meminfo {
    /// As it is now; one that can't be read says nothing.
    pub(crate) fn read() -> Meminfo {
        Meminfo(fs::read_to_string("/proc/meminfo").unwrap_or_default())
    }

    /// What it says of this, as in `MemAvailable:`, in bytes.
    pub(crate) fn bytes(&self, key: &str) -> Option<u64> {
        kib(&self.0, key).map(|kib| kib << 10)
    }
}

/// What a line of a file of `/proc` says that begins so, in KiB.
pub(crate) fn kib(text: &str, key: &str) -> Option<u64> {
    let line = text.lines().find_map(|line| line.strip_prefix(key))?;
    line.split_whitespace().next()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_is_told_in_bytes() {
        let told = Meminfo("MemTotal:       2 kB\nMemAvailable:   1 kB\n".to_owned());
        assert_eq!(
            ["MemTotal:", "MemAvailable:", "Swap:"].map(|key| told.bytes(key)),
            [Some(2048), Some(1024), None]
        );
    }

    #[test]
    fn numbers_are_found_by_their_names() {
        let text = "MemTotal:       16318480 kB\nMemFree:  12 kB\n";
        assert_eq!(
            (kib(text, "MemTotal:"), kib(text, "MemFree:"), kib(text, "Mem:")),
            (Some(16_318_480), Some(12), None)
        );
    }
}
