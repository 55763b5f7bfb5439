# shellcheck shell=bash
# What train.sbatch and eval.sbatch share: Ray on the nodes of an allocation, a driver beside its head, and their end.
# In: Slurm's variables, and the site settings at the top of those two. They call, in this order: begin, read_plan (train)
# or read_output_dir (eval), start_ray, examine (train), watch_time_limit (train), drive, again_if_saved (train).
# shellcheck disable=SC2317,SC2329  # the functions that traps call are reachable

: "${SLURM_RESTART_COUNT:=0}"
script=${SLURM_JOB_NAME:-sbatch}
nodes=$SLURM_JOB_NUM_NODES
cpus=${SLURM_CPUS_PER_TASK:-$SLURM_CPUS_ON_NODE}
token=$PWD/outputs/.ray-token-$SLURM_JOB_ID
logs=$PWD/outputs/slurm-$SLURM_JOB_ID # use_output_dir puts them there
driver='' timer='' early='' forwarded='' again=1
steps=() again_by=()

say() {
  echo "$script: $*" >&2
}

die() {
  say "$*"
  exit 1
}

# What a node said last is the reason more often than not, besides the banner that every node of Ray's prints.
nodes_failed() {
  local file line
  say "$*"
  for file in "$logs"/*.log; do
    line=$(grep -v ' INFO scripts.py' "$file" 2>/dev/null | tail -n 5) || true
    [[ -z $line ]] || printf '%s\n' "$script: $file ends with:" "$line" >&2
  done
  exit 1
}

# Asks the kernel: after a SIGTERM to all that a job has started, bash's own list keeps what has long ended.
ended_within() {
  local deadline=$((SECONDS + $1))
  while kill -0 ${driver:+"$driver"} "${steps[@]}" 2>/dev/null; do # true while there is one of them
    ((SECONDS < deadline)) || return 1
    sleep 0.5
  done
}

teardown() {
  trap '' TERM USR1 USR2
  [[ -z $driver ]] || kill -TERM "$driver" 2>/dev/null || true
  [[ -z $timer ]] || kill "$timer" 2>/dev/null || true
  # srun passes USR1 on to its tasks, which bring their logs home; TERM would have it kill them.
  ((${#steps[@]} == 0)) || kill -USR1 "${steps[@]}" 2>/dev/null || true
  ended_within 30 || kill -TERM "${steps[@]}" 2>/dev/null || true # of the lead
  ended_within 5 || kill -KILL "${steps[@]}" 2>/dev/null || true
  rm -f "$token"
}

# The driver takes a second signal as an order to leave at once, unsaved; so whatever else comes, it gets one.
forward() {
  [[ $1 == USR1 ]] || again=0
  if [[ $driver == starts ]]; then
    early=$1
    return 0
  fi
  if [[ -z $driver ]]; then
    say "SIG$1 while no driver runs"
    # Preempted before it began: the job starts over. One whose driver has ended has its exit code.
    [[ $1 != USR1 || -z ${REQUEUE:-} || -n ${code:-} ]] || again_if_saved
    exit 1
  fi
  if [[ -n $forwarded ]]; then
    say "SIG$1 after SIG$forwarded: the driver is already saving"
    return 0 # without the 0, in a trap, it is the status of the command that was interrupted
  fi
  forwarded=$1
  say "SIG$1: the driver saves and stops"
  kill -s USR1 "$driver" 2>/dev/null || true
}

begin() {
  # Whatever the person who submitted has set: steps get the job's variables, and squeue writes dates that can be read.
  export SLURM_EXPORT_ENV=ALL SLURM_TIME_FORMAT=standard
  trap teardown EXIT
  trap 'forward USR1' USR1
  trap 'forward USR2' USR2
  trap 'forward TERM' TERM
  head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
  if [[ -n $CONTAINER ]]; then
    python=${PYTHON:-python}
  else
    python=${PYTHON:-$PWD/.venv/bin/python}
    command -v "$python" >/dev/null || die "$python does not exist: run bash launch/install.sh --gpu, or set PYTHON or CONTAINER"
  fi
  in_container
}

# Adds to `mounts` each folder that is there and does not lie in one of them.
mount_too() {
  local folder mount those
  for folder; do
    [[ $folder == /* && -d $folder ]] || continue
    IFS=, read -ra those <<<"$mounts"
    for mount in "${those[@]}"; do
      [[ $folder/ != "$mount"/* ]] || continue 2
    done
    mounts+=,$folder
  done
}

# Sets the words before a command that put it into the container: `enter` inside a step, `step` as options of srun, and
# `here` on the head's node, outside of any step. Folders that it is given are mounted too, and the hub's caches.
in_container() {
  local mounts=$PWD,$NODE_DISK${CONTAINER_MOUNTS:+,$CONTAINER_MOUNTS} name cache
  enter=() step=() here=()
  [[ -n $CONTAINER ]] || return 0
  cache=${XDG_CACHE_HOME:-${HOME:-}/.cache}/huggingface # where it is by default; in the container another one is home
  [[ -n ${HF_HOME:-} || ! -d $cache ]] || export HF_HOME=$cache
  mount_too "${HF_HOME:-}" "${HF_HUB_CACHE:-}" "${HF_DATASETS_CACHE:-}" "$@"
  case $CONTAINER_RUNTIME in
    pyxis)
      # Named, so that the image is unpacked once on each node; after its file, because pyxis takes the container of that
      # name in the image's place, even one of a former job.
      name=dapo-$({ echo "$CONTAINER" && stat -Lc '%s %Y' "$CONTAINER"; } 2>/dev/null | cksum | cut -d' ' -f1) || true
      step=(--container-image="$CONTAINER" --container-name="$name" --container-workdir="$PWD"
        --container-mounts="$(sed -E ':a; s/(^|,)([^,:]+)(,|$)/\1\2:\2\3/; ta' <<<"$mounts")")
      here=(srun --overlap --nodes=1 --ntasks=1 --nodelist="$head" --cpus-per-task="$cpus" --cpu-bind=none "${step[@]}")
      ;;
    apptainer)
      enter=(apptainer exec --nv --bind "$mounts" "$CONTAINER")
      here=("${enter[@]}")
      ;;
    *) die "CONTAINER_RUNTIME is $CONTAINER_RUNTIME; it can be pyxis or apptainer" ;;
  esac
}

# One task on each of some nodes, beside the shell.
on_nodes() {
  srun --overlap --ntasks-per-node=1 --cpus-per-task="$cpus" --cpu-bind=none --output="$logs/%N.log" "${step[@]}" "$@" &
  steps+=($!)
}

# Puts the nodes' logs into the output directory, which is mounted: what a container writes elsewhere goes with it. $1:
# what `--job` printed.
use_output_dir() {
  local output_dir
  output_dir=$(sed -n 's/^output_dir //p' <<<"$1")
  [[ -n $output_dir ]] || return 0
  logs=$output_dir/nodes/$SLURM_JOB_ID.$SLURM_RESTART_COUNT
  mkdir -p "$output_dir"
  in_container "$output_dir"
}

read_output_dir() {
  local said
  said=$("${here[@]}" "$python" -m dapo.evaluate --job "$@") || die "this evaluation would be refused; see the message above"
  use_output_dir "$said"
}

# Besides the output directory, how long before the time limit to signal, and `again_by`: arguments by which a job that
# was queued again goes on. A path in checkpoint.resume stays: the run knows whether it has gone on from there already.
read_plan() {
  local plan planned_lead resume
  plan=$("${here[@]}" "$python" -m dapo.plan --job "$@") || [[ -n $LEAD_S ]] || die "this run cannot be planned; see the \
message above. Where only the planner does not know the model, give the seconds of an update and a save: LEAD_S=3600"
  planned_lead=$(sed -n 's/^lead_s //p' <<<"$plan")
  resume=$(sed -n 's/^resume //p' <<<"$plan")
  lead=${LEAD_S:-$planned_lead}
  again_by=()
  # shellcheck disable=SC2034  # train.sbatch reads it
  [[ $resume != never && (-n $resume || " $* " != *' checkpoint.resume=never '*) ]] || again_by=(checkpoint.resume=auto)
  use_output_dir "$plan"
}

# Prints the head's IPv4 address in the network that NODE_NETWORK names.
named_address() {
  "${here[@]}" "$python" -c '
import socket, sys, psutil
named, found = sys.argv[1], psutil.net_if_addrs()
those = {name: [one.address for one in found[name] if one.family == socket.AF_INET] for name in found}
for name, addresses in those.items():
    for address in addresses:
        if named == name or named not in found and f"{address}.".startswith(named.rstrip(".") + "."):
            sys.exit(print(address))
listed = ", ".join(" ".join([name, *(addresses or ["without IPv4"])]) for name, addresses in those.items())
sys.exit(f"NODE_NETWORK ({named}) is no interface with an IPv4 address, and begins none; there are: {listed}")
' "$NODE_NETWORK"
}

# Prints the first two free ports of 50 from one that is the job's own: above Ray's worker ports (10002 to 19999), below
# the kernel's ephemeral ones.
free_ports() {
  "${here[@]}" "$python" -c '
import socket, sys
ip, first, free = sys.argv[1], int(sys.argv[2]), []
for port in range(first, first + 50):
    try:
        for address in (ip, "127.0.0.1"):
            with socket.socket() as one:
                one.bind((address, port))
    except OSError as error:
        said = error
    else:
        free.append(port)
if len(free) < 2:
    sys.exit(f"no two ports from {first} to {port} of {ip} are free: {said}")
print(*free[:2])' "$ip" $((20000 + SLURM_JOB_ID % 12000))
}

# 0 while the head does not answer.
alive_nodes() {
  timeout 30 "${here[@]}" "$python" -c '
import ray
ray.init(log_to_driver=False)
print(sum(node["Alive"] for node in ray.nodes()))' 2>/dev/null || echo 0
}

start_ray() {
  local alive deadline pid ip port
  if [[ -n $NODE_NETWORK ]]; then
    ip=$(named_address) || die "no address for Ray's head on $head"
  else
    # A node's own name often means 127.0.1.1 on itself, which no other node can reach.
    ip=$(getent ahostsv4 "$head" | awk '$1 !~ /^127\./ {print $1; exit}') || true
    [[ -n $ip ]] || ip=$(hostname -I | awk '{print $1}')
  fi
  mkdir -p "$logs" outputs
  # Whoever can speak to Ray can run code as this user: the token is this job's own and readable by its owner only.
  (umask 077 && od -An -N32 -tx1 /dev/urandom | tr -d ' \n' >"$token")
  unset RAY_AUTH_TOKEN # a person's, for another cluster, which Ray would take before the file
  export RAY_AUTH_MODE=token RAY_AUTH_TOKEN_PATH=$token NODE_DISK LOGS=$logs
  export RAY_TMPDIR=$NODE_DISK # where the doctor looks for room
  port=$(free_ports) || die "no ports for Ray's head"
  # The second is for Ray's client, which nobody uses and which cannot be left out.
  export RAY_ADDRESS=$ip:${port% *} CLIENT_PORT=${port#* }

  local node=("${enter[@]}" bash launch/slurm/node.sh)
  on_nodes --nodes=1 --ntasks=1 --nodelist="$head" "${node[@]}" head "$python"
  ((nodes == 1)) || on_nodes --nodes=$((nodes - 1)) --ntasks=$((nodes - 1)) --exclude="$head" --kill-on-bad-exit=0 \
    "${node[@]}" worker "$python"
  deadline=$((SECONDS + READY_S))
  until alive=$(alive_nodes) && ((alive == nodes)); do
    for pid in "${steps[@]}"; do
      kill -0 "$pid" 2>/dev/null || nodes_failed "a Ray node ended while the cluster came up"
    done
    ((SECONDS < deadline)) || nodes_failed "$alive of $nodes nodes joined $RAY_ADDRESS within $READY_S s; check that the nodes \
reach that port, name the network by which they do (NODE_NETWORK=ib0), or allow more time: READY_S=600"
    sleep 1
  done
  say "$nodes nodes at $RAY_ADDRESS after $SECONDS s; their logs are in $logs"
}

# What would fail in an hour, or spoil the run unseen: versions, shared folders, clocks, the network, the plan.
examine() {
  ((DOCTOR == 1)) || return 0
  "${here[@]}" "$python" -m dapo.doctor "$@" || die "the doctor's faults stand above; DOCTOR=0 starts the run all the same"
}

# Prints when the allocation ends, in seconds since 1970, as it is now: a limit can be changed while the job runs.
# Nothing where there is no limit.
end_of_allocation() {
  local end
  end=$(squeue --noheader --format=%e --jobs="$SLURM_JOB_ID" 2>/dev/null) || true
  date --date="${end:-N/A}" +%s 2>/dev/null || echo "${SLURM_JOB_END_TIME:-}"
}

# sbatch's own --signal is a constant; an update and a save are not.
watch_time_limit() {
  local end left
  end=$(end_of_allocation)
  if [[ -z $end ]]; then
    say "the allocation has no time limit that squeue tells; nothing will signal the run"
    return
  fi
  left=$((end - $(date +%s))) # EPOCHSECONDS came with bash 5, which RHEL 8 has not
  ((left > 2 * lead)) || die "$left s are left and the run must be signalled $lead s \
before the end, an update and a save; ask for more time, sbatch --time=24:00:00, or set LEAD_S"
  say "the run is signalled $lead s before the end of the allocation ($(date --date="@$end"))"
  signal_before "$end" &>/dev/null &
  timer=$!
}

signal_before() {
  local end=$1 now left sleeper=''
  trap 'kill $sleeper; exit' TERM
  while left=$((end - $(date +%s) - lead)) && ((left > 0)); do
    sleep $((left < 60 ? left : 60)) &
    sleeper=$!
    wait "$sleeper" || true
    now=$(end_of_allocation)
    end=${now:-$end}
  done
  kill -USR1 $$
}

exec_python() {
  exec "${here[@]}" "$python" "$@"
}

# Sets `code` to the driver's exit code.
drive() {
  driver=starts # a signal that comes before its number is known waits for that
  # With exec, so that a signal for the process in the background is the driver's.
  exec_python -m "$@" &
  driver=$!
  [[ -z $early ]] || forward "$early"
  # A signal interrupts `wait` with a code of its own; the driver's is the one of the wait that finds it ended.
  while true; do
    code=0
    wait "$driver" || code=$?
    kill -0 "$driver" 2>/dev/null || break
  done
  wait "$driver" && code=0 || code=$?
  driver=''
  say "the driver ended with $code"
  # 138: USR1 came before it could hear, and there is nothing to save.
  ((code == 85 || code == 138)) || exit "$code"
}

# Slurm ends the script that asks for its own job to be queued again, so this comes last.
again_if_saved() {
  trap - EXIT
  teardown
  if ((REQUEUE == 1 && again == 1 && SLURM_RESTART_COUNT < MAX_REQUEUES)); then
    say "the job is queued again; it goes on from its newest checkpoint"
    scontrol requeue "$SLURM_JOB_ID" || say "scontrol refused; the same sbatch command continues the run"
  fi
  exit 85
}
