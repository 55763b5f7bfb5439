"""Waits for remote results: always with a deadline that says what is waited for, always with a readable error.

The watchdog (`dapo.report.watchdog`) tells of those that take long.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from ray.exceptions import ObjectLostError, RayActorError, RayError, RayTaskError

from dapo.report.watchdog import Member, waiting

FAILURE_GRACE_S = 2.0


class RemoteError(RuntimeError):
    """Says that a remote role failed or kept silent: which and why, without the remote traceback."""


class WorkerLost(RemoteError):
    """Says that a worker's process has ended, or stands still: only another one helps."""


async def wait(refs: Sequence[Any], timeout_s: float, what: str | Member, key: str) -> list[Any]:
    """Returns the results of all refs, in order; the first failure ends the wait at once. what: a `Member` where the
    same is waited for of several alike.

    Raises:
        RemoteError: a worker raised, died, or did not answer within `timeout_s` (configuration key `key`, "": none).
    """
    together = asyncio.gather(*refs)
    together.add_done_callback(lambda each: each.cancelled() or each.exception())  # whoever waits may be cancelled
    with _readable_errors(timeout_s, what, key), waiting(what):
        return list(await asyncio.wait_for(together, timeout_s))


async def wait_for_stream(refs: AsyncIterator[Any], timeout_s: float, what: str, key: str) -> AsyncIterator[Any]:
    """Yields the results of a streaming call one by one; `timeout_s` is for all of them together. The caller tells the
    watchdog what it is about.

    Raises:
        RemoteError: as `wait` does.
    """
    deadline = asyncio.get_running_loop().time() + timeout_s
    while True:
        with _readable_errors(timeout_s, what, key):
            async with asyncio.timeout_at(deadline):
                try:
                    result = await (await anext(refs))
                except StopAsyncIteration:
                    return
        yield result


@contextmanager
def _readable_errors(timeout_s: float, what: str | Member, key: str) -> Iterator[None]:
    """Turns what can go wrong with a remote call into one readable error."""
    try:
        yield
    except TimeoutError:
        remedy = f"; raise `{key}` if this is expected" if key else ""
        raise RemoteError(f"waited {timeout_s:g} s for {what}{remedy}") from None
    except RayTaskError as error:
        cause = error.cause
        kind = WorkerLost if isinstance(cause, WorkerLost) else RemoteError
        raise kind(f"while waiting for {what}: {type(cause).__name__}: {cause}") from cause
    except RayError as error:
        lost = isinstance(error, RayActorError | ObjectLostError)  # the latter: its node took its answer along
        first_line = str(error).partition("\n")[0]
        kind = WorkerLost if lost else RemoteError
        raise kind(f"while waiting for {what}: {type(error).__name__}: {first_line}") from None


async def wait_for_all(waits: Iterable[Awaitable[Any]]) -> list[Any]:
    """Returns the results of all, in order. The first that fails ends the wait, though others may hang in a collective.

    One worker's end makes others fail in their collectives, at times before Ray reports the end itself: a failure
    waits `FAILURE_GRACE_S` for theirs, and the message has all that differ, workers that died first. What still runs
    is no longer waited for.

    Raises:
        RemoteError: some failed.
    """
    tasks = [asyncio.ensure_future(one) for one in waits]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        errors = _errors(tasks)
        if errors and len(errors) < len(tasks):
            await asyncio.wait(tasks, timeout=FAILURE_GRACE_S)
            errors = _errors(tasks)
    finally:
        for task in tasks:
            task.cancel()
    if not errors:
        return [task.result() for task in tasks]
    dead_first = sorted(errors, key=lambda error: "ActorDiedError" not in str(error))
    message = "; ".join(str(error) for error in dead_first)
    raise RemoteError(message) from dead_first[0]


def _errors(waits: Sequence["asyncio.Future[Any]"]) -> list[RemoteError]:
    failures = [one.exception() for one in waits if one.done() and not one.cancelled()]
    unexpected = next((error for error in failures if error is not None and not isinstance(error, RemoteError)), None)
    if unexpected is not None:
        raise unexpected
    return [error for error in failures if isinstance(error, RemoteError)]
