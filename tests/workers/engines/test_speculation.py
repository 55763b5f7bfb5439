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
from dapo.types import Response, Sampling
from tests.support.local_actors import local_sync
from tests.support.report.reference import undocumented
from workers.engines.slot import PULSE_S

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("ray_cluster"), pytest.mark.timeout(1500)]
pytest.importorskip("numba", reason="n-gram drafts need it; bash launch/install.sh")

PROBLEMS = ("37+5+18=", "9+9+9=", "91+8+70+3=", "48+6=")
RESPONSES = 4096  # of each engine, equally many for each problem
LEVEL = 1e-3  # of the whole test: each problem is tested at LEVEL / len(PROBLEMS)
TEMPERATURE = 1.3  # not 1, and enough for hundreds of different responses
SPECULATION = (
    "{method: ngram, num_speculative_tokens: 4, prompt_lookup_min: 2, prompt_lookup_max: 4, "
    "num_speculative_tokens_per_batch_size: %s}"
)
ALWAYS, FEW = "[[1, 64, 4]]", "[[1, 4, 4], [5, 64, 0]]"


def config(schedule: str | None):
    drafts = [f"rollout.vllm.speculative_config={SPECULATION % schedule}"] if schedule else []
    return compose(["rollout.vllm.max_num_seqs=64", f"rollout.temperature={TEMPERATURE}", *drafts], "dapo_tiny")


@pytest.fixture(scope="module")
def pools(ray_cluster, loop):
    """One engine each: that drafts always, that drafts while at most 4 requests run, and that never does."""
    from tests.support.engines.started import started

    with ExitStack() as stack:
        yield [stack.enter_context(started(loop, config(schedule))) for schedule in (ALWAYS, FEW, None)]


@pytest.fixture(scope="module")
def model():
    return AutoModelForCausalLM.from_pretrained(resolve_path("pkg://dapo.tiny/base"), dtype=torch.float32)


@pytest.fixture(scope="module")
def prompts() -> list[np.ndarray]:
    tokenizer = AutoTokenizer.from_pretrained(resolve_path("pkg://dapo.tiny/base"))
    return [
        np.array(
            tokenizer.apply_chat_template(
                [{"role": "user", "content": problem}], add_generation_prompt=True, return_dict=True
            )["input_ids"],
            dtype=np.int32,
        )
        for problem in PROBLEMS
    ]


async def group_of(
    pool, key: str, prompt: np.ndarray, seeds: Sequence[int], temperature: float = TEMPERATURE
) -> list[Response]:
    """The responses to one prompt in the order of their seeds."""
    sampling = Sampling(n=len(seeds), temperature=temperature, top_p=1.0, top_k=-1, max_tokens=96)
    found = {number: response async for number, response in pool.generate(key, prompt, sampling, seeds)}
    return [found[number] for number in range(len(seeds))]


async def many(
    pool, prompts: Sequence[np.ndarray], first_seed: int, temperature: float = TEMPERATURE
) -> list[list[Response]]:
    """Each prompt's part of RESPONSES responses."""
    each = RESPONSES // len(PROBLEMS)
    seeds = [range(first_seed + k * each, first_seed + (k + 1) * each) for k in range(len(prompts))]
    return [
        await group_of(pool, f"m{first_seed}-{k}", prompt, seeds[k], temperature) for k, prompt in enumerate(prompts)
    ]


def counted(pool, loop) -> dict[str, float]:
    """The metrics of what the engine did since it was last asked."""
    loop.run(asyncio.sleep(4 * PULSE_S))
    return pool.lap()


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


def texts(responses: Sequence[Response]) -> list[str]:
    return [response.text for response in responses]


def test_the_statistical_test_keeps_its_level_and_finds_a_difference():
    """A kind of response that goes from 8 % to 15 % of 1,024, at the expense of another one, is found."""
    rng = np.random.default_rng(0)
    even = np.full(12, 1 / 12)
    moved = np.array([even[0] + 0.07, even[1] - 0.07, *even[2:]])

    def p_values(weights: np.ndarray, others: np.ndarray, times: int) -> list[float]:
        pairs = [[list(map(str, rng.choice(12, 1024, p=each))) for each in (weights, others)] for _ in range(times)]
        return [p_value(first, second) for first, second in pairs]

    alarms = sum(value < 0.05 for value in p_values(even, even, 1000))
    assert 30 <= alarms <= 70, "of 1,000 pairs of samples of one distribution, at a level of 5 %"
    assert max(p_values(even, moved, 50)) < LEVEL / len(PROBLEMS)


@pytest.mark.parametrize("half", [slice(2), pytest.param(slice(2, None), marks=pytest.mark.long)], ids=["", "others"])
def test_responses_with_drafts_have_the_policys_distribution(pools, prompts, loop, half):
    drafting, few, plain = pools
    prompts = prompts[half]
    counted(drafting, loop)
    with_drafts, without = loop.run(many(drafting, prompts, 10_000)), loop.run(many(plain, prompts, 20_000))
    metrics = counted(drafting, loop)
    assert 0.1 < metrics["perf/engine/draft_acceptance"] < 1 and 1.2 < metrics["perf/engine/tokens_per_draft"] < 5
    assert undocumented(metrics) == []
    bound = LEVEL / len(PROBLEMS)
    for first, second in zip(with_drafts, without, strict=True):
        assert p_value(texts(first), texts(second)) > bound
    truncated = loop.run(many(plain, prompts, 30_000, float(int(TEMPERATURE))))
    assert all(p_value(texts(a), texts(b)) < bound for a, b in zip(truncated, without, strict=True)), (
        "a temperature cut to a whole number, as vLLM's own kernel does, is found"
    )


def test_log_probabilities_are_the_models_and_weights_change_in_flight(pools, prompts, model, loop):
    drafting, few, _ = pools
    for number, pool in enumerate((drafting, few)):
        responses = loop.run(group_of(pool, f"p{number}", prompts[0], range(50)))
        assert max(differences(model, prompts[0], response).max() for response in responses) <= 1e-4
    models = {0: model, 1: deepcopy(model)}
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in models[1].parameters():
            parameter.add_(0.01 * torch.randn(parameter.shape, generator=generator))

    async def flight():
        running = asyncio.ensure_future(group_of(drafting, "flight", prompts[2], range(1000, 1256)))
        await asyncio.sleep(0.2)
        await local_sync(drafting, models[1])(1)
        return await running

    responses = loop.run(flight())
    assert {span.version for response in responses for span in response.policy_versions} == {0, 1}
    for response in responses:
        spans = response.policy_versions
        assert [span.start for span in spans] + [len(response.token_ids)] == [0] + [span.end for span in spans]
        for span in spans:
            found = differences(models[span.version], prompts[2], response)
            assert found[span.start : span.end].max() <= 1e-4
    loop.run(local_sync(drafting, model)(2))


def test_a_seed_gives_one_response_unless_drafts_depend_on_the_batch(pools, prompts, loop):
    """It may depend on the others where a limit on the requests turns drafts off."""
    drafting, few, plain = pools

    async def alone(pool) -> list[list[int]]:
        groups = [await group_of(pool, f"alone{seed}", prompts[2], [seed]) for seed in range(500, 516)]
        return [group[0].token_ids.tolist() for group in groups]

    async def busy(pool) -> list[list[int]]:
        others = [group_of(pool, f"other{k}", prompts[k % 4], range(2000 + 16 * k, 2016 + 16 * k)) for k in range(8)]
        group, *_ = await asyncio.gather(group_of(pool, "busy", prompts[2], range(500, 516)), *others)
        return [response.token_ids.tolist() for response in group]

    for pool in (drafting, plain):
        assert loop.run(alone(pool)) == loop.run(busy(pool))
    counted(few, loop)
    found = loop.run(alone(few))
    assert "perf/engine/draft_acceptance" in counted(few, loop) and found == loop.run(alone(drafting))
    assert found != loop.run(busy(few)) and found != loop.run(alone(plain))
    counted(few, loop)
    loop.run(group_of(few, "many", prompts[0], range(3000, 3064)))
    drafted = counted(few, loop)
    assert drafted["perf/engine/tokens_per_s"] > 0
