//! `phalanx train`: an agent that starts copies of itself, or one of these copies.
//!
//! Both take the signals of a batch system, which the agent passes on to its workers. SIGTERM, which comes before the machine
//! is taken away, ends the run after the step at hand and a checkpoint of it, if that takes no longer than [`GRACE`]; the exit
//! code is 143. SIGUSR1, with which Slurm's `--signal=B:USR1@90` warns before the time is over, and a time limit that is near do
//! the same without haste, with an exit code that says that the run is to be started again ([`DRAINED`]). SIGUSR2 asks for a
//! checkpoint, and the run goes on. A second SIGTERM to the agent, Ctrl-C, and SIGTERM to a worker that doesn't train yet end it at once.

use crate::args::{TrainArgs, WrongUsage};
use crate::bar::FetchBar;
use crate::drain::{self, Asks};
use crate::failure;
use crate::first::{BEST, First, MODEL, shown};
use crate::run::{Gpus, fresh_run_id, hang_limits, number_of_workers, refuse_trouble, tls_is_asked_for};
use crate::runs;
use crate::say::{self, print, say};
use anyhow::{Context, Result};
use nix::sys::signal::{SigSet, Signal};
use phalanx::checkpoint::{CheckpointConfig, Head, InitialWeights, Manifest, Spoilt};
use phalanx::data::{Location, Network, Places, Split, listing, open};
use phalanx::nn::{Module, Parameters};
use phalanx::parallel::{LocalConfig, ModelParallelConfig};
use phalanx::recipe::{BUILT_IN, KEYS, LaidOut};
use phalanx::tensor::{DebugSync, Device};
use phalanx::{
    DeviceSpec, Error, Event, Interruption, Observer, OnNan, Recipe, Requests, Scores, State, TimeLimit,
    Trainer, Worker, cores,
};
use phalanx_job::{DRAINED, RunDir, WorkerEnv, names};
use phalanx_launch::{Console, LaunchSpec, LocalRank, THIS_PROGRAM, inherited_file};
use signal_hook::consts::{SIGTERM, SIGUSR1, SIGUSR2};
use signal_hook::flag;
use std::fs;
use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// How long workers have to end once one has failed or the run is to stop.
const GRACE: Duration = Duration::from_secs(10);

/// How often workers are replaced where nobody says.
const MAX_RESTARTS: usize = 3;

pub(crate) fn train(args: &TrainArgs) -> Result<u8> {
    if args.list {
        for (name, _) in BUILT_IN {
            print(format_args!("{name:<20} {}", Recipe::load(name, &[])?.about));
        }
        return Ok(0);
    }
    if args.keys {
        KEYS.iter().for_each(print);
        return Ok(0);
    }
    let name = args.recipe.as_deref().unwrap_or_default();
    let text = recipe_text(name)?;
    let recipe = configured(name, text.as_deref(), args).map_err(|error| WrongUsage(error.to_string()))?;
    if args.print {
        print(recipe.to_toml().trim_end());
        return Ok(0);
    }
    match WorkerEnv::from_env()? {
        Some(env) => {
            // An agent has looked for all of its workers.
            if env.coordinator.is_none() {
                refuse_trouble()?;
            }
            work(args, &recipe, &env)
        }
        None => lead(args, &recipe, text.as_deref()),
    }
}

/// The text of the recipe's file, if it has one: for a worker that `phalanx train` has started as it was when the run began, though
/// it may have been edited since.
fn recipe_text(name: &str) -> Result<Option<String>> {
    let kept = std::env::var(names::RECIPE_FD).ok().filter(|_| std::env::var_os(names::LED).is_some());
    match kept {
        Some(fd) => {
            let kept = fs::read_to_string(format!("/proc/self/fd/{fd}"));
            Ok(Some(kept.context("the recipe that the run began with can't be read")?))
        }
        None => Ok(Recipe::text(name).map_err(|error| WrongUsage(error.to_string()))?),
    }
}

/// The recipe with everything that was typed; `text` is that of its file, if that was read already. What makes no sense is found here,
/// before any process is started.
pub(crate) fn configured(name: &str, text: Option<&str>, args: &TrainArgs) -> Result<Recipe, Error> {
    // A strategy gives other keys their meaning.
    let strategy = args.strategy.iter().map(|strategy| format!("parallel.strategy={strategy}"));
    let set: Vec<String> = strategy.chain(args.set.iter().cloned()).collect();
    let mut recipe = match text {
        Some(text) => Recipe::load_text(name, text, &set)?,
        None => Recipe::load(name, &set)?,
    };
    if args.skip_bad {
        recipe.set(["data.skip_bad=true"])?;
    }
    recipe.train.epochs = args.epochs.unwrap_or(recipe.train.epochs);
    recipe.train.batch_size = args.batch_size.unwrap_or(recipe.train.batch_size);
    recipe.train.seed = args.seed.unwrap_or(recipe.train.seed);
    if let Some(shards) = args.logical_shards {
        recipe.set([format!("parallel.logical_shards={shards}").as_str()])?;
    }
    if recipe.train.batch_size == 0 {
        return Err(Error::Recipe("--batch-size 0: a batch needs at least one sample".into()));
    }
    let (device, strategy) = (device(args), recipe.parallel.strategy.as_deref().unwrap_or("ddp"));
    if device != DeviceSpec::Cpu && !["ddp", "fsdp"].contains(&strategy) {
        let error = format!(
            "--device {device}: the strategy {strategy} is for CPUs so far\nhint: take --strategy ddp or fsdp"
        );
        return Err(Error::Recipe(error));
    }
    if recipe.parallel.offload && device == DeviceSpec::Cpu {
        let error = "parallel.offload=true: a worker on a CPU has all in the host's memory\nhint: leave it out, or take --device cuda";
        return Err(Error::Recipe(error.into()));
    }
    recipe.model()?;
    phalanx::nn::optim::Optimizer::new(recipe.rule()?)?;
    recipe.trainer()?;
    Ok(recipe)
}

/// The agent: gets the data once, starts the workers, reports.
fn lead(args: &TrainArgs, recipe: &Recipe, text: Option<&str>) -> Result<u8> {
    refuse_trouble()?;
    phalanx::check_environment().map_err(|error| WrongUsage(error.to_string()))?;
    let parts = own_parts(args);
    let workers = worker_count(args, parts.as_deref())?;
    match &parts {
        None => device(args).check(workers)?,
        Some(parts) if workers > parts.len() => {
            let (asked, present) = (device(args), parts.len() as u32);
            return Err(Error::NoSuchGpu { number: present, asked, present }.into());
        }
        Some(_) => DeviceSpec::gpus().map(drop)?,
    }
    recipe.check_workers(workers).map_err(|error| WrongUsage(error.to_string()))?;
    let shards = recipe.parallel.logical_shards;
    if let Some(shards) = shards.filter(|&shards| shards < workers) {
        let asked = match &args.nproc_per_node {
            Some(_) => format!("--nproc-per-node {workers}"),
            None => format!("{workers} workers"),
        };
        let error = format!(
            "{asked}: each worker needs a logical shard, of which there are {shards}\nhint: take {workers} or more shards, or fewer workers (--nproc-per-node {shards})"
        );
        return Err(WrongUsage(error).into());
    }
    // From the start of this command: to get the data may take its time.
    let end = drain::end(args, Asks::Always)?;
    let places = Places::from_env(args.data.clone());
    let found = places.find(listing(&recipe.data.name)?, &mut FetchBar::new())?;
    if let (Some(data), Location::Folder(found)) = (places.passed_over(&found), &found) {
        let (data, name, found) = (data.display(), &recipe.data.name, found.display());
        say(format_args!("note: --data {data} has not all files of {name}: those in {found} are taken"));
    }
    if let Some(init) = args.init.as_ref().filter(|_| !args.resume) {
        // A file that doesn't fit is told once, by this process, before any other is started. A run that goes on may not need it.
        check_initial(&initial(init, recipe)?, recipe)?;
    }
    if let Some(weights) = &args.evaluate {
        check_initial(&judged(weights, recipe)?, recipe)?;
    }
    let run_id = fresh_run_id()?;
    let out = args.out.clone().unwrap_or_else(|| unnamed_out(args, recipe, &run_id));
    refuse_to_begin_anew(args, &out)?;
    if let Some(limit) = args.time_limit.filter(|limit| *limit <= args.time_margin) {
        let margin = args.time_margin;
        say(format_args!(
            "note: --time-limit {limit:?} leaves no time before the --time-margin of {margin:?}: the run ends after its first step"
        ));
    }
    let max_restarts = args.max_restarts.unwrap_or(MAX_RESTARTS);
    let kept = text.map(|text| inherited_file(c"phalanx-recipe", text.as_bytes())).transpose();
    let kept = kept.context("no memory for the recipe")?;
    let mut variables = vec![(names::LED.into(), "1".into())];
    variables.extend(end.map(drain::variable));
    variables.extend(kept.as_ref().map(|file| (names::RECIPE_FD.into(), file.as_raw_fd().to_string())));
    let spec = LaunchSpec {
        program: THIS_PROGRAM.into(),
        args: std::env::args_os().skip(1).collect(),
        workers,
        local_rank: match parts {
            None => LocalRank::Counted,
            Some(devices) => LocalRank::Virtual { variable: "CUDA_VISIBLE_DEVICES", devices },
        },
        run_id,
        run_dir: out.clone(),
        console: Console::FirstRank,
        grace: GRACE,
        max_restarts,
        held_signals: vec![SIGUSR1],
        variables,
        tls: args.tls || tls_is_asked_for()?,
        hang_limits: hang_limits(args.hang_timeout.as_deref())?,
        ..LaunchSpec::default()
    };
    let mut outcome = phalanx_launch::run(&spec, move |report| failure::tell(&report, max_restarts))?;
    // Rank 0 writes to this terminal itself, so what it said is there.
    if let Some(failure) =
        outcome.failure.as_mut().filter(|failure| failure.who.rank().is_some_and(|rank| rank.index() == 0))
    {
        failure.reported = None;
    }
    Ok(failure::conclude(&outcome, &out, &out))
}

/// What the workers compute on.
fn device(args: &TrainArgs) -> DeviceSpec {
    let unsaid = match args.nproc_per_node.as_deref() {
        Some("gpu") => DeviceSpec::Cuda(None),
        _ => DeviceSpec::Cpu,
    };
    args.device.unwrap_or(unsaid)
}

/// The parts of GPUs that the workers have one each of, where the environment names parts.
fn own_parts(args: &TrainArgs) -> Option<Vec<String>> {
    let has_own = device(args) == DeviceSpec::Cuda(None);
    has_own.then(Gpus::of_this_machine).and_then(|gpus| gpus.parts())
}

/// How many there are.
fn worker_count(args: &TrainArgs, parts: Option<&[String]>) -> Result<usize> {
    let device = device(args);
    let gpus = device == DeviceSpec::Cuda(None);
    let unsaid = match device {
        DeviceSpec::Cpu => "2",
        DeviceSpec::Cuda(None) => "gpu",
        // More would share it, to no gain.
        DeviceSpec::Cuda(Some(_)) => "1",
    };
    let text = args.nproc_per_node.as_deref().unwrap_or(unsaid);
    match text {
        "auto" if !gpus => Ok(cores()),
        "cpu" => Ok(cores()),
        "auto" | "gpu" if parts.is_some() => Ok(parts.map_or(0, <[String]>::len)),
        "auto" | "gpu" => match DeviceSpec::gpus()? {
            0 => {
                let why =
                    "no GPU is to be seen; CUDA_VISIBLE_DEVICES may hide some, and nvidia-smi lists all";
                Err(WrongUsage(format!("--nproc-per-node {text}: {why}")).into())
            }
            n => Ok(n as usize),
        },
        number => Ok(number_of_workers("--nproc-per-node", number)?),
    }
}

/// One of the workers.
fn work(args: &TrainArgs, recipe: &Recipe, env: &WorkerEnv) -> Result<u8> {
    let threads = (recipe.train.threads > 0).then_some(recipe.train.threads);
    let requests = Requests::default();
    for (signal, request) in [(SIGUSR1, &requests.drain), (SIGUSR2, &requests.checkpoint)] {
        flag::register(signal, Arc::clone(request)).context("SIGUSR1 and SIGUSR2 can't be taken")?;
    }
    // Our agent has it wait for this.
    SigSet::from(Signal::SIGUSR1).thread_unblock().context("SIGUSR1 can't be taken")?;
    if args.tls && !env.tls {
        let own = "a rank that has its place from the environment has that from there, too: PHALANX_TLS=1";
        return Err(WrongUsage(format!("--tls: {own}")).into());
    }
    refuse_flags_of_a_launcher(args, env)?;
    let end = drain::end(args, Asks::AsFirst(env))?;
    let time_limit = end.map(|end| TimeLimit { end, margin: args.time_margin });
    // First what takes time: the others may be waiting for this one.
    let debug_sync = if args.debug_sync { DebugSync::Yes } else { DebugSync::No };
    let arrival = Worker::arrive_on(device(args), threads, debug_sync)?;
    let prepared = prepare(arrival.device(), args, recipe, env).inspect_err(|error| arrival.report(error))?;
    let mut worker = arrival.join()?;
    let ended = match &args.evaluate {
        None => train_as(&worker, prepared, args, recipe, env, &requests, time_limit),
        Some(weights) => evaluate(&worker, prepared, args, recipe, weights).map(|()| End::Done),
    };
    match ended {
        Ok(End::Done) => match say::lost() {
            None => Ok(0),
            // Whoever did it all again would have nowhere to tell it either.
            Some(why) => {
                let error = Error::Untold(why);
                worker.report(&error);
                Err(error.into())
            }
        },
        Ok(End::Interrupted { steps, why }) => {
            // Whoever was asked, all have ended, and nobody is to take their places.
            worker.report(&Error::Interrupted { steps });
            Ok(drain::exit_code(why))
        }
        // Rank 0 has stopped as it was asked to, and this one has lost it.
        Err(error) if requests.stop() && error.is_consequence() => Ok(drain::exit_code(Interruption::Stop)),
        Err(error) if requests.drain() && error.is_consequence() => Ok(DRAINED),
        Err(error) => {
            worker.report(&error);
            Err(error.into())
        }
    }
}

/// Refuses what is for whoever starts workers, where that is somebody else: it would mean nothing here.
fn refuse_flags_of_a_launcher(args: &TrainArgs, env: &WorkerEnv) -> Result<(), WrongUsage> {
    // Whoever `phalanx train` started has its flags.
    if std::env::var_os(names::LED).is_some() {
        return Ok(());
    }
    // A script may say one worker a task, or what there is anyway.
    let fits = |n: &str| n == "1" || n.parse() == Ok(env.local_world_size);
    let alone = env.coordinator.is_none();
    let none = |restarts: usize| restarts == 0 && alone;
    let flags = [
        ("--nproc-per-node", args.nproc_per_node.clone().filter(|n| !fits(n))),
        ("--max-restarts", args.max_restarts.filter(|&n| !none(n)).map(|n| n.to_string())),
        ("--hang-timeout", args.hang_timeout.clone().filter(|limits| !(limits == "off" && alone))),
    ];
    let Some((flag, value)) = flags.into_iter().find_map(|(flag, value)| Some((flag, value?))) else {
        return Ok(());
    };
    let local = env.local_world_size;
    let told = "this process is a worker that somebody else has started, so this is for whoever did";
    let hint = match (flag, alone) {
        ("--nproc-per-node", _) => format!(
            "workers of this node: {local}; phalanx run --nproc-per-node {value}, or srun --ntasks-per-node={value}, starts others"
        ),
        (_, true) => format!("phalanx run {flag} {value} is an agent that starts workers, one a node"),
        (_, false) => format!("phalanx run {flag} {value}"),
    };
    Err(WrongUsage(format!("{flag} {value}: {told}\nhint: {hint}")))
}

/// How the training of a worker ended.
enum End {
    Done,
    Interrupted { steps: u64, why: Interruption },
}

/// What a worker needs for its training beside the other workers.
struct Prepared {
    data: Split,
    model: Box<dyn Module>,
    parameters: Parameters,
    /// Before the first step.
    state: State,
    /// How passes are made.
    local: LocalConfig,
    /// How replicas lie on several workers, if they do.
    mesh: Option<ModelParallelConfig>,
    /// What is to be expected of a pipeline.
    foretold: Option<String>,
}

fn prepare(device: &Device, args: &TrainArgs, recipe: &Recipe, env: &WorkerEnv) -> Result<Prepared, Error> {
    // The agent has fetched the data.
    let places = Places { network: Network::Forbidden, ..Places::from_env(args.data.clone()) };
    let data = open(&recipe.data.name, recipe.view(), &places, &mut phalanx::data::Silent)?;
    recipe.check_classes(data.train.target())?;
    // First values aren't needed where others hold those of a later step.
    let LaidOut { model, parameters, local, mesh, foretold } =
        recipe.lay_out(device, data.train.input_dims())?;
    let is_kernel = |i: usize| parameters.layout().shape(i).n_dims() == 4;
    if (0..parameters.layout().count()).any(is_kernel) {
        device.prepare_convolutions()?;
    }
    let mut state = State::start(recipe.rule()?)?;
    // Where ranks share out what a model has, none is handed all of it.
    if env.elastic && mesh.is_none() && recipe.parallel.strategy.as_deref() != Some("fsdp") {
        state.make_room(&parameters);
    }
    Ok(Prepared { data, model, parameters, state, local, mesh, foretold })
}

fn train_as(
    worker: &Worker,
    prepared: Prepared,
    args: &TrainArgs,
    recipe: &Recipe,
    env: &WorkerEnv,
    requests: &Requests,
    time_limit: Option<TimeLimit>,
) -> Result<End, Error> {
    let Prepared { data, model, parameters, state, local, mesh, foretold } = prepared;
    let mut first = First::new(args, recipe, env);
    if worker.is_first() {
        let notes = recipe.advice().into_iter().map(str::to_owned).chain(foretold);
        notes.for_each(|note| say(format_args!("note: {note}")));
    }
    // Of a later membership than the first one, if nobody is left of those before, checkpoints are what is.
    let has_begun = env.restarts > 0 || worker.group().generation().0 > 0;
    // What can't be opened there ends the run before it begins.
    let begin = || if has_begun { first.begin_again() } else { first.begin() };
    let run_dir = worker.is_first().then(begin).transpose()?;
    // The first rank's files are everyone's; the others only need names for them, until they are the first.
    let run_path = run_dir.as_ref().map(RunDir::path).or(args.out.as_deref()).or(env.run_dir.as_deref());
    let run_path = run_path.unwrap_or(Path::new("runs"));
    // Whoever comes later finds a run that goes on.
    if env.world_size > env.local_world_size && worker.group().generation().0 == 0 {
        look_for_folder(worker, run_dir.as_ref().map(RunDir::path), recipe, env)?;
    }
    let checkpoints = runs::checkpoints_of(run_path);
    let resume = args.resume || has_begun;
    if worker.is_first() && !has_begun {
        refuse_to_begin_anew(args, run_path)?;
    }
    if args.resume && worker.is_first() && !checkpoints.exists() {
        let restarts = std::env::var("SLURM_RESTART_COUNT").unwrap_or_default();
        if restarts.parse::<u32>().is_ok_and(|restarts| restarts > 0) {
            let out = run_path.display();
            say(format_args!(
                "note: Slurm has started this job before, and {out} has no checkpoint here: beginning with the first step\nhint: if there was one, that folder isn't shared by the nodes: give one that is with --out"
            ));
        }
    }
    let trainer = Trainer {
        steps: args.steps,
        shuffle: !args.no_shuffle,
        local,
        mesh,
        best_file: (recipe.train.keep_best == Some(true)).then(|| run_path.join(BEST)),
        initial: args.init.as_ref().map(|init| initial(init, recipe)).transpose()?,
        checkpoint: Some(CheckpointConfig {
            resume,
            // One that was started again, and wasn't told to go on from what was there before, goes on from its own.
            own_only: !args.resume,
            run_id: Some(env.run_id.clone()).filter(|id| !id.is_empty()),
            ..recipe.checkpoint(checkpoints.clone())
        }),
        requests: requests.clone(),
        time_limit,
        ..recipe.trainer()?
    };
    // Not before, since only training heeds it.
    flag::register(SIGTERM, Arc::clone(&requests.stop))
        .map_err(|error| Error::Join(format!("SIGTERM can't be taken: {error}")))?;
    let trained =
        trainer.resume(worker, model.as_ref(), parameters, state, data.train, Some(data.test), &mut first)?;
    let Some(why) = trained.interrupted else { return Ok(End::Done) };
    let steps = trained.state.progress.step;
    if worker.is_first() {
        // Where the disk has failed, that was told.
        let is_kept = Manifest::path(&checkpoints, steps).exists();
        first.event(&Event::Note { message: drain::told(why, steps, is_kept) });
    }
    Ok(End::Interrupted { steps, why })
}

/// Judges weights on the test samples, and tells how they do.
fn evaluate(
    worker: &Worker,
    prepared: Prepared,
    args: &TrainArgs,
    recipe: &Recipe,
    weights: &Path,
) -> Result<(), Error> {
    let Prepared { data, model, parameters, local, mesh, .. } = prepared;
    let weights = judged(weights, recipe)?;
    let trainer = Trainer { local, mesh, ..recipe.trainer()? };
    let (start, samples) = (Instant::now(), data.test.len());
    let found = trainer.evaluate_file(weights, worker, model.as_ref(), &parameters, data.test.clone())?;
    let (world_size, seconds) = (worker.group().world_size(), start.elapsed().as_secs_f64());
    if worker.is_first() {
        let test = Scores::of(&found, data.test.as_ref(), &trainer.loss);
        let told = Event::Evaluation { world_size, samples, seconds, test };
        shown(args, None).event(&told);
    }
    Ok(())
}

/// Refuses a run whose folder isn't seen by all of its nodes where that loses something: a job of Slurm may begin again on other nodes, and
/// of a checkpoint in parts each rank writes its own. Elsewhere it is only told.
fn look_for_folder(
    worker: &Worker,
    run_dir: Option<&Path>,
    recipe: &Recipe,
    env: &WorkerEnv,
) -> Result<(), Error> {
    let error = match worker.look_for_folder(run_dir) {
        Err(error @ Error::NotShared { .. }) => error,
        looked => return looked,
    };
    let is_job = std::env::var("SLURM_JOB_ID").is_ok_and(|job| !job.is_empty());
    let parts = recipe.checkpoint(PathBuf::new()).parts;
    if (is_job || parts) && !env.unchecked {
        return Err(error);
    }
    if worker.is_first() {
        say(format_args!("note: {error}"));
    }
    Ok(())
}

/// Refuses to go on with a run that is over and has left no checkpoint: it would be trained from its first step, in the place of what it has
/// left.
fn refuse_to_begin_anew(args: &TrainArgs, run_dir: &Path) -> Result<(), Error> {
    let model = run_dir.join(MODEL);
    let is_over = || model.exists() && runs::is_over(run_dir) && !runs::has_checkpoint(run_dir);
    if !args.resume || !is_over() {
        return Ok(());
    }
    let (run_dir, model) = (run_dir.display(), model.display());
    let error = format!(
        "--resume: the run in {run_dir} is over and has left no checkpoint to go on from\nhint: --init {model} begins another with its weights; without --resume this one is trained again from its first step"
    );
    Err(Error::Recipe(error))
}

/// The folder of a run that wasn't told where to be kept: one of its own, or that of the run which it goes on with.
pub(crate) fn unnamed_out(args: &TrainArgs, recipe: &Recipe, run_id: &str) -> PathBuf {
    let own = runs::default_out(recipe, run_id);
    if !args.resume {
        return own;
    }
    runs::newest(recipe).unwrap_or_else(|| {
        let name = &recipe.name;
        say(format_args!("no run of {name} in runs has a checkpoint: starting one in {}", own.display()));
        own
    })
}

/// The weights of a file, the head's only if it fits where the recipe says what head there is to be.
fn initial(path: &Path, recipe: &Recipe) -> Result<InitialWeights, Error> {
    let head = if recipe.model.head.is_some() { Head::IfItFits } else { Head::All };
    let ignored = recipe.trainer()?.on_nan == OnNan::Ignore;
    let spoilt = if ignored { Spoilt::Taken } else { Spoilt::Refused };
    Ok(InitialWeights { path: path.to_owned(), head, spoilt })
}

/// The weights of a file that are judged as they are, head and all.
fn judged(path: &Path, recipe: &Recipe) -> Result<InitialWeights, Error> {
    Ok(InitialWeights { head: Head::All, ..initial(path, recipe)? })
}

/// Whether a run of this recipe can begin with the weights of a file.
///
/// # Errors
/// It can't; where nothing but the head doesn't fit, the message says what would do.
fn check_initial(weights: &InitialWeights, recipe: &Recipe) -> Result<(), Error> {
    let mut model = recipe.model()?;
    let parameters = Parameters::lay_out(&mut model, &Device::cpu(1), 0);
    let checked = weights.check(&parameters);
    let Err(Error::Mismatch { path, mismatch }) = checked else { return checked.map(drop) };
    let new_head = recipe.model_takes_head() && parameters.concerns_head_alone(&mismatch);
    match mismatch.misshaped.first().map(|(_, _, shape)| shape.dims()[0]) {
        Some(outputs) if new_head => Err(Error::OtherHead { path, mismatch, outputs }),
        _ => Err(Error::Mismatch { path, mismatch }),
    }
}
