//! `phalanx run --hosts`: an agent on each of several machines, started over the system's `ssh`.
//!
//! Each host has one ssh session from the first question to the end of its agent, in which our other half (`there`) answers and
//! then runs. Before anything is started all hosts are looked at, at once: what differs between them is told, what can't work is
//! refused. The run's secret travels inside the sessions. Whoever ends this command, or cuts a session, ends the agent behind it.

mod course;
mod differ;
mod facts;
mod list;
mod session;
pub(crate) mod there;
mod words;

use super::flags::RunArgs;
use super::nodes::{endpoint, nodes, unchecked};
use super::{fresh_run_id, program, tls_is_asked_for};
use crate::args::{WrongUsage, forwarded};
use crate::say::say;
use anyhow::{Context, Result, bail};
use clap::Args;
use course::{Course, Ended, Next};
use differ::{Looked, Wanted, compare};
use list::{Host, hosts};
use phalanx_job::{SecretSource, names};
use phalanx_launch::{MAX_GRACE, shell};
use session::{Heard, Session};
use signal_hook::consts::{SIGCONT, SIGHUP, SIGINT, SIGQUIT, SIGTERM, SIGUSR1, SIGUSR2};
use signal_hook::iterator::Signals;
use std::collections::BTreeMap;
use std::ffi::{OsStr, OsString};
use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, sync_channel};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};
use words::{Answer, Asked, Facts, Order, Start};

/// What concerns the machines of `--hosts`; none of it is for their agents.
#[derive(Args, Clone, Debug, Default)]
pub(crate) struct HostsArgs {
    /// Start the agents of these machines from here, over ssh, each with so many workers [default: --nproc-per-node of each], as in
    /// a:8,b:8 or me@n[1-4]:8. The program, its data and this binary lie at the same place on all.
    #[arg(long, value_name = "HOST[:N],...", conflicts_with_all = ["node_rank", "standalone", "master_addr", "local_addr", "stdin"])]
    pub(crate) hosts: Option<String>,
    /// What starts a command on a host, as in "ssh -p 2222" [default: PHALANX_SSH, else ssh].
    #[arg(long, value_name = "COMMAND", requires = "hosts")]
    pub(crate) ssh: Option<String>,
    /// Where this binary lies on the hosts [default: where it lies here].
    #[arg(long, value_name = "PATH", requires = "hosts")]
    pub(crate) remote_phalanx: Option<String>,
    /// The folder in which the program runs on the hosts [default: this one].
    #[arg(long, value_name = "DIR", requires = "hosts")]
    pub(crate) chdir: Option<PathBuf>,
    /// Hand this variable of the environment to the workers of the hosts, as PHALANX_THREADS, PHALANX_TRANSPORT, PHALANX_ALLREDUCE,
    /// PHALANX_END_TIME and OMP_NUM_THREADS are in any case; may be given often.
    #[arg(long, value_name = "NAME", requires = "hosts")]
    pub(crate) forward_env: Vec<String>,
    /// How long hosts may take to answer, and may then hear nothing of this command before they stop their workers, in seconds.
    #[arg(long, value_name = "SECONDS", default_value_t = 60.0, requires = "hosts")]
    pub(crate) hosts_patience: f64,
}

/// What is heard and not yet heeded.
const QUEUE: usize = 256;
/// How long nodes wait for each other, which are started at once.
const JOIN: &str = "join_timeout=120";
/// Variables of ours that a user sets for workers. What names a place or a descriptor on this machine isn't among them.
const FORWARDED: [&str; 5] =
    [names::THREADS, names::TRANSPORT, names::ALLREDUCE, names::END_TIME, names::OMP_NUM_THREADS];

/// Runs the program on all hosts.
pub(crate) fn run(args: &RunArgs, text: &str) -> Result<u8> {
    let typed = &args.hosts;
    let hosts = hosts(text)?;
    let least = least(args, hosts.len())?;
    let patience = Duration::try_from_secs_f64(typed.hosts_patience).ok();
    let patience = patience.filter(|limit| !limit.is_zero() && *limit <= MAX_GRACE).ok_or_else(|| {
        WrongUsage(format!("--hosts-patience {}: must be above 0 and up to a day", typed.hosts_patience))
    })?;
    let in_spite = unchecked(args)?;
    let job = Job::new(args)?;
    let (sender, heard) = sync_channel(QUEUE);
    take_signals(sender.clone())?;
    let mut site = Site::open(&job, args, hosts, patience, &sender, heard)?;
    let looked = match site.look(&job)? {
        Found::Hosts(looked) => looked,
        Found::Signal(signal) => return Ok(128 + signal as u8),
    };
    let wanted = Wanted {
        version: env!("CARGO_PKG_VERSION"),
        binary: &job.binary,
        folder: &job.folder,
        out: &job.out,
        programs: &job.programs,
    };
    let said = compare(&looked, &wanted);
    said.told.iter().for_each(say);
    if !said.refused.is_empty() && !in_spite {
        said.refused.iter().for_each(|line| say(format_args!("error: {line}")));
        bail!("nothing was started: --unchecked starts in spite of this");
    }
    said.refused.iter().for_each(|line| say(format_args!("started in spite of this: {line}")));
    site.start(&job, args, &looked, least)?;
    let grace = Duration::try_from_secs_f64(args.shutdown_timeout).unwrap_or(MAX_GRACE).min(MAX_GRACE);
    Ok(site.follow(Course::new(looked.len(), least, grace)))
}

/// Whether workers' lines have their host before them: unless somebody has said otherwise.
fn has_prefix(args: &RunArgs) -> bool {
    !args.no_prefix && args.log_line_prefix_template.is_none()
}

/// The least hosts that the run goes on with.
fn least(args: &RunArgs, hosts: usize) -> Result<usize, WrongUsage> {
    let spares = args.spares as usize;
    if spares >= hosts {
        let needs = spares + 1;
        return Err(WrongUsage(format!(
            "--spares {spares}: --hosts names {hosts} machines, not {needs} or more"
        )));
    }
    let Some(text) = &args.nnodes else { return Ok(hosts - spares) };
    let (least, most) = nodes(text)?;
    let here = hosts - spares;
    let beside = if spares > 0 { format!(", of which {spares} stand by") } else { String::new() };
    match most == here {
        true => Ok(least),
        false => Err(WrongUsage(format!(
            "--nnodes {text}: --hosts names {hosts} machines{beside}\nhint: leave it out, or say how few are enough: --nnodes 1:{here}"
        ))),
    }
}

/// What is to be done on all hosts.
struct Job {
    ssh: Vec<String>,
    binary: String,
    folder: PathBuf,
    out: PathBuf,
    run_id: String,
    /// The program and its arguments, as hosts start them, and the Python of those that need one.
    program: Vec<OsString>,
    python: Option<OsString>,
    /// What has to be there.
    programs: Vec<OsString>,
    data: Option<PathBuf>,
    /// Workers of hosts that have no number of their own.
    workers: String,
    secret: String,
    variables: Vec<(String, String)>,
}

impl Job {
    fn new(args: &RunArgs) -> Result<Job> {
        let typed = &args.hosts;
        let set = |name: &str| std::env::var(name).ok().filter(|value| !value.is_empty());
        let (name, ssh) = match (&typed.ssh, set("PHALANX_SSH")) {
            (Some(ssh), _) => ("--ssh", ssh.clone()),
            (None, Some(ssh)) => ("PHALANX_SSH", ssh),
            (None, None) => ("--ssh", "ssh".into()),
        };
        let words = shell::words(&ssh).ok().filter(|words| !words.is_empty());
        let words = words
            .ok_or_else(|| WrongUsage(format!("{name} {ssh}: must be a command, as in \"ssh -p 2222\"")))?;
        let own = std::env::current_exe().context("the path of this program")?;
        let binary = typed.remote_phalanx.clone().unwrap_or_else(|| own.to_string_lossy().into_owned());
        let here = || std::env::current_dir().context("the current folder");
        let folder = typed.chdir.clone().map_or_else(here, Ok)?;
        let mut program: Vec<OsString> = match args.program.as_slice() {
            [first, rest @ ..] if first == "--" => rest.to_vec(),
            all => all.to_vec(),
        };
        let Some(first) = program.first_mut() else {
            return Err(WrongUsage("PROGRAM is missing: give it after the flags".into()).into());
        };
        let stem =
            Path::new(first).file_stem().map_or("program".into(), |s| s.to_string_lossy().into_owned());
        // Shells that ssh starts often have another PATH than those that people type in.
        if first == "phalanx" {
            *first = binary.clone().into();
        }
        let run_id = args.rdzv_id.clone().map_or_else(fresh_run_id, Ok)?;
        let out = args.out.clone().or_else(|| args.log_dir.clone());
        let out = out.unwrap_or_else(|| PathBuf::from(format!("runs/{stem}-{run_id}")));
        let is_python = program::is_python(args, &program[0]);
        let python = is_python.then(program::active_python);
        let mut programs: Vec<OsString> = python.clone().into_iter().collect();
        programs.extend((!args.module).then(|| program[0].clone()));
        let is_own = Path::new(&program[0]).file_name() == Some(OsStr::new("phalanx"));
        let data = data(&program).filter(|_| is_own);
        let secret = match &args.secret_file {
            Some(path) => {
                let kept = SecretSource::File(path.clone()).read(&run_id)?;
                kept.expose().iter().map(|byte| format!("{byte:02x}")).collect()
            }
            None => random()?,
        };
        let mut variables: BTreeMap<String, String> = forwarded(&typed.forward_env)?.into_iter().collect();
        variables.extend(FORWARDED.iter().filter_map(|name| Some(((*name).to_owned(), set(name)?))));
        let variables = variables.into_iter().collect();
        let workers = args.nproc_per_node.clone();
        let ssh = words;
        Ok(Job {
            ssh,
            binary,
            folder,
            out,
            run_id,
            program,
            python,
            programs,
            data,
            workers,
            secret,
            variables,
        })
    }
}

/// 64 random hexadecimal digits.
fn random() -> Result<String> {
    let mut bytes = [0; 32];
    getrandom::fill(&mut bytes)
        .map_err(|error| anyhow::anyhow!("the system gives no random numbers: {error}"))?;
    Ok(bytes.iter().map(|byte| format!("{byte:02x}")).collect())
}

/// Where the data of `phalanx train` lies, if that was typed.
fn data(program: &[OsString]) -> Option<PathBuf> {
    let mut words = program.iter().map(|word| word.to_string_lossy());
    while let Some(word) = words.next() {
        match word.strip_prefix("--data") {
            Some("") => return words.next().map(|path| path.as_ref().into()),
            Some(rest) if rest.starts_with('=') => return Some(rest[1..].into()),
            _ => {}
        }
    }
    None
}

/// From here on signals are heard.
fn take_signals(sender: SyncSender<Heard>) -> Result<()> {
    let all = [SIGTERM, SIGINT, SIGHUP, SIGQUIT, SIGUSR1, SIGUSR2, SIGCONT];
    let mut signals = Signals::new(all).context("signals can't be taken")?;
    let listen = move || {
        signals.forever().take_while(|&signal| sender.send(Heard::Signal(signal)).is_ok()).for_each(drop);
    };
    std::thread::Builder::new().name("phalanx-signals".into()).spawn(listen)?;
    Ok(())
}

/// All hosts with their sessions.
struct Site {
    hosts: Vec<Host>,
    sessions: Vec<Session>,
    heard: Receiver<Heard>,
    patience: Duration,
    binary: String,
}

/// What came of looking.
enum Found {
    Hosts(Vec<Looked>),
    /// This signal came before.
    Signal(i32),
}

impl Site {
    fn open(
        job: &Job,
        args: &RunArgs,
        hosts: Vec<Host>,
        patience: Duration,
        sender: &SyncSender<Heard>,
        heard: Receiver<Heard>,
    ) -> Result<Site> {
        let mut sessions = Vec::new();
        for (number, host) in hosts.iter().enumerate() {
            let name = host.to_string();
            let which = (number, host.destination.as_str(), name.as_str());
            sessions.push(Session::start(&job.ssh, which, &job.binary, has_prefix(args), sender)?);
        }
        Ok(Site { hosts, sessions, heard, patience, binary: job.binary.clone() })
    }

    /// Asks all of them and waits for their answers, or for a signal.
    fn ask(&mut self, orders: &[(usize, Order)]) -> Result<Result<BTreeMap<usize, Answer>, i32>> {
        orders.iter().for_each(|(host, order)| self.sessions[*host].order(order));
        let until = Instant::now() + self.patience;
        let mut answers = BTreeMap::new();
        while answers.len() < orders.len() {
            let left = until.saturating_duration_since(Instant::now());
            match self.heard.recv_timeout(left) {
                Ok(Heard::Answer(host, answer)) => drop(answers.insert(host, *answer)),
                Ok(Heard::Signal(signal)) if ![SIGUSR1, SIGUSR2, SIGCONT].contains(&signal) => {
                    return Ok(Err(signal));
                }
                Ok(Heard::Signal(_)) => {}
                Ok(Heard::End(host)) => {
                    let status = self.sessions[host].ended();
                    let (name, to) = (self.hosts[host].to_string(), &self.hosts[host].destination);
                    let said = self.sessions[host].said();
                    bail!(session::why_silent(&name, to, &self.binary, status, &said));
                }
                Err(RecvTimeoutError::Timeout) => {
                    let silent =
                        orders.iter().map(|(host, _)| *host).filter(|host| !answers.contains_key(host));
                    let silent: Vec<usize> = silent.collect();
                    for &host in &silent {
                        session::tell_said(&self.hosts[host].to_string(), &self.sessions[host].said());
                    }
                    let to = &self.hosts[silent[0]].destination;
                    let silent: Vec<String> =
                        silent.iter().map(|host| self.hosts[*host].to_string()).collect();
                    let silent = silent.join(", ");
                    bail!(
                        "{silent}: no answer within {} s\nhint: see whether ssh comes through by itself, as in `ssh {to} true`, or wait longer with --hosts-patience",
                        self.patience.as_secs_f64()
                    );
                }
                Err(RecvTimeoutError::Disconnected) => bail!("no session is left"),
            }
        }
        Ok(Ok(answers))
    }

    /// What is there on each host.
    fn look(&mut self, job: &Job) -> Result<Found> {
        let asked = Asked {
            patience: self.patience.as_secs_f64(),
            folder: job.folder.clone(),
            programs: job.programs.clone(),
            out: job.out.clone(),
            data: job.data.clone(),
        };
        let all = 0..self.hosts.len();
        let orders: Vec<_> = all.clone().map(|host| (host, Order::Tell(Box::new(asked.clone())))).collect();
        let mut looked = Vec::new();
        let answers = match self.ask(&orders)? {
            Ok(answers) => answers,
            Err(signal) => return Ok(Found::Signal(signal)),
        };
        for (host, answer) in answers {
            let Answer::Facts(facts) = answer else { bail!("{}: gave another answer", self.hosts[host]) };
            let name = self.hosts[host].to_string();
            let workers = self.hosts[host].workers.clone().unwrap_or(job.workers.clone());
            looked.push(Looked { name, workers, facts: *facts, ahead: 0.0, within: 0.0, shares: None });
        }
        if looked.iter().any(|host| host.facts.version != env!("CARGO_PKG_VERSION")) {
            // It may not know the other questions.
            return Ok(Found::Hosts(looked));
        }
        // One after the other, so that nothing but the way counts.
        for host in all.clone() {
            let sent = now_ms();
            let answers = match self.ask(&[(host, Order::Clock)])? {
                Ok(answers) => answers,
                Err(signal) => return Ok(Found::Signal(signal)),
            };
            let took = now_ms() - sent;
            if let Some(Answer::Clock(there)) = answers.get(&host) {
                looked[host].ahead = (there - sent - took / 2.0) / 1e3;
                looked[host].within = took / 2e3;
            }
        }
        if self.hosts.len() > 1 && looked.iter().all(|host| host.facts.no_folder.is_none()) {
            let name = format!(".phalanx-{}", &random()?[..16]);
            if let Some(signal) = self.compare_folders(&name, &mut looked)? {
                return Ok(Found::Signal(signal));
            }
        }
        Ok(Found::Hosts(looked))
    }

    /// Finds out whether what the first host has in the folder is seen by the others; gives a signal that came meanwhile.
    fn compare_folders(&mut self, name: &str, looked: &mut [Looked]) -> Result<Option<i32>> {
        let left = match self.ask(&[(0, Order::Leave(name.into()))])? {
            Ok(left) => left,
            Err(signal) => return Ok(Some(signal)),
        };
        if !matches!(left.get(&0), Some(Answer::Done(None))) {
            // Where nothing can be written nothing is known of it.
            return Ok(None);
        }
        let orders: Vec<_> = (1..looked.len()).map(|host| (host, Order::Look(name.into()))).collect();
        let seen = self.ask(&orders);
        let taken = self.ask(&[(0, Order::Take(name.into()))]);
        for (host, answer) in match seen? {
            Ok(answers) => answers,
            Err(signal) => return Ok(Some(signal)),
        } {
            if let Answer::There(there) = answer {
                looked[host].shares = Some(there);
            }
        }
        Ok(taken?.err())
    }

    /// Tells every host to start its agent.
    fn start(&mut self, job: &Job, args: &RunArgs, looked: &[Looked], least: usize) -> Result<()> {
        let meet = match &args.rdzv_endpoint {
            Some(typed) => typed.clone(),
            None => meeting(&self.hosts, looked)?,
        };
        let usable = |host: usize| self.address(looked, host);
        let addresses: Vec<Option<String>> = (0..looked.len()).map(usable).collect();
        for (number, (host, own)) in self.hosts.iter().zip(addresses).enumerate() {
            let mut args = args.clone();
            let most = looked.len() - args.spares as usize;
            args.nnodes = Some(match least == most {
                true => least.to_string(),
                false => format!("{least}:{most}"),
            });
            args.node_rank = (least == most && number < most).then_some(number as u32);
            args.nproc_per_node = host.workers.clone().unwrap_or(args.nproc_per_node);
            args.rdzv_id = Some(job.run_id.clone());
            args.rdzv_endpoint = Some(meet.clone());
            args.stand_by = number >= most;
            args.rdzv_conf.get_or_insert_with(|| JOIN.into());
            args.rdzv_backend = None;
            args.local_addr = own;
            (args.secret_file, args.exit_code_to) = (None, None);
            args.out = Some(job.out.clone());
            args.tls = args.tls || tls_is_asked_for()?;
            args.program = job.program.clone();
            args.python = job.python.clone();
            args.unchecked = unchecked(&args)?;
            if has_prefix(&args) {
                args.log_line_prefix_template = Some(session::template(&host.to_string()));
            }
            args.hang_timeout = args.hang_timeout.or_else(|| std::env::var(names::HANG_TIMEOUT).ok());
            if looked.len() == 1 {
                // A run of one machine needs no meeting.
                (args.nnodes, args.node_rank, args.rdzv_endpoint, args.rdzv_conf) = (None, None, None, None);
                args.standalone = true;
            }
            let (secret, variables) = (job.secret.clone(), job.variables.clone());
            self.sessions[number].order(&Order::Run(Box::new(Start { args, secret, variables })));
        }
        Ok(())
    }

    /// The address of a host for the others, where it is known and means something to them.
    fn address(&self, looked: &[Looked], host: usize) -> Option<String> {
        let own = looked[host].facts.address.clone()?;
        let all_here = looked.iter().all(|host| is_loopback(&host.facts));
        (all_here || !is_loopback(&looked[host].facts)).then_some(own)
    }

    /// Stands by until all agents have ended; gives the exit code.
    fn follow(mut self, mut course: Course) -> u8 {
        let beat = self.patience / 4;
        let mut next_beat = Instant::now() + beat;
        loop {
            let now = Instant::now();
            if now >= next_beat {
                self.tell_all(&course, &Order::Here);
                next_beat = now + beat;
            }
            let wait = match course.next(now) {
                Next::Over => return course.exit_code(),
                Next::Wait(most) => most.unwrap_or(beat).min(next_beat - now),
                Next::Tell(signal) => {
                    say("stopping the workers of the other hosts");
                    self.tell_all(&course, &Order::Signal(signal));
                    continue;
                }
                Next::Cut => {
                    for host in (0..self.hosts.len()).filter(|&host| !course.has_ended(host)) {
                        let name = &self.hosts[host];
                        say(format_args!(
                            "{name}: still not ended after the grace period: ending its ssh session"
                        ));
                        self.sessions[host].cut();
                    }
                    continue;
                }
            };
            match self.heard.recv_timeout(wait) {
                Ok(Heard::Signal(signal)) => {
                    self.tell_all(&course, &Order::Signal(signal));
                    if ![SIGUSR1, SIGUSR2, SIGCONT].contains(&signal) {
                        course.asked(signal, Instant::now());
                    }
                }
                Ok(Heard::End(host)) => {
                    let how = self.end(host);
                    course.end(host, how, Instant::now());
                }
                Ok(Heard::Answer(..)) | Err(RecvTimeoutError::Timeout) => {}
                // The thread that takes signals has a sender.
                Err(RecvTimeoutError::Disconnected) => return course.exit_code(),
            }
        }
    }

    fn tell_all(&self, course: &Course, order: &Order) {
        for (host, session) in self.sessions.iter().enumerate() {
            if !course.has_ended(host) {
                session.order(order);
            }
        }
    }

    /// How the agent of a host ended, whose session is at its end.
    fn end(&mut self, host: usize) -> Ended {
        let status = self.sessions[host].ended();
        let name = &self.hosts[host];
        match status.and_then(|status| status.code()) {
            // ssh's own, which no agent of ours has.
            Some(255) | None => {
                say(format_args!(
                    "error: {name}: the ssh session has broken: its workers are stopped there\nhint: see its logs there, and `ssh {}`",
                    self.hosts[host].destination
                ));
                Ended::Lost
            }
            Some(code) => Ended::Code(code as u8),
        }
    }
}

fn now_ms() -> f64 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs_f64() * 1e3
}

/// Whether it was reached at an address that only it has.
fn is_loopback(facts: &Facts) -> bool {
    facts
        .address
        .as_ref()
        .and_then(|address| address.parse::<IpAddr>().ok())
        .is_some_and(|ip| ip.is_loopback())
}

/// Where the nodes meet: at the first host, by the address at which this command has reached it, or else by its name.
fn meeting(hosts: &[Host], looked: &[Looked]) -> Result<String> {
    let (name, facts) = (hosts[0].to_string(), &looked[0].facts);
    if let Some(other) =
        looked.iter().position(|host| host.facts.address.is_some() && !is_loopback(&host.facts))
        && is_loopback(facts)
    {
        let other = &hosts[other];
        bail!(
            "{name} is reached at an address of this machine alone, where {other} can't reach it\nhint: name it by an address that {other} knows, or say where hosts meet: --rdzv-endpoint HOST:PORT"
        );
    }
    let host = facts.address.clone().unwrap_or(name);
    let host = if host.contains(':') { format!("[{host}]") } else { host };
    let meet = format!("{host}:{}", facts.port);
    endpoint(&meet)?;
    Ok(meet)
}
