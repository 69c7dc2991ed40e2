//! A data set for a device: where the numbers of its batches are made.
//!
//! On a CPU the loader makes them. A GPU does it itself where samples are bytes ([`ByteSamples`]): all of them lie in its memory, if
//! they fit, and a batch is made from the samples' numbers, or else the bytes of each batch go there. It is the same batch in any
//! case, to the bit: random changes are functions of seed, epoch and the sample's number.
//!
//! [`ByteSamples`]: crate::ByteSamples

use crate::batch::Parts;
use crate::bytes::{Kept, Making};
use crate::dataset::Dataset;
use crate::error::{Error, Result};
use crate::transform::Draws;
use phalanx_tensor::{Device, Purpose, SampleOrder, Tensor};
use std::fmt;
use std::sync::Arc;

/// Whether all samples lie in a GPU's memory. Without a GPU it has no meaning.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Resident {
    /// If they take at most a fifth of what is free there when the run begins.
    #[default]
    Auto,
    /// Yes, or the run ends.
    Always,
    /// No: the samples of each batch go there.
    Never,
}

/// One part in so many of the free memory is what samples may take of their own accord.
const SHARE: u64 = 4;

/// A data set, and where its batches are made. Clones share what lies on the device.
#[derive(Clone)]
pub struct Supply {
    dataset: Arc<dyn Dataset>,
    maker: Option<Arc<Maker>>,
}

/// What a GPU makes batches with.
pub(crate) struct Maker {
    device: Device,
    making: Making,
    /// (channels, 256)
    table: Option<Tensor>,
    /// All samples, if they are there.
    kept: Option<Tensor>,
}

impl Supply {
    /// Batches that are made by the loader.
    pub fn on_host(dataset: Arc<dyn Dataset>) -> Supply {
        Supply { dataset, maker: None }
    }

    /// Batches for `device`, which makes them itself where it is a GPU and samples are bytes.
    ///
    /// # Errors
    /// [`Error::NotResident`] where all samples are to lie there and can't, and what reading them can meet.
    pub fn for_device(dataset: Arc<dyn Dataset>, device: &Device, resident: Resident) -> Result<Supply> {
        let Some(gpu) = device.gpu() else { return Ok(Supply::on_host(dataset)) };
        let refused = |reason: String| match resident {
            Resident::Always => Err(Error::NotResident { reason }),
            Resident::Auto | Resident::Never => Ok(()),
        };
        let Some(samples) = dataset.as_bytes() else {
            refused(
                "they aren't bytes that a GPU makes samples of, as images without mixup and text are"
                    .to_owned(),
            )?;
            return Ok(Supply::on_host(dataset));
        };
        let kept = samples.kept().filter(|_| resident != Resident::Never);
        if kept.is_none() {
            let reason = "what is done to them isn't all done by GPUs, they have many sizes, or one may take another's place (data.skip_bad)";
            refused(reason.to_owned())?;
        }
        let may_take = |bytes: usize| -> Result<bool> {
            let free = gpu.memory().map_or(0, |memory| memory.free);
            let most = if resident == Resident::Always { free } else { free / SHARE };
            // As much as a quarter more is taken: buffers come in classes of sizes.
            let fits = bytes as u64 + bytes as u64 / 4 <= most;
            if !fits {
                refused(format!("they are {bytes} bytes, and {free} bytes of its memory are free"))?;
            }
            Ok(fits)
        };
        let kept = match kept {
            Some(kept) if may_take(kept.bytes)? => Some(kept),
            _ => None,
        };
        let (making, kept) = match kept {
            Some(Kept { making, .. }) => {
                let all = samples.all()?;
                (making, Some(Tensor::from_slice(device, &all, [all.len()]).held_for(Purpose::Samples)))
            }
            None => (samples.making(), None),
        };
        let table = match &making {
            Making::Images { table, how, .. } => Some(Tensor::from_slice(device, table, [how.from[0], 256])),
            Making::Windows { .. } => None,
        };
        let maker = Maker { device: device.clone(), making, table, kept };
        Ok(Supply { dataset, maker: Some(Arc::new(maker)) })
    }

    /// The samples.
    pub fn dataset(&self) -> &Arc<dyn Dataset> {
        &self.dataset
    }

    /// Whether all samples lie on the device.
    pub fn is_resident(&self) -> bool {
        self.maker.as_ref().is_some_and(|maker| maker.kept.is_some())
    }

    pub(crate) fn maker(&self) -> Option<&Arc<Maker>> {
        self.maker.as_ref()
    }

    /// Fills what the host has to know of the samples `parts.plan.indices`: all of their numbers, or their bytes and labels.
    pub(crate) fn fill(&self, parts: &mut Parts) -> Result<()> {
        let Parts { plan, buffers, .. } = parts;
        let indices = &plan.indices;
        let Some(maker) = &self.maker else {
            buffers.fit(&*self.dataset, indices.len());
            return self.dataset.batch(indices, buffers);
        };
        let samples = self.dataset.as_bytes().expect("a maker is one of bytes");
        let (bytes, labels) = (maker.making.bytes(), indices.len() * maker.making.labels());
        match maker.kept {
            Some(_) => {
                buffers.fit_bytes(0, labels);
                samples.labels(indices, buffers.labels())
            }
            None => {
                buffers.fit_bytes(indices.len() * bytes, labels);
                samples.write(indices, buffers)
            }
        }
    }
}

impl Maker {
    /// Inputs and targets of the samples of this epoch that are numbered so, on its device.
    pub(crate) fn make(&self, epoch: u64, samples: &[u64], labels: &[i64], bytes: &[u8]) -> [Tensor; 2] {
        let words = self.words(epoch, samples, labels);
        let words = Tensor::from_slice(&self.device, &words, [words.len()]);
        let bytes = self.wants_bytes().then(|| Tensor::from_slice(&self.device, bytes, [bytes.len()]));
        self.make_of(&words, bytes, samples.len())
    }

    /// Whether the bytes of a batch's samples go to the device, since they don't lie there.
    pub(crate) fn wants_bytes(&self) -> bool {
        self.kept.is_none()
    }

    /// What goes to the device in any case: how the samples are changed in this epoch, their numbers, and their labels.
    pub(crate) fn words(&self, epoch: u64, samples: &[u64], labels: &[i64]) -> Vec<i64> {
        let key = match self.making {
            Making::Images { seed, .. } => [seed, Draws::stream(epoch)],
            Making::Windows { .. } => [0; 2],
        };
        let numbers = key.iter().chain(samples).map(|&word| word as i64);
        numbers.chain(labels.iter().copied()).collect()
    }

    /// Inputs and targets of `n` samples from what is on the device by now: their words, and their bytes where it wants them.
    pub(crate) fn make_of(&self, words: &Tensor, bytes: Option<Tensor>, n: usize) -> [Tensor; 2] {
        let (bytes, order) = match (&self.kept, bytes) {
            (Some(kept), _) => (kept.clone(), SampleOrder::ByNumber),
            (None, bytes) => (bytes.expect("it wants them"), SampleOrder::AsInBatch),
        };
        match &self.making {
            Making::Images { how, .. } => {
                let table = self.table.as_ref().expect("images have a table");
                let images = bytes.sample_images(words, table, how, order, n);
                [images, words.narrow(0, 2 + n, n)]
            }
            Making::Windows { window, stride } => bytes.sample_windows(words, *window, *stride, order, n),
        }
    }
}

impl fmt::Debug for Maker {
    /// Without values, which would have to come from the device.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let kept = self.kept.as_ref().map(Tensor::count);
        f.debug_struct("Maker").field("device", &self.device).field("kept", &kept).finish_non_exhaustive()
    }
}

impl fmt::Debug for Supply {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Supply({} samples, {:?})", self.dataset.len(), self.maker)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cifar::{Cifar, CifarSet, write_synthetic_cifar};
    use crate::dataset::BatchBuffers;
    use crate::mnist::{Mnist, Part, Scaling};
    use crate::pictures::{BadImages, Pictures};
    use crate::text::Text;
    use crate::transform::{Jitter, Normalise, Pipeline, Transform};
    use phalanx_tensor::Border;

    /// Batches of two epochs from all samples, and from the bytes of each, have the bits of the data set's own.
    fn check(what: &str, dataset: &dyn Dataset, is_kept: bool) {
        let samples = dataset.as_bytes().expect("samples of bytes");
        assert_eq!(samples.kept().is_some(), is_kept, "{what}");
        let device = Device::cpu(1);
        let maker = |making: Making, kept| {
            let table = match &making {
                Making::Images { table, how, .. } => {
                    Some(Tensor::from_slice(&device, table, [how.from[0], 256]))
                }
                Making::Windows { .. } => None,
            };
            Maker { device: device.clone(), making, table, kept }
        };
        let resident = samples.kept().map(|Kept { making, bytes }| {
            let all = samples.all().unwrap();
            assert_eq!(all.len(), bytes, "{what}");
            maker(making, Some(Tensor::from_slice(&device, &all, [bytes])))
        });
        let streamed = maker(samples.making(), None);
        let indices: Vec<usize> = (0..dataset.len()).rev().chain([1, 1]).collect();
        let ids: Vec<u64> = indices.iter().map(|&i| i as u64).collect();
        for epoch in [0, 3] {
            let (mut want, mut own) = (BatchBuffers::new(), BatchBuffers::new());
            want.begin(epoch);
            want.fit(dataset, indices.len());
            dataset.batch(&indices, &mut want).unwrap();
            own.begin(epoch);
            let n_labels = indices.len() * streamed.making.labels();
            own.fit_bytes(indices.len() * streamed.making.bytes(), n_labels);
            samples.write(&indices, &mut own).unwrap();
            let mut labels = vec![-1; n_labels];
            samples.labels(&indices, &mut labels).unwrap();
            assert_eq!(labels, *own.labels(), "{what}");
            for maker in resident.iter().chain([&streamed]) {
                let [inputs, targets] = maker.make(epoch, &ids, &labels, own.read_bytes());
                match inputs.dtype() {
                    phalanx_tensor::DType::F32 => {
                        let bits = |values: &[f32]| values.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
                        assert!(bits(&inputs.to_vec()) == bits(want.inputs()), "{what}, epoch {epoch}");
                    }
                    _ => assert!(inputs.to_vec::<i64>() == want.ids(), "{what}"),
                }
                assert!(targets.to_vec::<i64>() == want.labels(), "{what}, epoch {epoch}");
            }
        }
    }

    #[test]
    fn what_a_device_makes_of_bytes_is_what_the_data_set_writes() {
        check("digits", &Mnist::mini(Part::Test, Scaling::MNIST), true);
        let folder = tempfile::tempdir().unwrap();
        write_synthetic_cifar(folder.path(), CifarSet::Ten, 6).unwrap();
        use Transform::{CentreCrop, Flip, RandomCrop, RandomResizedCrop, Resize};
        let crop = RandomCrop { padding: 4, border: Border::Black, size: [32, 32] };
        let reflected = RandomCrop { padding: 4, border: Border::Reflect, size: [32, 32] };
        let cut = RandomCrop { padding: 0, border: Border::Black, size: [20, 27] };
        let piece = RandomResizedCrop { size: [16, 16], area: (0.2, 1.0), ratio: (0.75, 4.0 / 3.0) };
        let jitter = Transform::Jitter(Jitter { brightness: 0.4, ..Jitter::default() });
        let rows: [(&[Transform], usize, bool); 10] = [
            (&[], 0, true),
            (&[crop, Flip { chance: 0.5 }], 8, true),
            (&[Resize([32, 32]), cut, Flip { chance: 0.25 }], 3, true),
            (&[reflected, Flip { chance: 0.5 }], 8, true),
            (&[CentreCrop([21, 40]), Flip { chance: 1.0 }], 0, true),
            (&[Flip { chance: 0.5 }], 50, true),
            (&[Flip { chance: 0.5 }, crop], 8, false),
            (&[crop, jitter], 5, false),
            (&[piece, Flip { chance: 0.5 }], 4, false),
            (&[Resize([24, 24])], 0, false),
        ];
        for (steps, cutout, is_kept) in rows {
            let images = Cifar::open(folder.path(), CifarSet::Ten, Part::Train, BadImages::Refuse).unwrap();
            let pipeline = Pipeline { steps: steps.to_vec(), cutout, ..Pipeline::new(Normalise::CIFAR10) };
            let pictures = Pictures::new(images, pipeline, 9, BadImages::Refuse).unwrap();
            check(&format!("{steps:?}, {cutout}"), &pictures, is_kept);
        }
        let path = folder.path().join("text");
        std::fs::write(&path, (0..700).map(|i| (i * i % 251) as u8).collect::<Vec<_>>()).unwrap();
        for window in [1, 16] {
            for part in [Part::Train, Part::Test] {
                check("text", &Text::open(&path, part, window).unwrap(), true);
            }
        }
    }

    #[test]
    fn mixtures_and_images_that_may_be_replaced_are_made_by_the_loader() {
        let folder = tempfile::tempdir().unwrap();
        write_synthetic_cifar(folder.path(), CifarSet::Ten, 2).unwrap();
        for (mixup, bad, as_bytes, is_kept) in [
            (0.2, BadImages::Refuse, false, false),
            (0.0, BadImages::Replace, true, false),
            (0.0, BadImages::Refuse, true, true),
        ] {
            let images = Cifar::open(folder.path(), CifarSet::Ten, Part::Train, bad).unwrap();
            let pipeline = Pipeline { mixup, ..Pipeline::new(Normalise::UNIT) };
            let pictures = Pictures::new(images, pipeline, 1, bad).unwrap();
            let samples = pictures.as_bytes();
            assert_eq!(samples.is_some(), as_bytes);
            assert_eq!(samples.is_some_and(|samples| samples.kept().is_some()), is_kept);
        }
    }
}
