"""A real vLLM engine in bfloat16 whose head keeps float32 (`model.head_dtype`): a weight sync reaches the head, tied or
not."""

import asyncio
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from dapo.tiny.random_model import make_random_model
from dapo.types import Request, Response, Sampling
from tests.support.engines.two import make_config, started
from tests.support.local_actors import local_sync

pytestmark = [pytest.mark.ray, pytest.mark.nightly, pytest.mark.usefixtures("ray_cluster"), pytest.mark.timeout(900)]

PROMPT = np.array([20, 21, 22, 23, 24, 25], dtype=np.int32)
FEW = 16


@torch.no_grad()
def mean_difference(model, responses: list[Response]) -> float:
    """Mean over all tokens of |log-probability of transformers in float32 - of the engine|."""
    found = []
    for response in responses:
        ids = torch.from_numpy(np.concatenate([PROMPT, response.token_ids]).astype(np.int64))[None]
        logprobs = torch.log_softmax(model(ids).logits[0], dim=-1)[len(PROMPT) - 1 : -1]
        found.append(np.abs(logprobs.gather(1, ids[0, len(PROMPT) :, None])[:, 0].numpy() - response.rollout_logprobs))
    return float(np.concatenate(found).mean())


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_a_sync_reaches_the_head(ray_cluster: None, loop: asyncio.Runner, tied: bool, tmp_path: Path) -> None:
    folder = make_random_model(tmp_path / "model", layers=2, tie_word_embeddings=tied)
    cfg = make_config(str(folder), 1)
    cfg.model.dtype, cfg.model.head_dtype, cfg.trainer.device = "bfloat16", "float32", "cpu"
    models = []
    for seed in range(3):
        model = AutoModelForCausalLM.from_pretrained(cfg.model.path, dtype=torch.float32)
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for layer in model.model.layers:
                for matrix in (layer.self_attn.o_proj.weight, layer.mlp.gate_proj.weight, layer.mlp.down_proj.weight):
                    matrix.mul_(20)  # else a tied model only repeats its last token, whatever its weights
            head = model.get_output_embeddings().weight
            head.copy_(0.1 * torch.randn(head.shape, generator=generator))
        models.append(model)
    models[0].save_pretrained(folder)

    async def respond(pool, key: str) -> list[Response]:
        sampling = Sampling(n=FEW, temperature=1.0, top_p=1.0, top_k=-1, max_tokens=24)
        return [response async for _, response in pool.generate(Request(key, PROMPT, sampling, range(FEW)))]

    with started(loop, cfg) as pool:
        for version, model in enumerate(models):
            if version:
                loop.run(local_sync(pool, model, bucket_bytes=10_000)(version))
            responses = loop.run(respond(pool, f"version{version}"))
            own, *others = sorted(models, key=lambda each: each is not model)
            assert mean_difference(own, responses) < 0.05
            assert all(mean_difference(other, responses) > 0.5 for other in others)
