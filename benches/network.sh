#!/usr/bin/env bash
# All-reduces of 64 MiB between two network namespaces beside iperf3 and gloo, in turns, over links of several kinds.
# Usage: benches/network.sh PYTHON [ROUNDS [KIND...]]   (as root; a Python with torch; iperf3, ip, tc and gcc on the path)
# Kinds: plain, gigabit, delay, loss; all of them, if none is named.
# An all-reduce of two ranks sends its bytes once in each direction at the same time, so iperf3 runs with --bidir, and its rate
# is the mean of both directions. Delay and loss are netem's, or, where the kernel has none, those of peers/link.c.
set -euo pipefail
python=$1 rounds=${2:-3} kinds=("${@:3}") here=$(cd "$(dirname "$0")" && pwd) bytes=67108864
phalanx=${PHALANX:-$here/../target/release/phalanx}
folder=$(mktemp -d) a=phx-$$-a b=phx-$$-b link=
end() {
    [ -z "$link" ] || kill "$link" 2>/dev/null || true
    ip netns del $a 2>/dev/null || true
    ip netns del $b 2>/dev/null || true
    rm -rf "$folder"
}
trap end EXIT
(umask 077 && head -c32 /dev/urandom | od -An -tx1 | tr -d ' \n' > "$folder/secret")
gcc -O2 -o "$folder/link" "$here/peers/link.c"

# Two namespaces with a cable between them, and what makes it slow.
lay() {
    ip netns del $a 2>/dev/null || true
    ip netns del $b 2>/dev/null || true
    ip netns add $a && ip netns add $b
    device=phx0
    if [ "$1" = link ]; then
        device=slow0
        "$folder/link" $a $b "$2" "$3" "${4:-1500}" > "$folder/ready" &
        link=$!
        until grep -q ready "$folder/ready"; do sleep 0.05; done
    else
        ip link add phx0 netns $a type veth peer name phx0 netns $b
    fi
    local ns address=1
    for ns in $a $b; do
        ip -n $ns link set lo up
        ip -n $ns addr add 10.78.0.$address/24 dev $device
        ip -n $ns link set $device up
        address=2
    done
}
shape() { for ns in $a $b; do tc -n $ns qdisc add dev $device root "$@"; done; }
lift() { [ -z "$link" ] || { kill "$link"; wait "$link" 2>/dev/null || true; link=; }; }

# A rank in each namespace; rank 0 says what there is to say.
ranks() {
    local port=$((20000 + RANDOM % 10000))
    local env="WORLD_SIZE=2 LOCAL_RANK=0 LOCAL_WORLD_SIZE=1 MASTER_ADDR=10.78.0.1 MASTER_PORT=$port XDG_CONFIG_HOME=$folder \
        PHALANX_SECRET_FILE=$folder/secret GLOO_SOCKET_IFNAME=$device"
    ip netns exec $b env $env RANK=1 "$@" > /dev/null 2> "$folder/errors" &
    local other=$!
    ip netns exec $a env $env RANK=0 "$@" 2>> "$folder/errors" && wait $other || { cat "$folder/errors" >&2; exit 1; }
}
rate_of_iperf3() {
    ip netns exec $b iperf3 -s -1 > /dev/null &
    local server=$!
    sleep 0.3
    ip netns exec $a iperf3 -c 10.78.0.2 -t "$seconds" --bidir -J > "$folder/iperf3.json"
    wait $server
    "$python" - "$folder/iperf3.json" <<'PY'
import json, sys
end = json.load(open(sys.argv[1]))["end"]
print(f"{(end['sum_received']['bits_per_second'] + end['sum_received_bidir_reverse']['bits_per_second']) / 2 / 8e9:.3f}")
PY
}
rate_of_phalanx() { ranks "$phalanx" bench allreduce --transport tcp --sizes $bytes --iters "$iters" --json | sed -n 's/.*"algbw_gbps":\([0-9.]*\).*"verified":true.*/\1/p'; }
rate_of_gloo() { ranks "$python" "$here/peers/allreduce_gloo.py" $bytes "$iters" | sed -n 's/.*algbw *\([0-9.]*\) GB.*/\1/p'; }

measure() {
    local name=$1 round
    for ((round = 0; round < rounds; round++)); do
        printf '%-40s GB/s each way: iperf3 %s, phalanx %.3f, gloo %s\n' "$name" "$(rate_of_iperf3)" "$(rate_of_phalanx)" "$(rate_of_gloo)"
    done
    lift
}

# A cable that delays, and loses so many of 100000 packets.
lay_slow() {
    if lay veth && shape netem delay 1ms loss "$(awk "BEGIN { print $1 / 1000 }")%" 2> /dev/null; then
        how=netem
    else
        lay link 1000 "$1" 9000
        how=link.c
    fi
}

seconds=4 iters=8
[ ${#kinds[@]} -gt 0 ] || kinds=(plain gigabit delay loss)
for kind in "${kinds[@]}"; do
    case $kind in
        plain) lay veth && iters=20 measure "veth" ;;
        gigabit) lay veth && shape tbf rate 1gbit burst 256kb latency 20ms && measure "veth, 1 Gbit/s" ;;
        delay) lay_slow 0 && measure "$how: delay 1 ms" ;;
        loss) lay_slow 100 && measure "$how: delay 1 ms, loss 0.1%" ;;
        *) echo "no kind of link: $kind" >&2 && exit 2 ;;
    esac
done
