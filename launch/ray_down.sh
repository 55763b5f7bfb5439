#!/usr/bin/env bash
# Ends what launch/ray_up.sh started, on the machines it is given, and removes its token and variables:
#   bash launch/ray_down.sh node1 node2 node3
# A run that is to save first is told before that: kill -USR1 of its process.
set -euo pipefail

# shellcheck disable=SC2329  # it is called on the other machine
node_down() {
  local own pid
  own=$HOME/.dapo-ray/$(hostname -s)
  rm -f "$own/token" "$own/env"
  [[ -f $own/pid ]] || return 0
  pid=$(<"$own/pid")
  # Since the machine started anew the number may be another process's; a dead one has no command line.
  [[ $(tr '\0' ' ' 2>/dev/null <"/proc/$pid/cmdline") =~ ^$|ray\.scripts ]] || { rm -f "$own/pid" && return; }
  kill -TERM "$pid" 2>/dev/null || true
  for _ in {1..60}; do
    grep -qs '^State:.[^Z]' "/proc/$pid/status" || break # Z: dead, and nobody waits for it
    sleep 0.5
  done
  kill -KILL -- "-$pid" 2>/dev/null || true # what is left of its session
  rm -f "$own/pid"
}

(($#)) || {
  echo "ray_down.sh: name the machines: bash launch/ray_down.sh node1 node2 node3" >&2
  exit 1
}
status=0
for machine in "$@"; do
  { declare -f node_down && echo node_down; } | ssh -o BatchMode=yes -o ConnectTimeout=15 "$machine" bash -s || {
    echo "ray_down.sh: $machine did not answer; what runs there still runs" >&2
    status=1
  }
done
exit "$status"
