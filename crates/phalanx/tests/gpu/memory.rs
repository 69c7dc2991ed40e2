//! Who holds a GPU's memory in a run, as is told where none is left.

use crate::fake::fake;
use crate::samples::images;
use crate::{RULE, gpu, trainer};
use phalanx::comm::Group;
use phalanx::data::Resident;
use phalanx::tensor::{DType, Device, Tensor};
use phalanx::{Event, Observer, Precision, Trainer, Worker};
use phalanx_fake_cuda::{Count, FakeCuda};
use std::panic::{AssertUnwindSafe, catch_unwind};

/// Asks for more than there is once so many steps are made.
struct Starving<'a> {
    fake: &'a FakeCuda,
    device: Device,
    steps: usize,
}

impl Observer for Starving<'_> {
    fn event(&mut self, event: &Event) {
        let Event::Step { .. } = event else { return };
        self.steps = self.steps.wrapping_sub(1);
        if self.steps == 0 {
            self.fake.limit_memory(0, self.fake.count(Count::Bytes));
            let asked = || Tensor::zeros(&self.device, [512 << 20], DType::U8);
            assert!(catch_unwind(AssertUnwindSafe(asked)).is_err());
            self.fake.limit_memory(0, 1 << 30);
        }
    }
}

#[test]
fn all_that_a_run_holds_is_known_by_what_it_is_for() {
    let Some(fake) = fake() else { return };
    let folder = tempfile::tempdir().unwrap();
    let task = images(folder.path());
    let device = gpu(&fake);
    let worker = Worker::with_device(Group::solo(), device.clone());
    let trainer = Trainer {
        steps: Some(6),
        batch_size: 4,
        graphs: true,
        resident: Resident::Always,
        precision: Precision::Bfloat16,
        ..trainer()
    };
    let mut starving = Starving { fake: &fake, device: device.clone(), steps: 5 };
    trainer.fit(&worker, &mut *(task.net)(), RULE, task.train.clone(), None, &mut starving).unwrap();
    let told = device.lacked().expect("it was told in the midst");
    let of = |words: &str| told.held.iter().find(|(what, _)| what.contains(words)).unwrap().1;
    let values = of("values of parameters");
    // Of a convolution, a batch norm and a layer.
    assert!(values >= 4 * (4 * 3 * 25 + 4 + 2 * 4 + 10 * 196 + 10), "{told}");
    let others = ["gradients", "the optimizer's state"].map(of);
    assert_eq!((others, 2 * of("casts")), ([values; 2], values), "{told}");
    assert!(of("resident samples") >= task.train.len() as u64 * 3072, "{told}");
    for what in ["recorded passes", "activations", "workspace", "other arenas"] {
        assert!(of(what) > 0, "{what}: {told}");
    }
    let held: u64 = told.held.iter().map(|(_, bytes)| bytes).sum();
    assert_eq!((held + told.free, told.others), (told.total, 0), "{told}");
}
