//! Where the coordinator is, which changes when another agent of the run takes its place: a few bytes in memory that an agent
//! writes and its workers read.

use std::fs::File;
use std::io::{Error, ErrorKind, Result};
use std::net::SocketAddr;
use std::os::unix::fs::FileExt;
use std::sync::Arc;

/// As long as any address with a port, and some spaces.
const LENGTH: usize = 64;

/// Memory that holds an address.
#[derive(Clone, Debug)]
pub struct Whereabouts(Arc<File>);

impl Whereabouts {
    /// As the agent sees it, which has made this file of memory.
    pub fn new(file: File) -> Whereabouts {
        Whereabouts(Arc::new(file))
    }

    /// As a worker sees it, which has inherited it. None where that descriptor is something else by now.
    pub fn inherited(descriptor: u32) -> Option<Whereabouts> {
        let file = File::open(format!("/proc/self/fd/{descriptor}")).ok()?;
        let is_ours = file.metadata().is_ok_and(|found| found.is_file() && found.len() == LENGTH as u64);
        is_ours.then(|| Whereabouts(Arc::new(file)))
    }

    /// The coordinator is there from now on.
    pub fn write(&self, address: SocketAddr) -> Result<()> {
        self.0.write_all_at(format!("{address:<LENGTH$}").as_bytes(), 0)
    }

    /// Where it is.
    pub fn read(&self) -> Result<SocketAddr> {
        let mut text = [0; LENGTH];
        self.0.read_exact_at(&mut text, 0)?;
        let address = std::str::from_utf8(&text).ok().and_then(|text| text.trim_end().parse().ok());
        address.ok_or_else(|| Error::new(ErrorKind::InvalidData, "no address"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::fd::AsRawFd;

    #[test]
    fn what_is_written_is_read_by_who_inherits_it() {
        let file = tempfile::tempfile().unwrap();
        let descriptor = file.as_raw_fd() as u32;
        let written = Whereabouts::new(file);
        assert!(Whereabouts::inherited(descriptor).is_none(), "nothing is there yet");
        for address in ["127.0.0.1:29400", "[fe80::1234:5678:9abc:def0%4000000000]:65535", "10.0.0.1:1"] {
            let address: SocketAddr = address.parse().unwrap();
            written.write(address).unwrap();
            assert_eq!(Whereabouts::inherited(descriptor).unwrap().read().unwrap(), address);
        }
        assert!(Whereabouts::inherited(0).is_none());
    }
}
