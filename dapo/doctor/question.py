"""The settings of a run that the checks on nodes need, small enough to send."""

import importlib.metadata
import re
import sys
from dataclasses import dataclass
from pathlib import Path

from dapo.config.paths import checked_data, data_parts, resolve_path
from dapo.config.schema import Config
from dapo.data.sources import held_out_files, train_files
from dapo.derived import hands_over_memory
from dapo.rewards.calling.by_entry import section_of, source_functions
from dapo.rewards.calling.loading import SECTION

LOCKS = (Path(__file__).resolve().parents[2] / "docker", Path.cwd() / "docker")  # a checkout, or a job's copy of one


@dataclass(frozen=True, kw_only=True, slots=True)
class Question:
    """What a node's checks compare with; the same for every node.

    joined: whether the node belongs to a running Ray cluster. driver: whether the checks run in the driver's process,
    not in a Ray worker. python: the driver's version. lock: name of the lock file, empty without one. pins: its
    versions by package. models: paths or hub names by key. files: paths of code that every node runs, by key. data:
    paths of data that only the driver reads, by key. sizes: bytes of the files in each local model's directory, on the
    driver. gpus: whether the run computes on GPUs. shares: whether ranks hand weights to engines in GPU memory.
    cluster_gpus: GPUs of all nodes.
    """

    joined: bool
    driver: bool
    python: tuple[int, int]
    lock: str
    pins: dict[str, str]
    models: dict[str, str]
    files: dict[str, str]
    data: dict[str, str]
    sizes: dict[str, dict[str, int]]
    gpus: bool
    shares: bool
    cluster_gpus: int


def question(cfg: Config, *, joined: bool, driver: bool, gpus: bool, cluster_gpus: int = 0) -> Question:
    models = {"model.path": resolve_path(cfg.model.path)}
    beside = {"reward.model.path": cfg.reward.model.path, "reward.judge.engine.path": cfg.reward.judge.engine.path}
    models |= {key: resolve_path(path) for key, path in beside.items() if path}
    sections = {SECTION: cfg.reward.functions}
    sections |= {section_of(name): functions for name, functions in source_functions(cfg.data.sources).items()}
    files = {
        f"{section}[{index}].path": str(Path(spec.path).expanduser().absolute())
        for section, functions in sections.items()
        for index, spec in enumerate(functions)
        if spec.path.endswith(".py")
    }
    if cfg.rollout.function.path.endswith(".py"):
        files["rollout.function.path"] = str(Path(cfg.rollout.function.path).expanduser().absolute())
    lock, pins = locked()
    return Question(
        joined=joined,
        driver=driver,
        python=sys.version_info[:2],
        lock=lock,
        pins=pins,
        models=models,
        files=files,
        data=_data(cfg),
        sizes={key: sizes_of(Path(path)) for key, path in models.items() if Path(path).is_dir()},
        gpus=gpus,
        shares=gpus and hands_over_memory(cfg),
        cluster_gpus=cluster_gpus,
    )


def _data(cfg: Config) -> dict[str, str]:
    found = {}
    for one in (*train_files(cfg.data), *held_out_files(cfg.data)):
        for index, name in enumerate(one.files):
            try:
                path, *_ = data_parts(checked_data(name, key=one.key))
            except ValueError:  # loading the data reports it better
                continue
            if Path(path).exists():
                found[f"{one.key}[{index}]"] = path
    return found


def sizes_of(folder: Path) -> dict[str, int]:
    """Returns bytes by file name, not recursive."""
    return {each.name: each.stat().st_size for each in folder.iterdir() if each.is_file()}


def locked() -> tuple[str, dict[str, str]]:
    """Returns the name of this environment's lock file, and its versions by package; empty if not found."""
    name = "gpu.lock" if _version("vllm") else "cpu.lock"
    for folder in LOCKS:
        if (folder / name).is_file():
            lines = (folder / name).read_text(encoding="utf-8").splitlines()
            return f"docker/{name}", dict(re.findall(r"^([\w.-]+)==(\S+)", line)[0] for line in lines if "==" in line)
    return "", {}


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""
