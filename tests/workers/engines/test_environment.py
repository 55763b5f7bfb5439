"""A real vLLM engine, once it has started, reads its environment no more: neither process of vLLM's does."""

import os

import pytest
import ray

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("ray_cluster"), pytest.mark.timeout(1500)]


def changes(worker: object) -> bool:
    """The process that hands tokens out would read it for every token."""
    from vllm import envs

    before = envs.VLLM_COMPUTE_NANS_IN_LOGITS
    os.environ["VLLM_COMPUTE_NANS_IN_LOGITS"] = str(int(not before))
    try:
        return bool(envs.VLLM_COMPUTE_NANS_IN_LOGITS != before)
    finally:
        del os.environ["VLLM_COMPUTE_NANS_IN_LOGITS"]


def test_an_engine_that_has_started_reads_its_environment_no_more(two_engines) -> None:
    pool, _ = two_engines.fresh()
    assert ray.get(pool.workers[0].__ray_call__.remote(changes), timeout=60) is False
