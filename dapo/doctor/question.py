"""Holds what a node is asked: the few settings of a run that its checks need, small enough to travel.

In: the run's configuration on the driver. Out: a `Question`, the same for every node.
"""

import importlib.metadata
import re
import sys
from dataclasses import dataclass
from pathlib import Path

from dapo.allocator import hands_over_memory
from dapo.config.paths import checked_data, data_parts, resolve_path
from dapo.config.schema import Config
from dapo.data.sources import held_out_files, train_files
from dapo.rewards.calling.by_entry import section_of, source_functions
from dapo.rewards.calling.loading import SECTION

LOCKS = (Path(__file__).resolve().parents[2] / "docker", Path.cwd() / "docker")  # a checkout, or a job's copy of it


@dataclass(frozen=True, kw_only=True, slots=True)
class Question:
    """Holds what a node's checks compare with.

    joined: whether the node belongs to a Ray cluster that runs already. driver: whether the process that looks is the
    driver's, and not one of Ray's on a node. python: the driver's version. lock: the name of
    `pins`, empty without one. pins: versions by package. models: paths or hub names by key. files: paths on the
    driver by key: code that every node runs. data: the same, which the driver alone reads. sizes: bytes of the files in
    a local model's directory, as the driver sees them. gpus: whether the run computes on GPUs. shares: whether ranks
    hand weights to engines in memory of a GPU. cluster_gpus: GPUs of all nodes of a cluster.
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
    """Returns what the nodes of a run are asked. gpus: whether it computes on GPUs."""
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
    """Returns local data files by key; hub names are not among them."""
    found = {}
    for one in (*train_files(cfg.data), *held_out_files(cfg.data)):
        for index, name in enumerate(one.files):
            try:
                path, *_ = data_parts(checked_data(name, key=one.key))
            except ValueError:  # what loads the data says it better
                continue
            if Path(path).exists():
                found[f"{one.key}[{index}]"] = path
    return found


def sizes_of(folder: Path) -> dict[str, int]:
    """Returns the bytes of each file that lies in a folder, by name."""
    return {each.name: each.stat().st_size for each in folder.iterdir() if each.is_file()}


def locked() -> tuple[str, dict[str, str]]:
    """Returns the name of the lock that this environment is made from, and its versions by package; empty without
    one."""
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
