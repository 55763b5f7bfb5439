"""Calls the ranks for their half of a weight sync; a base class of `workers.actor.ActorPool`."""

from contextlib import suppress
from typing import Any

from dapo.config.schema import Config
from dapo.derived import transfer_timeout_s
from workers.remote import RemoteError, wait
from workers.training.ranks import Ranks, Submit

BESIDE = "beside"  # Ray's concurrency group of calls to a rank that may hang in a broadcast
CLOSE_S = 5.0


class Sending:
    _cfg: Config
    _ranks: Ranks

    async def open_weights(self, transport: str) -> tuple[int, list[Any]]:
        """Returns the number of buckets of a weight sync, and each rank's endpoint of the transport."""
        opened = await self._weights(lambda _, worker: worker.open_weights.remote(transport), "opening the weight sync")
        return opened[0][0], [endpoint for _, endpoint in opened]

    async def join_weights(self, transport: str, num_receivers: int) -> None:
        """Connects the ranks to the engines' processes."""
        join: Submit = lambda _, worker: worker.join_weights.remote(transport, num_receivers)  # noqa: E731
        await self._weights(join, "meeting the engines for the weight sync")

    async def gather_bucket(self, transport: str, index: int, what: str) -> Any:
        """Starts sending the next bucket of weights and returns it. what: the bucket and sync, for errors."""
        gather: Submit = lambda _, worker: worker.gather_bucket.remote(transport, index)  # noqa: E731
        return (await self._weights(gather, f"gathering {what}"))[0]

    async def close_weights(self, transport: str) -> None:
        """Makes rank 0 drop its connection to the engines, also while it is busy; the next sync opens a new one. A rank
        that fails to do so is detected by the next call to it."""
        close = self._ranks.workers[0].close_weights.options(concurrency_group=BESIDE)
        with suppress(RemoteError):
            await wait([close.remote(transport)], CLOSE_S, "actor rank 0 to let go of the engines", "")

    async def _weights(self, submit: Submit, what: str) -> list[Any]:
        # Separable: a transport may fail on rank 0 alone, when an engine is lost, after all have gathered the bucket.
        # Less than the timeout of the sync, which cannot tell a hanging rank from a hanging engine.
        timeout_s = min(self._cfg.weight_sync.timeout_s, 2 * transfer_timeout_s(self._cfg))
        return await self._ranks.call(submit, timeout_s, what, "weight_sync.timeout_s", separable=True)
