//! GPUs that aren't there, against a driver that computes: what is held of both is the same to the byte, where no convolution has a
//! workspace.

use crate::fake::fake;
use crate::sharded::{STAGES, dense};
use crate::{RULE, gpu_of, trainer};
use phalanx::comm::Group;
use phalanx::data::{Places, Silent, View, open};
use phalanx::parallel::FsdpConfig;
use phalanx::tensor::{AbsentGpu, Device, GpuOptions};
use phalanx::{Event, Observer, Precision, Trainer, Worker};
use std::sync::Mutex;

/// What the device holds, and for what, after each step.
struct Holdings<'a>(&'a Device, Vec<Vec<(&'static str, u64)>>);

impl Observer for Holdings<'_> {
    fn event(&mut self, event: &Event) {
        if let Event::Step { .. } = event {
            self.1.push(self.0.holdings());
        }
    }
}

/// That of the first rank, after the last step.
fn held(trainer: &Trainer, devices: &[Device]) -> Vec<(&'static str, u64)> {
    let found = Mutex::new(Vec::new());
    std::thread::scope(|scope| {
        for (group, device) in Group::threads(devices.len()).into_iter().zip(devices) {
            let found = &found;
            scope.spawn(move || {
                let worker = Worker::with_device(group, device.clone());
                let data = open("mnist-mini", View::default(), &Places::from_env(None), &mut Silent).unwrap();
                let mut holdings = Holdings(device, Vec::new());
                let trained = trainer.fit(&worker, &mut dense(), RULE, data.train, None, &mut holdings);
                trained.map(drop).unwrap_or_else(|error| panic!("{error}"));
                if worker.is_first() {
                    *found.lock().unwrap() = holdings.1.pop().unwrap();
                }
            });
        }
    });
    found.into_inner().unwrap()
}

#[test]
fn a_gpu_that_is_not_there_holds_what_one_that_computes_does() {
    const RANKS: usize = 2;
    let Some(fake) = fake() else { return };
    fake.gpus(RANKS as u32);
    let whole = [Precision::Float32, Precision::Bfloat16, Precision::Float16]
        .into_iter()
        .flat_map(|precision| [false, true].map(|graphs| Trainer { precision, graphs, ..trainer() }));
    let config =
        |sharded, offload| Some(FsdpConfig { sharded, offload, unit_bytes: 0, ..FsdpConfig::default() });
    let shared_out = STAGES.map(|stage| Trainer { sharded: config(stage, false), ..trainer() });
    let offloaded = Trainer { sharded: config(STAGES[2], true), ..trainer() };
    for trainer in whole.chain(shared_out).chain([offloaded]) {
        let trainer = Trainer { steps: Some(4), ..trainer };
        let computing: Vec<Device> = (0..RANKS).map(|rank| gpu_of(&fake, rank)).collect();
        let gpu = computing[0].gpu().unwrap();
        let kind = AbsentGpu {
            name: "as the fake one",
            architecture: gpu.architecture(),
            multiprocessors: gpu.multiprocessors(),
            memory: gpu.memory().unwrap().total,
            is_endless: false,
        };
        let options = GpuOptions { absent: Some(kind), ..GpuOptions::default() };
        let absent: Vec<Device> =
            (0..RANKS).map(|rank| Device::cuda(rank as u32, &options).unwrap()).collect();
        for ranks in [1, RANKS] {
            let [computed, rehearsed] =
                [&computing, &absent].map(|devices| held(&trainer, &devices[..ranks]));
            assert_eq!(rehearsed, computed, "{ranks} ranks, {trainer:?}");
        }
    }
}
