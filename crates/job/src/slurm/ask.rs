//! Asking Slurm by its own commands, none of which is waited for without end: a controller that is down answers after minutes.

use super::time::duration;
use std::io::{self, Read, Write};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::thread;
use std::time::{Duration, Instant};
use thiserror::Error;

/// How long a controller that doesn't answer is waited for.
const PATIENCE: Duration = Duration::from_secs(10);
/// How often it is seen whether a command has ended.
const LOOK: Duration = Duration::from_millis(2);
/// How long what it has printed may take to arrive once it has ended.
const LAST: Duration = Duration::from_secs(5);

/// What Slurm's commands are told of the cluster, and not of a job.
const OF_SITE: [&str; 5] =
    ["SLURM_CONF", "SLURM_CONF_SERVER", "SLURM_CLUSTERS", "SLURM_JWT", "SLURM_TIME_FORMAT"];

/// Why Slurm doesn't answer.
#[derive(Debug, Error)]
pub enum AskError {
    /// The command isn't there.
    #[error(
        "{command}: is not on this machine\nhint: this takes the commands of Slurm: log in to a node of the cluster that has them, or add their folder to PATH"
    )]
    Absent {
        /// Which.
        command: String,
    },
    /// It can't be run.
    #[error("{command}: can't be run: {source}")]
    NotRun {
        /// Which.
        command: String,
        /// What the system said.
        source: io::Error,
    },
    /// It has ended with an error.
    #[error("{command}: {said}")]
    Refused {
        /// Which.
        command: String,
        /// What it said, or how it ended.
        said: String,
    },
    /// It doesn't end.
    #[error("{command}: gave no answer in {} s\nhint: see whether the controller is up: scontrol ping", .after.as_secs())]
    Silent {
        /// Which.
        command: String,
        /// How long it was waited for.
        after: Duration,
    },
}

/// What a command of Slurm prints that is given this on its standard input. It is killed after `patience`.
pub fn ask(command: &str, args: &[&str], input: &str, patience: Duration) -> Result<String, AskError> {
    answer(command, Command::new(command).args(args), input, patience)
}

/// The same of a command that begins something of its own, where this process may be part of a job: what that was told of itself, as how
/// many tasks it has, would be taken for what is asked for.
pub fn ask_outside(
    command: &str,
    args: &[&str],
    input: &str,
    patience: Duration,
) -> Result<String, AskError> {
    let mut outside = Command::new(command);
    if std::env::var_os("SLURM_JOB_ID").is_some() {
        let names = std::env::vars_os().filter_map(|(name, _)| name.into_string().ok());
        for name in names.filter(|name| name.starts_with("SLURM_") && !OF_SITE.contains(&name.as_str())) {
            outside.env_remove(name);
        }
    }
    answer(command, outside.args(args), input, patience)
}

fn answer(command: &str, run: &mut Command, input: &str, patience: Duration) -> Result<String, AskError> {
    let name = || command.to_owned();
    let not_run = |source: io::Error| match source.kind() {
        io::ErrorKind::NotFound => AskError::Absent { command: name() },
        _ => AskError::NotRun { command: name(), source },
    };
    let mut child =
        run.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().map_err(not_run)?;
    let [out, err] = match talk(&mut child, input.to_owned()) {
        Ok(said) => said,
        Err(error) => {
            // Nobody is to be told that it can't be run, and it runs. It may have ended meanwhile, which is as good.
            let _ = child.kill();
            let _ = child.wait();
            return Err(not_run(error));
        }
    };
    let start = Instant::now();
    let status = loop {
        match child.try_wait().map_err(not_run)? {
            Some(status) => break status,
            None if start.elapsed() < patience => thread::sleep(LOOK),
            None => {
                // It may have ended meanwhile, which is as good.
                let _ = child.kill();
                let _ = child.wait();
                return Err(AskError::Silent { command: name(), after: patience });
            }
        }
    };
    let text = |stream: Receiver<Vec<u8>>| {
        // Whoever has inherited the stream may keep it open.
        let left = patience.saturating_sub(start.elapsed()).max(LAST);
        let bytes = stream.recv_timeout(left);
        let bytes = bytes.map_err(|_| AskError::Silent { command: name(), after: start.elapsed() })?;
        Ok(String::from_utf8_lossy(&bytes).into_owned())
    };
    let (out, err) = (text(out)?, text(err)?);
    if status.success() {
        return Ok(out);
    }
    let said = if err.trim().is_empty() { out.trim() } else { err.trim() };
    let said = if said.is_empty() { format!("ended with {status}") } else { said.to_owned() };
    // Its messages begin with its own name.
    let said = said.lines().map(|line| line.strip_prefix(&format!("{command}: ")).unwrap_or(line));
    let said = said.map(|line| line.strip_prefix("error: ").unwrap_or(line)).collect::<Vec<_>>().join("\n");
    Err(AskError::Refused { command: name(), said })
}

/// Hands the input over, last of all, and takes the two outputs. What is longer than a pipe would be waited for at both ends.
fn talk(child: &mut Child, input: String) -> io::Result<[Receiver<Vec<u8>>; 2]> {
    let (out, err) = (child.stdout.take().expect("it is piped"), child.stderr.take().expect("it is piped"));
    let said = [collected(out)?, collected(err)?];
    let mut stdin = child.stdin.take().expect("it is piped");
    // A command that doesn't read has its reasons, and says them.
    let feed = move || drop(stdin.write_all(input.as_bytes()));
    thread::Builder::new().name("phalanx-slurm-in".into()).spawn(feed)?;
    Ok(said)
}

/// All bytes of a stream, once it has ended.
fn collected(mut stream: impl Read + Send + 'static) -> io::Result<Receiver<Vec<u8>>> {
    let (sender, bytes) = channel();
    let read = move || {
        let mut all = Vec::new();
        // What can't be read is missing in the answer, which its reader sees.
        let _ = stream.read_to_end(&mut all);
        drop(sender.send(all));
    };
    thread::Builder::new().name("phalanx-slurm-out".into()).spawn(read)?;
    Ok(bytes)
}

/// The address that Slurm itself reaches a node at, for clusters whose node names nobody else resolves.
pub fn node_address(node: &str) -> Option<String> {
    address_in(&ask("scontrol", &["show", "node", node, "--oneliner"], "", PATIENCE).ok()?)
}

/// How long this job may still run, if its time is limited and Slurm tells.
pub(crate) fn time_left(job: &str) -> Option<Duration> {
    duration(ask("squeue", &["--noheader", "--format=%L", "--jobs", job], "", PATIENCE).ok()?.trim())
}

fn address_in(description: &str) -> Option<String> {
    let mut words = description.split_whitespace();
    words.find_map(|word| word.strip_prefix("NodeAddr=")).map(str::to_owned)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_address_in_what_scontrol_says() {
        let said = "NodeName=n1 Arch=x86_64 CPUAlloc=0 NodeAddr=10.0.0.7 NodeHostName=box Port=17001";
        assert_eq!(address_in(said).as_deref(), Some("10.0.0.7"));
        assert_eq!(address_in("slurm_load_node error: Invalid node name specified"), None);
    }

    #[test]
    fn a_command_is_answered_for_within_its_time() {
        let sh = |script: &str, input: &str, ms| ask("sh", &["-c", script], input, Duration::from_millis(ms));
        // More than a pipe holds, both ways.
        let long = "x".repeat(300_000);
        assert_eq!(sh("cat", &long, 60_000).unwrap(), long);
        let refused = sh("echo sh: error: no such job >&2; echo out; exit 3", "", 60_000).unwrap_err();
        assert_eq!(refused.to_string(), "sh: no such job");
        assert!(sh("exit 4", "", 60_000).unwrap_err().to_string().contains("exit status: 4"));
        let silent = sh("exec sleep 600", "", 30).unwrap_err().to_string();
        assert!(silent.contains("no answer in 0 s") && silent.contains("scontrol ping"), "{silent}");
        let absent = ask("no-such-command-of-slurm", &[], "", PATIENCE).unwrap_err().to_string();
        assert!(absent.contains("is not on this machine\nhint: "), "{absent}");
    }
}
