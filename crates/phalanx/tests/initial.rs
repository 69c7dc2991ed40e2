//! Weights that a run begins with come to each rank in parts, and are the same however ranks share the model out.

use phalanx::checkpoint::{Head, InitialWeights, Spoilt};
use phalanx::data::{Places, Silent, View, open};
use phalanx::nn::optim::Sgd;
use phalanx::nn::{Flatten, Linear, LogSoftmax, Module, Parameters, Relu, Sequential, Weights};
use phalanx::parallel::pipeline::ScheduleKind;
use phalanx::parallel::{Axis, DdpConfig, FsdpConfig, ModelParallelConfig, StagesConfig};
use phalanx::tensor::{Arena, Device};
use phalanx::{Error, Event, Observer, State, Trainer, spawn};
use std::path::Path;
use std::sync::{Arc, Mutex};

/// Six blocks with parameters.
fn net() -> Sequential {
    let mut net = Sequential::new().then(Flatten).then(Linear::new(784, 128)).then(Relu);
    for _ in 0..4 {
        net = net.then(Linear::new(128, 128)).then(Relu);
    }
    net.then(Linear::new(128, 10)).then(LogSoftmax)
}

/// How much of the whole model rank 0 has in memory when its first step begins.
struct AtStart {
    values: Arena,
    bytes: Option<usize>,
}

impl Observer for AtStart {
    fn event(&mut self, event: &Event) {
        if matches!(event, Event::Start { .. }) {
            self.bytes = Some(self.values.region().expect("an arena of its own").resident().unwrap());
        }
    }
}

/// The weights after a step that moves nothing, and what rank 0 had in memory before it.
fn begun(ranks: usize, trainer: &Trainer, path: &Path) -> Result<(Weights, usize), Error> {
    let initial = InitialWeights { path: path.to_owned(), head: Head::All, spoilt: Spoilt::Refused };
    let trainer = Trainer { initial: Some(initial), steps: Some(1), batch_size: 8, ..trainer.clone() };
    let left = Mutex::new(None);
    spawn(ranks, |worker| {
        let mut model = net();
        let parameters = Parameters::lay_out(&mut model, worker.device(), trainer.seed);
        let mut start = AtStart { values: parameters.values().clone(), bytes: None };
        let data = open("mnist-mini", View::default(), &Places::from_env(None), &mut Silent)?;
        let state = State::start(Sgd::new(0.0))?;
        let trained = trainer.resume(&worker, &model, parameters, state, data.train, None, &mut start)?;
        if worker.is_first() {
            *left.lock().unwrap() = Some((trained.parameters.to_weights(), start.bytes.unwrap()));
        }
        Ok(())
    })?;
    Ok(left.into_inner().unwrap().expect("rank 0 has trained"))
}

fn stages() -> ModelParallelConfig {
    let kind = ScheduleKind::OneFOneB;
    ModelParallelConfig {
        mesh: vec![(Axis::Pipeline, 2)],
        bounds: Vec::new(),
        model: Arc::new(|| Box::new(net()) as Box<dyn Module>),
        plan: None,
        stages: Some(StagesConfig { blocks: vec![0..5, 5..13], kind, micro_batches: 2 }),
        ddp: DdpConfig::default(),
        sharded: None,
        replays: false,
    }
}

#[test]
fn a_rank_takes_what_it_holds_of_a_file_or_of_a_folder_of_parts() {
    let folder = tempfile::tempdir().unwrap();
    let (file, parts) = (folder.path().join("w.safetensors"), folder.path().join("parts"));
    std::fs::create_dir(&parts).unwrap();
    let trained = Parameters::build(&mut net(), &Device::cpu(1), 99).to_weights();
    trained.save(&file).unwrap();
    for number in 0..3 {
        let mut part = Weights::default();
        for (_, name) in trained.names().enumerate().filter(|(i, _)| i % 3 == number) {
            let (shape, values) = trained.get(name).unwrap();
            part.push(name.to_owned(), *shape, values);
        }
        part.save(&parts.join(format!("model-{:05}-of-00003.safetensors", number + 1))).unwrap();
    }
    let plain = Trainer::default();
    let fsdp =
        Trainer { sharded: Some(FsdpConfig { unit_bytes: 0, ..FsdpConfig::default() }), ..plain.clone() };
    let mesh = Trainer { mesh: Some(stages()), ..plain.clone() };
    let whole = 4 * Parameters::lay_out(&mut net(), &Device::cpu(1), 0).layout().len();
    // Of each of six units up to two pages are shared with the next part.
    let pages = 6 * 2 * 4096;
    let rows = [
        (1, &plain, whole + pages),
        (2, &plain, whole + pages),
        (4, &fsdp, whole / 4 + pages),
        (2, &mesh, 0),
    ];
    for (ranks, trainer, most) in rows {
        for path in [&file, &parts] {
            let (left, bytes) = begun(ranks, trainer, path).unwrap();
            assert!(
                trained.names().all(|name| left.get(name) == trained.get(name)),
                "{ranks} ranks: {path:?}"
            );
            assert!(bytes <= most, "{ranks} ranks: {bytes} of {whole} bytes are in memory, not {most}");
        }
    }
}

#[test]
fn weights_that_do_not_fit_or_are_none_are_refused_on_all_ranks() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("w.safetensors");
    let fsdp = Trainer { sharded: Some(FsdpConfig::default()), ..Trainer::default() };
    let refused = || begun(2, &fsdp, &file).unwrap_err().to_string();
    Parameters::build(&mut Linear::new(3, 2), &Device::cpu(1), 0).to_weights().save(&file).unwrap();
    assert!(refused().contains("the weights don't fit the model; missing: 1.weight"), "{}", refused());
    let spoilt = Parameters::build(&mut net(), &Device::cpu(1), 0);
    spoilt.value(3).fill(f64::NAN);
    spoilt.to_weights().save(&file).unwrap();
    assert!(refused().contains("3.bias is NaN at element 0"), "{}", refused());
}
