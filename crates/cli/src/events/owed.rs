//! Lines that the disk had no room for: they are kept, and written before any other as soon as there is room again.

use std::io::{self, ErrorKind, Write};

/// More than that is kept by nobody: the events of some hundred thousand steps.
const MOST: usize = 16 << 20;

/// Whole lines, the first of which may be written in part.
#[derive(Default)]
pub(super) struct Owed {
    bytes: Vec<u8>,
}

impl Owed {
    /// Whether everything was written.
    pub(super) fn is_paid(&self) -> bool {
        self.bytes.is_empty()
    }

    /// What wasn't written.
    pub(super) fn bytes(&self) -> &[u8] {
        &self.bytes
    }

    /// Forgets all but the first `bytes`.
    pub(super) fn keep(&mut self, bytes: usize) {
        self.bytes.truncate(bytes);
    }

    /// Adds a line, unless there are too many.
    pub(super) fn add(&mut self, line: &[u8]) {
        if self.bytes.len() + line.len() <= MOST {
            self.bytes.extend_from_slice(line);
        }
    }

    /// Writes what there is, as far as that goes.
    pub(super) fn pay(&mut self, out: &mut impl Write) -> io::Result<()> {
        let mut written = 0;
        let mut result = Ok(());
        while written < self.bytes.len() && result.is_ok() {
            match out.write(&self.bytes[written..]) {
                Ok(0) => result = Err(ErrorKind::WriteZero.into()),
                Ok(more) => written += more,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => result = Err(error),
            }
        }
        self.bytes.drain(..written);
        result
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Has room for so many bytes.
    struct Disk {
        room: usize,
        has: Vec<u8>,
    }

    impl Write for Disk {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            let taken = bytes.len().min(self.room);
            self.room -= taken;
            self.has.extend_from_slice(&bytes[..taken]);
            if taken == 0 && !bytes.is_empty() { Err(ErrorKind::StorageFull.into()) } else { Ok(taken) }
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn what_a_full_disk_did_not_take_is_written_in_order_once_there_is_room() {
        let (mut owed, mut disk) = (Owed::default(), Disk { room: 6, has: Vec::new() });
        for line in ["one\n", "two\n", "three\n"] {
            owed.add(line.as_bytes());
            let paid = owed.pay(&mut disk);
            assert_eq!(paid.is_ok(), line == "one\n");
            assert_eq!(owed.is_paid(), paid.is_ok());
        }
        assert_eq!(disk.has, b"one\ntw");
        disk.room = 100;
        owed.add(b"four\n");
        owed.pay(&mut disk).unwrap();
        assert_eq!(disk.has, b"one\ntwo\nthree\nfour\n");
        assert!(owed.is_paid());
    }

    #[test]
    fn what_is_kept_is_bounded_and_made_of_whole_lines() {
        let mut owed = Owed::default();
        let line = [&[b'x'; 1023][..], b"\n"].concat();
        (0..2 * MOST / line.len()).for_each(|_| owed.add(&line));
        assert!(owed.bytes.len() <= MOST && owed.bytes.ends_with(b"x\n"));
        assert_eq!(owed.bytes.len() % line.len(), 0);
    }
}
