"""Asks the ranks for their half of a weight sync; the part of `workers.actor.ActorPool` that is about it.

In: a transport, and which bucket is due. Out: the ranks' ends of the transport and buckets, which are
`workers.weights.bucket`'s.
"""

from contextlib import suppress
from typing import Any

from dapo.config.schema import Config
from dapo.derived import transfer_timeout_s
from workers.remote import RemoteError, wait
from workers.training.ranks import Ranks, Submit

BESIDE = "beside"  # Ray's concurrency group of what a rank is told while it may hang in a broadcast
CLOSE_S = 5.0


class Sending:
    """Speaks for all ranks where the engines' weights are concerned."""

    _cfg: Config
    _ranks: Ranks

    async def open_weights(self, transport: str) -> tuple[int, list[Any]]:
        """Returns the number of buckets of a weight sync, and each rank's end of the transport."""
        opened = await self._weights(lambda _, worker: worker.open_weights.remote(transport), "opening the weight sync")
        return opened[0][0], [endpoint for _, endpoint in opened]

    async def join_weights(self, transport: str, num_receivers: int) -> None:
        """Lets the ranks meet the engines' processes."""
        join: Submit = lambda _, worker: worker.join_weights.remote(transport, num_receivers)  # noqa: E731
        await self._weights(join, "meeting the engines for the weight sync")

    async def gather_bucket(self, transport: str, index: int, what: str) -> Any:
        """Sends the next bucket of weights on its way and returns it. what: which one of which sync, for errors."""
        gather: Submit = lambda _, worker: worker.gather_bucket.remote(transport, index)  # noqa: E731
        return (await self._weights(gather, f"gathering {what}"))[0]

    async def close_weights(self, transport: str) -> None:
        """Lets rank 0 let go of the engines, whatever it does now; the next sync opens anew. A rank that does not is
        found out by what it is asked next."""
        close = self._ranks.workers[0].close_weights.options(concurrency_group=BESIDE)
        with suppress(RemoteError):
            await wait([close.remote(transport)], CLOSE_S, "actor rank 0 to let go of the engines", "")

    async def _weights(self, submit: Submit, what: str) -> list[Any]:
        # A transport may fail on rank 0 alone, when an engine is gone: all ranks have then gathered the bucket.
        # Less than the sync has, which cannot tell a rank that stands still from an engine that does.
        timeout_s = min(self._cfg.weight_sync.timeout_s, 2 * transfer_timeout_s(self._cfg))
        return await self._ranks.call(submit, timeout_s, what, "weight_sync.timeout_s", separable=True)
