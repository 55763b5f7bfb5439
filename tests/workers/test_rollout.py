"""Real vLLM engines on CPU: responses, their log-probabilities, aborts, and weights that arrive whole."""

import asyncio
import os
from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import ray
import torch

from dapo.config.facts.model_shape import shape_of
from dapo.tools.plan.engine import EngineMemory
from dapo.types import Request, Response, Sampling
from dapo.workers.engines.load import EngineCounts, engine_metrics
from dapo.workers.engines.slot import PULSE_S
from tests.support.engines.two import LONG, make_config
from tests.support.local_actors import local_sync
from tests.support.report.reference import undocumented

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("ray_cluster"), pytest.mark.timeout(1500)]

PROMPT = np.array([20, 21, 22, 23, 24, 25], dtype=np.int32)
PARTS = 5  # in which the weights change, one after the other


def sampling(n: int = 4, max_tokens: int = 48) -> Sampling:
    return Sampling(n=n, temperature=1.0, top_p=1.0, top_k=-1, max_tokens=max_tokens)


async def group_of(
    pool,
    key: str,
    first_seed: int,
    n: int = 4,
    max_tokens: int = 48,
    ended: Callable[[], None] = lambda: None,
    prompt: np.ndarray = PROMPT,
) -> list[Response]:
    """The responses of one group in the order of their seeds; `ended` is called after each that comes."""
    found: dict[int, Response] = {}
    seeds = range(first_seed, first_seed + n)
    async for sample, response in pool.generate(Request(key, prompt, sampling(n, max_tokens), seeds)):
        assert sample not in found
        found[sample] = response
        ended()
    assert sorted(found) == list(range(n))
    return [found[sample] for sample in range(n)]


@pytest.fixture(scope="module")
def engines(two_engines):
    """(pool of two engines, the same model in transformers)."""
    return two_engines.fresh()


@torch.no_grad()
def differences(model, response, prompt: np.ndarray = PROMPT) -> np.ndarray:
    """|log-probability of transformers - of the engine| of every token, [R]."""
    ids = torch.from_numpy(np.concatenate([prompt, response.token_ids]).astype(np.int64))[None]
    logprobs = torch.log_softmax(model(ids).logits[0], dim=-1)[len(prompt) - 1 : -1]
    own = logprobs.gather(1, ids[0, len(prompt) :, None])[:, 0].numpy()
    return np.abs(own - response.rollout_logprobs)


def largest_difference(model, responses) -> float:
    return max(differences(model, response).max() for response in responses)


def change(parameter, generator, scale: float, shift: float) -> None:
    with torch.no_grad():
        parameter.add_(scale * torch.randn(parameter.shape, generator=generator) + shift)


async def on_both(pool):
    """One group per engine: the least-loaded rule deals them out."""
    groups = await asyncio.gather(group_of(pool, "g0", 10), group_of(pool, "g1", 10))
    return [response for group in groups for response in group]


def test_the_cache_holds_what_the_planner_says(engines):
    pool, model = engines
    planned = EngineMemory(make_config("", 2), shape_of(model.config.to_dict(), "random"))
    for engine in pool._fleet.engines:
        assert engine.kv_tokens == pytest.approx(planned.kv_tokens, rel=0.01)
        assert (engine.sequences, engine.window) == (planned.max_num_seqs, planned.window)


def speed(worker) -> tuple[bool, str]:
    """Whether the process that hands tokens out reads its environment (for every token), and the engine's scheduler."""
    from vllm import envs

    before = envs.VLLM_COMPUTE_NANS_IN_LOGITS
    os.environ["VLLM_COMPUTE_NANS_IN_LOGITS"] = str(int(not before))
    reads = envs.VLLM_COMPUTE_NANS_IN_LOGITS != before
    del os.environ["VLLM_COMPUTE_NANS_IN_LOGITS"]
    return reads, worker._engine.vllm_config.scheduler_config.scheduler_cls


def test_an_engine_reads_no_environment_for_a_token_and_hands_log_probabilities_on_by_the_sixteen(engines):
    found = ray.get(engines[0].workers[0].__ray_call__.remote(speed), timeout=60)
    assert found == (False, "dapo.workers.engines.scheduling.scheduler")


def test_responses_are_complete_and_their_logprobs_are_the_models(engines, loop):
    pool, model = engines
    assert pool.capacity == 64 * 2
    responses = loop.run(on_both(pool))
    assert {response.engine for response in responses} == {0, 1}
    for response in responses:
        length = len(response.token_ids)
        assert length == len(response.rollout_logprobs) > 0
        assert response.finish_reason == ("length" if length == 48 else "stop")
        assert [(span.start, span.end) for span in response.policy_versions] == [(0, length)]
    assert largest_difference(model, responses) <= 1e-4


def test_a_seed_gives_the_same_response_on_a_busy_engine_and_alone(engines, loop):
    pool, _ = engines
    alone = loop.run(group_of(pool, "alone", 500))

    async def busy():
        others = [group_of(pool, f"other{i}", 1000 + 10 * i) for i in range(8)]
        return (await asyncio.gather(group_of(pool, "busy", 500), *others))[0]

    for first, second in zip(alone, loop.run(busy()), strict=True):
        np.testing.assert_array_equal(first.token_ids, second.token_ids)
        np.testing.assert_array_equal(first.rollout_logprobs, second.rollout_logprobs)


def test_without_log_probabilities_the_tokens_are_the_same(engines, loop):
    pool, _ = engines

    async def unasked() -> list[Response]:
        wanted = replace(sampling(), logprobs=False)
        found = dict([each async for each in pool.generate(Request("unasked", PROMPT, wanted, range(700, 704)))])
        return [found[sample] for sample in sorted(found)]

    async def both():
        return await asyncio.gather(group_of(pool, "asked", 700), unasked())  # in the same batches

    for first, second in zip(*loop.run(both()), strict=True):
        np.testing.assert_array_equal(first.token_ids, second.token_ids)
        assert len(second.rollout_logprobs) == len(second.token_ids) and np.isnan(second.rollout_logprobs).all()
        assert (first.text, first.finish_reason) == (second.text, second.finish_reason)
        assert first.policy_versions == second.policy_versions


@torch.no_grad()
def kept(model, response: Response, how: Sampling) -> tuple[np.ndarray, np.ndarray]:
    """Which tokens could be sampled at each position, [R, vocabulary], by transformers' probabilities and the
    definitions of min-p, top-k and top-p; and the log-probabilities before that."""
    ids = torch.from_numpy(np.concatenate([PROMPT, response.token_ids]).astype(np.int64))[None]
    logits = model(ids).logits[0, len(PROMPT) - 1 : -1] / how.temperature
    found = np.zeros(logits.shape, bool)
    for row, own in zip(found, logits.double().numpy(), strict=True):
        order = np.argsort(-own)
        order = order[np.exp(own[order] - own[order[0]]) >= how.min_p][: how.top_k]
        before = (
            np.cumsum(np.exp(own[order]) / np.exp(own[order]).sum()) - np.exp(own[order]) / np.exp(own[order]).sum()
        )
        row[order[before < how.top_p]] = True
    return found, logits.log_softmax(-1).numpy()


def test_of_truncated_sampling_the_tokens_that_could_be_sampled_come_back(engines, loop):
    """With them the log-probabilities agree as closely as without truncation; without them they do not."""
    pool, model = engines
    how = replace(sampling(8), temperature=0.3, top_p=0.9, top_k=12, min_p=0.02, support=16, support_logprobs=True)

    async def group() -> list[Response]:
        return [each async for _, each in pool.generate(Request("cut", PROMPT, how, range(900, 908)))]

    found, counts, far = loop.run(group()), [], 0.0
    for response in found:
        wanted, logprobs = kept(model, response, how)
        support = response.support
        rows = np.repeat(np.arange(len(response.token_ids)), support.counts)
        returned = np.zeros_like(wanted)
        returned[rows, support.token_ids] = True
        assert returned[np.arange(len(returned)), response.token_ids].all(), "the sampled token is one of them"
        # A token at the very edge may be in for one side and out for the other.
        assert (returned != wanted).sum() <= 1
        totals = np.log(np.where(returned, np.exp(logprobs), 0).sum(axis=1))
        own = logprobs[np.arange(len(returned)), response.token_ids]
        assert np.abs(own - totals - response.rollout_logprobs).max() <= 1e-4
        assert np.abs(logprobs[rows, support.token_ids] - totals[rows] - support.logprobs).max() <= 1e-4
        far = max(far, np.abs(own - response.rollout_logprobs).max())
        counts += support.counts.tolist()
    assert far > 0.01 and min(counts) < max(counts) <= how.top_k


def test_requests_that_ask_for_more_log_probabilities_change_nothing_for_the_others(engines, loop):
    """A step of a batch has as many of them for every request as one of its requests asks for."""
    pool, _ = engines
    workers = [*pool.workers]
    alone = loop.run(group_of(pool, "alone", 800))
    how = replace(sampling(4, 12), support=20, support_logprobs=True)

    async def group(number: int) -> list[Response]:
        request = Request(f"more{number}", PROMPT, how, range(10 * number, 10 * number + 4))
        return [each async for _, each in pool.generate(request)]

    async def mixed() -> list[Response]:
        beside = [asyncio.ensure_future(group_of(pool, f"beside{number}", 800)) for number in range(4)]
        for number in range(8):
            await asyncio.sleep(0.02)
            for response in await group(number):
                assert len(response.support.counts) == len(response.token_ids)
        return [response for found in await asyncio.gather(*beside) for response in found]

    for response, first in zip(loop.run(mixed()), alone * 4, strict=True):
        np.testing.assert_array_equal(response.token_ids, first.token_ids)
        np.testing.assert_array_equal(response.rollout_logprobs, first.rollout_logprobs)
    assert pool.workers == workers, "no engine was lost"


def test_an_abort_returns_all_responses_also_those_that_the_engine_does_not_know_yet(engines, loop):
    pool, model = engines
    empty = pool.room(1)

    async def aborted():
        some = asyncio.Event()
        running = asyncio.ensure_future(group_of(pool, "gone", 3000, 16, LONG, some.set))
        await asyncio.wait_for(some.wait(), 300)
        early = [asyncio.ensure_future(group_of(pool, f"early{i}", 3500, 4, LONG)) for i in range(4)]
        await asyncio.sleep(0)
        await pool.abort(["gone", *(f"early{i}" for i in range(4))])
        assert all(group.done() for group in (running, *early))
        return await running, [response for group in early for response in await group]

    responses, early = loop.run(aborted())
    assert {response.finish_reason for response in responses} == {"stop", "abort"}
    reasons = {response.finish_reason for response in early}
    assert "abort" in reasons <= {"stop", "abort"}, "on a busy machine a few may stop by themselves first"
    assert pool.room(1) == empty
    assert all(len(response.token_ids) == len(response.rollout_logprobs) for response in responses)
    assert largest_difference(model, [response for response in responses if len(response.token_ids)]) <= 1e-4
    whole = loop.run(group_of(pool, "whole", 3000, 16, LONG))
    for cut, full in zip(responses, whole, strict=True):  # in the order of the seeds, whatever ended first
        np.testing.assert_array_equal(cut.token_ids, full.token_ids[: len(cut.token_ids)])


def counted(pool, loop) -> list[EngineCounts]:
    """What each engine did since it was last asked; signs of life come while the loop runs."""
    loop.run(asyncio.sleep(4 * PULSE_S))
    return [lap for slot in pool.keeper.slots if (lap := slot.follower.lap()) is not None]


def test_weights_that_change_in_flight_split_responses_into_spans(engines, loop):
    """A token's log-probability is that of its version's weights over the whole context: no old keys and values."""
    pool, model = engines
    models = [deepcopy(model), model]
    generator = torch.Generator().manual_seed(2)
    for parameter in model.parameters():
        change(parameter, generator, 0.02, 0.0)

    async def flight(seed):
        """The update comes once a response of each group has ended."""
        await local_sync(pool, models[0])(0)
        begun: set[int] = set()
        all_run = asyncio.Event()

        def ended(number: int) -> None:
            begun.add(number)
            if len(begun) == 2:
                all_run.set()

        flights = [group_of(pool, f"f{seed}-{i}", seed + 100 * i, 32, LONG, partial(ended, i)) for i in range(2)]
        running = asyncio.ensure_future(asyncio.gather(*flights))
        await asyncio.wait_for(all_run.wait(), 300)
        await local_sync(pool, model)(1)
        return await running

    def crossed(group):
        return sum(len(response.policy_versions) == 2 for response in group)

    for seed in range(4000, 9000, 1000):  # on a busy machine an engine may begin late, and another be done by then
        counted(pool, loop)
        groups = loop.run(flight(seed))
        did = counted(pool, loop)
        if min(map(crossed, groups)) >= 8:
            break
    assert sum(lap.tokens for lap in did) == sum(len(response.token_ids) for group in groups for response in group)
    assert len(did) == 2 and sum(lap.preemptions for lap in did) == 0, "a weight sync is none"
    for lap in did:
        assert 0 < lap.busy_s < lap.running_s < 32 * lap.busy_s and lap.busy_s < lap.seconds and lap.waiting_s > 0
        assert 0 < lap.kv_s < lap.kv_peak * lap.busy_s and lap.kv_peak < 1 and lap.resident_bytes > 1e8
    assert undocumented(engine_metrics(dict(enumerate(did)), 1)) == []
    for group in groups:
        assert crossed(group) >= 8, "the update came when most of the group had ended"
        for response in group:
            spans = response.policy_versions
            assert [span.version for span in spans] in ([0], [0, 1])
            assert [span.start for span in spans] + [len(response.token_ids)] == [0] + [span.end for span in spans]
            found = [differences(each, response) for each in models]
            for span in spans:
                right, wrong = found[span.version], found[1 - span.version]
                assert right[span.start : span.end].max() <= 1e-4
                assert span.end - span.start < 20 or wrong[span.start : span.end].max() > 1e-2


def test_kept_keys_are_of_the_old_weights_and_no_later_request_takes_them(engines, loop):
    """Two blocks of the prompt are in the prefix cache. Of 80 responses an engine runs 64: it begins the others after
    the sync, with keys of the prompt that the old weights made, and says so by an empty span."""
    pool, model = engines
    models, prompt = [deepcopy(model), model], np.resize(PROMPT, 300)
    generator = torch.Generator().manual_seed(4)
    for parameter in model.parameters():
        change(parameter, generator, 0.02, 0.0)

    async def flight() -> list[Response]:
        await local_sync(pool, models[0])(0)
        one_ended = asyncio.Event()
        running = asyncio.ensure_future(group_of(pool, "kept", 9000, 80, 200, one_ended.set, prompt))
        await asyncio.wait_for(one_ended.wait(), 300)
        await local_sync(pool, model, keep=True)(1)
        return await running

    crossed = begun = 0
    for response in loop.run(flight()):
        first, *rest = response.policy_versions
        assert first.version == 0 and [span.version for span in rest] in ([], [1])
        assert differences(models[0], response, prompt)[: first.end].max(initial=0) <= 1e-4
        if rest and len(response.token_ids) - first.end >= 20:
            assert all(differences(each, response, prompt)[first.end :].max() > 1e-3 for each in models)
            crossed, begun = crossed + (first.end > 0), begun + (first.end == 0)
    assert crossed > 8 and begun > 4
    for version, served in (1, model), (1, models[0]):  # a version comes twice where what it named was lost
        if served is not model:
            loop.run(local_sync(pool, served, keep=True)(version))
        for response in loop.run(group_of(pool, "fresh", 9900, 16, 48, prompt=prompt)):
            assert [span.version for span in response.policy_versions] == [version]
            assert differences(served, response, prompt).max() <= 1e-5


def test_a_sync_replaces_every_named_parameter_on_every_engine(engines, loop):
    pool, model = engines
    before = loop.run(on_both(pool))
    generator = torch.Generator().manual_seed(1)
    sync = local_sync(pool, model, bucket_bytes=100_000)  # many transfers
    named = list(model.named_parameters())
    parts = [named[k::PARTS] for k in range(PARTS)]  # of each, all layers and kinds
    for version, part in enumerate(parts, start=1):
        for _, parameter in part:
            change(parameter, generator, 0.3, 0.1)
        loop.run(sync(version))
        responses = loop.run(on_both(pool))
        assert largest_difference(model, responses) <= 1e-4, f"after a change of {[name for name, _ in part]}"
        assert {span.version for response in responses for span in response.policy_versions} == {version}
    assert largest_difference(model, before) > 1e-2, "the old responses must not fit the new weights"


def test_every_transport_brings_the_same_bits(engines, loop):
    pool, model = engines
    other = deepcopy(model)
    generator = torch.Generator().manual_seed(3)
    for parameter in other.parameters():
        change(parameter, generator, 0.3, 0.0)
    found = {}
    for transport in ("broadcast", "ipc"):
        loop.run(local_sync(pool, other, transport, 100_000)(50))
        between = loop.run(on_both(pool))
        loop.run(local_sync(pool, model, transport, 100_000)(51))
        responses = loop.run(on_both(pool))
        assert largest_difference(model, responses) <= 1e-4 < 1e-2 < largest_difference(model, between)
        found[transport] = [(r.token_ids.tolist(), r.rollout_logprobs.tolist()) for r in responses]
    assert found["broadcast"] == found["ipc"]
