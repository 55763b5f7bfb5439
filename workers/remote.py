"""Waiting for remote results: always with a deadline that says what is waited for, always with a readable error."""

import asyncio
from collections.abc import Sequence
from typing import Any

from ray.exceptions import RayError, RayTaskError


class RemoteError(RuntimeError):
    """A remote role failed or kept silent; the message says which and why, without the remote traceback."""


async def wait(refs: Sequence[Any], timeout_s: float, what: str, key: str) -> list[Any]:
    """The results of all refs, in order; the first failure ends the wait at once.

    Raises:
        RemoteError: a worker raised, died, or did not answer within `timeout_s` (configuration key `key`).
    """
    try:
        return list(await asyncio.wait_for(asyncio.gather(*refs), timeout_s))
    except TimeoutError:
        raise RemoteError(f"waited {timeout_s:g} s for {what}; raise `{key}` if this is expected") from None
    except RayTaskError as error:
        cause = error.cause
        raise RemoteError(f"while waiting for {what}: {type(cause).__name__}: {cause}") from cause
    except RayError as error:
        raise RemoteError(f"while waiting for {what}: {type(error).__name__}: {str(error).splitlines()[0]}") from None
