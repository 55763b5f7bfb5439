"""A real vLLM engine in FP8 on a CPU: each weight sync is quantized as the files were, and none of it is left out."""

import shutil
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from dapo.config.compose import compose
from dapo.config.paths import resolve_path
from dapo.config.rules.engine import FP8_LOGPROB_DIFF
from dapo.types import Request, Response, Sampling
from tests.support.engines.two import started
from tests.support.local_actors import local_sync

pytestmark = [pytest.mark.ray, pytest.mark.nightly, pytest.mark.usefixtures("ray_cluster"), pytest.mark.timeout(900)]

PROMPT = np.array([3, 25, 29, 17, 27, 17, 23, 30, 35, 1, 4], dtype=np.int32)
FEW = 16  # responses: torch multiplies FP8 slowly on some processors, where 64 of them took eleven minutes


@torch.no_grad()
def mean_difference(model, responses: list[Response]) -> float:
    """Mean over all tokens of |log-probability of transformers in float32 - of the engine|."""
    found = []
    for response in responses:
        ids = torch.from_numpy(np.concatenate([PROMPT, response.token_ids]).astype(np.int64))[None]
        logprobs = torch.log_softmax(model(ids).logits[0], dim=-1)[len(PROMPT) - 1 : -1]
        found.append(np.abs(logprobs.gather(1, ids[0, len(PROMPT) :, None])[:, 0].numpy() - response.rollout_logprobs))
    return float(np.concatenate(found).mean())


def test_a_sync_quantizes_what_it_brings(ray_cluster: None, loop, tmp_path: Path) -> None:
    """It gives the bits of an engine that has loaded the same weights from files, there and back."""
    keys = [
        "rollout.vllm={max_num_seqs: 64, quantization: fp8_per_channel}",
        "model.dtype=bfloat16",
        "algorithm.rollout_correction.mode=truncate",
        f"weight_sync.max_mean_logprob_diff={FP8_LOGPROB_DIFF}",
    ]
    path = resolve_path(compose(keys, "dapo_tiny").model.path)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    other = deepcopy(model)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator))

    async def respond(pool, key: str) -> list[Response]:
        sampling = Sampling(n=FEW, temperature=1.0, top_p=1.0, top_k=-1, max_tokens=24)
        parts = pool.generate(Request(key, PROMPT, sampling, range(FEW)))
        found = {number: response async for number, response in parts}
        return [found[number] for number in range(FEW)]

    def scenario(files: str, *syncs: Any) -> list[list[Response]]:
        """Responses of an engine that loads `files`, and after each sync."""
        with started(loop, compose([*keys, f"model.path={files}"], "dapo_tiny")) as pool:
            found = [loop.run(respond(pool, "loaded"))]
            for version, weights in enumerate(syncs, start=1):
                loop.run(local_sync(pool, weights, bucket_bytes=100_000)(version))
                found.append(loop.run(respond(pool, f"version{version}")))
        return found

    shutil.copytree(path, tmp_path / "other")
    other.save_pretrained(tmp_path / "other")
    loaded, changed, back = scenario(path, other, model)
    [wanted] = scenario(str(tmp_path / "other"))
    assert 1e-3 < mean_difference(model, loaded) <= FP8_LOGPROB_DIFF, "it rounds, and the bound leaves room for it"
    assert mean_difference(other, changed) < 0.3 < mean_difference(model, changed)
    for first, second in (*zip(loaded, back, strict=True), *zip(changed, wanted, strict=True)):
        np.testing.assert_array_equal(first.token_ids, second.token_ids)
        np.testing.assert_array_equal(first.rollout_logprobs, second.rollout_logprobs)
