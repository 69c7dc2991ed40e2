//! Jobs that can't do what they ask for, as they look from the inside, before anything is started.

use std::path::Path;

/// Where Slurm runs a job whose own folder isn't on the node.
const ELSEWHERE: &str = "/tmp";

/// Why a command that starts workers on this node isn't what this job asks for, and the line to write instead; none outside of jobs,
/// in steps, and in jobs of one node. `folder` is that of this process, and `is_there` says whether there is one of this name.
pub fn trouble(
    get: impl Fn(&str) -> Option<String>,
    folder: &Path,
    is_there: impl Fn(&Path) -> bool,
) -> Option<String> {
    let get = |name: &str| get(name).filter(|value| !value.is_empty());
    let job = get("SLURM_JOB_ID")?;
    let node = get("SLURMD_NODENAME").unwrap_or_else(|| "this node".into());
    if let Some(own) = get("SLURM_SUBMIT_DIR").filter(|own| !is_there(Path::new(own)))
        && folder == Path::new(ELSEWHERE)
    {
        return Some(format!(
            "job {job} was submitted in {own}, which isn't on {node}: that file system isn't shared, and Slurm has put the job into {ELSEWHERE}\nhint: submit from a folder that all nodes see, or name one: #SBATCH --chdir=/shared/folder"
        ));
    }
    let nodes = get("SLURM_JOB_NUM_NODES")?.parse::<u32>().ok().filter(|&nodes| nodes > 1)?;
    match get("SLURM_STEP_NUM_TASKS") {
        Some(_) => None,
        None => Some(format!(
            "job {job} has {nodes} nodes, and this command runs on {node} alone, since srun hasn't started it\nhint: put `srun` before it for a worker a task, `srun --ntasks-per-node=1 phalanx run` for an agent a node, or `srun -N1 -n1` if one node is meant"
        )),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn jobs_that_cannot_do_what_they_ask_for_are_told_so() {
        let check = |set: &[(&str, &str)], folder: &str, want: Option<&str>| {
            let get = |name: &str| set.iter().find(|(n, _)| *n == name).map(|(_, value)| value.to_string());
            let told = trouble(get, Path::new(folder), |path| path == Path::new("/home/u"));
            match (&told, want) {
                (Some(told), Some(want)) => {
                    assert!(told.contains(want) && told.contains("\nhint: "), "{told}")
                }
                _ => assert_eq!(told.is_some(), want.is_some(), "{set:?}: {told:?}"),
            }
        };
        let (job, two) = (("SLURM_JOB_ID", "7"), ("SLURM_JOB_NUM_NODES", "2"));
        let (node, home) = (("SLURMD_NODENAME", "n3"), ("SLURM_SUBMIT_DIR", "/home/u"));
        check(&[], "/home/u", None);
        check(&[two], "/home/u", None);
        check(&[job, home], "/home/u", None);
        check(&[job, ("SLURM_JOB_NUM_NODES", "1"), home], "/home/u", None);
        check(
            &[job, two, node, home],
            "/home/u",
            Some("job 7 has 2 nodes, and this command runs on n3 alone"),
        );
        check(&[job, two, node, home, ("SLURM_STEP_NUM_TASKS", "2")], "/home/u", None);
        let gone = ("SLURM_SUBMIT_DIR", "/scratch/u");
        check(&[job, gone, node], "/tmp", Some("submitted in /scratch/u, which isn't on n3"));
        check(&[job, gone, node, two, ("SLURM_STEP_NUM_TASKS", "2")], "/tmp", Some("isn't shared"));
        // Whoever has gone elsewhere by himself has his reasons.
        check(&[job, gone], "/local/u", None);
        check(&[job, home], "/tmp", None);
    }
}
