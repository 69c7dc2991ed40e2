//! Memory that processes of one host can share.
//!
//! A [`Region`] starts as memory of its own process. [`Region::share`] puts an unnamed file, which can be handed to other
//! processes, in its place, under the same address; [`Region::open`] is their side. The file can no longer change its size, so
//! nobody who maps it can be pulled the ground from under, and it dies with the last process that maps it, so nothing is left
//! after any death.
//!
//! Sharing once more puts another file there: whoever maps the old one sees and changes the region no longer. That is how memory
//! is taken back from a process that was thought dead and wakes up.
//!
//! It is a crate because tensors live in such memory and collectives pass it around, and they may not know each other. Who may
//! read or write which part when is not decided here: a region gives out its address and nothing more. [`Words`] are for those
//! who only share numbers: they can be read and written at any time. [`bring_in`] is for memory of any kind, and [`Spare`] for
//! pages that are needed now here, now there.
#![allow(unsafe_code, reason = "mappings; every block has its note")]

mod room;
mod spare;
mod words;

pub use room::bring_in;
pub use spare::Spare;
pub use words::Words;

use nix::fcntl::{FallocateFlags, FcntlArg, SealFlag, fallocate, fcntl};
use nix::sys::memfd::{MFdFlags, memfd_create};
use nix::sys::mman::{MapFlags, MmapAdvise, ProtFlags, madvise, mmap, mmap_anonymous, munmap};
use std::fs::File;
use std::io::{Error, ErrorKind, Result};
use std::num::NonZeroUsize;
use std::ops::Range;
use std::ptr::NonNull;
use std::sync::{Arc, Mutex, PoisonError};

/// A run of bytes, whole pages, zeros at first.
pub struct Region {
    start: NonNull<u8>,
    bytes: usize,
    /// What others may map, once it was shared.
    file: Mutex<Option<Arc<File>>>,
}

// SAFETY: a region is plain bytes and gives out only their address; whoever uses that answers for it.
unsafe impl Send for Region {}
// SAFETY: as above; what changes behind a shared reference is behind a mutex.
unsafe impl Sync for Region {}

const READ_WRITE: ProtFlags = ProtFlags::PROT_READ.union(ProtFlags::PROT_WRITE);
/// Regions are made of pages, and pages are at least so large.
const PAGE: usize = 4096;

fn whole_pages(bytes: usize) -> Result<NonZeroUsize> {
    let rounded = bytes.max(1).checked_next_multiple_of(PAGE);
    rounded.and_then(NonZeroUsize::new).ok_or_else(|| {
        Error::new(ErrorKind::OutOfMemory, format!("{bytes} bytes are more than the address space has"))
    })
}

/// A file of zeros without a name, whose size is final.
pub fn unnamed_file(name: &str, bytes: usize) -> Result<File> {
    let file = memfd_create(name, MFdFlags::MFD_CLOEXEC | MFdFlags::MFD_ALLOW_SEALING)?;
    let file = File::from(file);
    file.set_len(bytes as u64)?;
    let seals = SealFlag::F_SEAL_SHRINK | SealFlag::F_SEAL_GROW | SealFlag::F_SEAL_SEAL;
    fcntl(&file, FcntlArg::F_ADD_SEALS(seals))?;
    Ok(file)
}

/// That a file from another process has this size and will keep it.
fn check(file: &File, bytes: usize) -> Result<()> {
    let seals = fcntl(file, FcntlArg::F_GET_SEALS)?;
    let (is, sealed) = (file.metadata()?.len(), seals & SealFlag::F_SEAL_SHRINK.bits() != 0);
    if is == bytes as u64 && sealed {
        return Ok(());
    }
    let but = if sealed { "" } else { " that can still shrink" };
    let reason = format!("memory of {is} bytes{but} was passed, where {bytes} that stay are expected");
    Err(Error::new(ErrorKind::InvalidData, reason))
}

impl Region {
    /// Zeros, at least so many bytes.
    pub fn zeroed(bytes: usize) -> Result<Region> {
        let bytes = whole_pages(bytes)?;
        // SAFETY: a new mapping, at an address of the kernel's choice, touches nothing that is there.
        let start = unsafe { mmap_anonymous(None, bytes, READ_WRITE, MapFlags::MAP_PRIVATE)? };
        Ok(Region { start: start.cast(), bytes: bytes.get(), file: Mutex::new(None) })
    }

    /// Another process's region, of which this process gets a view of its own.
    pub fn open(file: File, bytes: usize) -> Result<Region> {
        let bytes = whole_pages(bytes)?;
        check(&file, bytes.get())?;
        // SAFETY: as in `zeroed`; the file keeps its size, so every page of the mapping stays backed.
        let start = unsafe { mmap(None, bytes, READ_WRITE, MapFlags::MAP_SHARED, &file, 0)? };
        Ok(Region { start: start.cast(), bytes: bytes.get(), file: Mutex::new(None) })
    }

    /// Puts a new file in the place of the region, all zeros, under the same address; gives that file. Whoever had the file
    /// before no longer sees what is done here. What was in the region is lost: it isn't copied, since to bring in so many pages
    /// takes longer than all else that a new group needs.
    ///
    /// # Safety
    ///
    /// No thread of this process may use the region meanwhile, nor hold a reference into it: the bytes change.
    pub unsafe fn share(&self) -> Result<Arc<File>> {
        let mut own = self.file.lock().unwrap_or_else(PoisonError::into_inner);
        // Where it goes wrong there is no file, rather than one that others have.
        *own = None;
        let file = unnamed_file("phalanx-region", self.bytes)?;
        let (at, bytes) = (NonZeroUsize::new(self.start.as_ptr().addr()), NonZeroUsize::new(self.bytes));
        let bytes = bytes.expect("a region has a page");
        let flags = MapFlags::MAP_SHARED | MapFlags::MAP_FIXED;
        // SAFETY: the mapping that is replaced is this region's, whole, and nobody has a reference into it, as the caller says.
        unsafe { mmap(at, bytes, READ_WRITE, flags, &file, 0)? };
        let file = Arc::new(file);
        *own = Some(Arc::clone(&file));
        Ok(file)
    }

    /// What others may map, if the region was shared.
    pub fn file(&self) -> Option<Arc<File>> {
        self.file.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Gives those pages back to the system that lie wholly in these bytes: they are zeros when they are touched next, also for
    /// others who map the region's file. The address stays the region's.
    ///
    /// # Safety
    ///
    /// No thread of this process may use these bytes meanwhile, nor hold a reference to them: they change.
    pub unsafe fn give_back(&self, bytes: Range<usize>) -> Result<()> {
        assert!(bytes.end <= self.bytes, "give_back: bytes {bytes:?} of a region of {}", self.bytes);
        let (start, end) = (bytes.start.next_multiple_of(PAGE), bytes.end / PAGE * PAGE);
        if start >= end {
            return Ok(());
        }
        if let Some(file) = self.file() {
            let flags = FallocateFlags::FALLOC_FL_PUNCH_HOLE | FallocateFlags::FALLOC_FL_KEEP_SIZE;
            return Ok(fallocate(&*file, flags, start as i64, (end - start) as i64)?);
        }
        // SAFETY: the pages lie in this region's mapping, and nobody has a reference to them, as the caller says.
        unsafe { Ok(madvise(self.start.add(start).cast(), end - start, MmapAdvise::MADV_DONTNEED)?) }
    }

    /// How many of its bytes are in memory.
    pub fn resident(&self) -> Result<usize> {
        let mut pages = vec![0u8; self.bytes / PAGE];
        // SAFETY: the mapping is this region's, whole, and there is a byte for each of its pages.
        let code = unsafe { libc::mincore(self.start.as_ptr().cast(), self.bytes, pages.as_mut_ptr()) };
        if code != 0 {
            return Err(Error::last_os_error());
        }
        Ok(pages.iter().filter(|page| **page & 1 != 0).count() * PAGE)
    }

    /// Its first byte, on a page of its own.
    pub fn start(&self) -> NonNull<u8> {
        self.start
    }

    /// How many bytes there are.
    pub fn bytes(&self) -> usize {
        self.bytes
    }
}

impl Drop for Region {
    fn drop(&mut self) {
        // SAFETY: the mapping is this region's, and with it goes the last who knew its address. It can't fail for a mapping
        // that is whole.
        let _ = unsafe { munmap(self.start.cast(), self.bytes) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    impl Region {
        fn set(&self, at: usize, value: u8) {
            assert!(at < self.bytes);
            // SAFETY: inside the mapping; tests have one thread.
            unsafe { self.start.as_ptr().add(at).write_volatile(value) }
        }

        fn get(&self, at: usize) -> u8 {
            assert!(at < self.bytes);
            // SAFETY: as in `set`.
            unsafe { self.start.as_ptr().add(at).read_volatile() }
        }

        fn shared(&self) -> File {
            // SAFETY: tests have one thread.
            unsafe { self.share() }.unwrap().try_clone().unwrap()
        }
    }

    #[test]
    fn what_is_shared_keeps_its_place_and_is_seen_by_both() {
        let ours = Region::zeroed(10_000).unwrap();
        assert_eq!((ours.bytes(), ours.get(9_999)), (12_288, 0));
        assert!(ours.file().is_none());
        ours.set(9_999, 7);
        let start = ours.start();
        let theirs = Region::open(ours.shared(), 10_000).unwrap();
        assert_eq!((ours.start(), ours.get(9_999), theirs.get(9_999)), (start, 0, 0));
        theirs.set(1, 8);
        ours.set(2, 9);
        assert_eq!((ours.get(1), theirs.get(2)), (8, 9));
    }

    #[test]
    fn who_had_it_before_it_was_shared_anew_neither_sees_nor_changes_it() {
        let ours = Region::zeroed(1).unwrap();
        let old = Region::open(ours.shared(), 1).unwrap();
        old.set(0, 1);
        let new = Region::open(ours.shared(), 1).unwrap();
        assert_eq!((ours.get(0), new.get(0)), (0, 0));
        old.set(0, 2);
        new.set(1, 3);
        assert_eq!((ours.get(0), ours.get(1), old.get(1)), (0, 3, 0));
    }

    #[test]
    fn pages_that_are_given_back_are_zeros_and_take_no_memory() {
        let check = |region: &Region, seen_by: &Region| {
            (0..5 * PAGE).for_each(|at| region.set(at, 1));
            assert_eq!(region.resident().unwrap(), 5 * PAGE);
            // Of the first and the last of these pages a part is in use.
            // SAFETY: tests have one thread.
            unsafe { region.give_back(PAGE - 1..4 * PAGE + 1) }.unwrap();
            assert_eq!(region.resident().unwrap(), 2 * PAGE);
            let zeros = |at: usize| (PAGE..4 * PAGE).contains(&at);
            assert!((0..5 * PAGE).all(|at| seen_by.get(at) == u8::from(!zeros(at))));
            // SAFETY: as above.
            unsafe { region.give_back(PAGE + 1..2 * PAGE) }.unwrap();
            assert_eq!(seen_by.get(PAGE), 0);
        };
        let own = Region::zeroed(5 * PAGE).unwrap();
        check(&own, &own);
        let theirs = Region::open(own.shared(), 5 * PAGE).unwrap();
        check(&own, &theirs);
    }

    #[test]
    fn memory_of_another_size_or_kind_is_refused() {
        let ours = Region::zeroed(PAGE).unwrap();
        let error = Region::open(ours.shared(), 2 * PAGE).err().unwrap().to_string();
        assert_eq!(error, "memory of 4096 bytes was passed, where 8192 that stay are expected");
        let file = memfd_create("loose", MFdFlags::MFD_CLOEXEC | MFdFlags::MFD_ALLOW_SEALING).unwrap();
        let file = File::from(file);
        file.set_len(PAGE as u64).unwrap();
        let error = Region::open(file, PAGE).err().unwrap().to_string();
        assert!(error.contains("that can still shrink"), "{error}");
        assert!(Region::zeroed(usize::MAX).is_err());
    }
}
