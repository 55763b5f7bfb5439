"""Real vLLM engines on CPU: responses, their log-probabilities, aborts, and weights that arrive whole."""

import asyncio
from collections import Counter
from collections.abc import Callable
from copy import deepcopy
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from dapo.config.facts.model_shape import shape_of
from dapo.plan.engine import EngineMemory
from dapo.tiny.random_model import make_random_model
from dapo.types import Response, Sampling
from tests.support.engines.started import started
from tests.support.engines.two import LONG, make_config
from tests.support.local_actors import local_sync
from tests.support.report.reference import undocumented
from workers.engines.load import EngineCounts, engine_metrics
from workers.engines.slot import PULSE_S

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("ray_cluster"), pytest.mark.timeout(1500)]

PROMPT = np.array([20, 21, 22, 23, 24, 25], dtype=np.int32)
VERSION_1 = 1
PARTS = 5  # in which the weights change, one after the other


def sampling(n: int = 4, max_tokens: int = 48) -> Sampling:
    return Sampling(n=n, temperature=1.0, top_p=1.0, top_k=-1, max_tokens=max_tokens)


async def group_of(
    pool, key: str, first_seed: int, n: int = 4, max_tokens: int = 48, ended: Callable[[], None] = lambda: None
) -> list[Response]:
    """The responses of one group in the order of their seeds; `ended` is called after each that comes."""
    found: dict[int, Response] = {}
    seeds = range(first_seed, first_seed + n)
    async for sample, response in pool.generate(key, PROMPT, sampling(n, max_tokens), seeds):
        assert sample not in found
        found[sample] = response
        ended()
    assert sorted(found) == list(range(n))
    return [found[sample] for sample in range(n)]


@pytest.fixture(scope="module")
def engines(two_engines):
    """(pool of two engines, the same model in transformers, number of engines), with a tied head."""
    return *two_engines.fresh(), 2


@pytest.fixture(scope="module")
def untied(ray_cluster, tmp_path_factory, loop):
    """The same of one engine, with a head of its own."""
    path = str(make_random_model(tmp_path_factory.mktemp("model"), tie_word_embeddings=False, layers=2))
    with started(loop, make_config(path, 1)) as pool:
        yield pool, AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32), 1


@pytest.fixture(scope="module", params=[pytest.param("engines", id="tied-2"), pytest.param("untied", id="untied-1")])
def either(request):
    return request.getfixturevalue(request.param)


def test_the_cache_holds_what_the_planner_says(either):
    pool, model, count = either
    planned = EngineMemory(make_config("", count), shape_of(model.config.to_dict(), "random"))
    for engine in pool._fleet._engines:
        assert engine.kv_tokens == pytest.approx(planned.kv_tokens, rel=0.01)
        assert (engine.sequences, engine.window) == (planned.max_num_seqs, planned.window)


@torch.no_grad()
def differences(model, response) -> np.ndarray:
    """|log-probability of transformers - of the engine| of every token, [R]."""
    ids = torch.from_numpy(np.concatenate([PROMPT, response.token_ids]).astype(np.int64))[None]
    logprobs = torch.log_softmax(model(ids).logits[0], dim=-1)[len(PROMPT) - 1 : -1]
    own = logprobs.gather(1, ids[0, len(PROMPT) :, None])[:, 0].numpy()
    return np.abs(own - response.rollout_logprobs)


def largest_difference(model, responses) -> float:
    """Returns the largest difference over all tokens of all responses."""
    return max(differences(model, response).max() for response in responses)


def change(parameter, generator, scale: float, shift: float) -> None:
    with torch.no_grad():
        parameter.add_(scale * torch.randn(parameter.shape, generator=generator) + shift)


async def on_every_engine(pool, count: int, first_seed: int):
    """One group per engine: the least-loaded rule deals them out."""
    groups = await asyncio.gather(*[group_of(pool, f"g{first_seed}-{i}", first_seed) for i in range(count)])
    return [response for group in groups for response in group]


def test_responses_are_complete_and_their_logprobs_are_the_models(either, loop):
    pool, model, count = either
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
    alone = loop.run(group_of(pool, "alone", 500))

    async def busy():
        others = [group_of(pool, f"other{i}", 1000 + 10 * i) for i in range(8)]
        return (await asyncio.gather(group_of(pool, "busy", 500), *others))[0]

    again = loop.run(busy())
    for first, second in zip(alone, again, strict=True):
        np.testing.assert_array_equal(first.token_ids, second.token_ids)
        np.testing.assert_array_equal(first.rollout_logprobs, second.rollout_logprobs)


async def when_few_are_left(pool, generating: Callable[[Callable[[], None]], Any], left: int, then):
    """What `generating` gives, which reports each end; `then()` runs once at most `left` responses are running."""
    empty, few = pool.room(1), asyncio.Event()
    running = asyncio.ensure_future(generating(lambda: few.set() if pool.room(1) >= empty - left else None))
    await asyncio.wait_for(few.wait(), 300)
    await then()
    return await running


def test_room_shrinks_by_groups_and_grows_as_single_responses_end(engines, loop):
    pool, _, count = engines
    empty = pool.room(1)
    assert (empty, pool.room(8)) == (64 * count + count, 8 * count + count), "full engines, and one more group each"
    rooms: list[int] = []

    async def two_groups():
        groups = [
            asyncio.ensure_future(
                group_of(pool, f"room{i}", 2000 + 10 * i, 8, LONG, lambda: rooms.append(pool.room(1)))
            )
            for i in range(2)
        ]
        await asyncio.sleep(0)
        assert pool.room(1) == empty - 16
        return await asyncio.gather(*groups)

    assert [len(group) for group in loop.run(two_groups())] == [8, 8]
    assert len(rooms) == 16 and rooms == sorted(rooms), "there is more room when a response ends, and never less"
    assert empty - 16 < rooms[0] < empty - 8 and rooms[-1] == empty
    assert len(set(rooms)) > 4, "responses end one by one"


def test_what_runs_in_the_background_leaves_the_room_to_others_and_takes_what_is_spare(engines, loop):
    pool, _, count = engines
    empty = pool.room(1)

    async def behind(key: str, first: int) -> int:
        seeds = range(first, first + 8)
        return len([each async for each in pool.generate(key, PROMPT, sampling(8), seeds, background=True)])

    async def both():
        aside = asyncio.ensure_future(behind("aside", 5000))
        ahead = asyncio.ensure_future(group_of(pool, "ahead", 5100))
        await asyncio.sleep(0)
        assert (pool.room(1), pool.spare) == (empty - 4, 64 * count - 12)
        return await aside, len(await ahead)

    assert (pool.spare, pool.serving) == (64 * count, True)
    assert loop.run(both()) == (8, 4)
    assert (pool.room(1), pool.spare) == (empty, 64 * count)


def test_an_abort_while_responses_stream_in_returns_all_of_them(engines, loop):
    pool, model, _ = engines
    empty = pool.room(1)

    def group(ended):
        return group_of(pool, "gone", 3000, 16, LONG, ended)

    responses = loop.run(when_few_are_left(pool, group, 15, lambda: pool.abort(["gone"])))
    reasons = [response.finish_reason for response in responses]
    assert len(responses) == 16 and set(reasons) == {"stop", "abort"}
    assert pool.room(1) == empty
    assert all(len(response.token_ids) == len(response.rollout_logprobs) for response in responses)
    assert largest_difference(model, [response for response in responses if len(response.token_ids)]) <= 1e-4
    whole = loop.run(group_of(pool, "whole", 3000, 16, LONG))
    for cut, full in zip(responses, whole, strict=True):  # in the order of the seeds, whatever ended first
        np.testing.assert_array_equal(cut.token_ids, full.token_ids[: len(cut.token_ids)])


def test_an_abort_reaches_requests_that_the_engine_does_not_know_yet(engines, loop):
    pool, _, count = engines

    async def at_once():
        keys = [f"early{i}" for i in range(2 * count)]
        groups = [asyncio.ensure_future(group_of(pool, key, 3500, 4, LONG)) for key in keys]
        await asyncio.sleep(0)
        await pool.abort(keys)
        return [group.done() for group in groups], await asyncio.gather(*groups)

    empty = pool.room(1)
    done, groups = loop.run(at_once())
    assert all(done) and [len(group) for group in groups] == [4] * (2 * count)
    reasons = Counter(response.finish_reason for group in groups for response in group)
    assert reasons["abort"] and not reasons["length"], "on a busy machine a few may stop by themselves first"
    assert pool.room(1) == empty


def counted(pool, loop) -> list[EngineCounts]:
    """What each engine did since it was last asked; one that does nothing else is told of with its next sign of life.

    They come while the loop runs."""
    loop.run(asyncio.sleep(4 * PULSE_S))
    return [lap for slot in pool.keeper.slots if (lap := slot.follower.lap()) is not None]


def test_weights_that_change_in_flight_split_responses_into_spans(engines, loop):
    """A token's log-probability is that of its version's weights over the whole context: no old keys and values."""
    pool, model, count = engines
    models = {0: deepcopy(model), VERSION_1: model}
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
            if len(begun) == count:
                all_run.set()

        names = [f"flight{seed}-{i}" for i in range(count)]
        flights = [group_of(pool, name, seed + 100 * i, 32, LONG, partial(ended, i)) for i, name in enumerate(names)]
        running = asyncio.ensure_future(asyncio.gather(*flights))
        await asyncio.wait_for(all_run.wait(), 300)
        await local_sync(pool, model)(VERSION_1)
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
    assert len(did) == count and sum(lap.preemptions for lap in did) == 0, "a weight sync is none"
    for lap in did:
        assert 0 < lap.busy_s < lap.running_s < 32 * lap.busy_s and lap.busy_s < lap.seconds and lap.waiting_s > 0
        assert 0 < lap.kv_s < lap.kv_peak * lap.busy_s and lap.kv_peak < 1 and lap.resident_bytes > 1e8
    assert undocumented(engine_metrics(dict(enumerate(did)), 1)) == []
    for group in groups:
        assert crossed(group) >= 8, "the update came when most of the group had ended"
        for response in group:
            spans = response.policy_versions
            assert [span.version for span in spans] in ([0], [0, VERSION_1])
            assert [span.start for span in spans] + [len(response.token_ids)] == [0] + [span.end for span in spans]
            own, other = differences(models[0], response), differences(models[VERSION_1], response)
            for span in spans:
                right, wrong = (own, other) if span.version == 0 else (other, own)
                assert right[span.start : span.end].max() <= 1e-4
                assert span.end - span.start < 20 or wrong[span.start : span.end].max() > 1e-2


def test_a_sync_replaces_every_named_parameter_on_every_engine(either, loop):
    pool, model, count = either
    before = loop.run(on_every_engine(pool, count, 10))
    generator = torch.Generator().manual_seed(1)
    sync = local_sync(pool, model, bucket_bytes=100_000)  # many transfers
    named = list(model.named_parameters())
    parts = [named[k::PARTS] for k in range(PARTS)]  # of each, all layers and kinds
    for version, part in enumerate(parts, start=VERSION_1):
        for _, parameter in part:
            change(parameter, generator, 0.3, 0.1)
        loop.run(sync(version))
        responses = loop.run(on_every_engine(pool, count, 10))
        assert largest_difference(model, responses) <= 1e-4, f"after a change of {[name for name, _ in part]}"
        assert {span.version for response in responses for span in response.policy_versions} == {version}
    assert largest_difference(model, before) > 1e-2, "the old responses must not fit the new weights"


def test_every_transport_brings_the_same_bits(either, loop):
    pool, model, count = either
    other = deepcopy(model)
    generator = torch.Generator().manual_seed(3)
    for parameter in other.parameters():
        change(parameter, generator, 0.3, 0.0)
    found = {}
    for transport in ("broadcast", "ipc"):
        loop.run(local_sync(pool, other, transport, 100_000)(50))
        between = loop.run(on_every_engine(pool, count, 10))
        loop.run(local_sync(pool, model, transport, 100_000)(51))
        responses = loop.run(on_every_engine(pool, count, 10))
        assert largest_difference(model, responses) <= 1e-4 < 1e-2 < largest_difference(model, between)
        found[transport] = [(r.token_ids.tolist(), r.rollout_logprobs.tolist()) for r in responses]
    assert found["broadcast"] == found["ipc"]
