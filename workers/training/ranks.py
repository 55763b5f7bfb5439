"""Calls all ranks of the actors at once; separates failures that leave the ranks usable from those that do not.

If all ranks raise alike with nothing changed (`Unanimous`), a call raises `RemoteError`. Any other failure raises
`ActorsLost`, as does every later call until the ranks are restarted.
"""

import asyncio
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from typing import Any

import ray

from dapo.ground.watchdog import Member
from dapo.pools import ActorsLost
from dapo.workers.remote import FAILURE_GRACE_S, RemoteError, wait
from dapo.workers.training.collective_errors import Unanimous
from dapo.workers.training.processes import RankProcess, end_all

Submit = Callable[[int, Any], Any]  # (rank, its actor) -> Ray's reference to the answer
FATAL = ("OutOfMemoryError", "AcceleratorError")  # of torch: the rank is unusable after one
END_S = 60.0
PULSE_S = 1.0  # between two pings
SILENT_S = 60.0  # an idle rank that does not answer for so long hangs


class Ranks:
    """The ranks' actors. workers: Ray handles, in rank order."""

    def __init__(self, make: Callable[[], list[Any]]) -> None:
        """Creates the ranks. make: creates one set of them."""
        self._make = make
        self._processes: list[RankProcess] = []
        self.workers = make()
        self.lost = ""  # why a restart is needed
        self.restarts = 0
        self._busy = 0  # running calls
        self._turn = asyncio.Lock()  # one call at a time, so that its deadline covers only itself

    async def call(
        self,
        submit: Submit,
        timeout_s: float,
        what: str,
        key: str,
        *,
        changes: bool = False,
        separable: bool = False,
        beside: bool = False,
    ) -> list[Any]:
        """Returns all ranks' results of `submit(rank, worker)`, in rank order, after earlier calls have ended.

        timeout_s, key: the deadline and where it is set. what: for errors. changes: it changes the parameters, which
        are unknown if the caller stops waiting. separable: work after the last collective may fail on one rank alone.
        beside: it may run concurrently with other calls. Raises RemoteError if all ranks raised alike (`Unanimous`,
        which is the cause) or separable work failed; ActorsLost if anything else went wrong, now or before.
        """
        asked = self.workers
        async with nullcontext() if beside else self._turn:
            if self.lost or self.workers is not asked:
                why = self.lost or "others have taken their places"
                raise ActorsLost(f"the actors cannot be used for {what}, because they were lost before: {why}")
            return await self._call(submit, timeout_s, what, key, changes=changes, separable=separable)

    async def _call(
        self, submit: Submit, timeout_s: float, what: str, key: str, *, changes: bool, separable: bool
    ) -> list[Any]:
        refs = [submit(rank, worker) for rank, worker in enumerate(self.workers)]
        members = [Member(role="actor rank", number=k, count=len(refs), act=f"({what})") for k in range(len(refs))]
        waits = [wait([ref], timeout_s, member, key) for member, ref in zip(members, refs, strict=True)]
        self._busy += 1
        try:
            outcomes = await _outcomes([asyncio.ensure_future(one) for one in waits])
        except BaseException as error:
            if changes:
                self.lost = f"nobody waited for the end of {what} ({type(error).__name__})"
            raise
        finally:
            self._busy -= 1
        errors = [outcome for outcome in outcomes if isinstance(outcome, RemoteError)]
        if not errors and None not in outcomes:
            return [result for (result,) in outcomes]
        if len(errors) == len(outcomes) and all(_unanimous(error) for error in errors):
            cause = errors[0].__cause__
            raise RemoteError(f"{what}: {type(cause).__name__}: {cause}") from cause
        message = "; ".join(dict.fromkeys(map(str, sorted(errors, key=_answered))))
        if separable and None not in outcomes and all(_answered(error) for error in errors):
            raise RemoteError(message) from errors[0]
        self.lost = message
        raise ActorsLost(message) from errors[0]

    async def until_idle(self) -> None:
        """Returns when no call is running; each has its deadline."""
        async with self._turn:
            pass

    async def until_lost(self, timeout_s: float, key: str) -> str:
        """Returns why the ranks are lost, as soon as they are. While no call is running, the ranks are pinged and must
        answer within `timeout_s`, at most `SILENT_S`; a running call detects a loss itself."""
        timeout_s = min(timeout_s, SILENT_S)
        while not self.lost:
            await asyncio.sleep(PULSE_S)
            if not self._busy:
                with suppress(ActorsLost):
                    await self.call(lambda _, worker: worker.process.remote(), timeout_s, "a sign of life", key)
        return self.lost

    async def find_processes(self, timeout_s: float, key: str) -> None:
        what = "starting the ranks' processes"
        self._processes = await self.call(lambda _, worker: worker.process.remote(), timeout_s, what, key)

    def nodes(self) -> list[str]:
        """Returns the node of each rank, by Ray's ids."""
        return [process.node for process in self._processes]

    def gpus(self, ranks: Sequence[int]) -> list[str]:
        """Returns the GPUs of these ranks, by Ray's names on their node. Raises RemoteError while they start."""
        if ranks and not self._processes:
            raise RemoteError(f"the GPUs of actor ranks {list(ranks)} are not known yet, for they are starting")
        return [gpu for rank in ranks for gpu in self._processes[rank].gpus]

    async def restart(self, key: str) -> None:
        """Ends all ranks, waits until their processes have ended, and creates new ones. Raises ActorsLost if a process
        does not end, RuntimeError if there is no place for new ones. key: for errors."""
        self.lost = self.lost or "they are being restarted"
        self.kill()
        try:
            await end_all(self._processes, END_S, key)
        except RemoteError as error:
            raise ActorsLost(str(error)) from error
        self._processes = []
        self.workers = await asyncio.to_thread(self._make)  # it may wait for a node
        self.lost = ""
        self.restarts += 1

    def kill(self) -> None:
        for worker in self.workers:
            ray.kill(worker)


async def _outcomes(tasks: Sequence["asyncio.Future[Any]"]) -> list[Any]:
    """Returns for each rank its result, its RemoteError, or None if it was no longer waited for. After a failure the
    others may hang in a collective with the failed rank: they have `FAILURE_GRACE_S` from the last answer on. If all
    raise alike they do not hang, and are waited for."""
    pending = set(tasks)
    patience: float | None = None  # each wait has a deadline of its own
    try:
        while pending:
            done, pending = await asyncio.wait(pending, timeout=patience, return_when=asyncio.FIRST_COMPLETED)
            if not done:
                break
            if any(not _unanimous(error) for task in done if (error := task.exception())):
                patience = FAILURE_GRACE_S
    finally:
        for task in tasks:
            task.cancel()
    return [_outcome(task) if task not in pending else None for task in tasks]


def _outcome(task: "asyncio.Future[Any]") -> Any:
    error = task.exception()
    if error is None:
        return task.result()
    if isinstance(error, RemoteError):
        return error
    raise error


def _unanimous(error: BaseException) -> bool:
    return isinstance(error.__cause__, Unanimous)


def _answered(error: RemoteError) -> bool:
    """Whether the rank itself raised and is still usable; otherwise it died or did not answer."""
    return error.__cause__ is not None and type(error.__cause__).__name__ not in FATAL
