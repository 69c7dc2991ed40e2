use crate::error::Error;
use crate::group::{Group, Source};
use phalanx_wire::{Deadline, Rank};
use std::time::Duration;

const LIMIT: Duration = Duration::from_secs(20);

/// Two ranks, of which rank 0 sets aside one letter of 800 bytes and no more. Rank 1 sends it three: of tags 1, 1 and 2.
fn after_three_letters(then: impl Fn(&Group)) {
    let mut groups = Group::threads(2);
    let (sender, receiver) = (groups.pop().unwrap(), groups.pop().unwrap().with_timeout(LIMIT));
    receiver.free_engine().unwrap().mail.most_aside = 1000;
    let letters = [(1, 1u8), (1, 2), (2, 3)];
    let sent: Vec<_> =
        letters.iter().map(|&(tag, value)| sender.start_send(vec![value; 800], Rank(0), tag)).collect();
    for letter in sent {
        letter.wait(Deadline::after(LIMIT)).unwrap();
    }
    then(&receiver);
}

/// The letter of this tag that comes next.
fn next(receiver: &Group, tag: u32, from: Source) -> Result<u8, Error> {
    let mut letter = [0u8; 800];
    receiver.receive_tagged(&mut letter, from, tag).map(|_| letter[799])
}

#[test]
fn a_letter_that_there_is_no_room_for_waits_on_its_wire() {
    for from in [Source::Any, Source::Rank(Rank(1))] {
        after_three_letters(|receiver| {
            // Takes in what it can, and asks for nothing.
            let mut other = receiver.start_receive(vec![0u8], from, 9);
            assert!(!other.poll());
            drop(other);
            let came: Vec<u8> = [1, 1, 2].map(|tag| next(receiver, tag, from).unwrap()).to_vec();
            assert_eq!(came, [1, 2, 3]);
        });
    }
}

#[test]
fn who_waits_for_what_comes_behind_it_is_told() {
    let check = |wait: &dyn Fn(&Group) -> Result<(), Error>| {
        after_three_letters(|receiver| {
            let error = wait(receiver).unwrap_err();
            let right = matches!(&error, Error::Overrun { rank: Rank(0), peer: Rank(1), limit: 1000, .. });
            assert!(right && error.to_string().contains("message #2 (800 x u8, tag 1)"), "{error}");
        });
    };
    check(&|receiver| next(receiver, 2, Source::Any).map(drop));
    check(&|receiver| next(receiver, 2, Source::Rank(Rank(1))).map(drop));
    check(&|receiver| receiver.barrier());
}

/// However little may be set aside, and whoever sends most: one who sends as much as it gets takes it in.
#[test]
fn ranks_of_a_ring_that_all_send_first_get_what_is_sent() {
    for lengths in [&[4 << 20, 4 << 20][..], &[1 << 20, 4 << 20], &[4 << 20, 1 << 20, 2 << 20]] {
        std::thread::scope(|scope| {
            for group in Group::threads(lengths.len()) {
                scope.spawn(move || {
                    let group = group.with_timeout(LIMIT / 4);
                    group.free_engine().unwrap().mail.most_aside = 1000;
                    let (own, n) = (group.rank().index(), lengths.len());
                    let (next, last) = ((own + 1) % n, (own + n - 1) % n);
                    group.send(&vec![own as u8; lengths[own]], Rank(next as u32)).unwrap();
                    let mut came = vec![9u8; lengths[last]];
                    group.receive(&mut came, Rank(last as u32)).unwrap();
                    assert!(came.iter().all(|&x| x == last as u8));
                });
            }
        });
    }
}
