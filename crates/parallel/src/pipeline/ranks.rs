//! A pipeline over ranks: each is a process, or a thread, with its own stages of the row, and activations travel as letters.
//!
//! What is sent is the values as they lie in memory, in their own type, so both sides compute with the same bits in the same order. Type and
//! shape are told once for each number of samples, ahead of the first letter of that size; after that a letter is nothing but values, received
//! into a buffer that waits for it. Between ranks with a GPU each letters go by NCCL ([`super::lanes`]), and their forms as ever.

use super::check::check;
use super::devices::{Border, border};
use super::lanes::Lanes;
use super::parts::{evaluated, micro_batches};
use super::schedule::{Action, Schedule};
use super::stage::{Carried, Link, MicroBatch, Ran, Rank};
use crate::between_gpus::BetweenGpus;
use crate::error::Error;
use crate::evaluation::{EvalPass, Judge, Outputs};
use crate::local::{Local, Pass};
use phalanx_comm::{Deadline, Element as Sent, Group, Source, Trail, Work as Letter, bf16, f16};
use phalanx_nn::{Loss, Module};
use phalanx_tensor::{DType, Device, Element, GradSink, MAX_DIMS, Order, Shape, Tensor};
use std::collections::{HashMap, VecDeque};
use std::ops::Range;
use std::time::Instant;

/// Tags of letters between stages begin here, away from a program's own small numbers.
const TAGS: u32 = 0x5050_0000;

/// This rank's end of a pipeline over the ranks of a group: rank `r` holds the stages of the schedule's rank `r`.
pub struct RankPipeline {
    group: Group,
    schedule: Schedule,
    blocks: Vec<Range<usize>>,
    device: Device,
    letters: Letters,
    /// The ways of letters from GPU to GPU, where they go so.
    lanes: Option<Lanes>,
    /// What this rank's GPU waits for.
    trail: Trail,
    last: Ran,
}

impl RankPipeline {
    /// Stage `s` of the row has the blocks `blocks[s]`. Panics if the schedule is made for another number of ranks or stages.
    #[track_caller]
    pub fn new(group: Group, schedule: Schedule, blocks: Vec<Range<usize>>, device: Device) -> RankPipeline {
        let (ranks, stages) = (schedule.shape().ranks, schedule.stages());
        assert!(
            ranks == group.world_size() && stages == blocks.len(),
            "a pipeline of {ranks} ranks and {stages} stages over {} ranks and {} rows of blocks",
            group.world_size(),
            blocks.len()
        );
        check(&schedule).expect("every schedule that is made plays to its end; its tests say so");
        let (letters, last) = (Letters::default(), Ran::default());
        let trail = Trail::default();
        RankPipeline { group, schedule, blocks, device, letters, lanes: None, trail, last }
    }

    /// The same on a GPU that waits for others than these, too, which `trail` is told of.
    pub(crate) fn behind(self, trail: &Trail) -> RankPipeline {
        RankPipeline { trail: trail.clone(), ..self }
    }

    /// The same with letters that take this way between GPUs; without it they go by way of the host. All ranks must call it with the
    /// same. Fails if a rank is gone or late, or NCCL can't be used where it has to be.
    pub fn between_gpus(mut self, between: BetweenGpus) -> Result<RankPipeline, Error> {
        if between.is_tried(&self.group, &self.device) {
            let lanes = Lanes::among(&self.group, &self.schedule, &self.device)?;
            self.lanes = between.found("activations", &self.group, lanes)?;
        }
        Ok(self)
    }

    /// The groups of two, this rank one of them, whose letters go from GPU to GPU.
    pub(crate) fn lanes(&self) -> impl Iterator<Item = &Group> {
        self.lanes.iter().flat_map(Lanes::groups)
    }

    /// Whether this rank holds a block.
    pub fn holds(&self, block: usize) -> bool {
        let mut stages = self.schedule.stages_of(self.group.rank().index());
        stages.any(|stage| self.blocks[stage].contains(&block))
    }

    /// What this rank did when in the last pass, and what that came to.
    pub fn last(&self) -> &Ran {
        &self.last
    }

    /// One pass over micro-batches, of which the first stage's rank gives the inputs, the last one's the targets, and all the
    /// same numbers of samples. Gives the sum of the weighted losses, which is 0 but on the rank of the last stage. `sink` is
    /// told of each weight of this rank when its gradient is final. Fails if a rank is gone or late.
    pub fn run(
        &mut self,
        model: &dyn Module,
        loss: &Loss,
        micro_batches: &[MicroBatch],
        sink: &mut dyn GradSink,
    ) -> Result<f64, Error> {
        let RankPipeline { group, schedule, blocks, device, letters, lanes, trail, .. } = self;
        let rank = group.rank().index();
        if let Some(lanes) = lanes {
            lanes.begin(schedule, rank, micro_batches);
        }
        let own = Rank { schedule, rank, model, blocks, device, micro_batches };
        let mut post = Post { group, schedule, micro_batches, letters, lanes: lanes.as_mut(), trail };
        let ran = own.run(&mut post, loss, sink, Instant::now());
        let ran = ran.and_then(|ran| letters.deliver(group).map(|()| ran));
        // Whoever waits at the other end of a lane knows nothing of what happened at another.
        let ran = ran.inspect_err(|error| {
            lanes.iter().for_each(|lanes| lanes.abort(&error.to_string()));
        });
        self.last = ran?;
        Ok(self.last.loss)
    }

    /// The forward passes of an evaluation, in the order of the schedule's. Letters are others than in training, and nothing of them stays.
    fn run_forward(
        &mut self,
        pass: &EvalPass<'_>,
        judge: &mut dyn FnMut(Outputs<'static>) -> Result<(), Error>,
    ) -> Result<(), Error> {
        let RankPipeline { group, schedule, blocks, device, lanes, trail, .. } = self;
        let (rank, schedule) = (group.rank().index(), &schedule.forward_alone());
        let micro_batches = &evaluated(pass, schedule.shape().micro_batches);
        if let Some(lanes) = lanes {
            lanes.begin(schedule, rank, micro_batches);
        }
        let own = Rank { schedule, rank, model: pass.model, blocks, device, micro_batches };
        let letters = &mut Letters::default();
        let mut post = Post { group, schedule, micro_batches, letters, lanes: lanes.as_mut(), trail };
        own.evaluate(&mut post, judge)?;
        letters.deliver(group)
    }
}

/// All ranks are given the whole pass, and each takes of it what its stages need.
impl Local for RankPipeline {
    /// The mean loss is that of the last stage's rank; the others give 0.
    fn pass(&mut self, pass: &Pass<'_>, sink: &mut dyn GradSink) -> Result<f64, Error> {
        let n = self.schedule.shape().micro_batches;
        let parts = micro_batches(Some(&pass.input), Some(&pass.target), &pass.ctx, pass.weight, n);
        let loss = self.run(pass.model, &pass.loss, &parts, sink)?;
        Ok(if pass.samples() == 0 { 0.0 } else { loss / pass.weight })
    }

    /// Outputs come to the last stage's rank; the sums of the others stay what they are.
    fn evaluate(&mut self, pass: &EvalPass<'_>, judge: &Judge<'_>, sums: &mut [f64]) -> Result<(), Error> {
        let trail = self.trail.clone();
        let ran = self.run_forward(pass, &mut |outputs| judge(&outputs.behind(&trail), sums));
        ran.inspect_err(|error| {
            // Letters that nobody took would be the next pass's.
            self.group.abort(&error.to_string());
            self.lanes.iter().for_each(|lanes| lanes.abort(&error.to_string()));
        })
    }
}

/// What the values of a letter are, which is the same for all letters of a stage and a number of samples.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Form {
    dtype: DType,
    shape: Shape,
    order: Order,
    /// Random layers before them.
    layers: u64,
}

/// A form as numbers: how many dimensions, those, the type, the order, the layers.
const FORM: usize = MAX_DIMS + 4;
const DTYPES: [DType; 3] = [DType::F32, DType::BF16, DType::F16];
const ORDERS: [Order; 4] = [Order::RowMajor, Order::Pixels, Order::Taps, Order::ChannelsLast];

impl Form {
    fn words(&self) -> Vec<u64> {
        let mut words = vec![0; FORM];
        words[0] = self.shape.n_dims() as u64;
        words[1..].iter_mut().zip(self.shape.dims()).for_each(|(word, &dim)| *word = dim as u64);
        let dtype = DTYPES.iter().position(|&dtype| dtype == self.dtype);
        words[FORM - 3] = dtype.expect("whoever sends is asked before") as u64;
        let order = ORDERS.iter().position(|&order| order == self.order);
        words[FORM - 2] = order.expect("all orders are listed") as u64;
        words[FORM - 1] = self.layers;
        words
    }

    /// What another rank sent may be anything.
    fn of(words: &[u64]) -> Option<Form> {
        let n_dims = usize::try_from(words[0]).ok().filter(|&n| n <= MAX_DIMS)?;
        let dims: Vec<usize> = words[1..][..n_dims].iter().map(|&dim| dim as usize).collect();
        dims.iter().try_fold(1usize, |count, &dim| count.checked_mul(dim).filter(|&count| count < MOST))?;
        let dtype = *DTYPES.get(usize::try_from(words[FORM - 3]).ok()?)?;
        let order = *ORDERS.get(usize::try_from(words[FORM - 2]).ok()?)?;
        let fits = order == Order::RowMajor || n_dims == 4;
        fits.then(|| Form { dtype, shape: Shape::new(&dims), order, layers: words[FORM - 1] })
    }
}

/// Elements of a letter.
const MOST: usize = 1 << 40;

/// What a rank keeps of its letters from pass to pass.
#[derive(Default)]
struct Letters {
    /// Forms that were told, by border and samples.
    forms: HashMap<(Border, usize), Form>,
    single: Bag<f32>,
    bfloat16: Bag<bf16>,
    float16: Bag<f16>,
}

/// Letters in one type.
struct Bag<T: Sent> {
    /// Buffers that wait to be used again.
    spare: Vec<Vec<T>>,
    sending: VecDeque<Letter<Vec<T>>>,
    /// Letters that are waited for ahead of time, by where they come from.
    coming: HashMap<Border, Letter<Vec<T>>>,
}

impl<T: Sent> Default for Bag<T> {
    fn default() -> Bag<T> {
        Bag { spare: Vec::new(), sending: VecDeque::new(), coming: HashMap::new() }
    }
}

/// A type in which stages may send.
trait InLetters: Element + Sent {
    fn bag(letters: &mut Letters) -> &mut Bag<Self>;
}

impl InLetters for f32 {
    fn bag(letters: &mut Letters) -> &mut Bag<f32> {
        &mut letters.single
    }
}

impl InLetters for bf16 {
    fn bag(letters: &mut Letters) -> &mut Bag<bf16> {
        &mut letters.bfloat16
    }
}

impl InLetters for f16 {
    fn bag(letters: &mut Letters) -> &mut Bag<f16> {
        &mut letters.float16
    }
}

impl Letters {
    /// Waits until all that was sent is on its way.
    fn deliver(&mut self, group: &Group) -> Result<(), Error> {
        self.single.deliver(group)?;
        self.bfloat16.deliver(group)?;
        self.float16.deliver(group)
    }
}

impl<T: Sent> Bag<T> {
    /// A buffer with room for so many elements, if there is one, that has whatever elements it had.
    fn buffer(&mut self, count: usize) -> Vec<T> {
        let fits = self.spare.iter().position(|spare| spare.capacity() >= count);
        fits.map_or_else(Vec::new, |i| self.spare.swap_remove(i))
    }

    /// Takes back the buffers that are on their way.
    fn collect(&mut self, group: &Group) -> Result<(), Error> {
        while self.sending.front_mut().is_some_and(Letter::poll) {
            let sent = self.sending.pop_front().expect("it was looked at");
            self.spare.push(sent.wait(Deadline::after(group.timeout()))?);
        }
        Ok(())
    }

    /// Waits until all that was sent is on its way.
    fn deliver(&mut self, group: &Group) -> Result<(), Error> {
        while let Some(sent) = self.sending.pop_front() {
            self.spare.push(sent.wait(Deadline::after(group.timeout()))?);
        }
        Ok(())
    }
}

/// The link of one pass.
struct Post<'a> {
    group: &'a Group,
    schedule: &'a Schedule,
    micro_batches: &'a [MicroBatch],
    letters: &'a mut Letters,
    lanes: Option<&'a mut Lanes>,
    trail: &'a Trail,
}

/// What a border's letters are sent under, and what tells their form.
fn tags((stage, forth): Border) -> [u32; 2] {
    let first = TAGS + 4 * stage as u32 + 2 * u32::from(forth);
    [first, first + 1]
}

impl Post<'_> {
    fn peer(&self, stage: usize) -> phalanx_comm::Rank {
        phalanx_comm::Rank(self.schedule.rank_of(stage) as u32)
    }

    fn deadline(&self) -> Deadline {
        Deadline::after(self.group.timeout())
    }

    fn start_receive<T: InLetters>(&mut self, border: Border, form: &Form) -> Letter<Vec<T>> {
        let count = form.shape.count();
        let mut buffer = T::bag(self.letters).buffer(count);
        buffer.resize(count, T::default());
        self.group.start_receive(buffer, Source::Rank(self.peer(border.0)), tags(border)[0])
    }

    fn send_as<T: InLetters>(&mut self, action: Action, made: Carried) -> Result<(), Error> {
        T::bag(self.letters).collect(self.group)?;
        let border = border(action);
        let to = if border.1 { action.stage + 1 } else { action.stage - 1 };
        let to = self.peer(to);
        let Carried { values, layers } = made;
        // A GPU's values come to the host in row-major order.
        let lies = values.lies_in().filter(|_| values.device().gpu().is_none());
        let order = lies.unwrap_or(Order::RowMajor);
        let form = Form { dtype: T::DTYPE, shape: *values.shape(), order, layers };
        let known = (border, self.micro_batches[action.micro_batch].samples);
        if self.letters.forms.get(&known) != Some(&form) {
            let told = self.letters.forms.insert(known, form);
            assert!(told.is_none(), "a stage made {form:?} of as many samples as it made {told:?} of before");
            self.group.start_send(form.words(), to, tags(border)[1]).wait(self.deadline())?;
        }
        if let Some(lanes) = &mut self.lanes {
            return lanes.send(to.index(), &values);
        }
        let mut buffer = T::bag(self.letters).buffer(values.count());
        buffer.clear();
        match lies {
            Some(_) => values.with_lying(|values: &[T]| buffer.extend_from_slice(values)),
            None => {
                self.trail.settle()?;
                buffer.extend(values.to_vec::<T>());
            }
        }
        let letter = self.group.start_send(buffer, to, tags(border)[0]);
        T::bag(self.letters).sending.push_back(letter);
        Ok(())
    }

    fn receive_as<T: InLetters>(
        &mut self,
        action: Action,
        form: Form,
        device: &Device,
    ) -> Result<Carried, Error> {
        let border = border(action);
        let letter = T::bag(self.letters).coming.remove(&border);
        let letter = letter.unwrap_or_else(|| self.start_receive::<T>(border, &form));
        let buffer = letter.wait(self.deadline())?;
        // The next one finds its buffer waiting.
        if let Some(next) = self.micro_batches.get(action.micro_batch + 1)
            && let Some(&form) = self.letters.forms.get(&(border, next.samples))
            && form.dtype == T::DTYPE
            && next.samples > 0
        {
            let letter = self.start_receive::<T>(border, &form);
            T::bag(self.letters).coming.insert(border, letter);
        }
        let values = match device.gpu() {
            None => Tensor::from_order(device, &buffer, form.shape, form.order),
            Some(_) => Tensor::from_slice(device, &buffer, form.shape),
        };
        T::bag(self.letters).spare.push(buffer);
        Ok(Carried { values, layers: form.layers })
    }
}

impl Post<'_> {
    /// The form of what `action` makes, if it was told.
    fn known(&self, action: Action) -> Option<Form> {
        let samples = self.micro_batches[action.micro_batch].samples;
        self.letters.forms.get(&(border(action), samples)).copied()
    }

    /// The form of what `action` makes, which is waited for if it has yet to be told.
    fn form(&mut self, action: Action) -> Result<Form, Error> {
        if let Some(form) = self.known(action) {
            return Ok(form);
        }
        let (border, samples) = (border(action), self.micro_batches[action.micro_batch].samples);
        let mut words = vec![0; FORM];
        self.group.receive_tagged(&mut words, Source::Rank(self.peer(border.0)), tags(border)[1])?;
        let form = Form::of(&words).ok_or(Error::BadForm { stage: border.0, words })?;
        Ok(*self.letters.forms.entry((border, samples)).or_insert(form))
    }

    fn receive_on_lane(&mut self, action: Action, device: &Device) -> Result<Carried, Error> {
        let from = self.peer(action.stage).index();
        // Those that the other rank sends before this one come first (LANE-ORDER).
        while let Some(lacking) = self.lanes.as_ref().and_then(|lanes| lanes.lacking(from, action)) {
            let Form { shape, dtype, .. } = self.form(lacking)?;
            if let Some(lanes) = &mut self.lanes {
                lanes.ask(from, device, shape, dtype)?;
            }
        }
        let layers = self.form(action)?.layers;
        // The one behind it finds its room waiting.
        let next = self.lanes.as_ref().and_then(|lanes| lanes.next(from)).and_then(|next| self.known(next));
        let lanes = self.lanes.as_mut().expect("letters go by lanes here");
        if let Some(Form { shape, dtype, .. }) = next {
            lanes.ask(from, device, shape, dtype)?;
        }
        Ok(Carried { values: lanes.take(from, action, self.trail)?, layers })
    }
}

impl Link for Post<'_> {
    fn send(&mut self, action: Action, made: Carried) -> Result<(), Error> {
        match made.values.dtype() {
            DType::F32 => self.send_as::<f32>(action, made),
            DType::BF16 => self.send_as::<bf16>(action, made),
            DType::F16 => self.send_as::<f16>(action, made),
            other => panic!("a stage made {other} values: f32, bf16 or f16 can be sent"),
        }
    }

    fn receive(&mut self, action: Action, device: &Device) -> Result<Carried, Error> {
        if self.lanes.is_some() {
            return self.receive_on_lane(action, device);
        }
        let form = self.form(action)?;
        match form.dtype {
            DType::BF16 => self.receive_as::<bf16>(action, form, device),
            DType::F16 => self.receive_as::<f16>(action, form, device),
            _ => self.receive_as::<f32>(action, form, device),
        }
    }

    fn progress(&mut self) {
        self.group.progress();
    }

    fn settle(&mut self) -> Result<(), Error> {
        if let Some(lanes) = &mut self.lanes {
            lanes.deliver(self.trail)?;
        }
        Ok(self.trail.settle()?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_form_is_told_in_numbers_and_nonsense_is_none() {
        for shape in [Shape::new(&[]), Shape::new(&[3]), Shape::new(&[2, 3, 4, 5])] {
            for order in ORDERS.into_iter().filter(|&order| order == Order::RowMajor || shape.n_dims() == 4) {
                for dtype in DTYPES {
                    let form = Form { dtype, shape, order, layers: 7 };
                    assert_eq!(Form::of(&form.words()), Some(form));
                }
            }
        }
        let shape = Shape::new(&[2, 3]);
        let words = Form { dtype: DType::F32, shape, order: Order::RowMajor, layers: 0 }.words();
        let changed = |at: usize, to: u64| {
            let mut words = words.clone();
            words[at] = to;
            Form::of(&words)
        };
        assert_eq!(changed(0, 99), None);
        assert_eq!(changed(1, u64::MAX), None);
        assert_eq!(changed(1, 1 << 50), None);
        assert_eq!(changed(FORM - 3, 3), None, "no type that is sent");
        assert_eq!(changed(FORM - 2, 1), None, "pixel order has four dimensions");
        assert_eq!(changed(FORM - 2, 4), None);
    }
}
