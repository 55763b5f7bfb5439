"""Sends weights from the actors to the engines: the driver's half, one pipeline for both transports.

    actors    gather 0 | gather 1 | gather 2 | ...          while the engines load a bucket, the actors gather the next;
    engines   pause    | load 0   | load 1   | ... finish   two buckets exist at a time

In: a policy version. Out: all engines that run serve it, or RemoteError, and then they serve nothing until a later
sync. An engine that is lost on the way is left out, and joins by itself when another one has taken its place. Engines
that are lent the actors' GPUs sleep meanwhile; they get the version that the others serve when they wake, from the rank
on their GPU, by a connection of their own.

vLLM ships a sending half too (`TrainerWeightTransferEngine`). It is not used: its Ray client waits without a deadline,
nothing checks a digest, a missing parameter is no error, it has no way on a CPU, and the actor ranks would import vLLM.
Its `nccl_m2n` engine (from shards to shards, without gathering a tensor) is worth a measurement on several GPUs.
"""

import asyncio
import time
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from dapo.config.schema import Config
from dapo.derived import LENT_TRANSPORT, resolve_transport, transfer_timeout_s
from dapo.types import Float32Array, TrainSequence
from workers.remote import RemoteError, wait_for_all
from workers.weights.bucket import Bucket, Endpoint

ANSWER_S = 10.0  # what an engine has for an answer after a failed sync; one that gives none is replaced
DRAWS = 3  # of tokens, over any of which an engine may prove itself
LATER_S = 5.0  # by which a wait for an engine is longer than that of the transfer within it, whose error says more


class Disproved(RemoteError):
    """Says that an engine computes other log-probabilities than the actors, whose weights it has just got."""


class WeightSource(Protocol):
    """Names what the sync needs of `workers.actor.ActorPool`."""

    def restarts(self) -> dict[str, float]: ...
    async def until_idle(self) -> None: ...
    async def open_weights(self, transport: str) -> tuple[int, Sequence[Endpoint | None]]: ...
    async def join_weights(self, transport: str, num_receivers: int) -> None: ...
    async def close_weights(self, transport: str) -> None: ...
    async def gather_bucket(self, transport: str, index: int, what: str) -> Bucket: ...
    async def policy_logprobs(self, sequences: Sequence[TrainSequence]) -> list[Float32Array]: ...


class WeightSink(Protocol):
    """Names what the sync needs of `workers.rollout.RolloutPool`; members: the engines that take part, by number."""

    def has_turn(self, number: int) -> bool: ...
    def serves(self, number: int) -> bool: ...
    def is_lent(self, number: int) -> bool: ...
    def members(self, *, lent: bool = False) -> tuple[int, ...]: ...
    async def sleep(self) -> None: ...
    def lend(self) -> None: ...
    def drop(self, members: Sequence[int]) -> None: ...
    def identities(self, members: Sequence[int]) -> tuple[tuple[int, int], ...]: ...
    def num_receivers(self, members: Sequence[int]) -> int: ...
    async def leave_weights(self, members: Sequence[int], timeout_s: float) -> None: ...
    async def connect_weights(self, info: dict[str, Any], members: Sequence[int], timeout_s: float) -> None: ...
    async def start_update(self, members: Sequence[int], timeout_s: float) -> None: ...
    async def load_bucket(self, bucket: Bucket, what: str, members: Sequence[int], timeout_s: float) -> None: ...
    async def finish_update(self, version: int, members: Sequence[int], timeout_s: float) -> None: ...
    async def lose_silent(self, members: Sequence[int], grace_s: float) -> bool: ...
    async def canaries(self, members: Sequence[int]) -> list[TrainSequence]: ...
    async def sleep_lighter(self, why: str) -> bool: ...
    def admit(self, members: Sequence[int]) -> None: ...
    def refuse(self, reason: str) -> None: ...


@dataclass(kw_only=True, slots=True)
class _Link:
    """Holds a connection. connected: which starts of which processes have met; None: none. num_buckets: of a sync."""

    transport: str
    connected: object = None
    num_buckets: int = 0


class WeightSync:
    """Brings the actors' weights to the engines after each update. Where the engines that take part are not those of
    the sync before, both ends connect anew first.

    lock: who holds it knows that the actors' weights do not change; the trainer takes it for an update and the sync
    that follows.
    """

    def __init__(self, actors: WeightSource, rollouts: WeightSink, cfg: Config) -> None:
        """Connects nothing yet."""
        self.lock = asyncio.Lock()
        self._actors = actors
        self._engines = rollouts
        self._cfg = cfg.weight_sync
        self._transfer_s = transfer_timeout_s(cfg)
        self._link, self._lent = _Link(transport=resolve_transport(cfg)), _Link(transport=LENT_TRANSPORT)
        self._version: int | None = None  # that all engines serve
        self._stage = ""

    async def __call__(self, version: int) -> None:
        """Returns when all engines that run serve `version`. The caller holds `lock`.

        Raises:
            RemoteError: a bucket's digest differs, a parameter stayed stale, or the deadline passed, and that twice
                while no engine was lost; or a failure of the actors.
        """
        self._version = None
        try:
            if await self._bring_to_all(version, lent=False) is None:
                self._engines.admit(())
            self._version = version
        finally:
            if self._version is None:
                self._engines.refuse(
                    f"the weight sync to version {version} failed, and the engines may hold a mixture of two versions"
                )

    async def _bring_to_all(self, version: int, *, lent: bool) -> float | None:
        """Lets all of these engines that run serve `version`. Returns the seconds of the transfer; None without any."""
        before: RemoteError | None = None
        while members := self._engines.members(lent=lent):
            try:
                return await self._bring(version, members)
            except RemoteError as error:
                if await self._engines.lose_silent(members, ANSWER_S):
                    continue
                if isinstance(error, Disproved) and await self._engines.sleep_lighter(str(error)):
                    continue
                if before is not None:
                    raise RemoteError(f"{before}; and once more: {error}") from error
                before = error
        return None

    async def rest(self) -> None:
        """Lets the engines that share the actors' GPUs sleep until a sync wakes them."""
        async with self.lock:
            await self._engines.sleep()

    async def lend(self) -> float | None:
        """Lets engines that sleep on the actors' GPUs serve what the others do, until `rest`.

        Returns the seconds that it takes once both ends are connected; None where no engine came to serve. Raises
        RemoteError where they cannot take the weights, and then they are given up: others take their places.
        """
        async with self.lock:
            if self._version is None:
                return None
            try:
                return await self._bring_to_all(self._version, lent=True)
            except RemoteError:
                self._engines.drop(self._engines.members(lent=True))
                raise
            finally:
                self._engines.lend()

    async def rejoin(self, number: int) -> None:
        """Gives an engine that has started again the weights that the others serve, without holding them up.

        Before the first sync, after one that failed, and while the actors have its GPUs, this is left to the next one.
        """
        async with self.lock:
            running = self._engines.members(lent=self._engines.is_lent(number))
            waits = number in running and not self._engines.serves(number)  # a sync may have come first
            if self._version is not None and self._engines.has_turn(number) and waits:
                await self._actors.until_idle()  # a checkpoint may take longer than a sync has
                await self._bring(self._version, (number,))

    async def _bring(self, version: int, members: tuple[int, ...]) -> float:
        """Lets these engines serve `version`; returns the seconds of the transfer. Raises RemoteError as `__call__`
        does, at the first failure, when no engine waits in a broadcast any more for one that is gone."""
        link = self._lent if self._engines.is_lent(members[0]) else self._link
        try:
            seconds = await self._bring_by(link, version, members)
        except RemoteError:
            await self._actors.close_weights(link.transport)
            raise
        self._engines.admit(members)
        return seconds

    async def _bring_by(self, link: _Link, version: int, members: tuple[int, ...]) -> float:
        whole = False
        try:
            async with asyncio.timeout(self._cfg.timeout_s):
                processes = (self._actors.restarts(), self._engines.identities(members))
                if link.connected != processes:
                    await self._connect(link, members)
                    link.connected = processes
                began = time.monotonic()
                await self._transfer(link, version, members)
                seconds = time.monotonic() - began
                await self._prove(members)
            whole = True
        except TimeoutError:
            raise RemoteError(
                f"the weight sync to version {version} took more than {self._cfg.timeout_s:g} s, when it came to "
                f"{self._stage}; raise `weight_sync.timeout_s` if this is expected"
            ) from None
        finally:
            if not whole:
                link.connected = None
        return seconds

    async def _connect(self, link: _Link, members: tuple[int, ...]) -> None:
        self._stage = f"connecting actors and engines ({link.transport})"
        await self._engines.leave_weights(members, self._transfer_s + LATER_S)
        link.num_buckets, endpoints = await self._actors.open_weights(link.transport)
        first = endpoints[0]
        assert first is not None
        num_receivers = self._engines.num_receivers(members)
        info: dict[str, Any] = {
            "transport": link.transport,
            "capacity": first.capacity,
            "address": first.address,
            "port": first.port,
            "group_size": 1 + num_receivers,
            "timeout_s": self._transfer_s,
            "memory": {end.place: end.handles for end in endpoints if end is not None and end.handles},
        }
        waits = [
            self._actors.join_weights(link.transport, num_receivers),
            self._engines.connect_weights(info, members, self._transfer_s + LATER_S),
        ]
        await wait_for_all(waits)

    async def _transfer(self, link: _Link, version: int, members: tuple[int, ...]) -> None:
        deadline = self._transfer_s + LATER_S
        names = [f"weight bucket {i} of {link.num_buckets}, version {version}" for i in range(link.num_buckets)]
        self._stage = f"pausing the engines and gathering {names[0]}"
        _, bucket = await wait_for_all([self._engines.start_update(members, deadline), self._gather(link, 0, names[0])])
        for index, name in enumerate(names):
            self._stage = f"loading {name}"
            steps: list[Awaitable[Any]] = [self._engines.load_bucket(bucket, name, members, deadline)]
            if index + 1 < len(names):
                steps.append(self._gather(link, index + 1, names[index + 1]))
            bucket = (await wait_for_all(steps))[-1]
        self._stage = "taking the engines up again"
        await self._engines.finish_update(version, members, deadline)

    async def _gather(self, link: _Link, index: int, name: str) -> Bucket:
        bucket = await self._actors.gather_bucket(link.transport, index, name)
        if bucket.failure:
            raise RemoteError(f"while sending {name}: {bucket.failure}")
        return bucket

    async def _prove(self, members: tuple[int, ...]) -> None:
        """Compares engines that have started again, or slept for the first time, with the actors: both give a few
        tokens their log-probabilities, others at each draw. An engine passes with the first draw over which they agree:
        rounding may part the two over some tokens, other weights do over any.

        Of the others the next training batch is proof enough, before its first optimizer step.
        """
        self._stage = "comparing log-probabilities of an engine that started again or slept"
        bound, least = self._cfg.max_mean_logprob_diff, np.array(np.inf)
        for _ in range(DRAWS):
            canaries = await self._engines.canaries(members)
            actors = await self._actors.policy_logprobs(canaries) if canaries else []
            differences = [np.abs(a - c.rollout_logprobs).mean() for a, c in zip(actors, canaries, strict=True)]
            least = np.minimum(least, differences)
            if np.all(least <= bound):
                return
        raise Disproved(
            "an engine that started again or slept computes other log-probabilities than the actors (mean difference "
            f"{np.max(least):.4g}, `weight_sync.max_mean_logprob_diff` {bound:g}, by {DRAWS} draws of tokens)"
        )
