//! What can be typed behind `phalanx pool`.

use crate::work::WorkArgs;
use clap::{Args, Subcommand};
use std::path::PathBuf;

/// `phalanx pool`.
#[derive(Args)]
pub(crate) struct PoolArgs {
    #[command(subcommand)]
    pub(crate) what: Pool,
}

/// What can be done with a pool.
#[derive(Subcommand)]
pub(crate) enum Pool {
    /// Be the pool: decide which jobs run, until SIGTERM or Ctrl-C.
    ///
    /// What runs goes on without it, and it begins again where it was.
    Serve(ServeArgs),
    /// Be a node of a pool: start workers here as it says, until SIGTERM or Ctrl-C.
    ///
    /// Then jobs make room as they do for others; with a second signal they get SIGTERM.
    Node(NodeArgs),
    /// Have something run once its queue may hold so many slots.
    Submit(Box<SubmitArgs>),
    /// Show queues, nodes and jobs, and why those wait that do.
    Show {
        #[command(flatten)]
        to: To,
        /// This job alone.
        job: Option<u64>,
        /// Print one JSON object on standard output.
        #[arg(long)]
        json: bool,
    },
    /// Wait for the end of a job, with its exit code: 0 if it is done, else 1.
    Wait {
        #[command(flatten)]
        to: To,
        /// Its number.
        job: u64,
        /// Print one JSON object a line on standard output.
        #[arg(long)]
        json: bool,
    },
    /// End jobs that aren't wanted any more.
    Cancel {
        #[command(flatten)]
        to: To,
        /// Their numbers.
        #[arg(required = true)]
        jobs: Vec<u64>,
        /// Print one JSON object a line on standard output.
        #[arg(long)]
        json: bool,
    },
}

/// Where the pool is.
#[derive(Args)]
pub(crate) struct To {
    /// Where the pool is.
    #[arg(
        long,
        value_name = "HOST:PORT",
        default_value = "127.0.0.1:29390",
        env = "PHALANX_POOL",
        hide_env = true
    )]
    pub(crate) pool: String,
    /// A file with the secret that the pool, its nodes and whoever asks have alike [default: what PHALANX_SECRET_FILE names, else
    /// phalanx/secret in the user's configuration folder, made on first use].
    #[arg(long, value_name = "FILE")]
    pub(crate) secret_file: Option<PathBuf>,
}

/// `phalanx pool serve`.
#[derive(Args)]
pub(crate) struct ServeArgs {
    /// Where to listen: an address that nodes and whoever asks can reach. PHALANX_POOL says it to all of them.
    #[arg(
        long,
        value_name = "ADDRESS:PORT",
        default_value = "127.0.0.1:29390",
        env = "PHALANX_POOL",
        hide_env = true
    )]
    pub(crate) listen: String,
    /// The queues, as [queues.NAME] with quota, limit and weight in a TOML file [default: one, called default].
    #[arg(long, value_name = "FILE")]
    pub(crate) queues: Option<PathBuf>,
    /// Where to keep the journal [default: phalanx/pool in the user's folder for such things, ~/.local/state].
    #[arg(long, value_name = "DIR")]
    pub(crate) dir: Option<PathBuf>,
    /// As that of its nodes.
    #[arg(long, value_name = "FILE")]
    pub(crate) secret_file: Option<PathBuf>,
}

/// `phalanx pool node`.
#[derive(Args)]
pub(crate) struct NodeArgs {
    #[command(flatten)]
    pub(crate) to: To,
    /// Workers that this machine has room for: a number, gpu for one a GPU, cpu for one a core, or auto. If there are as many GPUs
    /// or more, each has its own.
    #[arg(long, value_name = "N", default_value = "auto")]
    pub(crate) slots: String,
    /// What it is called [default: the machine's name].
    #[arg(long, value_name = "NAME")]
    pub(crate) name: Option<String>,
    /// The address at which other nodes reach this one [default: that from which it reaches the pool].
    #[arg(long, value_name = "ADDRESS")]
    pub(crate) local_addr: Option<String>,
}

/// `phalanx pool submit`.
#[derive(Args)]
pub(crate) struct SubmitArgs {
    #[command(flatten)]
    pub(crate) to: To,
    /// The queue.
    #[arg(long, value_name = "NAME", default_value = "default")]
    pub(crate) queue: String,
    /// Workers, each of which takes a slot: a number, or MIN:MAX for a job that begins with MIN, grows where there is room and shrinks
    /// where others need it.
    #[arg(long, value_name = "N", default_value = "1")]
    pub(crate) workers: String,
    /// How many of them have to be on one node, and come and go together.
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub(crate) together: u32,
    /// Those of a high one begin first, and have jobs of a lower one in the same queue stopped if need be.
    #[arg(long, value_name = "N", default_value_t = 0, allow_negative_numbers = true)]
    pub(crate) priority: i32,
    /// What it is called [default: the recipe or program].
    #[arg(long, value_name = "NAME")]
    pub(crate) name: Option<String>,
    /// Where it keeps its files, with its number for %j [default: runs/NAME-%j].
    #[arg(long, value_name = "DIR")]
    pub(crate) out: Option<String>,
    /// How often workers that fail are started again.
    #[arg(long, value_name = "N", default_value_t = 3)]
    pub(crate) max_restarts: u32,
    /// Ask a program to make room by SIGUSR1, which those with our trainer heed: they keep a checkpoint and end with 75. Others get
    /// SIGTERM, and so do these if they don't end; recipes are asked like this.
    #[arg(long)]
    pub(crate) drain: bool,
    /// Hand on a variable of this environment; may be given often.
    #[arg(long, value_name = "NAME")]
    pub(crate) forward_env: Vec<String>,
    /// Wait for its end, as `phalanx pool wait` does.
    #[arg(long)]
    pub(crate) wait: bool,
    #[command(flatten)]
    pub(crate) typed: WorkArgs,
}
