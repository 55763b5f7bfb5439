"""Waits for remote results, always with a deadline and a readable error. The watchdog (`dapo.ground.watchdog`) reports
long waits."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from ray.exceptions import ObjectLostError, RayActorError, RayError, RayTaskError

from dapo.ground.watchdog import Member, waiting

FAILURE_GRACE_S = 2.0


class RemoteError(RuntimeError):
    """A remote role failed or did not answer. The message says which and why, without the remote traceback."""


class WorkerLost(RemoteError):
    """A worker's process has ended or hangs, and must be replaced."""


async def wait(refs: Sequence[Any], timeout_s: float, what: str | Member, key: str) -> list[Any]:
    """Returns the results of all refs, in order; the first failure ends the wait at once. what: a `Member` if several
    similar workers are waited for. Raises RemoteError if a worker raised, died, or did not answer within `timeout_s`
    (configuration key `key`, "": none)."""
    together = asyncio.gather(*refs)
    together.add_done_callback(lambda each: each.cancelled() or each.exception())  # the waiting task may be cancelled
    with _readable_errors(timeout_s, what, key), waiting(what):
        return list(await asyncio.wait_for(together, timeout_s))


async def wait_for_stream(refs: AsyncIterator[Any], timeout_s: float, what: str, key: str) -> AsyncIterator[Any]:
    """Yields the results of a streaming call one by one; `timeout_s` is for all of them together. The caller must
    report the wait to the watchdog. Raises RemoteError as `wait` does."""
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
        lost = isinstance(error, RayActorError | ObjectLostError)  # the latter: its node was lost with its answer
        first_line = str(error).partition("\n")[0]
        kind = WorkerLost if lost else RemoteError
        raise kind(f"while waiting for {what}: {type(error).__name__}: {first_line}") from None


async def wait_for_all(waits: Iterable[Awaitable[Any]]) -> list[Any]:
    """Returns the results of all, in order. The first failure ends the wait, because others may hang in a collective. A
    worker's death makes others fail, sometimes before Ray reports the death. So after a failure, waits
    `FAILURE_GRACE_S` for more, and raises RemoteError with all distinct messages, dead workers first. What still runs
    is no longer waited for."""
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
