"""What the checks look at (`Subject` on the driver, `Question` on every node), and what they return (`Finding`)."""

import importlib.metadata
import os
import re
import sys
from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path

from dapo.config.derived import device_of, hands_over_memory
from dapo.config.facts.model_shape import ModelShape, UnknownShape, read_config, shape_of
from dapo.config.paths import resolve_path
from dapo.config.plan import PlannedConfig
from dapo.config.reward_functions import SECTION, section_of, source_functions
from dapo.config.schema import Config
from dapo.tools.plan.actor import ActorMemory
from dapo.tools.plan.terms import together

OK, WARNING, FAULT = "ok", "warning", "fault"
SKIPPED = "skipped"  # not checked, because a check that it needs has failed
LEVELS = (SKIPPED, OK, WARNING, FAULT)  # in increasing severity
LOCKS = (Path(__file__).resolve().parents[3] / "docker", Path.cwd() / "docker")  # a checkout, or a job's copy of one


@dataclass(frozen=True, slots=True)
class Finding:
    """One finding. found: what was found, with numbers. remedy: empty where nothing is wrong."""

    level: str
    found: str
    remedy: str = ""


def ok(found: str) -> Finding:
    return Finding(OK, found)


def warning(found: str, remedy: str) -> Finding:
    """A problem that the run survives."""
    return Finding(WARNING, found, remedy)


def fault(found: str, remedy: str) -> Finding:
    """A problem that ends a run or spoils its results."""
    return Finding(FAULT, found, remedy)


def worst(levels: list[str]) -> str:
    return max(levels, key=LEVELS.index)


class Subject:
    """The run to check. cfg: a checked configuration; a plain `Config` gets the default `plan` section."""

    def __init__(self, cfg: Config) -> None:
        self.cfg = PlannedConfig(**{field.name: getattr(cfg, field.name) for field in fields(cfg)})

    @property
    def address(self) -> str:
        """The Ray cluster that the run joins; empty if it starts its own."""
        address = self.cfg.trainer.ray_address or os.environ.get("RAY_ADDRESS", "")
        return "" if address == "local" else address

    @property
    def uses_gpus(self) -> bool:
        return device_of(self.cfg) == "cuda"

    @cached_property
    def shape(self) -> ModelShape | None:
        try:
            return shape_of(read_config(self.cfg.model.path), self.cfg.model.path)
        except UnknownShape:
            return None

    @property
    def checkpoint_bytes(self) -> float | None:
        """Bytes of one checkpoint on disk; None if the planner does not know the model."""
        return None if self.shape is None else together(ActorMemory(self.cfg, self.shape).checkpoint())


@dataclass(frozen=True, kw_only=True, slots=True)
class Question:
    """What a node's checks compare with; the same for every node.

    joined: whether the node belongs to a running Ray cluster. driver: whether the checks run in the driver's process,
    not in a Ray worker. python: the driver's version. lock: name of the lock file, empty without one. pins: its
    versions by package. models: paths or hub names by key. files: paths of code that every node runs, by key. sizes:
    bytes of the files in each local model's directory, on the driver. gpus: whether the run computes on GPUs. shares:
    whether ranks hand weights to engines in GPU memory. cluster_gpus: GPUs of all nodes.
    """

    joined: bool
    driver: bool
    python: tuple[int, int]
    lock: str
    pins: dict[str, str]
    models: dict[str, str]
    files: dict[str, str]
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
        sizes={key: sizes_of(Path(path)) for key, path in models.items() if Path(path).is_dir()},
        gpus=gpus,
        shares=gpus and hands_over_memory(cfg),
        cluster_gpus=cluster_gpus,
    )


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
