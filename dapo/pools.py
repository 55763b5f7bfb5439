"""Interfaces of the workers: three protocols, one callable, and the failures of actors.
`workers.{rollout,reward,actor}` implement them over Ray; tests also have in-process fakes."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import psutil

from dapo.ground.usage import RankUse, resident_bytes
from dapo.types import Float32Array, Int32Array, Prompt, Request, Response, Sampling, Score, TrainBatch, TrainSequence


class RolloutPool(Protocol):
    @property
    def capacity(self) -> int:
        """Number of responses that all engines run at once: sequences, or what fits the KV cache."""

    def room(self, n: int) -> int:
        """Returns how many groups of n may start now without a long wait; background responses take no room."""

    @property
    def spare(self) -> int:
        """Number of responses that may start in the background, in free slots."""

    @property
    def serving(self) -> bool:
        """Whether an engine serves now; otherwise a group would wait for one to restart."""

    def generate(self, request: Request) -> AsyncGenerator[tuple[int, Response]]:
        """Yields (number, response) as the responses end; response number k has `request.seeds[k]`."""

    def tokens_per_s(self) -> float:
        """Returns the recent generation speed of the engines, as last reported."""

    def lap(self) -> dict[str, float]:
        """Returns metrics of the engines since the last call, and the number of replaced ones so far."""

    async def abort(self, keys: list[str]) -> None:
        """Aborts the named groups; their unfinished responses are yielded as they are, marked as aborted."""


class RewardPool(Protocol):
    async def score(self, prompt: Prompt, sample: int, response: Response) -> Score: ...

    def lap(self) -> dict[str, float]:
        """Returns metrics of the workers since the last call, and the number of replaced processes so far."""

    async def check(self) -> None:
        """Raises RuntimeError when known answers get wrong scores: then no verdict can be trusted."""


class Lender(Protocol):
    """Wakes engines on the actors' GPUs while a batch is collected; `dapo.sampling.lender` implements it."""

    def consider(self, missing: int, on_awake: Callable[[], None]) -> None: ...

    async def close(self) -> None: ...

    def lap(self) -> dict[str, float]:
        """Returns metrics since the last call."""


class ActorsLost(RuntimeError):
    """Ranks died, hang, or have different states: only `ActorPool.restart` helps."""


class BatchRefused(RuntimeError):
    """All ranks refused a batch, with nothing changed: they would refuse it again. reason: "parity", the engines'
    log-probabilities differ too much from the actors'; "nonfinite", too many optimizer steps in a row were skipped, and
    no step of this update was taken."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


@dataclass(frozen=True, kw_only=True, slots=True)
class Updated:
    """Result of an update. Made by `workers.training.update`, consumed by the trainer.

    metrics: over all ranks and optimizer steps. skipped: mini-batches with a skipped step, because a loss, gradient or
    log-probability was not finite (`dapo.algorithm.batch.deal` gives their groups). stop: why the run must stop, if too
    many were skipped in a row; else empty. The update counts in any case: its weights are a new version. use: resources
    of the rank that returned this.
    """

    metrics: dict[str, float]
    skipped: tuple[int, ...] = ()
    stop: str = ""
    use: RankUse | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Kept:
    """The actors' state of policy `version` in the memory of their nodes, which is free again once nothing holds this
    object. sources: for each rank, where it can take its part from, the nearest first; known to the pool alone."""

    version: int
    sources: Sequence[Any] = ()


class ActorPool(Protocol):
    """All FSDP ranks as one. Every method raises ActorsLost, and then so does every later one until `restart`; or
    another RuntimeError that all ranks raised alike with nothing changed."""

    async def update(self, batch: TrainBatch) -> Updated:
        """Trains on a batch, from policy version `batch.version` to the next one. Raises BatchRefused."""

    async def reference_logprobs(self, sequences: Sequence[TrainSequence]) -> list[Float32Array]: ...

    async def save(self, directory: str, version: int) -> None:
        """Writes the state of policy `version`, which the ranks must be at."""

    async def load(self, directory: str, version: int) -> None:
        """Reads what `save` wrote; the ranks are at policy `version` afterwards."""

    async def export_hf(self, directory: str) -> None: ...

    async def stage(self, version: int, *, export: bool) -> None:
        """Copies the state of policy `version`, which the ranks must be at, for one `write_staged`; `export`: also the
        model."""

    async def write_staged(self, directory: str, export: str) -> None:
        """Writes the staged copy like `save`, and the model to `export` like `export_hf`; updates may run meanwhile."""

    async def keep(self, version: int) -> Kept:
        """Copies the state of policy `version`, which the ranks must be at, into the memory of their nodes."""

    async def restore(self, kept: Kept) -> str:
        """Takes the state from there, also after `restart`; returns from where. Raises RuntimeError if a rank finds no
        copy that is whole: then only `load` helps."""

    async def check_shared(self, path: str, content: str) -> None:
        """Raises RuntimeError unless all ranks read `content` in the file at `path`."""

    def restarts(self) -> dict[str, float]:
        """Returns how many times all ranks were replaced so far, as a metric."""

    async def until_lost(self) -> str:
        """Waits until the ranks are lost, even when they are idle, and returns why."""

    async def restart(self) -> None:
        """Stops all ranks and starts new ones, at policy version 0."""


Compare = Callable[[Sequence[Int32Array], Sampling, int, float], Awaitable[dict[str, float]]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Pools:
    """The workers of a run, composed in `dapo.driver.fleet.build_pools`.

    sync_weights(version): makes the engines serve `version`. weights: held while actors and engines have different
    weights, from before an update to the end of the sync; a restarted engine loads its weights outside of that.
    compare(prompts, sampling, seed, stale): the metrics `mismatch/` (`dapo.algorithm.mismatch`), with `weights` held.
    leave_gpus: puts the engines on the actors' GPUs to sleep; None if there are none or they do not take turns.
    scale(directory): lets engines join and leave, until it is cancelled. told: set when a node with ranks was told to
    go. gpus: of all workers.
    """

    rollouts: RolloutPool
    rewards: RewardPool
    actors: ActorPool
    sync_weights: Callable[[int], Awaitable[None]]
    weights: asyncio.Lock = field(default_factory=asyncio.Lock)
    compare: Compare | None = None
    leave_gpus: Callable[[], Awaitable[None]] | None = None
    lender: Lender | None = None
    told: asyncio.Event = field(default_factory=asyncio.Event)
    scale: Callable[[Path], Awaitable[None]] | None = None
    gpus: int = 0

    def lap(self) -> dict[str, float]:
        """Returns metrics of the pools since the last call, of this process's memory, and replacements so far."""
        own = {"perf/driver_resident_bytes": float(resident_bytes([psutil.Process()]))}
        lent = {} if self.lender is None else self.lender.lap()
        return own | lent | self.rollouts.lap() | self.rewards.lap() | self.actors.restarts()
