#!/usr/bin/env bash
# All that is to be seen on a machine with a GPU, in one call: what is there, whether it is well, memory accesses, leaks, where the time of
# steps goes, and figures.
# Usage: benches/on_gpu.sh PYTHON PHALANX OUT [MNIST_DIR]
# PYTHON has torch and torchvision for GPUs, PHALANX is the built program; what is seen goes to the folder OUT, a file each, and a line about
# each to people. MNIST_DIR is as for benches/gpu.sh. ON_GPU_ONLY names some of look, selftest, memory, leaks, profile,
# figures, where time is short; nothing that is run, figures aside, goes on for longer than ON_GPU_LIMIT seconds, an hour unless told.
set -uo pipefail
python=$1 phalanx=$(realpath "$2") out=$3 mnist=${4:-} device=${BENCH_DEVICE:-cuda:0} steps=${ON_GPU_STEPS:-10000} limit=${ON_GPU_LIMIT:-3600}
here=$(cd "$(dirname "$0")" && pwd)
[ -x "$phalanx" ] || { echo "PHALANX: $2 is no program; \`cargo build --release\` makes target/release/phalanx" >&2 && exit 2; }
mkdir -p "$out"
out=$(realpath "$out")

# Where pip puts NVIDIA's libraries, if it does.
wheels=$("$python" -c 'import glob, site; print(":".join(sorted(f for s in site.getsitepackages() for f in glob.glob(s + "/nvidia/*/lib"))))' 2>/dev/null)
export LD_LIBRARY_PATH=$wheels${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}

failed=0
# What is killed has had ten seconds to end by itself.
limited=(timeout --foreground --kill-after 10 "$limit")
# Runs a command; its output goes to a file, and its end to people.
see() {
    local name=$1 start=$SECONDS code=0
    shift
    "$@" > "$out/$name.txt" 2>&1 || code=$?
    echo "$name: $([ $code = 0 ] && echo "done" || echo "FAILED ($code)") in $((SECONDS - start)) s, $out/$name.txt"
    [ $code = 0 ] || failed=1
}

# Ten thousand steps (ON_GPU_STEPS), with what the GPU's processes and the worker itself hold, in MB, every two seconds; at the end what came after a fifth.
leaks() {
    local graphs=$1 samples=$out/leaks-$1.memory.txt code=0
    "${limited[@]}" "$phalanx" train mnist-mini --nproc-per-node 1 --device "$device" --epochs 10000 --steps "$steps" --set "train.graphs=$graphs" \
        --out "$out/run-$graphs" --json > "$out/leaks-$graphs.jsonl" &
    local run=$!
    while kill -0 $run 2>/dev/null; do
        echo "$(nvidia-smi --query-compute-apps=used_memory --format=csv,noheader,nounits | awk '{ sum += $1 } END { print sum + 0 }')" \
            "$(ps -o rss= --ppid "$(pgrep -P $run | head -1)" | awk '{ sum += $1 } END { print int(sum / 1024) }')"
        sleep 2
    done > "$samples"
    wait $run || code=$?
    # The last sample may be of a run that is ending.
    awk '{ gpu[NR] = $1; host[NR] = $2 } END {
        begun = 1; while (begun < NR && gpu[begun] == 0) begun++
        last = NR > begun ? NR - 1 : NR; first = begun + int((last - begun) / 5)
        print "GPU " gpu[first] " to " gpu[last] " MB, host " host[first] " to " host[last] " MB, of " NR " looks"
        exit gpu[last] > gpu[first] || host[last] > host[first] + 8
    }' "$samples" || code=1
    return $code
}

for what in ${ON_GPU_ONLY:-look selftest memory leaks profile figures}; do
    case $what in
        look)
            date -u "+%Y-%m-%d %H:%M UTC" > "$out/date.txt"
            see machine "${limited[@]}" nvidia-smi
            see doctor "${limited[@]}" "$phalanx" doctor
            ;;
        selftest) see selftest "${limited[@]}" "$phalanx" selftest --device "$device" ;;
        memory)
            if sanitizer=$(command -v compute-sanitizer || ls /usr/local/cuda*/bin/compute-sanitizer 2>/dev/null | tail -1) && [ -n "$sanitizer" ]; then
                for tool in memcheck racecheck synccheck initcheck; do
                    # NCCL asks CUDA's runtime for kernels that it has for other GPUs alone, which is told as an error.
                    quiet=()
                    [ "$tool" = memcheck ] && quiet=(--report-api-errors no)
                    see "$tool" "${limited[@]}" "$sanitizer" --tool "$tool" "${quiet[@]}" --error-exitcode 9 "$phalanx" selftest --device "$device" --quick
                done
                # With buffers as long as what lies in them.
                see memcheck-exact "${limited[@]}" "$sanitizer" --tool memcheck --report-api-errors no --error-exitcode 9 "$phalanx" selftest --device "$device" --quick --debug-sync --exact-memory
            else
                echo "memory: compute-sanitizer isn't installed (package cuda-sanitizer-13-0 of NVIDIA's repository, or the toolkit)"
            fi
            ;;
        leaks)
            for graphs in false true; do
                see "leaks-$graphs" leaks "$graphs"
                tail -1 "$out/leaks-$graphs.txt"
            done
            ;;
        profile)
            profile() { see "profile-$1" "${limited[@]}" "$phalanx" bench step --device "$device" --profile --steps 20 "${@:2}"; }
            profile mnist --model mnist --batch 64
            profile resnet18 --model resnet18 --batch 64 --precision bfloat16
            profile resnet50 --model resnet50 --image 224 --batch 256 --precision bfloat16
            profile gpt2 --model gpt --layers 12 --width 768 --heads 12 --seq 1024 --vocabulary 50304 --tied --batch 16 --precision bfloat16
            ;;
        figures) see figures bash "$here/gpu.sh" "$python" "$phalanx" "$out/figures.jsonl" "$mnist" ;;
        *) echo "ON_GPU_ONLY: no such thing: $what" >&2 && exit 2 ;;
    esac
done
exit $failed
