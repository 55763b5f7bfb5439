"""Real vLLM engines on CPU: responses, their log-probabilities, aborts, and weights that arrive whole."""

import asyncio

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from dapo.config import Config
from dapo.tiny.random_model import make_random_model
from dapo.types import Sampling

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("ray_cluster"), pytest.mark.timeout(600)]

PROMPT = np.array([20, 21, 22, 23, 24, 25], dtype=np.int32)
VERSION_1 = 1


def sampling(first_seed: int, n: int = 4, max_tokens: int = 48) -> Sampling:
    seeds = tuple(range(first_seed, first_seed + n))
    return Sampling(n=n, temperature=1.0, top_p=1.0, top_k=-1, max_tokens=max_tokens, seeds=seeds)


def make_config(path: str, engines: int) -> Config:
    cfg = Config()
    cfg.model.path, cfg.model.dtype = path, "float32"
    cfg.data.max_prompt_length, cfg.data.max_response_length = 64, 192
    cfg.rollout.num_engines = engines
    cfg.rollout.vllm = {"max_num_seqs": 64}
    return cfg


@pytest.fixture(scope="module")
def loop():
    runner = asyncio.Runner()
    yield runner
    runner.close()


@pytest.fixture(scope="module", params=[pytest.param((True, 2), id="tied-2"), pytest.param((False, 1), id="untied-1")])
def engines(request, ray_cluster, tmp_path_factory, loop):
    """(pool, the same model in transformers, number of engines)."""
    from workers.cluster import Placement, engine_args
    from workers.rollout import RolloutPool

    tied, count = request.param
    path = str(make_random_model(tmp_path_factory.mktemp("model"), tie_word_embeddings=tied, layers=2))
    cfg = make_config(path, count)
    pool = RolloutPool(Placement(cfg, "cpu").rollout(), start_timeout_s=300, timeout_s=120)
    loop.run(pool.start(path, engine_args(cfg, "cpu")))
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    yield pool, model, count
    loop.run(pool.stop(3.0))


@torch.no_grad()
def largest_difference(model, responses) -> float:
    """Largest |log-probability of transformers - of the engine| over all tokens."""
    worst = 0.0
    for response in responses:
        ids = torch.from_numpy(np.concatenate([PROMPT, response.token_ids]).astype(np.int64))[None]
        logprobs = torch.log_softmax(model(ids).logits[0], dim=-1)[len(PROMPT) - 1 : -1]
        own = logprobs.gather(1, ids[0, len(PROMPT) :, None])[:, 0]
        worst = max(worst, (own - torch.from_numpy(response.rollout_logprobs.copy())).abs().max().item())
    return worst


async def on_every_engine(pool, count: int, first_seed: int):
    """One group per engine: the least-loaded rule deals them out."""
    groups = await asyncio.gather(
        *[pool.generate(f"g{first_seed}-{i}", PROMPT, sampling(first_seed)) for i in range(count)]
    )
    return [response for group in groups for response in group]


def test_responses_are_complete_and_their_logprobs_are_the_models(engines, loop):
    pool, model, count = engines
    assert pool.capacity == 64 * count
    responses = loop.run(on_every_engine(pool, count, 10))
    assert len(responses) == 4 * count
    for response in responses:
        length = len(response.token_ids)
        assert length == len(response.rollout_logprobs) > 0
        assert response.finish_reason == ("length" if length == 48 else "stop")
        assert [(span.start, span.end) for span in response.policy_versions] == [(0, length)]
    assert largest_difference(model, responses) <= 1e-4


def test_a_seed_gives_the_same_response_on_a_busy_engine_and_alone(engines, loop):
    pool, _, _ = engines
    alone = loop.run(pool.generate("alone", PROMPT, sampling(500)))

    async def busy():
        others = [pool.generate(f"other{i}", PROMPT, sampling(1000 + 10 * i)) for i in range(8)]
        return (await asyncio.gather(pool.generate("busy", PROMPT, sampling(500)), *others))[0]

    again = loop.run(busy())
    for first, second in zip(alone, again, strict=True):
        np.testing.assert_array_equal(first.token_ids, second.token_ids)
        np.testing.assert_array_equal(first.rollout_logprobs, second.rollout_logprobs)


def test_a_sync_replaces_every_named_parameter_on_every_engine(engines, loop):
    from workers.weight_sync import export_buckets

    pool, model, count = engines
    before = loop.run(on_every_engine(pool, count, 10))
    generator = torch.Generator().manual_seed(1)
    for version, (name, parameter) in enumerate(model.named_parameters(), start=VERSION_1):
        with torch.no_grad():
            parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator) + 0.1)
        # A bucket bound of 100 kB splits the model into many transfers.
        buckets = export_buckets(model.named_parameters(), 100_000, is_sender=True)
        assert len(buckets) > 5
        loop.run(pool.receive_weights(version, buckets, 60))
        responses = loop.run(on_every_engine(pool, count, 10))
        assert largest_difference(model, responses) <= 1e-4, f"after a change of {name}"
        assert {span.version for response in responses for span in response.policy_versions} == {version}
    assert largest_difference(model, before) > 1e-2, "the old responses must not fit the new weights"


def test_altered_bytes_are_refused(engines, loop):
    from dataclasses import replace

    from workers.remote import RemoteError
    from workers.weight_sync import export_buckets

    pool, model, _ = engines
    (bucket,) = export_buckets(model.named_parameters(), 1 << 30, is_sender=True)
    with pytest.raises(RemoteError, match="digest"):
        loop.run(pool.receive_weights(99, [replace(bucket, digest="0" * 32)], 60))
