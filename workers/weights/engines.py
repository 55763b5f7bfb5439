"""All engines as the driver's half of the weight sync sees them (DESIGN section 8).

In: buckets from the actors. Out: every engine has loaded them, or an error that says which engine failed on what.
"""

from collections.abc import Sequence
from typing import Any

from workers.remote import together, wait
from workers.weights.bucket import Bucket


class EngineWeights:
    """Speaks to the `workers.rollout.RolloutWorker`s. Its waits end after `timeout_s` with RemoteError.

    processes: of one engine, each with a part of the weights. refused: why the engines may serve nothing any more.
    """

    def __init__(self, workers: Sequence[Any]) -> None:
        self._workers = workers
        self.processes = 1
        self.refused = ""

    @property
    def num_receivers(self) -> int:
        """Processes of all engines together."""
        return len(self._workers) * self.processes

    async def connect(self, info: dict[str, Any], timeout_s: float) -> None:
        """Opens the engines' ends, while the actors open theirs. info: fields of `BucketInitInfo` but first_rank."""
        refs = [
            worker.connect_weights.remote(info | {"first_rank": 1 + index * self.processes})
            for index, worker in enumerate(self._workers)
        ]
        await self._all(refs, timeout_s, "to open the weight sync")

    async def start(self, timeout_s: float) -> None:
        """Holds all requests until `finish`."""
        await self._all([worker.start_update.remote() for worker in self._workers], timeout_s, "to pause")

    async def load(self, bucket: Bucket, what: str, timeout_s: float) -> None:
        """The next bucket. what: which one of which sync."""
        refs = [worker.load_bucket.remote(bucket, timeout_s) for worker in self._workers]
        await self._all(refs, timeout_s, f"to load {what}")

    async def finish(self, version: int, timeout_s: float) -> None:
        """All engines serve `version`, unless a parameter is missing."""
        refs = [worker.finish_update.remote(version) for worker in self._workers]
        await self._all(refs, timeout_s, f"to serve version {version}")

    def refuse(self, reason: str) -> None:
        """From now on nothing is generated: an engine may hold a mixture of two versions, and stays paused."""
        self.refused = reason

    async def _all(self, refs: Sequence[Any], timeout_s: float, what: str) -> None:
        key = "weight_sync.timeout_s"
        await together(wait([ref], timeout_s, f"engine {index} {what}", key) for index, ref in enumerate(refs))
