//! Numbers that processes of one host share.

use crate::Region;
use std::fs::File;
use std::io::Result;
use std::ops::Deref;
use std::sync::atomic::AtomicU64;

/// A region as numbers, each of which is read and written whole. What order writes are seen in is up to those who make them.
pub struct Words(Region);

impl Words {
    /// Maps a file whose size is final and is this, rounded up to whole pages.
    pub fn open(file: File, bytes: usize) -> Result<Words> {
        Region::open(file, bytes).map(Words)
    }
}

impl Deref for Words {
    type Target = [AtomicU64];

    fn deref(&self) -> &[AtomicU64] {
        let (start, bytes) = (self.0.start().cast::<AtomicU64>(), self.0.bytes());
        // SAFETY: a region is whole pages, so it is aligned, and it is mapped as long as `self`. This process reaches these bytes
        // through atomics alone, since nobody is given the address; any bytes are numbers, whatever other processes write.
        unsafe { std::slice::from_raw_parts(start.as_ptr(), bytes / size_of::<AtomicU64>()) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::unnamed_file;
    use std::sync::atomic::Ordering;

    #[test]
    fn what_one_writes_the_other_reads() {
        let file = unnamed_file("words", 4096).unwrap();
        let [ours, theirs] = [0, 1].map(|_| Words::open(file.try_clone().unwrap(), 4096).unwrap());
        assert_eq!((ours.len(), theirs[511].load(Ordering::Relaxed)), (512, 0));
        ours[511].store(u64::MAX, Ordering::Relaxed);
        assert_eq!(theirs[511].load(Ordering::Relaxed), u64::MAX);
        assert!(Words::open(file, 4097).is_err());
    }
}
