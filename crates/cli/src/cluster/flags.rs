//! What can be typed behind `phalanx cluster`.

use clap::{Args, Subcommand, ValueEnum};
use std::path::PathBuf;

/// `phalanx cluster`.
#[derive(Args)]
pub(crate) struct ClusterArgs {
    #[command(subcommand)]
    pub(crate) what: Cluster,
}

/// Where clusters are made.
#[derive(Subcommand)]
pub(crate) enum Cluster {
    /// Amazon's cloud, by AWS ParallelCluster 3.
    Aws {
        #[command(subcommand)]
        what: Aws,
    },
}

/// What can be done with a configuration.
#[derive(Subcommand)]
pub(crate) enum Aws {
    /// Write the configuration of a cluster, and say what comes next. Nothing is created, and no account is needed.
    Init(Box<InitArgs>),
    /// Check a configuration by the rules of ParallelCluster 3.16, without an account; the exit code is 1 if there is an error.
    Check {
        /// The configuration, usually config.yaml.
        file: PathBuf,
        /// Print one JSON object a line on standard output.
        #[arg(long)]
        json: bool,
    },
}

/// `phalanx cluster aws init`.
#[derive(Args)]
pub(crate) struct InitArgs {
    /// The region, as in us-east-1.
    #[arg(long)]
    pub(crate) region: String,
    /// The type of the nodes that compute, as in g4dn.metal.
    #[arg(long, value_name = "TYPE")]
    pub(crate) instance: String,
    /// How many are always on, and the most there may be, as in 0:8; those between come when jobs need them.
    #[arg(long, value_name = "MIN:MAX", default_value = "0:2")]
    pub(crate) nodes: String,
    /// The folder that all nodes share.
    #[arg(long, value_enum, default_value_t = Storage::Fsx)]
    pub(crate) storage: Storage,
    /// Its size in GiB, where it has one.
    #[arg(long, value_name = "GIB")]
    pub(crate) storage_size: Option<u32>,
    /// The type of the node that people log in to.
    #[arg(long, value_name = "TYPE", default_value = "m6i.2xlarge")]
    pub(crate) head_instance: String,
    /// The subnet of that node, which has to be reached from outside.
    #[arg(long, value_name = "SUBNET")]
    pub(crate) head_subnet: Option<String>,
    /// The subnet of the others.
    #[arg(long, value_name = "SUBNET")]
    pub(crate) compute_subnet: Option<String>,
    /// The name of the key pair to log in with.
    #[arg(long, value_name = "NAME")]
    pub(crate) key: Option<String>,
    /// The addresses from which people may log in, as in 203.0.113.0/24 [default: all].
    #[arg(long, value_name = "CIDR")]
    pub(crate) allowed_ips: Option<String>,
    /// The operating system.
    #[arg(long, default_value = "alinux2023")]
    pub(crate) os: String,
    /// Take spare capacity, which may be taken back.
    #[arg(long)]
    pub(crate) spot: bool,
    /// What the cluster is called, in the next steps.
    #[arg(long, default_value = "phalanx")]
    pub(crate) name: String,
    /// The file to write.
    #[arg(long, value_name = "FILE", default_value = "config.yaml")]
    pub(crate) out: PathBuf,
    /// Write over a file that is there.
    #[arg(long)]
    pub(crate) force: bool,
    /// Print the configuration, and write nothing.
    #[arg(long)]
    pub(crate) dry_run: bool,
}

/// Folders that nodes can share.
#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Storage {
    /// FSx for Lustre: fast, from 1200 GiB.
    Fsx,
    /// EFS: grows with what is in it.
    Efs,
    /// A disk of the head node.
    Ebs,
}
