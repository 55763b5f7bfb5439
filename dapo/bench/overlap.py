"""Staleness 1 against 0 on one set of workers: some steps at `filter_groups.max_staleness` 0, as many at 1, in turns.

Noise of a shared machine hits both. In: a shape of `dapo.bench.setting`. Out: groups trained per second, and the ratio.
The engine runs 32 responses at once: on two cores, recomputing keys and values is as expensive as decoding, and each
weight update does it for all that run. With 64 or 128 the gain is smaller (`README.md`).
"""

import argparse
import asyncio
import statistics
import tempfile
from collections.abc import Sequence
from copy import deepcopy
from pathlib import Path

from dapo.bench.setting import run_config, trainer, workers
from dapo.config.schema import Config
from dapo.pools import Pools
from dapo.report.log import METRICS, read_metrics
from dapo.report.table import table
from dapo.types import Prompt

SETTINGS = ("algorithm.rollout_correction.mode=truncate", "rollout.vllm={max_num_seqs: 32}")
WARM_UP = 2  # steps before each measurement: at staleness 1 the buffer fills meanwhile
BEYOND = 2  # steps after it: the last ones of a run generate nothing ahead
SHOWN = ("perf/update_s", "perf/sync_s", "perf/goodput", "batch/staleness_mean", "batch/stale_tokens")


async def measure(cfg: Config, steps: int, rounds: int) -> dict[int, list[float]]:
    """Returns the groups per second of every round, by staleness."""
    rates: dict[int, list[float]] = {0: [], 1: []}
    async with workers(cfg) as (pools, prompts):
        for number in range(rounds):
            for staleness in rates:
                rates[staleness].append(await one_round(cfg, staleness, steps, pools, prompts, f"{number}-{staleness}"))
    return rates


async def one_round(
    cfg: Config, staleness: int, steps: int, pools: Pools, prompts: Sequence[Prompt], name: str
) -> float:
    """Returns the groups trained per second, after the warm-up."""
    cfg = deepcopy(cfg)
    cfg.filter_groups.max_staleness = staleness
    cfg.trainer.total_steps = WARM_UP + steps + BEYOND
    directory = Path(cfg.trainer.output_dir) / name
    await pools.actors.restart()  # each run begins with untrained ranks
    async with trainer(cfg, pools, prompts, directory) as training:
        await training.run()
    records = read_metrics(directory / METRICS)[WARM_UP : WARM_UP + steps]
    rate = sum(record["buffer/trained"] for record in records) / sum(record["perf/step_s"] for record in records)
    means = {key: statistics.fmean(record.get(key, 0.0) for record in records) for key in SHOWN}
    shown = "  ".join(f"{key} {value:.3f}" for key, value in means.items())
    print(f"staleness {staleness}: {rate:.2f} groups/s  {shown}", flush=True)
    return rate


def run(given: argparse.Namespace) -> None:
    """Prints a line per round, and a table of the medians with the ratio."""
    with tempfile.TemporaryDirectory() as folder:
        cfg = run_config(given.shape, Path(folder), [*SETTINGS, *given.overrides])
        rates = asyncio.run(measure(cfg, given.steps, given.rounds))
    ratios = [loose / strict for strict, loose in zip(rates[0], rates[1], strict=True)]
    print(f"\nmedians of {given.rounds} rounds of {given.steps} steps, shape {given.shape}")
    cells = [
        str(cfg.rollout.vllm["max_num_seqs"]),
        *(f"{statistics.median(rates[staleness]):.2f}" for staleness in (0, 1)),
    ]
    rounds = " · ".join(f"{ratio:.2f}" for ratio in ratios)
    names = ("engine runs at once", "groups/s, staleness 0", "groups/s, staleness 1", "ratio (each round)")
    print(table(names, [[*cells, f"{statistics.median(ratios):.2f} ({rounds})"]]))
