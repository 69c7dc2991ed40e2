#!/usr/bin/env bash
# Training on a GPU beside PyTorch's, in turns, in one run; a JSON object a line goes to OUT, what they are to people.
# Usage: benches/gpu.sh PYTHON PHALANX OUT [MNIST_DIR] [STEPS]
# PYTHON has torch and torchvision for GPUs, PHALANX is the built program, and NVIDIA's libraries are where the system or LD_LIBRARY_PATH
# says. MNIST_DIR/MNIST/raw holds the digits; without them that epoch is left out. STEPS counted in each measurement: 200 unless told.
# CIFAR10_DIR, in the environment, holds CIFAR-10's files as `phalanx train cifar10-fast --data` takes them; without them its way to 94%
# is left out.
# BENCH_ONLY names some of rates, mnist, resnet18, resnet50, gpt2, epochs, accuracy, allreduce, where time is short: PyTorch's compiler
# alone takes minutes.
set -uo pipefail
python=$1 phalanx=$(realpath "$2") out=$3 mnist=${4:-} steps=${5:-200} device=${BENCH_DEVICE:-cuda:0}
here=$(cd "$(dirname "$0")" && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
: > "$out"
# A measurement that fails is told, and the others go on.
ours() { "$phalanx" "$@" --json >> "$out" || echo "failed: phalanx $*" >&2; }
peer() { "$python" "$here/peers/gpu.py" "$@" >> "$out" || echo "failed: gpu.py $*" >&2; }
epochs() {
    local lines
    lines=$("$phalanx" train "$@" --nproc-per-node 1 --device "$device" --out "$work/run" --json) || echo "failed: phalanx train $*" >&2
    rm -rf "$work/run"
    # Whose they are stands before them.
    echo "{\"ran\":\"$*\"}" >> "$out"
    grep -E '"event":"(epoch|done)"' <<< "$lines" >> "$out"
}
step() {
    local model=$1 peer_model=$2 batch=$3 count=$4 kind=$5
    shift 5
    for ways in "" --graphs "--graphs --search"; do
        ours bench step --model "$model" --batch "$batch" --steps "$count" --device "$device" --precision "$kind" $ways "$@"
    done
    for how in eager compile; do
        peer step "$peer_model" "$batch" "$count" "$how" "$kind"
    done
}

for what in ${BENCH_ONLY:-rates mnist resnet18 resnet50 gpt2 epochs accuracy allreduce}; do
    case $what in
        rates) peer rates ;;
        mnist) step mnist mnist 64 "$steps" float32 ;;
        resnet18)
            step resnet18 resnet18 64 "$steps" float32
            step resnet18 resnet18 64 "$steps" bfloat16
            ;;
        resnet50) step resnet50 resnet50 256 $((steps / 4)) bfloat16 --image 224 ;;
        gpt2)
            step gpt gpt2 16 $((steps / 4)) bfloat16 --layers 12 --width 768 --heads 12 --seq 1024 --vocabulary 50304 --tied
            ;;
        epochs)
            if [ -n "$mnist" ]; then
                epochs mnist --data "$mnist/MNIST/raw" --epochs 2
                epochs mnist --data "$mnist/MNIST/raw" --epochs 2 --set train.graphs=true
                epochs mnist --data "$mnist/MNIST/raw" --epochs 2 --set train.graphs=true --set train.precision=tf32
                peer epoch mnist 2 "$mnist"
            fi
            peer images "$work/images"
            epochs cifar10-resnet18 --data "$work/images" --epochs 2
            epochs cifar10-resnet18 --data "$work/images" --epochs 2 --set train.graphs=true
            for kind in tf32 bfloat16; do
                epochs cifar10-resnet18 --data "$work/images" --epochs 2 --set train.graphs=true --set "train.precision=$kind"
            done
            peer epoch resnet18 2 "$work/images"
            ;;
        accuracy)
            if [ -n "${CIFAR10_DIR:-}" ]; then
                before=$(wc -l < "$out")
                epochs cifar10-fast --data "$CIFAR10_DIR" --set train.graphs=true --set train.precision=bfloat16
                tail -n +$((before + 1)) "$out" > "$work/lines"
                peer reached 0.94 < "$work/lines"
            else
                echo "accuracy: CIFAR10_DIR names no files of CIFAR-10, so its way to 94% isn't measured" >&2
            fi
            ;;
        allreduce)
            # Beside NCCL left alone; with one GPU there is nothing to be sent, and it shows what ours cost by themselves.
            gpus=$("$python" -c 'import torch; print(max(torch.cuda.device_count(), 1))')
            ours bench allreduce --device cuda --nproc "$gpus" --sizes 64K,1M,25M,100M,500M
            ;;
        *) echo "BENCH_ONLY: no such measurement: $what" >&2 && exit 2 ;;
    esac
done
cat "$out"
