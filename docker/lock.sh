#!/usr/bin/env bash
# Regenerates docker/cpu.lock (Python 3.11, installs on 3.12 too) and docker/gpu.lock (Python 3.12, CUDA 13) with uv from
# pyproject.toml, both with the extra `dev`, so that the tests run in either environment.
#   bash docker/lock.sh              keeps every pin that still fits: what to do after a change in pyproject.toml
#   bash docker/lock.sh --upgrade    moves every pin (or one: --upgrade-package ray)
# The metadata overrides in [tool.uv] of pyproject.toml are what keeps torchvision and triton out of the CPU lock.
# uv ignores pip's settings: where a folder of wheels replaces PyTorch's CPU index, name it: UV_FIND_LINKS=/folder.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cd "$root"
command -v uv >/dev/null || { echo "lock.sh: uv is needed: pip install uv" >&2; exit 1; }

# `--torch-backend cpu` is uv's own name for PyTorch's CPU index; it yields the pin torch==…+cpu.
cpu_torch=(--torch-backend cpu)
[[ -z ${UV_FIND_LINKS:-} ]] || cpu_torch=()

compile() {
  uv pip compile --quiet --no-header --no-annotate pyproject.toml --extra dev "$@"
}
compile --extra cpu --python-version 3.11 -o docker/cpu.lock "${cpu_torch[@]}" "$@"
compile --extra gpu --python-version 3.12 -o docker/gpu.lock "$@"

grep -q '^torch==.*+cpu$' docker/cpu.lock || {
  echo "lock.sh: docker/cpu.lock has no CPU build of torch ($(grep '^torch==' docker/cpu.lock)); with UV_FIND_LINKS set," \
    "that folder must hold its wheel." >&2
  exit 1
}
