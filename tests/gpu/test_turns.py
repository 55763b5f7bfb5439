"""An engine and a rank that take turns on one GPU."""

import asyncio

import pytest
import torch

from dapo.config.paths import resolve_path

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

CYCLES = 5


@pytest.mark.ray
@pytest.mark.timeout(900)
def test_an_engine_that_slept_computes_what_the_actors_do_and_its_memory_was_theirs() -> None:
    from dapo.bench.__main__ import parse  # here, so that tests without Ray and vLLM run where they are not
    from dapo.bench.engines.cycle import measure, to_config
    from workers.cluster import connect, leave

    path = resolve_path("pkg://dapo.tiny/base")
    cfg = to_config(parse(["cycle", "--bucket-mib", "1", "--tokens", "512", "rollout.vllm.enforce_eager=true"]), path)
    connect("local", worker_logs=False)
    try:
        rows = asyncio.run(measure(cfg, CYCLES, tokens=512))
    finally:
        leave()
    assert len(rows) == CYCLES
    total = torch.cuda.get_device_properties(0).total_memory
    for row in rows:
        assert row["difference"] <= 0.02
        assert row["free asleep"] - row["free awake"] >= 0.4 * total  # of 0.5 that the engine took, weights and cache
    asleep = [row["free asleep"] for row in rows]
    assert max(asleep) - min(asleep) <= 0.01 * total
