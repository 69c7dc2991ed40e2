//! What can be typed.

use crate::cluster::ClusterArgs;
use crate::drain;
use crate::pool::PoolArgs;
use crate::run::RunArgs;
use crate::say::print;
use crate::slurm::SlurmArgs;
use crate::watch::WatchArgs;
use clap::builder::{FalseyValueParser, RangedU64ValueParser};
use clap::error::{ContextKind, ContextValue};
use clap::{Arg, ArgAction, Args, CommandFactory, FromArgMatches, Parser, Subcommand, ValueEnum};
use clap_complete::Shell;
use phalanx::DeviceSpec;
use phalanx::parallel::pipeline::ScheduleKind;
use phalanx::tensor::AbsentGpu;
use phalanx_job::MOST_THREADS;
use phalanx_launch::MOST_WORKERS;
use std::fmt;
use std::fs::File;
use std::io::{self, Read};
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Distributed training of neural networks: launch, train, measure.
#[derive(Parser)]
#[command(name = "phalanx", version, max_term_width = 100)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

/// The commands.
#[derive(Subcommand)]
pub(crate) enum Command {
    /// Train a model by a recipe, on all workers of this machine.
    Train(Box<TrainArgs>),
    /// Start any program as several workers, with torchrun's environment and flags.
    ///
    /// Flags are taken with dashes or underscores. One that isn't typed is looked for in PET_<FLAG>, as in PET_NPROC_PER_NODE.
    Run(Box<RunArgs>),
    /// The half of `run --hosts` that ssh starts on each host.
    #[command(hide = true)]
    Host,
    /// Measure this machine.
    Bench(BenchArgs),
    /// Fetch, list and verify data sets.
    Data(DataArgs),
    /// Look into the checkpoints of a run.
    Checkpoint(CheckpointArgs),
    /// Put faults to a training run, and see whether it ends as one that is left alone.
    Chaos(ChaosArgs),
    /// Write and check the configuration of a cluster in the cloud.
    Cluster(ClusterArgs),
    /// Tell what this machine has for training, and what is missing.
    Doctor(DoctorArgs),
    /// Show the GPUs of this machine and the workers of all runs on it, again and again.
    Top(TopArgs),
    /// Show runs as they go on: on a page for a browser, to Prometheus, in files for TensorBoard.
    Watch(WatchArgs),
    /// Try every operation of a device, runs on it, and how fast it is.
    Selftest(SelftestArgs),
    /// Submit runs as jobs of Slurm, follow them, and find mistakes in batch scripts.
    Slurm(Box<SlurmArgs>),
    /// Tell what a run would hold, send and take on GPUs that needn't be here.
    Plan(Box<PlanArgs>),
    /// Share machines between teams: queues with quotas, and jobs that shrink when others are owed what they borrowed.
    Pool(Box<PoolArgs>),
    /// Tell from the flight records of a failed run which ranks were missing, behind or mistaken.
    Flight(FlightArgs),
    /// Print what a shell needs to complete the commands and flags of this program.
    Completions {
        /// Which shell.
        shell: Shell,
    },
}

/// `phalanx train`.
#[derive(Args)]
pub(crate) struct TrainArgs {
    /// A built-in recipe (see --list) or a TOML file.
    #[arg(required_unless_present_any = ["list", "keys"])]
    pub(crate) recipe: Option<String>,
    /// Name the built-in recipes.
    #[arg(long, exclusive = true)]
    pub(crate) list: bool,
    /// List the keys of recipes, with what each is about and may be.
    #[arg(long, exclusive = true)]
    pub(crate) keys: bool,
    /// Print the recipe as TOML, with what --set and the other options make of it.
    #[arg(long)]
    pub(crate) print: bool,
    /// Workers on this machine: a number, gpu for one a GPU, cpu for one a core, or auto for gpu with --device cuda and else cpu
    /// [default: gpu with --device cuda, 1 with cuda:N, else 2].
    #[arg(long, value_name = "N")]
    pub(crate) nproc_per_node: Option<String>,
    /// What workers compute on: cpu, cuda for a GPU each, or cuda:N for that GPU, which all of them share; CUDA_VISIBLE_DEVICES says
    /// which GPUs are counted [default: cuda with --nproc-per-node gpu, else cpu].
    #[arg(long, value_name = "DEVICE")]
    pub(crate) device: Option<DeviceSpec>,
    /// Wait for each kernel, library call and copy on a GPU, so that one that fails is named: slow, and without recorded passes.
    #[arg(long)]
    pub(crate) debug_sync: bool,
    /// Encrypt what goes over TCP, as PHALANX_TLS=1 does.
    #[arg(long)]
    pub(crate) tls: bool,
    /// How often all samples are seen.
    #[arg(long, value_name = "E")]
    pub(crate) epochs: Option<u64>,
    /// End after this many steps.
    #[arg(long, value_name = "S")]
    pub(crate) steps: Option<u64>,
    /// Samples a step and worker, or logical shard.
    #[arg(long, value_name = "B")]
    pub(crate) batch_size: Option<usize>,
    /// Cut each step into so many shards, at least one a worker: the results are then the same bits on any number of workers.
    #[arg(long, value_name = "L")]
    pub(crate) logical_shards: Option<usize>,
    /// How the work is shared: ddp; fsdp, where workers share out the model, too; or workers of several devices each: dp, place or
    /// pipeline.
    #[arg(long, value_name = "S")]
    pub(crate) strategy: Option<String>,
    /// Where the data set lies: a folder, or the file of a text.
    #[arg(long, value_name = "PATH")]
    pub(crate) data: Option<PathBuf>,
    /// Start from the weights in this .safetensors or .pth file, or folder of .safetensors files.
    #[arg(long, value_name = "FILE")]
    pub(crate) init: Option<PathBuf>,
    /// Judge the weights in this file, or folder of files, on the test samples, and train nothing: only logs are left in --out.
    #[arg(
        long,
        value_name = "FILE",
        conflicts_with_all = ["init", "resume", "epochs", "steps", "time_limit", "log_interval", "save_optimizer", "print"]
    )]
    pub(crate) evaluate: Option<PathBuf>,
    /// Put the next good image in the place of one that can't be read, and count these.
    #[arg(long)]
    pub(crate) skip_bad: bool,
    /// Take the samples in the order of the files.
    #[arg(long)]
    pub(crate) no_shuffle: bool,
    /// Seed of first values, orders and dropout.
    #[arg(long)]
    pub(crate) seed: Option<u64>,
    /// Where to save the model and the logs [default: runs/RECIPE-RUN_ID].
    #[arg(long, value_name = "DIR")]
    pub(crate) out: Option<PathBuf>,
    /// Go on from the newest checkpoint in --out, or else of the newest run of this recipe in runs/; begin with the first
    /// step where there is none.
    #[arg(long)]
    pub(crate) resume: bool,
    /// End within this time, as in 90s, 1h30m or 2d, with a checkpoint and exit code 75: the run is to be started again, with
    /// --resume [default: until PHALANX_END_TIME, in seconds since 1970, or else the end of the Slurm job].
    #[arg(long, value_name = "TIME", value_parser = drain::duration)]
    pub(crate) time_limit: Option<Duration>,
    /// How long before the time is up the run ends at the latest; earlier if twice its longest checkpoint and
    /// step, or three such steps where a GPU is ahead of what is told, took longer.
    #[arg(long, value_name = "TIME", default_value = "30s", value_parser = drain::duration)]
    pub(crate) time_margin: Duration,
    /// Change a key of the recipe, as in --set optimizer.lr=0.1; may be given often.
    #[arg(long = "set", value_name = "KEY=VALUE")]
    pub(crate) set: Vec<String>,
    /// Print one JSON object a line on standard output, and nothing else there.
    #[arg(long, conflicts_with = "print")]
    pub(crate) json: bool,
    /// Print the loss every so many steps, as the PyTorch example does.
    #[arg(long, value_name = "STEPS")]
    pub(crate) log_interval: Option<u64>,
    /// How often workers may be started in the place of others that are lost, while those that are left go on: those that are
    /// lost within a second count once. 0 ends the run with the first [default: 3].
    #[arg(long, value_name = "N")]
    pub(crate) max_restarts: Option<usize>,
    /// How long a worker may make no progress before it is taken to hang and another takes its place: off, seconds, or seconds by
    /// section as in start=600,step=60,evaluation=60,checkpoint=900; as PHALANX_HANG_TIMEOUT does [default: start=600,
    /// checkpoint=900, step and evaluation 60 or 50 times the longest so far, and 600 for the first].
    #[arg(long, value_name = "LIMITS")]
    pub(crate) hang_timeout: Option<String>,
    /// Save optimizer.safetensors beside the model.
    #[arg(long)]
    pub(crate) save_optimizer: bool,
}

/// `phalanx selftest`.
#[derive(Args)]
pub(crate) struct SelftestArgs {
    /// What is tried: cpu, cuda for the first GPU, or cuda:N.
    #[arg(long, value_name = "DEVICE", default_value = "cpu")]
    pub(crate) device: DeviceSpec,
    /// Compute threads of the CPU [default: all cores].
    #[arg(long, value_parser = from_one_to(MOST_THREADS))]
    pub(crate) threads: Option<usize>,
    /// Try every operation, but make few steps, and measure small sizes only.
    #[arg(long)]
    pub(crate) quick: bool,
    /// Wait for each kernel, library call and copy on a GPU, so that one that fails is named: slow.
    #[arg(long)]
    pub(crate) debug_sync: bool,
    /// Give each tensor on a GPU memory of its own, as long as its elements, so that compute-sanitizer finds accesses beside it: slow.
    #[arg(long)]
    pub(crate) exact_memory: bool,
    /// Print one JSON object a line on standard output, and nothing else there.
    #[arg(long)]
    pub(crate) json: bool,
}

/// `phalanx doctor`.
#[derive(Args)]
pub(crate) struct DoctorArgs {
    /// Print one JSON object a line on standard output, and nothing else there.
    #[arg(long)]
    pub(crate) json: bool,
}

/// `phalanx top`.
#[derive(Args)]
pub(crate) struct TopArgs {
    /// Seconds from one look to the next.
    #[arg(long, value_name = "SECONDS", default_value = "1", value_parser = crate::top::interval)]
    pub(crate) interval: Duration,
    /// How many looks [default: until it is ended on a terminal, one elsewhere].
    #[arg(long, value_name = "N")]
    pub(crate) looks: Option<u64>,
    /// Print one JSON object a line on standard output, and nothing else there.
    #[arg(long)]
    pub(crate) json: bool,
}

/// `phalanx bench`.
#[derive(Args)]
pub(crate) struct BenchArgs {
    #[command(subcommand)]
    pub(crate) what: Bench,
}

/// What can be measured.
#[derive(Subcommand)]
pub(crate) enum Bench {
    /// One training step, compute only.
    Step(StepArgs),
    /// Images that the loader reads and transforms, with nobody training.
    Loader(LoaderArgs),
    /// All-reduces between ranks of this machine, every result verified.
    Allreduce(AllReduceArgs),
    /// Pipelines: schedules drawn, and a row of equal blocks trained through them.
    Pipeline(PipelineArgs),
    /// From the start of two workers over one all-reduce to their end.
    Launch {
        /// What workers do between their start and their end.
        #[arg(long, value_enum, default_value_t = Errand::AllReduce)]
        errand: Errand,
        /// Workers.
        #[arg(long, default_value_t = 2)]
        workers: usize,
        /// Runs.
        #[arg(long, default_value_t = 20)]
        runs: usize,
        /// Print JSON.
        #[arg(long)]
        json: bool,
    },
    /// What it costs to lose a worker: from its kill to the next finished step.
    Recovery(RecoveryArgs),
    /// A training run at several counts of workers, and how many are worth asking for.
    Scaling(Box<ScalingArgs>),
    /// What a worker of `bench launch` does.
    #[command(hide = true)]
    Hello,
}

/// What workers of `bench launch` do.
#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Errand {
    /// They meet, and sum a number once.
    AllReduce,
    /// Nothing: it is the launcher that is measured.
    Nothing,
}

/// `phalanx chaos`.
#[derive(Args)]
pub(crate) struct ChaosArgs {
    /// What is trained; recipes for CIFAR get images that are made up.
    #[arg(default_value = "mnist-mini")]
    pub(crate) recipe: String,
    /// How many faults.
    #[arg(long, default_value_t = 100)]
    pub(crate) faults: usize,
    /// What the faults, and the run, are functions of.
    #[arg(long, default_value_t = 0)]
    pub(crate) seed: u64,
    /// Several nodes, at least and at most so many: agents on this host, which come, go, and are killed and cut off as well.
    #[arg(long, value_name = "MIN:MAX")]
    pub(crate) nodes: Option<String>,
    /// Workers, of each node where there are several [default: 3, or 1 of each node].
    #[arg(long)]
    pub(crate) workers: Option<usize>,
    /// Samples of a step and worker, or logical shard.
    #[arg(long, default_value_t = 8)]
    pub(crate) batch: usize,
    /// Steps of the run [default: 40 a fault].
    #[arg(long)]
    pub(crate) steps: Option<u64>,
    /// Change the recipe; may be given often. Unless it says something of `parallel`, there are as many logical shards as workers, with
    /// which the weights must be the same bits.
    #[arg(long = "set", value_name = "KEY=VALUE")]
    pub(crate) set: Vec<String>,
    /// Print JSON.
    #[arg(long)]
    pub(crate) json: bool,
}

/// `phalanx bench recovery`.
#[derive(Args)]
pub(crate) struct RecoveryArgs {
    /// What is trained meanwhile, on images that are made up; recipes for MNIST need its files.
    #[arg(long, value_name = "RECIPE", default_value = "cifar10-resnet18")]
    pub(crate) recipe: String,
    /// Workers.
    #[arg(long, default_value_t = 2, value_parser = up_to(MOST_WORKERS))]
    pub(crate) workers: usize,
    /// Samples of a step and worker.
    #[arg(long, default_value_t = 64)]
    pub(crate) batch: usize,
    /// How often a worker is lost.
    #[arg(long, default_value_t = 20)]
    pub(crate) runs: usize,
    /// How it is lost: killed, stopped without being ended, or not at all.
    #[arg(long, value_enum, default_value_t = Loss::Kill)]
    pub(crate) by: Loss,
    /// Print JSON.
    #[arg(long)]
    pub(crate) json: bool,
}

/// `phalanx bench scaling`.
#[derive(Args)]
pub(crate) struct ScalingArgs {
    /// What is trained, on images that are made up; recipes for MNIST need its files.
    #[arg(default_value = "cifar10-resnet18")]
    pub(crate) recipe: String,
    /// Counts of workers.
    #[arg(long, value_name = "N,...", default_value = "1,2,4")]
    pub(crate) workers: String,
    /// Measure the same samples a step, dealt to more workers [default: both].
    #[arg(long)]
    pub(crate) strong: bool,
    /// Measure as many samples for each worker [default: both].
    #[arg(long)]
    pub(crate) weak: bool,
    /// Keep the model from this count, and say how far off it is there; may be given often.
    #[arg(long, value_name = "N")]
    pub(crate) hold_out: Vec<usize>,
    /// Samples of a step: of each worker, or of all of them for --strong.
    #[arg(long, default_value_t = 64)]
    pub(crate) batch: usize,
    /// Compute threads of each worker.
    #[arg(long, default_value_t = 1, value_parser = up_to(MOST_THREADS))]
    pub(crate) threads: usize,
    /// Steps that count, of each run.
    #[arg(long, default_value_t = 40)]
    pub(crate) steps: usize,
    /// Steps that go before them.
    #[arg(long, default_value_t = 10)]
    pub(crate) warm_up: usize,
    /// Runs of each count, in turns.
    #[arg(long, default_value_t = 3)]
    pub(crate) runs: usize,
    /// Change the recipe, as in --set model.dropout=0; may be given often.
    #[arg(long = "set", value_name = "KEY=VALUE")]
    pub(crate) set: Vec<String>,
    /// Submit each run as a job of Slurm. Inside an allocation runs are its steps without this.
    #[arg(long)]
    pub(crate) slurm: bool,
    /// Workers of each node under Slurm, at most [default: all on one].
    #[arg(long, value_name = "N")]
    pub(crate) nproc_per_node: Option<usize>,
    /// Ask for a GPU for each worker of a job.
    #[arg(long, requires = "slurm")]
    pub(crate) gpus: bool,
    /// Where jobs are queued [default: the cluster's default].
    #[arg(long, value_name = "NAME", requires = "slurm")]
    pub(crate) partition: Option<String>,
    /// How long each job may run, as in 10m.
    #[arg(long, value_name = "TIME", requires = "slurm", value_parser = drain::duration)]
    pub(crate) time: Option<Duration>,
    /// Any other option of sbatch, as in --sbatch=--account=lab; may be given often.
    #[arg(long, value_name = "OPTION", requires = "slurm", allow_hyphen_values = true)]
    pub(crate) sbatch: Vec<String>,
    /// How long a job may wait and run before the measurement is given up.
    #[arg(long, value_name = "TIME", default_value = "1d", value_parser = drain::duration)]
    pub(crate) patience: Duration,
    /// Draw the curves into this SVG file, too.
    #[arg(long, value_name = "FILE")]
    pub(crate) svg: Option<PathBuf>,
    /// Print JSON.
    #[arg(long)]
    pub(crate) json: bool,
}

/// How a worker is lost.
#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Loss {
    /// By SIGKILL.
    Kill,
    /// By SIGSTOP.
    Stop,
    /// Not at all: what it costs a step to be ready for it.
    Nothing,
}

/// `phalanx plan`.
#[derive(Args)]
pub(crate) struct PlanArgs {
    /// A GPU of this kind for each worker, none of which needs to be here [default: cores of this machine].
    #[arg(long, value_name = "KIND", value_parser = absent_gpu)]
    pub(crate) gpu: Option<AbsentGpu>,
    /// As if each GPU had so much memory, as in 40GB or 40GiB.
    #[arg(long, value_name = "SIZE", value_parser = memory)]
    pub(crate) memory: Option<u64>,
    /// How many workers there are [default: 1].
    #[arg(long, value_name = "N")]
    pub(crate) workers: Option<usize>,
    /// How long a step of one worker takes, in milliseconds, as `phalanx bench step` tells [default: measured, on cores].
    #[arg(long, value_name = "MS", value_parser = above_zero)]
    pub(crate) step_ms: Option<f64>,
    /// What a worker can send to the others, in GB a second: the busbw of `phalanx bench allreduce`.
    #[arg(long, value_name = "GB/S", value_parser = above_zero)]
    pub(crate) link: Option<f64>,
    /// Print one JSON object a line on standard output.
    #[arg(long)]
    pub(crate) json: bool,
    /// A recipe (a built-in name, or a .toml file) with arguments of `phalanx train`.
    #[arg(trailing_var_arg = true, allow_hyphen_values = true, required = true, value_name = "RECIPE")]
    pub(crate) work: Vec<String>,
}

/// A kind of GPU that is known.
fn absent_gpu(name: &str) -> Result<AbsentGpu, String> {
    let known = AbsentGpu::KNOWN.map(|known| known.name).join(", ");
    AbsentGpu::named(name).ok_or_else(|| format!("must be one of {known}; --memory changes what it has"))
}

/// So many bytes.
fn memory(text: &str) -> Result<u64, String> {
    const UNITS: [(&str, f64); 4] = [("GiB", 1073741824.0), ("MiB", 1048576.0), ("GB", 1e9), ("MB", 1e6)];
    let unit = UNITS.iter().find_map(|(unit, bytes)| Some((text.strip_suffix(unit)?, bytes)));
    let bytes = unit.and_then(|(number, bytes)| Some(number.trim().parse::<f64>().ok()? * bytes));
    let bytes = bytes.filter(|bytes| (1.0..1e18).contains(bytes));
    bytes.map(|bytes| bytes as u64).ok_or_else(|| "must be a size such as 40GB, 40GiB or 500MB".to_owned())
}

/// A number that a time or a rate may be.
fn above_zero(text: &str) -> Result<f64, String> {
    let number = text.parse::<f64>().ok().filter(|number| (1e-6..=1e9).contains(number));
    number.ok_or_else(|| "must be a number above 0, from 0.000001 to a billion".to_owned())
}

/// `phalanx bench step`.
#[derive(Args)]
pub(crate) struct StepArgs {
    /// Which model.
    #[arg(long, value_enum, default_value_t = StepModel::Mnist)]
    pub(crate) model: StepModel,
    /// Samples a step.
    #[arg(long, default_value_t = 64, value_parser = up_to(1 << 20))]
    pub(crate) batch: usize,
    /// Decoder blocks of the model gpt.
    #[arg(long, default_value_t = 6, value_parser = up_to(1 << 12))]
    pub(crate) layers: usize,
    /// Numbers a position of the model gpt.
    #[arg(long, default_value_t = 384, value_parser = up_to(1 << 16))]
    pub(crate) width: usize,
    /// Heads of each attention of the model gpt.
    #[arg(long, default_value_t = 6, value_parser = up_to(1 << 12))]
    pub(crate) heads: usize,
    /// Words of each sample of the model gpt.
    #[arg(long, value_name = "WORDS", default_value_t = 256, value_parser = up_to(1 << 20))]
    pub(crate) seq: usize,
    /// Different words of the model gpt [default: 256, those of bytes].
    #[arg(long, value_name = "N", value_parser = up_to(1 << 24))]
    pub(crate) vocabulary: Option<usize>,
    /// The last layer of the model gpt is its table of words, as GPT-2's.
    #[arg(long)]
    pub(crate) tied: bool,
    /// Height and width of the images, where the model takes any [default: 32 for ResNets].
    #[arg(long, value_name = "PIXELS", value_parser = from_one_to(1 << 13))]
    pub(crate) image: Option<usize>,
    /// cpu, cuda or cuda:N.
    #[arg(long, default_value_t)]
    pub(crate) device: DeviceSpec,
    /// What products are made in.
    #[arg(long, value_enum, default_value_t = BenchPrecision::Float32)]
    pub(crate) precision: BenchPrecision,
    /// Record the passes of a step on a GPU once, and replay them.
    #[arg(long)]
    pub(crate) graphs: bool,
    /// Measure which of the libraries' products and convolutions are the fastest on the GPU, and take those.
    #[arg(long)]
    pub(crate) search: bool,
    /// Compute threads [default: all cores].
    #[arg(long, value_parser = up_to(MOST_THREADS))]
    pub(crate) threads: Option<usize>,
    /// Steps that count; a fifth as many go before them.
    #[arg(long, default_value_t = 500)]
    pub(crate) steps: usize,
    /// Only the forward pass.
    #[arg(long)]
    pub(crate) forward_only: bool,
    /// Print where the time goes, kernel by kernel.
    #[arg(long)]
    pub(crate) profile: bool,
    /// Print JSON.
    #[arg(long)]
    pub(crate) json: bool,
}

/// `phalanx bench loader`.
#[derive(Args)]
pub(crate) struct LoaderArgs {
    /// Which data set; images are made up where CIFAR isn't found.
    #[arg(long, value_name = "NAME", default_value = "cifar10")]
    pub(crate) data_name: String,
    /// Where it lies [default: where it is found].
    #[arg(long, value_name = "DIR")]
    pub(crate) data: Option<PathBuf>,
    /// Threads that prepare batches; 0 prepares them where they are taken.
    #[arg(long, default_value_t = 0)]
    pub(crate) threads: usize,
    /// Images a batch.
    #[arg(long, default_value_t = 64)]
    pub(crate) batch: usize,
    /// Passes over all images that count; one more goes before them.
    #[arg(long, default_value_t = 5)]
    pub(crate) passes: usize,
    /// Change what is done to the images, as in --set data.crop_padding=4; may be given often.
    #[arg(long = "set", value_name = "KEY=VALUE")]
    pub(crate) set: Vec<String>,
    /// Print JSON.
    #[arg(long)]
    pub(crate) json: bool,
}

/// `phalanx bench pipeline`.
#[derive(Args)]
pub(crate) struct PipelineArgs {
    /// gpipe, 1f1b, interleaved or zb-h1.
    #[arg(long, default_value_t = ScheduleKind::OneFOneB)]
    pub(crate) schedule: ScheduleKind,
    /// Ranks of the pipeline.
    #[arg(long, value_name = "P", default_value_t = 2, value_parser = up_to(512))]
    pub(crate) stages: usize,
    /// Stages of each rank, of an interleaved schedule [default: 2].
    #[arg(long, value_name = "V")]
    pub(crate) chunks: Option<usize>,
    /// Micro-batches of a step.
    #[arg(long, value_name = "M", default_value_t = 8, value_parser = up_to(1 << 12))]
    pub(crate) micro_batches: usize,
    /// Only draw the schedule, with all parts of a stage's work equally long.
    #[arg(long)]
    pub(crate) draw: bool,
    /// Write the drawing to this SVG file, beside --draw, or what was measured, beside --devices.
    #[arg(long, value_name = "FILE")]
    pub(crate) svg: Option<PathBuf>,
    /// Measure devices of one process, a thread each, in the place of processes.
    #[arg(long)]
    pub(crate) devices: bool,
    /// Blocks of the row: a dense layer and a ReLU each.
    #[arg(long, default_value_t = 8)]
    pub(crate) blocks: usize,
    /// Have each block wait so long forward, and for each of both gradients, in the place of a dense layer: all blocks are equal then,
    /// and any number of stages is at work at once, so what is idle is the schedule's or the messages'.
    #[arg(long, value_name = "MS")]
    pub(crate) block_ms: Option<f64>,
    /// Inputs and outputs of each block.
    #[arg(long, default_value_t = 1024, value_parser = up_to(1 << 16))]
    pub(crate) width: usize,
    /// Samples of a step.
    #[arg(long, default_value_t = 512)]
    pub(crate) batch: usize,
    /// Steps that count; two more go before them.
    #[arg(long, default_value_t = 10)]
    pub(crate) steps: usize,
    /// Print JSON.
    #[arg(long)]
    pub(crate) json: bool,
}

/// `phalanx bench allreduce`.
#[derive(Args)]
pub(crate) struct AllReduceArgs {
    /// Ranks: a number, or 2..8 for each from 2 to 8; a worker of a run takes the ranks of its run.
    #[arg(long, value_name = "N", default_value = "2")]
    pub(crate) nproc: String,
    /// Bytes of float32 to be summed, with K or M for powers of 1024.
    #[arg(long, value_name = "BYTES,...", default_value = "4,16,64,256,1K,4K,16K,64K,256K,1M,4M,16M,64M")]
    pub(crate) sizes: String,
    /// Refuse to measure over anything else [default: shared memory where it can be had].
    #[arg(long, value_enum)]
    pub(crate) transport: Option<BenchTransport>,
    /// Measure this algorithm: direct, ring, halving, doubling, tree, star or hierarchical; auto is what is best for each size, whatever
    /// PHALANX_ALLREDUCE says.
    #[arg(long, value_name = "NAME")]
    pub(crate) algorithm: Option<String>,
    /// Where the slices lie: as a model's gradients do, or as any slice [default: shared].
    #[arg(long, value_enum)]
    pub(crate) buffer: Option<BenchBuffer>,
    /// Where ranks hold their slices: cpu; cuda has the GPUs of local ranks sum what gradients are summed in by NCCL, beside NCCL left
    /// alone, ten at a time, and cuda:N that GPU of a single rank.
    #[arg(long, value_name = "DEVICE", default_value = "cpu")]
    pub(crate) device: DeviceSpec,
    /// All-reduces that count; a fifth as many go before them [default: as many as take 1024M in all, from 20 to 1000].
    #[arg(long)]
    pub(crate) iters: Option<usize>,
    /// Print JSON on standard output, beside the table.
    #[arg(long)]
    pub(crate) json: bool,
}

/// What `bench allreduce` measures.
#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum BenchTransport {
    /// Processes that share memory.
    Memory,
    /// Processes, over TCP.
    Tcp,
    /// Threads of one process.
    Threads,
}

/// Where the slices of `bench allreduce` lie.
#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum BenchBuffer {
    /// Where all ranks of a host see them, as gradients do.
    Shared,
    /// In memory of each rank's own.
    Plain,
}

/// What `bench step` makes products in; float16 needs a scaled loss, which is the trainer's.
#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum BenchPrecision {
    Float32,
    /// Float32 with factors of 10 bits of fraction, on GPUs.
    Tf32,
    Bfloat16,
}

/// Models that `bench step` knows.
#[derive(Clone, Copy, ValueEnum)]
pub(crate) enum StepModel {
    /// The tutorials' MNIST network.
    Mnist,
    /// The HPC tutorial's MNIST network.
    MnistHpc,
    /// ResNet-18 of 10 classes, as the deeper ones.
    Resnet18,
    Resnet34,
    Resnet50,
    Resnet101,
    Resnet152,
    /// The smaller network of the recipe cifar10-fast.
    Resnet9,
    /// A decoder as GPT-2's, of bytes, with a last layer of its own and without dropout.
    Gpt,
}

/// `phalanx data`.
#[derive(Args)]
pub(crate) struct DataArgs {
    #[command(subcommand)]
    pub(crate) what: Data,
}

/// What can be done with data sets.
#[derive(Subcommand)]
pub(crate) enum Data {
    /// Name the data sets.
    List,
    /// Get a data set into the cache.
    Fetch {
        /// Which.
        name: String,
    },
    /// Check every file of a data set against its SHA-256.
    Verify {
        /// Which.
        name: String,
        /// Where it lies [default: where it is found].
        #[arg(long, value_name = "DIR")]
        data: Option<PathBuf>,
    },
}

/// `phalanx flight`.
#[derive(Args)]
pub(crate) struct FlightArgs {
    /// A run directory, its folder flight, or that of one generation.
    pub(crate) dir: PathBuf,
    /// Print the records themselves, a line of JSON each.
    #[arg(long)]
    pub(crate) json: bool,
}

/// `phalanx checkpoint`.
#[derive(Args)]
pub(crate) struct CheckpointArgs {
    #[command(subcommand)]
    pub(crate) what: Checkpoint,
}

/// What can be done with checkpoints.
#[derive(Subcommand)]
pub(crate) enum Checkpoint {
    /// Tell how far the run was, and what is in each file.
    Show {
        /// A run directory, its folder checkpoints, or one checkpoint.
        dir: PathBuf,
        /// Print JSON.
        #[arg(long)]
        json: bool,
    },
    /// Write it once more in another number of parts; with one, the model is a single file of weights.
    Convert {
        /// A run directory, its folder checkpoints, or one checkpoint; of several the newest is taken.
        dir: PathBuf,
        /// Into how many parts.
        #[arg(long, value_name = "N", default_value_t = 1)]
        parts: usize,
        /// The folder of checkpoints to write it into.
        #[arg(long, value_name = "DIR")]
        out: PathBuf,
        /// Print JSON.
        #[arg(long)]
        json: bool,
    },
    /// Read every byte and hold it against its checksum.
    Verify {
        /// A run directory, its folder checkpoints, or one checkpoint.
        dir: PathBuf,
        /// Print JSON.
        #[arg(long)]
        json: bool,
    },
}

/// The command line asks for what can't be.
#[derive(Debug)]
pub(crate) struct WrongUsage(pub(crate) String);

impl fmt::Display for WrongUsage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for WrongUsage {}

/// What was typed; exits with code 2 and a usage line if it makes no sense.
pub(crate) fn parse() -> Command {
    let matches = command().try_get_matches().unwrap_or_else(|error| dashed(error).exit());
    Cli::from_arg_matches(&matches).unwrap_or_else(|error| error.exit()).command
}

/// All commands, as they are typed.
fn command() -> clap::Command {
    let run = |command: clap::Command| underscored(command).mut_args(defaulted);
    negative_values(Cli::command().mut_subcommand("run", run).mut_subcommand("train", underscored))
}

/// What `phalanx train` makes of these words, without starting anything.
pub(crate) fn parse_train(words: &[String]) -> Result<TrainArgs, WrongUsage> {
    let all = ["phalanx", "train"].into_iter().chain(words.iter().map(String::as_str));
    let parsed = command().try_get_matches_from(all).and_then(|matches| Cli::from_arg_matches(&matches));
    match parsed.map_err(|error| dashed(error).to_string()) {
        Ok(Cli { command: Command::Train(args) }) => Ok(*args),
        Ok(_) => unreachable!("the second word is train"),
        // A line of its own says what kind of text it is, as ours does.
        Err(text) => Err(WrongUsage(text.trim_start_matches("error: ").trim_end().to_owned())),
    }
}

/// Variables that `--forward-env` names, each with its value here.
pub(crate) fn forwarded(names: &[String]) -> Result<Vec<(String, String)>, WrongUsage> {
    let value = |name: &String| {
        let unset = |_| WrongUsage(format!("--forward-env {name}: isn't set here\nhint: export {name}=..."));
        Ok((name.clone(), std::env::var(name).map_err(unset)?))
    };
    names.iter().map(value).collect()
}

/// A number up to this. Where 0 makes no sense, whoever takes it says so.
fn up_to(most: usize) -> RangedU64ValueParser<usize> {
    RangedU64ValueParser::new().range(..=most as u64)
}

/// The same from 1 on.
fn from_one_to(most: usize) -> RangedU64ValueParser<usize> {
    RangedU64ValueParser::new().range(1..=most as u64)
}

/// `-1` is a value, which is refused with the name of its flag, and no flag that nobody knows.
fn negative_values(command: clap::Command) -> clap::Command {
    command.allow_negative_numbers(true).mut_subcommands(negative_values)
}

/// A file that was named, if it has no more bytes than that; a device would never end.
pub(crate) fn read_up_to(most: u64, file: &Path) -> io::Result<Option<Vec<u8>>> {
    let mut bytes = Vec::new();
    let read = File::open(file)?.take(most.saturating_add(1)).read_to_end(&mut bytes)?;
    Ok((read as u64 <= most).then_some(bytes))
}

/// Writes a shell's completions.
pub(crate) fn completions(shell: Shell) -> anyhow::Result<u8> {
    let mut text = Vec::new();
    clap_complete::generate(shell, &mut command(), "phalanx", &mut text);
    print(String::from_utf8_lossy(&text).trim_end());
    Ok(0)
}

/// torchrun takes its flags with underscores as well.
fn underscored(command: clap::Command) -> clap::Command {
    command.mut_args(|arg| match arg.get_long().map(|long| long.replace('-', "_")) {
        Some(name) if name.contains('_') => arg.alias(name),
        _ => arg,
    })
}

/// A flag that is near the one that was typed is named as help names it, with dashes.
fn dashed(mut error: clap::Error) -> clap::Error {
    if let Some(ContextValue::String(flag)) = error.get(ContextKind::SuggestedArg) {
        let flag = flag.replace('_', "-");
        error.insert(ContextKind::SuggestedArg, ContextValue::String(flag));
    }
    error
}

/// What isn't typed is looked for in `PET_<FLAG>`, as torchrun does. One that is set to nothing is as if it weren't set.
fn defaulted(arg: Arg) -> Arg {
    let Some(long) = arg.get_long() else { return arg };
    let variable = format!("PET_{}", long.replace('-', "_").to_uppercase());
    if std::env::var_os(&variable).is_none_or(|value| value.is_empty()) {
        return arg;
    }
    let arg = arg.env(variable).hide_env(true);
    if matches!(arg.get_action(), ArgAction::SetTrue) {
        arg.value_parser(FalseyValueParser::new())
    } else {
        arg
    }
}
