"""Measures the host CPU time that one engine needs per token, by the number of concurrent requests. Engines of small
models wait for the host: for their own process, which schedules, and for the Ray actor's process, which receives
tokens. The weights are random; with a real vocabulary hardly any response ends before its limit. Output: tokens per
second, and CPU time per token of both processes."""

import argparse
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import psutil

from dapo.config.schema import Config
from dapo.sampling.stream import training_sampling
from dapo.tools.bench.setting import TIMEOUT_S, cluster, engine, of_models, one_device_config
from dapo.types import Request
from dapo.workers.remote import wait
from dapo.workers.rollout import RolloutPool

NAMES = ("model", "requests", "tokens", "s", "tokens/s", "us per token", "us of the actor", "us of the engine")
PROMPT = np.arange(1, 9, dtype=np.int32)


def to_config(given: argparse.Namespace, path: str) -> Config:
    """Returns the configuration of one engine. Raises ValueError for overrides that do not fit."""
    return one_device_config(
        given,
        path,
        *(f"data.max_response_length={given.tokens}", "reward.overlong_buffer.enable=false"),
        f"rollout.vllm={{max_num_seqs: {max(given.requests)}, gpu_memory_utilization: 0.5}}",
    )


def processor_seconds(worker: Any) -> tuple[float, float]:
    """Runs in the engine's actor: returns the CPU seconds of its own process so far, and of vLLM's."""
    own = psutil.Process()
    spent = lambda process: sum(process.cpu_times()[:2])  # noqa: E731
    return spent(own), sum(map(spent, own.children(recursive=True)))


async def measure(cfg: Config, model: str, given: argparse.Namespace) -> list[list[str]]:
    rows = []
    with cluster(cfg):
        async with engine(cfg) as pool:
            for count in given.requests:
                rounds = [await one_round(pool, cfg, count, number) for number in range(given.rounds + 1)]
                quickest = min(rounds[1:], key=lambda of: of[0] / of[1])  # the first one warms up
                rows.append([model, str(count), *_row(*quickest)])
    return rows


async def one_round(pool: RolloutPool, cfg: Config, count: int, number: int) -> tuple[float, int, float, float]:
    """Returns seconds, tokens, and the CPU seconds of the actor and the engine."""
    sampling = replace(training_sampling(cfg), n=count)
    before, began = await _spent(pool), time.monotonic()
    seeds = range(number * count, (number + 1) * count)
    parts = pool.generate(Request(f"host-{count}-{number}", PROMPT, sampling, seeds))
    tokens = sum([len(response.token_ids) async for _, response in parts])
    took = time.monotonic() - began
    actor, engines = (after - former for after, former in zip(await _spent(pool), before, strict=True))
    return took, tokens, actor, engines


async def _spent(pool: RolloutPool) -> tuple[float, float]:
    [worker] = pool.workers
    [spent] = await wait([worker.__ray_call__.remote(processor_seconds)], TIMEOUT_S, "engine 0", "its processor time")
    return spent


def _row(seconds: float, tokens: int, actor: float, engines: float) -> Sequence[str]:
    of_token = (f"{1e6 * each / tokens:.1f}" for each in (seconds, actor, engines))
    return str(tokens), f"{seconds:.2f}", f"{tokens / seconds:.0f}", *of_token


def run(given: argparse.Namespace) -> None:
    title = f"quickest of {given.rounds} rounds; responses of at most {given.tokens} tokens"
    of_models(given, to_config, lambda cfg, model: measure(cfg, model, given), NAMES, title)
