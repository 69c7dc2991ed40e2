//! The flags of `phalanx run`: torchrun's, and few of ours.

use super::hosts::HostsArgs;
use clap::{Args, ValueEnum};
use serde::{Deserialize, Serialize};
use std::ffi::OsString;
use std::path::PathBuf;

/// `phalanx run`; hosts of `--hosts` get it as it was typed.
#[derive(Args, Clone, Debug, Serialize, Deserialize)]
pub(crate) struct RunArgs {
    /// Workers on this machine: a number, `cpu` (one a core), `gpu` (one a GPU), or `auto` (one a GPU if there are any, else one
    /// a core).
    #[arg(long, default_value = "1", value_name = "N")]
    pub(crate) nproc_per_node: String,
    /// Machines (nodes), each of which runs this command, as N or MIN:MAX: with fewer than MAX the run goes on, and more may come
    /// [default: 1; in a step of Slurm of one task a node, its nodes].
    #[arg(long, value_name = "N")]
    pub(crate) nnodes: Option<String>,
    /// So many machines more may come and stand by: one of them takes the place of one that is lost. The same on all nodes. In a step
    /// of Slurm and with --hosts the last ones stand by, else those that come last, or were told to.
    #[arg(long, default_value_t = 0, value_name = "N")]
    pub(crate) spares: u32,
    /// This machine is one of those that stand by, as long as others come in time.
    #[arg(long)]
    pub(crate) stand_by: bool,
    /// Which node this is, from 0 on, where it matters; 0 hosts the coordinator then [default: as they come].
    #[arg(long, value_name = "I")]
    pub(crate) node_rank: Option<u32>,
    /// Host for the program's own meeting point [default: 127.0.0.1]; with several nodes and no --rdzv-endpoint, the first node.
    #[arg(long, value_name = "HOST")]
    pub(crate) master_addr: Option<String>,
    /// Port for the program's own meeting point [default: a free one, another for each start].
    #[arg(long, value_name = "PORT")]
    pub(crate) master_port: Option<u16>,
    /// A run of this machine alone, whatever is said of how machines meet.
    #[arg(long)]
    pub(crate) standalone: bool,
    /// What the run is called; all its nodes say the same [default: in a step of Slurm, its job and step].
    #[arg(long, value_name = "ID")]
    pub(crate) rdzv_id: Option<String>,
    /// How machines meet: static and c10d are the same here; etcd and etcd-v2 only go for one machine.
    #[arg(long, value_name = "NAME")]
    pub(crate) rdzv_backend: Option<String>,
    /// Where machines meet: the first node, and a port that is free there [default port: 29400; in a step of Slurm, its first node and
    /// a port of its own]. The same on all nodes. For one machine only `static` goes there: it becomes the program's own meeting point.
    #[arg(long, value_name = "HOST[:PORT]")]
    pub(crate) rdzv_endpoint: Option<String>,
    /// How patiently machines meet, in seconds: join_timeout=600 for as many as are needed, last_call_timeout=3 for more. A machine that is
    /// silent for 2 s is taken for lost, or for keep_alive_interval times keep_alive_max_attempt. With is_host=true this machine
    /// is where they meet, and with false it never is.
    #[arg(long, value_name = "KEY=VALUE,...")]
    pub(crate) rdzv_conf: Option<String>,
    /// A file with the secret that all nodes share, made with `head -c32 /dev/urandom | xxd -p -c64` and mode 600 [default: what
    /// PHALANX_SECRET_FILE names, else phalanx/secret in the user's configuration folder, made on first use].
    #[arg(long, value_name = "FILE")]
    pub(crate) secret_file: Option<PathBuf>,
    /// Encrypt what goes over TCP, as PHALANX_TLS=1 does: between nodes, to the coordinator, and between workers that are programs
    /// of ours. The same on all nodes.
    #[arg(long)]
    pub(crate) tls: bool,
    /// Start in spite of what nodes differ in, as PHALANX_UNCHECKED=1 does: what the look at --hosts has found, clocks, and folders that
    /// aren't shared.
    #[arg(long)]
    pub(crate) unchecked: bool,
    /// The address at which other nodes reach this one [default: that from which it reaches the first node].
    #[arg(long, value_name = "ADDRESS")]
    pub(crate) local_addr: Option<String>,
    /// How often workers are started again after a failure: all of them, or where the others go on in place, those that failed.
    #[arg(long, default_value_t = 0, value_name = "N")]
    pub(crate) max_restarts: usize,
    /// Accepted, and without effect: nothing is polled, a failure is seen at once.
    #[arg(long, value_name = "SECONDS")]
    pub(crate) monitor_interval: Option<f64>,
    /// Role of the workers, for the environment.
    #[arg(long, default_value = "default")]
    pub(crate) role: String,
    /// PROGRAM is a Python module.
    #[arg(short, long)]
    pub(crate) module: bool,
    /// PROGRAM is not Python, whatever its name.
    #[arg(long, conflicts_with = "module")]
    pub(crate) no_python: bool,
    /// PROGRAM is a Python script, whatever its name.
    #[arg(long, conflicts_with_all = ["module", "no_python"])]
    pub(crate) run_path: bool,
    /// Hand `--local-rank=N` to the program before its arguments, as torch.distributed.launch does.
    #[arg(long)]
    pub(crate) pass_local_rank: bool,
    /// Don't: programs read LOCAL_RANK (torch.distributed.launch's flag, and the default here).
    #[arg(long, conflicts_with = "pass_local_rank")]
    pub(crate) use_env: bool,
    /// Tell every worker that its LOCAL_RANK is 0, and let it see one GPU.
    #[arg(long)]
    pub(crate) virtual_local_rank: bool,
    /// Keep workers to processors that are near to each other; `node` and `socket` are without effect on a machine of one NUMA node.
    #[arg(long, value_enum, value_name = "HOW")]
    pub(crate) numa_binding: Option<Binding>,
    /// Where to keep the logs and whatever the program saves [default: runs/PROGRAM-RUN_ID].
    #[arg(long, value_name = "DIR")]
    pub(crate) out: Option<PathBuf>,
    /// Where to keep the logs, as logs/GENERATION/RANK.out and .err; stands for --out too if that isn't given.
    #[arg(long, value_name = "DIR")]
    pub(crate) log_dir: Option<PathBuf>,
    /// Write the exit code of the run into this file, as every agent does that learns how the whole run ended: one that is lost, or left
    /// the run, has a code of its own, which srun may take for the run's.
    #[arg(long, value_name = "FILE")]
    pub(crate) exit_code_to: Option<PathBuf>,
    /// Don't show standard output (1), standard error (2) or both (3), of all workers or by local rank as in 0:1,1:3; logs have
    /// them in any case.
    #[arg(short, long, value_name = "STREAMS")]
    pub(crate) redirects: Option<String>,
    /// Show these streams all the same, in the same words; whatever isn't redirected is shown.
    #[arg(short, long, value_name = "STREAMS")]
    pub(crate) tee: Option<String>,
    /// Show only these workers' lines, as in 0,2.
    #[arg(long, value_name = "RANK,...")]
    pub(crate) local_ranks_filter: Option<String>,
    /// The worker that reads this command's standard input, for programs that are given something there and for debuggers
    /// (`breakpoint()`): on a terminal it is in the foreground, writes there itself, and has Ctrl-C for itself; others read nothing.
    #[arg(long, value_name = "LOCAL_RANK")]
    pub(crate) stdin: Option<usize>,
    /// What stands before each line, with ${role_name}, ${local_rank}, ${rank} and ${hostname} [default: "[rank${rank}]: "].
    #[arg(long, value_name = "TEXT", conflicts_with = "no_prefix")]
    pub(crate) log_line_prefix_template: Option<String>,
    /// Show the workers' lines as they are, without their rank.
    #[arg(long)]
    pub(crate) no_prefix: bool,
    /// Where the time (UTC) stands before each line: in the logs, there and on the console, or nowhere, where logs are to hold
    /// what the workers write byte for byte.
    #[arg(long, value_enum, value_name = "WHERE", default_value_t = Times::Logs)]
    pub(crate) log_timestamps: Times,
    /// The signals that end the run after the workers had them.
    #[arg(long, value_name = "NAME,...", default_value = "SIGTERM,SIGINT,SIGHUP,SIGQUIT")]
    pub(crate) signals_to_handle: String,
    /// Seconds from SIGTERM to SIGKILL.
    #[arg(
        long,
        default_value_t = 30.0,
        value_name = "SECONDS",
        env = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT",
        hide_env = true
    )]
    pub(crate) shutdown_timeout: f64,
    #[command(flatten)]
    pub(crate) idle: Idle,
    #[command(flatten)]
    #[serde(skip)]
    pub(crate) hosts: HostsArgs,
    /// The Python of programs that need one, where it isn't to be found by the environment of this process.
    #[arg(skip)]
    pub(crate) python: Option<OsString>,
    /// How long a worker may make no progress before it is taken to hang and killed, as a failed one: off, seconds, or seconds by section as
    /// in start=600,step=60,evaluation=60,checkpoint=900. For programs with our library; as PHALANX_HANG_TIMEOUT does [default:
    /// start=600, checkpoint=900, step and evaluation 60 or 50 times the longest so far, and 600 for the first].
    #[arg(long, value_name = "LIMITS")]
    pub(crate) hang_timeout: Option<String>,
    /// The program and its arguments; a .py program runs with the active Python. Its standard input is empty but for that of --stdin's
    /// worker.
    #[arg(trailing_var_arg = true, required = true, value_name = "PROGRAM")]
    pub(crate) program: Vec<OsString>,
}

/// Flags of torchrun that change nothing here, or are refused.
#[derive(Args, Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Idle {
    /// Workers are always fresh processes.
    #[arg(long, hide = true, value_parser = ["spawn", "fork", "forkserver"])]
    pub(crate) start_method: Option<String>,
    #[arg(long, hide = true)]
    pub(crate) event_log_handler: Option<String>,
    #[arg(long, hide = true)]
    pub(crate) duplicate_stdout_filters: Option<String>,
    #[arg(long, hide = true)]
    pub(crate) duplicate_stderr_filters: Option<String>,
    #[arg(long, hide = true)]
    pub(crate) logs_specs: Option<String>,
}

/// What `--log-timestamps` may be.
#[derive(Clone, Copy, Debug, ValueEnum, Serialize, Deserialize)]
pub(crate) enum Times {
    Logs,
    All,
    None,
}

/// What `--numa-binding` may be.
#[derive(Clone, Copy, Debug, ValueEnum, Serialize, Deserialize)]
pub(crate) enum Binding {
    /// All processors of a node.
    Node,
    /// All processors of a socket.
    Socket,
    /// Cores that no other worker has.
    Exclusive,
    /// Cores that share a cache.
    CoreComplex,
}
