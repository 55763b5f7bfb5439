"""Benchmark of whole steps against two floors: `python -m dapo.bench [short|long|both] [steps] [key=value ...]`.

Each step is a real one (generation, rewards, update, weight sync). Right after it the same run measures, on the same
requests and the same tokens, the engines alone and a bare packed forward and backward on as many ranks; so noise of a
shared machine hits both and the ratio can be trusted. The learning rate is so small that requests repeat exactly.
"""

import asyncio
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncGenerator, Sequence
from pathlib import Path
from typing import Any

import ray

from dapo.config.compose import compose
from dapo.config.schema import Config
from dapo.pools import Pools
from dapo.report.log import MetricsLogger
from dapo.run import build_pools, load_data, make_paths_absolute, ray_cluster
from dapo.state.checkpoint import CheckpointStore
from dapo.tiny.random_model import make_random_model
from dapo.trainer import Trainer
from dapo.types import Int32Array, Response, Sampling, TrainBatch
from workers.actor import RankWork, split_batch
from workers.remote import wait
from workers.rollout import RolloutPool

ALLOWANCE_S = 0.2  # of a step beyond its floors, before the factor
FACTOR = 1.25
COLUMNS = ("step", "generation", "reward", "update", "sync", "driver", "engine alone", "bare update", "ratio")
COMMON = ("actor.optim.lr=1e-12", "eval.before_train=false", "logging.samples=0", "checkpoint.every=0", "rollout.n=8")
SHAPES = {
    "short": (),
    "long": (
        "data.max_response_length=2048",
        "actor.max_tokens_per_gpu=4096",
        "reward.overlong_buffer.enable=false",
        "reward.functions=[{path: dapo.tiny.even_length}]",
    ),
}


class RecordingRollouts:
    """The engines, with the requests of the current step noted down."""

    def __init__(self, pool: RolloutPool) -> None:
        self._pool = pool
        self.requests: dict[str, tuple[Int32Array, Sampling, Sequence[int]]] = {}

    def generate(
        self, key: str, prompt: Int32Array, sampling: Sampling, seeds: Sequence[int]
    ) -> AsyncGenerator[tuple[int, Response]]:
        self.requests[key] = (prompt, sampling, seeds)
        return self._pool.generate(key, prompt, sampling, seeds)

    async def abort(self, keys: list[str]) -> None:
        """The step did not need these: they do not belong to its floor."""
        for key in keys:
            del self.requests[key]
        await self._pool.abort(keys)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._pool, name)


class RecordingActors:
    """The actors, with the last batch kept."""

    def __init__(self, pool: Any) -> None:
        self._pool = pool
        self.batch = TrainBatch(version=0, minibatches=(), order=())

    async def update(self, batch: TrainBatch) -> dict[str, float]:
        self.batch = batch
        return await self._pool.update(batch)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._pool, name)


class BareRank:
    """The floor of the update: the model alone, without FSDP, optimizer, metrics or reduction."""

    def __init__(self, cfg: Config) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        from workers.training.attention import PACKED_ATTENTION
        from workers.training.policy import PackedPolicy

        torch.set_num_threads(cfg.actor.cpu_threads)
        model = AutoModelForCausalLM.from_pretrained(
            cfg.model.path, dtype=torch.float32, attn_implementation=PACKED_ATTENTION
        )
        self._policy = PackedPolicy(model, cfg.rollout.temperature).train()

    def run(self, work: RankWork) -> float:
        """Seconds for forward and backward over the rank's share."""
        import torch

        from workers.training.policy import collate

        began = time.monotonic()
        for micro_batches in work.minibatches:
            for sequences in micro_batches:
                batch = collate(sequences, torch.device("cpu"))
                logprobs, _ = self._policy(
                    batch.token_ids, batch.position_ids, batch.segments, batch.predictors, batch.labels
                )
                (-batch.weights * batch.advantages * logprobs).sum().backward()
        self._policy.zero_grad()
        return time.monotonic() - began


async def bare_update(ranks: Sequence[Any], batch: TrainBatch, cfg: Config) -> float:
    """Seconds of the slowest rank."""
    works = split_batch(batch, len(ranks), cfg.actor.max_tokens_per_gpu)
    refs = [rank.run.remote(work) for rank, work in zip(ranks, works, strict=True)]
    return max(await wait(refs, cfg.actor.timeout_s, "the bare update", "actor.timeout_s"))


async def measure(shape: str, cfg: Config, steps: int) -> list[dict[str, float]]:
    """One row of seconds and sizes per step; the first two steps warm up and are left out."""
    make_paths_absolute(cfg)
    prompts, _ = load_data(cfg)
    output_dir = Path(cfg.trainer.output_dir)
    logger = MetricsLogger(output_dir, tensorboard=False)
    store = CheckpointStore(output_dir / "checkpoints", keep=1)
    rows: list[dict[str, float]] = []
    with ray_cluster(cfg):
        remote: Any = ray.remote(num_cpus=0)(BareRank)
        ranks = [remote.remote(cfg) for _ in range(cfg.actor.num_workers)]
        async with build_pools(cfg) as pools:
            assert isinstance(pools.rollouts, RolloutPool)
            rollouts, actors = RecordingRollouts(pools.rollouts), RecordingActors(pools.actors)
            recorded = Pools(rollouts=rollouts, rewards=pools.rewards, actors=actors, sync_weights=pools.sync_weights)
            trainer = Trainer(cfg, recorded, prompts, [], store, logger, say=lambda line: None)
            await pools.sync_weights(0)
            for step in range(steps + 2):
                rollouts.requests.clear()
                metrics = await trainer.step()
                alone = await pools.rollouts.generate_alone(list(rollouts.requests.values()))
                bare = await bare_update(ranks, actors.batch, cfg)
                if step >= 2:
                    rows.append(row_of(metrics, alone, bare))
                    seconds = "  ".join(f"{name} {rows[-1][name]:.2f}" for name in COLUMNS)
                    print(f"{shape} step {step - 1}: {seconds}", flush=True)
    logger.close()
    return rows


def row_of(metrics: dict[str, float], alone: float, bare: float) -> dict[str, float]:
    """What the table shows of one step."""
    row = {name: metrics.get(f"perf/{name}_s", 0.0) for name in COLUMNS[:6]}
    row |= {"engine alone": alone, "bare update": bare, "ratio": row["step"] / (alone + bare + ALLOWANCE_S)}
    row |= {name: metrics[f"perf/{name}"] for name in ("generation_tokens_per_s", "update_tokens_per_s", "goodput")}
    return row | {name: metrics[f"rollout/response_length_{name}"] for name in ("mean", "max")}


def report(shape: str, rows: Sequence[dict[str, float]]) -> str:
    """A Markdown table of medians."""
    median = {name: statistics.median(row[name] for row in rows) for name in rows[0]}
    lines = [
        f"{shape}: {len(rows)} steps, mean length {median['mean']:.0f}, longest {median['max']:.0f} (medians)",
        "| " + " | ".join(f"{name} s" if name != "ratio" else name for name in COLUMNS) + " |",
        "|" + "---|" * len(COLUMNS),
        "| " + " | ".join(f"{median[name]:.2f}" for name in COLUMNS) + " |",
        f"generation {median['generation_tokens_per_s']:.0f} tokens/s · update {median['update_tokens_per_s']:.0f} "
        f"response tokens/s · goodput {median['goodput']:.2f} · driver {median['driver'] / median['step']:.1%} · "
        f"ratio = step / (engine alone + bare update + {ALLOWANCE_S} s), wanted: at most {FACTOR}",
    ]
    return "\n".join(lines)


def bench_config(shape: str, folder: Path, overrides: Sequence[str]) -> Config:
    """dapo_tiny with 8 responses per prompt; the long shape with random weights that end at random."""
    arguments = [*COMMON, *SHAPES[shape], f"trainer.output_dir={folder / shape}", *overrides]
    if shape == "long":
        make_random_model(folder / "random")
        arguments.append(f"model.path={folder / 'random'}")
    (folder / shape).mkdir()
    return compose(arguments, experiment="dapo_tiny")


def main() -> None:
    """Parses the command line and prints a table per shape."""
    arguments = sys.argv[1:]
    overrides = [argument for argument in arguments if "=" in argument]
    words = [argument for argument in arguments if "=" not in argument]
    shapes = [word for word in words if word in SHAPES] or list(SHAPES)
    steps = next((int(word) for word in words if word.isdigit()), 10)
    with tempfile.TemporaryDirectory() as folder:
        tables = []
        for shape in shapes:
            rows = asyncio.run(measure(shape, bench_config(shape, Path(folder), overrides), steps))
            tables.append(report(shape, rows))
    print("\n\n".join(["", *tables]))


if __name__ == "__main__":
    main()
