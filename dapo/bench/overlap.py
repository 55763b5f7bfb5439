"""Benchmark of staleness 1 against 0: `python -m dapo.bench.overlap [short|long] [steps] [rounds] [key=value ...]`.

In a shape of `dapo.bench` (by default the long-tailed one), on one set of workers: some steps at
`filter_groups.max_staleness` 0, as many at 1, and so on in turns, so that noise of a shared machine hits both. Prints
groups trained per second, and the ratio.

The engine runs 32 responses at once: on two cores, recomputing keys and values is as dear as decoding, and each weight
update does it for all that run. With 64 or 128 the gain is smaller (README).
"""

import asyncio
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from copy import deepcopy
from pathlib import Path

from dapo.bench.__main__ import SHAPES, bench_config
from dapo.config.schema import Config
from dapo.pools import Pools
from dapo.report.log import MetricsLogger
from dapo.run import build_pools, load_data, make_paths_absolute, ray_cluster
from dapo.state.checkpoint import CheckpointStore
from dapo.trainer import Trainer
from dapo.types import Prompt

WARM_UP = 2  # steps before each measurement: at staleness 1 the buffer fills meanwhile
SHOWN = ("perf/update_s", "perf/sync_s", "perf/goodput", "batch/staleness_mean", "batch/stale_tokens")


async def measure(cfg: Config, steps: int, rounds: int) -> dict[int, list[float]]:
    """Groups per second of every round, by staleness."""
    make_paths_absolute(cfg)
    prompts, _ = load_data(cfg)
    rates: dict[int, list[float]] = {0: [], 1: []}
    with ray_cluster(cfg):
        async with build_pools(cfg) as pools:
            for number in range(rounds):
                for staleness in (0, 1):
                    rate = await one_round(cfg, staleness, steps, pools, prompts, f"{number}-{staleness}")
                    rates[staleness].append(rate)
    return rates


async def one_round(
    cfg: Config, staleness: int, steps: int, pools: Pools, prompts: Sequence[Prompt], name: str
) -> float:
    """Groups trained per second, after the warm-up."""
    cfg = deepcopy(cfg)
    cfg.filter_groups.max_staleness = staleness
    cfg.trainer.total_steps = steps + WARM_UP + 2  # more than measured: the last steps generate nothing ahead
    directory = Path(cfg.trainer.output_dir) / name
    directory.mkdir()
    logger = MetricsLogger(directory, tensorboard=False)
    store = CheckpointStore(directory / "checkpoints", keep=1)
    trainer = Trainer(cfg, pools, prompts, [], store, logger, say=lambda line: None)
    groups, began, records = 0.0, 0.0, []
    async with AsyncExitStack() as stack:
        stack.push_async_callback(trainer.stream.close)
        await pools.sync_weights(0)
        for step in range(steps + WARM_UP):
            if step == WARM_UP:
                groups, began = 0.0, time.monotonic()
            records.append(await trainer.step())
            groups += records[-1]["buffer/trained"]
        rate = groups / (time.monotonic() - began)
    logger.close()
    means = {key: statistics.mean(record.get(key, 0.0) for record in records[WARM_UP:]) for key in SHOWN}
    print(
        f"staleness {staleness}: {rate:.2f} groups/s  " + "  ".join(f"{k} {v:.3f}" for k, v in means.items()),
        flush=True,
    )
    return rate


def main() -> None:
    """Parses the command line and prints the medians and their ratio."""
    arguments = sys.argv[1:]
    overrides = [argument for argument in arguments if "=" in argument]
    numbers = [int(argument) for argument in arguments if argument.isdigit()]
    steps, rounds = [*numbers, *(10, 3)[len(numbers) :]][:2]
    shape = next((argument for argument in arguments if argument in SHAPES), "long")
    settings = ["algorithm.rollout_correction.mode=truncate", "rollout.vllm={max_num_seqs: 32}"]
    with tempfile.TemporaryDirectory() as folder:
        cfg = bench_config(shape, Path(folder), [*settings, *overrides])
        rates = asyncio.run(measure(cfg, steps, rounds))
    strict, loose = (statistics.median(rates[staleness]) for staleness in (0, 1))
    ratios = [b / a for a, b in zip(rates[0], rates[1], strict=True)]
    print(
        f"groups/s, medians of {rounds} rounds of {steps} steps: staleness 0 {strict:.2f}, staleness 1 {loose:.2f}, "
        f"ratio {statistics.median(ratios):.2f} (rounds: {', '.join(f'{ratio:.2f}' for ratio in ratios)})"
    )


if __name__ == "__main__":
    main()
