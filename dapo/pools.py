"""Declares what the algorithm needs of the compute: three protocols, one callable, and how the actors fail.

`workers.{rollout,reward,actor}` fulfil them over Ray; tests also bring in-process stand-ins.
"""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import psutil

from dapo.measure.usage import RankUse, resident_bytes
from dapo.sampling.lender import Lender
from dapo.types import Float32Array, Int32Array, Prompt, Response, Sampling, Score, TrainBatch, TrainSequence


class RolloutPool(Protocol):
    """Stands for the engines."""

    @property
    def capacity(self) -> int:
        """Counts the responses that all engines together run at once: sequences, or what the KV cache holds."""

    def room(self, n: int) -> int:
        """Counts the groups of n responses that may start now without waiting long for an engine; what runs in the
        background takes no room."""

    @property
    def spare(self) -> int:
        """Counts the responses that may start in the background: in slots that nothing takes now."""

    @property
    def serving(self) -> bool:
        """Returns whether an engine serves now, or a group would have to wait for one that starts again."""

    def generate(
        self,
        key: str,
        prompt: Int32Array,
        sampling: Sampling,
        seeds: Sequence[int],
        *,
        background: bool = False,
        problem: Prompt | None = None,
    ) -> AsyncGenerator[tuple[int, Response]]:
        """Yields the responses to one prompt as they end, each with its number; response number k has `seeds[k]`.
        problem: that the prompt is of, for the rollout function where there is one."""

    def tokens_per_s(self) -> float:
        """Returns how many tokens the engines generated a second lately, as far as they have told."""

    def lap(self) -> dict[str, float]:
        """Returns what the engines did since the last lap, and how many were replaced so far, as metrics."""

    async def abort(self, keys: list[str]) -> None:
        """Ends the named groups; their unfinished responses come as far as they are, marked as aborted."""


class RewardPool(Protocol):
    """Stands for the reward workers."""

    async def score(self, prompt: Prompt, sample: int, response: Response) -> Score:
        """Scores response number `sample` to the prompt."""

    def lap(self) -> dict[str, float]:
        """Returns what the workers did since the last lap, and how many processes were replaced so far, as metrics."""

    async def check(self) -> None:
        """Raises RuntimeError when known answers are not scored as they must be: no verdict can be trusted then."""


class ActorsLost(RuntimeError):
    """Says that ranks died, keep silent, or no longer stand at the same point: only `ActorPool.restart` helps."""


class BatchRefused(RuntimeError):
    """Says that all ranks refused a batch with nothing changed: they would refuse it again.

    reason: "parity", the engines sampled it from other probabilities than the actors compute; "nonfinite", too many
    optimizer steps in a row were skipped, and no step of this update was taken.
    """

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


@dataclass(frozen=True, kw_only=True, slots=True)
class Updated:
    """Says what became of an update. Made by `workers.training.update`, consumed by the trainer.

    metrics: over all ranks and optimizer steps. skipped: the mini-batches of which a step was skipped, because a loss,
    gradient or log-probability was not finite (`dapo.batch.deal` tells their groups). stop: why the run must stop,
    too many were skipped in a row; else empty. The update counts as one in any case, its weights are of a new version.
    use: of the machine, by the rank whose answer this is.
    """

    metrics: dict[str, float]
    skipped: tuple[int, ...] = ()
    stop: str = ""
    use: RankUse | None = None


class ActorPool(Protocol):
    """Stands for all FSDP ranks as one.

    Every method raises ActorsLost, and then so does every later one until `restart`; or another RuntimeError that all
    ranks raised alike with nothing changed.
    """

    async def update(self, batch: TrainBatch) -> Updated:
        """Trains on a batch, from policy version `batch.version` to the next one. Raises BatchRefused."""

    async def reference_logprobs(self, sequences: Sequence[TrainSequence]) -> list[Float32Array]: ...

    async def save(self, directory: str, version: int) -> None:
        """Writes the state of policy `version`, which the ranks must be at."""

    async def load(self, directory: str, version: int) -> None:
        """Reads what `save` wrote; the ranks are at policy `version` from then on."""

    async def export_hf(self, directory: str) -> None: ...

    async def stage(self, version: int, *, export: bool) -> None:
        """Copies the state of policy `version`, which the ranks must be at, for one `write_staged`; with `export` also
        the model for `export_hf`."""

    async def write_staged(self, directory: str, export: str) -> None:
        """Writes what was staged as `save` and `export_hf` do, the latter into `export`; updates may run meanwhile."""

    async def check_shared(self, path: str, content: str) -> None:
        """Raises RuntimeError unless all ranks read `content` in the file at `path`."""

    def restarts(self) -> dict[str, float]:
        """Returns how many times all ranks were replaced so far, as a metric."""

    async def until_lost(self) -> str:
        """Returns why the ranks are lost, as soon as they are, also while nothing is asked of them."""

    async def restart(self) -> None:
        """Ends all ranks and starts new ones, at policy version 0."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Pools:
    """Holds the compute of a run, composed in `dapo.fleet.build_pools`.

    sync_weights(version): the engines serve `version`. weights: held while the actors' weights are not those that the
    engines serve, from before an update to the end of the sync; an engine that starts again takes its weights between.
    leave_gpus: lets the engines sleep that share the actors' GPUs; None where none does, or not in turns. lender: wakes
    some on the actors' GPUs while a batch is collected; None where none is lent any.
    gpus: of all of them.
    """

    rollouts: RolloutPool
    rewards: RewardPool
    actors: ActorPool
    sync_weights: Callable[[int], Awaitable[None]]
    weights: asyncio.Lock = field(default_factory=asyncio.Lock)
    leave_gpus: Callable[[], Awaitable[None]] | None = None
    lender: Lender | None = None
    gpus: int = 0

    def lap(self) -> dict[str, float]:
        """Returns what the pools did since the last lap, what memory this process takes, and how many processes of each
        kind were replaced so far, as metrics."""
        own = {"perf/driver_resident_bytes": float(resident_bytes([psutil.Process()]))}
        lent = {} if self.lender is None else self.lender.lap()
        return own | lent | self.rollouts.lap() | self.rewards.lap() | self.actors.restarts()
