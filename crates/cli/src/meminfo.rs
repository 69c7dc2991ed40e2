//! How much memory this machine has.

use std::fs;

/// What `/proc/meminfo` says.
pub(crate) struct Meminfo(String);

impl Meminfo {
    /// As it is now; of one that can't be read all is 0.
    pub(crate) fn read() -> Meminfo {
        Meminfo(fs::read_to_string("/proc/meminfo").unwrap_or_default())
    }

    /// What it says of this, as in `MemAvailable:`, in bytes.
    pub(crate) fn bytes(&self, key: &str) -> u64 {
        let line = self.0.lines().find_map(|line| line.strip_prefix(key));
        let kib = line.and_then(|line| line.split_whitespace().next()?.parse::<u64>().ok());
        kib.unwrap_or(0) * 1024
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_is_told_in_bytes() {
        let told = Meminfo("MemTotal:       2 kB\nMemAvailable:   1 kB\n".to_owned());
        assert_eq!(["MemTotal:", "MemAvailable:", "Swap:"].map(|key| told.bytes(key)), [2048, 1024, 0]);
    }
}
