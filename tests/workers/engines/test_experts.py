"""A real engine of a mixture on a CPU: which experts it has used comes back, and actors that would route otherwise take
them."""

import asyncio
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from dapo.tiny.random_model import make_random_model
from dapo.types import Request, Response, Sampling
from dapo.workers.rollout import canary_sequence
from tests.support.engines.two import make_config, started
from tests.support.local_actors import local_sync
from tests.support.training.plain_reference import make_config as actor_config
from tests.support.training.plain_reference import rank_here
from tests.support.training.upcycled import upcycle

pytestmark = [pytest.mark.ray, pytest.mark.nightly, pytest.mark.usefixtures("ray_cluster"), pytest.mark.timeout(900)]

PROMPT = np.arange(5, 42, dtype=np.int32)  # two blocks of vLLM's cache, and a part of one
SAMPLING = Sampling(n=12, temperature=1.0, top_p=1.0, top_k=-1, max_tokens=400, experts=True)
LAYERS, EXPERTS, K = 2, 6, 2


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Experts that differ much, and routers for which they are nearly equal."""
    folder = tmp_path_factory.mktemp("mixture")
    dense = str(make_random_model(folder / "dense", layers=LAYERS))
    path = upcycle(dense, folder / "of_experts", experts=EXPERTS, per_token=K, noise=1.0)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    reroute(model, 5e-3, seed=0, keep=0.0)
    model.save_pretrained(path)
    return path


def reroute(model: torch.nn.Module, scale: float, seed: int, keep: float = 1.0) -> None:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for layer in model.model.layers:
            weight = layer.mlp.gate.weight
            weight.mul_(keep).add_(scale * torch.randn(weight.shape, generator=generator))


@pytest.fixture(scope="module")
def engine(ray_cluster: None, loop: asyncio.Runner, mixture: Path) -> Any:
    """(pool of one engine that returns experts, the same model in transformers)."""
    cfg = make_config(str(mixture), 1)
    cfg.rollout.replay_experts = True
    with started(loop, cfg) as pool:
        model = AutoModelForCausalLM.from_pretrained(mixture, dtype=torch.float32).eval()
        loop.run(local_sync(pool, model)(0))
        yield pool, model


async def group_of(pool: Any, key: str, sampling: Sampling = SAMPLING) -> list[Response]:
    seeds = range(100, 100 + sampling.n)
    found = {number: one async for number, one in pool.generate(Request(key, PROMPT, sampling, seeds))}
    return [found[number] for number in range(sampling.n)]


@torch.no_grad()
def choice(model: torch.nn.Module, response: Response) -> np.ndarray:
    """The experts that transformers' routers choose, sorted, [P + R - 1, layers, k]."""
    chosen: list[torch.Tensor] = []
    hooks = [
        layer.mlp.gate.register_forward_hook(lambda module, args, output: chosen.append(output[2]))
        for layer in model.model.layers
    ]
    model(torch.from_numpy(np.concatenate([PROMPT, response.token_ids]).astype(np.int64))[None])
    for hook in hooks:
        hook.remove()
    return torch.stack(chosen, dim=1)[:-1].sort(-1).values.numpy()


def equal_rows(model: torch.nn.Module, response: Response) -> np.ndarray:
    """Whether the engine has used the experts that `model` would choose, by token, [P + R - 1]."""
    wanted = choice(model, response)
    assert response.experts is not None and response.experts.dtype == np.uint8
    assert response.experts.shape == wanted.shape == (len(PROMPT) + len(response.token_ids) - 1, LAYERS, K)
    return (np.sort(response.experts, axis=-1) == wanted).all((1, 2))


def test_each_tokens_experts_come_back_also_of_a_prompt_from_the_cache(engine: Any, loop: asyncio.Runner) -> None:
    pool, model = engine
    responses = loop.run(group_of(pool, "whole")) + loop.run(group_of(pool, "again"))
    assert sum(len(response.token_ids) for response in responses) > 500
    agreed = np.concatenate([equal_rows(model, response) for response in responses])
    assert agreed.mean() > 0.998, "rounding decides between experts that are as good"
    assert len(np.unique(np.concatenate([response.experts[:, 0, 0] for response in responses]))) == EXPERTS


def test_a_response_in_parts_has_the_experts_of_each_token_once(engine: Any, loop: asyncio.Runner) -> None:
    pool, model = engine
    parts = []

    async def put_down_again_and_again() -> list[Response]:
        running = asyncio.ensure_future(group_of(pool, "parts"))
        while not running.done():
            await asyncio.sleep(0.05 * (1 + len(parts) / 5))  # ever longer, for a slow machine gets nowhere in it
            await pool.put_down()
            left = pool._groups["parts"].left.values() if "parts" in pool._groups else ()
            parts.append(sum(bool(len(one.so_far.token_ids)) for one in left))
            pool.admit(pool.members())
        return await running

    responses = loop.run(put_down_again_and_again())
    assert sum(parts) > len(responses), "put down midway"
    assert np.concatenate([equal_rows(model, response) for response in responses]).mean() > 0.998


def test_an_aborted_response_has_the_experts_of_what_it_holds(engine: Any, loop: asyncio.Runner) -> None:
    pool, model = engine

    async def abort_after(attempt: int) -> list[Response]:
        running = asyncio.ensure_future(group_of(pool, f"aborted {attempt}"))
        await asyncio.sleep(0.04 * attempt)
        await pool.abort([f"aborted {attempt}"])
        return await running

    found: list[Response] = []
    for attempt in range(1, 100):  # log-probabilities come by the sixteen: at first there are none yet
        found = [one for one in loop.run(abort_after(attempt)) if one.aborted and len(one.token_ids)]
        if found:
            break
    assert found
    assert np.concatenate([equal_rows(model, response) for response in found]).mean() > 0.998


def test_of_weights_in_flight_each_token_has_the_experts_of_the_policy_that_sampled_it(
    engine: Any, loop: asyncio.Runner
) -> None:
    pool, model = engine
    other = deepcopy(model)
    reroute(other, 0.02, seed=1)
    sync = local_sync(pool, other)

    async def update(version: int) -> list[Response]:
        running = asyncio.ensure_future(group_of(pool, f"in flight {version}"))
        await asyncio.sleep(0.05 * version)
        await sync(version)
        return await running

    try:
        mixed, version = [], 0
        while not mixed and (version := version + 1) < 30:  # a slow machine has no token yet
            loop.run(local_sync(pool, model)(0))
            mixed = [one for one in loop.run(update(version)) if len(one.policy_versions) == 2]
        assert mixed
        by_old, by_new = [], []
        for response in mixed:
            first = len(PROMPT) + response.policy_versions[0].end - 1  # number of tokens that the first policy computed
            both = np.stack([equal_rows(model, response), equal_rows(other, response)])
            by_old.append(both[:, :first])
            by_new.append(both[:, first:])
        (kept, changed), (gone, new) = (np.concatenate(rows, axis=1).mean(1) for rows in (by_old, by_new))
        assert kept > 0.998 and changed < 0.7 and gone < 0.7 and new > 0.998
    finally:
        loop.run(local_sync(pool, model)(0))


def test_actors_that_route_otherwise_agree_with_the_engine_by_replay(
    engine: Any, loop: asyncio.Runner, mixture: Path, tmp_path: Path
) -> None:
    """The planted cause: other routers, for which the experts are as nearly equal, so that only the choice differs."""
    pool, model = engine
    other = deepcopy(model)
    reroute(other, 5e-4, seed=2)
    other.save_pretrained(tmp_path)
    responses = loop.run(group_of(pool, "other routers", replace(SAMPLING, max_tokens=64)))
    replayed = tuple(canary_sequence(PROMPT, response) for response in responses)
    free = tuple(replace(one, prompt_experts=None, experts=None) for one in replayed)
    cfg = actor_config(tmp_path, num_workers=1)
    cfg.rollout.temperature = 1.0
    with rank_here(cfg) as rank:
        means = {}
        for name, sequences in {"free": free, "replayed": replayed}.items():
            batch = rank._updater._collate(sequences)
            [[found]] = rank._updater._before([[batch]])[0]
            means[name] = float((found - batch.rollout_logprobs).abs().mean())
    changed = 1 - np.concatenate([equal_rows(other, response) for response in responses]).mean()
    assert changed > 0.1 and means["free"] > 4e-3, (means, changed)
    assert means["replayed"] < means["free"] / 20, (means, changed)
    print(f"{changed:.1%} of the tokens routed otherwise; mean difference {means}")
