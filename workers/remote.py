"""Waiting for remote results: always with a deadline that says what is waited for, always with a readable error."""

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from ray.exceptions import RayError, RayTaskError

FAILURE_GRACE_S = 2.0


class RemoteError(RuntimeError):
    """A remote role failed or kept silent; the message says which and why, without the remote traceback."""


class PartialFailure(RemoteError):
    """Some workers of a collective failed while others did not: they no longer stand at the same point."""


async def wait(refs: Sequence[Any], timeout_s: float, what: str, key: str) -> list[Any]:
    """The results of all refs, in order; the first failure ends the wait at once.

    Raises:
        RemoteError: a worker raised, died, or did not answer within `timeout_s` (configuration key `key`).
    """
    with _told(timeout_s, what, key):
        return list(await asyncio.wait_for(asyncio.gather(*refs), timeout_s))


async def wait_for_stream(refs: AsyncIterator[Any], timeout_s: float, what: str, key: str) -> AsyncIterator[Any]:
    """The results of a streaming call one by one; `timeout_s` is for all of them together.

    Raises:
        RemoteError: as `wait` does.
    """
    deadline = asyncio.get_running_loop().time() + timeout_s
    while True:
        with _told(timeout_s, what, key):
            async with asyncio.timeout_at(deadline):
                try:
                    result = await (await anext(refs))
                except StopAsyncIteration:
                    return
        yield result


@contextmanager
def _told(timeout_s: float, what: str, key: str) -> Iterator[None]:
    """Turns what can go wrong with a remote call into one readable error."""
    try:
        yield
    except TimeoutError:
        raise RemoteError(f"waited {timeout_s:g} s for {what}; raise `{key}` if this is expected") from None
    except RayTaskError as error:
        cause = error.cause
        raise RemoteError(f"while waiting for {what}: {type(cause).__name__}: {cause}") from cause
    except RayError as error:
        raise RemoteError(f"while waiting for {what}: {type(error).__name__}: {str(error).splitlines()[0]}") from None


async def wait_for_ranks(refs: Sequence[Any], timeout_s: float, what: str, key: str) -> list[Any]:
    """Results in rank order. The first rank that fails ends the wait, though the others may hang in a collective.

    One rank's end makes others fail in their collectives, at times before Ray tells of the end itself: a failure waits
    `FAILURE_GRACE_S` for theirs, and the message has all that differ, ranks that died first.

    Raises:
        RemoteError: all ranks failed, or were silent for `timeout_s` (configuration key `key`).
        PartialFailure: some did.
    """
    waits = [
        asyncio.ensure_future(wait([ref], timeout_s, f"actor rank {k} ({what})", key)) for k, ref in enumerate(refs)
    ]
    try:
        await asyncio.wait(waits, return_when=asyncio.FIRST_EXCEPTION)
        errors = _errors(waits)
        if errors and len(errors) < len(waits):
            await asyncio.wait(waits, timeout=FAILURE_GRACE_S)
            errors = _errors(waits)
    finally:
        for one in waits:
            one.cancel()
    if not errors:
        return [one.result()[0] for one in waits]
    dead_first = sorted(errors, key=lambda error: "ActorDiedError" not in str(error))
    message = "; ".join(str(error) for error in dead_first)
    raise (RemoteError if len(errors) == len(waits) else PartialFailure)(message) from dead_first[0]


def _errors(waits: Sequence["asyncio.Future[Any]"]) -> list[RemoteError]:
    failures = [one.exception() for one in waits if one.done() and not one.cancelled()]
    unexpected = next((error for error in failures if error is not None and not isinstance(error, RemoteError)), None)
    if unexpected is not None:
        raise unexpected
    return [error for error in failures if isinstance(error, RemoteError)]
