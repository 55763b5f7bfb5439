"""Measures whole steps against two baselines, on the same requests and tokens, right after each step. The baselines are
the engines alone, and a bare packed forward and backward on as many ranks. Noise of a shared machine affects all three,
so the ratio is reliable. Output: a table of medians."""

import argparse
import asyncio
import statistics
import tempfile
import time
from collections.abc import AsyncGenerator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import ray
import torch
from transformers import AutoModelForCausalLM

from dapo.config.derived import shares_prompts
from dapo.config.schema import Config
from dapo.ground.table import table
from dapo.pools import ActorPool, RolloutPool, Updated
from dapo.tools.bench.setting import Recording, run_config, trainer, workers
from dapo.tools.bench.shapes import LENGTHS
from dapo.types import Request, Response, TrainBatch
from dapo.workers.actor import RankWork, split_batch
from dapo.workers.engines.requests import Unfinished
from dapo.workers.remote import wait
from dapo.workers.rollout import RolloutPool as Engines
from dapo.workers.training.forward.attention import implementation
from dapo.workers.training.forward.policy import PackedPolicy, collate

ALLOWANCE_S = 0.2  # of a step beyond its floors, before the factor
FACTOR = 1.25
WARM_UP = 2  # steps before the measured ones
SECONDS = ("step", "generation", "reward", "update", "sync", "driver")
FLOORS = ("engine alone", "bare update", "ratio")
SPEEDS = {"generation_tokens_per_s": "generation tokens/s", "update_tokens_per_s": "update response tokens/s"}


class RecordingRollouts(Recording):
    """Records the requests of the current step."""

    def __init__(self, pool: RolloutPool) -> None:
        super().__init__(pool)
        self.requests: dict[str, Request] = {}

    def generate(self, request: Request) -> AsyncGenerator[tuple[int, Response]]:
        self.requests[request.key] = request
        return self._pool.generate(request)

    async def abort(self, keys: list[str]) -> None:
        """Drops aborted requests from the record, because the step did not need them."""
        for key in keys:
            self.requests.pop(key, None)
        await self._pool.abort(keys)


class RecordingActors(Recording):
    def __init__(self, pool: ActorPool) -> None:
        super().__init__(pool)
        self.batch = TrainBatch(version=0, minibatches=(), order=())

    async def update(self, batch: TrainBatch) -> Updated:
        self.batch = batch
        return await self._pool.update(batch)


class BareRank:
    """Forward and backward through the trainer's own log-probabilities."""

    def __init__(self, cfg: Config) -> None:
        self._shared = shares_prompts(cfg)
        torch.set_num_threads(cfg.actor.cpu_threads)
        kind = implementation(cfg.model.attn_implementation)
        model = AutoModelForCausalLM.from_pretrained(cfg.model.path, dtype=torch.float32, attn_implementation=kind)
        self._policy = PackedPolicy(model, cfg.rollout.temperature).train()

    def run(self, work: RankWork) -> float:
        began = time.perf_counter()
        for k in work.order:
            for sequences in work.minibatches[k]:
                batch = collate(sequences, torch.device("cpu"), share_prompts=self._shared)
                logprobs, *_ = self._policy(batch)
                (-batch.weights * batch.advantages * logprobs).sum().backward()
        self._policy.zero_grad()
        return time.perf_counter() - began


def engine_alone(worker: Any, requests: Sequence[Request]) -> float:
    """Runs on an engine's actor, in a thread next to its event loop: returns the seconds to generate all these
    groups."""

    async def generate() -> float:
        began = time.monotonic()
        responses = [
            worker._generate_one(f"alone-{i}-{k}", each.prompt.tolist(), each.sampling, Unfinished(seed=seed).start())
            for i, each in enumerate(requests)
            for k, seed in enumerate(each.seeds)
        ]
        await asyncio.gather(*responses)
        return time.monotonic() - began

    return asyncio.run_coroutine_threadsafe(generate(), worker._engine.output_handler.get_loop()).result()


async def engines_alone(engines: Engines, requests: Sequence[Request], timeout_s: float) -> float:
    shares = [requests[i :: len(engines.workers)] for i in range(len(engines.workers))]
    refs = [w.__ray_call__.remote(engine_alone, share) for w, share in zip(engines.workers, shares, strict=True)]
    return max(await wait(refs, timeout_s, "the engines alone", "rollout.timeout_s"))


async def bare_update(ranks: Sequence[Any], batch: TrainBatch, cfg: Config) -> float:
    works = split_batch(batch, len(ranks), cfg.actor.max_tokens_per_gpu)
    refs = [rank.run.remote(work) for rank, work in zip(ranks, works, strict=True)]
    return max(await wait(refs, cfg.actor.timeout_s, "the bare update", "actor.timeout_s"))


async def measure(shape: str, cfg: Config, steps: int, *, floors: bool) -> list[dict[str, float]]:
    rows: list[dict[str, float]] = []
    async with workers(cfg) as (pools, prompts):
        assert isinstance(pools.rollouts, Engines)
        remote: Any = ray.remote(num_cpus=0)(BareRank)
        ranks = [remote.remote(cfg) for _ in range(cfg.actor.num_workers * floors)]
        rollouts, actors = RecordingRollouts(pools.rollouts), RecordingActors(pools.actors)
        recorded = replace(pools, rollouts=cast(RolloutPool, rollouts), actors=cast(ActorPool, actors))
        async with trainer(cfg, recorded, prompts, Path(cfg.trainer.output_dir) / "run") as training:
            await pools.sync_weights(0)
            for step in range(1 - WARM_UP, steps + 1):
                rollouts.requests.clear()
                metrics = await training.step()
                row = {name: metrics.get(f"perf/{name}_s", 0.0) for name in SECONDS}
                if floors:
                    requests = list(rollouts.requests.values())
                    alone = await engines_alone(pools.rollouts, requests, cfg.rollout.timeout_s)
                    bare = await bare_update(ranks, actors.batch, cfg)
                    ratio = row["step"] / (alone + bare + ALLOWANCE_S)
                    row |= dict(zip(FLOORS, (alone, bare, ratio), strict=True))
                if step > 0:
                    print(f"{shape} step {step}: " + "  ".join(f"{name} {row[name]:.2f}" for name in row), flush=True)
                    row |= {name: metrics[f"perf/{name}"] for name in (*SPEEDS, "goodput")}
                    row |= {name: metrics[f"rollout/response_length_{name}"] for name in ("mean", "max")}
                    rows.append(row)
    return rows


def report(shape: str, rows: Sequence[dict[str, float]]) -> list[str]:
    median = {name: statistics.median(row[name] for row in rows) for name in rows[0]}
    return [
        f"{shape} (mean {median['mean']:.0f} tokens, longest {median['max']:.0f})",
        *(f"{median[name]:.2f}" for name in (*SECONDS, *FLOORS, "goodput") if name in median),
        *(f"{median[name]:.0f}" for name in SPEEDS),
        f"{median['driver'] / median['step']:.1%}",
    ]


def run(given: argparse.Namespace) -> None:
    shapes = ["long"] if given.model else LENGTHS if given.shape == "both" else [given.shape]
    rows, floors = [], () if given.model else FLOORS
    with tempfile.TemporaryDirectory() as folder:
        for shape in shapes:
            cfg = run_config(shape, Path(folder), given.overrides, given.model)
            found = asyncio.run(measure(shape, cfg, given.steps, floors=not given.model))
            rows.append(report(shape, found))
    seconds = [f"{name} s" for name in (*SECONDS, *floors[:2])]
    names = ["shape", *seconds, *floors[2:], "goodput", *SPEEDS.values(), "driver / step"]
    print(f"\nmedians of {given.steps} steps")
    print(table(names, rows))
    if floors:
        print(f"ratio = step / (engine alone + bare update + {ALLOWANCE_S} s), wanted: at most {FACTOR}")
