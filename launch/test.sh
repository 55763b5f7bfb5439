#!/usr/bin/env bash
# Linters, type checker, tests. Without an option: every test that starts neither Ray, engines nor ranks, and a choice
# of the others. --all: everything but `long`. --long: only `long`. All other arguments go on to pytest.
# Leaves test-results.xml (JUnit; `python -m tests.support.costs` reads it). A linter that fails fails the command.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
select="not nightly and not long"
case ${1:-} in
  --all)
    select="not long"
    export HYPOTHESIS_PROFILE=all
    shift
    ;;
  --long)
    select="long"
    shift
    ;;
esac
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
# A file at a time. Three processes on two cores: slow tests mostly wait for processes to start.
python -m pytest -m "$select" -n 3 --dist loadfile --junitxml=test-results.xml --durations=20 --durations-min=5 "$@" ||
  status=$?
exit "$status"
