//! What a step of Slurm with one task a node says of where nodes meet, as far as it wasn't typed.

use super::flags::RunArgs;
use super::nodes::nodes;
use crate::args::WrongUsage;
use phalanx_job::port_of;
use phalanx_job::slurm::{AgentPlace, node_address, trouble};
use phalanx_launch::Nodes;
use std::net::ToSocketAddrs;
use std::path::Path;
use std::time::Duration;

/// Long enough for a standstill of seconds, and short beside the minute that `srun --wait=60` gives the others of a task that has ended.
const ANEW: Duration = Duration::from_secs(15);

/// The flags with what Slurm says in the place of those that are missing. Whoever says where nodes meet is asked for all of it, but for
/// their number.
pub(super) fn placed(args: &RunArgs, get: impl Fn(&str) -> Option<String>) -> Result<RunArgs, WrongUsage> {
    let mut args = args.clone();
    let typed = |text: &Option<String>| text.as_ref().is_some_and(|text| !text.is_empty());
    let set_rank = get("RANK").is_some_and(|rank| !rank.is_empty());
    if args.standalone || set_rank {
        return Ok(args);
    }
    if typed(&args.rdzv_endpoint) || args.master_addr.is_some() {
        let here = |host: &str| ["localhost", "127.", "[::1]"].iter().any(|own| host.starts_with(own));
        let meets = args.master_addr.iter().chain(&args.rdzv_endpoint).any(|host| !here(host));
        // Without a number each node would be a run of its own, at a place where others come, too.
        if args.nnodes.is_none() && meets {
            args.nnodes = place(&get)?.map(|place| place.nodes.to_string());
        }
        return Ok(args);
    }
    let is_alone = get("SLURM_STEP_NUM_TASKS").is_some_and(|tasks| tasks == "1");
    let Some(place) = place(&get)? else {
        if let (true, Some(text)) = (is_alone, &args.nnodes) {
            let (least, most) = nodes(text)?;
            if least > 1 {
                return Err(WrongUsage(unlike(text, least, 1)));
            }
            if most > 1 {
                // Of MIN:MAX nodes the job has got one, and no other can come into its step.
                (args.nnodes, args.spares, args.stand_by) = (None, 0, false);
            }
        }
        if is_alone && args.spares > 0 {
            return Err(WrongUsage(too_many_spares(args.spares as usize, 1)));
        }
        return Ok(args);
    };
    let spares = args.spares as usize;
    let (least, most) = match &args.nnodes {
        Some(text) => nodes(text)?,
        None if spares >= place.nodes => return Err(WrongUsage(too_many_spares(spares, place.nodes))),
        None => (place.nodes - spares, place.nodes - spares),
    };
    if place.nodes < least || (least == most && !(most..=most + spares).contains(&place.nodes)) {
        return Err(WrongUsage(unlike(&args.nnodes.unwrap_or_default(), least, place.nodes)));
    }
    if least == most && place.node < most && args.node_rank.is_none() {
        args.node_rank = Some(place.node as u32);
    }
    args.stand_by |= place.node >= most && spares > 0;
    if least != most && place.node != 0 {
        // Nodes that come and go have no numbers, and meet at the first all the same.
        let typed = args.rdzv_conf.into_iter();
        args.rdzv_conf = Some(typed.chain(["is_host=false".to_owned()]).collect::<Vec<String>>().join(","));
    }
    args.nnodes.get_or_insert_with(|| most.to_string());
    args.rdzv_id.get_or_insert_with(|| place.run_id.clone());
    args.rdzv_endpoint = Some(format!("{}:{}", address(&place.first_node), port_of(&place.run_id)));
    Ok(args)
}

/// How long a node that was lost may take to come anew after a standstill, where none can come that isn't one of a step: Slurm starts no
/// task again that has ended.
pub(super) fn anew(typed: &RunArgs, nodes: &Nodes, get: impl Fn(&str) -> Option<String>) -> Option<Duration> {
    let step = place(&get).ok().flatten()?;
    let is_at_its_own = typed.rdzv_endpoint.is_none() && typed.master_addr.is_none();
    let has_all = is_at_its_own || step.nodes >= nodes.most as usize;
    has_all.then(|| nodes.patience.join.min(ANEW))
}

/// The place of this process among the nodes of its step.
fn place(get: &impl Fn(&str) -> Option<String>) -> Result<Option<AgentPlace>, WrongUsage> {
    AgentPlace::from_variables(get).map_err(|error| WrongUsage(error.to_string()))
}

/// What to say where none would be left beside those that stand by.
fn too_many_spares(spares: usize, step: usize) -> String {
    format!("--spares {spares}: this step of Slurm has {}, and needs {}", counted(step), spares + 1)
}

fn counted(nodes: usize) -> String {
    if nodes == 1 { "1 node".into() } else { format!("{nodes} nodes") }
}

/// What to say of a number of nodes that isn't the step's.
fn unlike(typed: &str, least: usize, step: usize) -> String {
    let has = counted(step);
    let hint = format!("leave it out, or ask for as many: srun -N{least} --ntasks-per-node=1 ...");
    format!("--nnodes {typed}: this step of Slurm has {has}; {hint}")
}

/// Fails where this process is in a job of Slurm that can't do what it asks for.
pub(crate) fn refuse_trouble() -> Result<(), WrongUsage> {
    let folder = std::env::current_dir().unwrap_or_default();
    match trouble(|name| std::env::var(name).ok(), &folder, Path::is_dir) {
        Some(why) => Err(WrongUsage(why)),
        None => Ok(()),
    }
}

/// The node as the others reach it: by its name, or where nobody knows that but Slurm, by the address that this has.
fn address(node: &str) -> String {
    let is_known = (node, 0).to_socket_addrs().is_ok_and(|mut found| found.next().is_some());
    if is_known { node.to_owned() } else { node_address(node).unwrap_or_else(|| node.to_owned()) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::run::nodes::meeting;
    use clap::Parser;

    #[derive(Parser)]
    struct Typed {
        #[command(flatten)]
        run: RunArgs,
    }

    fn typed(flags: &[&str]) -> RunArgs {
        Typed::parse_from(["run"].iter().chain(flags).chain(&["true"])).run
    }

    /// What Slurm tells node 1 of a step of two.
    fn step(tasks: &str) -> impl Fn(&str) -> Option<String> + '_ {
        let set = [
            ("SLURM_STEP_NUM_TASKS", tasks),
            ("SLURM_STEP_NUM_NODES", "2"),
            ("SLURM_STEP_TASKS_PER_NODE", "4(x2)"),
            ("SLURM_NODEID", "1"),
            ("SLURM_STEP_NODELIST", "localhost,elsewhere"),
            ("SLURM_JOB_ID", "55"),
            ("SLURM_STEP_ID", "2"),
        ];
        move |name: &str| set.iter().find(|(n, _)| *n == name).map(|(_, value)| value.to_string())
    }

    /// What comes of the flags in a step of two nodes, as node 1 of it.
    fn check(flags: &[&str], tasks: &str, want: Result<(&str, Option<u32>, &str, bool), &str>) {
        match (placed(&typed(flags), step(tasks)), want) {
            (Ok(args), Ok((nnodes, rank, id, meets))) => {
                assert_eq!(args.nnodes.as_deref().unwrap_or_default(), nnodes, "{flags:?}");
                assert_eq!(
                    (args.node_rank, args.rdzv_id.as_deref().unwrap_or_default()),
                    (rank, id),
                    "{flags:?}"
                );
                let endpoint = format!("localhost:{}", port_of("slurm-55.2"));
                assert_eq!(args.rdzv_endpoint == Some(endpoint), meets, "{flags:?} {:?}", args.rdzv_endpoint);
            }
            (Err(error), Err(want)) => assert!(error.0.contains(want), "{error}"),
            (got, want) => panic!("{flags:?}: {:?} and not {want:?}", got.map(|args| args.nnodes)),
        }
    }

    #[test]
    fn who_is_lost_is_waited_for_briefly_where_no_others_come() {
        let check = |flags: &[&str], tasks: &str, want: Option<u64>| {
            let typed = typed(flags);
            let args = placed(&typed, step(tasks)).unwrap();
            let nodes = meeting(&args, &[]).unwrap().1.unwrap();
            assert_eq!(anew(&typed, &nodes, step(tasks)), want.map(Duration::from_secs), "{flags:?}");
        };
        check(&[], "2", Some(15));
        check(&["--rdzv-conf", "join_timeout=5"], "2", Some(5));
        // The job has got two of four, and gets no more.
        check(&["--nnodes", "1:4"], "2", Some(15));
        check(&["--nnodes", "2", "--rdzv-endpoint", "h:1"], "2", Some(15));
        // Some are elsewhere, where somebody may start others.
        check(&["--nnodes", "3", "--rdzv-endpoint", "h:1"], "2", None);
        check(&["--nnodes", "2", "--rdzv-endpoint", "h:1"], "1", None);
    }

    #[test]
    fn nodes_that_come_and_go_meet_at_the_first() {
        let check = |flags: &[&str], want: Option<&str>| {
            let args = placed(&typed(flags), step("2")).unwrap();
            assert_eq!(args.rdzv_conf.as_deref(), want, "{flags:?}");
        };
        check(&["--nnodes", "1:4"], Some("is_host=false"));
        check(&["--nnodes", "1:4", "--rdzv-conf", "join_timeout=5"], Some("join_timeout=5,is_host=false"));
        check(&["--nnodes", "2"], None);
    }

    #[test]
    fn the_last_nodes_of_a_step_stand_by() {
        let args = |flags: &[&str]| placed(&typed(flags), step("2"));
        // Node 1 of two.
        let spare = args(&["--spares", "1"]).unwrap();
        assert_eq!((spare.nnodes.as_deref(), spare.node_rank, spare.stand_by), (Some("1"), None, true));
        let refused = |flags: &[&str]| args(flags).err().map(|WrongUsage(why)| why).unwrap_or_default();
        assert_eq!(refused(&["--spares", "2"]), "--spares 2: this step of Slurm has 2 nodes, and needs 3");
        // Fewer than may stand by do.
        let last = args(&["--nnodes", "2", "--spares", "1"]).unwrap();
        assert_eq!((last.node_rank, last.stand_by), (Some(1), false));
        assert!(refused(&["--nnodes", "3", "--spares", "1"]).contains("--nnodes 3: this step"));
    }

    #[test]
    fn a_step_says_what_was_not_typed() {
        check(&[], "2", Ok(("2", Some(1), "slurm-55.2", true)));
        check(&["--nnodes", "1:4"], "2", Ok(("1:4", None, "slurm-55.2", true)));
        check(&["--rdzv-id", "mine", "--nnodes", "2"], "2", Ok(("2", Some(1), "mine", true)));
        check(&[], "1", Ok(("", None, "", false)));
        check(&["--standalone"], "8", Ok(("", None, "", false)));
        check(&["--nnodes", "2", "--rdzv-endpoint", "h:1"], "2", Ok(("2", None, "", false)));
        check(&["--nnodes", "2", "--master-addr", "h"], "2", Ok(("2", None, "", false)));
        // Two nodes that meet are no two runs; those that each stay at home are.
        check(&["--rdzv-endpoint", "h:1"], "2", Ok(("2", None, "", false)));
        check(&["--rdzv-endpoint", "localhost:0"], "2", Ok(("", None, "", false)));
        check(&["--nnodes", "1:2"], "1", Ok(("", None, "", false)));
        check(&["--nnodes", "2", "--rdzv-endpoint", "h:1"], "1", Ok(("2", None, "", false)));
        check(&["--nnodes", "2"], "1", Err("--nnodes 2: this step of Slurm has 1 node; leave it out"));
        check(&["--nnodes", "3"], "2", Err("--nnodes 3: this step of Slurm has 2 nodes"));
        check(&["--nnodes", "1"], "2", Err("--nnodes 1: this step"));
        check(&["--nnodes", "3:4"], "2", Err("srun -N3 --ntasks-per-node=1"));
        check(&[], "8", Err("hint: srun --ntasks-per-node=1 phalanx run --nproc-per-node 4"));
    }
}
