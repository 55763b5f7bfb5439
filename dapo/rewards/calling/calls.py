"""Runs the async reward functions of a worker in one process, with many responses at a time in one event loop."""

import asyncio
import errno
import json
import os
import random
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from contextvars import ContextVar
from typing import Any

from dapo.config.reward import RemoteConfig
from dapo.ground.user_code import describe
from dapo.rewards.calling.by_entry import FunctionsByEntry
from dapo.rewards.calling.frames import EXIT_MEMORY, HEADER, MAX_REPLY_BYTES, pack
from dapo.rewards.calling.functions import RewardFunctionError, error_of
from dapo.rewards.calling.loading import LoadedFunction

BEAT_S = 1.0  # interval of heartbeats; a function that blocks the event loop stops them
MAX_ALIKE = 2  # maximum number of `Retry` with `alike`
MAX_PAUSE_S = 30.0  # maximum backoff; a server may request a longer pause
NOWHERE = (errno.EHOSTUNREACH, errno.ENETUNREACH)

# The judge servers started by the run, all equivalent; each has its `url` and API `key`.
servers: ContextVar[Sequence[Mapping[str, str]]] = ContextVar("servers", default=())


class Retry(Exception):
    """Raised by async reward functions for a call that may succeed later. after_s: minimum pause in seconds, as
    requested by the server (Retry-After). alike: the server works but will probably return the same again, at the same
    cost; retried at most `MAX_ALIKE` times. away: the server is unavailable, so the response is not the cause;
    `after_s` without `alike` means the same."""

    def __init__(self, reason: str, after_s: float = 0.0, *, alike: bool = False, away: bool = False) -> None:
        super().__init__(reason)
        self.after_s, self.alike, self.away = after_s, alike, away


class Unanswered(Exception):
    """No call was answered in time. away: the last one found no server, or one that requested a pause of `after_s`
    seconds."""

    def __init__(self, reason: str, *, away: bool, after_s: float) -> None:
        super().__init__(reason)
        self.away, self.after_s = away, after_s


class _Late(Exception): ...


class Pace:
    """Spaces calls evenly. per_minute: calls of this process; 0: unlimited."""

    def __init__(self, per_minute: float) -> None:
        self._gap_s = 60.0 / per_minute if per_minute else 0.0
        self._next = 0.0

    async def turn(self) -> None:
        now = time.monotonic()
        at = max(now, self._next)
        self._next = at + self._gap_s
        if at > now:
            await asyncio.sleep(at - now)


async def answer(
    call: Callable[[], Any], config: RemoteConfig, pace: Pace, rng: random.Random | None = None
) -> tuple[Any, dict[str, float]]:
    """Returns the result of a call and the metrics latency_s (of the answered call) and retries. Timeouts, `Retry` and
    network errors are retried with growing pauses; other exceptions pass through. Waiting for `pace` does not count
    against `timeout_s`, so that a low rate does not make responses unscorable. Raises Unanswered without an answer
    within `timeout_s` or after `retries`."""
    left, pause, reason, alike, away = config.timeout_s, config.backoff_s, "", 0, False
    # TimeoutError is an OSError; the others are clients' exceptions for a broken connection.
    broken = (*_errors("httpx", "TransportError"), *_errors("aiohttp", "ClientConnectionError", "ClientPayloadError"))
    passing: tuple[type[Exception], ...] = (Retry, OSError, *broken)
    for tries in range(config.retries + 1):
        await pace.turn()
        began, asked_s, most_s = time.monotonic(), 0.0, min(config.call_timeout_s, left)
        try:
            value = await _within(most_s, call)
            return value, {"latency_s": time.monotonic() - began, "retries": float(tries)}
        except asyncio.CancelledError:
            if _is_cancelled():
                raise
            # for example a task shared by calls, cancelled by another call's deadline
            reason, away = "what it awaited was cancelled elsewhere", False
        except _Late:
            reason, away = f"no answer within {most_s:.3g} s", False
        except passing as error:
            if isinstance(error, OSError) and error.errno == errno.ENOMEM:
                raise MemoryError from error
            reason, away = describe(error), _is_away(error)
            if isinstance(error, Retry):
                asked_s, alike = error.after_s, alike + error.alike
        wait_s = max(asked_s, pause * (rng or random).uniform(0.5, 1.0))
        pause = min(2 * pause, MAX_PAUSE_S)
        left -= time.monotonic() - began + wait_s
        if left <= 0 or tries == config.retries or alike > MAX_ALIKE:
            break
        await asyncio.sleep(wait_s)
    raise Unanswered(f"{tries + 1} calls were not answered; the last: {reason}", away=away, after_s=asked_s)


async def _within(seconds: float, call: Callable[[], Any]) -> Any:
    """Returns the result of a call, or raises _Late. The call has its own task: if it ignores its cancellation, nobody
    waits."""

    async def run() -> tuple[Any, SystemExit | None]:
        try:
            return await call(), None
        except SystemExit as error:  # asyncio would raise it out of the event loop
            return None, error

    task = asyncio.create_task(run())
    try:
        await asyncio.wait({task}, timeout=seconds)
        if not task.done():
            raise _Late
        value, left = task.result()
    finally:
        task.cancel()
    if left is not None:
        raise left
    return value


def serve(channel: socket.socket, functions: FunctionsByEntry, config: RemoteConfig) -> None:
    asyncio.run(_serve(channel, functions, config))


async def _serve(channel: socket.socket, functions: FunctionsByEntry, config: RemoteConfig) -> None:
    reader, writer = await asyncio.open_unix_connection(sock=channel)
    pace = Pace(config.calls_per_minute)
    running: set[asyncio.Task[None]] = {asyncio.create_task(_beat(writer))}
    with suppress(asyncio.IncompleteReadError, ConnectionError):
        while True:
            size = HEADER.unpack(await reader.readexactly(HEADER.size))[0]
            item = json.loads(await reader.readexactly(size))
            task = asyncio.create_task(_reply(writer, functions, config, pace, item))
            running.add(task)
            task.add_done_callback(running.discard)


async def _beat(writer: asyncio.StreamWriter) -> None:
    while True:
        writer.write(pack({"number": 0}))
        await asyncio.sleep(BEAT_S)


async def _reply(
    writer: asyncio.StreamWriter, functions: FunctionsByEntry, config: RemoteConfig, pace: Pace, item: dict[str, Any]
) -> None:
    number = item["number"]
    try:
        reply = await given(functions, config, pace, item)
        frame = pack({**reply, "number": number})
        if len(frame) > MAX_REPLY_BYTES:
            raise ValueError(f"they gave {len(frame):,} bytes, and {MAX_REPLY_BYTES:,} are the most")
    except MemoryError:
        os._exit(EXIT_MEMORY)
    except (Exception, asyncio.CancelledError) as error:  # every item needs a reply
        if _is_cancelled():
            raise
        frame = pack({"failure": "error", "detail": f"async reward functions: {describe(error)}", "number": number})
    writer.write(frame)


def _is_cancelled() -> bool:
    """Whether this task itself is being cancelled, not something that it awaits."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


async def given(functions: FunctionsByEntry, config: RemoteConfig, pace: Pace, item: dict[str, Any]) -> dict[str, Any]:
    """Returns `given` (results of the async functions by label), or `failure` (a kind of `Score.failure`), `detail` and
    `after_s`. A function of weight 0 that was not answered gives None, because it is only recorded."""
    own = functions.of(item["entry"])
    jobs = {label: asyncio.create_task(_one(label, f, config, pace, item)) for label, f in own.asynchronous()}
    found: dict[str, Any] = {}
    try:
        for label, job in jobs.items():
            try:
                found[label] = await job
            except Unanswered as error:
                if own.counts(label):
                    failure, detail = "away" if error.away else "remote", f"reward function `{label}`: {error}"
                    return {"failure": failure, "detail": detail, "after_s": error.after_s}
                found[label] = None
            except RewardFunctionError as error:
                return {"failure": "error", "detail": str(error)}
    finally:
        for job in jobs.values():
            job.cancel()
        await asyncio.gather(*jobs.values(), return_exceptions=True)
    return {"given": found}


async def _one(label: str, function: LoadedFunction, config: RemoteConfig, pace: Pace, item: dict[str, Any]) -> Any:
    source = item["source"]
    servers.set(item.get("servers", ()))

    def call() -> Any:
        return function.ask(source, item["text"], item["ground_truth"], item["extra_info"])

    try:
        value, metrics = await answer(call, config, pace)
    except (Unanswered, MemoryError):
        raise
    except (Exception, SystemExit) as error:
        raise error_of(label, function, source, error) from error
    return {**metrics, **value} if isinstance(value, dict) else {**metrics, "score": value}


def _errors(client: str, *names: str) -> list[type[Exception]]:
    module = sys.modules.get(client)
    return [] if module is None else [getattr(module, name) for name in names]


def _is_away(error: Exception) -> bool:
    """Whether no server accepted the connection, or the server requested a pause: the response was not processed."""
    if isinstance(error, OSError) and error.errno in NOWHERE:
        return True
    if isinstance(error, Retry):
        return error.away or (error.after_s > 0 and not error.alike)
    refused = (*_errors("httpx", "ConnectError", "ConnectTimeout"), *_errors("aiohttp", "ClientConnectorError"))
    return isinstance(error, (ConnectionRefusedError, socket.gaierror, *refused))
