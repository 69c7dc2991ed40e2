//! The rules, a row each.

use super::text::{defined, joined, program};
use super::{Line, Script, words};

/// What a rule finds: the line, why, and what to write instead.
type Found = Vec<(usize, String, String)>;
type Rule = fn(&Script<'_>) -> Found;

pub(super) const RULES: &[(&str, Rule)] = &[
    ("shebang", shebang),
    ("line-ends", line_ends),
    ("late-directive", late_directive),
    ("not-a-directive", not_a_directive),
    ("variable-in-directive", variable_in_directive),
    ("time", time),
    ("memory", memory),
    ("output-folder", output_folder),
    ("open-mode", open_mode),
    ("tasks", tasks),
    ("cpus-per-task", cpus_per_task),
    ("one-node", one_node),
    ("agent-tasks", agent_tasks),
    ("agent-nodes", agent_nodes),
    ("agent-endpoint", agent_endpoint),
    ("workers", workers),
    ("node-rank", node_rank),
    ("head-node", head_node),
    ("port", port),
    ("bad-exit", bad_exit),
    ("no-kill", no_kill),
    ("signal", signal),
    ("requeue-array", requeue_array),
    ("exit-code", exit_code),
    ("background", background),
    ("visible-devices", visible_devices),
];

/// Programs that start the workers of a node.
const AGENTS: [&str; 3] = ["torchrun", "accelerate", "torch.distributed.run"];
/// Programs that start something on all nodes by themselves.
const LAUNCHERS: [&str; 6] = ["mpirun", "mpiexec", "orterun", "deepspeed", "horovodrun", "colossalai"];

fn one(line: usize, why: impl Into<String>, instead: impl Into<String>) -> Found {
    vec![(line, why.into(), instead.into())]
}

/// Whether a command starts an agent a node.
fn is_agent(line: &Line<'_>) -> bool {
    AGENTS.iter().any(|agent| line.runs(agent)) || is_phalanx(line, "run")
}

/// Whether it runs `phalanx` with this command.
fn is_phalanx(line: &Line<'_>, command: &str) -> bool {
    line.words.windows(2).any(|words| words[0].rsplit('/').next() == Some("phalanx") && words[1] == command)
}

/// Whether it runs a program of several ranks, as far as its words tell.
fn is_training(line: &Line<'_>) -> bool {
    // It may be run for its output.
    let name = |word: &str| {
        word.rsplit('/').next().unwrap_or_default().trim_start_matches(['$', '(', '`']).to_owned()
    };
    let is_python = |word: &str| name(word).starts_with("python");
    let is_script = |word: &str| word.ends_with(".py");
    let runs_script = line.commands().any(|command| {
        let words = &command.words;
        let is_run = words.iter().any(|word| is_python(word) || word == "srun")
            || program(words).is_some_and(is_script);
        is_run && words.iter().any(|word| is_script(word))
    });
    is_agent(line) || is_phalanx(line, "train") || runs_script
}

/// Whether it only says what a word stands for.
fn is_assignment(line: &Line<'_>) -> bool {
    let first = line.words.first();
    first.is_some_and(|word| {
        word.contains('=') || ["export", "declare", "local", "readonly"].contains(&word.as_str())
    })
}

impl<'a> Script<'a> {
    fn steps(&self) -> impl Iterator<Item = &Line<'a>> {
        self.lines.iter().filter(|line| line.runs("srun"))
    }

    fn tasks_per_node(&self) -> Option<(usize, u64)> {
        self.directives.number(&["--ntasks-per-node"])
    }

    /// Tasks of a step, where they are known.
    fn tasks(&self) -> Option<u64> {
        let per_node = self.tasks_per_node().map(|(_, n)| n * self.directives.nodes());
        self.directives.number(&["--ntasks", "-n"]).map(|(_, n)| n).or(per_node)
    }
}

fn shebang(script: &Script<'_>) -> Found {
    match script.raw.first() {
        Some((_, first)) if first.starts_with("#!") => Vec::new(),
        _ => one(1, "sbatch refuses a script that doesn't begin with the shell that runs it", "#!/bin/bash"),
    }
}

fn line_ends(script: &Script<'_>) -> Found {
    let found = script.raw.iter().find(|(_, line)| line.contains('\r'));
    found.map_or(Vec::new(), |(line, text)| {
        one(*line, "sbatch refuses lines that end as on DOS (a carriage return)", text.replace('\r', ""))
    })
}

fn late_directive(script: &Script<'_>) -> Found {
    let late = script.directives.all.iter().filter(|directive| directive.is_late);
    late.map(|directive| {
        let why = "it stands behind the first command, so sbatch takes it for a comment";
        (directive.line, why.into(), format!("{} (above all commands)", directive.text))
    })
    .collect()
}

fn not_a_directive(script: &Script<'_>) -> Found {
    let of_script = script.raw.iter().filter(|(line, _)| !script.documents.contains(line));
    let found = of_script.filter_map(|(line, text)| Some((*line, meant(text)?)));
    found
        .map(|(line, rest)| (line, "sbatch takes this for a comment".into(), format!("#SBATCH {rest}")))
        .collect()
}

/// What stands behind a misspelt `#SBATCH`.
fn meant(line: &str) -> Option<&str> {
    let rest = line.trim().strip_prefix('#')?.trim_start();
    let (word, rest) = rest.split_at_checked(6)?;
    let is_meant = word.eq_ignore_ascii_case("sbatch") && rest.trim_start().starts_with('-');
    (is_meant && !line.starts_with("#SBATCH ")).then(|| rest.trim())
}

fn variable_in_directive(script: &Script<'_>) -> Found {
    let found =
        script.directives.all.iter().filter(|directive| !directive.is_late && directive.text.contains('$'));
    found
        .map(|directive| {
            let why = "sbatch expands no variables in its lines: this is taken word by word";
            let instead = if directive.text.contains("--output") || directive.text.contains("--error") {
                "#SBATCH --output=%x-%j.out (%j is the job, %x its name; or give it to sbatch on the command line)"
            } else {
                "the value itself, or the option on the command line of sbatch"
            };
            (directive.line, why.into(), instead.into())
        })
        .collect()
}

fn time(script: &Script<'_>) -> Found {
    let Some((line, value)) = script.directives.get(&["--time", "-t"]) else { return Vec::new() };
    let parts_are_numbers =
        |text: &str| !text.is_empty() && text.split([':', '-']).all(|part| part.parse::<u32>().is_ok());
    if let Ok(minutes) = value.parse::<u64>()
        && is_of_hours(minutes)
    {
        let why = format!("{minutes} is minutes");
        return one(
            line,
            why,
            format!("#SBATCH --time={minutes}:00:00 for hours, or --time=00:{minutes:02}:00"),
        );
    }
    if parts_are_numbers(&value) || ["infinite", "unlimited"].contains(&value.to_lowercase().as_str()) {
        return Vec::new();
    }
    let why = format!("Slurm doesn't read {value:?} as a time");
    let hours = value.strip_suffix('h').filter(|hours| hours.parse::<u32>().is_ok()).unwrap_or("8");
    one(line, why, format!("#SBATCH --time={hours}:00:00"))
}

/// Whether it is a number that people think of in hours.
fn is_of_hours(number: u64) -> bool {
    matches!(number, 1..10 | 12 | 18 | 24 | 36 | 48 | 72 | 96)
}

fn memory(script: &Script<'_>) -> Found {
    let names = ["--mem", "--mem-per-cpu", "--mem-per-gpu"];
    let found = names.iter().filter_map(|name| Some((name, script.directives.number(&[*name])?)));
    let least = |name: &str| if name == "--mem-per-cpu" { 64 } else { 1024 };
    let small = found.filter(|(name, (_, megabytes))| (1..least(name)).contains(megabytes));
    small
        .map(|(name, (line, n))| (line, format!("{n} is megabytes"), format!("#SBATCH {name}={n}G")))
        .collect()
}

fn output_folder(script: &Script<'_>) -> Found {
    let names: [&[&str]; 2] = [&["--output", "-o"], &["--error", "-e"]];
    let found = names.iter().filter_map(|names| script.directives.get(names));
    let missing = found.filter_map(|(line, path)| {
        let (folder, _) = path.rsplit_once('/')?;
        (!folder.is_empty() && !folder.contains(['%', '$']) && !(script.folder_exists)(folder))
            .then(|| (line, folder.to_owned()))
    });
    missing
        .map(|(line, folder)| {
            let why = "Slurm doesn't make folders: without it the job fails at once, and without a word";
            (line, why.into(), format!("mkdir -p {folder} (once, before sbatch)"))
        })
        .collect()
}

fn open_mode(script: &Script<'_>) -> Found {
    match (script.directives.get(&["--requeue"]), script.directives.get(&["--open-mode"])) {
        (Some((line, _)), None) => one(
            line,
            "each start of a requeued job writes over the output of the one before",
            "#SBATCH --open-mode=append",
        ),
        _ => Vec::new(),
    }
}

fn tasks(script: &Script<'_>) -> Found {
    let (nodes, per_node) = (script.directives.nodes(), script.tasks_per_node());
    // Without it there are as many nodes as the tasks need.
    if script.directives.get(&["--nodes", "-N"]).is_none() || script.directives.is_several_jobs() {
        return Vec::new();
    }
    match (script.directives.number(&["--ntasks", "-n"]), per_node) {
        (Some((line, total)), Some((_, per_node))) if total != nodes * per_node => one(
            line,
            format!(
                "{nodes} nodes with {per_node} tasks each are {} tasks, and not {total}",
                nodes * per_node
            ),
            format!("#SBATCH --ntasks={} (or leave it out)", nodes * per_node),
        ),
        _ => Vec::new(),
    }
}

fn cpus_per_task(script: &Script<'_>) -> Found {
    let Some((_, cpus)) = script.directives.get(&["--cpus-per-task", "-c"]) else { return Vec::new() };
    let exported = script.lines.iter().any(|line| line.text.contains("SRUN_CPUS_PER_TASK"));
    if exported || cpus == "1" || script.directives.is_several_jobs() {
        return Vec::new();
    }
    let bare = script.steps().filter(|step| step.flag(&["--cpus-per-task", "-c"]).is_none());
    let bare = bare.filter(|step| step.flag(&["--cpu-bind"]).as_deref() != Some("none"));
    bare.map(|step| {
        let why = "since Slurm 22.05 srun doesn't take --cpus-per-task over from the job: each task is bound to one core";
        let instead = step.text.replacen("srun", "srun --cpus-per-task=$SLURM_CPUS_PER_TASK", 1);
        (step.number, why.into(), instead)
    })
    .collect()
}

fn one_node(script: &Script<'_>) -> Found {
    let nodes = script.directives.nodes();
    let starts_elsewhere = |line: &Line<'_>| LAUNCHERS.iter().any(|launcher| line.runs(launcher));
    // Ray hands what a program gives it to those that it was started on.
    if nodes < 2 || script.directives.is_several_jobs() || script.lines.iter().any(|line| line.runs("ray")) {
        return Vec::new();
    }
    let bare = script.lines.iter().filter(|line| {
        is_training(line) && !line.runs("srun") && !line.text.contains("ssh ") && !starts_elsewhere(line)
    });
    // A command that is kept in a variable is started elsewhere.
    let bare = bare.filter(|line| !is_assignment(line));
    // What one process does before all train, or behind that.
    let has_step = script.steps().any(is_training);
    let bare = bare.filter(|line| !has_step || is_agent(line) || is_phalanx(line, "train"));
    // Nor can srun run a function, which may well run srun.
    let is_function = |name: &str| script.functions.iter().any(|function| function == name);
    let is_called = |command: &Line<'_>| {
        defined(&command.text).is_none() && program(&command.words).is_some_and(is_function)
    };
    let bare =
        bare.filter(|line| line.commands().any(|command| is_training(&command) && !is_called(&command)));
    bare.map(|line| {
        let why = format!("without srun it runs on the first of the {nodes} nodes alone");
        let option = if is_agent(line) { "srun --ntasks-per-node=1" } else { "srun" };
        (line.number, why, format!("{option} {}", line.text))
    })
    .collect()
}

fn agent_tasks(script: &Script<'_>) -> Found {
    let job = script.tasks_per_node();
    let agents = script.steps().filter(|step| is_agent(step));
    agents
        .filter_map(|step| {
            let own = step.flag(&["--ntasks-per-node"]).and_then(|n| n.parse().ok());
            let tasks = own.or(job.map(|(_, n)| n)).filter(|&n: &u64| n > 1)?;
            let why = format!(
                "this is an agent, which starts the workers of its node: {tasks} of them would each start all"
            );
            let instead = match own {
                Some(_) => step.text.replace(&format!("--ntasks-per-node={tasks}"), "--ntasks-per-node=1"),
                None => step.text.replacen("srun", "srun --ntasks-per-node=1", 1),
            };
            Some((step.number, why, instead))
        })
        .collect()
}

fn agent_nodes(script: &Script<'_>) -> Found {
    let (nodes, asked) = (script.directives.nodes(), script.directives.get(&["--nodes", "-N"]));
    let agents = script.lines.iter().filter(|line| is_agent(line));
    agents
        .filter_map(|line| {
            let typed = line.flag(&["--nnodes"])?;
            let most: u64 = typed.rsplit(':').next()?.parse().ok()?;
            let job =
                asked.as_ref().map_or("has one node".into(), |(at, _)| format!("has {nodes} (line {at})"));
            let instead = line.text.replace(&typed, "$SLURM_JOB_NUM_NODES");
            (most > nodes || (most < nodes && !typed.contains(':')))
                .then(|| (line.number, format!("--nnodes is {typed}, and the job {job}"), instead))
        })
        .collect()
}

fn workers(script: &Script<'_>) -> Found {
    let Some(gpus) = script.directives.gpus() else { return Vec::new() };
    let agents = script.lines.iter().filter(|line| is_agent(line));
    agents
        .filter_map(|line| {
            let typed = line.flag(&["--nproc-per-node"])?;
            let workers: u64 = typed.parse().ok().filter(|&workers| workers != gpus)?;
            let why = format!("{workers} workers a node, which has {gpus} GPUs for the job");
            Some((line.number, why, line.text.replace(&format!("={typed}"), &format!("={gpus}"))))
        })
        .collect()
}

fn node_rank(script: &Script<'_>) -> Found {
    let found = script.steps().filter_map(|step| {
        let value = step.flag(&["--node-rank", "--machine-rank"])?;
        let is_early = ["$SLURM_NODEID", "$SLURM_PROCID", "${SLURM_NODEID}", "${SLURM_PROCID}"]
            .contains(&value.as_str());
        // In single quotes, or with a backslash, it is for the shell of the task.
        (is_early && !step.text.contains('\'')).then(|| {
            let why = format!(
                "{value} is expanded once, by the script, which runs on node 0: every node is told 0"
            );
            if step.text.contains("bash -c \"") {
                // What else stands there may be meant for the script.
                return (step.number, why, step.text.replacen(&value, &format!("\\{value}"), 1));
            }
            let (before, command) = step
                .text
                .split_once(AGENTS.iter().find(|a| step.runs(a)).copied().unwrap_or("torchrun"))
                .unwrap_or((&step.text, ""));
            let agent = AGENTS.iter().find(|a| step.runs(a)).copied().unwrap_or("torchrun");
            (step.number, why, format!("{before}bash -c '{agent}{command}'"))
        })
    });
    found.collect()
}

fn head_node(script: &Script<'_>) -> Found {
    let right = |line: &Line<'_>| {
        let export = if line.text.trim_start().starts_with("export ") { "export " } else { "" };
        format!("{export}MASTER_ADDR=$(scontrol show hostnames \"$SLURM_JOB_NODELIST\" | head -n 1)")
    };
    let mut found = Found::new();
    for line in &script.lines {
        let is_list = line.text.contains("SLURM_JOB_NODELIST") || line.text.contains("SLURM_NODELIST");
        let by_hand =
            ["cut ", "sed ", "awk ", "tr ", "%%", "##", "head "].iter().any(|tool| line.text.contains(tool));
        if is_list && by_hand && !line.text.contains("scontrol show hostname") {
            let why = "lists such as rack[0-3]_blade[0-1],login can't be taken apart so: scontrol knows how";
            found.push((line.number, why.into(), right(line)));
        }
        let local = ["MASTER_ADDR=localhost", "MASTER_ADDR=127.0.0.1"]
            .iter()
            .any(|text| line.text.replace('"', "").contains(text));
        if local && script.directives.nodes() > 1 {
            found.push((line.number, "each node would look for rank 0 on itself".into(), right(line)));
        }
    }
    found
}

fn port(script: &Script<'_>) -> Found {
    let value = |line: &Line<'_>| {
        let (_, rest) = line.text.split_once("MASTER_PORT=")?;
        Some(rest.trim_matches(|c| "\"'".contains(c)).to_owned())
    };
    let why = "two jobs that share a node would take the same port";
    const FREE: &str = "$((20000 + SLURM_JOB_ID % 12000))";
    let fixed = script.lines.iter().filter_map(|line| {
        let value = value(line)?;
        let digits = value.split_whitespace().next().unwrap_or_default().trim_matches('"');
        let is_fixed = digits.parse::<u16>().is_ok();
        is_fixed.then(|| (line.number, why.into(), format!("export MASTER_PORT={FREE}")))
    });
    let typed = script.lines.iter().filter(|line| is_agent(line)).filter_map(|line| {
        let endpoint = line.flag(&["--rdzv-endpoint"]);
        let of_endpoint = endpoint.and_then(|endpoint| Some(endpoint.rsplit_once(':')?.1.to_owned()));
        let port = of_endpoint.or_else(|| line.flag(&["--master-port", "--main-process-port"]))?;
        // 0 is a free one.
        port.parse::<u16>().ok().filter(|port| *port > 0)?;
        let flag = ["endpoint", "-port", "_port"].iter().find_map(|name| line.text.find(name))?;
        let at = flag + line.text[flag..].find(&port)?;
        let instead = format!("{}{FREE}{}", &line.text[..at], &line.text[at + port.len()..]);
        Some((line.number, why.into(), instead))
    });
    fixed.chain(typed).collect()
}

/// Torchrun's own, on several nodes of which none is told where the others are.
fn agent_endpoint(script: &Script<'_>) -> Found {
    let names = ["--rdzv-endpoint", "--master-addr", "--standalone"];
    let is_told = |line: &Line<'_>| {
        let of_environment = ["PET_RDZV_ENDPOINT", "PET_MASTER_ADDR"];
        let words = &line.words;
        // More of them may be in a variable.
        let is_open = |(at, word): (usize, &String)| {
            word.starts_with('$') && at.checked_sub(1).is_none_or(|before| !words[before].starts_with('-'))
        };
        line.flag(&names).is_some()
            || words.iter().enumerate().any(is_open)
            || script.lines.iter().any(|line| of_environment.iter().any(|name| line.text.contains(name)))
    };
    let is_torchrun = |line: &&Line<'_>| line.runs("torchrun") || line.runs("torch.distributed.run");
    if script.directives.nodes() < 2 {
        return Vec::new();
    }
    let is_of_one = |line: &Line<'_>| line.flag(&["--nodes", "-N"]).is_some_and(|nodes| nodes == "1");
    let found = script.steps().filter(is_torchrun).filter(|line| !is_told(line) && !is_of_one(line));
    found
        .map(|line| {
            let why = "without an endpoint each node looks for the others on itself";
            let endpoint = "--rdzv-backend=c10d --rdzv-endpoint=$MASTER_ADDR:$MASTER_PORT";
            let agent = if line.runs("torchrun") { "torchrun" } else { "torch.distributed.run" };
            (line.number, why.into(), line.text.replacen(agent, &format!("{agent} {endpoint}"), 1))
        })
        .collect()
}

fn bad_exit(script: &Script<'_>) -> Found {
    if script.tasks().is_none_or(|tasks| tasks < 2) {
        return Vec::new();
    }
    let kills = |step: &Line<'_>| {
        // A wait of 0 has no end.
        step.flag(&["--kill-on-bad-exit", "-K"]).is_some()
            || step.flag(&["--wait", "-W"]).is_some_and(|seconds| seconds != "0")
    };
    let is_alone = |step: &Line<'_>| step.flag(&["--ntasks", "-n"]).is_some_and(|tasks| tasks == "1");
    let steps = script.steps().filter(|step| is_training(step) && !is_agent(step) && !is_alone(step));
    steps
        .filter(|step| {
            !kills(step) && !script.lines.iter().any(|line| line.text.contains("SLURM_KILL_BAD_EXIT"))
        })
        .map(|step| {
            let why = "when one rank fails, srun leaves the others waiting for it until the time is up";
            (step.number, why.into(), step.text.replacen("srun", "srun --kill-on-bad-exit=1", 1))
        })
        .collect()
}

fn no_kill(script: &Script<'_>) -> Found {
    let elastic = script.lines.iter().find(|line| {
        let comes_and_goes = line.flag(&["--nnodes"]).is_some_and(|nodes| nodes.contains(':'));
        is_agent(line) && (comes_and_goes || line.flag(&["--spares"]).is_some_and(|spares| spares != "0"))
    });
    let Some(line) = elastic else { return Vec::new() };
    let why = "the run could go on without a node, but Slurm ends the whole job with the first that is lost";
    let mut found = Found::new();
    if script.directives.get(&["--no-kill", "-k"]).is_none() {
        found.push((line.number, why.into(), "#SBATCH --no-kill".into()));
    }
    if line.runs("srun") && line.flag(&["--no-kill", "-k"]).is_none() {
        found.push((line.number, why.into(), line.text.replacen("srun", "srun --no-kill", 1)));
    }
    found
}

fn signal(script: &Script<'_>) -> Found {
    let Some((at, value)) = script.directives.get(&["--signal"]) else { return Vec::new() };
    let name = value
        .trim_start_matches(['R', 'B', ':'])
        .split('@')
        .next()
        .unwrap_or_default()
        .trim_start_matches("SIG")
        .to_owned();
    let is_trap =
        |line: &&Line<'_>| line.words.first().is_some_and(|word| word == "trap") && line.text.contains(&name);
    let trap = script.lines.iter().find(is_trap);
    let to_shell = value.split(':').next().is_some_and(|who| who.contains('B') && value.contains(':'));
    match (to_shell, trap) {
        (false, Some(trap)) => one(
            at,
            format!(
                "without B: the signal goes to the tasks of srun and never to this script: the trap in line {} isn't sprung",
                trap.number
            ),
            format!("#SBATCH --signal=B:{value}"),
        ),
        (true, None)
            if script
                .lines
                .last()
                .is_none_or(|line| line.words.first().is_none_or(|word| word != "exec")) =>
        {
            one(
                at,
                "B: is for this script, which has no trap: it dies of the signal, and the tasks don't hear of it",
                format!("#SBATCH --signal={}", value.replacen("B:", "", 1)),
            )
        }
        (true, Some(_))
            if !script.lines.iter().any(|line| line.words.first().is_some_and(|word| word == "wait")) =>
        {
            let step = script.steps().next();
            step.map_or(Vec::new(), |step| {
                let why =
                    "bash springs a trap only when the command in front has ended: srun has to run behind it";
                one(step.number, why, format!("{} & wait $!", step.text))
            })
        }
        _ => Vec::new(),
    }
}

fn requeue_array(script: &Script<'_>) -> Found {
    if script.directives.get(&["--array", "-a"]).is_none() {
        return Vec::new();
    }
    let is_whole = |line: &&Line<'_>| {
        line.text.contains("scontrol requeue")
            && line.text.contains("SLURM_JOB")
            && !line.text.contains("SLURM_ARRAY")
    };
    let found = script.lines.iter().filter(is_whole);
    found
        .map(|line| {
            let why = "one job of an array has the number of the whole array: all of it would be requeued";
            (
                line.number,
                why.into(),
                "scontrol requeue \"${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID\"".into(),
            )
        })
        .collect()
}

fn exit_code(script: &Script<'_>) -> Found {
    let Some(last) = script.lines.last().filter(|_| script.lines.iter().any(is_training)) else {
        return Vec::new();
    };
    let is_asked = |line: &Line<'_>| {
        line.words.first().is_some_and(|word| ["if", "elif", "while", "until"].contains(&word.as_str()))
    };
    if script.lines.iter().any(|line| is_training(line) && is_asked(line)) {
        return Vec::new();
    }
    let stops = script.lines.iter().any(|line| {
        line.text.starts_with("set -") && (line.text.contains('e') || line.text.contains("errexit"))
    });
    let commands = joined(&last.text).into_iter().map(|(joint, text)| (joint, words(text)));
    let commands: Vec<_> = commands.filter(|(_, words)| !words.is_empty()).collect();
    let Some(((joint, own), before)) = commands.split_last() else { return Vec::new() };
    let (why, instead) = match *joint {
        "|" | "|&"
            if is_training(last) && !script.lines.iter().any(|line| line.text.contains("pipefail")) =>
        {
            ("a pipe ends with the code of its last command", format!("set -o pipefail; {}", last.text))
        }
        "|" | "|&" => return Vec::new(),
        // What comes behind that is heard only where the training went well.
        "&&" if !before.iter().all(|(_, words)| is_idle(words)) => return Vec::new(),
        _ if *own == ["wait"] => {
            let instead =
                "wait $! (several behind it: wait for each by its number, and exit with the worst code)";
            ("wait by itself ends with 0, however those ended that it waited for", instead.into())
        }
        _ if is_idle(own) && !stops => {
            let code = format!("code=$?; {}; exit $code (with code=$? right behind the training)", last.text);
            ("the job ends with the code of its last command", code)
        }
        _ => return Vec::new(),
    };
    one(last.number, format!("{why}: it counts as completed when the training has failed"), instead)
}

/// Whether this goes well whatever was before it.
fn is_idle(words: &[String]) -> bool {
    const IDLE: [&str; 12] = [
        "echo",
        "date",
        "deactivate",
        "printf",
        "module",
        "cat",
        "ls",
        "tail",
        "hostname",
        "seff",
        "sacct",
        "nvidia-smi",
    ];
    program(words).is_some_and(|program| IDLE.contains(&program))
}

fn background(script: &Script<'_>) -> Found {
    let waits = |line: &Line<'_>| line.commands().any(|command| program(&command.words) == Some("wait"));
    let Some(last) = script.lines.last().filter(|_| !script.lines.iter().any(waits)) else {
        return Vec::new();
    };
    match last.text.ends_with('&') && is_training(last) {
        true => one(
            last.number,
            "the job ends with this script, which doesn't wait for what it has started behind it",
            format!("{} wait $!", last.text),
        ),
        false => Vec::new(),
    }
}

fn visible_devices(script: &Script<'_>) -> Found {
    if script.directives.gpus().is_none() {
        return Vec::new();
    }
    let found = script
        .lines
        .iter()
        .filter(|line| line.text.contains("CUDA_VISIBLE_DEVICES=") && !line.text.contains("srun"));
    found
        .map(|line| {
            let why = "Slurm sets it to the GPUs that the job has; numbers of one's own may be those of another job";
            let raw = line.raw.trim();
            (line.number, why.into(), format!("leave it out: # {raw}"))
        })
        .collect()
}
