"""Measures one way to use the machine against another on one set of workers: rounds of steps either way, in turns.

`overlap`: `filter_groups.max_staleness` 1 against 0. `lend`: engines that may wake on the actors' devices
(`trainer.colocate=lend`) against engines that sleep there. Noise of a shared machine hits both. In: a shape of
`dapo.bench.setting`. Out: groups trained per second, and the ratio. For `overlap` the engine runs 32 responses at once:
on two cores, recomputing keys and values is as expensive as decoding, and each weight update does it for all that run.
With 64 or 128 the gain is smaller (`README.md`).
"""

import argparse
import asyncio
import statistics
import tempfile
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import replace
from pathlib import Path

from dapo.bench.setting import run_config, trainer, workers
from dapo.config.schema import Config
from dapo.pools import Pools
from dapo.report.log import METRICS, read_metrics
from dapo.report.table import table
from dapo.types import Prompt

OVERLAP = ("algorithm.rollout_correction.mode=truncate", "rollout.vllm={max_num_seqs: 32}")
LEND = ("trainer.colocate=lend", "trainer.device=cpu", "rollout.vllm={max_num_seqs: 8}")
Way = Callable[[Config, Pools], tuple[Config, Pools]]
WARM_UP = 2  # steps before each measurement: at staleness 1 the buffer fills meanwhile
BEYOND = 2  # steps after it: the last ones of a run generate nothing ahead
SHOWN = (
    *("perf/update_s", "perf/sync_s", "perf/goodput", "batch/staleness_mean", "batch/stale_tokens"),
    *(f"perf/lending/{name}" for name in ("wakes", "awake_s", "wake_s", "sleep_s")),
)


def staleness(bound: int) -> Way:
    """Returns the way at this bound."""

    def way(cfg: Config, pools: Pools) -> tuple[Config, Pools]:
        cfg.filter_groups.max_staleness = bound
        return cfg, pools

    return way


def lending(cfg: Config, pools: Pools) -> tuple[Config, Pools]:
    """Returns what engines wake with on the actors' devices where that pays."""
    return cfg, pools


def not_lending(cfg: Config, pools: Pools) -> tuple[Config, Pools]:
    """Returns what they sleep with."""
    return cfg, replace(pools, lender=None, leave_gpus=None)


async def measure(cfg: Config, steps: int, rounds: int, ways: Mapping[str, Way]) -> dict[str, list[float]]:
    """Returns the groups per second of every round, by the way."""
    rates: dict[str, list[float]] = {name: [] for name in ways}
    async with workers(cfg) as (pools, prompts):
        for number in range(rounds):
            for name, way in ways.items():
                given, used = way(deepcopy(cfg), pools)
                directory = Path(cfg.trainer.output_dir) / f"{number} {name}"
                rates[name].append(await one_round(given, name, steps, used, prompts, directory))
    return rates


async def one_round(
    cfg: Config, name: str, steps: int, pools: Pools, prompts: Sequence[Prompt], directory: Path
) -> float:
    """Returns the groups trained per second, after the warm-up."""
    cfg.trainer.total_steps = WARM_UP + steps + BEYOND
    await pools.actors.restart()  # each run begins with untrained ranks
    async with trainer(cfg, pools, prompts, directory) as training:
        await training.run()
    records = read_metrics(directory / METRICS)[WARM_UP : WARM_UP + steps]
    rate = sum(record["buffer/trained"] for record in records) / sum(record["perf/step_s"] for record in records)
    means = {key: statistics.fmean(record.get(key, 0.0) for record in records) for key in SHOWN}
    shown = "  ".join(f"{key} {value:.3f}" for key, value in means.items() if key in records[-1])
    print(f"{name}: {rate:.2f} groups/s  {shown}", flush=True)
    return rate


def run(given: argparse.Namespace) -> None:
    """Measures staleness 1 against 0."""
    compare(given, OVERLAP, {f"staleness {bound}": staleness(bound) for bound in (0, 1)})


def run_lend(given: argparse.Namespace) -> None:
    """Measures engines that are lent the actors' devices against none."""
    compare(given, LEND, {"not lending": not_lending, "lending": lending})


def compare(given: argparse.Namespace, settings: Sequence[str], ways: Mapping[str, Way]) -> None:
    """Prints a line per round, and a table of the medians with the ratio of the second way to the first."""
    with tempfile.TemporaryDirectory() as folder:
        cfg = run_config(given.shape, Path(folder), [*settings, *given.overrides])
        rates = asyncio.run(measure(cfg, given.steps, given.rounds, ways))
    ratios = [second / first for first, second in zip(*rates.values(), strict=True)]
    print(f"\nmedians of {given.rounds} rounds of {given.steps} steps, shape {given.shape}")
    cells = [str(cfg.rollout.vllm["max_num_seqs"]), *(f"{statistics.median(each):.2f}" for each in rates.values())]
    rounds = " · ".join(f"{ratio:.2f}" for ratio in ratios)
    names = ("engine runs at once", *(f"groups/s, {name}" for name in ways), "ratio (each round)")
    print(table(names, [[*cells, f"{statistics.median(ratios):.2f} ({rounds})"]]))
