//! Writing the configuration of a cluster.

use super::flags::{InitArgs, Storage};
use super::instances::{gpus, has_efa};
use super::rules::{Finding, check};

/// What stands where something has to be filled in.
const FILL_IN: &str = "FILL-IN";
/// The most nodes of a queue that ParallelCluster was told of before it refuses; a typing error is likelier.
const MOST_NODES: u32 = 1000;

/// A cluster of one queue of one type of nodes.
pub(super) struct Config<'a> {
    args: &'a InitArgs,
    least: u32,
    most: u32,
    size: u32,
}

/// What was typed, checked.
pub(super) fn config(args: &InitArgs) -> Result<Config<'_>, String> {
    let wrong = || format!("--nodes {}: must be how many are always on and the most, as in 0:8", args.nodes);
    let (least, most) = args.nodes.split_once(':').unwrap_or((&args.nodes, &args.nodes));
    let (least, most): (u32, u32) = (least.parse().map_err(|_| wrong())?, most.parse().map_err(|_| wrong())?);
    if most == 0 || least > most || most > MOST_NODES {
        return Err(wrong());
    }
    for (flag, value) in [("--instance", &args.instance), ("--head-instance", &args.head_instance)] {
        let is_type =
            value.split_once('.').is_some_and(|(family, size)| !family.is_empty() && !size.is_empty());
        if !is_type || !value.chars().all(|c| c.is_ascii_alphanumeric() || "-.".contains(c)) {
            return Err(format!("{flag} {value}: must be a type of instances, as in g4dn.metal"));
        }
    }
    let plain = |flag: &str, value: &str, more: &str| match value
        .chars()
        .all(|c| c.is_ascii_alphanumeric() || more.contains(c))
    {
        true if !value.is_empty() => Ok(()),
        _ => Err(format!("{flag} {value:?}: must be letters, digits and {more:?}")),
    };
    plain("--region", &args.region, "-")?;
    plain("--name", &args.name, "-")?;
    plain("--os", &args.os, "-")?;
    for (flag, value) in [("--head-subnet", &args.head_subnet), ("--compute-subnet", &args.compute_subnet)] {
        value.as_ref().map_or(Ok(()), |value| plain(flag, value, "-"))?;
    }
    args.key.as_ref().map_or(Ok(()), |key| plain("--key", key, "-_. "))?;
    args.allowed_ips.as_ref().map_or(Ok(()), |ips| plain("--allowed-ips", ips, "./-"))?;
    let size = args.storage_size.unwrap_or(if args.storage == Storage::Fsx { 1200 } else { 200 });
    if args.storage == Storage::Fsx && size != 1200 && !size.is_multiple_of(2400) || size == 0 {
        return Err(format!("--storage-size {size}: FSx for Lustre has 1200, or a multiple of 2400 GiB"));
    }
    let config = Config { args, least, most, size };
    // What is still to be filled in is as it should be.
    let filled =
        config.text().replace(&format!("subnet-{FILL_IN}"), "subnet-00000000").replace(FILL_IN, "key");
    match check(&filled).into_iter().find(|finding| finding.is_error) {
        Some(Finding { path, why, .. }) => Err(format!("{}: {why}", flag_of(&path))),
        None => Ok(config),
    }
}

/// What was typed for a key, or the key.
fn flag_of(path: &str) -> &str {
    match path {
        "Image.Os" => "--os",
        "HeadNode.Networking.SubnetId" => "--head-subnet",
        "HeadNode.Ssh.AllowedIps" => "--allowed-ips",
        _ if path.ends_with("Networking.SubnetIds") => "--compute-subnet",
        _ => path,
    }
}

impl Config<'_> {
    /// The file.
    pub(super) fn text(&self) -> String {
        let Config { args, least, most, size } = self;
        let subnet = |given: &Option<String>| given.clone().unwrap_or_else(|| format!("subnet-{FILL_IN}"));
        let key = args.key.as_deref().unwrap_or(FILL_IN);
        let allowed =
            args.allowed_ips.as_ref().map(|ips| format!("    AllowedIps: {ips}\n")).unwrap_or_default();
        let capacity = if args.spot { "      CapacityType: SPOT\n" } else { "" };
        let efa = has_efa(&args.instance).unwrap_or(false);
        let adapter = if efa { "          Efa:\n            Enabled: true\n" } else { "" };
        let resource: String = args.instance.chars().map(|c| if c == '.' { '-' } else { c }).collect();
        let storage = match args.storage {
            Storage::Fsx => format!("  - Name: shared\n    MountDir: /shared\n    StorageType: FsxLustre\n    FsxLustreSettings:\n      StorageCapacity: {size}\n      DeploymentType: SCRATCH_2\n      # Delete the data with the cluster; Retain keeps both data and costs.\n      DeletionPolicy: Delete\n"),
            Storage::Efs => "  - Name: shared\n    MountDir: /shared\n    StorageType: Efs\n    EfsSettings:\n      Encrypted: true\n      # Delete the data with the cluster; Retain keeps both data and costs.\n      DeletionPolicy: Delete\n".into(),
            Storage::Ebs => format!("  - Name: shared\n    MountDir: /shared\n    StorageType: Ebs\n    EbsSettings:\n      Size: {size}\n      Encrypted: true\n      # Delete the data with the cluster; Retain keeps both data and costs.\n      DeletionPolicy: Delete\n"),
        };
        format!(
            "# A cluster for AWS ParallelCluster 3.16, written by `phalanx cluster aws init`.\n\
             Region: {region}\nImage:\n  Os: {os}\nHeadNode:\n  InstanceType: {head}\n  Networking:\n    SubnetId: {head_subnet}\n  Ssh:\n    KeyName: {key}\n{allowed}\
             Scheduling:\n  Scheduler: slurm\n  SlurmQueues:\n    - Name: compute\n{capacity}      # Jobs have whole nodes, as those that train want them.\n      JobExclusiveAllocation: true\n      Networking:\n        SubnetIds:\n          - {compute_subnet}\n        # Near each other; what an EFA needs said, one way or the other.\n        PlacementGroup:\n          Enabled: true\n      ComputeResources:\n        - Name: {resource}\n          InstanceType: {instance}\n          # So many are always on and paid for; the others come with jobs and go when idle.\n          MinCount: {least}\n          MaxCount: {most}\n{adapter}\
             SharedStorage:\n{storage}",
            region = args.region,
            os = args.os,
            head = args.head_instance,
            head_subnet = subnet(&args.head_subnet),
            compute_subnet = subnet(&args.compute_subnet),
            instance = args.instance,
        )
    }

    /// What people do with it.
    pub(super) fn next_steps(&self, path: &str) -> String {
        let InitArgs { name, region, .. } = self.args;
        let gpus =
            gpus(&self.args.instance).map(|gpus| format!(" --gpus-per-node {gpus}")).unwrap_or_default();
        let most = self.most;
        let fill_in = match self.text().contains(FILL_IN) {
            true => format!(
                "   fill in what is {FILL_IN}: aws ec2 describe-subnets --region {region}, aws ec2 describe-key-pairs --region {region}\n"
            ),
            false => String::new(),
        };
        format!(
            "next:\n{fill_in}   phalanx cluster aws check {path}\n   python3 -m pip install 'aws-parallelcluster>=3.16,<4'\n   \
             pcluster create-cluster --cluster-name {name} --cluster-configuration {path} --region {region}\n   \
             pcluster describe-cluster --cluster-name {name} --region {region}    (until CREATE_COMPLETE, ten minutes or more)\n   \
             pcluster ssh --cluster-name {name} --region {region}\n   \
             phalanx slurm submit --nodes {most}{gpus} --time 8h mnist    (there, in /shared)\n   \
             pcluster delete-cluster --cluster-name {name} --region {region}\n\
             note: the head node, its disk, the shared folder and the {} nodes that are always on cost money by the hour until the cluster is deleted, used or not",
            self.least
        )
    }
}
