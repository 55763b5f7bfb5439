"""Measures whole weight syncs, from pausing the engines to resuming them: seconds, and bytes of the model per second.
Uses real actor ranks and engines with random weights and a tiny vocabulary. The transports alternate in one run, so
that noise of a shared machine affects all of them. The first sync of each turn sets up the connections and is not
counted."""

import argparse
import asyncio
import itertools
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from dapo.config.checks import validate
from dapo.config.facts.model_shape import read_shape
from dapo.config.schema import Config
from dapo.ground.table import table
from dapo.tiny.random_model import make_random_model
from dapo.tools.bench.setting import cluster, engines_and_actors
from dapo.tools.bench.shapes import SYNC_SHAPES
from dapo.workers.weight_sync import WeightSync

LENGTH = 64  # tokens of prompt and response; nothing is generated


def to_config(options: argparse.Namespace, path: str) -> Config:
    """Returns the configuration of the pools. Raises ValueError for options that do not go together."""
    cfg = Config()
    cfg.model.path = path
    cfg.model.dtype = "bfloat16" if options.device == "cuda" else "float32"
    cfg.data.max_prompt_length = cfg.data.max_response_length = LENGTH
    cfg.reward.overlong_buffer.enable = False
    cfg.rollout.num_engines = options.engines
    cfg.rollout.vllm = {"max_num_seqs": 8}
    if options.colocate:
        cfg.rollout.vllm["gpu_memory_utilization"] = 0.3
    cfg.actor.num_workers = options.ranks
    cfg.actor.max_tokens_per_gpu = 2 * LENGTH
    cfg.weight_sync.bucket_bytes = options.bucket_mib << 20
    cfg.trainer.device, cfg.trainer.colocate = options.device, "time" if options.colocate else "none"
    validate(cfg)
    return cfg


async def measure(cfg: Config, transports: Sequence[str], turns: int, syncs: int) -> dict[str, list[float]]:
    seconds: dict[str, list[float]] = {transport: [] for transport in transports}
    versions = itertools.count(1)
    with cluster(cfg):
        async with engines_and_actors(cfg) as (engines, actors):
            for transport in [*transports] * turns:
                cfg.weight_sync.transport = transport
                sync = WeightSync(actors, engines, cfg)
                await sync(next(versions))
                for _ in range(syncs):
                    began = time.monotonic()
                    await sync(next(versions))
                    seconds[transport].append(time.monotonic() - began)
    return seconds


def run(given: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = str(make_random_model(Path(folder) / "model", **SYNC_SHAPES[given.shape]))
        cfg = to_config(given, path)
        elements = read_shape(path).parameters
        seconds = asyncio.run(measure(cfg, given.transports, given.turns, given.syncs))
    size = elements * (2 if cfg.model.dtype == "bfloat16" else 4)
    print(f"{elements / 1e6:.0f}M parameters, {size / 1e6:.0f} MB in {cfg.model.dtype}, {given.bucket_mib} MiB buckets")
    medians = {transport: statistics.median(each) for transport, each in seconds.items()}
    rows = [
        [transport, f"{median:.3f}", f"{min(seconds[transport]):.3f}", f"{size / median / 1e9:.2f}"]
        for transport, median in medians.items()
    ]
    print(table(("transport", "median s", "fastest s", "GB/s"), rows))
