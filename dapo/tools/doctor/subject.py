"""What the checks look at (`Subject` on the driver, `Question` on every node), and what they return (`Finding`)."""

import importlib.metadata
import os
import re
from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path

from dapo.config.derived import device_of
from dapo.config.facts.model_shape import ModelShape, UnknownShape, read_config, shape_of
from dapo.config.paths import resolve_path
from dapo.config.plan import PlannedConfig
from dapo.config.reward_functions import SECTION, section_of, source_functions
from dapo.config.schema import Config
from dapo.tools.plan.actor import ActorMemory
from dapo.tools.plan.terms import together

OK, WARNING, FAULT = LEVELS = ("ok", "warning", "fault")  # in increasing severity
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

    joined: whether the node belongs to a running Ray cluster. driver: whether the checks run in the driver's process.
    gpus: whether the run computes on GPUs. cluster_gpus: GPUs of all nodes. lock: name of the lock file. pins: its
    versions by package. files: what every node reads, by key.
    """

    joined: bool
    driver: bool
    gpus: bool
    cluster_gpus: int
    lock: str
    pins: dict[str, str]
    files: dict[str, str]


def question(cfg: Config, *, joined: bool, driver: bool, gpus: bool, cluster_gpus: int = 0) -> Question:
    models = {"model.path": cfg.model.path, "reward.model.path": cfg.reward.model.path}
    models["reward.judge.engine.path"] = cfg.reward.judge.engine.path
    folders = {key: Path(resolve_path(path)) for key, path in models.items() if path}
    files = {key: folder / "config.json" for key, folder in folders.items() if folder.is_dir()}
    sections = {SECTION: cfg.reward.functions}
    sections |= {section_of(name): functions for name, functions in source_functions(cfg.data.sources).items()}
    code = {f"{key}[{n}].path": spec.path for key, specs in sections.items() for n, spec in enumerate(specs)}
    code["rollout.function.path"] = cfg.rollout.function.path
    files |= {key: Path(path).expanduser().absolute() for key, path in code.items() if path.endswith(".py")}
    lock, pins = locked()
    return Question(
        joined=joined,
        driver=driver,
        gpus=gpus,
        cluster_gpus=cluster_gpus,
        lock=lock,
        pins=pins,
        files={key: str(path) for key, path in files.items()},
    )


def locked() -> tuple[str, dict[str, str]]:
    """Returns the name of this environment's lock file, and its versions by package; empty if not found."""
    try:
        importlib.metadata.version("vllm")
        name = "gpu.lock"
    except importlib.metadata.PackageNotFoundError:
        name = "cpu.lock"
    for folder in LOCKS:
        if (folder / name).is_file():
            text = (folder / name).read_text(encoding="utf-8")
            return f"docker/{name}", dict(re.findall(r"^([\w.-]+)==(\S+)", text, re.MULTILINE))
    return "", {}
