//! `phalanx bench scaling` under Slurm: runs that it submits, and steps of an allocation.

use super::PHALANX;
use super::cluster::Cluster;
use super::user::text;
use serde_json::Value;

#[test]
fn runs_are_jobs_or_steps_of_an_allocation() {
    let Some(cluster) = Cluster::start(2) else { return };
    let folder = tempfile::tempdir().unwrap();
    let bench = [
        "bench",
        "scaling",
        "mnist-mini",
        "--workers",
        "1,2",
        "--nproc-per-node",
        "1",
        "--weak",
        "--batch",
        "8",
    ];
    let sizes = ["--runs", "1", "--steps", "6", "--warm-up", "2", "--json"];
    for place in ["jobs", "steps"] {
        let mut command = match place {
            "jobs" => cluster.command(PHALANX),
            _ => {
                let mut command = cluster.command("salloc");
                command.args(["--quiet", "--nodes=2", "--ntasks=2", PHALANX]);
                command
            }
        };
        command.current_dir(folder.path()).env("XDG_CONFIG_HOME", folder.path().join("config"));
        command.env_remove("RANK").args(bench).args(sizes);
        if place == "jobs" {
            command.args(["--slurm", "--time", "10m", "--patience", "10m"]);
        }
        let out = cluster.attempt(&mut command);
        let said = text(&out.stderr);
        assert_eq!(out.status.code(), Some(0), "{place}: {said}\n{}", cluster.logs());
        let line: Value = serde_json::from_slice(&out.stdout).unwrap();
        let points = line["points"].as_array().unwrap();
        let workers: Vec<u64> = points.iter().map(|point| point["workers"].as_u64().unwrap()).collect();
        assert_eq!(workers, [1, 2], "{place}: {line}");
        assert!(points.iter().all(|point| point["step_ms"].as_f64() > Some(0.0)), "{place}: {line}");
        // Two workers are on two nodes, which is told where jobs are submitted.
        assert_eq!(said.contains("2 workers on 2 nodes: job "), place == "jobs", "{place}: {said}");
        assert!(line["cores"].is_null(), "{place}: cores of nodes aren't those of this machine");
    }
}
