//! A real Slurm on this machine, of as many nodes as a test wants: a controller, a daemon a node, and a key of their own, all in a
//! folder that goes with it. Nothing of a Slurm that may be installed and running is touched.

use std::fs;
use std::net::TcpListener;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

/// How long its daemons may take to know each other, and any command to answer.
const PATIENCE: Duration = Duration::from_secs(60);

/// A cluster, which ends with this value.
pub(crate) struct Cluster {
    folder: tempfile::TempDir,
    daemons: Vec<Child>,
}

impl Cluster {
    /// A cluster of nodes `n1`, `n2` and so on; none, aloud, where Slurm isn't installed.
    pub(crate) fn start(nodes: usize) -> Option<Cluster> {
        Cluster::with_gpus(nodes, 0)
    }

    /// The same with so many GPUs on each node, as far as Slurm deals them out: it is told of other devices in their place.
    pub(crate) fn with_gpus(nodes: usize, gpus: usize) -> Option<Cluster> {
        for program in ["slurmctld", "slurmd", "munged", "srun"] {
            if which(program).is_none() {
                eprintln!("skipped: there is no {program} here (Debian's packages slurm-wlm and munge)");
                return None;
            }
        }
        let folder = tempfile::Builder::new().prefix("phalanx-slurm-").tempdir().unwrap();
        let mut cluster = Cluster { folder, daemons: Vec::new() };
        cluster.start_munge();
        cluster.write_conf(nodes, gpus);
        cluster.start_daemon("slurmctld", &["-D", "-c"]);
        for node in 1..=nodes {
            cluster.start_daemon("slurmd", &["-D", "-N", &format!("n{node}")]);
        }
        let start = Instant::now();
        while cluster.run("sinfo", &["-h", "-N", "-t", "idle", "-o", "%N"]).lines().count() < nodes {
            assert!(start.elapsed() < PATIENCE, "the nodes don't come up: {}", cluster.logs());
            std::thread::sleep(Duration::from_millis(100));
        }
        Some(cluster)
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// What proves messages to come from this user, on this machine.
    fn start_munge(&mut self) {
        let key = self.path("munge.key");
        fs::write(&key, [7; 64]).unwrap();
        fs::set_permissions(&key, fs::Permissions::from_mode(0o600)).unwrap();
        // The folder of the socket has to be open to those who use it.
        fs::set_permissions(self.folder.path(), fs::Permissions::from_mode(0o755)).unwrap();
        let option = |name: &str, file: &str| format!("--{name}={}", self.path(file).display());
        let args = [
            "--foreground".into(),
            "--force".into(),
            option("key-file", "munge.key"),
            option("socket", "munge.socket"),
            option("pid-file", "munge.pid"),
            option("log-file", "munge.log"),
            option("seed-file", "munge.seed"),
        ];
        self.start_daemon("munged", &args.each_ref().map(String::as_str));
        let start = Instant::now();
        while !self.path("munge.socket").exists() {
            assert!(start.elapsed() < PATIENCE, "munged doesn't come up: {}", self.logs());
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    fn write_conf(&self, nodes: usize, gpus: usize) {
        let host = nix::unistd::gethostname().unwrap().into_string().unwrap();
        let host = host.split('.').next().unwrap();
        let user = nix::unistd::User::from_uid(nix::unistd::getuid()).unwrap().unwrap().name;
        // Kept until all are known to be free at once.
        let free: Vec<TcpListener> = (0..=nodes).map(|_| TcpListener::bind("127.0.0.1:0").unwrap()).collect();
        let ports: Vec<u16> = free.iter().map(|listener| listener.local_addr().unwrap().port()).collect();
        let dir = self.folder.path().display();
        let mut conf = format!(
            "ClusterName=test\nSlurmctldHost={host}(127.0.0.1)\nSlurmctldPort={}\nAuthType=auth/munge\n\
             AuthInfo=socket={dir}/munge.socket,ttl=60,cred_expire=5\nMpiDefault=none\nProctrackType=proctrack/linuxproc\nTaskPlugin=task/none\n\
             SwitchType=switch/none\nReturnToService=2\nSlurmUser={user}\nSlurmdUser={user}\nSlurmctldPidFile={dir}/slurmctld.pid\n\
             SlurmdPidFile={dir}/slurmd-%n.pid\nSlurmdSpoolDir={dir}/spool-%n\nStateSaveLocation={dir}/state\n\
             SlurmctldLogFile={dir}/slurmctld.log\nSlurmdLogFile={dir}/slurmd-%n.log\nSelectType=select/cons_tres\n\
             SelectTypeParameters=CR_CPU\nAccountingStorageType=accounting_storage/none\nJobAcctGatherType=jobacct_gather/none\n\
             KillWait=5\nFirstJobId={}\nSlurmdParameters=config_overrides\nSchedulerParameters=sched_interval=1,batch_sched_delay=0\n",
            // Runs meet at a port that follows from the job, and other clusters of this machine have jobs, too.
            ports[0],
            ports[0]
        );
        let mut gres = String::new();
        for device in ["/dev/null", "/dev/zero", "/dev/full", "/dev/random"].iter().take(gpus) {
            gres += &format!("NodeName=n[1-{nodes}] Name=gpu File={device}\n");
        }
        let mut has = String::new();
        if gpus > 0 {
            fs::write(self.path("gres.conf"), gres).unwrap();
            conf += "GresTypes=gpu\n";
            has = format!("Gres=gpu:{gpus} ");
        }
        for (node, port) in (1..=nodes).zip(&ports[1..]) {
            conf += &format!(
                "NodeName=n{node} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs=8 {has}State=UNKNOWN\n"
            );
        }
        // Jobs of the second take nodes from those of the first, which have a minute to end.
        conf += "PreemptType=preempt/partition_prio\nPreemptMode=REQUEUE\n";
        conf += "PartitionName=debug Nodes=ALL Default=YES MaxTime=INFINITE State=UP PriorityTier=1 GraceTime=60\n";
        conf += "PartitionName=urgent Nodes=ALL MaxTime=INFINITE State=UP PriorityTier=9\n";
        fs::create_dir(self.path("state")).unwrap();
        fs::write(self.path("slurm.conf"), conf).unwrap();
    }

    fn start_daemon(&mut self, program: &str, args: &[&str]) {
        let said = fs::File::options().create(true).append(true).open(self.path("daemons.log")).unwrap();
        let mut command = Command::new(which(program).unwrap());
        command.args(args).env("SLURM_CONF", self.path("slurm.conf")).stdin(Stdio::null());
        command.stdout(said.try_clone().unwrap()).stderr(said);
        self.daemons.push(command.spawn().unwrap());
    }

    /// A command of this cluster.
    pub(crate) fn command(&self, program: impl AsRef<std::ffi::OsStr>) -> Command {
        let mut command = Command::new(program);
        // Whoever runs the tests may be in a job of another cluster.
        std::env::vars().filter(|(name, _)| name.starts_with("SLURM")).for_each(|(name, _)| {
            command.env_remove(name);
        });
        command.env("SLURM_CONF", self.path("slurm.conf"));
        command
    }

    /// What a command prints that ends well.
    pub(crate) fn run(&self, program: &str, args: &[&str]) -> String {
        let out = self.command(program).args(args).output().unwrap();
        let said = String::from_utf8_lossy(&out.stderr);
        // Before the controller is up, there is nothing to be had.
        assert!(out.status.success() || said.contains("Unable to contact"), "{program} {args:?}: {said}");
        String::from_utf8(out.stdout).unwrap()
    }

    /// What a command says that may fail, within its time.
    pub(crate) fn attempt(&self, command: &mut Command) -> Output {
        let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        let pid = nix::unistd::Pid::from_raw(child.id() as i32);
        let (done, over) = std::sync::mpsc::channel::<()>();
        let watch = std::thread::spawn(move || {
            if over.recv_timeout(2 * PATIENCE) == Err(std::sync::mpsc::RecvTimeoutError::Timeout) {
                let _ = nix::sys::signal::kill(pid, nix::sys::signal::Signal::SIGKILL);
            }
        });
        let _ = child.stdin.take();
        let out = child.wait_with_output().unwrap();
        drop(done);
        watch.join().unwrap();
        out
    }

    /// Everything that its daemons have written.
    pub(crate) fn logs(&self) -> String {
        let files = fs::read_dir(self.folder.path()).unwrap().map(|entry| entry.unwrap().path());
        let logs = files.filter(|path| path.extension().is_some_and(|end| end == "log"));
        let tail = |path: PathBuf| {
            let text = String::from_utf8_lossy(&fs::read(&path).unwrap_or_default()).into_owned();
            let lines: Vec<&str> = text.lines().collect();
            format!("== {}\n{}\n", path.display(), lines[lines.len().saturating_sub(20)..].join("\n"))
        };
        logs.map(tail).collect()
    }
}

impl Drop for Cluster {
    fn drop(&mut self) {
        // What still runs in it would outlive its daemons, and so would what waits to tell them of its end.
        let quietly = |program: &str, args: &[&str]| self.command(program).args(args).output().ok();
        for partition in ["--partition=debug", "--partition=urgent"] {
            quietly("scancel", &["--full", "--signal=KILL", "--state=RUNNING", partition]);
            quietly("scancel", &[partition]);
        }
        let start = Instant::now();
        let is_empty = || {
            let jobs = quietly("squeue", &["--noheader"]);
            jobs.is_none_or(|jobs| !jobs.status.success() || jobs.stdout.is_empty())
        };
        while start.elapsed() < PATIENCE && !is_empty() {
            std::thread::sleep(Duration::from_millis(100));
        }
        for daemon in &mut self.daemons.iter_mut().rev() {
            let _ = nix::sys::signal::kill(
                nix::unistd::Pid::from_raw(daemon.id() as i32),
                nix::sys::signal::Signal::SIGTERM,
            );
        }
        let start = Instant::now();
        for daemon in &mut self.daemons {
            while daemon.try_wait().unwrap().is_none() {
                if start.elapsed() > Duration::from_secs(10) {
                    let _ = daemon.kill();
                }
                std::thread::sleep(Duration::from_millis(20));
            }
        }
    }
}

/// Where a program is, in PATH or where daemons are kept.
fn which(program: &str) -> Option<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let folders = std::env::split_paths(&path).chain(["/usr/sbin".into(), "/sbin".into()]);
    folders.map(|folder| folder.join(program)).find(|file| Path::is_file(file))
}
