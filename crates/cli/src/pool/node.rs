//! `phalanx pool node`: an agent of a job is a `phalanx run` of its own, which meets the others of its run where the first one is.

use super::flags::NodeArgs;
use super::{address, secret};
use crate::args::WrongUsage;
use crate::run::{Gpus, worker_count};
use crate::say::{harmless, say};
use crate::work::own_path;
use anyhow::Result;
use phalanx_job::{Work, host_name, names};
use phalanx_pool::{NodeConfig, Start, check_name, run_node};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::iterator::Signals;
use std::fmt::Display;
use std::fs::{self, OpenOptions};
use std::io;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::mpsc::channel;
use std::thread;

pub(crate) fn node(args: &NodeArgs) -> Result<u8> {
    let gpus = Gpus::of_this_machine();
    let slots = worker_count("--slots", &args.slots, phalanx::cores(), &gpus)?;
    let name = args.name.clone().unwrap_or_else(host_name);
    check_name(&name).map_err(|why| WrongUsage(format!("--name {why}")))?;
    let devices = (args.slots != "cpu" && slots <= gpus.count()).then(|| gpus.named(slots));
    let having = if devices.is_some() { ", each with a GPU of its own" } else { "" };
    say(format_args!("node {name}: room for {slots} workers{having}"));
    let machine = Machine {
        phalanx: own_path()?.into(),
        secret_file: args.to.secret_file.as_deref().map(std::path::absolute).transpose()?,
        threads: (phalanx::cores() / slots).max(1),
        devices,
    };
    let (lines, said) = channel();
    let config = NodeConfig {
        pool: address(&args.to.pool, "--pool")?,
        secret: secret(args.to.secret_file.as_deref())?,
        name,
        slots: slots as u32,
        address: args.local_addr.clone(),
        command: Arc::new(move |start, endpoint| machine.agent(start, endpoint)),
        say: Box::new(move |line| drop(lines.send(line.to_owned()))),
    };
    // A terminal that is stopped keeps nobody but this.
    let speaking = thread::Builder::new().name("phalanx-say".into());
    let speaking = speaking.spawn(move || said.iter().for_each(|line| say(harmless(&line))))?;
    let mut signals = Signals::new([SIGTERM, SIGINT, SIGHUP])?;
    let left = run_node(config, |leaver| {
        let waiting = thread::Builder::new().name("phalanx-signals".into());
        let spawned = waiting.spawn(move || signals.forever().for_each(|_| leaver.leave()));
        if let Err(error) = spawned {
            say(format_args!("no thread for signals, which end this at once: {error}"));
        }
    });
    // It has all been said once nobody can say more.
    let _ = speaking.join();
    left?;
    say("the node has left");
    Ok(0)
}

/// What agents are given here.
struct Machine {
    phalanx: PathBuf,
    secret_file: Option<PathBuf>,
    /// The threads of each worker, as long as all slots are taken.
    threads: usize,
    /// What says which GPUs are seen, and the GPU of each slot.
    devices: Option<(&'static str, Vec<String>)>,
}

impl Machine {
    /// What is wrong with the job's folders is an error of the kind `InvalidInput`.
    fn agent(&self, start: &Start, endpoint: &str) -> io::Result<Command> {
        let (spec, id) = (&start.spec, start.id);
        if !spec.folder.is_dir() {
            return Err(of_job(&spec.folder, "there is no such folder here"));
        }
        let out = spec.run_dir(id.job);
        let logs = out.join("agents");
        fs::create_dir_all(&logs).map_err(|error| of_job(&logs, error))?;
        let log = logs.join(format!("{}-{}.log", id.attempt, id.agent));
        let log =
            OpenOptions::new().create(true).append(true).open(&log).map_err(|error| of_job(&log, error))?;
        let mut command = Command::new(&self.phalanx);
        command.arg("run").args(["--nproc-per-node", &spec.workers.to_string()]);
        command.args(["--max-restarts", &spec.max_restarts.to_string()]);
        if spec.most > 1 {
            command.args(["--nnodes", &format!("{}:{}", spec.least, spec.most)]);
            command.args([
                "--rdzv-endpoint",
                endpoint,
                "--rdzv-id",
                &format!("pool-{}-{}", id.job, id.attempt),
            ]);
            // Those that are to begin with it are on their way, and more may come at any time. One that came where the first
            // was, and is no more, would begin a run of its own.
            let is_host = id.agent == 0;
            command.args(["--rdzv-conf", &format!("is_host={is_host},join_timeout=60,last_call_timeout=0")]);
            command.args(self.secret_file.iter().flat_map(|file| [Path::new("--secret-file"), file]));
        }
        command.arg("--out").arg(&out).arg("--");
        match &spec.work {
            Work::Train(typed) => {
                command.arg(&self.phalanx).arg("train").args(typed).arg("--resume").arg("--out").arg(&out)
            }
            Work::Program(typed) => command.args(typed),
        };
        command.envs(spec.variables.iter().cloned()).current_dir(&spec.folder);
        let threads = self.threads.to_string();
        command.env(names::THREADS, &threads).env(names::OMP_NUM_THREADS, &threads);
        if let Some((variable, devices)) = &self.devices {
            let own = start.slots.iter().filter_map(|slot| devices.get(*slot as usize));
            command.env(variable, own.cloned().collect::<Vec<String>>().join(","));
        }
        command.stdin(Stdio::null()).stdout(log.try_clone()?).stderr(log);
        // Ctrl-C is for the node, which asks its agents as their jobs want it.
        command.process_group(0);
        phalanx_launch::end_with_caller(&mut command);
        Ok(command)
    }
}

fn of_job(path: &Path, why: impl Display) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidInput, format!("{}: {why}", path.display()))
}
