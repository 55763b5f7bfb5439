#!/usr/bin/env bash
# One node of a run, for services that start the same command on every node (skypilot.yaml, dstack.yml):
#   bash launch/each_node.sh RANK HEAD_IP PYTHON +experiment=NAME key=value ...
# Rank 0 is the Ray head and runs the driver, whose exit code it ends with (85: saved, the same command goes on); the
# others are Ray workers until the head has ended. The doctor looks at all nodes first.
# In: RAY_AUTH_TOKEN, the same secret on all nodes; READY_S, seconds for them to join; CLOUD, aws, gcp or azure, whose notice
# that it takes this node away is passed on to the run (python -m dapo.leave).
set -euo pipefail
rank=$1 head=$2 python=$3
shift 3
: "${RAY_AUTH_TOKEN:?give all nodes the same secret: export RAY_AUTH_TOKEN=\$(openssl rand -hex 32)}"
ready_s=${READY_S:-900}
port=20379 # this and the client's lie above the ports of Ray's workers (10002 to 19999)
ray=("$python" -m ray.scripts.scripts)
# SkyPilot has a Ray of its own, with its ports and its address in the environment.
start=("${ray[@]}" start --disable-usage-stats --dashboard-agent-listen-port=52366)
unset RAY_ADDRESS
export RAY_AUTH_MODE=token RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S=0
files=$(ulimit -Hn)
[[ $files != unlimited ]] && ((files < 65536)) || files=65536
ulimit -Sn "$files"
ulimit -l unlimited 2>/dev/null || true # for RDMA; the doctor says where it is refused

head_answers() {
  timeout 5 bash -c "exec 3<>/dev/tcp/$head/$port" 2>/dev/null
}

# In the background: waits for a notice, then runs the command.
watch_cloud() {
  [[ -n ${CLOUD:-} ]] || exit 0
  RAY_ADDRESS=$head:$port "$python" -m dapo.leave --watch "$CLOUD" &
  trap 'kill $! 2>/dev/null || true' EXIT
  wait $! && "$@"
}

if ((rank > 0)); then
  until head_answers; do
    ((SECONDS < ready_s)) || { echo "each_node.sh: $head:$port did not answer within $ready_s s; READY_S=1800 allows more" >&2 && exit 1; }
    sleep 1
  done
  watch_cloud true &
  watch=$!
  trap 'kill "$watch" 2>/dev/null || true' EXIT
  while head_answers; do # a worker that Ray gave up starts again
    "${start[@]}" --address="$head:$port" --block || true
    sleep 2
  done
  exit 0
fi

"${start[@]}" --head --node-ip-address="$head" --port="$port" --ray-client-server-port=20001 --dashboard-host=127.0.0.1 \
  --no-monitor --block &
node=$! driver=''
trap 'kill -TERM "${driver:-$node}" 2>/dev/null || true' TERM INT # the driver saves, and ends with 85
until head_answers; do
  kill -0 "$node" 2>/dev/null || { echo "each_node.sh: the head ended; its last lines stand above" >&2 && exit 1; }
  sleep 1
done
RAY_ADDRESS=$head:$port "$python" -m dapo.doctor --run trainer.nodes_timeout_s="$ready_s" "$@" &
driver=$!
watch_cloud kill -TERM "$driver" & # the cluster ends with its head
watch=$!
while true; do # `wait` also ends at a signal
  code=0
  wait "$driver" || code=$?
  kill -0 "$driver" 2>/dev/null || break
done
kill "$watch" 2>/dev/null || true
kill -TERM "$node" 2>/dev/null || true # not `ray stop`, which would end SkyPilot's Ray too
wait "$node" || true
exit "$code"
