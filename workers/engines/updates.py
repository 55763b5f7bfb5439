"""Driver side of the engines' half of a weight sync: one call to each engine that takes part. Each method returns when
all of them have finished, or raises RemoteError."""

from collections.abc import Sequence
from typing import Any

from workers.engines.slot import EngineSlot
from workers.remote import wait, wait_for_all
from workers.weights.bucket import Bucket


class WeightUpdates:
    """Base class of `workers.rollout.RolloutPool`. members: engine numbers."""

    _slots: list[EngineSlot]
    _processes: int  # of one engine

    def identities(self, members: Sequence[int]) -> tuple[tuple[int, int], ...]:
        """Returns (number, restarts) of these engines: a restarted engine must connect again."""
        return tuple((number, self._slots[number].restarts) for number in members)

    def num_receivers(self, members: Sequence[int]) -> int:
        """Returns the number of processes of these engines, each of which holds a part of the weights."""
        return len(members) * self._processes

    async def leave_weights(self, members: Sequence[int], timeout_s: float) -> None:
        calls = [self._slots[k].worker.leave_weights.remote() for k in members]
        await self._all(calls, members, timeout_s, "to leave the weight sync")

    async def connect_weights(self, info: dict[str, Any], members: Sequence[int], timeout_s: float) -> None:
        """Opens these engines' ends, while the actors open theirs. info: fields of `BucketInitInfo`, without
        first_rank."""
        ranks = range(1, 1 + self.num_receivers(members), self._processes)
        infos = [info | {"first_rank": first} for first in ranks]
        calls = [self._slots[k].worker.connect_weights.remote(each) for k, each in zip(members, infos, strict=True)]
        await self._all(calls, members, timeout_s, "to open the weight sync")

    async def start_update(self, members: Sequence[int], timeout_s: float) -> None:
        """Pauses all requests of these engines until `finish_update`."""
        calls = [self._slots[k].worker.start_update.remote() for k in members]
        await self._all(calls, members, timeout_s, "to pause")

    async def load_bucket(self, bucket: Bucket, what: str, members: Sequence[int], timeout_s: float) -> None:
        calls = [self._slots[k].worker.load_bucket.remote(bucket) for k in members]
        await self._all(calls, members, timeout_s, f"to load {what}")

    async def finish_update(self, version: int, members: Sequence[int], timeout_s: float) -> None:
        """Resumes these engines with `version`, unless a parameter is missing."""
        calls = [self._slots[k].worker.finish_update.remote(version) for k in members]
        await self._all(calls, members, timeout_s, f"to serve version {version}")
        for number in members:
            self._slots[number].version = version

    async def _all(self, refs: Sequence[Any], members: Sequence[int], timeout_s: float, what: str) -> None:
        key = "weight_sync.timeout_s"
        engines = zip(members, refs, strict=True)
        await wait_for_all(wait([ref], timeout_s, self._slots[k].member(what), key) for k, ref in engines)
