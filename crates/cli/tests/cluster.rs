//! Configurations of clusters: what is written passes its own check and that of the `aws-parallelcluster` package, and mistakes are told
//! by line.

mod user;

use std::fs;
use std::path::PathBuf;
use std::process::Command;
use user::{phalanx, text};

const SUBNETS: [&str; 6] =
    ["--head-subnet", "subnet-12345678", "--compute-subnet", "subnet-0123456789abcdef0", "--key", "mine"];

/// What is written for clusters of every kind.
const KINDS: [&[&str]; 4] = [
    &["--instance", "g4dn.metal", "--nodes", "2:8", "--storage", "fsx"],
    &["--instance", "p5.48xlarge", "--nodes", "0:4", "--storage", "efs", "--spot"],
    &[
        "--instance",
        "c6i.xlarge",
        "--storage",
        "ebs",
        "--storage-size",
        "500",
        "--allowed-ips",
        "203.0.113.0/24",
    ],
    &["--instance", "p3.16xlarge", "--storage-size", "4800", "--os", "ubuntu2404"],
];

#[test]
fn what_is_written_is_right_by_our_rules() {
    for kind in KINDS {
        let folder = tempfile::tempdir().unwrap();
        let aws =
            |args: &[&str]| phalanx(folder.path()).args(["cluster", "aws"]).args(args).output().unwrap();
        let args = [&["init", "--region", "us-east-1"], kind, &SUBNETS].concat();
        let out = aws(&args);
        assert_eq!(out.status.code(), Some(0), "{}", text(&out.stderr));
        let said = text(&out.stderr);
        let steps = [
            "pcluster create-cluster",
            "pcluster ssh",
            "phalanx slurm submit",
            "pcluster delete-cluster",
            "cost money",
        ];
        assert!(steps.iter().all(|step| said.contains(step)), "{said}");
        let out = aws(&["check", "config.yaml"]);
        assert_eq!(out.status.code(), Some(0), "{kind:?}: {}", text(&out.stdout));
        assert!(text(&out.stderr).contains("0 errors"), "{}", text(&out.stderr));
        // What is there isn't written over.
        let out = aws(&args);
        assert_eq!(out.status.code(), Some(1));
        assert!(text(&out.stderr).contains("--force"), "{}", text(&out.stderr));
        assert_eq!(aws(&[&args[..], &["--force"]].concat()).status.code(), Some(0));
    }
}

#[test]
fn what_has_to_be_filled_in_is_an_error_until_it_is() {
    let folder = tempfile::tempdir().unwrap();
    let aws = |args: &[&str]| phalanx(folder.path()).args(["cluster", "aws"]).args(args).output().unwrap();
    let out = aws(&["init", "--region", "us-east-1", "--instance", "g4dn.metal"]);
    assert!(text(&out.stderr).contains("fill in what is FILL-IN"), "{}", text(&out.stderr));
    let out = aws(&["check", "config.yaml", "--json"]);
    assert_eq!(out.status.code(), Some(1));
    let errors = text(&out.stdout).lines().filter(|line| line.contains("\"kind\":\"error\"")).count();
    assert_eq!(errors, 3, "{}", text(&out.stdout));
    for (args, want) in [
        (&["--nodes", "4:2"][..], "--nodes 4:2"),
        (&["--storage-size", "1500"], "--storage-size 1500"),
        (&["--instance", "metal"], "--instance metal"),
        (&["--region", "us east"], "--region"),
        (&["--os", "windows"], "--os: \"windows\" is none of "),
        (&["--head-subnet", "mine"], "--head-subnet: \"mine\" is no subnet"),
        (&["--compute-subnet", "subnet-1"], "--compute-subnet: \"subnet-1\" is no subnet"),
        (&["--allowed-ips", "203.0.113.0/33"], "--allowed-ips: \"203.0.113.0/33\" is no network"),
    ] {
        let usual: &[&str] = match args[0] {
            "--instance" => &["init", "--region", "r"],
            "--region" => &["init", "--instance", "g4dn.metal"],
            _ => &["init", "--region", "r", "--instance", "g4dn.metal"],
        };
        let out = aws(&[usual, args].concat());
        assert_eq!(out.status.code(), Some(2), "{}", text(&out.stderr));
        assert!(text(&out.stderr).contains(want), "{}", text(&out.stderr));
    }
}

#[test]
fn mistakes_are_told_by_line() {
    let folder = tempfile::tempdir().unwrap();
    let aws = |args: &[&str]| phalanx(folder.path()).args(["cluster", "aws"]).args(args).output().unwrap();
    let right =
        text(&aws(&[&["init", "--region", "us-east-1", "--dry-run"], KINDS[0], &SUBNETS].concat()).stdout);
    let path = folder.path().join("c.yaml");
    let check = |from: &str, to: &str, code: i32, want: &str| {
        assert!(right.contains(from), "{from}");
        fs::write(&path, right.replacen(from, to, 1)).unwrap();
        let out = aws(&["check", "c.yaml"]);
        let said = text(&out.stdout);
        assert!(out.status.code() == Some(code) && said.contains(want), "{from} -> {to}: {said}");
    };
    check("Os: alinux2023", "Os: alinux2", 1, "c.yaml:4: error: Image.Os: \"alinux2\" is none of");
    check("MinCount: 2", "MinCounts: 2", 1, "is no key there; did you mean MinCount?");
    check("MinCount: 2", "MinCount: 9", 1, "9 is above MaxCount, which is 8");
    check("MinCount: 2", "MinCount: two", 1, "MinCount: must be a number from 0");
    check("subnet-12345678", "subnet-1", 1, "HeadNode.Networking.SubnetId: \"subnet-1\" is no subnet");
    check(
        "KeyName: mine",
        "KeyName: mine\n    AllowedIps: home",
        1,
        "\"home\" is no network, as 203.0.113.0/24 is",
    );
    check("KeyName: mine", "KeyName: mine\n    AllowedIps: pl-1234", 0, "");
    check("Name: compute", "Name: default", 1, "\"default\" must be");
    check("PlacementGroup:\n          Enabled: true", "AssignPublicIp: false", 1, "an EFA needs a decision");
    check("InstanceType: g4dn.metal", "InstanceType: g4dn.xlarge", 1, "g4dn.xlarge has no EFA");
    check(
        "          Efa:\n            Enabled: true\n",
        "",
        0,
        "warning: Scheduling.SlurmQueues[0].ComputeResources[0].Efa",
    );
    check("StorageCapacity: 1200", "StorageCapacity: 1300", 1, "must be 1200 or a multiple of 2400");
    check("SCRATCH_2", "PERSISTENT_2", 1, "PERSISTENT_2 needs it, as in PerUnitStorageThroughput: 250");
    check("DeploymentType: SCRATCH_2", "FileSystemId: fs-12345678", 1, "is for new file systems");
    check(
        "      DeletionPolicy: Delete\n",
        "",
        0,
        "warning: SharedStorage[0].FsxLustreSettings.DeletionPolicy",
    );
    check("StorageType: FsxLustre", "StorageType: Efs", 1, "StorageType is Efs");
    check("MountDir: /shared", "MountDir: /home", 1, "is a folder of the system");
    check("Scheduler: slurm", "Scheduler: awsbatch", 1, "\"awsbatch\" is none of slurm");
    check("Image:\n  Os: alinux2023\n", "", 1, "error: Image: is missing");
    check("Region: us-east-1\n", "Region: [\n", 1, "not YAML");
    fs::write(&path, "").unwrap();
    assert!(text(&aws(&["check", "c.yaml"]).stdout).contains("the file is empty"));
    assert_eq!(aws(&["check", "missing.yaml"]).status.code(), Some(1));
}

/// Asked of the package itself, where PHALANX_TEST_PCLUSTER names a Python that has it.
#[test]
fn what_is_written_is_right_by_the_schema_of_parallelcluster() {
    let Some(python) = std::env::var_os("PHALANX_TEST_PCLUSTER").map(PathBuf::from) else {
        eprintln!(
            "skipped: PHALANX_TEST_PCLUSTER names no Python with aws-parallelcluster (pip install 'aws-parallelcluster>=3.16,<4')"
        );
        return;
    };
    let program = "import sys, yaml; from pcluster.schemas.cluster_schema import ClusterSchema; \
                   ClusterSchema(cluster_name='phalanx').load(yaml.safe_load(open(sys.argv[1])))";
    for kind in KINDS {
        let folder = tempfile::tempdir().unwrap();
        let args = [&["cluster", "aws", "init", "--region", "us-east-1"], kind, &SUBNETS].concat();
        assert!(phalanx(folder.path()).args(args).status().unwrap().success());
        let mut load = Command::new(&python);
        load.args(["-c", program, "config.yaml"])
            .current_dir(folder.path())
            .env("AWS_DEFAULT_REGION", "us-east-1");
        let out = load.output().unwrap();
        assert!(out.status.success(), "{kind:?}: {}", text(&out.stderr));
    }
    // It can tell wrong ones.
    let folder = tempfile::tempdir().unwrap();
    fs::write(folder.path().join("config.yaml"), "Region: us-east-1\nNonsense: 1\n").unwrap();
    let mut load = Command::new(&python);
    load.args(["-c", program, "config.yaml"])
        .current_dir(folder.path())
        .env("AWS_DEFAULT_REGION", "us-east-1");
    assert!(!load.output().unwrap().status.success());
}
