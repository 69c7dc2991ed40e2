//! A batch of buffers that it owns, so that it runs while the caller does something else.
//!
//! Its packs, and what travels for them, are those of a batch that borrows.

use super::joined::{Joined, Layout};
use super::{Key, What};
use crate::buffer::{AnyBuffer, Buffer, Plain, Reduced};
use crate::element::{Element, ElementKind, Erased, ReduceOp, is_widened};
use crate::engine::Play;
use crate::group::Group;
use crate::mail::Delivered;
use crate::queue::{Engine, Queued};
use crate::schedule::{Schedule, Seat};
use crate::signature::{Kind, Signature};
use crate::work::Work;
use phalanx_wire::Rank;
use std::any::Any;
use std::collections::VecDeque;
use std::marker::PhantomData;
use std::sync::Arc;
use std::time::Instant;

/// Collectives on buffers that wait to be started together; see [`Group::owned_batch`].
#[must_use = "a batch does nothing until it is started"]
pub struct OwnedBatch<'a> {
    group: &'a Group,
    packs: Vec<Pack>,
    len: usize,
    /// Told from others by its address.
    batch: Arc<()>,
}

/// Which buffer of which batch: what [`Batched::take`] gives it back for.
pub struct Member<B> {
    batch: Arc<()>,
    number: usize,
    buffer: PhantomData<fn() -> B>,
}

/// The buffers of a batch that is done.
pub struct Batched {
    batch: Arc<()>,
    /// By number; those that were taken are none.
    buffers: Vec<Option<Box<dyn Any + Send>>>,
}

type AnyBox = Box<dyn AnyBuffer>;

/// Collectives that will travel as one.
struct Pack {
    key: Key,
    kind: ElementKind,
    /// What is sent, which may be wider.
    element: Erased,
    numbers: Vec<usize>,
    members: Vec<AnyBox>,
    /// Make one buffer of a single member, and of several, for the types that they have.
    alone: fn(AnyBox, Layout) -> AnyBox,
    join: fn(Vec<AnyBox>, Layout) -> AnyBox,
}

/// What travels for the members of a pack.
struct Parcel {
    what: What,
    kind: ElementKind,
    element: Erased,
    layout: Layout,
    numbers: Vec<usize>,
    buffer: AnyBox,
}

/// A batch that was started: what is played now is the parcel at `at`.
struct Started {
    batch: Arc<()>,
    parcels: Vec<Parcel>,
    at: usize,
}

impl Group {
    /// An empty batch of buffers, which [`OwnedBatch::start`] sets off as one operation. All ranks must add the same collectives
    /// in the same order; to the others it is the same as a [`Group::batch`] that is run.
    ///
    /// ```
    /// # use phalanx_comm::{Deadline, Group, Rank, ReduceOp};
    /// # use std::time::Duration;
    /// # std::thread::scope(|scope| for group in Group::threads(2) { scope.spawn(move || {
    /// let mut batch = group.owned_batch();
    /// let losses = batch.all_reduce(vec![0.5f32; 3], ReduceOp::Average);
    /// let word = batch.broadcast(vec![group.rank().0], Rank(1));
    /// let work = batch.start();
    /// // ... something else ...
    /// let mut done = work.wait(Deadline::after(Duration::from_secs(60))).unwrap();
    /// assert_eq!((done.take(losses), done.take(word)), (vec![0.5; 3], vec![1]));
    /// # }); });
    /// ```
    pub fn owned_batch(&self) -> OwnedBatch<'_> {
        OwnedBatch { group: self, packs: Vec::new(), len: 0, batch: Arc::default() }
    }
}

impl OwnedBatch<'_> {
    /// Adds a [`Group::start_all_reduce`].
    #[track_caller]
    pub fn all_reduce<B: Buffer>(&mut self, buffer: B, op: ReduceOp) -> Member<B> {
        crate::group::collectives::check_op::<B::Item>("all_reduce", op);
        self.add(What::AllReduce(op), buffer)
    }

    /// Adds a [`Group::start_reduce_scatter`], which is in place.
    #[track_caller]
    pub fn reduce_scatter<B: Buffer>(&mut self, mut buffer: B, op: ReduceOp) -> Member<B> {
        crate::group::collectives::check_op::<B::Item>("reduce_scatter", op);
        self.group.check_parts("reduce_scatter", buffer.as_mut_slice().len());
        self.add(What::ReduceScatter(op), buffer)
    }

    /// Adds a [`Group::start_all_gather`], which is in place.
    #[track_caller]
    pub fn all_gather<B: Buffer>(&mut self, mut buffer: B) -> Member<B> {
        self.group.check_parts("all_gather", buffer.as_mut_slice().len());
        self.add(What::AllGather, buffer)
    }

    /// Adds a [`Group::start_broadcast`].
    #[track_caller]
    pub fn broadcast<B: Buffer>(&mut self, buffer: B, root: Rank) -> Member<B> {
        self.group.check_peer("broadcast", root);
        self.add(What::Broadcast(root), buffer)
    }

    /// Starts all of them. One error is the end of all that aren't done, and of the group.
    pub fn start(self) -> Work<Batched> {
        let OwnedBatch { group, packs, batch, .. } = self;
        let parcels = packs.into_iter().map(|pack| pack.into_parcel(group.world_size)).collect();
        let mut started = Started { batch, parcels, at: 0 };
        group.begin(|engine, ticket| {
            let mut plays: VecDeque<_> =
                started.parcels.iter_mut().map(|parcel| parcel.issue(group, engine)).collect();
            let buffer = Box::new(started);
            match plays.pop_front() {
                Some(play) => engine.queue.push_back(Queued { ticket, play, then: plays, buffer }),
                None => {
                    let nothing = Delivered { ticket, buffer, peer: group.rank.index() };
                    engine.done.insert(ticket, nothing);
                }
            }
            Ok(())
        })
    }

    fn add<B: Buffer>(&mut self, what: What, mut buffer: B) -> Member<B> {
        let number = self.len;
        self.len += 1;
        let op = what.layout(1).op;
        let key = Key::new::<B::Item>(what, size_of_val(buffer.as_mut_slice()));
        let buffer: AnyBox = Box::new(Plain(buffer));
        match self.packs.iter_mut().find(|pack| pack.key.packs_with(&key)) {
            Some(pack) => {
                pack.numbers.push(number);
                pack.members.push(buffer);
            }
            None => self.packs.push(Pack {
                key,
                kind: B::Item::KIND,
                element: sent::<B::Item>(op),
                numbers: vec![number],
                members: vec![buffer],
                alone: |buffer, layout| {
                    let buffer = buffer.into_any().downcast::<B>().expect("the first member");
                    Box::new(Reduced::new(*buffer, layout.op, layout.ranks))
                },
                join: |members, layout| Box::new(Joined::<B::Item>::new(members, layout)),
            }),
        }
        Member { batch: Arc::clone(&self.batch), number, buffer: PhantomData }
    }
}

/// What travels of elements of a type.
fn sent<T: Element>(op: ReduceOp) -> Erased {
    if is_widened::<T>(op) { Erased::of::<T::Wide>() } else { Erased::of::<T>() }
}

impl Pack {
    fn into_parcel(self, ranks: usize) -> Parcel {
        let Pack { key: Key { what, .. }, kind, element, numbers, mut members, alone, join } = self;
        let layout = what.layout(ranks);
        let buffer = match members.len() {
            1 => alone(members.remove(0), layout),
            _ => join(members, layout),
        };
        Parcel { what, kind, element, layout, numbers, buffer }
    }
}

impl Parcel {
    fn issue(&mut self, group: &Group, engine: &mut Engine) -> Box<Play> {
        let (bytes, element) = (self.buffer.bytes(), self.element);
        let count = bytes.len() / element.bytes;
        let signature = self.what.signature(group, self.kind, count);
        let schedule = || self.what.schedule(&group.seat(), count, element.bytes);
        engine.collective(signature, element, self.layout.op, Instant::now(), bytes, schedule)
    }
}

impl What {
    /// How members lie in a pack, and what is done with them there.
    fn layout(self, ranks: usize) -> Layout {
        match self {
            What::AllReduce(op) => Layout { parts: 1, op, ranks },
            What::ReduceScatter(op) => Layout { parts: ranks, op, ranks },
            What::AllGather => Layout { parts: ranks, op: ReduceOp::Sum, ranks },
            What::Broadcast(_) => Layout { parts: 1, op: ReduceOp::Sum, ranks },
        }
    }

    fn signature(self, group: &Group, element: ElementKind, count: usize) -> Signature {
        let (kind, op, detail, algorithm) = match self {
            What::AllReduce(op) => (Kind::AllReduce, Some(op), 0, group.algorithm),
            What::ReduceScatter(op) => (Kind::ReduceScatter, Some(op), 0, None),
            What::AllGather => (Kind::AllGather, None, 0, None),
            What::Broadcast(root) => (Kind::Broadcast, None, root.0, None),
        };
        Signature { kind, op: op.map(Into::into), algorithm, detail, at: 0, sequence: 0, element, count }
    }

    fn schedule(self, seat: &Seat<'_>, len: usize, element_bytes: usize) -> Schedule {
        match self {
            What::AllReduce(_) => seat.all_reduce(len, element_bytes),
            What::ReduceScatter(_) => seat.reduce_scatter(len, element_bytes),
            What::AllGather => seat.all_gather(len, element_bytes),
            What::Broadcast(root) => seat.broadcast(len, root.index()),
        }
    }
}

impl Batched {
    /// The buffer of a member.
    #[track_caller]
    pub fn take<B: Buffer>(&mut self, member: Member<B>) -> B {
        assert!(Arc::ptr_eq(&member.batch, &self.batch), "take: a member of another batch");
        let buffer = self.buffers[member.number].take().expect("a member is taken once, by value");
        *buffer.downcast().expect("a member knows its type")
    }
}

impl AnyBuffer for Started {
    fn bytes(&mut self) -> &mut [u8] {
        self.parcels[self.at].buffer.bytes()
    }

    fn settle(&mut self) {
        self.parcels[self.at].buffer.settle();
        self.at += 1;
    }

    fn into_any(self: Box<Self>) -> Box<dyn Any + Send> {
        let len = self.parcels.iter().map(|parcel| parcel.numbers.len()).sum();
        let mut buffers: Vec<Option<Box<dyn Any + Send>>> = Vec::new();
        buffers.resize_with(len, || None);
        for Parcel { numbers, buffer, .. } in self.parcels {
            let came = buffer.into_any();
            if let [number] = numbers[..] {
                buffers[number] = Some(came);
                continue;
            }
            let members: Box<Vec<Box<dyn Any + Send>>> = came.downcast().expect("what several became");
            numbers.into_iter().zip(*members).for_each(|(number, member)| buffers[number] = Some(member));
        }
        Box::new(Batched { batch: self.batch, buffers })
    }
}
