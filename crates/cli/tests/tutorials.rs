//! Every command of the tutorials is run as it stands on its page, with small settings.
//!
//! A block of commands is one that begins with three backticks and `sh`. What its test does otherwise stands in comments right before it,
//! which readers of the page don't see: `<!-- test: WORDS is OTHERS -->` puts other words in the place of some, `says WORDS` expects
//! them in what is printed, `exits with N` another code than 0, `together` starts all lines at once, and `on slurm` or `over ssh` has
//! the block run where there is one.

#[allow(dead_code, reason = "not all of it is needed here")]
#[path = "slurm/cluster.rs"]
mod cluster;
#[allow(dead_code, reason = "commands are found as a shell finds them")]
mod user;

use cluster::Cluster;
use phalanx::data::{CifarSet, write_synthetic_cifar};
use std::fs;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};
use user::text;

/// How long a block may take on a busy machine.
const LIMIT: Duration = Duration::from_secs(300);

fn docs() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/tutorials")
}

/// A block of commands.
#[derive(Debug, Default, PartialEq)]
struct Block {
    commands: String,
    replaced: Vec<(String, String)>,
    says: Vec<String>,
    code: i32,
    together: bool,
    slurm: bool,
    ssh: bool,
}

/// The blocks of a page. Panics where a command of ours stands in a block that isn't run, and where a comment makes no sense.
fn blocks(page: &str) -> Vec<Block> {
    let (mut all, mut next) = (Vec::new(), Block::default());
    let mut inside: Option<(String, String)> = None;
    for line in page.lines() {
        match (&mut inside, line.strip_prefix("```")) {
            (None, Some(kind)) => inside = Some((kind.trim().to_owned(), String::new())),
            (Some((kind, commands)), Some(_)) => {
                if kind == "sh" {
                    next.commands = std::mem::take(commands);
                    all.push(std::mem::take(&mut next));
                } else {
                    let ours = commands.lines().find(|line| line.trim_start().starts_with("phalanx "));
                    assert_eq!(ours, None, "a command that no test runs: mark its block with `sh`");
                }
                inside = None;
            }
            (Some((_, commands)), None) => {
                commands.push_str(line);
                commands.push('\n');
            }
            (None, None) => {
                if let Some(setting) = line.strip_prefix("<!-- test: ") {
                    set(&mut next, setting.strip_suffix(" -->").expect("a comment that ends"));
                }
            }
        }
    }
    assert_eq!(inside, None, "a block is never closed");
    assert_eq!(next, Block::default(), "settings without a block");
    all
}

fn set(block: &mut Block, setting: &str) {
    if let Some(words) = setting.strip_prefix("says ") {
        block.says.push(words.to_owned());
    } else if let Some(code) = setting.strip_prefix("exits with ") {
        block.code = code.parse().unwrap();
    } else if let Some((words, others)) = setting.split_once(" is ") {
        block.replaced.push((words.to_owned(), others.to_owned()));
    } else {
        match setting {
            "together" => block.together = true,
            "on slurm" => block.slurm = true,
            "over ssh" => block.ssh = true,
            other => panic!("no setting: {other}"),
        }
    }
}

/// What is run of a block.
fn script(block: &Block, port: u16) -> String {
    let mut commands = block.commands.clone();
    for (words, others) in &block.replaced {
        assert!(commands.contains(words), "{words} isn't in {commands}");
        commands = commands.replace(words, others);
    }
    // Ports of the pages may be anybody's here.
    commands = commands.replace("29400", &port.to_string());
    if !block.together {
        // What a page has running goes with its shell.
        return format!("set -e\ntrap 'kill $(jobs -p) 2> /dev/null || true' EXIT\n{commands}");
    }
    let lines = commands.replace("\\\n", " ");
    let started = lines
        .lines()
        .filter(|line| !line.trim().is_empty())
        .map(|line| format!("{line} &\nall=\"$all $!\"\n"));
    format!("{}for one in $all; do wait $one || exit; done\n", started.collect::<String>())
}

/// A folder as a reader of the pages has it: a program of ours, one in Python, a script for Slurm, and data.
fn home() -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name);
    fs::create_dir(path("bin")).unwrap();
    symlink(env!("CARGO_BIN_EXE_phalanx"), path("bin/phalanx")).unwrap();
    let programs = [
        ("train", "#!/bin/sh\nexec phalanx train mnist-mini --steps 4 --batch-size 8 --out run \"$@\"\n"),
        (
            "bin/stand-in-for-ssh",
            "#!/bin/sh\nfor word; do last=$word; done\nSSH_CONNECTION='127.0.0.1 1 127.0.0.1 22' exec sh -c \"$last\"\n",
        ),
        (
            "train.py",
            "import os\nprint('rank', os.environ['RANK'], 'of', os.environ['WORLD_SIZE'], flush=True)\n",
        ),
        (
            "job.sh",
            "#!/bin/bash\n#SBATCH --nodes=2\n#SBATCH --ntasks-per-node=8\nexport MASTER_PORT=12345\nsrun python train.py\n",
        ),
    ];
    for (name, content) in programs {
        fs::write(path(name), content).unwrap();
        fs::set_permissions(path(name), fs::Permissions::from_mode(0o755)).unwrap();
    }
    fs::create_dir(path("images")).unwrap();
    write_synthetic_cifar(&path("images"), CifarSet::Ten, 20).unwrap();
    fs::write(path("book.txt"), "All ranks move together. ".repeat(400)).unwrap();
    folder
}

/// Runs a script in the folder, for so long at most.
fn run(folder: &Path, cluster: Option<&Cluster>, script: &str) -> Output {
    let mut command = cluster.map_or_else(|| Command::new("bash"), |cluster| cluster.command("bash"));
    for (name, _) in std::env::vars() {
        let is_own = name.starts_with("SLURM_") && cluster.is_none() || name.starts_with("PET_");
        if is_own || ["RANK", "WORLD_SIZE", "OMP_NUM_THREADS", "PHALANX_SECRET_FILE"].contains(&name.as_str())
        {
            command.env_remove(name);
        }
    }
    let path = std::env::var("PATH").unwrap_or_default();
    command.args(["-c", script]).current_dir(folder).stdin(Stdio::null());
    command.env("PATH", format!("{}:{path}", folder.join("bin").display()));
    command.env("PHALANX_CACHE", folder.join("cache")).env("XDG_CONFIG_HOME", folder.join("config"));
    command.env("PHALANX_SSH", folder.join("bin/stand-in-for-ssh")).env("USER", "root");
    let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let pid = nix::unistd::Pid::from_raw(child.id() as i32);
    let (done, over) = std::sync::mpsc::channel::<()>();
    let watch = std::thread::spawn(move || {
        if over.recv_timeout(LIMIT) == Err(std::sync::mpsc::RecvTimeoutError::Timeout) {
            let _ = nix::sys::signal::kill(pid, nix::sys::signal::Signal::SIGKILL);
        }
    });
    drop(child.stdin.take());
    let out = child.wait_with_output().unwrap();
    drop(done);
    watch.join().unwrap();
    out
}

/// Runs all commands of a page, or of a part of one.
fn check(page: &str) {
    let home = home();
    let blocks = blocks(page);
    assert!(!blocks.is_empty(), "a page without a command");
    let cluster = blocks.iter().any(|block| block.slurm).then(|| Cluster::start(2)).flatten();
    for block in &blocks {
        if block.slurm && cluster.is_none() {
            eprintln!("skipped, for want of Slurm: {}", block.commands);
            continue;
        }
        let port = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
        let (script, start) = (script(block, port), Instant::now());
        let out = run(home.path(), cluster.as_ref().filter(|_| block.slurm), &script);
        let said = text(&out.stdout) + &text(&out.stderr);
        let took = start.elapsed();
        assert_eq!(out.status.code(), Some(block.code), "after {took:.0?}:\n{script}\n{said}");
        for words in &block.says {
            assert!(said.contains(words), "{words:?} isn't in what\n{script}\nprints:\n{said}");
        }
    }
}

fn page(name: &str) -> String {
    fs::read_to_string(docs().join(name)).unwrap()
}

/// A test a page, so that they run side by side; none is forgotten.
macro_rules! pages {
    ($($test:ident $name:literal),+ $(,)?) => {
        const PAGES: &[&str] = &[$($name),+];
        $(
            #[test]
            fn $test() {
                check(&page($name));
            }
        )+
    };
}

pages! {
    one_device "single-device.md",
    data_parallel "data-parallel.md",
    spawn "spawn.md",
    tabular "tabular.md",
    pixels "pixels.md",
    own_loop "own-loop.md",
    two_models "two-models.md",
    launcher "launcher.md",
    model_parallel "model-parallel.md",
    pipeline "pipeline.md",
    elastic "elastic.md",
    slurm "slurm.md",
    aws "aws.md",
    pool "pool.md",
}

#[test]
fn every_page_is_run() {
    let mut there: Vec<String> = fs::read_dir(docs())
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    there.retain(|name| name != "README.md");
    let mut run: Vec<&str> = PAGES.to_vec();
    there.sort();
    run.sort_unstable();
    assert_eq!(there, run);
    // And each can be found.
    let list = page("README.md");
    assert!(PAGES.iter().all(|name| list.contains(&format!("({name})"))), "{list}");
}

/// What the README tells those who have a cluster.
#[test]
fn the_way_of_a_user_of_a_cluster() {
    let readme = fs::read_to_string(docs().join("../../README.md")).unwrap();
    let (_, rest) = readme.split_once("\n## On a cluster\n").expect("a section about clusters");
    let section = rest.split_once("\n## ").map_or(rest, |(section, _)| section);
    check(section);
}

#[test]
fn blocks_and_their_settings_are_read() {
    let page = "words\n<!-- test: on slurm -->\n<!-- test: mnist is mnist-mini --steps 2 -->\n<!-- test: says done -->\n<!-- test: exits with 75 -->\n```sh\nsrun phalanx train mnist\n```\n```text\ntorchrun train.py\n```\n```sh\ntwo\n```\n";
    let found = blocks(page);
    assert_eq!(found.len(), 2);
    let first = &found[0];
    assert_eq!((first.slurm, first.code, first.says.as_slice()), (true, 75, &["done".to_owned()][..]));
    assert!(script(first, 1).ends_with(" EXIT\nsrun phalanx train mnist-mini --steps 2\n"));
    assert_eq!(found[1], Block { commands: "two\n".into(), ..Block::default() });
    let together = Block { commands: "a \\\n b\nc 29400\n".into(), together: true, ..Block::default() };
    assert_eq!(
        script(&together, 7),
        "a   b &\nall=\"$all $!\"\nc 7 &\nall=\"$all $!\"\nfor one in $all; do wait $one || exit; done\n"
    );
    for wrong in [
        "```text\nphalanx train mnist\n```\n",
        "<!-- test: together -->\n",
        "```sh\nopen\n",
        "<!-- test: x -->\n",
    ] {
        assert!(std::panic::catch_unwind(|| blocks(wrong)).is_err(), "{wrong}");
    }
}
