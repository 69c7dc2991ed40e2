#!/usr/bin/env bash
# The MNIST job beside PyTorch's, in turns, in one run.
# Usage: benches/mnist.sh PYTHON DATA_DIR   (a Python with torch and torchvision; DATA_DIR/MNIST/raw holds the files)
set -euo pipefail
python=$1 data=$2 here=$(cd "$(dirname "$0")" && pwd)
cargo build --release --quiet
phalanx=$here/../target/release/phalanx
out=$(mktemp -d)
trap 'rm -rf "$out"' EXIT
epoch() { "$phalanx" train mnist --data "$data" --epochs 1 --out "$out" "$@" 2>&1 | sed -n 's/^epoch 0: \([0-9.]* s\).*/\1/p'; }

for threads in 1 2; do
    for _ in 1 2 3; do
        echo "step, $threads threads: phalanx $("$phalanx" bench step --threads $threads | sed 's/.*median \([0-9.]* ms\).*/\1/')," \
            "PyTorch $("$python" "$here/peers/mnist.py" step $threads)"
    done
done
for _ in 1 2 3; do
    echo "epoch, 1 worker with 2 threads: phalanx $(epoch --nproc-per-node 1)," \
        "PyTorch $("$python" "$here/peers/mnist.py" epoch 2 "$data")"
done
for _ in 1 2 3; do
    echo "epoch, 2 workers: phalanx $(epoch)," \
        "PyTorch $("$python" -m torch.distributed.run --nproc-per-node 2 "$here/peers/mnist.py" epoch 1 "$data" 2>/dev/null)"
done
"$phalanx" bench launch
/usr/bin/env time -f "largest process: %M kB resident" "$phalanx" train mnist --data "$data" --epochs 1 --out "$out" 2>&1 | tail -n 1
ls -l "$phalanx" | awk '{print "binary:", $5, "bytes"}'
