//! Messages from one rank of a group to another.
//!
//! Between two ranks, messages of the same tag are received in the order in which they were sent; those of different tags, and
//! from different ranks, in any. A message is received into a slice of exactly its type and length. A rank that waits
//! in a collective takes in messages meanwhile, and the other way round; of what nobody asked
//! for yet 1 GiB may wait here, and the rest with its sender. Only a rank that waits for what comes behind such a message ends
//! the group.

use super::Group;
use crate::buffer::{Buffer, Plain};
use crate::element::Element;
use crate::error::Error;
use crate::mail::Wanted;
use crate::signature::{Kind, Signature};
use crate::work::Work;
use phalanx_wire::{Deadline, Rank};

/// Where a message may come from.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Source {
    /// From this rank only.
    Rank(Rank),
    /// From whichever rank sends first.
    Any,
}

/// One of the messages of a [`Group::exchange`].
#[derive(Debug)]
pub enum Transfer<'a, T> {
    /// A slice to send.
    Send {
        /// What is sent.
        values: &'a [T],
        /// Who receives it.
        to: Rank,
        /// What it is received under.
        tag: u32,
    },
    /// A slice to receive into.
    Receive {
        /// Where it goes.
        values: &'a mut [T],
        /// Who sends it.
        from: Source,
        /// What it was sent under.
        tag: u32,
    },
}

impl Group {
    /// Sends a slice to rank `to`, which receives one of the same length.
    #[track_caller]
    pub fn send<T: Element>(&self, values: &[T], to: Rank) -> Result<(), Error> {
        self.send_tagged(values, to, 0)
    }

    /// Receives what rank `from` sends into a slice of the same length.
    #[track_caller]
    pub fn receive<T: Element>(&self, values: &mut [T], from: Rank) -> Result<(), Error> {
        self.receive_tagged(values, Source::Rank(from), 0).map(|_| ())
    }

    /// As [`Group::send`], under a tag.
    #[track_caller]
    pub fn send_tagged<T: Element>(&self, values: &[T], to: Rank, tag: u32) -> Result<(), Error> {
        self.start_send(values.to_vec(), to, tag).wait(Deadline::after(self.timeout)).map(|_| ())
    }

    /// As [`Group::receive`], of what was sent under a tag, by one rank or by any. Says by which.
    #[track_caller]
    pub fn receive_tagged<T: Element>(
        &self,
        values: &mut [T],
        from: Source,
        tag: u32,
    ) -> Result<Rank, Error> {
        let work = self.start_receive(values.to_vec(), from, tag);
        let (came, from) = work.wait_from(Deadline::after(self.timeout))?;
        values.copy_from_slice(&came);
        Ok(from)
    }

    /// Sends and receives messages in any order at once, until all are done. Says which rank each went to or came from.
    #[track_caller]
    pub fn exchange<T: Element>(&self, transfers: &mut [Transfer<'_, T>]) -> Result<Vec<Rank>, Error> {
        let started = transfers.iter().map(|transfer| match transfer {
            Transfer::Send { values, to, tag } => self.start_send(values.to_vec(), *to, *tag),
            Transfer::Receive { values, from, tag } => self.start_receive(values.to_vec(), *from, *tag),
        });
        let started: Vec<_> = started.collect();
        let deadline = Deadline::after(self.timeout);
        let mut peers = Vec::new();
        for (transfer, work) in transfers.iter_mut().zip(started) {
            let (came, peer) = work.wait_from(deadline)?;
            if let Transfer::Receive { values, .. } = transfer {
                values.copy_from_slice(&came);
            }
            peers.push(peer);
        }
        Ok(peers)
    }

    /// Starts to send a buffer, which comes back from [`Work::wait`] when it is on its way.
    #[track_caller]
    pub fn start_send<B: Buffer>(&self, mut buffer: B, to: Rank, tag: u32) -> Work<B> {
        self.check_partner("send", to);
        let signature = letter::<B>(&mut buffer, tag);
        self.begin(|engine, ticket| {
            engine.mail.send(ticket, to.index(), signature, Box::new(Plain(buffer)));
            Ok(())
        })
    }

    /// Starts to receive into a buffer, which comes back, filled, from [`Work::wait`].
    #[track_caller]
    pub fn start_receive<B: Buffer>(&self, mut buffer: B, from: Source, tag: u32) -> Work<B> {
        let from = match from {
            Source::Rank(from) => {
                self.check_partner("receive", from);
                Some(from.index())
            }
            Source::Any => {
                assert!(self.world_size > 1, "receive: from any other rank in a world of one");
                None
            }
        };
        let signature = letter::<B>(&mut buffer, tag);
        self.begin(|engine, ticket| {
            engine.mail.want(Wanted { ticket, from, signature, buffer: Box::new(Plain(buffer)) })
        })
    }

    #[track_caller]
    fn check_partner(&self, op: &str, peer: Rank) {
        self.check_peer(op, peer);
        assert!(peer != self.rank, "{op}: a message between rank {peer} and itself");
    }
}

/// The signature of a message that isn't counted yet.
fn letter<B: Buffer>(buffer: &mut B, tag: u32) -> Signature {
    let count = buffer.as_mut_slice().len();
    Signature {
        kind: Kind::Message,
        op: None,
        algorithm: None,
        detail: tag,
        at: 0,
        sequence: 0,
        element: B::Item::KIND,
        count,
    }
}
