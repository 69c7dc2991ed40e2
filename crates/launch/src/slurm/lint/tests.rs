use super::*;

/// The rules that speak up about a script of these lines, each with its line; the first two of every script are right.
fn found(lines: &[&str]) -> Vec<(usize, &'static str)> {
    let text = format!("#!/bin/bash\n#SBATCH --job-name=x\n{}\n", lines.join("\n"));
    lint(&text, &|folder| folder == "logs").into_iter().map(|finding| (finding.line, finding.rule)).collect()
}

#[test]
fn each_mistake_is_found_and_its_repair_is_none() {
    let check = |rule: &str, line: usize, wrong: &[&str], right: &[&str]| {
        assert!(
            found(wrong).iter().any(|found| *found == (line, found.1) && found.1 == rule),
            "{rule}: {:?} of {wrong:?}",
            found(wrong)
        );
        assert!(!found(right).iter().any(|found| found.1 == rule), "{rule}: {:?} of {right:?}", found(right));
    };
    let two = "#SBATCH --nodes=2";
    check(
        "late-directive",
        4,
        &["cd work", "#SBATCH --time=1:00:00"],
        &["#SBATCH --time=1:00:00", "cd work"],
    );
    check("not-a-directive", 3, &["# SBATCH --time=1:00:00"], &["# sbatch takes this script"]);
    check("not-a-directive", 3, &["#sbatch --time=1:00:00"], &["#SBATCH --time=1:00:00"]);
    check("variable-in-directive", 3, &["#SBATCH --output=$HOME/%j.out"], &["#SBATCH --output=%j.out"]);
    check("time", 3, &["#SBATCH --time=8h"], &["#SBATCH --time=8:00:00"]);
    check("time", 3, &["#SBATCH -t 24"], &["#SBATCH -t 1-00:00"]);
    check("time", 3, &["#SBATCH -t 48"], &["#SBATCH --time=30"]);
    check("memory", 3, &["#SBATCH --mem-per-cpu=4"], &["#SBATCH --mem-per-cpu=512"]);
    check("memory", 3, &["#SBATCH --mem=64"], &["#SBATCH --mem=64G"]);
    check("output-folder", 3, &["#SBATCH -o out/%j.txt"], &["#SBATCH -o logs/%j.txt"]);
    check("open-mode", 3, &["#SBATCH --requeue"], &["#SBATCH --requeue", "#SBATCH --open-mode=append"]);
    check(
        "tasks",
        3,
        &["#SBATCH --ntasks=4", two, "#SBATCH --ntasks-per-node=4"],
        &["#SBATCH -n 8", two, "#SBATCH --ntasks-per-node=4"],
    );
    check(
        "cpus-per-task",
        4,
        &["#SBATCH -c 8", "srun python train.py"],
        &["#SBATCH -c 8", "srun -c $SLURM_CPUS_PER_TASK python train.py"],
    );
    check(
        "cpus-per-task",
        4,
        &["#SBATCH --cpus-per-task=8", "srun ./t"],
        &["#SBATCH --cpus-per-task=8", "export SRUN_CPUS_PER_TASK=8", "srun ./t"],
    );
    check(
        "one-node",
        4,
        &[two, "torchrun --nproc_per_node=8 t.py"],
        &[two, "srun torchrun --nproc_per_node=8 t.py"],
    );
    check("one-node", 4, &[two, "python train.py"], &["python train.py"]);
    check(
        "agent-tasks",
        4,
        &["#SBATCH --ntasks-per-node=8", "srun torchrun t.py"],
        &["#SBATCH --ntasks-per-node=1", "srun torchrun t.py"],
    );
    check(
        "agent-tasks",
        3,
        &["srun --ntasks-per-node=8 phalanx run ./t"],
        &["srun --ntasks-per-node=8 phalanx train mnist"],
    );
    check("agent-nodes", 4, &[two, "srun torchrun --nnodes=4 t.py"], &[two, "srun torchrun --nnodes=2 t.py"]);
    check(
        "agent-nodes",
        4,
        &[two, "srun torchrun --nnodes 4 t.py"],
        &[two, "srun torchrun --nnodes 1:2 t.py"],
    );
    check(
        "workers",
        4,
        &["#SBATCH --gres=gpu:a100:4", "torchrun --nproc_per_node=8 t.py"],
        &["#SBATCH --gres=gpu:a100:4", "torchrun --nproc_per_node=4 t.py"],
    );
    check(
        "agent-endpoint",
        4,
        &[two, "srun torchrun --nnodes=2 --nproc_per_node=8 t.py"],
        &[two, "srun torchrun --nnodes $SLURM_NNODES --rdzv_endpoint $head:$port t.py"],
    );
    check(
        "agent-endpoint",
        4,
        &[two, "srun python -m torch.distributed.run t.py"],
        &[two, "srun torchrun $ARGS t.py"],
    );
    check(
        "node-rank",
        4,
        &[two, "srun torchrun --node_rank=$SLURM_NODEID t.py"],
        &[two, "srun bash -c 'torchrun --node_rank=$SLURM_NODEID t.py'"],
    );
    check(
        "head-node",
        3,
        &["head=$(echo $SLURM_JOB_NODELIST | cut -d, -f1)"],
        &["head=$(scontrol show hostnames $SLURM_JOB_NODELIST | head -n 1)"],
    );
    check("head-node", 4, &[two, "export MASTER_ADDR=localhost"], &["export MASTER_ADDR=localhost"]);
    check(
        "port",
        3,
        &["export MASTER_PORT=29500"],
        &["export MASTER_PORT=$((20000 + SLURM_JOB_ID % 12000))"],
    );
    check(
        "port",
        3,
        &["srun torchrun --rdzv_endpoint $head:29500 t.py"],
        &["srun torchrun --rdzv_endpoint $head:$port t.py", "torchrun --rdzv-endpoint localhost:0 t.py"],
    );
    check("port", 3, &["torchrun --master-port 29500 t.py"], &["torchrun --master-port=$port t.py"]);
    check(
        "bad-exit",
        4,
        &["#SBATCH --ntasks=8", "srun --wait=0 python train.py"],
        &[
            "#SBATCH --ntasks=8",
            "srun -n1 -c4 python sweep.py 1 &",
            "srun -n1 -c4 python sweep.py 2 & wait $!",
        ],
    );
    check(
        "bad-exit",
        4,
        &["#SBATCH --ntasks=8", "srun python train.py"],
        &["#SBATCH --ntasks=8", "srun -K1 python train.py"],
    );
    check(
        "no-kill",
        4,
        &["#SBATCH -N 4", "srun --no-kill torchrun --nnodes=1:4 t.py"],
        &["#SBATCH -N 4", "#SBATCH --no-kill", "srun --no-kill torchrun --nnodes=1:4 t.py"],
    );
    check(
        "signal",
        3,
        &["#SBATCH --signal=USR1@90", "trap save USR1", "srun ./t &", "wait"],
        &["#SBATCH --signal=B:USR1@90", "trap save USR1", "srun ./t &", "wait"],
    );
    check(
        "signal",
        3,
        &["#SBATCH --signal=B:USR1@90", "srun ./t"],
        &["#SBATCH --signal=USR1@90", "srun ./t"],
    );
    check(
        "signal",
        5,
        &["#SBATCH --signal=B:USR1@90", "trap save USR1", "srun ./t"],
        &["#SBATCH --signal=B:USR1@90", "exec ./t"],
    );
    check(
        "requeue-array",
        4,
        &["#SBATCH --array=0-3", "scontrol requeue $SLURM_JOB_ID"],
        &["#SBATCH --array=0-3", "scontrol requeue ${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID"],
    );
    check("exit-code", 4, &["python train.py", "echo done"], &["set -e", "python train.py", "echo done"]);
    check(
        "exit-code",
        4,
        &["python train.py", "cat log"],
        &["if ! python train.py; then", "exit 1", "fi", "echo done"],
    );
    check("exit-code", 3, &["python train.py; echo done"], &["echo begun && python train.py"]);
    check("exit-code", 3, &["python train.py || echo failed"], &["python train.py && echo done"]);
    check("exit-code", 4, &["python train.py", "echo 1 && date"], &["python train.py || exit 1"]);
    check(
        "exit-code",
        3,
        &["srun python train.py 2>&1 | tee log"],
        &["set -eo pipefail", "srun python train.py 2>&1 | tee log"],
    );
    check("exit-code", 3, &["python train.py |& tee log"], &["python train.py > log 2>&1"]);
    check("exit-code", 4, &["python train.py &", "wait"], &["python train.py &", "wait $!"]);
    check("exit-code", 3, &["srun python train.py & wait"], &["srun python train.py & wait $!"]);
    check("background", 3, &["srun python train.py &"], &["srun python train.py & wait $!"]);
    check("background", 4, &["python a.py &", "python b.py &"], &["python a.py &", "python b.py"]);
    check(
        "visible-devices",
        4,
        &["#SBATCH --gpus-per-node=2", "export CUDA_VISIBLE_DEVICES=0,1"],
        &["#SBATCH --gpus-per-node=2"],
    );
}

/// What others of a site's scripts do is right as it is.
#[test]
fn what_starts_its_ranks_otherwise_is_let_be() {
    let two = "#SBATCH --nodes=2";
    for lines in [
        &["mpirun -np $SLURM_NTASKS python train.py"][..],
        &["deepspeed --hostfile hosts train.py"],
        &["phalanx data fetch mnist", "srun phalanx train mnist"],
        &["cp train.py $TMPDIR/", "srun -K1 python $TMPDIR/train.py"],
        &["python prepare_data.py", "srun -K1 python train.py", "python evaluate.py"],
        &["srun ray start --head &", "python driver.py"],
        &["export SCRIPT=train.py", "srun -K1 python $SCRIPT"],
        &[
            "#SBATCH --ntasks=8",
            "#SBATCH hetjob",
            "#SBATCH --ntasks-per-node=4",
            "srun -K1 python t.py : python u.py",
        ],
    ] {
        assert_eq!(found(&[&[two], lines].concat()), [], "{lines:?}");
    }
    assert_eq!(found(&["#SBATCH --ntasks=8", "#SBATCH --ntasks-per-node=4", "srun -K1 python t.py"]), []);
    let quoted = "srun bash -c \"torchrun --node-rank $SLURM_NODEID --master-addr $A t.py\"";
    let all = lint(&format!("#!/bin/bash\n{two}\n{quoted}\n"), &|_| true);
    let instead = quoted.replace("$SLURM", "\\$SLURM");
    assert_eq!(all[0].instead, instead);
    assert_eq!(lint(&format!("#!/bin/bash\n{two}\n{instead}\n"), &|_| true), []);
}

#[test]
fn what_sbatch_refuses_is_found_first() {
    let rules =
        |text: &str| lint(text, &|_| true).into_iter().map(|finding| finding.rule).collect::<Vec<_>>();
    assert_eq!(rules(""), ["shebang"]);
    assert_eq!(rules("echo\n"), ["shebang"]);
    assert_eq!(rules("#!/bin/sh\necho a\rb\n"), ["line-ends"]);
    assert_eq!(rules("#!/bin/sh\r\necho\r\n"), ["line-ends"]);
}

/// Whoever puts it in the line's place still exports the variable.
#[test]
fn a_repair_of_a_line_that_exports_exports() {
    let instead = |line: &str| {
        let all = lint(&format!("#!/bin/bash\n#SBATCH --nodes=2\n{line}\nsrun python t.py\n"), &|_| true);
        all.into_iter().find(|finding| finding.rule == "head-node").map(|finding| finding.instead)
    };
    let right = "MASTER_ADDR=$(scontrol show hostnames \"$SLURM_JOB_NODELIST\" | head -n 1)";
    assert_eq!(instead("MASTER_ADDR=localhost"), Some(right.into()));
    assert_eq!(instead("export MASTER_ADDR=localhost"), Some(format!("export {right}")));
}

#[test]
fn every_rule_has_a_line_a_reason_and_a_repair() {
    let text = "#SBATCH --nodes=2 --ntasks-per-node=4 --requeue --time=8h # why\nsrun --label \\\n  python train.py\n";
    let all = lint(text, &|_| true);
    let lines: Vec<_> = all.iter().map(|finding| (finding.line, finding.rule)).collect();
    assert_eq!(lines, [(1, "open-mode"), (1, "shebang"), (1, "time"), (2, "bad-exit")]);
    assert_eq!(all[3].instead, "srun --kill-on-bad-exit=1 --label python train.py");
    assert!(all.iter().all(|finding| !finding.why.is_empty() && !finding.instead.is_empty()));
}

#[test]
fn comments_and_quotes_are_told_apart() {
    for (line, want) in [
        ("srun ./t # -K1", "srun ./t"),
        ("echo '# no' # yes", "echo '# no'"),
        ("echo \"a # b\"", "echo \"a # b\""),
        ("x=${#a}", "x=${#a}"),
        ("# all", ""),
    ] {
        assert_eq!(without_comment(line), want);
    }
}

#[test]
fn text_and_calls_of_functions_are_no_commands() {
    let check = |lines: &[&str], want: &[(usize, &str)]| {
        let all = [&["#SBATCH --nodes=2", "#SBATCH --ntasks-per-node=1"], lines].concat();
        assert_eq!(found(&all), want, "{lines:?}");
    };
    check(&["echo \"torchrun --nnodes 7 train.py\""], &[]);
    check(&["if true; then printf '%s\\n' 'torchrun --nnodes 7 train.py'; fi 2>&1"], &[]);
    check(&[": 'srun python train.py'"], &[]);
    check(&[": 'a; b' && python train.py"], &[(5, "one-node")]);
    check(&[": \"$(python train.py)\""], &[(5, "one-node")]);
    check(&[": don\\'t; python train.py"], &[(5, "one-node")]);
    let document = ["python train.py", "#SBATCH --time=1:00:00", "# SBATCH --time=1:00:00"];
    for (begin, end) in
        [("<<EOF > a", "EOF"), ("<<-EOF", "\tEOF"), ("<< 'EOF'", "EOF"), ("<<\\EOF |\\\n tac", "EOF")]
    {
        let begin = format!("cat {begin}");
        let lines = [&[begin.as_str()], &document[..], &[end]].concat();
        check(&lines, &[]);
        let n = lines.join("\n").lines().count();
        check(&[&lines[..], &["python train.py"]].concat(), &[(5 + n, "one-node")]);
    }
    check(&["cat <<A <<B", "python a.py", "A", "python b.py", "B", "python c.py"], &[(10, "one-node")]);
    // None of these begins a document.
    for line in ["cat <<< EOF", "echo '<<EOF'", "x=$((1 << EOF))", "# <<EOF", "cat <<OTHER"] {
        check(&[line, "python train.py", "EOF"], &[(6, "one-node")]);
    }
    let run = "run() { srun -c4 -K1 \"$@\"; }";
    check(&[run, "run torchrun train.py"], &[]);
    check(&["function run {", "srun -K1 \"$@\"", "}", "run torchrun train.py || exit 1"], &[]);
    check(&["train() { python train.py; }", "train"], &[(5, "one-node")]);
    check(&[run, "run hostname && torchrun train.py"], &[(6, "one-node")]);
    check(&[run, "run torchrun --nnodes 7 train.py"], &[(6, "agent-nodes")]);
}

/// Whatever is written there is read to its end.
#[test]
fn no_script_is_too_mad() {
    let mut runner = proptest::test_runner::TestRunner::new(proptest::prelude::ProptestConfig {
        failure_persistence: None,
        ..proptest::prelude::ProptestConfig::with_cases(500)
    });
    let words = [
        "#SBATCH",
        "# SBATCH",
        "srun",
        "torchrun",
        "--nnodes=",
        "1:4",
        "--signal=B:",
        "trap",
        "USR1",
        "\\\n",
        "\n",
        " ",
        "'",
        "\"",
        "$SLURM_NODEID",
        "--node_rank",
        "--time=",
        "\u{e9}",
        "MASTER_PORT=",
        "-N",
        "=",
        "<<",
        "EOF",
        "echo",
        ";",
        "run()",
    ];
    let word = proptest::sample::select(words.to_vec());
    let text = proptest::collection::vec(word, 0..60);
    runner
        .run(&text, |words| {
            let text = words.concat();
            let all = lint(&text, &|_| false);
            assert!(all.iter().all(|finding| finding.line <= text.lines().count().max(1)));
            Ok(())
        })
        .unwrap();
}

#[test]
fn quotes_go_on_over_lines() {
    let two = "#SBATCH --nodes=2";
    let script =
        ["srun bash -c '", "  # it has two", "  cd work", "  torchrun --master-addr=$A \\", "    t.py", "'"];
    assert_eq!(found(&[&[two], &script[..]].concat()), []);
    // What they are given to has its mistakes all the same, in its line, and what stands behind them is read as ever.
    let alone = ["bash -c \"", "torchrun t.py", "\"", "python train.py"];
    assert_eq!(found(&[&[two], &alone[..]].concat()), [(4, "one-node"), (7, "one-node")]);
    let variable = ["CMD=\"torchrun \\", "  t.py \\", "\"", "srun bash -c \"$CMD\""];
    assert_eq!(found(&[&[two], &variable[..]].concat()), []);
    // One that is never closed is a letter like others.
    assert_eq!(found(&[two, "echo it's", "python train.py"]), [(5, "one-node")]);
}
