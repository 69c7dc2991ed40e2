//! Whether a node fits into a run: what refuses it, and what is only said.

use phalanx_job::{Node, Terms, why_too_far_apart};

/// Takes the newcomer into a run whose nodes are `here`, beside so many that stand by, or says why not; `clock_ms` is what the wall
/// clock here shows.
pub(super) fn admit(
    terms: &Terms,
    here: &[&Node],
    spares: usize,
    clock_ms: u64,
    newcomer: &Node,
) -> Result<(), String> {
    let theirs = &newcomer.terms;
    let another = "another run with another --rdzv-id may use the same endpoint";
    if theirs.program != terms.program {
        let (ours, theirs) = (&terms.program, &theirs.program);
        return Err(format!("this run's program is {ours}, not {theirs}\nhint: {another}"));
    }
    let nodes = |terms: &Terms| format!("{}:{}", terms.least, terms.most);
    for (flag, ours, theirs) in [
        ("--nnodes", nodes(terms), nodes(theirs)),
        ("--spares", terms.spares.to_string(), theirs.spares.to_string()),
        ("--max-restarts", terms.max_restarts.to_string(), theirs.max_restarts.to_string()),
    ] {
        if ours != theirs {
            let hint = format!("hint: give it the same on all nodes; {another}");
            return Err(format!("this run has {flag} {ours}, not {theirs}\n{hint}"));
        }
    }
    if newcomer.workers == 0 {
        return Err("a node needs at least one worker".into());
    }
    if let Some(rank) = newcomer.node_rank {
        if rank >= terms.most {
            return Err(format!("--node-rank {rank}: must be below --nnodes, which is {}", terms.most));
        }
        if let Some(other) = here.iter().find(|node| node.node_rank == Some(rank)) {
            return Err(format!("--node-rank {rank} is taken, by {}", other.host));
        }
    }
    if here.len() >= terms.most as usize && spares >= terms.spares as usize {
        let hosts: Vec<&str> = here.iter().map(|node| node.host.as_str()).collect();
        let its = if terms.most == 1 { "node".into() } else { format!("{} nodes", terms.most) };
        let hosts = hosts.join(", ");
        let beside = if spares > 0 { format!(", and {spares} that stand by") } else { String::new() };
        let more = terms.spares + 1;
        let stands_by =
            format!("with --spares {more}, on all nodes, one more stands by in case that one is lost");
        return Err(format!("this run has its {its}: {hosts}{beside}\nhint: {another}; {stands_by}"));
    }
    let apart = newcomer.clock_ms.and_then(|theirs| why_too_far_apart(&newcomer.host, theirs, clock_ms));
    apart.map_or(Ok(()), Err)
}

/// What people should know of a newcomer that is taken.
pub(super) fn doubts(terms: &Terms, newcomer: &Node) -> Option<String> {
    let host = &newcomer.host;
    (newcomer.terms.arguments != terms.arguments).then(|| {
        let shown = |arguments: &[String]| arguments.join(" ");
        let (ours, theirs) = (shown(&terms.arguments), shown(&newcomer.terms.arguments));
        format!("{host} gives the program other arguments than the first node: `{theirs}`, not `{ours}`")
    })
}
