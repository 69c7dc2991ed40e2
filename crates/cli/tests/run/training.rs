//! Nodes that train together, as tests of `phalanx run` have them: agents on this host with one worker each, whose training has
//! the same bits on any number of them.

use super::nodes::{Agent, Site};
use super::user::{self, phalanx, text};
use serde_json::Value;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

const LIMIT: Duration = Duration::from_secs(240);
/// The training of all nodes, whose bits depend on nothing but this.
const TRAINING: &str = "train mnist-mini --batch-size 4 --logical-shards 4";
/// Samples of its steps.
const STEP: u64 = 16;
/// Steps of its epochs.
const EPOCH: u64 = 125;

/// Nodes that train together, and what was told of it.
pub(crate) struct Training {
    site: Site,
    /// What the training is told beside, the same on all nodes.
    args: &'static str,
    /// The lines of the events that were read and are still true.
    told: Vec<String>,
    /// Where what the nodes say to people is kept while they run.
    said: Vec<PathBuf>,
    start: Instant,
}

impl Training {
    /// Agents have these flags, training has these arguments.
    pub(crate) fn new(flags: &[&str], args: &'static str) -> Training {
        let (site, start) = (Site::new(flags), Instant::now());
        Training { site, args, told: Vec::new(), said: Vec::new(), start }
    }

    /// A node of one worker.
    pub(crate) fn node(&mut self, name: &str) -> Agent {
        self.node_with(name, &[], &self.out())
    }

    /// Two nodes of one worker, of which the first leads.
    pub(crate) fn two(&mut self) -> [Agent; 2] {
        let first = self.node("a");
        first.waits_for_others();
        [first, self.node("b")]
    }

    /// Three, with ranks in this order.
    pub(crate) fn three(&mut self) -> [Agent; 3] {
        let [first, second] = self.two();
        first.says("nodes here: 2 of");
        [first, second, self.node("c")]
    }

    /// One that waits for no others, and keeps what its training leaves in a folder of its own.
    pub(crate) fn hasty_node(&mut self, name: &str) -> Agent {
        self.node_with(name, &["--rdzv-conf", "last_call_timeout=0"], &self.site.folder("hasty"))
    }

    fn node_with(&mut self, name: &str, flags: &[&str], out: &Path) -> Agent {
        let mut command = self.site.command(name, flags);
        command.args(["--", env!("CARGO_BIN_EXE_phalanx")]);
        self.agent(command, out)
    }

    /// A node of one worker, which prints more than anybody reads where `loud` is "yes".
    pub(crate) fn node_in_shell(&mut self, name: &str, loud: &str) -> Agent {
        let mut command = self.site.command(name, &[]);
        let script = "test $LOUD = yes && yes & exec \"$@\"";
        command.env("LOUD", loud).args(["--", "sh", "-c", script, "sh", env!("CARGO_BIN_EXE_phalanx")]);
        self.agent(command, &self.out())
    }

    fn agent(&mut self, mut command: Command, out: &Path) -> Agent {
        self.tell(&mut command, &[], out);
        let agent = Agent::of(command);
        self.said.push(agent.said.clone());
        agent
    }

    /// The training, told this too, on this host alone.
    pub(crate) fn alone(&self, args: &[&str], out: &Path) {
        let mut command = phalanx(&self.site.folder("alone"));
        self.tell(&mut command, args, out);
        let out = command.output().unwrap();
        assert_eq!(out.status.code(), Some(0), "{}", text(&out.stderr));
    }

    fn tell(&self, command: &mut Command, args: &[&str], out: &Path) {
        command.args(TRAINING.split(' ')).args(self.args.split(' ')).args(args).arg("--out").arg(out);
    }

    pub(crate) fn out(&self) -> PathBuf {
        self.site.folder("shared")
    }

    /// The worker of a node that was started as this rank last.
    pub(crate) fn worker(&self, name: &str, rank: u32) -> String {
        user::worker(&self.site.folder(name).join("out"), rank).to_string()
    }

    /// What the worker of a node that was started as this rank at first has said to people.
    pub(crate) fn logged(&self, name: &str, rank: u32) -> String {
        fs::read_to_string(self.site.folder(name).join(format!("out/logs/0/{rank}.err"))).unwrap()
    }

    /// The worker of a node that was started last.
    pub(crate) fn newest_worker(&self, name: &str) -> Option<i32> {
        user::workers(&self.site.folder(name).join("out"), "RANK=").into_iter().max()
    }

    /// The lines of the events that weren't read yet.
    fn untold(&mut self) -> Vec<String> {
        let text = fs::read_to_string(self.out().join("events.jsonl")).unwrap_or_default();
        let whole = &text[..text.rfind('\n').map_or(0, |end| end + 1)];
        // What will be told again was cut.
        let is_same = |(told, line): &(&String, &str)| told == line;
        let known = self.told.iter().zip(whole.lines()).take_while(is_same).count();
        self.told.truncate(known);
        whole.lines().skip(known).map(str::to_owned).collect()
    }

    /// Reads on to the first event that is wanted; fails if the training is done before.
    pub(crate) fn until(&mut self, wanted: impl Fn(&Value) -> bool) -> Value {
        loop {
            for line in self.untold() {
                let event = serde_json::from_str(&line).unwrap();
                self.told.push(line);
                if wanted(&event) {
                    return event;
                }
                assert!(event["event"] != "done", "the training is over too soon\n{}", self.all_said());
            }
            assert!(self.start.elapsed() < LIMIT, "{:?}\n{}", self.told.last(), self.all_said());
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// Waits until this is so.
    pub(crate) fn wait_for(&self, is_so: impl Fn(&Training) -> bool, what: &str) {
        while !is_so(self) {
            assert!(self.start.elapsed() < LIMIT, "{what} is waited for: {}", self.all_said());
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// Reads on to a membership of so many.
    pub(crate) fn until_members(&mut self, world_size: usize) {
        let begins = |event: &Value| event["event"] == "start" || event["event"] == "members";
        self.until(|event| begins(event) && event["world_size"] == world_size);
    }

    /// The step of the last checkpoint of a run that was stopped.
    pub(crate) fn checkpointed(&self) -> u64 {
        let steps =
            fs::read_dir(self.out().join("checkpoints")).unwrap().map(|entry| entry.unwrap().file_name());
        let steps = steps.filter_map(|name| name.to_str()?.strip_prefix("step-")?.parse().ok());
        steps.max().expect("a run that was stopped leaves a checkpoint")
    }

    /// Whether a run that was stopped has kept all steps that it told of.
    pub(crate) fn has_kept_its_last_step(&self) {
        let told = fs::read_to_string(self.out().join("events.jsonl")).unwrap();
        let mut events = told.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
        let last = events.rfind(|event| event["event"] == "step").expect("it has made steps");
        let kept = self.checkpointed();
        assert!(kept > last["step"].as_u64().unwrap(), "kept at {kept}: {last}");
    }

    /// What all nodes have said so far.
    fn all_said(&self) -> String {
        let said: Vec<String> = self.said.iter().flat_map(fs::read_to_string).collect();
        said.join("\n")
    }

    /// Reads on to the end of the training, which is whole, and after which these nodes end well; gives what they have said.
    pub(crate) fn ends_well<const N: usize>(&mut self, nodes: [Agent; N]) -> [String; N] {
        self.until(|event| event["event"] == "done");
        self.is_whole();
        nodes.map(|node| {
            let (code, _, said) = node.end();
            assert_eq!(code, 0, "{said}");
            said
        })
    }

    /// Reads on to a step that is told from now on.
    fn until_another_step(&mut self) {
        let old = self.untold();
        self.told.extend(old);
        self.until(|event| event["event"] == "step");
    }

    /// Asks these nodes, which are all, to end after another step, and checks what has come of the training; gives what they have said.
    pub(crate) fn stops_well<const N: usize>(&mut self, nodes: [Agent; N]) -> [String; N] {
        self.until_another_step();
        nodes.iter().for_each(|node| node.signal("-TERM"));
        let said = nodes.map(|node| {
            let (code, _, said) = node.end();
            assert_eq!(code, 143, "{said}");
            said
        });
        self.goes_on_to_the_same_bits();
        said
    }

    /// Goes on with the training, which was stopped, on this host alone to the end of its epoch, and checks that it is whole and has
    /// the bits of one that nothing happened to.
    pub(crate) fn goes_on_to_the_same_bits(&mut self) {
        let steps = self.checkpointed().next_multiple_of(EPOCH).to_string();
        self.alone(&["--resume", "--steps", &steps], &self.out());
        self.until(|event| event["event"] == "done");
        self.is_whole();
        self.has_the_bits_of_an_undisturbed_one(&["--steps", &steps]);
    }

    /// What the training has left that more of it would change.
    pub(crate) fn files(&self) -> [Vec<u8>; 2] {
        ["events.jsonl", "model.safetensors"].map(|name| fs::read(self.out().join(name)).unwrap())
    }

    /// Whether each step was made once, of which every tenth is told, and each sample of an epoch used once.
    pub(crate) fn is_whole(&self) {
        let told: Vec<Value> = self.told.iter().map(|line| serde_json::from_str(line).unwrap()).collect();
        let of = |kind: &'static str| told.iter().filter(move |event| event["event"] == kind);
        let steps: Vec<u64> = of("step").map(|step| step["step"].as_u64().unwrap()).collect();
        assert!(steps.is_sorted_by(|a, b| a < b), "{steps:?}");
        assert!(of("step").zip(&steps).all(|(step, i)| step["samples"] == (i + 1) * STEP), "{told:?}");
        assert!(of("epoch").all(|epoch| epoch["each_once"] == true), "{told:?}");
        assert_eq!(of("start").count(), 1 + of("resume").count());
    }

    /// Whether the training, which is over, has the bits of one that was told this and that nothing happened to.
    pub(crate) fn has_the_bits_of_an_undisturbed_one(&self, args: &[&str]) {
        let undisturbed = self.site.folder("undisturbed");
        self.alone(args, &undisturbed);
        let model = |out: &Path| fs::read(out.join("model.safetensors")).unwrap();
        assert!(model(&self.out()) == model(&undisturbed), "other bits");
    }
}
