//! What the kernel knows of a TCP connection: its `TCP_INFO`, of which new kernels tell more than old ones.
#![allow(unsafe_code, reason = "nix can't ask for it; the one block has its note")]

use nix::libc::{IPPROTO_TCP, TCP_INFO, getsockopt, socklen_t};
use std::io::{Error, Result};
use std::net::TcpStream;
use std::os::fd::AsRawFd;
use std::time::Duration;

/// Bytes of it that are asked for.
const ASKED: usize = 232;

pub(super) struct Info {
    /// How often the oldest of what isn't acknowledged was sent again.
    pub(super) again: u8,
    /// Segments that weren't acknowledged, and bytes that weren't sent yet.
    pub(super) unacknowledged: u32,
    pub(super) unsent: u32,
    /// Segments with data that came, also out of their turn, or once more.
    pub(super) arrived: u32,
    /// Bytes of a segment, and bytes that the peer has room for.
    pub(super) segment: u32,
    pub(super) room: u32,
    /// Since data came last, and since an acknowledgement came last.
    pub(super) silent: Duration,
    pub(super) unanswered: Duration,
    /// How long an acknowledgement takes, and by how much that differs from one to the next, in the mean.
    pub(super) round_trip: Duration,
    pub(super) variation: Duration,
    /// Bytes that were acknowledged, and that came.
    pub(super) acknowledged: u64,
    pub(super) received: u64,
}

impl Info {
    /// When the system takes what was sent for lost and sends it again (RFC 6298), as far as this link asks for it.
    pub(super) fn is_resent_after(&self) -> Duration {
        self.round_trip + 4 * self.variation
    }

    /// Whether the peer's host should have answered: something was sent again for it, or can't even be sent though there is room.
    pub(super) fn is_owed_answer(&self) -> bool {
        let is_stuck = self.unsent > 0 && self.unacknowledged == 0 && self.room > 2 * self.segment;
        self.unacknowledged > 0 && self.again > 0 || is_stuck
    }
}

/// Asks the kernel.
pub(super) fn info(stream: &TcpStream) -> Result<Info> {
    let mut bytes = [0u8; ASKED];
    let mut len = ASKED as socklen_t;
    // SAFETY: the descriptor is open as long as `stream` lives; the kernel writes `len` bytes at most, which `bytes` has, and
    // says how many; any bytes are good ones.
    let result =
        unsafe { getsockopt(stream.as_raw_fd(), IPPROTO_TCP, TCP_INFO, bytes.as_mut_ptr().cast(), &mut len) };
    if result != 0 {
        return Err(Error::last_os_error());
    }
    // Places in `struct tcp_info`, which only ever grows at its end; what an old kernel leaves out is 0.
    let word = |at: usize| u32::from_ne_bytes(bytes[at..at + 4].try_into().expect("four bytes"));
    let long = |at: usize| u64::from_ne_bytes(bytes[at..at + 8].try_into().expect("eight bytes"));
    let [ms, us] =
        [Duration::from_millis, Duration::from_micros].map(|unit| move |at: usize| unit(word(at).into()));
    Ok(Info {
        again: bytes[2],
        unacknowledged: word(24),
        silent: ms(52),
        unanswered: ms(56),
        round_trip: us(68),
        variation: us(72),
        acknowledged: long(120),
        received: long(128),
        unsent: word(144),
        arrived: word(152),
        segment: word(16),
        room: word(228),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{Read, Write};
    use std::net::TcpListener;

    #[test]
    fn the_kernel_tells_what_moved_and_what_waits() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let mut a = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (mut b, _) = listener.accept().unwrap();
        a.write_all(&[7; 1000]).unwrap();
        b.read_exact(&mut [0; 1000]).unwrap();
        assert_eq!((info(&b).unwrap().received, info(&b).unwrap().arrived), (1000, 1));
        // The acknowledgement comes with what goes back.
        b.write_all(&[7; 10]).unwrap();
        a.read_exact(&mut [0; 10]).unwrap();
        let known = info(&a).unwrap();
        assert!((1000..=1001).contains(&known.acknowledged), "{} bytes acknowledged", known.acknowledged);
        assert_eq!((known.unacknowledged, known.unsent, known.again), (0, 0, 0));
        let answered = [known.round_trip, known.variation];
        assert!(answered.iter().all(|time| (1..1_000_000).contains(&time.as_micros())), "{answered:?}");
        // Nobody reads, so the most of it stays here.
        a.set_nonblocking(true).unwrap();
        while a.write(&[7; 1 << 16]).is_ok() {}
        assert!(info(&a).unwrap().unsent > 0);
    }
}
