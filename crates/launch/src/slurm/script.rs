//! The batch script of a run: an agent on each node, a worker for each device, and the run started again where it asks for that.
//!
//! A run that is ended before its work is done (its time is nearly up, or the machine is wanted back) keeps a checkpoint and exits
//! with code 75. The script then has itself requeued: the same job, from the top, whose run goes on with `--resume`. Everything that a
//! reader of the script could wonder about stands in it as a comment.

use crate::shell::{quoted, unquoted};
use phalanx_job::slurm::written;
use phalanx_job::{DRAINED, Work};
use std::fmt::Write;
use std::time::Duration;

/// A time limit from which on a signal ahead of the end is asked for: Slurm may send it a minute early.
const LONG: Duration = Duration::from_secs(600);
/// How long before the end that signal comes.
const AHEAD: u64 = 90;
/// The exit code of a run that was asked to end by SIGTERM.
const TERMINATED: u8 = 143;
/// How often a job has itself requeued.
const MOST_REQUEUES: u32 = 100;

/// How many seconds after the others have ended an agent that hangs is ended, where `srun` doesn't count them. It gets SIGKILL: one that
/// SIGTERM wakes would say in the place of the others how the run has ended.
const LEFT_BEHIND: u32 = 30;

/// How often, and after how many seconds, the controller is asked for that.
const TRIES: u32 = 24;
const BETWEEN: u32 = 5;

/// A job.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Submission {
    /// What it is called.
    pub name: String,
    /// The least and the most nodes; more than the least only where the run can do with fewer.
    pub nodes: (u32, u32),
    /// How many more stand by, in case that one is lost.
    pub spares: u32,
    /// Workers of each node: a number, or a word of `phalanx run`.
    pub workers: String,
    /// GPUs of each node.
    pub gpus: u32,
    /// Cores of each node; none for whole nodes.
    pub cores: Option<u32>,
    /// How long it may take.
    pub time: Option<Duration>,
    /// Where it is queued.
    pub partition: Option<String>,
    /// Numbers of jobs that are alike, as in `0-15%4`.
    pub array: Option<String>,
    /// More options of `sbatch`, each with its dashes.
    pub options: Vec<String>,
    /// The run directory, if it is to have another name than the job.
    pub out: Option<String>,
    /// How often workers are started again.
    pub max_restarts: usize,
    /// The binary.
    pub phalanx: String,
    /// What is to be done.
    pub work: Work,
}

impl Submission {
    /// Whether nodes may come and go.
    fn is_elastic(&self) -> bool {
        self.nodes.0 < self.nodes.1
    }

    /// Whether the run goes on when a node is lost.
    fn survives(&self) -> bool {
        self.is_elastic() || self.spares > 0
    }

    /// The run directory of the job of this number, by which Slurm also writes those of an array: `7_3`, or `7_%a` for whichever.
    pub fn run_dir(&self, job: &str) -> String {
        match (&self.out, job.split_once('_')) {
            (Some(out), Some((_, task))) => format!("{out}/{task}"),
            (Some(out), None) => out.clone(),
            (None, _) => format!("runs/{}-{job}", self.name),
        }
    }
}

/// What the second line of each begins with.
const WRITTEN: &str = "# Written by `phalanx slurm submit`: ";

/// The run directory that a script of ours gives the job of this number; none if it is somebody else's.
pub fn run_dir(script: &str, job: &str) -> Option<String> {
    script.lines().nth(1).filter(|line| line.starts_with(WRITTEN))?;
    let out = script.lines().find_map(|line| line.strip_prefix("out="))?;
    if let Some(stem) = out.strip_suffix("-$job") {
        return Some(format!("{stem}-{job}"));
    }
    Some(match (out.strip_suffix("/$SLURM_ARRAY_TASK_ID"), job.split_once('_')) {
        (Some(out), Some((_, task))) => format!("{}/{task}", unquoted(out)),
        _ => unquoted(out),
    })
}

/// Its script.
pub fn script(job: &Submission) -> String {
    let is_array = job.array.is_some();
    let mut text = String::new();
    let mut line = |line: &str| {
        // A string takes everything.
        let _ = writeln!(text, "{line}");
    };
    line("#!/bin/bash");
    line(&format!("{WRITTEN}an agent on each node, which starts {} there.", workers(&job.workers)));
    for option in directives(job) {
        line(&format!("#SBATCH {option}"));
    }
    line("");
    match is_array {
        true => line("job=${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID"),
        false => line("job=$SLURM_JOB_ID"),
    }
    match &job.out {
        Some(out) if is_array => line(&format!("out={}/$SLURM_ARRAY_TASK_ID", quoted(out))),
        Some(out) => line(&format!("out={}", quoted(out))),
        None => line(&format!("out={}-$job", quoted(&format!("runs/{}", job.name)))),
    }
    line("");
    line(
        "# Nodes find each other by what Slurm tells each task: no addresses, ports or ranks are needed here.",
    );
    line("rm -f \"$out/exit-code\"");
    if job.survives() {
        line(&format!(
            "# An agent that hangs for good would hold the nodes: {LEFT_BEHIND} s after the run the step is over."
        ));
        line(&format!(
            "(until [ -s \"$out/exit-code\" ]; do sleep 5; done; sleep {LEFT_BEHIND}; scancel -s KILL \"$job.0\" 2> /dev/null) &"
        ));
    }
    srun(job).iter().for_each(|part| line(part));
    line("code=$?");
    if job.survives() {
        line("{ kill $! && wait $!; } 2> /dev/null");
    }
    line("# An agent that was lost on the way has its part in that code, and none in how the run ended.");
    line("[ ! -s \"$out/exit-code\" ] || code=$(cat \"$out/exit-code\")");
    line("");
    line("# A controller that is just being restarted takes no requests.");
    line("requeue() {");
    line(&format!(
        "    for try in {{1..{TRIES}}}; do scontrol requeue \"$job\" && return; sleep {BETWEEN}; done"
    ));
    line("}");
    line("");
    line(&format!(
        "# {DRAINED}: the time was nearly up, the machine is wanted back, or a node was lost; the run goes on where it has stopped."
    ));
    line(&format!(
        "if [ $code = {DRAINED} ] && [ \"${{SLURM_RESTART_COUNT:-0}}\" -lt {MOST_REQUEUES} ]; then"
    ));
    line("    requeue");
    line("fi");
    line("");
    line(&format!(
        "# {TERMINATED}: SIGTERM has ended it. If others take the nodes, Slurm counts that as the end of the job, unless"
    ));
    line("# it is requeued now; scancel is left to be the end.");
    line(&format!(
        "if [ $code = {TERMINATED} ] && scontrol show job \"$job\" | grep -q 'PreemptTime=[0-9]'; then"
    ));
    line("    requeue");
    line("fi");
    line("exit $code");
    text
}

/// What stands behind `#SBATCH`.
fn directives(job: &Submission) -> Vec<String> {
    let (least, most) = (job.nodes.0, job.nodes.1 + job.spares);
    let mut all = vec![format!("--job-name={}", job.name)];
    all.push(if job.is_elastic() { format!("--nodes={least}-{most}") } else { format!("--nodes={most}") });
    // Beside it Slurm counts the tasks of the fewest nodes, and gives no more nodes than these need.
    all.extend((!job.is_elastic()).then(|| "--ntasks-per-node=1".to_owned()));
    all.push(job.cores.map_or("--exclusive".into(), |cores| format!("--cpus-per-task={cores}")));
    all.extend((job.gpus > 0).then(|| format!("--gpus-per-node={}", job.gpus)));
    all.extend(job.time.map(|time| format!("--time={}", written(time))));
    all.extend(job.partition.as_ref().map(|partition| format!("--partition={partition}")));
    all.extend(job.array.as_ref().map(|array| format!("--array={array}")));
    let warned = matches!(job.work, Work::Train(_)) && job.time.is_some_and(|time| time >= LONG);
    // Without B: it is for the tasks, which is what agents want.
    all.extend(warned.then(|| format!("--signal=USR1@{AHEAD}")));
    all.push("--requeue".into());
    all.push("--open-mode=append".into());
    all.push(format!("--output={}", if job.array.is_some() { "%x-%A_%a.out" } else { "%x-%j.out" }));
    // A node that is lost would take the whole job with it.
    all.extend(job.survives().then(|| "--no-kill".to_owned()));
    all.extend(job.options.iter().map(|option| whole(option)));
    all
}

/// An option whose value is one word to sbatch, too.
fn whole(option: &str) -> String {
    match option.split_once('=') {
        Some((name, value)) if !name.contains(' ') && value.contains(' ') && !value.contains(['"', '\'']) => {
            format!("{name}=\"{value}\"")
        }
        _ => option.to_owned(),
    }
}

/// The step, a line a part.
fn srun(job: &Submission) -> Vec<String> {
    let (least, most) = job.nodes;
    let mut step = String::from("srun --ntasks-per-node=1");
    step.push_str(match job.cores {
        // It isn't taken over from the job by all versions.
        Some(_) => " --cpus-per-task=$SLURM_CPUS_PER_TASK",
        // One task a node would be bound to one core.
        None => " --cpu-bind=none",
    });
    // Agents end together; who is left behind by all others isn't waited for. Where nodes come and go some end before, and the script
    // watches for the end of the run instead.
    step.push_str(if job.survives() {
        " --no-kill --kill-on-bad-exit=0"
    } else {
        " --kill-on-bad-exit=0 --wait=60"
    });
    let mut nodes = if job.is_elastic() { format!(" --nnodes={least}:{most}") } else { String::new() };
    if job.spares > 0 {
        nodes.push_str(&format!(" --spares={}", job.spares));
    }
    let phalanx = quoted(&job.phalanx);
    let agent = format!(
        "{phalanx} run{nodes} --nproc-per-node={} --max-restarts={} --out=\"$out\" --exit-code-to=\"$out/exit-code\" --",
        job.workers, job.max_restarts
    );
    let (command, typed) = match &job.work {
        Work::Train(typed) => (format!("{phalanx} train"), typed),
        Work::Program(typed) => (String::new(), typed),
    };
    let words = typed.iter().map(|word| quoted(word)).collect::<Vec<_>>().join(" ");
    let mut command = format!("{command} {words}").trim().to_owned();
    if let Work::Train(typed) = &job.work {
        command.push_str(" --resume --out=\"$out\"");
        if job.array.is_some() && !typed.iter().any(|word| word.starts_with("--seed")) {
            // Jobs of an array differ in something.
            command.push_str(" --seed \"$SLURM_ARRAY_TASK_ID\"");
        }
    }
    vec![format!("{step} \\"), format!("    {agent} \\"), format!("    {command}")]
}

fn workers(workers: &str) -> String {
    match workers {
        "1" => "1 worker".into(),
        "auto" | "gpu" => "a worker for each GPU".into(),
        "cpu" => "a worker for each core".into(),
        number => format!("{number} workers"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::slurm::lint::lint;
    use std::process::Command;

    fn job() -> Submission {
        Submission {
            name: "mnist".into(),
            nodes: (2, 2),
            spares: 0,
            workers: "8".into(),
            gpus: 8,
            cores: None,
            time: Some(Duration::from_secs(8 * 3600)),
            partition: Some("gpu".into()),
            array: None,
            options: Vec::new(),
            out: None,
            max_restarts: 3,
            phalanx: "/opt/phalanx".into(),
            work: Work::Train(vec!["mnist".into(), "--epochs".into(), "9".into()]),
        }
    }

    #[test]
    fn a_script_is_short_and_says_everything_once() {
        let want = r#"#!/bin/bash
# Written by `phalanx slurm submit`: an agent on each node, which starts 8 workers there.
#SBATCH --job-name=mnist
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --exclusive
#SBATCH --gpus-per-node=8
#SBATCH --time=08:00:00
#SBATCH --partition=gpu
#SBATCH --signal=USR1@90
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=%x-%j.out

job=$SLURM_JOB_ID
out=runs/mnist-$job

# Nodes find each other by what Slurm tells each task: no addresses, ports or ranks are needed here.
rm -f "$out/exit-code"
srun --ntasks-per-node=1 --cpu-bind=none --kill-on-bad-exit=0 --wait=60 \
    /opt/phalanx run --nproc-per-node=8 --max-restarts=3 --out="$out" --exit-code-to="$out/exit-code" -- \
    /opt/phalanx train mnist --epochs 9 --resume --out="$out"
code=$?
# An agent that was lost on the way has its part in that code, and none in how the run ended.
[ ! -s "$out/exit-code" ] || code=$(cat "$out/exit-code")

# A controller that is just being restarted takes no requests.
requeue() {
    for try in {1..24}; do scontrol requeue "$job" && return; sleep 5; done
}

# 75: the time was nearly up, the machine is wanted back, or a node was lost; the run goes on where it has stopped.
if [ $code = 75 ] && [ "${SLURM_RESTART_COUNT:-0}" -lt 100 ]; then
    requeue
fi

# 143: SIGTERM has ended it. If others take the nodes, Slurm counts that as the end of the job, unless
# it is requeued now; scancel is left to be the end.
if [ $code = 143 ] && scontrol show job "$job" | grep -q 'PreemptTime=[0-9]'; then
    requeue
fi
exit $code
"#;
        assert_eq!(script(&job()), want);
    }

    #[test]
    fn what_is_asked_for_stands_in_it() {
        let elastic = Submission {
            nodes: (1, 4),
            cores: Some(16),
            gpus: 0,
            array: Some("0-15%4".into()),
            options: vec!["--account=lab".into(), "--comment=two words".into()],
            out: Some("it's here".into()),
            time: Some(Duration::from_secs(60)),
            ..job()
        };
        let text = script(&elastic);
        let parts = [
            "#SBATCH --nodes=1-4\n",
            "#SBATCH --cpus-per-task=16\n",
            "#SBATCH --no-kill\n",
            "#SBATCH --account=lab\n",
            "#SBATCH --comment=\"two words\"\n",
            "#SBATCH --array=0-15%4\n",
            "#SBATCH --output=%x-%A_%a.out\n",
            "job=${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID\n",
            r"out='it'\''s here'/$SLURM_ARRAY_TASK_ID",
            "srun --ntasks-per-node=1 --cpus-per-task=$SLURM_CPUS_PER_TASK --no-kill --kill-on-bad-exit=0 \\\n",
            "run --nnodes=1:4 --nproc-per-node=8",
            "--out=\"$out\" --exit-code-to=\"$out/exit-code\" -- ",
            "--seed \"$SLURM_ARRAY_TASK_ID\"",
            "sleep 30; scancel -s KILL \"$job.0\" 2> /dev/null) &\nsrun ",
        ];
        parts.iter().for_each(|part| assert!(text.contains(part), "{part} is missing:\n{text}"));
        ["--gpus-per-node", "--signal", "--wait", "--exclusive", "#SBATCH --ntasks-per-node"]
            .iter()
            .for_each(|part| assert!(!text.contains(part), "{part} is in:\n{text}"));
        let text = script(&Submission { spares: 1, ..job() });
        let parts = [
            "#SBATCH --nodes=3\n#SBATCH --ntasks-per-node=1\n",
            "#SBATCH --no-kill\n",
            "run --spares=1 --nproc-per-node=8",
        ];
        parts.iter().for_each(|part| assert!(text.contains(part), "{part} is missing:\n{text}"));
        assert!(text.contains(" --no-kill --kill-on-bad-exit=0 \\\n") && text.contains("$job.0"), "{text}");
        let program = Submission { work: Work::Program(vec!["./train".into(), "a b".into()]), ..job() };
        let text = script(&program);
        assert!(text.contains("--exit-code-to=\"$out/exit-code\" -- \\\n    ./train 'a b'\n"), "{text}");
        assert!(!text.contains("--signal"), "a program that doesn't know it would die of it:\n{text}");
    }

    #[test]
    fn the_run_directory_is_read_from_a_script() {
        for (out, array) in [(None, false), (None, true), (Some("it's here"), false), (Some("/a b"), true)] {
            let array = array.then(|| "0-3".to_owned());
            let number = if array.is_some() { "7_3" } else { "7" };
            let job = Submission { out: out.map(str::to_owned), array, ..job() };
            assert_eq!(run_dir(&script(&job), number), Some(job.run_dir(number)));
        }
        assert_eq!(run_dir("#!/bin/bash\nout=runs\n", "7"), None);
    }

    #[test]
    fn scripts_are_bash_and_have_none_of_the_classic_mistakes() {
        let program = Submission { work: Work::Program(vec!["./train".into()]), ..job() };
        let several = [
            job(),
            program,
            Submission { nodes: (1, 3), cores: Some(4), array: Some("1-3".into()), ..job() },
            Submission { spares: 2, ..job() },
        ];
        for job in several {
            let text = script(&job);
            assert_eq!(lint(&text, &|_| true), [], "{text}");
            let bash = Command::new("bash").args(["-n", "-c", &text]).output().unwrap();
            assert!(bash.status.success(), "{text}\n{}", String::from_utf8_lossy(&bash.stderr));
        }
    }
}
