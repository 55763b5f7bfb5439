"""What pyproject.toml and the locks promise: one wheel that holds everything, composed far from the checkout."""

import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
FOLDER = ROOT / "config/experiment"
EXPERIMENTS = sorted(str(path.relative_to(FOLDER).with_suffix("")) for path in FOLDER.rglob("*.yaml"))
SOURCES = ["dapo", "workers", "config", "pyproject.toml", "README.md", "LICENSE"]


def pip(*args: str) -> None:
    command = [sys.executable, "-m", "pip", "-q", *args, "--no-deps", "--no-index", "--disable-pip-version-check"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built from a copy: setuptools leaves a build/ whose stale files the next wheel would contain."""
    folder = tmp_path_factory.mktemp("wheel")
    for name in SOURCES:
        source, copy = ROOT / name, folder / "source" / name
        copy.parent.mkdir(exist_ok=True)
        if source.is_dir():
            shutil.copytree(source, copy, ignore=shutil.ignore_patterns("__pycache__", "_config"))
        else:
            shutil.copy(source, copy)
    pip("wheel", "--no-build-isolation", "--wheel-dir", str(folder), str(folder / "source"))
    (built,) = folder.glob("dapo_rl-*.whl")
    return built


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder into which the wheel alone is installed."""
    target = tmp_path_factory.mktemp("installed")
    pip("install", "--no-compile", "--target", str(target), str(wheel))
    return target


def test_every_package_is_listed() -> None:
    code = [path.parent for name in ("dapo", "workers") for path in (ROOT / name).rglob("__init__.py")]
    data = [ROOT / "config", *(path for path in (ROOT / "config").rglob("*") if path.is_dir())]
    names = [".".join(path.relative_to(ROOT).parts) for path in code]
    names = [f"dapo.{name}" if name.startswith("workers") else name for name in names]
    names += [".".join(("dapo._config", *path.relative_to(ROOT / "config").parts)) for path in data]
    assert sorted(PROJECT["tool"]["setuptools"]["packages"]) == sorted(names)


def test_wheel_holds_every_file_of_the_checkout(wheel: Path) -> None:
    inside = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    files = [path for name in ("dapo", "workers", "config") for path in (ROOT / name).rglob("*") if path.is_file()]
    kept = [path.relative_to(ROOT) for path in files if "__pycache__" not in path.parts]
    moved = {"config": "dapo/_config", "workers": "dapo/workers", "dapo": "dapo"}
    expected = {str(Path(moved[path.parts[0]], *path.parts[1:])) for path in kept}
    assert "dapo/_config/dapo.yaml" in expected and any(name.startswith("dapo/tiny/base/") for name in expected)
    assert inside == expected
    links = re.findall(r"\]\(((?:dapo|workers|config)/[^)#]+)", (ROOT / "README.md").read_text())
    there = {str(Path(moved[Path(link).parts[0]], *Path(link).parts[1:])) for link in links}
    assert len(there) > 5 and there <= inside, "README's links and picture, into the packages"


def run_elsewhere(installed: Path, folder: Path, *args: str) -> str:
    # -P keeps the current folder out of the import path; PYTHONPATH goes before the checkout's editable install.
    env = {**os.environ, "PYTHONPATH": str(installed)}
    done = subprocess.run(
        [sys.executable, "-P", *args], cwd=folder, env=env, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


COMPOSE_ALL = """
import sys
import dapo, dapo.workers
from dapo.main_ppo import main
print("from", dapo.__file__, dapo.workers.__file__)
for name in sys.argv[1:]:
    print("experiment", name)
    sys.argv[1:] = ["+experiment=" + name, "--cfg", "job"]
    main()
"""


def test_installed_wheel_composes_every_experiment(installed: Path, tmp_path: Path) -> None:
    named = {"dapo_tiny", "grpo_tiny", "dr_grpo_tiny", "dapo_qwen7b", "dapo_qwen32b", "dapo_qwen0.5b_1gpu"}
    assert named <= set(EXPERIMENTS)
    output = run_elsewhere(installed, tmp_path, "-c", COMPOSE_ALL, *EXPERIMENTS)
    header, *composed = output.split("experiment ")
    assert header.split() == ["from", f"{installed}/dapo/__init__.py", f"{installed}/dapo/workers/__init__.py"]
    assert [part.split(maxsplit=1)[0] for part in composed] == EXPERIMENTS
    assert all("train_batch_size:" in part for part in composed)
    assert len(set(part.split(maxsplit=1)[1] for part in composed)) == len(EXPERIMENTS), "an experiment changes nothing"
    assert list(tmp_path.iterdir()) == [], "printing leaves nothing behind"


def pins(lock: str) -> dict[str, str]:
    lines = (ROOT / "docker" / lock).read_text().splitlines()
    return {canonicalize_name(name): version for name, version in (line.split("==") for line in lines)}


@pytest.mark.parametrize(
    ("lock", "extra"), [pytest.param("cpu.lock", "cpu", id="cpu"), pytest.param("gpu.lock", "gpu", id="gpu")]
)
def test_lock_satisfies_what_the_project_declares(lock: str, extra: str) -> None:
    locked = pins(lock)
    extras = PROJECT["project"]["optional-dependencies"]
    declared = [Requirement(text) for text in PROJECT["project"]["dependencies"] + extras[extra] + extras["dev"]]
    unmet = [str(one) for one in declared if not one.specifier.contains(locked.get(canonicalize_name(one.name), "0"))]
    assert unmet == [], "run docker/lock.sh"


def test_cpu_lock_has_a_cpu_torch_and_no_cuda_build() -> None:
    locked = pins("cpu.lock")
    assert locked["torch"].endswith("+cpu")
    assert not [
        name for name in locked if name.startswith(("nvidia-", "torchvision", "torchaudio", "torchcodec", "triton"))
    ]
