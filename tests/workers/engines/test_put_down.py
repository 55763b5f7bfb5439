"""Real vLLM engines that put down what they run: it goes on from its tokens, on any engine and with other weights."""

import asyncio
import os
import random
import signal
import time
from copy import deepcopy

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer

from tests.support.engines.two import LONG
from tests.support.local_actors import local_sync
from tests.workers.engines.test_lost_engines import BACK_S, pids, serving, until
from tests.workers.test_rollout import change, differences, group_of

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("ray_cluster"), pytest.mark.timeout(1500)]

GROUPS = 6
ALIKE = -30.0  # log-probability with which fresh noise gives the same tokens once more: never


@pytest.fixture(scope="module")
def engines(two_engines):
    """(pool of two engines, what it said, the same model in transformers, its tokenizer)."""
    pool, model = two_engines.fresh()
    return pool, two_engines.said, model, AutoTokenizer.from_pretrained(two_engines.path)


def some_groups(pool, seed: int, ended=lambda: None, which=range(GROUPS)):
    return [asyncio.create_task(group_of(pool, f"p{seed}-{i}", seed + 100 * i, 8, cap_of(i), ended)) for i in which]


def cap_of(place: int) -> int:
    """One that every fourth response runs into, in every other group."""
    return 160 if place % 2 else LONG


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


def test_put_down_at_random_points_each_span_has_the_logprobs_of_its_version(engines, loop):
    pool, _, model, tokenizer = engines
    models, rng, generator = {}, random.Random(0), torch.Generator().manual_seed(1)
    empty, took, slept = pool.room(1), [], []

    async def run():
        await local_sync(pool, model)(20)
        models[20] = deepcopy(model)
        running = some_groups(pool, 7000)
        version = 20
        while not all(task.done() for task in running):
            # Short, for a quick machine is done within a second; ever longer, for a slow one gets nowhere in it.
            await asyncio.sleep(rng.uniform(0.02, 0.15) * (1 + len(took) / 10))
            began = time.monotonic()
            await pool.put_down()
            took.append(time.monotonic() - began)
            assert [slot.load for slot in pool._slots] == [0, 0] and pool.room(1) == 0 and not pool.serving
            left = {key: len(group.left) for key, group in pool._groups.items()}
            await asyncio.sleep(0.1)
            assert {key: len(group.left) for key, group in pool._groups.items()} == left, "nothing runs"
            if len(took) % 2:
                if len(took) % 4 == 3:
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
    crossed = 0
    for response in responses:
        crossed += len(response.policy_versions) > 1
        for span in response.policy_versions:
            assert differences(models[span.version], response)[span.start : span.end].max() <= 1e-4
    print(f"{len(took)} times put down, {max(took):.3f} s at most; {crossed} of {len(responses)} crossed an update")
    assert len(took) > 3 and crossed > 4 and slept


def test_groups_that_were_put_down_are_dealt_out_anew_and_draw_fresh_noise(engines, loop):
    pool, _, model, tokenizer = engines

    async def run(put_down: bool):
        ends = asyncio.Semaphore(0)
        running = []
        for which in (range(GROUPS), range(GROUPS, 2 * GROUPS)):  # those that start later are shorter
            running += some_groups(pool, 8000, ends.release, which)
            for _ in range(12):  # by then others have more tokens than an engine hands on together
                await asyncio.wait_for(ends.acquire(), 300)
        if put_down:
            await pool.put_down()
            parts = {
                (key, number): unfinished.so_far.token_ids
                for key, group in pool._groups.items()
                for number, unfinished in group.left.items()
            }
            pool.admit([1])
            return [await task for task in running], parts
        return [await task for task in running], {}

    loop.run(local_sync(pool, model)(40))
    whole, _ = loop.run(run(False))
    found, parts = loop.run(run(True))
    pool.admit(pool.members())
    assert len(parts) > 8 and len({len(tokens) for tokens in parts.values()}) > 1, "put down at different lengths"
    told = 0
    for (key, number), tokens in parts.items():
        place = int(key.rpartition("-")[2])
        before, after = whole[place][number], found[place][number]
        assert after.engine == 1 and is_whole(after, tokenizer, place) and differences(model, after).max() <= 1e-4
        assert [span.version for span in after.policy_versions] == [40], "spans of one version are one"
        np.testing.assert_array_equal(after.token_ids[: len(tokens)], before.token_ids[: len(tokens)])
        np.testing.assert_array_equal(after.token_ids[: len(tokens)], tokens)
        again = after.token_ids[len(tokens) : 2 * len(tokens)]
        assert len(again) < 8 or (again != tokens[: len(again)]).any(), "the noise of the beginning, once more"
        rest = before.token_ids[len(tokens) :]
        if len(tokens) and before.rollout_logprobs[len(tokens) :].sum() < ALIKE:
            told += 1
            assert not np.array_equal(after.token_ids[len(tokens) :], rest), "the noise of an engine that goes on"
    assert told > 8, "of most it is known which noise they drew"


def test_an_abort_while_groups_are_put_down_returns_what_they_had(engines, loop):
    pool, _, model, tokenizer = engines

    async def run():
        some = asyncio.Event()
        running = some_groups(pool, 9000, some.set)
        await asyncio.wait_for(some.wait(), 300)
        had: dict[str, list[int]] = {}
        while not any(map(sum, had.values())):  # one may end with its first token, before others begin
            pool.admit(pool.members())
            await asyncio.sleep(0.05)
            await pool.put_down()
            groups = pool._groups.items()
            had = {key: [len(one.so_far.token_ids) for one in group.left.values()] for key, group in groups}
            assert had, "all have ended"
        await asyncio.wait_for(pool.abort(list(had)), 60)
        assert not pool._groups
        pool.admit(pool.members())
        found = [await task for task in running]
        cut = {f"p9000-{i}": [len(r.token_ids) for r in group if r.aborted] for i, group in enumerate(found)}
        assert {key: cut[key] for key in had} == had and sum(map(sum, had.values())) > 0
        assert all(r.aborted or is_whole(r, tokenizer, i) for i, group in enumerate(found) for r in group)

    loop.run(run())


def test_an_engine_that_dies_while_groups_are_put_down_costs_none_of_their_tokens(engines, loop):
    pool, said, model, tokenizer = engines

    async def run():
        some = asyncio.Event()
        running = some_groups(pool, 9500, some.set)
        await asyncio.wait_for(some.wait(), 300)
        await pool.put_down()
        had = {
            (int(key.rpartition("-")[2]), number): unfinished.so_far.token_ids
            for key, group in pool._groups.items()
            for number, unfinished in group.left.items()
        }
        os.kill(pids(pool, 0)[1], signal.SIGKILL)
        await until(lambda: not pool._slots[0].started, 60.0, f"not noticed: {said}")
        await local_sync(pool, model)(50)
        found = [await task for task in running]
        await until(lambda: all(serving(pool)), BACK_S, f"not back: {said}")
        return had, found

    had, found = loop.run(run())
    assert len(had) > 8
    for (place, number), tokens in had.items():
        np.testing.assert_array_equal(found[place][number].token_ids[: len(tokens)], tokens)
        assert is_whole(found[place][number], tokenizer, place)
    assert max(differences(model, response).max() for group in found for response in group) <= 1e-4
