//! A pass that a GPU is given once and then does again and again, at the cost of one call: a graph of CUDA's.
//!
//! A graph has fixed addresses and numbers. So what changes from pass to pass lies in tensors that stay where they are: the
//! samples, which the caller copies into tensors of its own, and what is fed: the keys of dropout, which are written before each
//! replay, and values that are the same in every pass. All else that a pass brings from the host would be that of the recorded
//! pass for good, and so would what it reads: a pass that does either is never recorded, and [`Rehearsal::refusal`] says why. What
//! is fed has a buffer that nothing else in the pass has, before or after it, since it is written before all of the pass.
//!
//! The buffers of the pass are its own: they come from a cache that only rehearsals and recordings take from, and which the
//! replay keeps ([`Room`]), so nobody else finds his values overwritten. Passes that are done one after the other may have one such cache
//! together. The rehearsal is an ordinary pass whose numbers count; it brings that cache, kernels and plans into being, since nothing can
//! be allocated while the GPU records.

use crate::arena::Arena;
use crate::device::{Backend, Device};
use crate::dtype::{DType, Element};
use crate::gpu::Engine;
use crate::lock::lock;
use crate::ops::dropout::DropoutKey;
use crate::shape::Shape;
use crate::storage::{Buffer, Memory};
use crate::tensor::Tensor;
use phalanx_cuda::{Error, Graph};
use std::collections::VecDeque;
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, Weak};
use std::thread::ThreadId;

/// Free buffers by size class.
type Buffers = Vec<Vec<Arc<Buffer>>>;

/// Buffers that the recorded passes of a device have to themselves. Clones are one. Several passes may use the same, as those of a step
/// do: a GPU does one of them after the other, and none needs what another has left there.
#[derive(Clone, Default)]
pub struct Room(Arc<Mutex<Buffers>>);

impl Room {
    /// The same, for one who keeps nobody's buffers.
    pub(crate) fn known(&self) -> KnownRoom {
        KnownRoom(Arc::downgrade(&self.0))
    }

    /// Whatever made a thread panic, the buffers are whole.
    fn free(&self) -> MutexGuard<'_, Buffers> {
        lock(&self.0)
    }
}

/// A room that may be gone.
pub(crate) struct KnownRoom(Weak<Mutex<Buffers>>);

impl KnownRoom {
    pub(crate) fn is_there(&self) -> bool {
        self.0.strong_count() > 0
    }

    pub(crate) fn is(&self, room: &Room) -> bool {
        std::ptr::eq(self.0.as_ptr(), Arc::as_ptr(&room.0))
    }

    /// Of the buffers that are in it now, which no pass uses.
    pub(crate) fn bytes(&self) -> usize {
        let room = self.0.upgrade().map(Room);
        room.map_or(0, |room| room.free().iter().flatten().map(|buffer| buffer.capacity()).sum())
    }
}

/// A pass that was made as any other, in buffers of its own, so that it can be recorded.
#[must_use = "it is recorded, or was an ordinary pass"]
pub struct Rehearsal {
    device: Device,
    room: Room,
    /// In the order in which the pass asks for them.
    feeds: VecDeque<Feed>,
    key: (u64, Arc<[u64]>),
    refusal: Option<String>,
}

/// A pass on a GPU that can be made again with other samples.
pub struct Replay {
    graph: Graph,
    fed: Option<Fed>,
    /// The pass reads their tensors, which are nobody else's.
    _feeds: Vec<Feed>,
    n_samples: usize,
    /// What the pass uses that isn't of its own buffers.
    _held: Vec<Arc<Memory>>,
    _room: Room,
    /// Last: the graph's kernels are loaded as long as it is there.
    device: Device,
}

/// What is written anew before each replay.
struct Feed {
    tensor: Tensor,
    words: Words,
}

/// All that is written anew before each replay, in one piece, so that it goes up in one copy: the samples' numbers, and behind them the
/// words of each dropout's key.
struct Fed {
    words: Tensor,
    /// Seed and layer of each.
    keys: Vec<[u64; 2]>,
}

impl Fed {
    /// Has what these feeds are fed lie in one piece, if anything is.
    fn with(device: &Device, feeds: &mut VecDeque<Feed>, n_samples: usize) -> Option<Fed> {
        let keys = feeds.iter().filter_map(|feed| match feed.words {
            Words::Key { seed, layer } => Some([seed, layer]),
            Words::Samples | Words::Constant => None,
        });
        let keys: Vec<[u64; 2]> = keys.collect();
        if keys.is_empty() {
            return None;
        }
        let words = Tensor::stale(device, [n_samples + KEY * keys.len()].into(), DType::I64);
        let mut at = n_samples;
        for feed in feeds {
            match feed.words {
                Words::Key { .. } => {
                    feed.tensor = words.narrow(0, at, KEY);
                    at += KEY;
                }
                Words::Samples => feed.tensor = words.narrow(0, 0, n_samples),
                Words::Constant => {}
            }
        }
        Some(Fed { words, keys })
    }

    fn write(&self, engine: &Engine, step: u64, samples: &[u64]) {
        let keys = self.keys.iter().flat_map(|&[seed, layer]| [seed, step, layer]);
        let words: Vec<i64> = samples.iter().copied().chain(keys).map(|word| word as i64).collect();
        engine.put(&words, &self.words);
    }
}

/// Words of a key: seed, step and layer.
const KEY: usize = 3;

/// What a feed holds.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Words {
    /// Seed, step and layer of a dropout.
    Key { seed: u64, layer: u64 },
    /// The number of each sample.
    Samples,
    /// What is the same in each pass.
    Constant,
}

/// What a device knows of a pass that is being rehearsed or recorded.
pub(crate) struct Private {
    /// Who makes it. What other threads do meanwhile isn't part of it.
    thread: ThreadId,
    buffers: Buffers,
    key: (u64, Arc<[u64]>),
    /// Those of the rehearsal that the recording hasn't asked for yet.
    rehearsed: VecDeque<Feed>,
    feeds: Vec<Feed>,
    held: Vec<Arc<Memory>>,
    is_recording: bool,
    /// Whether what its thread does at the moment is no part of it.
    pub(crate) is_aside: bool,
    refusal: Option<String>,
}

impl Private {
    pub(crate) fn is_of_this_thread(&self) -> bool {
        self.thread == std::thread::current().id()
    }

    /// Whether what this thread does is part of it.
    pub(crate) fn is_at_work(&self) -> bool {
        self.is_of_this_thread() && !self.is_aside
    }

    /// Those that it doesn't use now.
    pub(crate) fn buffers(&self) -> &[Vec<Arc<Buffer>>] {
        &self.buffers
    }

    pub(crate) fn is_recording(&self) -> bool {
        self.is_recording
    }

    pub(crate) fn take(&mut self, class: usize) -> Option<Arc<Buffer>> {
        self.buffers.get_mut(class).and_then(Vec::pop)
    }

    pub(crate) fn give(&mut self, class: usize, buffer: Arc<Buffer>) {
        put_back(&mut self.buffers, class, buffer);
    }

    /// Has this memory stay as long as the replay, which uses it.
    pub(crate) fn hold(&mut self, memory: &Arc<Memory>) {
        if self.is_recording && !self.held.iter().any(|held| Arc::ptr_eq(held, memory)) {
            self.held.push(memory.clone());
        }
    }

    /// Notes that the pass can't be recorded; the first reason stays.
    pub(crate) fn refuse(&mut self, why: &str) {
        self.refusal.get_or_insert_with(|| why.to_owned());
    }
}

fn put_back(buffers: &mut Buffers, class: usize, buffer: Arc<Buffer>) {
    if buffers.len() <= class {
        buffers.resize_with(class + 1, Vec::new);
    }
    buffers[class].push(buffer);
}

impl Device {
    /// Makes a pass over these samples, numbered as in the data set, in step `step`, in buffers of this room; gives what it gives.
    /// None on a CPU, where there is nothing to record and the pass isn't made. Panics if a pass is being rehearsed already.
    #[track_caller]
    pub fn rehearse<T>(
        &self,
        room: &Room,
        step: u64,
        samples: &Arc<[u64]>,
        pass: impl FnOnce() -> T,
    ) -> Option<(Rehearsal, T)> {
        let Backend::Gpu(_) = self.backend() else { return None };
        self.note_room(room);
        let mut rehearsal = Rehearsal {
            device: self.clone(),
            room: room.clone(),
            feeds: VecDeque::new(),
            key: (step, samples.clone()),
            refusal: None,
        };
        let (private, given) = rehearsal.go_private(false, || Ok::<T, Error>(pass()));
        // Nothing can be allocated while the GPU records.
        let exact = self.is_exact().then(|| "memory for each tensor alone, addresses of which".to_owned());
        (rehearsal.feeds, rehearsal.refusal) = (private.feeds.into(), private.refusal.or(exact));
        let Ok(given) = given else { unreachable!("an ordinary pass doesn't fail") };
        Some((rehearsal, given))
    }

    /// The words of a dropout's key, and the samples, on a GPU: new in each replay of a pass that is recorded.
    pub(crate) fn feed_key(&self, key: &DropoutKey) -> [Tensor; 2] {
        self.private(|private| {
            let (step, samples) = &private.key;
            if *step != key.step || **samples != *key.samples {
                private.refuse("a dropout whose key has another step or other samples than the pass, which");
            }
        });
        let rows = [
            (signed(&[key.seed, key.step, key.layer]), Words::Key { seed: key.seed, layer: key.layer }),
            (signed(&key.samples), Words::Samples),
        ];
        rows.map(|(values, words)| self.feed(&values, [values.len()].into(), words))
    }

    /// A tensor of a GPU with these values, in a buffer that nothing else in the pass has.
    fn feed<T: Element>(&self, values: &[T], shape: Shape, words: Words) -> Tensor {
        let rehearsed = self.private(|private| {
            let feed = private.rehearsed.pop_front();
            if private.is_recording && feed.as_ref().is_none_or(|feed| feed.words != words) {
                private.refuse("values that the rehearsal of the pass hadn't in this place, which");
            }
            feed
        });
        // The recorded one is written before each replay.
        let tensor = match rehearsed.flatten() {
            Some(feed) => feed.tensor,
            // Not from the pass's buffers: it would take one that the pass has used before, and will use again.
            None => self.aside(|| Tensor::from_slice(self, values, shape)),
        };
        self.private(|private| private.feeds.push(Feed { tensor: tensor.clone(), words }));
        tensor
    }
}

impl Tensor {
    /// As [`Tensor::from_slice`], of values that are the same in every pass of these shapes, such as weights of classes or codes of positions:
    /// a pass that is recorded on a GPU keeps them, where it can't be recorded with others.
    #[track_caller]
    pub fn constant<T: Element>(device: &Device, values: &[T], shape: impl Into<Shape>) -> Tensor {
        match device.backend() {
            Backend::Cpu => Tensor::from_slice(device, values, shape),
            Backend::Gpu(_) => device.feed(values, shape.into(), Words::Constant),
        }
    }
}

impl Rehearsal {
    /// Why the pass can't be recorded, if it can't.
    pub fn refusal(&self) -> Option<&str> {
        self.refusal.as_deref()
    }

    /// Records the same pass, which isn't made now. All that it gives to the GPU must be as it was in the rehearsal, whose tensors were
    /// taken back. Fails where the driver can't, or where [`Rehearsal::refusal`] has a reason. Panics where the pass panics, and where it
    /// wants more memory than the rehearsal.
    #[track_caller]
    pub fn record<T>(mut self, pass: impl FnOnce() -> T) -> Result<(Replay, T), Error> {
        let refused = |why: Option<String>| match why {
            Some(what) => Err(Error::NotRecorded { what }),
            None => Ok(()),
        };
        refused(self.refusal.take())?;
        let device = self.device.clone();
        let fed = Fed::with(&device, &mut self.feeds, self.key.1.len());
        let Backend::Gpu(engine) = device.backend() else { unreachable!("only GPUs rehearse") };
        let stream = engine.gpu().compute();
        let (private, recorded) = self.go_private(true, || stream.capture(|| Ok::<T, Error>(pass())));
        let (graph, given) = recorded?;
        refused(private.refusal)?;
        let Private { feeds, held, key: (_, samples), .. } = private;
        let n_samples = samples.len();
        let replay = Replay { graph, fed, _feeds: feeds, n_samples, _held: held, _room: self.room, device };
        Ok((replay, given))
    }

    /// Does `work` with the pass's own buffers, which are back in their room afterwards.
    #[track_caller]
    fn go_private<T, E>(
        &mut self,
        is_recording: bool,
        work: impl FnOnce() -> Result<T, E>,
    ) -> (Private, Result<T, E>) {
        let private = Private {
            thread: std::thread::current().id(),
            buffers: std::mem::take(&mut *self.room.free()),
            key: self.key.clone(),
            rehearsed: std::mem::take(&mut self.feeds),
            feeds: Vec::new(),
            held: Vec::new(),
            is_recording,
            is_aside: false,
            refusal: None,
        };
        let is_first = self.device.set_private(Some(private)).is_none();
        let public = is_first.then_some(Public { device: &self.device, room: &self.room });
        let public = public.unwrap_or_else(|| {
            panic!("rehearse: a pass of {:?} is being rehearsed or recorded already", self.device)
        });
        let result = work();
        (public.again().expect("set above"), result)
    }

    /// Takes back a tensor that the rehearsal gave and that is done with: the recording will want its buffer. One that somebody else
    /// still has stays his.
    pub fn take_back(&mut self, tensor: Tensor) {
        let storage = tensor.storage.clone();
        drop(tensor);
        let (class, buffer) = storage.into_buffer();
        let Some(buffer) = buffer else { return };
        put_back(&mut self.room.free(), class, buffer);
    }
}

/// Sees to it that the device's buffers are everybody's again, and the pass's in their room, also after a panic.
struct Public<'a> {
    device: &'a Device,
    room: &'a Room,
}

impl Public<'_> {
    fn again(&self) -> Option<Private> {
        let mut private = self.device.set_private(None)?;
        *self.room.free() = std::mem::take(&mut private.buffers);
        Some(private)
    }
}

impl Drop for Public<'_> {
    fn drop(&mut self) {
        drop(self.again());
    }
}

impl Replay {
    /// Gives the GPU the pass once more, over these samples in step `step`. The arenas are those that it uses: `written` as it
    /// writes them, `read` as it only reads them. Parameters that it wants in 16 bits it finds cast: whoever moves them in between sees to
    /// that ([`crate::Grads::renew_casts`]). Panics while anyone uses what it writes, or with another number of samples.
    #[track_caller]
    pub fn again(
        &mut self,
        step: u64,
        samples: &[u64],
        written: &[&Arena],
        read: &[&Arena],
    ) -> Result<(), Error> {
        assert!(
            samples.len() == self.n_samples,
            "replay: {} samples, of which the pass has {}",
            samples.len(),
            self.n_samples
        );
        let Backend::Gpu(engine) = self.device.backend() else { unreachable!("only GPUs record") };
        self.fed.iter().for_each(|fed| fed.write(engine, step, samples));
        let _written: Vec<_> = written.iter().map(|arena| arena.write()).collect();
        let _read: Vec<_> = read.iter().map(|arena| arena.read()).collect();
        // SAFETY: all memory that tensors of the pass lie in is held, what kernels find besides is the engine's, and both are there
        // as long as the graph; they are given back after all work. The buffers are those of recorded passes alone, of which the compute
        // stream does one after the other. Kernels take sizes from the recording, which are those of the buffers, and bounds of what they
        // find in memory are checked by themselves.
        unsafe { self.graph.launch(engine.gpu().compute()) }
    }
}

fn signed(values: &[u64]) -> Vec<i64> {
    values.iter().map(|&value| value as i64).collect()
}

impl fmt::Debug for Rehearsal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Rehearsal(on {:?}, {} samples)", self.device, self.key.1.len())
    }
}

impl fmt::Debug for Replay {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Replay({:?} on {:?}, {} samples)", self.graph, self.device, self.n_samples)
    }
}
