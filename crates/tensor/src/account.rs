//! What a device's memory is held for, and what an allocation that finds none left says of it.
//!
//! Arenas and landings are counted by what they are for when their memory is taken, and given back. Buffers are used by one tensor
//! after the other, so what they are for is counted while they are in use; the others wait, for anybody or for recorded passes.

use phalanx_cuda::Amount;
use std::fmt;
use std::sync::atomic::{AtomicUsize, Ordering};

/// What memory is held for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Purpose {
    /// Parameters, as the model has them.
    Values,
    /// Their gradients.
    Gradients,
    /// What an optimizer keeps of them, and means of them.
    Optimizer,
    /// Their casts to 16 bits.
    Casts,
    /// Samples that stay on the device.
    Samples,
    /// What a pass keeps for its way back, and uses meanwhile: all tensors that nobody said anything else of.
    Pass,
    /// Batches that come to a GPU beside what it computes.
    Landings,
    /// What libraries use as they like.
    Workspace,
    /// Any other arena: buffers of batch norms, say.
    Other,
}

impl Purpose {
    const ALL: [Purpose; 9] = [
        Purpose::Values,
        Purpose::Gradients,
        Purpose::Optimizer,
        Purpose::Casts,
        Purpose::Samples,
        Purpose::Pass,
        Purpose::Landings,
        Purpose::Workspace,
        Purpose::Other,
    ];

    fn words(self) -> &'static str {
        match self {
            Purpose::Values => "values of parameters",
            Purpose::Gradients => "gradients",
            Purpose::Optimizer => "the optimizer's state and means",
            Purpose::Casts => "casts of parameters",
            Purpose::Samples => "resident samples",
            Purpose::Pass => "activations and temporary values of a pass",
            Purpose::Landings => "batches on their way",
            Purpose::Workspace => "libraries' workspace",
            Purpose::Other => "other arenas",
        }
    }

    /// That of this number, as `as usize` gives it.
    pub(crate) fn numbered(number: usize) -> Purpose {
        Purpose::ALL[number]
    }
}

/// Bytes of each purpose.
#[derive(Default)]
struct Bytes([AtomicUsize; Purpose::ALL.len()]);

impl Bytes {
    fn add(&self, purpose: Purpose, bytes: usize) -> usize {
        self.0[purpose as usize].fetch_add(bytes, Ordering::Relaxed) + bytes
    }

    fn take(&self, purpose: Purpose, bytes: usize) {
        self.0[purpose as usize].fetch_sub(bytes, Ordering::Relaxed);
    }

    fn of(&self, purpose: Purpose) -> usize {
        self.0[purpose as usize].load(Ordering::Relaxed)
    }

    fn all(&self) -> usize {
        Purpose::ALL.into_iter().map(|purpose| self.of(purpose)).sum()
    }
}

/// What the memory of a device is held for at the moment.
#[derive(Default)]
pub(crate) struct Account {
    /// Taken from the system, or of a GPU, and not given back yet. All buffers are counted as [`Purpose::Pass`].
    held: Bytes,
    /// Of buffers in use.
    live: Bytes,
    most_live: AtomicUsize,
    /// The most that it was before somebody asked for that.
    most_before: AtomicUsize,
    /// The samples of the pass that is made, and the most bytes of buffers that were in use for it at a time.
    samples: AtomicUsize,
    most_of_pass: AtomicUsize,
    /// The most that a pass before took for each of its samples.
    most_a_sample: AtomicUsize,
}

impl Account {
    /// So many bytes are taken.
    pub(crate) fn take(&self, purpose: Purpose, bytes: usize) {
        self.held.add(purpose, bytes);
    }

    /// They are given back.
    pub(crate) fn give_back(&self, purpose: Purpose, bytes: usize) {
        self.held.take(purpose, bytes);
    }

    /// A buffer of so many bytes is in use now.
    pub(crate) fn begin_use(&self, purpose: Purpose, bytes: usize) {
        let own = self.live.add(purpose, bytes);
        if purpose == Purpose::Pass {
            self.most_of_pass.fetch_max(own, Ordering::Relaxed);
        }
        self.most_live.fetch_max(self.live.all(), Ordering::Relaxed);
    }

    /// It isn't any more.
    pub(crate) fn end_use(&self, purpose: Purpose, bytes: usize) {
        self.live.take(purpose, bytes);
    }

    /// What buffers and arenas hold.
    pub(crate) fn held(&self) -> usize {
        self.held.all() - self.held.of(Purpose::Landings)
    }

    /// What buffers in use hold.
    pub(crate) fn live(&self) -> usize {
        self.live.all()
    }

    /// The most that it was since this was asked for last.
    pub(crate) fn take_most_live(&self) -> usize {
        let most = self.most_live.swap(self.live(), Ordering::Relaxed);
        self.most_before.fetch_max(most, Ordering::Relaxed);
        most
    }

    /// The most that it ever was.
    pub(crate) fn most_ever_live(&self) -> usize {
        self.most_live.load(Ordering::Relaxed).max(self.most_before.load(Ordering::Relaxed))
    }

    /// A pass over so many samples begins; 0 where it isn't told.
    pub(crate) fn begin_pass(&self, samples: usize) {
        let before = self.samples.swap(samples, Ordering::Relaxed);
        let most = self.most_of_pass.swap(self.live.of(Purpose::Pass), Ordering::Relaxed);
        if before > 0 {
            self.most_a_sample.fetch_max(most.div_ceil(before), Ordering::Relaxed);
        }
    }

    /// What is held for a purpose: of buffers what is in use.
    fn of(&self, purpose: Purpose, beside: Beside) -> usize {
        match purpose {
            Purpose::Pass => self.live.of(Purpose::Pass),
            Purpose::Workspace => beside.workspace,
            purpose => self.held.of(purpose) + self.live.of(purpose),
        }
    }

    /// What all that is held is held for, in words, and how much it is.
    pub(crate) fn holdings(&self, beside: Beside) -> Vec<(&'static str, u64)> {
        let mut held: Vec<(&'static str, u64)> =
            Purpose::ALL.iter().map(|&purpose| (purpose.words(), self.of(purpose, beside) as u64)).collect();
        held.push(("buffers of recorded passes", beside.of_recorded as u64));
        held.push(("buffers that wait to be used again", beside.waiting as u64));
        held
    }

    /// What to say where so many bytes aren't there.
    pub(crate) fn lacks(&self, lack: Lack) -> OutOfMemory {
        let of = |purpose| self.of(purpose, lack.beside);
        let held = self.holdings(lack.beside);
        let ours: u64 = held.iter().map(|(_, bytes)| bytes).sum();
        let model = [Purpose::Values, Purpose::Gradients, Purpose::Optimizer, Purpose::Casts].map(of);
        let is_of_pass = lack.purpose == Purpose::Pass;
        let of_pass = of(Purpose::Pass) + if is_of_pass { lack.asked } else { 0 };
        let pass = Taken {
            samples: self.samples.load(Ordering::Relaxed),
            most: of_pass.max(self.most_of_pass.load(Ordering::Relaxed)),
            most_a_sample: self.most_a_sample.load(Ordering::Relaxed),
        };
        let room = lack.free as usize + of(Purpose::Pass);
        let room = room.saturating_sub(if is_of_pass { 0 } else { lack.asked });
        let shares = [
            (
                of_pass,
                "parallel.recompute=blocks keeps fewer activations, and train.precision=bfloat16 smaller ones",
            ),
            (
                model.iter().sum::<usize>() + if is_of_pass { 0 } else { lack.asked },
                "--strategy fsdp shares values, gradients and the optimizer's state out among workers, and parallel.offload=true keeps them in the host's memory",
            ),
        ];
        let mut hints: Vec<&'static str> = Vec::new();
        hints.extend(shares.iter().max_by_key(|(bytes, _)| *bytes).map(|(_, hint)| *hint));
        let others = lack.total.saturating_sub(lack.free + ours);
        let also = [
            (of(Purpose::Samples) as u64, "data.resident=never keeps samples on the host"),
            (lack.beside.of_recorded as u64, "train.graphs=false does without buffers of recorded passes"),
            // A context of the driver's takes some hundreds of MiB.
            (others.saturating_sub(1 << 30), "`nvidia-smi` shows which programs hold the rest"),
        ];
        // What holds little, next to what is lacking, helps little.
        let helps = |bytes: u64| bytes >= lack.asked as u64 / 4;
        hints.extend(also.into_iter().filter(|(bytes, _)| *bytes > 0 && helps(*bytes)).map(|(_, hint)| hint));
        OutOfMemory {
            gpu: lack.gpu,
            asked: lack.asked as u64,
            purpose: lack.purpose,
            free: lack.free,
            total: lack.total,
            held,
            others,
            fits: pass.fit_into(room).map(|fit| (pass.samples, fit)),
            hints,
        }
    }
}

/// An allocation that finds no memory.
pub(crate) struct Lack {
    pub(crate) gpu: u32,
    pub(crate) asked: usize,
    pub(crate) purpose: Purpose,
    pub(crate) free: u64,
    pub(crate) total: u64,
    pub(crate) beside: Beside,
}

/// What a device knows of its bytes that the account doesn't.
#[derive(Clone, Copy)]
pub(crate) struct Beside {
    /// Of the libraries.
    pub(crate) workspace: usize,
    /// Of buffers that nobody but recorded passes may use, and that none uses now.
    pub(crate) of_recorded: usize,
    /// Of those that anybody may.
    pub(crate) waiting: usize,
}

/// What passes took.
struct Taken {
    /// Those of the pass at hand; 0 where it isn't known.
    samples: usize,
    /// What it has taken so far, with what was asked for last.
    most: usize,
    /// What one before took a sample.
    most_a_sample: usize,
}

impl Taken {
    /// How many samples, fewer than there were, would fit into so many bytes, if each takes as much as the others. None where that isn't
    /// known.
    fn fit_into(&self, room: usize) -> Option<usize> {
        let each = self.most.div_ceil(self.samples.max(1)).max(self.most_a_sample);
        (self.samples > 0 && each > 0).then(|| (room / each).min(self.samples - 1))
    }
}

/// What is told where a GPU has no memory left for an allocation: what is told adds up to all that the GPU has.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OutOfMemory {
    /// Which GPU.
    pub gpu: u32,
    /// Bytes that were asked for.
    pub asked: u64,
    /// What for.
    pub purpose: Purpose,
    /// Bytes that were free then.
    pub free: u64,
    /// Bytes that the GPU has.
    pub total: u64,
    /// What this device holds, in words, with its bytes; some hold none.
    pub held: Vec<(&'static str, u64)>,
    /// Bytes of all others: other processes, the driver, and whatever of this process isn't the device's.
    pub others: u64,
    /// The samples of the pass at hand, and about how many would fit; none where it isn't known.
    pub fits: Option<(usize, usize)>,
    /// What else can be done, the best first.
    pub hints: Vec<&'static str>,
}

impl fmt::Display for OutOfMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [asked, free, total] = [self.asked, self.free, self.total].map(Amount);
        let what = self.purpose.words();
        writeln!(
            f,
            "out of memory on GPU {}: {asked} were asked for, for {what}, {free} of {total} are free",
            self.gpu
        )?;
        let ours = Amount(self.held.iter().map(|(_, bytes)| bytes).sum());
        write!(f, "this process holds {ours}")?;
        let mut held: Vec<_> = self.held.iter().filter(|(_, bytes)| *bytes > 0).collect();
        held.sort_by_key(|(_, bytes)| std::cmp::Reverse(*bytes));
        for (i, (what, bytes)) in held.into_iter().enumerate() {
            let before = if i == 0 { ':' } else { ',' };
            write!(f, "{before} {} by {what}", Amount(*bytes))?;
        }
        writeln!(f, "\nothers hold {}, the driver among them", Amount(self.others))?;
        match self.fits {
            Some((samples, 0)) => writeln!(
                f,
                "not one sample of the {samples} of a pass would fit, as far as can be estimated: what isn't of the pass takes too much"
            )?,
            Some((samples, fit)) => writeln!(
                f,
                "about {fit} of the {samples} samples of a pass would fit, by an estimate from what it took: a smaller --batch-size, and with train.accumulate {} times as large as many samples a step",
                samples.div_ceil(fit)
            )?,
            None => {}
        }
        write!(f, "hint: {}", self.hints.join("; "))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fewer_samples_fit_by_what_each_took() {
        let taken = |samples, most, most_a_sample| Taken { samples, most, most_a_sample };
        for (taken, room, want) in [
            (taken(8, 800, 0), 450, Some(4)),
            // What a whole pass took before counts more than what this one took until it failed.
            (taken(8, 800, 200), 450, Some(2)),
            (taken(8, 800, 0), 99, Some(0)),
            // It didn't fit, whatever the estimate is.
            (taken(8, 800, 0), 8000, Some(7)),
            (taken(0, 800, 100), 450, None),
            (taken(8, 0, 0), 450, None),
        ] {
            assert_eq!(taken.fit_into(room), want, "{} in {room}", taken.samples);
        }
    }

    #[test]
    fn a_pass_is_measured_from_its_beginning() {
        let account = Account::default();
        account.begin_use(Purpose::Pass, 100);
        account.begin_pass(4);
        account.begin_use(Purpose::Pass, 300);
        account.begin_use(Purpose::Samples, 5000);
        account.end_use(Purpose::Pass, 300);
        account.begin_pass(2);
        let lack = Lack {
            gpu: 0,
            asked: 10,
            purpose: Purpose::Gradients,
            free: 260,
            total: 6000,
            beside: Beside { workspace: 0, of_recorded: 0, waiting: 300 },
        };
        let told = account.lacks(lack);
        // 400 bytes for 4 samples, 250 free for others than gradients, and the 100 that are the pass's now.
        assert_eq!(told.fits, Some((2, 1)));
        assert_eq!(told.others, 6000 - 260 - 100 - 5000 - 300);
    }
}
