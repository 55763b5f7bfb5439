#!/usr/bin/env bash
# One Ray node of a Slurm job, in the foreground: node.sh head|worker PYTHON, started by cluster.sh through srun.
# In: RAY_ADDRESS, CLIENT_PORT (of a head, free), RAY_AUTH_MODE and RAY_AUTH_TOKEN_PATH; NODE_DISK, a folder of this node; LOGS, one that all nodes share.
# Out: a node until SIGTERM or SIGUSR1, then Ray's own logs in LOGS/NODE. A worker that Ray gave up starts again; a head
# that ends, ends the job.
set -euo pipefail
role=$1
ray=("$2" -m ray.scripts.scripts start --block --disable-usage-stats)
name=$(hostname -s)
own=$NODE_DISK/dapo-$SLURM_JOB_ID # short: Ray puts sockets below it, and Linux allows 107 characters
restarts=3
node='' stopped=''

stop() {
  stopped=1
  [[ -z $node ]] || kill -TERM "$node" 2>/dev/null || true
}

# Many nodes writing many small files into a shared folder at all times would slow it down; so they come at the end, of
# which cluster.sh leaves each node 30 s.
bring_home() {
  mkdir -p "$LOGS/$name"
  timeout 15 cp -r "$own"/ray/session_2*/logs/. "$LOGS/$name/" 2>/dev/null || true
  rm -rf "$own"
}

trap stop TERM INT USR1
trap bring_home EXIT
if ! { mkdir -p "$own/tmp" && chmod 700 "$own"; }; then
  echo "node.sh: $name cannot write to NODE_DISK=$NODE_DISK; name a folder of the node's own disk" >&2
  exit 1
fi

# What processes leave there, as an engine that is killed does its sockets, goes with the job. A TMPDIR that sbatch took
# from where the job was submitted need not be on this node.
export TMPDIR=$own/tmp

# Compiled kernels outlive the job; on a shared home every rank of every node would write the same files.
caches=$NODE_DISK/dapo-cache-$(id -u)
mkdir -p "$caches" && chmod 700 "$caches"
export TRITON_CACHE_DIR=$caches/triton TORCHINDUCTOR_CACHE_DIR=$caches/inductor VLLM_CACHE_ROOT=$caches/vllm
export FLASHINFER_WORKSPACE_BASE=$caches CUDA_CACHE_PATH=$caches/cuda

if [[ $role == head ]]; then
  ray+=(--head --node-ip-address="${RAY_ADDRESS%:*}" --port="${RAY_ADDRESS##*:}" --dashboard-host=127.0.0.1
    --ray-client-server-port="$CLIENT_PORT" --no-monitor) # the autoscaler's, which would listen on all networks, without a token
else
  ray+=(--address="$RAY_ADDRESS")
fi
unset RAY_ADDRESS # `ray start --head` would refuse
# Ray raises the limit of open files in drivers alone; what a node starts keeps what it is started with, 1024 by default.
files=$(ulimit -Hn)
[[ $files != unlimited ]] && ((files < 65536)) || files=65536
[[ $(ulimit -Sn) == unlimited ]] || (($(ulimit -Sn) >= files)) || ulimit -Sn "$files"
export RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S=0 # what still runs here when the job ends is not worth Ray's 30 s
while true; do
  # USR1 is for this shell. Where Slurm sends it to all that a task has started, Ray would die of it, untidily.
  (trap '' USR1 && exec "${ray[@]}" --temp-dir="$own/ray") &
  node=$!
  code=0
  [[ -z $stopped ]] || kill -TERM "$node" # the signal came while there was nothing to pass it on to
  wait "$node" || code=$?
  if [[ -n $stopped ]]; then
    for _ in {1..20}; do # 10 s; a node that waits for a head which is not there hears no signal
      kill -0 "$node" 2>/dev/null || exit 0
      sleep 0.5 || true
    done
    kill -KILL "$node" 2>/dev/null || true
    exit 0
  fi
  if [[ $role == head ]] || ((restarts == 0)); then
    echo "node.sh: Ray on $name ended with $code" >&2
    exit 1
  fi
  restarts=$((restarts - 1))
  echo "node.sh: Ray on $name ended with $code; it starts again" >&2
  sleep 2
done
