"""Measures time-shared engines and actors on the same GPUs (`trainer.colocate=time`): one row per model.

A cycle is a training step without generation: the engines sleep, the actors train on random tokens (optional), the
engines wake their weights, the weight sync runs, the KV cache wakes. Then engine and actors compute the
log-probabilities of the same few tokens. The weights are random. Output: median seconds of each phase, free GPU memory
while engines are awake and asleep, and its range over the cycles.
"""

import argparse
import statistics
import time
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from dapo.config.facts.model_shape import read_shape
from dapo.config.schema import Config
from dapo.tools.bench.setting import (
    LEARNT_NOTHING,
    TIMEOUT_S,
    VOCABULARY,
    Recording,
    cluster,
    engines_and_actors,
    of_models,
    one_device_config,
    random_batch,
)
from dapo.workers.actor import ActorPool
from dapo.workers.remote import wait
from dapo.workers.rollout import RolloutPool
from dapo.workers.weight_sync import WeightSync

GIB = 1 << 30
PHASES = ("sleep", "update", "wake weights", "transfer", "wake KV")
NAMES = (
    *("model", *(f"{name} s" for name in (*PHASES, "cycle"))),
    *("free awake GiB", "free asleep GiB", "its range", "largest difference"),
)
WARM_UP = 1  # cycles: the first one connects both ends


class TimedEngines(Recording):
    def __init__(self, pool: Any) -> None:
        super().__init__(pool)
        self.seconds: dict[str, float] = {}

    async def start_update(self, *given: Any) -> None:
        await self._timed("wake weights", self._pool.start_update(*given))

    async def finish_update(self, *given: Any) -> None:
        await self._timed("wake KV", self._pool.finish_update(*given))

    async def _timed(self, phase: str, work: Any) -> None:
        began = time.monotonic()
        await work
        self.seconds[phase] = time.monotonic() - began


def to_config(given: argparse.Namespace, path: str) -> Config:
    """Returns the configuration of one time-shared rank and engine. Raises ValueError for overrides that do not fit."""
    share = "rollout.vllm={max_num_seqs: 64, gpu_memory_utilization: 0.5}"
    return one_device_config(given, path, *arguments(given), share)


def arguments(given: argparse.Namespace) -> list[str]:
    return [
        *("model.gradient_checkpointing=full", "actor.reshard_after_forward=true", *LEARNT_NOTHING),
        f"weight_sync.bucket_bytes={given.bucket_mib << 20}",
        f"actor.max_tokens_per_gpu={max(given.tokens, 4096)}",
    ]


def free_bytes(worker: Any) -> int:
    """Runs on a rank: returns the free bytes of its GPU; 0 on a CPU."""
    return int(torch.cuda.mem_get_info()[0]) if torch.cuda.is_initialized() else 0


async def measure(
    cfg: Config, engines: RolloutPool, actors: ActorPool, given: argparse.Namespace
) -> dict[str, list[float]]:
    """Returns the values of all measured cycles by name."""
    cycle = Cycle(cfg, engines, actors, given.tokens)
    rows = []
    for number in range(1 - WARM_UP, given.cycles + 1):
        row = await cycle.run()
        if number > 0:
            rows.append(row)
            seconds = "  ".join(f"{name} {row[name]:.2f} s" for name in (*PHASES, "cycle"))
            print(f"cycle {number}: {seconds}", flush=True)
    return {name: [row[name] for row in rows] for name in rows[0]}


class Cycle:
    """Runs cycles. tokens: trained on in each cycle; 0: no update."""

    def __init__(self, cfg: Config, pool: RolloutPool, actors: ActorPool, tokens: int) -> None:
        self._cfg, self._pool, self._actors, self._tokens = cfg, pool, actors, tokens
        self._engines: Any = TimedEngines(pool)
        self._sync = WeightSync(actors, self._engines, cfg)
        self._version = 0
        vocabulary, prompt = min(VOCABULARY, read_shape(cfg.model.path).vocab_size), max(1, tokens // 8)
        lengths = [(prompt, max(1, tokens - prompt))]
        self._batch = random_batch(lengths, vocabulary, np.random.default_rng(0))

    async def run(self) -> dict[str, float]:
        began = time.monotonic()
        await self._pool.sleep()
        asleep = time.monotonic()
        free_asleep = await self._free()
        updating = time.monotonic()
        if self._tokens:
            await self._actors.update(replace(self._batch, version=self._version))
        self._version += 1
        updated = time.monotonic()
        await self._sync(self._version)
        ended = time.monotonic()
        row = {"sleep": asleep - began, "update": updated - updating, "cycle": ended - began - (updating - asleep)}
        row |= self._engines.seconds
        row["transfer"] = ended - updated - row["wake weights"] - row["wake KV"]
        return row | {"free asleep": free_asleep, "free awake": await self._free(), "difference": await self._parity()}

    async def _free(self) -> float:
        [rank] = self._actors._ranks.workers
        return float((await wait([rank.__ray_call__.remote(free_bytes)], TIMEOUT_S, "actor rank 0", "its memory"))[0])

    async def _parity(self) -> float:
        """Returns the largest mean log-probability difference over all engines, as `workers.weight_sync` checks it."""
        slots = self._pool.keeper.slots
        for slot in slots:
            slot.proven = False
        canaries = await self._pool.canaries([slot.number for slot in slots])
        actors = await self._actors.policy_logprobs(canaries)
        pairs = zip(actors, canaries, strict=True)
        return max(float(np.abs(a - canary.rollout_logprobs).mean()) for a, canary in pairs)


def cells(found: dict[str, list[float]]) -> list[str]:
    """Returns the table's cells of one model, but for its name."""
    median = {name: statistics.median(values) for name, values in found.items()}
    asleep = found["free asleep"]
    return [
        *(f"{median[name]:.2f}" for name in (*PHASES, "cycle")),
        *(f"{median[name] / GIB:.2f}" for name in ("free awake", "free asleep")),
        f"{(max(asleep) - min(asleep)) / max(*asleep, 1):.2%}",
        f"{max(found['difference']):.1e}",
    ]


def run(given: argparse.Namespace) -> None:
    title = f"\nmedians of {given.cycles} cycles; updates of {given.tokens} tokens"
    of_models(given, to_config, lambda cfg, model: rows_of(cfg, model, given), NAMES, title)


async def rows_of(cfg: Config, model: str, given: argparse.Namespace) -> list[list[str]]:
    print(model, flush=True)
    with cluster(cfg):
        async with engines_and_actors(cfg) as (engines, actors):
            return [[model, *cells(await measure(cfg, engines, actors, given))]]
