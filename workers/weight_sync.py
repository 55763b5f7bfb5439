"""Sends weights from the actors to the engines: the driver's half, one pipeline for all transports.

    actors    gather 0 | gather 1 | gather 2 | ...          while the engines load a bucket, the actors gather the next;
    engines   pause    | load 0   | load 1   | ... finish   two buckets exist at a time

After a sync all running engines serve the version; after a failure none serves until a later sync. An engine lost on
the way is left out, and its replacement joins later. Engines on GPUs lent by the actors sleep meanwhile; when they wake
they get the version that the others serve, from the rank on their GPU, over a separate connection.

vLLM's own sending half (`TrainerWeightTransferEngine`) is not used: its Ray client waits without a deadline, it checks
no digest, a missing parameter is no error, it does not support CPUs, and the actor ranks would import vLLM. Its
`nccl_m2n` engine (shards to shards, without gathering a tensor) is worth a measurement on several GPUs.
"""

import asyncio
import math
import time
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np

from dapo.algorithm.mismatch import (
    Probe,
    Variant,
    actor_probe,
    budget,
    engine_probe,
    helps,
    temperature_factor,
    together,
)
from dapo.config.derived import LENT_TRANSPORT, resolve_transport, transfer_timeout_s
from dapo.config.schema import Config
from dapo.ground.console import say, warn
from dapo.types import Float32Array, Int32Array, Sampling, TrainSequence
from dapo.workers.remote import RemoteError, wait_for_all
from dapo.workers.weights.bucket import STORE, Bucket, Endpoint

FETCHES = 4  # buckets that an engine outside of the cluster fetches at a time: a far store answers late
RETRY_S = 10.0  # after an engine outside of the cluster got no weights
ANSWER_S = 10.0  # after a failed sync, engines that do not answer within this are replaced
DRAWS = 3  # of canary tokens; an engine must agree on one of them
LATER_S = 5.0  # added to waits for an engine, so that the transfer's own, more specific timeout comes first


class Disproved(RemoteError):
    """An engine computes other log-probabilities than the actors, whose weights it has just received."""


class WeightSource(Protocol):
    """What the sync needs of `workers.actor.ActorPool`."""

    def restarts(self) -> dict[str, float]: ...
    async def until_idle(self) -> None: ...
    async def open_weights(self, transport: str) -> tuple[int, Sequence[Endpoint | None]]: ...
    async def join_weights(self, transport: str, num_receivers: int) -> None: ...
    async def stored_weights(self, others: Collection[str]) -> list[tuple[str, str]]: ...
    async def close_weights(self, transport: str) -> None: ...
    async def gather_bucket(self, transport: str, index: int, what: str) -> Bucket: ...
    async def policy_logprobs(self, sequences: Sequence[TrainSequence]) -> list[Float32Array]: ...
    async def probe(self, sequences: Sequence[TrainSequence], variant: Variant) -> list[Float32Array]: ...


class WeightSink(Protocol):
    """What the sync needs of `workers.rollout.RolloutPool`. members: numbers of the engines that take part."""

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
    async def start_update(self, version: int, keep: bool, members: Sequence[int], timeout_s: float) -> None: ...
    async def load_bucket(self, bucket: Bucket, what: str, members: Sequence[int], timeout_s: float) -> None: ...
    async def finish_update(self, version: int, members: Sequence[int], timeout_s: float) -> None: ...
    async def lose_silent(self, members: Sequence[int], grace_s: float) -> bool: ...
    async def canaries(self, members: Sequence[int]) -> list[TrainSequence]: ...
    async def probe(self, prompts: Sequence[Int32Array], sampling: Sampling, seed: int) -> list[TrainSequence]: ...
    async def sleep_lighter(self, why: str) -> bool: ...
    def admit(self, members: Sequence[int]) -> None: ...
    def refuse(self, reason: str) -> None: ...
    def take_weights(
        self, rejoin: Callable[[int], Awaitable[None]], supply: Callable[[int], Awaitable[None]] | None = None
    ) -> None: ...
    def version(self, number: int) -> int: ...
    def is_proven(self, number: int) -> bool: ...
    def outdate(self, oldest: float) -> None: ...
    async def fetch(self, number: int, bucket: Bucket, what: str, timeout_s: float) -> None: ...
    async def load(self, number: int, version: int, keep: bool, buckets: list[Bucket], timeout_s: float) -> None: ...


@dataclass(kw_only=True, slots=True)
class _Link:
    """A connection. connected: identifies the actor and engine processes that are connected; None: none. num_buckets:
    per sync."""

    transport: str
    connected: object = None
    num_buckets: int = 0


class NoSync:
    """The weight sync of half a run: the engines, if there are any, serve the model that they have loaded."""

    def __init__(self, engines: WeightSink) -> None:
        self.lock = asyncio.Lock()
        self._engines = engines

    async def __call__(self, version: int) -> None:
        self._engines.admit(self._engines.members())

    async def rest(self) -> None: ...

    async def lend(self) -> float | None: ...


class WeightSync:
    """Brings the actors' weights to the engines after each update; reconnects both ends if the participants have
    changed. lock: while it is held, the actors' weights do not change. The trainer holds it for an update and the
    following sync."""

    def __init__(self, actors: WeightSource, rollouts: WeightSink, cfg: Config) -> None:
        self.lock = asyncio.Lock()
        self._actors = actors
        self._engines = rollouts
        self._cfg = cfg.weight_sync
        self._replays = cfg.rollout.replay_experts
        self._transfer_s = transfer_timeout_s(cfg)
        self._link, self._lent = _Link(transport=resolve_transport(cfg)), _Link(transport=LENT_TRANSPORT)
        self._version: int | None = None  # that all engines serve
        self._stage = ""
        self._lags = cfg.filter_groups.max_staleness
        self._synced = asyncio.Event()  # replaced at each sync
        self._publishing: asyncio.Task[None] | None = None
        self._newest, self._epoch = -1, 0  # the last version, also during a sync; how often the run went back
        self._published: tuple[int, list[Bucket]] = (-1, [])
        self._late: set[int] = set()  # those told of
        self._fetched: dict[int, list[Bucket]] = {}  # what each engine outside of the cluster fetches or has
        rollouts.take_weights(self.rejoin, self.supply)

    async def __call__(self, version: int) -> None:
        """Returns when all running engines serve `version`. The caller holds `lock`. Raises RemoteError if the actors
        failed, or if twice, without losing an engine, a digest differed, a parameter was not updated, or the deadline
        passed."""
        self._version = None
        if version <= self._newest:  # the run went back: later versions will have other weights than before
            self._published, self._newest, self._epoch = (-1, []), -1, self._epoch + 1
            self._engines.outdate(math.inf)
        try:
            if await self._bring_to_all(version, lent=False) is None:
                self._engines.admit(())
            self._version = self._newest = version
            self._engines.outdate(version - self._lags)
            self._synced.set()
            self._synced = asyncio.Event()
        finally:
            if self._version is None:
                self._engines.refuse(
                    f"the weight sync to version {version} failed, and the engines may hold a mixture of two versions"
                )

    async def _bring_to_all(self, version: int, *, lent: bool) -> float | None:
        """Makes all lent, or all other, running engines serve `version`. Returns the transfer time in seconds; None
        without any."""
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

    async def compare(
        self, prompts: Sequence[Int32Array], sampling: Sampling, seed: int, stale: float
    ) -> dict[str, float]:
        """Returns the metrics `mismatch/` (`dapo.algorithm.mismatch`): an engine answers the prompts, and the actors
        compute the log-probabilities of its tokens in several ways. The caller holds `lock`, after a sync."""
        sequences = [one for one in await self._engines.probe(prompts, sampling, seed) if len(one.rollout_logprobs)]
        if not sequences:
            return {}
        engine = engine_probe(sequences)

        async def by(variant: Variant) -> Probe:
            return actor_probe(await self._actors.probe(sequences, variant), engine.likely.shape[1])

        base = Variant(own_experts=not self._replays)
        variants = {"as_is": await by(base)}
        changed = {
            "temperature": replace(base, temperature=temperature_factor(engine, variants["as_is"])),
            "head": replace(base, other_head=True),
        }
        if sequences[0].experts is not None:
            changed["router"] = replace(base, own_experts=self._replays)
        for cause, variant in changed.items():
            variants[cause] = await by(variant)
        variants["all"] = await by(together([base, *(changed[cause] for cause in helps(engine, variants))]))
        return budget(engine, variants, stale=stale, replays=self._replays)

    async def rest(self) -> None:
        """Puts the engines that share the actors' GPUs to sleep until a sync wakes them."""
        async with self.lock:
            await self._engines.sleep()

    async def lend(self) -> float | None:
        """Lets the engines on the actors' GPUs serve the current version until `rest`. Returns the transfer time in
        seconds, excluding connection setup; None if no engine came to serve. If they cannot take the weights, drops
        them, to be replaced, and raises RemoteError."""
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
        """Gives a restarted engine the current weights without pausing the others. Does nothing before the first sync,
        after a failed one, and while the actors use its GPUs; the next sync does it."""
        async with self.lock:
            running = self._engines.members(lent=self._engines.is_lent(number))
            waits = number in running and not self._engines.serves(number)  # a sync may already have updated it
            if self._version is not None and self._engines.has_turn(number) and waits:
                await self._actors.until_idle()  # a checkpoint may take longer than the sync's deadline
                await self._bring(self._version, (number,))

    async def supply(self, number: int) -> None:
        """Gives an engine outside of the cluster the current version, and then each later one, until it is cancelled.
        It fetches while it serves an older version, and nobody waits for it."""
        try:
            await self._follow(number)
        finally:
            self._fetched.pop(number, None)

    async def _follow(self, number: int) -> None:
        while True:
            synced, version = self._synced, self._version
            if version is None or version == self._engines.version(number):
                await synced.wait()
                continue
            try:
                await self._publish(version)
                published, buckets = self._published
                await self._supply(number, published, buckets)
            except Disproved:
                raise
            except RuntimeError as error:  # of store, ranks or engine; who watches these notices a loss
                warn(f"engine {number}, outside of the cluster, does not get version {version}: {error}")
                await asyncio.sleep(RETRY_S)

    async def _publish(self, version: int) -> None:
        """Brings the current version to the store, for all engines that ask for it."""
        if self._published[0] < version:
            if self._publishing is None or self._publishing.done():
                self._publishing = asyncio.create_task(self._store())
            await asyncio.shield(self._publishing)

    async def _store(self) -> None:
        async with self.lock:
            if (version := self._version) is None:
                return
            epoch = self._epoch
            await self._actors.until_idle()
            count, _ = await self._actors.open_weights(STORE)
            names = [f"weight bucket {index} of {count}, version {version}, for the store" for index in range(count)]
            buckets = [await self._actors.gather_bucket(STORE, index, name) for index, name in enumerate(names)]
        if failure := next((bucket.failure for bucket in buckets if bucket.failure), ""):
            raise RemoteError(f"the weight store: {failure}")
        others = {bucket.file for fetched in self._fetched.values() for bucket in fetched}
        written = await self._actors.stored_weights(others)
        named = zip(buckets, written, strict=True)
        found = [replace(bucket, digest=digest, file=file) for bucket, (digest, file) in named]
        if epoch == self._epoch:
            self._published = version, found

    async def _supply(self, number: int, version: int, buckets: list[Bucket]) -> None:
        """Returns early if a later version is due before the engine can serve this one."""
        self._fetched[number], epoch = buckets, self._epoch
        at_a_time = asyncio.Semaphore(FETCHES)

        async def fetch(bucket: Bucket) -> None:
            async with at_a_time:
                if self._serves(number, version):
                    name = f"weight bucket {bucket.index} of {len(buckets)}, version {version}"
                    await self._engines.fetch(number, bucket, name, self._cfg.timeout_s)

        await wait_for_all(map(fetch, buckets))
        if not self._serves(number, version):
            if number not in self._late:
                late = f"has version {version} when the others serve {self._newest}: its link to the store is slow"
                warn(f"engine {number}, outside of the cluster, {late}")
            self._late.add(number)
            return
        await self._engines.load(number, version, self._cfg.keep_kv_cache, buckets, self._cfg.timeout_s)
        self._late.discard(number)
        if epoch != self._epoch:
            self._engines.outdate(math.inf)
            return
        if not self._engines.is_proven(number):
            async with self.lock:
                if version == self._version:
                    await self._actors.until_idle()
                    await self._prove((number,))
                    self._engines.admit((number,))
                    say(f"engine {number}, outside of the cluster, has joined, and serves")
        elif self._serves(number, version):
            self._engines.admit((number,))

    def _serves(self, number: int, version: int) -> bool:
        """Whether an engine outside of the cluster may serve this version: for its first, that of the others alone."""
        lags = self._lags if self._engines.is_proven(number) else 0
        return self._newest - lags <= version <= self._newest

    async def _bring(self, version: int, members: tuple[int, ...]) -> float:
        """Makes these engines serve `version`; returns the transfer time in seconds. Raises RemoteError at the first
        failure, after closing the connection so that no engine stays in a broadcast with a lost one."""
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
        pause = self._engines.start_update(version, self._cfg.keep_kv_cache, members, deadline)
        _, bucket = await wait_for_all([pause, self._gather(link, 0, names[0])])
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
        """Compares engines that restarted, or slept for the first time, with the actors: both compute the
        log-probabilities of a few tokens, different ones at each draw. An engine passes at the first draw where they
        agree: rounding may cause a difference for some tokens, wrong weights cause one for all. The other engines are
        checked with the next training batch, before its first optimizer step."""
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
