"""Real vLLM engines that put down what they run: it goes on from its tokens, on any engine and with other weights."""

import asyncio
import random
from copy import deepcopy

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer

from dapo.types import Response
from tests.support.engines.two import LONG
from tests.support.local_actors import local_sync
from tests.workers.test_rollout import change, differences, group_of

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("ray_cluster"), pytest.mark.timeout(1500)]

GROUPS = 6


def cap_of(place: int) -> int:
    """One that most responses run into, in every other group."""
    return 60 if place % 2 else LONG


def is_whole(response, tokenizer, place: int) -> bool:
    """Whether spans, length, reason and text are those of one response, however many parts it came in."""
    length, spans = len(response.token_ids), response.policy_versions
    edges = [0, *[span.end for span in spans]]
    stops = np.flatnonzero(response.token_ids == tokenizer.eos_token_id)
    return (
        length == len(response.rollout_logprobs) <= cap_of(place)
        and [span.start for span in spans] == edges[:-1]
        and edges[-1] == length
        and [span.version for span in spans] == sorted({span.version for span in spans})
        and response.text == tokenizer.decode(response.token_ids, skip_special_tokens=True)
        and stops.tolist() == ([length - 1] if response.finish_reason == "stop" else [])
        and (response.finish_reason == "length") == (length == cap_of(place) and not len(stops))
    )


def test_put_down_at_random_points_each_span_has_the_logprobs_of_its_version(two_engines, loop):
    pool, model = two_engines.fresh()
    tokenizer = AutoTokenizer.from_pretrained(two_engines.path)
    models, rng, generator = {}, random.Random(0), torch.Generator().manual_seed(1)
    empty, slept, parts = pool.room(1), [], []

    async def run():
        await local_sync(pool, model)(20)
        models[20] = deepcopy(model)
        names = [(f"p{i}", 7000 + 100 * i, 8, cap_of(i)) for i in range(GROUPS)]
        running = [asyncio.create_task(group_of(pool, *asked)) for asked in names]
        version = 20
        while not all(task.done() for task in running):
            # Short, for a quick machine is done within a second; ever longer, for a slow one gets nowhere in it.
            await asyncio.sleep(rng.uniform(0.02, 0.15) * (1 + len(parts) / 10))
            await pool.put_down()
            assert [slot.load for slot in pool._slots] == [0, 0] and pool.room(1) == 0 and not pool.serving
            left = {
                (int(key[1:]), number): unfinished.so_far.token_ids
                for key, group in pool._groups.items()
                for number, unfinished in group.left.items()
            }
            parts.append(left)
            await asyncio.sleep(0.1)
            assert sum(len(group.left) for group in pool._groups.values()) == len(left), "nothing runs"
            if len(parts) % 2:
                if len(parts) % 4 == 3:
                    await pool.sleep()
                    slept.append(version)
                for parameter in model.parameters():
                    change(parameter, generator, 0.02, 0.0)
                version += 1
                models[version] = deepcopy(model)
                await local_sync(pool, model)(version)
            else:
                pool.admit(pool.members())
        return [task.result() for task in running]

    found = loop.run(run())
    responses = [response for group in found for response in group]
    assert len(responses) == 8 * GROUPS and pool.room(1) == empty
    assert all(is_whole(response, tokenizer, place) for place, group in enumerate(found) for response in group)
    assert {response.finish_reason for response in responses} >= {"stop", "length"}
    for response in responses:
        for span in response.policy_versions:
            assert differences(models[span.version], response)[span.start : span.end].max() <= 1e-4
    assert len(parts) > 3 and slept and sum(len(response.policy_versions) > 1 for response in responses) > 4
    for left in parts:
        for (place, number), tokens in left.items():
            whole = found[place][number].token_ids
            np.testing.assert_array_equal(whole[: len(tokens)], tokens)
            again = whole[len(tokens) : 2 * len(tokens)]
            assert len(again) < 8 or (again != tokens[: len(again)]).any(), "the noise of the beginning, once more"


def test_what_is_put_down_ends_as_if_it_had_not_been(two_engines, loop):
    pool, _ = two_engines.fresh()

    async def run(moves: int) -> list[Response]:
        running = [asyncio.create_task(group_of(pool, f"m{moves}-{i}", 8000 + 100 * i, 8, LONG)) for i in range(GROUPS)]
        for move in range(moves):
            await asyncio.sleep(0.1)
            await pool.put_down()
            pool.admit((move % 2,))
        return [response for task in running for response in await task]

    async def sampled() -> int:
        return sum([(await slot.worker.pulse.remote()).counts.tokens for slot in pool._slots])

    before = loop.run(sampled())
    plain, moved = loop.run(run(0)), loop.run(run(8))
    pool.admit(pool.members())
    once = sum(len(response.token_ids) for response in [*plain, *moved])
    assert loop.run(sampled()) - before == once, "no token is sampled twice"
    assert any(one.engine != other.engine for one, other in zip(plain, moved, strict=True))
    for one, other in zip(plain, moved, strict=True):
        np.testing.assert_array_equal(one.token_ids, other.token_ids)
        np.testing.assert_array_equal(one.rollout_logprobs, other.rollout_logprobs)
