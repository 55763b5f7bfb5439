#!/usr/bin/env bash
# A Ray cluster on bare machines over ssh; the first is the head, where the driver runs; after `--` the run's arguments,
# with which the doctor looks at all nodes before the cluster counts as ready:
#   bash launch/ray_up.sh node1 node2 node3 -- +experiment=dapo_qwen7b trainer.output_dir=/shared/dapo_qwen7b
# Each machine has the checkout at the same path (DIR, else this one's) with .venv made from docker/gpu.lock, and can be
# reached by `ssh NAME` without a password. What is started keeps its token, variables, process number and log in
# ~/.dapo-ray/HOSTNAME (mode 700; homes may be shared), and launch/ray_down.sh ends that and nothing else.
# In: HEAD_IP, the head's address on the network that the nodes share (else the one that ssh reached); PORT; READY_S,
# seconds for all to join; NODE_ENV, names of variables that every node and the run get with the values they have here:
# NODE_ENV="NCCL_SOCKET_IFNAME HF_HOME HF_TOKEN"; DOCTOR=0, to start without the doctor.
# Out: a cluster that answers, and the command for a run on it; or nothing left behind, and why.
set -euo pipefail

machines=()
while (($#)) && [[ $1 != -- ]]; do
  machines+=("$1")
  shift
done
((${#machines[@]})) || {
  echo "ray_up.sh: name the machines, the head first: bash launch/ray_up.sh node1 node2 -- +experiment=NAME" >&2
  exit 1
}
run=("${@:2}")
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
dir=${DIR:-$(dirname "$here")}
head=${machines[0]}
port=${PORT:-20379} # above Ray's worker ports (10002 to 19999)
ready_s=${READY_S:-300}
options=(-o BatchMode=yes -o ConnectTimeout=15)
variables=''
for name in ${NODE_ENV:-}; do
  if ! [[ $name =~ ^[A-Za-z_][A-Za-z0-9_]*$ ]] || ! printenv "$name" >/dev/null; then
    echo "ray_up.sh: NODE_ENV names $name, which is no variable of this environment; set it, or leave it out" >&2
    exit 1
  fi
  printf -v variables '%sexport %s=%q\n' "$variables" "$name" "${!name}"
done

die() {
  trap - EXIT
  echo "ray_up.sh: $*" >&2
  ((${#started[@]} == 0)) || bash "$here/ray_down.sh" "${started[@]}"
  exit 1
}

# Starts one node of the machine that it runs on: node_up DIR IP PORT, and `head` where it is one.
node_up() {
  set -euo pipefail
  local python=$1/.venv/bin/python own files ray client sessions
  own=$HOME/.dapo-ray/$(hostname -s)
  [[ -x $python ]] || { echo "$python does not exist: run bash launch/install.sh --gpu there" >&2 && exit 1; }
  ray=("$python" -m ray.scripts.scripts start --block --disable-usage-stats)
  if [[ ${4:-} == head ]]; then
    # Ray's client, which nobody uses and which cannot be left out, takes 10001 where nothing else is said, and a head
    # that finds it taken ends.
    client=$("$python" -c '
import socket, sys
first = int(sys.argv[1]) + 1
for port in range(first, first + 50):
    with socket.socket() as one:
        try:
            one.bind(("", port))
        except OSError:
            continue
        sys.exit(print(port))
sys.exit(f"no port from {first} to {port} is free, for the client of Ray; give another PORT")' "$3")
    ray+=(--head --node-ip-address="$2" --port="$3" --dashboard-host=127.0.0.1 --no-monitor)
    ray+=(--ray-client-server-port="$client")
  else
    ray+=(--address="$2:$3")
  fi
  cd "$1"
  # shellcheck source=/dev/null
  source "$own/env"
  # Ray lets everyone write to its sessions. Not in the home: on a shared one there are no sockets.
  sessions=${RAY_TMPDIR:-${TMPDIR:-/tmp}}/dapo-$(id -u)
  mkdir -m 700 "$sessions" 2>/dev/null || true
  if ! [[ -d $sessions && -O $sessions && ! -L $sessions ]]; then
    echo "$sessions is no folder of yours; remove it, or name another place: NODE_ENV=RAY_TMPDIR" >&2 && exit 1
  fi
  chmod 700 "$sessions"
  ray+=(--temp-dir="$sessions/ray")
  # Ray raises the limit of open files in drivers alone; what a node starts keeps what it is started with.
  files=$(ulimit -Hn)
  [[ $files != unlimited ]] && ((files < 65536)) || files=65536
  [[ $(ulimit -Sn) == unlimited ]] || (($(ulimit -Sn) >= files)) || ulimit -Sn "$files"
  # A RAY_AUTH_TOKEN of the machine's environment, for another cluster, would be taken before the file.
  # Without 0, a node on which anything runs would take half a minute to end.
  RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S=0 RAY_AUTH_MODE=token RAY_AUTH_TOKEN='' RAY_AUTH_TOKEN_PATH=$own/token setsid "${ray[@]}" >"$own/log" 2>&1 </dev/null &
  echo $! >"$own/pid"
  # Before that it has this shell's command line, and passes for somebody else's process.
  until grep -qsa ray.scripts "/proc/$!/cmdline" || ! kill -0 $! 2>/dev/null; do sleep 0.1; done
}

# 0 while the head does not answer; with the end of the log where a node has ended.
node_count() {
  local own
  own=$HOME/.dapo-ray/$(hostname -s)
  # A dead process has no command line, though it can be signalled while nobody waits for it.
  grep -qsa ray.scripts "/proc/$(<"$own/pid")/cmdline" || { echo ended && tail -n 5 "$own/log" >&2 && return; }
  RAY_AUTH_MODE=token RAY_AUTH_TOKEN='' RAY_AUTH_TOKEN_PATH=$own/token RAY_ADDRESS=$2:$3 timeout 30 "$1/.venv/bin/python" -c '
import ray
ray.init(log_to_driver=False)
print(sum(node["Alive"] for node in ray.nodes()))' 2>/dev/null || echo 0
}

# What would fail in an hour, or spoil a run unseen: examine DIR IP PORT, then the run's arguments.
examine() {
  cd "$1" || return
  # shellcheck source=/dev/null
  source "$HOME/.dapo-ray/$(hostname -s)/env"
  RAY_AUTH_MODE=token RAY_AUTH_TOKEN='' RAY_AUTH_TOKEN_PATH=$HOME/.dapo-ray/$(hostname -s)/token RAY_ADDRESS=$2:$3 \
    .venv/bin/python -m dapo.doctor "${@:4}" </dev/null
}

# A function of this script on another machine, with arguments.
remotely() {
  local machine=$1 name=$2
  { declare -f "$name" && printf '%q ' "${@:2}"; } | ssh "${options[@]}" "$machine" bash -s
}

started=()
trap 'die interrupted' INT TERM
trap 'die "stopped by the error above"' EXIT
ip=${HEAD_IP:-}
# The address that ssh has reached, unless no other node reaches it (a machine's own name often means 127.0.1.1 there) or
# it is one of IPv6: then the first of the machine's others.
# shellcheck disable=SC2016  # the variables are the other side's
[[ -n $ip ]] || ip=$(ssh "${options[@]}" "$head" 'set -- $SSH_CONNECTION
  case $3 in 127.* | *:*) hostname -I | tr " " "\n" | grep -m 1 -v -e : -e "^$" || echo "$3" ;; *) echo "$3" ;; esac') ||
  die "ssh $head failed"
token=$(od -An -N32 -tx1 /dev/urandom | tr -d ' \n')
# Token and variables go over standard input: arguments can be read by everyone on a machine.
# shellcheck disable=SC2016  # the variables are the other side's
take='own=$HOME/.dapo-ray/$(hostname -s); if grep -qsa ray.scripts "/proc/$(cat "$own/pid" 2>/dev/null)/cmdline"
then echo "a node of ray_up.sh runs there already; end it first: bash launch/ray_down.sh" >&2; exit 1
fi; umask 077 && mkdir -p "$own" && IFS= read -r token && printf "%s\n" "$token" >"$own/token" && cat >"$own/env"'
for machine in "${machines[@]}"; do
  # shellcheck disable=SC2029
  ssh "${options[@]}" "$machine" "$take" <<<"$token"$'\n'"$variables" || die "$machine cannot be used; see the message \
above"
  started+=("$machine")
done
for machine in "${machines[@]}"; do
  role=worker
  [[ $machine != "$head" ]] || role='head'
  remotely "$machine" node_up "$dir" "$ip" "$port" "$role" || die "$machine: no Ray node was started"
done
deadline=$((SECONDS + ready_s))
while true; do
  alive=$(remotely "$head" node_count "$dir" "$ip" "$port") || die "ssh $head failed"
  [[ $alive != "${#machines[@]}" ]] || break
  [[ $alive != ended ]] || die "the head, $head, ended; its last lines stand above"
  ((SECONDS < deadline)) || die "$alive of ${#machines[@]} nodes joined $ip:$port within $ready_s s; look at ~/.dapo-ray/HOSTNAME/log on each, \
check that they reach that port, give HEAD_IP, or allow more time: READY_S=600"
  sleep 1
done
if ((${#run[@]} == 0)); then
  run=(+experiment=dapo_qwen7b trainer.output_dir=/shared/dapo_qwen7b)
  echo "No run was named after --, so the doctor has looked at nothing: python -m dapo.doctor with a run's arguments"
elif [[ ${DOCTOR:-1} != 0 ]]; then
  remotely "$head" examine "$dir" "$ip" "$port" "${run[@]}" || die "the doctor's faults stand above; DOCTOR=0 starts the \
cluster all the same"
fi
trap - EXIT
echo "${#machines[@]} nodes at $ip:$port after $SECONDS s. A run, on $head:"
echo "  cd $(printf %q "$dir") &&${variables:+ . ~/.dapo-ray/\$(hostname -s)/env &&} RAY_ADDRESS=$ip:$port RAY_AUTH_MODE=token RAY_AUTH_TOKEN= \\"
echo "    RAY_AUTH_TOKEN_PATH=~/.dapo-ray/\$(hostname -s)/token \\"
echo "    .venv/bin/python -m dapo.main_ppo$(printf ' %q' "${run[@]}")"
echo "To end the cluster: bash launch/ray_down.sh ${machines[*]}"
