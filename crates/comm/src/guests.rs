//! Who was let in to which memory of this process. Memory that nobody else can touch any more need not be shared anew for the
//! group that follows, which would have the kernel find all of its pages again.
//!
//! A guest is harmless if it is of the group at hand, since it left the group before to come to it and does nothing there any
//! more, or if its process has ended. One that only fell silent may wake up and write.

use crate::endpoint::PeerAddress;
use crate::transport::{Process, State};
use std::fs::File;
use std::sync::{Arc, Mutex, PoisonError, Weak};

#[derive(Default)]
pub(crate) struct Guests(Mutex<Vec<Guest>>);

struct Guest {
    file: Weak<File>,
    address: PeerAddress,
    /// None until it is known, or where it can't be seen from here.
    process: Option<Process>,
}

impl Guests {
    /// Whoever is at `address` is about to be let in to `file`.
    pub(crate) fn let_in(&self, file: &Arc<File>, address: &PeerAddress) {
        let mut guests = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        guests.retain(|guest| guest.file.strong_count() > 0);
        let (file, address) = (Arc::downgrade(file), address.clone());
        guests.push(Guest { file, address, process: None });
    }

    /// That is this process.
    pub(crate) fn recognise(&self, address: &PeerAddress, process: Process) {
        let mut guests = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        guests
            .iter_mut()
            .filter(|guest| guest.address == *address)
            .for_each(|guest| guest.process = Some(process));
    }

    /// Whether nobody but those at `here` can touch `file`.
    pub(crate) fn are_all_among(&self, file: &Arc<File>, here: &[PeerAddress]) -> bool {
        let guests = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let mut of_file = guests.iter().filter(|guest| guest.file.as_ptr() == Arc::as_ptr(file));
        of_file.all(|guest| {
            here.contains(&guest.address)
                || guest.process.is_some_and(|process| matches!(process.state(), State::Ended))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::Command;

    fn at(port: u16) -> PeerAddress {
        PeerAddress {
            tcp: ([127, 0, 0, 1], port).into(),
            local: None,
            tls: false,
            processors: Default::default(),
        }
    }

    #[test]
    fn memory_is_one_s_own_again_when_its_guests_have_come_along_or_ended() {
        let file = || Arc::new(File::open("/dev/null").unwrap());
        let (ours, other, guests) = (file(), file(), Guests::default());
        assert!(guests.are_all_among(&ours, &[]), "nobody was let in");
        (1..=3).for_each(|port| guests.let_in(&ours, &at(port)));
        guests.let_in(&other, &at(9));
        assert!(guests.are_all_among(&ours, &[at(3), at(2), at(1)]));
        let mut child = Command::new("sleep").arg("60").spawn().unwrap();
        guests.recognise(&at(2), Process::of(child.id() as i32).unwrap());
        assert!(!guests.are_all_among(&ours, &[at(1), at(3)]), "one that lives may wake up");
        child.kill().unwrap();
        child.wait().unwrap();
        assert!(guests.are_all_among(&ours, &[at(1), at(3)]));
        assert!(!guests.are_all_among(&ours, &[at(1)]), "one that can't be seen may live");
        // Another file in its place has no guests, even where it lies where that lay.
        drop(ours);
        assert!(guests.are_all_among(&file(), &[]));
        assert!(!guests.are_all_among(&other, &[]));
    }
}
