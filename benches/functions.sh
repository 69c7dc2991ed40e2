#!/bin/sh
# Layers and operations on a CPU beside PyTorch, in turns: the medians of so many runs each, with one and with two threads, in ms.
# Usage: benches/functions.sh [RUNS] [PART OF A NAME], with PHALANX_TEST_PYTHON naming a Python that has torch.
set -e
runs=${1:-3} only=${2:-} python=${PHALANX_TEST_PYTHON:-python3}
cd "$(dirname "$0")/.."
cargo build --release -q -p phalanx-nn --example functions
folder=$(mktemp -d)
trap 'rm -r "$folder"' EXIT
for threads in 1 2; do
    for run in $(seq "$runs"); do
        target/release/examples/functions "$threads" "$only" > "$folder/ours.$run"
        "$python" benches/peers/functions.py "$threads" "$only" > "$folder/theirs.$run"
    done
    echo "threads: $threads (a step and a forward pass: ours, PyTorch's, and by how much ours is faster)"
    "$python" - "$folder" <<'PYTHON'
import glob, statistics, sys

def medians(whose):
    found = {}
    for path in glob.glob(f"{sys.argv[1]}/{whose}.*"):
        for line in open(path):
            *name, step, forward = line.split()
            found.setdefault(" ".join(name), []).append((float(step), float(forward)))
    return {name: [statistics.median(times) for times in zip(*rows)] for name, rows in found.items()}

ours, theirs = medians("ours"), medians("theirs")
for name, (step, forward) in ours.items():
    their_step, their_forward = theirs[name]
    print(f"| {name} | {step:.2f} | {their_step:.2f} | {their_step / step:.1f} | {forward:.2f} | {their_forward:.2f} | {their_forward / forward:.1f} |")
PYTHON
done
