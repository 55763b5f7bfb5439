"""Sends weights from the actors to the engines: the driver's half, one pipeline for both transports.

    actors    gather 0 | gather 1 | gather 2 | ...          while the engines load a bucket, the actors gather the next;
    engines   pause    | load 0   | load 1   | ... finish   two buckets exist at a time

In: a policy version. Out: all engines serve it, or RemoteError, and then they serve nothing any more.

vLLM ships a sending half too (`TrainerWeightTransferEngine`). It is not used: its Ray client waits without a deadline,
nothing checks a digest, a missing parameter is no error, it has no way on a CPU, and the actor ranks would import vLLM.
Its `nccl_m2n` engine (from shards to shards, without gathering a tensor) is worth a measurement on several GPUs.
"""

import asyncio
from collections.abc import Awaitable, Sequence
from typing import Any, Protocol

from dapo.config.actor import WeightSyncConfig
from workers.remote import RemoteError, wait_for_all
from workers.weights.bucket import Bucket, Endpoint


class WeightSource(Protocol):
    """Names what the sync needs of `workers.actor.ActorPool`."""

    async def open_weights(self, transport: str) -> tuple[int, Sequence[Endpoint | None]]: ...

    async def join_weights(self, num_receivers: int) -> None: ...

    async def gather_bucket(self, index: int, what: str) -> Bucket: ...


class WeightSink(Protocol):
    """Names what the sync needs of `workers.rollout.RolloutPool`."""

    @property
    def num_receivers(self) -> int: ...

    async def connect_weights(self, info: dict[str, Any], timeout_s: float) -> None: ...

    async def start_update(self, timeout_s: float) -> None: ...

    async def load_bucket(self, bucket: Bucket, what: str, timeout_s: float) -> None: ...

    async def finish_update(self, version: int, timeout_s: float) -> None: ...

    def refuse(self, reason: str) -> None: ...


class WeightSync:
    """Brings the actors' weights to all engines after each update. The first call also connects both."""

    def __init__(self, actors: WeightSource, rollouts: WeightSink, cfg: WeightSyncConfig, transport: str) -> None:
        """Connects nothing yet. transport: from `dapo.derived.resolve_transport`."""
        self._actors = actors
        self._engines = rollouts
        self._timeout_s = cfg.timeout_s
        self._transport = transport
        self._num_buckets = 0
        self._stage = ""

    async def __call__(self, version: int) -> None:
        """Returns when all engines serve `version`.

        Raises:
            RemoteError: a bucket's digest differs, a parameter stayed stale, a worker failed, or the deadline passed.
        """
        whole = False
        try:
            async with asyncio.timeout(self._timeout_s):
                if not self._num_buckets:
                    await self._connect()
                await self._sync(version)
            whole = True
        except TimeoutError:
            raise RemoteError(
                f"the weight sync to version {version} took more than {self._timeout_s:g} s, when it came to "
                f"{self._stage}; raise `weight_sync.timeout_s` if this is expected"
            ) from None
        finally:
            if not whole:
                self._engines.refuse(
                    f"the weight sync to version {version} failed, and the engines may hold a mixture of two versions"
                )

    async def _connect(self) -> None:
        self._stage = f"connecting actors and engines ({self._transport})"
        num_buckets, endpoints = await self._actors.open_weights(self._transport)
        first = endpoints[0]
        assert first is not None
        num_receivers = self._engines.num_receivers
        info: dict[str, Any] = {
            "transport": self._transport,
            "capacity": first.capacity,
            "address": first.address,
            "port": first.port,
            "group_size": 1 + num_receivers,
            "timeout_s": self._timeout_s,
            "memory": {end.place: end.handles for end in endpoints if end is not None and end.handles},
        }
        await wait_for_all(
            [self._actors.join_weights(num_receivers), self._engines.connect_weights(info, self._timeout_s)]
        )
        self._num_buckets = num_buckets

    async def _sync(self, version: int) -> None:
        names = [f"weight bucket {i} of {self._num_buckets}, version {version}" for i in range(self._num_buckets)]
        self._stage = f"pausing the engines and gathering {names[0]}"
        _, bucket = await wait_for_all(
            [self._engines.start_update(self._timeout_s), self._actors.gather_bucket(0, names[0])]
        )
        for index, name in enumerate(names):
            self._stage = f"loading {name}"
            steps: list[Awaitable[Any]] = [self._engines.load_bucket(bucket, name, self._timeout_s)]
            if index + 1 < len(names):
                steps.append(self._actors.gather_bucket(index + 1, names[index + 1]))
            bucket = (await wait_for_all(steps))[-1]
        self._stage = "taking the engines up again"
        await self._engines.finish_update(version, self._timeout_s)
