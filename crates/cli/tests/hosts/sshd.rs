//! A real sshd on this machine, with a key, a configuration and a port of its own, all in a folder that goes with it.

use std::fs;
use std::net::{TcpListener, TcpStream};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

const PATIENCE: Duration = Duration::from_secs(60);

/// An sshd, which ends with this value.
pub(crate) struct Sshd {
    folder: tempfile::TempDir,
    daemon: Child,
    port: u16,
}

impl Sshd {
    /// Started, and tried by a login; none, aloud, where that can't be done here.
    pub(crate) fn start() -> Option<Sshd> {
        let skip = |why: &str| {
            eprintln!("skipped: {why} (Debian's package openssh-server)");
            None
        };
        let Some(program) = which("sshd").filter(|_| which("ssh").is_some() && which("ssh-keygen").is_some())
        else {
            return skip("there is no sshd, ssh or ssh-keygen here");
        };
        // Started as root it keeps a part of itself there.
        if nix::unistd::geteuid().is_root() && fs::create_dir_all("/run/sshd").is_err() {
            return skip("/run/sshd can't be made");
        }
        let folder = tempfile::Builder::new().prefix("phalanx-sshd-").tempdir().unwrap();
        let path = |name: &str| folder.path().join(name).display().to_string();
        for key in ["host_key", "key"] {
            let args = ["-q", "-t", "ed25519", "-N", "", "-f"];
            let made = Command::new("ssh-keygen").args(args).arg(path(key)).status().unwrap();
            assert!(made.success());
        }
        fs::copy(path("key.pub"), path("authorized_keys")).unwrap();
        fs::set_permissions(path("authorized_keys"), fs::Permissions::from_mode(0o600)).unwrap();
        let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
        let conf = format!(
            "Port {port}\nListenAddress 127.0.0.1\nHostKey {}\nPidFile {}\nAuthorizedKeysFile {}\nStrictModes no\nUsePAM no\n\
             PasswordAuthentication no\nKbdInteractiveAuthentication no\nPermitRootLogin yes\nMaxStartups 100\n",
            path("host_key"),
            path("pid"),
            path("authorized_keys")
        );
        fs::write(path("sshd_config"), conf).unwrap();
        let said = fs::File::create(path("sshd.log")).unwrap();
        let mut command = Command::new(program);
        command.args(["-D", "-e", "-f", &path("sshd_config")]).stdin(Stdio::null());
        let daemon = command.stdout(said.try_clone().unwrap()).stderr(said).spawn().unwrap();
        let mut sshd = Sshd { folder, daemon, port };
        let start = Instant::now();
        while TcpStream::connect(("127.0.0.1", port)).is_err() {
            if sshd.daemon.try_wait().unwrap().is_some() {
                return skip(&format!("sshd doesn't start: {}", sshd.log()));
            }
            assert!(start.elapsed() < PATIENCE, "sshd doesn't listen: {}", sshd.log());
            std::thread::sleep(Duration::from_millis(20));
        }
        let words = phalanx_launch::shell::words(&sshd.ssh()).unwrap();
        let tried = Command::new(&words[0]).args(&words[1..]).args(["127.0.0.1", "true"]).output().unwrap();
        if !tried.status.success() {
            let said = String::from_utf8_lossy(&tried.stderr).into_owned();
            return skip(&format!("nobody can log in to it: {said} {}", sshd.log()));
        }
        Some(sshd)
    }

    /// The command that logs in to it, under whatever name.
    pub(crate) fn ssh(&self) -> String {
        let key = self.folder.path().join("key");
        format!(
            "ssh -4 -F none -p {} -i '{}' -o IdentitiesOnly=yes -o StrictHostKeyChecking=no -o UserKnownHostsFile=/dev/null -o LogLevel=ERROR",
            self.port,
            key.display()
        )
    }

    fn log(&self) -> String {
        fs::read_to_string(self.folder.path().join("sshd.log")).unwrap_or_default()
    }
}

impl Drop for Sshd {
    fn drop(&mut self) {
        let _ = self.daemon.kill();
        let _ = self.daemon.wait();
    }
}

/// Where a program is, in PATH or where daemons are kept; sshd wants to be called by its whole path.
fn which(program: &str) -> Option<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let folders = std::env::split_paths(&path).chain(["/usr/sbin".into(), "/sbin".into()]);
    folders.map(|folder| folder.join(program)).find(|file| Path::is_file(file))
}
