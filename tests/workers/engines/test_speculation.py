"""A real vLLM engine that drafts tokens: its responses are those of the policy, told apart by no statistical test.

The model of dapo_tiny repeats itself, so that n-grams draft well. The tests need numba, which docker/cpu.lock has.
"""

import asyncio
import math
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from copy import deepcopy

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from dapo.config.compose import compose
from dapo.config.paths import resolve_path
from dapo.types import Request, Response, Sampling
from dapo.workers.engines.slot import PULSE_S
from tests.support.local_actors import local_sync
from tests.support.report.reference import undocumented

pytestmark = [pytest.mark.ray, pytest.mark.nightly, pytest.mark.usefixtures("ray_cluster"), pytest.mark.timeout(1500)]
pytest.importorskip("numba", reason="n-gram drafts need it; bash launch/install.sh")

PROBLEMS = ("37+5+18=", "9+9+9=")
EACH = 1024  # responses of each engine for each problem
BOUND = 5e-4  # the level of the test with two problems is 1e-3
TEMPERATURE = 1.3  # not 1, and enough for hundreds of different responses
SPECULATION = (
    "rollout.vllm.speculative_config={method: ngram, num_speculative_tokens: 4, prompt_lookup_min: 2, "
    "prompt_lookup_max: 4, num_speculative_tokens_per_batch_size: [[1, 64, 4]]}"
)


@pytest.fixture(scope="module")
def pools(ray_cluster, loop):
    """One engine each: that drafts, and that does not."""
    from tests.support.engines.two import started

    common = ["rollout.vllm.max_num_seqs=64", f"rollout.temperature={TEMPERATURE}"]
    with ExitStack() as stack:
        yield [
            stack.enter_context(started(loop, compose([*common, *more], "dapo_tiny"))) for more in ([SPECULATION], [])
        ]


@pytest.fixture(scope="module")
def prompts() -> list[np.ndarray]:
    tokenizer = AutoTokenizer.from_pretrained(resolve_path("pkg://dapo.tiny/base"))
    chats = [[{"role": "user", "content": problem}] for problem in PROBLEMS]
    asked = tokenizer.apply_chat_template(chats, add_generation_prompt=True, return_dict=True)["input_ids"]
    return [np.array(ids, dtype=np.int32) for ids in asked]


async def group_of(
    pool, key: str, prompt: np.ndarray, seeds: Sequence[int], temperature: float = TEMPERATURE
) -> list[Response]:
    """The responses to one prompt in the order of their seeds."""
    sampling = Sampling(n=len(seeds), temperature=temperature, top_p=1.0, top_k=-1, max_tokens=96)
    found = {number: response async for number, response in pool.generate(Request(key, prompt, sampling, seeds))}
    return [found[number] for number in range(len(seeds))]


@torch.no_grad()
def differences(model, prompt: np.ndarray, response: Response) -> np.ndarray:
    """|log-probability of transformers at TEMPERATURE - of the engine| of every token, [R]."""
    ids = torch.from_numpy(np.concatenate([prompt, response.token_ids]).astype(np.int64))[None]
    logprobs = torch.log_softmax(model(ids).logits[0] / TEMPERATURE, dim=-1)[len(prompt) - 1 : -1]
    return np.abs(logprobs.gather(1, ids[0, len(prompt) :, None])[:, 0].numpy() - response.rollout_logprobs)


def p_value(first: Sequence[str], second: Sequence[str]) -> float:
    """Pearson's test that two samples of equal size have one distribution; texts expected fewer than 5 times in
    each are one category. The chi-square distribution's tail is taken by Wilson and Hilferty's approximation."""
    counts = (Counter(first), Counter(second))
    both = counts[0] + counts[1]
    common = [text for text, count in both.items() if count >= 10]
    rows = [[each[text] for text in common] for each in counts]
    for row in rows:
        row.append(len(first) - sum(row))
    columns = [(a, b) for a, b in zip(*rows, strict=True) if a + b]
    statistic, freedom = sum((a - b) ** 2 / (a + b) for a, b in columns), len(columns) - 1
    assert freedom >= 10, "too few kinds of responses to compare"
    spread = 2 / (9 * freedom)
    return 0.5 * math.erfc(((statistic / freedom) ** (1 / 3) - (1 - spread)) / math.sqrt(2 * spread))


def test_responses_with_drafts_have_the_policys_distribution(pools, prompts, loop):
    drafting, plain = pools

    def texts(pool, seed: int, place: int, temperature: float = TEMPERATURE) -> list[str]:
        seeds = range(seed + place * EACH, seed + (place + 1) * EACH)
        found = loop.run(group_of(pool, f"m{seed}-{place}", prompts[place], seeds, temperature))
        return [response.text for response in found]

    for place in range(len(PROBLEMS)):
        without = texts(plain, 20_000, place)
        assert p_value(texts(drafting, 10_000, place), without) > BOUND
        truncated = texts(plain, 30_000, place, float(int(TEMPERATURE)))
        assert p_value(truncated, without) < BOUND, "vLLM's own kernel cuts a temperature to a whole number: found"
    loop.run(asyncio.sleep(4 * PULSE_S))
    metrics = drafting.lap()
    assert 0.1 < metrics["perf/engine/draft_acceptance"] < 1 and 1.2 < metrics["perf/engine/tokens_per_draft"] < 5
    assert undocumented(metrics) == []


def test_log_probabilities_are_the_models_and_weights_change_in_flight(pools, prompts, loop):
    drafting, _ = pools
    model = AutoModelForCausalLM.from_pretrained(resolve_path("pkg://dapo.tiny/base"), dtype=torch.float32)
    models = [model, deepcopy(model)]
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in models[1].parameters():
            parameter.add_(0.01 * torch.randn(parameter.shape, generator=generator))

    async def flight():
        running = asyncio.ensure_future(group_of(drafting, "flight", prompts[0], range(1000, 1256)))
        await asyncio.sleep(0.2)
        await local_sync(drafting, models[1])(1)
        return await running

    responses = loop.run(flight())
    assert {span.version for response in responses for span in response.policy_versions} == {0, 1}
    for response in responses:
        spans = response.policy_versions
        assert [span.start for span in spans] + [len(response.token_ids)] == [0] + [span.end for span in spans]
        for span in spans:
            found = differences(models[span.version], prompts[0], response)
            assert found[span.start : span.end].max() <= 1e-4
    loop.run(local_sync(drafting, model)(2))


def test_a_seed_gives_one_response_whatever_runs_beside_it(pools, prompts, loop):
    async def alone(pool) -> list[list[int]]:
        groups = [await group_of(pool, f"alone{seed}", prompts[0], [seed]) for seed in range(500, 516)]
        return [group[0].token_ids.tolist() for group in groups]

    async def busy(pool) -> list[list[int]]:
        others = [group_of(pool, f"other{k}", prompts[k % 2], range(2000 + 16 * k, 2016 + 16 * k)) for k in range(8)]
        group, *_ = await asyncio.gather(group_of(pool, "busy", prompts[0], range(500, 516)), *others)
        return [response.token_ids.tolist() for response in group]

    found = [loop.run(alone(pool)) for pool in pools]
    assert found == [loop.run(busy(pool)) for pool in pools]
    assert found[0] != found[1], "drafts draw other noise"
