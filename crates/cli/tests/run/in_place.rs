//! Nodes that come, go, and are lost while the training of the others goes on, and workers that are killed on any of them.

use super::nodes::kill;
use super::training::Training;
use std::time::{Duration, Instant};

#[test]
fn nodes_come_and_go_and_are_lost_and_the_result_has_the_same_bits() {
    let mut run = Training::new(&["--nnodes", "1:2", "--max-restarts", "3"], "--epochs 30");
    let first = run.node("a");
    run.until(|event| event["event"] == "step");
    let second = run.node("b");
    run.until_members(2);
    // Its agent stays, and starts another, which may come before the others have gone on without it.
    kill("-9", &run.worker("b", 1));
    run.until_members(2);
    // The first worker as well, which has told of the run so far.
    kill("-9", &run.worker("a", 0));
    run.until_members(2);
    second.signal("-9");
    run.until_members(1);
    let third = run.node("c");
    run.until_members(2);
    third.signal("-TERM");
    let (code, _, said) = third.end();
    assert_eq!(code, 143, "{said}");
    run.until_members(1);
    let [said] = run.ends_well([first]);
    // With or without a reason: what was sent to an agent that is killed may be refused.
    let is_of_loss = |line: &str| {
        line.contains("lost: its agent's connection ended") && line.ends_with("; the others go on")
    };
    assert!(said.lines().any(is_of_loss), "{said}");
    assert!(said.contains("(restart 2 of 3)"), "{said}");
    assert!(!said.contains("starting all workers"), "{said}");
    run.has_the_bits_of_an_undisturbed_one(&[]);
}

#[test]
fn a_worker_that_fails_too_often_ends_the_run_of_all_nodes_with_its_name() {
    let mut run = Training::new(&["--nnodes", "2", "--max-restarts", "1"], "--epochs 1000");
    let [first, second] = run.two();
    run.until(|event| event["event"] == "step");
    kill("-9", &run.worker("b", 1));
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
    let mut run = Training::new(&["--nnodes", "1:3", "--max-restarts", "3"], "--epochs 1000");
    let [first, second, third] = run.three();
    run.until(|event| event["event"] == "step");
    first.signal("-9");
    run.until_members(2);
    // One that comes finds nobody where they met at first, waits there, and is fetched.
    let fourth = run.node("d");
    run.until_members(3);
    // Workers are replaced under the next coordinator as under the first.
    kill("-9", &run.worker("c", 2));
    run.until_members(3);
    second.signal("-9");
    run.until_members(2);
    let [joined, said] = run.stops_well([fourth, third]);
    // It has got the number of the one that was lost.
    for words in ["the run goes on elsewhere: joining it, at ", "this node leads the run on"] {
        assert!(joined.contains(words), "{words} in {joined}");
    }
    for words in ["another node leads the run on", "restart 1 of 3"] {
        assert!(said.contains(words), "{words} in {said}");
    }
    assert!(!said.contains("starting all workers"), "{said}");
}

#[test]
fn the_coordinators_node_is_lost_under_tls_and_the_run_goes_on() {
    let mut run = Training::new(&["--nnodes", "1:2", "--max-restarts", "3", "--tls"], "--epochs 20");
    let [first, second] = run.two();
    run.until(|event| event["event"] == "step");
    first.signal("-9");
    run.until_members(1);
    let third = run.node("c");
    run.until_members(2);
    run.ends_well([second, third]);
    run.has_the_bits_of_an_undisturbed_one(&[]);
}

/// A run of a fixed number of nodes has as many all the time.
#[test]
fn nodes_that_stand_by_take_the_places_of_those_that_are_lost_and_the_result_has_the_same_bits() {
    let mut run = Training::new(&["--nnodes", "2", "--spares", "2", "--max-restarts", "3"], "--epochs 1000");
    let [first, second] = run.two();
    run.until(|event| event["event"] == "step");
    let [third, fourth] = ["c", "d"].map(|name| {
        let spare = run.node(name);
        spare.says(" stands by, in case that a node is lost");
        spare
    });
    second.signal("-9");
    run.until_members(2);
    // The next leads the run, which is the one that stood by, and the other that did takes the place of who has led it.
    first.signal("-9");
    run.until_members(1);
    run.until_members(2);
    third.says("this node leads the run on");
    fourth.says("another node leads the run on");
    let [said, _] = run.stops_well([third, fourth]);
    let stops = ["waiting", "starting all workers", "stopping all workers"];
    assert!(said.contains("was lost: its agent has ended; the others go on"), "{said}");
    assert!(stops.iter().all(|words| !said.contains(words)), "{said}");
}

/// Its machine is silent, so it may be alive: of three that know each other two go on, and none of two.
#[test]
fn one_that_stands_by_and_one_other_go_on_without_the_coordinators_node_that_stands_still() {
    let mut run = Training::new(&["--nnodes", "2", "--spares", "1", "--max-restarts", "3"], "--epochs 1000");
    let [first, second] = run.two();
    run.until(|event| event["event"] == "step");
    let third = run.node("c");
    third.says(" stands by, in case that a node is lost");
    let worker = run.worker("a", 0);
    first.signal("-STOP");
    kill("-STOP", &worker);
    second.says("this node leads the run on");
    run.until_members(1);
    run.until_members(2);
    kill("-CONT", &worker);
    first.signal("-CONT");
    // It stands by from now on.
    first.says("the run goes on elsewhere: joining it");
    let [_, said, _] = run.stops_well([first, second, third]);
    assert!(
        said.contains(" comes in for a node that is missing") && !said.contains("starting all"),
        "{said}"
    );
}

/// Its workers begin again from the last checkpoint.
#[test]
fn one_that_stands_by_leads_the_run_on_where_no_other_is_left() {
    let mut run = Training::new(&["--nnodes", "1", "--spares", "1", "--max-restarts", "3"], "--epochs 1000");
    let first = run.node("a");
    run.until(|event| event["event"] == "epoch" && event["epoch"] == 2);
    let second = run.node("b");
    second.says(" stands by, in case that a node is lost");
    first.signal("-9");
    second.says("this node leads the run on");
    second.says(" comes in for a node that is missing");
    run.stops_well([second]);
}

/// Its worker, which tells of the run, stands still as well, and keeps the run directory: longer than what is killed may take to end.
#[test]
fn what_happens_is_told_on_though_the_node_that_told_it_hangs() {
    let mut run = Training::new(&["--nnodes", "1:3", "--max-restarts", "3"], "--epochs 1000");
    let [first, second, third] = run.three();
    run.until(|event| event["event"] == "step" && event["world_size"] == 3);
    let worker = run.worker("a", 0);
    first.signal("-STOP");
    kill("-STOP", &worker);
    run.until_members(2);
    let words = "shared: taken over from a worker of this run that was lost, and hangs";
    run.wait_for(|run| run.logged("c", 2).contains(words), words);
    // It writes nothing of its own between what the others write.
    kill("-CONT", &worker);
    first.signal("-CONT");
    run.until_members(3);
    run.until(|event| event["event"] == "step");
    third.signal("-TERM");
    run.until_members(2);
    run.until(|event| event["event"] == "step");
    run.is_whole();
    drop([first, second, third]);
}

/// Its agent stands still, not its worker: the others can't know that and go on without either.
#[test]
fn a_coordinator_that_stands_still_joins_the_others_that_have_gone_on_without_it() {
    let mut run = Training::new(&["--nnodes", "1:3", "--max-restarts", "3"], "--epochs 1000");
    let [first, second, third] = run.three();
    run.until(|event| event["event"] == "step" && event["world_size"] == 3);
    first.signal("-STOP");
    // Its worker lives, and keeps the run directory, until the agent hears what has happened.
    second.says("this node leads the run on");
    first.signal("-CONT");
    run.until_members(2);
    run.until_members(3);
    let [said, ..] = run.stops_well([first, second, third]);
    assert!(said.contains("the run goes on elsewhere: joining it"), "{said}");
}

/// Neither who led before it nor who did after it is there any more.
#[test]
fn a_coordinator_that_stands_still_while_two_others_lead_joins_the_second() {
    let mut run = Training::new(&["--nnodes", "1:4", "--max-restarts", "3"], "--epochs 1000");
    let [first, second, third] = run.three();
    first.says("nodes here: 3 of");
    let fourth = run.node("d");
    run.until_members(4);
    first.signal("-9");
    second.says("this node leads the run on");
    run.until_members(3);
    second.signal("-STOP");
    third.says("this node leads the run on");
    third.signal("-9");
    fourth.says("this node leads the run on");
    second.signal("-CONT");
    run.until_members(2);
    let [said, _] = run.stops_well([second, fourth]);
    assert!(said.contains("the run goes on elsewhere: joining it"), "{said}");
}

/// Its node is needed, and the other waits for one.
#[test]
fn an_agent_that_stood_still_joins_anew_those_that_took_it_for_lost() {
    for nodes in ["2", "1:2"] {
        let mut run = Training::new(&["--nnodes", nodes, "--max-restarts", "3"], "--epochs 1000");
        let first = run.node("a");
        first.waits_for_others();
        let second = run.node("b");
        run.until(|event| event["event"] == "step" && event["world_size"] == 2);
        second.signal("-STOP");
        first.says("lost: gave no sign of life for 2.0 s");
        second.signal("-CONT");
        second.says("joining the run anew");
        let is_later = |event: &str| ["resume", "start", "members"].contains(&event);
        run.until(|event| event["event"].as_str().is_some_and(is_later));
        run.until(|event| event["event"] == "step" && event["world_size"] == 2);
        let [_, said] = run.stops_well([first, second]);
        assert!(said.contains("the others have gone on without this node"), "{said}");
    }
}

#[test]
fn the_first_of_two_agents_may_stand_still_for_seconds() {
    let mut run = Training::new(&["--nnodes", "2", "--max-restarts", "3"], "--epochs 1000");
    let [first, second] = run.two();
    run.until(|event| event["event"] == "step");
    first.signal("-STOP");
    second.says("looking for who leads the run on");
    std::thread::sleep(Duration::from_secs(2));
    first.signal("-CONT");
    second.says("the coordinator is there again");
    run.stops_well([first, second]);
}

#[test]
fn a_node_that_stood_still_while_the_others_finished_does_not_lead_them_again() {
    let mut run = Training::new(&["--nnodes", "1:2", "--max-restarts", "3"], "--epochs 30");
    let [first, second] = run.two();
    run.until_members(2);
    run.until(|event| event["event"] == "step");
    // With its worker, as if the machine slept.
    let worker = run.worker("b", 1);
    second.signal("-STOP");
    kill("-STOP", &worker);
    run.until_members(1);
    run.ends_well([first]);
    let before = run.files();
    kill("-CONT", &worker);
    second.signal("-CONT");
    let (code, _, said) = second.end();
    assert!(code == 1 && said.contains("only 1 of 2 nodes are here"), "{code}: {said}");
    assert!(!said.contains("this node leads the run on"), "{said}");
    assert!(run.files() == before, "what the run has left was written again");
}

#[test]
fn a_node_that_leaves_holds_up_nobody_though_nobody_reads_what_it_prints() {
    let flags = ["--nnodes", "1:2", "--max-restarts", "3", "--shutdown-timeout", "100"];
    let mut run = Training::new(&flags, "--epochs 1000");
    let first = run.node_in_shell("a", "no");
    first.waits_for_others();
    let second = run.node_in_shell("b", "yes");
    run.until_members(2);
    run.until(|event| event["event"] == "epoch" && event["epoch"] == 2);
    let asked = Instant::now();
    second.signal("-TERM");
    run.until_members(1);
    run.until(|event| event["event"] == "step");
    assert!(asked.elapsed() < Duration::from_secs(50), "the others waited for {:?}", asked.elapsed());
    let (code, _, said) = second.end();
    assert_eq!(code, 143, "{said}");
    assert!(asked.elapsed() < Duration::from_secs(80), "it took {:?} to leave", asked.elapsed());
    first.signal("-TERM");
    assert_eq!(first.end().0, 143);
}

#[test]
fn a_node_that_comes_when_the_coordinator_was_just_lost_is_in_the_run_after_all() {
    let mut run = Training::new(&["--nnodes", "1:3", "--max-restarts", "3"], "--epochs 25");
    let [first, second] = run.two();
    run.until(|event| event["event"] == "step");
    first.signal("-9");
    // Nobody answers where they met, so it takes itself for the first of its run, until it hears of the others.
    let third = run.hasty_node("c");
    run.until_members(1);
    run.until_members(2);
    run.ends_well([second, third]);
    run.has_the_bits_of_an_undisturbed_one(&[]);
}

#[test]
fn the_coordinators_node_leaves_and_the_next_leads_the_run() {
    let mut run = Training::new(&["--nnodes", "1:2"], "--epochs 20");
    let [first, second] = run.two();
    // By then it is known that the others go on without a node that leaves.
    run.until(|event| event["event"] == "epoch" && event["epoch"] == 2);
    first.signal("-TERM");
    let (code, _, said) = first.end();
    assert_eq!(code, 143, "{said}");
    run.until_members(1);
    let [said] = run.ends_well([second]);
    assert!(said.contains("this node leads the run on") && !said.contains("lost"), "{said}");
}
