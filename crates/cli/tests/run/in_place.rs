//! Nodes that come, go, and are lost while the training of the others goes on, and workers that are killed on any of them.

use super::nodes::{Agent, Site, kill};
use super::user::{self, phalanx, text};
use serde_json::Value;
use std::fs;
use std::path::PathBuf;
use std::time::{Duration, Instant};

const LIMIT: Duration = Duration::from_secs(120);
/// The training of all nodes, whose bits depend on nothing but this.
const TRAINING: &str = "train mnist-mini --batch-size 4 --logical-shards 4";

/// Nodes that train together, and what was told of it.
struct Training {
    site: Site,
    epochs: &'static str,
    told: Vec<Value>,
    /// Where what the nodes say to people is kept while they run.
    said: Vec<PathBuf>,
    start: Instant,
}

impl Training {
    fn new(flags: &[&str], epochs: &'static str) -> Training {
        Training { site: Site::new(flags), epochs, told: Vec::new(), said: Vec::new(), start: Instant::now() }
    }

    /// A node of one worker.
    fn node(&mut self, name: &str) -> Agent {
        let mut command = self.site.command(name, &[]);
        command.args(["--", env!("CARGO_BIN_EXE_phalanx")]).args(TRAINING.split(' '));
        command.args(["--epochs", self.epochs, "--out"]).arg(self.out());
        let agent = Agent::of(command);
        self.said.push(agent.said.clone());
        agent
    }

    fn out(&self) -> PathBuf {
        self.site.folder("shared")
    }

    /// The worker of a node that was started as this rank last.
    fn worker(&self, name: &str, rank: u32) -> String {
        user::worker(&self.site.folder(name).join("out"), rank).to_string()
    }

    /// Reads on to the first event that is wanted.
    fn until(&mut self, wanted: impl Fn(&Value) -> bool) {
        loop {
            let text = fs::read_to_string(self.out().join("events.jsonl")).unwrap_or_default();
            let whole = &text[..text.rfind('\n').map_or(0, |end| end + 1)];
            for line in whole.lines().skip(self.told.len()) {
                self.told.push(serde_json::from_str(line).unwrap());
                if wanted(self.told.last().unwrap()) {
                    return;
                }
            }
            if self.start.elapsed() > LIMIT {
                let said: Vec<String> = self.said.iter().flat_map(fs::read_to_string).collect();
                panic!("{:?}\n{}", self.told.last(), said.join("\n"));
            }
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// Reads on to a membership of so many.
    fn until_members(&mut self, world_size: usize) {
        self.until(|event| event["event"] == "members" && event["world_size"] == world_size);
    }

    /// Whether each step was made once, of which every tenth is told, and each sample of an epoch used once.
    fn is_whole(&self) {
        let of = |kind: &'static str| self.told.iter().filter(move |event| event["event"] == kind);
        let steps: Vec<u64> = of("step").map(|step| step["step"].as_u64().unwrap()).collect();
        assert!(steps.is_sorted_by(|a, b| a < b), "{steps:?}");
        assert!(of("step").zip(&steps).all(|(step, i)| step["samples"] == (i + 1) * 16), "{:?}", self.told);
        assert!(of("epoch").all(|epoch| epoch["each_once"] == true), "{:?}", self.told);
        assert_eq!(of("start").count(), 1);
    }

    fn has_the_bits_of_an_undisturbed_one(&self) {
        let folder = tempfile::tempdir().unwrap();
        let mut undisturbed = phalanx(folder.path());
        undisturbed.args(TRAINING.split(' ')).args(["--epochs", self.epochs, "--out", "out"]);
        let out = undisturbed.output().unwrap();
        assert_eq!(out.status.code(), Some(0), "{}", text(&out.stderr));
        let model = |out: PathBuf| fs::read(out.join("model.safetensors")).unwrap();
        assert!(model(self.out()) == model(folder.path().join("out")), "other bits");
    }
}

#[test]
fn nodes_come_and_go_and_are_lost_and_the_result_has_the_same_bits() {
    let mut run = Training::new(&["--nnodes", "1:2", "--max-restarts", "3"], "60");
    let first = run.node("a");
    run.until(|event| event["event"] == "step");
    let second = run.node("b");
    run.until_members(2);
    // Its agent stays, and starts another.
    kill("-9", &run.worker("b", 1));
    run.until_members(1);
    run.until_members(2);
    // The first worker as well, which has told of the run so far.
    kill("-9", &run.worker("a", 0));
    run.until_members(1);
    run.until_members(2);
    second.signal("-9");
    run.until_members(1);
    let third = run.node("c");
    run.until_members(2);
    third.signal("-TERM");
    let (code, _, said) = third.end();
    assert_eq!(code, 143, "{said}");
    run.until_members(1);
    run.until(|event| event["event"] == "done");
    let (code, _, said) = first.end();
    assert_eq!(code, 0, "{said}");
    run.is_whole();
    for words in ["its agent's connection ended; the others go on", "(restart 2 of 3)"] {
        assert!(said.contains(words), "{words} in {said}");
    }
    assert!(!said.contains("starting all workers"), "{said}");
    run.has_the_bits_of_an_undisturbed_one();
}

#[test]
fn a_worker_that_fails_too_often_ends_the_run_of_all_nodes_with_its_name() {
    let mut run = Training::new(&["--nnodes", "2", "--max-restarts", "1"], "1000");
    let first = run.node("a");
    first.waits_for_others();
    let second = run.node("b");
    run.until(|event| event["event"] == "step");
    kill("-9", &run.worker("b", 1));
    run.until_members(1);
    run.until_members(2);
    run.until(|event| event["event"] == "step");
    kill("-9", &run.worker("a", 0));
    for agent in [first, second] {
        let (code, _, said) = agent.end();
        assert_eq!(code, 1, "{said}");
        assert!(said.contains("rank 0") && said.contains("was killed by SIGKILL"), "{said}");
    }
}

#[test]
fn the_coordinators_node_is_lost_and_the_next_leads_the_run_to_the_same_bits() {
    let mut run = Training::new(&["--nnodes", "1:3", "--max-restarts", "3"], "90");
    let first = run.node("a");
    first.waits_for_others();
    let second = run.node("b");
    first.says("nodes here: 2 of");
    let third = run.node("c");
    run.until(|event| event["event"] == "step");
    first.signal("-9");
    run.until_members(2);
    // One that comes finds nobody where they met at first, waits there, and is fetched.
    let fourth = run.node("d");
    run.until_members(3);
    // Workers are replaced under the next coordinator as under the first.
    kill("-9", &run.worker("c", 2));
    run.until_members(2);
    run.until_members(3);
    second.signal("-9");
    run.until_members(2);
    run.until(|event| event["event"] == "done");
    let (code, _, said) = fourth.end();
    assert!(code == 0 && said.contains("the run goes on elsewhere: joining it, at "), "{said}");
    // It has got the number of the one that was lost.
    assert!(said.contains("this node leads the run on"), "{said}");
    let (code, _, said) = third.end();
    assert_eq!(code, 0, "{said}");
    run.is_whole();
    for words in ["another node leads the run on", "restart 1 of 3"] {
        assert!(said.contains(words), "{words} in {said}");
    }
    assert!(!said.contains("starting all workers"), "{said}");
    run.has_the_bits_of_an_undisturbed_one();
}

#[test]
fn the_coordinators_node_leaves_and_the_next_leads_the_run() {
    let mut run = Training::new(&["--nnodes", "1:2"], "40");
    let first = run.node("a");
    first.waits_for_others();
    let second = run.node("b");
    // By then it is known that the others go on without a node that leaves.
    run.until(|event| event["event"] == "epoch" && event["epoch"] == 2);
    first.signal("-TERM");
    let (code, _, said) = first.end();
    assert_eq!(code, 143, "{said}");
    run.until_members(1);
    run.until(|event| event["event"] == "done");
    let (code, _, said) = second.end();
    assert_eq!(code, 0, "{said}");
    assert!(said.contains("this node leads the run on") && !said.contains("lost"), "{said}");
    run.is_whole();
}
