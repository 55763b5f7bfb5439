"""Measures decoding with and without speculation, by the number of requests that run at once.

Two engines of the tiny model in one run, of which one drafts by n-grams and the other does not; they take turns on the
same prompts and seeds. In: how many requests, how many tokens are drafted. Out: seconds until the last response has
ended, and the engine's own acceptance rate. All requests of a round have prompts of their own.
"""

import argparse
import asyncio
import statistics
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace

from dapo.bench.setting import bench_config, cluster
from dapo.config.schema import Config
from dapo.derived import device_of
from dapo.fleet import STOP_GRACE_S
from dapo.report.table import table
from dapo.run import load_data
from dapo.sampling.stream import sampling_of
from dapo.types import Prompt
from workers.engines.arguments import engine_args
from workers.engines.slot import PULSE_S
from workers.placement import Placement
from workers.rollout import RolloutPool

WARM_UP = 1  # rounds that do not count


def to_config(given: argparse.Namespace) -> tuple[Config, Config]:
    """Returns the setting without and with speculation, at any number of requests. Raises ValueError."""
    most = max(given.requests)
    common = [f"rollout.vllm.max_num_seqs={most}", *given.overrides]
    drafts = (
        f"{{method: ngram, num_speculative_tokens: {given.tokens}, prompt_lookup_min: {given.ngram}, "
        f"prompt_lookup_max: {given.ngram}, num_speculative_tokens_per_batch_size: [[1, {most}, {given.tokens}]]}}"
    )
    return bench_config(*common), bench_config(*common, f"rollout.vllm.speculative_config={drafts}")


@asynccontextmanager
async def engine(cfg: Config) -> AsyncIterator[RolloutPool]:
    """Yields one engine."""
    device = device_of(cfg)
    pool = RolloutPool(Placement(cfg, device).rollout(), cfg.rollout)
    try:
        await pool.start(cfg.model.path, engine_args(cfg, device))
        yield pool
    finally:
        await pool.stop(STOP_GRACE_S)


async def one_round(pool: RolloutPool, prompts: Sequence[Prompt], cfg: Config, seed: int) -> tuple[float, int]:
    """Returns the seconds until every prompt has its response, and the tokens of all."""
    sampling = replace(sampling_of(cfg.rollout, cfg.data.max_response_length), n=1)

    async def respond(number: int) -> int:
        name = f"{seed}-{number}"
        parts = pool.generate(name, prompts[number].token_ids, sampling, [seed * len(prompts) + number])
        return sum([len(response.token_ids) async for _, response in parts])

    began = time.monotonic()
    tokens = sum(await asyncio.gather(*map(respond, range(len(prompts)))))
    return time.monotonic() - began, tokens


async def measure(given: argparse.Namespace) -> list[list[str]]:
    """Returns the rows of the table, one per number of requests."""
    plain, drafting = to_config(given)
    prompts, _, _ = load_data(plain)
    rows = []
    with cluster(plain):
        async with engine(plain) as without, engine(drafting) as using:
            for count in given.requests:
                seconds: dict[RolloutPool, list[float]] = {without: [], using: []}
                tokens: dict[RolloutPool, int] = {without: 0, using: 0}
                for number in range(WARM_UP + given.rounds):
                    first = number * count % (len(prompts) - count + 1)
                    for pool in seconds:
                        took, made = await one_round(pool, prompts[first : first + count], plain, number)
                        if number >= WARM_UP:
                            seconds[pool].append(took)
                            tokens[pool] += made
                        else:
                            await asyncio.sleep(3 * PULSE_S)
                            pool.lap()
                await asyncio.sleep(3 * PULSE_S)  # until its counts have come
                rows.append(_row(count, seconds[without], seconds[using], tokens[without], tokens[using], using.lap()))
    return rows


def _row(
    count: int, without: Sequence[float], using: Sequence[float], tokens: int, drafted: int, lap: dict[str, float]
) -> list[str]:
    ratio = (sum(without) / tokens) / (sum(using) / drafted)
    return [
        str(count),
        f"{statistics.median(without):.3f}",
        f"{statistics.median(using):.3f}",
        f"{tokens / sum(without):.0f}",
        f"{drafted / sum(using):.0f}",
        f"{ratio:.2f}",
        f"{lap.get('perf/engine/draft_acceptance', 0.0):.2f}",
        f"{lap.get('perf/engine/tokens_per_draft', 0.0):.2f}",
    ]


def run(given: argparse.Namespace) -> None:
    """Prints a table with a row per number of requests."""
    rows = asyncio.run(measure(given))
    print(f"{given.tokens} tokens drafted by n-grams of {given.ngram}; medians of {given.rounds} rounds")
    names = ("requests", "s without", "s with", "tokens/s without", "tokens/s with", "ratio", "accepted", "per draft")
    print(table(names, rows))
