//! The rules of a configuration that can be checked without an account.

use super::instances::has_efa;
use super::yaml::{Node, Value, parse};
use std::collections::BTreeSet;
use std::net::Ipv4Addr;

/// Something wrong with it.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Finding {
    /// Its line in the file, from 1.
    pub(super) line: usize,
    /// Whether ParallelCluster refuses it.
    pub(super) is_error: bool,
    /// The key, from the top, as in `HeadNode.Networking.SubnetId`.
    pub(super) path: String,
    /// Why, and what to write.
    pub(super) why: String,
}

/// Most queues, and most compute resources of all of them.
const MOST_QUEUES: usize = 50;
/// Most file systems of FSx: new ones, and others.
const MOST_FSX: (usize, usize) = (1, 20);
const SYSTEMS: [&str; 7] = ["alinux2023", "ubuntu2204", "ubuntu2404", "rhel8", "rocky8", "rhel9", "rocky9"];

/// The keys of a part of the file.
struct Section {
    path: &'static str,
    keys: &'static [&'static str],
}

/// Those parts whose keys are known here; the others are left to `pcluster`.
const SECTIONS: &[Section] = &[
    Section {
        path: "",
        keys: &[
            "Region",
            "Image",
            "HeadNode",
            "Scheduling",
            "SharedStorage",
            "Monitoring",
            "Tags",
            "Iam",
            "LoginNodes",
            "DirectoryService",
            "Imds",
            "DeploymentSettings",
            "DevSettings",
            "CustomS3Bucket",
            "AdditionalPackages",
            "AdditionalResources",
        ],
    },
    Section { path: "Image", keys: &["Os", "CustomAmi"] },
    Section {
        path: "HeadNode",
        keys: &[
            "InstanceType",
            "DisableSimultaneousMultithreading",
            "Networking",
            "Ssh",
            "LocalStorage",
            "SharedStorageType",
            "SharedStorageEfsSettings",
            "Dcv",
            "CustomActions",
            "Iam",
            "Imds",
            "Image",
        ],
    },
    Section {
        path: "HeadNode.Networking",
        keys: &["AdditionalSecurityGroups", "SecurityGroups", "SubnetId", "ElasticIp", "Proxy"],
    },
    Section { path: "HeadNode.Ssh", keys: &["KeyName", "AllowedIps"] },
    Section { path: "Scheduling", keys: &["Scheduler", "ScalingStrategy", "SlurmSettings", "SlurmQueues"] },
    Section {
        path: "Scheduling.SlurmSettings",
        keys: &[
            "ScaledownIdletime",
            "Dns",
            "QueueUpdateStrategy",
            "EnableMemoryBasedScheduling",
            "Database",
            "CustomSlurmSettings",
            "CustomSlurmSettingsIncludeFile",
            "MungeKeySecretArn",
            "ExternalSlurmdbd",
        ],
    },
    Section {
        path: "Scheduling.SlurmQueues[]",
        keys: &[
            "Name",
            "CapacityType",
            "ComputeSettings",
            "CustomActions",
            "Iam",
            "Image",
            "CapacityReservationTarget",
            "AllocationStrategy",
            "ComputeResources",
            "Networking",
            "HealthChecks",
            "CustomSlurmSettings",
            "Tags",
            "JobExclusiveAllocation",
        ],
    },
    Section {
        path: "Scheduling.SlurmQueues[].Networking",
        keys: &[
            "AdditionalSecurityGroups",
            "SecurityGroups",
            "AssignPublicIp",
            "SubnetIds",
            "PlacementGroup",
            "Proxy",
        ],
    },
    Section { path: "Scheduling.SlurmQueues[].Networking.PlacementGroup", keys: &["Enabled", "Id", "Name"] },
    Section {
        path: "Scheduling.SlurmQueues[].ComputeResources[]",
        keys: &[
            "Name",
            "InstanceType",
            "Instances",
            "MaxCount",
            "MinCount",
            "SpotPrice",
            "Efa",
            "DisableSimultaneousMultithreading",
            "SchedulableMemory",
            "CapacityReservationTarget",
            "Networking",
            "HealthChecks",
            "CustomSlurmSettings",
            "Tags",
            "StaticNodePriority",
            "DynamicNodePriority",
            "LaunchTemplateOverrides",
        ],
    },
    Section { path: "Scheduling.SlurmQueues[].ComputeResources[].Efa", keys: &["Enabled", "GdrSupport"] },
    Section {
        path: "SharedStorage[]",
        keys: &[
            "MountDir",
            "Name",
            "StorageType",
            "EbsSettings",
            "EfsSettings",
            "FsxLustreSettings",
            "FsxOpenZfsSettings",
            "FsxOntapSettings",
            "FileCacheSettings",
        ],
    },
    Section {
        path: "SharedStorage[].FsxLustreSettings",
        keys: &[
            "StorageCapacity",
            "DeploymentType",
            "ImportedFileChunkSize",
            "ExportPath",
            "ImportPath",
            "WeeklyMaintenanceStartTime",
            "AutomaticBackupRetentionDays",
            "CopyTagsToBackups",
            "DailyAutomaticBackupStartTime",
            "PerUnitStorageThroughput",
            "BackupId",
            "KmsKeyId",
            "FileSystemId",
            "AutoImportPolicy",
            "DriveCacheType",
            "DataCompressionType",
            "StorageType",
            "DeletionPolicy",
            "DataRepositoryAssociations",
        ],
    },
    Section {
        path: "SharedStorage[].EbsSettings",
        keys: &[
            "VolumeType",
            "Iops",
            "Size",
            "KmsKeyId",
            "Throughput",
            "Encrypted",
            "SnapshotId",
            "VolumeId",
            "Raid",
            "DeletionPolicy",
        ],
    },
    Section {
        path: "SharedStorage[].EfsSettings",
        keys: &[
            "Encrypted",
            "KmsKeyId",
            "PerformanceMode",
            "ThroughputMode",
            "ProvisionedThroughput",
            "FileSystemId",
            "DeletionPolicy",
            "AccessPointId",
            "EncryptionInTransit",
            "IamAuthorization",
        ],
    },
];

/// All that is wrong with a configuration, by line.
pub(super) fn check(text: &str) -> Vec<Finding> {
    let mut found = Found(Vec::new());
    match parse(text) {
        Err((line, why)) => found.error(line, "", format!("not YAML: {why}")),
        Ok(None) => found.error(1, "", "the file is empty: phalanx cluster aws init writes one"),
        Ok(Some(root)) if !matches!(root.value, Value::Map(_)) => {
            found.error(root.line, "", "must be keys and values")
        }
        Ok(Some(root)) => {
            keys(&root, "", "", &mut found);
            head(&root, &mut found);
            scheduling(&root, &mut found);
            storage(&root, &mut found);
        }
    }
    let Found(mut all) = found;
    all.sort_by(|a, b| a.line.cmp(&b.line).then(a.path.cmp(&b.path)));
    all
}

/// What was found so far.
struct Found(Vec<Finding>);

impl Found {
    fn error(&mut self, line: usize, path: &str, why: impl Into<String>) {
        self.0.push(Finding { line: line.max(1), is_error: true, path: path.into(), why: why.into() });
    }

    fn warning(&mut self, line: usize, path: &str, why: impl Into<String>) {
        self.0.push(Finding { line: line.max(1), is_error: false, path: path.into(), why: why.into() });
    }

    /// A key that has to be there.
    fn needed<'a>(&mut self, node: &'a Node, path: &str, key: &str, example: &str) -> Option<&'a Node> {
        let value = node.get(key).filter(|value| value.text() != Some(""));
        if value.is_none() {
            self.error(node.line, &join(path, key), format!("is missing, as in {key}: {example}"));
        }
        value
    }

    /// A word out of a few.
    fn one_of(&mut self, node: &Node, path: &str, key: &str, words: &[&str]) {
        if let Some(value) = node.get(key)
            && !value.text().is_some_and(|text| words.contains(&text))
        {
            let text = value.text().unwrap_or_default();
            self.error(value.line, &join(path, key), format!("{text:?} is none of {}", words.join(", ")));
        }
    }
}

fn join(path: &str, key: &str) -> String {
    if path.is_empty() { key.to_owned() } else { format!("{path}.{key}") }
}

/// Unknown keys; `kind` is the path with `[]` for the numbers of elements.
fn keys(node: &Node, kind: &str, path: &str, found: &mut Found) {
    match &node.value {
        Value::Scalar(_) => {}
        Value::List(list) => {
            let of = |number: usize| format!("{path}[{number}]");
            list.iter().enumerate().for_each(|(i, node)| keys(node, &format!("{kind}[]"), &of(i), found));
        }
        Value::Map(pairs) => {
            let known = SECTIONS.iter().find(|section| section.path == kind);
            for (key, line, value) in pairs {
                if let Some(section) = known.filter(|section| !section.keys.contains(&key.as_str())) {
                    let near = section.keys.iter().max_by(|a, b| near(a, key).total_cmp(&near(b, key)));
                    let near = near.map(|near| format!("; did you mean {near}?")).unwrap_or_default();
                    found.error(*line, &join(path, key), format!("is no key there{near}"));
                }
                keys(value, &join(kind, key), &join(path, key), found);
            }
        }
    }
}

fn near(a: &str, b: &str) -> f64 {
    strsim::jaro_winkler(&a.to_lowercase(), &b.to_lowercase())
}

fn number(node: Option<&Node>) -> Option<i64> {
    node?.text()?.parse().ok()
}

fn is_true(node: Option<&Node>) -> bool {
    node.and_then(Node::text).is_some_and(|text| text.eq_ignore_ascii_case("true"))
}

/// Whether this is a network of IPv4 addresses, or a list of them that has a name.
fn is_network(text: &str) -> bool {
    let is_length = |length: &str| length.parse::<u8>().is_ok_and(|length| length <= 32);
    text.split_once('/').is_some_and(|(ip, length)| ip.parse::<Ipv4Addr>().is_ok() && is_length(length))
        || text.starts_with("pl-")
}

fn subnet(node: &Node, path: &str, found: &mut Found) {
    let text = node.text().unwrap_or_default();
    let is_id = text.strip_prefix("subnet-").is_some_and(|id| {
        [8, 17].contains(&id.len()) && id.chars().all(|c| c.is_ascii_digit() || c.is_ascii_lowercase())
    });
    if !is_id {
        found.error(node.line, path, format!("{text:?} is no subnet: aws ec2 describe-subnets names yours"));
    }
}

fn head(root: &Node, found: &mut Found) {
    if root.get("Region").is_none() {
        found.warning(root.line, "Region", "is missing: the one of the shell that runs pcluster is taken");
    }
    let image = found.needed(root, "", "Image", "{Os: alinux2023}");
    let system = image.and_then(|image| found.needed(image, "Image", "Os", "alinux2023"));
    if let Some(system) = system
        && let Some(text) = system.text().filter(|text| !SYSTEMS.contains(text))
    {
        let why = format!("{text:?} is none of {} in version 3.16", SYSTEMS.join(", "));
        found.error(system.line, "Image.Os", why);
    }
    let Some(head) = found.needed(root, "", "HeadNode", "{InstanceType: m6i.2xlarge, ...}") else { return };
    found.needed(head, "HeadNode", "InstanceType", "m6i.2xlarge");
    if let Some(networking) = found.needed(head, "HeadNode", "Networking", "{SubnetId: subnet-...}")
        && let Some(id) = found.needed(networking, "HeadNode.Networking", "SubnetId", "subnet-...")
    {
        subnet(id, "HeadNode.Networking.SubnetId", found);
    }
    let ssh = head.get("Ssh");
    match ssh.and_then(|ssh| ssh.get("KeyName")) {
        None => found.warning(head.line, "HeadNode.Ssh.KeyName", "is missing: nobody can log in by ssh"),
        Some(key) if key.text().is_some_and(|key| key == "FILL-IN") => {
            found.error(
                key.line,
                "HeadNode.Ssh.KeyName",
                "fill it in: aws ec2 describe-key-pairs names yours",
            );
        }
        Some(_) => {}
    }
    let allowed = ssh.and_then(|ssh| ssh.get("AllowedIps"));
    if let Some(ips) = allowed
        && !ips.text().is_some_and(is_network)
    {
        let why = format!("{:?} is no network, as 203.0.113.0/24 is", ips.text().unwrap_or_default());
        found.error(ips.line, "HeadNode.Ssh.AllowedIps", why);
    }
    if allowed.is_none_or(|ips| ips.text() == Some("0.0.0.0/0")) {
        let line = allowed.or(ssh).unwrap_or(head).line;
        found.warning(
            line,
            "HeadNode.Ssh.AllowedIps",
            "all of the internet may try to log in: give your network, as in 203.0.113.0/24",
        );
    }
}

fn scheduling(root: &Node, found: &mut Found) {
    let Some(scheduling) = found.needed(root, "", "Scheduling", "{Scheduler: slurm, ...}") else { return };
    found.needed(scheduling, "Scheduling", "Scheduler", "slurm");
    found.one_of(scheduling, "Scheduling", "Scheduler", &["slurm"]);
    found.one_of(
        scheduling,
        "Scheduling",
        "ScalingStrategy",
        &["all-or-nothing", "greedy-all-or-nothing", "best-effort"],
    );
    if let Some(settings) = scheduling.get("SlurmSettings") {
        let words = ["COMPUTE_FLEET_STOP", "DRAIN", "TERMINATE"];
        found.one_of(settings, "Scheduling.SlurmSettings", "QueueUpdateStrategy", &words);
    }
    let Some(queues) = found.needed(scheduling, "Scheduling", "SlurmQueues", "[{Name: compute, ...}]") else {
        return;
    };
    let (path, all) = ("Scheduling.SlurmQueues", queues.elements());
    if all.is_empty() || all.len() > MOST_QUEUES {
        found.error(queues.line, path, format!("has {} queues: it takes 1 to {MOST_QUEUES}", all.len()));
    }
    let resources: usize =
        all.iter().filter_map(|q| q.get("ComputeResources")).map(|r| r.elements().len()).sum();
    if resources > MOST_QUEUES {
        found.error(
            queues.line,
            path,
            format!("has {resources} compute resources: a cluster takes {MOST_QUEUES}"),
        );
    }
    let mut names = BTreeSet::new();
    for (i, queue) in all.iter().enumerate() {
        let path = format!("{path}[{i}]");
        if let Some(name) = found.needed(queue, &path, "Name", "compute") {
            let text = name.text().unwrap_or_default();
            named(name, &join(&path, "Name"), found);
            if !names.insert(text) {
                found.error(name.line, &join(&path, "Name"), format!("two queues are called {text}"));
            }
        }
        found.one_of(queue, &path, "CapacityType", &["ONDEMAND", "SPOT", "CAPACITY_BLOCK"]);
        let networking = found.needed(queue, &path, "Networking", "{SubnetIds: [subnet-...]}");
        let subnets = networking
            .and_then(|node| found.needed(node, &join(&path, "Networking"), "SubnetIds", "[subnet-...]"));
        let subnets = subnets.map_or(&[][..], Node::elements);
        subnets.iter().for_each(|id| subnet(id, &join(&path, "Networking.SubnetIds"), found));
        if let Some(resources) = found.needed(queue, &path, "ComputeResources", "[{Name: p5, ...}]") {
            let mut names = BTreeSet::new();
            for (i, resource) in resources.elements().iter().enumerate() {
                let path = format!("{path}.ComputeResources[{i}]");
                compute_resource(resource, &path, queue, subnets.len() > 1, found);
                let name = resource.get("Name").and_then(Node::text);
                if name.is_some_and(|name| !names.insert(name)) {
                    found.error(resource.line, &join(&path, "Name"), "two of this queue have this name");
                }
            }
        }
    }
}

/// Names of queues and compute resources become names of nodes.
fn named(node: &Node, path: &str, found: &mut Found) {
    let text = node.text().unwrap_or_default();
    let is_name = text.starts_with(|c: char| c.is_ascii_lowercase())
        && text.len() <= 25
        && text.chars().all(|c| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-')
        && text != "default";
    if !is_name {
        let why = "must be up to 25 lower-case letters, digits and dashes, a letter first, and not default";
        found.error(node.line, path, format!("{text:?} {why}"));
    }
}

fn compute_resource(node: &Node, path: &str, queue: &Node, many_zones: bool, found: &mut Found) {
    if let Some(name) = found.needed(node, path, "Name", "p5") {
        named(name, &join(path, "Name"), found);
    }
    let reserved = node.get("CapacityReservationTarget").or(queue.get("CapacityReservationTarget")).is_some();
    match (node.get("InstanceType"), node.get("Instances")) {
        (Some(_), Some(both)) => {
            found.error(both.line, &join(path, "Instances"), "either this or InstanceType")
        }
        (None, None) if !reserved => {
            found.error(node.line, &join(path, "InstanceType"), "is missing, as in InstanceType: p5.48xlarge")
        }
        _ => {}
    }
    let (least, most) = (number(node.get("MinCount")), number(node.get("MaxCount")));
    for (key, value, from) in [("MinCount", least, 0), ("MaxCount", most, 1)] {
        if let Some(given) = node.get(key)
            && value.is_none_or(|value| value < from)
        {
            found.error(given.line, &join(path, key), format!("must be a number from {from}"));
        }
    }
    if let (Some(least), Some(most)) = (least, most)
        && least > most
    {
        found.error(
            node.get("MinCount").map_or(node.line, |n| n.line),
            &join(path, "MinCount"),
            format!("{least} is above MaxCount, which is {most}"),
        );
    }
    if least.is_some_and(|least| least > 0) {
        let line = node.get("MinCount").map_or(node.line, |n| n.line);
        found.warning(line, &join(path, "MinCount"), "these nodes are always on, and paid for while idle");
    }
    let efa = node.get("Efa");
    let enabled = is_true(efa.and_then(|efa| efa.get("Enabled")));
    let line = efa.map_or(node.line, |efa| efa.line);
    let supported = node.get("InstanceType").and_then(Node::text).map(|text| (text, has_efa(text)));
    match supported {
        Some((instance, Some(false))) if enabled => {
            found.error(
                line,
                &join(path, "Efa"),
                format!("{instance} has no EFA: leave it out, or take a larger type"),
            );
        }
        Some((instance, Some(true))) if !enabled && !many_zones => {
            found.warning(
                line,
                &join(path, "Efa"),
                format!("{instance} has an EFA, which costs nothing: Efa: {{Enabled: true}}"),
            );
        }
        _ => {}
    }
    if let Some(direct) = efa.and_then(|efa| efa.get("GdrSupport")) {
        found.warning(
            direct.line,
            &join(path, "Efa.GdrSupport"),
            "has had no effect since version 3.0.2: leave it out",
        );
    }
    let is_block = queue.get("CapacityType").and_then(Node::text) == Some("CAPACITY_BLOCK");
    let group = |node: &Node| node.get("Networking").and_then(|n| n.get("PlacementGroup")).is_some();
    if enabled && !many_zones && !is_block && !group(queue) && !group(node) {
        let why = "an EFA needs a decision on the placement group: Networking: {PlacementGroup: {Enabled: true}} in its queue";
        found.error(line, &join(path, "Efa"), why);
    }
}

fn storage(root: &Node, found: &mut Found) {
    let Some(storage) = root.get("SharedStorage") else { return };
    let (mut names, mut folders, mut fsx) = (BTreeSet::new(), BTreeSet::new(), (0, 0));
    for (i, node) in storage.elements().iter().enumerate() {
        let path = format!("SharedStorage[{i}]");
        let kinds = ["Ebs", "Efs", "FsxLustre", "FsxOpenZfs", "FsxOntap", "FileCache"];
        found.needed(node, &path, "StorageType", "FsxLustre");
        found.one_of(node, &path, "StorageType", &kinds);
        if let Some(name) = found.needed(node, &path, "Name", "shared")
            && !names.insert(name.text())
        {
            found.error(name.line, &join(&path, "Name"), "another one has this name");
        }
        if let Some(folder) = found.needed(node, &path, "MountDir", "/shared") {
            let text = folder.text().unwrap_or_default();
            if !folders.insert(text.trim_matches('/')) {
                found.error(folder.line, &join(&path, "MountDir"), format!("{text} is that of another one"));
            }
            if ["", "home", "opt", "usr", "etc", "tmp", "var", "opt/slurm", "opt/parallelcluster"]
                .contains(&text.trim_matches('/'))
            {
                found.error(
                    folder.line,
                    &join(&path, "MountDir"),
                    format!("{text:?} is a folder of the system: take /shared or the like"),
                );
            }
        }
        let kind = node.get("StorageType").and_then(Node::text).unwrap_or_default();
        let settings = node.get(&format!("{kind}Settings"));
        for other in kinds.iter().filter(|other| **other != kind) {
            if let Some(wrong) = node.get(&format!("{other}Settings")) {
                found.error(
                    wrong.line,
                    &join(&path, &format!("{other}Settings")),
                    format!("StorageType is {kind}"),
                );
            }
        }
        let id = settings.and_then(|s| s.get("FileSystemId").or(s.get("VolumeId")));
        let path = join(&path, &format!("{kind}Settings"));
        if kind == "FsxLustre" {
            if id.is_some() {
                fsx.1 += 1
            } else {
                fsx.0 += 1
            }
            lustre(settings, id.is_some(), node.line, &path, found);
        }
        let keeps = settings.and_then(|s| s.get("DeletionPolicy"));
        if id.is_none() && keeps.is_none() && ["FsxLustre", "Efs", "Ebs"].contains(&kind) {
            let why =
                "is missing, which is Delete: the data goes with the cluster; Retain keeps it, and its costs";
            found.warning(node.line, &join(&path, "DeletionPolicy"), why);
        }
    }
    if fsx.0 > MOST_FSX.0 || fsx.1 > MOST_FSX.1 {
        let (new, old) = MOST_FSX;
        found.error(
            storage.line,
            "SharedStorage",
            format!("at most {new} new and {old} other file systems of FSx"),
        );
    }
}

fn lustre(settings: Option<&Node>, is_old: bool, line: usize, path: &str, found: &mut Found) {
    let get = |key: &str| settings.and_then(|settings| settings.get(key));
    if is_old {
        for key in [
            "StorageCapacity",
            "DeploymentType",
            "PerUnitStorageThroughput",
            "ImportPath",
            "ExportPath",
            "BackupId",
        ] {
            if let Some(node) = get(key) {
                found.error(
                    node.line,
                    &join(path, key),
                    "is for new file systems, and FileSystemId names one that is there",
                );
            }
        }
        return;
    }
    let kinds = ["SCRATCH_1", "SCRATCH_2", "PERSISTENT_1", "PERSISTENT_2"];
    if let Some(settings) = settings {
        found.one_of(settings, path, "DeploymentType", &kinds);
    }
    if get("BackupId").is_none() {
        match get("StorageCapacity") {
            None => found.error(
                settings.map_or(line, |s| s.line),
                &join(path, "StorageCapacity"),
                "is missing, as in StorageCapacity: 1200",
            ),
            Some(node)
                if !number(Some(node)).is_some_and(|size| size == 1200 || size > 0 && size % 2400 == 0)
                    && get("DeploymentType").and_then(Node::text) != Some("SCRATCH_1") =>
            {
                found.error(
                    node.line,
                    &join(path, "StorageCapacity"),
                    "must be 1200 or a multiple of 2400 GiB",
                );
            }
            Some(_) => {}
        }
    }
    let kind = get("DeploymentType").and_then(Node::text).unwrap_or("SCRATCH_2");
    let rates: &[i64] = match kind {
        "PERSISTENT_1" => &[12, 40, 50, 100, 200],
        "PERSISTENT_2" => &[125, 250, 500, 1000],
        _ => &[],
    };
    match get("PerUnitStorageThroughput") {
        Some(node) if !number(Some(node)).is_some_and(|rate| rates.contains(&rate)) => {
            let words: Vec<String> = rates.iter().map(i64::to_string).collect();
            let why = if rates.is_empty() {
                format!("{kind} takes none: leave it out")
            } else {
                format!("must be one of {}", words.join(", "))
            };
            found.error(node.line, &join(path, "PerUnitStorageThroughput"), why);
        }
        None if !rates.is_empty() => {
            found.error(
                settings.map_or(line, |s| s.line),
                &join(path, "PerUnitStorageThroughput"),
                format!("{kind} needs it, as in PerUnitStorageThroughput: {}", rates[1]),
            );
        }
        _ => {}
    }
}
