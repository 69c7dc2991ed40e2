//! Batch scripts are judged line by line.

use crate::user::{phalanx, text};
use serde_json::Value;
use std::fs;

/// Such as it is found in the forums.
const SCRIPT: &str = "#!/bin/bash
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=4
#SBATCH --cpus-per-task=8
#SBATCH --mem=64
export MASTER_PORT=29500
srun python train.py
";

#[test]
fn mistakes_are_told_with_their_lines_and_what_to_write() {
    let folder = tempfile::tempdir().unwrap();
    fs::write(folder.path().join("job.sh"), SCRIPT).unwrap();
    let lint = |args: &[&str]| phalanx(folder.path()).args(["slurm", "lint"]).args(args).output().unwrap();
    let out = lint(&["job.sh"]);
    assert_eq!(out.status.code(), Some(1));
    let said = text(&out.stdout);
    let want =
        "job.sh:5: 64 is megabytes [memory]\n    now:     #SBATCH --mem=64\n    instead: #SBATCH --mem=64G\n";
    assert!(said.contains(want), "{said}");
    assert!(
        said.contains("    instead: srun --cpus-per-task=$SLURM_CPUS_PER_TASK python train.py\n"),
        "{said}"
    );
    assert_eq!(text(&out.stderr), "job.sh: 4 mistakes\n");
    let lines = text(&lint(&["job.sh", "--json"]).stdout);
    let found: Vec<Value> = lines.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let rules: Vec<&str> = found.iter().map(|finding| finding["rule"].as_str().unwrap()).collect();
    assert_eq!(rules, ["memory", "port", "bad-exit", "cpus-per-task"]);
    fs::write(folder.path().join("good.sh"), "#!/bin/bash\n#SBATCH --nodes=1\nsrun ./train\n").unwrap();
    assert_eq!(lint(&["good.sh"]).status.code(), Some(0));
    let endless = lint(&["/dev/zero"]);
    assert_eq!(endless.status.code(), Some(1));
    assert!(text(&endless.stderr).contains("has more than 4194304 bytes"), "{}", text(&endless.stderr));
    let out = lint(&["missing.sh"]);
    assert_eq!(out.status.code(), Some(1));
    assert!(text(&out.stderr).contains("missing.sh: can't be read"), "{}", text(&out.stderr));
}
