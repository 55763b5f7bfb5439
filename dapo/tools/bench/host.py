"""Measures the host CPU time that engines need per token, by the number of concurrent requests. Engines of small
models wait for the host: for their own process, which schedules, and for the Ray actor's process, which receives
tokens. The weights are random; with a real vocabulary hardly any response ends before its limit. The first round puts
the prompts into the prefix cache and is not counted. Output: tokens per second, and CPU time per token of both
processes."""

import argparse
import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import psutil

from dapo.config.facts.model_shape import read_shape
from dapo.config.schema import Config
from dapo.sampling.stream import training_sampling
from dapo.tools.bench.alone import Row
from dapo.tools.bench.setting import TIMEOUT_S, VOCABULARY, cluster, engine, of_models, one_device_config
from dapo.types import Request
from dapo.workers.remote import wait
from dapo.workers.rollout import RolloutPool

NAMES = ("model", "requests", "tokens", "s", "tokens/s", "us per token", "us of the actor", "us of the engine")
WARM_UP_TOKENS = 16


def to_config(given: argparse.Namespace, path: str) -> Config:
    """Returns the configuration of one engine. Raises ValueError for overrides that do not fit."""
    return one_device_config(given, path, *arguments(given), "rollout.vllm.gpu_memory_utilization=0.5")


def arguments(given: argparse.Namespace) -> list[str]:
    return [
        *(f"data.max_prompt_length={max(given.prompts)}", f"data.max_response_length={given.tokens}"),
        *("reward.overlong_buffer.enable=false", f"rollout.vllm.max_num_seqs={max(given.requests)}"),
        f"actor.max_tokens_per_gpu={max(4096, max(given.prompts) + given.tokens)}",
    ]


def processor_seconds(worker: Any) -> tuple[float, float]:
    """Runs in the engine's actor: returns the CPU seconds of its own process so far, and of vLLM's."""
    own = psutil.Process()
    spent = lambda process: sum(process.cpu_times()[:2])  # noqa: E731
    return spent(own), sum(map(spent, own.children(recursive=True)))


async def measure(pool: RolloutPool, cfg: Config, given: argparse.Namespace) -> AsyncIterator[Row]:
    """Yields the quickest round of each of `--requests` with its `--prompts`."""
    vocabulary, seeds = min(VOCABULARY, read_shape(cfg.model.path).vocab_size), iter(range(1 << 30))
    for count, length in cases(given):
        prompts = np.random.default_rng(0).integers(0, vocabulary, (count, length)).astype(np.int32)
        sampling = replace(training_sampling(cfg), n=1)
        await one_round(pool, replace(sampling, max_tokens=min(WARM_UP_TOKENS, given.tokens)), prompts, seeds)
        rounds = [await one_round(pool, sampling, prompts, seeds) for _ in range(given.rounds)]
        seconds, tokens, actor, engines = min(rounds, key=lambda of: of[0] / of[1])
        counts = {"requests": count, "tokens": tokens, "tokens_per_s": tokens / seconds}
        yield counts | {"seconds": seconds, "actor_s": actor, "engine_s": engines}


def cases(given: argparse.Namespace) -> Iterator[tuple[int, int]]:
    """Yields requests and the tokens of their prompts; raises ValueError where there are not as many of both."""
    prompts = given.prompts * len(given.requests) if len(given.prompts) == 1 else given.prompts
    if len(prompts) != len(given.requests):
        raise ValueError(f"`--prompts` takes one number, or one for each of `--requests` ({len(given.requests)})")
    yield from zip(given.requests, prompts, strict=True)


async def one_round(
    pool: RolloutPool, sampling: Any, prompts: np.ndarray, seeds: Iterator[int]
) -> tuple[float, int, float, float]:
    """Returns seconds, tokens, and the CPU seconds of the actors and the engines."""

    async def tokens_of(prompt: Any, seed: int) -> int:
        parts = pool.generate(Request(f"host-{seed}", prompt, sampling, [seed]))
        return sum([len(response.token_ids) async for _, response in parts])

    before, began = await _spent(pool), time.monotonic()
    tokens = sum(await asyncio.gather(*map(tokens_of, prompts, seeds)))
    took = time.monotonic() - began
    actor, engines = (after - former for after, former in zip(await _spent(pool), before, strict=True))
    return took, tokens, actor, engines


async def _spent(pool: RolloutPool) -> tuple[float, float]:
    refs = [worker.__ray_call__.remote(processor_seconds) for worker in pool.workers]
    actors, engines = zip(*await wait(refs, TIMEOUT_S, "the engines", "their processor time"), strict=True)
    return sum(actors), sum(engines)


async def rows_of(cfg: Config, model: str, given: argparse.Namespace) -> list[list[str]]:
    with cluster(cfg):
        async with engine(cfg) as pool:
            return [[model, *_cells(row)] async for row in measure(pool, cfg, given)]


def _cells(row: Row) -> list[str]:
    of_token = (f"{1e6 * row[name] / row['tokens']:.1f}" for name in ("seconds", "actor_s", "engine_s"))
    counts = (f"{row[name]}" for name in ("requests", "tokens"))
    return [*counts, f"{row['seconds']:.2f}", f"{row['tokens_per_s']:.0f}", *of_token]


def run(given: argparse.Namespace) -> None:
    title = f"quickest of {given.rounds} rounds; responses of at most {given.tokens} tokens"
    of_models(given, to_config, lambda cfg, model: rows_of(cfg, model, given), NAMES, title)
