#!/usr/bin/env bash
# Linters, type checker, then every test that is not `long`. Arguments go on to pytest: -k buffer, -m ray …
# pytest's summary is the last line; a linter that fails makes the whole command fail all the same.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
bash "$root/launch/install.sh"
cd "$root"
export PATH=$root/.venv/bin:$PATH
# Engines, ranks and tests share few cores; more threads than cores stall each other.
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}

status=0
check() {
  "$@" || {
    status=1
    echo "test.sh: \`$*\` failed; so will this command, whatever pytest says below." >&2
  }
}
check ruff check .
check ruff format --check .
check mypy
# Two processes, a file at a time: most of the time of the slow tests is one process that starts.
python -m pytest -m "not long" -n 2 --dist loadfile --durations=40 --durations-min=5 "$@" || status=$?
exit "$status"
